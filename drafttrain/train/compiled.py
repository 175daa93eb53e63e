"""torch.compile of a drafter's layers in training: their norms, rotary positions and gates, not their attention.

A part that torch cannot compile runs as it is written, and one line says so. Weights keep their names, and the objective, whose
chunks have other sizes in every step, is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Drafter
from drafttrain.model.layers import Attention, DecoderLayer, GatedMLP

PARTS: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: ("qkv", "kv"),
    DecoderLayer: ("leave", "enter"),
    GatedMLP: ("forward",),
}


class Compiled:
    """A function that is compiled when it first runs with gradients; when that fails, the function as it is."""

    def __init__(self, function: Callable[..., Any], failed: Callable[[Exception], None]) -> None:
        self.function, self.failed = function, failed
        self.fast: Callable[..., Any] | None = torch.compile(function, dynamic=True)

    def __call__(self, *inputs: Any) -> Any:
        if self.fast is None or not torch.is_grad_enabled():
            return self.function(*inputs)
        try:
            return self.fast(*inputs)
        except failures() as error:
            self.fast = None
            self.failed(error)
            return self.function(*inputs)


def compile_layers(drafter: Drafter, say: Callable[[str], None]) -> int:
    """Compile the parts of the drafter's layers. Returns their number. say: shows a line to the user, once if parts fail."""
    reported = list[Exception]()

    def failed(error: Exception) -> None:
        if not reported:
            say(f"train.compile: this part runs without compilation, as do others that fail: {reason(error)}")
        reported.append(error)

    methods = list(_parts(drafter))
    if methods:  # with the first call, where a failure is caught, and not out of `backward`
        functorch.force_non_lazy_backward_lowering = True
    for module, name in methods:
        setattr(module, name, Compiled(getattr(module, name), failed))
    if not methods:
        say("train.compile: nothing to compile, this family has no layers of its own; training continues without")
    return len(methods)


def _parts(drafter: Drafter) -> Iterator[tuple[nn.Module, str]]:
    """(module, method). A layer's `leave` calls its MLP, which is then no part of its own."""
    leaving_mlps = {id(layer.mlp) for layer in drafter.modules() if _leaves(layer)}
    for module in drafter.modules():
        for module_class, names in PARTS.items():
            if isinstance(module, module_class) and id(module) not in leaving_mlps:
                yield from ((module, name) for name in names if hasattr(module, name) and (name != "leave" or _leaves(module)))


def _leaves(module: nn.Module) -> bool:
    """Whether the layer's steps call `leave`; a layer with another order of operations calls its MLP itself."""
    return isinstance(module, DecoderLayer) and not hasattr(module, "around")


def check(choice: str, zero_stage: int) -> None:
    """Raise UserError with weights that only modules gather."""
    if choice == "on" and zero_stage == 3:
        raise UserError(
            "train.compile=on needs whole weights, and deepspeed.zero_stage=3 divides them; set train.compile=off or "
            "deepspeed=zero2"
        )


def failures() -> tuple[type[Exception], ...]:
    """What torch.compile raises when it cannot compile."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


def reason(error: Exception) -> str:
    """The error's first line, with the name of the innermost one."""
    inner: BaseException = getattr(error, "inner_exception", None) or error
    first_line = next((line.strip() for line in str(inner).splitlines() if line.strip()), "no message")
    return f"{type(inner).__name__}: {first_line}"[:200]
