"""The directory of a run, and the search for a run to resume."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, atomic_write_text, new_directory, remove_abandoned
from drafttrain.data.files import read_template
from drafttrain.drafters.checkpoint import TEMPLATE, list_checkpoints, step_of
from drafttrain.runs.environment import environment
from drafttrain.runs.options import RENAMED, RunOptions, dated_path, not_a_run
from drafttrain.train.checkpoint_manager import newest_valid
from drafttrain.train.engine import World
from drafttrain.train.optimizer import learning_rate

NOT_HASHED = (
    *("output", "resume", "measure", "logger", "launcher", "checkpoint", "prompts", "recipe", "out", "prepare", "inspect"),
    *("tune", "compare", "runs", "simulate", "report", "export"),
    *("format", "dtype", "quantize", "overwrite", "max_shard_size"),
    *("deepspeed.zero_stage", "deepspeed.offload_optimizer", "deepspeed.offload_parameters"),
    *(f"train.{key}" for key in ("micro_batch", "sequence_parallel", "log_every", "checkpoint_every", "keep_last")),
    *(f"train.{key}" for key in ("per_rank", "profile", "hang_timeout", "bad_steps", "activation_checkpointing", "compile")),
    *(f"data.{key}" for key in ("workers", "cache")),
    *(f"features.{key}" for key in ("dir", "engine", "target", "servers", "final_servers", "python", "arguments", "key_env")),
    *(f"features.{key}" for key in ("transport", "mooncake")),
    *(f"features.{key}" for key in ("ahead", "concurrency", "timeout", "patience")),
    *(f"features.{key}" for key in ("gpus", "tensor_parallel", "count", "nodes")),
    *(f"target.{key}" for key in ("placement", "tensor_parallel", "expert_parallel", "prefetch")),
)
LEAVES = ("decode.logit_bias",)  # settings whose keys are values
SHOWN = 3  # settings that are named where runs differ


@dataclass
class RunDirectory:
    """The directory `<output>/<name>/<time>/`. Its run.json records whether the run has finished."""

    path: Path
    resumed: Path | None  # the checkpoint to resume from
    first_steps: int | None = None  # train.steps at the beginning of a run that was lengthened

    @property
    def resumed_step(self) -> int:
        return int(self.resumed.name.split("-")[1]) if self.resumed else 0

    @staticmethod
    def open(options: RunOptions, resolved: dict[str, Any], world: World, say: Callable[[str], None]) -> RunDirectory:
        """Make a new directory, or find the one to resume. Rank 0 decides.

        say: prints what resume=auto does, whether a run is lengthened, and a line on each damaged checkpoint.
        """
        path = resumed = first_steps = None
        if world.first:
            path = _find(options, resolved, say) or _make(options, resolved)
            for folder in (path, path / "checkpoints", *list_checkpoints(path / "checkpoints")):
                remove_abandoned(folder)  # what a killed process has not finished writing
            resumed = newest_valid(path / "checkpoints", say)
            resumed_step = step_of(resumed) if resumed else 0
            first_steps = _lengthened(path, options, resolved, resumed_step, say)
        return RunDirectory(*world.share((path, resumed, first_steps)))

    def finish(self) -> None:
        """Record that the run has finished."""
        state = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        atomic_write_json(self.path / "run.json", state | {"finished": True})


def config_hash(resolved: dict[str, Any]) -> str:
    """A hash of the settings that determine the trained weights and the decode settings.

    It leaves out where a run is written, how it is logged, and how its work is distributed (which changes the order of sums).
    """
    return hashlib.sha256(json.dumps(_hashed(resolved), sort_keys=True).encode()).hexdigest()


def _hashed(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    kept = {key: value for key, value in node.items() if f"{prefix}{key}" not in NOT_HASHED}
    inner = {key for key, value in kept.items() if isinstance(value, dict) and f"{prefix}{key}" not in LEAVES}
    return {key: _hashed(value, f"{prefix}{key}.") if key in inner else value for key, value in kept.items()}


def _find(options: RunOptions, resolved: dict[str, Any], log: Callable[[str], None]) -> Path | None:
    if options.resume is None:
        return None
    if options.resume != "auto":
        path = Path(options.resume).expanduser()
        state = run_state(path)
        if state is None:
            raise not_a_run(options.resume)
        steps = _steps(path, state)
        if changed_settings := _other_settings(path, state, options, _of_steps(resolved, steps)):
            raise UserError(
                f"resume is {options.resume!r}, a run of another configuration: {_listed(changed_settings)}; repeat the run's "
                "settings (see its config.yaml)"
            )
        if steps is not None and options.train.steps < steps:
            raise UserError(
                f"train.steps is {options.train.steps}, but {options.resume} is a run of {steps} steps, which can only become "
                f"longer; set train.steps to {steps} or more"
            )
        return path
    finished, mismatch = None, ""
    runs = Path(options.output) / options.name
    for path in sorted((p.parent for p in runs.glob("*/run.json")), reverse=True):
        state = run_state(path)
        if not state:
            continue
        steps = _steps(path, state)
        if changed_settings := _other_settings(path, state, options, _of_steps(resolved, steps)):
            mismatch = mismatch or ("" if state["finished"] else f" (of {path}, {_listed(changed_settings)})")
        elif state["finished"]:
            finished = finished or path
        elif steps in (None, options.train.steps):
            return path
    hint = f"; {finished} has finished, resume={finished} train.steps=N makes it longer" if finished else ""
    log(f"resume=auto: {runs} has no unfinished run of these settings{mismatch}, so a new one begins{hint}")
    return None


def _other_settings(path: Path, state: dict[str, Any], options: RunOptions, resolved: dict[str, Any]) -> list[str]:
    """The settings, of those in `config_hash`, that the run in this directory has otherwise: `train.lr was 0.001, is 0.002`.

    A setting that its file lacks, as that of an older version may, was the default. One that is no setting any more is ignored.
    """
    if state["config_hash"] == config_hash(resolved):
        return []
    try:
        saved = _flat(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")))
        saved_settings = {RENAMED.get(key, key): value for key, value in saved.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return [f"{path / 'config.yaml'} cannot be read"]
    drafter = None if options.drafter is None else type(options.drafter)()
    defaults = _flat(asdict(RunOptions(drafter=drafter)))
    differences = []
    for key, value in _flat(resolved).items():
        saved_value = saved_settings.get(key, defaults.get(key))
        if json.dumps(saved_value, default=str) != json.dumps(value, default=str):
            differences.append(f"{key} was {json.dumps(saved_value, default=str)}, is {json.dumps(value, default=str)}")
    return differences


def _flat(resolved: dict[str, Any]) -> dict[str, Any]:
    """The settings in `config_hash` by their whole names."""
    settings, nodes = dict[str, Any](), [("", _hashed(resolved))]
    while nodes:
        prefix, node = nodes.pop()
        for key, value in node.items():
            if isinstance(value, dict) and prefix + key not in LEAVES:
                nodes.append((f"{prefix}{key}.", value))
            else:
                settings[prefix + key] = value
    return settings


def _listed(settings: list[str]) -> str:
    suffix = f", and {len(settings) - SHOWN} more" if len(settings) > SHOWN else ""
    return f"{', '.join(sorted(settings)[:SHOWN])}{suffix}"


def _steps(path: Path, state: dict[str, Any]) -> int | None:
    """train.steps of a run; None if nothing says so."""
    if "steps" in state:  # of a run that was lengthened
        return int(state["steps"])
    try:
        return int(yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))["train"]["steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _of_steps(resolved: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """The configuration with this number of steps."""
    return resolved if steps is None else resolved | {"train": resolved["train"] | {"steps": steps}}


def _lengthened(
    path: Path, options: RunOptions, resolved: dict[str, Any], resumed_step: int, log: Callable[[str], None]
) -> int | None:
    """The number of steps that a run had at its beginning; None if it still has. Makes it longer where train.steps is more."""
    state = run_state(path) or {}
    steps, train = _steps(path, state), options.train
    first: int | None = state.get("first_steps")
    if steps is None or train.steps <= steps:
        if options.resume not in (None, "auto") and resumed_step == train.steps:
            log(f"resume: {path} has all of its {resumed_step} steps; set train.steps to more to train it further")
        return first
    first = first or steps
    change = {"config_hash": config_hash(resolved), "finished": False, "steps": train.steps, "first_steps": first}
    atomic_write_json(path / "run.json", state | change)  # at once: what the configuration's file says comes second
    atomic_write_text(path / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
    last_rate = learning_rate(replace(train, steps=steps), max(0, resumed_step - 1), first)
    log(
        f"resume: {path} is lengthened from {steps} to {train.steps} steps; train.schedule={train.schedule}: the rate was "
        f"{last_rate:.1e} at step {resumed_step} and goes on with {learning_rate(train, resumed_step, first):.1e}, as in a run "
        f"of {train.steps} steps after the same warm-up"
    )
    return first


def run_state(path: Path) -> dict[str, Any] | None:
    """What `run.json` says; None without one of a run."""
    try:
        state = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    required_types = {"config_hash": str, "finished": bool}
    is_valid = isinstance(state, dict) and all(
        isinstance(state.get(name), value_type) for name, value_type in required_types.items()
    )
    has_valid_steps = is_valid and all(isinstance(state.get(name, 1), int | None) for name in ("steps", "first_steps"))
    return state if has_valid_steps else None


def _make(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Make a new directory with the resolved configuration, the environment and the git revision."""

    def fill(staging_dir: Path) -> None:  # at once, because a run without run.json cannot be resumed
        (staging_dir / "checkpoints").mkdir()
        if (template := read_template(options.data.template)) is not None:
            atomic_write_text(staging_dir / TEMPLATE, template)
        atomic_write_text(staging_dir / "config.yaml", yaml.safe_dump(resolved, sort_keys=False))
        machine_info = environment(torch.device("cpu")) | {"command": sys.argv, "git": _git_revision()}
        atomic_write_json(staging_dir / "environment.json", machine_info)
        atomic_write_json(staging_dir / "run.json", {"config_hash": config_hash(resolved), "finished": False})

    base = dated_path(options.output, options.name)
    remove_abandoned(base.parent)
    return new_directory(base, fill)


def _git_revision() -> str | None:
    """The git revision of the working directory, with `-dirty` for uncommitted changes; None outside a repository."""
    try:
        completed = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None if completed.returncode == 0 else None
