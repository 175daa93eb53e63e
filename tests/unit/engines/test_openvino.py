"""The script that runs OpenVINO GenAI, with modules of our own in its place."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from drafttrain.engines.process import EngineResult
from drafttrain.engines.scripts import openvino


class Anything:
    """Takes whatever it is called with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = args, kwargs


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What reached the converter, and what the pipeline was told."""
    told: dict[str, Any] = {"converted": [], "layers": None, "draft": None}

    def convert(source: str, place: str, **settings: Any) -> None:
        told["converted"].append((Path(source).name, settings["trust_remote_code"]))

    def draft_model(place: str, device: str, **settings: Any) -> None:
        told["draft"] = settings

    def name_layers(place: Path, layers: list[int]) -> None:
        told["layers"] = layers

    optimum = types.ModuleType("optimum.exporters.openvino")
    optimum.main_export = convert  # type: ignore[attr-defined]
    genai = types.ModuleType("openvino_genai")
    genai.draft_model = draft_model  # type: ignore[attr-defined]
    genai.SchedulerConfig = genai.LLMPipeline = genai.GenerationConfig = Anything  # type: ignore[attr-defined]
    for module in (types.ModuleType("optimum"), types.ModuleType("optimum.exporters"), optimum, genai):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(openvino, "version", lambda _: "1")
    counts = types.SimpleNamespace(get_num_accepted_tokens=lambda: 1, get_num_draft_tokens=lambda: 3)
    answer = types.SimpleNamespace(tokens=[[5, 6]], extended_perf_metrics=counts)
    monkeypatch.setattr(openvino, "answered", lambda *_: answer)
    monkeypatch.setattr(openvino, "name_layers", name_layers)
    return told


def job(folder: Path, family: str = "eagle3") -> dict[str, Any]:
    for name in ("target", "drafter", "scratch"):
        (folder / name).mkdir()
    places = {name: str(folder / name) for name in ("target", "drafter", "scratch")}
    about = {"family": family, "draft_length": 3, "max_new_tokens": 2, "stop_ids": [9], "facts": {"layer_inputs": [1, 2, 3]}}
    return places | about | {"prompts": [[7, 8]]}


def test_openvino_script_names_target_layers_without_running_target_code(told: dict[str, Any], tmp_path: Path) -> None:
    outcome = EngineResult.of(openvino.decoded(job(tmp_path)))
    assert told["layers"] == [0, 1, 2]
    assert told["converted"] == [("target", False), ("drafter", True)]
    assert told["draft"] == {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    assert (outcome.accepted, outcome.drafted, outcome.ends) == (1, 3, "none")


def test_openvino_script_draft_model_names_no_target_layers(told: dict[str, Any], tmp_path: Path) -> None:
    assert openvino.decoded(job(tmp_path, "draft_model"))["begins"] == "plain"
    assert told["layers"] is None


def test_openvino_script_refuses_export_that_contains_code(told: dict[str, Any], tmp_path: Path) -> None:
    asked = job(tmp_path)
    (tmp_path / "drafter" / "deep").mkdir()
    (tmp_path / "drafter" / "deep" / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match=r"has code in it \(modeling\.py\), which is not run"):
        openvino.decoded(asked)
    assert told["converted"] == []
