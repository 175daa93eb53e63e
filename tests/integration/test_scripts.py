"""Scripts that make the documents' pictures still do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.integration.test_training import last_weights

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_plot_step_script_draws_png_of_checkpoint(tmp_path: Path) -> None:
    settings = ("recipe=medusa", "train.steps=2", "data.limit=80", "measure.enabled=false", f"output={tmp_path / 'runs'}")
    forked.run([sys.executable, "-m", "drafttrain", "fit", *settings])
    (made,) = (tmp_path / "runs").glob("*/*")
    picture = tmp_path / "step.png"
    drawn = run("scripts/plot_step.py", f"checkpoint={last_weights(made).parent}", f"out={picture}")
    assert drawn.returncode == 0 and picture.read_bytes().startswith(b"\x89PNG"), drawn.stderr


def test_plot_step_script_help_prints_usage() -> None:
    said = run("scripts/plot_step.py", "--help")
    assert said.returncode == 1 and said.stderr == "usage: python scripts/plot_step.py checkpoint=DIR [out=FILE]\n"
