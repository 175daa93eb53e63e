"""The nodes of a Slurm job that run servers of states: a step for each of them, next to the step of the trainers.

`python -m drafttrain.cli.slurm_servers FOLDER` runs the servers of this node. The command is that of the job's trainers, which
submitit has pickled in FOLDER.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# ends with training (0), or where servers do not start or do not stay (2, the trainers end too); with the job in any case
STEPS = """serve() {{ # states, on one node; again if its step is lost
  until srun --nodes=1 --ntasks=1 --nodelist="$1" {options}; do
    [ $? -eq 2 ] && return
    sleep 5
    kill -0 $$ || return # the job's script has ended
  done
}}
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n {servers}); do serve "$node" & done"""


def server_steps(servers: int, folder: Path, cpus: Sequence[str], array: bool) -> list[str]:
    """Lines of the job's script. servers: the number of nodes, which are the job's last ones. cpus: options of srun.

    array: the script is that of several jobs.
    """
    name = "%A_%a" if array else "%j"
    output = folder.absolute() / f"{name}_%N_log.out"
    own = [sys.executable, "-m", "drafttrain.cli.slurm_servers", str(folder.absolute())]
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
