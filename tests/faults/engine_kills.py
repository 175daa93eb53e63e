"""Kills of trainers and of servers of states: `python -m tests.faults.engine_kills --kills 50 --seed 0`.

Several servers (the tests' stand-in for vLLM, each a process) give states to a run of several trainer processes. At random
moments the trainer or a server, chosen at random, gets SIGKILL. A server starts again after a random pause, the trainer at
once, with `resume=auto`. Runs follow each other until so many kills are done. Every run must end with the weights and losses of
an undisturbed run, bit for bit, and leave no file of states. The random choices follow from the seed, the moments roughly.

With `--transport mooncake` the states go through Mooncake's store, by TCP on loopback, and its master is killed too. No object
may be left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import forked
from tests.standin.mooncake import Master, free_port, remove_left

ROOT = Path(__file__).parents[2]
STUCK = 900.0  # seconds without a new step, after which a run counts as stuck
SOON = 4.0  # seconds within which a kill follows the first step, or another kill
SETTINGS = (
    *("logger=none", "measure.enabled=false", "data.held_out=4", "data.max_length=96", "train.log_every=50"),
    *("train.global_batch=4", "train.micro_batch=1", "train.steps=60", "train.checkpoint_every=3", "recipe=medusa"),
)
LAYERS = "4"  # of Medusa on the target of four blocks: its last state alone
QUIET = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class FoundError(Exception):
    """A disturbed run did not end as the undisturbed one."""


@dataclass
class Server:
    """A server's process, on a port of its own."""

    target: Path
    where: str  # the folder of its files, or the address of Mooncake's master
    module: str
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    starts_at: float = 0.0  # of `time.monotonic`, after a kill

    def start(self) -> None:
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        command = [sys.executable, "-m", self.module, str(self.target), self.where, LAYERS]
        self.process = subprocess.Popen(
            [*command, str(self.port)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | QUIET
        )

    @property
    def name(self) -> str:
        return "server"

    def kill(self, pause: float) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process, self.starts_at = None, time.monotonic() + pause

    def revive(self) -> None:
        """Start again where the pause after a kill is over."""
        if self.process is None and time.monotonic() >= self.starts_at:
            self.start()


@dataclass
class KilledMaster:
    """Mooncake's master, at an address of its own."""

    master: Master
    starts_at: float = 0.0
    name: str = "master"

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        return self.master.process

    def start(self) -> None:
        self.master.start()

    def kill(self, pause: float) -> None:
        self.master.kill()
        self.master.process, self.starts_at = None, time.monotonic() + pause

    def revive(self) -> None:
        """Start again where the pause after a kill is over."""
        if self.process is None and time.monotonic() >= self.starts_at:
            self.start()


@dataclass
class Campaign:
    """The servers, and how trainers are started."""

    material: Path
    out: Path
    servers: list[Server]
    master: KilledMaster | None
    processes: int
    steps: Sequence[str] = ()
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def victims(self) -> list[Server | KilledMaster]:
        """Whatever may be killed, beside the trainer."""
        return [*self.servers, *([self.master] if self.master else [])]

    def trainer(self, output: Path) -> forked.Forked:
        """Start the trainer, as the leader of a process group."""
        urls = ",".join(f"http://127.0.0.1:{server.port}" for server in self.servers)
        store = ("features.transport=mooncake", f"features.mooncake.master={self.master.master.address}") if self.master else ()
        return forked.start(
            [
                *(sys.executable, "-m", "drafttrain", "fit", "target=hf", f"target.path={self.material / 'target'}"),
                *(f"data.path={self.material / 'data.jsonl'}", f"output={output}", "resume=auto", *SETTINGS, *self.steps),
                *("features=engine", f"features.servers=[{urls}]", f"launcher.nproc={self.processes}", *store),
            ]
        )

    def run(self, output: Path, kills: int, draw: random.Random) -> int:
        """One run with so many kills at most; the number of kills. Raises FoundError where it does not end well."""
        trainer, done, last, moved = self.trainer(output), 0, steps_of(output), time.monotonic()
        due = first_kill(draw)
        try:
            while (code := trainer.poll()) is None:
                time.sleep(0.02)
                for server in self.victims:
                    server.revive()
                if (found := steps_of(output)) != last:
                    last, moved = found, time.monotonic()
                    due = moved + draw.uniform(0.0, SOON) if due is None else due
                if time.monotonic() - moved > STUCK:
                    raise FoundError(f"no new step after step {last} for {STUCK:g} s: {trainer.said()[-2000:]}")
                if due is None or time.monotonic() < due or done == kills:
                    continue
                due = time.monotonic() + draw.uniform(0.0, SOON)
                alive = [server for server in self.victims if server.process is not None]
                if draw.random() < 0.5 or not alive:
                    if (runs := runs_of(output)) and all(map(finished, runs)):  # it ends, and a repeat would be a new run
                        continue
                    end_group(trainer)
                    self.counts["trainer"] += 1
                    trainer, due = self.trainer(output), first_kill(draw)
                else:
                    victim = draw.choice(alive)
                    victim.kill(draw.uniform(0.0, 4.0))
                    self.counts[victim.name] += 1
                done += 1
        finally:
            end_group(trainer)
        if code:
            raise FoundError(f"the trainer ended with {code}: {trainer.said()[-2000:]}")
        return done


def first_kill(draw: random.Random) -> float | None:
    """When a kill follows the start of a trainer: in one of five cases while it starts. None: after its first step."""
    return time.monotonic() + draw.uniform(0.5, 12.0) if draw.random() < 0.2 else None


def steps_of(output: Path) -> int:
    """Steps in the metrics of the newest run."""
    files = sorted(output.glob("*/*/metrics.jsonl"))
    return files[-1].read_bytes().count(b"\n") if files else 0


def end_group(process: forked.Forked) -> None:
    """Kill a process and all processes of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def runs_of(output: Path) -> list[Path]:
    """The directories of all runs."""
    return sorted(path.parent for path in output.glob("*/*/run.json") if ".tmp-" not in path.parent.name)


def finished(run: Path) -> bool:
    """Whether a run's directory says that it has finished."""
    return bool(json.loads((run / "run.json").read_text(encoding="utf-8"))["finished"])


def results(output: Path) -> set[tuple[bool, str, tuple[float, ...]]]:
    """(finished, hash of the last weights, losses of all steps) of the runs; several where one was killed as it ended."""
    found = set()
    for run in runs_of(output):
        weights = sorted(run.glob("checkpoints/step-*"))[-1] / "drafter.safetensors"
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = tuple(json.loads(line)["loss"] for line in lines)
        found.add((finished(run), hashlib.sha256(weights.read_bytes()).hexdigest(), losses))
    return found


def campaign(
    material: Path,
    out: Path,
    kills: int,
    seed: int,
    servers: int,
    processes: int,
    steps: Sequence[str] = (),
    transport: str = "files",
) -> Counter[str]:
    """Run until so many kills are done; what was killed. material: a folder with `target` and `data.jsonl`.

    Raises FoundError for the first run that does not end as an undisturbed one.
    """
    out.mkdir(parents=True, exist_ok=True)
    states, draw = out / "states", random.Random(seed)
    master, module, where = None, "tests.standin.states_server", str(states)
    if transport == "mooncake":
        master, module = KilledMaster(Master(f"127.0.0.1:{free_port()}")), "tests.standin.mooncake_server"
        where = master.master.address
    started = [Server(material / "target", where, module) for _ in range(servers)]
    own = Campaign(material, out, started, master, processes, steps)
    try:
        for server in own.victims[::-1]:  # the master first
            server.start()
        own.run(out / "whole", 0, draw)
        whole = results(out / "whole")
        while (done := sum(own.counts[name] for name in ("trainer", "server", "master"))) < kills:
            output = out / f"run-{own.counts['runs']}"
            own.run(output, kills - done, draw)
            own.counts["runs"] += 1
            if results(output) != whole:
                raise FoundError(f"{output} ended with other weights or losses than {out / 'whole'}")
            for server in own.victims:
                server.revive()
            print(f"{dict(own.counts)}: weights and losses as undisturbed", flush=True)
            shutil.rmtree(output)
        if master is None and (left := sorted(path.name for path in states.iterdir())):
            raise FoundError(f"{states} still holds {left}")
        if master is not None and (left := objects_of(master)):
            raise FoundError(f"the store still holds {left} objects")
    finally:
        for server in own.victims:
            if server.process is not None:
                server.kill(0.0)
    return own.counts


def objects_of(master: KilledMaster) -> int:
    """Objects that trainers have left in the store."""
    while master.process is None:
        master.revive()
        time.sleep(0.1)
    return remove_left(master.master.address)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.engine_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2, help="of the trainer")
    parser.add_argument("--transport", choices=("files", "mooncake"), default="files")
    parser.add_argument("--out", type=Path, default=Path("outputs/engine-kills"))
    asked = parser.parse_args()
    from tests.faults import material

    os.environ.update(QUIET)
    out = asked.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    material.base(out / "material")
    began = time.monotonic()
    try:
        counts = campaign(
            out / "material", out, asked.kills, asked.seed, asked.servers, asked.processes, transport=asked.transport
        )
    except FoundError as error:
        print(error, file=sys.stderr)
        return 1
    victims = f"{counts['server']} of {asked.servers} servers, {counts['master']} of the master"
    print(
        f"{asked.transport}: {counts['trainer']} kills of the trainer ({asked.processes} processes), {victims}, in "
        f"{counts['runs']} runs, {time.monotonic() - began:.0f} s: weights and losses as undisturbed, no file or object left"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
