"""Sampled sequences that part: next to a boundary rounding explains it, elsewhere it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import draws, ladder
from benchmarks.gpu.draws import Parting, Watch
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.results import RedError
from drafttrain.core.sampling import Lane, Sampling, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.acceptance import THRESHOLD, policy_for

MACHINE = Machine(torch.device("cpu"), True, "rehearsal", {"torch": torch.__version__})
PROMPTS = [[5, 6, 7], [8, 9]]
OURS, THEIRS = [[1, 2, 3], [4, 0, 2]], [[1, 2, 3], [4, 1, 3]]  # the second one parts at its second token
REQUEST, AT = 1, 3  # its number, and the position of that token
WATCHED = [("medusa-static", "lossless"), ("redrafter", "typical"), ("draft_model", "lossless")]
CASES = {"near": 5e-5, "far": 1e-2}


def number(sampling: Sampling, position: int, lane: Lane, draw: int = 0) -> float:
    return float(uniform(sampling.rows(torch.tensor([REQUEST])), torch.tensor([position]), lane, draw)[0])


def laws(*shares: float) -> torch.Tensor:
    """Logits, at temperature `t`, of a distribution that begins with these shares; the rest is the last token's."""
    return torch.tensor([*shares, 1.0 - sum(shares)], dtype=torch.float64).clamp_min(1e-12).log()


def same(rung: ladder.Rung, patch: pytest.MonkeyPatch, watch: Watch | None = None) -> ladder.Near:
    patch.setattr(ladder, "target_of", lambda *_: type("Target", (), {"device": torch.device("cpu")})())
    patch.setattr(ladder, "asked", lambda *_: (PROMPTS, 3))
    return ladder.same("captured and eager", rung, OURS, THEIRS, MACHINE, watch)


@pytest.mark.sampled(policy=["coupled"])  # without a watch both are drawn again alike
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["coupled", "lossless"])
def test_ladder_plain_decoding_difference_is_explained_only_near_boundary(
    policy: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = ladder.Rung("llama-tiny", "float32", ladder.PLAIN, policy)
    sampling = rung.sampling
    edge = number(sampling, AT, Lane.TARGET) + CASES[case]
    monkeypatch.setattr(draws, "own_logits", lambda target, token_1T: laws(edge, 0.5 * (1 - edge)) * sampling.temperature)
    if case == "near":
        assert same(rung, monkeypatch) == ladder.Near(draws=1)
    else:
        with pytest.raises(RedError, match="1 of 2 texts differ"):
            same(rung, monkeypatch)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["lossless", "threshold"])
def test_ladder_acceptance_difference_is_explained_only_near_boundary(
    policy: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of one draft at the position of the token that differs, accepted by a hair or by much."""
    rung, watch = ladder.Rung("llama-tiny", "float32", "medusa", policy), Watch()
    sampling = rung.sampling.rows(torch.tensor([REQUEST]))
    least = number(rung.sampling, AT, Lane.ACCEPT, 1) if policy == "lossless" else THRESHOLD
    logits_V = laws(least + CASES[case], 0.5 * (1 - least)) * sampling.temperature
    last_V = laws(0.5) * sampling.temperature
    logits_BNV = torch.stack([logits_V, torch.cat([last_V, torch.tensor([-40.0])])]).float()[None]
    tree, position_BN = DraftTree.chain(torch.tensor([[2, 0]])), torch.tensor([[AT - 1, AT]])
    verdict = watch.over(policy_for(policy, sampling)).accept(tree, tree.ancestor_BNN, logits_BNV, position_BN, sampling)
    assert int(verdict.count_B[0]) == 2
    margin = watch.margin[REQUEST, AT]
    assert margin == pytest.approx(CASES[case], rel=0.02), "the one decision that made the token"
    if case == "near":
        assert same(rung, monkeypatch, watch) == ladder.Near(draws=1)
    else:
        with pytest.raises(RedError, match="1 of 2 texts differ"):
            same(rung, monkeypatch, watch)


def test_watch_text_that_only_ends_earlier_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Parting(0, [1], [1, 2], [1, 2, 3])
    assert short.at is None and Watch({(0, 3): 0.0}).of(short) == float("inf")
    assert Watch().of(Parting(0, [1], [1, 2], [1, 3])) == float("inf"), "what was not watched explains nothing"


@pytest.mark.parametrize(("drafter", "policy"), WATCHED)
def test_watch_records_margin_of_every_token_without_changing_texts(drafter: str, policy: str) -> None:
    rung, watch = ladder.Rung("llama-tiny", "float32", drafter, policy), Watch()
    target = ladder.target_of(rung.model, rung.dtype, MACHINE)
    built = ladder.variants()[drafter](target)
    prompts, new = ladder.asked(target, MACHINE)
    plain = ladder.texts(ladder.decoded(rung, built, False, MACHINE))
    found: Any = ladder.texts(ladder.decoded(rung, built, False, MACHINE, watch))
    assert found == plain, "watching changes nothing"
    wanted = {(i, len(prompt) + t) for i, prompt in enumerate(prompts) for t in range(1, new)}
    assert wanted <= watch.margin.keys() and all(margin >= 0.0 for margin in watch.margin.values())
    assert min(watch.margin.values()) < 0.2
