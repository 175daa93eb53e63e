"""The greedy accept walk over a verified tree.

Shapes: B rows, N nodes (root included), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.core.tree import DraftTree
from drafttrain.ops import choice_accept, library


def greedy_accept(tree: DraftTree, logits_BNV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(path_BN, count_B, bonus_B): the path from the root on which every token is the target's most likely one.

    path_BN: the accepted nodes in order, then zeros. Among children with the same token the first counts, among equally likely
    tokens the lowest. bonus_B: the most likely token after the last accepted node.
    """
    if not (library.serves(logits_BNV) and logits_BNV.is_contiguous()):
        return reference(tree, logits_BNV)
    verdict = choice_accept.blank(tree)
    torch.ops.drafttrain.greedy_accept(logits_BNV, *choice_accept.nodes(tree), *verdict)
    return verdict


def reference(tree: DraftTree, logits_BNV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The plain-torch twin of `greedy_accept`."""
    return choice_accept.reference(tree, logits_BNV.argmax(-1))
