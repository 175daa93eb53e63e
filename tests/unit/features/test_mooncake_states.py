"""States through Mooncake's store: the manifest is checked, faults are repeated, and no object is left."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.files import HOST
from drafttrain.features import FeatureOptions, servers
from drafttrain.features.engine import EngineStates
from drafttrain.features.mooncake_states import Manifest, MooncakeStates, key_of, object_bytes
from drafttrain.features.mooncake_store import MooncakeStore, StoreSettings
from drafttrain.features.online import Online
from drafttrain.features.servers import ReferenceStates, Servers, ServerSettings
from drafttrain.features.source import NoStatesError, WrongError
from drafttrain.features.vllm_source import VllmSource
from drafttrain.targets.hf import HFTarget
from tests.standin.mooncake import Master, Producer, free_port, needs_mooncake
from tests.standin.mooncake_server import MooncakeStandIn, packed
from tests.standin.states_server import serving
from tests.unit.features.test_engine import LAYERS, NO_PROCESS, TAPS, batch, computed, target, texts

__all__ = ["target"]
NAME = "drafttrain-some.machine-12-1f-3-"
HANDLE = f"cmpl-{key_of(NAME)}-0-ab12"
TENSORS = {"hidden_states": torch.randn(5, 2, 8), "token_ids": torch.arange(5)}


def manifest() -> tuple[bytes, dict[str, Any]]:
    return packed(HANDLE, TENSORS)


def test_mooncake_manifest_gives_tensors_of_object() -> None:
    content, params = manifest()
    found = Manifest.of(params, NAME, 5)
    content_N = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    assert found.handle == HANDLE and found.nbytes == len(content) <= object_bytes(5, 2, 8, 4)
    assert torch.equal(found.hidden.of(content_N), TENSORS["hidden_states"])
    assert torch.equal(found.tokens.of(content_N), TENSORS["token_ids"])


def changed(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(params: dict[str, Any]) -> None:
        for key in path[:-1]:
            params = params[key]
        params[path[-1]] = to

    return change


STATES, IDS = ("tensors", "hidden_states"), ("tensors", "token_ids")


@pytest.mark.parametrize(
    "change",
    [
        changed("version", to=2),
        changed("handle", to=7),
        changed("handle", to="cmpl-.*"),
        changed("handle", to="x" * 1000),
        changed("handle", to="cmpl-other"),
        changed("tensors", to=["hidden_states", "token_ids"]),
        changed("tensors", to={}),
        changed("tensors", to=None),
        changed("metadata", to=None),
        changed("metadata", "total_aligned_bytes", to=2**62),
        changed("metadata", "total_aligned_bytes", to=64),
        changed("metadata", "total_aligned_bytes", to=2**30),
        changed("metadata", "num_tokens", to=6),
        changed(*STATES, to=None),
        changed(*STATES, "dtype", to="torch.float8_e4m3fn"),
        changed(*STATES, "dtype", to="torch.int64"),
        changed(*STATES, "dtype", to=["torch.float32"]),
        changed(*STATES, "shape", to=[5, 2, 9]),
        changed(*STATES, "shape", to=[5, -2, -8]),
        changed(*STATES, "shape", to=[10, 1, 8]),
        changed(*STATES, "shape", to=[5, 16]),
        changed(*STATES, "shape", to=[5, 2, 8.0]),
        changed(*STATES, "shape", to=5),
        changed(*STATES, "nbytes", to=319),
        changed(*STATES, "offset", to=-64),
        changed(*STATES, "offset", to=1),
        changed(*STATES, "offset", to=64),
        changed(*STATES, "offset", to=2**63),
        changed(*STATES, "offset", to=True),
        changed(*IDS, "offset", to=0),
        changed(*IDS, "offset", to=2**20),
        changed(*IDS, "shape", to=[4]),
        changed(*IDS, "dtype", to="torch.int32"),
    ],
)
def test_mooncake_damaged_manifest_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    params = copy.deepcopy(manifest()[1])
    change(params)
    with pytest.raises(WrongError):
        Manifest.of(params, NAME, 5)


@pytest.mark.parametrize(
    ("params", "line"),
    [(None, "without"), ([], "without"), ({}, "without"), ({"hidden_states_path": "/a"}, "features.transport is mooncake")],
)
def test_mooncake_answer_without_manifest_is_refused(params: Any, line: str) -> None:
    with pytest.raises(NoStatesError, match=line):
        Manifest.of(params, NAME, 5)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"transport": "mooncake", "servers": ["http://a:1"]}, "give the HOST:PORT of the mooncake_master"),
    ],
)
def test_mooncake_feature_options_invalid_values_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        FeatureOptions("engine", **options).check(64)


def source(target: HFTarget, url: str, transport: MooncakeStates, timeout: float = 60.0) -> EngineStates:
    ids = texts(1)[0].tolist()
    own = dict(zip(range(4), computed(target, (1, 2, 3, 4))(ids).unbind(1), strict=True))
    reference, settings = ReferenceStates(ids, LAYERS.keys, own, torch.float32), ServerSettings((f"{url}/v1",), timeout=timeout)
    vllm = VllmSource(LAYERS.keys, 64, transport, "start it well")
    return EngineStates(Servers(settings, vllm, reference, [].append), LAYERS, target, 2)


@needs_mooncake
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["status", "drop", "missing", "error", "nan", "ids", "another", "half", "damaged", ""])
def test_mooncake_states_failed_requests_are_repeated(
    fault: str, target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "FIRST_WAIT", 0.01)
    master = Master(f"127.0.0.1:{free_port()}").start()
    try:
        standin = MooncakeStandIn(computed(target), master.address, {2: fault, 3: fault})
        transport = MooncakeStates(MooncakeStore(StoreSettings(master.address, buffer=2**20)), tmp_path)
        with serving(standin) as url:
            states = source(target, url, transport, 2.0 if fault == "missing" else 60.0)
            states.servers.check()
            some = batch(texts(4))
            found, expected = states.fill(some), Online(target, TAPS).fill(some)
            torch.testing.assert_close(found.hidden[2], expected.hidden[2].where(some.document_BT[..., None] >= 0, 0.0))
            assert states.servers.counts.repeated == (2 if fault else 0)
            transport.remove([transport.names.own])
            states.close()
        assert standin.client.remove_by_regex(".", force=True) == 0, "an object is left"
        lost = fault not in ("", "ids")  # where whole objects were read; of "nan" the server puts the reason alone
        assert [path.name for path in tmp_path.iterdir()] == ([transport.names.own] if lost else [])
        standin.client.close()
    finally:
        master.kill()


@needs_mooncake
@pytest.mark.slow
def test_mooncake_objects_of_dead_processes_are_removed_and_others_kept(tmp_path: Path) -> None:
    master = Master(f"127.0.0.1:{free_port()}").start()
    producer = Producer(master.address)
    try:
        names = {
            "dead": f"drafttrain-{HOST}-{NO_PROCESS}-1f-",
            "alive": f"drafttrain-{HOST}-{os.getppid()}-1f-",
            "elsewhere": f"drafttrain-{HOST}-{NO_PROCESS}-2f-",
        }
        for which, name in names.items():
            (tmp_path / name).write_text("other:1" if which == "elsewhere" else master.address)
            assert producer.put(f"cmpl-{key_of(name)}7--0-ab", 100) == 0
        transport = MooncakeStates(MooncakeStore(StoreSettings(master.address, buffer=2**20)), tmp_path)
        transport.sweep()
        assert transport.store.exists(*(f"cmpl-{key_of(name)}7--0-ab" for name in names.values())) == [False, True, True]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names["alive"], names["elsewhere"]])
        transport.close()
    finally:
        producer.kill()
        master.kill()
