"""Finds the reports that the user names: by run directory, checkpoint, report file, glob, or W&B run."""

from __future__ import annotations

import glob
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drafttrain.core.errors import UserError
from drafttrain.drafters import META
from drafttrain.measure.report import FILE, Report, read_report

WANDB = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w-]+)")


@dataclass(frozen=True, slots=True)
class RunReport:
    """A report and its run."""

    where: str  # path of the run, or its W&B path
    report: Report
    config: dict[str, Any] = field(default_factory=dict)  # the run's settings by dotted key
    checkpoint: str | None = None  # the checkpoint that the user named


def find_runs(words: Sequence[str]) -> tuple[list[RunReport], list[str]]:
    """(the reports that the words name, each once; notes on runs without a report). Raises UserError for a word without any."""
    if not words:
        raise UserError("no run is named; give run directories, as in drafttrain compare RUN RUN")
    found: dict[tuple[str, str | None], RunReport] = {}
    notes: list[str] = []
    for word in words:
        reports, without = _of_word(word)
        found |= {(run.where, run.checkpoint): run for run in reports if (run.where, run.checkpoint) not in found}
        notes += without
    return list(found.values()), list(dict.fromkeys(notes))


def _of_word(word: str) -> tuple[list[RunReport], list[str]]:
    path = Path(word).expanduser()
    if path.exists():
        return _of_path(path)
    if glob.has_magic(word):
        hits = [Path(hit) for hit in sorted(glob.glob(str(path), recursive=True))]
        files = dict.fromkeys(file for hit in hits for file in _report_files(hit))
        if not files:
            raise UserError(f"{word!r} matches {len(hits)} paths, but none has a {FILE}; name runs that were measured")
        folders = [hit for hit in hits if hit.is_dir()]
        return [_local(file) for file in files], _unmeasured(folders)
    if match := WANDB.fullmatch(word):
        return [_at_wandb("/".join(match.groups()))], []
    raise UserError(f"no run {word!r}: not a path, a glob, or a W&B run as entity/project/run; name a run directory")


def _of_path(path: Path) -> tuple[list[RunReport], list[str]]:
    if path.is_file():
        return [_local(path)], []
    if (path / META).exists():
        return [_of_checkpoint(path)], []
    files = _report_files(path)
    if not files:
        raise UserError(f"{path} has no {FILE}; measure it: drafttrain measure checkpoint=DIR writes one")
    return [_local(file) for file in files], _unmeasured([path])


def _report_files(path: Path) -> list[Path]:
    """The report of a run directory, or the reports of all runs below a directory."""
    if path.is_file():
        return [path] if path.name == FILE else []
    return [path / FILE] if (path / FILE).exists() else sorted(path.rglob(FILE))


def _unmeasured(folders: Sequence[Path]) -> list[str]:
    """A note on the runs that were not measured."""
    runs = {file.parent for folder in folders for file in folder.rglob("run.json")}
    left = sorted(str(run) for run in runs if not (run / FILE).exists())
    return [f"left out, because there is no {FILE}: {', '.join(left)}"] if left else []


def _local(file: Path) -> RunReport:
    return RunReport(str(file.parent if file.name == FILE else file), read_report(file), _settings(file.parent / "config.yaml"))


def _of_checkpoint(directory: Path) -> RunReport:
    run = directory.absolute().parent.parent
    if (run / FILE).exists():
        found = _local(run / FILE)
        if any(_checkpoint_name(entry["name"]) == directory.name for entry in found.report["checkpoints"]):
            return RunReport(str(directory.parent.parent), found.report, found.config, directory.name)
    raise UserError(f"{directory} was not measured by its run; measure it: drafttrain measure checkpoint={directory}")


def _checkpoint_name(entry: str) -> str:
    """The checkpoint of a row: a variant's row is named `step-00400 int8`."""
    return entry.split()[0]


def _at_wandb(path: str) -> RunReport:
    """The report of a W&B run: its newest artifact of type `report`."""
    import wandb

    try:
        run = wandb.Api().run(path)
        reports = [a for a in run.logged_artifacts() if a.type == "report"]
        artifact = max(reports, key=lambda a: int(a.version.removeprefix("v")), default=None)
        if artifact is None:
            raise UserError(f"W&B run {path} has no report; name a run whose measurement has finished")
        with tempfile.TemporaryDirectory(prefix="drafttrain-") as folder:
            artifact.download(root=folder)
            report = read_report(Path(folder) / FILE)
    except (wandb.Error, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read W&B run {path}: {reason}; check the name, and wandb login") from error
    return RunReport(path, report, flat(dict(run.config)))


def _settings(file: Path) -> dict[str, Any]:
    """The run's config.yaml by dotted key; empty if there is none, as for reports of `drafttrain measure`."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return flat(content) if isinstance(content, dict) else {}


def flat(node: dict[str, Any]) -> dict[str, Any]:
    """`{"train": {"lr": 1}}` as `{"train.lr": 1}`."""

    def walk(inner: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in inner.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(node, ""))
