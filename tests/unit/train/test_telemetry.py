"""What a step cost is counted, not guessed; a step that hangs shows its stacks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from drafttrain.core.errors import UserError
from drafttrain.model.batch import TrainBatch
from drafttrain.train.interrupt import Watchdog
from drafttrain.train.telemetry import Flops, Meter, Profile, named_peak, window


def batch(B: int, T: int) -> TrainBatch:
    grid_BT = torch.zeros(B, T, dtype=torch.long)
    return TrainBatch(grid_BT, torch.arange(T).expand(B, T), grid_BT, torch.ones(B, T, dtype=torch.bool))


def test_flops_linear_counts_two_gradient_products_if_trained_one_if_frozen() -> None:
    B, T, H, V, flops = 2, 5, 8, 11, Flops()
    trained, frozen = nn.Linear(H, H, bias=False), nn.Linear(H, V, bias=False).requires_grad_(False)
    with flops.counting(batch(B, T)):
        with torch.no_grad():
            states_BTH = trained(torch.randn(B, T, H))  # as a target's: forward alone
        frozen(trained(states_BTH)).sum().backward()
    forward, head = 2 * B * T * H * H, 2 * B * T * H * V
    assert flops.of(batch(B, T)) == pytest.approx(forward + (forward + forward) + (head + head))  # no gradient of the states
    assert flops.of(batch(3, 7)) == pytest.approx(flops.of(batch(B, T)) * 21 / 10)


def assert_recomputation_is_free() -> None:
    layer, x_BTH = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(2, 5, 8, requires_grad=True)
    counts = []
    for again in (False, True):
        flops = Flops()
        with flops.counting(batch(2, 5)):
            (checkpoint(layer, x_BTH, use_reentrant=False) if again else layer(x_BTH)).sum().backward()
        counts.append(flops.of(batch(2, 5)))
    assert counts[0] == counts[1] == 2 * 3 * 2 * 10 * 64


def test_flops_activation_checkpointing_recompute_is_not_counted() -> None:
    assert_recomputation_is_free()


def test_flops_recompute_inside_autograd_function_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 makes a `Function` of every linear map, in whose forward pass gradients are off."""
    plain = torch.nn.functional.linear

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return plain(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            x, weight = ctx.saved_tensors
            return grads[0] @ weight, torch.einsum("bto,bti->oi", grads[0], x), grads[0].sum((0, 1))

    monkeypatch.setattr(torch.nn.functional, "linear", Linear.apply)
    assert_recomputation_is_free()


def test_flops_attention_grows_with_square_of_length() -> None:
    flops, q_BhTD = Flops(), torch.randn(2, 3, 16, 8)
    with flops.counting(batch(2, 16)), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q_BhTD, q_BhTD, q_BhTD)
    assert flops.of(batch(2, 16)) == pytest.approx(2 * 2 * 2 * 3 * 16 * 16 * 8)
    flops.per_position, flops.per_pair = 3.0, 5.0
    assert flops.of(batch(2, 7)) == 3.0 * 14 + 5.0 * 2 * 49


def test_flops_gpu_grouped_query_attention_counts_all_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's own formula refused them."""
    q_BhTD, k_BgTD, v_BgTD = (torch.zeros(2, heads, 16, 8, device="meta") for heads in (6, 3, 3))
    for kernel, bias in {"flash": (), "efficient": (None, True), "cudnn": (None, True)}.items():
        flops, packet = Flops(), getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        monkeypatch.setitem(flop_registry, packet, refusing)
        with flops.counting(batch(2, 16)):
            packet(q_BhTD, k_BgTD, v_BgTD, *bias)
        assert flops.of(batch(2, 16)) == pytest.approx(2 * 2 * 2 * 6 * 16 * 16 * 8), kernel


def refusing(*_: object, **__: object) -> int:
    raise AssertionError("shapes are incompatible")


def test_named_peak_returns_flops_of_device_by_name() -> None:
    """Also where a name begins like another, or holds it."""
    peaks = {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989.4e12,
        "NVIDIA GH200 480GB": 989.4e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA A10": 125e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GB200": 2500e12,
        "An accelerator of tomorrow": None,
    }
    assert {name: named_peak(name) for name in peaks} == peaks


def test_meter_step_shares_sum_to_one_and_restart() -> None:
    meter = Meter(torch.device("cpu"))
    with meter.data():
        torch.randn(100, 100)
    with meter.micro_batch(batch(1, 4)), meter.target():
        torch.randn(50, 50) @ torch.randn(50, 50)
    cost = meter.step()
    assert cost.mfu is None and 0 < cost.data_share < 1 and 0 < cost.target_share < 1
    assert cost.data_share + cost.target_share + cost.rest_share == pytest.approx(1.0)
    assert cost.peak_memory > 2**20
    assert (later := meter.step()).target_share == later.data_share == 0.0, "of the new step alone"
    meter.peak = 1e9
    with meter.micro_batch(batch(1, 4)):
        pass
    assert (cost := meter.step()).mfu == pytest.approx(2 * 50**3 / cost.seconds / 1e9)


def test_profile_window_returns_steps_of_option(subtests: pytest.Subtests) -> None:
    for option, first, last, steps in (
        (False, 0, 100, []),
        (True, 0, 100, [5, 6, 7]),
        (True, 0, 3, [1, 2, 3]),
        (True, 98, 100, [98, 99, 100]),
        ([2, 4], 0, 9, [2, 3, 4]),
    ):
        with subtests.test(option=option, first=first, last=last):
            assert list(window(option, first, last)) == steps


def test_profile_window_invalid_option_is_refused(subtests: pytest.Subtests) -> None:
    for option in ([3], [4, 2], [0, 2], "yes", 3, [1.5, 2]):
        with (
            subtests.test(option=option),
            pytest.raises(UserError, match=r"train\.profile is .*; set it to true, false, or the first and last step"),
        ):
            window(option, 0, 10)


def test_profile_writes_trace_of_window_steps(tmp_path: Path) -> None:
    said: list[str] = []
    with Profile(range(2, 4), tmp_path / "trace-rank0.json.gz", said.append) as trace:
        for step in (1, 2, 3, 4):
            with trace.step(step):
                torch.full((4, 4), float(step)).matmul(torch.eye(4))
    events = json.loads(gzip.decompress((tmp_path / "trace-rank0.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::matmul" for event in events) == 2
    assert len(said) == 1 and "perfetto" in said[0]


def test_watchdog_hanging_step_writes_stacks(tmp_path: Path) -> None:
    said: SimpleQueue[str] = SimpleQueue()

    def waits_for_a_rank_that_never_comes() -> tuple[Path, str]:
        with Watchdog(tmp_path, 3, 0.05, said.put) as watchdog:
            line, end = said.get(timeout=60), time.monotonic() + 60
            while "never_comes" not in watchdog.file.read_text() and time.monotonic() < end:  # a thread of its own writes it
                time.sleep(0.005)
            return watchdog.file, line

    stacks, line = waits_for_a_rank_that_never_comes()
    assert "waits_for_a_rank_that_never_comes" in stacks.read_text()
    assert line == f"no step has ended for 0.05 seconds; every process's stacks are in {tmp_path}/rank-*.stack"


HANGS = """
import sys, time
from pathlib import Path
from drafttrain.train import interrupt

def waits_for_a_rank_that_never_comes():
    time.sleep(60)

interrupt.WRITING = 0.1
with interrupt.Watchdog(Path(sys.argv[1]), 3, 0.1, print, ends=True):
    waits_for_a_rank_that_never_comes()
"""


def test_watchdog_ends_hanging_process_with_exit_code_1(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "waits_for_a_rank_that_never_comes" in (tmp_path / "rank-3.stack").read_text()
    assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith("drafttrain: no step has ended for 0.1 seconds; every process's stacks are in ")


def test_watchdog_without_hang_leaves_no_files(tmp_path: Path) -> None:
    for seconds in (60.0, 0.0):
        with Watchdog(tmp_path / "logs", 3, seconds, print) as watchdog:
            watchdog.alive()
    assert not list(tmp_path.iterdir())
