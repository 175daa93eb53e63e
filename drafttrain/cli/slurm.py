"""`launcher=slurm`: runs the command as a Slurm job, which saves before its time limit and is queued again.

The job runs one `drafttrain` on each node, which starts the processes there. submitit writes and submits the script, and asks
Slurm to queue the job again. It pickles only the command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttrain.core.errors import Interrupted, UserError, WorkerError
from drafttrain.runs.options import LauncherOptions

COMMANDS = ("fit", "measure")


class SlurmJob:
    """The job that Slurm runs on each node."""

    def __init__(self, arguments: Sequence[str], nproc: int, restarts: int, port: int) -> None:
        """arguments: the command and its overrides, without the launcher's."""
        self.arguments, self.nproc, self.restarts, self.port = list(arguments), nproc, restarts, port
        self._running: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        """Run the command to its end. Raises WorkerError when it fails."""
        from submitit import JobEnvironment

        job = JobEnvironment()
        resumed = ["resume=auto"] if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else []  # last, to win over overrides
        place = [f"launcher.nodes={job.num_nodes}", f"launcher.rendezvous={job.hostnames[0]}:{self.port}"]
        launcher = ["launcher=local", f"launcher.nproc={self.nproc}", f"launcher.restarts={self.restarts}", *place]
        self._running = subprocess.Popen([sys.executable, "-m", "drafttrain", *self.arguments, *launcher, *resumed])
        code = self._running.wait()
        if code not in (0, Interrupted.CODE):
            raise WorkerError(f"drafttrain ended with code {code} on {job.hostname}; its output is above")
        return "done" if code == 0 else "interrupted"

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


def submit(command: str, overrides: Sequence[str], launcher: LauncherOptions) -> str:
    """Submit the command to Slurm; returns the job's number. overrides: as typed, for this job of a sweep.

    Raises UserError if submitit or Slurm is missing or refuses the options.
    """
    if command not in COMMANDS:
        raise UserError(f"launcher=slurm runs {' and '.join(COMMANDS)}, not {command}; leave it out")
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # read at import: Slurm sends it to every process of the job
    try:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError
    except ImportError as error:
        raise UserError("launcher=slurm needs submitit; pip install 'drafttrain[slurm]'") from error
    slurm = launcher.slurm
    gpus = launcher.nproc if slurm.gpus_per_node is None else slurm.gpus_per_node
    parameters = {
        "job_name": f"drafttrain-{command}",
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.minutes,
        "nodes": launcher.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": gpus or None,
        "cpus_per_task": slurm.cpus_per_task,
        "signal_delay_s": slurm.save_before,
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, **slurm.extra},
    }
    own = [override for override in overrides if override.lstrip("+~").split("=")[0].split(".")[0] != "launcher"]
    try:
        executor = SlurmExecutor(Path(slurm.folder), max_num_timeout=slurm.requeues)
        executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
        job = executor.submit(SlurmJob([command, *own], launcher.nproc, launcher.restarts, slurm.port))
    except (RuntimeError, FailedJobError) as error:  # there is no Slurm, or it refuses the job
        reason = " ".join(str(error).split())
        raise UserError(
            f"launcher=slurm: {reason}; submit on the cluster, and set the launcher.slurm options that it requires"
        ) from error
    print(f"job {job.job_id}: output in {job.paths.stdout}")
    return str(job.job_id)
