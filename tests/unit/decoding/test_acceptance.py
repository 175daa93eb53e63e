"""Exactness of the policies, by enumeration of everything that can happen rather than by sampling.

Every comparison of the verifier with a uniform number is a branch. `branches` walks all of them: a run is scripted by
accept / refuse decisions, the probability of each decision is found by searching the draw at which the verifier changes
its mind, and the law of the bonus token is read off the residual. What comes out is the law of the emitted tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, distribution
from drafttrain.core.tree import DraftTree, TreeShape, ancestors
from drafttrain.decoding.acceptance import POLICIES, AcceptedPath, coupled, greedy, lossless, policy_for
from drafttrain.ops import accept as accept_op
from drafttrain.ops import sampling as sampling_op

V = 5
Law = dict[tuple[int, ...], float]


class Recorder:
    """Stands in for `uniform` and `pick` of the plain-torch verifier: scripted draws, and what it asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script: dict[int, float | Tensor] = {}  # of each node: one draw for all rows, or one for each
        self.residual_V = torch.zeros(V)
        monkeypatch.setattr(accept_op, "uniform", self.uniform)
        monkeypatch.setattr(accept_op, "pick", self.pick)

    def uniform(self, sampling: Sampling, position_B: Tensor, lane: Lane, draw: int = 0) -> Tensor:
        given = torch.as_tensor(self.script.get(draw, 0.0), dtype=torch.float64)
        return given.expand(len(position_B))

    def pick(self, law_BV: Tensor, uniform_B: Tensor) -> Tensor:
        self.residual_V = law_BV[0].clone()
        return torch.zeros(len(law_BV), dtype=torch.long)


WAYS = 64  # a verdict about so many draws at a time: each gives 6 bits of the probability


def accepted(tree: DraftTree, verdict: AcceptedPath) -> tuple[int, ...]:
    path = verdict.path_BA[0, 1 : int(verdict.count_B[0])]
    return tuple(tree.token_BN[0, path].tolist())


def given_tree(tree: DraftTree, logits: Tensor, sampling: Sampling, recorder: Recorder) -> Law:
    """Law of (accepted tokens..., bonus) when this tree has been proposed."""
    outcome: Law = defaultdict(float)
    N, mask_BNN = tree.token_BN.shape[1], ancestors(tree.parent_BN)
    position_BN = mask_BNN.sum(-1) - 1

    def walk(node: int, probability: float) -> None:
        if probability < 1e-300:
            return
        if node == N:
            verdict = lossless(tree, mask_BNN, logits, position_BN, sampling)
            for token, p in enumerate(recorder.residual_V.tolist()):
                outcome[(*accepted(tree, verdict), token)] += probability * p
            return
        chance = acceptance(node)
        for draw, p in ((-1.0, chance), (2.0, 1.0 - chance)):
            recorder.script[node] = draw
            walk(node + 1, probability * p)
        del recorder.script[node]

    def acceptance(node: int) -> float:
        """The draw below which this node is taken, given the decisions before it; 0 when it is not tried."""
        recorder.script |= dict.fromkeys(range(node + 1, N), 2.0)
        tried, certain = taken(node, torch.tensor([-1.0, 1.0 - 1e-16], dtype=torch.float64)).tolist()
        if not tried or certain:
            return float(tried)
        low, width = 0.0, 1.0
        for _ in range(8):  # 48 bits
            width /= WAYS
            low += width * int(taken(node, low + width * torch.arange(1, WAYS, dtype=torch.float64)).sum())
        return low + width / 2

    def taken(node: int, draw_R: Tensor) -> Tensor:
        """For each of these draws: whether the verifier takes the node. Each is a row of one batch."""
        recorder.script[node] = draw_R
        rows = {field.name: getattr(tree, field.name) for field in fields(tree)}
        wide = DraftTree(**{name: None if x is None else x.expand(len(draw_R), *x.shape[1:]) for name, x in rows.items()})
        given = (x.expand(len(draw_R), *x.shape[1:]) for x in (mask_BNN, logits, position_BN))
        return (lossless(wide, *given, sampling).path_BA == node).any(-1)

    walk(1, 1.0)
    return outcome


def target_law(logits_of: Callable[[tuple[int, ...]], Tensor], sampling: Sampling, length: int) -> Law:
    """Plain sampling: the law of `length` tokens."""
    laws: Law = {(): 1.0}
    for _ in range(length):
        laws = {(*s, t): p * q for s, p in laws.items() for t, q in enumerate(distribution(logits_of(s), sampling).tolist())}
    return laws


def marginal(outcome: Law, logits_of: Callable[[tuple[int, ...]], Tensor], sampling: Sampling, length: int) -> Law:
    """Continue every emitted prefix plainly to `length` tokens, so that laws of unequal lengths compare."""
    whole: Law = defaultdict(float)
    for emitted, p in outcome.items():
        rest = max(0, length - len(emitted))
        tails = target_law(lambda s, e=emitted: logits_of(e + s), sampling, rest)
        for tail, q in tails.items():
            whole[(emitted + tail)[:length]] += p * q
    return whole


def total_variation(a: Law, b: Law) -> float:
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})


def model(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    """A 'target': float64 logits as a function of the tokens so far."""

    def logits_of(tokens: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *tokens)) % 2**31)
        return torch.randn(V, generator=generator, dtype=torch.float64) * 1.5

    return logits_of


def tree_logits(tree: DraftTree, logits_of: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    mask = ancestors(tree.parent_BN)[0]
    rows = [logits_of(tuple(tree.token_BN[0, mask[i].nonzero()[1:, 0]].tolist())) for i in range(mask.shape[0])]
    return torch.stack(rows)[None]


SAMPLINGS = [Sampling(1.0), Sampling(0.6, min_p=0.1), Sampling(1.4, top_k=3), Sampling(1.0, top_p=0.7)]
FEW_SAMPLINGS = [SAMPLINGS[0], SAMPLINGS[3]]  # laws without zeros and with them: the verifier sees no other difference


@pytest.mark.sampled
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "paths", [[(0,), (0, 0), (0, 0, 0)], [(0,), (1,), (2,)], [(0,), (1,), (0, 0), (0, 1), (1, 0)]], ids=str
)
def test_lossless_deterministic_tree_preserves_target_distribution(
    paths: list[tuple[int, ...]], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, logits_of, shape = Recorder(monkeypatch), model(1), TreeShape.of(paths)
    for tokens in ([1, 3, 0, 2, 4], [4, 2, 1, 0, 3]):
        token = [0] + [(tokens[shape.rank_N[i]] + int(shape.parent_N[i])) % V for i in range(1, len(shape.parent_N))]
        tree = DraftTree.static(torch.tensor([token]), shape)
        outcome = given_tree(tree, tree_logits(tree, logits_of), sampling, recorder)
        length = shape.max_depth + 1
        assert total_variation(marginal(outcome, logits_of, sampling, length), target_law(logits_of, sampling, length)) < 1e-12


@pytest.mark.sampled
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("paths", [[(0,), (0, 0)], [(0,), (1,), (0, 0), (1, 0)]], ids=str)
def test_coupled_tree_preserves_target_distribution(
    paths: list[tuple[int, ...]], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every choice at every node on the way is scripted; its probability is the node's law of it."""
    logits_of, shape = model(6), TreeShape.of(paths)
    token = [0] + [(int(shape.rank_N[i]) * 2 + int(shape.parent_N[i])) % V for i in range(1, len(shape.parent_N))]
    tree = DraftTree.static(torch.tensor([token]), shape)
    logits = tree_logits(tree, logits_of)
    mask, laws, script = ancestors(tree.parent_BN), distribution(logits, sampling)[0], {}
    monkeypatch.setattr(sampling_op, "pick", lambda p, u: torch.tensor([script.get(i, 0) for i in range(len(p))]))
    outcome: Law = defaultdict(float)

    def walk(node: int, probability: float) -> None:
        for choice in range(V):
            script[node] = choice
            verdict = coupled(tree, mask, logits, mask.sum(-1) - 1, sampling)
            last, chance = int(verdict.last_B[0]), probability * float(laws[node, choice])
            if last == node:
                outcome[(*accepted(tree, verdict), choice)] += chance
            else:
                walk(next(int(i) for i in mask[0, last].nonzero()[:, 0] if tree.parent_BN[0, i] == node), chance)
        del script[node]

    walk(0, 1.0)
    length = shape.max_depth + 1
    assert total_variation(marginal(outcome, logits_of, sampling, length), target_law(logits_of, sampling, length)) < 1e-12


def proposals(draft: Callable[[tuple[int, ...]], Tensor], sampling: Sampling) -> Iterator[tuple[float, DraftTree]]:
    """All chains of two drafts sampled from q, with their probabilities."""
    for first, second in product(range(V), repeat=2):
        laws = torch.stack(
            [distribution(draft(()), sampling), distribution(draft((first,)), sampling), torch.zeros(V, dtype=torch.float64)]
        )
        yield float(laws[0, first] * laws[1, second]), DraftTree.chain(torch.tensor([[0, first, second]]), q_BNV=laws[None])


@pytest.mark.sampled(sampling=FEW_SAMPLINGS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_lossless_sampled_chain_preserves_target_distribution(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, logits_of, draft = Recorder(monkeypatch), model(2), model(3)
    whole: Law = defaultdict(float)
    for probability, tree in proposals(draft, sampling):
        if probability == 0.0:
            continue
        outcome = given_tree(tree, tree_logits(tree, logits_of), sampling, recorder)
        for tokens, p in marginal(outcome, logits_of, sampling, 3).items():
            whole[tokens] += probability * p
    assert total_variation(whole, target_law(logits_of, sampling, 3)) < 1e-12


@pytest.mark.sampled(sampling=FEW_SAMPLINGS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_lossless_siblings_without_replacement_preserve_target_distribution(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, logits_of, draft = Recorder(monkeypatch), model(4), model(5)
    q = distribution(draft(()), sampling)
    whole: Law = defaultdict(float)
    for probability, tokens in without_replacement(q):
        tree = DraftTree(
            torch.tensor([[0, *tokens]]),
            torch.tensor([[-1] + [0] * len(tokens)]),
            torch.tensor([1 + len(tokens)]),
            q.expand(1, 1 + len(tokens), V),
            torch.tensor([[True] + [False] * len(tokens)]),
        )
        outcome = given_tree(tree, tree_logits(tree, logits_of), sampling, recorder)
        for emitted, p in marginal(outcome, logits_of, sampling, 2).items():
            whole[emitted] += probability * p
    assert total_variation(whole, target_law(logits_of, sampling, 2)) < 1e-12


def without_replacement(q: Tensor) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Two tokens drawn one after the other, or one where q has no second."""
    for first in range(V):
        left = q.clone()
        left[first] = 0.0
        if float(left.sum()) == 0.0:
            yield float(q[first]), (first,)
            continue
        for second in range(V):
            if second != first and float(q[first] * left[second]) > 0.0:
                yield float(q[first] * left[second] / left.sum()), (first, second)


def test_enumeration_detects_argmax_drafts_verified_as_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argmax drafts verified as if sampled from q: the field's known mistake must not pass."""
    recorder, logits_of, draft, sampling = Recorder(monkeypatch), model(2), model(3), Sampling(1.0)
    q = distribution(draft(()), sampling)
    token = int(q.argmax())
    tree = DraftTree.chain(torch.tensor([[0, token]]), q_BNV=torch.stack([q, q])[None])
    outcome = given_tree(tree, tree_logits(tree, logits_of), sampling, recorder)
    assert total_variation(marginal(outcome, logits_of, sampling, 2), target_law(logits_of, sampling, 2)) > 0.05


def test_greedy_accepts_deepest_argmax_path_and_ignores_padding() -> None:
    shape = TreeShape.of([(0,), (1,), (0, 0), (1, 0)])
    token = torch.tensor([[9, 1, 2, 3, 4]]) % V
    logits = torch.zeros(1, 5, V)
    logits[0, 0, 2], logits[0, 2, 4], logits[0, 4, 1] = 1.0, 1.0, 1.0
    tree = DraftTree.static(token, shape)
    mask = ancestors(tree.parent_BN)
    verdict = greedy(tree, mask, logits, mask.sum(-1) - 1, Sampling())
    assert verdict.path_BA.tolist() == [[0, 2, 4, 0, 0]] and verdict.bonus_B.tolist() == [1] and verdict.last_B.tolist() == [4]
    assert verdict.trimmed().path_BA.tolist() == [[0, 2, 4]]
    short = DraftTree(token, tree.parent_BN, torch.tensor([4]))
    verdict = greedy(short, mask, logits, mask.sum(-1) - 1, Sampling())
    assert verdict.trimmed().path_BA.tolist() == [[0, 2]] and verdict.bonus_B.tolist() == [4]


def test_accept_policies_never_synchronise_with_device(subtests: pytest.Subtests) -> None:
    """On tensors without values every question to them is an error."""
    meta, B, N = torch.device("meta"), 2, 4
    node_BN, mask_BNN = torch.zeros(B, N, dtype=torch.long, device=meta), torch.ones(B, N, N, dtype=torch.bool, device=meta)
    logits_BNV = torch.zeros(B, N, V, device=meta)
    temperature_B, seed_1 = torch.ones(B, device=meta), torch.zeros(1, dtype=torch.long, device=meta)
    sampling = Sampling(1.0, 3, 0.9, min_p=0.1, key_B=node_BN[:, 0], temperature_B=temperature_B, seed_1=seed_1)
    given = DraftTree(node_BN, node_BN, node_BN[:, 0], known_BNN=mask_BNN)
    drawn = replace(given, q_BNV=logits_BNV, sampled_BN=mask_BNN[:, 0])
    for (name, policy), tree in product(POLICIES.items(), (given, drawn)):
        with subtests.test(policy=name, drawn=tree is drawn):
            found = policy.accept(tree, mask_BNN, logits_BNV, node_BN, sampling)
            assert found.path_BA.shape == (B, N) and found.count_B.shape == found.bonus_B.shape == found.last_B.shape == (B,)


@pytest.mark.parametrize(
    ("name", "temperature", "words"),
    [("greedy", 1.0, "decode.policy=lossless"), ("typical", 0.0, "temperature above 0"), ("nucleus", 0.0, "choose one of")],
)
def test_policy_for_contradicting_temperature_is_refused(name: str, temperature: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        policy_for(name, Sampling(temperature))


@pytest.mark.parametrize("name", ["coupled", "lossless"])
def test_accept_policies_at_temperature_0_accept_argmax_drafts(name: str) -> None:
    shape, mask = TreeShape.of([(0,), (1,), (1, 0)]), TreeShape.of([(0,), (1,), (1, 0)]).ancestor_NN[None]
    logits = torch.tensor([[[0.0, 2, 2, 1, 0], [9.0, 0, 0, 0, 0], [0.0, 0, 0, 3, 0], [0.0, 0, 0, 0, 1]]])
    tree = DraftTree.static(torch.tensor([[0, 2, 1, 3]]), shape)
    drawn = replace(tree, q_BNV=torch.full((1, 4, V), 0.2), sampled_BN=torch.ones(1, 4, dtype=torch.bool))
    for proposal in (tree, drawn):
        verdict = POLICIES[name].accept(proposal, mask, logits, mask.sum(-1), Sampling(draft_temperature=0.7))
        assert verdict.trimmed().path_BA.tolist() == [[0, 2, 3]] and verdict.bonus_B.tolist() == [4]


def test_typical_policy_is_marked_lossy() -> None:
    assert not policy_for("typical", Sampling(0.8)).lossless


def test_threshold_policy_accepts_tokens_above_probability() -> None:
    sampling = Sampling(1.0)
    tree = DraftTree.chain(torch.tensor([[0, 1, 2]]))
    logits = torch.tensor([[[0.2, 0.5, 0.1, 0.1, 0.1], [0.1, 0.1, 0.4, 0.2, 0.2], [0.2] * 5]]).log()
    for least, count in ((0.3, 3), (0.45, 2), (0.6, 1)):
        policy = policy_for("threshold", sampling, least)
        assert not policy.lossless
        assert policy.accept(tree, tree.ancestor_BNN, logits, torch.tensor([[5, 6, 7]]), sampling).count_B.tolist() == [count]
