"""Early exit: the target's first blocks, its norm and its head draft for all of them (arXiv 2404.16710); with an
adapter one attention layer at the exit is trained (Kangaroo, arXiv 2404.18911).

Shapes: B rows, N tokens of one pass, T positions, M predictions, R logit rows, H hidden, V vocabulary.

    x[0..t+1] -- blocks 1..n of the target -- f -- f + attention(norm(f)) -- the target's norm and head -- x[t+2]

The adapter's output matrix is zero at first, so that it begins as the plain exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from drafttrain.drafters import Family
from drafttrain.drafters.common.autoregressive import Autoregressive
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.recurrent import UnrolledAttention
from drafttrain.drafters.options import EarlyExitOptions
from drafttrain.model.attention import AttentionMetadata
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.cached_layers import CachedLayers, FusedAttention
from drafttrain.model.drafter import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import Attention, AttentionShape, RMSNorm, recomputed
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import Taps, Target


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
        self._angles: tuple[Tensor, Tensor] | None = None
        self.fused_attention = None if self.adapter is None else FusedAttention(self.adapter.self_attn)

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
    def generations(self) -> bool:
        return self._first.module.generations

    @property
    def last_position(self) -> int:
        return self._target.module.shape.max_positions - 1

    def new_caches(self, slots: int, max_len: int) -> list[KVCache]:
        caches = [self._first.module.new_cache(slots, max_len)]
        if self.adapter is not None and self.fused_attention is not None:
            caches.append(CachedLayers(self.fused_attention, slots, max_len, self._angle_table(self.adapter.self_attn)).kv)
        return caches

    def _angle_table(self, attention: Attention) -> tuple[Tensor, Tensor]:
        """The rotary angles of all positions, made once: captured graphs of earlier sessions read them there."""
        weight, angles = attention.o_proj.weight, self._angles
        if angles is None or (angles[0].device, angles[0].dtype) != (weight.device, weight.dtype):
            angles = self._angles = attention.angle_table(self._target.module.shape.max_positions)
        return angles

    def run(
        self, caches: list[KVCache], token_BN: Tensor, ancestor_BNN: Tensor | None, position_BN: Tensor, row_BR: Tensor
    ) -> Tensor | None:
        first, (kv, *adapter_caches) = self._first.module, caches
        if self.adapter is None:
            return first(token_BN, kv, ancestor_BNN, position_BN, Taps(), row_BR).logits_BRV
        out = first(token_BN, kv, ancestor_BNN, position_BN, self.taps, token_BN[:, :0])
        exit_BNH, (adapter_kv,) = out.hidden[self.blocks - 1], adapter_caches
        assert self.fused_attention is not None
        earlier = 0 if ancestor_BNN is None else ancestor_BNN.shape[2] - ancestor_BNN.shape[1]
        angles = self._angle_table(self.adapter.self_attn)
        meta = AttentionMetadata(adapter_kv, position_BN, ancestor_BNN, *angles, None, earlier)
        added_BNH = self.fused_attention.run(self.adapter.read(exit_BNH), meta)
        index_BRH = row_BR[..., None].expand(-1, -1, exit_BNH.shape[-1])
        return self._logits((exit_BNH + added_BNH).gather(1, index_BRH)) if row_BR.shape[1] else None


FAMILY = Family(
    "early_exit",
    EarlyExitOptions,
    EarlyExit,
    unserved="only the target is needed, and no stack reads an adapter; transformers: generate(assistant_early_exit=blocks)",
)
