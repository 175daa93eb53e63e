"""Floor 2: the one decode loop. It knows no drafter by name; without a drafter it is plain decoding, the baseline.

Shapes: S slots, B active rows, N tree nodes, A accepted nodes, T prompt positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter import Commit, Drafter
from drafttrain.errors import UserError
from drafttrain.sampling import Sampling, choose
from drafttrain.target import Taps, Target, TargetOut
from drafttrain.tree import DraftTree, depth
from drafttrain.verify import Verdict, policy_for


@dataclass
class Result:
    """One request. tokens[0] comes from the prefill; the rest, `emitted` of them, from `verifications`.

    offered[i], accepted[i]: verifications in which a draft at depth i + 1 was offered below an accepted path, and
    those that accepted it. nodes: draft nodes verified, roots excluded. started, first, ended: seconds of perf_counter.
    """

    request: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    verifications: int = 0
    emitted: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: int = 0
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0


@dataclass
class Costs:
    """Seconds summed over the decode steps, prefill excluded. host: bookkeeping between the other three."""

    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    host: float = 0.0
    steps: int = 0


@dataclass
class Decoded:
    results: list[Result]
    costs: Costs


class Decoder:
    """Batched decoding with ragged lengths: prompts in, results with their counts and times out.

    drafter None decodes plainly with the same target, cache and sampler. Requests run in waves of `batch_size`;
    a finished request leaves its wave. `prefill_chunk` bounds the positions of one prefill pass.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: str,
        sampling: Sampling,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        prefill_chunk: int = 512,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.policy = policy_for(policy, sampling)
        if drafter is not None and not target.trees and any(set(path) != {0} for path in drafter.paths()):
            raise UserError("the drafter proposes trees; this target's architecture is exact for chains only: draft a chain")
        self.stop_ids, self.max_new_tokens, self.prefill_chunk = stop_ids, max_new_tokens, prefill_chunk

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], batch_size: int = 1, first_request: int = 0) -> Decoded:
        """Decode every prompt. Raises ValueError for an empty prompt or one that leaves no room for new tokens."""
        decoded = Decoded([], Costs())
        for start in range(0, len(prompts), batch_size):
            wave = Wave(self, prompts[start : start + batch_size], first_request + start, decoded.costs)
            wave.prefill()
            while len(wave.slot_B):
                wave.step()
            decoded.results += wave.results
        return decoded


class Wave:
    """Requests that decode together: `prefill` once, then `step` until every slot is done."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]], first_request: int, costs: Costs) -> None:
        self.decoder, self.prompts, self.costs = decoder, prompts, costs
        self.results = [Result(first_request + i, len(p), started=perf_counter()) for i, p in enumerate(prompts)]
        longest = max(len(p) for p in prompts)
        limit = decoder.target.shape.max_positions
        if min(len(p) for p in prompts) == 0:
            raise ValueError("a prompt has no tokens; give each at least one")
        if longest + decoder.max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens + max_new_tokens {decoder.max_new_tokens} exceed the target's {limit}; "
                "shorten the prompt or lower decode.max_new_tokens"
            )
        # A proposal may reach past the last token that counts: its scratch positions need room too.
        self.max_len = longest + decoder.max_new_tokens + MAX_NODES
        self.kv = decoder.target.new_cache(len(prompts), self.max_len)
        self.state: Any = decoder.drafter.open(len(prompts), self.max_len) if decoder.drafter else None
        device = decoder.target.device
        self.slot_B = torch.arange(len(prompts), device=device)
        self.root_S = torch.zeros(len(prompts), dtype=torch.long, device=device)
        self.key_S = self.slot_B + first_request

    @property
    def taps(self) -> Taps:
        return self.decoder.drafter.taps if self.decoder.drafter else Taps()

    def prefill(self) -> None:
        """A prompt is a chain that is accepted whole: causal passes over chunks, one `observe` each."""
        device = self.root_S.device
        length_B = torch.tensor([len(p) for p in self.prompts], device=device)
        token_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(p, device=device) for p in self.prompts], batch_first=True)
        last_BV: Tensor | None = None
        commits = []
        for start in range(0, token_BT.shape[1], self.decoder.prefill_chunk):
            chunk_BT = token_BT[:, start : start + self.decoder.prefill_chunk]
            count_B = (length_B - start).clamp(0, chunk_BT.shape[1])
            position_BT = self.kv.length_B[:, None] + torch.arange(chunk_BT.shape[1], device=device)
            out = self.decoder.target(chunk_BT, self.kv, None, position_BT, self.taps, (count_B - 1).clamp_min(0)[:, None])
            assert out.logits_BRV is not None
            ends_B1 = ((count_B > 0) & (start + count_B == length_B))[:, None]
            last_BV = out.logits_BRV[:, 0] if last_BV is None else torch.where(ends_B1, out.logits_BRV[:, 0], last_BV)
            self.kv.keep(torch.arange(chunk_BT.shape[1], device=device).expand_as(chunk_BT), count_B)
            commits.append((start, count_B, out.hidden))
        assert last_BV is not None
        self.root_S = choose(last_BV, self.decoder.sampling.rows(self.key_S), length_B)
        if self.decoder.drafter:
            known_BT = torch.cat([token_BT, token_BT[:, :1]], 1).scatter(1, length_B[:, None], self.root_S[:, None])
            for start, count_B, hidden in commits:
                stop = min(start + self.decoder.prefill_chunk, token_BT.shape[1])
                commit = Commit(known_BT[:, start:stop], known_BT[:, start + 1 : stop + 1], hidden, count_B)
                self.decoder.drafter.observe(self.state, commit, self.slot_B)
        now = perf_counter()
        for result, token in zip(self.results, self.root_S.tolist(), strict=True):
            result.tokens, result.first, result.ended = [token], now, now
        self._retire()

    def step(self) -> None:
        """One decode round for the active rows: propose, verify, commit, observe."""
        drafter, sampling = self.decoder.drafter, self.decoder.sampling.rows(self.key_S[self.slot_B])
        began = perf_counter()
        if drafter is None:
            tree = DraftTree.chain(self.root_S[self.slot_B][:, None])
        else:
            tree = drafter.propose(self.state, self.slot_B, sampling)
        drafted = perf_counter()
        ancestor_BNN = tree.ancestor_BNN
        # Past the target's last position there are only drafts that the cut below drops.
        position_BN = (self.kv.length_B[:, None] + depth(ancestor_BNN)).clamp_max(self.decoder.target.shape.max_positions - 1)
        self.kv.room(tree.token_BN.shape[1])
        out = self.decoder.target(tree.token_BN, self.kv, ancestor_BNN, position_BN, self.taps)
        assert out.logits_BRV is not None
        verified = perf_counter()
        verdict = self.decoder.policy.verify(tree, ancestor_BNN, out.logits_BRV, position_BN, sampling)
        self.kv.keep(verdict.path_BA, verdict.count_B)
        commit = commit_of(tree, verdict, out)
        if drafter is not None:
            drafter.observe(self.state, commit, self.slot_B)
        self.root_S[self.slot_B] = verdict.bonus_B
        committed = perf_counter()
        self._record(tree, verdict, commit.next_BA)
        self._retire()
        self.costs.draft += drafted - began
        self.costs.verify += verified - drafted
        self.costs.commit += committed - verified
        self.costs.host += perf_counter() - committed
        self.costs.steps += 1

    def _record(self, tree: DraftTree, verdict: Verdict, next_BA: Tensor) -> None:
        """Count the round per request, cut at the stop token and at max_new_tokens."""
        now, nodes = perf_counter(), (tree.count_B - 1).tolist()
        has_child = (tree.parent_BN == verdict.last_B[:, None]).any(-1).tolist()
        for row, (slot, count) in enumerate(zip(self.slot_B.tolist(), verdict.count_B.tolist(), strict=True)):
            result = self.results[slot]
            new = next_BA[row, :count].tolist()
            kept = next((i + 1 for i, t in enumerate(new) if t in self.decoder.stop_ids), count)
            kept = min(kept, self.decoder.max_new_tokens - len(result.tokens))
            drafts = min(kept, count - 1)
            offered = drafts + (1 if kept == count and has_child[row] else 0)
            _add(result.offered, offered)
            _add(result.accepted, drafts)
            result.tokens += new[:kept]
            result.emitted += kept
            result.verifications += 1
            result.nodes += nodes[row]
            result.ended = now

    def _retire(self) -> None:
        """Keep the rows that go on, and tell the cache and the next step which slots those are."""
        going = [s for s in self.slot_B.tolist() if not self._done(self.results[s])]
        if len(going) != len(self.slot_B):
            self.slot_B = torch.tensor(going, dtype=torch.long, device=self.slot_B.device)
            self.kv.rows(self.slot_B)

    def _done(self, result: Result) -> bool:
        return len(result.tokens) >= self.decoder.max_new_tokens or result.tokens[-1] in self.decoder.stop_ids


MAX_NODES = 256  # of one proposal; reserves scratch positions in every cache


def commit_of(tree: DraftTree, verdict: Verdict, out: TargetOut) -> Commit:
    """Lay the accepted path out in aligned columns: token, the token after it, the target's state at it."""
    token_BA = tree.token_BN.gather(1, verdict.path_BA)
    rows_B, last_B = torch.arange(len(token_BA), device=token_BA.device), verdict.count_B - 1
    next_BA = torch.cat([token_BA[:, 1:], token_BA[:, :1]], 1)
    next_BA[rows_B, last_B] = verdict.bonus_B
    hidden = {k: h_BNH.gather(1, verdict.path_BA[..., None].expand(-1, -1, h_BNH.shape[-1])) for k, h_BNH in out.hidden.items()}
    return Commit(token_BA, next_BA, hidden, verdict.count_B)


def _add(counts: list[int], depth_reached: int) -> None:
    counts.extend([0] * (depth_reached - len(counts)))
    for i in range(depth_reached):
        counts[i] += 1
