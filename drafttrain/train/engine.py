"""The DeepSpeed engine: processes, optimiser steps, and the training state on disk. Only this file imports DeepSpeed."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.core.sequence_shard import is_part
from drafttrain.objective.losses import Objective
from drafttrain.targets.devices import bind, number_by_gpu
from drafttrain.targets.parallel import end_at_exit, meeting
from drafttrain.train import DeepSpeedOptions, TrainOptions, shards
from drafttrain.train.compiled import check
from drafttrain.train.optimizer import Matrix, MuonWithAdamW, Refusal, make_optimizer
from drafttrain.train.shards import ParameterShard

# Gradients that are reduced at once while the backward pass goes on, in elements. Large enough for full bandwidth, and a small
# part of a drafter; DeepSpeed's default of 5e8 holds all of most drafters, so that nothing would overlap, and takes 1 to 2 GB.
BUCKET = 5 * 10**7
# torchrun's variables for a process that is alone. Port 0: any free one, which no other process can take before.
LONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, and the rank of this one. Rank 0 prints and writes."""

    rank: int
    size: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The element-wise sum over all processes, on every process."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every process. The value must be picklable."""
        if self.size == 1:
            return value
        objects = [value]
        torch.distributed.broadcast_object_list(objects, src=0)
        return objects[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value by rank, on all processes. Values must be picklable."""
        values = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            torch.distributed.barrier()


def join_world(device: torch.device, hang_timeout: float = 0.0) -> World:
    """Join the process group of torchrun's environment. A single process makes its own group, once.

    device: this process's device. hang_timeout: seconds after which a hanging step is reported; collectives time out later.
    """
    bind(device)
    os.environ["DS_ACCELERATOR"] = device.type  # read when DeepSpeed is imported; without it DeepSpeed prefers a GPU
    initialized = torch.distributed.is_initialized()
    single_env = {} if initialized or "RANK" in os.environ else LONE
    os.environ |= single_env
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed looks for MPI without it
    number_by_gpu(device)
    if not initialized:
        try:
            with hushed():
                backend, deepspeed = "nccl" if device.type == "cuda" else "gloo", load_deepspeed()
                with contextlib.nullcontext() if single_env else meeting():
                    deepspeed.init_distributed(backend, verbose=False, timeout=timedelta(minutes=30, seconds=hang_timeout))
            end_at_exit()
        finally:
            for name in single_env.keys() - {"LOCAL_RANK"}:  # child processes must not join this group
                del os.environ[name]
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size())


def leave_world(world: World) -> None:
    """Destroy the group of several processes. A single process keeps its group for the next run of a sweep."""
    if world.size > 1:
        world.wait()
        torch.distributed.destroy_process_group()


def load_deepspeed() -> Any:
    """Import DeepSpeed, without its shared-memory collectives for CPUs: they take minutes to build and training needs none."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = dict(deepspeed.ops.__compatible_ops__) | {"deepspeed_shm_comm": False}
    return deepspeed


def head_exchange() -> Callable[..., Tensor]:
    """DeepSpeed Ulysses' all-to-all: (group, x, scattered dimension, gathered dimension, batch dimension) -> x."""
    load_deepspeed()
    from deepspeed.sequence.layer import _SeqAllToAll

    all_to_all: Callable[..., Tensor] = _SeqAllToAll.apply
    return all_to_all


@contextmanager
def hushed() -> Iterator[None]:
    """Suppress what DeepSpeed prints while it starts. It raises errors, it does not print them."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class TrainingEngine:
    """Trains one objective: `backward` per micro-batch, then `step` once per global batch.

    objective: forward(batch) gives (sum of losses, counts). DeepSpeed averages gradients over processes and accumulation steps;
    `backward` undoes that, so that only the caller's divisor normalises the loss.
    """

    def __init__(
        self,
        objective: Objective,
        options: TrainOptions,
        deepspeed: DeepSpeedOptions,
        world: World,
        rescaled: nn.Module | None = None,
    ) -> None:
        """rescaled: a part of the objective with a scaled learning rate, see `step`."""
        self.world, self.stage = world, deepspeed.zero_stage
        self.accumulation = accumulation(options, world)
        names = {p: name for name, p in objective.named_parameters() if p.requires_grad}
        self._summed = list(names) if self.stage == 0 and options.precision == "bfloat16" else []
        self._optimizer = make_optimizer(objective, options, rescaled)
        self._groups = [[(names[p], p) for p in group["params"]] for group in self._optimizer.param_groups]
        library = load_deepspeed()
        with hushed():
            self.engine, self._wrapped, _, _ = library.initialize(
                model=objective,
                model_parameters=list(names),
                optimizer=self._optimizer,
                config=settings(options, deepspeed, self.accumulation),
            )
        for parameter in self._summed:
            parameter.grad_dtype = torch.float32
        self._gathered = library.zero.GatheredParameters
        self._norm_before = torch.zeros(())
        self._refused: Tensor | None = None
        Refusal(self._base, self._refusal)
        if isinstance(self._optimizer, MuonWithAdamW):
            self._optimizer.muon.spread(self._matrices(), world.rank, self.engine.device)

    def backward(self, loss: Tensor, divisor: float) -> None:
        """Accumulate the gradient of loss / divisor, where loss is this micro-batch's sum on this process.

        Micro-batches and processes are added in float32, also where the drafter is bfloat16: a sum of many small terms would
        stop to grow in bfloat16. DeepSpeed does it from stage 1 on (`settings`), torch at stage 0.
        """
        for parameter in self._summed:
            if parameter.grad is None:  # DeepSpeed would set one of the parameter's dtype where the loss does not reach it
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        self.engine.backward(loss * (self.world.size * self.accumulation / divisor))

    def forward(self, batch: Any, progress: float) -> Any:
        return self.engine(batch, progress)

    def step(self, lr: float, scale: float = 1.0, refused: Tensor | None = None) -> Tensor:
        """Run one optimiser step and return the gradient norm before clipping, maybe on the device.

        With a norm that is not finite the step changes nothing, on any process. scale: factor of lr for the `rescaled` part.
        refused: not 0 where the step must change nothing for another reason; the same on every process, maybe on the device.
        """
        for group in self._wrapped.param_groups:
            group["lr"] = lr * scale if group["rescaled"] else lr
        local_norm = self._norm() if self.stage == 0 else torch.zeros(())
        self._norm_before, self._refused = local_norm, refused
        self.engine.step()
        global_norm = self.engine.get_global_grad_norm()
        return local_norm if global_norm is None else torch.as_tensor(global_norm)

    def _refusal(self) -> Tensor:
        """Not 0 where the current step must change nothing. DeepSpeed's norm is one of all processes, known before its step."""
        norm = getattr(self._wrapped, "_global_grad_norm", None)
        norm = self._norm_before if norm is None else torch.as_tensor(norm)
        fault = ~norm.isfinite() | (norm < 0)  # -1: what DeepSpeed writes for NaN
        return fault if self._refused is None else fault.to(self._refused.device) | (self._refused != 0)

    def micro_done(self) -> None:
        """Between micro-batches of one global batch: DeepSpeed counts its boundary by calls of `step`."""
        self.engine.step()

    def _norm(self) -> Tensor:
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())

    def whole_state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors of the module, on the host of rank 0; empty on other ranks. Sharded tensors are gathered one by one."""
        tensors, state = self._tensors(), {}
        for name in names:
            with self._whole_tensor(tensors[name]):
                if self.world.first:
                    state[name] = tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        return state

    def save_state(self, directory: Path) -> Path:
        """Write this process's part of the optimiser state (master weights and moments) and return the file."""
        file = directory / f"optimizer-{self.world.rank:05d}.safetensors"
        shards.write(self._shards(), self._base.state, file)
        return file

    def load_state(self, directory: Path, weights: dict[str, Tensor]) -> None:
        """Load the module's weights and this process's part of the optimiser state.

        The state may come from `save_state` of any number of processes at any ZeRO stage.
        """
        tensors = self._tensors()
        for name in sorted(weights):  # in one order on every process
            with self._whole_tensor(tensors[name], modifier_rank=0), torch.no_grad():
                tensors[name].copy_(weights[name])
        shards.read(self._shards(), self._base.state, directory)
        if any(group.get("fused") or group.get("capturable") for group in self._base.param_groups):
            for owner, state in self._base.state.items():  # these count on the device
                state |= {key: value.to(owner.device) for key, value in state.items() if torch.is_tensor(value)}

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name. A tied matrix has two names."""
        module = self.engine.module
        return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))

    def _whole_tensor(self, tensor: Tensor, modifier_rank: int | None = None) -> AbstractContextManager[Any]:
        sharded = self.stage == 3 and is_part(tensor)
        return self._gathered([tensor], modifier_rank=modifier_rank) if sharded else contextlib.nullcontext()

    @property
    def _base(self) -> torch.optim.Optimizer:
        """The torch optimiser inside DeepSpeed's wrapper."""
        return getattr(self._wrapped, "optimizer", self._wrapped)

    def _shards(self) -> list[ParameterShard]:
        """This process's shard of each trained parameter, from DeepSpeed's maps of its flat partitions.

        The maps are private to DeepSpeed, which does not say publicly which elements of a parameter a process optimises. With
        them a checkpoint is in elements, and any number of processes at any stage can read it.
        """
        local_shards = []
        for g, group in enumerate(self._groups):
            for i, (name, parameter) in enumerate(group):
                if is_part(parameter):
                    local_shards.append(self._sharded(name, parameter))
                elif not hasattr(parameter, "_hp_mapping"):  # stage 0: every process has the whole, and saves an equal part
                    size = parameter.numel()
                    bounds = [size * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1)]
                    local_shards.append(
                        ParameterShard(name, 0, size, self._base.param_groups[g]["params"][i], 0, range(*bounds))
                    )
                elif (mapping := parameter._hp_mapping) is not None:  # stages 1, 2: None where another process has it
                    flat, lp, hp = (
                        self._base.param_groups[g]["params"][0],
                        mapping.lp_fragment_address,
                        mapping.hp_fragment_address,
                    )
                    local_shards.append(ParameterShard(name, lp.start, lp.numel, flat, hp.start, range(lp.numel)))
        return local_shards

    def _matrices(self) -> list[Matrix]:
        """The matrices that Muon optimises, with the elements that each process has."""
        local = {shard.name: shard for shard in self._shards()}
        ranges_by_rank = self.world.gather({name: (shard.start, shard.start + shard.length) for name, shard in local.items()})
        matrices = []
        for group, named_parameters in zip(self._base.param_groups, self._groups, strict=True):
            for name, parameter in named_parameters if group["muon"] else []:
                owner, offset = (local[name].owner, local[name].offset) if name in local else (group["params"][0], 0)
                ranges = tuple(range(*rank_ranges.get(name, (0, 0))) for rank_ranges in ranges_by_rank)
                matrices.append(Matrix(tuple(getattr(parameter, "ds_shape", parameter.shape)), owner, offset, ranges))
        return matrices

    def _sharded(self, name: str, parameter: Any) -> ParameterShard:
        """ZeRO-3 cuts each parameter into equal parts, the last ones padded."""
        group, offset, padded_size = self._wrapped.grad_position[self._wrapped.get_param_id(parameter)]
        start = min(self.world.rank * padded_size, parameter.ds_numel)
        length = min(padded_size, parameter.ds_numel - start)
        return ParameterShard(name, start, length, self._wrapped.fp32_partitioned_groups_flat[group], offset, range(length))


def divided(options: TrainOptions, world: World) -> TrainOptions:
    """The options with the largest micro-batch, up to the configured one, that divides a process's share of the batch.

    Raises UserError if the batch cannot be divided among the processes, or the processes into groups of sequence_parallel.
    """
    per_sequence = options.sequence_parallel
    if world.size % per_sequence:
        raise UserError(
            f"train.sequence_parallel is {per_sequence}; set it to a divisor of the number of processes, {world.size}, by "
            "launcher.nproc or torchrun's --nproc-per-node"
        )
    quota, remainder = divmod(options.global_batch, world.size // per_sequence)
    if quota < 1 or remainder:
        processes = f"{world.size}" if per_sequence == 1 else f"{world.size} / train.sequence_parallel={per_sequence}"
        raise UserError(
            f"train.global_batch is {options.global_batch}; set it to a multiple of the number of processes, {processes}"
        )
    return replace(options, micro_batch=next(m for m in range(min(options.micro_batch, quota), 0, -1) if quota % m == 0))


def accumulation(options: TrainOptions, world: World) -> int:
    """Micro-batches per process and step. options: as `divided` returns them."""
    return options.global_batch * options.sequence_parallel // (options.micro_batch * world.size)


def settings(options: TrainOptions, deepspeed: DeepSpeedOptions, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Raises UserError for options that do not fit each other."""
    check(options.compile, deepspeed.zero_stage)
    if len(options.betas) != 2:
        raise UserError(f"train.betas is {list(options.betas)}; give two numbers")
    for name, stage in (("offload_optimizer", 1), ("offload_parameters", 3)):
        if getattr(deepspeed, name) and deepspeed.zero_stage < stage:
            raise UserError(f"deepspeed.{name} needs ZeRO stage {stage}, got {deepspeed.zero_stage}; set deepspeed=zero{stage}")
    zero_config: dict[str, Any] = {"stage": deepspeed.zero_stage}
    if deepspeed.zero_stage in (1, 2):  # stage 3 overlaps by default; without streams, on a CPU, it is only another order
        zero_config |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": BUCKET}
    if deepspeed.offload_optimizer:
        zero_config["offload_optimizer"] = {"device": "cpu"}
    if deepspeed.offload_parameters:
        zero_config["offload_param"] = {"device": "cpu"}
    bf16 = options.precision == "bfloat16"
    # stage 1 then has another optimiser, with float32 gradients of all parameters: only where there is something to add up
    grad_dtype = {"data_types": {"grad_accum_dtype": "fp32"}} if bf16 and accumulation > 1 and deepspeed.zero_stage else {}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": options.clip,
        "zero_optimization": zero_config,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    } | (grad_dtype | deepspeed.extra)
