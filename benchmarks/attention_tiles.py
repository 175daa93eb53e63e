"""Tree attention with other tiles, and other versions of its kernel: microseconds of each on this GPU.

    python -m benchmarks.attention_tiles --out attention_tiles.json [--also FILE ...] [--rehearse]

Shapes of Llama-3.1-8B, batch 1. Every variant is checked against the definition in float64 and timed in turn with the others:
replays of one CUDA graph that holds a call for each of several inputs, together larger than the cache. --also: other versions
of kernels/triton/tree_attention.py, timed with their own tiles. --rehearse: the same code at small sizes in Triton's
interpreter (TRITON_INTERPRET=1), to find errors. Needs torch, Triton and this checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import benchmarks.gpu  # noqa: F401  before drafttrain.kernels, for which it stands in

# isort: split
from drafttrain.kernels.triton import tree_attention as kernels
from drafttrain.kernels.triton.launch import Launch
from drafttrain.kernels.triton.tree_attention import Tiles

from benchmarks.gpu.cache import TreeAttention
from benchmarks.gpu.case import Tensors, complaint, widened
from benchmarks.gpu.machine import Machine, Replay, race
from drafttrain.ops.tree_bits import words_for

NODES, CONTEXTS = (1, 16, 64, 65, 128), (4096, 16384)
ROUNDS, REPLAYS = 7, 20
TILES = {  # by the rows that one KV head has, at most
    16: (Tiles(16, 128, 4, 3), Tiles(16, 64, 4, 3, 2)),
    64: (Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 3, 2)),
    1024: (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 3, 2)),
}


@dataclass(frozen=True)
class Variant:
    """One way to compute the attention of a case."""

    module: Any
    options: dict[str, Any]  # of its `launches`

    def launches(self, case: TreeAttention, given: Tensors, out: Tensor) -> list[Launch]:
        names = ("q", "keys", "values", "table", "length", "bits", "position")
        given_to = (*(given[name] for name in names), out, case.width**-0.5, case.window, case.context + case.nodes, 0)
        found: list[Launch] = self.module.launches(*given_to, **self.options)
        return found

    def run(self, case: TreeAttention, sets: list[Tensors]) -> list[Tensors]:
        outs = [given["q"].new_empty(*given["q"].shape[:2], case.heads * case.width) for given in sets]
        for given, out in zip(sets, outs, strict=True):
            for launch in self.launches(case, given, out):
                launch.run()
        return [{"out": out} for out in outs]


def variants(case: TreeAttention, arrived: Tensor, also: list[Any]) -> dict[str, Variant]:
    """All that differ, by name; the first one is what `tree_attention` takes."""
    rows = case.nodes * (case.heads // case.kv_heads)
    found = {"as it is": Variant(kernels, {"arrived": arrived})}
    for module in also:
        counts = "arrived" in signature(module.launches).parameters
        found[module.__name__] = Variant(module, {"arrived": arrived} if counts else {})
    if case.nodes == 1:
        found["a second launch joins"] = Variant(kernels, {})
    chosen = kernels.tiles(rows, case.width, torch.bfloat16, words_for(case.nodes))
    for tile in next(tiles for most, tiles in TILES.items() if rows <= most):
        if tile != chosen:
            text = f"{tile.rows}x{tile.keys} warps {tile.warps} stages {tile.stages} programs {tile.programs}"
            found[text] = Variant(kernels, {"arrived": arrived, "tile": tile})
    return found


def compiled(launches: list[Launch]) -> None:
    """Compile all of them at once, in threads."""
    with ThreadPoolExecutor(16) as threads, triton.AsyncCompileMode(threads):
        for launch in launches:
            sizes = {"num_warps": launch.warps, "num_stages": launch.stages}
            launch.kernel.warmup(grid=launch.grid, **launch.arguments, **sizes)


def inputs(case: TreeAttention, machine: Machine) -> list[Tensors]:
    dtype = torch.float16 if machine.rehearsal else torch.bfloat16
    count = 1 if machine.rehearsal else min(-(-2 * machine.cached // case.moved(dtype)), 8)
    return [case.inputs(dtype, machine.device, seed) for seed in range(count)]


def measure(case: TreeAttention, machine: Machine, arrived: Tensor, also: list[Any]) -> list[dict[str, Any]]:
    """A row for each variant: its grid, microseconds, and what is wrong with its result."""
    sets, rows, replays = inputs(case, machine), list[dict[str, Any]](), dict[str, Replay[Any]]()
    wanted = case.exact(widened(sets[0]))
    for name, variant in variants(case, arrived, also).items():
        launches = variant.launches(case, sets[0], sets[0]["q"])
        row = {
            "nodes": case.nodes,
            "context": case.context,
            "variant": name,
            "grid": launches[0].grid,
            "launches": len(launches),
        }
        rows.append(row)
        try:
            replays[name] = Replay(partial(variant.run, case, sets), machine)
            replays[name].run()
            row["wrong"] = complaint(wanted, replays[name].out[0]) or ("counters are left" if bool(arrived.any()) else None)
        except triton.runtime.errors.OutOfResources as error:  # of a smaller GPU
            row["wrong"] = str(error)
    taken = race({name: partial(replay.seconds, REPLAYS) for name, replay in replays.items()}, ROUNDS)
    for row in rows:
        row["us"] = 1e6 * taken.get(row["variant"], float("nan")) / len(sets)
        row["bytes"] = case.moved(torch.bfloat16)
    return rows


def loaded(name: str) -> Any:
    path = Path(name)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--also", type=loaded, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    machine = Machine.here(options.rehearse)
    cases = [TreeAttention(1, nodes, context) for context in CONTEXTS for nodes in NODES]
    if options.rehearse:
        cases = [TreeAttention(1, nodes, 256, heads=4, kv_heads=1, width=32) for nodes in (1, 5)]
    arrived = torch.zeros(1024, dtype=torch.int32, device=machine.device)
    if not options.rehearse:
        firsts = [(case, inputs(case, machine)[0]) for case in cases[: len(NODES)]]
        every = [(case, given, v) for case, given in firsts for v in variants(case, arrived, options.also).values()]
        compiled([launch for case, given, v in every for launch in v.launches(case, given, given["q"])])
    rows = [row for case in cases for row in measure(case, machine, arrived, options.also)]
    options.out.write_text(json.dumps({"gpu": machine.name, "facts": machine.facts, "rows": rows}, indent=1))
    print(f"{machine.name}: tree attention, {cases[0].heads} query heads, {cases[0].kv_heads} KV heads of {cases[0].width}")
    for row in rows:
        grid = " x ".join(map(str, row["grid"]))
        print(
            f"{row['nodes']:4} nodes {row['context']:6} {row['us']:8.2f} us  {grid:12} {row['variant']}  {row['wrong'] or ''}"
        )


if __name__ == "__main__":
    main()
