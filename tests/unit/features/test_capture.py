"""States from SGLang with SpecForge's patch: what is asked, read and removed. Server and store are stand-ins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.features import servers
from drafttrain.features.engine import EngineStates, StateLayers
from drafttrain.features.mooncake_states import MooncakeStates, key_of
from drafttrain.features.mooncake_store import MissingError, StoreError, StoreSettings
from drafttrain.features.online import Online
from drafttrain.features.servers import ReferenceStates, Servers, ServerSettings
from drafttrain.features.sglang_source import CaptureSource
from drafttrain.model.target import Taps
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.standin.sglang_server import Patched, SglangHandler, StandIn
from tests.standin.states_server import serving
from tests.unit.features.test_engine import batch, texts
from tests.unit.features.test_sglang import computed

TAPS = Taps((0, 2))


class Memory:
    """A store in this process, with the methods that are used."""

    def __init__(self) -> None:
        self.settings = StoreSettings("127.0.0.1:50051")
        self.objects: dict[str, Tensor] = {}

    def put(self, key: str, tensor: Tensor) -> None:
        self.objects[key] = tensor.view(torch.uint8).flatten()

    def get(self, key: str, nbytes: int) -> Tensor:
        if key not in self.objects:
            raise MissingError(f"no object {key}")
        if self.objects[key].numel() != nbytes:
            raise StoreError("of another size")
        return self.objects[key].clone()

    def remove(self, *keys: str) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def remove_matching(self, pattern: str) -> int:
        found = [key for key in self.objects if re.search(pattern, key)]
        self.remove(*found)
        return len(found)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(servers, "LONGEST_WAIT", 0.05)


@contextmanager
def states_of(target: HFTarget, standin: StandIn, memory: Any, folder: Path, taps: Taps = TAPS) -> Iterator[EngineStates]:
    layers, ids = StateLayers(taps, target.shape.blocks, final=True), texts(1)[0].tolist()
    reference = ReferenceStates(ids, layers.keys, computed(target)(ids), torch.float32)
    with serving(standin, kind=SglangHandler) as url:
        source = CaptureSource(layers.keys, 64, MooncakeStates(memory, folder), "start it well")
        found = Servers(ServerSettings((url,), None, 5.0, 0.5, 4), source, reference, lambda line: None)
        states = EngineStates(found, layers, target, 2)
        try:
            yield states
        finally:
            states.close()


@pytest.mark.parametrize("taps", [TAPS, Taps()], ids=["taps", "none"])
def test_capture_source_states_equal_target_states(taps: Taps, target: HFTarget, tmp_path: Path) -> None:
    memory = Memory()
    standin = StandIn(computed(target), Patched(spec_capture_aux_layer_ids=[2, 0] if taps.blocks else None), put=memory.put)
    with states_of(target, standin, memory, tmp_path, taps) as states:
        states.servers.check()
        for ids in (*texts(3), texts(1)[0]):
            some = batch([ids])
            expected, found = Online(target, taps).fill(some), states.fill(some)
            assert sorted(found.hidden) == sorted(expected.hidden)
            for key, state_BTH in expected.hidden.items():
                assert torch.equal(found.hidden[key], state_BTH)
        assert not memory.objects, "objects are removed as soon as they are read"
        assert states.totals()["engine"] == "sglang 0.5.14 with SpecForge's patch"
    request = standin.requests[-1]
    assert request["sampling_params"]["max_new_tokens"] == 0 and "return_hidden_states" not in request
    assert len({one["extra_key"] for one in standin.requests}) == len(standin.requests)


@pytest.mark.parametrize("fault", ["status", "drop", "abort", "lost", "nan", "another"])
def test_capture_source_failed_requests_are_repeated(fault: str, target: HFTarget, tmp_path: Path) -> None:
    memory = Memory()
    arguments = Patched(spec_capture_aux_layer_ids=[0, 2])
    standin = StandIn(computed(target), arguments, {2: fault, 3: fault}, put=memory.put)
    with states_of(target, standin, memory, tmp_path) as states:
        object.__setattr__(states.servers.settings, "patience", 60.0)  # the waits after two faults, on a busy machine too
        states.servers.check()  # requests 0 and 1
        some = batch([texts(1)[0]])
        assert torch.equal(states.fill(some).hidden[2], Online(target, TAPS).fill(some).hidden[2])
        assert states.servers.counts.repeated == 2
    assert not memory.objects


def test_capture_source_late_objects_of_failed_requests_are_removed(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again while the run goes on, and at the next start where they come after its end."""
    memory, clock = Memory(), [1000.0]
    monkeypatch.setattr(servers, "monotonic", lambda: clock[0])
    standin = StandIn(computed(target), Patched(spec_capture_aux_layer_ids=[0, 2]), {2: "drop"}, put=memory.put)
    with states_of(target, standin, memory, tmp_path) as states:
        states.servers.check()  # requests 0 and 1
        states.servers.states(texts(1)[0].tolist())
        late = f"drafttrain/{key_of(standin.requests[2]['rid'])}/g1/aux"
        for seconds in (6, 30):
            memory.put(late, torch.zeros(1))
            clock[0] += seconds
            states.servers.states(texts(1)[0].tolist())
            assert late not in memory.objects
    memory.put(late, torch.zeros(1))
    following = MooncakeStates(memory, tmp_path)  # type: ignore[arg-type]
    following.sweep_once()
    assert not memory.objects
    following.sweep()
    assert not list(tmp_path.iterdir())


def test_capture_source_full_store_raises_user_error(target: HFTarget, tmp_path: Path) -> None:
    def full(key: str, tensor: Tensor) -> None:
        raise RuntimeError(f"spec-capture put_from failed (status -200) for {key}")

    standin = StandIn(computed(target), Patched(spec_capture_aux_layer_ids=[0, 2]), put=full)
    with (
        states_of(target, standin, Memory(), tmp_path) as states,
        pytest.raises(UserError, match=r"could not give the states: spec-capture put_from failed .*, for 0.5 s"),
    ):
        states.servers.check()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"enable_spec_capture": False}, "puts no states into a store; start it well"),
        ({"spec_capture_aux_layer_ids": [1, 3]}, r"gives the blocks \[1, 3\], but the drafter needs \[0, 2\]; start it well"),
        ({}, r"gives the blocks None, but the drafter needs \[0, 2\]"),
        ({"spec_capture_aux_layer_ids": [0, 2], "context_length": 40}, "takes prompts of fewer than 34 tokens"),
    ],
)
def test_capture_source_server_with_wrong_settings_is_refused(
    arguments: dict[str, Any], line: str, target: HFTarget, tmp_path: Path
) -> None:
    memory = Memory()
    standin = StandIn(computed(target), Patched(**arguments), put=memory.put)
    with states_of(target, standin, memory, tmp_path) as states, pytest.raises(UserError, match=line):
        states.servers.check()


def test_capture_source_states_cut_by_prefix_cache_are_refused(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ignores extra_key, and finds the sequence in its cache."""
    memory = Memory()
    standin = StandIn(computed(target), Patched(spec_capture_aux_layer_ids=[0, 2]), put=memory.put)
    monkeypatch.setattr(standin, "_hits", lambda key, ids: StandIn._hits(standin, None, ids))
    with states_of(target, standin, memory, tmp_path) as states, pytest.raises(UserError, match="are in its prefix cache"):
        for _ in range(2):
            states.servers.states(texts(1)[0].tolist())
    assert not memory.objects
