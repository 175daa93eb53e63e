"""`drafttrain fit`: distils a drafter from the frozen target, then measures every kept checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console as RichConsole
from torch import Tensor

from drafttrain.commands.measure import measure_run
from drafttrain.core.errors import Interrupted, UserError, check_at_least
from drafttrain.data.contamination import contamination
from drafttrain.data.dataset import Dataset
from drafttrain.drafters.checkpoint import list_checkpoints, read_meta, start_weights
from drafttrain.drafters.common.drafter_lora import adapted_maps, added, trained_and_frozen
from drafttrain.export import golden
from drafttrain.export.opened import Opened
from drafttrain.export.table import loads
from drafttrain.features.engine import EngineStates
from drafttrain.measure.cases import encode_cases
from drafttrain.measure.curves import engine_steps
from drafttrain.measure.decoding import decoder_of
from drafttrain.measure.quick_measurement import quick_measurement
from drafttrain.measure.runner import CheckpointRef, check_measurement
from drafttrain.model.drafter import Drafter, check_images, trainable
from drafttrain.model.images import has_images
from drafttrain.ops import library
from drafttrain.runs.checkpoint_source import CheckpointSource, check_start
from drafttrain.runs.console import line_printer, print_line, print_note
from drafttrain.runs.data import (
    data_report,
    measurement_prompts,
    print_counts,
    print_vocabulary,
    training_data,
    write_rejected,
)
from drafttrain.runs.directory import RunDirectory
from drafttrain.runs.options import RunOptions, target_arguments
from drafttrain.runs.placement import Placement, built, check_placement, load_for_training, place, target_to_measure
from drafttrain.runs.provenance import origin_of
from drafttrain.runs.ready import Ready
from drafttrain.runs.states_servers import states_servers
from drafttrain.runs.training_engine import ENGINE, check_engine_options, engine_settings
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.devices import device_of
from drafttrain.targets.estimate import format_bytes
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import TrainOptions
from drafttrain.train.caching import Caching, check_features
from drafttrain.train.checkpoint_manager import Progress, best_checkpoint, engine_figures
from drafttrain.train.engine import World, divided, join_world, settings
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.interrupt import Interrupt
from drafttrain.train.logger import Logger, check_logger
from drafttrain.train.onpolicy import check_on_policy
from drafttrain.train.packed_rows import check_packing
from drafttrain.train.profile import window
from drafttrain.train.progress import Console
from drafttrain.train.schedule import learning_rate
from drafttrain.train.trainer import Trainer, TrainingJob, without_training
from drafttrain.train.ulysses import check_sequence_parallel

CHECKPOINT = 16  # bytes of a trained parameter in a checkpoint: weights, master weights and two moments
FROZEN = 4  # and of a parameter that LoRA freezes
SEARCHED = 20_000  # conversations of each source that are searched for evaluation prompts before training: takes seconds


def fit(options: RunOptions, resolved: dict[str, Any], ready: Ready | None = None) -> Path:
    """Train and measure; returns the run directory. ready: what is in memory already, for callers of the Python API.

    Raises UserError for bad input, before anything is written. Raises Interrupted when a signal has ended the run, which
    `resume=auto` continues.
    """
    check_placement(options)
    try:
        with Interrupt() as interrupt:
            return _fit(options, resolved, interrupt, ready)
    except Interrupted as stopped:
        raise Interrupted(f"{stopped}; resume=auto continues the run", stopped.together) from stopped


def _fit(options: RunOptions, resolved: dict[str, Any], interrupt: Interrupt, ready: Ready | None) -> Path:
    world = join_world(device_of(options.target.device), options.train.hang_timeout)
    console = Console(RichConsole() if world.first and not (ready and ready.quiet) else None)
    options = replace(options, train=_divided(options.train, world, console))
    _check(options)
    where = ready.place if ready else place(options, world, console.say)
    job, served = _prepare(options, world, where, console, ready), ExitStack()
    logger: Logger | None = None
    try:
        job = _with_features(job, options, world, console, served)
        run = RunDirectory.open(options, resolved, world, console.say)
        console.say(f"run: {run.path}" + (f" (resumed at step {run.resumed_step})" if run.resumed_step else ""))
        logger = Logger(options.logger, run.path, resolved, run.resumed_step) if world.first else None
        if job.drafter.trained:
            trainer = Trainer(job, world, run.path, run.resumed)
            with interrupt.deferred():
                progress = trainer.train(logger, console, interrupt)
            del trainer
        else:
            progress = without_training(job, world, run.path)
        served.close()  # a server that was started for training leaves its memory to the measurement
        loaded, data, states = job.loaded, job.data, _states_totals(job, console)
        data.close()
        del job  # frees the drafter and its engine before a target is loaded for the measurement
        with target_to_measure(options, where, loaded, world) as measured:
            interrupt.check()
            if measured is not None:
                if options.measure.enabled or not where.shared:  # otherwise the target is still shared among processes
                    _store_golden(list_checkpoints(run.path / "checkpoints"), measured, console.rich or RichConsole())
                _finish(options, measured, run, progress, data, states, logger, console.rich or RichConsole(), ready is None)
    finally:
        served.close()
        if logger is not None:
            logger.close()
    return run.path


def _divided(train: TrainOptions, world: World, console: Console) -> TrainOptions:
    fitted = divided(train, world)
    if fitted.micro_batch != min(train.micro_batch, train.global_batch):
        batch = f"a batch of {train.global_batch} is divided among {world.size // train.sequence_parallel} processes"
        console.say(f"micro-batches: {fitted.micro_batch} sequences instead of {train.micro_batch}, because {batch}")
    return fitted


def _check(options: RunOptions) -> None:
    """Raise UserError for options that are wrong for every target and data set."""
    settings(options.train, options.deepspeed, 1)
    learning_rate(options.train, 0)
    options.train.lora.check()
    check_at_least(1, "train", options.train, "steps", "checkpoint_every", "keep_last", "log_every")
    check_logger(options.logger)
    window(options.train.profile, 0, options.train.steps)
    if options.train.hang_timeout < 0:
        raise UserError(f"train.hang_timeout is {options.train.hang_timeout:g}; set it to a number of seconds, or 0 for never")
    if options.decode.tree_nodes is not None and options.decode.tree_nodes < 1:
        raise UserError(
            f"decode.tree_nodes is {options.decode.tree_nodes}; set it to 1 or more, or null for the fastest number"
        )
    options.loss.check()
    if options.measure.every < 0 or options.measure.every_prompts < 1:
        every, prompts = options.measure.every, options.measure.every_prompts
        raise UserError(f"measure.every is {every}, every_prompts {prompts}; set steps to 0 or more, prompts to 1 or more")
    check_engine_options(options)
    if options.measure.enabled or options.measure.every:
        measurement_prompts(options)


def _prepare(options: RunOptions, world: World, where: Placement, console: Console, ready: Ready | None) -> TrainingJob:
    """Load target, drafter and data, and check the options against them, before anything is written."""
    torch.manual_seed(options.train.seed)
    loaded = ready.loaded if ready else load_for_training(options, where)
    drafter = ready.drafter if ready else built(options, loaded.target)
    adapter = _adapter(options, loaded, drafter)
    start = (ready.start if ready else None) or _start(options, loaded, drafter, adapter, console)
    lora = _lora(options, loaded, drafter, start)
    quick_measure = _quick_measure(options, loaded, drafter, adapter, where) if options.measure.every else None
    open_engine = engine_settings(options, loaded, drafter)
    check_on_policy(drafter, options.train, options.deepspeed)
    check_sequence_parallel(options.train, options.loss, loaded.target, drafter, adapter)
    check_packing(options.data.pack, options.train, loaded.target, drafter, adapter)
    check_features(options.features, drafter, options.train, loaded.target.shape.vocab_size)
    _check_end(options, loaded, drafter)
    if options.decode.tree_nodes is None and drafter.proposal.tunable and options.deepspeed.zero_stage == 3:
        raise UserError(
            "decode.tree_nodes=null needs whole weights, but ZeRO stage 3 shards them; set decode.tree_nodes or a lower stage"
        )
    _print_models(options, loaded, drafter, adapter, bool(start), lora, console)
    data = Dataset([], [], {})
    if drafter.trained:
        records = ready.records if ready else None
        data = training_data(options.data, loaded, world, console.say, records)
        _check_images(options, drafter, data)
        print_vocabulary(data, loaded.target.shape.vocab_size, getattr(options.drafter, "draft_vocab", None), console.say)
        if world.first and records is None:
            data = _with_origin(data, options, loaded, where, console)
    return TrainingJob(
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
        options.target.prefetch,
        quick_measure=quick_measure,
        quick_measure_every=options.measure.every,
        open_engine=open_engine,
        best_by_engine=options.measure.best == ENGINE,
    )


def _check_images(options: RunOptions, drafter: Drafter, data: Dataset) -> None:
    """Raise UserError for conversations with images that cannot be trained on."""
    check_images(drafter, data.has_images)
    if data.has_images and options.train.sequence_parallel > 1:
        raise UserError(
            f"train.sequence_parallel is {options.train.sequence_parallel}, but it divides text alone, and the data has "
            "images; leave it out"
        )


def _print_models(
    options: RunOptions,
    loaded: LoadedTarget,
    drafter: Drafter,
    adapter: Adapter | None,
    started: bool,
    lora: str,
    console: Console,
) -> None:
    """Print target, drafter and adapter with their sizes. started: training begins with the weights of `train.init`.

    lora: what is trained in place of the drafter's weights; empty: these are.
    """
    about, path = loaded.description, loaded.description["path"] or loaded.description["name"]
    size = f"{about['parameters']:,} parameters, {about['blocks']} blocks"
    console.say(f"target: {about['architecture']}, {size} ({path}, {about['runner']} runner)")
    if about["runner_reason"]:
        console.say(f"the fast runner cannot run this target: {about['runner_reason']}")
    if about["chains_reason"]:
        console.say(f"this target verifies chains, not trees, so drafts are chains: {about['chains_reason']}")
    if about["attention_reason"]:
        console.say(f"target.attention is eager: {about['attention_reason']}")
    if about["capture_reason"]:
        console.say(f"decode steps run without CUDA graphs: {about['capture_reason']}")
    if about.get("weights"):
        console.say(f"target.weights={about['weights']} saves memory, not time: weights are dequantised for each product")
    operators = library.state_on(loaded.target.device)
    if not operators.loaded:
        console.say(f"operators: {operators.text}")
    begun = f", from {options.train.init}" if started and options.train.init else ""
    kind = "frozen" if lora else "trainable"
    console.say(f"drafter: {options.drafter.family}, {trainable(drafter):,} {kind} parameters{begun}{lora}")
    if adapter is not None:
        console.say(f"adapter of the target: rank {adapter.spec.rank}, {trainable(adapter):,} trainable parameters")
    if drafter.remark:
        console.say(drafter.remark)


def _check_end(options: RunOptions, loaded: LoadedTarget, drafter: Drafter) -> None:
    """Raise UserError for what would fail after training: the measurement, and a checkpoint that does not fit on the disk."""
    if options.measure.enabled:
        check_measurement(loaded, drafter, options.decode, options.measure)
        room = loaded.target.shape.max_positions - options.decode.max_new_tokens
        cases, _ = encode_cases(measurement_prompts(options), loaded.tokenizer, room, loaded.images)
        check_images(drafter, any(has_images(case.tokens) for case in cases))
    else:
        decoder_of(loaded, options.decode, drafter)
    folder = next(path for path in (Path(options.output).absolute(), *Path(options.output).absolute().parents) if path.is_dir())
    trained, frozen = trained_and_frozen(drafter, options.train.lora, loaded.target.shape.vocab_size)
    needed, free = CHECKPOINT * trained + FROZEN * frozen, shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"output {folder} has {format_bytes(free)} free, but a checkpoint of this drafter and its optimiser needs "
            f"{format_bytes(needed)}; free some space, or set output"
        )


def _quick_measure(
    options: RunOptions, loaded: LoadedTarget, drafter: Drafter, adapter: Adapter | None, where: Placement
) -> Callable[[Drafter], dict[str, float]]:
    """The small measurement of `measure.every`. Raises UserError for a target that is adapted or shared."""
    if adapter is not None:
        raise UserError("measure.every decodes with the original target, but this family adapts it; leave measure.every out")
    if where.shared:
        raise UserError(
            f"measure.every needs the whole target on rank 0, but target.placement={where.placement} splits it; leave "
            "measure.every out"
        )
    decoder_of(loaded, options.decode, drafter)
    return quick_measurement(loaded, options.decode, options.measure, measurement_prompts(options))


def _with_origin(data: Dataset, options: RunOptions, loaded: LoadedTarget, where: Placement, console: Console) -> Dataset:
    """Print who wrote the data's replies and which evaluation prompts it contains, and add both to the data's summary."""
    origin = origin_of(options, loaded, data, where.shared)
    for line in origin.lines(options):
        console.say(line)
    summary = {"origin": origin.summary}
    if options.measure.enabled and data.conversations is not None:
        ngram, overlap = options.inspect.ngram, options.inspect.overlap
        found = contamination(data.conversations.sources, measurement_prompts(options), ngram, overlap, SEARCHED)
        if copies := found.line():
            console.say(copies)
        summary["contamination"] = found.summary
    return replace(data, summary=data.summary | summary)


def _with_features(job: TrainingJob, options: RunOptions, world: World, console: Console, served: ExitStack) -> TrainingJob:
    """The job with its source of states, unless the target computes them in every step. served: ends a server started here."""
    if options.features.name == "online":
        return job
    if options.features.name == "engine":
        longest = min(options.data.max_length, job.loaded.target.shape.max_positions)
        features = EngineFeatures(options.features, job.loaded, job.drafter.taps, longest)
        servers = served.enter_context(states_servers(features, options, world, console))
        states = features.features(job.data, servers.urls, servers.folder, servers.way_out, world, console)
        served.callback(states.close)
        return replace(job, features=states)
    root = Path(options.features.dir or Path(options.output) / "features").expanduser()
    caching = Caching(options.features, job.loaded, job.drafter.taps, root, options.train.micro_batch)
    return replace(job, features=caching.features(job.data, world, console))


def _states_totals(job: TrainingJob, console: Console) -> dict[str, Any] | None:
    """What the servers gave, for the report; it is printed. None where the states came from elsewhere."""
    if not isinstance(job.features, EngineStates):
        return None
    totals = job.features.totals()
    if totals["tokens_per_s"] is not None:
        console.say(
            f"features: {totals['requests']:,} conversations, {totals['tokens']:,} tokens from {totals['engine']} at "
            f"{totals['tokens_per_s']:,.0f} tokens/s; training waited for {totals['wait_share']:.0%} of the time, "
            f"{totals['repeated']} requests were repeated"
        )
    return totals


def _start(
    options: RunOptions, loaded: LoadedTarget, drafter: Drafter, adapter: Adapter | None, console: Console
) -> dict[str, Tensor] | None:
    init = options.train.init
    if init is None:
        return None
    if not drafter.trained:
        raise UserError(f"train.init is {init!r}; {options.drafter.family} trains nothing, leave it out")
    source = CheckpointSource.of(init)
    if source.family != options.drafter.family:
        raise UserError(
            f"train.init {init} is of the family {source.family}, but this drafter is of {options.drafter.family}; "
            f"give a checkpoint of {options.drafter.family}"
        )
    directory = source.checkpoint(loaded, console.say)
    check_start(init, read_meta(directory), asdict(options.drafter), drafter.resolved_options())
    return start_weights(directory, drafter, adapter)


def _lora(options: RunOptions, loaded: LoadedTarget, drafter: Drafter, start: dict[str, Tensor] | None) -> str:
    """What `train.lora` trains, in words; empty if nothing. Raises UserError where it cannot train this drafter."""
    lora = options.train.lora
    if not lora.rank:
        return ""
    if start is None:
        raise UserError(
            f"train.lora.rank is {lora.rank} without train.init, but LoRA on random weights learns nothing; "
            "give a checkpoint or published drafter as train.init"
        )
    if drafter.adapts is not None:
        raise UserError(f"train.lora.rank is {lora.rank}, but this family also adapts its target; set drafter.adapter.rank=0")
    maps = adapted_maps(drafter, lora, loaded.target.shape.vocab_size)
    return f"; LoRA of rank {lora.rank} on {len(maps)} linear maps, {added(maps, lora.rank):,} trainable parameters"


def _adapter(options: RunOptions, loaded: LoadedTarget, drafter: Drafter) -> Adapter | None:
    """The adapter of the target, if the family trains one."""
    if drafter.adapts is None:
        return None
    if options.deepspeed.zero_stage == 3:
        raise UserError(
            "deepspeed.zero_stage is 3, but an adapter of the target trains only at lower stages; set it to 0, 1 or 2"
        )
    return Adapter(loaded.target, drafter.adapts)


def _finish(
    options: RunOptions,
    loaded: LoadedTarget,
    run: RunDirectory,
    progress: Progress,
    data: Dataset,
    states: dict[str, Any] | None,
    logger: Logger | None,
    console: RichConsole,
    advise: bool,
) -> None:
    """Measure the kept checkpoints, log, mark the run as finished, and print the next steps if `advise`.

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
    best = chosen or checkpoints[-1].name
    if options.measure.enabled:
        refs = [CheckpointRef(c.name, c, int(c.name.split("-")[1])) for c in checkpoints]
        report = measure_run(
            loaded, refs, options, run.path, console, training, run.path / "metrics.jsonl", data.held_out, chosen
        )
        best = report["best"].split()[0]  # a variant's row is named after its checkpoint
        files = [run.path / f"report.{kind}" for kind in ("json", "md", "html")]
        if logger is not None:
            logger.report(report, sorted(run.path.glob("**/*.png")), checkpoints, files)
    if logger is not None:
        run.finish()
    if advise:
        _next_steps(run.path / "checkpoints" / best, options, console)


def _chosen_by_engine(options: RunOptions, checkpoints: list[Path], console: RichConsole) -> str | None:
    """The name of the best checkpoint by the engine's tau, if `measure.best=engine` and it has measured any."""
    if options.measure.best != ENGINE:
        return None
    found = {path.name: figures["tau"] for path in checkpoints if (figures := engine_figures(path))}
    others, label = [path.name for path in checkpoints if path.name not in found], options.measure.engine
    if not found:
        print_note(console, f"measure.best=engine: {label} has measured no kept checkpoint, so our own figures choose the best")
        return None
    best = best_checkpoint(checkpoints[0].parent, by_engine=True).name
    print_line(console, f"best checkpoint by {label}: {best}, tau {found[best]:.2f}")
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
                opened = Opened.of(directory, loaded)
                if opened.drafter.trained:
                    golden.store(directory, golden.made(opened, golden.sequences_for(loaded)))
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


def _next_steps(best: Path, options: RunOptions, console: RichConsole) -> None:
    target = target_arguments(options)
    print_line(console, "\nnext:")
    for command, purpose in (
        (f"drafttrain measure checkpoint={best}{target} prompts=FILE", "measure it on your own prompts (MT-bench format)"),
        (f"drafttrain measure checkpoint={best}{target} decode=sampling", "measure lossless sampling at temperature 1"),
        (f"drafttrain export checkpoint={best}{target} format=all out=DIR", "write it for the serving stacks that load it"),
        ("drafttrain fit recipe=NAME target=hf target.path=DIR data.path=FILE", "distil a drafter for your own target"),
    ):
        print_line(console, f"  {command}\n      {purpose}")
