"""The training job of a run: target, drafter, data and states, checked against each other before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.data.contamination import contamination
from drafttrain.data.dataset import Dataset
from drafttrain.data.prompts import Prompt
from drafttrain.drafters.checkpoint import read_meta, start_weights
from drafttrain.drafters.common.drafter_lora import adapted_maps, added, trained_and_frozen
from drafttrain.features.engine import EngineStates
from drafttrain.features.vllm_source import check_placeholders
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Budget, encode_cases
from drafttrain.measure.decoding import decoder_of
from drafttrain.measure.entry import race_keys
from drafttrain.measure.runner import check_measurement
from drafttrain.model.drafter import Drafter, check_images, trainable
from drafttrain.model.images import has_images
from drafttrain.ops import library
from drafttrain.runs.checkpoint_source import CheckpointSource, check_start
from drafttrain.runs.data import measurement_prompts, print_vocabulary, training_data
from drafttrain.runs.derived import for_target
from drafttrain.runs.options import RunOptions, ends_alone
from drafttrain.runs.placement import Placement, Ready, built, load_for_training
from drafttrain.runs.provenance import origin_of
from drafttrain.runs.stacks import check_stacks
from drafttrain.runs.states_servers import states_servers
from drafttrain.runs.training_engine import ENGINE, engine_settings
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.estimate import format_bytes
from drafttrain.targets.frozen_ends import FrozenEnds, load_ends
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.images import ImageReader
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import why_slow
from drafttrain.train import TrainOptions
from drafttrain.train.caching import Caching, check_features
from drafttrain.train.engine import World
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.following import check_on_policy
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.sharding import check_sequence_parallel, language_models
from drafttrain.train.streamed_states import StreamedStates

CHECKPOINT = 16  # bytes of a trained parameter in a checkpoint: weights, master weights and two moments
FROZEN = 4  # and of a parameter that LoRA freezes
SEARCHED = 20_000  # conversations of each source that are searched for evaluation prompts before training: takes seconds
NOW, HOURS = "now", 1e9


def prepare_job(options: RunOptions, world: World, where: Placement, console: Console, ready: Ready | None) -> TrainingJob:
    """Load target, drafter and data, and check the options against them, before anything is written."""
    torch.manual_seed(options.train.seed)
    ends = load_ends(options.target, world.first, world.share) if ends_alone(options) else None
    loaded = ends.loaded if ends else ready.loaded if ready else load_for_training(options, where)
    options = for_target(options, loaded.target.shape)
    drafter = ready.drafter if ready else built(options, loaded.target)
    adapter = _adapter(options, loaded, drafter)
    initial_weights = (ready.start if ready else None) or _start(options, loaded, drafter, adapter, console)
    lora = _lora(options, loaded, drafter, initial_weights)
    decodes_here = options.measure.every and ends is None
    quick_measure = _quick_measure(options, loaded, drafter, adapter, where) if decodes_here else None
    open_engine = engine_settings(options, loaded, drafter)
    check_on_policy(drafter, options.train, options.deepspeed)
    check_sequence_parallel(options.train, options.loss, loaded.target, drafter, adapter)
    check_packing(options.data.pack, options.train, loaded.target, drafter, adapter, options.features.answers)
    check_features(options.features, drafter, options.train, loaded.target.shape.vocab_size)
    _check_end(options, loaded, drafter)
    if options.decode.tree_nodes is None and drafter.proposal.tunable and ends is not None:
        raise UserError(
            "decode.tree_nodes=null times the target's blocks, but features.target=ends loads none; set decode.tree_nodes"
        )
    if options.decode.tree_nodes is None and drafter.proposal.tunable and options.deepspeed.zero_stage == 3:
        raise UserError(
            "decode.tree_nodes=null needs whole weights, but ZeRO stage 3 shards them; set decode.tree_nodes or a lower stage"
        )
    _print_models(options, loaded, drafter, adapter, bool(initial_weights), lora, console)
    if options.export.stacks or not (where.shared or ends):
        check_stacks(options, loaded, drafter, console.say)
    data = Dataset([], [], {})
    if drafter.trained:
        records = ready.records if ready else None
        data = training_data(options.data, loaded, world, console.say, records)
        _check_images(options, loaded, drafter, data)
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
        initial_weights,
        options.target.prefetch,
        quick_measure=quick_measure,
        quick_measure_every=options.measure.every,
        open_engine=open_engine,
        best_by_engine=options.measure.best == ENGINE,
        ends=ends,
    )


def _check_images(options: RunOptions, loaded: LoadedTarget, drafter: Drafter, data: Dataset) -> None:
    """Raise UserError for conversations with images that cannot be trained on. Servers are not started yet."""
    check_images(drafter, data.has_images)
    if data.has_images and options.features.engine == "sglang":
        raise UserError("features.engine=sglang takes text alone, but the data has images; set it to vllm")
    if data.has_images and options.features.name == "engine" and isinstance(loaded.images, ImageReader):
        check_placeholders(loaded.images)
    if data.has_images and options.features.answers:
        raise UserError("features.answers continues text alone, but the data has images; leave it out")
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
    description, path = loaded.description, loaded.description["path"] or loaded.description["name"]
    size = f"{description['parameters']:,} parameters, {description['blocks']} blocks"
    runner = f"{description['runner']} runner"
    if isinstance(loaded.target, FrozenEnds):
        runner = f"{format_bytes(loaded.target.own_bytes)} of them here: features.target=ends"
    console.say(f"target: {description['architecture']}, {size} ({path}, {runner})")
    if description["runner_reason"]:
        console.say(f"the fast runner cannot run this target: {description['runner_reason']}")
    if description["chains_reason"]:
        console.say(f"this target verifies chains, not trees, so drafts are chains: {description['chains_reason']}")
    if description["attention_reason"]:
        console.say(f"target.attention is eager: {description['attention_reason']}")
    if description["capture_reason"]:
        console.say(f"decode steps run without CUDA graphs: {description['capture_reason']}")
    if reason := why_slow(loaded.target.model):
        name = f"target.weights={description['weights']}" if description.get("weights") else "the target's FP8"
        console.say(f"{name} saves memory, not time: {reason}")
    operators = library.state_on(loaded.target.device)
    if not operators.loaded:
        console.say(f"operators: {operators.text}")
    init_note = f", from {options.train.init}" if started and options.train.init else ""
    trainability = "frozen" if lora else "trainable"
    console.say(f"drafter: {options.drafter.family}, {trainable(drafter):,} {trainability} parameters{init_note}{lora}")
    if adapter is not None:
        console.say(f"adapter of the target: rank {adapter.spec.rank}, {trainable(adapter):,} trainable parameters")
    if drafter.remark:
        console.say(drafter.remark)


def _check_end(options: RunOptions, loaded: LoadedTarget, drafter: Drafter) -> None:
    """Raise UserError for what would fail after training: the measurement, and a checkpoint that does not fit on the disk."""
    if options.measure.enabled and not ends_alone(options):
        check_measurement(loaded, drafter, options.decode, options.measure)
        max_prompt_tokens = loaded.target.shape.max_positions - options.decode.max_new_tokens
        cases, _ = encode_cases(measurement_prompts(options), loaded.tokenizer, max_prompt_tokens, loaded.images)
        loaded.check_adapters(case.adapter for case in cases)
        check_images(drafter, any(has_images(case.tokens) for case in cases))
    else:
        decoder_of(loaded, options.decode, drafter)
    folder = next(path for path in (Path(options.output).absolute(), *Path(options.output).absolute().parents) if path.is_dir())
    trained_count, frozen_count = trained_and_frozen(drafter, options.train.lora, loaded.target.shape.vocab_size)
    needed_bytes, available_bytes = CHECKPOINT * trained_count + FROZEN * frozen_count, shutil.disk_usage(folder).free
    if needed_bytes > available_bytes:
        raise UserError(
            f"output {folder} has {format_bytes(available_bytes)} free, but a checkpoint of this drafter and its optimiser "
            f"needs {format_bytes(needed_bytes)}; free some space, or set output"
        )


def _quick_measure(
    options: RunOptions, loaded: LoadedTarget, drafter: Drafter, adapter: Adapter | None, placement: Placement
) -> Callable[[Drafter], dict[str, float]]:
    """The small measurement of `measure.every`. Raises UserError for a target that is adapted or shared."""
    if adapter is not None:
        raise UserError("measure.every decodes with the original target, but this family adapts it; leave measure.every out")
    if placement.shared:
        raise UserError(
            f"measure.every needs the whole target on rank 0, but target.placement={placement.placement} splits it; leave "
            "measure.every out"
        )
    decoder_of(loaded, options.decode, drafter)
    return quick_measurement(loaded, options.decode, options.measure, measurement_prompts(options))


def _with_origin(data: Dataset, options: RunOptions, loaded: LoadedTarget, placement: Placement, console: Console) -> Dataset:
    """Print who wrote the data's replies and which evaluation prompts it contains, and add both to the data's summary."""
    origin = origin_of(options, loaded, data, placement.shared or ends_alone(options))
    for line in origin.lines(options):
        console.say(line)
    summary = {"origin": origin.summary}
    if options.measure.enabled and data.conversations is not None:
        ngram, overlap = options.inspect.ngram, options.inspect.overlap
        contamination_report = contamination(data.conversations.sources, measurement_prompts(options), ngram, overlap, SEARCHED)
        if copies := contamination_report.line():
            console.say(copies)
        summary["contamination"] = contamination_report.summary
    return replace(data, summary=data.summary | summary)


def with_features(job: TrainingJob, options: RunOptions, world: World, console: Console, served: ExitStack) -> TrainingJob:
    """The job with its source of states, unless the target computes them in every step. served: ends a server started here."""
    if options.features.name == "online":
        return job
    if options.features.name == "engine":
        longest = min(options.data.max_length, job.loaded.target.shape.max_positions)
        if job.ends is not None:
            StreamedStates(job.ends, longest).learn(world, console)
        features = EngineFeatures(options.features, job.loaded, job.drafter.taps, longest)
        servers = served.enter_context(states_servers(features, options, world, console))
        states = features.features(job.data, servers.urls, servers.folder, servers.way_out, world, console, servers.store)
        served.callback(states.close)
        return replace(job, features=states)
    root = Path(options.features.dir or Path(options.output) / "features").expanduser()
    caching = Caching(options.features, job.loaded, job.drafter.taps, root, options.train.micro_batch)
    return replace(job, features=caching.features(job.data, world, console))


def states_totals(job: TrainingJob, console: Console) -> dict[str, Any] | None:
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
    if totals.get("answers"):
        console.say(
            f"features: the target wrote {totals['answers']:,} answers of {totals['answer_length']:,.0f} tokens on average, "
            f"{totals['answers_cut']:.0%} of them were cut off"
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


def check_packing(
    pack: bool, options: TrainOptions, target: HFTarget, drafter: Drafter, adapter: Adapter | None, answers: bool = False
) -> None:
    """Raise UserError for what cannot be trained with `data.pack`. answers: the target writes them during training."""
    if not pack:
        return
    if answers:
        raise UserError(
            "data.pack fills rows by the lengths of the given replies, but with features.answers the target writes others; "
            "leave one out"
        )
    if options.on_policy:
        raise UserError("train.on_policy needs one conversation per row, but data.pack puts several in a row; leave one out")
    if target.has_adapters:
        raise UserError("data.pack puts texts of several of target.adapters in a row, but a row has one; set data.pack=false")
    for model_name, model in language_models(target, drafter, adapter) if drafter.trained else ():
        if model.recurrent:
            raise UserError(
                f"data.pack puts several conversations in a row, and the recurrent layers of {model_name}, "
                f"{type(model.model).__name__}, would carry each one's state into the next; set data.pack=false"
            )


def quick_measurement(
    loaded: LoadedTarget, decode: DecodeOptions, options: MeasureOptions, prompts: Sequence[Prompt]
) -> Callable[[Drafter], dict[str, float]]:
    """A function that measures a drafter's `measured_tau` and `measured_speedup`.

    It uses the first batch size and `every_prompts` of the prompts. Raises UserError if all prompts are too long.
    """
    max_prompt_tokens = loaded.target.shape.max_positions - decode.max_new_tokens
    cases, _ = encode_cases(prompts, loaded.tokenizer, max_prompt_tokens, loaded.images)
    loaded.check_adapters(case.adapter for case in cases)
    cases, size = cases[: options.every_prompts], options.batch_sizes[0]
    single_repeat = replace(options, repeats=1, transformers=False)

    def quick_measure(drafter: Drafter) -> dict[str, float]:
        bench = Bench(loaded, decode, single_repeat, Budget(HOURS), lambda *_: None)
        keys = race_keys(bench.race({NOW: drafter.requires_grad_(False)}, cases, size, HOURS, "glance"), NOW)
        return {"measured_tau": keys["tau"] or 1.0, "measured_speedup": keys["speedup"] or 1.0}

    return quick_measure
