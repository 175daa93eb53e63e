"""Logs a run's measurement and artifacts (data, checkpoints, reports, exports) to W&B."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain.core.files import atomic_write_json
from drafttrain.drafters.checkpoint import META, WEIGHTS
from drafttrain.measure.flags import best_entry

RUN = "wandb.json"  # in a run directory: the names of its W&B run
DRAFTER_FILES = (WEIGHTS, META)  # files of a checkpoint that the drafter needs; the others are for resuming
COLUMNS = (
    *("checkpoint", "slice", "step", "tau", "expected_tau", "alpha", "alpha_by_position"),
    *("speedup", "speedup_min", "speedup_max"),
    *("tokens_per_s", "baseline_tokens_per_s", "draft_cost", "verify_cost", "exact_matches", "prompts", "parameters"),
)


def group_of(config: Mapping[str, Any]) -> str:
    """`medusa on Llama-3.1-8B`: the W&B group of runs of one recipe on one target."""
    target = config.get("target") or {}
    target_name = str(target.get("path") or target.get("name") or "target").rstrip("/")
    return f"{config.get('name', 'default')} on {target_name.rpartition('/')[2]}"[:128]


def summary_of(report: dict[str, Any]) -> dict[str, Any]:
    """The best checkpoint's scalars, its training cost, and `exact`: the share of outputs identical to plain decoding."""
    best = best_entry(report)
    scalars = {key: value for key, value in best.items() if isinstance(value, int | float | str)}
    if best.get("exact_matches") is not None:
        scalars["exact"] = best["exact_matches"] / best["prompts"]
    cost = best.get("training") or {}
    scalars |= {f"training_{key}": cost[key] for key in ("tokens", "flops") if cost.get(key) is not None}
    if cost.get("process_seconds") is not None:
        scalars["training_hours"] = cost["process_seconds"] / 3600
    return scalars | {"best": report["best"]}


def measurement_rows(report: Mapping[str, Any]) -> list[list[Any]]:
    """Rows under `COLUMNS`: one per checkpoint, and one per slice of it."""
    rows = []
    for entry in report["checkpoints"]:
        for row in (entry, *entry["slices"]):
            total = row is entry
            cells = {"checkpoint": entry["name"], "slice": "all" if total else f"{row['by'].replace('_', ' ')} {row['value']}"}
            cells["alpha_by_position"] = " ".join(f"{a[0]:.3f}" for a in row["alpha_by_position"])
            rows.append([cells.get(name, row.get(name)) for name in COLUMNS])
    return rows


class Lineage:
    """The artifacts of one W&B run: those that it used and those that it made.

    Offline, W&B cannot look up used artifacts. Inputs are then logged again, and the run's config names them as `inputs`.
    """

    def __init__(self, run: Any, kind: str) -> None:
        self.run, self.kind = run, kind

    def record_run(self, run_dir: Path) -> None:
        """Write the names of the W&B run to the run directory. Exports of its checkpoints refer to them."""
        names = {name: getattr(self.run, name, None) for name in ("entity", "project", "id", "group")}
        atomic_write_json(run_dir / RUN, names)

    def uses_data(self, data: Mapping[str, Any]) -> None:
        """Log the training data as used, by name and settings. The files are not uploaded."""
        digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:12]
        artifact = self._artifact(f"data-{digest}", "dataset", dict(data))
        path = Path(str(data.get("path") or "")).expanduser()
        if data.get("path") and path.exists():
            artifact.add_reference(path.absolute().as_uri(), checksum=False)
        self._use(artifact, artifact.name)

    def made_checkpoints(self, checkpoints: Sequence[Path], report: Mapping[str, Any]) -> None:
        """Log each checkpoint with its figures. The best one gets the alias `best`."""
        if self.kind == "none":
            return
        best = str(report["best"]).split()[0]  # a variant's row is named after its checkpoint
        for checkpoint in checkpoints:
            entry: Mapping[str, Any] = next((e for e in report["checkpoints"] if e["name"] == checkpoint.name), {})
            figures = {key: entry.get(key) for key in ("step", "tau", "alpha", "speedup", "parameters")}
            artifact = self._artifact(checkpoint_artifact(self.run.id, checkpoint), "drafter", figures)
            self._fill(artifact, checkpoint, DRAFTER_FILES)
            self.run.log_artifact(artifact, aliases=["best"] if checkpoint.name == best else [])

    def made_report(self, files: Sequence[Path]) -> None:
        """Log the report's files."""
        artifact = self._artifact(f"{self.run.id}-report", "report", {})
        for file in files:
            artifact.add_file(str(file))
        self.run.log_artifact(artifact)

    def uses_checkpoint(self, checkpoint: Path, made_by: Mapping[str, Any]) -> None:
        """Log a checkpoint as used: the artifact of the run that made it, else a new one with its path."""
        import wandb

        name = checkpoint_artifact(str(made_by["id"]), checkpoint)
        if not self.run.offline:
            try:
                self.run.use_artifact("/".join(str(made_by[k]) for k in ("entity", "project")) + f"/{name}:latest")
                return
            except (wandb.Error, ValueError):  # not synced yet, or logged with logger.artifacts=none
                pass
        artifact = self._artifact(name, "drafter", {})
        self._fill(artifact, checkpoint, DRAFTER_FILES)
        self._use(artifact, name)

    def made_export(self, folder: Path, stack: str, checkpoint: str) -> None:
        """Log an export. checkpoint: the name of its checkpoint's artifact."""
        artifact = self._artifact(f"{checkpoint}-{stack}", "export", {"stack": stack})
        self._fill(artifact, folder)
        self.run.log_artifact(artifact, aliases=[stack])

    def _artifact(self, name: str, artifact_type: str, metadata: dict[str, Any]) -> Any:
        import wandb

        return wandb.Artifact(name, type=artifact_type, metadata=json.loads(json.dumps(metadata, default=str)))

    def _fill(self, artifact: Any, folder: Path, names: Sequence[str] = ()) -> None:
        """Add these files of a folder, or the whole folder, to the artifact: as paths, or with their content."""
        for file in [folder / name for name in names if (folder / name).exists()] if names else [folder]:
            if self.kind != "files":
                artifact.add_reference(file.absolute().as_uri(), checksum=False)
            elif file.is_dir():
                artifact.add_dir(str(file))
            else:
                artifact.add_file(str(file))

    def _use(self, artifact: Any, name: str) -> None:
        input_names = list(self.run.config.get("inputs", []))
        if name not in input_names:  # a resumed run has it
            self.run.config.update({"inputs": [*input_names, name]}, allow_val_change=True)
        if self.run.offline:
            self.run.log_artifact(artifact)
        else:
            self.run.use_artifact(artifact)


def checkpoint_artifact(run_id: str, checkpoint: Path) -> str:
    return f"{run_id}-{checkpoint.name}"


def run_of(checkpoint: Path) -> dict[str, Any] | None:
    """The names of the W&B run that made a checkpoint; None if there is none."""
    return recorded_run(checkpoint.absolute().parent.parent)


def continued_run(run_dir: Path, project: str, entity: str | None) -> str | None:
    """The id of a run directory's W&B run, if it is one of this project."""
    record = recorded_run(run_dir) or {}
    if record.get("project") != project or (entity and record.get("entity") and record["entity"] != entity):
        return None
    return str(record["id"])


def recorded_run(run_dir: Path) -> dict[str, Any] | None:
    """The names of a run directory's W&B run, from `Lineage.record_run`; None if there is none."""
    try:
        record = json.loads((run_dir / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("id") else None
