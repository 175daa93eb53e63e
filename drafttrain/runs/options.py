"""The whole configuration of a command, as plain dataclasses, and what it says of paths. Imports nothing that takes time."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.limits import at_least, choice
from drafttrain.data import DataOptions, InspectOptions, PrepareOptions
from drafttrain.data.files import check_file, is_local, read_template
from drafttrain.drafters.options import RENAMED as RENAMED_OPTIONS
from drafttrain.features import FeatureOptions
from drafttrain.measure import DecodeOptions, MeasureOptions, TuneOptions
from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.simulate import SimulateOptions
from drafttrain.objective import LossOptions
from drafttrain.targets import TargetOptions, check_there
from drafttrain.train import DeepSpeedOptions, LoggerOptions, TrainOptions


@dataclass
class SlurmOptions:
    """The options of `sbatch` for launcher=slurm. null: the cluster's default."""

    partition: str | None = None
    account: str | None = None
    minutes: int = 60  # the job's time limit
    gpus_per_node: int | None = None  # null: launcher.nproc, and features.gpus on machines that train too; 0: none
    cpus_per_task: int | None = None
    save_before: int = 120  # seconds before the time limit at which the run saves, ends and is queued again
    requeues: int = 100  # at most, per job
    array_parallelism: int = 256  # jobs of a sweep that run at the same time, at most
    port: int | None = None  # rendezvous port on the first node; null: 15000 to 24999, by the job's number
    folder: str = "outputs/slurm"  # scripts and output of jobs
    extra: dict[str, Any] = field(default_factory=dict)  # further sbatch options: {constraint: h100}


@dataclass
class LauncherOptions:
    """How a command is launched. Leave these options out under torchrun.

    With several nodes, start the same command on each node, with the same rendezvous.
    """

    name: str = choice("local", "slurm")  # local: processes on this machine | slurm: a Slurm job
    nproc: int | str = 1  # processes per machine; auto: one for each of its GPUs that no server of features=engine has
    nodes: int = at_least(1, 1)  # machines
    role: str = choice("trainer", "server")  # of this machine, with features.nodes: trainer | server. launcher=slurm sets it
    rendezvous: str | None = None  # HOST:PORT, for several nodes
    restarts: int = at_least(0, 0)  # how often all processes may restart from the last checkpoint after one has failed
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    @property
    def processes(self) -> int:
        """Processes per machine, once `auto` is a number. Raises UserError for what is none."""
        try:
            number = int(self.nproc)
        except ValueError as error:
            raise UserError(f"launcher.nproc is {self.nproc!r}; set it to a number of processes, or to auto") from error
        if number < 1:
            raise UserError(f"launcher.nproc is {number}; set it to 1 or more")
        return number


@dataclass
class ExportOptions:
    """Changes of the drafter on its way into a stack's files."""

    stacks: list[str] = field(default_factory=list)  # fit: stacks that must load the drafter; else nothing is trained
    plan: bool = False  # only print which stacks load the recipe's drafter for this target, as `export --plan` does
    rope_scaling: Any = None  # of the drafter's layers, for contexts longer than it was trained on: {rope_type: yarn, ...}


@dataclass
class AutoOptions:
    """How `auto` chooses a drafter."""

    candidates: list[str] = field(default_factory=list)  # recipes, each with settings behind it; none: all families
    # of every recipe of all families: settings with which it races once more, where the budget is long; typed for all recipes
    also: list[str] = field(default_factory=list)
    batch_sizes: list[int] = at_least([1, 8], 1)  # whose speedups count, all the same
    parallel: int = at_least(1, 1)  # candidates that train at the same time, each with an equal share of the GPUs
    yes: bool = False  # start without asking, as --yes does
    # [I, N]: only the share of node I of N in the race; [0, N]: only what comes before the race. launcher=slurm sets it
    share: list[int] = at_least([], 0)


@dataclass
class RunOptions:
    """The whole configuration. All commands share it."""

    target: TargetOptions = field(default_factory=TargetOptions)
    drafter: Any = None  # the family's options
    data: DataOptions = field(default_factory=DataOptions)
    features: FeatureOptions = field(default_factory=FeatureOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    deepspeed: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    logger: LoggerOptions = field(default_factory=LoggerOptions)
    launcher: LauncherOptions = field(default_factory=LauncherOptions)
    prepare: PrepareOptions = field(default_factory=PrepareOptions)
    inspect: InspectOptions = field(default_factory=InspectOptions)
    tune: TuneOptions = field(default_factory=TuneOptions)
    compare: CompareOptions = field(default_factory=CompareOptions)
    simulate: SimulateOptions = field(default_factory=SimulateOptions)
    export: ExportOptions = field(default_factory=ExportOptions)
    auto: AutoOptions = field(default_factory=AutoOptions)
    name: str = "default"  # the recipe's name; runs land in <output>/<name>/<time>/
    output: str = "outputs"
    # prepare: directory of the new data set; inspect: the .html file; export: the directory (format=all: with a folder for each
    # stack); verify: an exported directory; compare: directory of its files; simulate: the .png file
    out: str | None = None
    budget: str = "1h"  # auto: time for everything, such as 45m, 8h or 2d
    resume: str | None = None  # auto: the newest unfinished run of this configuration; or a run directory
    # measure, tune, generate, export: a checkpoint directory, a run, whose best checkpoint it is, or a published drafter, by
    # directory or hub id; verify: a checkpoint directory or a run; simulate: a checkpoint directory
    checkpoint: str | None = None
    report: str | None = None  # simulate: the report.json to start from, or its run
    prompts: str | None = None  # fit, measure, tune, verify, inspect: a prompt file instead of measure.prompts
    prompt: str | None = None  # generate: the prompt; null: standard input, or a chat on a terminal
    chat: bool = True  # generate: apply the chat template and remember turns; false: continue the text without a template
    format: str | None = None  # export: vllm | sglang | trtllm | speculators | transformers | llamacpp | openvino | ... | all
    # export: dtype of the weights, float32 | bfloat16 | float16; null: that of the target in training
    dtype: str | None = choice(None, "float32", "bfloat16", "float16")
    # export: quantise the weights of the drafter's layers, fp8 | int8 | int4, in compressed-tensors' layout
    quantize: str | None = choice(None, "fp8", "int8", "int4")
    adapter: bool = False  # export: write low-rank matrices as a peft adapter instead of merging them
    overwrite: bool = False  # export: replace an earlier export in `out`
    max_shard_size: str = "5GB"  # export: largest size of a weights file
    with_target: bool = False  # export: also write the target as GGUF, with format=llamacpp
    push_to_hub: str | None = None  # export: upload `out` to this repository of the Hugging Face hub, OWNER/NAME
    push_private: bool = True  # export: make a new repository private
    # verify: vllm | openvino | transformers | speculators | llamacpp; measure: vllm | openvino | transformers | llamacpp, a
    # server (http | sglang), a list, or all (every engine that is installed and loads the drafter)
    engine: Any = None
    engine_python: str | None = None  # the Python with the engine; null: .venv-engines/<engine>/bin/python, else this one
    engine_url: str | None = None  # measure: a server with speculation, http://HOST:PORT/v1, for engine=http
    engine_plain_url: str | None = None  # measure: a server without speculation, for engine=http
    engine_model: str | None = None  # the model's name at both servers; null: their only model
    engine_key_env: str = "OPENAI_API_KEY"  # environment variable with the servers' API key, if they need one
    # tokens: completions of our token ids | chat: messages, with the server's template
    engine_api: str = choice("tokens", "chat")
    runs: list[str] = field(default_factory=list)  # compare: the runs, named by the arguments without a key
    recipe: str | None = None


def note_renamed(key: str) -> None:
    """Say the new name of a key of an earlier version, which is read as that."""
    print(f"note: {key} is called {RENAMED[key]} now", file=sys.stderr)


def target_arguments(options: RunOptions) -> str:
    """` target=DIR`: the target's part of a command line to print; empty for the embedded target."""
    target = options.target
    if target.name == "embedded":
        return ""
    path = shlex.quote(str(target.path))
    return f" target={path}" if "/" in path else f" target={target.name} target.path={path}"


# settings that hold as they are typed: the override that makes them so, and the keys that are typed in its place. Without it a
# recipe's follow the target and the data
EXPLICIT = {
    "train.steps": ("train.exact_steps=true", ("train.exact_steps", "train.epochs")),
    "train.global_batch": ("train.least_steps=null", ("train.least_steps",)),
    "train.lr": ("train.lr_width=null", ("train.lr_width",)),
}
# keys of earlier versions, by their whole names
RENAMED = {
    "features.law": "features.distribution",
    **{f"drafter.{old}": f"drafter.{new}" for old, new in RENAMED_OPTIONS.items()},
}
# take keys of any name, which Hydra wants marked
FREE = ("loss.mix", "deepspeed.extra", "launcher.slurm.extra", "target.adapters")


def understood(words: Sequence[str]) -> list[str]:
    """The overrides that these words stand for.

    `target=DIR` names a model's directory or hub id, and `target.path=DIR` alone is such a target too.
    """
    overrides: list[str] = []
    for word in words:
        key, _, value = word.partition("=")
        if (stem := key.lstrip("+~")) in RENAMED:
            key = key.replace(stem, RENAMED[stem])
            word = f"{key}={value}"
            note_renamed(stem)
        is_path = key == "target" and ("/" in value or os.path.isdir(os.path.expanduser(value)))
        marked = f"++{word}" if key in FREE and value.startswith("{") else word
        overrides += ["target=hf", f"target.path={value}"] if is_path else [marked]
        if key == "loss" and value.isidentifier():  # a recipe's section is composed after the choice; of a sweep see `_hold`
            overrides.append(f"loss.name={value}")
    keys = {word.partition("=")[0] for word in overrides}
    if "target.path" in keys and "target" not in keys:
        overrides.append("target=hf")
    return overrides + [word for key, (word, others) in EXPLICIT.items() if key in keys and keys.isdisjoint(others)]


def check_engine_adapters(options: RunOptions, engine: Any) -> None:
    """Raise UserError for an engine that would measure prompts of adapters: it is given the base alone."""
    if options.target.adapters and engine is not None:
        raise UserError(f"target.adapters are measured by our own decoder alone, but the engine is {engine}; leave one out")


ENDS = "ends"
WHOLE_ENGINES = ("llamacpp",)  # read targets as files that the trainer writes


def ends_alone(options: RunOptions) -> bool:
    """Whether the trainer loads the target without its blocks."""
    return options.features.target == ENDS


def check_target(options: RunOptions, in_memory: bool) -> None:
    """Raise UserError where a run without the target's blocks needs them.

    in_memory: a caller has loaded the target already. Families that need blocks are refused where they are built.
    """
    features, target, measure = options.features, options.target, options.measure
    if target.adapters and features.name != "online":
        raise UserError(f"target.adapters need the target in the trainer, features={features.name}; set features=online")
    check_engine_adapters(options, measure.engine)
    if not ends_alone(options):
        return
    if in_memory:
        raise UserError("features.target is ends, but the target is in memory already; leave it out")
    if features.name != "engine":
        raise UserError(
            f"features.target is ends, but features={features.name} runs the target's blocks in the trainer; set "
            "features=engine, or features.target=whole"
        )
    if target.weights is not None:
        raise UserError(
            f"features.target is ends, but target.weights={target.weights} quantises the blocks in the trainer; leave one out"
        )
    setting, size = target.shared_by
    if size != 1 or target.placement not in ("auto", "replicated"):
        conflict = f"{setting}={size}" if size != 1 else f"target.placement={target.placement}"
        raise UserError(f"features.target is ends, but {conflict} divides the blocks among processes; leave one out")
    if measure.every and measure.engine is None:
        raise UserError(
            f"measure.every is {measure.every}, but with features.target=ends our decoder has no blocks to decode with; set "
            "measure.engine=vllm too, or leave measure.every out"
        )
    if measure.engine in WHOLE_ENGINES:
        raise UserError(
            f"measure.engine is {measure.engine}, for which the trainer writes the whole target; with features.target=ends set "
            "measure.engine=vllm"
        )


def dated_path(output: str, kind: str, suffix: str = "") -> Path:
    """`<output>/<kind>/<time><suffix>`: a new path for the results of a command."""
    return Path(output) / kind / (time.strftime("%Y-%m-%d_%H-%M-%S") + suffix)


def check_paths(options: RunOptions) -> None:
    """Raise UserError for a path that is not there, before what reads it is imported. What may be of the hub is left alone."""
    check_there(options.target)
    prompts = options.prompts or options.measure.prompts
    sets = [name for name in (prompts if isinstance(prompts, list) else [prompts]) if isinstance(name, str) and ":" not in name]
    for name in (*options.data.paths, *sets):
        path = Path(os.path.expanduser(name))
        if not has_magic(name) and not path.exists() and is_local(path):
            check_file(path)
    read_template(options.data.template)
    if options.resume not in (None, "auto") and not (Path(options.resume).expanduser() / "run.json").is_file():
        raise not_a_run(options.resume)
    for key, checkpoint in (("checkpoint", options.checkpoint), ("train.init", options.train.init)):
        if checkpoint is not None and not has_magic(checkpoint):
            _check_checkpoint(key, checkpoint, options.output)


def not_a_run(resume: str) -> UserError:
    """The error for `resume`."""
    return UserError(f"resume is {resume!r}, which is not a run directory (no run.json of one); name one, or set resume=auto")


def _check_checkpoint(key: str, name: str, output: str) -> None:
    """A relative path may also be a hub id or a run of W&B; a single word and what is in the output folder are none."""
    is_path = "/" not in name or name.startswith((".", "/", "~")) or Path(output) in Path(name).parents
    if is_path and not os.path.exists(os.path.expanduser(name)):
        raise UserError(f"{key} {name!r} does not exist; name a run, one of its step-NNNNN directories, or a published drafter")
