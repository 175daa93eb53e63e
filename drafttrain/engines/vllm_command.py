"""The command that starts a vLLM server which gives states."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

CONNECTOR = "ExampleHiddenStatesConnector"


def serve_arguments(
    model: str, layers: Sequence[int], folder: str, longest: int, connector: Mapping[str, Any] | None = None
) -> list[str]:
    """Arguments of `vllm`. layers: ids, ascending. folder: of the files. longest: tokens of the longest conversation.

    connector: settings of another connector than vLLM's own.
    """
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    speculation["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_producer", **(connector or {})}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": folder}
    length = ["--max-model-len", str(longest + 1)]  # the answer has one token
    return [
        "serve", model, *length,
        "--speculative-config", json.dumps(speculation, separators=(",", ":")),
        "--kv-transfer-config", json.dumps(transfer, separators=(",", ":")),
    ]  # fmt: skip


def serve_line(model: str, layers: Sequence[int], folder: str, longest: int) -> str:
    """The command to type."""
    return shlex.join(["vllm", *serve_arguments(model, layers, folder, longest)])
