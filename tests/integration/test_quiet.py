"""Commands that do not train print none of the libraries' lines and do not import DeepSpeed, which takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.cli.quiet import SETTINGS
from tests.runs import report

STRAY = re.compile(
    r"accelerator|deepspeed|loading weights|writing model shards|\[(WARNING|INFO)\]|\bWarning\b|it/s\]", re.IGNORECASE
)
LOAD = """
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
load_target(TargetOptions())
"""
RUN = """
import json, sys
from drafttrain.cli import main as cli
for words in json.loads(sys.argv[1]):
    code = cli.run(words)
    print(f"{words[0]} ended with {code}", flush=True)
    assert "deepspeed" not in sys.modules, f"DeepSpeed was imported by {words[0]}"
"""
SMALL = ("decode.max_new_tokens=6", "measure.limit=2", "measure.minutes=0.05", "measure.repeats=1", "tune.minutes=0.05")


def bare() -> dict[str, str]:
    """The environment as a user has it: without what `quiet` sets in this process."""
    return {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "DS_ACCELERATOR")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dataclasses import asdict

    from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, save_drafter
    from drafttrain.drafters.medusa import Medusa, MedusaOptions
    from drafttrain.targets import TargetOptions
    from drafttrain.targets.load import load_target

    loaded, folder = load_target(TargetOptions()), tmp_path_factory.mktemp("run") / "step-00001"
    options = MedusaOptions(heads=2)
    drafter = Medusa(options, loaded.target)
    folder.mkdir()
    meta = CheckpointMeta("medusa", asdict(options), drafter.decode_settings(), TargetRecord.of(loaded), 1)
    save_drafter(folder, drafter.state_dict(), meta)
    return folder


@pytest.mark.slow
def test_command_prints_no_library_output_and_skips_deepspeed_import(checkpoint: Path, tmp_path: Path) -> None:
    """One after another in a fresh process, those that import least first."""
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "report.json").write_text(json.dumps(report()))
    commands = {
        "simulate": (),
        "compare": (str(tmp_path / "a"), str(tmp_path / "b")),
        "inspect": ("data.limit=20",),
        "export": (f"checkpoint={checkpoint}", "format=vllm", f"out={tmp_path / 'out'}"),
        "generate": (f"checkpoint={checkpoint}", "prompt=hi", *SMALL),
        "tune": (f"checkpoint={checkpoint}", *SMALL),
        "measure": (f"checkpoint={checkpoint}", *SMALL),
    }
    call = [sys.executable, "-c", RUN, json.dumps([[name, *words] for name, words in commands.items()])]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=bare())
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0 and all(f"{name} ended with 0" in said for name in commands), said
    stray = [line for line in said if STRAY.search(line)]
    assert not stray, stray


@pytest.mark.slow
def test_load_target_from_python_prints_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, cwd=tmp_path, env=bare(), timeout=300)
    assert done.returncode == 0 and done.stdout + done.stderr == ""
