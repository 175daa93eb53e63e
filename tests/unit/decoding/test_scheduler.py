"""The decode loop's exactness: greedy and coupled output is plain decoding's whatever is drafted, batched or queued."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.logits_processors import logits_after
from drafttrain.decoding.request import Request, Result, StopText
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.measure.exactness import Match, compare
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.target import Taps
from drafttrain.ops import accept, library
from drafttrain.ops import sampling as sampling_op
from drafttrain.targets.fast import FastTarget
from tests.distributions import Texts, of_texts, tail
from tests.helpers import Scripted, ScriptedState, never, oracle, prompts, random_guess, tiny_model, tiny_target
from tests.unit.decoding.path_logits import check_logits_by_path

NEW = 14
CHAIN = [[0] * d for d in range(1, 5)]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
HF, FAST = tiny_target(), FastTarget(tiny_model())
TARGETS = {"hf": HF, "fast": FAST}


def plain_texts(asked: list[list[int]]) -> list[list[int]]:
    results = Decoder(HF, None, "greedy", Sampling(), max_new_tokens=NEW + 8).run(asked, len(asked)).results
    return [prompt + r.tokens for prompt, r in zip(asked, results, strict=True)]


def drafter_of(kind: str, texts: list[list[int]], paths: list[list[int]]) -> Scripted:
    guess = {"oracle": oracle(texts), "never": never(texts), "random": random_guess(5)}[kind]
    return Scripted(guess, paths)


def drain(session: Session, requests: list[Request]) -> list[Result]:
    results = [r for request in requests for r in session.submit(request)]
    for _ in session:
        pass
    return results


@st.composite
def trees(draw: Any) -> list[list[int]]:
    paths: list[list[int]] = [[0]]
    for _ in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from([[], *paths]))
        rank = sum(len(p) == len(parent) + 1 and p[:-1] == parent for p in paths)
        if len(parent) < 4 and rank < 7:
            paths.append([*parent, rank])
    return paths


ANY = {
    "runner": st.sampled_from(sorted(TARGETS)),
    "kind": st.sampled_from(["oracle", "never", "random"]),
    "paths": trees(),
    "count": st.integers(1, 7),
    "slots": st.integers(1, 4),
    "pooled": st.booleans(),
    "chunk": st.integers(2, 30),
    "seed": st.integers(0, 50),
}


@settings(max_examples=12, deadline=None)
@given(**ANY)
def test_session_greedy_tokens_equal_plain_decoding(
    runner: str, kind: str, paths: list[list[int]], count: int, slots: int, pooled: bool, chunk: int, seed: int
) -> None:
    """Chains and trees, batch 1 and ragged batches that stop at different times, requests that enter mid-way."""
    asked, stop = prompts(count, seed=seed), frozenset({7, 11, 30})
    texts = plain_texts(asked)
    decoder = Decoder(TARGETS[runner], drafter_of(kind, texts, paths), "greedy", Sampling(), prefill_chunk=chunk)
    requests = [Request(p, i, NEW - i % 3, stop_ids=stop) for i, p in enumerate(asked)]
    most = max(map(decoder.positions, requests))
    session = Session(decoder, slots, most, pages=slots * -(-most // PAGE) if pooled else None)
    results = drain(session, requests)
    for request, result, text in zip(requests, results, texts, strict=True):
        wanted = text[len(request.prompt) :][: request.max_new_tokens]
        end = next((i + 1 for i, t in enumerate(wanted) if t in stop), len(wanted))
        assert result.tokens == wanted[:end]
        assert result.ended_by == ("stop" if wanted[end - 1] in stop else "length")
        assert result.emitted == len(result.tokens) - 1
        if kind == "never":
            assert result.verifications == result.emitted
    if pooled:
        assert session.kv.free_pages == session.kv.pages


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(**ANY)
def test_session_greedy_tokens_equal_plain_decoding_in_more_cases(**drawn: Any) -> None:
    test_session_greedy_tokens_equal_plain_decoding.hypothesis.inner_test(**drawn)  # type: ignore[attr-defined]


SAMPLINGS = [
    Sampling(1.0, seed=3),
    Sampling(0.7, top_k=9, top_p=0.8, seed=4),
    Sampling(1.3, min_p=0.05, repetition_penalty=1.4, draft_temperature=0.5, seed=5),
    Sampling(0.8, presence_penalty=0.3, frequency_penalty=0.4, logit_bias={5: 3.0, 9: -2.0}, repetition_penalty=1.2, seed=6),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["oracle", "never", "random"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_coupled_tokens_equal_plain_sampling(sampling: Sampling, kind: str) -> None:
    asked = prompts(5, seed=2)
    texts = [
        p + r.tokens
        for p, r in zip(asked, Decoder(HF, None, "lossless", sampling, max_new_tokens=NEW).run(asked, 2).results, strict=True)
    ]
    for paths in (CHAIN, TREE):
        drafter = drafter_of(kind, texts, paths)
        results = Decoder(FAST, drafter, "coupled", sampling, max_new_tokens=NEW).run(asked, 3).results
        assert [p + r.tokens for p, r in zip(asked, results, strict=True)] == texts
        if kind == "oracle":
            assert sum(r.verifications for r in results) < 0.5 * sum(r.emitted for r in results)


def test_controls_window_and_draft_length_bound_offered_drafts() -> None:
    asked = prompts(3, seed=1)
    texts = plain_texts(asked)
    for controls, deepest, nodes in ((Controls(window=2), 2, 6), (Controls(draft_length=1), 1, 3), (Controls(), 3, 8)):
        drafter = drafter_of("oracle", texts, TREE)
        results = Decoder(FAST, drafter, "greedy", Sampling(), max_new_tokens=NEW, controls=controls).run(asked, 3).results
        assert [p + r.tokens for p, r in zip(asked, results, strict=True)] == [
            t[: len(p) + NEW] for p, t in zip(asked, texts, strict=True)
        ]
        assert all(len(r.offered) == deepest and r.nodes == nodes * r.verifications for r in results)
    for bad in ({"window": 0}, {"draft_length": -1}):
        with pytest.raises(ValueError, match="set it to 1 or more"):
            Controls(**bad)


@pytest.mark.parametrize("name", ["draft_length", "window"])
def test_decoder_limit_beyond_deepest_proposal_is_refused(name: str) -> None:
    drafter = drafter_of("oracle", [], TREE)
    Decoder(FAST, drafter, "greedy", Sampling(), controls=Controls(**{name: 3}))
    with pytest.raises(ValueError, match=f"decode.{name} is 4, but this drafter drafts 3 tokens ahead at most"):
        Decoder(FAST, drafter, "greedy", Sampling(), controls=Controls(**{name: 4}))


def committed(session: Session, slot: int) -> list[torch.Tensor]:
    kv = session.kv
    length, row = int(kv.lengths(torch.tensor(slot))), kv.storage.table_SQ[slot]
    return [pool[row].flatten(0, 1)[:length] for layer in range(kv.layers) for pool in kv.page_view().layer(layer)]


@pytest.mark.parametrize("rows", [1, 3])
def test_kv_cache_committed_entries_equal_prefill_and_rejected_ones_are_not_read(rows: int) -> None:
    if rows > 1 and not library.state().loaded:
        pytest.skip(f"the torch reference masks foreign positions by adding: {library.state().text}")
    asked = prompts(rows, seed=6)
    texts = plain_texts(asked)
    drafter = Scripted(lambda text: (oracle(texts) if len(text) % 3 else random_guess(1))(text), TREE)
    session = Session(Decoder(FAST, drafter, "greedy", Sampling()), rows, 96)
    results = [session.submit(Request(p, i, NEW))[0] for i, p in enumerate(asked)]
    for _ in range(4):
        session.step()
        for slot in session.slot_B.tolist():
            for p in range(int(session.kv.lengths(torch.tensor(slot))), session.kv.storage.capacity):
                for layer in range(session.kv.layers):
                    for pool in session.kv.page_view().layer(layer):
                        pool[session.kv.storage.table_SQ[slot, p // PAGE], p % PAGE] = torch.nan
    for slot, (prompt, result) in enumerate(zip(asked, results, strict=True)):
        text = prompt + result.tokens
        fresh = FAST.new_cache(1, 96)
        with torch.inference_mode():
            position = torch.arange(len(text) - 1)[None]
            FAST(torch.tensor([text[:-1]]), fresh, None, position, Taps(), torch.empty(1, 0, dtype=torch.long))
        for layer in range(fresh.layers):
            for pool, ours in zip(fresh.page_view().layer(layer), committed(session, slot)[2 * layer :], strict=False):
                torch.testing.assert_close(pool.flatten(0, 1)[: len(text) - 1], ours, rtol=1e-4, atol=1e-5)
    for _ in session:
        pass
    assert [p + r.tokens for p, r in zip(asked, results, strict=True)] == [
        t[: len(p) + NEW] for p, t in zip(asked, texts, strict=True)
    ]


@pytest.mark.parametrize("gradients", [False, True], ids=["compiled", "reference"])
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_tree_node_logits_equal_path_alone(gradients: bool, seed: int, nodes: int) -> None:
    check_logits_by_path(FAST, nodes, range(nodes), gradients, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_divergences_are_near_ties(dtype: torch.dtype) -> None:
    if not library.state().loaded:  # torch's own kernels sum a node's attention in another order for each number of rows
        pytest.skip(f"in a random model their rounding grows past the last place: {library.state().text}")
    target = FastTarget(tiny_model().to(dtype))
    asked = prompts(8, seed=12)
    plain = [r.tokens for r in Decoder(target, None, "greedy", Sampling(), max_new_tokens=40).run(asked, 8).results]
    drafter = Scripted(oracle([p + t for p, t in zip(asked, plain, strict=True)]), TREE)
    ours = [r.tokens for r in Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=40).run(asked, 4).results]
    matches = compare(target, dtype, asked, ours, plain, target.device)
    assert Match.UNEXPLAINED not in matches


@pytest.mark.parametrize("paths", [TREE, CHAIN], ids=["tree", "chain"])
def test_float16_target_verifies_with_compiled_operators(paths: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.state().loaded:
        pytest.skip(library.state().text)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the plain-torch twin ran where the compiled operator should")

    for module, name in ((accept, "lossless_reference"), (accept, "greedy_reference"), (sampling_op, "sample_reference")):
        monkeypatch.setattr(module, name, refuse)
    target, asked = FastTarget(tiny_model().half()), prompts(6, seed=4)
    for sampling in (Sampling(), Sampling(1.0, seed=3), Sampling(0.8, top_k=20, seed=5)):
        plain = Decoder(target, None, "lossless", sampling, max_new_tokens=24).run(asked, 6)
        assert all(len(r.tokens) == 24 for r in plain.results)
        drafter = Scripted(oracle([p + r.tokens for p, r in zip(asked, plain.results, strict=True)]), paths)
        ours = Decoder(target, drafter, "lossless", sampling, max_new_tokens=24).run(asked, 6)
        assert all(len(r.tokens) == 24 for r in ours.results)
        assert sum(r.verifications for r in ours.results) < sum(len(r.tokens) for r in ours.results)


def test_session_requests_wait_for_pages_and_start_in_order() -> None:
    decoder = Decoder(FAST, None, "greedy", Sampling())
    requests = [Request(p, i, 40) for i, p in enumerate(prompts(6, seed=3))]
    session = Session(decoder, 4, 64, pages=5)  # two pages each: two run at a time
    results = [session.submit(r)[0] for r in requests]
    most = 0
    while session.busy:
        session.step()
        most = max(most, len(session.active))
        assert session.kv.free_pages + sum(len(p) for p in session.kv.storage.owned) == 5
    assert most == 2 and [r.request for r in sorted(results, key=lambda r: r.started)] == list(range(6))
    alone = Decoder(FAST, None, "greedy", Sampling(), max_new_tokens=40).run([r.prompt for r in requests], 1).results
    assert [r.tokens for r in results] == [r.tokens for r in alone]


def test_session_request_that_cannot_fit_is_refused_with_sizes() -> None:
    session = Session(Decoder(FAST, None, "greedy", Sampling()), 2, 64, pages=3)
    with pytest.raises(ValueError, match=r"1 x 111 positions need 1 slots and 4 pages; .* 2 slots of 64 positions and 3 pages"):
        session.submit(Request([1] * 10, 0, 100))
    with pytest.raises(ValueError, match="3 x 12 positions need 3 slots"):
        session.submit(Request([1], 0, 10, samples=3))
    with pytest.raises(ValueError, match="exceed the target's 512"):
        session.submit(Request([1] * 500, 0, 100))
    for bad in ({"prompt": []}, {"prompt": [1], "max_new_tokens": 0}, {"prompt": [1], "min_new_tokens": 200}):
        with pytest.raises(ValueError):
            Request(**bad)
    assert not session.busy


@pytest.mark.parametrize("pooled", [False, True])
def test_session_samples_share_prompt_pages_and_equal_separate_requests(pooled: bool) -> None:
    prompt, sampling = (prompts(1, seed=4)[0] * 80)[:75], Sampling(1.0, seed=7)
    texts = [
        prompt + r.tokens for r in Decoder(HF, None, "lossless", sampling, max_new_tokens=NEW).run([prompt] * 3, 1).results
    ]
    decoder = Decoder(FAST, drafter_of("random", texts, TREE), "coupled", sampling)
    whole = len(prompt) // PAGE
    assert whole >= 2
    one = -(-decoder.positions(Request(prompt, 0, NEW)) // PAGE)
    session = Session(decoder, 3, one * PAGE, pages=one + 2 * (one - whole) if pooled else None)
    results = session.submit(Request(prompt, 0, NEW, samples=3))
    session.step()
    if pooled:
        assert session.kv.free_pages == 0
        assert len({tuple(pages[:whole]) for pages in session.kv.storage.owned}) == 1
    for _ in session:
        pass
    assert [prompt + r.tokens for r in results] == texts
    assert not pooled or session.kv.free_pages == session.kv.pages


@pytest.mark.parametrize("runner", sorted(TARGETS))
def test_session_request_may_fill_target_context(runner: str) -> None:
    """The last proposals reach past the last position; what they hold there is never text."""
    prompt = (prompts(1, seed=11)[0] * 60)[:490]
    texts = [prompt + r.tokens for r in Decoder(HF, None, "greedy", Sampling(), max_new_tokens=22).run([prompt]).results]
    for kind in ("oracle", "random"):
        decoder = Decoder(
            TARGETS[runner], drafter_of(kind, texts, TREE), "greedy", Sampling(), max_new_tokens=22, prefill_chunk=100
        )
        (result,) = decoder.run([prompt]).results
        assert prompt + result.tokens == texts[0] and len(texts[0]) == 512


def test_stop_text_cuts_output_where_string_is_complete() -> None:
    asked = prompts(4, seed=5)
    texts = plain_texts(asked)
    decode = "".join
    names = [f"<{i}>" for i in range(64)]
    stop = StopText(
        (names[texts[0][len(asked[0]) + 4]] + names[texts[0][len(asked[0]) + 5]],), lambda ids: decode(names[i] for i in ids)
    )
    for kind in ("oracle", "never"):
        decoder = Decoder(FAST, drafter_of(kind, texts, CHAIN), "greedy", Sampling())
        results = drain(Session(decoder, 2, 64), [Request(p, i, NEW, stop_text=stop) for i, p in enumerate(asked)])
        for prompt, text, result in zip(asked, texts, results, strict=True):
            new = text[len(prompt) :][:NEW]
            end = next((i for i in range(1, NEW + 1) if stop.strings[0] in stop.decode(new[:i])), NEW)
            assert result.tokens == new[:end]
        assert results[0].ended_by == "text" and len(results[0].tokens) == 6
    with pytest.raises(ValueError, match="none of them empty"):
        StopText(("a", ""), str)


def test_stop_text_has_space_of_first_token_and_nothing_of_prompt() -> None:
    """As SentencePiece decodes: without the space of the first token."""
    pieces = ["<s>", " Once", " upon", " a", "!"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids).removeprefix(" ")

    assert StopText((" upon",), decode).end([0, 1], [2], 1) == 1
    assert StopText((" upon a",), decode).end([1], [2, 3, 4], 3) == 2
    for string in (" Once", "Once upon", "e u"):
        assert StopText((string,), decode).end([1], [2, 3], 2) is None, "a part of it is the prompt's"


def test_repetition_penalty_and_min_new_tokens_equal_transformers() -> None:
    asked, stop = prompts(4, seed=8), frozenset(range(40))
    decoder = Decoder(FAST, drafter_of("random", [], TREE), "greedy", Sampling(repetition_penalty=1.7))
    requests = [Request(p, i, 20, min_new_tokens=6 + i, stop_ids=stop) for i, p in enumerate(asked)]
    results = drain(Session(decoder, 3, 64), requests)
    for request, result in zip(requests, results, strict=True):
        wanted = HF.model.generate(
            torch.tensor([request.prompt]),
            max_new_tokens=20,
            min_new_tokens=request.min_new_tokens,
            do_sample=False,
            repetition_penalty=1.7,
            eos_token_id=sorted(stop),
            pad_token_id=0,
        )
        assert result.tokens == wanted[0, len(request.prompt) :].tolist()


class Additive(LogitsProcessor):
    """Presence and frequency penalty as OpenAI's API defines them, of tokens behind the prompt."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        count_V = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])
        return scores - self.frequency * count_V - self.presence * (count_V > 0)


@pytest.mark.parametrize("kind", ["oracle", "random"])
def test_presence_and_frequency_penalty_and_logit_bias_equal_transformers(kind: str) -> None:
    """Order included: bias, repetition penalty, the two others. Accepted drafts count on their own path alone."""
    asked, sampling = (
        prompts(4, seed=8),
        Sampling(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.15, logit_bias={3: 1.5, 8: -0.5}),
    )
    wanted = [
        HF.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
            repetition_penalty=1.1, sequence_bias=[[[3], 1.5], [[8], -0.5]],
            logits_processor=LogitsProcessorList([Additive(len(prompt), 0.2, 0.15)]),
        )[0].tolist()
        for prompt in asked
    ]  # fmt: skip
    decoder = Decoder(FAST, drafter_of(kind, wanted, TREE), "greedy", sampling, max_new_tokens=24)
    results = decoder.run(asked, 3).results
    assert [p + r.tokens for p, r in zip(asked, results, strict=True)] == wanted
    assert max(Counter(results[0].tokens).values()) > 1, "some token is counted more than once"
    assert (sum(map(sum, (r.accepted for r in results))) > 20) == (kind == "oracle")
    with pytest.raises(ValueError, match=r"decode\.logit_bias has token 4000; the target has token ids from 0 to"):
        Decoder(FAST, None, "greedy", Sampling(logit_bias={4000: 1.0}))


def test_penalties_finer_than_half_precision_change_its_logits() -> None:
    """bfloat16 has no number between 22 and 22.125. transformers' processors get float32 too."""
    after_V = logits_after(torch.full((8,), 22.0, dtype=torch.bfloat16), Sampling(logit_bias={3: 0.05}), [1], [2])
    assert after_V.argmax() == 3 and after_V[3] - after_V[0] == pytest.approx(0.05, abs=1e-4)


def test_session_streamed_chunks_join_to_results() -> None:
    asked = prompts(5, seed=9)
    texts = plain_texts(asked)
    session = Session(Decoder(FAST, drafter_of("oracle", texts, CHAIN), "greedy", Sampling()), 2, 64)
    results = [session.submit(Request(p, i, NEW))[0] for i, p in enumerate(asked)]
    streamed: dict[int, list[int]] = {}
    drafted = 0
    for chunk in session:
        streamed.setdefault(chunk.result.request, []).extend(chunk.tokens)
        drafted += chunk.drafted
    assert [streamed[r.request] for r in results] == [r.tokens for r in results]
    assert drafted == sum(sum(r.accepted) for r in results)


class Siblings(Scripted):
    """Two children of the root drawn without replacement from a law of the text, each with a child drawn from its own."""

    def __init__(self, vocab: int) -> None:
        super().__init__(lambda text: [0, 1], [[0], [1], [0, 0], [1, 0]], SiblingsState)
        self.vocab, self.generator = vocab, torch.Generator().manual_seed(1)

    def q(self, text: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(text[-3:])) % 2**31)
        return torch.randn(self.vocab, generator=generator).mul(2.0).softmax(-1)


class SiblingsState(ScriptedState):
    def propose(self, slot_B: torch.Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        tokens, laws, drafter = [], [], self.drafter
        assert isinstance(drafter, Siblings)
        for slot in slot_B.tolist():
            text = self.text[slot]
            root = drafter.q(text)
            first, second = torch.multinomial(root, 2, generator=drafter.generator).tolist()
            below = [drafter.q([*text, child]) for child in (first, second)]
            drawn = [int(torch.multinomial(law, 1, generator=drafter.generator)) for law in below]
            tokens.append([text[-1], first, second, *drawn])
            laws.append(torch.stack([root, *below, root, root]))
        rows = len(tokens)
        sampled = torch.tensor([[True, True, True, False, False]]).expand(rows, 5)
        parent = torch.tensor([[-1, 0, 0, 1, 2]]).expand(rows, 5)
        return DraftTree(torch.tensor(tokens), parent, torch.full((rows,), 5), torch.stack(laws), sampled)


@pytest.mark.slow  # exact and cheaper: test_acceptance.py (the rule), kernels/test_accept.py (the operator)
@pytest.mark.sampled(policy=["lossless"])
@pytest.mark.parametrize("policy", ["lossless", "coupled"])
def test_decoder_sampled_siblings_follow_target_distribution(policy: str) -> None:
    """Chi-square of three tokens jointly, vocabulary 64, top-k and top-p applied."""
    sampling, prompt, count = Sampling(1.1, top_k=5, top_p=0.9, seed=21), prompts(1, seed=4, longest=9)[0], 4000
    joint = Texts()
    for text, p in of_texts(HF.model, prompt, sampling, 4).items():
        joint[text[1:]] = joint.get(text[1:], 0.0) + p
    decoder = Decoder(FAST, Siblings(64), policy, sampling, max_new_tokens=4)
    results = decoder.run([prompt] * count, 250).results
    assert len(joint) > 20 and tail(joint, (tuple(r.tokens[1:]) for r in results)) > 1e-4
