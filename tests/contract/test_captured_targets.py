"""Captured decode steps of every architecture: the tokens of eager steps, and a reason where no graph can hold them."""

from __future__ import annotations

from typing import Any

import pytest

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import mtp_native
from drafttrain.ops import library
from drafttrain.targets.hf import HFTarget
from tests.architectures import ARCHITECTURES, WINDOW
from tests.cases import with_grid
from tests.contract.test_targets import EXACT, block_by_block
from tests.helpers import prompts
from tests.recorder import Graph, cpu_graphs
from tests.targets import refusal
from tests.tiny import build

__all__ = ["cpu_graphs"]
CAPTURED = [name for name in EXACT if ARCHITECTURES[name].captured]
TRIED = ("GPT-NeoX", "Bamba", "Falcon")  # of keys and values alone, with recurrent layers, and one that no graph can hold
FAMILIES = (None, "medusa", "draft_model", "eagle3", "mtp_native")
FEW = [("GPT-NeoX", None), ("Bamba", "medusa")]
SLOW = [  # of each kind of attention or recurrence; all: `test_target_greedy_output_equals_transformers_generate`
    ("Llama", "mtp_native"),
    ("Gemma-4 (text)", "eagle3"),
    ("DeepSeek-V3", "draft_model"),
    ("gpt-oss", "medusa"),
    ("Llama-4 (text)", None),
    ("Qwen3-Next", "eagle3"),
    ("MPT", "draft_model"),
]
CHAIN: dict[str | None, dict[str, Any]] = {"medusa": {"paths": [[0], [0, 0], [0, 0, 0]]}, "mtp_native": {"tree": "chain"}}


@pytest.mark.sampled(name=TRIED)
@pytest.mark.parametrize("name", EXACT)
def test_target_capture_refusal_matches_architecture_table(name: str) -> None:
    """As the table of docs/targets.md says; on a GPU the same is tried when a target is loaded."""
    reason = refusal(block_by_block(name))
    assert (reason is None) == ARCHITECTURES[name].captured, reason
    assert reason is None or reason.startswith("modeling_")


@pytest.mark.parametrize(("name", "family"), with_grid(FEW, CAPTURED, FAMILIES, slow=SLOW))
def test_decoder_captured_steps_equal_eager_steps(
    name: str, family: str | None, cpu_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and texts are longer than windows; three rows in slots for two, so that rows come, go and are filled up."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    target, asked = block_by_block(name), prompts(3, vocab=60, seed=3, longest=2 * WINDOW)
    asked[0] = (asked[0] * 20)[: 3 * WINDOW]
    drafter = None if family is None else drafter_of(family, target)
    found = []
    for captures in (False, True):
        decoder = Decoder(
            target, drafter, "greedy", Sampling(), frozenset({7}), 12, 6, Controls(read_every=1 if captures else None)
        )
        decoder.captures = captures
        results = decoder.run(asked, 2).results
        found.append([(r.tokens, r.verifications, r.accepted) for r in results])
    assert found[0] == found[1] and Graph.made >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"tree": "dynamic"},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({"tree": "chain"}, {"tree": "chain", "modules": 2})),
    ],
    ids=str,
)
def test_mtp_native_captured_steps_equal_eager_steps(
    options: dict[str, Any], cpu_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "has_product", lambda: False)
    target, asked, found = block_by_block("Llama"), prompts(3, vocab=60, seed=3), []
    drafter = build("mtp_native", target, 0.3, **options, **({"draft_length": 2} if "modules" in options else {}))
    for captures in (False, True):
        controls = Controls(read_every=1 if captures else None)
        decoder = Decoder(target, drafter, "coupled", Sampling(0.8, seed=4), frozenset({7}), 16, 6, controls)
        decoder.captures = captures
        found.append([(r.tokens, r.verifications, r.accepted) for r in decoder.run(asked, 2).results])
    assert found[0] == found[1] and Graph.made >= 1


def test_mtp_native_expert_modules_are_probed_once_for_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, tried = build("mtp_native", block_by_block("Mixtral"), draft_length=2, tree="chain", modules=2), []
    assert drafter.captured, "without a GPU nothing is tried"
    monkeypatch.setattr(mtp_native, "why_waiting", lambda work: tried.append(work()) or "it waits")
    assert drafter._why_waiting() == "it waits" and len(tried) == 1


def drafter_of(family: str, target: HFTarget) -> Any:
    """A shaken one. Skips families that do not take the target."""
    from drafttrain.core.errors import UserError

    try:
        return build(family, target, 0.3, **({} if target.trees else CHAIN.get(family, {})))
    except UserError as error:
        pytest.skip(f"not for this target: {error}")
