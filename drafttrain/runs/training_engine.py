"""A serving engine that measures the drafter during training (`fit measure.every=N measure.engine=NAME`).

At a measured step the drafter is exported into a temporary folder of the run, and the engine starts on it. Training goes on.
When the engine has ended, our decoder decodes the same prompts with the same chains, and the folder is removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from drafttrain.core.errors import ParityError, UserError, one_line
from drafttrain.core.files import temporary_name
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord
from drafttrain.engines.process import ENGINES, EngineJob, batches_with, check_family, python_of
from drafttrain.engines.timed_process import CPU, BackgroundEngine, Resources, start_background
from drafttrain.export import golden
from drafttrain.export.engine_check import Ending
from drafttrain.export.exporter import export
from drafttrain.export.opened import Opened
from drafttrain.measure.cases import encode_cases
from drafttrain.model.drafter import Drafter
from drafttrain.model.images import has_images
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.options import RunOptions
from drafttrain.runs.serving_engines import (
    chain_room,
    check_greedy,
    own_decoding,
    stacks_of,
    target_place,
    wanted_export,
)
from drafttrain.targets.frozen_ends import FrozenEnds
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import weights_of

OWN, ENGINE = "own", "engine"  # values of measure.best
DEVICE = re.compile(r"cpu|\d+(,\d+)*|(GPU|MIG)-[\w/-]+")
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """An engine, and what it decodes at every measured step. Calling it gives a run's engine."""

    name: str
    python: Path
    loaded: LoadedTarget
    family: str
    ids: list[list[int]]  # the prompts as token ids
    ending: Ending
    length: int  # of the drafted chains
    resources: Resources
    timeout: float  # seconds

    def __call__(self, run_dir: Path, say: Callable[[str], None]) -> RunEngine:
        return RunEngine(self, run_dir, say)

    @property
    def dtype(self) -> str:
        return str(self.loaded.target.dtype).removeprefix("torch.")

    def job(self, opened: Opened, out: Path, stack: str) -> EngineJob:
        """The job for an exported drafter."""
        batch = max(map(len, self.waves))
        return EngineJob(
            target=target_place(out, opened),
            drafter=str(out),
            family=self.family,
            layout=stack,
            draft_length=self.length,
            max_new_tokens=self.ending.max_new_tokens,
            stop_ids=sorted(self.ending.stop_ids),
            prompts=self.ids,
            facts={"layer_inputs": [block + 1 for block in opened.drafter.taps.blocks]},
            timed=self.resources.timed(self.dtype, batch),
        )

    @property
    def waves(self) -> list[list[int]]:
        """Numbers of the prompts that are decoded together."""
        numbers = list(range(len(self.ids)))
        return [numbers] if batches_with(self.name, self.family) else [[i] for i in numbers]


@dataclass(frozen=True, slots=True)
class _Running:
    step: int
    folder: Path
    process: BackgroundEngine
    blocked: float  # seconds that training waited for the export


class RunEngine:
    """The engine of one run, on rank 0: `drafttrain.train.engine_measurement.EngineProcess`."""

    def __init__(self, settings: EngineSettings, run_dir: Path, say: Callable[[str], None]) -> None:
        self.settings, self.run_dir, self.say = settings, run_dir, say
        self._running: _Running | None = None

    @property
    def label(self) -> str:
        return ENGINES[self.settings.name].label

    @property
    def step(self) -> int | None:
        return None if self._running is None else self._running.step

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._running is None else max(0.0, self.settings.timeout - self._running.process.seconds)

    def start(self, step: int, write: Callable[[Path], object]) -> None:
        folder, start_time = temporary_name(self.run_dir / f"engine-{step:05d}"), monotonic()
        try:
            (folder / "checkpoint").mkdir(parents=True)
            write(folder / "checkpoint")
            process = self._started(folder)
            self._running = _Running(step, folder, process, monotonic() - start_time)
        except Exception as error:  # an engine's measurement must not end training, whatever an export raises
            shutil.rmtree(folder, ignore_errors=True)
            self.say(f"step {step} is not measured by {self.label}: {_reason(error)}")

    def collect(self) -> Figures | None:
        running = self._running
        if running is None or not (running.process.ended() or self.seconds_left <= 0):
            return None
        figures = None
        try:
            if not running.process.ended():
                limit = f"measure.engine_timeout={self.settings.timeout:g}"
                raise UserError(f"it had not ended after {limit} seconds; raise that, or measure fewer prompts")
            figures = self._figures(running)
            self.say(self._line(figures))
        except Exception as error:  # as above
            log = self._kept_log(running)
            self.say(f"{self.label} did not measure step {running.step}: {_reason(error)}" + (f" (log: {log})" if log else ""))
        self.close()
        return figures

    def close(self) -> None:
        if self._running is not None:
            self._running.process.kill()
            shutil.rmtree(self._running.folder, ignore_errors=True)
            self._running = None

    def _started(self, folder: Path) -> BackgroundEngine:
        settings = self.settings
        checkpoint = Opened.of(folder / "checkpoint", settings.loaded)
        export_settings = wanted_export(checkpoint, settings.name, folder / "export", settings.dtype)
        export(checkpoint, golden.made(checkpoint, golden.sequences_for(settings.loaded)), export_settings)
        job = settings.job(checkpoint, export_settings.out, export_settings.stacks[0])
        return start_background(settings.name, settings.python, job, folder, settings.waves, settings.resources)

    def _figures(self, running: _Running) -> Figures:
        """The engine's counts, and tau of our decoder with the same chains, which are decoded now."""
        settings, seconds, start_time = self.settings, running.process.seconds, monotonic()
        engine_info, replies = running.process.answers()
        counts = [length for reply in replies for length in reply.lengths]
        sums = [sum(getattr(reply, name) or 0 for reply in replies) for name in ("verifications", "drafted", "accepted")]
        if len(counts) != len(settings.ids) or not sums[0]:
            raise UserError(f"it answered {len(counts)} of {len(settings.ids)} prompts in {sums[0]} verifications")
        prefilled = 0 if engine_info.begins == "drafted" else 1
        own_tau = None
        if not isinstance(settings.loaded.target, FrozenEnds):  # which cannot decode
            checkpoint = Opened.of(running.folder / "checkpoint", settings.loaded)
            our_decoding = own_decoding(checkpoint, settings.ids, settings.ending, settings.length, settings.dtype)(
                engine_info.begins
            )
            own_tau = our_decoding.tau(range(len(settings.ids)))
        return {
            "name": settings.name,
            "version": next(iter(engine_info.versions.values()), None),
            "step": running.step,
            "tau": sum(max(0, count - prefilled) for count in counts) / sums[0],
            "own_tau": own_tau,
            "acceptance": sums[2] / sums[1] if sums[1] else None,
            "prompts": len(counts),
            "draft_length": settings.length,
            "seconds": round(seconds, 1),
            "blocked_seconds": round(running.blocked + monotonic() - start_time, 1),
        }

    def _line(self, figures: Figures) -> str:
        accepted = "" if figures["acceptance"] is None else f"; {figures['acceptance']:.0%} of the drafts accepted"
        ours = "" if figures["own_tau"] is None else f" (our decoder {figures['own_tau']:.2f} with the same chains)"
        return (
            f"step {figures['step']}: {self.label} measured tau {figures['tau']:.2f}{ours}{accepted}; "
            f"{figures['seconds']:.0f} s"
        )

    def _kept_log(self, running: _Running) -> Path | None:
        """Keep the log of a process that failed with the run."""
        log_copy = self.run_dir / "logs" / f"engine-{running.step:05d}.log"
        with suppress(OSError):
            log_copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(running.process.log, log_copy)
            return log_copy
        return None


def check_engine_options(options: RunOptions) -> None:
    """Raise UserError for settings of `measure.engine` that are wrong for every target and drafter."""
    measure = options.measure
    if measure.engine is None:
        if measure.best == ENGINE:
            raise UserError("measure.best is engine, but no engine measures during training; set measure.engine=NAME")
        return
    if not measure.every:
        raise UserError(f"measure.engine is {measure.engine}, but measure.every is 0; set it to a number of steps")
    if measure.engine_device is not None and not DEVICE.fullmatch(_device(measure.engine_device)):
        raise UserError(
            f"measure.engine_device is {measure.engine_device!r}; set it to cpu, the number of a GPU, or a list of numbers"
        )
    check_greedy(options)


def engine_settings(options: RunOptions, loaded: LoadedTarget, drafter: Drafter) -> EngineSettings | None:
    """The engine of `measure.engine`; None without. The target is in this process.

    Raises UserError for an engine that is not installed or does not load this drafter, and for what engines cannot measure.
    """
    measure, name, family = options.measure, options.measure.engine, options.drafter.family
    if name is None:
        return None
    stacks_of(name, family)
    check_family(name, family)
    if (width := weights_of(loaded.target.fingerprint)) != "whole":
        raise UserError(f"the target has {width} weights here, but engines load whole ones; leave out measure.engine")
    device = CPU if measure.engine_device is None else _device(measure.engine_device)
    if measure.engine_device is None and loaded.target.device.type != CPU:
        raise UserError(
            "measure.engine_device is null, but the target is on a GPU; name a GPU that training leaves free, as in "
            "CUDA_VISIBLE_DEVICES, or cpu"
        )
    length = options.decode.draft_length or drafter.draft_length
    max_prompt_tokens = chain_room(loaded, options.decode.max_new_tokens, length)
    cases, _ = encode_cases(measurement_prompts(options), loaded.tokenizer, max_prompt_tokens, loaded.images)
    ids = [case.tokens for case in cases[: measure.every_prompts]]
    if any(map(has_images, ids)):
        raise UserError("engines are measured with prompts of text alone; leave out measure.engine, or name other prompts")
    settings = EngineSettings(
        name,
        python_of(name, options.engine_python),
        loaded,
        family,
        ids,
        Ending(loaded.target.stop_ids, options.decode.max_new_tokens),
        length,
        Resources(device, measure.engine_threads),
        measure.engine_timeout,
    )
    meta = CheckpointMeta(family, asdict(options.drafter), drafter.decode_settings(), TargetRecord.of(loaded), 0)
    wanted_export(Opened.in_memory(meta, drafter, loaded), name, Path("export"), settings.dtype)
    return settings


def _device(device: Any) -> str:
    """`measure.engine_device` as CUDA_VISIBLE_DEVICES has it."""
    return ",".join(map(str, device)) if isinstance(device, list) else str(device)


def _reason(error: Exception) -> str:
    """One line. Errors that are not meant for users have their type with them."""
    is_user_error = isinstance(error, UserError | ParityError)
    return str(error) if is_user_error else one_line(f"{type(error).__name__}: {error}")
