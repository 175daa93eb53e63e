"""Logs a run's figures: always to metrics.jsonl, and to W&B if configured. Rank 0 only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_text
from drafttrain.train import LoggerOptions
from drafttrain.train.lineage import (
    COLUMNS,
    Lineage,
    check_artifacts,
    checkpoint_artifact,
    group_of,
    measurement_rows,
    run_of,
    summary_of,
)
from drafttrain.train.login import logged_in


class Logger:
    """Logs figures as JSON lines and to W&B. W&B runs offline unless the user is logged in; it never prompts."""

    def __init__(self, options: LoggerOptions, run_dir: Path, config: dict[str, Any], kept_steps: int) -> None:
        self.file = run_dir / "metrics.jsonl"
        _drop_after(self.file, kept_steps)
        self._lines = self.file.open("a", encoding="utf-8")
        self.options = options
        self.run = start(options, run_dir, config, f"{run_dir.parent.name}/{run_dir.name}", "fit")
        if self.run is not None:
            self.run.define_metric("engine/*", step_metric="engine/step")  # their step is earlier than that of the line
            lineage = Lineage(self.run, options.artifacts)
            lineage.record_run(run_dir)
            lineage.uses_data(config["data"])

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the figures of one training step."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        if self.run is not None:
            self.run.log(_flat(values), step=step)

    def report(self, report: dict[str, Any], plots: list[Path], checkpoints: list[Path], files: list[Path]) -> None:
        """Log the measurement: summary, table, pictures and artifacts."""
        if self.run is None:
            return
        import wandb

        self.run.summary.update(summary_of(report))
        pictures = {f"report/{p.stem}": wandb.Image(str(p)) for p in plots}
        self.run.log(pictures | {"report/measurement": wandb.Table(columns=list(COLUMNS), data=measurement_rows(report))})
        lineage = Lineage(self.run, self.options.artifacts)
        lineage.made_checkpoints(checkpoints, report)
        lineage.made_report(files)

    def close(self) -> None:
        self._lines.close()
        if self.run is not None:
            self.run.finish()


def log_export(options: LoggerOptions, config: dict[str, Any], checkpoint: Path, folders: Mapping[str, Path]) -> None:
    """Log an export as a separate W&B run that used the checkpoint and made `folders` (by stack).

    Nothing is logged if the checkpoint's own run is not at W&B, or logger.artifacts is none.
    """
    made_by = run_of(checkpoint)
    if made_by is None or options.artifacts == "none":
        return
    options = replace(options, group=options.group or made_by.get("group"), project=made_by.get("project") or options.project)
    run = start(options, checkpoint.absolute().parent.parent, config, f"export {checkpoint.name}", "export")
    if run is None:
        return
    lineage = Lineage(run, options.artifacts)
    lineage.uses_checkpoint(checkpoint, made_by)
    for stack, folder in folders.items():
        lineage.made_export(folder, stack, checkpoint_artifact(str(made_by["id"]), checkpoint))
    run.finish()


def check_logger(options: LoggerOptions) -> None:
    """Raise UserError for bad options."""
    if options.name not in ("wandb", "none"):
        raise UserError(f"logger.name is {options.name!r}; choose wandb or none")
    if options.mode not in ("auto", "online", "offline"):
        raise UserError(f"logger.mode is {options.mode!r}; choose auto, online or offline")
    check_artifacts(options.artifacts)


def start(options: LoggerOptions, folder: Path, config: dict[str, Any], name: str, job: str) -> Any:
    """Start a W&B run with its files in `folder`; None without W&B. Raises UserError for bad options."""
    check_logger(options)
    if options.name == "none":
        return None
    mode: Any = options.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    import wandb

    return wandb.init(
        project=options.project,
        entity=options.entity,
        group=options.group or group_of(config),
        job_type=job,
        name=name,
        dir=str(folder.absolute()),  # its own process may have been started in another folder
        config=config,
        mode=mode,
        settings=wandb.Settings(silent=True, console="off"),
    )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list):
            flat |= {f"{key}/{i + 1}": v for i, v in enumerate(value)}
        else:
            flat[key] = value
    return flat


def _drop_after(file: Path, steps: int) -> None:
    """Remove lines of later steps, and incomplete lines. A resumed run writes the steps after its checkpoint again.

    A serving engine's figures of an earlier step stay, in a line of their own.
    """
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            if values["step"] <= steps:
                kept.append(line)
            elif values.get("engine/step", steps + 1) <= steps:
                own = {key: value for key, value in values.items() if key.startswith("engine/")}
                kept.append(json.dumps({"step": steps, **own}))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    atomic_write_text(file, "".join(f"{line}\n" for line in kept))
