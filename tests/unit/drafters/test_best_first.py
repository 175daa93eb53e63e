"""Best-first trees of drafts that do not know each other, against a heap."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.drafters import families
from drafttrain.drafters.common.dynamic_tree import DynamicTree
from drafttrain.drafters.common.proposal import BestFirst, TreeOptions, TreeProposal
from drafttrain.ops.build_tree import MOST_CANDIDATES
from tests.contract import test_families as contract
from tests.helpers import prompts, tiny_target
from tests.unit.drafters import test_dynamic_tree as dynamic
from tests.unit.drafters.test_dynamic_tree import token_paths as paths_of

INDEPENDENT = ("dflare", "dflash", "jetspec", "medusa", "pard", "peagle", "uno")  # drafts that do not know each other
SIZES = [  # slots, vocabulary, nodes
    (1, 90, 130),  # one depth, and fewer paths than nodes
    (3, 70, 1),
    (7, 64, 63),
    (15, 80, 18),
    (15, 80, 5),  # fewer nodes than depths
    (5, 3, 130),  # more nodes than tokens
    (2, 2, 63),
    (7, 64, 2),
]


def searched(log_p_KV: Tensor, nodes: int) -> list[tuple[int, ...]]:
    """The likeliest paths as tokens: the best of the heap is a node, and its first child and its next sibling go in."""
    value, token = log_p_KV.double().sort(dim=-1, descending=True, stable=True)
    heap, found = [(-float(value[0, 0]), (0,))], dict[tuple[int, ...], float]()
    while heap and len(found) <= nodes:
        cost, ranks = heapq.heappop(heap)
        found[tuple(int(token[d, r]) for d, r in enumerate(ranks))] = -cost
        last, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < value.shape[1]:
            heapq.heappush(heap, (cost + float(value[last, rank] - value[last, rank + 1]), (*ranks[:-1], rank + 1)))
        if len(ranks) < len(value):
            heapq.heappush(heap, (cost - float(value[last + 1, 0]), (*ranks, 0)))
    return dynamic.likeliest(found, nodes)


def logits(slots: int, vocab: int, sharp: float, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(slots * vocab)
    return torch.randn(rows, slots, vocab, generator=generator) * sharp


def test_best_first_tree_nodes_equal_heap_search(subtests: pytest.Subtests) -> None:
    for slots, vocab, nodes in SIZES:
        grower = BestFirst.of(slots, nodes, vocab, torch.device("cpu"))
        for sharp in (0.3, 2.0, 9.0):
            with subtests.test(slots=slots, vocab=vocab, nodes=nodes, sharp=sharp):
                logits_BKV = logits(slots, vocab, sharp)
                with torch.inference_mode():
                    tree = grower.from_slots(torch.arange(4), logits_BKV, None, Sampling())
                assert tree.token_BN[:, 0].tolist() == [0, 1, 2, 3]
                for row, log_p_KV in enumerate(logits_BKV.log_softmax(-1)):
                    wanted = searched(log_p_KV, nodes)
                    assert set(paths_of(tree, row)) == set(wanted)
                assert len(wanted) == min(nodes, sum(vocab**d for d in range(1, slots + 1)))


def test_best_first_tree_temperature_equals_heap_search_of_divided_logits() -> None:
    logits_BKV = logits(7, 64, 2.0)
    grower = BestFirst.of(7, 20, 64, torch.device("cpu"), 0.25)
    for sampling, temperature in ((Sampling(), 0.25), (Sampling(0.5), 0.5), (Sampling(0.1), 0.25)):
        tree = grower.from_slots(torch.zeros(4).long(), logits_BKV, None, sampling)
        for row, log_p_KV in enumerate((logits_BKV / temperature).log_softmax(-1)):
            assert set(paths_of(tree, row)) == set(searched(log_p_KV, 20))


def test_best_first_tree_with_depth_limit_equals_heap_and_sorts_siblings() -> None:
    logits_BKV, grower = logits(5, 70, 2.0), BestFirst.of(5, 20, 70, torch.device("cpu"))
    for depth in (1, 3, 9):
        tree = grower.from_slots(torch.zeros(4).long(), logits_BKV, None, Sampling(), depth)
        for row, log_p_KV in enumerate(logits_BKV.log_softmax(-1)):
            found = paths_of(tree, row)
            assert set(found) == set(searched(log_p_KV[:depth], 20))
            for i, path in enumerate(found):
                later = [p for p in found[i + 1 :] if p[:-1] == path[:-1]]
                assert all(log_p_KV[len(path) - 1, p[-1]] <= log_p_KV[len(path) - 1, path[-1]] for p in later)


def test_best_first_tree_tied_scores_give_distinct_paths() -> None:
    """Flat logits, and drafts so sure that a child is as likely as its parent."""
    for logits_BKV in (torch.zeros(2, 4, 70), torch.full((2, 4, 70), -200.0).index_fill_(2, torch.tensor([3]), 200.0)):
        tree = BestFirst.of(4, 30, 70, torch.device("cpu")).from_slots(torch.zeros(2).long(), logits_BKV, None, Sampling())
        for row in range(2):
            assert len(set(paths_of(tree, row))) == 30
    assert (3, 3, 3, 3) in paths_of(tree, 0)


def test_best_first_tree_is_no_less_likely_than_dynamic_tree() -> None:
    logits_BKV = logits(6, 70, 3.0)
    growers = BestFirst.of(6, 24, 70, torch.device("cpu")), DynamicTree(6, 4, 24).grower(torch.device("cpu"))
    best, beams = (grower.from_slots(torch.zeros(4).long(), logits_BKV, None, Sampling()) for grower in growers)
    gained = []
    for row, log_p_KV in enumerate(logits_BKV.log_softmax(-1)):
        mass = [
            sum(float(torch.tensor([log_p_KV[d, t] for d, t in enumerate(path)]).sum().exp()) for path in paths_of(tree, row))
            for tree in (best, beams)
        ]
        gained.append(mass[0] - mass[1])
    assert min(gained) >= 0.0 and max(gained) > 1e-4


def test_best_first_tree_is_accepted_by_families_of_independent_drafts() -> None:
    """By no others: their drafts depend on those above."""
    target, found = tiny_target(), []
    for name in contract.NAMES:
        if issubclass(families()[name].options, TreeOptions):
            settings = {k: v for k, v in contract.SHAPES.get(name, {}).items() if k != "paths"} | {"tree": "best_first"}
            try:
                families()[name].build(families()[name].options(**settings), target)
            except UserError as error:
                assert "depend on those above" in str(error)
                continue
            found.append(name)
    assert sorted(found) == list(INDEPENDENT)


@pytest.fixture
def best(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    settings = {k: v for k, v in contract.SHAPES.get(name, {}).items() if k != "paths"} | {"tree": "best_first", "nodes": 9}
    monkeypatch.setitem(contract.SHAPES, name, settings)
    return name


@pytest.mark.sampled
@pytest.mark.parametrize("bound", [None, 40])
@pytest.mark.parametrize(("name", "options"), [row for row in dynamic.FAMILIES if row[0] in INDEPENDENT])
def test_drafter_with_best_first_tree_drafts_likeliest_paths(name: str, options: dict[str, Any], bound: int | None) -> None:
    """bound: lengths live on the device alone, as a graph has it."""
    drafter = dynamic.built(name, tiny_target(), tree="best_first", draft_length=4, nodes=21, **options)
    tree = dynamic.proposed(drafter, bound)
    for row in range(3):
        log_p_KV = torch.stack([dynamic.naive_logits(drafter, row, [0] * depth).log_softmax(-1) for depth in range(4)])
        assert set(paths_of(tree, row)) == set(searched(log_p_KV, 21))


@pytest.mark.slow
@pytest.mark.sampled(best=("medusa", "dflash"))
@pytest.mark.parametrize("best", INDEPENDENT, indirect=True)
@pytest.mark.parametrize(
    "check",
    [
        contract.test_drafter_sampling_follows_target_distribution,
        contract.test_drafter_proposal_has_distribution_only_if_sampled,
    ],
)
def test_drafter_with_best_first_tree_passes_family_contract(check: Any, best: str) -> None:
    check(best)


@pytest.mark.sampled(best=("medusa", "dflash"))
@pytest.mark.parametrize("best", INDEPENDENT, indirect=True)
def test_best_first_tree_greedy_output_equals_plain_in_fewer_steps_than_static_tree(best: str) -> None:
    contract.test_drafter_greedy_output_equals_plain_decoding(best, 1.0, 4)
    target, asked = tiny_target(), prompts(4, seed=3)
    drafter = contract.build(best, target)
    assert drafter.proposal.max_nodes == 10
    torch.manual_seed(1)
    chain = families()[best].build(
        families()[best].options(**contract.SHAPES[best] | {"tree": "static", "nodes": None}), target
    )
    ours, theirs = (contract.decode(target, d.eval(), asked, 3, tokens=24) for d in (drafter, chain))
    assert sum(r.verifications for r in ours) < sum(r.verifications for r in theirs)


@pytest.mark.sampled(best=("medusa",))
@pytest.mark.parametrize("best", INDEPENDENT, indirect=True)
def test_drafter_with_best_first_tree_reloaded_drafts_same_tokens(best: str, tmp_path: Any) -> None:
    contract.test_drafter_reloaded_checkpoint_drafts_same_tokens(best, tmp_path)


def test_tree_proposal_tuned_best_first_nodes_survive_reload() -> None:
    proposal = TreeProposal(TreeOptions("best_first"), 4, tiny_target(), independent=True)
    assert proposal.tunable and proposal.max_nodes == 25 and proposal.scratch_positions == 0
    proposal.tune([torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]] * 3)], 40)
    assert proposal.max_nodes == 41 and proposal.settings()["nodes"] == 40
    again = TreeProposal(TreeOptions("best_first"), 4, tiny_target(), independent=True)
    again.use(proposal.settings())
    assert again.max_nodes == 41 and again.paths == proposal.paths


def test_tree_proposal_tuned_best_first_nodes_stay_within_candidate_limit() -> None:
    proposal = TreeProposal(TreeOptions("best_first"), 24, tiny_target(), independent=True)
    proposal.tune([torch.zeros(8, 24, dtype=torch.long)], 255)
    assert 150 < proposal.nodes < 255 and BestFirst.most(24, proposal.nodes, 64) < MOST_CANDIDATES
    with pytest.raises(UserError, match=r"candidates are possible: lower drafter\.nodes"):
        TreeProposal(TreeOptions("best_first", nodes=proposal.nodes + 1), 24, tiny_target(), independent=True)


def test_tree_proposal_invalid_best_first_size_is_refused() -> None:
    target, long = tiny_target(), "lower drafter.nodes or the draft length"
    for length, nodes, message in ((4, 256, "at most 255 nodes"), (4, 0, "must be 1 or more"), (40, 255, long)):
        with pytest.raises(UserError, match=message):
            TreeProposal(TreeOptions("best_first", nodes=nodes), length, target, independent=True)
