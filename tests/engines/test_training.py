"""Real engines measure drafters while they train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.conftest import python_for

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("engine", "recipe"), [("vllm", "eagle3"), ("vllm", "medusa"), ("transformers", "draft_model")])
def test_fit_engine_measurement_tau_matches_decoder_tau(
    engine: str, recipe: str, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("measure.every=10", "measure.every_prompts=4", f"measure.engine={engine}", f"engine_python={python_for(engine)}")
    asked += ("measure.best=engine", "measure.repeats=1", "measure.limit=4", "measure.transformers=false")
    steps = ("train.steps=30", "train.checkpoint_every=30", "decode.max_new_tokens=32", "logger=none")
    code = command("fit", f"recipe={recipe}", *steps, *asked, "measure.minutes=0.2")
    assert code == 0
    (run,) = (file.parent for file in tmp_path.glob("outputs/*/*/run.json"))
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    steps = report["training"]["engine"]
    assert [one["step"] for one in steps][-1] == 30 and steps[0]["step"] in (0, 10)
    for one in steps:
        assert one["name"] == engine and one["tau"] == pytest.approx(one["own_tau"], rel=0.03)
    assert f"best checkpoint by {engine}: {report['best']}" in capsys.readouterr().out
    assert not list(run.rglob("*.tmp-*"))
