"""Guards end a text or turn it to plain decoding, at the same token whenever the host looks, and touch no other text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.draft_length import Cut
from drafttrain.decoding.guards import Act, Guard, JsonText, Watch
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.targets.fast import FastTarget
from tests.helpers import Scripted, ScriptedState, prompts, random_guess, tiny_model

TARGET = FastTarget(tiny_model())
SAMPLING = Sampling(0.9, repetition_penalty=1.2, seed=6)
ASKED = prompts(5, seed=4)
NEW, BAD = 36, 9
CHAIN = [[0] * d for d in range(1, 21)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    # text, place of its fault, whether it is complete
    ("Here is", 0, False),
    ('{"a": 1} Here', 9, False),
    ('{"a" 1}', 5, False),
    ("{'a': 1}", 1, False),
    ("[1,]", 3, False),
    ('{"a": 1,}', 8, False),
    ("[1}", 2, False),
    ('{"a": NaN}', 6, False),
    ('"a\nb"', 2, False),
    ('"\\x"', 2, False),
    ("01", 1, False),
    ("12", None, True),
    ("1.", None, False),
    ("tru", None, False),
    ("trux", 3, False),
    ("", None, False),
    ("``", None, False),
    ("``a", 2, False),
    ("```json\n[1]", None, False),
    ("```json\n[1]\n``", None, False),
    ("```json\n[1]\n```\n", None, True),
    ("```json\n[1]\n``` x", 16, False),
    ("[1]```", 3, False),
    ("```json [1]", 8, False),
]


def spaces(tokens: list[int]) -> str:
    """Blank but for the token that no JSON begins with."""
    return "".join("x" if token == BAD else " " for token in tokens)


def looping(text: list[int]) -> list[int]:
    """Texts that end in an even token are drafted 5 5 5 ..."""
    return [5] * 8 if text[0] % 2 == 0 else random_guess(3)(text)


def breaking(text: list[int]) -> list[int]:
    return [BAD if text[0] % 2 == 0 and len(text) > 26 else (text[-1] * 7 + 1) % 8] * 8


@cache
def decoded(
    guess: object, guard: Guard, policy: str = "threshold", every: int | None = None, rows: int = 3, fallback: bool = False
) -> list[Result]:
    drafter = None if guess is None else Scripted(guess, CHAIN)  # type: ignore[arg-type]
    sampling = Sampling() if policy == "greedy" else SAMPLING
    controls = Controls(parameter=1e-9, read_every=every, fallback=fallback)
    decoder = Decoder(TARGET, drafter, policy, sampling, max_new_tokens=NEW, controls=controls, guard=guard)
    return decoder.run(ASKED, rows, as_json=[True] * len(ASKED)).results


def plainly(prompt: list[int], kept: list[int], key: int) -> list[int]:
    """The target's own continuation, with the noise of this request."""
    decoder = Decoder(TARGET, None, "lossless", SAMPLING, max_new_tokens=NEW - len(kept))
    return decoder.run([prompt + kept], 1, first_request=key).results[0].tokens


GUARDS = {"loop": (looping, Guard(loop="plain")), "json": (breaking, Guard(json="plain", decode=spaces))}


@pytest.mark.sampled(every=[None])  # test_guard_results_are_independent_of_read_interval_and_batch_size has the others
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("kind", sorted(GUARDS))
def test_guard_fallback_continues_as_plain_decoding_and_leaves_other_requests(kind: str, every: int | None) -> None:
    guess, guard = GUARDS[kind]
    found, free = decoded(guess, guard, every=every, rows=3), decoded(guess, Guard(), every=every)
    assert any(r.acts for r in found) and not all(r.acts for r in found)
    for key, (prompt, ours, other) in enumerate(zip(ASKED, found, free, strict=True)):
        assert len(ours.tokens) == NEW and ours.ended_by == "length" and ours.plain == bool(ours.acts)
        assert sum(ours.lengths) == ours.emitted == NEW - 1 and len(ours.lengths) == ours.verifications
        if not ours.acts:
            assert (ours.tokens, ours.runs) == (other.tokens, other.runs)
            continue
        (act,) = ours.acts
        assert (act.guard, act.action) == (kind, "plain")
        kept = ours.tokens[: act.kept]
        assert kept == other.tokens[: act.kept] and 0 < act.kept < NEW
        assert other.tokens[act.kept] == BAD or kind == "loop"
        assert ours.tokens[act.kept :] == plainly(prompt, kept, key)


class Confident(ScriptedState):
    """Gives a confidence for each draft."""

    def propose(self, *asked: Any, **more: Any) -> DraftTree:
        tree = super().propose(*asked, **more)
        return replace(tree, confidence_BN=torch.full(tree.token_BN.shape, 0.9))


class Alternating(Cut):
    """Every draft but each third is cut, and each elsewhere."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def depth(self, rows: int, total: Sequence[float], sampled: bool) -> int:
        step = len(self.seen)
        self.seen.append(len(total) if step % 3 == 2 else (5 + 3 * step) % len(total))
        return self.seen[-1]


@pytest.mark.parametrize("kind", sorted(GUARDS))
def test_guard_fallback_with_cut_drafts_continues_as_plain_decoding(kind: str) -> None:
    guess, guard = GUARDS[kind]
    controls, seen = Controls(parameter=1e-9, fallback=True), list[int]()
    drafter = Scripted(guess, CHAIN, Confident)  # type: ignore[arg-type]
    decoder = Decoder(TARGET, drafter, "threshold", SAMPLING, max_new_tokens=NEW, controls=controls, guard=guard)
    decoder.cut, always = Alternating(seen), SimpleNamespace(depth=lambda rows: len(CHAIN), record=lambda *step: None)
    decoder.fallback = always  # type: ignore[assignment]
    found = decoder.run(ASKED, 3, as_json=[True] * len(ASKED)).results
    turned = [(key, r) for key, r in enumerate(found) if r.acts]
    assert turned and len(turned) < len(found) and len({*seen}) > 3
    for key, result in turned:
        kept = result.tokens[: result.acts[0].kept]
        assert len(result.tokens) == NEW and result.tokens[len(kept) :] == plainly(ASKED[key], kept, key)


@pytest.mark.parametrize("kind", sorted(GUARDS))
def test_guard_results_are_independent_of_read_interval_and_batch_size(kind: str) -> None:
    ways = ((None, 3), (1, 5), (4, 1))  # it looks every so many steps, at so many rows
    texts = [[(r.tokens, r.acts, r.runs) for r in decoded(*GUARDS[kind], every=n, rows=b)] for n, b in ways]
    assert all(text == texts[0] for text in texts)


def test_guard_fallback_of_all_requests_stops_drafting() -> None:
    asked: list[int | None] = []

    class Watched(ScriptedState):
        def propose(self, slot_B, sampling, depth=None):  # type: ignore[no-untyped-def]
            asked.append(len(slot_B))
            return super().propose(slot_B, sampling, depth)

    decoder = Decoder(TARGET, Scripted(lambda text: [5] * 8, CHAIN, Watched), "threshold", SAMPLING, max_new_tokens=NEW,
                      controls=Controls(parameter=1e-9), guard=Guard(loop="plain"))  # fmt: skip
    results = decoder.run(ASKED, 5).results
    assert all(r.plain for r in results)
    assert len(asked) < max(r.verifications for r in results) - 10


STOPS = {"loop": (looping, Guard(loop="stop")), "json": (breaking, Guard(json="stop", decode=spaces))}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", sorted(STOPS))
@pytest.mark.parametrize("every", [None, 1, 3])
@pytest.mark.parametrize("policy", ["greedy", "lossless", "coupled", "threshold"])
def test_guard_stop_ends_request_and_keeps_earlier_tokens(policy: str, every: int | None, kind: str) -> None:
    guess, guard = STOPS[kind]
    stopped, free = decoded(guess, guard, policy, every), decoded(guess, Guard(), policy, every)
    for ours, other in zip(stopped, free, strict=True):
        assert ours.tokens == other.tokens[: len(ours.tokens)]
        acts = Watch(guard).act(other.tokens, NEW)
        assert len(ours.tokens) == (acts.kept if acts else NEW)
        assert ours.ended_by == (acts.guard if acts else "length")
        assert ours.acts == ([acts] if acts else []) and ours.emitted == len(ours.tokens) - 1


def test_guard_with_lossless_policy_has_no_fallback() -> None:
    guard = Guard(loop="plain", json="stop", decode=spaces)
    for drafter, policy in ((None, "threshold"), (Scripted(looping, CHAIN), "lossless")):
        decoder = Decoder(TARGET, drafter, policy, SAMPLING, guard=guard)
        assert decoder.guard == Guard(json="stop", decode=spaces) and not decoder.may_fall_back
    assert decoder.request([1]).guard is None


def test_guard_ignores_request_ended_by_stop_token() -> None:
    stop = frozenset({5})
    decoder = Decoder(TARGET, Scripted(looping, CHAIN), "threshold", SAMPLING, stop, NEW,
                      controls=Controls(parameter=1e-9), guard=Guard(loop="stop"))  # fmt: skip
    found = decoder.run(ASKED, 3).results
    assert {r.ended_by for r in found if r.tokens[-1] == 5} == {"stop"} and not any(r.acts for r in found)


def test_guard_fallback_frees_pages_and_streams_all_tokens() -> None:
    decoder = Decoder(TARGET, Scripted(looping, CHAIN), "threshold", SAMPLING, max_new_tokens=NEW,
                      controls=Controls(parameter=1e-9, fallback=True), guard=Guard(loop="plain"))  # fmt: skip
    requests = [decoder.request(prompt, key) for key, prompt in enumerate(ASKED)]
    session = Session(decoder, 2, max(map(decoder.positions, requests)), pages=12)
    results = [r for request in requests for r in session.submit(request)]
    seen: dict[int, list[int]] = {r.request: [] for r in results}
    for chunk in session:
        seen[chunk.result.request] += chunk.tokens
    assert session.kv.free_pages == 12 and all(seen[r.request] == r.tokens for r in results)


def test_guard_watch_joins_split_characters_and_acts_once() -> None:
    pieces = {1: b"[", 2: b'"', 3: b"\xc3", 4: b"\xa4", 5: b"]", 6: b"x"}

    def decode(tokens: list[int]) -> str:
        return b"".join(pieces[t] for t in tokens).decode(errors="replace")

    text = [1, 2, 3, 4, 2, 5, 6, 6]
    guard = Guard(loop="stop", json="plain", decode=decode)
    watch = Watch(guard)
    assert [watch.act(text[: n + 1], 1) for n in range(7)] == [None] * 6 + [Act("json", "plain", 6)]
    assert watch.act(text, 1) is None and watch.act([*text, *[6] * 14], 14) == Act("loop", "stop", 22)
    assert Watch(guard).act(text, 8) == Act("json", "plain", 6)
    assert Watch(guard).act([6], 1) == Act("json", "plain", 1)
    both = Watch(Guard(loop="plain", json="plain", decode=decode))
    assert both.act([6], 1) == Act("json", "plain", 1) and both.act([6] * 40, 39) is None


def test_guard_invalid_options_are_refused() -> None:
    for bad in ({"loop": "end"}, {"json": "False"}):
        with pytest.raises(ValueError, match="choose one of off, plain, stop"):
            Guard(**bad)
    with pytest.raises(ValueError, match="tokenizer's decode"):
        Guard(json="stop")


def parses(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def read(text: str, fence: bool = True) -> tuple[int | None, bool]:
    checker = JsonText(fence)
    return checker.feed(text), checker.complete


@settings(max_examples=50)
@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.data())
def test_json_text_accepts_every_prefix_of_valid_json(
    value: object, indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read(f" {text}\n") == (None, True)
    assert read(f"```json\n{text}\n```\n") == (None, True)
    assert read(text[: data.draw(st.integers(0, len(text)))])[0] is None
    whole = JsonText()
    whole.feed(f"```\n {text} \n```")
    assert json.loads(whole.value) == value


@given(st.text(alphabet='{}[]",:0123456789-+.eEtrufalsn\\ \n', max_size=12))
def test_json_text_completes_exactly_for_parsable_strings(text: str) -> None:
    fault, complete = read(text, fence=False)
    assert (fault is None and complete) == parses(text)


@given(VALUES, st.sampled_from('{}[]",:01-.eatx`\\ \x01'), st.data())
def test_json_text_stray_character_fault_is_not_before_its_position(value: object, stray: str, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    fault, complete = read(text[:at] + stray + text[at:], fence=False)
    assert complete == parses(text[:at] + stray + text[at:])
    assert fault is None or fault >= at


def test_json_text_names_place_of_fault_and_whether_complete(subtests: pytest.Subtests) -> None:
    for text, fault, complete in PLACES:
        with subtests.test(text=text):
            assert read(text) == (fault, complete)


def test_json_text_respects_fence_option_and_chunked_input() -> None:
    assert read("```json\n1\n```", fence=False) == (0, False)
    checker = JsonText()
    assert [checker.feed(part) for part in ('{"', 'a":', " [tr", "ue", ", 1", "2]", "}")] == [None] * 7 and checker.complete
    assert checker.feed("\n") is None and checker.feed("x") == 0 and not checker.complete and checker.feed(" ") == 0
