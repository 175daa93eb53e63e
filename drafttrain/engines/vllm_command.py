"""The command that starts a vLLM server which gives states."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

CONNECTOR = "ExampleHiddenStatesConnector"
MOONCAKE = "MooncakeHiddenStatesConnector"
MOONCAKE_MODULE = "hs_connectors.mooncake_hidden_states_connector"
STAGING = 64 * 2**20  # bytes for messages of errors; states are put from a buffer of the connector


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
