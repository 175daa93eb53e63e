"""Floor 5: `drafttrain fit`: distil a drafter from the frozen target, then measure every kept checkpoint."""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console as RichConsole
from torch import Tensor

from drafttrain.checkpoint import list_checkpoints, start_weights
from drafttrain.commands.measure import measure_run
from drafttrain.commands.run import RunOptions
from drafttrain.commands.rundir import RunDirectory
from drafttrain.data.dataset import Dataset, load_dataset
from drafttrain.data.prompts import load_prompts
from drafttrain.drafter import Drafter, trainable
from drafttrain.drafters import families
from drafttrain.errors import UserError
from drafttrain.losses import NAMES as LOSSES
from drafttrain.measure.runner import CheckpointRef
from drafttrain.ops import library
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.load import LoadedTarget, device_of, load_target
from drafttrain.train.engine import World, accumulation, join_world, leave_world, settings
from drafttrain.train.logger import Logger
from drafttrain.train.onpolicy import check_on_policy
from drafttrain.train.progress import Console
from drafttrain.train.schedule import learning_rate
from drafttrain.train.trainer import Job, Progress, Trainer, without_training


def fit(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Train and measure; returns the run directory. Raises UserError before anything is written when the input is bad."""
    if options.target.tensor_parallel != 1:
        raise UserError(
            f"target.tensor_parallel is {options.target.tensor_parallel}; fit needs the whole target in every process, "
            "leave it out (measure and generate can share one)"
        )
    device = device_of(options.target.device)
    world = join_world(device)
    console = Console(RichConsole() if world.first else None)
    job = _prepare(options, world, console)
    run = RunDirectory.open(options, resolved, world)
    console.say(f"run: {run.path}" + (f" (resumed at step {run.resumed_step})" if run.resumed_step else ""))
    logger = Logger(options.logger, run.path, resolved, run.resumed_step) if world.first else None
    try:
        if job.drafter.trained:
            progress = Trainer(job, world, run.path).train(logger, console)
        else:
            progress = without_training(job, world, run.path)
        leave_world(world)
        gc.collect()
        if logger is not None and console.rich is not None:
            _finish(options, job.loaded, run, progress, job.data, logger, console.rich)
    finally:
        if logger is not None:
            logger.close()
    return run.path


def _prepare(options: RunOptions, world: World, console: Console) -> Job:
    """Load and check everything that can be wrong, the cheap things first."""
    accumulation(options.train, world)
    settings(options.train, options.deepspeed, 1)
    learning_rate(options.train, 0)
    for name in ("steps", "checkpoint_every", "keep_last", "log_every"):
        if getattr(options.train, name) < 1:
            raise UserError(f"train.{name} is {getattr(options.train, name)}; set it to 1 or more")
    if options.decode.tree_nodes is not None and options.decode.tree_nodes < 1:
        raise UserError(f"decode.tree_nodes is {options.decode.tree_nodes}; set it to 1 or more, or null: as many as pay")
    if options.loss.chunk < 1 or options.loss.name not in LOSSES:
        loss = options.loss
        choice = f"choose {', '.join(LOSSES)}, and a chunk of 1 or more"
        raise UserError(f"loss.name is {loss.name!r}, loss.chunk {loss.chunk}; {choice}")
    if options.measure.enabled:
        load_prompts(options.prompts or options.measure.prompts, options.measure.limit)
    torch.manual_seed(options.train.seed)
    loaded = load_target(options.target)
    drafter = _build(options, loaded)
    adapter = _adapter(options, loaded, drafter)
    start = _start(options, drafter, adapter)
    check_on_policy(drafter, options.train, options.deepspeed)
    about, where = loaded.description, loaded.description["path"] or loaded.description["name"]
    size = f"{about['parameters']:,} parameters, {about['blocks']} blocks"
    console.say(f"target: {about['architecture']}, {size} ({where}, {about['runner']} runner)")
    if options.decode.tree_nodes is None and drafter.tunable and options.deepspeed.zero_stage == 3:
        raise UserError(
            "decode.tree_nodes=null times whole weights, ZeRO stage 3 shards them; set decode.tree_nodes or a lower stage"
        )
    if about["runner_reason"]:
        console.say(f"the fast runner cannot run this target: {about['runner_reason']}")
    operators = library.state_on(loaded.target.device)
    if not operators.loaded:
        console.say(f"operators: {operators.text}")
    begun = f", from {options.train.init}" if start else ""
    console.say(f"drafter: {options.drafter.family}, {trainable(drafter):,} trainable parameters{begun}")
    if adapter is not None:
        console.say(f"adapter of the target: rank {adapter.spec.rank}, {trainable(adapter):,} trainable parameters")
    if drafter.remark:
        console.say(drafter.remark)
    data = Dataset([], [], {})
    if drafter.trained:
        data = load_dataset(_limited(options, loaded), loaded.tokenizer, progress=world.first)
        counts = f"{data.summary['conversations']:,} conversations, {data.summary['supervised_tokens']:,} supervised tokens"
        console.say(f"data: {counts} ({options.data.path})")
    return Job(
        loaded,
        drafter,
        options.drafter.family,
        asdict(options.drafter),
        data,
        options.train,
        options.deepspeed,
        options.loss,
        options.decode.tree_nodes,
        adapter,
        start,
    )


def _start(options: RunOptions, drafter: Drafter, adapter: Adapter | None) -> dict[str, Tensor] | None:
    init = options.train.init
    if init is None:
        return None
    if not drafter.trained:
        raise UserError(f"train.init is {init!r}; {options.drafter.family} trains nothing, leave it out")
    return start_weights(Path(init).expanduser(), options.drafter.family, drafter, adapter)


def _build(options: RunOptions, loaded: LoadedTarget) -> Drafter:
    try:
        return families()[options.drafter.family].build(options.drafter, loaded.target)
    except UserError:
        raise
    except ValueError as error:  # a drafter's own checks of options against the target
        raise UserError(str(error)) from error


def _adapter(options: RunOptions, loaded: LoadedTarget, drafter: Drafter) -> Adapter | None:
    """What the family trains of the target."""
    if drafter.adapts is None:
        return None
    if options.deepspeed.zero_stage == 3:
        raise UserError("deepspeed.zero_stage is 3, which an adapter of the target does not train under; set it to 0, 1 or 2")
    return Adapter(loaded.target, drafter.adapts)


def _limited(options: RunOptions, loaded: LoadedTarget) -> Any:
    """Conversations no longer than the target's context."""
    limit = loaded.target.shape.max_positions
    return replace(options.data, max_length=min(options.data.max_length, limit))


def _finish(
    options: RunOptions,
    loaded: LoadedTarget,
    run: RunDirectory,
    progress: Progress,
    data: Dataset,
    logger: Logger,
    console: RichConsole,
) -> None:
    """Measure the kept checkpoints, log, mark the run finished, and say what comes next."""
    training: dict[str, Any] | None = None
    if data.train:
        training = {
            "steps": progress.step,
            "tokens": progress.tokens,
            "tokens_per_s": progress.tokens / progress.seconds if progress.seconds else None,
            "final_loss": progress.loss,
            "data": data.summary | {"path": options.data.path},
        }
    checkpoints = list_checkpoints(run.path / "checkpoints")
    best = checkpoints[-1].name
    if options.measure.enabled:
        refs = [CheckpointRef(c.name, c, int(c.name.split("-")[1])) for c in checkpoints]
        report = measure_run(loaded, refs, options, run.path, console, training, run.path / "metrics.jsonl", data.held_out)
        best = report["best"].split()[0]  # a variant's row is its checkpoint's
        files = [run.path / "report.json", run.path / "report.md"]
        logger.report(report, sorted(run.path.glob("**/*.png")), checkpoints, files)
    run.finish()
    _next_steps(run.path / "checkpoints" / best, options, console)


def _next_steps(best: Path, options: RunOptions, console: RichConsole) -> None:
    target = "" if options.target.name == "embedded" else f" target={options.target.name} target.path={options.target.path}"
    console.print("\nnext:", highlight=False)
    for command, why in (
        (f"drafttrain measure checkpoint={best}{target} prompts=FILE", "measure it on your own prompts (MT-bench format)"),
        (f"drafttrain measure checkpoint={best}{target} decode=sampling", "measure lossless sampling at temperature 1"),
        ("drafttrain fit recipe=NAME target=hf target.path=DIR data.path=FILE", "distil a drafter for your own target"),
    ):
        console.print(f"  {command}\n      {why}", highlight=False, soft_wrap=True)
