"""Acceptance, speed, exactness, monitors, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MeasureOptions:
    """What is measured after training. Definitions: docs/metrics.md."""

    enabled: bool = True  # fit: measure after training; measure=off
    # embedded; a JSON-lines file with `question_id`, `category`, `turns`; a public set (spec_bench, mt_bench, humaneval, gsm8k,
    # math500, alpaca, cnn_dm); NAME:FILE for a local copy of such a set; or a list of these
    prompts: Any = "embedded"
    limit: int | None = None  # at most so many prompts of each file or set
    turns: int | None = None  # at most so many turns of a dialogue; null: all. Each turn follows the target's own replies
    minutes: float = 3.0  # time budget for all checkpoints; a short budget reduces repeats and timed prompts
    repeats: int = 3  # repeats of the timing; contenders alternate within each
    timed_prompts: int = 16  # prompts that are timed; acceptance is measured on all prompts
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])  # batch sizes to time; the first one gives the headline
    temperatures: list[float] = field(default_factory=list)  # further temperatures to measure, sampled by policy lossless
    contexts: list[int] = field(default_factory=list)  # context lengths to measure, in tokens, cut from long documents
    # fit: choose the fastest chain or tree on prompts of held-out conversations first, within a third of measure.minutes. It is
    # kept in decode.json; the report shows it beside the one that was trained
    tune: bool = True
    every: int = 0  # fit: steps between small measurements, which also choose the best checkpoint; 0: none
    every_prompts: int = 8  # fit: prompts of a small measurement
    # fit: with every, vllm | openvino | transformers | llamacpp loads each measured drafter too, in a process of its own while
    # training goes on, and counts its acceptance. engine_python names its Python
    engine: str | None = None
    engine_device: Any = None  # fit: cpu, or a GPU that training does not use, as in CUDA_VISIBLE_DEVICES; null: cpu
    engine_threads: int = 1  # fit: CPU threads of the engine
    engine_timeout: float = 1800.0  # fit: seconds after which a measurement by the engine is given up
    best: str = "own"  # fit: whose tau chooses the best checkpoint of a training: own (see every) | engine
    documents: str | None = None  # a text file or a folder for measure.contexts; null: Python's standard library
    untimed_batch: int = 8  # prompts decoded together where nothing is timed: acceptance and the comparison of tokens
    transformers: bool = True  # also time transformers' generate, and compare its greedy tokens


@dataclass
class TuneOptions:
    """How `drafttrain tune` searches."""

    batch_size: int = 1  # requests decoded together
    objective: str = "tpot"  # tpot: time per token of a request | throughput: tokens a second of all requests
    minutes: float = 3.0  # time budget; a short budget reduces prompts and repeats
    repeats: int = 3  # repeats of the last timing
    finalists: int = 4  # proposals that are timed: those of the best predicted speed
    write: bool = True  # write the choice to the checkpoint's decode.json; later decoding uses it


@dataclass
class GuardOptions:
    """Actions on outputs that go wrong.

    off: none. plain: under a lossy policy, continue by plain decoding. stop: end the output.
    """

    loop: str = "off"  # action where an output begins to loop: off | plain | stop
    json: str = (
        "off"  # action where an output breaks the JSON that its prompt asks for; `generate` expects JSON of every prompt
    )
    fence: bool = True  # allow a ``` fence around the JSON


@dataclass
class DecodeOptions:
    """How the measured decoder runs."""

    policy: str = "greedy"  # greedy | lossless | coupled | typical | threshold
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    threshold: float = 0.3  # policy threshold: the least target probability of an accepted draft
    draft_temperature: float | None = None  # the drafter's sampling temperature; null: as tuned, else the target's
    draft_length: int | None = None  # deepest proposal; null: as tuned (drafttrain tune), else as trained
    window: int | None = None  # acceptance window: drafts of a path offered to one verification; null: all
    fallback: bool = False  # draft only while drafting is faster, by measured step costs and acceptance
    read_every: int | None = None  # decode steps that may run before the host reads results; null: 1 on a GPU, none elsewhere
    seed: int = 0
    max_new_tokens: int = 128
    min_new_tokens: int = 0  # no stop token before so many
    stop: list[str] = field(default_factory=list)  # strings that end an output, besides the stop tokens
    guard: GuardOptions = field(default_factory=GuardOptions)
    tree_nodes: int | None = 24  # node budget of families that draft trees, root excluded; null: the fastest on this machine
