"""Trees against a walk along parents, written as loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.core.tree import (
    DraftTree,
    TreeShape,
    ancestors,
    arrivals,
    best_paths,
    depth,
    expected_nodes,
    tuned_paths,
    visits,
)


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 20))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]


@given(parents())
@settings(max_examples=60, deadline=None)
def test_ancestors_and_depth_equal_walk_along_parents(parent: list[int]) -> None:
    mask = ancestors(torch.tensor([parent]))[0]
    for node in range(len(parent)):
        walk, at = set(), node
        while at >= 0:
            walk.add(at)
            at = parent[at]
        assert {j for j in range(len(parent)) if mask[node, j]} == walk
        assert int(depth(mask[None])[0, node]) == len(walk) - 1


def test_draft_tree_trimmed_drops_columns_padded_in_every_row() -> None:
    token_BN, q_BNV = torch.arange(10).view(2, 5), torch.rand(2, 5, 7)
    tree = DraftTree.chain(token_BN, torch.tensor([3, 1]), q_BNV)
    found = tree.trimmed()
    assert found.token_BN.tolist() == [[0, 1, 2], [5, 6, 7]] and found.parent_BN.tolist() == [[-1, 0, 1]] * 2
    assert found.q_BNV is not None and torch.equal(found.q_BNV, q_BNV[:, :3])
    assert torch.equal(found.ancestor_BNN, ancestors(found.parent_BN)) and torch.equal(found.count_B, tree.count_B)
    assert found.trimmed() is found


def test_tree_shape_and_chain_have_expected_parents_and_ancestors() -> None:
    shape = TreeShape.of([(0,), (1,), (0, 0)])
    assert shape.parent_N.tolist() == [-1, 0, 0, 1]
    assert shape.depth_N.tolist() == [0, 1, 1, 2]
    assert shape.rank_N.tolist() == [0, 0, 1, 0]
    chain = DraftTree.chain(torch.zeros(1, 3, dtype=torch.long))
    assert chain.parent_BN.tolist() == [[-1, 0, 1]]
    for tree in (chain, DraftTree.static(torch.zeros(2, 4, dtype=torch.long), shape)):
        assert torch.equal(tree.ancestor_BNN, ancestors(tree.parent_BN))


def test_tree_shape_missing_parent_or_repeated_path_is_refused() -> None:
    for paths in ([(0, 0)], [(0,), (0,)], [()]):
        with pytest.raises(ValueError, match="tree path"):
            TreeShape.of(paths)


def test_best_paths_are_most_frequent_and_closed_under_parents() -> None:
    hit = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 2, 0], [3, 3, 3]])
    # of five rows: (0,) is on three paths, (0, 0) on two, all others on one at most
    # ties go to the shallower, then the lower rank
    chosen = best_paths(hit, nodes=3)
    assert chosen == [(0,), (1,), (0, 0)]
    assert best_paths(hit, nodes=1) == [(0,)]
    assert expected_nodes(hit.split(1), chosen) == pytest.approx((3 + 2 + 1) / 5)
    assert best_paths(hit, nodes=99)[-1] == (3, 3, 3)


def test_tuned_paths_are_best_where_decode_steps_start() -> None:
    """Thirty easy positions are leapt over, ten hard ones are all visited: the node that helps there wins."""
    text = torch.tensor([[0, 0, 0]] * 30 + [[1, 9, 9]] * 10)
    assert best_paths(text, nodes=3) == [(0,), (0, 0), (0, 0, 0)]
    tuned = tuned_paths([text], nodes=3)
    assert tuned == [(0,), (1,), (0, 0)]
    # 10 leaps of 3 and 5 of 2 tokens, against 8 of 4 tokens and 8 of 1 (the last leap over easy text ends in the hard)
    assert 1 + expected_nodes([text], tuned) == pytest.approx(40 / 15)
    assert 1 + expected_nodes([text], best_paths(text, nodes=3)) == pytest.approx((8 * 4 + 8) / 16)


def test_visits_restart_with_every_text() -> None:
    text = torch.zeros(3, 2, dtype=torch.long)
    assert visits(arrivals(text, [(0,)])).tolist() == [1.0, 0.0, 1.0]
    # the first text's last leap ends with it: the second's only sample, a miss, counts as well
    assert expected_nodes([torch.tensor([[0]]), torch.tensor([[9]])], [(0,)]) == 0.5


def test_best_paths_ranks_out_of_range_leave_chain() -> None:
    hit = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    assert best_paths(torch.where(hit == 0, 0, 2**31), nodes=9) == [(0,), (0, 0), (0, 0, 0)]


def test_best_paths_more_nodes_never_lower_expected_nodes() -> None:
    hit = torch.randint(0, 5, (60, 4), generator=torch.Generator().manual_seed(0))
    values = [expected_nodes(hit.split(1), best_paths(hit, n)) for n in (1, 2, 4, 8, 16, 32)]
    assert values == sorted(values)


def test_draft_tree_cut_keeps_order_distributions_and_parents() -> None:
    parent = torch.tensor([[-1, 0, 1, 0, 3, 2], [-1, 0, 0, 0, 3, 0]])
    q = torch.arange(2 * 6 * 3.0).view(2, 6, 3)
    tree = DraftTree(torch.arange(12).view(2, 6), parent, torch.tensor([6, 5]), q, torch.ones(2, 6, dtype=torch.bool))
    cut = tree.cut(1)
    assert cut.count_B.tolist() == [3, 4]
    assert cut.token_BN.tolist()[0][:3] == [0, 1, 3] and cut.token_BN.tolist()[1] == [6, 7, 8, 9]
    assert cut.parent_BN[0, :3].tolist() == [-1, 0, 0] and cut.parent_BN[1].tolist() == [-1, 0, 0, 0]
    assert torch.equal(cut.q_BNV[1], q[1, :4])
    two = tree.cut(2)
    assert two.parent_BN[0, : int(two.count_B[0])].tolist() == [-1, 0, 1, 0, 3] and two.token_BN[0, 4] == 4
    assert tree.cut(3) is tree
