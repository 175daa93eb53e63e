"""Bytes of a drafter's training state in one process (arXiv 1910.02054, figure 1)."""

from __future__ import annotations

from drafttrain.train import DeepSpeedOptions, TrainOptions

MASTER = 4  # float32, which the optimiser works on
MOMENTS = 8  # two, float32; Muon has one of hidden matrices
SHARDED_FROM = {"optimiser": 1, "gradients": 2, "weights": 3}  # the ZeRO stage


def state_bytes(parameters: int, options: TrainOptions, deepspeed: DeepSpeedOptions, processes: int) -> int:
    """On the device. At stage 0 in float32 the weights are the optimiser's own; elsewhere it has a copy."""
    wide = 2 if options.precision == "bfloat16" else 4
    copied = deepspeed.zero_stage > 0 or wide == 2
    sizes = {"optimiser": MOMENTS + copied * MASTER, "gradients": wide, "weights": wide}
    if deepspeed.offload_optimizer:
        sizes["optimiser"] = 0
    if deepspeed.offload_parameters:
        sizes["weights"] = 0
    return sum(
        parameters * size // (processes if deepspeed.zero_stage >= SHARDED_FROM[part] else 1) for part, size in sizes.items()
    )
