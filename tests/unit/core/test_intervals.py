"""Intervals of pooled figures: they hold the truth as often as they say, and decide what is flagged.

Shapes: C texts, F figures that are added up, M samples, K draft depth.
"""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor

from drafttrain.commands.measure import console_table
from drafttrain.core.intervals import accepted_length, added_by, jackknife, t_quantile, tau_interval, with_interval
from drafttrain.core.tree import expected_nodes, tuned_paths
from drafttrain.drafters.eagle3 import Eagle3, Eagle3Options
from drafttrain.drafters.medusa import Medusa, MedusaOptions
from drafttrain.measure import cells
from drafttrain.measure.expected import ExpectedTau, counted_paths, expected_tau, predicted
from drafttrain.objective.losses import Hits
from drafttrain.train.trainer import tuned_sums
from tests.helpers import tiny_target
from tests.reports import entry_of

CHAIN = [(0,), (0, 0), (0, 0, 0)]


def test_t_quantile_equals_scipy() -> None:
    special = pytest.importorskip("scipy.special", reason="scipy is what it is compared with")
    for degrees in (1, 7, 4096):
        assert t_quantile(degrees) == pytest.approx(float(special.stdtrit(degrees, 0.975)), rel=1e-9), degrees


def texts(count: int, generator: torch.Generator, positions: int = 60, spread: float = 4.0) -> list[Hits]:
    """Each text with a share of its own of positions whose draft is right: Beta around 0.6, wider for a lower spread."""
    found = []
    for _ in range(count):
        a, b = (torch._standard_gamma(torch.tensor(share * spread), generator=generator) for share in (0.6, 0.4))
        token_T = torch.rand(positions + 2, generator=generator) > a / (a + b)
        rank_MK = torch.stack([token_T[k : k + positions] for k in range(3)], 1).long()
        found.append(Hits(rank_MK, torch.zeros(positions, 3), [positions]))
    return found


def counts(hits: list[Hits], scale: float = 1.0) -> Tensor:
    """[C, 2] drafts accepted and verifications, as decoding would count them where it agrees with teacher forcing; scale: of
    the drafts that it accepts."""
    rows = []
    for h in hits:
        at, accepted, steps = 0, 0, 0
        drafts_M = (h.rank_MK == 0).long().cumprod(1).sum(1).tolist()
        while at < len(drafts_M):
            at, accepted, steps = at + drafts_M[at] + 1, accepted + drafts_M[at], steps + 1
        rows.append([scale * accepted, steps])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture(scope="module")
def pool() -> Tensor:
    """[C, 2] The counts of so many texts that draws of a few are independent."""
    return counts(texts(1000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("count", [8, 40])
def test_tau_interval_covers_true_tau_at_nominal_rate(count: int, pool: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = float(accepted_length(pool.sum(0)))
    drawn = [pool[torch.randint(len(pool), (count,), generator=generator)] for _ in range(600)]
    found = [tau_interval(sum_C2) for sum_C2 in drawn]
    covered = sum(low <= truth <= high for low, high in filter(None, found)) / len(found)
    assert 0.90 <= covered <= 0.98, covered


def test_tau_interval_of_one_text_is_none_and_dialogue_turns_are_one_text() -> None:
    generator = torch.Generator().manual_seed(1)
    hits = texts(3, generator)
    assert tau_interval(counts(hits[:1])) is None and jackknife(accepted_length, counts(hits[:1])) is None
    alone = predicted(hits[:1], CHAIN, False, ["a"], counts(hits[:1], 2.0))
    assert alone is not None and (alone.interval, alone.gap_interval, alone.flagged) == (None, None, False)
    joined = added_by(["a", "b", "a"], counts(hits))
    assert torch.equal(joined, torch.stack([counts(hits)[[0, 2]].sum(0), counts(hits)[1]]))


def test_tau_interval_ignores_texts_without_decode_steps() -> None:
    sum_C2 = torch.tensor([[3.0, 5.0], [0.0, 0.0], [4.0, 5.0]])
    assert tau_interval(sum_C2) == tau_interval(sum_C2[[0, 2]])
    assert tau_interval(torch.tensor([[0.0, 5.0], [0.0, 7.0]])) == (1.0, 1.0)


def of(measured: float, count: int, spread: float) -> ExpectedTau:
    """The same texts, measured on others where they say little, and with so many of the drafts accepted."""
    generator = torch.Generator().manual_seed(4)
    hits, other = texts(count, generator, spread=spread), texts(count, generator, spread=spread)
    found = predicted(hits, CHAIN, False, range(count), counts(other, measured))
    assert found is not None and found.tau == expected_tau(hits, CHAIN, False)
    return found


def test_prediction_gap_is_flagged_only_with_narrow_interval() -> None:
    wide, narrow = of(0.8, 5, spread=1.5), of(0.6, 200, spread=20.0)
    assert wide.gap is not None and narrow.gap is not None and min(abs(wide.gap), abs(narrow.gap)) > 0.10
    assert not wide.flagged and narrow.flagged
    assert not of(0.95, 200, spread=20.0).flagged, "sure, but below 10 %"


def test_prediction_gap_is_paired_by_text() -> None:
    """Texts that differ widely leave tau uncertain; a drafter that decodes worse on each of them is flagged all the same."""
    hits = texts(12, torch.Generator().manual_seed(5), spread=1.5)
    same = predicted(hits, CHAIN, False, range(12), counts(hits))
    assert same is not None and same.gap == pytest.approx(0.0, abs=0.03) and not same.flagged
    worse = predicted(hits, CHAIN, False, range(12), counts(hits, 0.6))
    assert worse is not None and worse.interval is not None and worse.flagged
    assert worse.tau - worse.interval[0] > 0.2, "tau itself is not known well"


def test_with_interval_formats_value_and_bounds() -> None:
    assert with_interval(1.52, (1.38, 1.66)) == "1.52 (1.38 to 1.66)" and with_interval(1.52, None) == "1.52"
    assert cells.expected({"expected_tau": 1.5, "expected_tau_interval": [1.25, 1.75]}) == "1.50 (1.25 to 1.75)"
    assert cells.expected({"expected_tau": 1.5}) == "1.50" and cells.expected({"expected_tau": None}) == "-"


def test_counted_paths_dynamic_tree_is_tuned_on_measured_texts() -> None:
    """The paths that training searched are for the training data: text in which another token is right says nothing."""
    drafter = Eagle3(Eagle3Options(tree="dynamic", draft_length=3, width=4, nodes=6), tiny_target())
    drafter.proposal.tune([torch.full((20, 3), 9)], 6)
    assert expected_tau(texts(4, torch.Generator().manual_seed(0)), drafter.proposal.paths, False) == 1.0
    hits = texts(4, torch.Generator().manual_seed(0))
    paths = counted_paths(drafter, hits, None)
    assert (expected_tau(hits, paths, False) or 0.0) >= (expected_tau(hits, CHAIN, False) or 9.0) > 1.5
    assert len(paths) <= 6
    assert max(map(len, counted_paths(drafter, hits, 2))) == 2
    chain = Eagle3(Eagle3Options(draft_length=3), tiny_target())
    assert counted_paths(chain, hits, 2) == CHAIN[:2] and counted_paths(chain, None, None) == CHAIN


def test_tuned_sums_scores_tuned_tree_on_held_out_texts() -> None:
    """Ranks without any pattern: no tree is better than another, and what is searched only seems so on its own texts."""
    generator = torch.Generator().manual_seed(0)
    ranks = [torch.randint(0, 10, (40, 2), generator=generator) for _ in range(2 * 8)]
    drafter = Medusa(MedusaOptions(heads=2), tiny_target())
    sum_C2 = tuned_sums(drafter, ranks[:8], 5)
    chosen = drafter.proposal.paths
    own, others = (1.0 + expected_nodes(part, chosen) for part in (ranks[:8], ranks[8:]))
    assert float(accepted_length(sum_C2.sum(0))) == pytest.approx(others, abs=0.05) and own > others + 0.05
    assert chosen == tuned_paths(ranks[:8], 5)


def test_console_table_shows_intervals_within_80_columns() -> None:
    entry = entry_of(12400, 2.2, 1.25) | {"expected_tau": 2.22, "expected_tau_interval": [2.0612, 12.3849], "best": True}
    entry |= {"alpha_by_position": [[0.74, 0.7, 0.8]] * 5, "prompts": 56, "exact_matches": 56}
    report = {
        "drafter": {"family": "medusa"},
        "measure": {"prompts": "embedded"},
        "checkpoints": [entry],
        "best": entry["name"],
    }
    console = Console(width=80, file=io.StringIO())
    console.print(console_table(report))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said and "2.06 to" in said and " 12.38 " in said and "56/56" in said
