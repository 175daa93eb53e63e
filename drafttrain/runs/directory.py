"""The directory of a run, and the search for a run to resume."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, atomic_write_text, new_directory, remove_abandoned
from drafttrain.runs.environment import environment
from drafttrain.runs.options import RunOptions
from drafttrain.runs.paths import dated_path
from drafttrain.train.checkpoint_checksums import newest_valid
from drafttrain.train.engine import World

NOT_HASHED = (
    *("output", "resume", "measure", "logger", "launcher", "checkpoint", "prompts", "recipe", "out", "prepare", "inspect"),
    *("tune", "compare", "runs", "simulate", "report", "export"),
    *("format", "dtype", "overwrite", "max_shard_size"),
    *("deepspeed.zero_stage", "deepspeed.offload_optimizer", "deepspeed.offload_parameters"),
    *(f"train.{key}" for key in ("micro_batch", "sequence_parallel", "log_every", "checkpoint_every", "keep_last")),
    *(f"train.{key}" for key in ("per_rank", "profile", "hang_timeout", "activation_checkpointing", "compile")),
    *(f"data.{key}" for key in ("workers", "cache")),
    *(f"features.{key}" for key in ("dir", "engine", "target", "servers", "final_servers", "python", "arguments", "key_env")),
    *(f"features.{key}" for key in ("transport", "mooncake")),
    *(f"features.{key}" for key in ("ahead", "concurrency", "timeout", "patience")),
    *(f"features.{key}" for key in ("gpus", "tensor_parallel", "count", "nodes")),
    *(f"target.{key}" for key in ("placement", "tensor_parallel", "expert_parallel", "prefetch")),
)


@dataclass
class RunDirectory:
    """The directory `<output>/<name>/<time>/`. Its run.json records whether the run has finished."""

    path: Path
    resumed: Path | None  # the checkpoint to resume from

    @property
    def resumed_step(self) -> int:
        return int(self.resumed.name.split("-")[1]) if self.resumed else 0

    @staticmethod
    def open(options: RunOptions, resolved: dict[str, Any], world: World, say: Callable[[str], None]) -> RunDirectory:
        """Make a new directory, or find the one to resume. Rank 0 decides. say: prints a line on each damaged checkpoint."""
        path = resumed = None
        if world.first:
            path = _find(options, config_hash(resolved)) or _make(options, resolved)
            for folder in (path, path / "checkpoints"):
                remove_abandoned(folder)  # temporary directories of a killed run
            resumed = newest_valid(path / "checkpoints", say)
        return RunDirectory(*world.share((path, resumed)))

    def finish(self) -> None:
        """Record that the run has finished."""
        state = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        atomic_write_json(self.path / "run.json", state | {"finished": True})


def config_hash(resolved: dict[str, Any]) -> str:
    """A hash of the settings that determine the trained weights and the decode settings.

    It leaves out where a run is written, how it is logged, and how its work is distributed (which changes the order of sums).
    """
    return hashlib.sha256(json.dumps(_hashed(resolved), sort_keys=True).encode()).hexdigest()


def _hashed(node: dict[str, Any], above: str = "") -> dict[str, Any]:
    kept = {key: value for key, value in node.items() if above + key not in NOT_HASHED}
    return {key: _hashed(value, f"{above}{key}.") if isinstance(value, dict) else value for key, value in kept.items()}


def _find(options: RunOptions, digest: str) -> Path | None:
    if options.resume is None:
        return None
    if options.resume != "auto":
        path = Path(options.resume).expanduser()
        state = _state(path)
        if state is None:
            raise UserError(
                f"resume is {options.resume!r}, which is not a run directory (it has no run.json); name one, or set resume=auto"
            )
        if state["config_hash"] != digest:
            raise UserError(
                f"resume is {options.resume!r}, a run of another configuration; repeat the run's settings (see its config.yaml)"
            )
        return path
    runs = Path(options.output) / options.name
    candidates = sorted((p.parent for p in runs.glob("*/run.json")), reverse=True)
    for path in candidates:
        state = _state(path)
        if state and not state["finished"] and state["config_hash"] == digest:
            return path
    return None


def _state(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _make(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Make a new directory with the resolved configuration, the environment and the git revision."""

    def fill(aside: Path) -> None:  # at once, because a run without run.json cannot be resumed
        (aside / "checkpoints").mkdir()
        atomic_write_text(aside / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
        about = environment(torch.device("cpu")) | {"command": sys.argv, "git": _git_revision()}
        atomic_write_json(aside / "environment.json", about)
        atomic_write_json(aside / "run.json", {"config_hash": config_hash(resolved), "finished": False})

    base = dated_path(options.output, options.name)
    remove_abandoned(base.parent)
    return new_directory(base, fill)


def _git_revision() -> str | None:
    """The git revision of the working directory, with `-dirty` for uncommitted changes; None outside a repository."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
