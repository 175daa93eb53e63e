"""What of a draft is verified: on made-up cost curves, and in the loop, where the output must not notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.draft_length import WHOLE_EVERY, Cut, best_depth
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import build, pair_law
from tests.helpers import prompts, tiny_model

TARGET = FastTarget(tiny_model())
SURE, DOUBTED = [0.9, 0.81, 0.73, 0.66], [0.9, 0.3, 0.05, 0.01]


def curve(costs: Sequence[float], rows: int = 1, draft: float = 0.2) -> Cut:
    """One that has seen every depth at these costs."""
    cut = Cut()
    for depth, seconds in enumerate(costs):
        for _ in range(2):
            cut.record(rows, len(costs) - 1 if depth else 0, depth, draft, seconds)
    return cut


def test_cut_depth_that_pays_is_kept(subtests: pytest.Subtests) -> None:
    """The last curve rises in one step: three drafts cost two steps, and give less a second than four."""
    curves = {(1, 1, 1, 1, 1): 4, (1, 1.1, 1.2, 1.3, 1.4): 4, (1, 1, 1, 2, 2): 2}
    for (costs, depth), drawn in product(curves.items(), (False, True)):
        with subtests.test(costs=costs, drawn=drawn):
            cut = curve(costs)
            cut.depth(1, SURE, drawn)
            assert cut.depth(1, SURE, drawn) == depth


def test_cut_depth_that_does_not_pay_is_reduced() -> None:
    for drawn in (False, True):
        cut = curve((1, 1.1, 1.6, 2.1, 2.6))
        for _ in range(40):
            cut.depth(1, DOUBTED, drawn)
        assert cut.depth(1, DOUBTED, drawn) == 1, drawn
        assert cut.depth(1, [0.01, 0.0, 0.0, 0.0], drawn) == 0, drawn
    assert curve((1, 1, 1, 1, 1)).depth(1, DOUBTED, False) == 4, "what costs nothing is verified"


def test_draft_cut_depth_is_decided_for_whole_batch() -> None:
    """One sure row of eight does not pay for the verification of all; eight do."""
    costs = (1, 1.4, 1.8, 2.2, 2.6)
    one = [0.9 + 7 * 0.02, 0.81, 0.73, 0.66]
    assert curve(costs, 8).depth(8, one, False) == 0
    assert curve(costs, 8).depth(8, [8 * r for r in SURE], False) == 4


def test_best_depth_finds_global_maximum_past_dip() -> None:
    """At every depth the outcome is the best rate of all, whatever lies between."""
    for seconds in ([1, 3, 3, 3, 1.5], [1, 1, 9, 9, 9], [1, 2, 4, 8, 16], [5, 5, 5, 5, 5]):
        tokens = [1.0]
        for reach in SURE:
            tokens.append(tokens[-1] + reach)
        rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
        assert best_depth(1, SURE, seconds.__getitem__) == max(range(5), key=lambda d: (rates[d], d))


def test_best_depth_sampled_draft_never_decides_its_verification() -> None:
    """The confidence below a draft knows it: it may move the cut, and never to or past that draft."""
    seconds = [1.0, 1.3, 1.6, 1.9, 2.2].__getitem__
    typical = [0.5, 0.5, 0.5, 0.5]
    for position in range(1, 4):
        depths = set()
        for sure in (0.01, 0.5, 0.99):
            total = [0.6**k for k in range(1, 5)]
            total[position:] = [total[position - 1] * sure * 0.9 ** (k - position) for k in range(position, 4)]
            depths.add(min(best_depth(1, total, seconds, typical), position))
        assert len(depths) == 1


def test_draft_cut_relearns_costs_periodically() -> None:
    cut = Cut()
    assert cut.depth(1, DOUBTED, False) == 4, "what nobody has measured is verified whole"
    cut.record(1, 0, 0, 0.0, 1.0)
    cut.record(1, 4, 4, 0.1, 4.0)
    depths = []
    for _ in range(3 * WHOLE_EVERY):
        depths.append(cut.depth(1, DOUBTED, False))
        cut.record(1, 4, depths[-1], 0.1, 1.0 + 0.75 * depths[-1])
    assert depths[0] < 4 and 2 <= depths.count(4) <= 4


class Eager(Cut):
    """Of made-up costs, the same in every run, at which every depth is sometimes best."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen = seen

    def depth(self, rows: int, total: Sequence[float], sampled: bool) -> int:
        self.seen.append(best_depth(rows, total, [1, 1.3, 1.55, 1.9, 2.4].__getitem__, [0.45] * 4 if sampled else None))
        return self.seen[-1]


def decoded(
    sampling: Sampling, policy: str, asked: list[list[int]], batch: int, tokens: int, family: str = "dspark"
) -> tuple[list[Any], list[int]]:
    """With a confident drafter whose confidences differ, every draft cut by them."""
    seen = list[int]()
    drafter: Any = build(family, TARGET, 5.0, **{} if family == "dspark" else {"confidence": "top1"})
    if family == "dspark":
        drafter.confidence_head.proj.weight.data.mul_(2.0)
    else:
        shift = 18.0 if policy == "lossless" else 16.0  # so that the probabilities differ
        lines = [[[8.0, shift]] * drafter.draft_length] * 2
        drafter.use_decode_settings({"calibration": lines})
    decoder = Decoder(TARGET, drafter, policy, sampling, max_new_tokens=tokens, controls=Controls(fallback=True))
    decoder.cut = Eager(seen)
    monkey: Any = decoder.fallback
    monkey.depth, monkey.record = lambda rows: 4, lambda *step: None
    return decoder.run(asked, batch).results, seen


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["dspark", "dflash", "domino"])
@pytest.mark.parametrize("policy, sampling", [("greedy", Sampling()), ("coupled", Sampling(0.9, seed=2))])
def test_draft_cut_decoded_tokens_equal_plain_decoding(policy: str, sampling: Sampling, family: str) -> None:
    """By a head that learnt confidences, and by the probability of the likeliest token."""
    asked = prompts(6, seed=3)
    plain = Decoder(TARGET, None, policy if sampling.greedy else "lossless", sampling, max_new_tokens=30).run(asked, 1)
    ours, seen = decoded(sampling, policy, asked, 2, 30, family)
    assert [r.tokens for r in ours] == [r.tokens for r in plain.results]
    assert len(set(seen)) >= 3 and 0 in seen


def first_token(typical: Sequence[float] | None) -> list[float]:
    """The exact law of the first of two drafts' position, where the confidence in the second knows the first."""
    p, q, after = [0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.95, 0.05, 0.5]
    law, left = [0.0] * 3, [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    for token in range(3):
        depth = best_depth(1, [0.5, 0.5 * after[token]], [1.0, 1.6, 1.7].__getitem__, typical)
        taken = min(1.0, p[token] / q[token]) if depth else 0.0
        law[token] += q[token] * taken
        rest = [x / sum(left) for x in left] if depth else p
        law = [x + q[token] * (1.0 - taken) * r for x, r in zip(law, rest, strict=True)]
    return law


def test_draft_cut_using_sampled_confidence_would_change_distribution() -> None:
    for typical in ([0.5, 0.1], [0.5, 0.9]):
        assert first_token(typical) == pytest.approx([0.5, 0.3, 0.2])
    assert first_token(None) != pytest.approx([0.5, 0.3, 0.2], abs=0.02)


@pytest.mark.sampled(family=["dspark"])
@pytest.mark.parametrize("family", ["dspark", "domino"])
def test_draft_cut_sampled_drafts_follow_target_distribution(family: str) -> None:
    """Chi-square of pairs of tokens against plain sampling's exact law, through the whole loop."""
    sampling, count = Sampling(1.0, top_k=4, seed=11), 800
    prompt = prompts(1, seed=4, longest=9)[0]
    expected = pair_law(TARGET, prompt, sampling)
    results, seen = decoded(sampling, "lossless", [prompt] * count, 16, 4, family)
    assert len(set(seen)) >= 3
    drawn = Counter(tuple(r.tokens[1:3]) for r in results)
    assert set(drawn) <= set(expected)
    cells = [(drawn[k], count * p) for k, p in expected.items() if count * p >= 5]
    rest = count - sum(e for _, e in cells)
    cells += [(count - sum(s for s, _ in cells), rest)] if rest > 5 else []
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    tail = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2))
    assert float(tail) > 1e-4, f"chi-square {statistic:.1f} over {len(cells)} cells"
