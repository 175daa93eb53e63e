"""Records tokens and states of a model's own training passes, so that a drafter needs no pass of its own.

Shapes: B rows, T positions, H hidden.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.live import LiveTarget
from drafttrain.targets.structure import find_blocks

NOT_A_TARGET = -100  # of transformers' labels


@dataclass(slots=True)
class Recorded:
    """One training pass of the model."""

    token_BT: Tensor
    attention_BT: Tensor | None
    mask_BT: Tensor | None  # supervised tokens, from the pass's labels; None: there were no labels
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [B, T, H] by tap, detached


class PassRecorder:
    """Hooks on a model that record its passes with gradients over whole sequences, at most the `keep` last ones.

    Passes without gradients, such as generation, are not recorded, and recomputation of checkpointed blocks is not either.
    """

    def __init__(self, target: LiveTarget, taps: Taps, keep: int) -> None:
        self.passes: deque[Recorded] = deque(maxlen=keep)
        self._open: Recorded | None = None
        self._keys = taps.keys
        blocks = find_blocks(target.model, target.shape.blocks)
        self._handles = [
            target.outer.register_forward_pre_hook(self._begin, with_kwargs=True),
            target.outer.register_forward_hook(self._end, always_call=True),
            target.backbone.module.register_forward_hook(self._final),
            *(blocks[number].register_forward_hook(self._block(number)) for number in taps.blocks),
        ]

    def take(self) -> list[Recorded]:
        """The recorded passes, oldest first; they are forgotten here."""
        passes = list(self.passes)
        self.passes.clear()
        return passes

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_BT = kwargs.get("input_ids", args[0] if args else None)
        is_training_pass = torch.is_grad_enabled() and module.training and kwargs.get("past_key_values") is None
        if not is_training_pass or token_BT is None or kwargs.get("position_ids") is not None:
            self._open = None
            return
        labels = kwargs.get("labels")
        mask_BT = None if labels is None else labels != NOT_A_TARGET
        self._open = Recorded(token_BT.detach(), kwargs.get("attention_mask"), mask_BT)

    def _block(self, block: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self._open is not None:
                self._open.hidden[block] = (output[0] if isinstance(output, tuple) else output).detach()

        return keep

    def _final(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open is not None:
            self._open.hidden[FINAL] = output[0].detach()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        recorded, self._open = self._open, None
        if recorded is not None and all(key in recorded.hidden for key in (*self._keys, FINAL)):
            self.passes.append(recorded)
