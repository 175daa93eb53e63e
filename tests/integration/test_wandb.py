"""`fit` with W&B, against a server here: online, offline with `wandb sync`, killed and resumed, and with a failing server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import yaml

from drafttrain.train.lineage import COLUMNS, measurement_rows, recorded_run, summary_of
from tests import forked
from tests.integration.test_training import reach
from tests.standin.wandb_server import KEY, Run, WandbServer

pytestmark = pytest.mark.slow
STEPS = 12
SETTINGS = (
    *("recipe=medusa", "logger=wandb", "target=hf", "train.global_batch=4", "train.micro_batch=2", "data.held_out=4"),
    *(f"train.steps={STEPS}", "train.checkpoint_every=4", "measure.limit=2", "measure.minutes=0.02", "measure.tune=off"),
    *("measure.transformers=false", "measure.batch_sizes=[1]", "decode.max_new_tokens=12"),
)
RETRIES = {  # of W&B's own process, which waits for seconds and tries for days otherwise
    f"WANDB__{what}_RETRY_{name}": value
    for what in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")
    for name, value in (("WAIT_MIN_SECONDS", "0.05"), ("WAIT_MAX_SECONDS", "0.2"), ("MAX", "3"))
}
SECRET = "marked-secret-"
SECRETS = {
    name: f"{SECRET}{i}"
    for i, name in enumerate(
        ("HF_TOKEN", "OPENAI_API_KEY", "MY_OWN_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "DB_PASSWORD")
    )
}


def environment(server: WandbServer, home: Path, **more: str) -> dict[str, str]:
    """Variables of a user who is logged in to the server, and has further secrets."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "HF_"))}
    plain = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLCONFIGDIR": matplotlib.get_cachedir()}
    plain["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # compiled operators
    return own | plain | server.environment(home) | RETRIES | SECRETS | more


def command(material: Path, output: Path, *more: str) -> list[str]:
    paths = (f"target.path={material / 'target'}", f"data.path={material / 'data.jsonl'}", f"output={output}")
    return [sys.executable, "-m", "drafttrain", "fit", *paths, *SETTINGS, *more]


def fit(material: Path, home: Path, variables: dict[str, str], *more: str, answer: float = 60.0) -> tuple[Path, str]:
    """Train to the end; the run directory, and what was printed."""
    process = start(command(material, home / "outputs", *more), home, variables, answer)
    assert process.wait() == 0, process.said()
    (run,) = (home / "outputs").glob("*/*/run.json")
    return run.parent, process.said()


def start(call: list[str], home: Path, variables: dict[str, str], answer: float = 60.0) -> forked.Forked:
    """answer: seconds that the run waits for W&B."""
    return forked.start(call, home, variables, {"drafttrain.train.wandb_run.ANSWER": answer})


def kill_after(call: list[str], home: Path, variables: dict[str, str], lines: int) -> None:
    """Kill the command and W&B's own process once metrics.jsonl has so many lines."""
    process = start(call, home, variables)
    reach(process, home / "outputs", lines)
    assert process.poll() is None, "the run ended before it could be killed"
    process.kill()


def sync(typed: str, home: Path, variables: dict[str, str]) -> str:
    """What a user types to send offline runs."""
    path = f"{Path(sys.executable).parent}:{variables['PATH']}"
    wandb = f"{shlex.quote(sys.executable)} -m wandb"
    call = ["bash", "-c", typed.replace("wandb sync", f"{wandb} sync", 1)]
    done = subprocess.run(call, env=variables | {"PATH": path}, cwd=home, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def flat(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl as W&B shows it, which gets no empty figures."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        if key != "step":
            found |= {f"{key}/{i}": v for i, v in enumerate(value, 1)} if isinstance(value, list) else {key: value}
    return {key: value for key, value in found.items() if value is not None}


def near(value: Any) -> Any:
    """A value of report.json, which rounds to six digits."""
    return pytest.approx(value, rel=1e-4) if isinstance(value, float) else value


def without_empty(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as W&B keeps it: without empty groups inside of others."""
    found = {key: without_empty(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in found.items() if value != {}}


def assert_complete(server: WandbServer, run_dir: Path, artifact: bool = True) -> Run:
    """The server has the run as its directory has it: config, figures step by step, summary, pictures, table and report.

    artifact: the report as an artifact too, which wandb does not keep for a later `wandb sync` when it cannot send it.
    """
    run = server.run()
    report = json.loads((run_dir / "report.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert run.steps() == [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        there = {key: value for key, value in run.values(line["step"]).items() if not key.startswith("report/")}
        assert there == flat(line), f"step {line['step']}"
    summary = summary_of(report)
    for key, value in summary.items():
        assert run.summary[key] == near(value), key
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    kept = without_empty(config)
    assert {key: run.config[key] for key in kept} == kept
    pictures = {picture.stem: picture.read_bytes() for picture in run_dir.glob("**/*.png") if "wandb" not in picture.parts}
    last = run.values(STEPS)
    assert pictures and {f"report/{name}" for name in pictures} | {"report/measurement"} <= set(last)
    for name, content in pictures.items():
        assert run.files[last[f"report/{name}"]["path"]] == content
    table = json.loads(run.files[last["report/measurement"]["path"]])
    assert table["columns"] == list(COLUMNS)
    assert [near(value) for row in measurement_rows(report) for value in row] == [v for row in table["data"] for v in row]
    if artifact:
        sent = server.artifact("report")
        assert set(server.entries(sent)) == {"report.json", "report.md", "report.html"} and sent.state == "COMMITTED"
        for name in server.entries(sent):
            assert server.storage[f"artifact/{sent.name}/0/{name}"] == (run_dir / name).read_bytes()
    assert (run.state, run.exit_code) == ("finished", 0)
    assert run.name == (recorded_run(run_dir) or {})["id"]
    assert not server.unknown
    return run


def assert_no_secret(server: WandbServer, run_dir: Path) -> None:
    """Neither was a secret sent, nor is one in the run's files."""
    found = server.bodies()
    assert SECRET.encode() not in found and KEY.encode() not in found
    for file in run_dir.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert SECRET.encode() not in content and KEY.encode() not in content, file


def about_wandb(said: str) -> list[str]:
    """Where the word stands alone: the folders of these tests have `_wandb_` in their names."""
    return [line for line in said.splitlines() if re.search(r"W&B|\bwandb\b", line) and "logger=wandb" not in line]


def test_wandb_online_run_is_complete_and_readable_by_compare(material: Path, tmp_path: Path) -> None:
    with WandbServer() as server:
        variables = environment(server, tmp_path)
        run_dir, said = fit(material, tmp_path, variables, "prepare.key_env=MY_OWN_KEY")
        assert about_wandb(said) == []
        run = assert_complete(server, run_dir)
        assert_no_secret(server, run_dir)
        assert server.used == [(run.name, server.artifact("dataset").name)]
        there = f"me/drafttrain/{run.name}"
        call = [sys.executable, "-m", "drafttrain", "compare", there, str(run_dir), "compare.samples=200", "out=compared"]
        compared = start(call, tmp_path, variables)
        assert compared.wait() == 0, compared.said()
        assert there in (tmp_path / "compared/compare.csv").read_text() and not server.unknown


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_killed_fit_resumes_in_same_wandb_run(mode: str, material: Path, tmp_path: Path) -> None:
    with WandbServer() as server:
        variables = environment(server, tmp_path)
        more = (f"logger.mode={mode}", "resume=auto")
        kill_after(command(material, tmp_path / "outputs", *more), tmp_path, variables, lines=6)
        (noted,) = tmp_path.glob("outputs/*/*/wandb.json")
        before = json.loads(noted.read_text())["id"]
        run_dir, _ = fit(material, tmp_path, variables, *more)
        if mode == "offline":
            assert not server.requests
            sync("wandb sync outputs/*/*/wandb/offline-run-*", tmp_path, variables)
        run = assert_complete(server, run_dir)
        assert run.name == before and len(server.runs) == 1
        assert len(run.config["inputs"]) == 1
        assert_no_secret(server, run_dir)


@pytest.mark.parametrize(
    ("fault", "run_id"),
    [
        (401, None),
        ("hang", "chosen"),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in (("gone", None), (500, None), ("hang", None), (500, "chosen"))
        ),
    ],
)
def test_wandb_server_failing_at_start_makes_run_offline(
    fault: int | str, run_id: str | None, material: Path, tmp_path: Path
) -> None:
    """run_id: the user's, which a resumed run has too: W&B's own process still holds it after the failure."""
    with WandbServer() as server:
        variables = environment(server, tmp_path, WANDB_INIT_TIMEOUT="1", **({"WANDB_RUN_ID": run_id} if run_id else {}))
        if fault == "gone":
            server.stop()
        else:
            server.fault = fault
        run_dir, said = fit(material, tmp_path, variables, answer=5.0)
    (line,) = about_wandb(said)
    assert "the run is logged offline, send it later: wandb sync" in line
    with WandbServer() as server:
        sync(line.partition("later: ")[2], tmp_path, variables | server.environment(tmp_path))
        assert assert_complete(server, run_dir).name == (run_id or recorded_run(run_dir)["id"])


@pytest.mark.sampled(fault=["hang"])
@pytest.mark.parametrize("fault", ["gone", 401, 500, "hang"])
def test_wandb_server_failing_later_leaves_run_to_sync(fault: int | str, material: Path, tmp_path: Path) -> None:
    """It has the start of the run."""
    with WandbServer() as server:
        variables = environment(server, tmp_path)
        call = command(material, tmp_path / "outputs", "logger.finish_timeout=1")
        process = start(call, tmp_path, variables, answer=5.0)
        reach(process, tmp_path / "outputs", 1)
        while process.poll() is None and not server.used:
            time.sleep(0.01)
        if fault == "gone":
            server.stop()
        else:
            server.fault = fault
        assert process.wait() == 0, process.said()
        said = process.said()
        (run_dir,) = (file.parent for file in tmp_path.glob("outputs/*/*/run.json"))
        assert json.loads((run_dir / "run.json").read_text())["finished"] and (run_dir / "report.json").exists()
        *first, line = about_wandb(said)
        assert len(first) <= 1 and all("W&B does not get all" in one for one in first), said
        if fault != "gone":
            server.fault = None
            server.released.set()
            sync(line.partition("later: ")[2], tmp_path, variables)
            assert_complete(server, run_dir, artifact=False)


def test_wandb_interrupted_fit_is_marked_failed(material: Path, tmp_path: Path) -> None:
    with WandbServer() as server:
        variables = environment(server, tmp_path)
        call = command(material, tmp_path / "outputs", "train.steps=4000", "train.checkpoint_every=2000")
        process = start(call, tmp_path, variables)
        reach(process, tmp_path / "outputs", 1)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 75, process.said()
        assert server.run().state == "failed"
