"""Conversations in, batches of supervised tokens out."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from drafttrain.core.limits import above, at_least, choice, share

FORM_NAMES = (  # of records, in the order in which they are tried
    *("messages", "conversations", "prompt", "alpaca", "input", "query", "turns", "input_ids", "segments", "text"),
    "question",
)
REPLY_PARTS = ("reply", "call", "reasoning")


@dataclass
class SourceOptions:
    """One source of conversations."""

    path: str = "embedded"  # embedded: replies of the embedded target. Else a file, pattern, folder, hub id or named set
    split: str = "train"  # of a folder or hub data set
    config: str | None = None  # of a hub data set with several configurations
    form: str = choice("auto", *FORM_NAMES)  # of its records: auto, or a name of the table of forms in docs/data.md
    limit: int | None = at_least(None, 1)  # at most so many of its records, the first
    revision: str | None = None  # of a hub data set: a branch, tag or commit; null: the newest
    files: str | None = None  # of a hub data set: a pattern of its files, instead of a split
    # LoRA adapter of the target (target.adapters) whose texts they are, where a record names none in a column `adapter`
    adapter: str | None = None
    # in data.mix: its share of an epoch, relative to the other sources; null for all: by size
    weight: float | None = above(None, 0, below=inf)


@dataclass
class DataOptions:
    """Where the training conversations come from, and how they become rows of tokens."""

    path: str = "embedded"  # embedded: replies of the embedded target. Else a file, pattern, folder, hub id or named set
    split: str = "train"  # of a folder or hub data set
    config: str | None = None  # of a hub data set with several configurations
    form: str = choice("auto", *FORM_NAMES)  # of its records: auto, or a name of the table of forms in docs/data.md
    limit: int | None = at_least(None, 1)  # at most so many of its records, the first
    revision: str | None = None  # of a hub data set: a branch, tag or commit; null: the newest
    files: str | None = None  # of a hub data set: a pattern of its files, instead of a split
    # LoRA adapter of the target (target.adapters) whose texts they are, where a record names none in a column `adapter`
    adapter: str | None = None
    mix: list[SourceOptions] = field(default_factory=list)  # several sources instead of one
    template: str | None = None  # a Jinja file instead of the tokenizer's own chat template
    # keep: reasoning goes to the template unchanged. drop: it is removed, and the template's thinking is off
    thinking: str = choice("keep", "drop")
    # what is learnt of the assistant's turns: their text, tool calls, reasoning
    supervise: list[str] = choice(list(REPLY_PARTS))
    date: str = "2026-01-01"  # for templates that print today's date, so that a resumed run has the same tokens on another day
    max_length: int = at_least(1024, 2)  # tokens; of longer conversations the turns are kept that fit
    # up to this many unusable records are left out and listed in rejected.txt; more are an error
    bad_records: int = at_least(0, 0)
    # conversations held out for the draft's shape and expected tau; null: an eighth, 64 at most
    held_out: int | None = at_least(None, 0)
    seed: int = 0
    group_by_length: bool = True  # batches of similar lengths, which need little padding; false: in random order
    pack: bool = False  # rows of max_length tokens hold several separate conversations; train.*_batch count rows
    workers: int | None = at_least(None, 1)  # processes that prepare large data; null: the number of cores less one, at most 16
    cache: str | None = None  # folder of prepared data; null: drafttrain/data in ~/.cache, or in $XDG_CACHE_HOME

    @property
    def paths(self) -> list[str]:
        """The paths of all sources."""
        return [source.path for source in self.mix] or [self.path]

    @property
    def named(self) -> str:
        """The sources as a user names them."""
        return f"data.mix with {', '.join(self.paths)}" if self.mix else f"data.path={self.path}"


@dataclass
class PrepareOptions:
    """How `prepare` lets the target answer the prompts of data.path. A text's noise depends only on its prompt, number and
    seed.
    """

    samples: int = at_least(1, 1)  # texts per prompt
    temperatures: list[float] = at_least([0.0], 0)  # each text is sampled at one of these
    weights: list[float] = at_least([], 0)  # relative frequency of each temperature; none: all equal
    top_p: float = share(1.0)
    top_k: int = at_least(0, 0)
    seed: int = 0
    # of one reply; null: 1024, or half of what a conversation has room for if that is less
    max_new_tokens: int | None = at_least(None, 1)
    # tokens of a conversation; a turn that leaves no room for max_new_tokens is not answered
    max_length: int = at_least(4096, 1)
    batch_size: int = at_least(32, 1)  # texts decoded together, in each process
    drop: list[str] = choice(["empty", "truncated", "loop"], "refusal")  # of data/reply_text.py: also refusal
    failures: int = at_least(100, 0)  # prompts that may fail; one more ends the command
    format: str = choice("jsonl", "parquet")  # jsonl | parquet
    shard: int = at_least(50_000, 1)  # conversations in a file
    server: str | None = None  # http://HOST:PORT/v1 of an OpenAI-compatible server that answers instead
    model: str | None = None  # the model's name there; null: the only one that the server has
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the server's key, if it needs one
    concurrency: int = at_least(64, 1)  # concurrent requests to the server, per process
    timeout: float = above(600.0, 0)  # seconds for one reply
    patience: float = at_least(600.0, 0)  # seconds to retry a request while the server is down, busy or limits its rate


@dataclass
class InspectOptions:
    """Settings of `inspect`."""

    samples: int = at_least(3, 0)  # conversations printed
    page_samples: int = at_least(24, 0)  # conversations on the page
    ngram: int = at_least(8, 1)  # consecutive words that must agree to count as copied
    overlap: float = share(0.5)  # smallest share of a prompt's n-grams in one training text that is reported
