"""The drafter's optimiser: AdamW, or Muon for hidden matrices and AdamW for the other parameters; its learning rate, and its
state as a file.

The learning rate is a function of the step alone, so that a resumed run needs no scheduler state.

A state is what `Optimizer.state_dict()` gives: dictionaries and lists of tensors, numbers, strings and None. In the file
tensors are tensors, and all else is JSON in its metadata. Nothing is pickled (decision 002).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr, _zeropower_via_newtonschulz

from drafttrain.core.errors import UserError
from drafttrain.objective.losses import Objective
from drafttrain.train import TrainOptions

MOMENTUM = 0.95


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, and the elements of it that each process steps."""

    shape: tuple[int, ...]
    owner: Tensor  # a parameter of the optimiser that contains this process's elements
    offset: int  # of this process's elements in `owner`
    parts: tuple[range, ...]  # by rank, elements of the flattened matrix: all of them on every process, or a part on each

    @property
    def replicated(self) -> bool:
        return all(len(span) == math.prod(self.shape) for span in self.parts)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") for matrices that are divided among processes.

    With Nesterov momentum, steps scaled to AdamW's (arXiv 2502.16982, section 2.2), and decoupled weight decay. Momentum is
    element-wise and stays with its elements. For orthogonalisation, one process gathers a whole matrix in bfloat16 (the dtype
    that torch computes in), and every process gets the update of its elements back. N processes take N matrices at a time.
    Matrices of similar size go together, so that no process waits and each holds at most one whole matrix. The
    orthogonalisation functions are torch's: for a matrix in a single process, results are bit for bit those of
    torch.optim.Muon.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None  # on the device: where it is not 0, a step changes nothing, as in torch's AdamW
        matrices = [p for group in self.param_groups for p in group["params"]]
        self.spread([Matrix(tuple(p.shape), p, 0, (range(p.numel()),)) for p in matrices], 0)

    def spread(self, matrices: Sequence[Matrix], rank: int, device: torch.device | None = None) -> None:
        """Set where the elements of the matrices are, before the first step. All processes list the same matrices in order.

        device: of orthogonalisation and exchange; None: that of the elements.
        """
        assert all(m.replicated or sum(map(len, m.parts)) == math.prod(m.shape) for m in matrices)
        self._rank, self._device = rank, device
        self._matrices = sorted(matrices, key=lambda m: (max(m.shape) * min(m.shape) ** 2, m.shape), reverse=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all groups. All processes call it together, with the same matrices. `params` are owners of matrices."""
        assert closure is None, "DeepSpeed steps without one"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(self._unless_refused(p.grad, momentum), 1 - MOMENTUM)
                decay_factor = 1 - group["lr"] * group["weight_decay"]
                p.mul_(decay_factor if self.found_inf is None else torch.where(self.found_inf > 0, 1.0, decay_factor))
            stepped_ids = {id(p) for p in parameters}
            matrices = [m for m in self._matrices if id(m.owner) in stepped_ids]
            processes = len(matrices[0].parts) if matrices else 1
            for start in range(0, len(matrices), processes):
                self._step_together(matrices[start : start + processes], group["lr"])

    def _step_together(self, matrices: Sequence[Matrix], lr: float) -> None:
        """Step at most one matrix per process. Each process orthogonalises the matrix of its rank."""
        local_matrix = matrices[self._rank] if self._rank < len(matrices) else None
        direction = self._whole(matrices, local_matrix)
        chunks: list[Tensor] = []
        if local_matrix is not None:
            coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
            orthogonal = _zeropower_via_newtonschulz(
                direction.view(local_matrix.shape), coefficients, DEFAULT_NS_STEPS, EPS
            ).reshape(-1)
            chunks = [orthogonal[span.start : span.stop] for span in local_matrix.parts]
        updates = self._exchange(chunks, [len(m.parts[self._rank]) for m in matrices], len(matrices[0].parts))
        for matrix, update in zip(matrices, updates, strict=False):
            elements = self._own(matrix, matrix.owner)
            rate = _adjust_lr(lr, "match_rms_adamw", torch.Size(matrix.shape))
            update = self._unless_refused(update, torch.zeros_like(update))
            elements.add_(update.to(elements.device), alpha=-rate)

    def _unless_refused(self, x: Tensor, fallback: Tensor) -> Tensor:
        return x if self.found_inf is None else torch.where(self.found_inf > 0, fallback, x)

    def _whole(self, matrices: Sequence[Matrix], local_matrix: Matrix | None) -> Tensor:
        """The whole flattened matrix of this process's rank; empty if there is none."""
        if all(m.replicated for m in matrices):
            return self._empty(0) if local_matrix is None else self._direction(local_matrix)
        lengths = [] if local_matrix is None else [len(span) for span in local_matrix.parts]
        chunks = self._exchange([self._direction(m) for m in matrices], lengths, len(matrices[0].parts))
        full_direction = self._empty(sum(lengths))
        for destination, chunk in zip(() if local_matrix is None else local_matrix.parts, chunks, strict=False):
            full_direction[destination.start : destination.stop] = chunk
        return full_direction

    def _direction(self, matrix: Matrix) -> Tensor:
        """This process's elements of the gradient with Nesterov momentum."""
        assert matrix.owner.grad is not None
        momentum = self.state[matrix.owner]["momentum_buffer"]
        direction = self._own(matrix, matrix.owner.grad).lerp(self._own(matrix, momentum), MOMENTUM)
        return direction.to(self._device, torch.bfloat16)

    def _own(self, matrix: Matrix, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[matrix.offset : matrix.offset + len(matrix.parts[self._rank])]

    def _exchange(self, chunks: Sequence[Tensor], lengths: Sequence[int], processes: int) -> list[Tensor]:
        """All-to-all: send part k to process k, and receive lengths[k] elements from it. Missing parts are empty."""
        if processes == 1:
            return list(chunks)
        send_sizes = [len(chunk) for chunk in chunks] + [0] * (processes - len(chunks))
        receive_sizes = [*lengths, *[0] * (processes - len(lengths))]
        buffer = self._empty(sum(receive_sizes))
        torch.distributed.all_to_all_single(buffer, torch.cat([self._empty(0), *chunks]), receive_sizes, send_sizes)
        return list(buffer.split(receive_sizes))

    def _empty(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.bfloat16, device=self._device)


Group = dict[str, Any]
TENSOR, KEYS, ITEMS = "tensor", "keys", "items"


def make_optimizer(objective: Objective, options: TrainOptions, rescaled: nn.Module | None = None) -> torch.optim.Optimizer:
    """The optimiser of the objective's trainable parameters.

    rescaled: a part of the objective with a scaled learning rate; its parameter group has `rescaled` True.
    """
    rescaled_parameters = set() if rescaled is None else set(rescaled.parameters())
    matrices = hidden_matrices(objective) - rescaled_parameters if options.optimizer == "muon" else set()
    groups: list[Group] = [{"params": [], "rescaled": n == 1, "muon": n == 2} for n in range(3)]
    for parameter in objective.parameters():
        if parameter.requires_grad:
            groups[2 if parameter in matrices else 1 if parameter in rescaled_parameters else 0]["params"].append(parameter)
    *others, muon_group = groups
    if not muon_group["params"]:
        return _adamw([group for group in others if group["params"]], options)
    muon, adamw_groups = Muon([muon_group], options.lr, options.weight_decay), [group for group in others if group["params"]]
    return MuonWithAdamW(muon, _adamw(adamw_groups, options) if adamw_groups else None)


def hidden_matrices(objective: Objective) -> set[nn.Parameter]:
    """Weights of linear layers between hidden states, which Muon is made for (Jordan et al. 2024).

    Embeddings, heads, norms and biases are excluded.
    """
    linears = [m for m in objective.modules() if isinstance(m, nn.Linear) and m.out_features not in objective.vocabularies]
    return {p for m in linears for p in m.parameters() if p.ndim == 2 and p.requires_grad}


def _adamw(groups: list[Group], options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW. On a GPU, one fused kernel updates all parameters."""
    fused = all(p.is_cuda for group in groups for p in group["params"])
    betas = (options.betas[0], options.betas[1])
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, weight_decay=options.weight_decay, fused=fused)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser, with common parameter groups and a common state."""

    def __init__(self, muon: Muon, adamw: torch.optim.Optimizer | None) -> None:
        self.muon, self.adamw = muon, adamw
        groups = [*([] if adamw is None else adamw.param_groups), *muon.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the current `param_groups`. DeepSpeed sets them one at a time."""
        assert closure is None, "DeepSpeed steps without one"
        optimizers: tuple[Any, ...] = (self.adamw, self.muon)
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.state = self.state
                optimizer.param_groups = [group for group in self.param_groups if group["muon"] == (optimizer is self.muon)]
                optimizer.found_inf = self.found_inf
                optimizer.step()


class Refusal:
    """Lets steps of an optimiser change nothing, neither weights nor state, where `refused` is not 0.

    On a GPU nothing waits: the flag goes to the optimiser as `found_inf`, which torch's fused kernel and Muon read there.
    Elsewhere an optimiser skips parameters without gradients, so the gradients are taken away during the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, refused: Callable[[], Tensor]) -> None:
        self._refused = refused
        self._taken = list[tuple[nn.Parameter, Tensor]]()
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if parameters and all(p.is_cuda for p in parameters):
            optimizer.found_inf = self._refused().to(parameters[0].device, torch.float32)
        elif parameters and bool(self._refused()):
            self._taken = [(p, p.grad) for p in parameters]
            for p in parameters:
                p.grad = None

    def _after(self, optimizer: Any, *_: Any) -> None:
        optimizer.found_inf = None
        for p, gradient in self._taken:
            p.grad = gradient  # DeepSpeed's own, where it keeps the optimiser on the host
        self._taken = []


def save_state(file: Path, state: dict[Any, Any]) -> None:
    """Write a state. Raises UserError for a value that is neither a tensor nor plain data."""
    tensors, structure = packed(state)
    save_file(tensors, file, {"form": structure})


def load_state(file: Path, device: torch.device) -> Any:
    """Read a state; its tensors are on this device. Raises UserError for a damaged file."""
    try:
        with safe_open(file, "pt", device=str(device)) as reader:
            return unpacked(reader.metadata()["form"], reader.get_tensor)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it to go on without the optimiser's state") from error


def packed(state: Any) -> tuple[dict[str, Tensor], str]:
    """A state as (copies of its tensors on the host by name, everything else as JSON). Raises UserError as `save_state`."""
    tensors: dict[str, Tensor] = {}
    return tensors, json.dumps(_packed(state, tensors, ""))


def unpacked(structure: str | bytes, tensor: Callable[[str], Tensor]) -> Any:
    """The state of `packed`. tensor: gives one by its name."""
    return _unpacked(json.loads(structure), tensor)


def _packed(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Plain data in which `{"tensor": name}` stands for a tensor. Keys of dictionaries may be numbers, which JSON lacks."""
    if isinstance(value, Tensor):
        name = path if path not in tensors else f"{path}#{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: name}
    if isinstance(value, dict):
        return {
            KEYS: list(value),
            ITEMS: [_packed(item, tensors, f"{path}/{key}" if path else str(key)) for key, item in value.items()],
        }
    if isinstance(value, list | tuple):
        return [_packed(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"the optimiser's state holds a {type(value).__name__}, but only tensors, numbers and texts are saved; choose another "
        "optimiser"
    )


def _unpacked(structure: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(structure, dict):
        if TENSOR in structure:
            return tensor(structure[TENSOR])
        return dict(zip(structure[KEYS], (_unpacked(item, tensor) for item in structure[ITEMS]), strict=True))
    return [_unpacked(item, tensor) for item in structure] if isinstance(structure, list) else structure


def learning_rate(options: TrainOptions, step: int, first_steps: int | None = None) -> float:
    """The learning rate of `step` (from 0): linear warm-up, then cosine, wsd (warmup-stable-decay, linear) or constant.

    first_steps: the number of steps at the beginning of a run that was lengthened; its warm-up is behind it and stays.

    Example: 100 steps, warmup 0.1, schedule wsd, decay 0.2: rises over steps 0-9, is constant to step 79, then falls.
    """
    warmup_steps = round(options.warmup * (first_steps or options.steps))
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    if options.schedule == "constant":
        return options.lr
    if options.schedule == "cosine":
        fraction = (step - warmup_steps) / max(1, options.steps - warmup_steps)
        return options.lr * (options.min_lr + (1 - options.min_lr) * 0.5 * (1 + math.cos(math.pi * fraction)))
    decay_steps = max(1, round(options.decay * options.steps))
    remaining = min(1.0, (options.steps - step) / decay_steps)
    return options.lr * (options.min_lr + (1 - options.min_lr) * remaining)
