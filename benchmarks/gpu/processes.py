"""Work of several processes, as far as one GPU can test it: collectives, a target shared by two processes, ZeRO's stages.

NCCL takes only one process per GPU. So a group of one uses NCCL, and two processes on one GPU use gloo, with tensors on that
GPU; `benchmarks/gpu/two.py` gives each a GPU of its own. Each piece runs in its own processes, which end with it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.gpu import sources
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import LADDER, random_model
from benchmarks.gpu.results import Job, RedError, SkipError
from benchmarks.gpu.sources import ROOT
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.parallel import Part
from drafttrain.targets.split import split_target

PATIENCE = 120.0  # seconds of one piece
DONE = "the piece ran"
CPU = torch.device("cpu")
AGREE = 1e-4  # of losses at other ZeRO stages, in float32
STAGES = (0, 1, 2, 3)
MODULES = ("drafttrain.train.engine", "drafttrain.targets.split", *sources.TRAINING)


@dataclass(frozen=True, slots=True)
class Place:
    """This process: its rank of `size`, and its device."""

    rank: int
    size: int
    device: torch.device
    own: bool = False  # whether no other process has this device

    @property
    def backend(self) -> str:
        return "nccl" if self.own and self.device.type == "cuda" else "gloo"

    def join(self) -> None:
        backend = self.backend
        bound = self.device if backend == "nccl" else None
        distributed.init_process_group(backend, timeout=timedelta(seconds=PATIENCE / 2), device_id=bound)

    def numbers(self) -> Tensor:
        return torch.arange(6.0, device=self.device) + self.rank


def hold(what: str, fact: bool) -> None:
    """Raises RedError unless the condition is true."""
    if not fact:
        raise RedError(what)


def alone(place: Place) -> None:
    """A group of one with NCCL: every collective that a run uses, also inside a captured graph."""
    from drafttrain.train.engine import World

    place.join()
    several = 2  # a single process would skip the group's collectives; with 2 they run, in a group of one
    world, part = World(0, several), Part(0, several)
    hold("a sum over one process changes it", torch.equal(world.sum(place.numbers()), place.numbers()))
    hold("an object is shared as another one", world.share({"steps": [1, 2]}) == {"steps": [1, 2]})
    hold("an object is gathered as another one", world.gather(("a", 1))[0] == ("a", 1))
    world.wait()
    hold("a part's sum over one process changes it", torch.equal(part.sum(place.numbers()), place.numbers()))
    part.check([1, 2, 3])
    pieces = [torch.empty_like(place.numbers())]
    distributed.all_gather(pieces, place.numbers())
    hold("a tensor is gathered as another one", torch.equal(pieces[0], place.numbers()))
    if place.backend == "nccl":
        captured(part, place, 1)


def captured(part: Part, place: Place, size: int) -> None:
    """Decode steps of a shared target, whose graph holds such sums. size: processes that add."""
    x, graph = place.numbers(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = part.sum(x * 2)
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    hold("a replayed sum is another one", bool((y == 6.0 * size).all()))


def shared(place: Place) -> None:
    """Two processes: sums and objects of a run, then a target of which each holds a half. With NCCL both are captured."""
    from drafttrain.train.engine import World

    place.join()
    world, part, capture = World(place.rank, place.size), Part(place.rank, place.size), place.backend == "nccl"
    total = sum(torch.arange(6.0) + rank for rank in range(place.size))
    hold("the sum over processes is wrong", torch.equal(world.sum(place.numbers()).cpu(), torch.as_tensor(total)))
    hold("the first one's object does not arrive", world.share(f"of {place.rank}") == "of 0")
    hold("objects are gathered in another order", world.gather(place.rank) == list(range(place.size)))
    if capture:
        captured(part, place, place.size)
    model = partial(random_model, LADDER["llama-tiny"], torch.float32, CPU, spread=1.2)
    found = texts(split_target(model(), part, place.device), capture)
    world.wait()
    hold("texts of a shared target differ from the whole one's", found == texts(FastTarget(model().to(place.device)), capture))


def texts(target: FastTarget, capture: bool) -> list[list[int]]:
    """Greedy texts with drafts. capture: as CUDA graphs; gloo's collectives cannot be captured."""
    family = families()["medusa"]
    torch.manual_seed(1)
    drafter = family.build(family.options(), target).to(target.device).eval().requires_grad_(False)
    prompts = [torch.randint(6, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 11)]
    decoder = Decoder(target, drafter, "greedy", Sampling(), frozenset(), 12, controls=Controls(capture=capture))
    return [result.tokens for result in decoder.run(prompts, 2).results]


def zero(place: Place) -> None:
    """Steps of DeepSpeed's engine at every ZeRO stage, in a group of one. The losses of all stages agree, and they fall."""
    from benchmarks.gpu.two import STEPS, Training
    from drafttrain.train.engine import join_world

    training, found = Training(join_world(place.device), place.device), {}
    for stage in STAGES:
        losses = training.steps(training.engine(stage), STEPS)
        hold(f"the loss does not fall at ZeRO stage {stage}: {losses}", losses[-1] < losses[0])
        found[stage] = torch.tensor(losses)
    for stage, losses in found.items():
        apart = float(((losses - found[0]) / found[0]).abs().max())
        hold(f"losses at ZeRO stage {stage} are {apart:.1e} from those at stage 0", apart <= AGREE)


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    processes: int
    work: Callable[[Place], None]
    package: str = "torch"  # required to run


PIECES = {
    piece.name: piece
    for piece in (
        Piece("one process: collectives", 1, alone),
        Piece("two processes on one device: a shared target", 2, shared),
        Piece("one process: ZeRO stages", 1, zero, "deepspeed"),
    )
}


def run(piece: Piece, machine: Machine) -> dict[str, Any]:
    """Run a piece. Raises RedError with the first process's message, SkipError where a package is missing."""
    if find_spec(piece.package) is None:
        raise SkipError(f"{piece.package} is not installed")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if machine.rehearsal else {}
    launch([sys.executable, "-m", "benchmarks.gpu.processes", piece.name], [{"LOCAL_RANK": "0"} | hidden] * piece.processes)
    return {}


def launch(command: Sequence[str], variables: Sequence[dict[str, str]]) -> None:
    """Run the command once for each process of a group, with its variables. Raises RedError with a process's message."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(len(variables)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [start(command, os.environ | group | {"RANK": str(rank)} | own) for rank, own in enumerate(variables)]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    except subprocess.TimeoutExpired as error:
        raise RedError(f"not done in {PATIENCE:.0f} s") from error
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        if process.returncode or DONE not in text:
            raise RedError(last_line(text))


def start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)  # type: ignore[call-overload,no-any-return]


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1][:200]


def jobs(machine: Machine) -> list[Job]:
    group = "several processes"
    return [
        Job(f"processes {piece.name}", group, MODULES, partial(run, piece, machine), able=partial(find_spec, piece.package))
        for piece in PIECES.values()
    ]


def here() -> Place:
    """This process's place: on the GPU of its number, if it sees one."""
    rank, size, number = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return Place(rank, size, CPU, own=True)
    torch.cuda.set_device(number)
    return Place(rank, size, torch.device("cuda", number), own=number == rank)


def finished() -> int:
    if distributed.is_initialized():
        distributed.destroy_process_group()
    print(DONE, flush=True)
    return 0


def main() -> int:
    """One process of one piece."""
    place = here()
    PIECES[sys.argv[1]].work(replace(place, own=place.size == 1))
    return finished()


if __name__ == "__main__":
    sys.exit(main())
