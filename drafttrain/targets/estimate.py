"""Estimates the memory of a training process from configurations: models are built on `meta`, no weights are loaded.

The figure is approximate. Allocators keep some memory in reserve, and the drafter's saved activations are estimated from the
widths of its linear maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drafttrain.core.errors import UserError
from drafttrain.model.drafter import Drafter
from drafttrain.targets import TargetOptions
from drafttrain.targets.experts import expert_size
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import DTYPES, dtype_of, path_of, reason
from drafttrain.targets.quantised import FP8, holds_fp8, weight_bytes
from drafttrain.targets.structure import find_blocks
from drafttrain.targets.weights import model_class

PLACEMENTS = ("replicated", "zero3", "tensor_parallel", "expert_parallel")
LIVE = 2 * 10**9  # most parameters of a sharded target that are gathered at a time: DeepSpeed's stage3_max_live_parameters
WIDE = 6  # tensors of hidden width that a block without gradients holds at a time, in addition to the three of its MLP
CGROUP = Path("/sys/fs/cgroup")


class Outline(HFTarget):
    """A target without weights, on the `meta` device. Drafters of the right shapes are built from it."""

    outline = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, frozen=False)

    def outline_of(self, model: PreTrainedModel) -> HFTarget:
        return Outline(model)

    _trainable = _view = outline_of


def outline(options: TargetOptions) -> Outline:
    """The target of these options without weights. Raises UserError for a path without a usable configuration."""
    path, hub_options = path_of(options), {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path, **hub_options)
            settings = {"dtype": DTYPES[dtype_of(options)], "trust_remote_code": options.trust_remote_code}
            model = model_class(config).from_config(config, **settings)
    except Exception as error:  # as in `load_target`
        raise UserError(
            f"target.path {path!r} could not be loaded as a transformers causal LM: {reason(error, path, options.revision)}"
        ) from error
    return Outline(model)


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of a training process, in bytes."""

    target: int  # all weights of the target
    blocks: int  # the blocks' share of them
    live: int  # blocks that are gathered at a time when they are sharded
    drafter: int  # weights, gradients and optimiser states of the drafter
    activations: int  # temporary tensors of a step
    experts: int = 0  # the experts' share of the blocks

    def of_target(self, placement: str, sharing: int) -> int:
        """The target's bytes in one of the `sharing` processes that hold it together."""
        if placement == "replicated":
            return self.target
        divided_bytes = self.experts if placement == "expert_parallel" else self.blocks
        resident_bytes = self.target - divided_bytes + -(-divided_bytes // sharing)
        return resident_bytes + self.live if placement == "zero3" else resident_bytes

    def total(self, placement: str, sharing: int) -> int:
        """All bytes of one of these processes."""
        return self.of_target(placement, sharing) + self.drafter + self.activations


def need_of(target: Outline, kind: str | None, drafter: int, activations: int) -> Need:
    """kind: name of the weights' quantisation, or None. drafter, activations: bytes, as in `Need`.

    A checkpoint in FP8 counts as one whose scales are of rows.
    """
    kind = FP8 if kind is None and holds_fp8(target.model.config) else kind
    blocks, itemsize = find_blocks(target.model, target.shape.blocks), target.dtype.itemsize
    block_bytes = sum(p.numel() * itemsize for p in blocks.parameters())
    total_bytes = sum(p.numel() * itemsize for p in target.model.parameters())
    if kind is not None:
        linears = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
        saved_bytes = sum(m.weight.numel() * itemsize - weight_bytes(kind, m.out_features, m.in_features) for m in linears)
        block_bytes, total_bytes = block_bytes - saved_bytes, total_bytes - saved_bytes
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    live_bytes = min(block_bytes, 2 * largest * itemsize, LIVE * itemsize)  # a block and the next one
    return Need(total_bytes, block_bytes, live_bytes, drafter, activations, expert_size(blocks) * itemsize)


def activation_bytes(target: Outline, drafter: Drafter, rows: int, length: int, chunk: int) -> int:
    """Bytes of a micro-batch of `rows` x `length` tokens.

    chunk: predictions whose logits are in memory at once. Four tensors of that size count: the target's logits, those of the
    predictions among them, the drafter's logits and their gradient.
    """
    shape = target.shape
    widths = (len(drafter.taps.blocks) + 1 + WIDE) * shape.hidden_size + 3 * shape.intermediate_size
    forward, logits = rows * length * widths * target.dtype.itemsize, 4 * 4 * chunk * shape.vocab_size
    return forward + logits + kept_bytes(drafter, shape.vocab_size, rows * drafter.training_positions(length))


def kept_bytes(drafter: Drafter, vocab: int, positions: int) -> int:
    """Bytes that the drafter saves for its backward pass, in float32: inputs and outputs of its linear maps. Heads do not
    count, since their chunks are recomputed.
    """
    maps = [m.weight.shape for m in drafter.modules() if isinstance(m, nn.Linear | Conv1D)]
    return 4 * positions * sum(sum(shape) for shape in maps if vocab not in shape)


def free_bytes(device: torch.device, neighbours: int) -> int:
    """Memory of the device that this process may use. neighbours: processes of this machine, which share a CPU's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _container()) // neighbours


def _container() -> int:
    """Bytes left in the process's control group (version 2); without a limit, a number larger than any memory."""
    try:
        limit, used = ((CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):
        return 2**63


def choose(need: Need, free: int, processes: int) -> str:
    """`replicated` if it fits, else `zero3` if there are several processes. Raises UserError if neither fits."""
    totals = {name: need.total(name, processes) for name in (("replicated", "zero3") if processes > 1 else ("replicated",))}
    for placement, total in totals.items():
        if total <= free:
            return placement
    bytes_by_use = {"target": need.target, "drafter and optimizer": need.drafter, "activations": need.activations}
    raise UserError(
        f"training needs about {format_bytes(min(totals.values()))} in each process ("
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in bytes_by_use.items())
        + f"), {format_bytes(free)} are free; use more processes, or lower train.micro_batch, data.max_length or loss.chunk, "
        "or set target.weights or a higher deepspeed.zero_stage; target.placement=replicated or zero3 goes on regardless"
    )


def format_bytes(size: int) -> str:
    """A size with its unit, for messages."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
