"""Train a drafter: the whole training, or the loss of one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.api.drafter import LoadedDrafter, for_recipe
from drafttrain.api.settings import composed, for_drafter, given
from drafttrain.cli.config import compose_run
from drafttrain.cli.main import user_errors
from drafttrain.cli.quiet import quiet as quieten
from drafttrain.core.errors import Interrupted, UserError
from drafttrain.core.limits import check_limits
from drafttrain.data.dataset import collate, load_dataset, token_counts
from drafttrain.data.records import Listed
from drafttrain.drafters.checkpoint import list_checkpoints
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs.placement import Ready, built
from drafttrain.targets.load import LoadedTarget

Conversation = Mapping[str, Any]
NAME = "conversation"


def listed(conversations: Sequence[Conversation]) -> Listed:
    """Records in memory. Raises UserError for an empty list, and for something else than dictionaries."""
    rows = list(conversations)
    if not rows:
        raise UserError('no conversations; give dictionaries such as {"messages": [{"role": "user", "content": "..."}, ...]}')
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f'conversation {number} is a {type(row).__name__}; give a dictionary such as {{"messages": [...]}}')
    return Listed(NAME, map(dict, rows))


def batches(
    drafter: LoadedDrafter,
    conversations: Sequence[Conversation],
    *,
    batch_size: int = 8,
    epochs: int = 1,
    max_length: int | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[TrainBatch]:
    """Turn conversations into batches for a training loop of your own.

    The tokenizer's chat template is applied. Assistant turns are supervised. Batches hold conversations of like lengths, in an
    order that follows from the seed. The last batch is filled up from the beginning of the next epoch.

    Args:
        drafter: The drafter to train. The first call lets its family prepare itself from the data, as some choose a vocabulary.
        conversations: Dictionaries `{"messages": [{"role": ..., "content": ...}, ...]}`, or another form of docs/data.md.
        batch_size: Conversations in a batch.
        epochs: Passes over the conversations.
        max_length: Tokens of a conversation. Later turns that do not fit are left out. None: as in the recipe, and the target's
            context at most.
        seed: Of the order.
        settings: Further keys of the data by name, such as `{"data.template": "chat.jinja"}`.

    Yields:
        Batches on the target's device, without the target's states. `token_BT` and `mask_BT` are [batch, tokens];
        `mask_BT` is True on supervised tokens.

    Raises:
        UserError: A conversation cannot be used, or none has a supervised token, or the drafter cannot be trained.
    """
    drafter.check_trainable()
    if batch_size < 1 or epochs < 1:
        raise UserError(f"batch_size is {batch_size}, epochs {epochs}; set both to 1 or more")
    target = drafter.base
    options = for_recipe(drafter.recipe, {**drafter.settings, **(settings or {})}, target).options.data
    length = min(max_length or options.max_length, target.target.shape.max_positions)
    options = replace(options, path=NAME, mix=[], max_length=length, held_out=0, seed=seed)
    check_limits("data", options)
    data = load_dataset(
        options,
        target.tokenizer,
        progress=False,
        records=listed(conversations),
        images=target.images,
        vocab_size=target.target.shape.vocab_size,
    )
    if not drafter.prepared:
        drafter.module.prepare(lambda: token_counts(data.train, target.target.shape.vocab_size))
        drafter.prepared = True
    return _batches(drafter, data, batch_size, epochs)


def _batches(drafter: LoadedDrafter, data: Any, batch_size: int, epochs: int) -> Iterator[TrainBatch]:
    pad, device = drafter.base.tokenizer.pad_token_id, drafter.base.target.device
    try:
        for step in range(-(-epochs * len(data.train) // batch_size)):
            yield collate(data.global_batch(step, batch_size), 0 if pad is None else pad).to(device)
    finally:
        data.close()


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What `train_drafter` leaves on disk."""

    path: Path  # the run's directory: configuration, environment, metrics.jsonl, checkpoints
    checkpoint: Path  # the kept checkpoint of the highest expected tau on the held-out conversations
    checkpoints: list[Path]  # all kept checkpoints, by step
    losses: list[float]  # the mean loss per supervised token of each optimiser step
    expected_tau: float | None  # of `checkpoint`; None for families that train nothing


def train_drafter(
    drafter: LoadedDrafter,
    conversations: Sequence[Conversation] | str | Path,
    *,
    steps: int | None = None,
    batch: int | None = None,
    lr: float | None = None,
    max_length: int | None = None,
    out: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> TrainingRun:
    """Train a drafter as `drafttrain fit` does, on a target and conversations that are in memory.

    The drafter given stays as it is: load the trained one from the checkpoint. Torch's random seed is set to `train.seed`.
    DeepSpeed is needed here alone. Several GPUs: start the script with torchrun; each process then holds the whole target.

    Args:
        drafter: From `build_drafter`, or from `load_drafter(..., trainable=True)`, which training goes on from.
        conversations: Dictionaries `{"messages": [{"role": ..., "content": ...}, ...]}`, or a path as in `data.path`. A drafter
            learns best from replies that its target wrote (`drafttrain prepare`).
        steps: Optimiser steps (`train.steps`).
        batch: Conversations of one step, over all processes (`train.global_batch`).
        lr: The highest learning rate (`train.lr`).
        max_length: Tokens of a conversation (`data.max_length`).
        out: Runs land in `<out>/<recipe>/<time>/`.
        settings: Any other key of the configuration, such as `{"loss.name": "lk", "train.precision": "bfloat16"}`. Groups too:
            `{"logger": "wandb", "deepspeed": "zero1"}`. What is set nowhere is as in the recipe. One of eight conversations is
            held out, 64 at most, unless `data.held_out` is set.
        quiet: Print nothing.

    Returns:
        The run. Ctrl-C saves a checkpoint first and then raises KeyboardInterrupt.

    Raises:
        UserError: The drafter, the conversations or a setting cannot be used. Nothing is written then.
    """
    quieten()
    if drafter.checkpoint is not None:
        drafter.check_trainable()
    records = None if isinstance(conversations, str | Path) else listed(conversations)
    overrides = {"train.steps": steps, "train.global_batch": batch, "train.lr": lr, "data.max_length": max_length}
    run_settings = _named(records, conversations) | {"logger": "none", "measure": "off", "output": str(out)}
    run_settings |= {"target": drafter.base.description["name"]}
    run = composed(drafter.recipe, {**drafter.settings, **run_settings, **given(overrides), **(settings or {})})
    run = for_drafter(run, drafter.base, drafter.options)
    module, state = built(run.options, drafter.base.target), drafter.module.state_dict()
    if not drafter.prepared:
        module.load_state_dict(state)
    initial_state = {name: tensor.clone() for name, tensor in state.items()} if drafter.prepared else None
    return _trained(run.options, run.resolved, Ready(drafter.base, module, initial_state, records, quiet))


def auto(
    target: str | Path = "embedded",
    conversations: str | Path | None = None,
    *,
    stacks: Sequence[str] = (),
    budget: str = "1h",
    out: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Pick, train, prove and export a drafter, as `drafttrain auto --yes` does. Called again, it goes on where it was ended.

    Args:
        target: `embedded`, a directory or a hub id.
        conversations: A path as in `data.path`.
        stacks: Serving stacks that must load the drafter (`export.stacks`).
        budget: The time for everything: `45m`, `8h`, `2d`.
        out: The decision lands in `<out>/auto/<name>/`.
        settings: Any other key of the configuration, such as `{"auto.batch_sizes": [1], "auto.candidates": ["medusa"]}`.

    Returns:
        The decision, as its auto.json has it: `recipe`, `checkpoint`, `predicted` and `measured` speedup, `serving` commands by
        stack, all `candidates`, and `folder`.

    Raises:
        UserError: Bad input, or a budget that is too short. Nothing is spent then.
        KeyboardInterrupt: Ctrl-C, after what runs has been saved.
    """
    quieten()
    command = import_module("drafttrain.commands.auto")  # Optuna is needed here alone
    place = {"target": "embedded"} if target == "embedded" else {"target": "hf", "target.path": str(target)}
    keys = {"budget": budget, "output": str(out), "auto.yes": True, "export.stacks": list(stacks), **place}
    if conversations is not None:
        keys["data.path"] = str(conversations)
    run = composed(None, {**keys, **(settings or {})})
    try:
        with user_errors():
            folder = command.auto(run.options, run.overrides, _candidate)
    except Interrupted as interrupt:
        raise KeyboardInterrupt(str(interrupt)) from interrupt
    decision: dict[str, Any] = json.loads((folder / command.DECISION).read_text(encoding="utf-8"))
    return decision | {"folder": folder}


def _candidate(recipe: str, words: Sequence[str]) -> Any:
    with user_errors():
        return compose_run(recipe, words).options


def _named(records: Listed | None, conversations: Any) -> dict[str, Any]:
    """Settings of the data. Its name has its content, so that another list never continues this one's run."""
    if records is None:
        return {"data.path": str(conversations)}
    return {"data.path": f"memory:{records.digest[:12]}"}


def _trained(options: Any, resolved: dict[str, Any], ready: Ready) -> TrainingRun:
    from drafttrain.commands.fit import fit  # DeepSpeed is needed from here on
    from drafttrain.train.checkpoint_manager import Progress, best_checkpoint

    try:
        with user_errors():
            path = fit(options, resolved, ready)
    except Interrupted as interrupt:
        raise KeyboardInterrupt(str(interrupt)) from interrupt
    folder, metrics = path / "checkpoints", path / "metrics.jsonl"
    best = best_checkpoint(folder, options.measure.best == "engine")
    lines = metrics.read_text(encoding="utf-8").splitlines() if ready.drafter.trained else []
    losses = [float(values["loss"]) for line in lines if (values := json.loads(line)).get("loss") is not None]
    return TrainingRun(path, best, list_checkpoints(folder), losses, Progress.of(best).expected_tau)


def loss(
    drafter: LoadedDrafter,
    target: LoadedTarget,
    batch: TrainBatch,
    *,
    name: str = "kl",
    settings: Mapping[str, Any] | None = None,
) -> Tensor:
    """The training loss of one batch, for a training loop of your own.

    Args:
        drafter: The drafter to train. Give `drafter.module.parameters()` to your optimiser.
        target: The target that the drafter was built for. It runs over the batch without gradients.
        batch: From `batches`.
        name: The divergence between draft and target distribution: `kl`, `ce`, `rkl`, `jsd`, `tvd`, `lk`, `lk_hybrid`,
            `e2e_tv`, or a `mix`.
        settings: Further keys of the loss by name, such as `{"loss.mix": {"kl": 0.5, "ce": 0.5}}`.

    Returns:
        A scalar in float32 with gradients to the drafter's parameters: the weighted losses of all draft depths, summed, divided
        by the number of supervised tokens. It is what `fit` logs as `loss`.

    Raises:
        UserError: The batch has no supervised token, the loss has no such name, the target is another one, or the drafter
            cannot be trained so.
    """
    drafter.check_trainable()
    drafter.check(target)
    if drafter.module.adapts is not None:
        raise UserError(f"{drafter.recipe or drafter.family} also trains the target; use train_drafter")
    options = composed(None, {"loss": name, **settings}).options.loss if settings else LossOptions(name)
    check_limits("loss", options)
    options.check()
    if not (supervised := batch.supervised()):
        raise UserError("the batch has no supervised token; give longer conversations, or raise max_length")
    filled_batch = batch if batch.hidden else Online(target.target, drafter.module.taps).fill(batch)
    total: Tensor = Objective(drafter.module, target.target, options)(filled_batch)[0]
    return total / supervised
