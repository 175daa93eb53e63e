"""Machines in miniature: each has its own network, hostname, /etc/hosts and processes, and all of them the files of this one.

A machine is a set of Linux namespaces with a shell as process 1. When that ends, for whatever reason, the kernel ends all
processes of the machine. Nothing of the system outside changes, and nothing stays when the test process dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
REAP = "hostname {name}; ip link set lo up; mount --bind {hosts} /etc/hosts; echo ready; while :; do sleep 1000; done"


@cache
def missing() -> str | None:
    """Why machines cannot be made here; None if they can."""
    if names := absent():
        return f"there is no {', '.join(names)}"
    try_ = "ip link add one type veth peer name two && ip link add eth0 type bridge && mount -t tmpfs none /mnt"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", try_], capture_output=True, text=True)
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else None


def absent() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


class Machine:
    """A machine with the address 10.0.0.<number>. Without `connect` it has no network."""

    def __init__(self, name: str, number: int, hosts: Path) -> None:
        """hosts: the file that it sees as /etc/hosts."""
        self.name, self.address, self._started = name, f"10.0.0.{number}", list[subprocess.Popen[bytes]]()
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        shell = ["bash", "-c", REAP.format(name=name, hosts=hosts)]  # bash: process 1 must collect the processes that end
        self._outer = subprocess.Popen([*command, *shell], stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n"
        (first,) = psutil.Process(self._outer.pid).children()
        self.pid = first.pid  # of its process 1, seen from here

    def command(self, *words: str | Path) -> list[str]:
        """The command line that runs this command there."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={os.getcwd()}", *map(str, words)]

    def run(self, *words: str | Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=300, **more)
        assert not check or not done.returncode, f"{words}: {done.stdout}{done.stderr}"
        return done

    def start(
        self, words: Sequence[str | Path], output: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command there; stdout and stderr go to one file."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                self.command(*words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def processes(self, *words: str) -> list[psutil.Process]:
        """Its processes whose command lines have these words."""
        own, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                if os.readlink(f"/proc/{process.pid}/ns/pid") == own and all(word in line for word in words):
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it has ended meanwhile
        return found

    def end(self) -> None:
        """End the machine with all its processes at once."""
        self._outer.kill()
        self._outer.wait()
        for process in self._started:  # nsenter stops itself when its process is stopped, and would never see that it ended
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.wait(30)


def kill(processes: Iterable[psutil.Process]) -> None:
    """At once. One may end with another, before its turn."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Network:
    """Machines that are connected by a switch, which is a machine too: the first name. NAME.SWITCH is a name of each, too."""

    def __init__(self, folder: Path, names: Sequence[str], stack: ExitStack) -> None:
        hosts = folder / "hosts"
        lines = [f"10.0.0.{number} {name} {name}.{names[0]}" for number, name in enumerate(names, start=1)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.switch, *self.machines = [Machine(name, i, hosts) for i, name in enumerate(names, start=1)]
        for machine in (self.switch, *self.machines):
            stack.callback(machine.end)
        self.switch.run("ip", "link", "add", "eth0", "type", "bridge")
        self.switch.run("ip", "link", "set", "eth0", "up")
        self.switch.run("ip", "address", "add", f"{self.switch.address}/24", "dev", "eth0")
        for machine in self.machines:
            add = ["ip", "link", "add", machine.name, "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid)]
            subprocess.run(["nsenter", f"--target={self.switch.pid}", "--net", *add], check=True)
            self.switch.run("ip", "link", "set", machine.name, "master", "eth0", "up")
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")

    def cut(self, machine: Machine) -> None:
        """Pull this machine's cable."""
        self.switch.run("ip", "link", "set", machine.name, "down")

    def mend(self, machine: Machine) -> None:
        self.switch.run("ip", "link", "set", machine.name, "up")


@contextmanager
def network(folder: Path, *names: str) -> Iterator[Network]:
    """folder: of files that they share, which exists."""
    with ExitStack() as stack:
        yield Network(folder, names, stack)
