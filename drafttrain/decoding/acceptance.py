"""AcceptedPath policies: which path of a verified tree becomes text, and which token follows it.

Shapes: B rows, N nodes (root included), A accepted nodes (root included), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.ops.accept import choice_accept, greedy_accept, likely_accept, lossless_accept
from drafttrain.ops.sampling import sample


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The accepted path of each tree. Policies make it without a sync with the host."""

    path_BA: Tensor  # accepted nodes, root first, padded with 0 past count_B; A is N until `trimmed`
    count_B: Tensor  # accepted nodes, root included
    bonus_B: Tensor  # the target's token after the last accepted node

    @property
    def last_B(self) -> Tensor:
        """The last accepted node."""
        return self.path_BA.gather(1, self.count_B[:, None] - 1)[:, 0]

    def trimmed(self) -> AcceptedPath:
        """With no more columns than the longest path has nodes. Syncs with the host."""
        return AcceptedPath(self.path_BA[:, : max(self.count_B.tolist())], self.count_B, self.bonus_B)


@dataclass(frozen=True, slots=True)
class Policy:
    """Which drafts are accepted, and what that promises of the output."""

    name: str
    lossless: bool  # the output follows the target's own distribution; greedy: it is plain greedy decoding's, token for token
    accept: Callable[[DraftTree, Tensor, Tensor, Tensor, Sampling], AcceptedPath]
    keyed: bool = False  # the target samples with plain sampling's noise at each position: the output is plain sampling's
    at_zero: bool = True  # may be used at temperature 0
    above_zero: bool = True  # may be used at temperatures above 0
    parameter: str | None = None  # the key of `decode` that `accept` takes too; the field has its limit

    def repeats_plain(self, sampling: Sampling) -> bool:
        """Whether the output equals plain decoding's token for token."""
        return self.lossless and (sampling.greedy or self.keyed)

    def agreement_is_acceptance(self, sampled: bool) -> bool:
        """Whether sum min(p, q) is the probability of acceptance. `sampled`: drafts are sampled from q.

        Under the keyed policy, samples of p and q with the same noise agree less often than that.
        """
        return self.lossless and not (self.keyed and sampled)


def greedy(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> AcceptedPath:
    """The deepest node whose every token is its parent's argmax."""
    return AcceptedPath(*greedy_accept(tree, logits_BNV))


def coupled(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> AcceptedPath:
    """The target chooses at every node with the noise of the next position, as plain sampling would; drafts that are the
    choice are accepted (after arXiv 2408.07978). The output is plain sampling's, token for token.
    """
    B, N = position_BN.shape
    choice_BN = sample(logits_BNV.flatten(0, 1), sampling, (position_BN + 1).flatten(), Lane.TARGET).view(B, N)
    return AcceptedPath(*choice_accept(tree, choice_BN))


def lossless(
    tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling
) -> AcceptedPath:
    """Speculative sampling over a tree. The output follows the target's processed distribution (`lossless_accept`)."""
    return AcceptedPath(*lossless_accept(tree, logits_BNV, position_BN, sampling))


EPSILON, DELTA = 0.09, 0.3  # of the typical policy
THRESHOLD = 0.3  # of the threshold policy, unless set


def typical(tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling) -> AcceptedPath:
    """Typical acceptance (arXiv 2401.10774, section 2.3.2): p(x) > min(eps, delta * exp(-H(p))). Not lossless."""
    return AcceptedPath(*likely_accept(tree, logits_BNV, position_BN, sampling, EPSILON, DELTA))


def threshold(
    tree: DraftTree,
    ancestor_BNN: Tensor,
    logits_BNV: Tensor,
    position_BN: Tensor,
    sampling: Sampling,
    threshold: float = THRESHOLD,
) -> AcceptedPath:
    """A draft is accepted where the target gives it more than `threshold`. Not lossless."""
    return AcceptedPath(*likely_accept(tree, logits_BNV, position_BN, sampling, threshold, math.inf))


POLICIES = {
    p.name: p
    for p in (
        Policy("greedy", True, greedy, above_zero=False),
        Policy("lossless", True, lossless),
        Policy("coupled", True, coupled, keyed=True),
        Policy("typical", False, typical, at_zero=False),
        Policy("threshold", False, threshold, at_zero=False, parameter="threshold"),
    )
}


def policy_for(name: str, sampling: Sampling, parameter: float | None = None) -> Policy:
    """The named policy; raises ValueError for an unknown name or one that contradicts the temperature.

    parameter: of policies that have one; None: its default.
    """
    if name not in POLICIES:
        raise ValueError(f"decode.policy is {name!r}; choose one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if not sampling.greedy and not policy.above_zero:
        raise ValueError(
            f"decode.policy={name} at temperature {sampling.temperature}; set decode.policy=lossless, or temperature 0"
        )
    if sampling.greedy and not policy.at_zero:
        raise ValueError(f"decode.policy={name} at temperature 0; set decode.temperature above 0, or decode.policy=greedy")
    if policy.parameter is not None and parameter is not None:
        return replace(policy, accept=partial(policy.accept, **{policy.parameter: parameter}))
    return policy
