"""An EAGLE-3 step compared with SpecForge's and speculators' modules on the same GPU: forward, loss and backward, for a target
of a real size with random weights, whose states are computed once and given to both. No optimiser, because all would use
torch's.

Each runs as its own training does (`benchmarks/rival_modules.py`): weights, batch and states are ours, all in bfloat16. The
draft vocabulary holds the target's choices, or a module that leaves the other positions out would do less. The norms of the
gradients must agree. The rivals' packages come in a folder of wheels of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu import check, wheels
from benchmarks.gpu.machine import Machine, race
from benchmarks.gpu.models import REHEARSED, TIMED
from benchmarks.gpu.results import Job, RedError, SkipError
from benchmarks.gpu.steps import target_of
from benchmarks.gpu.throughput import CONTEXTS, MODEL, OPERATORS, REPEATS, Setting, Training, beyond, modules_of
from benchmarks.rival_modules import RIVALS, Given, Rival
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL

FOLDER = wheels.ROOT / "wheels-rivals"
CLOSE = 5e-2  # allowed difference of the gradients' norms, relative
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("max_position_embeddings", "rms_norm_eps", "rope_parameters", "num_hidden_layers")


def provided() -> None:
    """Raises SkipError where a rival's packages are missing."""
    wheels.provide()
    said = wheels.provide(FOLDER)
    if missing := [name for name in ("specforge", "speculators", "datasets", "pydantic") if find_spec(name) is None]:
        raise SkipError(said or f"{', '.join(missing)} cannot be imported, and {FOLDER} has no wheels of them")


def measure(name: str, setting: Setting, machine: Machine) -> dict[str, Any]:
    """Raises RedError where the gradients' norms differ."""
    provided()
    stance = torch.compiler.set_stance("force_eager") if machine.rehearsal else contextlib.nullcontext()
    with stance:
        blocks = target_of(setting.model, machine).shape.blocks
        more = {"draft_vocab": 80} if machine.rehearsal else {}
        # three blocks, as the rivals' modules want
        training = Training(setting, machine, target_layer_ids=[0, blocks // 2, blocks - 2], **more)
        batch = training.online.fill(training.batch.to(machine.device))
        training.drafter.prepare(partial(chosen, training, batch))
        config = (REHEARSED if machine.rehearsal else TIMED)[setting.model].to_dict()
        steps = training.drafter.predicted_steps
        rival = RIVALS[name](Given(training.drafter, training.target, batch, steps, {key: config[key] for key in SIZES}))
        return compared(training, batch, rival, machine)


def chosen(training: Training, batch: TrainBatch) -> torch.Tensor:
    """How often the target chooses each token."""
    vocab, found = training.target.shape.vocab_size, []
    with torch.no_grad():
        for row_TH in batch.hidden[FINAL]:
            found.append(training.target.head(row_TH).argmax(-1).flatten())
    return torch.bincount(torch.cat(found), minlength=vocab)


def compared(training: Training, batch: TrainBatch, rival: Rival, machine: Machine) -> dict[str, Any]:
    def ours() -> None:
        training.drafter.zero_grad()
        (training.objective(batch)[0] / batch.token_BT.numel()).backward()

    def theirs() -> None:
        rival.module.zero_grad()
        rival.loss().backward()  # type: ignore[no-untyped-call]

    began = perf_counter()
    theirs()
    machine.wait()
    found: dict[str, Any] = {"rows": len(batch.token_BT), "first_s": perf_counter() - began}  # with what it compiles
    ours()
    own = [p.grad.float() for p in training.drafter.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(own)) * batch.token_BT.numel()
    found["apart"] = abs(rival.norm() / norm - 1.0)
    if not found["apart"] <= CLOSE:
        raise RedError(f"the gradients' norms are {norm:.4g} and {rival.norm():.4g}")
    ways: dict[str, Callable[[], None]] = {"ours": ours, "theirs": theirs}
    for way, step in ways.items():
        training.drafter.zero_grad()
        rival.module.zero_grad()
        found[f"{way}_bytes"] = beyond(step, machine)  # beyond weights and states, with the gradients
    taken = race({way: partial(machine.seconds, step) for way, step in ways.items()}, REPEATS)
    rates = {f"{way}_tokens_per_s": batch.token_BT.numel() / seconds for way, seconds in taken.items()}
    return found | rates | {"times": taken["theirs"] / taken["ours"]}


def jobs(machine: Machine) -> list[Job]:
    model, contexts = (next(iter(REHEARSED)), (128,)) if machine.rehearsal else (MODEL, CONTEXTS)
    needs = check.needed(OPERATORS, machine)
    return [
        Job(
            f"rival {name} eagle3 {setting.model} context={setting.context}",
            "rivals",
            modules_of("eagle3"),
            partial(measure, name, setting, machine),
            **needs,
            able=able,
        )
        for setting in (Setting("eagle3", model, context) for context in contexts)
        for name in RIVALS
    ]


def able() -> bool:
    return FOLDER.exists() or find_spec("specforge") is not None
