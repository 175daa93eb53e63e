"""An engine's process next to training: a stand-in that answers, and one whose parent is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drafttrain.core.errors import UserError
from drafttrain.engines import process
from drafttrain.engines.answers import EngineInfo, TimedText, WaveOutputs
from drafttrain.engines.process import ENGINES, LAUNCHERS, Engine, EngineJob, check_family
from drafttrain.engines.timed_process import Resources, start_background

SCRIPT = """
import json, os, time
from contextlib import contextmanager
FAMILIES = ("eagle",)
@contextmanager
def opened(job):
    print(json.dumps(dict(os.environ)), flush=True)
    time.sleep(job["facts"]["sleep"])
    def answer(wave):
        texts = [{"tokens": job["prompts"][i], "first": 0.5, "ended": 1.0, "ahead": 1} for i in wave]
        return {"texts": texts, "verifications": 3, "drafted": 2, "accepted": 1}
    yield {"versions": {"spoken": "1"}, "begins": "plain"}, answer
"""


def job(sleep: float) -> EngineJob:
    timed = Resources("0,1", 3).timed("float32", 1)
    return EngineJob("target", "drafter", "eagle", "vllm", 3, 8, [0], [[5, 6], [7]], {"sleep": sleep}, timed)


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a stand-in's script, and an engine for it."""
    monkeypatch.setattr(process, "SCRIPTS", tmp_path)
    monkeypatch.setitem(ENGINES, "spoken", Engine("Spoken", "json", (), (), limited={"BIND": "none"}))
    (tmp_path / "spoken.py").write_text(SCRIPT)
    (tmp_path / "place").mkdir()
    return tmp_path


def test_background_engine_answers_are_read_after_exit(spoken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES", "MINE"):
        monkeypatch.setenv(name, "1")
    started = start_background("spoken", Path(sys.executable), job(0), spoken / "place", [[0], [1]], Resources("0,1", 3))
    started.process.wait(30)
    about, answers = started.answers()
    assert about == EngineInfo({"spoken": "1"})
    assert answers == [WaveOutputs([TimedText(n, ids, 0.5, 1.0)], 3, 2, 1) for n, ids in ((2, (5, 6)), (1, (7,)))]
    there = json.loads(started.log.read_text().splitlines()[0])
    assert there["OMP_NUM_THREADS"] == "3" and there["CUDA_VISIBLE_DEVICES"] == "0,1" and there["BIND"] == "none"
    assert "MINE" in there and not {n for n in there if n in ("RANK", "WORLD_SIZE") or n.startswith(LAUNCHERS)}


def test_background_engine_killed_process_raises_user_error(spoken: Path) -> None:
    started = start_background("spoken", Path(sys.executable), job(60), spoken / "place", [[0]], Resources())
    assert not started.ended()
    started.kill()
    assert started.ended()
    with pytest.raises(UserError, match="Spoken ended with -9 and no result"):
        started.answers()


def test_check_family_not_supported_by_engine_script_is_refused(spoken: Path) -> None:
    check_family("spoken", "eagle")
    with pytest.raises(UserError, match="Spoken is run here with eagle alone, and this is hydra"):
        check_family("spoken", "hydra")


STARTER = """
import sys, time
from pathlib import Path
from drafttrain.engines import process
from drafttrain.engines.process import ENGINES, Engine
from drafttrain.engines.timed_process import Resources, start_background
from tests.unit.engines.test_background import job
process.SCRIPTS = Path(sys.argv[1])
ENGINES["spoken"] = Engine("Spoken", "json", (), ())
started = start_background("spoken", Path(sys.executable), job(60), process.SCRIPTS / "place", [[0]], Resources())
print(started.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_background_engine_of_killed_parent_removes_files_and_ends(spoken: Path, root: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(spoken)], stdout=subprocess.PIPE, text=True, cwd=root)
    assert starter.stdout is not None
    orphan = int(starter.stdout.readline())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (spoken / "place" / "log").stat().st_size:
        time.sleep(0.02)
    starter.kill()
    starter.wait()
    while time.monotonic() < deadline and psutil.pid_exists(orphan) and psutil.Process(orphan).status() != "zombie":
        time.sleep(0.05)
    assert not (spoken / "place").exists() and time.monotonic() < deadline
