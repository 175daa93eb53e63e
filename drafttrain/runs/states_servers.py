"""The servers that compute a run's states: those that are named, or those that are started, here or on other machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST, remove_abandoned
from drafttrain.engines.process import python_of
from drafttrain.engines.states_server import (
    HERE,
    IMAGES,
    ServedStates,
    StatesServer,
    blocks_line,
    capture_line,
    final_line,
    free_ports,
    mooncake_connector,
    mooncake_master,
    running,
    serve_line,
    server_process,
)
from drafttrain.features import FeatureOptions
from drafttrain.features.mooncake_store import StoreSettings
from drafttrain.model.target import FINAL
from drafttrain.runs.options import RunOptions
from drafttrain.runs.server_machines import MEETING, asked, servers_next_to_trainers, visible_gpus
from drafttrain.targets.devices import NUMBER
from drafttrain.train.engine import World
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.progress import Console

SHARED_MEMORY = Path("/dev/shm")
NAME = "drafttrain-states"


@dataclass(frozen=True, slots=True)
class StatesServers:
    """Where this process's states come from."""

    urls: list[str]
    folder: Path | None  # where this machine sees the servers' files; None: where the servers say
    way_out: str = "set features=online, or start a server by hand (docs/engine.md)"  # where they give other states
    store: StoreSettings | None = None  # Mooncake's, through which the states come; None: in files


@contextmanager
def states_servers(features: EngineFeatures, options: RunOptions, world: World, console: Console) -> Iterator[StatesServers]:
    """The run's servers. Those that are started for it end with the context; their files are removed.

    Raises UserError on all processes where one does not start.
    """
    settings = options.features
    if settings.servers:
        folder = None if settings.dir is None else Path(settings.dir).expanduser().absolute()
        store = None if settings.transport == "files" else _store(settings)
        yield StatesServers(list(settings.servers), folder, f"{_way_out(features, settings, store)} (docs/engine.md)", store)
        return
    local_rank = int(os.environ.get(NUMBER, os.environ.get("LOCAL_RANK", "0")))  # of this process on its machine
    with ExitStack() as stack:
        local_servers: StatesServers | str | None = None
        try:
            if settings.nodes and world.first:
                local_servers = stack.enter_context(_elsewhere(features, options, console))
            elif not settings.nodes and local_rank == 0:
                local_servers = stack.enter_context(_here(features, options, console))
        except UserError as error:
            local_servers = str(error)
        by_rank: list[StatesServers | str | None] = world.gather(local_servers)
        for outcome in by_rank:
            if isinstance(outcome, str):
                raise UserError(outcome)
        servers = by_rank[0 if settings.nodes else world.rank - local_rank]
        assert isinstance(servers, StatesServers)
        for fault in world.gather(_unseen(servers.folder) if servers.store is None else None):
            if fault is not None:
                raise UserError(fault)
        yield servers


def _way_out(features: EngineFeatures, settings: FeatureOptions, store: StoreSettings | None) -> str:
    """How to start servers that give the states."""
    path, longest, layers = features.loaded.path, features.longest, features.layers
    if settings.engine == "vllm":
        host = urlsplit(settings.servers[0]).hostname or "HOST"
        connector = None if store is None else mooncake_connector(host=host, **_mooncake(settings, store.master))
        line = serve_line(path, layers.ids, settings.dir or "/dev/shm/states", longest, connector)
        return f"start it so: {line}{f' {IMAGES}' if features.images else ''}"
    blocks = [key for key in layers.keys if key != FINAL]
    if store is not None:
        return f"start SGLang with SpecForge's patch so: {capture_line(path, longest, blocks, store.master)}"
    if not blocks:
        return f"start it so: {final_line(path, longest)}"
    if settings.final_servers:
        tapped, final = blocks_line(path, longest, blocks), final_line(path, longest)
        return f"start those of features.servers so: {tapped} and those of features.final_servers so: {final}"
    return (
        "released SGLang gives both to few architectures: name servers of the final state in features.final_servers, or use "
        "SpecForge's patch with features.transport=mooncake"
    )


@contextmanager
def _here(features: EngineFeatures, options: RunOptions, console: Console) -> Iterator[StatesServers]:
    """Servers on this machine, for its training processes alone."""
    settings, on_cpu = options.features, features.loaded.target.device.type == "cpu"
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = servers_next_to_trainers(settings, visible_gpus(), 0 if on_cpu else processes)
    python = python_of(settings.engine, settings.python, "features.python")
    folder = _folder(options)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store = None
        if settings.transport == "mooncake":
            starts_master = settings.mooncake.master is None
            store = _store(
                settings, stack.enter_context(mooncake_master(folder / "master.log", console.say)) if starts_master else None
            )
        served = _served(features, options, folder, store)
        servers, host = [], HERE if store is None else store.host or HERE
        for i, port in enumerate(free_ports(len(gpus.of_servers))):
            server_gpus, name = gpus.of_servers[i], "vLLM" if len(gpus.of_servers) == 1 else f"vLLM {i + 1}"
            arguments, environment = server_process(
                served, server_gpus, settings.tensor_parallel, on_cpu and not server_gpus, host
            )
            log = folder / f"{name.lower().replace(' ', '-')}.log"
            servers.append(StatesServer(python, arguments, environment, log, console.say, port, name=name))
        console.say(f"features: starting vLLM, which takes a minute or more: {gpus}; {_training(processes, on_cpu)}")
        stack.enter_context(running(servers))
        yield StatesServers([server.url for server in servers], folder, store=store)


@contextmanager
def _elsewhere(features: EngineFeatures, options: RunOptions, console: Console) -> Iterator[StatesServers]:
    """Servers on the `features.nodes` machines that do not train. They remove the folder of the files."""
    settings = options.features
    store = _store(settings) if settings.transport == "mooncake" else None
    root = settings.dir if store is None else settings.dir or options.output  # all machines see the output
    if MEETING not in os.environ or root is None:
        raise UserError(
            f"features.nodes is {settings.nodes}, but this run was not started by the command drafttrain fit; start "
            "servers by hand and name them in features.servers"
        )
    meeting = Path(os.environ[MEETING])
    folder = Path(root).expanduser().absolute() / f"{NAME}-{meeting.name}"  # of this run, however often its trainers start
    _make(folder)
    with asked(_served(features, options, folder, store), settings.nodes, meeting, console.say) as urls:
        yield StatesServers(urls, folder, store=store)


def _served(features: EngineFeatures, options: RunOptions, folder: Path, store: StoreSettings | None) -> ServedStates:
    target, loaded = options.target, features.loaded
    if target.weights is not None:
        raise UserError(
            f"target.weights is {target.weights}, which the server would not have; leave it out, or name servers of the same "
            "weights in features.servers"
        )
    path = Path(loaded.path).expanduser()
    return ServedStates(
        options.features.engine,
        str(path.absolute()) if path.exists() else loaded.path,
        tuple(features.layers.ids),
        features.longest,
        str(folder),
        target.dtype,
        target.revision,
        target.trust_remote_code,
        (*([IMAGES] if features.images else []), *options.features.arguments),
        None if store is None else _mooncake(options.features, store.master),
    )


def _store(settings: FeatureOptions, started: str | None = None) -> StoreSettings:
    """How this machine reaches the store. started: the address of a master of this run; None: the user's.

    Raises UserError for settings that cannot be right.
    """
    mooncake = settings.mooncake
    store = StoreSettings(started or str(mooncake.master), mooncake.host, mooncake.protocol, mooncake.device, mooncake.buffer)
    store.check()
    return store


def _mooncake(settings: FeatureOptions, master: str) -> dict[str, Any]:
    """What servers must know of the store."""
    mooncake = settings.mooncake
    return {"master": master, "protocol": mooncake.protocol, "device": mooncake.device, "segment": mooncake.segment}


def _training(processes: int, on_cpu: bool) -> str:
    """As in `4 processes train on the GPUs 0, 1, 2, 3`."""
    subject = f"{processes} process{' trains' if processes == 1 else 'es train'}"
    gpus = visible_gpus()[:processes]
    return f"{subject} on the CPU" if on_cpu else f"{subject} on the GPU{'' if len(gpus) == 1 else 's'} {', '.join(gpus)}"


def _unseen(folder: Path | None) -> str | None:
    """Why this process cannot read the servers' files."""
    if folder is None or folder.is_dir():
        return None
    return f"{folder} is not there on {HOST}; set features.dir to a folder that all machines of the run see"


def _folder(options: RunOptions) -> Path:
    """A new folder for the files of this machine's servers. Those of processes that have ended are removed."""
    if options.features.dir is not None:
        root = Path(options.features.dir).expanduser().absolute()
    else:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(options.output).absolute()
    _make(root)
    with suppress(OSError):  # the server of a killed run may still be ending: its files are removed at the next start
        remove_abandoned(root, f"{NAME}.tmp-*")
    folder = root / f"{NAME}.tmp-{HOST}-{os.getpid()}"
    _make(folder)
    return folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {folder} for the servers' states cannot be made ({error.strerror}); set features.dir to another one"
        ) from error
