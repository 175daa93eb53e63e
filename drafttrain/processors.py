"""Floor 1: what changes logits by a request's own text, at every node of a tree: repetition penalty, minimum length.

Shapes: S slots, B active rows, N nodes (root included), A new tokens, M pairs, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.request import Request


class Processors:
    """Per slot: which tokens its text has, and until when its stop tokens are barred. Off where no request asks for it."""

    def __init__(self, slots: int, vocab: int, penalty: float, device: torch.device) -> None:
        self.penalty, self._device = penalty, device
        self.seen_SV = torch.zeros(slots, vocab, dtype=torch.bool, device=device) if penalty != 1.0 else None
        self._least: dict[int, tuple[int, Tensor]] = {}  # by slot: tokens before which its stop tokens are barred

    def enter(self, slot: int, request: Request) -> None:
        """A request takes the slot."""
        self._least.pop(slot, None)
        if request.min_new_tokens and request.stop_ids:
            self._least[slot] = (request.min_new_tokens, torch.tensor(sorted(request.stop_ids), device=self._device))
        if self.seen_SV is not None:
            self.seen_SV[slot] = False
            self.seen_SV[slot, torch.tensor(request.prompt, device=self._device)] = True

    def add(self, slot_B: Tensor, token_BA: Tensor, count_B: Tensor) -> None:
        """The first count_B tokens of each row became text."""
        if self.seen_SV is not None:
            for slot, tokens, count in zip(slot_B.tolist(), token_BA, count_B.tolist(), strict=True):
                self.seen_SV[slot, tokens[:count]] = True

    def __call__(self, logits_BNV: Tensor, token_BN: Tensor, ancestor_BNN: Tensor, slot_B: Tensor, made: list[int]) -> Tensor:
        """Logits as the request wants them. made: tokens of each row's text so far, the root among them.

        A node sees the text and its own path: its root is text already, its drafts would be.
        """
        if self.seen_SV is not None:
            seen_BNV = self.seen_SV[slot_B][:, None].repeat(1, token_BN.shape[1], 1)
            row_M, node_M, above_M = ancestor_BNN.nonzero(as_tuple=True)
            seen_BNV[row_M, node_M, token_BN[row_M, above_M]] = True
            # a likely token becomes less so whatever the sign of its logit (arXiv 1909.05858, as transformers does it)
            lowered_BNV = torch.where(logits_BNV < 0, logits_BNV * self.penalty, logits_BNV / self.penalty)
            logits_BNV = torch.where(seen_BNV, lowered_BNV, logits_BNV)
        barred = [(row, *self._least[slot]) for row, slot in enumerate(slot_B.tolist()) if slot in self._least]
        if any(made[row] < least for row, least, _ in barred):
            logits_BNV = logits_BNV.clone()
            depth_BN = ancestor_BNN.sum(-1) - 1
            for row, least, stop in barred:
                early = (made[row] + depth_BN[row] < least).nonzero()[:, 0]
                logits_BNV[row, early[:, None], stop] = -torch.inf
        return logits_BNV

    @property
    def idle(self) -> bool:
        return self.seen_SV is None and not self._least
