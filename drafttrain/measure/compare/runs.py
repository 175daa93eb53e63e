"""The runs of a comparison: finds reports by run directory, checkpoint, report file, glob, or W&B run, and makes rows."""

from __future__ import annotations

import glob
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from drafttrain.core.errors import UserError
from drafttrain.drafters import META
from drafttrain.measure.report import FILE, Report, read_report

FLOPS, HOURS, TOKENS = "flops", "hours", "tokens"
UNVARIED = ("output", "name", "recipe", "resume", "logger", "launcher", "measure", "out", "runs")  # do not affect the drafter


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the comparison: one measured checkpoint."""

    label: str  # its name in the table
    run: RunReport
    entry: dict[str, Any]  # its figures in the report
    varied: dict[str, Any]  # its values of the settings in which the runs differ

    @property
    def family(self) -> str:
        return str(self.run.report["drafter"].get("family", "-"))

    @property
    def training(self) -> dict[str, Any]:
        """The cost of training up to this checkpoint; empty where it was not recorded."""
        if (recorded := self.entry.get("training")) is not None:
            return dict(recorded)
        run_training = self.run.report.get("training") or {}
        last = max((e["step"] or 0) for e in self.run.report["checkpoints"])
        return dict(run_training) if run_training and (self.entry["step"] or 0) == last else {}

    def cost(self, kind: str) -> float | None:
        """Training cost: floating-point operations, hours of all processes together, or tokens read; None if unknown."""
        if kind == HOURS:
            seconds = self.training.get("process_seconds")
            return None if seconds is None else seconds / 3600
        value = self.training.get({FLOPS: "flops", TOKENS: "tokens"}[kind])
        return None if value is None else float(value)

    def counts(self) -> dict[str, NDArray[np.float64]] | None:
        """By prompt: (emitted, verifications); None in reports of version 1."""
        return self._by_prompt(("emitted", "verifications"))

    def times(self) -> dict[str, NDArray[np.float64]] | None:
        """By timed prompt: (plain ms, plain tokens after the first, speculative ms, speculative tokens after the first).

        None in reports of version 1.
        """
        by_prompt = self._by_prompt(("baseline_decode_ms", "baseline_tokens", "decode_ms", "tokens"))
        return None if by_prompt is None else {key: x - np.array([0.0, 1.0, 0.0, 1.0]) for key, x in by_prompt.items()}

    def _by_prompt(self, keys: Sequence[str]) -> dict[str, NDArray[np.float64]] | None:
        prompts = self.entry.get("per_prompt") or []
        if not prompts or any("prompt" not in p for p in prompts):
            return None
        complete = [p for p in prompts if all(p.get(key) is not None for key in keys)]
        return {f"{p['question_id']} {p['prompt']}": np.array([float(p[key]) for key in keys]) for p in complete} or None


def rows_of(runs: Sequence[RunReport], checkpoints: str) -> list[Row]:
    """A row for each run's best checkpoint, or for each checkpoint, with distinct labels."""
    varied_keys = varied([run.config for run in runs if run.config])
    pairs = [(run, entry) for run in runs for entry in _chosen(run, checkpoints)]
    labels = _labels(pairs)
    return [
        Row(label, run, entry, {key: run.config[key] for key in varied_keys if key in run.config})
        for label, (run, entry) in zip(labels, pairs, strict=True)
    ]


def _chosen(run: RunReport, checkpoints: str) -> list[dict[str, Any]]:
    entries = run.report["checkpoints"]
    if run.checkpoint is not None:
        return [e for e in entries if e["name"].split()[0] == run.checkpoint]
    return [e for e in entries if checkpoints == "all" or e["name"] == run.report["best"]]


def _labels(pairs: Sequence[tuple[RunReport, dict[str, Any]]]) -> list[str]:
    """The runs' names, and the checkpoint's name where a run has several rows."""
    short, count = names_of([run.where for run, _ in pairs]), Counter(run.where for run, _ in pairs)
    return [f"{short[run.where]} {entry['name']}" if count[run.where] > 1 else short[run.where] for run, entry in pairs]


def names_of(paths: Sequence[str]) -> dict[str, str]:
    """The shortest ends of the paths that tell them apart, of two parts at least."""
    parts = {path: Path(path).parts for path in paths}
    length = next((n for n in range(2, 64) if len({components[-n:] for components in parts.values()}) == len(parts)), 64)
    return {path: "/".join(components[-length:]) for path, components in parts.items()}


def varied(configs: Iterable[dict[str, Any]]) -> list[str]:
    """Settings that all runs have and in which they differ."""
    configs = list(configs)
    shared = [key for key in configs[0] if all(key in c for c in configs)] if configs else []
    if len({c.get("drafter.family") for c in configs}) > 1:  # the table has a column for it, and families have different keys
        shared = [key for key in shared if not key.startswith("drafter.")]
    of_interest = [key for key in shared if key.split(".")[0] not in UNVARIED]
    return [key for key in of_interest if any(c[key] != configs[0][key] for c in configs)]


RUN = "run.json"
WANDB = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w-]+)")


@dataclass(frozen=True, slots=True)
class RunReport:
    """A report and its run."""

    where: str  # path of the run, or its W&B path
    report: Report
    config: dict[str, Any] = field(default_factory=dict)  # the run's settings by dotted key
    checkpoint: str | None = None  # the checkpoint that the user named


@dataclass(frozen=True, slots=True)
class Found:
    """The runs that words name."""

    reports: list[RunReport]
    unmeasured: list[Path] = field(default_factory=list)  # directories of runs without a report
    together: bool = False  # a word names several, as a folder of runs does

    @property
    def notes(self) -> list[str]:
        """What a ranking leaves out."""
        return [f"left out, because there is no {FILE}: {', '.join(map(str, self.unmeasured))}"] if self.unmeasured else []


def find_runs(words: Sequence[str]) -> Found:
    """The runs that the words name, each once. Raises UserError for a word that names none."""
    matches, reports = [_of_word(word) for word in words], dict[tuple[str, str | None], RunReport]()
    for run in (run for match in matches for run in match.reports):
        reports.setdefault((run.where, run.checkpoint), run)
    unmeasured = dict.fromkeys(run for match in matches for run in match.unmeasured)
    return Found(list(reports.values()), list(unmeasured), any(match.together for match in matches))


def _of_word(word: str) -> Found:
    path = Path(word).expanduser()
    if path.exists():
        return _of_path(path)
    if glob.has_magic(word):
        hits = [Path(hit) for hit in sorted(glob.glob(str(path), recursive=True))]
        runs = _below(hits)
        if not runs.reports and not runs.unmeasured:
            raise UserError(f"{word!r} matches {len(hits)} paths, but none has a {FILE}; name runs that were measured")
        return runs
    if match := WANDB.fullmatch(word):
        return Found([_at_wandb("/".join(match.groups()))])
    raise UserError(f"no run {word!r}: not a path, a glob, or a W&B run as entity/project/run; name a run directory")


def _of_path(path: Path) -> Found:
    if path.is_file():
        return Found([_local(path)])
    if (path / META).exists():
        return Found([_of_checkpoint(path)])
    runs = _below([path])
    if not runs.reports and not runs.unmeasured:
        raise UserError(f"{path} has no {FILE}; measure it: drafttrain measure checkpoint=DIR writes one")
    return runs


def _below(paths: Sequence[Path]) -> Found:
    """The runs that these paths are, or that are below them."""
    files = dict.fromkeys(file for path in paths for file in _report_files(path))
    runs = {file.parent for path in paths if path.is_dir() for file in path.rglob(RUN)}
    unmeasured = sorted(run for run in runs if not (run / FILE).exists())
    return Found([_local(file) for file in files], unmeasured, len(files) + len(unmeasured) > 1)


def _report_files(path: Path) -> list[Path]:
    """The report of a run directory, or the reports of all runs below a directory."""
    if path.is_file():
        return [path] if path.name == FILE else []
    return [path / FILE] if (path / FILE).exists() else sorted(path.rglob(FILE))


def _local(file: Path) -> RunReport:
    return RunReport(
        str(file.parent if file.name == FILE else file), read_report(file), settings_of(file.parent / "config.yaml")
    )


def _of_checkpoint(directory: Path) -> RunReport:
    run = directory.absolute().parent.parent
    if (run / FILE).exists():
        run_report = _local(run / FILE)
        if any(_checkpoint_name(entry["name"]) == directory.name for entry in run_report.report["checkpoints"]):
            return RunReport(str(directory.parent.parent), run_report.report, run_report.config, directory.name)
    raise UserError(
        f"{directory} was not measured by its run; name the folder that drafttrain measure checkpoint={directory} prints"
    )


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


def settings_of(file: Path) -> dict[str, Any]:
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
