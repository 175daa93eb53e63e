"""Trainers and machines of servers find each other by files in a folder of the run that all see. The servers' GPUs.

- `wanted.json`: the first trainer process writes it under a new id, says in it what servers must give, and writes it again
  every `BEAT` seconds with a greater `beat`. It goes away when training has ended.
- `machine-NAME.json`: a machine of servers writes it once its servers answer: their addresses, or why there are none, and the
  id that this answers.

A trainer that starts again asks under another id; servers that give what it wants go on. A machine that starts again takes the
ports that it had, because trainers know its addresses.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST
from drafttrain.engines.states_server import ServedStates
from drafttrain.features import FeatureOptions
from drafttrain.runs.options import RunOptions


@dataclass(frozen=True, slots=True)
class ServerGpus:
    """Which GPUs of a machine are its servers' of states; the others train.

    By server, as CUDA_VISIBLE_DEVICES names them; empty: it has none for itself.
    """

    of_servers: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        """As in `2 servers, on the GPUs 4, 5 and on the GPUs 6, 7`."""
        count = len(self.of_servers)
        number = f"{count} server{'' if count == 1 else 's'}"
        if not self.of_servers[0]:
            return number
        gpu_lists = [f"the GPU{'' if len(gpus) == 1 else 's'} {', '.join(gpus)}" for gpus in self.of_servers]
        return f"{number}, on {' and on '.join(gpu_lists)}"


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # takes long, and machines that only start servers do without

    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")]
    return names[:count]


def servers_next_to_trainers(features: FeatureOptions, gpus: Sequence[str], trainers: int) -> ServerGpus:
    """Servers on a machine that trains too. They have its last GPUs. gpus: of the machine. trainers: GPUs that training uses.

    Raises UserError where there are fewer GPUs.
    """
    if not features.gpus:
        return ServerGpus(((),) * (features.count or 1))
    check_gpus(features, gpus, trainers)
    return _divided(features, gpus[-features.gpus :])


def servers_alone(features: FeatureOptions, gpus: Sequence[str]) -> ServerGpus:
    """Servers on a machine that does not train. They have all of its GPUs, or the last `features.gpus`.

    Raises UserError where there are fewer GPUs.
    """
    if not gpus and not features.gpus:
        return ServerGpus(((),) * (features.count or 1))
    gpu_count = features.gpus or (features.count or 0) * features.tensor_parallel
    gpu_count = gpu_count or len(gpus) - len(gpus) % features.tensor_parallel
    if not features.tensor_parallel <= gpu_count <= len(gpus):
        raise UserError(
            f"the servers need {max(gpu_count, features.tensor_parallel)} GPUs by features.gpus={features.gpus} and "
            f"features.tensor_parallel={features.tensor_parallel}, but their machine has {len(gpus)}; set fewer"
        )
    return _divided(features, gpus[-gpu_count:])


def check_gpus(features: FeatureOptions, gpus: Sequence[str], trainers: int) -> None:
    """Raise UserError where a machine has fewer GPUs than `trainers` and its servers use together."""
    if features.gpus + trainers > len(gpus):
        requirement = f"features.gpus={features.gpus}"
        requirement += f" and {trainers} training process{'' if trainers == 1 else 'es'}" if trainers else ""
        raise UserError(
            f"{requirement} need {features.gpus + trainers} GPUs, but this machine has {len(gpus)}; set features.gpus or "
            "launcher.nproc lower"
        )


def gpus_next_to_trainers(options: RunOptions) -> int:
    """GPUs of each machine of trainers that its servers have for themselves."""
    features = options.features
    return features.gpus if features.name == "engine" and not features.nodes and not features.servers else 0


def processes_of(options: RunOptions) -> int:
    """The number of training processes by `launcher.nproc=auto`: one for each GPU of this machine that no server has."""
    if options.target.device == "cpu":
        return 1
    gpus, servers = visible_gpus(), gpus_next_to_trainers(options)
    if servers:
        check_gpus(options.features, gpus, 1)
    return max(1, len(gpus) - servers)


def _divided(features: FeatureOptions, gpus: Sequence[str]) -> ServerGpus:
    gpus_per_server = features.tensor_parallel
    return ServerGpus(tuple(tuple(gpus[i : i + gpus_per_server]) for i in range(0, len(gpus), gpus_per_server)))


MEETING = "DRAFTTRAIN_SERVERS"  # environment variable of training processes: the folder
BEAT, LOOK = 2.0, 0.5  # seconds between two signs of life, and between two looks
COMING = 1800.0  # seconds for the servers of all machines to answer
READS = 5  # of a file that is replaced while it is read, which is an error on NFS
WANTED, MACHINE = "wanted.json", "machine-*.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the trainers ask for."""

    id: str
    beat: int
    served: ServedStates


@dataclass(frozen=True, slots=True)
class Machine:
    """The answer of a machine of servers."""

    id: str  # of the request that it answers
    urls: tuple[str, ...] = ()
    error: str | None = None  # why there are no servers


def meeting_folder(options: RunOptions) -> Path:
    """The folder of a run. All its machines have the same output and rendezvous."""
    rendezvous_name = re.sub(r"[^\w.-]", "_", str(options.launcher.rendezvous))
    return Path(options.output).expanduser().absolute() / options.name / "servers" / rendezvous_name


@contextmanager
def asked(served: ServedStates, machines: int, folder: Path, say: Callable[[str], None]) -> Iterator[list[str]]:
    """The addresses of all machines' servers. At the end, unless by an exception, the machines hear that training has ended.

    Raises UserError where a machine has none, or does not answer.
    """
    request, closing = uuid4().hex, threading.Event()
    beating = threading.Thread(target=_beat, args=(folder, request, served, closing), daemon=True)
    beating.start()
    try:
        yield _answers(folder, request, machines, say)
        closing.set()
        beating.join()
        end(folder)
    finally:
        closing.set()
        beating.join()


def end(folder: Path) -> None:
    """Tell the machines of servers that training has ended."""
    (folder / WANTED).unlink(missing_ok=True)


def wanted(folder: Path) -> Wanted | None:
    """What is asked for now; None if nothing."""
    content = _read(folder / WANTED)
    return None if content is None else Wanted(content["id"], content["beat"], ServedStates.of(content["served"]))


def answer(folder: Path, machine: Machine) -> None:
    """Write the answer of this machine."""
    _write(_own(folder), asdict(machine))


def earlier_answer(folder: Path) -> Machine | None:
    """What this machine has answered last, maybe before it started again."""
    content = _read(_own(folder))
    return None if content is None else _machine(content)


def leave(folder: Path) -> None:
    """Remove this machine's answer, and the folder when it is empty."""
    _own(folder).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _answers(folder: Path, request: str, machines: int, log: Callable[[str], None]) -> list[str]:
    log(f"features: waiting for the servers of {machines} machine{'' if machines == 1 else 's'}, which takes a minute or more")
    deadline = monotonic() + COMING
    while True:
        replies = [_machine(content) for file in sorted(folder.glob(MACHINE)) if (content := _read(file)) is not None]
        answers = [machine for machine in replies if machine.id == request]
        for machine in answers:
            if machine.error is not None:
                raise UserError(machine.error)
        if len(answers) >= machines:
            return [url for machine in answers for url in machine.urls]
        if monotonic() > deadline:
            raise UserError(
                f"the servers of {len(answers)} of features.nodes={machines} machines answer {COMING:g} s after the trainers "
                "asked; look at those machines' output"
            )
        sleep(LOOK)


def _beat(folder: Path, request: str, served: ServedStates, closing: threading.Event) -> None:
    beat = 0
    while True:
        with suppress(OSError):  # a full disk: the machines wait for a long time
            _write(folder / WANTED, asdict(Wanted(request, beat, served)))
        beat += 1
        if closing.wait(BEAT):
            return


def _own(folder: Path) -> Path:
    return folder / MACHINE.replace("*", os.environ.get("SLURMD_NODENAME") or HOST)


def _machine(content: dict[str, Any]) -> Machine:
    return Machine(content["id"], tuple(content["urls"]), content["error"])


def _write(file: Path, content: dict[str, Any]) -> None:
    """Replace the file at once. It is not fsynced: nothing needs it after a crash."""
    temporary_file = file.with_name(f"{file.name}.tmp-{HOST}-{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary_file.write_text(json.dumps(content), encoding="utf-8")
    temporary_file.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    reads = 0
    while True:
        reads += 1
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return content
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE or reads == READS:
                raise
