"""Estimate of training speed on GPUs by a formula.

    python -m benchmarks.projection [--mfu 0.45]

For a drafter of one layer trained on its own outputs: EAGLE-3 with the settings of `recipes/eagle3_llama31_8b.yaml`. For a
micro-batch of T tokens in rows of S, on each of n processes:

    operations = T (2 N + 4 L S A)              the target's forward: N weights in its L blocks, attention of width A
               + T 2 V H                        its head, once for all K predictions
               + T (4 F + K (6 (W + D H) + 14 S A))   the drafter: fusion F, layer W and head D H trained, attention
    bytes      = 2 (n - 1) / n G                the drafter's gradients, G bytes: summed, and weights or gradients returned
               + (n - 1) / n B                  target.placement=zero3: B bytes of blocks
               or 8 (n - 1) L T H               target.placement=tensor_parallel: two sums a block, for all n T tokens
    seconds    = operations / (mfu * peak) + bytes / bandwidth

If all communication overlaps with computing, the seconds are the larger of the two and not their sum. Operations are counted as
in a run's `mfu` (`drafttrain/train/telemetry.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import WIDTH
from drafttrain.cli.quiet import quiet
from drafttrain.drafters import families
from drafttrain.model.drafter import trainable
from drafttrain.objective.losses import LossOptions
from drafttrain.runs.placement import state_bytes
from drafttrain.targets.estimate import Outline, activation_bytes, format_bytes, need_of
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.structure import find_blocks
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.telemetry import named_peak

MFU = 0.45  # the goal of `make gpu`; docs/performance.md has what was reached
GPU, NODE = "H100", 8
LINK = 0.75 * 450e9  # bytes per second of a process, of NVLink 4's 450 GB/s each way
NETWORK = 0.8 * NODE * 50e9  # between machines with one 400 Gb/s adapter per GPU; a ring through a machine uses all of them
BILLION = 10**9
FAMILY: dict[str, Any] = {"steps": 7, "draft_length": 6, "draft_vocab": 32_000, "tree": "dynamic"}
LLAMA: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
LLAMA |= {"head_dim": 128, "tie_word_embeddings": False}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes in the formula: N, L, A, V, H of the target, B bytes of its blocks; K, F, W, D of the drafter, G bytes of
    gradients.
    """

    N: int
    L: int
    A: int
    V: int
    H: int
    B: int
    K: int
    F: int
    W: int
    D: int
    G: int

    @staticmethod
    def of(target: HFTarget, drafter: Any) -> Sizes:
        shape, blocks = target.shape, find_blocks(target.model, target.shape.blocks)
        inside = sum(p.numel() for p in blocks.parameters() if p.ndim > 1)
        layer = sum(p.numel() for p in drafter.midlayer.parameters() if p.ndim > 1)
        gradients = sum(p.numel() * p.element_size() for p in drafter.parameters() if p.requires_grad)
        return Sizes(
            N=inside,
            L=shape.blocks,
            A=shape.heads * shape.head_dim,
            V=shape.vocab_size,
            H=shape.hidden_size,
            B=inside * target.dtype.itemsize,
            K=drafter.steps,
            F=drafter.fc.weight.numel(),
            W=layer,
            D=drafter.lm_head.out_features,
            G=gradients,
        )

    def target_operations(self, tokens: int, length: int) -> float:
        return tokens * (2.0 * self.N + 4.0 * self.L * length * self.A)

    def operations(self, tokens: int, length: int) -> float:
        predictions = 2.0 * self.V * self.H
        drafter = 4.0 * self.F + self.K * (6.0 * (self.W + self.D * self.H) + 14.0 * length * self.A)
        return self.target_operations(tokens, length) + tokens * (predictions + drafter)

    def of_gradients(self, processes: int) -> float:
        """Bytes of gradients that a process moves."""
        return 2.0 * (processes - 1) / processes * self.G

    def of_target(self, tokens: int, sharing: int, placement: str) -> float:
        """Bytes of the target that a process moves. sharing: number of processes that hold it together."""
        if placement == "replicated":
            return 0.0
        return (sharing - 1) / sharing * self.B if placement == "zero3" else 8.0 * (sharing - 1) * self.L * tokens * self.H


@dataclass(frozen=True, slots=True)
class Plan:
    """A training run: sizes, memory of a process by placement, rows of a micro-batch; global batch = rows x processes."""

    name: str
    outline: Outline
    drafter: Any
    length: int
    rows: int
    zero_stage: int

    def memory(self, processes: int, placement: str) -> int:
        options, stage = TrainOptions(precision="bfloat16"), DeepSpeedOptions(self.zero_stage)
        state = state_bytes(trainable(self.drafter), options, stage, processes)
        chunk = LossOptions().at_once(self.outline.shape.vocab_size)
        activations = activation_bytes(self.outline, self.drafter, self.rows, self.length, chunk)
        return need_of(self.outline, None, state, activations).total(placement, shared_by(processes, placement))

    def seconds(self, processes: int, placement: str, mfu: float) -> tuple[float, float]:
        """(computing, communicating) seconds of one step."""
        peak, tokens = named_peak(GPU), self.rows * self.length
        assert peak is not None
        sizes, sharing = Sizes.of(self.outline, self.drafter), shared_by(processes, placement)
        moving = sizes.of_gradients(processes) / bandwidth(processes)
        moving += sizes.of_target(tokens, sharing, placement) / bandwidth(sharing)
        return sizes.operations(tokens, self.length) / (mfu * peak), moving


def shared_by(processes: int, placement: str) -> int:
    """The number of processes that hold the target together. A split target stays within a machine."""
    return min(processes, NODE) if placement == "tensor_parallel" else processes


def bandwidth(processes: int) -> float:
    return LINK if processes <= NODE else min(LINK, NETWORK)


def outline_of(hidden: int, blocks: int, heads: int, inner: int) -> Outline:
    shape = {"hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads, "intermediate_size": inner}
    with torch.device("meta"):
        return Outline(AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, **shape), dtype=torch.bfloat16))


def plans() -> Iterator[tuple[Plan, tuple[str, ...]]]:
    """The plans with useful placements."""
    family = families()["eagle3"]
    for name, shape, rows, stage, placements in (
        ("8B", (4096, 32, 32, 14_336), {2048: 2, 8192: 1}, 1, ("replicated",)),
        ("70B", (8192, 80, 64, 28_672), {2048: 1, 8192: 1}, 2, ("zero3", "tensor_parallel")),
    ):
        outline = outline_of(*shape)
        with torch.device("meta"):
            drafter = family.build(family.options(**FAMILY), outline).to(torch.bfloat16)
        for length, count in rows.items():
            yield Plan(name, outline, drafter, length, count, stage), placements


def table(mfu: float) -> Table:
    names = ("target", "length", "GPUs", "placement", "memory", "compute, s", "communication, s", "tokens/s", "hours for 10⁹")
    found = Table(*names, box=None, width=WIDTH)
    for plan, placements in plans():
        for processes in (8, 64):
            for placement in placements:
                computing, moving = plan.seconds(processes, placement, mfu)
                tokens = plan.rows * plan.length * processes
                slow, fast = tokens / (computing + moving), tokens / max(computing, moving)
                hours = (BILLION / rate / 3600 for rate in (fast, slow))
                memory = format_bytes(plan.memory(processes, placement))
                cells = (plan.name, f"{plan.length:,}", str(processes), placement, memory)
                rates = (f"{slow:,.0f}-{fast:,.0f}", "{:.1f}-{:.1f}".format(*hours))
                found.add_row(*cells, f"{computing:.3f}", f"{moving:.3f}", *rates)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.projection", description=__doc__.splitlines()[0])
    parser.add_argument("--mfu", type=float, default=MFU, help="assumed share of the peak")
    asked = parser.parse_args()
    if not 0.0 < asked.mfu <= 1.0:
        parser.error(f"--mfu is {asked.mfu}; it is above 0 and at most 1")
    quiet()
    console = Console(width=WIDTH)
    console.print(f"{GPU}, mfu {asked.mfu:.0%} (assumed); communication overlaps with nothing - with everything")
    console.print(table(asked.mfu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
