"""Saves, prunes and loads the checkpoints of a run. All processes write each one together, atomically as a directory.

Checksums of its files tell whether a checkpoint is undamaged (`damage`), and which is the newest of those (`newest_valid`).
"""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import (
    atomic_directory,
    disk_full,
    file_sum,
    first_fault,
    read_sealed_json,
    remove_directory,
    write_sealed_json,
)
from drafttrain.drafters.checkpoint import (
    ANOTHER,
    META,
    WEIGHTS,
    CheckpointMeta,
    checkpoint_name,
    list_checkpoints,
    prune,
    read_weights,
    save_drafter,
    step_of,
)
from drafttrain.train.engine import TrainingEngine, World
from drafttrain.train.shards import PATTERN

PROGRESS = "trainer.json"
ENGINE = "engine.json"  # the figures of an engine that measured the checkpoint during training
Result = TypeVar("Result")
SUMS = "checksums.json"
TENSORS = (WEIGHTS, PATTERN)  # files that training reads and users do not edit


@dataclass
class Progress:
    """The progress of training, as a checkpoint stores it (trainer.json)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, over all sessions of the run
    process_seconds: float = 0.0  # the same, times the number of processes
    flops: float = 0.0  # of target and drafter in all processes; counted on GPUs only
    device: str | None = None  # cuda or cpu
    loss: float | None = None
    expected_tau: float | None = None
    expected_interval: list[float] | None = None  # 95 %, over the held-out conversations
    measured_tau: float | None = None
    left_out: int = 0  # rows that steps left out, because a value was not finite
    passing: bool = False  # saved at an interruption: only for resuming, removed later; its proposal is not tuned

    @staticmethod
    def of(checkpoint: Path) -> Progress:
        """Read a checkpoint's progress. Raises UserError for a file that is missing or damaged."""
        file, description = checkpoint / PROGRESS, "the progress of training"
        try:
            return Progress(**read_sealed_json(file, description, ANOTHER))
        except (OSError, TypeError) as error:
            raise UserError(f"{file}: expected {description}, got something else ({error}); {ANOTHER}") from error


class NoSpaceError(Exception):
    """A process's disk is full. Raised in all processes."""


class CheckpointManager:
    """The checkpoints in `folder`, which all processes share. All processes call its methods together.

    names: names of the tensors in the engine's module, by their names in the checkpoint. by_engine: as for `best_checkpoint`.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        engine: TrainingEngine,
        names: Mapping[str, str],
        keep_last: int,
        by_engine: bool = False,
    ) -> None:
        self.folder, self.world, self.engine, self.names, self.keep_last = folder, world, engine, names, keep_last
        self.by_engine = by_engine
        self.measured_step: int | None = None  # by a serving engine now: with by_engine, its checkpoint is kept until then

    def save(self, progress: Progress, meta: CheckpointMeta) -> bool:
        """Write a new checkpoint and prune old ones. False if the disk is full; then nothing has changed."""
        weights = self.engine.whole_state(self.names.values())
        try:
            with ExitStack() as stack:
                self._write(stack, weights, progress, meta)
        except NoSpaceError:
            return False
        if self.world.first:
            self.prune()
        self.world.wait()
        return True

    def resume(self, checkpoint: Path) -> Progress:
        """Load weights and optimiser state; returns the progress of training."""
        weights = read_weights(checkpoint)
        self.engine.load_state(checkpoint, {self.names[name]: tensor for name, tensor in weights.items()})
        return Progress.of(checkpoint)

    def _write(self, stack: ExitStack, weights: dict[str, Tensor], progress: Progress, meta: CheckpointMeta) -> None:
        """Write each process's files to a temporary directory, then the checksums, and then rename the directory."""
        is_main, final_dir = self.world.first, self.folder / checkpoint_name(progress.step)
        staging_dir = self._each(lambda: stack.enter_context(atomic_directory(final_dir)) if is_main else final_dir)[0]
        sums = self._each(lambda: file_sums(self.engine.save_state(staging_dir)))

        def complete() -> None:
            state = {name: weights[module_name] for name, module_name in self.names.items()}
            save_settings(staging_dir, state, meta, progress, dict(ChainMap(*sums)))
            stack.close()  # the directory gets its name

        self._each(lambda: complete() if is_main else None)

    def _each(self, work: Callable[[], Result]) -> list[Result]:
        """Results of `work` in every process, on all of them. Raises NoSpaceError on all if one finds its disk full."""
        local_results: list[Result] = []
        try:
            local_results = [work()]
        except Exception as error:
            if not disk_full(error):
                raise
        results = self.world.gather(local_results)
        if not all(results):
            raise NoSpaceError
        return [result for (result,) in results]

    def prune(self) -> None:
        """Remove old checkpoints except the best, and those saved at an interruption. The newest stays."""
        checkpoints = list_checkpoints(self.folder)
        if not checkpoints:
            return
        for checkpoint in checkpoints[:-1]:
            if Progress.of(checkpoint).passing:
                remove_directory(checkpoint)
        kept_names = {best_checkpoint(self.folder, self.by_engine).name, checkpoint_name(0)}
        if self.by_engine and self.measured_step is not None:
            kept_names.add(checkpoint_name(self.measured_step))
        prune(self.folder, self.keep_last, kept_names)


def save_settings(
    directory: Path,
    state: dict[str, Tensor],
    meta: CheckpointMeta,
    progress: Progress,
    others: Mapping[str, str] | None = None,
) -> None:
    """Write rank 0's files, the checksums last. others: checksums of the other files."""
    save_drafter(directory, state, meta)
    write_sealed_json(directory / PROGRESS, asdict(progress))
    seal(directory, file_sums(*(directory / name for name in (WEIGHTS, META, PROGRESS))) | dict(others or {}))


def best_checkpoint(folder: Path, by_engine: bool = False) -> Path:
    """The checkpoint of the highest tau: measured if all were measured, else expected on held-out text. Ties: the newest.

    by_engine: by the tau of a serving engine, among the checkpoints that it has measured; if there are any.
    """
    paths = list_checkpoints(folder)
    engine_tau = {path: figures["tau"] for path in paths if by_engine and (figures := engine_figures(path))}
    if engine_tau:
        return max(engine_tau, key=lambda path: (engine_tau[path], step_of(path)))
    progress_by_path = {path: Progress.of(path) for path in paths}
    measured = all(progress.measured_tau is not None for progress in progress_by_path.values() if not progress.passing)

    def merit(path: Path) -> tuple[float, int]:
        progress = progress_by_path[path]
        return ((progress.measured_tau if measured else progress.expected_tau) or 0.0, progress.step)

    return max(progress_by_path, key=merit)


def store_engine_figures(folder: Path, step: int, figures: Mapping[str, Any]) -> None:
    """Store a serving engine's figures of this step with the checkpoint of the same step, if there is one in `folder`."""
    directory = folder / checkpoint_name(step)
    if directory.is_dir():
        write_sealed_json(directory / ENGINE, dict(figures))


def engine_figures(checkpoint: Path) -> dict[str, Any] | None:
    """The figures of a serving engine that measured this checkpoint; None if none has. A damaged file counts as none."""
    try:
        return read_sealed_json(checkpoint / ENGINE, "an engine's figures", "delete it")
    except (OSError, UserError):
        return None


def seal(directory: Path, sums: Mapping[str, str]) -> None:
    """Write the file of checksums: each file's sha256 by name, and a checksum of the whole. It is written last."""
    write_sealed_json(directory / SUMS, dict(sorted(sums.items())))


def file_sums(*files: Path) -> dict[str, str]:
    """Each file's sha256 by name. The files are flushed to disk first."""
    return {file.name: file_sum(file, durable=True) for file in files}


def damage(directory: Path) -> str | None:
    """A sentence on the first damaged file of a checkpoint; None if all files are as saved.

    Files that are written later, such as decode.json and golden drafts, have their own checksums.
    """
    try:
        sums = read_sealed_json(directory / SUMS, "checksums", "")
    except (OSError, UserError):
        return f"{SUMS} is missing or damaged"
    if unlisted := sorted({file.name for pattern in TENSORS for file in directory.glob(pattern)} - sums.keys()):
        return f"{unlisted[0]} is not in {SUMS}"
    return first_fault(directory, sums, SUMS)


def newest_valid(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest undamaged checkpoint. Newer, damaged ones are renamed to `<name>.damaged`, with a line to `say` for each."""
    for path in reversed(list_checkpoints(folder)):
        if (problem := damage(path)) is None:
            return path
        damaged_path = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(damaged_path, ignore_errors=True)
        path.rename(damaged_path)
        say(f"checkpoint {path.name} is damaged and renamed to {damaged_path.name}: {problem}")
    return None
