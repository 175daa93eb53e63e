"""Acceptance, speed, exactness, monitors, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafttrain.core.limits import above, at_least, biases, choice, counts, share, within


@dataclass
class MeasureOptions:
    """What is measured after training. Definitions: docs/metrics.md."""

    enabled: bool = True  # fit: measure after training; measure=off
    # embedded; a JSON-lines file with `question_id`, `category`, `turns`; a public set (spec_bench, speed_bench, mt_bench,
    # arena_hard, humaneval, mbpp, livecodebench, gsm8k, math500, aime25, alpaca, cnn_dm); NAME:FILE for a local copy of such a
    # set; or a list of these
    prompts: Any = "embedded"
    limit: int | None = at_least(None, 1)  # at most so many prompts of each file or set
    # at most so many turns of a dialogue; null: all. Each turn follows the target's own replies
    turns: int | None = at_least(None, 1)
    minutes: float = at_least(3.0, 0)  # time budget for all checkpoints; a short budget reduces repeats and timed prompts
    repeats: int = at_least(3, 1)  # repeats of the timing; contenders alternate within each
    timed_prompts: int = at_least(16, 1)  # prompts that are timed; acceptance is measured on all prompts
    batch_sizes: list[int] = at_least([1, 4], 1)  # batch sizes to time; the first one gives the headline
    temperatures: list[float] = at_least([], 0)  # further temperatures to measure, sampled by policy lossless
    # context lengths to measure, in tokens (2k: 2048), of long documents; auto: 1k, 4k, 16k, 32k as far as the target goes
    contexts: Any = counts([], "auto")
    # fit: choose the fastest chain or tree on prompts of held-out conversations first, within a third of measure.minutes. It is
    # for each of batch_sizes, kept in decode.json; the report shows it beside the one that was trained
    tune: bool = True
    tune_only: bool = False  # fit: measure no more than that choice takes; its figures are in the run's tune.json
    every: int = at_least(0, 0)  # fit: steps between small measurements, which also choose the best checkpoint; 0: none
    every_prompts: int = at_least(8, 1)  # fit: prompts of a small measurement
    # fit: with every, vllm | openvino | transformers | llamacpp loads each measured drafter too, in a process of its own while
    # training goes on, and counts its acceptance. engine_python names its Python
    engine: str | None = choice(None, "vllm", "openvino", "transformers", "llamacpp")
    engine_device: Any = None  # fit: cpu, or a GPU that training does not use, as in CUDA_VISIBLE_DEVICES; null: cpu
    engine_threads: int = at_least(1, 1)  # fit: CPU threads of the engine
    engine_timeout: float = above(1800.0, 0)  # fit: seconds after which a measurement by the engine is given up
    best: str = choice("own", "engine")  # fit: whose tau chooses the best checkpoint of a training: own (see every) | engine
    documents: str | None = None  # a text file or a folder for measure.contexts; null: Python's standard library
    # prompts decoded together where nothing is timed: acceptance and the comparison of tokens
    untimed_batch: int = at_least(8, 1)
    transformers: bool = True  # also time transformers' generate, and compare its greedy tokens


@dataclass
class TuneOptions:
    """How `drafttrain tune` searches."""

    batch_size: int | None = at_least(None, 1)  # requests decoded together; null: each of measure.batch_sizes
    # tpot: time per token of a request | throughput: tokens a second of all requests
    objective: str = choice("tpot", "throughput")
    minutes: float = above(3.0, 0)  # time budget; a short budget reduces prompts and repeats
    repeats: int = at_least(3, 1)  # repeats of the last timing
    finalists: int = at_least(4, 1)  # proposals that are timed: those of the best predicted speed
    write: bool = True  # write the choice to the checkpoint's decode.json; later decoding uses it


@dataclass
class GuardOptions:
    """Actions on outputs that go wrong.

    off: none. plain: under a lossy policy, continue by plain decoding. stop: end the output.
    """

    loop: str = choice("off", "plain", "stop")  # action where an output begins to loop: off | plain | stop
    # action where an output breaks the JSON that its prompt asks for; `generate` expects JSON of every prompt
    json: str = choice("off", "plain", "stop")
    fence: bool = True  # allow a ``` fence around the JSON


@dataclass
class DecodeOptions:
    """How the measured decoder runs."""

    # how drafts are accepted (docs/decoder.md)
    policy: str = choice("greedy", "lossless", "coupled", "typical", "threshold")
    temperature: float = at_least(0.0, 0)
    top_k: int = at_least(0, 0)
    top_p: float = share(1.0)
    min_p: float = at_least(0.0, 0, below=1)
    repetition_penalty: float = above(1.0, 0)  # of tokens in the prompt and the output
    presence_penalty: float = within(0.0, -2, 2)  # of tokens in the output
    frequency_penalty: float = within(0.0, -2, 2)  # of each occurrence in the output
    logit_bias: Any = biases()  # added to the logits of these token ids: {13: -5}; null: none. Any: Hydra fills no mapping
    threshold: float = above(0.3, 0, below=1)  # policy threshold: the least target probability of an accepted draft
    draft_temperature: float | None = at_least(None, 0)  # the drafter's sampling temperature; null: as tuned, else the target's
    draft_length: int | None = at_least(None, 1)  # deepest proposal; null: as tuned (drafttrain tune), else as trained
    window: int | None = at_least(None, 1)  # acceptance window: drafts of a path offered to one verification; null: all
    fallback: bool = False  # draft only while drafting is faster, by measured step costs and acceptance
    # decode steps that may run before the host reads results; null: 1 on a GPU, none elsewhere
    read_every: int | None = within(None, 1, 64)
    seed: int = 0
    max_new_tokens: int = at_least(128, 1)
    min_new_tokens: int = at_least(0, 0)  # no stop token before so many
    stop: list[str] = field(default_factory=list)  # strings that end an output, besides the stop tokens
    guard: GuardOptions = field(default_factory=GuardOptions)
    # node budget of families that draft trees, root excluded; null: the fastest on this machine
    tree_nodes: int | None = at_least(24, 1, null=True)
