"""Bytes of a drafter's training state in one process (arXiv 1910.02054, figure 1)."""

from __future__ import annotations

from drafttrain.train import DeepSpeedOptions, TrainOptions

MASTER = 4  # bytes per parameter of the float32 master weights
MOMENTS = 8  # bytes per parameter of two float32 moments; Muon has only one for hidden matrices
SUM = 4  # and of the float32 sum of a bfloat16 drafter's micro-batches
SHARDED_FROM = {"optimiser": 1, "gradients": 2, "sums": 2, "weights": 3}  # ZeRO stage from which each is sharded


def state_bytes(parameters: int, options: TrainOptions, deepspeed: DeepSpeedOptions, processes: int, frozen: int = 0) -> int:
    """Bytes on the device. At stage 0 in float32 the optimiser steps the weights themselves; otherwise it has a copy.

    parameters: that are trained. frozen: further ones, which have neither gradients nor moments.
    """
    wide = 2 if options.precision == "bfloat16" else 4
    copied = deepspeed.zero_stage > 0 or wide == 2
    sizes = {"optimiser": MOMENTS + copied * MASTER, "gradients": wide, "sums": 0, "weights": wide}
    if wide == 2 and deepspeed.zero_stage == 0:  # there the gradients themselves are float32
        sizes["gradients"] = SUM
    elif wide == 2 and options.global_batch * options.sequence_parallel > options.micro_batch * processes:
        sizes["sums"] = SUM
    if deepspeed.offload_optimizer:
        sizes["optimiser"] = 0
    if deepspeed.offload_parameters:
        sizes["weights"] = 0
    counts = dict.fromkeys(sizes, parameters) | {"weights": parameters + frozen}
    return sum(
        counts[part] * size // (processes if deepspeed.zero_stage >= SHARDED_FROM[part] else 1) for part, size in sizes.items()
    )
