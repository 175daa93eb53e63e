"""Early exit: the target's first blocks, its norm and its head draft for all of them (arXiv 2404.16710); with an
adapter one attention layer at the exit is trained (Kangaroo, arXiv 2404.18911).

Shapes: B rows, N tokens of one pass, T positions, M predictions, R logit rows, H hidden, V vocabulary.

    x[0..t+1] -- blocks 1..n of the target -- f -- f + attention(norm(f)) -- the target's norm and head -- x[t+2]

The adapter's output matrix is zero at first, so that it begins as the plain exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.drafters import Family
from drafttrain.drafters.common.autoregressive import Autoregressive
from drafttrain.drafters.common.proposal import TreeOptions, TreeProposal
from drafttrain.drafters.common.recurrent import UnrolledAttention
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import Attention, AttentionShape, RMSNorm, recomputed
from drafttrain.model.target import Taps, Target, TargetShape


@dataclass
class EarlyExitOptions(TreeOptions):
    """Where the exit is, and whether something is trained there."""

    family: str = "early_exit"
    tree: str = "chain"
    blocks: int | None = None  # of the target, from its first; null: a third of them
    adapter: bool = False  # one attention layer at the exit, the only thing trained
    draft_length: int = 4


class ExitAdapter(nn.Module):
    """One attention layer, whose output is added to the exit's state."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(AttentionShape.of(shape, shape.hidden_size))
        nn.init.zeros_(self.self_attn.o_proj.weight)

    def read(self, exit_H: Tensor) -> Tensor:
        """The input of attention for the exit's states, in the adapter's dtype."""
        read_H: Tensor = self.input_layernorm(exit_H.to(self.self_attn.o_proj.weight.dtype))
        return read_H


class EarlyExit(Autoregressive):
    """It has its own cache for the first blocks: the decoder passes on the target's states, not the target's cache."""

    def __init__(self, options: EarlyExitOptions, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target))
        shape = target.shape
        self.blocks = max(1, shape.blocks // 3) if options.blocks is None else options.blocks
        self._target, self._first = FrozenRef(target), FrozenRef(target.shallow(self.blocks))
        self.trained = self.starts_usable = options.adapter
        self.taps = Taps((self.blocks - 1,)) if options.adapter else Taps()
        self.adapter = ExitAdapter(shape) if options.adapter else None

    def resolved_options(self) -> dict[str, Any]:
        return {"blocks": self.blocks}

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """The target's own pass gives the exit's states. Under teacher forcing one prediction covers every depth."""
        if self.adapter is None:
            return
        exit_BTH = batch.hidden[self.blocks - 1]
        state_BTH = recomputed(self.recomputes, self._adapted, self.adapter, exit_BTH, batch)
        pairs = batch.future(1)
        hidden_MH = state_BTH.flatten(0, 1)[pairs.source_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self._logits, every_step=True)

    @property
    def label_offset(self) -> int:
        return 1

    def _adapted(self, adapter: ExitAdapter, exit_BTH: Tensor, batch: TrainBatch) -> Tensor:
        added_BTH, _, _ = UnrolledAttention(adapter.self_attn, batch).step(adapter.read(exit_BTH), ())
        return exit_BTH + added_BTH

    def _logits(self, state_H: Tensor) -> Tensor:
        """[..., V] by the target's norm and head, in its dtype."""
        target = self._target.module
        return target.head(target.norm(state_H.to(target.head_weight.dtype)))

    def language_model(self) -> Target | None:
        return self._first.module if self.adapter is None else None

    @property
    def last_position(self) -> int:
        return self._target.module.shape.max_positions - 1

    def new_caches(self, slots: int, max_len: int) -> list[KVCache]:
        caches = [self._first.module.new_cache(slots, max_len)]
        return caches if self.adapter is None else [*caches, KVCache(1, slots, max_len, self._target.module.device)]

    def run(
        self, caches: list[KVCache], token_BN: Tensor, ancestor_BNN: Tensor | None, position_BN: Tensor, row_BR: Tensor
    ) -> Tensor | None:
        first, (kv, *others) = self._first.module, caches
        if self.adapter is None:
            return first(token_BN, kv, ancestor_BNN, position_BN, Taps(), row_BR).logits_BRV
        out = first(token_BN, kv, ancestor_BNN, position_BN, self.taps, token_BN[:, :0])
        exit_BNH, (adapter_kv,) = out.hidden[self.blocks - 1], others
        B, N = token_BN.shape
        if ancestor_BNN is None:
            ancestor_BNN = torch.ones(N, N, dtype=torch.bool, device=token_BN.device).tril().expand(B, N, N)
        added_BNH = self.adapter.self_attn.cached(self.adapter.read(exit_BNH), position_BN, adapter_kv, 0, ancestor_BNN)
        at_BRH = row_BR[..., None].expand(-1, -1, exit_BNH.shape[-1])
        return self._logits((exit_BNH + added_BNH).gather(1, at_BRH)) if row_BR.shape[1] else None


FAMILY = Family("early_exit", EarlyExitOptions, EarlyExit)
