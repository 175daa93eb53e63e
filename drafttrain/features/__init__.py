"""The target states that a drafter trains on: computed in every step, stored on disk, or computed by a serving engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.core.errors import UserError
from drafttrain.core.limits import above, at_least, choice

OF_SERVERS = (  # options of features=engine alone
    "engine", "transport", "mooncake", "servers", "final_servers", "gpus", "tensor_parallel", "count", "nodes", "python",
    "arguments",
)  # fmt: skip


@dataclass
class MooncakeOptions:
    """Mooncake's store, through which states come from other machines."""

    master: str | None = None  # HOST:PORT of a running mooncake_master; null: one is started here, with the server
    host: str | None = None  # address of this machine for the others; null: the one from which it reaches the master
    protocol: str = choice("tcp", "rdma")
    device: str = ""  # RDMA devices, with commas; empty: Mooncake chooses
    # bytes in each process in which states arrive, at least those of the longest conversation
    buffer: int = at_least(2**30, 2**20)
    segment: int = at_least(2**32, 2**20)  # bytes of a server that is started here in which states wait to be read


@dataclass
class FeatureOptions:
    """Where the target's states come from: docs/scaling.md explains `cached`, docs/engine.md `engine`."""

    # online: the target runs in every step. cached: it runs once over all data, then states come from disk. engine: a serving
    # engine computes them while the drafter trains, and none are stored
    name: str = choice("online", "cached", "engine")
    # cached: null: <output>/features; every set of features has its own folder there. engine: the folder in which this machine
    # sees the files that the servers write; null: where the servers say that they are
    dir: str | None = None
    # of cached
    # of states: float32 | bfloat16 | float8 (e4m3, one scale a row)
    format: str = choice("bfloat16", "float32", "bfloat16", "float8")
    # the target's: its post-norm state (hidden), or its k largest log-probabilities (top_k)
    distribution: str = choice("hidden", "top_k")
    k: int = 64  # of distribution=top_k: tokens stored per position
    verify: bool = True  # checks all shards' checksums before training; false: only their sizes
    confirm_above: float = 50.0  # GiB; writing more asks for confirmation
    yes: bool = False  # writes without asking
    # of engine
    engine: str = choice("vllm", "sglang")
    # how states come: files | mooncake (over a network). Of sglang: files: in the answers; mooncake: with SpecForge's patch
    transport: str = choice("files", "mooncake")
    # of the target in the trainer: whole, or its embedding, last norm and output matrix alone (ends)
    target: str = choice("whole", "ends")
    mooncake: MooncakeOptions = field(default_factory=MooncakeOptions)
    servers: list[str] = field(default_factory=list)  # http://HOST:PORT of running servers; none: they are started
    # of sglang: servers that give the final state, where `servers` give the outputs of blocks without it
    final_servers: list[str] = field(default_factory=list)
    # GPUs of each machine that are its servers' alone, the last ones; 0: servers share the trainers' GPUs
    gpus: int = at_least(0, 0)
    tensor_parallel: int = at_least(1, 1)  # GPUs of one server
    count: int | None = at_least(None, 1)  # servers that are started on a machine; null: gpus / tensor_parallel, 1 without gpus
    # of launcher.nodes, those that run servers and do not train, with all their GPUs unless gpus is set
    nodes: int = at_least(0, 0)
    python: str | None = None  # the engine's Python for servers that are started; null: .venv-engines/<engine>/bin/python
    arguments: list[str] = field(default_factory=list)  # further arguments of servers that are started, as for `vllm serve`
    key_env: str = "OPENAI_API_KEY"  # environment variable that holds the servers' key, if they need one
    ahead: int = at_least(4, 1)  # micro-batches whose states are requested before they are due, in each process
    concurrency: int = at_least(32, 1)  # requests at a time, in each process
    # seconds for one conversation's states; null: 120, and 600 if the target writes an answer
    timeout: float | None = above(None, 0)
    patience: float = above(600.0, 0)  # seconds to repeat a request while no server answers it
    # the target answers each conversation's last prompt anew in the engine, and the drafter trains on that answer
    answers: bool = False
    temperature: float = at_least(1.0, 0)  # of answers; 0: greedy, the same answer in every epoch
    max_new_tokens: int = at_least(1024, 1)  # of an answer; data.max_length bounds prompt and answer together

    @property
    def request_timeout(self) -> float:
        """Seconds for one request of `engine`."""
        return self.timeout or (600.0 if self.answers else 120.0)

    def check(self, vocab_size: int) -> None:
        """Raise UserError for options that do not fit each other, and for k outside the vocabulary."""
        if self.distribution == "top_k" and not 1 <= self.k < vocab_size:
            raise UserError(f"features.k is {self.k}, the target has {vocab_size} tokens; set it within 1..{vocab_size - 1}")
        if self.answers and self.name != "engine":
            raise UserError(f"features.answers needs an engine to write them, but features is {self.name}; set features=engine")
        if self.name == "engine":
            self._check_engine()
            return
        defaults = FeatureOptions()
        for name in OF_SERVERS:
            if getattr(self, name) != getattr(defaults, name):
                raise UserError(
                    f"features.{name} is for features=engine, but features is {self.name}; set features=engine, or leave it out"
                )

    def _check_engine(self) -> None:
        if self.engine == "sglang" and not self.servers:
            raise UserError(
                "features.engine is 'sglang', but features.servers is empty and SGLang is not started here; start servers and "
                "name them in features.servers (docs/engine.md)"
            )
        if self.engine != "sglang" and self.final_servers:
            raise UserError(
                f"features.final_servers is for features.engine=sglang, but features.engine is {self.engine!r}, whose servers "
                "give all states; leave it out"
            )
        if self.transport == "mooncake" and self.final_servers:
            raise UserError(
                "features.final_servers is for servers that give states in their answers, but with features.transport=mooncake "
                "every server gives all states; leave one of them out"
            )
        if self.answers and self.engine != "vllm":
            raise UserError(f"features.answers is true, but features.engine is {self.engine!r}; only vllm can answer")
        if self.transport == "mooncake" and self.servers and self.mooncake.master is None:
            raise UserError(
                "features.mooncake.master is empty, but features.servers names running servers; give the HOST:PORT of the "
                "mooncake_master that they use"
            )
        self.check_started()

    def check_started(self) -> None:
        """Raise UserError for options of servers that are started which do not fit each other."""
        for name in ("python", "arguments", "gpus", "count", "nodes"):
            if self.servers and getattr(self, name):
                raise UserError(
                    f"features.{name} is for servers that are started, but features.servers names running ones; "
                    "leave one of them out"
                )
        if self.gpus % self.tensor_parallel:
            raise UserError(
                f"features.gpus is {self.gpus}, but each server has features.tensor_parallel={self.tensor_parallel} GPUs; set "
                "gpus to a multiple of it"
            )
        if self.gpus and self.count is not None and self.count * self.tensor_parallel != self.gpus:
            raise UserError(
                f"features.count is {self.count}, but features.gpus={self.gpus} and features.tensor_parallel="
                f"{self.tensor_parallel} are those of {self.gpus // self.tensor_parallel} servers; leave count out"
            )
