"""Two sequences of a target differ from one token on: does rounding, as measured, explain it?

Greedy ones in a narrow format: `measure.exactness` allows only for the rounding of the last logits, which suits trained models.
In a random model, rounding in the earlier blocks moves the logits several times further. So the bound is measured:
transformers' own error at that position, compared with the same weights in float32. Our error may not be much larger.

Sampled ones in float32: captured and eager steps add in different orders, so their distributions differ in the last digits. A
uniform number next to a boundary may then choose another token. Where no draft is accepted by chance (plain decoding and policy
`coupled`), the number and the distribution are computed again. The other policies' decisions are watched in the eager steps.

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, distribution, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.acceptance import DELTA, EPSILON, THRESHOLD, AcceptedPath, Policy
from drafttrain.measure.exactness import first_difference
from drafttrain.model.target import Taps
from drafttrain.targets.hf import HFTarget

WORSE = 2.0  # our error may be this many times transformers'
NEAR = 1e-4  # distance of a number from its boundary, in cumulative probability
LIKELY = {"typical": (EPSILON, DELTA), "threshold": (THRESHOLD, math.inf)}


@lru_cache(maxsize=1)
def exact_copy(model: Any) -> Any:
    return copy.deepcopy(model).float()


@torch.no_grad()
def explains(target: HFTarget, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether both tokens are equally likely within the error, and our logits are no worse than transformers'."""
    at = first_difference(ours, theirs)
    if at is None or at >= min(len(ours), len(theirs)):
        return at is None
    token_1T = torch.tensor([[*prompt, *ours[:at]]], device=target.device)
    true_V, their_V = (m(token_1T).logits[0, -1].double() for m in (exact_copy(target.model), target.model))
    our_error, their_error = own_logits(target, token_1T) - true_V, their_V - true_V
    gap = true_V.max() - true_V[[ours[at], theirs[at]]].min()
    return bool(gap <= 2 * their_error.abs().max()) and bool(our_error.norm() <= WORSE * their_error.norm())


def own_logits(target: HFTarget, token_1T: Tensor) -> Tensor:
    """[V] after the last token, by the target's own forward, with the last positions decoded from the cache."""
    length = token_1T.shape[1]
    kv, position_1T = target.new_cache(1, length + 1), torch.arange(length, device=token_1T.device)[None]
    none_10, last_11 = position_1T[:, :0], torch.zeros_like(position_1T[:, :1])
    if length > 1:
        target(token_1T[:, :-1], kv, None, position_1T[:, :-1], Taps(), none_10)
        kv.keep(position_1T[:, :-1], torch.full((1,), length - 1, device=token_1T.device))
    out = target(token_1T[:, -1:], kv, None, position_1T[:, -1:], Taps(), last_11)
    assert out.logits_BRV is not None
    return out.logits_BRV[0, 0].double()


@dataclass(frozen=True, slots=True)
class Parting:
    """One sequence in two runs that differ."""

    request: int  # its number, the key of its noise
    prompt: Sequence[int]
    ours: Sequence[int]
    theirs: Sequence[int]

    @property
    def at(self) -> int | None:
        """Index of the first token that differs; None where one sequence only ends earlier."""
        found = first_difference(self.ours, self.theirs)
        return None if found is None or found >= min(len(self.ours), len(self.theirs)) else found


def distance(p_V: Tensor, number: float, token: int) -> float:
    """The distance of a uniform number from the token's share of the cumulative probability; 0 inside."""
    upper_V = p_V.double().cumsum(-1)
    at, upper = number * float(upper_V[-1]), float(upper_V[token])
    return max(0.0, upper - float(p_V[token]) - at, at - upper)


def to_boundary(p_V: Tensor, number: float) -> float:
    """The distance of a uniform number from the nearest boundary between two tokens."""
    upper_V = p_V.double().cumsum(-1)
    inner_V = upper_V[:-1][p_V[:-1] > 0]
    return float((inner_V - number * upper_V[-1]).abs().min()) if len(inner_V) else math.inf


@torch.no_grad()
def redrawn(target: HFTarget, sampling: Sampling, parting: Parting) -> float:
    """The larger distance of both tokens from the number with which plain decoding samples there."""
    at = parting.at
    if at is None:
        return math.inf
    context = [*parting.prompt, *parting.ours[:at]]
    logits_V = own_logits(target, torch.tensor([context], device=target.device)).cpu()
    p_V = distribution(logits_V[None], sampling)[0]
    key_1 = torch.tensor([parting.request])
    number = float(uniform(sampling.rows(key_1), torch.tensor([len(context)]), Lane.TARGET)[0])
    return max(distance(p_V, number, tokens[at]) for tokens in (parting.ours, parting.theirs))


@dataclass
class Watch:
    """The numbers by which an acceptance policy decided, token by token."""

    # by (request, position of the token): the smallest distance from its boundary of a number that decided about this token
    margin: dict[tuple[int, int], float] = field(default_factory=dict)

    def over(self, policy: Policy) -> Policy:
        return replace(policy, accept=partial(self._accept, policy))

    def of(self, parting: Parting) -> float:
        at = parting.at
        return math.inf if at is None else self.margin.get((parting.request, len(parting.prompt) + at), math.inf)

    def _accept(
        self, policy: Policy, tree: DraftTree, ancestor_BNN: Tensor, logits_BNV: Tensor, position_BN: Tensor, sampling: Sampling
    ) -> AcceptedPath:
        accepted = policy.accept(tree, ancestor_BNN, logits_BNV, position_BN, sampling)
        p_BNV = distribution(logits_BNV.double(), sampling).cpu()
        for row in range(len(position_BN)):
            key = 0 if sampling.key_B is None else int(sampling.key_B[row])
            own = replace(sampling, key_B=torch.tensor([key]), temperature_B=None, seed_1=None)
            step = Step.of(row, tree, p_BNV[row], position_BN, accepted, own)
            found = step.likely(*LIKELY[policy.name]) if policy.name in LIKELY else step.lossless()
            self.margin |= {(key, position): margin for position, margin in found.items()}
        return accepted


@dataclass(frozen=True, slots=True)
class Step:
    """One row of a verified tree, on the host."""

    parent: list[int]
    token: list[int]
    position: list[int]
    path: list[int]  # the accepted nodes, the root first
    p_NV: Tensor
    q_NV: Tensor | None
    sampled: list[bool]
    sampling: Sampling

    @staticmethod
    def of(row: int, tree: DraftTree, p_NV: Tensor, position_BN: Tensor, accepted: AcceptedPath, sampling: Sampling) -> Step:
        """sampling: with the row's key alone."""
        count, sampled_BN = int(tree.count_B[row]), tree.sampled_BN
        drawn = tree.q_BNV is not None and sampled_BN is not None
        q_NV = tree.q_BNV[row].double().cpu() if drawn and tree.q_BNV is not None else None
        sampled = sampled_BN[row].tolist() if drawn and sampled_BN is not None else [False] * count
        rows: list[Any] = [x[row, :count].tolist() for x in (tree.parent_BN, tree.token_BN, position_BN)]
        path = accepted.path_BA[row, : int(accepted.count_B[row])].tolist()
        return Step(*rows, path, p_NV, q_NV, sampled, sampling)

    def number(self, position: int, lane: Lane, draw: int = 0) -> float:
        return float(uniform(self.sampling, torch.tensor([position]), lane, draw)[0])

    def lossless(self) -> dict[int, float]:
        """By position: along the accepted path, every child that was tried there, and the token sampled at its end."""
        found = {}
        for depth, node in enumerate(self.path):
            after = self.path[depth + 1] if depth + 1 < len(self.path) else None
            margin, left_V = self._tried(node, after)
            if after is None:
                margin = min(margin, to_boundary(left_V, self.number(self.position[node] + 1, Lane.TARGET)))
            found[self.position[node] + 1] = margin
        return found

    def _tried(self, node: int, after: int | None) -> tuple[float, Tensor]:
        """(the smallest margin of the node's decisions, the rest of its distribution), up to the accepted child."""
        p_V, margin = self.p_NV[node], math.inf
        q_V = self.q_NV[node] if self.q_NV is not None and self.sampled[node] else None
        for child in (i for i, parent in enumerate(self.parent) if parent == node):
            token = self.token[child]
            ratio = float(p_V[token]) if q_V is None else float(p_V[token] / q_V[token].clamp_min(1e-38))
            margin = min(margin, abs(self.number(self.position[child], Lane.ACCEPT, child) - ratio))
            if child == after:
                break
            left_V = p_V.clone() if q_V is None else (p_V - q_V).clamp_min(0.0)
            if q_V is None:
                left_V[token] = 0.0
            else:
                q_V = q_V.clone()
                q_V[token] = 0.0
                q_V = q_V / q_V.sum().clamp_min(1e-38)
            p_V = left_V / left_V.sum() if bool((left_V > 0).any()) else p_V
        return margin, p_V

    def likely(self, epsilon: float, delta: float) -> dict[int, float]:
        """By position. Any draft's threshold may change the path, so the smallest margin counts for all tokens of the step."""
        entropy_N = -torch.xlogy(self.p_NV, self.p_NV).sum(-1)
        floor_N = (delta * (-entropy_N).exp()).clamp_max(epsilon)
        drafts = range(1, len(self.parent))
        asked = [abs(float(self.p_NV[self.parent[i], self.token[i]] - floor_N[self.parent[i]])) for i in drafts]
        margin, last = min(asked, default=math.inf), self.path[-1]
        found = {self.position[node] + 1: margin for node in self.path}
        number = self.number(self.position[last] + 1, Lane.TARGET)
        return found | {self.position[last] + 1: min(margin, to_boundary(self.p_NV[last], number))}
