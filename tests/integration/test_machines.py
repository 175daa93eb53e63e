"""Two machines of two processes each, all of them here: the losses are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.integration.test_training import arguments, losses, once
from tests.standin.mooncake import free_port

pytestmark = pytest.mark.slow
STEPS = ("recipe=medusa", "train.steps=6", "train.micro_batch=1")


def started(command: list[str], machines: int = 2) -> None:
    """The same command on each; all must end well."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=one_thread)
        for _ in range(machines)
    ]
    try:
        said = [machine.communicate()[0] for machine in running]
    finally:
        for machine in running:
            machine.kill()
    assert [machine.returncode for machine in running] == [0] * machines, "\n".join(said)


@pytest.mark.sampled(launcher=["torchrun"])  # test_devices.py has two machines of drafttrain's own launcher
@pytest.mark.parametrize("launcher", ["torchrun", "drafttrain", "deepspeed"])
def test_fit_under_each_launcher_losses_equal_one_process(launcher: str, material: Path, tmp_path: Path) -> None:
    one, port = once(material, *STEPS), free_port()
    own = arguments(material, tmp_path / "four", *STEPS)
    if launcher == "drafttrain":
        place = ["launcher.nproc=2", "launcher.nodes=2", f"launcher.rendezvous=localhost:{port}"]
        machines = [forked.start([*own, *place]) for _ in range(2)]
        assert [machine.wait() for machine in machines] == [0, 0], "\n".join(machine.said() for machine in machines)
    elif launcher == "torchrun":
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost", "--rdzv-id=two"]
        started([sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *place, *own[1:]])
    else:  # one machine: others it reaches by ssh alone
        place = ["--num_gpus=2", "--no_local_rank", f"--master_port={port}"]
        started([sys.executable, "-m", "deepspeed.launcher.runner", *place, "--module", *own[2:]], machines=1)
    (four,) = (path.parent for path in (tmp_path / "four").glob("*/*/run.json"))
    assert losses(four) == pytest.approx(losses(one), rel=1e-5)
