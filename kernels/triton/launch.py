"""One kernel call as a value, so that a machine without a GPU compiles and checks what runs on one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}

EARLY = "EARLY"  # the parameter of kernels that call `enter`


@triton.jit
def enter(EARLY: tl.constexpr):
    """The first statement of a kernel that may start while the one before it on the stream still runs (programmatic dependent
    launch, from Hopper on): lets the next one start, and waits until what those before it have written can be read.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name
    warps: int  # that the kernel is compiled for
    stages: int = 1  # pipeline stages that it is compiled for

    def run(self) -> None:
        """Run the kernel on the device of its first tensor."""
        device = next(a.device for a in self.arguments.values() if isinstance(a, Tensor))
        options = self._options(major_of(device))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, **options)

    def _options(self, major: int) -> dict[str, Any]:
        """What is given to the kernel beside its arguments, on an NVIDIA GPU of this major capability; 0: on another one."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if EARLY in self.kernel.arg_names:
            options[EARLY] = major >= 9
            options |= {"launch_pdl": True} if major >= 9 else {}  # AMD's backend does not know the option
        return options

    def compile(self, architecture: int | str) -> Any:
        """The kernel compiled as `run` does it on a GPU of this capability (80: A100, 90: H100) or of this name of AMD's
        (gfx942: MI300X). Needs no GPU, no CUDA toolkit and no ROCm.

        Tensors may be on the meta device; they count as aligned, as an allocator's memory is.
        """
        signature, constants, attributes = {}, {}, {}
        options = self._options(architecture // 10 if isinstance(architecture, int) else 0)
        arguments = self.arguments | {name: options.pop(name) for name in [EARLY] if name in options}
        for at, parameter in enumerate(self.kernel.params):
            value = arguments[parameter.name]
            free = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (free and isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = _type(value)
            if isinstance(value, Tensor) or (free and isinstance(value, int) and value % 16 == 0):
                attributes[at,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        backend, lanes = ("cuda", 32) if isinstance(architecture, int) else ("hip", 64)
        return triton.compile(source, target=GPUTarget(backend, architecture, lanes), options=options)


def major_of(device: torch.device) -> int:
    """The major capability of an NVIDIA GPU; 0 for anything else. torch calls AMD's GPUs `cuda` too: an MI300X has 9.4 there,
    but neither programmatic launches nor PTX.
    """
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.version.hip is None else 0


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
