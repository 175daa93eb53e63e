"""An engine's process that runs next to training: it gets all its prompts at the start, and its answers are read at the end.

It is a timed job (`timed_process.py`) with speculation whose stdin and stdout are files. It is the leader of a session of its
own, so that Ctrl-C in the terminal and the signals of a launcher do not reach it. When the process that started it has ended,
`serve.py` removes its files and ends it, also after kill -9.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.engines.answers import EngineInfo, WaveOutputs
from drafttrain.engines.process import ENGINES, Engine, EngineJob, command, environment, result_of, without_launcher
from drafttrain.engines.timed_process import answer_of

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Resources:
    """The part of the machine that the engine may use."""

    device: str = CPU  # `cpu`, or GPUs as in CUDA_VISIBLE_DEVICES
    threads: int = 1  # CPU threads

    def timed(self, dtype: str, batch: int) -> dict[str, Any]:
        """The job's `timed`. `eager`: without compilation, which takes longer than a few prompts."""
        device_type = CPU if self.device == CPU else "cuda"
        return {
            "speculative": True, "dtype": dtype, "threads": self.threads, "device": device_type, "batch": batch, "eager": True,
        }  # fmt: skip

    def variables(self, engine: Engine) -> dict[str, str]:
        """The process's whole environment, without the launcher's variables."""
        base_variables = without_launcher(environment(engine))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        gpus = {"CUDA_VISIBLE_DEVICES": "" if self.device == CPU else self.device}
        return base_variables | engine.limited | threads | gpus


@dataclass(frozen=True, slots=True)
class BackgroundEngine:
    """A process that was started."""

    engine: Engine
    process: subprocess.Popen[bytes]
    place: Path  # the folder of its files
    began: float  # by `monotonic`

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return monotonic() - self.began

    @property
    def log(self) -> Path:
        return self.place / "log"

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answers(self) -> tuple[EngineInfo, list[WaveOutputs]]:
        """The result of a process that has ended. Raises UserError with the engine's own message where it failed."""
        result_of(self.engine, self.place, self.process.returncode)
        with suppress(ValueError, TypeError):
            info, *outputs = map(json.loads, (self.place / "answers").read_text(encoding="utf-8").splitlines())
            return EngineInfo(**info), [answer_of(self.engine, output) for output in outputs]
        raise UserError(f"{self.engine.label}: its answers do not have the required form; correct the script")


def start(
    name: str, python: Path, job: EngineJob, place: Path, waves: Sequence[Sequence[int]], resources: Resources
) -> BackgroundEngine:
    """Start an engine on these waves of prompt numbers. place: a folder that has the export, and that is removed with the
    process.
    """
    engine, scratch = ENGINES[name], place / "scratch"
    scratch.mkdir(exist_ok=True)
    content = asdict(replace(job, parent=os.getpid())) | {"scratch": str(scratch)}
    (place / "job.json").write_text(json.dumps(content), encoding="utf-8")
    (place / "waves").write_text("".join(json.dumps(list(wave)) + "\n" for wave in waves), encoding="utf-8")
    with (place / "waves").open("rb") as stdin, (place / "answers").open("wb") as stdout, (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command(name, python, place), stdin=stdin, stdout=stdout, stderr=log, env=resources.variables(engine),
            start_new_session=True,
        )  # fmt: skip
    return BackgroundEngine(engine, process, place, monotonic())
