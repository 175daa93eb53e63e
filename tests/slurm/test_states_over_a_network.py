"""States that come from another machine by Mooncake: server and master there, the trainer here, a cable between them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_interrupt import lines_of
from tests.integration.test_training import arguments, digest, losses, once
from tests.slurm.cluster import wait_for
from tests.slurm.machines import Network
from tests.standin.mooncake import Master, needs_mooncake
from tests.standin.states_server import STANDIN_HOST

pytestmark = [pytest.mark.slurm, needs_mooncake]
STEPS = ("recipe=medusa", "train.steps=40", "train.checkpoint_every=20", "data.max_length=64")
PORT, MASTER = 8000, 50051


def test_mooncake_states_network_cut_during_training_keeps_weights(
    two_machines: Network, material: Path, tmp_path: Path
) -> None:
    here, there = two_machines.machines
    master, quiet = f"{there.address}:{MASTER}", os.environ | {"OMP_NUM_THREADS": "1"}
    there.start(Master(master).command(), tmp_path / "master.txt")
    time.sleep(1)
    module = [sys.executable, "-m", "tests.standin.mooncake_server", str(material / "target"), master, "4", str(PORT)]
    log = tmp_path / "server.txt"
    there.start(module, log, quiet | {STANDIN_HOST: there.address})
    wait_for(lambda: "ready" in log.read_text(), log.read_text)
    served = ("features=engine", f"features.servers=[http://{there.name}:{PORT}]", "features.timeout=5")
    store = ("features.transport=mooncake", f"features.mooncake.master={there.name}:{MASTER}")
    command = (*STEPS, *served, *store)

    def trained(name: str, fault: Callable[[], None] | None) -> Path:
        output, said = tmp_path / name, tmp_path / f"{name}.txt"
        output.mkdir()
        trainer = here.start(arguments(material, output, *command), said, quiet)
        if fault is not None:
            wait_for(lambda: lines_of(output) >= 5 or trainer.poll() is not None, said.read_text)
            fault()
        wait_for(lambda: trainer.poll() is not None, said.read_text)
        assert trainer.returncode == 0, said.read_text()
        (run,) = (file.parent for file in output.glob("medusa/*/run.json"))
        return run

    def pull() -> None:
        two_machines.cut(there)
        time.sleep(8)
        assert lines_of(tmp_path / "pulled") < 40, "the run has ended before the fault"
        two_machines.mend(there)

    whole, pulled = trained("whole", None), trained("pulled", pull)
    assert losses(pulled) == losses(whole) and digest(pulled) == digest(whole)
    assert losses(whole) == pytest.approx(losses(once(material, *STEPS)), rel=1e-5)
