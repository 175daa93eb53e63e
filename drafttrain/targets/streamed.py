"""Runs a target over one sequence block by block: a block's weights are read when it is due, and dropped after it.

Memory: what is outside the blocks, and one block. Every weight is read once. The target's fingerprint is taken on the way.

Shapes: B rows, T positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.targets.fingerprint import Samples, fingerprint_from, sample_of, sampled
from drafttrain.targets.frozen_ends import FrozenEnds, KnownStates
from drafttrain.targets.pieces import Pieces


class _StreamedBlock(nn.Module):
    """In the place of a block: reads it, runs it and drops it. Other attributes are those of the block without weights."""

    def __init__(self, outline: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self._outline, self._run = FrozenRef(outline), run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_outline"].module, name)


class _Stream:
    """The states of one pass."""

    def __init__(self, pieces: Pieces, device: torch.device, done: Callable[[int], None]) -> None:
        self.pieces, self.device, self.done = pieces, device, done
        self.samples: Samples = {}
        self.hidden: dict[int, Tensor] = {}
        self.final_TH: Tensor | None = None
        self.wrong_tap: int | None = None

    def run(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The output of a block."""
        hidden_states: Tensor = args[0] if args else kwargs["hidden_states"]
        if number and self.wrong_tap is None and not torch.equal(hidden_states[0], self.hidden[number - 1]):
            self.wrong_tap = number - 1  # the model changes a block's output before the next block reads it
        block = self.pieces.block(number)
        name = f"{self.pieces.prefix}.{number}"
        self.samples |= {f"{name}.{param_name}": sampled(*sample_of(p)) for param_name, p in block.named_parameters()}
        out = block.to(self.device)(*args, **kwargs)
        del block
        self.hidden[number] = (out[0] if isinstance(out, tuple) else out)[0].clone()
        self.done(number)
        return out

    def keep_final(self, module: nn.Module, args: Any, out: Any) -> None:
        self.final_TH = (out[0] if isinstance(out, tuple) else out.last_hidden_state)[0]


@torch.no_grad()
def stream(target: FrozenEnds, pieces: Pieces, ids: Sequence[int], done: Callable[[int], None]) -> KnownStates:
    """The target's states of these tokens. done: called after each block, with its number.

    Raises UserError for damaged files, and weights that do not fill the model.
    """
    model: Any = target.model
    state, blocks = _Stream(pieces, target.device, done), model.get_submodule(pieces.prefix)
    state.samples |= outside_samples(target)
    outlines = list(blocks)
    backbone: Any = target.backbone.module
    handle = backbone.register_forward_hook(state.keep_final)
    try:
        for number, outline in enumerate(outlines):
            blocks[number] = _StreamedBlock(outline, _numbered(state, number))
        backbone(input_ids=torch.tensor([list(ids)], device=target.device), use_cache=False)
    finally:
        handle.remove()
        for number, outline in enumerate(outlines):
            blocks[number] = outline
    pieces.check_read(target.model)
    assert state.final_TH is not None
    hidden = {number: x_TH.cpu() for number, x_TH in state.hidden.items()}
    return KnownStates(list(ids), hidden, state.final_TH.cpu(), fingerprint_from(state.samples), state.wrong_tap)


def outside_samples(target: FrozenEnds) -> Samples:
    """What the fingerprint depends on outside of the blocks."""
    return {name: sampled(*sample_of(p)) for name, p in target.model.named_parameters() if not p.is_meta}


def _numbered(state: _Stream, number: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return state.run(number, *args, **kwargs)

    return run
