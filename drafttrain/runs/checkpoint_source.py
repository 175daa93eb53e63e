"""The checkpoint that a command was given: one of ours, or a drafter of other people, on disk or by hub id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from drafttrain.core.errors import UserError
from drafttrain.drafters.checkpoint import META, CheckpointMeta, check_shape, list_checkpoints, read_meta
from drafttrain.export.importers.convert import converted
from drafttrain.export.importers.directory import Foreign, fetched
from drafttrain.export.importers.table import recognised
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_shape

RECORDED = ("name", "path", "revision", "dtype", "weights")  # of the target


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """meta: of one of ours; foreign: what else there is."""

    directory: Path
    meta: CheckpointMeta | None = None
    foreign: Foreign | None = None

    @staticmethod
    def of(name: str) -> CheckpointSource:
        """Raises UserError for a path or hub id without a drafter, and for a damaged one."""
        directory = Path(name).expanduser()
        if not directory.exists() and _hub_id(name):
            directory = fetched(name)
        if not directory.is_dir() or (directory / META).is_file() or _of_a_run(directory):
            return CheckpointSource(directory, read_meta(directory))
        found = Foreign(directory, name)
        recognised(found)
        return CheckpointSource(directory, None, found)

    @property
    def family(self) -> str:
        if self.foreign is not None:
            return recognised(self.foreign).family
        assert self.meta is not None
        return self.meta.family

    @property
    def dtype(self) -> str:
        """What it is exported in where nothing is said: as the target was loaded in training, or as the weights are."""
        if self.foreign is not None:
            return recognised(self.foreign).dtype(self.foreign)
        assert self.meta is not None
        return self.meta.target.dtype

    @property
    def step(self) -> int | None:
        return None if self.meta is None else self.meta.step

    def target(self, options: TargetOptions) -> TargetOptions:
        """The target that the user names, else the one that the checkpoint records.

        Raises UserError for one of another shape than the checkpoint was trained for, before its weights are read.
        """
        if self.meta is None:
            return options
        if options.name == "embedded" and self.meta.target.name != "embedded":
            options = replace(options, **{name: getattr(self.meta.target, name) for name in RECORDED})
        check_shape(self.directory, self.meta.target, load_shape(options))
        return options

    def checkpoint(self, loaded: LoadedTarget, say: Callable[[str], None]) -> Path:
        """Ours; what is not is converted. Raises UserError where that is not possible for this target."""
        return self.directory if self.foreign is None else converted(self.foreign, loaded, say)


def plain_printer(console: Console) -> Callable[[str], None]:
    """Lines as they are, paths in them included."""
    return partial(console.print, soft_wrap=True, highlight=False, markup=False)


def check_start(name: str, meta: CheckpointMeta, options: dict[str, object], settled: dict[str, object]) -> None:
    """Raise UserError unless training goes on with the network that was imported: with all options that its files determine.

    options: of this run's drafter; settled: those of them that were left to a rule.
    """
    about = meta.imported
    if about is None:
        return
    here = options | settled
    apart = [key for key in about["determined"] if here[key] != meta.options[key]]
    if apart:
        words = " ".join(f"drafter.{word}" for key in apart for word in _overrides(key, meta.options[key], here[key]))
        raise UserError(f"train.init {name}: its {meta.family} drafter has other options than this one; add {words}")


def _overrides(key: str, wanted: object, here: object) -> list[str]:
    if isinstance(wanted, dict) and isinstance(here, dict):
        return [word for k, v in wanted.items() if here.get(k) != v for word in _overrides(f"{key}.{k}", v, here.get(k))]
    return [f"{key}={_hydra(wanted)}"]


def _hydra(value: object) -> str:
    """As it is typed on the command line."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if isinstance(value, dict):
        return "'{" + ",".join(f"{k}:{_hydra(v)}" for k, v in value.items()) + "}'"
    return str(value)


def _hub_id(name: str) -> bool:
    """As `owner/name` or `owner/name@revision`, and no path."""
    return not name.startswith((".", "/", "~")) and name.partition("@")[0].count("/") == 1


def _of_a_run(directory: Path) -> bool:
    """A run's directory or one inside it, which `read_meta` explains."""
    return bool(list_checkpoints(directory)) or bool(list_checkpoints(directory / "checkpoints"))
