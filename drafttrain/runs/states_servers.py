"""The servers that compute a run's states: those that are named, or one that is started on this machine."""

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
from drafttrain.engines.mooncake_master import mooncake_master
from drafttrain.engines.process import python_of
from drafttrain.engines.sglang_command import blocks_line, capture_line, final_line
from drafttrain.engines.states_server import CPU_CONNECTOR, CPU_MOONCAKE, states_server
from drafttrain.engines.vllm_command import mooncake_connector, serve_arguments, serve_line
from drafttrain.features import FeatureOptions
from drafttrain.features.mooncake_store import StoreSettings
from drafttrain.model.target import FINAL
from drafttrain.runs.options import RunOptions
from drafttrain.train.engine import World
from drafttrain.train.engine_features import EngineFeatures
from drafttrain.train.progress import Console

SHARED_MEMORY = Path("/dev/shm")
NAME = "drafttrain-states"


@dataclass(frozen=True, slots=True)
class StatesServers:
    """Where states come from."""

    urls: list[str]
    folder: Path | None  # where this machine sees the servers' files; None: where the servers say
    way_out: str = "set features=online, or start a server by hand (docs/engine.md)"  # where they give other states
    store: StoreSettings | None = None  # Mooncake's, through which the states come; None: in files


@contextmanager
def states_servers(features: EngineFeatures, options: RunOptions, world: World, console: Console) -> Iterator[StatesServers]:
    """The run's servers. One that is started here ends with the context; its files are removed.

    Raises UserError on all processes where it does not start.
    """
    given = options.features
    if given.servers:
        folder = None if given.dir is None else Path(given.dir).expanduser().absolute()
        store = None if given.transport == "files" else _store(given, str(given.mooncake.master))
        yield StatesServers(list(given.servers), folder, f"{_way_out(features, given, store)} (docs/engine.md)", store)
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) != world.size:
        raise UserError(
            "features.servers is empty, but the run has several machines, which would not see the files of a server that is "
            "started on the first; start servers and name them in features.servers (docs/engine.md)"
        )
    if not world.first:
        found: StatesServers | str = world.share(None)
        if isinstance(found, str):
            raise UserError(found)
        yield found
        return
    told = False
    try:
        with _started(features, options, console) as here:
            world.share(here)
            told = True
            yield here
    except UserError as error:
        if not told:
            world.share(str(error))
        raise


def _way_out(features: EngineFeatures, given: FeatureOptions, store: StoreSettings | None) -> str:
    """How to start servers that give the states."""
    path, longest, layers = features.loaded.path, features.longest, features.layers
    if given.engine == "vllm":
        connector = None if store is None else _connector(given, store.master, urlsplit(given.servers[0]).hostname or "HOST")
        return f"start it so: {serve_line(path, layers.ids, given.dir or '/dev/shm/states', longest, connector)}"
    blocks = [key for key in layers.keys if key != FINAL]
    if store is not None:
        return f"start SGLang with SpecForge's patch so: {capture_line(path, longest, blocks, store.master)}"
    if not blocks:
        return f"start it so: {final_line(path, longest)}"
    if given.final_servers:
        tapped, final = blocks_line(path, longest, blocks), final_line(path, longest)
        return f"start those of features.servers so: {tapped} and those of features.final_servers so: {final}"
    return (
        "released SGLang gives both to few architectures: name servers of the final state in features.final_servers, or use "
        "SpecForge's patch with features.transport=mooncake"
    )


@contextmanager
def _started(features: EngineFeatures, options: RunOptions, console: Console) -> Iterator[StatesServers]:
    target, loaded = options.target, features.loaded
    if target.weights is not None:
        raise UserError(
            f"target.weights is {target.weights}, which the server would not have; leave it out, or name servers of the same "
            "weights in features.servers"
        )
    python = python_of(options.features.engine, options.features.python, "features.python")
    folder = _folder(options)
    path = Path(loaded.path).expanduser()
    on_cpu = loaded.target.device.type == "cpu"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        store, connector = None, CPU_CONNECTOR if on_cpu else None
        if options.features.transport == "mooncake":
            own = options.features.mooncake.master or stack.enter_context(mooncake_master(folder / "master.log", console.say))
            store = _store(options.features, own)
            store.check()
            connector = _connector(options.features, own, store.host or "127.0.0.1") | (CPU_MOONCAKE if on_cpu else {})
        model = str(path.absolute()) if path.exists() else loaded.path
        arguments = serve_arguments(model, features.layers.ids, str(folder), features.longest, connector)
        arguments += _more(options, on_cpu)
        console.say("features: starting vLLM, which takes a minute or more")
        server = stack.enter_context(states_server(python, arguments, folder / "vllm.log", console.say))
        yield StatesServers([server.url], folder, store=store)


def _more(options: RunOptions, on_cpu: bool) -> list[str]:
    """Further arguments of `vllm`."""
    target = options.target
    arguments = ["--dtype", target.dtype, "--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])]
    arguments += ["--revision", target.revision] if target.revision is not None else []
    arguments += ["--trust-remote-code"] if target.trust_remote_code else []
    return [*arguments, *options.features.arguments]


def _store(given: FeatureOptions, master: str) -> StoreSettings:
    """How this machine reaches the store."""
    own = given.mooncake
    return StoreSettings(master, own.host, own.protocol, own.device, own.buffer)


def _connector(given: FeatureOptions, master: str, host: str) -> dict[str, Any]:
    """The settings of a server's connector. host: of the server."""
    own = given.mooncake
    return mooncake_connector(master, host, own.protocol, own.device, own.segment)


def _folder(options: RunOptions) -> Path:
    """A new folder for the files of this process's server. Those of processes that have ended are removed."""
    if options.features.dir is not None:
        root = Path(options.features.dir).expanduser().absolute()
    else:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(options.output).absolute()
    root.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # the server of a killed run may still be ending: its files are removed at the next start
        remove_abandoned(root, f"{NAME}.tmp-*")
    folder = root / f"{NAME}.tmp-{HOST}-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder
