"""One kernel call as a value, so that a machine without a GPU compiles and checks what runs on one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


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
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)

    def compile(self, capability: int) -> Any:
        """The kernel compiled as `run` does it on a GPU of this capability (80: A100, 90: H100). Needs no GPU.

        Tensors may be on the meta device; they count as aligned, as an allocator's memory is.
        """
        signature, constants, attributes = {}, {}, {}
        for at, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            free = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (free and isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = _type(value)
            if isinstance(value, Tensor) or (free and isinstance(value, int) and value % 16 == 0):
                attributes[at,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
