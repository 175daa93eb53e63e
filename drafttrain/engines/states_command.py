"""What the servers of a run's states give, and the commands that start such servers: vLLM's and SGLang's."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.engines.process import ENGINES, SCRIPTS, environment, without_launcher
from drafttrain.engines.states_server import HERE
from drafttrain.features.sglang_source import context_length

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
STAGING = 64 * 2**20  # bytes for messages of errors; states are put from a buffer of the connector


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
