"""A target whose own cache cannot be taken back or batched: every pass runs its model over the whole text again.

The slowest way that is exact, for architectures that `HFTarget` refuses. The cache holds the texts' tokens in place of keys.
Draft trees are chains. Shapes: B rows, N new positions, P positions of one row, R logit rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents
from drafttrain.model.target import FINAL, Taps, TargetOut
from drafttrain.targets.hf import HFTarget

ANEW = "each step computes the text anew"


class RecomputedTarget(HFTarget):
    """As HFTarget, by the model's own forward without a cache, one row at a time. Raises UserError where that is not exact."""

    name = "recomputed"

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int] = frozenset(), why: str = "") -> None:
        """why: it cannot decode otherwise."""
        self.why = why
        super().__init__(model, stop_ids)
        self.trees, self.chains_reason = (
            False,
            f"{ANEW}, because {why}; its times are not those of a decoder with a cache",
        )

    def _prepare(self) -> None:
        self.recurrent = True  # it may have such layers, whose rows hold one text each

    def _record_scans(self) -> dict[int, tuple[float, float]]:
        return {}

    def _install_attention(self) -> bool:
        return False

    def _why_not_captured(self) -> str:
        return ANEW

    def new_cache(self, slots: int, max_len: int, pages: int | None = None) -> KVCache:
        kv = KVCache(1, slots, max_len, self.device, pages)
        kv.allocate(1, 1, torch.float32, 0)  # every token id has a float32 of its own
        return kv

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        if kv is None:
            return super().forward(token_BN, None, ancestor_BNN, position_BN, taps, logit_row_BR)
        N, keys_B1N1 = token_BN.shape[1], token_BN[:, None, :, None].float()
        kv.append(0, keys_B1N1, keys_B1N1[..., :0])
        states_by_block: dict[int, list[Tensor]] = {}
        for row in range(len(token_BN)):
            token_1P = kv.read_row(0, row, N)[0][..., 0].long()
            position_1P = torch.arange(token_1P.shape[1], device=self.device)[None]
            out = super().forward(token_1P, None, None, position_1P, Taps(taps.blocks, final=True), token_1P[:, :0])
            for number, states_1PH in out.hidden.items():
                states_by_block.setdefault(number, []).append(states_1PH[:, -N:])
        hidden = {number: torch.cat(rows) for number, rows in states_by_block.items()}
        return self._output(hidden.pop(FINAL), hidden, taps, logit_row_BR)

    def _view(self, model: PreTrainedModel) -> HFTarget:
        return RecomputedTarget(model, self.stop_ids, self.why)
