"""States from SGLang: what is asked, what its answers can lack, and what is refused. The server is a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.features import servers
from drafttrain.features.engine import EngineStates, JoinedServers, StateLayers
from drafttrain.features.online import Online
from drafttrain.features.servers import ReferenceStates, Servers, ServerSettings
from drafttrain.features.sglang_source import SglangSource, meta_info, narrowed, numbers
from drafttrain.features.source import AbsentError, WrongError
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.standin.sglang_server import Arguments, SglangHandler, StandIn
from tests.standin.states_server import serving
from tests.unit.features.test_engine import batch, texts

FULL = {"return_hidden_states_mode": "full"}


def aux(*blocks: int) -> dict[str, Any]:
    return {"enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": list(blocks)}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(servers, "LONGEST_WAIT", 0.05)


def computed(target: HFTarget) -> Any:
    """All states of the target."""
    taps, one = Taps(tuple(range(target.shape.blocks)), final=True), threading.Lock()

    def compute(ids: list[int]) -> Mapping[int, Tensor]:
        with one:
            hidden = Online(target, taps).fill(batch([np.array(ids, np.int32)])).hidden
        return {key: state_BTH[0] for key, state_BTH in hidden.items()}

    return compute


def group(target: HFTarget, keys: Sequence[int], url: str, longest: int = 64) -> Servers:
    ids = texts(1)[0].tolist()
    reference = ReferenceStates(ids, tuple(keys), computed(target)(ids), torch.float32)
    source = SglangSource(keys, target.shape.blocks, longest, torch.no_grad()(target.norm), "start it well")
    return Servers(ServerSettings((url,), None, 5.0, 0.5, 4), source, reference, lambda line: None)


@contextmanager
def states_of(
    target: HFTarget, standin: StandIn, taps: Taps, longest: int = 64, final: StandIn | None = None
) -> Iterator[EngineStates]:
    layers = StateLayers(taps, target.shape.blocks, final=True)
    with serving(standin, kind=SglangHandler) as url, serving(final or standin, kind=SglangHandler) as other:
        keys = layers.keys
        found: Servers | JoinedServers = group(target, keys, url, longest)
        if final is not None:
            found = JoinedServers(group(target, keys[:-1], url), group(target, (FINAL,), other))
        states = EngineStates(found, layers, target, 2)
        try:
            yield states
        finally:
            states.close()


@pytest.mark.parametrize(
    ("taps", "arguments", "final", "last"),
    [
        (Taps(), FULL, None, False),
        (Taps(), {"enable_return_hidden_states": True}, None, False),
        (Taps((0, 2)), aux(0, 2), FULL, False),
        (Taps((0, 2)), aux(2, 3, 0), None, True),
        (Taps((1, 3)), aux(1, 3), None, True),
    ],
    ids=["final", "older flag", "two servers", "last block", "last block tapped"],
)
def test_sglang_source_states_equal_target_states(
    taps: Taps, arguments: dict[str, Any], final: dict[str, Any] | None, last: bool, target: HFTarget
) -> None:
    standin = StandIn(computed(target), Arguments(**arguments), last=last)
    other = None if final is None else StandIn(computed(target), Arguments(**final))
    with states_of(target, standin, taps, final=other) as states:
        states.servers.check()
        for ids in (*texts(3), texts(1)[0]):  # the last one again: its states are whole, though its tokens are in the cache
            some = batch([ids])
            expected, found = Online(target, taps).fill(some), states.fill(some)
            assert sorted(found.hidden) == sorted(expected.hidden) == sorted({*taps.blocks, FINAL})
            for key, state_BTH in expected.hidden.items():
                assert torch.equal(found.hidden[key], state_BTH)
        assert states.totals()["engine"] == "sglang 0.5.23" and states.totals()["servers"] == 1 + (final is not None)
    request = standin.requests[-1]
    assert request["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 1} and request["return_hidden_states"] is True
    assert len({one["extra_key"] for one in standin.requests}) == len(standin.requests)


@pytest.mark.parametrize("fault", ["status", "busy", "drop", "abort", "nan", "ids", "another"])
def test_sglang_source_failed_requests_are_repeated(fault: str, target: HFTarget) -> None:
    standin = StandIn(computed(target), Arguments(**FULL), {2: fault, 3: fault})
    with states_of(target, standin, Taps()) as states:
        object.__setattr__(states.servers.settings, "patience", 60.0)  # the waits after two faults, on a busy machine too
        states.servers.check()  # requests 0 and 1
        some = batch([texts(1)[0]])
        assert torch.equal(states.fill(some).hidden[FINAL], Online(target, Taps()).fill(some).hidden[FINAL])
        assert states.servers.counts.repeated == 2


@pytest.mark.parametrize(
    ("arguments", "taps", "longest", "line"),
    [
        ({}, Taps(), 64, "gives no hidden states; start it well"),
        ({"return_hidden_states_mode": "last"}, Taps(), 64, "gives no hidden states; start it well"),
        (
            FULL,
            Taps((0, 2)),
            64,
            "gives the final state, but the drafter needs the blocks 0, 2 and the final state; start it well",
        ),
        (aux(0, 2), Taps((0, 2)), 64, "gives the blocks 0, 2, but the drafter needs the blocks 0, 2 and the final state"),
        (aux(0, 1), Taps(), 64, "gives the blocks 0, 1, but the drafter needs the final state"),
        (
            {"enable_return_aux_hidden_states": True},
            Taps(),
            64,
            "gives the blocks of SGLang's own choice, but the drafter needs the final state",
        ),
        (FULL | {"chunked_prefill_size": 8192}, Taps(), 64, "start it with --chunked-prefill-size -1"),
        (FULL | {"context_length": 70}, Taps(), 64, "prompts of fewer than 64 tokens, .* up to 64; .* --context-length 71"),
    ],
)
def test_sglang_server_with_wrong_settings_is_refused(
    arguments: dict[str, Any], taps: Taps, longest: int, line: str, target: HFTarget
) -> None:
    standin = StandIn(computed(target), Arguments(**arguments))
    with states_of(target, standin, taps, longest) as states, pytest.raises(UserError, match=line):
        states.servers.check()
    assert not standin.requests


@pytest.mark.parametrize(
    ("last", "faults", "line"),
    [
        (True, dict.fromkeys(range(9), "early"), "the final state differs .*; it is the output of block 2: it serves other"),
        (False, {}, "for 0.5 s; start the server again"),
    ],
    ids=["early", "the last block is not captured"],
)
def test_sglang_server_with_early_or_missing_block_states_is_refused(
    last: bool, faults: dict[int, str], line: str, target: HFTarget
) -> None:
    """SGLang ends at the first request when a model cannot give a block's output."""
    arguments = Arguments(**(FULL if faults else aux(0, 2, 3)))
    taps = Taps() if faults else Taps((0, 2))
    with (
        states_of(target, StandIn(computed(target), arguments, faults, last), taps) as states,
        pytest.raises(UserError, match=line),
    ):
        states.servers.check()


def test_sglang_states_before_final_norm_are_refused(target: HFTarget) -> None:
    def before_norm(ids: list[int]) -> Mapping[int, Tensor]:
        found = dict(computed(target)(ids))
        return found | {FINAL: found[3]}

    with (
        states_of(target, StandIn(before_norm, Arguments(**FULL)), Taps()) as states,
        pytest.raises(UserError, match=r"the final state differs .*; it is the output of block 3"),
    ):
        states.servers.check()


def test_sglang_layer_ids_off_by_one_are_refused(target: HFTarget) -> None:
    """As with the convention EAGLE3 on some architectures, which takes ids as they are."""

    def early(ids: list[int]) -> Mapping[int, Tensor]:
        found = dict(computed(target)(ids))
        return found | {2: found[1]}

    final = StandIn(computed(target), Arguments(**FULL))
    with (
        states_of(target, StandIn(early, Arguments(**aux(0, 2))), Taps((0, 2)), final=final) as states,
        pytest.raises(UserError, match=r"the output of block 2 differs .*; it is the output of block 1"),
    ):
        states.servers.check()


@pytest.mark.parametrize(
    ("arguments", "ignored", "line"),
    [
        ({}, True, r"the states of 1 of \d+ tokens, since \d+ are in its prefix cache; start it with --disable-radix-cache"),
        ({"chunked_prefill_size": 8}, False, r"the states of \d of \d+ tokens, since it computes prompts in chunks"),
    ],
)
def test_sglang_states_of_partial_prompt_are_refused(
    arguments: dict[str, Any], ignored: bool, line: str, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows no extra_key, and one that hides how it computes."""
    standin = StandIn(computed(target), Arguments(**(FULL | arguments)))
    monkeypatch.setattr("drafttrain.features.sglang_source.SglangLayers.of", lambda *a: standin_layers())
    if ignored:
        monkeypatch.setattr(standin, "_hits", lambda key, ids: StandIn._hits(standin, None, ids))
    with states_of(target, standin, Taps()) as states, pytest.raises(UserError, match=line):
        for _ in range(2):
            states.servers.states(texts(1)[0].tolist())


def standin_layers() -> Any:
    from drafttrain.features.sglang_source import SglangLayers

    return SglangLayers((), True)


def test_sglang_numbers_keep_server_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state_TW = torch.randn(5, 16).to(dtype)
        assert torch.equal(found := narrowed(numbers(state_TW.tolist())), state_TW) and found.dtype == dtype
    assert not numbers([[1.0, None]]).isfinite().all()
    with pytest.raises(WrongError, match="rows of several lengths"):
        numbers([[1.0], [1.0, 2.0]])


def test_sglang_answer_aborted_or_of_other_request_is_refused() -> None:
    with pytest.raises(AbsentError, match="it has ended the request"):
        meta_info("u", {"meta_info": {"id": "a", "finish_reason": {"type": "abort", "message": "m"}}}, "a")
    with pytest.raises(WrongError, match="another request, b"):
        meta_info("u", {"meta_info": {"id": "b"}}, "a")
    with pytest.raises(UserError, match="is it an SGLang server"):
        meta_info("u", [], "a")
