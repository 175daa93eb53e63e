"""A context for each draft layer: its own mixture of the target's tapped states (arXiv 2606.02091).

Shapes: L draft layers, T taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PREFERRED = 2.0  # of the tap that a layer prefers at the start; the others have 0


class LayerFusion(nn.Module):
    """Logits over the taps for each draft layer. At the start layer i prefers tap floor(i T / L), so early layers early blocks.

    The official code has a bare parameter, `layer_fusion_weights`. It is a module here, because sharded parameters are gathered
    for the calls of modules.
    """

    def __init__(self, layers: int, taps: int) -> None:
        super().__init__()
        logits_LT = torch.zeros(layers, taps)
        for layer in range(layers):
            logits_LT[layer, layer * taps // layers] = PREFERRED
        self.weight = nn.Parameter(logits_LT)

    def forward(self, tapped: Sequence[Tensor]) -> Tensor:
        """[L, ..., H] the mixtures. tapped: T states [..., H]."""
        states_TH = torch.stack(list(tapped))
        share_LT = self.weight.float().softmax(-1).to(states_TH.dtype)
        return torch.einsum("lt,t...h->l...h", share_LT, states_TH)
