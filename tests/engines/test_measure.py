"""Real engines beside our decoder in one report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import python_for, trained
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
def test_an_engines_tau_is_ours(engine: str, drafter: str, command: Callable[..., int], tmp_path: Path) -> None:
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
    assert [part["value"] for part in entry["slices"]] == ([1, 2] if engine in ("vllm", "llamacpp") else [1])
