"""The compiled operators are tried out where they are to run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.ops import build, library


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
