"""A real vLLM gives the states that transformers computes, and a drafter trains on them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
import torch

from drafttrain.core.files import remove_abandoned
from drafttrain.engines.states_server import ServedStates, StatesServer, free_ports, mooncake_master, running, server_process
from drafttrain.features.mooncake_states import MooncakeStates
from drafttrain.features.mooncake_store import MooncakeStore, StoreSettings
from drafttrain.features.source import States, Transport
from drafttrain.features.vllm_source import StateFiles
from drafttrain.runs.states_servers import NAME
from drafttrain.targets.load import EMBEDDED
from tests.engines.conftest import ROOT, python_for
from tests.standin.mooncake import needs_mooncake

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SETTINGS = ("logger=none", "measure.enabled=false", "train.steps=6", "data.limit=80", "data.held_out=8")


@pytest.mark.parametrize("recipe", ["eagle3", "medusa"])
def test_vllm_states_training_losses_match_online_training(
    recipe: str, command: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server is compared with transformers' states before training: 0.001 of their norm at most."""
    states = tmp_path / "states"
    more = ("features=engine", f"features.python={python_for('vllm')}", f"features.dir={states}")
    assert command("fit", f"recipe={recipe}", *SETTINGS, *more, f"output={tmp_path / 'engine'}") == 0
    said = capfd.readouterr().out
    assert "1 of 1 servers (vllm 0.32" in said and "in float32; training does not run the target's blocks" in said
    assert not list(states.iterdir()), "the server's folder goes with it"
    assert command("fit", f"recipe={recipe}", *SETTINGS, f"output={tmp_path / 'online'}") == 0
    ours, online = (metrics(tmp_path / kind) for kind in ("engine", "online"))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in online], rel=1e-3)
    assert all(line["states_repeated"] == 0 for line in ours)


@needs_mooncake
def test_vllm_states_over_mooncake_equal_file_states(tmp_path: Path) -> None:
    """Bit for bit, of requests one after the other."""
    python = Path(python_for("vllm"))
    check = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('hs_connectors', 'mooncake'))))"
    if subprocess.run([python, "-P", "-c", check], check=False).returncode:
        pytest.skip("vLLM's Python needs hs-connectors==0.9.0 mooncake-transfer-engine-non-cuda==0.3.13.post1")
    files, objects = (states_by(kind, python, tmp_path / kind) for kind in ("files", "mooncake"))
    for one, other in zip(files, objects, strict=True):
        assert torch.equal(one.hidden_TLH, other.hidden_TLH) and torch.equal(one.token_T, other.token_T)


def states_by(kind: str, python: Path, folder: Path) -> list[States]:
    """vLLM's states of some sequences, by files or by Mooncake."""
    folder.mkdir()
    generator, found = torch.Generator().manual_seed(0), []
    with ExitStack() as stack:
        transport: Transport = StateFiles()
        store = None
        if kind == "mooncake":
            master = stack.enter_context(mooncake_master(folder / "master.log", print))
            transport = MooncakeStates(MooncakeStore(StoreSettings(master)), folder / "names")
            store = {"master": master, "protocol": "tcp", "device": "", "segment": 2**28}
        served = ServedStates("vllm", str(EMBEDDED), (4, 8, 12), 400, str(folder / "states"), "float32", mooncake=store)
        arguments, environment = server_process(served, (), 1, on_cpu=True)
        server = StatesServer(python, arguments, environment, folder / "vllm.log", print, free_ports(1)[0])
        stack.enter_context(running([server]))
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        for length in (1, 15, 16, 17, 63, 200, 399, 400):
            ids, name = torch.randint(0, 500, (length,), generator=generator).tolist(), transport.names.next()
            body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "request_id": name}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
            found.append(transport.receive(name, answer["kv_transfer_params"], length, time.monotonic() + 120, Event()))
            assert found[-1].token_T.tolist() == ids
        transport.sweep()
        transport.close()
    return found


def test_vllm_answers_training_needs_no_repeated_request(
    command: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Answers are compared with the target before training. vLLM 0.32 for CPUs samples wrongly, so they are greedy."""
    more = ("features=engine", f"features.python={python_for('vllm')}", f"features.dir={tmp_path / 'states'}")
    answers = ("features.answers=true", "features.max_new_tokens=24", "features.temperature=0")
    assert command("fit", "recipe=medusa", *SETTINGS, *more, *answers, f"output={tmp_path / 'out'}") == 0
    assert "answers that the target writes at temperature 0;" in capfd.readouterr().out
    lines = metrics(tmp_path / "out")
    assert all(line["states_repeated"] == 0 and line["supervised_tokens"] > 0 for line in lines)
    assert all(line["answer_length"] is None or 1 <= line["answer_length"] <= 24 for line in lines)
    assert not list((tmp_path / "states").iterdir())


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of the only run."""
    (file,) = output.glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_vllm_states_server_ends_when_trainer_is_killed(tmp_path: Path) -> None:
    """Its files are removed by the next run that starts a server there."""
    states, said = tmp_path / "states", tmp_path / "said"
    more = ("features=engine", f"features.python={python_for('vllm')}", f"features.dir={states}", f"output={tmp_path / 'out'}")
    with said.open("w") as log:
        command = [sys.executable, "-m", "drafttrain", "fit", "recipe=medusa", *SETTINGS, *more]
        trainer = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while "give the target's states" not in said.read_text() and trainer.poll() is None:
            time.sleep(0.2)
        assert trainer.poll() is None, said.read_text()
        assert servers_of(states)
        trainer.kill()
        trainer.wait()
    until = time.monotonic() + 120
    while servers_of(states) and time.monotonic() < until:
        time.sleep(0.5)
    assert not servers_of(states)
    remove_abandoned(states, f"{NAME}.tmp-*")
    assert not list(states.iterdir())


def servers_of(folder: Path) -> list[int]:
    """Processes that were given this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(word.endswith("vllm_states.py") for word in words) and any(str(folder) in word for word in words):
                found.append(process.pid)
    return found
