"""`launcher=slurm`: runs the command as a Slurm job, which saves before its time limit and is queued again.

The job runs one `drafttrain` on each node, which starts the processes there. The jobs of a sweep are one array, and so are the
jobs that race for `auto` on several nodes. submitit writes and submits the script, and asks Slurm to queue the job again. It
pickles only the command line.

Nodes that run servers of states have a step of their own, next to the step of the trainers. `python -m drafttrain.cli.slurm
FOLDER` runs the servers of its node. The command is that of the job's trainers, which submitit has pickled in FOLDER.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafttrain.cli.launch import check_launcher
from drafttrain.core.errors import Interrupted, UserError, WorkerError
from drafttrain.runs.options import LauncherOptions, RunOptions

COMMANDS = ("fit", "measure", "auto")
INTERRUPTED = (Interrupted.CODE, -signal.SIGTERM, -signal.SIGUSR1)  # the last two: while Python starts
PORTS = range(15000, 25000)  # below those that Linux gives to connections
# ends with training (0), or where servers do not start or do not stay (2, the trainers end too); with the job in any case
STEPS = """serve() {{ # states, on one node; again if its step is lost
  until srun --nodes=1 --ntasks=1 --nodelist="$1" {options}; do
    [ $? -eq 2 ] && return
    sleep 5
    kill -0 $$ || return # the job's script has ended
  done
}}
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n {servers}); do serve "$node" & done"""


class SlurmJob:
    """The job that Slurm runs on each node."""

    def __init__(self, arguments: Sequence[str], nproc: int | str, restarts: int, port: int | None) -> None:
        """arguments: the command and its overrides, without the launcher's. port: None: by the job's number."""
        self.arguments, self.nproc, self.restarts, self.port = list(arguments), nproc, restarts, port
        self._running: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        """Run the command to its end. Raises WorkerError when it fails."""
        from submitit import JobEnvironment

        job = JobEnvironment()
        again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) and self.arguments[0] != "auto"  # which always goes on
        resumed = ["resume=auto"] if again else []  # last, to win over overrides
        self._running = subprocess.Popen([*self.command(job), *resumed])
        code = self._running.wait()
        if code in INTERRUPTED:
            if job.global_rank == 0:
                queue_again(job.job_id)
            return "interrupted"
        if code:
            raise WorkerError(f"drafttrain ended with code {code} on {job.hostname}; its output is above")
        return "done"

    def command(self, job: Any) -> list[str]:
        """The command of a node. job: submitit's JobEnvironment."""
        port = self.port or PORTS[int(job.raw_job_id) % len(PORTS)]  # jobs that share a node must not meet
        place = [f"launcher.nproc={self.nproc}", f"launcher.nodes={job.num_nodes}"]
        place += [f"launcher.rendezvous={job.hostnames[0]}:{port}"]
        if self.arguments[0] == "auto":  # its own commands are on this node, each on the GPUs that it sees
            place = ["launcher.nproc=auto"]
        return [
            sys.executable,
            "-m",
            "drafttrain",
            *self.arguments,
            "launcher=local",
            f"launcher.restarts={self.restarts}",
            *place,
        ]

    def checkpoint(self) -> Any:
        """submitit calls this on the first node shortly before the time limit: let the run save, then queue the job again."""
        from submitit.helpers import DelayedSubmission

        if self._running is None or self._running.returncode is not None:
            return DelayedSubmission(self._again())
        self._running.send_signal(signal.SIGUSR1)
        # not wait(): this is a signal handler that has interrupted a wait(), which still holds its lock
        ended = os.waitid(os.P_PID, self._running.pid, os.WEXITED | os.WNOWAIT)
        finished = ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
        return DelayedSubmission(str, "done") if finished else DelayedSubmission(self._again())

    def _again(self) -> SlurmJob:
        return SlurmJob(self.arguments, self.nproc, self.restarts, self.port)


def queue_again(job: str) -> None:
    """Have Slurm queue this job again, unless it does so anyway or the user has cancelled the job.

    A job that is preempted with a time of grace and ends by itself meanwhile would otherwise count as completed.
    job: its number. In an array it is ARRAY_TASK, because the array's number stands for all of its jobs.
    """
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False)
    if "JobState=RUNNING" in shown.stdout.split():
        subprocess.run(["scontrol", "requeue", job], check=False)


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """A command to submit."""

    overrides: list[str]  # as typed, for this job of a sweep
    launcher: LauncherOptions
    servers: int = 0  # of the nodes, those that run servers of states
    gpus: int = 0  # of a node's GPUs, those that its servers have and no training process


def request_of(overrides: list[str], options: RunOptions) -> SlurmRequest:
    """The request of one job. Raises UserError for machines that do not fit each other."""
    check_launcher(options)
    features = options.features
    gpus = features.gpus if features.name == "engine" else 0
    return SlurmRequest(overrides, options.launcher, features.nodes, gpus)


def submit(command: str, requests: Sequence[SlurmRequest]) -> list[str]:
    """Submit the command to Slurm, several as an array for each set of launcher options. Returns the jobs' numbers.

    Raises UserError if submitit or Slurm is missing or refuses the options.
    """
    if command not in COMMANDS:
        raise UserError(f"launcher=slurm runs {', '.join(COMMANDS)}, not {command}; leave it out")
    if command == "auto" and not all("auto.yes=true" in request.overrides for request in requests):
        raise UserError("a job cannot ask before it starts; add --yes, or --plan without launcher=slurm for the plan")
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # read at import: Slurm sends it to every process of the job
    try:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError
    except ImportError as error:
        raise UserError("launcher=slurm needs submitit; pip install 'drafttrain[slurm]'") from error
    arrays: list[list[SlurmRequest]] = []
    for request in requests:
        same = next((array for array in arrays if alike(array[0], request)), None)
        arrays.append([request]) if same is None else same.append(request)
    numbers = list[str]()

    def submitted(array: Sequence[SlurmRequest]) -> str:
        """The number of the array, or of its one job."""
        slurm = array[0].launcher.slurm
        try:
            executor = SlurmExecutor(Path(slurm.folder), max_num_timeout=slurm.requeues)
            executor.update_parameters(**parameters(command, array[0], len(array) > 1))
            with redirect_stderr(io.StringIO()) as warnings, executor.batch():  # submitit prints what sbatch says
                jobs = [executor.submit(job_of(command, request)) for request in array]
        except (RuntimeError, FailedJobError, OSError) as error:  # there is no Slurm, or it refuses the job
            reason = " ".join(str(error).split())
            raise UserError(
                f"launcher=slurm: {reason}; submit on the cluster, and set the launcher.slurm options that it requires"
            ) from error
        print(warnings.getvalue(), end="", file=sys.stderr)
        for request, job in zip(array, jobs, strict=True):
            print(announcement(request, requests, job.job_id, job.paths.folder), flush=True)
        numbers.extend(str(job.job_id) for job in jobs)
        return str(jobs[0].job_id).partition("_")[0]

    for array in arrays:
        if command == "auto" and array[0].launcher.nodes > 1:
            for request in array:
                _submit_race(request, submitted)
        else:
            submitted(array)
    return numbers


def _submit_race(request: SlurmRequest, submit: Callable[[Sequence[SlurmRequest]], str]) -> None:
    """`auto` on several nodes: a job that plans and lets the target answer, an array that races, a job that does the rest."""
    launcher, nodes = replace(request.launcher, nodes=1), request.launcher.nodes

    def part(share: int | None, after: str | None) -> SlurmRequest:
        extra = {"dependency": after, "kill-on-invalid-dep": "yes"} if after else {}
        slurm = replace(launcher.slurm, extra=launcher.slurm.extra | extra)
        own = [] if share is None else [f"auto.share=[{share},{nodes}]"]
        return replace(request, overrides=[*request.overrides, *own], launcher=replace(launcher, slurm=slurm))

    print(
        f"auto on {nodes} nodes: a job plans, an array races, one for each node, and a last job trains the winner", flush=True
    )
    first = f"afterok:{submit([part(0, None)])}"
    race = submit([part(share, first) for share in range(1, nodes + 1)])
    submit([part(None, f"{first},afterany:{race}")])


def alike(one: SlurmRequest, other: SlurmRequest) -> bool:
    """Whether both can be jobs of one array."""
    return (one.launcher, one.servers, one.gpus) == (other.launcher, other.servers, other.gpus)


def parameters(command: str, request: SlurmRequest, array: bool) -> dict[str, Any]:
    """submitit's names for the options of sbatch. array: several jobs have them.

    Raises UserError if the number of GPUs follows from nothing.
    """
    launcher, slurm, servers = request.launcher, request.launcher.slurm, request.servers
    if launcher.nproc == "auto" and slurm.gpus_per_node is None:
        raise UserError(
            "launcher.nproc is auto, so launcher=slurm does not know how many GPUs to ask for; set "
            "launcher.slurm.gpus_per_node to the number of a node's GPUs"
        )
    gpus = gpus_of(request) if slurm.gpus_per_node is None else slurm.gpus_per_node
    cpus = [] if slurm.cpus_per_task is None else [f"--cpus-per-task={slurm.cpus_per_task}"]
    trainers = launcher.nodes - servers
    place = [f"--nodes={trainers}", f"--ntasks={trainers}", "--relative=0"] if servers else []
    sbatch_options = {
        "job_name": f"drafttrain-{command}",
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.minutes,
        "nodes": launcher.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": gpus or None,
        "cpus_per_task": slurm.cpus_per_task,
        # Slurm 22.05 and later do not pass it on from sbatch to srun
        "srun_args": [*place, *cpus] or None,
        "setup": server_steps(servers, Path(slurm.folder), cpus, array) if servers else None,
        "signal_delay_s": slurm.save_before,
        "stderr_to_stdout": True,
        "array_parallelism": slurm.array_parallelism,
        "additional_parameters": {"requeue": True, **slurm.extra},
    }
    return {name: value for name, value in sbatch_options.items() if value is not None}


def gpus_of(request: SlurmRequest) -> int:
    """GPUs that each node needs: all nodes of a job have as many."""
    nproc = request.launcher.processes
    return max(nproc, request.gpus) if request.servers else nproc + request.gpus


def job_of(command: str, request: SlurmRequest) -> SlurmJob:
    launcher = request.launcher
    own = [word for word in request.overrides if word.lstrip("+~").split("=")[0].split(".")[0] != "launcher"]
    return SlurmJob([command, *own], launcher.nproc, launcher.restarts, launcher.slurm.port)


def announcement(request: SlurmRequest, sweep: Sequence[SlurmRequest], number: str, folder: Path) -> str:
    """Where a job's output is, and by which overrides the job differs from others of the sweep."""
    common = set.intersection(*(set(other.overrides) for other in sweep))
    own = " ".join(word for word in request.overrides if word not in common)
    several = request.launcher.nodes - request.servers > 1 or request.servers
    file = f"{number}_*_log.out, a file for each node" if several else f"{number}_0_log.out"
    return f"job {number}{f' ({own})' if own else ''}: output in {folder / file}"


def server_steps(servers: int, folder: Path, cpus: Sequence[str], array: bool) -> list[str]:
    """Lines of the job's script. servers: the number of nodes, which are the job's last ones. cpus: options of srun.

    array: the script is that of several jobs.
    """
    name = "%A_%a" if array else "%j"
    output = folder.absolute() / f"{name}_%N_log.out"
    own = [sys.executable, "-m", "drafttrain.cli.slurm", str(folder.absolute())]
    options = ["--unbuffered", f"--output={output}", "--open-mode=append", *cpus, *own]
    return STEPS.format(options=shlex.join(options), servers=servers).splitlines()


def main() -> None:
    from submitit.core.utils import DelayedSubmission, JobPaths
    from submitit.slurm.slurm import SlurmJobEnvironment

    job = SlurmJobEnvironment()
    trainers: Any = DelayedSubmission.load(JobPaths(Path(sys.argv[1]), job.job_id).submitted_pickle).function
    command = [*trainers.command(job), "launcher.role=server"]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
