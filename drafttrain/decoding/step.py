"""One decode step, for every drafter. On a GPU a CUDA graph holds it; elsewhere it runs operation by operation.

Shapes: S slots, B rows, N tree nodes, A accepted nodes, K stop tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree, depth, keep_chains
from drafttrain.decoding.acceptance import AcceptedPath, Policy
from drafttrain.decoding.draft_length import Cut
from drafttrain.decoding.logits_processors import LogitsProcessors, StopTokens
from drafttrain.decoding.request import Request
from drafttrain.model.drafter import Commit, Drafter, DraftState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Taps, Target, TargetOut
from drafttrain.ops.commit import Sequences, commit, shifted


class SlotState:
    """The device's record of each slot's text.

    root_S: last accepted token, not in any cache yet. key_S: key of the request. made_S: new tokens so far. limit_S: new tokens
    at most. done_S: the text has ended; the row commits nothing more, and the host drops it when it reads the results.
    plain_S: the row has fallen back to plain decoding, whatever the policy. temperature_S, seed_1: of the sampling.
    """

    def __init__(self, slots: int, sampling: Sampling, device: torch.device) -> None:
        self.root_S, self.key_S, self.made_S, self.limit_S = (
            torch.zeros(slots, dtype=torch.long, device=device) for _ in range(4)
        )
        self.done_S = torch.ones(slots, dtype=torch.bool, device=device)
        self.plain_S = torch.zeros(slots, dtype=torch.bool, device=device)
        self.temperature_S = torch.full((slots,), sampling.temperature, dtype=torch.float32, device=device)
        self.seed_1 = torch.full((1,), sampling.seed, dtype=torch.long, device=device)
        self.stop = StopTokens(slots, device)

    def enter(self, slot: int, request: Request, key: int) -> None:
        self.stop.put(slot, request.stop_ids)
        self.key_S[slot], self.limit_S[slot], self.done_S[slot] = key, request.max_new_tokens, False
        self.plain_S[slot] = False

    def begin(self, slot_B: Tensor, root_B: Tensor) -> None:
        """The first tokens of new texts."""
        self.root_S[slot_B] = root_B
        self.made_S.index_fill_(0, slot_B, 1)

    def fall_back(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot's text is these tokens; plain decoding continues it."""
        self.root_S[slot], self.made_S[slot] = tokens[-1], len(tokens)
        self.done_S[slot], self.plain_S[slot] = False, True

    def sampling(self, sampling: Sampling, slot_B: Tensor) -> Sampling:
        """The settings of these rows, as device tensors. Without sampling they are the same for all rows."""
        if sampling.greedy and sampling.drafting.greedy:
            return sampling
        return replace(sampling.rows(self.key_S[slot_B]), temperature_B=self.temperature_S[slot_B], seed_1=self.seed_1)

    @property
    def sequences(self) -> Sequences:
        """What `commit` writes."""
        return Sequences(self.root_S, self.made_S, self.done_S, self.limit_S, self.stop.token_SK)


@dataclass(frozen=True, slots=True)
class StepRow:
    """What the host reads of one row of a step: new tokens, how many of them count, verified nodes (root included), and whether
    the last accepted node had children: then one more draft was offered than accepted.
    """

    tokens: list[int]
    count: int
    nodes: int
    open: bool

    @staticmethod
    def of(record_BX: list[list[int]]) -> list[StepRow]:
        return [StepRow(tokens, count, nodes, bool(is_open)) for *tokens, count, nodes, is_open in record_BX]


@dataclass
class DecodeStep:
    """Draft, verify, accept and observe, for the rows of `slot_B`."""

    target: Target
    drafter: Drafter | None
    policy: Policy
    sampling: Sampling
    window: int | None  # drafts of a path that are verified at most
    kv: KVCache
    state: DraftState | None  # None: without a drafter
    slots: SlotState
    logits_processors: LogitsProcessors
    may_fall_back: bool = False  # rows may fall back to plain decoding
    cut: Cut | None = None  # chooses how much of a chain to verify, in steps that sync with the host anyway
    drafted: int = 0  # depth of the last such draft before it was cut
    marks: list[float] = field(default_factory=list)  # when the parts of the last step began and ended, in seconds
    _events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        keep_chains(1 + (self.drafter.draft_length if self.drafter else 0), self.slots.root_S.device)

    def run(self, slot_B: Tensor, limit: int | None) -> Tensor:
        """[B, A + 3] int64, for `Row.of`. limit: deepest draft allowed; 0: none. With a bound on the cache's lengths nothing
        syncs with the host.
        """
        kv, fixed = self.kv, self.kv.static
        self.marks = []
        self._mark()
        if fixed:
            kv.rows(slot_B)
        sampling = self.slots.sampling(self.sampling, slot_B)
        tree = self._tree(slot_B, limit, sampling)
        self._mark()
        ancestor_BNN = tree.ancestor_BNN
        # drafts past the target's last position are dropped where the text ends
        position_BN = (kv.length_B[:, None] + depth(ancestor_BNN)).clamp_max(self.target.shape.max_positions - 1)
        kv.ensure_room(tree.token_BN.shape[1])
        out = self.target(tree.token_BN, kv, ancestor_BNN, position_BN, self.taps)
        assert out.logits_BRV is not None
        self._mark()
        logits_BNV, idle = out.logits_BRV, self.logits_processors.idle
        if not idle:
            logits_BNV = self.logits_processors(logits_BNV, tree.token_BN, ancestor_BNN, slot_B, self.slots.made_S[slot_B])
        accepted = self.policy.accept(tree, ancestor_BNN, logits_BNV, position_BN, sampling)
        path_BN, columns = accepted.path_BA, self._columns(accepted, limit)
        path = (path_BN, columns, accepted.count_B, accepted.bonus_B)
        committed = commit(tree, *path, slot_B, self.slots.sequences, skips=fixed, counts=fixed or not idle)
        kv.keep(path_BN, committed.count_B)
        if self.state is not None:
            hidden = out.hidden_along(path_BN, columns)
            self._observe(self.state, Commit(committed.token_BA, committed.next_BA, hidden, committed.count_B), slot_B, limit)
        if not idle:
            self.logits_processors.add(slot_B, tree.token_BN[:, 0], committed.next_BA, committed.count_B)
        self._mark()
        return committed.record_BX

    @property
    def taps(self) -> Taps:
        return self.drafter.taps if self.drafter else Taps()

    def _tree(self, slot_B: Tensor, limit: int | None, sampling: Sampling) -> DraftTree:
        self.drafted = 0
        if self.state is None or limit == 0:
            return DraftTree.chain(self.slots.root_S[slot_B][:, None])
        tree, fixed = self.state.propose(slot_B, sampling, limit), self.kv.static
        deepest = [d for d in (self.window, None if fixed else self._depth_to_verify(tree, slot_B)) if d is not None]
        tree = tree.cut(min(deepest), trim=not fixed) if deepest else tree
        if self.may_fall_back:
            tree = self._root_only_if_plain(tree, slot_B)
        return tree if fixed else tree.trimmed()

    def _root_only_if_plain(self, tree: DraftTree, slot_B: Tensor) -> DraftTree:
        """Rows that have fallen back get their root alone. The drafter does not know it any more."""
        token_BN = torch.cat([self.slots.root_S[slot_B][:, None], tree.token_BN[:, 1:]], 1)
        return replace(tree, token_BN=token_BN, count_B=tree.count_B.masked_fill(self.slots.plain_S[slot_B], 1))

    def _depth_to_verify(self, tree: DraftTree, slot_B: Tensor) -> int | None:
        """The depth to verify, chosen from the drafter's confidences; None: no choice, the whole draft."""
        if self.cut is None or tree.confidence_BN is None:
            return None
        self.drafted = tree.token_BN.shape[1] - 1
        reach_BD = tree.confidence_BN[:, 1:].double().cumprod(1)
        reach_BD = reach_BD.masked_fill(self.slots.plain_S[slot_B][:, None], 0.0) if self.may_fall_back else reach_BD
        return self.cut.depth(len(slot_B), reach_BD.sum(0).tolist(), sampled=tree.q_BNV is not None)

    def _columns(self, accepted: AcceptedPath, limit: int | None) -> int:
        """As many as the longest path has nodes. With fixed shapes, as many as can be accepted."""
        if not self.kv.static:
            return max(accepted.count_B.tolist())
        drafts = [self.drafter.draft_length if self.drafter else 0, limit, self.window]
        return min(accepted.path_BA.shape[1], 1 + min(d for d in drafts if d is not None))

    def _observe(self, state: DraftState, commit: Commit, slot_B: Tensor, limit: int | None) -> None:
        if self.may_fall_back:  # the drafter does not know the text of rows that have fallen back
            commit = replace(commit, count_B=commit.count_B.masked_fill(self.slots.plain_S[slot_B], 0))
        state.observe(commit, slot_B)
        if limit == 0 and self.kv.static:  # pending positions must fit the next proposal, whose width is fixed
            state.catch_up(slot_B)

    def fall_back(self, slot: int, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue the slot's text after these tokens by plain decoding. Later positions are forgotten.

        Where the cache cannot forget them, the caller has computed the text again (`Prefill.again`).
        """
        if self.kv.croppable:
            self.kv.crop_slot(slot, len(prompt) + len(tokens) - 1)  # the last one is the root, which no cache holds yet
        self.slots.fall_back(slot, tokens)
        self.logits_processors.see(slot, prompt, tokens)

    @contextmanager
    def marked(self, events: list[Any]) -> Iterator[None]:
        """Within this context the ends of the parts are also recorded on the device, by these events."""
        self._events = events
        try:
            yield
        finally:
            self._events = []

    def _mark(self) -> None:
        if self._events:
            self._events[len(self.marks)].record()
        self.marks.append(perf_counter())


def commit_of(tree: DraftTree, accepted: AcceptedPath, out: TargetOut) -> Commit:
    """The accepted path as aligned columns: token, the token after it, the target's state at it."""
    token_BA, next_BA = shifted(tree, accepted.path_BA, accepted.count_B, accepted.bonus_B)
    return Commit(token_BA, next_BA, out.hidden_along(accepted.path_BA, accepted.path_BA.shape[1]), accepted.count_B)
