"""Scripts that make the documents' pictures still do."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.integration.test_training import last_weights


@pytest.mark.slow
def test_plot_step_script_draws_png_of_checkpoint(tmp_path: Path) -> None:
    settings = ("recipe=medusa", "train.steps=2", "data.limit=80", "measure.enabled=false", f"output={tmp_path / 'runs'}")
    forked.run([sys.executable, "-m", "drafttrain", "fit", *settings])
    (made,) = (tmp_path / "runs").glob("*/*")
    picture = tmp_path / "step.png"
    with forked.module("scripts.plot_step", f"checkpoint={last_weights(made).parent}", f"out={picture}") as drawn:
        assert drawn.wait() == 0 and picture.read_bytes().startswith(b"\x89PNG"), drawn.said()


def test_plot_step_script_help_prints_usage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_step.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(root / "scripts" / "plot_step.py"), run_name="__main__")
    assert ended.value.code == "usage: python scripts/plot_step.py checkpoint=DIR [out=FILE]"
