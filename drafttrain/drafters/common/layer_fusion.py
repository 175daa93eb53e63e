"""A context for each draft layer: its own mixture of the target's tapped states (arXiv 2606.02091).

Shapes: L draft layers, T taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PREFERRED = 2.0  # of a tap that a layer prefers at the start, or per step away from it


def preferring(layers: int, taps: int) -> Tensor:
    """[L, T] where layer i starts with 2 at tap floor(i T / L), as in AngelSlim's DFlare."""
    logits_LT = torch.zeros(layers, taps)
    for layer in range(layers):
        logits_LT[layer, layer * taps // layers] = PREFERRED
    return logits_LT


def falling(layers: int, taps: int) -> Tensor:
    """[L, T] where layer i starts with -2 |t - c|, c = round(i (T - 1) / (L - 1)): first to last, as in AngelSpec."""
    tap_T = torch.arange(taps)
    centres = [round(layer * (taps - 1) / max(layers - 1, 1)) for layer in range(layers)]
    return torch.stack([-PREFERRED * (tap_T - centre).abs() for centre in centres])


class LayerFusion(nn.Module):
    """Logits over the taps for each draft layer, which start so that early layers prefer early target layers.

    The official code has a bare parameter, `layer_fusion_weights`. It is a module here, because sharded parameters are gathered
    for the calls of modules.
    """

    def __init__(self, start_LT: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start_LT)

    def forward(self, tapped: Sequence[Tensor]) -> Tensor:
        """[L, ..., H] the mixtures. tapped: T states [..., H]."""
        states_TH = torch.stack(list(tapped))
        share_LT = self.weight.float().softmax(-1).to(states_TH.dtype)
        return torch.einsum("lt,t...h->l...h", share_LT, states_TH)
