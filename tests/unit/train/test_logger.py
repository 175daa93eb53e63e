"""What W&B gets, read back from the files of offline runs; and what an online run is asked for."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from matplotlib.figure import Figure
from wandb.proto import wandb_internal_pb2 as protocol

from drafttrain.measure.plots import read_curves
from drafttrain.train import LoggerOptions
from drafttrain.train.lineage import COLUMNS, Lineage, group_of, measurement_rows, run_of, summary_of
from drafttrain.train.logger import Logger, log_export
from tests.runs import report

CONFIG = {"name": "medusa", "target": {"name": "hf", "path": "/models/Some-8B/"}, "data": {"path": None, "seed": 0}}
HEADER, BLOCK = 7, 32768  # of a .wandb file, which is a LevelDB log


def records(file: Path) -> Iterator[Any]:
    """The records of an offline run."""
    content, at, parts = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):  # the end may still be on its way
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + HEADER])
        if at + HEADER + length > len(content):
            return
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def found(folder: Path, job: str = "fit") -> dict[str, list[Any]]:
    """By kind, of the one run in a folder that does this."""
    runs = map(by_kind_of, folder.glob("wandb/offline-run-*/*.wandb"))
    (own,) = (by_kind for by_kind in runs if by_kind["run"][0].job_type == job)
    return own


def by_kind_of(file: Path) -> dict[str, list[Any]]:
    """W&B's own process writes the file, its end after `finish` has returned."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        by_kind: dict[str, list[Any]] = {}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            by_kind.setdefault(kind, []).append(getattr(record, kind))
        if "exit" in by_kind:
            return by_kind
        time.sleep(0.005)
    raise AssertionError(f"{file} has no end")


def checkpoint(run: Path, name: str) -> Path:
    path = run / "checkpoints" / name
    path.mkdir(parents=True)
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        (path / name).write_bytes(b"weights")
    return path


def logged(folder: Path, **options: Any) -> Path:
    """A run of two steps and a measurement."""
    run = folder / "medusa" / "2026"
    best = checkpoint(run, "step-00400")
    logger = Logger(LoggerOptions(**options), run, CONFIG, 0)
    logger.step(1, {"loss": 2.0, "agreement": [0.5, 0.25]})
    picture = run / "speedup.png"
    Figure(figsize=(1, 1)).savefig(picture)
    (run / "report.json").write_text("{}", encoding="utf-8")
    logger.report(report(entry__exact_matches=18), [picture], [best], [run / "report.json"])
    logger.close()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names its checkpoint, and the exports of a test."""
    return logged(tmp_path_factory.mktemp("run"), artifacts="reference")


def test_logger_offline_run_records_summary_table_images_and_artifacts(run: Path) -> None:
    by_kind = found(run)
    told = by_kind["run"][0]
    assert (told.run_group, told.job_type, told.project) == ("medusa on Some-8B", "fit", "drafttrain")
    scalars: dict[str, Any] = {}
    for part in by_kind["summary"]:
        scalars |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in part.update}
    assert scalars["exact"] == 18 / 24 and scalars["best"] == "step-00400"
    assert (scalars["speedup"], scalars["alpha"]) == (1.5, 0.6) and scalars["tau"] == pytest.approx(2.2, rel=0.1)
    (table,) = run.glob("wandb/offline-run-*/files/media/table/report/measurement_*.table.json")
    content = json.loads(table.read_text(encoding="utf-8"))
    assert content["columns"] == list(COLUMNS) and [row[:2] for row in content["data"]] == [
        ["step-00400", "all"],
        ["step-00400", "batch size 1"],
    ]
    assert list(run.glob("wandb/offline-run-*/files/media/images/report/speedup_*.png"))
    artifacts = {a.name: a for a in by_kind["artifact"]}
    names = run_of(run / "checkpoints" / "step-00400")
    assert names is not None and names["group"] == "medusa on Some-8B"
    made = artifacts[f"{names['id']}-step-00400"]
    assert made.type == "drafter" and set(made.aliases) == {"best", "latest"}
    assert [entry.ref for entry in made.manifest.contents] == [(run / "checkpoints/step-00400/drafter.safetensors").as_uri()]
    assert artifacts[f"{names['id']}-report"].type == "report"
    (data,) = (a for a in artifacts.values() if a.type == "dataset")
    inputs = [json.loads(u.value_json) for c in by_kind["config"] for u in c.update if u.key == "inputs"]
    assert inputs[-1] == [data.name]


def test_logger_follows_chdir_and_logs_checkpoint_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is one of this process: W&B's own keeps the folder that it was started in."""
    made: list[list[Any]] = []
    for name, options in (("a", {}), ("b", {"artifacts": "files", "group": "mine"})):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made.append(found(logged(Path(f"run-{name}"), **options))["artifact"])
    assert {a.type for a in made[0] if not a.type.startswith("run_table")} == {"dataset", "report"}
    (drafter,) = (a for a in made[1] if a.type == "drafter")
    assert [(entry.path, bool(entry.ref)) for entry in drafter.manifest.contents] == [("drafter.safetensors", False)]


@pytest.mark.slow
def test_wandb_sync_dry_run_finds_training_and_export_runs(tmp_path: Path) -> None:
    """Of a training and of an export, in the run's directory. It is asked what it would send, and sends nothing."""
    run = logged(tmp_path)
    best, out = run / "checkpoints" / "step-00400", tmp_path / "out"
    out.mkdir()
    log_export(LoggerOptions(artifacts="reference"), CONFIG, best, {"vllm": out})
    folders = sorted(run.glob("wandb/offline-run-*"))
    call = [sys.executable, "-m", "wandb", "sync", "--dry-run", *map(str, folders)]
    own = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    done = subprocess.run(call, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert len(folders) == 2 and all(folder.name in said for folder in folders)


def test_log_export_logs_run_that_uses_checkpoint_artifact(run: Path, tmp_path: Path) -> None:
    best, out = run / "checkpoints" / "step-00400", tmp_path / "out"
    out.mkdir()
    log_export(LoggerOptions(artifacts="none"), CONFIG, best, {"vllm": out})
    assert len(list(run.glob("wandb/offline-run-*"))) == 1
    log_export(LoggerOptions(artifacts="reference"), CONFIG, best, {"vllm": out})
    exported = found(run, "export")
    assert exported["run"][0].run_group == "medusa on Some-8B"
    name = f"{(run_of(best) or {})['id']}-step-00400"
    assert [(a.name, a.type) for a in exported["artifact"]] == [(name, "drafter"), (f"{name}-vllm", "export")]
    log_export(LoggerOptions(artifacts="reference"), CONFIG, tmp_path / "elsewhere/checkpoints/step-1", {"vllm": out})
    assert len(list(run.glob("wandb/offline-run-*"))) == 2


class Online:
    """A run that is online, and what it was asked for."""

    offline, id = False, "abc"

    def __init__(self, known: bool) -> None:
        self.known, self.used, self.made = known, [], []
        self.config = SimpleNamespace(get=lambda *_: [], update=lambda *_, **__: None)

    def use_artifact(self, artifact: Any) -> None:
        if isinstance(artifact, str) and not self.known:
            raise wandb.errors.CommError("artifact not found")
        self.used.append(artifact if isinstance(artifact, str) else artifact.name)

    def log_artifact(self, artifact: Any, aliases: Any = None) -> None:
        self.made.append(artifact.name)


@pytest.mark.parametrize(("known", "used"), [(True, "me/p/xyz-step-1:latest"), (False, "xyz-step-1")])
def test_lineage_online_export_uses_existing_or_new_checkpoint_artifact(known: bool, used: str, tmp_path: Path) -> None:
    run = Online(known)
    lineage = Lineage(run, "reference")
    lineage.uses_checkpoint(checkpoint(tmp_path, "step-1"), {"entity": "me", "project": "p", "id": "xyz"})
    lineage.made_export(tmp_path, "vllm", "xyz-step-1")
    lineage.uses_data({"path": str(tmp_path)})
    assert run.used[0] == used and run.used[1].startswith("data-") and run.made == ["xyz-step-1-vllm"]


def test_lineage_summary_omits_missing_exactness_and_rows_fit_columns() -> None:
    assert group_of({"name": "x", "target": {"name": "embedded", "path": None}}) == "x on embedded"
    made = report(entry__exact_matches=None)
    assert "exact" not in summary_of(made) and summary_of(made)["policy"] == "greedy"
    assert all(len(row) == len(COLUMNS) for row in measurement_rows(made))


def test_logger_resume_drops_damaged_and_later_lines_of_metrics_jsonl(tmp_path: Path) -> None:
    """They are left out, as those of steps that are to be made again."""
    good = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2, 3)]
    bad = [b'{"step": 2, "lo\xff\x00', b'["step"]', b"3", b'{"step": "two"}', b"[" * 9000, b""]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good[0], *bad, good[1], good[2]]))
    Logger(LoggerOptions(name="none"), tmp_path, CONFIG, 2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == good[0] + b"\n" + good[1] + b"\n"


def test_logger_lines_are_json_whatever_a_step_gives(tmp_path: Path) -> None:
    """Of a step with a loss that is not finite. A line that an earlier version wrote is mended."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    logger = Logger(LoggerOptions(name="none"), tmp_path, CONFIG, 1)
    logger.step(2, {"loss": math.nan, "agreement": [0.5, math.inf], "mfu": None, "lr": 1.0})
    logger.close()
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first) == {"step": 1, "loss": None}
    assert second == '{"step": 2, "loss": null, "agreement": [0.5, null], "mfu": null, "lr": 1.0}'
    assert all(curve for curve in read_curves(tmp_path / "metrics.jsonl")["agreement"].values())
