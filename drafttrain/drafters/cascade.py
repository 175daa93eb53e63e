"""A cascade: the tokens of one drafter, the middle, are drafted by a cheaper one, the inner (arXiv 2312.11462).

A middle with a language model decodes as the target does, by rounds of propose, verify and commit, and what it has
written is the draft. One without leaves it to the target to verify both (`Merged`).
Shapes: B rows, N tree nodes, A accepted nodes, K draft length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Lane, Sampling, distribution
from drafttrain.core.tree import DraftTree, depth
from drafttrain.decoding.acceptance import Policy, policy_for
from drafttrain.decoding.step import commit_of
from drafttrain.drafters import Family, families
from drafttrain.drafters.common.merged import Merged
from drafttrain.drafters.common.pending import CachedDrafter, OwnCache, Staged, with_root
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Target, TargetOut
from drafttrain.ops.sample import sample


@dataclass
class CascadeOptions:
    """Two families' own options, each with its `family`."""

    family: str = "cascade"
    middle: Any = field(default_factory=lambda: {"family": "draft_model"})  # trained; the figures are its own
    inner: Any = field(default_factory=lambda: {"family": "prompt_lookup"})  # drafts for the middle's model, or for the target
    join: str = "auto"  # verify: the middle's model verifies the inner's drafts. merge: one tree. auto: verify where it has one


@dataclass
class CascadeState(OwnCache):
    """The middle's cache and what is staged for it; inner: the inner drafter's state, fed by the middle's commits."""

    inner: Any


class Cascade(CachedDrafter):
    """Chains of K tokens, the very ones that the middle would draft alone: its own rounds are verified without loss.

    Between proposals both drafters know committed text only; what they saw of a draft they forget, and what they saw of
    text they never read again.
    """

    captured = False  # how many rounds a draft takes is asked of the device
    samples = True

    def __init__(self, options: CascadeOptions, target: Target, middle: Drafter) -> None:
        super().__init__()
        self.middle, model = middle, middle.language_model()
        if model is None:
            raise UserError(
                f"drafter.middle is {_name(options.middle)}, which has no language model of its own to verify drafts with; "
                "set drafter.join=merge, or choose a family that has one"
            )
        self.inner = built(options.inner, model, "drafter.inner")
        if not self.inner.rewinds:
            raise UserError(
                f"drafter.inner is {_name(options.inner)}, which cannot take back what it has seen; choose another family"
            )
        if not target.trees and any(set(path) != {0} for path in self.inner.paths()):
            raise UserError("drafter.inner proposes trees; this target's architecture is exact for chains only: draft a chain")
        self.taps, self.draft_length, self.trained = self.middle.taps, self.middle.draft_length, self.middle.trained
        self.starts_usable = self.middle.starts_usable
        self._model = FrozenRef(model)

    @property
    def model(self) -> Target:
        return self._model.module

    @property
    def max_nodes(self) -> int:
        """Or of the inner drafter's largest: the caches behind it are given room by this one."""
        return max(self.draft_length + 1, self.inner.widest)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """The middle's; in training then the inner's, from the middle's states as they are."""
        yield from self.middle.predict(batch)
        if self.training and self.inner.trained:
            no_rows_B0 = batch.token_BT[:, :0]
            with torch.no_grad():
                hidden = self.model(batch.token_BT, None, batch.sees(), batch.position_BT, self.inner.taps, no_rows_B0).hidden
            for prediction in self.inner.predict(replace(batch, hidden=hidden)):
                yield replace(prediction, counted=False)

    @property
    def ahead(self) -> int:
        return max(self.middle.ahead, self.inner.ahead)

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        self.middle.prepare(counts)
        self.inner.prepare(counts)

    def open(self, slots: int, max_len: int) -> CascadeState:
        positions = max_len + self.draft_length + self.max_nodes  # the inner drafts behind a draft
        kv = self.model.new_cache(slots, positions)
        return CascadeState(kv, Staged(slots, self.draft_length, kv.length_S.device), self.inner.open(slots, positions))

    def reset(self, state: Any, slot_R: Tensor) -> None:
        super().reset(state, slot_R)
        self.inner.reset(state.inner, slot_R)

    def caches(self, state: Any) -> list[KVCache]:
        return [state.kv, *self.inner.caches(state.inner)]

    def consume(self, state: Any, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        out = self._feed(state.kv, commit.token_BA, commit.token_BA[:, :0])
        _keep_first(state.kv, commit.token_BA, commit.count_B)
        self.inner.read(state.inner, replace(commit, hidden=out.hidden), slot_B)

    def mark(self, state: Any, slot_B: Tensor) -> Any:
        return super().mark(state, slot_B), self.inner.mark(state.inner, slot_B)

    def rewind(self, state: Any, slot_B: Tensor, mark: Any) -> None:
        super().rewind(state, slot_B, mark[0])
        self.inner.rewind(state.inner, slot_B, mark[1])

    def propose(self, state: Any, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv, sampling, inner = state.kv, apart(sampling.drafting), state.inner
        kv.rows(slot_B)
        staged = self.staged(state, slot_B)
        token_BN, last_B = with_root(staged)
        out = self._feed(kv, token_BN, last_B[:, None])
        _keep_first(kv, token_BN, last_B + 1)
        root_B1, committed_B = token_BN.gather(1, last_B[:, None]), kv.length_B - 1
        self.inner.read(inner, replace(staged, hidden={k: h[:, :-1] for k, h in out.hidden.items()}), slot_B)
        seen = self.inner.mark(inner, slot_B)
        assert out.logits_BRV is not None
        token_B1 = sample(out.logits_BRV[:, 0], sampling, committed_B + 1, Lane.TARGET)[:, None]
        at_root = {k: h.gather(1, last_B[:, None, None].expand(-1, 1, h.shape[-1])) for k, h in out.hidden.items()}
        self.inner.observe(inner, Commit(root_B1, token_B1, at_root, torch.ones_like(last_B)), slot_B)
        draft = Draft.begun(token_B1, out.logits_BRV, min(self.draft_length, depth or self.draft_length), sampling)
        policy = policy_for(policy_name(sampling), sampling)
        while (left := draft.left()) > 0:
            self._round(state, slot_B, draft, left, policy, sampling)
        self.inner.rewind(inner, slot_B, seen)
        kv.rollback(committed_B)  # the root's keys too: the next commit brings it again
        return draft.tree(root_B1)

    def _round(self, state: CascadeState, slot_B: Tensor, draft: Draft, left: int, policy: Policy, sampling: Sampling) -> None:
        """One round of the middle's own decoding; rows whose draft is long enough commit nothing."""
        kv = state.kv
        if left > 1:
            tree = self.inner.propose(state.inner, slot_B, sampling, left - 1)
            tree = tree if kv.bound is not None else tree.trimmed()
        else:
            tree = DraftTree.chain(draft.last())
        ancestor_BNN = tree.ancestor_BNN
        position_BN = self._within(kv.length_B[:, None] + depth(ancestor_BNN))
        kv.room(tree.token_BN.shape[1])
        out = self.model(tree.token_BN, kv, ancestor_BNN, position_BN, self.inner.taps)
        assert out.logits_BRV is not None
        verdict = policy.verify(tree, ancestor_BNN, out.logits_BRV, position_BN, sampling).trimmed()
        whole = commit_of(tree, verdict, out)
        commit = replace(whole, count_B=torch.minimum(whole.count_B, draft.missing_B))
        kv.keep(verdict.path_BA, commit.count_B)
        self.inner.observe(state.inner, commit, slot_B)
        draft.add(commit, out.logits_BRV, verdict.path_BA)

    def _feed(self, kv: KVCache, token_BN: Tensor, row_BR: Tensor) -> TargetOut:
        """Committed tokens through the middle's model, in order; the caller keeps those that are no padding."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = self._within(kv.length_B[:, None] + column_N)
        return self.model(token_BN, kv, None, position_BN, self.inner.taps, row_BR)

    def _within(self, position_BN: Tensor) -> Tensor:
        return position_BN.clamp_max(self.model.shape.max_positions - 1)

    def decode_settings(self) -> dict[str, Any]:
        return {"middle": self.middle.decode_settings(), "inner": self.inner.decode_settings()}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        self.middle.use_decode_settings(settings.get("middle", {}))
        self.inner.use_decode_settings(settings.get("inner", {}))


@dataclass
class Draft:
    """What the middle has written behind the root, `made_B` tokens of each row, and, unless it is greedy, the laws it drew
    them from.
    """

    token_BK: Tensor
    made_B: Tensor
    law_BKV: Tensor | None
    sampling: Sampling

    @staticmethod
    def begun(token_B1: Tensor, logits_B1V: Tensor, length: int, sampling: Sampling) -> Draft:
        law_B1V = None if sampling.greedy else distribution(logits_B1V, sampling)
        law_BKV = None if law_B1V is None else law_B1V.repeat(1, length, 1)
        return Draft(token_B1.repeat(1, length), torch.ones_like(token_B1[:, 0]), law_BKV, sampling)

    @property
    def missing_B(self) -> Tensor:
        return self.token_BK.shape[1] - self.made_B

    def left(self) -> int:
        """Tokens that the shortest row lacks."""
        return int(self.missing_B.max())

    def last(self) -> Tensor:
        return self.token_BK.gather(1, self.made_B[:, None] - 1)

    def add(self, commit: Commit, logits_BNV: Tensor, path_BA: Tensor) -> None:
        """The commit's next tokens, `count_B` of them, each drawn at its node of the path."""
        K, A = self.token_BK.shape[1], path_BA.shape[1]
        place_BK = torch.arange(K, device=path_BA.device) - self.made_B[:, None]
        new_BK, from_BK = (place_BK >= 0) & (place_BK < commit.count_B[:, None]), place_BK.clamp(0, A - 1)
        self.token_BK = torch.where(new_BK, commit.next_BA.gather(1, from_BK), self.token_BK)
        if self.law_BKV is not None:
            node_BK = path_BA.gather(1, from_BK)
            logits_BKV = logits_BNV.gather(1, node_BK[..., None].expand(-1, -1, logits_BNV.shape[-1]))
            self.law_BKV = torch.where(new_BK[..., None], distribution(logits_BKV, self.sampling), self.law_BKV)
        self.made_B = self.made_B + commit.count_B

    def tree(self, root_B1: Tensor) -> DraftTree:
        q_BNV = None if self.law_BKV is None else torch.cat([self.law_BKV, self.law_BKV[:, -1:]], 1)
        return DraftTree.chain(torch.cat([root_B1, self.token_BK], 1), q_BNV=q_BNV)


_LEVEL = 0x5DEECE66D3A9


def apart(sampling: Sampling) -> Sampling:
    """The same settings with other noise: a draft must not depend on the numbers that it is verified with.

    Unless it is to be drawn with just these (`coupled`). Drafts beyond a rejection were never looked at, so that drawing
    them again at the same positions with the same numbers does no harm.
    """
    if sampling.shared_noise:
        return sampling
    return replace(
        sampling,
        seed=sampling.seed + _LEVEL,
        seed_1=None if sampling.seed_1 is None else sampling.seed_1 + _LEVEL,
    )


def policy_name(sampling: Sampling) -> str:
    """Of the middle's rounds: without loss whatever the outer policy, so that drafts follow the law they are said to follow."""
    if sampling.greedy:
        return "greedy"
    return "coupled" if sampling.shared_noise else "lossless"


JOINS = ("auto", "verify", "merge")


def build(options: CascadeOptions, target: Target) -> Cascade | Merged:
    if options.join not in JOINS:
        raise UserError(f"drafter.join is {options.join!r}; choose one of {', '.join(JOINS)}")
    middle = built(options.middle, target, "drafter.middle")
    if options.join == "verify" or (options.join == "auto" and middle.language_model() is not None):
        return Cascade(options, target, middle)
    return Merged(middle, built(options.inner, target, "drafter.inner"), target)


def built(options: Any, target: Target, key: str) -> Drafter:
    """A family's drafter for this target, from its options or from plain data, as a checkpoint has them."""
    if isinstance(options, Mapping):
        options = _parsed(options, key)
    drafter = families()[options.family].build(options, target)
    if drafter.adapts is not None:
        raise UserError(f"{key} trains the target too, which a cascade leaves as it is; give one that does not")
    return drafter


def _parsed(values: Mapping[str, Any], key: str) -> Any:
    name = values.get("family")
    if name not in families():
        raise UserError(f"{key}.family is {name!r}; use one of {', '.join(families())}")
    schema = families()[name].options
    known = {f.name: f for f in fields(schema)}
    if unknown := sorted(values.keys() - known.keys()):
        raise UserError(f"{key}: {name} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    # JSON has no tuples
    return schema(**{k: tuple(v) if isinstance(known[k].default, tuple) else v for k, v in values.items()})


def _name(options: Any) -> str:
    return str(options["family"] if isinstance(options, Mapping) else options.family)


def _keep_first(kv: KVCache, token_BN: Tensor, count_B: Tensor) -> None:
    kv.keep(torch.arange(token_BN.shape[1], device=token_BN.device).expand_as(token_BN), count_B)


FAMILY = Family("cascade", CascadeOptions, build)
