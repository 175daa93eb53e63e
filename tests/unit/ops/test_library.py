"""The compiled operators are tried out where they are to run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafttrain.model import unrolled_attention
from drafttrain.ops import build, jit, library


def test_cuda_state_tries_kernels_on_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two: a tensor that names no number would open a context on whichever device is the current one."""
    tried: list[str] = []
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(library, "state", lambda: library.State(True, ""))
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "architectures", lambda: ["90a"])
    monkeypatch.setattr(build, "cuda_library", lambda nvcc, architectures: Path("none.so"))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)

    def asked(*size: int, device: object) -> torch.Tensor:
        tried.append(str(device))
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(torch, "ones", asked)
    assert not library.cuda_state.__wrapped__().loaded
    assert tried == ["cuda:1"]


def test_cuda_kernels_are_not_built_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls AMD's GPUs `cuda`, and a machine may have a CUDA toolkit too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(build, "nvcc", lambda: pytest.fail("nvcc compiles nothing for AMD's GPUs"))
    state = library.cuda_state.__wrapped__()
    assert not state.loaded and "ROCm" in state.text


def test_devices_without_operators_take_torch_path(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(jit, "installed", lambda: True)
    for kind, hip in (("mps", None), ("xpu", None), ("cuda", "7.0")):
        monkeypatch.setattr(torch.version, "hip", hip)
        x: Any = SimpleNamespace(
            device=torch.device(kind), is_cuda=kind == "cuda", dtype=torch.bfloat16, shape=torch.Size((1, 2, 8, 64))
        )
        with subtests.test(kind=kind), torch.no_grad():
            monkeypatch.setattr(library, "cuda_state", lambda: library.State(False, "as on ROCm"))
            assert not library.serves(x) and not library.serves_on(x.device)
            assert not library.state_on(x.device).loaded
            assert jit.serves(x) is (kind == "cuda"), "Triton has a backend for AMD's GPUs"
            assert unrolled_attention._kernel(x, None) is None
