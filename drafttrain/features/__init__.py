"""The target states that a drafter trains on: computed in every step, stored on disk, or computed by a serving engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.core.errors import UserError, check_at_least

NAMES = ("online", "cached", "engine")
FORMATS = ("float32", "bfloat16", "float8")
DISTRIBUTIONS = ("hidden", "top_k")


@dataclass
class FeatureOptions:
    """Where the target's states come from: docs/scaling.md explains `cached`, docs/engine.md `engine`."""

    # online: the target runs in every step. cached: it runs once over all data, then states come from disk. engine: a serving
    # engine computes them while the drafter trains, and none are stored
    name: str = "online"
    # cached: null: <output>/features; every set of features has its own folder there. engine: the folder in which this machine
    # sees the files that the servers write; null: where the servers say that they are
    dir: str | None = None
    # of cached
    format: str = "bfloat16"  # of states: float32 | bfloat16 | float8 (e4m3, one scale a row)
    law: str = "hidden"  # the target's distribution: its post-norm state (hidden), or its k largest log-probabilities (top_k)
    k: int = 64  # of law=top_k: tokens stored per position
    verify: bool = True  # checks all shards' checksums before training; false: only their sizes
    confirm_above: float = 50.0  # GiB; writing more asks for confirmation
    yes: bool = False  # writes without asking
    # of engine
    engine: str = "vllm"
    servers: list[str] = field(default_factory=list)  # http://HOST:PORT of running servers; none: one is started here
    python: str | None = None  # the engine's Python for a server started here; null: .venv-engines/<engine>/bin/python
    arguments: list[str] = field(default_factory=list)  # further arguments of a server started here, as for `vllm serve`
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the servers' key, if they need one
    ahead: int = 4  # micro-batches whose states are requested before they are due, in each process
    concurrency: int = 32  # requests at a time, in each process
    timeout: float | None = None  # seconds for one conversation's states; null: 120, and 600 if the target writes an answer
    patience: float = 600.0  # seconds to repeat a request while no server answers it
    # the target answers each conversation's last prompt anew in the engine, and the drafter trains on that answer
    answers: bool = False
    temperature: float = 1.0  # of answers; 0: greedy, the same answer in every epoch
    max_new_tokens: int = 1024  # of an answer; data.max_length bounds prompt and answer together

    @property
    def request_timeout(self) -> float:
        """Seconds for one request of `engine`."""
        return self.timeout or (600.0 if self.answers else 120.0)

    def check(self, vocab_size: int) -> None:
        """Raise UserError for unknown values and for k outside the vocabulary."""
        for name, choices in (("name", NAMES), ("format", FORMATS), ("law", DISTRIBUTIONS)):
            if getattr(self, name) not in choices:
                raise UserError(f"features.{name} is {getattr(self, name)!r}; choose {', '.join(choices)}")
        if self.law == "top_k" and not 1 <= self.k < vocab_size:
            raise UserError(f"features.k is {self.k}, the target has {vocab_size} tokens; set it within 1..{vocab_size - 1}")
        if self.answers and self.name != "engine":
            raise UserError(f"features.answers needs an engine to write them, but features is {self.name}; set features=engine")
        if self.name == "engine":
            self._check_engine()

    def _check_engine(self) -> None:
        if self.engine == "sglang":
            raise UserError(
                "features.engine is 'sglang', but unpatched SGLang gives no states of single blocks together with the last; "
                "set features.engine=vllm"
            )
        if self.engine != "vllm":
            raise UserError(f"features.engine is {self.engine!r}; choose vllm")
        check_at_least(1, "features", self, "ahead", "concurrency", "max_new_tokens")
        if not self.temperature >= 0:
            raise UserError(f"features.temperature is {self.temperature:g}; set it to 0 (greedy) or more")
        for name in ("timeout", "patience"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise UserError(f"features.{name} is {getattr(self, name):g}; set it to a number of seconds above 0")
        for name in ("python", "arguments"):
            if self.servers and getattr(self, name):
                raise UserError(
                    f"features.{name} is for a server that is started here, but features.servers names running ones; "
                    "leave one of them out"
                )
