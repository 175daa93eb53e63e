"""Causal attention of a prompt with each order of torch's attention kernels: torch's own, and with cuDNN's last.

torch decides on the order at a process's first attention, from the GPU and TORCH_CUDNN_SDPA_DEPRIORITIZED, so each order has
its own process. cuDNN builds a plan for every new shape, so the first call of a length is timed as well as the second.

Chunks after a prefix are timed too, without a mask as the decoder computes them, and with a dense mask.

Shapes: T positions of a prompt, N of a chunk, P those and its prefix, h query heads, g KV heads, R = N h / g, D head width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from benchmarks.gpu import check
from benchmarks.gpu.ladder import PLAIN
from benchmarks.gpu.machine import WARM, Machine
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.suite import Job, RedError
from drafttrain.model.causal_attention import causal, row_attention

ORDERS = {"torch's order": None, "cuDNN after the others": "1"}  # of TORCH_CUDNN_SDPA_DEPRIORITIZED
VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
REPEATS = 20
PATIENCE = 300  # seconds for one order's process


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: int
    kv_heads: int
    width: int
    lengths: tuple[int, ...]  # of prompts that are timed repeatedly
    fresh: int  # how many new lengths are tried, from `above` on
    above: int
    chunk: int  # positions of a chunk
    prefixes: tuple[int, ...]  # positions before it


LLAMA = Sizes(32, 8, 128, (512, 2048, 8192, 32768), 16, 1000, 2048, (0, 2048, 14336, 63488))  # Llama-3.1-8B's
TINY = Sizes(4, 2, 16, (16, 40), 3, 50, 20, (0, 30))


def inputs(sizes: Sizes, length: int, machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, h, T, D], k and v [1, g, T, D] as a projection gives them, with the heads of a position next to each other."""
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    dtype = torch.float32 if machine.rehearsal else torch.bfloat16
    mixed = torch.randn(1, length, sum(heads), sizes.width, device=machine.device, dtype=dtype)
    q, k, v = (x.transpose(1, 2) for x in mixed.split(heads, 2))
    return q, k, v


@torch.inference_mode()
def repeated(sizes: Sizes, length: int, machine: Machine) -> float:
    """Milliseconds of one call at a length that was used before: the median."""
    given = inputs(sizes, length, machine)
    return 1e3 * median([machine.seconds(lambda: causal(*given)) for _ in range(WARM + REPEATS)][WARM:])


@torch.inference_mode()
def fresh(sizes: Sizes, machine: Machine) -> dict[str, float]:
    """Milliseconds on the clock of a call at a new length, and of the second one there: medians."""

    def waited(given: tuple[Tensor, Tensor, Tensor]) -> float:
        machine.wait()
        began = perf_counter()
        causal(*given)
        machine.wait()
        return 1e3 * (perf_counter() - began)

    times = []
    for length in range(sizes.above, sizes.above + sizes.fresh):
        given = inputs(sizes, length, machine)
        times.append((waited(given), waited(given)))
    first, second = (median(column) for column in zip(*times, strict=True))
    return {"first_ms": first, "second_ms": second}


@torch.inference_mode()
def chunks(sizes: Sizes, machine: Machine) -> dict[str, dict[str, float]]:
    """By prefix: milliseconds of a chunk's attention as the decoder computes it, and with a dense mask; medians, in turn."""
    found = {}
    for prefix in sizes.prefixes:
        q_1hPD, k_1gPD, v_1gPD = inputs(sizes, prefix + sizes.chunk, machine)
        q_1hND, P = q_1hPD[:, :, prefix:], prefix + sizes.chunk
        # all query heads of one KV head as rows of one attention, since kernels with masks share no keys among heads
        groups = sizes.heads // sizes.kv_heads
        seen_RP = torch.ones(sizes.chunk, P, dtype=torch.bool, device=machine.device).tril(prefix).repeat(groups, 1)
        q_1gRD = q_1hND.reshape(1, sizes.kv_heads, -1, sizes.width)
        each = {
            "ms": partial(row_attention, q_1hND[0], k_1gPD[0], v_1gPD[0], None, None),
            "masked_ms": partial(F.scaled_dot_product_attention, q_1gRD, k_1gPD, v_1gPD, seen_RP),
        }
        outputs = [work().float().flatten() for work in each.values()]
        if not bool((outputs[0] - outputs[1]).norm() < 0.02 * outputs[1].norm()):
            raise RedError(f"a chunk of {sizes.chunk} after {prefix} positions differs from attention with a mask")
        rounds = [{name: machine.seconds(work) for name, work in each.items()} for _ in range(WARM + REPEATS)][WARM:]
        found[str(prefix)] = {name: 1e3 * median(times[name] for times in rounds) for name in each}
    return found


def kernel(sizes: Sizes, machine: Machine) -> str:
    """The kernel of torch that is used."""
    q, k, v = inputs(sizes, sizes.lengths[0], machine)
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=None, enable_gqa=True)
    return SDPBackend(choice).name.removesuffix("_ATTENTION").lower()


def of_this_process(sizes: Sizes, machine: Machine) -> dict[str, Any]:
    """The figures of this process's order."""
    found = {str(length): repeated(sizes, length, machine) for length in sizes.lengths}
    return {"kernel": kernel(sizes, machine), "ms": found, "chunks": chunks(sizes, machine)} | fresh(sizes, machine)


def measure(machine: Machine) -> dict[str, Any]:
    """By order: the kernel, milliseconds by length, first and second call at new lengths. Raises RedError."""
    return {order: _elsewhere(setting, machine) for order, setting in ORDERS.items()}


def _elsewhere(setting: str | None, machine: Machine) -> dict[str, Any]:
    """The figures of a separate process with this value of the environment variable."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if setting is None else {VARIABLE: setting}
    command = [sys.executable, "-m", "benchmarks.gpu.prefill", *(["--rehearse"] if machine.rehearsal else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise RedError(f"{VARIABLE}={setting or ''}: {done.stderr.strip().splitlines()[-1:] or 'no message'}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["setting"] != setting:
        raise RedError(f"a process was to run with {VARIABLE}={setting}, and had {found['setting']}")
    return found


def jobs(machine: Machine) -> list[Job]:
    needs = check.needed((), machine, texts=[PLAIN])
    modules = ("drafttrain.model.causal_attention",)
    return [Job("prefill attention", "prefill attention", modules, partial(measure, machine), **needs)]


def main() -> int:
    """Print one order's figures as a line of JSON."""
    machine = Machine.here("--rehearse" in sys.argv[1:])
    sizes = TINY if machine.rehearsal else LLAMA
    print(json.dumps(of_this_process(sizes, machine) | {"setting": os.environ.get(VARIABLE), "sizes": asdict(sizes)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
