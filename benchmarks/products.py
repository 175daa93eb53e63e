"""Products of few rows with the weights of Llama-3.1-8B on this GPU, by cuBLAS and by cuBLASLt, in turn.

    python -m benchmarks.products [--out FILE]

Each product is replayed in a graph, with several weights in turn, together larger than the cache. Bytes per second are those of
the weight. `drafttrain/ops/linear.py` chooses by these figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.machine import Machine, NoGpuError, Replay, race

WEIGHTS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate, up": (4096, 28672), "down": (14336, 4096), "head": (4096, 128_256)}
ROWS = (1, 5, 16, 32, 64, 128, 256)
CALLS, REPLAYS, REPEATS = 24, 5, 7
LIBRARIES = ("cublas", "cublaslt")


def measured(rows: int, inputs: int, outputs: int, machine: Machine) -> dict[str, float]:
    """Microseconds of one product, by library."""
    draw = partial(torch.randn, device=machine.device, dtype=torch.bfloat16)
    weights = [draw(outputs, inputs) for _ in range(2 + 2 * machine.cached // (2 * inputs * outputs))]
    x_MI, rounds = draw(rows, inputs), -(-CALLS // len(weights))

    def product() -> list[Tensor]:
        return [F.linear(x_MI, weight_OI) for _ in range(rounds) for weight_OI in weights]

    ways = {}
    for library in LIBRARIES:
        torch.backends.cuda.preferred_blas_library(library)
        ways[library] = partial(Replay(product, machine).seconds, REPLAYS)
    taken = race(ways, REPEATS)
    return {library: 1e6 * seconds / rounds / len(weights) for library, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    out, found = parser.parse_args().out, dict[str, dict[str, float]]()
    try:
        machine = Machine.here(False)
    except NoGpuError as error:
        print(f"products: {error}", file=sys.stderr)
        sys.exit(2)
    for rows in ROWS:
        for name, (inputs, outputs) in WEIGHTS.items():
            found[f"{name}, {rows} rows"] = one = measured(rows, inputs, outputs, machine)
            rates = ", ".join(f"{way} {us:.1f} us ({2 * inputs * outputs / us / 1e6:.2f} TB/s)" for way, us in one.items())
            print(f"{name:9} {rows:4} rows: {rates}", flush=True)
    if out is not None:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
