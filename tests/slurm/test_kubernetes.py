"""`scripts/kubernetes/fit.yaml`: Kubernetes' own schemas accept it, and its command does what the page says on two machines.

A machine stands for a pod. It has a pod's hostname, and the name that the headless service gives it. The controller of jobs is
not here: the tests do what the manifest tells it to do for each exit code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.test_interrupt import lines_of
from tests.integration.test_training import arguments, digest, losses, once
from tests.slurm import machines
from tests.slurm.cluster import wait_for
from tests.slurm.machines import Machine, Network

pytestmark = pytest.mark.slurm
STEPS = ("recipe=medusa", "train.steps=60", "train.checkpoint_every=20")
VERSIONS = ("1.31", "1.37")  # the first with all that the manifest uses, and the newest


@pytest.fixture
def documents(root: Path) -> dict[str, Any]:
    """The manifest's documents by kind."""
    loaded = yaml.safe_load_all((root / "scripts/kubernetes/fit.yaml").read_text())
    return {document["kind"]: document for document in loaded}


@pytest.fixture
def pods(documents: dict[str, Any], tmp_path: Path) -> Iterator[Network]:
    """Machines with the names of the job's pods."""
    if reason := machines.missing():
        pytest.skip(reason)
    job = documents["Job"]
    names = [f"{job['metadata']['name']}-{index}" for index in range(job["spec"]["completions"])]
    (tmp_path / "network").mkdir()
    with machines.network(tmp_path / "network", documents["Service"]["metadata"]["name"], *names) as network:
        yield network


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_manifest_is_valid_in_official_schemas(version: str, documents: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test-slurm installs kubernetes-validate")
    for document in documents.values():
        assert kubernetes_validate.validate(document, version, strict=True) == version
    wrong = {**documents["Job"], "spec": {**documents["Job"]["spec"], "completion": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_kubernetes_manifest_names_counts_and_exit_codes_agree(documents: dict[str, Any]) -> None:
    """What no schema says: names, numbers of machines, and exit codes."""
    service, job = documents["Service"], documents["Job"]
    spec, template = job["spec"], job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    words = dict(word.split("=", 1) for word in container["args"])
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert template["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert words["launcher.rendezvous"].split(":")[0] == first
    assert int(words["launcher.nodes"]) == spec["completions"] == spec["parallelism"]
    assert int(words["launcher.nproc"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {volume["name"] for volume in template["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert actions(job) == {75: "Ignore", 2: "FailJob"} and template["restartPolicy"] == "Never"


def actions(job: dict[str, Any]) -> dict[int, str]:
    """What the controller does after an exit code."""
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    return {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}


def command(documents: dict[str, Any], material: Path, output: Path) -> list[str]:
    """The container's command line with the test's material, and one process on each machine."""
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    program, *own = arguments(material, output, *STEPS, "launcher.nproc=1")
    keys = {word.split("=", 1)[0] for word in own}
    assert container["command"] == ["drafttrain", "fit"]
    return [program, *own, *(word for word in container["args"] if word.split("=", 1)[0] not in keys)]


def test_kubernetes_evicted_pod_ends_all_with_75_and_new_pods_resume(
    pods: Network, documents: dict[str, Any], material: Path, tmp_path: Path
) -> None:
    output, words = tmp_path / "outputs", command(documents, material, tmp_path / "outputs")
    output.mkdir()

    def started() -> list[Any]:
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        return [pod.start(words, output / f"{pod.name}.txt", one_thread) for pod in pods.machines]

    def said() -> str:
        return "\n".join(file.read_text() for file in output.glob("*.txt"))

    def codes(running: list[Any]) -> list[int]:
        wait_for(lambda: all(pod.poll() is not None for pod in running), said)
        return [pod.returncode for pod in running]

    running = started()
    wait_for(lambda: lines_of(output) >= 3, said)
    (leader,) = [p for p in pods.machines[1].processes("-m drafttrain fit") if "nsenter" not in p.name()]
    leader.terminate()
    assert codes(running) == [75, 75], said()
    assert "is saved; resume=auto continues the run" in said()
    assert codes(started()) == [0, 0], said()
    (run,) = (file.parent for file in output.glob("medusa/*/run.json"))
    whole = once(material, *STEPS, "launcher.nproc=2")
    assert digest(run) == digest(whole) and losses(run) == losses(whole)


def test_kubernetes_pod_waiting_for_rendezvous_ends_when_evicted(
    pods: Network, documents: dict[str, Any], material: Path, tmp_path: Path
) -> None:
    output = tmp_path / "outputs"
    output.mkdir()
    pod, file = pods.machines[1], output / "second.txt"
    running = pod.start(command(documents, material, output), file, os.environ)
    wait_for(lambda: refused(pod) > 0, file.read_text)
    for process in pod.processes("-m drafttrain fit"):
        process.terminate()
    wait_for(lambda: running.poll() is not None, file.read_text)
    assert running.returncode == 75, file.read_text()
    assert file.read_text() == "drafttrain: interrupted before the machines had met\n"


def refused(machine: Machine) -> int:
    """The number of its connections that others have refused."""
    names, values = [
        line.split() for line in machine.run("cat", "/proc/net/snmp").stdout.splitlines() if line.startswith("Tcp:")
    ]
    return int(dict(zip(names, values, strict=True))["AttemptFails"])
