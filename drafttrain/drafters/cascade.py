"""A cascade: the tokens of one drafter, the middle, are drafted by a cheaper one, the inner (arXiv 2312.11462).

A middle with a language model decodes as the target does: it proposes, verifies and commits, and the text that it writes is
the draft. For a middle without one, the target verifies the drafts of both (`Merged`).
Shapes: B rows, N tree nodes, A accepted nodes, K draft length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.core.sampling import Lane, Sampling
from drafttrain.core.tree import DraftTree, depth
from drafttrain.decoding.acceptance import Policy, policy_for
from drafttrain.decoding.step import commit_of
from drafttrain.drafters import Family, families
from drafttrain.drafters.common.merged import Merged
from drafttrain.drafters.common.pending import CachedState, with_root
from drafttrain.drafters.options import CascadeOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, FrozenRef, RevertibleState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Target, TargetOut
from drafttrain.ops.sampling import distribution, sample


class CascadeProposal(Proposal):
    """A chain of the middle's length, with room for the inner drafter's passes."""

    def __init__(self, draft_length: int, inner: Drafter) -> None:
        super().__init__(draft_length)
        self._inner = inner

    @property
    def max_nodes(self) -> int:
        """The inner drafter's caches get their room by this number, so it covers the inner drafter's passes too."""
        return max(self.draft_length + 1, self._inner.max_new_positions)


class Cascade(Drafter):
    """Drafts chains of K tokens, the same ones that the middle would draft alone: its own decode steps are lossless."""

    samples = True
    revertible = True

    def __init__(self, options: CascadeOptions, target: Target, middle: Drafter) -> None:
        model = middle.language_model()
        if model is None:
            raise UserError(
                f"drafter.middle is {_name(options.middle)}, which has no language model of its own to verify drafts with; "
                "set drafter.join=merge, or choose a family that has one"
            )
        inner = built(options.inner, model, "drafter.inner")
        if not inner.revertible:
            raise UserError(
                f"drafter.inner is {_name(options.inner)}, which cannot take back what it has seen; choose another family"
            )
        if not target.trees and any(set(path) != {0} for path in inner.proposal.paths):
            raise UserError("drafter.inner proposes trees; this target's architecture is exact for chains only: draft a chain")
        super().__init__(CascadeProposal(middle.draft_length, inner))
        self.middle, self.inner = middle, inner
        self.taps, self.trained, self.starts_usable = middle.taps, middle.trained, middle.starts_usable
        self._model = FrozenRef(model)

    @property
    def model(self) -> Target:
        return self._model.module

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """The middle's predictions. In training the inner's follow, made from the middle's current states."""
        yield from self.middle.predict(batch)
        if self.training and self.inner.trained:
            no_rows_B0 = batch.token_BT[:, :0]
            with torch.no_grad():
                hidden = self.model(batch.token_BT, None, batch.sees(), batch.position_BT, self.inner.taps, no_rows_B0).hidden
            for prediction in self.inner.predict(replace(batch, hidden=hidden)):
                yield replace(prediction, counted=False)

    def open(self, slots: int, max_len: int) -> CascadeState:
        return CascadeState(self, slots, max_len)


class CascadeState(CachedState):
    """The middle's cache and pending positions, and the inner drafter's state, which observes the middle's commits.

    Between proposals both know committed text only: they forget what they saw of a draft, and never read text again.
    """

    def __init__(self, drafter: Cascade, slots: int, max_len: int) -> None:
        positions = max_len + drafter.draft_length + drafter.proposal.max_nodes  # the inner drafts after a draft
        super().__init__(drafter.model.new_cache(slots, positions), slots, drafter.draft_length)
        self.drafter = drafter
        inner = drafter.inner.open(slots, positions)
        assert isinstance(inner, RevertibleState), "`Drafter.revertible` says so"
        self.inner = inner

    @property
    def caches(self) -> list[KVCache]:
        return [*self.own_caches, *self.inner.caches]

    def reset(self, slot_R: Tensor) -> None:
        super().reset(slot_R)
        self.inner.reset(slot_R)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        self.kv.rows(slot_B)
        out = self._run(commit.token_BA, commit.token_BA[:, :0])
        self._keep_first(commit.token_BA, commit.count_B)
        self.inner.observe_prompt(replace(commit, hidden=out.hidden), slot_B)

    def snapshot(self, slot_B: Tensor) -> Any:
        return super().snapshot(slot_B), self.inner.snapshot(slot_B)

    def restore(self, slot_B: Tensor, snapshot: Any) -> None:
        middle_snapshot, inner = snapshot
        super().restore(slot_B, middle_snapshot)
        self.inner.restore(slot_B, inner)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv, inner, sampling = self.kv, self.inner, other_noise(sampling.drafting)
        kv.rows(slot_B)
        pending = self.take_pending(slot_B)
        token_BN, last_B = with_root(pending)
        out = self._run(token_BN, last_B[:, None])
        committed = kv.mark(last_B)  # without the root: the next commit brings it again
        self._keep_first(token_BN, last_B + 1)
        root_B1 = token_BN.gather(1, last_B[:, None])
        inner.observe_prompt(replace(pending, hidden={k: h[:, :-1] for k, h in out.hidden.items()}), slot_B)
        before_draft = inner.snapshot(slot_B)
        assert out.logits_BRV is not None
        token_B1 = sample(out.logits_BRV[:, 0], sampling, kv.length_B, Lane.TARGET)[:, None]
        root_hidden = {k: h.gather(1, last_B[:, None, None].expand(-1, 1, h.shape[-1])) for k, h in out.hidden.items()}
        inner.observe(Commit(root_B1, token_B1, root_hidden, torch.ones_like(last_B)), slot_B)
        longest = self.drafter.draft_length
        draft = MiddleDraft.begun(token_B1, out.logits_BRV, min(longest, depth or longest), sampling)
        policy = policy_for(policy_name(sampling), sampling)
        for limit in range(draft.length - 1, 0, -1):  # each decode step writes one token at least
            min_missing, max_missing = (0, limit) if kv.static else draft.left()
            if max_missing == 0:
                break
            self._decode_step(slot_B, draft, max_missing, min_missing < max_missing, policy, sampling)
        inner.restore(slot_B, before_draft)
        kv.back_to(committed)
        return draft.tree(root_B1)

    def _decode_step(
        self, slot_B: Tensor, draft: MiddleDraft, max_missing: int, uneven: bool, policy: Policy, sampling: Sampling
    ) -> None:
        """One decode step of the middle; rows whose draft is long enough commit nothing.

        max_missing: no row lacks more tokens. uneven: some may lack fewer. A row verifies one draft fewer than it lacks
        tokens, so that sampled drafts do not depend on other rows.
        """
        kv, drafter = self.kv, self.drafter
        if max_missing > 1:
            tree = self.inner.propose(slot_B, sampling, max_missing - 1)
            if uneven:
                tree = tree.cut((draft.missing_B - 1).clamp_min(0), trim=False)
            tree = tree if kv.static else tree.trimmed()
        else:
            tree = DraftTree.chain(draft.last())
        ancestor_BNN = tree.ancestor_BNN
        position_BN = self._clamped(kv.length_B[:, None] + depth(ancestor_BNN))
        kv.ensure_room(tree.token_BN.shape[1])
        out = drafter.model(tree.token_BN, kv, ancestor_BNN, position_BN, drafter.inner.taps)
        assert out.logits_BRV is not None
        accepted = policy.accept(tree, ancestor_BNN, out.logits_BRV, position_BN, sampling)
        if kv.static:  # no more than the inner drafter has room for
            longest = 1 + min(drafter.inner.draft_length, max_missing - 1)
            accepted = replace(accepted, path_BA=accepted.path_BA[:, :longest])
        else:
            accepted = accepted.trimmed()
        full_commit = commit_of(tree, accepted, out)
        commit = replace(full_commit, count_B=torch.minimum(full_commit.count_B, draft.missing_B))
        kv.keep(accepted.path_BA, commit.count_B)
        self.inner.observe(commit, slot_B)
        draft.add(commit, out.logits_BRV, accepted.path_BA)

    def _run(self, token_BN: Tensor, row_BR: Tensor) -> TargetOut:
        """Committed tokens through the middle's model, in order; the caller keeps those that are not padding."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = self._clamped(self.kv.length_B[:, None] + column_N)
        return self.drafter.model(token_BN, self.kv, None, position_BN, self.drafter.inner.taps, row_BR)

    def _clamped(self, position_BN: Tensor) -> Tensor:
        return position_BN.clamp_max(self.drafter.model.shape.max_positions - 1)

    def _keep_first(self, token_BN: Tensor, count_B: Tensor) -> None:
        self.kv.keep(torch.arange(token_BN.shape[1], device=token_BN.device).expand_as(token_BN), count_B)


@dataclass
class MiddleDraft:
    """The tokens that the middle has written after the root."""

    token_BK: Tensor
    made_B: Tensor  # how many of each row's tokens are written
    q_BKV: Tensor | None  # the distributions that they were sampled from; None: greedy
    sampling: Sampling

    @staticmethod
    def begun(token_B1: Tensor, logits_B1V: Tensor, length: int, sampling: Sampling) -> MiddleDraft:
        q_B1V = None if sampling.greedy else distribution(logits_B1V, sampling)
        q_BKV = None if q_B1V is None else q_B1V.repeat(1, length, 1)
        return MiddleDraft(token_B1.repeat(1, length), torch.ones_like(token_B1[:, 0]), q_BKV, sampling)

    @property
    def length(self) -> int:
        """Tokens of a whole draft."""
        return self.token_BK.shape[1]

    @property
    def missing_B(self) -> Tensor:
        return self.length - self.made_B

    def left(self) -> tuple[int, int]:
        """(tokens that the longest row lacks, that the shortest lacks). Syncs with the host."""
        missing = self.missing_B.tolist()
        return min(missing), max(missing)

    def last(self) -> Tensor:
        return self.token_BK.gather(1, self.made_B[:, None] - 1)

    def add(self, commit: Commit, logits_BNV: Tensor, path_BA: Tensor) -> None:
        """Append the commit's next tokens, `count_B` of them, each sampled at its node of the path."""
        K, A = self.token_BK.shape[1], path_BA.shape[1]
        index_BK = torch.arange(K, device=path_BA.device) - self.made_B[:, None]
        written_BK, from_BK = (index_BK >= 0) & (index_BK < commit.count_B[:, None]), index_BK.clamp(0, A - 1)
        self.token_BK = torch.where(written_BK, commit.next_BA.gather(1, from_BK), self.token_BK)
        if self.q_BKV is not None:
            node_BK = path_BA.gather(1, from_BK)
            logits_BKV = logits_BNV.gather(1, node_BK[..., None].expand(-1, -1, logits_BNV.shape[-1]))
            self.q_BKV = torch.where(written_BK[..., None], distribution(logits_BKV, self.sampling), self.q_BKV)
        self.made_B = self.made_B + commit.count_B

    def tree(self, root_B1: Tensor) -> DraftTree:
        q_BNV = None if self.q_BKV is None else torch.cat([self.q_BKV, self.q_BKV[:, -1:]], 1)
        return DraftTree.chain(torch.cat([root_B1, self.token_BK], 1), q_BNV=q_BNV)


_LEVEL = 0x5DEECE66D3A9


def other_noise(sampling: Sampling) -> Sampling:
    """The same settings with other noise: a draft must not depend on the noise that it is verified with.

    With `shared_noise` (policy `coupled`) drafts are sampled with just that noise. Drafts after a rejection were never
    verified, so sampling them again at the same positions with the same noise is correct.
    """
    if sampling.shared_noise:
        return sampling
    return replace(
        sampling,
        seed=sampling.seed + _LEVEL,
        seed_1=None if sampling.seed_1 is None else sampling.seed_1 + _LEVEL,
    )


def policy_name(sampling: Sampling) -> str:
    """The policy of the middle's decode steps: always lossless, so that drafts follow the distribution that they carry."""
    if sampling.greedy:
        return "greedy"
    return "coupled" if sampling.shared_noise else "lossless"


def build(options: CascadeOptions, target: Target) -> Cascade | Merged:
    middle = built(options.middle, target, "drafter.middle")
    if options.join == "verify" or (options.join == "auto" and middle.language_model() is not None):
        return Cascade(options, target, middle)
    return Merged(middle, built(options.inner, target, "drafter.inner"), target)


def built(options: Any, target: Target, key: str) -> Drafter:
    """A family's drafter for this target, from its options or from plain data, as a checkpoint has them."""
    if isinstance(options, Mapping):
        options = _parsed(options, key)
    check_limits(key, options)
    drafter = families()[options.family].build(options, target)
    if drafter.adapts is not None:
        raise UserError(f"{key} trains the target too, which a cascade leaves as it is; give one that does not")
    return drafter


def _parsed(values: Mapping[str, Any], key: str) -> Any:
    name = values.get("family")
    if name not in families():
        raise UserError(f"{key}.family is {name!r}; use one of {', '.join(families())}")
    schema = families()[name].options
    schema_fields = {f.name: f for f in fields(schema)}
    if unknown := sorted(values.keys() - schema_fields.keys()):
        raise UserError(f"{key}: {name} has no option {', '.join(unknown)}; it has {', '.join(schema_fields)}")
    # JSON has no tuples
    return schema(**{k: tuple(v) if isinstance(schema_fields[k].default, tuple) else v for k, v in values.items()})


def _name(options: Any) -> str:
    return str(options["family"] if isinstance(options, Mapping) else options.family)


FAMILY = Family(
    "cascade",
    CascadeOptions,
    build,
    unserved="no stack combines drafters; train and export its middle or inner drafter by itself",
)
