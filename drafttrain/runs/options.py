"""Everything one run is made of, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafttrain.data import DataOptions, InspectOptions, PrepareOptions
from drafttrain.features import FeatureOptions
from drafttrain.measure import DecodeOptions, MeasureOptions, TuneOptions
from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.simulate import SimulateOptions
from drafttrain.objective.losses import LossOptions
from drafttrain.targets import TargetOptions
from drafttrain.train import DeepSpeedOptions, LoggerOptions, TrainOptions


@dataclass
class SlurmOptions:
    """What `sbatch` is asked for by launcher=slurm; null leaves it to the cluster."""

    partition: str | None = None
    account: str | None = None
    minutes: int = 60  # the job's time limit
    gpus_per_node: int | None = None  # null: launcher.nproc; 0: none
    cpus_per_task: int | None = None
    save_before: int = 120  # seconds before the limit at which the run saves, ends and is queued again
    requeues: int = 100  # times at most
    port: int = 29400  # of the first node, where processes meet
    folder: str = "outputs/slurm"  # scripts and output of jobs
    extra: dict[str, Any] = field(default_factory=dict)  # more of sbatch's options, as they are: {constraint: h100}


@dataclass
class LauncherOptions:
    """name local: this process, or `nproc` on each of `nodes` machines, where the same command is started on each with the same
    `rendezvous`. name slurm: a job that does so. Under torchrun all stay as they are.
    """

    name: str = "local"  # local | slurm
    nproc: int = 1  # processes per machine
    nodes: int = 1
    rendezvous: str | None = None  # HOST:PORT, with nodes above 1
    restarts: int = 0  # times that all processes start again from the last checkpoint after one has failed
    slurm: SlurmOptions = field(default_factory=SlurmOptions)


@dataclass
class RunOptions:
    """The whole configuration of every command, resolved. `drafter` is the family's own options object."""

    target: TargetOptions = field(default_factory=TargetOptions)
    drafter: Any = None
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
    name: str = "default"  # the recipe's name; runs land in <output>/<name>/<time>/
    output: str = "outputs"
    # prepare: the new data set's directory; inspect: the page, an .html file; export: the directory, with format=all one for
    # each stack in it; verify: what was exported; compare: the directory of its files; simulate: the picture, a .png file
    out: str | None = None
    resume: str | None = None  # auto: the newest unfinished run of this configuration; or a run directory
    # measure, tune, generate, export, verify, simulate: a checkpoint directory; the first four take published drafters too, by
    # directory or hub id
    checkpoint: str | None = None
    report: str | None = None  # simulate: the report.json to start from, or its run
    prompts: str | None = None  # measure, tune, verify, inspect: a prompt file instead of measure.prompts
    prompt: str | None = None  # generate: the text; null: standard input, or a chat on a terminal
    chat: bool = True  # generate: apply the chat template and remember turns; false continues the text as it is
    format: str | None = None  # export: vllm | sglang | trtllm | speculators | transformers | llamacpp | openvino | ... | all
    dtype: str | None = None  # export: of the weights: float32 | bfloat16 | float16; null: as the target was loaded in training
    adapter: bool = False  # export: what was trained by low-rank matrices as a peft adapter instead of merged
    overwrite: bool = False  # export: replace an earlier export in `out`
    max_shard_size: str = "5GB"  # export: of one weights file
    with_target: bool = False  # export: the target as GGUF too, with format=llamacpp
    push_to_hub: str | None = None  # export: upload `out` to this repository of the Hugging Face hub, OWNER/NAME
    push_private: bool = True  # export: as a private repository, where it is a new one
    # verify: vllm | openvino | transformers | speculators | llamacpp; measure: one of them but speculators, or http | sglang (a
    # server), a list, or all that are installed and load the drafter
    engine: Any = None
    engine_python: str | None = None  # the Python that has it; null: .venv-engines/<engine>/bin/python, else this one
    engine_url: str | None = None  # measure engine=http: of a server with speculation, http://HOST:PORT/v1
    engine_plain_url: str | None = None  # measure engine=http: of the same without
    engine_model: str | None = None  # its name at both; null: the only one there
    engine_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the servers' key, where they want one
    engine_api: str = "tokens"  # tokens: completions of our token ids | chat: messages, by the server's own template
    runs: list[str] = field(default_factory=list)  # compare: what the words without a key name
    recipe: str | None = None
