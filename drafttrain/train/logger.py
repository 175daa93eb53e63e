"""Where a run's figures go: metrics.jsonl always, W&B when asked. Rank 0 only."""

from __future__ import annotations

import json
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.train import LoggerOptions

HOST = "api.wandb.ai"


class Logger:
    """`step` figures as JSON lines and to W&B. W&B runs offline unless the user is logged in, and never prompts."""

    def __init__(self, options: LoggerOptions, run_dir: Path, config: dict[str, Any], kept_steps: int) -> None:
        self.file = run_dir / "metrics.jsonl"
        _forget_after(self.file, kept_steps)
        self._lines = self.file.open("a", encoding="utf-8")
        self.run = _start(options, run_dir, config)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        if self.run is not None:
            self.run.log(_flat(values), step=step)

    def report(self, report: dict[str, Any], plots: list[Path], checkpoints: list[Path], files: list[Path]) -> None:
        """The measured checkpoints as summary and artifacts."""
        if self.run is None:
            return
        import wandb

        best = next(c for c in report["checkpoints"] if c["name"] == report["best"])
        self.run.summary.update({k: v for k, v in best.items() if isinstance(v, int | float | str)} | {"best": report["best"]})
        self.run.log({f"report/{p.stem}": wandb.Image(str(p)) for p in plots})
        for checkpoint in checkpoints:
            artifact = wandb.Artifact(f"{self.run.id}-{checkpoint.name}", type="drafter")
            for name in ("drafter.safetensors", "drafter.json"):
                artifact.add_file(str(checkpoint / name))
            self.run.log_artifact(artifact, aliases=["best"] if checkpoint.name == report["best"] else [])
        artifact = wandb.Artifact(f"{self.run.id}-report", type="report")
        for file in files:
            artifact.add_file(str(file))
        self.run.log_artifact(artifact)

    def close(self) -> None:
        self._lines.close()
        if self.run is not None:
            self.run.finish()


def logged_in() -> bool:
    """A key in the environment or in ~/.netrc; the key itself is not looked at."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(os.environ.get("WANDB_HOST", HOST)) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _start(options: LoggerOptions, run_dir: Path, config: dict[str, Any]) -> Any:
    if options.name == "none":
        return None
    if options.name != "wandb":
        raise UserError(f"logger.name is {options.name!r}; choose wandb or none")
    if options.mode not in ("auto", "online", "offline"):
        raise UserError(f"logger.mode is {options.mode!r}; choose auto, online or offline")
    mode: Any = options.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    import wandb

    return wandb.init(
        project=options.project,
        entity=options.entity,
        group=options.group,
        name=f"{run_dir.parent.name}/{run_dir.name}",
        dir=str(run_dir),
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


def _forget_after(file: Path, steps: int) -> None:
    """A resumed run writes the steps after its checkpoint again: drop what a killed one wrote of them, torn lines too."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= steps:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
