"""A Python that "has vLLM": what `features.python` names runs the stand-in server with the arguments that vLLM would get.

`python -m tests.standin.vllm serve TARGET --speculative-config ... --kv-transfer-config ... --host ... --port ...`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from tests.standin.states_server import StandIn, serving, states_of

ROOT = Path(__file__).parents[2]
WRAPPER = """#!/bin/sh
[ "$2" = -c ] && exit 0 # the question whether it has vLLM
shift 2
cd {root} && exec {python} -m tests.standin.vllm "$@"
"""


def python(folder: Path) -> Path:
    """Write the "Python" into this folder."""
    file = folder / "python"
    file.write_text(WRAPPER.format(root=ROOT, python=sys.executable))
    file.chmod(0o755)
    return file


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--speculative-config", "--kv-transfer-config"):
        parser.add_argument(name, type=json.loads)
    for name in ("--host", "--port"):
        parser.add_argument(name)
    parser.add_argument("command")
    parser.add_argument("target")
    asked, _ = parser.parse_known_args()
    threading.Thread(target=_follow, daemon=True).start()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(asked.target, dtype=torch.float32)
    layers = asked.speculative_config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    standin = _standin(states_of(model, layers), asked.kv_transfer_config["kv_connector_extra_config"])
    with serving(standin, int(asked.port), asked.host):
        threading.Event().wait()


def _standin(compute: Any, connector: dict[str, Any]) -> StandIn:
    """As the connector's settings say where states go."""
    if "mooncake" not in connector:
        return StandIn(compute, Path(connector["shared_storage_path"]))
    from tests.standin.mooncake_server import MooncakeStandIn

    store = connector["mooncake"]
    assert store["protocol"] == "tcp" and not store["device_name"]
    segment, host = store["global_segment_size"], store["local_hostname"]
    return MooncakeStandIn(compute, store["master_server_address"], segment=segment, host=host)


def _follow() -> None:
    """End with the standard input, as drafttrain/engines/scripts/vllm_states.py does."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
