"""`sbatch`, `srun` and `scontrol` for one machine: they run what they are given, as a cluster of nodes that are all localhost.

Called by scripts of these names in a folder of the test's; $SLURM_PLACE is where they keep what they must remember.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

JOB = "7"


def sbatch(script: str) -> None:
    place = Path(os.environ["SLURM_PLACE"])
    (place / "script").write_text(script)
    start(place, restarts=0)
    print(f"Submitted batch job {JOB}")


def start(place: Path, restarts: int) -> None:
    """The job's script, detached; $SLURM_RESTART_COUNT is set from the second time on."""
    script = (place / "script").read_text()
    found = re.search(r"#SBATCH --nodes=(\d+)", Path(script).read_text())
    assert found is not None
    job = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NUM_NODES": found[1], "SLURM_NTASKS": found[1], "SLURM_JOB_NODELIST": "localhost"}
    again = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    subprocess.Popen(
        ["bash", script],
        env=os.environ | job | again,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def srun(*arguments: str) -> None:
    """One task per node; then the next start, if that was asked for meanwhile."""
    place = Path(os.environ["SLURM_PLACE"])
    output = arguments[arguments.index("--output") + 1]
    command = arguments[next(i for i, word in enumerate(arguments) if "python" in word) :]
    tasks = []
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
        own = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        with open(output.replace("%j", JOB).replace("%t", str(node)), "a") as said:
            tasks.append(subprocess.Popen(command, env=os.environ | own, stdout=said, stderr=said, start_new_session=True))
    (place / "tasks").write_text(json.dumps([task.pid for task in tasks]))
    for task in tasks:
        task.wait()
    if (place / "requeued").exists():
        (place / "requeued").unlink()
        del os.environ["SLURM_JOB_ID"]
        start(place, int(os.environ.pop("SLURM_RESTART_COUNT", "0")) + 1)


def scontrol(action: str, job: str) -> None:
    assert (action, job) == ("requeue", JOB)
    Path(os.environ["SLURM_PLACE"], "requeued").touch()


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](*sys.argv[2:])
