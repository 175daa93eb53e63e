"""The checkpoint that the user names: one of ours, or a published drafter, by directory or hub id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.core.console import print_line
from drafttrain.core.errors import UserError
from drafttrain.data.files import read_template
from drafttrain.drafters.checkpoint import META, CheckpointMeta, check_shape, list_checkpoints, read_meta, template_of
from drafttrain.export.convert import converted
from drafttrain.export.external import ExternalCheckpoint, fetched
from drafttrain.export.table import recognised
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_shape, load_target
from drafttrain.targets.parallel import WHOLE, Part
from drafttrain.train.checkpoint_manager import best_checkpoint

RECORDED = ("name", "path", "revision", "dtype", "weights")  # target settings that a checkpoint records


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint that the user named. Either `meta` or `foreign` is set."""

    directory: Path
    meta: CheckpointMeta | None = None  # of our checkpoint
    foreign: ExternalCheckpoint | None = None  # a published drafter

    @staticmethod
    def of(name: str) -> CheckpointSource:
        """Find a checkpoint by path or hub id. A run's directory stands for its best checkpoint, a recipe's for that of its
        newest run; a line on stderr names it. Raises UserError for a missing or damaged one.
        """
        directory = Path(name).expanduser()
        if not directory.exists() and _hub_id(name):
            directory = fetched(name)
        if (best := _best_of(directory)) is not None:
            count = len(list(directory.glob("*/run.json")))
            print_line(Console(stderr=True), f"checkpoint: {best}" + (f", of the newest of {count} runs" if count > 1 else ""))
            return CheckpointSource(best, read_meta(best))
        if not directory.is_dir() or (directory / META).is_file():
            return CheckpointSource(directory, read_meta(directory))
        external = ExternalCheckpoint(directory, name)
        recognised(external)
        return CheckpointSource(directory, None, external)

    @property
    def family(self) -> str:
        """The drafter's family."""
        if self.foreign is not None:
            return recognised(self.foreign).family
        assert self.meta is not None
        return self.meta.family

    @property
    def dtype(self) -> str:
        """The default dtype of exports: that of the target in training, or that of a published drafter's weights."""
        if self.foreign is not None:
            return recognised(self.foreign).dtype(self.foreign)
        assert self.meta is not None
        return self.meta.target.dtype

    @property
    def step(self) -> int | None:
        """The training step; None for a published drafter."""
        return None if self.meta is None else self.meta.step

    def target(self, options: TargetOptions) -> TargetOptions:
        """The target that the user names, else the one that the checkpoint records; images as in training.

        Raises UserError for a target of another shape, before its weights are read.
        """
        if self.meta is None:
            return options
        if options.name == "embedded" and self.meta.target.name != "embedded":
            options = replace(options, **{name: getattr(self.meta.target, name) for name in RECORDED})
        if self.meta.target.image_inputs is not None:
            options = replace(options, image_inputs=self.meta.target.image_inputs)
        check_shape(self.directory, self.meta.target, load_shape(options))
        return options

    def load(self, options: TargetOptions, part: Part = WHOLE, **settings: Any) -> LoadedTarget:
        """The target, with these settings in place of its own, and with the chat template that the run trained with."""
        loaded = load_target(replace(self.target(options), **settings), part)
        if (template := template_of(self.directory)) is not None:
            loaded.tokenizer.chat_template = read_template(str(template))
        return loaded

    def checkpoint(self, loaded: LoadedTarget, say: Callable[[str], None]) -> Path:
        """Our checkpoint, or the conversion of a published drafter. Raises UserError if it does not fit this target."""
        return self.directory if self.foreign is None else converted(self.foreign, loaded, say)


def check_start(name: str, meta: CheckpointMeta, options: dict[str, object], settled: dict[str, object]) -> None:
    """Raise UserError unless this run's drafter has the options that an imported drafter's files determine.

    options: of this run's drafter; settled: values of the options that were left to a rule.
    """
    if meta.imported is None:
        return
    run_options = options | settled
    mismatched_keys = [key for key in meta.imported["determined"] if run_options[key] != meta.options[key]]
    if mismatched_keys:
        overrides = " ".join(
            f"drafter.{word}" for key in mismatched_keys for word in _overrides(key, meta.options[key], run_options[key])
        )
        raise UserError(f"train.init {name}: its {meta.family} drafter has other options than this run; add {overrides}")


def _overrides(key: str, expected: object, actual: object) -> list[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        return [word for k, v in expected.items() if actual.get(k) != v for word in _overrides(f"{key}.{k}", v, actual.get(k))]
    return [f"{key}={_hydra(expected)}"]


def _hydra(value: object) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if isinstance(value, dict):
        return "'{" + ",".join(f"{k}:{_hydra(v)}" for k, v in value.items()) + "}'"
    return str(value)


def _hub_id(name: str) -> bool:
    """Whether a name is a hub id, `owner/name` or `owner/name@revision`, and not a path."""
    return not name.startswith((".", "/", "~")) and name.partition("@")[0].count("/") == 1


def _best_of(directory: Path) -> Path | None:
    """The best checkpoint of the run with this directory or these `checkpoints`, or of the newest run in a recipe's directory;
    None if there is none.
    """
    runs = sorted(directory.glob("*/run.json"), reverse=True) if directory.is_dir() else []
    folders = (directory, directory / "checkpoints", *(run.parent / "checkpoints" for run in runs))
    return next((best_checkpoint(folder) for folder in folders if list_checkpoints(folder)), None)
