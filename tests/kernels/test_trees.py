"""Choosing among candidates and what follows from parents: the operators against walks written out in Python."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

import pytest
import torch

from drafttrain.core.tree import ancestors, depth
from drafttrain.ops import library
from drafttrain.ops import top as top_op
from drafttrain.ops.build_tree import Built, build_reference, build_tree, links_reference, tree_links
from drafttrain.ops.top import remap_logits
from drafttrain.ops.tree_bits import bits_of, words_of

compiled = pytest.mark.skipif(not library.state().loaded, reason=library.state().text)
STEPS = (0.0, 0.0, 0.25, 0.5, 1.0, math.inf, math.nan)  # how far a child's score may lie below its parent's


def candidates(rows: int, many: int, steps: tuple[float, ...] = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """Random parents [rows, many], from chains to stars, and scores that fall along every path, with many ties."""
    above = torch.rand(rows, many) ** torch.rand(rows, 1).mul(6).sub(3).exp()
    parent = (above * torch.arange(many)).long().clamp_max(torch.arange(many) - 1)
    step = torch.tensor(steps)[(torch.rand(rows, many) ** 2 * len(steps)).long()]
    score = torch.zeros(rows, many)
    for i in range(1, many):
        score[:, i] = score.gather(1, parent[:, i : i + 1])[:, 0] - step[:, i]
    score[:, 0] = torch.tensor([math.inf, math.nan, -math.inf, 0.0])[torch.arange(rows) % 4]  # not read
    return parent, score


def fields(built: Built) -> list[torch.Tensor]:
    return [getattr(built, field.name) for field in dataclasses.fields(built)]


def linked(parent: list[int]) -> tuple[list[int], list[list[int]]]:
    depths, bits = [], []
    for node in range(len(parent)):
        walk = [node]
        while walk[-1] > 0:
            walk.append(parent[walk[-1]])
        depths.append(len(walk) - 1)
        bits.append(words_of(sum(1 << i for i in walk), -(-len(parent) // 64)))
    return depths, bits


def chosen(parent: list[int], score: list[float], nodes: int) -> list[list[Any]]:
    """The fields of `Built` for one row."""
    rest = sorted(range(1, len(parent)), key=lambda i: (math.isnan(score[i]), 0.0 if math.isnan(score[i]) else -score[i], i))
    kept = sorted([0, *rest[: nodes - 1]])
    new_parent = [-1, *(kept.index(parent[i]) for i in kept[1:])]  # raises where a parent was not kept
    children: dict[int, list[int]] = {i: [] for i in range(-1, nodes)}
    for node, above in enumerate(new_parent):
        children[above].append(node)
    child = [min(children[i], default=-1) for i in range(nodes)]
    sibling = [min((j for j in children[new_parent[i]] if j > i), default=-1) for i in range(nodes)]
    return [kept, new_parent, *linked(new_parent), child, sibling]


@compiled
def test_tree_links_equal_reference_and_python_walk(subtests: pytest.Subtests) -> None:
    for rows, nodes in (
        *((300, 1), (300, 2), (300, 5), (200, 13), (50, 40), (50, 63), (100, 64), (30, 65), (10, 150), (8, 256)),
    ):
        with subtests.test(nodes=nodes):
            torch.manual_seed(nodes)
            parent, _ = candidates(rows, nodes)
            parent[0] = torch.arange(-1, nodes - 1)  # the deepest tree
            with torch.inference_mode():
                found = tree_links(parent)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, links_reference(parent), strict=True))
            for row, above in enumerate(parent.tolist()):
                depths, bits = linked(above)
                assert found[0][row].tolist() == depths and found[1][row].tolist() == bits


def test_tree_links_reference_equals_tree_ancestors() -> None:
    for nodes in (1, 2, 31, 64, 65, 128, 256):
        parent, _ = candidates(20, nodes)
        depths, bits = links_reference(parent)
        assert torch.equal(depths, depth(ancestors(parent))) and torch.equal(bits, bits_of(ancestors(parent)))


BUILT = [  # rows, candidates, nodes
    *((100, 1, 1), (200, 3, 2), (200, 7, 4), (200, 9, 9), (150, 30, 12), (100, 64, 64), (80, 120, 61)),
    *((8, 1024, 64), (20, 120, 100), (8, 300, 129), (8, 256, 256), (8, 4096, 256)),
]


@compiled
def test_build_tree_equals_reference_and_python_walk(subtests: pytest.Subtests) -> None:
    for rows, many, nodes in BUILT:
        with subtests.test(candidates=many, nodes=nodes):
            torch.manual_seed(many)
            parent, score = candidates(rows, many)
            with torch.inference_mode():
                found = fields(build_tree(parent, score, nodes))
            reference = fields(build_reference(parent, score, nodes))
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, reference, strict=True))
            mine = zip(*(field.tolist() for field in found), strict=True)
            for row, above, scores in zip(mine, parent.tolist(), score.tolist(), strict=True):
                assert list(row) == chosen(above, scores, nodes)


@compiled
def test_build_tree_rising_scores_still_give_valid_tree() -> None:
    """What no drafter may hand in: then the tree is another, but it is one."""
    torch.manual_seed(0)
    parent, _ = candidates(500, 100)
    score = torch.randn(500, 100)
    with torch.inference_mode():
        built = build_tree(parent, score, 20)
    assert all(torch.equal(a, b) for a, b in zip(fields(built), fields(build_reference(parent, score, 20)), strict=True))
    assert (built.parent_BN[:, 1:] >= 0).all() and (built.parent_BN < torch.arange(20)).all()


def test_build_tree_reproduces_documented_example() -> None:
    parent, score = torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([[0.0, -1.0, -2.0, -1.5, -9.0]])
    built = build_tree(parent, score, 4)
    assert built.kept_BN.tolist() == [[0, 1, 2, 3]] and built.parent_BN.tolist() == [[-1, 0, 0, 1]]
    assert built.depth_BN.tolist() == [[0, 1, 1, 2]] and built.bits_BNw.tolist() == [[[1], [3], [5], [11]]]
    assert built.child_BN.tolist() == [[1, 3, -1, -1]] and built.sibling_BN.tolist() == [[-1, 2, -1, -1]]


def test_tree_operators_unsupported_node_counts_are_refused() -> None:
    parent = torch.zeros(1, 257, dtype=torch.long)
    with pytest.raises(ValueError, match="a tree of 257 nodes, root included; at most 256 are possible"):
        tree_links(parent)
    for nodes in (0, 257, 258):
        with pytest.raises(ValueError, match=f"{nodes} nodes of 257 candidates"):
            build_tree(parent, torch.zeros(1, 257), nodes)


@compiled
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", library.DTYPES)
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (16, 16), (100, 1), (1000, 64), (5003, 10)])
def test_top_operator_equals_sorted_reference(vocab: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    ids = torch.randperm(3 * vocab)[:vocab]
    for trial in range(18):  # each scale with each part that is masked, rounded and not
        logits = (torch.randn(5, vocab) * (1, 3, 0)[trial % 3]).to(dtype)
        logits = logits.round() if trial % 2 else logits
        logits[torch.rand(5, vocab) < (0.0, 0.5, 0.99)[trial // 3 % 3]] = (-torch.inf, torch.nan, torch.inf)[trial % 3]
        with torch.inference_mode():
            value, index = top_op.top(logits, k)
            named = top_op.top(logits, k, ids)[1]
        assert torch.equal(named, ids[index])
        torch.testing.assert_close((value, index), top_op.reference(logits, k), rtol=0, atol=0, equal_nan=True)
        for row, found in zip(logits.tolist(), index.tolist(), strict=True):
            order = sorted(range(vocab), key=lambda i: (math.isnan(row[i]), 0.0 if math.isnan(row[i]) else -row[i], i))
            assert found == order[:k]


def test_top_log_equals_reference_and_float64_for_any_size_and_dtype(subtests: pytest.Subtests) -> None:
    for (vocab, k), dtype in product([(1, 1), (7, 3), (64, 5), (2049, 10)], library.DTYPES):
        with subtests.test(vocab=vocab, dtype=dtype):
            torch.manual_seed(vocab)
            logits, ids = (4 * torch.randn(6, vocab)).to(dtype), torch.randperm(3 * vocab)[:vocab]
            logits[1] = 0.0
            logits[2, 1:] = -torch.inf
            logits[3] += 50.0
            with torch.inference_mode():
                value, index = top_op.top_log(logits, k)
                assert torch.equal(top_op.top_log(logits, k, ids)[1], ids[index])
                twin, order = top_op.reference_log(logits, k)
            assert torch.equal(index, order) and value.dtype == torch.float32 and bool((value <= 0).all())
            wanted = logits.double().log_softmax(-1).gather(1, index).float()
            for found in (value, twin):
                torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_remap_logits_scatters_values_and_gradients() -> None:
    ids = torch.tensor([7, 0, 3])
    q = torch.rand(2, 4, 3, requires_grad=True)
    wide = remap_logits(q, ids, 9)
    assert wide.shape == (2, 4, 9) and torch.equal(wide[..., ids], q) and (wide > -torch.inf).sum() == q.numel()
    wide[..., 3].sum().backward()
    assert q.grad is not None and q.grad.sum() == 8
