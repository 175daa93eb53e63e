"""A separate draft model: a small causal LM, here the target's first blocks, trained further (arXiv 2211.17192, 2310.08461).

Shapes: B rows, N tree nodes, A staged positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.drafter import Commit, draft_chain
from drafttrain.drafters import Family
from drafttrain.errors import UserError
from drafttrain.kv import KVCache
from drafttrain.sampling import Sampling
from drafttrain.staged import CachedDrafter, OwnCache, Staged, with_root
from drafttrain.target import FINAL, Taps, Target
from drafttrain.tree import DraftTree


@dataclass
class DraftModelOptions:
    """A layer-pruned copy of the target as the draft."""

    family: str = "draft_model"
    blocks: int = 3  # of the target's, from the first
    draft_length: int = 4


class DraftModel(CachedDrafter):
    """Chain drafter with its own cache; at temperature above 0 it samples and reports the law q of every draft."""

    samples = True

    def __init__(self, options: DraftModelOptions, target: Target) -> None:
        super().__init__()
        if options.draft_length < 1:
            raise UserError(f"drafter.draft_length is {options.draft_length}; set it to 1 or more")
        self.taps, self.draft_length = Taps(), options.draft_length
        self.lm: Any = target.pruned(options.blocks)

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Teacher-forced next tokens: the same model drafts every depth, so one prediction stands for all."""
        no_rows_B0 = batch.token_BT[:, :0]
        final_BTH = self.lm(batch.token_BT, None, batch.sees(), batch.position_BT, Taps(final=True), no_rows_B0).hidden[FINAL]
        pairs = batch.future(1)
        hidden_MH = final_BTH.flatten(0, 1)[pairs.source_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self.lm.head, every_step=True)

    def language_model(self) -> Target:
        model: Target = self.lm
        return model

    def open(self, slots: int, max_len: int) -> OwnCache:
        kv = self.lm.new_cache(slots, max_len)
        return OwnCache(kv, Staged(slots, self.draft_length, kv.length_S.device))

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        no_rows_B0 = commit.token_BA[:, :0]
        self._feed(state.kv, commit.token_BA, commit.count_B, no_rows_B0)

    def propose(self, state: OwnCache, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv = state.kv
        kv.rows(slot_B)
        token_BN, last_B = with_root(self.staged(state, slot_B))
        logits_BV = self._feed(kv, token_BN, last_B + 1, last_B[:, None])
        committed_B = kv.length_B - 1  # the root's keys are scratch: the next commit brings it again

        def advance(token_B: Tensor) -> Tensor:
            return self._feed(kv, token_B[:, None], torch.ones_like(token_B), torch.zeros_like(token_B)[:, None])

        steps = min(self.draft_length, depth or self.draft_length)
        root_B = token_BN.gather(1, last_B[:, None])[:, 0]
        tree = draft_chain(root_B, logits_BV, advance, steps, sampling, committed_B)
        kv.rollback(committed_B)
        return tree

    def _feed(self, kv: KVCache, token_BN: Tensor, count_B: Tensor, row_BR: Tensor) -> Tensor:
        """[B, V] logits at the one row asked for, if any; the first `count` tokens stay in the cache."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(self.lm.shape.max_positions - 1)
        logits_BRV = self.lm(token_BN, kv, None, position_BN, Taps(), row_BR).logits_BRV
        kv.keep(column_N.expand_as(token_BN), count_B)
        return logits_BRV[:, 0] if row_BR.shape[1] else row_BR


FAMILY = Family("draft_model", DraftModelOptions, DraftModel)
