"""Slurm's own daemons on machines in miniature: a controller and two nodes."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.slurm import machines

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("node1", "node2")
SECONDS = 300  # that anything may take

# cred_expire: so long a job that is queued again waits. Without accounting and control groups, which need other daemons.
SETTINGS = """
ClusterName=miniature
SlurmctldHost=controller(10.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node1 NodeAddr=10.0.0.2 CPUs=4 Gres=gpu:2
NodeName=node2 NodeAddr=10.0.0.3 CPUs=4 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=grace Nodes=ALL PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if names := absent():
        return f"there is no {', '.join(names)}; make test-slurm installs Slurm"
    return machines.missing()


def absent() -> list[str]:
    return [name for name in DAEMONS if path_of(name) is None]


def path_of(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


class Cluster:
    """folder: of its state. SLURM_CONF names its configuration; commands run on the controller."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.network = folder, stack.enter_context(machines.network(folder, "controller", *NODES))
        self.controller = self.network.switch
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/full,/dev/zero\n")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf")}
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
        self._daemon(self.controller, "munged", "--force", "--foreground", *options)
        wait_for((folder / "munge.socket").exists, self.said)
        self._daemon(self.controller, "slurmctld", "-D")
        for machine in self.network.machines:
            self._daemon(machine, "slurmd", "-D")
        wait_for(self.idle, self.said)

    def _daemon(self, machine: machines.Machine, name: str, *options: str) -> None:
        path = path_of(name)
        assert path is not None
        machine.start([path, *options], self.folder / f"{name}-{machine.name}.txt", self.environment)

    def run(self, *words: str | Path) -> str:
        """The output of a command on the controller."""
        done = self.controller.run(*words, check=False, env=self.environment)
        return done.stdout + done.stderr

    def idle(self) -> bool:
        """Whether no node runs a job, and none is lost."""
        return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle", "idle"]

    def lose(self, node: int) -> None:
        """End all processes of a node at once. The controller learns it now, not `SlurmdTimeout` later."""
        machine = self.network.machines[node]
        machines.kill(process for process in machine.processes() if process.pid != machine.pid)
        self.run("scontrol", "update", f"NodeName={machine.name}", "State=DOWN", "Reason=lost")

    def find(self, node: int) -> None:
        """Start a lost node again."""
        self._daemon(self.network.machines[node], "slurmd", "-D")

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of the job."""
        said = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(found.groups() for found in re.finditer(r"(\w+)=(\S*)", said))

    def state(self, number: str) -> str:
        return self.job(number).get("JobState", "UNKNOWN")

    def said(self) -> str:
        """The end of all daemons' logs."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.txt")])
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def wait_for(happened: Callable[[], bool], said: Callable[[], str], seconds: float = SECONDS) -> None:
    """said: what to show if it does not happen."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose state is in this folder, which must be on a file system with Unix sockets."""
    with ExitStack() as stack:
        yield Cluster(folder, stack)
