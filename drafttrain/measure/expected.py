"""Expected tau: the accepted length that teacher-forced agreement predicts for the measured decode settings.

Shapes: B sequences (one here), T positions, M samples, K draft depth, D depth of the proposal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.core.intervals import Interval, accepted_length, added_by, jackknife, tau_interval
from drafttrain.core.tree import Path, arrivals, step_sums, tuned_paths, visits
from drafttrain.drafters.common.calibration import expected_error
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Target
from drafttrain.objective.losses import Hits, teacher_forced

FLAGGED_GAP = 0.10  # relative difference of expected and measured tau above which a report flags it


def forced_batch(prompt: Sequence[int], output: Sequence[int], device: torch.device | str = "cpu") -> TrainBatch:
    """One sequence: the prompt, then the output. The output is supervised.

    Example: prompt `a b`, output `c d e`. The tokens are `a b c d e`, the mask is True at `c`, `d` and `e`. The first source
    is `b` and its root is `c`, as in decoding: the prefill gives the first root.
    """
    token_BT = torch.tensor([[*prompt, *output]], device=device)
    position_BT = torch.arange(token_BT.shape[1], device=device)[None]
    mask_BT = position_BT >= len(prompt)
    return TrainBatch(token_BT, position_BT, torch.zeros_like(token_BT), mask_BT)


@torch.no_grad()
def forced_hits(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    device: torch.device | str,
) -> list[Hits]:
    """Teacher-forced hits on every prompt's output, in order. An output too short for a sample gives empty hits."""
    online = Online(target, drafter.taps)
    width = max(10, 1 + max((max(path) for path in drafter.proposal.paths), default=0))
    pairs = zip(prompts, outputs, strict=True)
    return [teacher_forced(drafter, target, online.fill(forced_batch(p, o, device)), width) for p, o in pairs]


@dataclass(frozen=True, slots=True)
class ExpectedTau:
    """An expected tau and its distance from the measured tau."""

    tau: float  # expected
    interval: Interval | None  # 95 %, over sequences; None for fewer than two
    gap: float | None  # expected / measured - 1
    gap_interval: Interval | None  # 95 %, of the gap, paired by sequence

    @property
    def flagged(self) -> bool:
        """Whether the gap is above `FLAGGED_GAP` and its interval excludes 0."""
        if self.gap is None or self.gap_interval is None:
            return False
        low, high = self.gap_interval
        return abs(self.gap) > FLAGGED_GAP and not low <= 0.0 <= high


def predicted(
    hits: Sequence[Hits], paths: Sequence[Path], sampled: bool, dialogues: Sequence[Hashable], measured_C2: Tensor
) -> ExpectedTau | None:
    """Expected tau of these samples, compared with the measured tau; None without samples.

    hits: one per case. dialogues: names the dialogue of each case, so that its turns count as one text. measured_C2: accepted
    drafts and verifications of each case. The gap covers all cases. Its interval pairs each text's prediction with its
    measurement, because a text that is hard to draft lowers both.
    """
    tau = expected_tau(hits, paths, sampled)
    if tau is None:
        return None
    forced_C2 = step_sums([_arrivals(h, paths, sampled) for h in hits])
    joint_C4 = added_by(dialogues, torch.cat([forced_C2, measured_C2.double()], 1))
    paired_C4 = joint_C4[(joint_C4[:, 1] > 0) & (joint_C4[:, 3] > 0)]

    def apart(sum_4: Tensor) -> Tensor:
        return accepted_length(sum_4[..., :2]) / accepted_length(sum_4[..., 2:]) - 1.0

    measured_F = joint_C4[:, 2:].sum(0)
    return ExpectedTau(
        tau=tau,
        interval=tau_interval(joint_C4[:, :2]),
        gap=gap(tau, float(accepted_length(measured_F)) if measured_F[1] else None),
        gap_interval=jackknife(apart, paired_C4),
    )


def expected_tau(hits: Sequence[Hits], paths: Sequence[Path], sampled: bool, visited: bool = True) -> float | None:
    """Mean accepted length that these samples predict, including the bonus token; None without samples.

    hits: one per prompt, its samples in text order.
    sampled: False for a deterministic proposal: 1 + the sum over nodes of P(the node's whole path is hit). True for a chain
    sampled from the drafter's distribution q: 1 + the sum over depths of P(all accepted so far), with `sum min(p, q)` for each.
    visited: True: P is over the positions at which decode steps start. False: over all positions, as in training logs. The two
    differ because decoding skips over easy text. Example: half of a text is accepted 5 tokens at a time, half 1 at a time. All
    positions average 3.0, but tau is 1.67.
    """
    rows = [h for h in hits if len(h.rank_MK)]
    if not rows:
        return None
    arrivals_per_text = [_arrivals(h, paths, sampled) for h in rows]
    arrive_MD = torch.cat(arrivals_per_text)
    weight_M = torch.cat([visits(a) for a in arrivals_per_text]) if visited else torch.ones_like(arrive_MD[:, 0])
    return 1.0 + float((weight_M[:, None] * arrive_MD).sum() / weight_M.sum())


def expected_interval(hits: Sequence[Hits], paths: Sequence[Path], sampled: bool) -> Interval | None:
    """The interval of `expected_tau` over the prompts; None for fewer than two with samples."""
    return tau_interval(step_sums([_arrivals(h, paths, sampled) for h in hits if len(h.rank_MK)]))


def counted_paths(drafter: Drafter, hits: Sequence[Hits] | None, depth: int | None) -> list[Path]:
    """The proposal's paths, down to `depth`, whose hits count.

    For a tree that grows by confidence: the paths of the best static tree with as many nodes, on these outputs. The static tree
    found in training is the best one for the training data.
    """
    proposal = drafter.proposal
    ranks = [h.rank_MK[:, :depth] for h in hits or () if len(h.rank_MK)]
    if proposal.grown and ranks:
        return tuned_paths(ranks, proposal.max_nodes - 1) or proposal.paths[:1]
    return [path for path in drafter.proposal.paths if depth is None or len(path) <= depth]


def rank_shares(hits: Sequence[Hits], paths: Sequence[Path], width: int = 10) -> list[list[float]] | None:
    """[depth][rank]: how often the true token is the drafter's choice of this rank; None without samples.

    A share of the positions at which decode steps start and every token above was among the drafter's first `width` choices.
    """
    rows = [h for h in hits if len(h.rank_MK)]
    if not rows or not paths:
        return None
    rank_MK = torch.cat([h.rank_MK for h in rows])
    alive_M = torch.cat([visits(arrivals(h.rank_MK, paths)) for h in rows])
    table = []
    for rank_M in rank_MK.unbind(-1):
        if not float(alive_M.sum()):
            break
        share_R = torch.zeros(width + 1, dtype=torch.float64).index_add_(0, rank_M.clamp_max(width).long(), alive_M)
        table.append((share_R / share_R.sum())[:width].tolist())
        alive_M = torch.where(rank_M < width, alive_M, 0.0)
    return table


def confidence_error(drafter: Drafter, hits: Sequence[Hits], sampled: bool) -> float | None:
    """The expected calibration error of the drafter's confidence in its drafts; None without a confidence or a sample.

    sampled: as for `expected_tau`. It decides what counts as accepted.
    """
    rows = [
        (h.confidence_MK, h.acceptance_MK if sampled else (h.rank_MK == 0).float()) for h in hits if h.confidence_MK is not None
    ]
    if not rows:
        return None
    logit_MK, accepted_MK = (torch.cat(column) for column in zip(*rows, strict=True))
    calibration = drafter.calibration
    expected_MK = logit_MK.sigmoid() if calibration is None else calibration.acceptance_probability(logit_MK, sampled)
    return expected_error(expected_MK, accepted_MK)


def _arrivals(hits: Hits, paths: Sequence[Path], sampled: bool) -> Tensor:
    """[M, D] float64: P(the node at depth d + 1 is accepted) at each sample; 0 or 1 where the proposal is deterministic."""
    if not sampled:
        return arrivals(hits.rank_MK, paths)
    return hits.acceptance_MK[:, : max(map(len, paths))].double().cumprod(-1)


def gap(expected: float | None, measured: float | None) -> float | None:
    """The prediction's relative error: expected / measured - 1."""
    return None if expected is None or not measured else expected / measured - 1.0
