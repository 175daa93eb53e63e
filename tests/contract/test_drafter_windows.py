"""Sliding windows and attention sinks in drafters' layers: trained as they draft, exact in every tree, and windows are blind to
the text before them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.features.online import Online
from drafttrain.model import cached_layers
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.kv_cache import KVCache
from tests.cases import slow_but, with_grid
from tests.helpers import drafted_and_predicted, fast_target, prompts
from tests.tiny import SHAPES, build

WINDOW = {"sliding_window": 9}
MIXED = WINDOW | {"full_attention_layers": [1]}
SINKS = {"attention_sinks": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {"layer": WINDOW}),
    "eagle3": ("eagle3", {"layer": WINDOW}),
    "eagle3, dynamic": ("eagle3", {"layer": WINDOW, "tree": "dynamic", "width": 2, "nodes": 12}),
    "mtp": ("mtp", {"layer": WINDOW}),
    "peagle": ("peagle", {"layer": WINDOW}),
    "peagle, mixed": ("peagle", {"layer": MIXED}),
    "dflash": ("dflash", {"layer": WINDOW}),
    "dflash, mixed": ("dflash", {"layer": MIXED}),
    "dflash, not causal": ("dflash", {"layer": MIXED, "causal_windows": False}),
    "dspark, mixed": ("dspark", {"layer": MIXED}),
    "dflash2": ("dflash2", {"layer": WINDOW}),
    "dflare": ("dflare", {"layer": WINDOW}),
    "dflare, mixed": ("dflare", {"layer": MIXED}),
    "dfly, mixed": ("dfly", {"layer": MIXED}),
    "dflash2, mixed and causal": ("dflash2", {"layer": MIXED, "causal_windows": True}),
    "eagle, sinks": ("eagle", {"layer": SINKS}),
    "eagle3, sinks": ("eagle3", {"layer": SINKS | WINDOW, "layers": 2, "tree": "dynamic", "width": 2, "nodes": 12}),
    "mtp, sinks": ("mtp", {"layer": SINKS | WINDOW}),
    "dflash, sinks": ("dflash", {"layer": SINKS | MIXED}),
    "dspark, sinks": ("dspark", {"layer": SINKS}),
    "dflash2, sinks": ("dflash2", {"layer": SINKS | WINDOW}),
    "dflare, sinks": ("dflare", {"layer": SINKS}),
}
# windows of a recurrent layer, in chains and trees; of PEagle's own mask; of blocks; sinks of a recurrent layer and of blocks
FEW = ("eagle3, dynamic", "peagle, mixed", "dflash, mixed", "eagle3, sinks", "dflash, sinks")
MORE = ("eagle3", "dflash, not causal", "dflash2, mixed and causal", "dspark, sinks")
ASKED, SETTINGS = prompts(4, seed=3, longest=40), ("greedy", Sampling(), frozenset[int](), 30)
CHANGED = [name for name, (_, options) in CASES.items() if options["layer"] == WINDOW]


def drafter_of(case: str) -> Drafter:
    """With sinks that take shares of a softmax from almost none to almost all."""
    name, options = CASES[case]
    drafter = build(name, fast_target(), 0.5, **options)
    sinks = [p for key, p in drafter.named_parameters() if key.endswith("attention_sink_bias")]
    for sinks_h in sinks:
        sinks_h.data.copy_(torch.linspace(-3, 5, len(sinks_h)))
    assert bool(sinks) == options["layer"].get("attention_sinks", False)
    return drafter


@pytest.mark.sampled(case=(*FEW, *MORE))
@pytest.mark.parametrize("case", CASES)
def test_sliding_window_training_predictions_equal_draft_tokens(case: str) -> None:
    target, prompt = fast_target(), prompts(1, seed=8, longest=30)[0] + [5, 9, 2, 8, 1, 30, 12, 40, 2, 2, 7, 9, 3, 6, 4]
    drafts, predicted = drafted_and_predicted(target, drafter_of(case), prompt)
    assert predicted == drafts


@pytest.mark.sampled(case=(*FEW, *MORE))
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", slow_but(FEW, CASES))
def test_sliding_window_greedy_output_equals_plain_decoding(case: str, batch: int) -> None:
    drafted = Decoder(fast_target(), drafter_of(case), *SETTINGS, prefill_chunk=6).run(ASKED, batch).results
    assert [r.tokens for r in drafted] == plain()


@cache
def plain() -> list[list[int]]:
    return [r.tokens for r in Decoder(fast_target(), None, *SETTINGS).run(ASKED, 1).results]


@pytest.mark.parametrize(
    ("case", "every"),
    with_grid(
        [("eagle3, dynamic", None), ("dflash", 2)],
        CASES,
        (None, 2),  # each step is read at once, or shapes are static
        slow=[
            *[("eagle3, dynamic", 2), ("dflash", None), ("peagle", None), ("dflash, mixed", None), ("mtp", 2)],
            *[("eagle3, sinks", 2), ("mtp, sinks", None), ("dflash, sinks", 2)],
        ],
    ),
)
def test_sliding_window_bounded_cache_drafts_same_tokens(case: str, every: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and outputs of several times the memory, ragged, in chunks, over fewer slots."""
    layer = CASES[case][1]["layer"]
    target, caches = fast_target(), list[KVCache]()
    asked = [(prompts(1, seed=n, longest=9)[0] * 150)[: 110 + 20 * n] for n in range(3)]
    drafter = drafter_of(case)

    def decoded() -> list[tuple[list[int], int, list[int]]]:
        decoder = Decoder(
            target, drafter, "greedy", Sampling(), max_new_tokens=36, prefill_chunk=90, controls=Controls(read_every=every)
        )
        return [(r.tokens, r.verifications, r.accepted) for r in decoder.run(asked, 2).results]

    monkeypatch.setattr(cached_layers, "AT_ONCE", 10**6)
    whole = decoded()
    monkeypatch.setattr(cached_layers, "AT_ONCE", 64)
    opened = KVCache.__init__

    def noted(cache: KVCache, *given: Any, **more: Any) -> None:
        opened(cache, *given, **more)
        caches.append(cache)

    monkeypatch.setattr(KVCache, "__init__", noted)
    assert decoded() == whole
    kept = [cache for cache in caches if cache.kept is not None]
    assert bool(kept) == ("sliding_window" in layer and "full_attention_layers" not in layer)
    assert all(cache.pages == 4 * cache.slots < cache.slots * cache.capacity // 32 for cache in kept)


def test_sliding_window_long_prompt_takes_several_static_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the positions of those before, though all are of one chunk of the prompt."""
    asked, target = [(prompts(1, seed=5, longest=9)[0] * 150)[:145]], fast_target()
    drafter = build("eagle3", target, 0.5, layer=WINDOW)

    def decoded(every: int | None) -> list[tuple[list[int], int, list[int]]]:
        controls = Controls(read_every=every)
        decoder = Decoder(target, drafter, *SETTINGS, prefill_chunk=200, controls=controls)
        return [(r.tokens, r.verifications, r.accepted) for r in decoder.run(asked, 1).results]

    whole = decoded(None)
    monkeypatch.setattr(cached_layers, "AT_ONCE", 70)
    assert decoded(2) == whole and len(whole[0][0]) == 30


@pytest.mark.sampled(case=("eagle3", "peagle", "dflash"))
@pytest.mark.parametrize("case", CHANGED)
def test_sliding_window_ignores_text_before_window(case: str) -> None:
    """A change of the first state reaches predictions as far as the windows of all layers do, and not beyond."""
    name, options = CASES[case]
    target, text = fast_target(), torch.tensor([prompts(1, seed=8, longest=30)[0][:20] + [5, 9, 2, 8] * 5])
    ones = torch.ones_like(text, dtype=torch.bool)
    batch = TrainBatch(text, torch.arange(text.shape[1])[None], torch.zeros_like(text), ones)
    far = {True: 0, False: 0}
    for windowed in far:
        own = options if windowed else {k: v for k, v in options.items() if k != "layer"}
        drafter = build(name, target, 0.5, **own)
        layers = SHAPES.get(name, {}).get("layers", 1)
        filled = Online(target, drafter.taps).fill(batch)
        changed = replace(filled, hidden={k: x.clone() for k, x in filled.hidden.items()})
        for state_BTH in changed.hidden.values():
            state_BTH[:, 0] += 1.0
        with torch.no_grad():
            pairs = zip(drafter.predict(filled), drafter.predict(changed), strict=True)
            for one, other in pairs:
                moved_M = (one.hidden_MH - other.hidden_MH).abs().amax(-1) > 0
                far[windowed] = max(far[windowed], *(one.source_M[moved_M]).tolist())
    assert far[True] <= 9 * layers < far[False]


def test_sliding_window_invalid_options_are_refused(subtests: pytest.Subtests) -> None:
    target, cut = fast_target(), "drafter.layer.sliding_window is"
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("dflash", {"sliding_window": 5}, f"{cut} 5; 4 drafts or training steps and the token before"),
        ("dflash", MIXED | {"full_attention_layers": [2]}, "full_attention_layers is [2]; the drafter has layers 0"),
        ("dflash", {"full_attention_layers": [0]}, "without drafter.layer.sliding_window"),
        ("eagle3", {"sliding_window": -1}, f"{cut} -1; set it to 1 or more, or null"),
        ("peagle", SINKS, "drafter.layer.attention_sinks is true, which this family is not trained with; set it to false"),
    ]
    for name, layer, says in cases:
        with subtests.test(name=name, layer=layer), pytest.raises(UserError, match=re.escape(says)):
            build(name, target, layer=layer)


def test_sliding_window_shorter_than_training_steps_is_refused(subtests: pytest.Subtests) -> None:
    """A step more would see positions of its own index that its window leaves out."""
    target = fast_target()
    for name in ("eagle", "eagle3", "mtp"):
        with subtests.test(name=name):
            with pytest.raises(UserError, match=r"sliding_window is 8; 7 drafts or training steps and .* set it above 8"):
                build(name, target, layer={"sliding_window": 8}, steps=7)
            assert build(name, target, layer={"sliding_window": 9}, steps=7).layer.self_attn.shape.window == 9
