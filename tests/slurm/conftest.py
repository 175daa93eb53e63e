"""Clusters and machines in miniature for the tests; without them the tests are skipped, with the reason."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import material
from tests.slurm import cluster as slurm
from tests.slurm import machines
from tests.slurm.machines import Network

__all__ = ["material"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    if reason := slurm.missing():
        pytest.skip(reason)
    pytest.importorskip("submitit")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm.cluster(Path(folder)) as started:  # sockets: short paths
        yield started


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[Network]:
    if reason := machines.missing():
        pytest.skip(reason)
    (tmp_path / "network").mkdir()
    with machines.network(tmp_path / "network", "switch", "first", "second") as network:
        yield network
