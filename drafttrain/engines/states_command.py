"""What the servers of a run's states give, and the arguments and variables of a process that gives it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.engines.process import ENGINES, SCRIPTS, environment, without_launcher
from drafttrain.engines.states_server import HERE
from drafttrain.engines.vllm_command import mooncake_connector, serve_arguments

CONNECTORS = SCRIPTS / "connectors"
CPU_CONNECTOR = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "drafttrain_cpu_connector"}
CPU_MOONCAKE = {"kv_connector": "CpuMooncakeConnector", "kv_connector_module_path": "drafttrain_cpu_mooncake"}
IPV6 = "MC_USE_IPV6"  # variable that Mooncake reads
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of the cache on a CPU, 1 unless the user sets it


@dataclass(frozen=True, slots=True)
class ServedStates:
    """What servers give. It travels to other machines as JSON."""

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
    known = without_launcher(environment(ENGINES[served.engine]))
    known["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # of a conversation with all positions: the answer's is never computed
    known[SPACE] = os.environ.get(SPACE, known[SPACE])
    known.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # without its own process an engine writes the last file only later
    known["PYTHONPATH"] = str(CONNECTORS)
    if gpus:
        known["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return [*arguments, *served.arguments], known
