"""`drafttrain auto` as a user starts it: interrupted, started again, decided."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafttrain.commands import auto as auto_file
from tests.integration.test_interrupt import CODE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ctrl_c_is_heard")]
WORDS = (
    *("auto.candidates=[medusa,medusa drafter.heads=2]", "auto.batch_sizes=[1]", "export.stacks=[vllm]", "budget=20m"),
    *("train.steps=40", "data.limit=200", "decode.max_new_tokens=16", "measure.limit=4", "measure.minutes=0.3", "logger=none"),
)


def started(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """The command in a process of its own, and the file of what it says."""
    said = folder / "said.txt"
    command = [sys.executable, "-m", "drafttrain", "auto", "--yes", f"output={folder}", *WORDS]
    with said.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), said


def test_auto_goes_on_after_an_interruption_and_hands_over_the_faster_drafter(tmp_path: Path) -> None:
    process, said = started(tmp_path)
    while process.poll() is None and not list(tmp_path.glob("auto/*/logs/medusa-round-1.log")):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == CODE, said.read_text()
    assert "the same command goes on" in said.read_text() and "Traceback" not in said.read_text()
    again, said = started(tmp_path)
    assert again.wait() == 0, said.read_text()
    (folder,) = tmp_path.glob("auto/*")
    decision = json.loads((folder / auto_file.DECISION).read_text())
    assert {each["name"] for each in decision["candidates"]} == {"medusa", "medusa-2"}
    assert len(list(folder.glob("runs/*/*"))) == 2, "each candidate has one run, which was continued"
    assert not any(decision["results"].values()), decision["results"]
    for each in decision["candidates"]:
        (metrics,) = folder.glob(f"runs/{each['name']}/*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        logged = next(line["predicted_speedup"] for line in lines if "predicted_speedup" in line)
        assert logged == pytest.approx(each["points"][0]["value"], rel=1e-4), "trackers show the race"
    assert decision["serving"]["vllm"].startswith("vllm serve") and (folder / "exported" / "vllm").is_dir()
    assert decision["sampled"]["temperature"] == 1.0 and decision["entry"]["exact_matches"] == decision["entry"]["prompts"]
    assert (folder / auto_file.PAGE).read_text() in said.read_text()
