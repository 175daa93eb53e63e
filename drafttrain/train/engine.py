"""The only file that imports DeepSpeed: processes, optimisation, and the training state on disk."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.errors import UserError
from drafttrain.train import DeepSpeedOptions, TrainOptions


@dataclass(frozen=True, slots=True)
class World:
    """This process among all: rank 0 speaks to the user and writes."""

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
        """Rank 0's value, on every process. Plain values only."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


def join_world(device: torch.device) -> World:
    """Start the process group from torchrun's environment; a lone process makes a group of its own, once."""
    if not torch.distributed.is_initialized():
        lone = {} if "RANK" in os.environ else _lone_environment()
        os.environ |= lone
        with _hushed():
            backend = "nccl" if device.type == "cuda" else "gloo"
            _deepspeed().init_distributed(backend, verbose=False, timeout=timedelta(minutes=30))
        for name in lone.keys() - {"LOCAL_RANK"}:  # processes started from here are no part of this group
            del os.environ[name]
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size())


def _lone_environment() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def leave_world(world: World) -> None:
    """End the group of several processes. A lone process keeps its own: the next run of a sweep trains in it."""
    if world.size > 1:
        world.wait()
        torch.distributed.destroy_process_group()


def _deepspeed() -> Any:
    """DeepSpeed without its shared-memory collectives for CPUs: a build of minutes for a call that training never makes."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = dict(deepspeed.ops.__compatible_ops__) | {"deepspeed_shm_comm": False}
    return deepspeed


@contextmanager
def _hushed() -> Iterator[None]:
    """DeepSpeed prints notes of its own while it starts; what goes wrong is raised, not printed."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class Engine:
    """One optimised module. `backward` per micro-batch, then `step` once per global batch.

    objective: forward(batch) gives (sum of losses, counts). Gradients are averaged over processes and accumulation
    steps by DeepSpeed, which `backward` undoes: the caller's divisor alone normalises the loss.
    """

    def __init__(
        self,
        objective: nn.Module,
        options: TrainOptions,
        deepspeed: DeepSpeedOptions,
        world: World,
        apart: nn.Module | None = None,
    ) -> None:
        """apart: a part of the objective whose learning rate is another one."""
        self.world, self.stage = world, deepspeed.zero_stage
        self.accumulation = accumulation(options, world)
        trained = [p for p in objective.parameters() if p.requires_grad]
        other = set() if apart is None else set(apart.parameters())
        groups = [[p for p in trained if p not in other], [p for p in trained if p in other]]
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups if group],
            lr=options.lr,
            betas=(options.betas[0], options.betas[1]),
            weight_decay=options.weight_decay,
        )
        library = _deepspeed()
        with _hushed():
            self.engine, self._wrapped, _, _ = library.initialize(
                model=objective,
                model_parameters=trained,
                optimizer=self._optimizer,
                config=settings(options, deepspeed, self.accumulation),
            )
        self._gathered = library.zero.GatheredParameters

    def backward(self, loss: Tensor, divisor: float) -> None:
        """Accumulate the gradient of loss / divisor, where loss is this micro-batch's sum on this process."""
        self.engine.backward(loss * (self.world.size * self.accumulation / divisor))

    def forward(self, batch: Any, progress: float) -> Any:
        return self.engine(batch, progress)

    def step(self, lr: float, scale: float = 1.0) -> float:
        """One optimiser step at this rate, what stands apart at `scale` times it; the norm of the gradient before clipping."""
        for number, group in enumerate(self._wrapped.param_groups):
            group["lr"] = lr * scale if number else lr
        before = self._norm() if self.stage == 0 else 0.0
        self.engine.step()
        known = self.engine.get_global_grad_norm()
        return before if known is None else float(known)

    def micro_done(self) -> None:
        """Between micro-batches of one global batch: DeepSpeed counts its boundary by calls of `step`."""
        self.engine.step()

    def _norm(self) -> float:
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The module with all parameters in place on every process (ZeRO-3 shards them otherwise)."""
        parameters = list(self.engine.module.parameters())
        context = self._gathered(parameters, modifier_rank=None) if self.stage == 3 else contextlib.nullcontext()
        with context:
            yield self.engine.module

    def save_state(self, directory: Path) -> None:
        """This process's share of the optimiser: master weights and moments, as safetensors."""
        tensors = {}
        for name, parameter in self._shares():
            tensors[f"{name}.weight"] = parameter.detach()
            tensors |= {f"{name}.{key}": value for key, value in self._base.state[parameter].items()}
        plain = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        save_file(plain, directory / f"optimizer-{self.world.rank:05d}.safetensors")
        if self.world.first:
            (directory / "optimizer.json").write_text(json.dumps({"processes": self.world.size, "zero_stage": self.stage}))

    def load_state(self, directory: Path, weights: dict[str, Tensor]) -> None:
        """Take up `save_state` and the module's weights. Raises UserError for another number of processes or ZeRO stage."""
        saved = json.loads((directory / "optimizer.json").read_text())
        if (saved["processes"], saved["zero_stage"]) != (self.world.size, self.stage):
            raise UserError(
                f"{directory} was written by {saved['processes']} processes at ZeRO stage {saved['zero_stage']}, "
                f"this run has {self.world.size} at stage {self.stage}; resume with the same, or start anew without resume"
            )
        module = self.engine.module
        parameters = dict(module.named_parameters(remove_duplicate=False))  # a tied matrix has two names
        parameters |= dict(module.named_buffers())
        gathered = self._gathered(list(module.parameters()), modifier_rank=0) if self.stage == 3 else contextlib.nullcontext()
        with gathered, torch.no_grad():
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)
        tensors = load_file(directory / f"optimizer-{self.world.rank:05d}.safetensors")
        with torch.no_grad():
            for name, parameter in self._shares():
                parameter.copy_(tensors.pop(f"{name}.weight"))
                keys = [key for key in tensors if key.startswith(f"{name}.")]
                self._base.state[parameter] = {key.removeprefix(f"{name}."): tensors.pop(key) for key in keys}
        assert not tensors, f"optimizer state has unknown entries {list(tensors)[:3]}"

    @property
    def _base(self) -> torch.optim.Optimizer:
        """The torch optimiser inside whatever DeepSpeed wrapped around it."""
        return getattr(self._wrapped, "optimizer", self._wrapped)

    def _shares(self) -> Iterator[tuple[str, Tensor]]:
        """What this process optimises, named. ZeRO-3 shows its partitions to the optimiser only while it steps."""
        if self.stage == 3:
            yield from ((str(i), part) for i, part in enumerate(self._wrapped.fp32_partitioned_groups_flat))
            return
        for g, group in enumerate(self._base.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield f"{g}.{i}", parameter


def accumulation(options: TrainOptions, world: World) -> int:
    """Micro-batches of one process per step. Raises UserError when the batch does not divide."""
    share = options.micro_batch * world.size
    if options.micro_batch < 1 or options.global_batch < 1 or options.global_batch % share:
        fitting = share * max(1, options.global_batch // max(share, 1))
        raise UserError(
            f"train.global_batch is {options.global_batch}; it must be a multiple of train.micro_batch {options.micro_batch} "
            f"x {world.size} processes: set it to {fitting} or lower train.micro_batch"
        )
    return options.global_batch // share


def settings(options: TrainOptions, deepspeed: DeepSpeedOptions, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Raises UserError for a stage or precision it does not have."""
    if deepspeed.zero_stage not in (0, 1, 2, 3):
        raise UserError(f"deepspeed.zero_stage is {deepspeed.zero_stage}; choose 0, 1, 2 or 3")
    if options.precision not in ("float32", "bfloat16"):
        raise UserError(f"train.precision is {options.precision!r}; choose float32 or bfloat16")
    if len(options.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in options.betas):
        raise UserError(f"train.betas is {list(options.betas)}; give two numbers from 0 to below 1")
    zero: dict[str, Any] = {"stage": deepspeed.zero_stage}
    if deepspeed.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if deepspeed.offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": options.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.precision == "bfloat16"},
        "steps_per_print": 2**31,
    } | deepspeed.extra
