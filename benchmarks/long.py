"""Peak memory of one training step by text length; each cell runs in its own processes.

    python benchmarks/long.py [FAMILY ...] [--lengths 2048 8192 32768] [--documents 1] [--together 1] [--json FILE]

Target and drafter, forward and backward, one row, one thread, with the embedded target's first blocks extended to as many
positions as the text has, on the CPU. Memory used before the step is not counted: weights, gradients, libraries.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.cli.launch import launch
from drafttrain.cli.quiet import quiet
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.load import EMBEDDED
from drafttrain.train import TrainOptions
from drafttrain.train.engine import join_world, leave_world
from drafttrain.train.telemetry import peak_memory
from drafttrain.train.ulysses import sequence_group

BLOCKS = 4  # of the target: more blocks take more time but no more memory
BESIDE = ("prompt_lookup", "cascade")  # left out: one has no weights, the other combines two families
VARIANTS = {"hydra++": ("hydra", {"prefix_layer": True})}


def text(length: int, documents: int, vocab: int) -> TrainBatch:
    """One row of random tokens, all of them supervised."""
    generator = torch.Generator().manual_seed(0)
    column_T, each = torch.arange(length), -(-length // documents)
    token_BT = torch.randint(0, vocab, (1, length), generator=generator)
    mask_BT = torch.ones(1, length, dtype=torch.bool)
    return TrainBatch(token_BT, (column_T % each)[None], (column_T // each)[None], mask_BT)


def cell(options: RunOptions, resolved: dict[str, Any]) -> None:
    """Write a step's megabytes and seconds to a file, for the process that uses most."""
    torch.set_num_threads(1)
    quiet()
    name, length = resolved["family"], resolved["length"]
    world = join_world(torch.device("cpu"))
    config = AutoConfig.from_pretrained(EMBEDDED, max_position_embeddings=max(length, 2048), num_hidden_layers=BLOCKS)
    target = FastTarget(AutoModelForCausalLM.from_pretrained(EMBEDDED, config=config, dtype=torch.float32))
    family, chosen = VARIANTS.get(name, (name, {}))
    torch.manual_seed(0)
    drafter = families()[family].build(families()[family].options(**chosen), target).train()
    online, objective = Online(target, drafter.taps), Objective(drafter, target, LossOptions())
    group = sequence_group(TrainOptions(sequence_parallel=world.size), world)

    def step(batch: TrainBatch) -> None:
        own = batch if group is None else batch.part(group, drafter.label_offset)
        objective(online.fill(own))[0].backward()

    step(text(64, 1, target.shape.vocab_size))  # makes gradients and everything else that is allocated once
    before, began = peak_memory(torch.device("cpu")), perf_counter()
    step(text(length, resolved["documents"], target.shape.vocab_size))
    own = (peak_memory(torch.device("cpu")) - before) / 1e6, perf_counter() - began
    most = [max(column) for column in zip(*world.gather(own), strict=True)]
    if world.first:
        Path(resolved["output"]).write_text(json.dumps(most))
    leave_world(world)


def measured(name: str, length: int, documents: int, processes: int) -> tuple[float, float]:
    """Megabytes and seconds. The launcher has its own process too; otherwise a single process would run inside it."""
    fresh = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(1, fresh) as pool:
        resolved = {"family": name, "length": length, "documents": documents, "output": f"{folder}/cell.json"}
        pool.submit(launch, cell, RunOptions(launcher=LauncherOptions(nproc=processes)), resolved).result()
        megabytes, seconds = json.loads(Path(resolved["output"]).read_text())
    return megabytes, seconds


def main() -> int:
    names = [*(name for name in sorted(families()) if name not in BESIDE), *VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(names))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--documents", type=int, default=1, help="that the row holds")
    parser.add_argument("--together", type=int, default=1, help="processes that hold the row together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.families if name not in names]:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(names)}")
    console, found = Console(width=110), {}
    table = Table("family", *(f"{length:,} tokens" for length in arguments.lengths), box=None)
    for name in arguments.families or names:
        found[name] = []
        for length in arguments.lengths:
            found[name].append(measured(name, length, arguments.documents, arguments.together))
            console.print(f"{name}, {length:,}: {found[name][-1][0]:,.0f} MB, {found[name][-1][1]:,.1f} s", highlight=False)
        table.add_row(name, *(f"{megabytes:,.0f} MB" for megabytes, _ in found[name]))
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"lengths": arguments.lengths, "megabytes_seconds": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
