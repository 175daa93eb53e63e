"""`drafttrain fit`: distils a drafter from the frozen target, then measures every kept checkpoint."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from drafttrain.commands.measure import measure_run
from drafttrain.commands.tune import tune_run
from drafttrain.core.console import line_printer, print_line, print_note
from drafttrain.core.errors import Interrupted, UserError
from drafttrain.data.dataset import Dataset
from drafttrain.data.files import read_template
from drafttrain.data.sources import check_sources
from drafttrain.drafters.checkpoint import list_checkpoints, read_meta
from drafttrain.engines.process import ENGINES
from drafttrain.export import golden
from drafttrain.export.opened import Opened
from drafttrain.export.table import loads
from drafttrain.measure import DecodeOptions, MeasureOptions, TuneOptions
from drafttrain.measure.plots import engine_steps
from drafttrain.measure.report import FILE
from drafttrain.measure.runner import CheckpointRef
from drafttrain.measure.tuning import DEFAULT, predicted_speedup
from drafttrain.runs.data import check_data, data_report, measurement_prompts, print_counts, write_rejected
from drafttrain.runs.derived import derived, doubts, from_device, lines_of, recorded, with_values
from drafttrain.runs.directory import RunDirectory
from drafttrain.runs.options import RunOptions, check_target, ends_alone, target_arguments
from drafttrain.runs.placement import Ready, check_placement, place, target_to_measure
from drafttrain.runs.stacks import check_named
from drafttrain.runs.training_engine import ENGINE, check_engine_options
from drafttrain.runs.training_job import prepare_job, states_totals, with_features
from drafttrain.targets.devices import device_of
from drafttrain.targets.frozen_ends import NO_BLOCKS
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import TrainOptions
from drafttrain.train.checkpoint_manager import Progress, best_checkpoint, engine_figures
from drafttrain.train.engine import World, divided, join_world, settings
from drafttrain.train.interrupt import Interrupt
from drafttrain.train.logger import Logger, check_installed
from drafttrain.train.progress import Console
from drafttrain.train.telemetry import window
from drafttrain.train.trainer import Trainer, without_training


def fit(options: RunOptions, resolved: dict[str, Any], ready: Ready | None = None) -> Path:
    """Train and measure; returns the run directory. ready: what is in memory already, for callers of the Python API.

    Raises UserError for bad input, before anything is written. Raises Interrupted when a signal has ended the run, which
    `resume=auto` continues.
    """
    check_target(options, ready is not None)
    check_placement(options)
    try:
        with Interrupt() as interrupt:
            return _fit(options, resolved, interrupt, ready)
    except Interrupted as stopped:
        raise Interrupted(f"{stopped}; resume=auto continues the run", stopped.together) from stopped


def _fit(options: RunOptions, resolved: dict[str, Any], interrupt: Interrupt, ready: Ready | None) -> Path:
    world = join_world(device_of(options.target.device), options.train.hang_timeout)
    console = Console(RichConsole() if world.first and not (ready and ready.quiet) else None)
    device = from_device(options)
    options, resolved = with_values(options, device), recorded(resolved, device)
    options = replace(options, train=_divided(options.train, world, console))
    check_options(options)
    if ready is None:
        check_sources(options.data)
    where = ready.place if ready else place(options, world, console.say)
    if ready is None and where.trained:
        check_data(options)
    job = prepare_job(options, world, where, console, ready)
    shape, rows = job.loaded.target.shape, len(job.data.train)
    derived_values = derived(options, shape, rows, world.size // options.train.sequence_parallel)
    recipe_options, options, resolved = options, with_values(options, derived_values), recorded(resolved, derived_values)
    for line in lines_of(recipe_options, options, shape, rows):
        console.say(line)
    for line in doubts(options.train, rows) if job.drafter.trained else ():
        console.say(f"note: {line}")
    options = replace(options, train=divided(options.train, world))
    job = replace(job, train=options.train)
    with ExitStack() as logged, ExitStack() as served:
        job = with_features(job, options, world, console, served)
        run = RunDirectory.open(options, resolved, world, console.say)
        console.say(f"run: {run.path}" + (f" (resumed at step {run.resumed_step})" if run.resumed_step else ""))
        logger = Logger(options.logger, run.path, resolved, run.resumed_step, console.say) if world.first else None
        if logger is not None:
            logged.push(lambda kind, *_: logger.close(kind is not None))
        if job.drafter.trained:
            trainer = Trainer(job, world, run.path, run.resumed, run.first_steps)
            with interrupt.deferred():
                progress = trainer.train(logger, console, interrupt)
            del trainer
        else:
            progress = without_training(job, world, run.path)
        served.close()  # servers that were started for training leave their memory to the measurement
        loaded, data, states = job.loaded, job.data, states_totals(job, console)
        data.close()
        del job  # frees the drafter and its engine before a target is loaded for the measurement
        with target_to_measure(options, where, loaded, world) as measured:
            interrupt.check()
            if measured is not None:
                if options.measure.enabled or not where.shared:  # otherwise the target is still shared among processes
                    _store_golden(list_checkpoints(run.path / "checkpoints"), measured, console.rich or RichConsole())
                _finish(options, measured, run, progress, data, states, logger, console.rich or RichConsole())
    return run.path


def _divided(train: TrainOptions, world: World, console: Console) -> TrainOptions:
    fitted = divided(train, world)
    if fitted.micro_batch != min(train.micro_batch, train.global_batch):
        batch = f"a batch of {train.global_batch} is divided among {world.size // train.sequence_parallel} processes"
        console.say(f"micro-batches: {fitted.micro_batch} sequences instead of {train.micro_batch}, because {batch}")
    return fitted


def check_options(options: RunOptions) -> None:
    """Raise UserError for options that are wrong for every target and data set."""
    settings(options.train, options.deepspeed, 1)
    check_installed([options.logger.name, *options.logger.also])
    window(options.train.profile, 0, options.train.steps)
    options.loss.check()
    check_named(options)
    read_template(options.data.template)  # whether it is there
    check_engine_options(options)
    if options.measure.enabled or options.measure.every:
        measurement_prompts(options)


def _finish(
    options: RunOptions,
    loaded: LoadedTarget,
    run: RunDirectory,
    progress: Progress,
    data: Dataset,
    states: dict[str, Any] | None,
    logger: Logger | None,
    console: RichConsole,
) -> None:
    """Measure the kept checkpoints, log, and mark the run as finished.

    logger: on rank 0 only. states: what the servers of `features=engine` gave to training.
    """
    training: dict[str, Any] | None = None
    if data.train:
        training = {
            "steps": progress.step,
            "tokens": progress.tokens,
            "tokens_per_s": progress.tokens / progress.seconds if progress.seconds else None,
            "final_loss": progress.loss,
            "data": _data_report(data, options, loaded, run, console),
        }
        if states is not None:
            training["states"] = states
        if by_engine := engine_steps(run.path / "metrics.jsonl"):
            training["engine"] = by_engine
    checkpoints = list_checkpoints(run.path / "checkpoints")
    chosen = _chosen_by_engine(options, checkpoints, console)
    if ends_alone(options):
        best = run.path / "checkpoints" / chosen if chosen else best_checkpoint(run.path / "checkpoints")
        words = f"drafttrain measure {shlex.quote(f'checkpoint={best}')}{target_arguments(options)}"
        print_line(console, f"not measured: {NO_BLOCKS}; measure it where the whole target fits: {words} engine=vllm")
    elif options.measure.enabled:
        refs = [CheckpointRef(c.name, c, int(c.name.split("-")[1])) for c in checkpoints]
        if options.measure.tune and data.train:
            tuned = best_checkpoint(run.path / "checkpoints")
            found = tune_run(run.path, tuned, loaded, data.held_out, options, console)
            if found is not None and logger is not None:
                names = ("predicted_speedup", "predicted_speedup_low", "predicted_speedup_high")
                logger.step(progress.step, dict(zip(names, predicted_speedup(found), strict=True)))
            if found is not None and any(each["chosen"]["better"] for each in found["batch_sizes"]):
                as_trained = next(ref for ref in refs if ref.path == tuned)
                refs.append(replace(as_trained, name=f"{tuned.name} {DEFAULT}", tuned=False))
        if not options.measure.tune_only:
            report = measure_run(
                loaded, refs, options, run.path, console, training, run.path / "metrics.jsonl", data.held_out, chosen
            )
            files = [run.path / f"report.{extension}" for extension in ("json", "md", "html")]
            if logger is not None:
                logger.report(report, sorted(run.path.glob("**/*.png")), checkpoints, files)
    if logger is not None:
        run.finish()


def _chosen_by_engine(options: RunOptions, checkpoints: list[Path], console: RichConsole) -> str | None:
    """The name of the best checkpoint by the engine's tau, if `measure.best=engine` and it has measured any."""
    if options.measure.best != ENGINE:
        return None
    engine_tau = {path.name: figures["tau"] for path in checkpoints if (figures := engine_figures(path))}
    others, label = [path.name for path in checkpoints if path.name not in engine_tau], options.measure.engine
    if not engine_tau:
        print_note(console, f"measure.best=engine: {label} has measured no kept checkpoint, so our own figures choose the best")
        return None
    best = best_checkpoint(checkpoints[0].parent, by_engine=True).name
    print_line(console, f"best checkpoint by {label}: {best}, tau {engine_tau[best]:.2f}")
    if others:
        print_note(console, f"{label} has not measured {', '.join(others)}, so measure.best=engine leaves them out")
    return best


def _store_golden(checkpoints: list[Path], loaded: LoadedTarget, console: RichConsole) -> None:
    """Store golden drafts with each checkpoint, which exports must reproduce. On failure, `export` tries again later."""
    if loaded.target.part.size > 1:
        return
    for directory in checkpoints:
        try:
            if loads(read_meta(directory).family) and golden.stored(directory) is None:
                checkpoint = Opened.of(directory, loaded)
                if checkpoint.drafter.trained:
                    golden.store(directory, golden.made(checkpoint, golden.sequences_for(loaded)))
        except UserError as error:
            print_note(console, f"no golden drafts with {directory.name}: {error}")


def _data_report(
    data: Dataset, options: RunOptions, loaded: LoadedTarget, run: RunDirectory, console: RichConsole
) -> dict[str, Any]:
    """The report's section on training data. Prints the counts again if data was still being prepared at the start."""
    report = data_report(data, loaded.target.shape.vocab_size)
    if report["prepared"] > data.summary["prepared"]:
        print_counts(report, options.data, line_printer(console))
    write_rejected(data, run.path)
    return report


def next_steps(run: Path, options: RunOptions) -> None:
    """Print what can be done with the best checkpoint of a finished run."""
    checkpoint, report, stacks = run, run / FILE, None
    if report.is_file():
        content = json.loads(report.read_text(encoding="utf-8"))
        best, stacks = run / "checkpoints" / content["best"].split()[0], content["drafter"]["stacks"]
        checkpoint = run if best == best_checkpoint(run / "checkpoints") else best
    console = RichConsole()
    print_line(console, "\nnext:")
    for command, purpose in _commands(shlex.quote(f"checkpoint={checkpoint}"), options, stacks):
        print_line(console, f"  drafttrain {command}\n      {purpose}")


def _commands(checkpoint: str, options: RunOptions, stacks: list[str] | None) -> Iterator[tuple[str, str]]:
    """Commands, what they are for and how long they take. stacks: that load the drafter; None: it was not measured."""
    measured, stacks = stacks is not None, loads(options.drafter.family) if stacks is None else stacks
    minutes = f"{MeasureOptions().minutes:g} minutes"
    if measured:
        if options.prompts is None and options.measure.prompts == MeasureOptions().prompts:
            yield f"measure {checkpoint} prompts=FILE", f"measure it on your own prompts (MT-bench format): {minutes}"
        if options.decode.policy == DecodeOptions().policy:
            yield f"measure {checkpoint} decode=sampling", f"measure lossless sampling at temperature 1: {minutes}"
    elif not ends_alone(options):
        yield f"measure {checkpoint}", f"measure acceptance and speed: {minutes}"
        yield f"tune {checkpoint}", f"find the fastest draft length or tree on this machine: {TuneOptions().minutes:g} minutes"
    if stacks:
        yield f"export {checkpoint} format=all out=exported", "write it for the serving stacks that load it"
        if engine := next((name for name, engine in ENGINES.items() if set(engine.loads) & set(stacks)), None):
            stack = next(stack for stack in ENGINES[engine].loads if stack in stacks)
            yield f"verify engine={engine} out=exported/{stack} {checkpoint}", f"count the drafts that {engine} accepts"
    if options.target.name == "embedded":
        kind = "" if stacks else ", by a recipe that serving stacks load"
        yield "fit recipe=NAME target=DIR data.path=FILE", f"distil a drafter for your own target{kind}"
