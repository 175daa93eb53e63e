"""How a machine's GPUs are divided among training processes and servers of states; options that do not fit are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch

from drafttrain.cli.launch import check_launcher, launch
from drafttrain.cli.slurm import parameters, request_of
from drafttrain.core.errors import UserError
from drafttrain.engines.states_server import ServedStates, server_process
from drafttrain.features import FeatureOptions
from drafttrain.runs.options import LauncherOptions, RunOptions, SlurmOptions
from drafttrain.runs.server_machines import processes_of, servers_alone, servers_next_to_trainers, visible_gpus

EIGHT = [str(i) for i in range(8)]


def engine(**options: Any) -> FeatureOptions:
    return FeatureOptions("engine", **options)


def run(features: FeatureOptions, **launcher: Any) -> RunOptions:
    return RunOptions(features=features, launcher=LauncherOptions(**launcher))


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def test_servers_next_to_trainers_get_last_gpus() -> None:
    divided = servers_next_to_trainers(engine(gpus=4, tensor_parallel=2), EIGHT, 4)
    assert divided.of_servers == (("4", "5"), ("6", "7"))
    assert str(divided) == "2 servers, on the GPUs 4, 5 and on the GPUs 6, 7"
    assert str(servers_next_to_trainers(engine(gpus=1), EIGHT, 4)) == "1 server, on the GPU 7"
    assert servers_next_to_trainers(engine(count=3), [], 0).of_servers == ((), (), ())


def test_servers_alone_get_all_or_last_requested_gpus() -> None:
    assert servers_alone(engine(tensor_parallel=4), EIGHT).of_servers == (("0", "1", "2", "3"), ("4", "5", "6", "7"))
    assert servers_alone(engine(tensor_parallel=3), EIGHT).of_servers == (("2", "3", "4"), ("5", "6", "7"))
    assert servers_alone(engine(gpus=2), EIGHT).of_servers == (("6",), ("7",))
    assert servers_alone(engine(count=1, tensor_parallel=2), EIGHT).of_servers == (("6", "7"),)
    assert servers_alone(engine(count=2), []).of_servers == ((), ())


def test_visible_gpus_follow_cuda_visible_devices(eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus() == EIGHT
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]


def test_processes_of_nproc_auto_excludes_gpus_of_servers(eight: None) -> None:
    assert processes_of(run(engine(gpus=2), nproc="auto")) == 6
    assert processes_of(run(engine(gpus=2, nodes=1), nproc="auto", nodes=2)) == 8, "servers have a machine of their own"
    assert processes_of(run(FeatureOptions(gpus=2), nproc="auto")) == 8
    with pytest.raises(UserError, match=r"features.gpus=8 and 1 training process need 9 GPUs, but this machine has 8"):
        processes_of(run(engine(gpus=8), nproc="auto"))


def test_server_gpus_more_than_available_are_refused() -> None:
    with pytest.raises(UserError, match=r"features.gpus=2 and 7 training processes need 9 GPUs, but this machine has 8"):
        servers_next_to_trainers(engine(gpus=2), EIGHT, 7)
    with pytest.raises(UserError, match=r"the servers need 4 GPUs by .*tensor_parallel=4, but their machine has 2; set fewer"):
        servers_alone(engine(tensor_parallel=4), ["0", "1"])


def test_launch_conflicting_server_options_are_refused(subtests: pytest.Subtests) -> None:
    two = {"nodes": 2}
    for features, launcher, line in (
        (engine(nodes=2, dir="x"), two, "features.nodes is 2 of launcher.nodes=2, so no machine trains"),
        (engine(nodes=1, dir="x"), {}, "features.nodes is 1 of launcher.nodes=1, so no machine trains"),
        (engine(nodes=1), two, "features.nodes is 1, but features.dir is not set; name a folder that all machines see"),
        (
            engine(nodes=1, transport="mooncake"),
            two,
            "1, but features.mooncake.master is empty; start mooncake_master on a machine",
        ),
        (engine(nodes=1, servers=["http://x"]), two, "features.nodes is for servers that are started, but"),
        (engine(gpus=3, tensor_parallel=2), {}, "features.gpus is 3, but each server has features.tensor_parallel=2 GPUs"),
        (
            engine(gpus=4, count=3),
            {},
            "features.count is 3, but features.gpus=4 and .* are those of 4 servers; leave count out",
        ),
        (FeatureOptions(nodes=1), two, "features.nodes is 1, but features=online has no servers; leave it out"),
        (engine(), {"role": "server"}, "launcher.role is server, but features.nodes is 0"),
        (engine(nodes=1, dir="x"), two, "launcher.rendezvous is None with launcher.nodes=2; set it to HOST:PORT"),
        (engine(), {"nproc": "many"}, "launcher.nproc is 'many'; set it to a number of processes, or to auto"),
    ):
        with subtests.test(line), pytest.raises(UserError, match=line):
            launch(lambda *_: None, run(features, **launcher), {})


def test_check_launcher_server_nodes_under_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"features.nodes is 1 under torchrun, which starts training processes alone"):
        check_launcher(run(engine(nodes=1, dir="x"), nodes=2))


def test_server_process_gets_its_gpus_without_torchrun_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    served = ServedStates("vllm", "target", (3, 4), 64, "/states", "bfloat16", arguments=("--seed=1",))
    arguments, variables = server_process(served, ["4", "5"], 2, on_cpu=False)
    assert arguments[:2] == ["serve", "target"] and arguments[-3:] == ["--tensor-parallel-size", "2", "--seed=1"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "4,5" and not {"MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(variables)
    assert "CpuHiddenStatesConnector" in " ".join(server_process(served, [], 1, on_cpu=True)[0])


def test_server_process_mooncake_config_names_host_of_server() -> None:
    """What they must know travels to their machines as JSON."""
    store = {"master": "a:50051", "protocol": "tcp", "device": "", "segment": 2**28}
    served = ServedStates("vllm", "target", (3, 4), 64, "/logs", "bfloat16", mooncake=store)
    there = ServedStates.of(json.loads(json.dumps(asdict(served))))
    assert there == served
    for on_cpu, connector in ((False, "MooncakeHiddenStatesConnector"), (True, "CpuMooncakeConnector")):
        arguments, _ = server_process(there, [], 1, on_cpu, "10.0.0.4")
        transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == connector
        settings = transfer["kv_connector_extra_config"]["mooncake"]
        assert (settings["local_hostname"], settings["master_server_address"]) == ("10.0.0.4", "a:50051")


def test_server_process_mooncake_ipv6_address_needs_mc_use_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise trainers cannot read what such a server puts, and wait for `features.patience` seconds."""
    store = {"master": "a:50051", "protocol": "tcp", "device": "", "segment": 2**28}
    served = ServedStates("vllm", "target", (3, 4), 64, "/logs", "bfloat16", mooncake=store)
    with pytest.raises(UserError, match=r"this machine's address for the trainers is fd00::4, but Mooncake uses IPv4 alone"):
        server_process(served, [], 1, False, "fd00::4")
    monkeypatch.setenv("MC_USE_IPV6", "1")
    assert server_process(served, [], 1, False, "fd00::4")[1]["MC_USE_IPV6"] == "1"


def test_slurm_parameters_give_last_nodes_to_servers() -> None:
    launcher = {"nodes": 4, "nproc": 8, "slurm": SlurmOptions(folder="/shared")}
    asked = parameters("fit", request_of([], run(engine(nodes=1, dir="x"), **launcher)), array=False)
    assert asked["nodes"] == 4 and asked["gpus_per_node"] == 8
    assert asked["srun_args"] == ["--nodes=3", "--ntasks=3", "--relative=0"]
    script = "\n".join(asked["setup"])
    assert "tail -n 1" in script and "--output=/shared/%j_%N_log.out" in script
    next_to = parameters("fit", request_of([], run(engine(gpus=2), **launcher | {"nproc": 6})), array=False)
    assert next_to["gpus_per_node"] == 8 and "setup" not in next_to and "srun_args" not in next_to
    with pytest.raises(UserError, match=r"launcher.nproc is auto, so launcher=slurm does not know how many GPUs to ask for"):
        parameters("fit", request_of([], run(engine(gpus=2), nproc="auto")), array=False)
