"""Acceptance, speed, exactness, monitors, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class MeasureOptions:
    """What is measured after training. Definitions: docs/metrics.md."""

    enabled: bool = True
    # embedded, a file with `question_id`, `category`, `turns` a line, or public sets: spec_bench, mt_bench, humaneval, gsm8k,
    # math500, alpaca, cnn_dm; NAME:FILE for a local file of one; a list of these
    prompts: Any = "embedded"
    limit: int | None = None  # at most so many prompts of each file or set
    turns: int | None = None  # of a dialogue at most; null: all, each behind the target's own replies
    minutes: float = 3.0  # budget for all checkpoints; fewer repeats and timed prompts are taken when it is short
    repeats: int = 3  # of the interleaved timing
    timed_prompts: int = 16  # prompts in the timing; acceptance is taken from all of them
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])  # timed; the first is the report's headline
    temperatures: list[float] = field(default_factory=list)  # slices beside decode.temperature, sampled by policy lossless
    contexts: list[int] = field(default_factory=list)  # slices: prompts of so many tokens, cut from long documents
    every: int = 0  # steps between small measurements during training, which also choose the best checkpoint; 0: none
    every_prompts: int = 8  # of a small measurement
    documents: str | None = None  # a text file or a folder for measure.contexts; null: Python's standard library
    untimed_batch: int = 8  # prompts decoded together where nothing is timed: acceptance and the comparison of tokens
    transformers: bool = True  # time transformers' generate beside it, and compare its greedy tokens


@dataclass
class TuneOptions:
    """What `drafttrain tune` looks for."""

    batch_size: int = 1  # requests decoded together
    objective: str = "tpot"  # tpot: time per token of a request | throughput: tokens a second of all requests
    minutes: float = 3.0  # budget; fewer prompts and repeats are raced when it is short
    repeats: int = 3  # of the last race
    finalists: int = 4  # shapes that are raced, the best predicted ones
    write: bool = True  # into the checkpoint's decode.json, by which it is decoded from then on


@dataclass
class GuardOptions:
    """What is done where a text begins to loop or breaks its format, in all texts or in those whose prompt asks for JSON: off |
    plain: the target decodes it plainly from there on, under a lossy policy | stop: it ends.
    """

    loop: str = "off"
    json: str = "off"  # generate: of every text
    fence: bool = True  # a ``` fence may stand around the JSON


@dataclass
class DecodeOptions:
    """How the measured decoder runs."""

    policy: str = "greedy"  # greedy | lossless | coupled | typical | threshold
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    threshold: float = 0.3  # of the policy of that name: the least probability of an accepted draft
    draft_temperature: float | None = None  # what drafters sample at; null: as tuned, else the target's
    draft_length: int | None = None  # deepest proposal; null: as tuned (drafttrain tune), else as trained
    window: int | None = None  # acceptance window: drafts of a path offered to one verification; null: all
    fallback: bool = False  # draft only while it pays, by measured step costs and acceptance
    read_every: int | None = None  # rounds that run ahead of the host's look at results; null: 1 on a GPU, none elsewhere
    seed: int = 0
    max_new_tokens: int = 128
    min_new_tokens: int = 0  # no stop token before so many
    stop: list[str] = field(default_factory=list)  # strings that end a text, besides the stop tokens
    guard: GuardOptions = field(default_factory=GuardOptions)
    tree_nodes: int | None = 24  # node budget of families that draft trees, root excluded; null: as many as pay on this machine
