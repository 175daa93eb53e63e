"""Targets with recurrent layers: the committed states are those of the accepted tokens, whatever was rejected."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.guards import Guard
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.recurrent_state import RecurrentStates, States
from drafttrain.model.target import Taps
from drafttrain.objective.losses import LossOptions
from drafttrain.runs.training_job import check_packing
from drafttrain.targets.hf import HFTarget
from drafttrain.train import TrainOptions
from drafttrain.train.sharding import check_sequence_parallel
from tests.architectures import model_of
from tests.exports import unprobed
from tests.helpers import Scripted, oracle, prompts, random_guess
from tests.tiny import build
from tests.unit.decoding.test_acceptance import Law, Recorder, given_tree, target_law, total_variation

NAMES = (
    *("Qwen3-Next", "Qwen3.5 (text)", "Kimi-Linear", "Nemotron-H", "Bamba", "Granite-4 (hybrid)", "Falcon-H1", "LFM2"),
    "Jamba",
)
DELTA, MAMBA2 = "Qwen3-Next", "Bamba"
# one of each scan: the delta rule, the same with a decay of each channel, Mamba-2 with limits of its step sizes, Mamba-2 beside
# attention, convolution alone, Mamba
KINDS = (DELTA, "Kimi-Linear", "Nemotron-H", "Falcon-H1", "LFM2", "Jamba")
CHAIN = [[0] * d for d in range(1, 5)]


@cache
def target_of(name: str) -> HFTarget:
    """Only one is probed, which takes as long as a test; `test_targets.py` probes all."""
    return HFTarget(model_of(name)) if name == DELTA else unprobed(model_of(name))


@torch.no_grad()
def run(target: HFTarget, kv: KVCache, token_BN: Tensor, taken: Tensor | None = None) -> Tensor:
    """[B, N, V] logits of a chain after the committed positions; the first `taken` of each row are committed."""
    position_BN = kv.length_B[:, None] + torch.arange(token_BN.shape[1])
    logits_BNV = target(token_BN, kv, None, position_BN, Taps()).logits_BRV
    assert logits_BNV is not None
    if taken is not None:
        kv.advance(taken)
    return logits_BNV


def plain_states(target: HFTarget, text: list[int], at_once: int) -> States:
    kv = target.new_cache(1, 128)
    for start in range(0, len(text), at_once):
        piece = torch.tensor([text[start : start + at_once]])
        run(target, kv, piece, torch.tensor([piece.shape[1]]))
    assert kv.states is not None
    return kv.states.take(kv.slot_B)


def assert_same(found: States, row: int, wanted: States) -> None:
    assert found.keys() == wanted.keys() and found
    for layer, pair in wanted.items():
        for ours, theirs in zip(found[layer], pair, strict=True):
            if theirs is not None:
                assert ours is not None and theirs.abs().max() > 0
                assert (ours[row] - theirs[0]).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.sampled(name=KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_recurrent_target_committed_states_equal_pass_over_accepted_tokens(name: str) -> None:
    """Rows accept different counts, 0 and all included; slots are not in the order of the rows."""
    target, generator = target_of(name), torch.Generator().manual_seed(5)
    kv, order = target.new_cache(4, 128), torch.tensor([2, 0, 3])
    kv.rows(order)
    texts: list[list[int]] = [[], [], []]
    for width, least in ((9, 1), (5, 0), (1, 0), (5, 0), (2, 1), (5, 0)):
        token_BN = torch.randint(0, 60, (3, width), generator=generator)
        taken_B = torch.randint(least, width + 1, (3,), generator=generator)
        run(target, kv, token_BN, taken_B)
        for row, text in enumerate(texts):
            text += token_BN[row, : int(taken_B[row])].tolist()
    assert kv.states is not None and kv.length_B.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        assert_same(kv.states.take(order), row, plain_states(target, text, len(text)))
    assert_same(kv.states.take(order), 0, plain_states(target, texts[0], 1))
    (untouched,) = {float(x.abs().max()) for x in kv.states.take(torch.tensor([1]))[_first(kv)] if x is not None}
    assert untouched == 0.0


def _first(kv: KVCache) -> int:
    assert kv.states is not None
    return min(kv.states.take(kv.slot_B))


@pytest.mark.sampled(name=KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_recurrent_kv_cache_back_to_mark_restores_states(name: str) -> None:
    target, kv = target_of(name), target_of(name).new_cache(2, 64)
    token_BN = torch.randint(0, 60, (2, 6), generator=torch.Generator().manual_seed(1))
    run(target, kv, token_BN)
    mark = kv.mark(torch.tensor([2, 4]))
    kv.advance(torch.tensor([3, 5]))
    run(target, kv, token_BN, torch.tensor([6, 1]))
    kv.back_to(mark)
    assert kv.states is not None and kv.length_B.tolist() == [2, 4]
    for row, length in enumerate((2, 4)):
        assert_same(kv.states.take(kv.slot_B), row, plain_states(target, token_BN[row, :length].tolist(), length))
    with pytest.raises(AssertionError, match="cannot go back to any length"):
        kv.crop(torch.tensor([1, 1]))
    with pytest.raises(AssertionError, match="compute the slot's positions again"):
        kv.crop_slot(0, 1)


def greedy(target: HFTarget, asked: list[list[int]], new: int) -> list[list[int]]:
    return [r.tokens for r in Decoder(target, None, "greedy", Sampling(), frozenset(), new).run(asked, 2).results]


@pytest.mark.sampled(name=KINDS)
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("name", NAMES)
def test_recurrent_target_partly_accepted_chains_give_greedy_tokens(name: str, every: int | None) -> None:
    """Each third token of the drafter is wrong, so that counts differ between rows and steps."""
    target, asked = target_of(name), prompts(4, vocab=60, seed=8, longest=14)
    texts = greedy(target, asked, 12)
    right = oracle([p + t for p, t in zip(asked, texts, strict=True)])

    def guess(text: list[int]) -> list[int]:
        found = right(text)
        return found[1:] if (len(text) + text[0]) % 3 == 0 else found

    decoder = Decoder(target, Scripted(guess, CHAIN), "greedy", Sampling(), frozenset(), 12, 4, Controls(read_every=every))
    results = decoder.run(asked, 3).results
    assert [r.tokens for r in results] == texts
    assert {n for r in results for n in r.runs} >= {0, 1, 2}


@pytest.mark.sampled
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", (DELTA, MAMBA2, "LFM2"))
def test_recurrent_target_parallel_samples_equal_separate_requests(name: str, pooled: bool) -> None:
    target, prompt = target_of(name), prompts(1, vocab=60, seed=2, longest=19)[0] * 3
    decoder = Decoder(target, Scripted(random_guess(1), CHAIN), "coupled", Sampling(0.9, seed=3), max_new_tokens=10)
    alone = [r.tokens for r in decoder.run([prompt] * 3, 3).results]
    session = Session(decoder, 4, 128, 40 if pooled else None)
    session.submit(Request([7, 7], 9, 5))
    results = session.submit(Request(prompt, 0, 10, samples=3))
    list(session)
    assert [r.tokens for r in results] == alone


@pytest.mark.sampled(every=(None, 3))
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("name", (DELTA, MAMBA2))
def test_recurrent_target_guard_fallback_continues_as_plain_decoding(name: str, every: int | None) -> None:
    """Its states are behind its end, so the text is computed again."""
    target, asked, sampling = target_of(name), prompts(4, vocab=60, seed=4), Sampling(0.9, seed=6)
    chain, new = [[0] * d for d in range(1, 21)], 30

    def looping(text: list[int]) -> list[int]:
        return [5] * 8 if text[0] % 2 == 0 else random_guess(3)(text)

    controls = Controls(parameter=1e-9, read_every=every)
    decoder = Decoder(target, Scripted(looping, chain), "threshold", sampling, max_new_tokens=new, prefill_chunk=8,
                      controls=controls, guard=Guard(loop="plain"))  # fmt: skip
    results = decoder.run(asked, 3).results
    acted = [(key, r) for key, r in enumerate(results) if r.acts]
    assert acted and len(acted) < len(results)
    for key, result in acted:
        kept = result.tokens[: result.acts[0].kept]
        plain = Decoder(target, None, "lossless", sampling, max_new_tokens=new - len(kept))
        assert result.tokens[len(kept) :] == plain.run([asked[key] + kept], 1, first_request=key).results[0].tokens


def test_recurrent_session_memory_is_flat_over_many_requests() -> None:
    target = target_of(DELTA)
    decoder = Decoder(target, Scripted(random_guess(2), CHAIN), "greedy", Sampling(), max_new_tokens=6)
    session = Session(decoder, 4, 64, pages=16)
    held = session.kv.state_bytes
    for key, prompt in enumerate(prompts(24, vocab=60, seed=1, longest=9)):
        session.submit(Request(prompt, key, 6))
    list(session)
    states, every = session.kv.states, torch.arange(5)
    assert states is not None and states.bytes_per_slot == held == target.cache_bytes().states > 0
    assert len(session.free) == 4 and session.kv.free_pages == 16 and not states.recorded
    assert all(float(x.abs().max()) == 0 for pair in states.take(every).values() for x in pair if x is not None)


@pytest.mark.sampled(name=(DELTA,))  # the states of the others are compared above
@pytest.mark.parametrize("name", (DELTA, MAMBA2))
def test_recurrent_target_two_step_sampling_preserves_target_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration: after each outcome of the first step, the second one starts from the states that it left."""
    target = unprobed(model_of(name, vocab_size=5, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    sampling, prompt, length, recorder = Sampling(1.0), [3, 1, 4, 0, 2], 4, Recorder(monkeypatch)

    @cache
    def logits_after(count: int) -> dict[tuple[int, ...], Tensor]:
        """Of each text of so many tokens, by one pass of the model."""
        texts = list(product(range(5), repeat=count))
        with torch.no_grad():
            logits_RTV = target.model(torch.tensor([[*prompt, *text] for text in texts]), use_cache=False).logits
        return dict(zip(texts, logits_RTV[:, -1].double(), strict=True))

    def logits_of(tokens: tuple[int, ...]) -> Tensor:
        return logits_after(len(tokens))[tokens]

    def steps_law(kv: KVCache, root: int, drafts: tuple[tuple[int, int], ...]) -> Law:
        """The distribution of the tokens after the root, of one step for each pair of drafts."""
        tree, mark = DraftTree.chain(torch.tensor([[root, *drafts[0]]])), kv.mark()
        logits_1NV = run(target, kv, tree.token_BN).double()
        outcome, whole = given_tree(tree, logits_1NV, sampling, recorder), Law()
        for emitted, p in outcome.items():
            kv.back_to(mark)
            rest: Law = {(): 1.0}
            if len(drafts) > 1:
                run(target, kv, tree.token_BN, torch.tensor([len(emitted)]))
                rest = steps_law(kv, emitted[-1], drafts[1:])
            for more, q in rest.items():
                whole[emitted + more] = whole.get(emitted + more, 0.0) + p * q
        kv.back_to(mark)
        return whole

    kv = target.new_cache(1, 32)
    run(target, kv, torch.tensor([prompt[:-1]]), torch.tensor([len(prompt) - 1]))
    found: Law = {}
    for emitted, p in steps_law(kv, prompt[-1], ((0, 3), (1, 1))).items():
        rest = max(0, length - len(emitted))
        for tail, q in target_law(lambda s, e=emitted: logits_of(e + s), sampling, rest).items():  # type: ignore[misc]
            text = (emitted + tail)[:length]
            found[text] = found.get(text, 0.0) + p * q
    assert abs(sum(found.values()) - 1) < 1e-6
    assert total_variation(found, target_law(logits_of, sampling, length)) < 1e-4


def test_recurrent_recording_leaves_other_models_unchanged(tmp_path: Path) -> None:
    """A hybrid target, a hybrid draft model of another kind, and a model that nobody serves."""
    bare = model_of(DELTA, seed=4)
    asked, given = torch.tensor([[3, 1, 4, 1, 5]]), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = bare.generate(asked, **given).tolist()
    model_of(MAMBA2, seed=2).save_pretrained(tmp_path)
    target, texts = target_of(DELTA), prompts(3, vocab=60, seed=6)
    drafter = build("draft_model", target, source="hf", path=str(tmp_path))
    found = Decoder(target, drafter, "greedy", Sampling(), frozenset(), 12).run(texts, 3).results
    assert [r.tokens for r in found] == greedy(target, texts, 12)
    assert bare.generate(asked, **given).tolist() == before
    assert copy.deepcopy(bare).generate(asked, **given).tolist() == before


def test_recurrent_target_trees_packing_and_sequence_parallel_are_refused() -> None:
    target, drafter = target_of(DELTA), build("medusa", target_of(DELTA), paths=[[0], [0, 0]])
    with pytest.raises(UserError, match="exact for chains only"):
        Decoder(target, build("medusa", target), "greedy", Sampling())
    assert build("eagle3", target, tree="dynamic").proposal.kind == "chain"
    with pytest.raises(UserError, match=r"recurrent layers of the target.*set data\.pack=false"):
        check_packing(True, TrainOptions(), target, drafter, None)
    check_packing(False, TrainOptions(), target, drafter, None)
    options: Any = SimpleNamespace(sequence_parallel=2, on_policy=False)
    with pytest.raises(UserError, match=r"recurrent layers of the target.*set train\.sequence_parallel=1"):
        check_sequence_parallel(options, LossOptions(), target, drafter, None)


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        (True, r"^its recurrent layer 0 runs a kernel of another package \(fla, mamba_ssm\)[^\n]* not recorded[^\n]*uninstall"),
        (False, r"^its recurrent layer 0 runs a scan that is not recorded here, [^\n]* after rejected drafts$"),
    ],
)
def test_recurrent_states_unrecorded_scan_is_refused(installed: bool, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttrain.model.recurrent_state.find_spec", lambda name: installed)
    states = RecurrentStates(2, torch.device("cpu"))
    states.begin()
    states.convolution_inputs(0, torch.ones(2, 3, 5), 4)
    states.finish(0, torch.ones(2, 4))
    with pytest.raises(UserError, match=says):
        states.commit(torch.tensor([1, 5]))
    states.commit(torch.tensor([5, 5]), [5, 5])
    assert states.take(torch.tensor([0]))[0][0].tolist() == [[[1.0] * 3] * 3]
