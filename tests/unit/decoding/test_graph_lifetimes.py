"""Captured steps outlive what is around them: other requests in their slots, other sessions, other decoders, larger caches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

from drafttrain.core.sampling import Sampling
from drafttrain.decoding import graph_runner as ahead
from drafttrain.decoding import scheduler as speculate
from drafttrain.decoding.request import Request, Result
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters.draft_model import DraftModel
from drafttrain.model.drafter import Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.ops import library
from drafttrain.targets import fast
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import NAMES, build
from tests.helpers import prompts, tiny_model
from tests.recorder import FreedError, Graph, capture, cpu_graphs

__all__ = ["cpu_graphs"]
STOP = frozenset({7, 11})
FAMILIES: list[str | None] = [None, *NAMES]
ALL = Sampling(
    repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={5: 1}
)  # a whole number, as an option gives it
PROCESSORS = ((Sampling(), 12), (Sampling(repetition_penalty=1.3), 0), (ALL, 12))  # with the least number of new tokens
OFTEN = (None, "medusa", "eagle3")  # no state, that of the last token, and one with a cache of its own


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> FastTarget:
    """One that runs block by block, as on a GPU. Tests share it: what one leaves behind must not matter to another."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    return block_by_block()


@cache
def block_by_block() -> FastTarget:
    return FastTarget(tiny_model())


def drafter_of(name: str | None, target: FastTarget) -> Drafter | None:
    drafter = None if name is None else build(name, target, 0.3)
    if drafter is not None and not drafter.captured:
        pytest.skip("says itself that no graph can hold its steps")
    return drafter


def capturing(*arguments: Any, read_every: int | None = 1, **settings: Any) -> Decoder:
    decoder = Decoder(*arguments, controls=Controls(read_every=read_every), **settings)
    decoder.captures = True
    return decoder


def texts(decoder: Decoder, asked: list[list[int]], batch: int) -> list[list[int]]:
    return [result.tokens for result in decoder.run(asked, batch).results]


@pytest.mark.sampled(name=OFTEN)
@pytest.mark.parametrize("processors", PROCESSORS, ids=["least", "penalty", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_step_reused_slots_give_eager_tokens(
    name: str | None, processors: tuple[Sampling, int], cpu_graphs: None, target: FastTarget
) -> None:
    """With every kind of logits processor. Later requests have other stop tokens, then more of them, then fewer."""
    sampling, least = processors
    drafter, found = drafter_of(name, target), list[list[list[int]]]()
    for captures in (False, True):
        decoder = Decoder(target, drafter, "greedy", sampling, controls=Controls(read_every=1))
        decoder.captures = captures
        session, results = Session(decoder, 2, 128), list[Result]()
        for i, prompt in enumerate(prompts(8, seed=3)):
            stop = frozenset({7, 11} if i < 4 else {5, 7, 11, 13, 17} if i < 6 else {3})
            results += session.submit(Request(prompt, i, 25, least if i % 3 else 2 * least, stop))
        for _ in session:
            pass
        found.append([r.tokens for r in results])
    assert found[0] == found[1]
    assert not least or any(len(text) > least for text in found[0])


@pytest.mark.sampled(name=OFTEN)
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_of_alternating_decoders_give_eager_tokens(
    name: str | None, cpu_graphs: None, target: FastTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in tuning: each keeps its graphs while the other's session is opened, used, and replaced by a larger one."""
    for module in (ahead, speculate):
        monkeypatch.setattr(module, "LEAST_BOUND", 64)
    drafter, short = drafter_of(name, target), prompts(3, seed=3)
    long = [prompt + list(range(40)) + prompt for prompt in prompts(2, seed=4)]
    ways: dict[str, tuple[str, Sampling]] = {"greedy": ("greedy", Sampling()), "sampled": ("coupled", Sampling(0.9, seed=4))}
    wanted = {
        (way, i): texts(Decoder(target, drafter, *how, STOP, 8), asked, 2)
        for way, how in ways.items()
        for i, asked in enumerate((short, long))
    }
    decoders = {way: capturing(target, drafter, *how, STOP, 8) for way, how in ways.items()}
    order = [("greedy", 0), ("sampled", 0), ("greedy", 0), ("sampled", 1), ("greedy", 0), ("greedy", 1), ("sampled", 0)]
    for way, i in order:
        assert texts(decoders[way], (short, long)[i], 2) == wanted[way, i], (way, i)


@pytest.mark.parametrize(
    "name", ["medusa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("draft_model", "eagle3"))]
)
def test_captured_steps_of_overlapping_sessions_give_eager_tokens(name: str, cpu_graphs: None, target: FastTarget) -> None:
    """Steps in turn; the second one opens while the first one's graphs are in use, and a third after the first has gone."""
    drafter, asked = drafter_of(name, target), prompts(3, seed=5)
    wanted = texts(Decoder(target, drafter, "greedy", Sampling(), STOP, 20), asked, 3)
    decoder, sessions, found = capturing(target, drafter, "greedy", Sampling(), STOP, 20), [], []
    for _ in range(3):
        session = Session(decoder, 3, 96)
        results = [result for prompt in asked for result in session.submit(decoder.request(prompt))]
        session.step(), session.step(), session.step()
        sessions.append(session)
        found.append(results)
        if len(sessions) == 3:
            for _ in sessions.pop(0):
                pass
            gc.collect()
        for other in sessions:
            other.step()
    for session in sessions:
        for _ in session:
            pass
    assert [[r.tokens for r in results] for results in found] == [wanted] * 3


@pytest.mark.parametrize("bits", [*map(slow, (None, 8)), 4])
def test_captured_step_loaded_weights_take_effect_in_same_memory(
    bits: int | None, cpu_graphs: None, target: FastTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights loaded into a draft model between two passes; the joined ones stay where they were."""
    monkeypatch.setattr(fast, "PACKED_BYTES", 0)  # packed ones are the CPU's alone
    drafter, asked = drafter_of("draft_model", target), prompts(3, seed=5)
    assert isinstance(drafter, DraftModel)
    other = build("draft_model", target, 2.0)
    assert isinstance(other, DraftModel)
    drafter.lm.bits = other.lm.bits = bits
    decoder = capturing(target, drafter, "greedy", Sampling(), STOP, 12)

    def accepted(decoder: Decoder) -> list[int]:
        return [result.accepted for result in decoder.run(asked, 2).results]

    before = accepted(decoder)
    weights = [joint.weight if joint.quantised is None else joint.quantised.code for joint in drafter.lm._joints]
    joined = [weight.data_ptr() for weight in weights]
    drafter.load_state_dict(other.state_dict())
    after = accepted(capturing(target, drafter, "greedy", Sampling(), STOP, 12))
    weights = [joint.weight if joint.quantised is None else joint.quantised.code for joint in drafter.lm._joints]
    assert [weight.data_ptr() for weight in weights] == joined
    assert before != after == accepted(Decoder(target, other, "greedy", Sampling(), STOP, 12)) == accepted(decoder)


def test_packed_weights_follow_loaded_draft_model(target: FastTarget) -> None:
    """On a CPU, where products read packed copies: also of maps that are joined with no other."""
    drafter, other, asked = drafter_of("draft_model", target), build("draft_model", target, 2.0), prompts(3, seed=5)
    assert isinstance(drafter, DraftModel)

    def accepted(drafter: Drafter) -> list[int]:
        return [r.accepted for r in Decoder(target, drafter, "greedy", Sampling(), STOP, 12).run(asked, 2).results]

    before = accepted(drafter)
    drafter.load_state_dict(other.state_dict())
    assert before != accepted(drafter) == accepted(other)
    fresh = build("draft_model", target, 2.0)
    assert isinstance(fresh, DraftModel)
    fresh.lm.new_cache(1, 8)
    for joint, wanted in zip(drafter.lm._joints, fresh.lm._joints, strict=True):
        x_1I = torch.randn(1, wanted.weight.shape[1])
        torch.testing.assert_close(joint(x_1I), wanted(x_1I))


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """To the garbage collector there is nothing older, so that a look at all objects takes no seconds; and it collects none."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled(name=["medusa", "draft_model"], passes=[3])
@pytest.mark.parametrize(("name", "passes"), [(None, 20), ("medusa", 20), *((name, 3) for name in FAMILIES)])
def test_captured_decoders_memory_is_flat_over_passes(
    name: str | None, passes: int, only_new_objects: None, cpu_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with a decoder of its own, as a measurement has; without the garbage collector, which knows no device memory."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    target = FastTarget(tiny_model())  # of its own: `alive` sees new tensors alone
    drafter, asked = None if name is None else build(name, target, 0.3), prompts(1, seed=5)
    graphs, held = len(Graph.alive), []  # an earlier test's failure may hold some
    gc.collect()
    for done in range(passes):
        decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=3, controls=Controls(read_every=1))
        decoder.captures = drafter is None or drafter.captured
        decoder.run(asked, 2)
        del decoder
        if done in (0, 1, passes - 1):
            held.append(alive())
    assert held == [held[0]] * 3 and held[0][:2] == (graphs, 0)


def alive() -> tuple[int, int, int]:
    """Graphs, caches, and the bytes of all tensors that the program has made since it was frozen."""
    objects = gc.get_objects()
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in objects if is_tensor(x)}
    return len(Graph.alive), sum(isinstance(x, KVCache) for x in objects), sum(found.values())


def is_tensor(x: Any) -> bool:
    return issubclass(type(x), torch.Tensor) and not issubclass(type(x), FakeTensor) and not x.is_mkldnn


def captured(work: Callable[[], Any]) -> Graph:
    graph = Graph()
    with capture(graph):
        work()
    return graph


def test_graph_recorder_replay_with_freed_input_fails() -> None:
    box = [torch.ones(3)]
    out = torch.zeros(3)
    graph = captured(lambda: out.add_(box[0]))
    assert out.tolist() == [0.0] * 3, "a capture computes nothing"
    graph.replay()
    assert out.tolist() == [1.0] * 3
    box[0].mul_(5)
    graph.replay()
    assert out.tolist() == [6.0] * 3
    box[0] = torch.ones(3)
    with pytest.raises(FreedError, match=r"add_.*shape \[3\] was freed"):
        graph.replay()


def test_graph_recorder_replay_with_moved_input_fails() -> None:
    given, out = torch.ones(3), torch.zeros(3)
    graph = captured(lambda: out.add_(given))
    given.resize_(1 << 16)
    with pytest.raises(FreedError, match="lies elsewhere"):
        graph.replay()


def test_graph_recorder_tracks_views_by_memory() -> None:
    given, out = torch.arange(6.0), torch.zeros(2)
    graph = captured(partial(lambda view: out.copy_(view[1:3]), given[2:]))
    graph.replay()
    assert out.tolist() == [3.0, 4.0]
    del given
    with pytest.raises(FreedError):
        graph.replay()


def test_graph_recorder_poisons_graph_memory_between_replays() -> None:
    made, out = list[torch.Tensor](), torch.zeros(2)

    def work() -> None:
        made.append(torch.zeros(2, dtype=torch.long) + 3)
        out.copy_(torch.empty(2))

    graph = captured(work)
    assert made[0].tolist() == [-77, -77]
    graph.replay()
    assert made[0].tolist() == [3, 3] and out.isnan().all()
    made[0].fill_(5)
    graph.replay()
    assert made[0].tolist() == [3, 3]
    weak = weakref.ref(made.pop())
    del graph
    assert weak() is None
