"""The drafter's optimiser: AdamW, or Muon for hidden matrices and AdamW for the other parameters; its learning rate, and its
state as a file.

The learning rate is a function of the step alone, so that a resumed run needs no scheduler state.

A state is what `Optimizer.state_dict()` gives: dictionaries and lists of tensors, numbers, strings and None. In the file
tensors are tensors, and all else is JSON in its metadata. Nothing is pickled (decision 002).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.objective.losses import Objective
from drafttrain.train import TrainOptions
from drafttrain.train.muon import Muon

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
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_packed(state, tensors))
    save_file(tensors, file, {"form": structure})


def load_state(file: Path, device: torch.device) -> Any:
    """Read a state; its tensors are on this device. Raises UserError for a damaged file."""
    try:
        with safe_open(file, "pt", device=str(device)) as reader:
            structure = json.loads(reader.metadata()["form"])
            return _unpacked(structure, reader)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it to go on without the optimiser's state") from error


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Plain data in which `{"tensor": name}` stands for a tensor. Keys of dictionaries may be numbers, which JSON lacks."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().contiguous().clone()
        return {TENSOR: name}
    if isinstance(value, dict):
        return {KEYS: list(value), ITEMS: [_packed(item, tensors) for item in value.values()]}
    if isinstance(value, list | tuple):
        return [_packed(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"the optimiser's state holds a {type(value).__name__}, but only tensors, numbers and texts are saved; choose another "
        "optimiser"
    )


def _unpacked(structure: Any, reader: Any) -> Any:
    if isinstance(structure, dict):
        if TENSOR in structure:
            return reader.get_tensor(structure[TENSOR])
        return dict(zip(structure[KEYS], (_unpacked(item, reader) for item in structure[ITEMS]), strict=True))
    return [_unpacked(item, reader) for item in structure] if isinstance(structure, list) else structure


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
