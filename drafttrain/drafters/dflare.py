"""DFlare: DFlash whose layers read different mixtures of the target's states, by maps of their own (arXiv 2606.02091).

Shapes: L layers, T taps, H hidden.

Layer i has its own context of a position with the tapped states h_1 to h_T:

    c_i = hidden_norm(sum over t of softmax(w_i)_t h_t)

Its keys and values of the context are k_proj_target and v_proj_target of c_i, those of the block k_proj and v_proj. There is no
`fc`.
"""

from __future__ import annotations

from torch import Tensor, nn

from drafttrain.drafters import Family
from drafttrain.drafters.common.block_drafter import BlockDrafter
from drafttrain.drafters.common.own_modules import LayerFusion, preferring
from drafttrain.drafters.options import DFlareOptions
from drafttrain.model.layers import RMSNorm
from drafttrain.model.target import Target


class DFlare(BlockDrafter):
    """Drafts are deterministic at any temperature, as DFlash's. hidden_norm is named as in the official code."""

    def __init__(self, options: DFlareOptions, target: Target) -> None:
        super().__init__(options, target, own_context_maps=True)

    def add_context(self) -> list[nn.Linear]:
        self.layer_fusion = LayerFusion(preferring(self.shape.layers, len(self.shape.taps)))
        self.hidden_norm = RMSNorm(self.layer_shape.hidden_size, self.layer_shape.norm_eps)
        return []

    def contexts(self, hidden: dict[int, Tensor]) -> list[Tensor]:
        return list(self.hidden_norm(self.layer_fusion(self.tapped(hidden))))


FAMILY = Family(
    "dflare",
    DFlareOptions,
    DFlare,
    unserved="no released engine loads it; engines load dflash, dflash2 and dspark",
)
