"""A mixture of experts over several processes: each holds a share of every block's experts, and the rest whole.

The scheme is GShard's (arXiv 2006.16668, section 3). `dispatched` serves training, where each process has its own tokens: a
token's state goes to the processes that have its experts, and their results come back. `summed` serves decoding in lock step,
where all processes have the same tokens: each computes the results of its own experts, and an all-reduce adds them up, so that
all processes see the same bits.

Order of sums: `dispatched` adds up the results of a token's experts in the router's order, in the token's own process, as
transformers' grouped product does. `summed` adds up those of each process first.

Checkpoints hold experts in two ways: as tensors of their own (`experts.7.down_proj.weight`), of which `load_share` leaves out
the others', or one after another in a tensor (`experts.down_proj`), of which it reads this process's.

Shapes: T tokens, K experts of a token, S pairs of a token and an expert, E experts of the whole target, H hidden.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.parallel import Part
from drafttrain.targets.structure import fingerprint_of, sample_of, sampled_places
from drafttrain.targets.weights import check_files, model_class

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # (state_SH, expert_SK, weight_SK) -> [S, H]
WHOLE_BLOCKS = "choose a family with its own layers, or a target that fits one device"
NUMBERED = re.compile(r"\bexperts\.(\d+)\.")
STACKED = re.compile(r"\bexperts\.\D")
FILES = ["model*.safetensors*", "*.json"]  # of a model on the hub


def find_experts(model: nn.Module) -> list[Any]:
    """The modules that hold a block's routed experts, one after another in the first dimension of all their parameters."""
    return [module for module in model.modules() if _holds_experts(module)]


def _holds_experts(module: Any) -> bool:
    parameters = list(module.parameters(recurse=False))
    count = getattr(module, "num_experts", None)
    stacked = isinstance(count, int) and any(p.ndim == 3 for p in parameters) and all(p.shape[0] == count for p in parameters)
    return stacked and len(inspect.signature(module.forward).parameters) == 3  # states, experts and weights of tokens


def experts_of(model: nn.Module) -> int:
    """The number of routed experts of every block that has some; 0: a dense model, or one whose blocks differ in it."""
    counts = {module.num_experts for module in find_experts(model)}
    return int(counts.pop()) if len(counts) == 1 else 0


def check_experts(model: nn.Module, size: int) -> None:
    """Raise UserError unless `size` processes can share the model's experts."""
    count, setting = experts_of(model), f"target.expert_parallel is {size}"
    if not count:
        reason = f"{type(model).__name__} has no routed experts, or not the same number in all of its blocks"
        raise UserError(f"{setting}, but {reason}; leave target.expert_parallel out")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"{setting}, but the checkpoint's weights are quantised; leave target.expert_parallel out")
    if count % size:
        sizes = [str(n) for n in range(2, count + 1) if count % n == 0]
        raise UserError(f"{setting}, which does not divide the target's {count} experts; set it to {' or '.join(sizes)}")


def expert_size(model: nn.Module) -> int:
    """The number of the parameters of all experts that the model has."""
    return sum(p.numel() for module in find_experts(model) for p in module.parameters(recurse=False))


def whole_size(model: nn.Module, size: int) -> int:
    """The number of parameters of the whole model, of whose experts this one has one of `size` shares."""
    return sum(p.numel() for p in model.parameters()) + (size - 1) * expert_size(model)


@torch.no_grad()
def keep_share(model: nn.Module, part: Part) -> None:
    """Keep this process's share of the experts' parameters."""
    for module in find_experts(model):
        module.num_experts //= part.size
        for name, parameter in list(module.named_parameters(recurse=False)):
            local_rows = parameter.chunk(part.size)[part.rank].clone()
            setattr(module, name, nn.Parameter(local_rows, requires_grad=parameter.requires_grad))


def dispatched(part: Part, experts: Experts, own: int, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """[T, H]: the weighted sums of the results of each token's experts, wherever these are. Each process passes its own tokens.

    experts: this process's, numbered from 0. own: how many these are.
    """
    expert_S, K = expert_TK.flatten(), expert_TK.shape[1]
    order_S = expert_S.argsort(stable=True)  # by process, and by expert within it
    count_E = expert_S.bincount(minlength=own * part.size)
    taken_E = part.exchanged(count_E, [own] * part.size, [own] * part.size)  # pairs of each process for each of these experts
    send_counts, recv_counts = torch.stack([count_E, taken_E]).view(2, part.size, own).sum(2).tolist()
    state_SH = part.exchanged(x_TH[order_S // K], send_counts, recv_counts)
    number_S = torch.arange(own, device=x_TH.device).repeat(part.size).repeat_interleave(taken_E)
    result_SH = part.exchanged(_results(experts, state_SH, number_S), recv_counts, send_counts)
    placed_SH = torch.empty_like(result_SH)
    placed_SH[order_S] = result_SH
    return (placed_SH.unflatten(0, expert_TK.shape) * weight_TK[..., None]).sum(1).to(x_TH.dtype)


def summed(part: Part, experts: Experts, own: int, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """As `dispatched`, where all processes pass the same tokens."""
    expert_S, K = expert_TK.flatten(), expert_TK.shape[1]
    local_S = (expert_S // own == part.rank).nonzero()[:, 0]
    result_SH = _results(experts, x_TH[local_S // K], expert_S[local_S] - part.rank * own) * weight_TK.flatten()[local_S, None]
    placed_SH = result_SH.new_zeros(len(expert_S), x_TH.shape[1])
    placed_SH[local_S] = result_SH
    return part.sum(placed_SH.unflatten(0, expert_TK.shape).sum(1)).to(x_TH.dtype)


def _results(experts: Experts, state_SH: Tensor, number_S: Tensor) -> Tensor:
    """[S, H]: each pair's result, without its weight."""
    if not len(number_S):
        return state_SH
    return experts(state_SH, number_S[:, None], state_SH.new_ones(len(number_S), 1))


class ExpertTarget(HFTarget):
    """As HFTarget, for a model that has this process's experts. All processes make the same calls, in the same order."""

    combine = staticmethod(summed)
    shared_by = "target.expert_parallel"
    capture_reason = "processes share its experts"

    def __init__(self, model: PreTrainedModel, part: Part, stop_ids: frozenset[int] = frozenset()) -> None:
        self.part = part
        for module in find_experts(model):
            module.forward = partial(self.combine, part, module.forward, module.num_experts)
        super().__init__(model, stop_ids)

    def _fingerprint(self) -> str:
        """That of the whole model."""
        expert_param_ids = {id(p) for module in find_experts(self.model) for p in module.parameters(recurse=False)}
        return fingerprint_of(self.model, sample=lambda p: self._sample(p) if id(p) in expert_param_ids else sample_of(p))

    def _sample(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], Tensor]:
        """As `sample_of`, of the parameter that has all processes' experts."""
        count, part = parameter.numel(), self.part
        index_S = sampled_places(count * part.size).to(parameter.device) - part.rank * count
        local_S = (index_S >= 0) & (index_S < count)
        sample_S = torch.where(local_S, parameter.flatten()[index_S.clamp(0, count - 1)], 0)
        return (parameter.shape[0] * part.size, *parameter.shape[1:]), part.sum(sample_S)

    def pruned(self, blocks: int) -> NoReturn:
        raise UserError(
            f"this drafter copies whole blocks of the target, and each of {self.part.size} processes that share it "
            f"holds some of their experts; {WHOLE_BLOCKS}"
        )


class DispatchedTarget(ExpertTarget):
    """An ExpertTarget for training: each process passes its own sequences."""

    combine = staticmethod(dispatched)

    def shallow(self, blocks: int) -> NoReturn:
        raise UserError(
            "this drafter runs the target's first blocks by themselves, and their experts are shared by processes; "
            f"{WHOLE_BLOCKS}"
        )


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some rows of a tensor in a file, which are read when transformers asks for the tensor."""

    tensor: Any  # safetensors' slice
    first: int
    end: int

    def __getitem__(self, everything: Any) -> Tensor:
        rows: Tensor = self.tensor[self.first : self.end]
        return rows.clone()  # a view would keep all rows

    def get_shape(self) -> list[int]:
        return [self.end - self.first, *self.tensor.get_shape()[1:]]

    def get_dtype(self) -> str:
        return str(self.tensor.get_dtype())


def load_share(path: str, part: Part, **settings: Any) -> tuple[Any, Any]:
    """(model, transformers' report on its tensors), with this process's share of the experts.

    settings: arguments of `from_pretrained`. Raises UserError for a dense model, and a number of experts that the processes do
    not divide, before weights are read.
    """
    shared = {name: settings[name] for name in ("revision", "trust_remote_code") if name in settings}
    config = AutoConfig.from_pretrained(path, **shared)
    with torch.device("meta"):
        bare = model_class(config).from_config(config, trust_remote_code=shared.get("trust_remote_code", False))
    check_experts(bare, part.size)
    local_experts, expert_params = (
        experts_of(bare) // part.size,
        [p for m in find_experts(bare) for p in m.parameters(recurse=False)],
    )
    directory = Path(path)
    if not directory.is_dir():
        directory = Path(snapshot_download(path, revision=shared.get("revision"), allow_patterns=FILES))
    share_cls = _kind_of_share(type(bare), part)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "pt")) for file in check_files(directory, path)]
        tensors = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        share_tensors = _share_of(
            tensors, {tuple(p.shape) for p in expert_params}, part.rank * local_experts, (part.rank + 1) * local_experts
        )
        loaded = share_cls.from_pretrained(None, config=config, state_dict=share_tensors, **settings)
    model: Any = loaded[0]
    model.__class__ = type(bare)
    with suppress(OSError):  # many have none
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, loaded[1]


def _kind_of_share(model_cls: Any, part: Part) -> Any:
    """The model's class, whose models are made with this process's share of the experts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model_cls.__init__(self, *args, **kwargs)
        keep_share(self, part)

    return type(model_cls.__name__, (model_cls,), {"__init__": init, "__module__": model_cls.__module__})


def _share_of(tensors: dict[str, Any], shapes: set[tuple[int, ...]], first: int, end: int) -> dict[str, Any]:
    """The tensors of a checkpoint, of each block's experts only those within first and end. shapes: of experts' parameters."""
    share_tensors: dict[str, Any] = {}
    for name, tensor in tensors.items():
        numbered = NUMBERED.search(name)
        if numbered is None:
            share_tensors[name] = (
                TensorRows(tensor, first, end) if _is_stacked(name, tuple(tensor.get_shape()), shapes) else tensor
            )
        elif first <= int(numbered[1]) < end:
            share_tensors[name] = tensor
    return share_tensors


def _is_stacked(name: str, shape: tuple[int, ...], shapes: set[tuple[int, ...]]) -> bool:
    """Whether a tensor holds all experts of a block. The name tells, or else the shape, if it is that of matrices."""
    if STACKED.search(name):
        return any(shape[:1] == expert_shape[:1] for expert_shape in shapes)
    return len(shape) == 3 and shape in shapes
