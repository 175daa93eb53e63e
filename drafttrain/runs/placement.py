"""Chooses the placement of the frozen target's weights, in training and in measurement; `Ready`: one that is in memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from drafttrain.core.errors import UserError
from drafttrain.data.files import read_template
from drafttrain.data.records import Records
from drafttrain.drafters import families
from drafttrain.drafters.common.drafter_lora import trained_and_frozen
from drafttrain.model.drafter import Drafter, trainable
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import Target
from drafttrain.runs.derived import for_target
from drafttrain.runs.lock_step import only_first_prints
from drafttrain.runs.options import RunOptions, ends_alone
from drafttrain.targets import TargetOptions
from drafttrain.targets.devices import device_of
from drafttrain.targets.estimate import Need, activation_bytes, choose, format_bytes, free_bytes, need_of, outline
from drafttrain.targets.experts import DispatchedTarget, check_experts, experts_of
from drafttrain.targets.load import DTYPES, LoadedTarget, check_options, dtype_of, load_target
from drafttrain.targets.parallel import Part, leave
from drafttrain.targets.split import RoundRobinTarget, part_among_neighbours
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import World, leave_world
from drafttrain.train.sharding import ZeroShards

MASTER = 4  # bytes per parameter of the float32 master weights
MOMENTS = 8  # bytes per parameter of two float32 moments; Muon has only one for hidden matrices
SUM = 4  # and of the float32 sum of a bfloat16 drafter's micro-batches
SHARDED_FROM = {"optimiser": 1, "gradients": 2, "sums": 2, "weights": 3}  # ZeRO stage from which each is sharded


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of the target, and the memory that it needs."""

    placement: str  # one of `estimate.PLACEMENTS`
    sharing: int  # number of processes that share one target
    need: Need
    weights: int  # bytes of the drafter's weights
    shape: TargetShape  # of the target
    experts: int = 0  # routed experts in each of its blocks; 0: a dense target
    trained: bool = True  # whether the drafter is

    @property
    def shared(self) -> bool:
        """Whether several processes share one target."""
        return self.placement != "replicated"

    @property
    def measured(self) -> int:
        """Bytes that a measurement in one process needs: the whole target and the drafter."""
        return self.need.target + self.weights


def check_placement(options: RunOptions) -> None:
    """Raise UserError for settings in conflict with the placement. It runs before processes are joined."""
    target = options.target
    check_options(target)
    size = _sharing(options)
    setting, shared_size = target.shared_by
    if shared_size != 1 and target.placement not in ("auto", setting.removeprefix("target.")):
        raise UserError(f"{setting} is {shared_size}, but target.placement is {target.placement}; leave one out")
    if _requested(options) == "expert_parallel" and (size < 2 or _processes() % size):
        raise UserError(
            f"target.expert_parallel is {size}, but the run has {_processes()} processes; set launcher.nproc, or torchrun's "
            f"--nproc-per-node, to a multiple of {max(size, 2)}"
        )
    if _requested(options) == "tensor_parallel" and (size < 2 or _neighbours() % size):
        raise UserError(
            f"target.tensor_parallel is {size}, but this machine runs {_neighbours()} of the processes; set launcher.nproc, or "
            f"torchrun's --nproc-per-node, to a multiple of {max(size, 2)}"
        )


def place(options: RunOptions, world: World, say: Callable[[str], None]) -> Placement:
    """The user's placement, or one chosen by free memory; it is printed.

    Raises UserError if no placement fits, and for settings that a shared target does not support.
    """
    target, single_process, placement_name = options.target, world.size == 1, _requested(options)
    meta_target = outline(target)
    with torch.device("meta"):
        drafter = built(options, meta_target)
    length = -(-min(options.data.max_length, meta_target.shape.max_positions) // options.train.sequence_parallel)
    chunk = options.loss.at_once(meta_target.shape.vocab_size)
    activations = activation_bytes(meta_target, drafter, options.train.micro_batch, length, chunk)
    trained_count, frozen_count = trained_and_frozen(drafter, options.train.lora, meta_target.shape.vocab_size)
    state = state_bytes(trained_count, options.train, options.deepspeed, world.size, frozen_count)
    need = need_of(meta_target, target.weights, state, activations)
    if ends_alone(options):
        need = replace(need, target=need.target - need.blocks, blocks=0, live=0, experts=0)
    free = min(world.gather(free_bytes(device_of(target.device), _neighbours())))
    if placement_name == "auto":
        unsharded = single_process or drafter.adapts is not None or target.weights is not None or ends_alone(options)
        placement_name = choose(need, free, 1 if unsharded else world.size)
    sharing_size = {"replicated": 1, "zero3": world.size}.get(placement_name) or _sharing(options)
    if placement_name == "expert_parallel":
        check_experts(meta_target.model, sharing_size)
    placement = Placement(
        placement_name,
        sharing_size,
        need,
        4 * trainable(drafter),
        meta_target.shape,
        experts_of(meta_target.model),
        drafter.trained,
    )
    if placement.shared:
        _check_shared(options, placement, drafter, free)
    libraries = "" if device_of(target.device).type == "cuda" else " beside the libraries' own"
    say(f"placement: {placement_name}, about {_figures(placement)}{libraries}, of {format_bytes(free)} free in each process")
    return placement


def built(options: RunOptions, target: Target) -> Drafter:
    """Build the drafter for this target. Raises UserError for options that do not fit."""
    try:
        return families()[options.drafter.family].build(for_target(options, target.shape).drafter, target)
    except UserError:
        raise
    except ValueError as error:  # a drafter's own checks of options against the target
        raise UserError(str(error)) from error


def load_for_training(options: RunOptions, found: Placement) -> LoadedTarget:
    """Load the whole target for training. Raises UserError as `load_target` does."""
    if found.placement == "zero3":
        return _load(options, shards=ZeroShards(DTYPES[dtype_of(options.target)]))
    if found.placement == "tensor_parallel":
        return _load(options, part=part_among_neighbours(found.sharing), kind=RoundRobinTarget)
    if found.placement == "expert_parallel":
        return _load(options, part=part_among_neighbours(found.sharing), kind=DispatchedTarget)
    return _load(options)


def _load(options: RunOptions, **placed: Any) -> LoadedTarget:
    """The target, with the chat template that the data have: it is measured with the prompts that it is trained on."""
    loaded = load_target(options.target, **placed)
    if options.data.template is not None:
        loaded.tokenizer.chat_template = read_template(options.data.template)
    return loaded


@contextmanager
def target_to_measure(
    options: RunOptions, found: Placement, loaded: LoadedTarget, world: World
) -> Iterator[LoadedTarget | None]:
    """The target for the measurement after training; None on processes that take no part in it.

    A replicated target is kept. A shared target is freed and loaded again: whole on rank 0 if it fits there, else split among
    the processes of rank 0's machine, which measure in lock step.
    """
    if found.shared and options.measure.enabled:
        loaded.target.free()
        gc.collect()
        device = device_of(options.target.device)
        if not world.share(found.measured <= free_bytes(device, 1)):
            with _in_lock_step(options, found, world) as split:
                yield split
            return
    leave_world(world)
    gc.collect()
    if found.shared and options.measure.enabled and world.first:
        target = replace(options.target, placement="replicated", tensor_parallel=1, expert_parallel=1)
        loaded = _load(replace(options, target=target))
    yield loaded if world.first else None


@contextmanager
def _in_lock_step(options: RunOptions, placement: Placement, world: World) -> Iterator[LoadedTarget | None]:
    shared_options = _measuring(options, placement)
    _, size = shared_options.shared_by
    group = distributed.new_group(list(range(size)))
    if world.rank >= size:
        yield None
        return
    part = Part(world.rank, size, group)
    with only_first_prints(part):
        yield _load(replace(options, target=shared_options), part=part)
    leave(part)


def _check_shared(options: RunOptions, placement: Placement, drafter: Drafter, free: int) -> None:
    """Raise UserError for settings that a shared target does not support."""
    check_options(options.target, shared=True)
    remedy = "set target.placement=replicated"
    if drafter.adapts is not None:
        raise UserError(f"target.placement is {placement.placement}, but an adapter needs the whole target; {remedy}")
    if options.decode.tree_nodes is None and drafter.proposal.tunable:
        raise UserError(
            f"decode.tree_nodes=null needs the whole target in one process, but target.placement is {placement.placement}; "
            f"set decode.tree_nodes, or {remedy}"
        )
    collective = placement.placement in ("tensor_parallel", "expert_parallel") and options.features.name == "online"
    if collective and options.target.prefetch:
        raise UserError(
            f"target.prefetch is true, but target.placement is {placement.placement}: the target's collectives would run "
            "beside the gradients', in another group, which NCCL may not do safely; set target.prefetch=false, or "
            "target.placement=zero3 or replicated"
        )
    if placement.placement == "tensor_parallel" and options.train.sequence_parallel > 1:
        raise UserError(
            f"train.sequence_parallel is {options.train.sequence_parallel}, but target.placement=tensor_parallel splits the "
            "target's heads; set target.placement=zero3 or replicated"
        )
    if placement.placement in ("zero3", "expert_parallel") and options.target.runner == "fast":
        raise UserError(
            f"target.runner=fast needs whole weights, but target.placement is {placement.placement}; set target.runner=hf, "
            f"or {remedy}"
        )
    if options.measure.enabled and placement.measured > free:
        _measuring(options, placement)


def _requested(options: RunOptions) -> str:
    """The placement that the user set; auto if none."""
    setting, size = options.target.shared_by
    return setting.removeprefix("target.") if size != 1 else options.target.placement


def _sharing(options: RunOptions) -> int:
    """Number of processes that share a target: the configured one, else all of this machine, or for experts all of the run."""
    _, size = options.target.shared_by
    if size != 1:
        return size
    return _processes() if options.target.placement == "expert_parallel" else _neighbours()


def _measuring(options: RunOptions, placement: Placement) -> TargetOptions:
    """The target's options for processes that measure it together, because it is too large for one.

    Raises UserError if no number of processes works.
    """
    target, shape, max_size = options.target, placement.shape, _neighbours()
    if target.tensor_parallel != 1 or 1 < target.expert_parallel <= max_size:
        return target
    for size in range(max_size, 1, -1):
        if placement.experts and placement.experts % size == 0:
            return replace(target, expert_parallel=size)
        if not placement.experts and shape.kv_heads % size == shape.intermediate_size % size == 0:
            return replace(target, tensor_parallel=size)
    dimension = f"{placement.experts} experts" if placement.experts else f"{shape.kv_heads} KV heads"
    raise UserError(
        f"measuring needs the whole target in one process, or at most {max_size} processes whose number divides its "
        f"{dimension}; set measure=off and measure it on another machine"
    )


def _neighbours() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _processes() -> int:
    """Processes of this run."""
    return int(os.environ.get("WORLD_SIZE", _neighbours()))


def _figures(placement: Placement) -> str:
    target_bytes, need = placement.need.of_target(placement.placement, placement.sharing), placement.need
    sizes = {"target": target_bytes, "drafter and optimizer": need.drafter, "activations": need.activations}
    breakdown = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return f"{format_bytes(need.total(placement.placement, placement.sharing))} ({breakdown})"


def state_bytes(parameters: int, options: TrainOptions, deepspeed: DeepSpeedOptions, processes: int, frozen: int = 0) -> int:
    """Bytes on the device. At stage 0 in float32 the optimiser steps the weights themselves; otherwise it has a copy.

    parameters: that are trained. frozen: further ones, which have neither gradients nor moments.
    """
    itemsize = 2 if options.precision == "bfloat16" else 4
    has_master = deepspeed.zero_stage > 0 or itemsize == 2
    sizes = {"optimiser": MOMENTS + has_master * MASTER, "gradients": itemsize, "sums": 0, "weights": itemsize}
    if itemsize == 2 and deepspeed.zero_stage == 0:  # there the gradients themselves are float32
        sizes["gradients"] = SUM
    elif itemsize == 2 and options.global_batch * options.sequence_parallel > options.micro_batch * processes:
        sizes["sums"] = SUM
    if deepspeed.offload_optimizer:
        sizes["optimiser"] = 0
    if deepspeed.offload_parameters:
        sizes["weights"] = 0
    counts = dict.fromkeys(sizes, parameters) | {"weights": parameters + frozen}
    return sum(
        counts[state_name] * size // (processes if deepspeed.zero_stage >= SHARDED_FROM[state_name] else 1)
        for state_name, size in sizes.items()
    )


@dataclass(frozen=True, slots=True)
class Ready:
    """What a caller of the Python API has in memory already, and a command then does not load again.

    A whole target in this process, a drafter for it, and the conversations to train on.
    """

    loaded: LoadedTarget
    drafter: Drafter
    start: dict[str, Tensor] | None = None  # weights to begin with after the family has prepared itself from the data
    records: Records | None = None  # conversations; None: those that the options name
    quiet: bool = False  # print nothing

    @property
    def place(self) -> Placement:
        """The target is there already: nothing is estimated."""
        return Placement("replicated", 1, Need(0, 0, 0, 0, 0), 0, self.loaded.target.shape)
