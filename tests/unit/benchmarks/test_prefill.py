"""The comparison of torch's orders of attention kernels: each in a process of its own, whose setting is checked."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import prefill, report
from benchmarks.gpu.bench import jobs
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.prefill import LLAMA, ORDERS, TINY, VARIABLE
from benchmarks.gpu.suite import RedError

REHEARSAL = Machine(torch.device("cpu"), True, "rehearsal", {"torch": torch.__version__})


@pytest.mark.slow
def test_prefill_measure_reports_both_attention_kernel_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")  # of the user's shell: torch's own order is still measured without it
    found = prefill.measure(REHEARSAL)
    assert {order: figures["setting"] for order, figures in found.items()} == ORDERS
    for figures in found.values():
        assert list(figures["ms"]) == [str(length) for length in TINY.lengths] and figures["kernel"]
        assert list(figures["chunks"]) == [str(prefix) for prefix in TINY.prefixes]
        assert all(min(own["ms"], own["masked_ms"]) > 0 for own in figures["chunks"].values())
        assert min(figures["first_ms"], figures["second_ms"], *figures["ms"].values()) > 0
    assert [job.name for job in jobs(REHEARSAL)].count("prefill attention") == 1


def test_prefill_measure_failed_or_wrong_subprocess_raises_red_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {"returncode": 1, "stdout": "", "stderr": "Traceback\nRuntimeError: no kernel"}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(**said))
    with pytest.raises(RedError, match="no kernel"):
        prefill.measure(REHEARSAL)
    said |= {"returncode": 0, "stdout": "a note\n" + json.dumps({"setting": "1"})}
    with pytest.raises(RedError, match="was to run with"):
        prefill.measure(REHEARSAL)


def test_prefill_inputs_have_model_shapes_and_report_rows_have_figures() -> None:
    q, k, v = prefill.inputs(LLAMA, 5, REHEARSAL)
    assert q.shape == (1, 32, 5, 128) and k.shape == v.shape == (1, 8, 5, 128)
    figures = {"kernel": "flash", "ms": {"512": 0.25, "2048": 1.5}, "first_ms": 90.0, "second_ms": 0.5}
    entry = {"status": "passed", "figures": dict.fromkeys(ORDERS, figures), "sources": "other"}
    rows = report.prefills({"prefill attention": entry})
    assert len(rows) == 4 and "512 tokens, ms" in rows[0] and "| flash | 0.250 | 1.500 | 90.000 | 0.500 |" in rows[3]
    assert report.prefills({}) == report.prompt_chunks({})[2:] == []
    figures |= {"chunks": {"2048": {"ms": 0.5, "masked_ms": 4.0}}}
    rows = report.prompt_chunks({"prefill attention": entry})
    assert len(rows) == 4 and "| 2,048 | 0.500 (older sources) | 4.000 | 8.0 |" in rows[3]

    def differs(*_: object) -> torch.Tensor:
        return torch.ones(TINY.heads, TINY.chunk, TINY.width)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RedError, match="differs from attention with a mask"):
        patched.setattr(prefill, "row_attention", differs)
        prefill.chunks(TINY, REHEARSAL)
