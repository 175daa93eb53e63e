"""Real engines beside our decoder in one report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.engines.states_server import ServedStates, StatesServer, free_ports, running, server_process
from tests.engines.conftest import ROOT, python_for, trained
from tests.unit.measure.test_runner import SCHEMA, check

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("engine", "drafter"),
    [
        ("openvino", "draft_model"),
        ("openvino", "eagle3"),
        ("openvino", "dflash"),
        ("transformers", "dflash"),
        ("llamacpp", "draft_model"),
        ("vllm", "draft_model"),
        ("vllm", "dflash"),
    ],
)
def test_measure_engine_tau_matches_decoder_tau(engine: str, drafter: str, command: Callable[..., int], tmp_path: Path) -> None:
    python = python_for(engine)
    code = command(
        "measure", f"checkpoint={trained(drafter)}", f"engine={engine}", f"engine_python={python}", "measure.limit=4",
        "decode.max_new_tokens=48", "measure.batch_sizes=[1,2]", "measure.repeats=2", "measure.transformers=false",
    )  # fmt: skip
    assert code == 0
    (file,) = tmp_path.glob("outputs/measure/*/report.json")
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    check(report, SCHEMA)
    (entry,) = report["engines"]
    assert entry["error"] is None and entry["flags"] == []
    assert entry["prompts"] == entry["exact_matches"] == entry["same_as_here"] == 4
    assert entry["tau"] == pytest.approx(entry["tau_here"], rel=0.02), "the round that ends a text is counted in several ways"
    assert entry["speedup"] > 0 and entry["tokens_per_s"] > 0
    counts_positions = engine in ("transformers", "vllm")
    assert (entry["accepted_by_position"] is not None) == counts_positions
    assert not counts_positions or sum(entry["accepted_by_position"]) == entry["accepted"]
    assert [part["value"] for part in entry["slices"]] == ([1, 2] if engine in ("vllm", "llamacpp") else [1])


def test_measure_vllm_server_counts_equal_in_process_vllm(command: Callable[..., int], tmp_path: Path) -> None:
    """And as our decoder does."""
    python, out = Path(python_for("vllm")), tmp_path / "exported"
    assert command("export", f"checkpoint={trained('eagle')}", "format=vllm", f"out={out}") == 0
    drafts = {"method": "eagle", "model": str(out), "num_speculative_tokens": 3}
    serve = ["serve", str(ROOT / "drafttrain" / "assets" / "tiny"), "--dtype", "float32", "--max-model-len", "1024"]
    serve += ["--no-enable-prefix-caching", "--enforce-eager", "--speculative-config", json.dumps(drafts)]
    _, environment = server_process(ServedStates("vllm", serve[1], (1,), 1, str(tmp_path), "float32"), (), 1, on_cpu=True)
    server = StatesServer(python, serve, environment, tmp_path / "log", print, free_ports(1)[0])
    with running([server]):
        code = command(
            "measure", f"checkpoint={trained('eagle')}", "engine=[vllm,http]", f"engine_url={server.url}/v1",
            f"engine_python={python}", "measure.limit=4", "decode.max_new_tokens=48", "decode.draft_length=3",
            "measure.batch_sizes=[1,2]", "measure.repeats=1", "measure.minutes=10", "measure.transformers=false",
        )  # fmt: skip
    assert code == 0
    (file,) = tmp_path.glob("outputs/measure/*/report.json")
    process, http = json.loads(file.read_text(encoding="utf-8"))["engines"]
    assert http["notes"] == http["flags"] == []
    for inside, outside in zip(process["slices"], http["slices"], strict=True):
        same = ("verifications", "drafted", "accepted", "accepted_by_position", "alpha_by_position", "tau")
        assert [outside[key] for key in same] == [inside[key] for key in same]
        assert outside["alpha_by_position"] == outside["alpha_by_position_here"]
