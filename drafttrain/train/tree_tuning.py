"""Tree shapes chosen on held-out sequences, and the expected acceptance with them."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.tree import arrivals, step_sums
from drafttrain.model.drafter import Drafter

FOLDS = 4  # cross-validation folds of the held-out sequences


def tuned_sums(drafter: Drafter, sequences: list[Tensor], nodes: int) -> Tensor:
    """[sequences, 2] accepted drafts and verifications of each sequence. A tunable drafter ends up tuned on all sequences.

    Each sequence is counted with a tree tuned on the other ones (cross-validation). With a tree tuned on the sequence itself,
    tau of a few sequences would be up to a tenth too high.
    """
    folds = min(FOLDS, len(sequences)) if drafter.proposal.tunable else 1
    sum_C2 = torch.zeros(len(sequences), 2, dtype=torch.float64)
    for fold in range(folds if folds > 1 else 0):
        drafter.proposal.tune([rank_MK for i, rank_MK in enumerate(sequences) if i % folds != fold], nodes)
        sum_C2[fold::folds] = step_sums([arrivals(rank_MK, drafter.proposal.paths) for rank_MK in sequences[fold::folds]])
    if drafter.proposal.tunable:
        drafter.proposal.tune(sequences, nodes)
    return sum_C2 if folds > 1 else step_sums([arrivals(rank_MK, drafter.proposal.paths) for rank_MK in sequences])
