"""Servers of states on this machine, for the time of a training run: vLLM's, and a `mooncake_master`. Their commands."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from drafttrain.core.errors import UserError
from drafttrain.engines.process import ENGINES, SCRIPTS, SHOWN, environment, without_launcher
from drafttrain.features.sglang_source import context_length

START = 1200.0  # seconds until a server must answer: it may load a large target, and compile
LOOK, PATIENCE = 0.5, 30.0  # seconds between two looks at a server, and for it to end by itself
STARTS = 5  # of a server that ends by itself
HERE = "127.0.0.1"
MASTER_START = 60.0  # seconds until a `mooncake_master` must answer
INSTALL = "pip install 'drafttrain[mooncake]'"


@dataclass
class StatesServer:
    """A server's process. It is started again when it ends by itself, `STARTS` times at most."""

    python: Path
    arguments: Sequence[str]  # of `vllm`, without its address
    environment: Mapping[str, str]
    log: Path
    say: Callable[[str], None]
    port: int
    host: str = HERE  # the address at which it listens
    name: str = "vLLM"  # in messages
    closing: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None
    lost: str | None = None  # why it is not started again

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> None:
        """Start the process."""
        command = [str(self.python), "-P", str(SCRIPTS / "vllm_states.py"), *self.arguments]
        command += ["--host", self.host, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=self.environment,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers. Raises UserError with its last lines where it does not."""
        assert self.process is not None
        deadline, opener = monotonic() + START, build_opener(ProxyHandler({}))  # a proxy does not reach this machine
        while monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                log_tail = " | ".join(_errors(self.log)) or "its log is empty"
                raise UserError(f"{self.name} ended with {code} as it started: {log_tail}")
            with suppress(URLError, OSError), opener.open(f"{self.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            sleep(LOOK)
        raise UserError(f"{self.name} does not answer {START:g} s after its start; see {self.log}")

    def watch(self) -> None:
        """Start the process again where it ends by itself, until `closing`."""
        assert self.process is not None
        for restarts in range(STARTS + 1):
            while (code := self.process.poll()) is None:
                if self.closing.wait(LOOK):
                    return
            if self.closing.is_set():
                return
            message = f"{self.name} ended with {code} ({' | '.join(_errors(self.log)[-1:])})"
            kill(self.process)
            if restarts == STARTS:
                self.lost = f"{message} after {STARTS} new starts, and is not started again"
                self.say(f"features: {self.lost}")
                return
            self.say(f"features: {message}; it starts again")
            self.start()

    def ask_to_end(self) -> None:
        """Send the process SIGTERM."""
        if self.process is not None:
            self.process.terminate()

    def end(self) -> None:
        """Wait for the process and its children to end, and kill them after `PATIENCE`."""
        if self.process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        kill(self.process)


@contextmanager
def running(servers: Sequence[StatesServer]) -> Iterator[None]:
    """Start the servers, wait until all answer, and watch over them; they end with the context.

    Raises UserError with the engine's own message where one does not start.
    """
    with ExitStack() as stack:
        stack.callback(_end, servers)
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        for server in servers:
            watch_thread = threading.Thread(target=server.watch, daemon=True)
            watch_thread.start()
            stack.callback(watch_thread.join)
            stack.callback(server.closing.set)
        yield


def free_ports(count: int, host: str = HERE) -> list[int]:
    """Ports of this address that nothing uses."""
    with ExitStack() as stack:  # all are held until the last one is found, so that none comes twice
        sockets = [stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) for _ in range(count)]
        for sock in sockets:
            sock.bind((host, 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


def _end(servers: Sequence[StatesServer]) -> None:
    for server in servers:
        server.closing.set()
    for server in servers:
        server.ask_to_end()
    for server in servers:
        server.end()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, with its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _errors(log: Path) -> list[str]:
    """The last lines of a log that name an error, else its last lines."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    error_lines = [line for line in lines if "Error: " in line]
    return (error_lines or lines)[-SHOWN // 4 :]


@dataclass
class Master:
    """The process. It is started again when it ends by itself, `STARTS` times at most."""

    program: Path
    log: Path
    say: Callable[[str], None]
    port: int = field(default_factory=lambda: free_ports(1)[0])
    closing: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HERE}:{self.port}"

    def start(self) -> None:
        """Start the process, and wait until it answers. Raises UserError where it does not."""
        command = [sys.executable, "-P", str(SCRIPTS / "followed.py"), str(self.program)]
        command += [f"--rpc_address={HERE}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={HERE}", f"--metrics_port={free_ports(1)[0]}", "--enable_metric_reporting=false"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        deadline = monotonic() + MASTER_START
        while monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection((HERE, self.port), LOOK):
                return
            sleep(LOOK / 10)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise UserError(f"mooncake_master does not start: {' | '.join(lines[-3:]) or 'its log is empty'}")

    def watch(self) -> None:
        """Start the process again where it ends by itself, until it is closed."""
        for _ in range(STARTS):
            assert self.process is not None
            while self.process.poll() is None:
                if self.closing.wait(LOOK):
                    return
            if self.closing.is_set():
                return
            self.say("features: mooncake_master ended; it starts again")
            kill(self.process)
            with suppress(UserError):  # the requests fail, and end the run after their patience
                self.start()


@contextmanager
def mooncake_master(log: Path, say: Callable[[str], None]) -> Iterator[str]:
    """A master that answers; its address. Raises UserError where Mooncake is not installed, or the master does not start."""
    spec = importlib.util.find_spec("mooncake")
    programs = [Path(folder) / "mooncake_master" for folder in (spec.submodule_search_locations or ())] if spec else []
    if not programs or not programs[0].is_file():
        raise UserError(f"Mooncake is not installed, so that no mooncake_master can be started; {INSTALL}")
    with suppress(OSError):  # wheels may be unpacked without the bit
        programs[0].chmod(programs[0].stat().st_mode | 0o100)
    master = Master(programs[0], log, say)
    watch_thread = threading.Thread(target=master.watch, daemon=True)
    try:
        master.start()
        watch_thread.start()
        yield master.address
    finally:
        master.closing.set()
        if watch_thread.ident is not None:
            watch_thread.join()
        if master.process is not None:
            kill(master.process)


CONNECTORS = SCRIPTS / "connectors"
CPU_CONNECTOR = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "drafttrain_cpu_connector"}
CPU_MOONCAKE = {"kv_connector": "CpuMooncakeConnector", "kv_connector_module_path": "drafttrain_cpu_mooncake"}
IPV6 = "MC_USE_IPV6"  # variable that Mooncake reads
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of the cache on a CPU, 1 unless the user sets it
SGLANG = ("python", "-m", "sglang.launch_server", "--model-path")
CONVENTION = "EAGLE3"  # of numbering blocks: b is the output of block b
CONNECTOR = "ExampleHiddenStatesConnector"
MOONCAKE = "MooncakeHiddenStatesConnector"
MOONCAKE_MODULE = "hs_connectors.mooncake_hidden_states_connector"
IMAGES = "--enable-scale-out"  # argument of vLLM that lets it take images beside token ids
STAGING = 64 * 2**20  # bytes for messages of errors; states are put from a buffer of the connector


@dataclass(frozen=True, slots=True)
class ServedStates:
    """What the servers of a run's states give. It travels to other machines as JSON."""

    engine: str
    model: str  # a directory, or an id of the hub
    layers: tuple[int, ...]  # layer ids, ascending
    longest: int  # tokens of the longest conversation
    folder: str  # of the files of states
    dtype: str
    revision: str | None = None
    trust_remote_code: bool = False
    arguments: tuple[str, ...] = ()  # further ones of the user
    mooncake: dict[str, Any] | None = None  # of the store that states go to: master, protocol, device, segment; None: files

    @staticmethod
    def of(content: Mapping[str, Any]) -> ServedStates:
        """Read it from JSON. Raises TypeError and KeyError for another form."""
        return ServedStates(**{**content, "layers": tuple(content["layers"]), "arguments": tuple(content["arguments"])})


def server_process(
    served: ServedStates, gpus: Sequence[str], tensor_parallel: int, on_cpu: bool, host: str = HERE
) -> tuple[list[str], dict[str, str]]:
    """Arguments of `vllm` without its address, and all variables of its process.

    gpus: those that the server has for itself, as CUDA_VISIBLE_DEVICES names them; empty: all that this process sees.
    host: the address of this machine for the trainers. Raises UserError where Mooncake cannot use it.
    """
    connector = CPU_CONNECTOR if on_cpu else None
    if served.mooncake is not None:
        if ":" in host and IPV6 not in os.environ:
            raise UserError(
                f"this machine's address for the trainers is {host}, but Mooncake uses IPv4 alone unless it is told; name IPv4 "
                f"addresses in launcher.rendezvous and features.mooncake.host, or set {IPV6}=1 on all machines"
            )
        connector = mooncake_connector(host=host, **served.mooncake) | (CPU_MOONCAKE if on_cpu else {})
    arguments = serve_arguments(served.model, served.layers, served.folder, served.longest, connector)
    arguments += ["--dtype", served.dtype, "--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])]
    arguments += ["--revision", served.revision] if served.revision is not None else []
    arguments += ["--trust-remote-code"] if served.trust_remote_code else []
    arguments += ["--tensor-parallel-size", str(tensor_parallel)] if tensor_parallel > 1 else []
    variables = without_launcher(environment(ENGINES[served.engine]))
    variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # of a conversation with all positions: the answer's is never computed
    variables[SPACE] = os.environ.get(SPACE, variables[SPACE])
    variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # without its own process an engine writes the last file only later
    variables["PYTHONPATH"] = str(CONNECTORS)
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return [*arguments, *served.arguments], variables


def _sglang_line(model: str, longest: int, arguments: Sequence[str]) -> str:
    length = str(context_length(longest))
    return shlex.join([*SGLANG, model, "--context-length", length, "--chunked-prefill-size", "-1", *arguments])


def final_line(model: str, longest: int) -> str:
    """Of a server that gives the state after the last norm. longest: tokens of the longest conversation."""
    return _sglang_line(model, longest, ["--return-hidden-states-mode", "full"])


def blocks_line(model: str, longest: int, blocks: Sequence[int]) -> str:
    """Of a server that gives the outputs of these blocks."""
    ids = ["--return-aux-hidden-state-layer-ids", *map(str, blocks)]
    return _sglang_line(model, longest, ["--enable-return-aux-hidden-states", "--speculative-algorithm", CONVENTION, *ids])


def capture_line(model: str, longest: int, blocks: Sequence[int], master: str) -> str:
    """Of a server with SpecForge's patch, which gives both, in the store of this master."""
    ids = ["--spec-capture-aux-layer-ids", *map(str, blocks)] if blocks else []
    store = (
        f"MOONCAKE_MASTER_SERVER_ADDR={shlex.quote(master)} MOONCAKE_METADATA_SERVER=P2PHANDSHAKE MOONCAKE_LOCAL_HOSTNAME=HOST"
    )
    return f"{store} {_sglang_line(model, longest, ['--enable-spec-capture', *ids])}"


def serve_arguments(
    model: str, layers: Sequence[int], folder: str, longest: int, connector: Mapping[str, Any] | None = None
) -> list[str]:
    """Arguments of `vllm`. layers: ids, ascending. folder: of the files. longest: tokens of the longest conversation.

    connector: settings of another connector than vLLM's own, or of more.
    """
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    speculation["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    transfer: dict[str, Any] = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", **(connector or {})}
    transfer.setdefault("kv_connector_extra_config", {"shared_storage_path": folder})
    length = ["--max-model-len", str(longest + 1)]  # the answer has one token
    # the model's own generation_config.json would limit an answer's length
    return [
        "serve", model, *length, "--generation-config", "vllm",
        "--speculative-config", json.dumps(speculation, separators=(",", ":")),
        "--kv-transfer-config", json.dumps(transfer, separators=(",", ":")),
    ]  # fmt: skip


def mooncake_connector(master: str, host: str, protocol: str, device: str, segment: int) -> dict[str, Any]:
    """Settings of hs_connectors' connector. host: of the server, for other machines. segment: bytes in which states wait."""
    settings = {"local_hostname": host, "master_server_address": master, "protocol": protocol, "device_name": device}
    sizes = {"global_segment_size": segment, "local_buffer_size": STAGING}
    return {
        "kv_connector": MOONCAKE,
        "kv_connector_module_path": MOONCAKE_MODULE,
        "kv_connector_extra_config": {"mooncake": settings | sizes},
    }


def serve_line(model: str, layers: Sequence[int], folder: str, longest: int, connector: Mapping[str, Any] | None = None) -> str:
    """The command to type."""
    return shlex.join(["vllm", *serve_arguments(model, layers, folder, longest, connector)])
