"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass, from mask tokens with a learnt state (arXiv 2602.01469).

Shapes: B rows, T positions, A pending positions, N columns of one pass, K drafts, H hidden, M predictions, V vocabulary.

At index t the drafter reads the token x[t+1] and the target's states at t, and predicts x[t+2]. After it come K - 1 slots, of
the mask token and the mask state: slot d, at position t + d, predicts x[t+2+d]. It sees the indices up to t, and the slots
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.pending import CachedState
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.eagle3 import Eagle3Layer, FusedDrafter, own_embedding, taps_of
from drafttrain.drafters.options import PEagleOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.cached_layers import CachedLayers, FusedLayers
from drafttrain.model.drafter import Commit, FrozenRef
from drafttrain.model.layers import Attention, DecoderLayer, RMSNorm, recomputed
from drafttrain.model.mask_chains import Chains, Retention, attended
from drafttrain.model.shapes import LayerOptions
from drafttrain.model.target import Target

Attend = Callable[[Attention, Tensor], Tensor]


class MaskState(nn.Module):
    """The learnt state of a slot, in place of the target's. It is a module, because sharded parameters are gathered for the
    calls of modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(1, 1, width))

    def forward(self) -> Tensor:
        return self.hidden


class PEagle(FusedDrafter):
    """fc, fc_norm, embed_tokens, layers, norm and lm_head are named as in the official code. The embedding is trained.

    Drafts are deterministic at any temperature, since slots do not know each other's tokens.
    """

    proposal: TreeProposal
    revertible = True

    def __init__(self, options: PEagleOptions, target: Target) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target, independent=True))
        self._target = FrozenRef(target)
        self.retention = Retention(options.retention, options.least_retention)
        layer_shape = self.layer_shape = LayerOptions.of(options.layer).shape(target.shape)
        if layer_shape.attention_sinks:
            raise UserError("drafter.layer.attention_sinks is true, which this family is not trained with; set it to false")
        self.mask_token = layer_shape.vocab_size - 1 if options.mask_token is None else options.mask_token
        if not 0 <= self.mask_token < layer_shape.vocab_size:
            raise UserError(f"drafter.mask_token is {self.mask_token}; the drafter embeds 0..{layer_shape.vocab_size - 1}")
        self.before = options.norm_before_residual
        self.add_fusion(taps_of(options, layer_shape.blocks), options.fc_norm, layer_shape, options.norm_before_fc)
        self.mask = MaskState(self.fc.in_features)
        self.embed_tokens = own_embedding(target, layer_shape)
        layer_shape.check_window(options.layers, self.draft_length)
        further_layers = (DecoderLayer(layer_shape, qk_norm=options.qk_norm, number=i) for i in range(1, options.layers))
        self.layers = nn.ModuleList([Eagle3Layer(layer_shape, options.qk_norm), *further_layers])
        self.fused_layers = FusedLayers(list(self.layers))  # type: ignore[arg-type]
        self.norm = RMSNorm(layer_shape.hidden_size, layer_shape.norm_eps)
        self.add_head(options.draft_vocab)

    def resolved_options(self) -> dict[str, Any]:
        layer_options = LayerOptions.between(self.layer_shape, self._target.module.shape)
        return {"target_layer_ids": list(self.taps.blocks), "mask_token": self.mask_token, "layer": asdict(layer_options)}

    @property
    def _slots(self) -> int:
        return self.draft_length - 1

    def training_positions(self, length: int) -> int:
        return round(length * (1 + sum(self.retention.shares(self._slots))))

    def logits(self, state_H: Tensor) -> Tensor:
        logits_D: Tensor = self.lm_head(self.norm(state_H))
        return logits_D

    def mask_state(self) -> Tensor:
        """[1, 1, H] fused."""
        return self.fused(list(self.mask().chunk(len(self.taps.blocks), -1)))

    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual, the input of attention) of the first layer."""
        layer: Any = self.layers[0]
        residual_and_input: tuple[Tensor, Tensor] = layer.enter(self.embed_tokens(token_BN), state_BNH, self.before)
        return residual_and_input

    def through(self, token_BN: Tensor, state_BNH: Tensor, attend: Attend) -> Tensor:
        """[B, N, H] the last layer's output. attend: (attention of a layer, its input) -> its output."""

        def run(layer_index: int, state_BNH: Tensor) -> Tensor:
            layer: Any = self.layers[layer_index]
            if layer_index:
                residual_BNH, read_BNI = state_BNH, layer.input_layernorm(state_BNH)
            else:
                residual_BNH, read_BNI = self.enter(token_BN, state_BNH)
            out_BNH: Tensor = layer.leave(residual_BNH, attend(layer.self_attn, read_BNI))
            return out_BNH

        for layer_index in range(len(self.layers)):
            state_BNH = recomputed(self.recomputes, run, layer_index, state_BNH)
        return state_BNH

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Draft d (from 0) predicts the token d + 2 after its source. In evaluation every anchor has all slots."""
        shares = self.retention.shares(self._slots) if self.training else None
        chains = Chains.append_to(batch, shares, self._slots, root=False)
        B, slots = len(batch.token_BT), chains.position_BN.shape[1] - chains.columns
        state_BNH = torch.cat([self.fuse(batch.hidden), self.mask_state().expand(B, slots, -1)], 1)

        def attend(attention: Attention, read_BNI: Tensor) -> Tensor:
            return attention.out(attended(*attention.qkv(read_BNI, chains.position_BN), chains, attention.shape.window))

        state_BNH = self.through(chains.append_masks(batch.after(1), self.mask_token), state_BNH, attend)
        pairs = batch.future(2)
        hidden_MH = state_BNH[:, : chains.columns].flatten(0, 1)[pairs.source_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self.logits, vocab_D=self.ids)
        for depth, pairs, hidden_MH in chains.steps(batch, state_BNH):
            yield Prediction(depth, pairs.source_M, pairs.label_M, hidden_MH, self.logits, vocab_D=self.ids)

    @property
    def max_new_positions(self) -> int:
        """Accepted positions, and the slots after them."""
        return max(super().max_new_positions, 2 * self.draft_length)

    def open(self, slots: int, max_len: int) -> PEagleState:
        return PEagleState(self, slots, max_len)


class PEagleState(CachedState):
    def __init__(self, drafter: PEagle, slots: int, max_len: int) -> None:
        """Slots take positions after the text, even if few of their drafts become nodes."""
        layers = drafter.fused_layers
        self.cached = CachedLayers(layers, slots, max_len + drafter.draft_length, window=layers.window)
        super().__init__(self.cached.kv, slots, drafter.draft_length)
        self.drafter, self.grower = drafter, drafter.proposal.grower(self.kv.device)
        with torch.no_grad():
            self._mask_11H = drafter.mask_state()

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        self.kv.rows(slot_B)
        self._process(commit, 0)

    def _process(self, commit: Commit, slots: int) -> Tensor:
        """[B, N, H] the states of each row's positions and of so many slots after its last; the positions stay in the cache."""
        drafter, cached, A = self.drafter, self.cached, commit.next_BA.shape[1]
        column_N = torch.arange(A + slots, device=commit.next_BA.device)
        real_BN = column_N < commit.count_B[:, None]
        token_BN = torch.where(real_BN, F.pad(commit.next_BA, (0, slots)), drafter.mask_token)
        state_BNH = F.pad(drafter.fuse(commit.hidden), (0, 0, 0, slots))
        state_BNH = torch.where(real_BN[..., None], state_BNH, self._mask_11H)
        residual_BNH, read_BNI = drafter.enter(token_BN, state_BNH)
        x_BNH, delta_BNH = drafter.fused_layers.run(residual_BNH, cached.meta(cached.after_prefix(A + slots)), read_BNI)
        cached.keep_first(commit.count_B)
        return x_BNH + delta_BNH

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter = self.drafter
        self.kv.rows(slot_B)
        pending = self.take_pending(slot_B)
        drafts, last_B1 = min(drafter.draft_length, depth or drafter.draft_length), pending.last_B1
        root_B = pending.root_B
        state_BNH = self._process(pending, drafts - 1)
        row_BK1 = (last_B1 + torch.arange(drafts, device=last_B1.device))[..., None]
        logits_BKV = drafter.logits(state_BNH.gather(1, row_BK1.expand(-1, -1, state_BNH.shape[-1])))
        return self.grower.from_slots(root_B, logits_BKV, drafter.ids, sampling)


FAMILY = Family("peagle", PEagleOptions, PEagle, early=1)
