"""Suffix trees against counting by hand, and what the decoder sees of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.suffix import END, FAMILY, Node, Suffix, SuffixOptions, SuffixTree
from drafttrain.targets.fast import FastTarget
from tests.helpers import prompts, tiny_model, tiny_target

DEPTH = 5


def counted(text: list[int], piece: tuple[int, ...]) -> Counter[int]:
    """What came next behind each occurrence of the piece."""
    n = len(piece)
    return Counter(text[i + n] for i in range(len(text) - n) if tuple(text[i : i + n]) == piece)


def check(tree: SuffixTree, text: list[int]) -> None:
    """Every piece that occurred twice has a node with the right counts; the text's ends stand where they should."""
    pieces = Counter(tuple(text[i : i + n]) for n in range(1, DEPTH + 1) for i in range(len(text) - n + 1))
    seen = 0
    stack: list[tuple[tuple[int, ...], Node]] = [((), tree.root)]
    while stack:
        piece, node = stack.pop()
        after = counted(text, piece)
        if len(piece) <= DEPTH:
            assert node.count == after and node.total == after.total()
            assert node.count[node.best] == max(after.values())
        for token, below in node.below.items():
            longer = (*piece, token)
            if isinstance(below, Node):
                stack.append((longer, below))
                seen += len(longer) <= DEPTH
            else:
                assert tuple(text[below + 1 - len(longer) : below + 1]) == longer
    repeated = {p for p, count in pieces.items() if count > 1}
    assert seen == len(repeated)
    ends = [n for n in range(min(DEPTH, len(text)), 0, -1) if pieces[tuple(text[-n:])] > 1]
    assert len(tree.ends) == len(ends)
    for n, node in zip(ends, tree.ends, strict=True):
        assert node.count == counted(text, tuple(text[-n:]))


def test_suffix_tree_counts_equal_brute_force(subtests: pytest.Subtests) -> None:
    for alphabet in (1, 2, 3, 8):
        with subtests.test(alphabet=alphabet):
            draw = random.Random(alphabet)
            tree, text = SuffixTree(DEPTH), list[int]()
            for length in range(1, 61):
                text.append(draw.randrange(alphabet))
                tree.add(text[-1])
                if length <= 20 or length % 8 == 4:  # 60 too
                    check(tree, text)


def frozen(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    return node.best, node.total, dict(node.count), {token: frozen(below) for token, below in node.below.items()}


@pytest.mark.parametrize("alphabet", [1, 2, 3])
def test_suffix_tree_take_back_restores_previous_tree(alphabet: int) -> None:
    draw = random.Random(alphabet)
    tree = SuffixTree(DEPTH)
    for _ in range(40):
        before = frozen(tree.root), list(tree.text), [frozen(node) for node in tree.ends]
        changes = [tree.add(draw.randrange(alphabet)) for _ in range(draw.randrange(6))]
        for change in reversed(changes):
            tree.take_back(change)
        assert before == (frozen(tree.root), tree.text, [frozen(node) for node in tree.ends])
        tree.add(draw.randrange(alphabet))


def test_suffix_tree_appended_texts_stay_separate() -> None:
    tree = SuffixTree(8)
    tree.append([1, 2, 3])
    tree.append([4, 5])
    assert not any(isinstance(below, Node) for below in tree.root.below.values())
    three = tree.root.below[3]
    assert tree.follow(three, 9, 0.1) == ([], 0.0), "the first text ends there"
    assert tree.follow(tree.root.below[1], 9, 0.1) == ([2, 3], 2.0)
    assert END not in tree.root.count


def test_suffix_tree_draft_follows_most_frequent_token_above_min_probability() -> None:
    """After `1 2` came 3 twice and 4 once; after `1 2 3` 5 and 6."""
    tree = SuffixTree(8)
    for token in (1, 2, 3, 5, 9, 1, 2, 4, 9, 1, 2, 3, 6, 9, 1, 2):
        tree.add(token)
    assert len(tree.ends) == 3, "9 1 2, 1 2 and 2 occurred before"
    one_two = tree.ends[1]
    assert dict(one_two.count) == {3: 2, 4: 1}
    draft, score = tree.follow(one_two, 2, 0.1)
    assert draft == [3, 6] and score == pytest.approx(2 / 3 + 1 / 3), "of two that came once the later"
    assert tree.follow(one_two, 2, 0.5)[0] == [3]
    assert tree.follow(one_two, 0, 0.1) == ([], 0.0)


def decoded(options: SuffixOptions, asked: list[list[int]], batch: int) -> list[Any]:
    target = FastTarget(tiny_model())
    return Decoder(target, Suffix(options, target), "greedy", Sampling(), max_new_tokens=40).run(asked, batch).results


def test_suffix_drafter_repeated_prompt_needs_fewer_verifications() -> None:
    """The same prompt again: its whole reply is known, and costs a verification for each `depth`-limited draft."""
    asked = prompts(1, seed=3) * 3
    alone = decoded(SuffixOptions(past=0), asked, 1)
    first, *again = decoded(SuffixOptions(), asked, 1)
    assert [r.tokens for r in alone] == [r.tokens for r in (first, *again)]
    assert len({r.verifications for r in alone}) == 1 and alone[0].verifications == first.verifications
    assert all(r.verifications < first.verifications / 2 for r in again)


def test_suffix_drafter_memory_of_past_texts_is_bounded() -> None:
    target = tiny_target()
    drafter = Suffix(SuffixOptions(past=100), target)
    state = drafter.open(1, 64)
    kept = []
    for number in range(30):
        state.reset(torch.zeros(1, dtype=torch.long))
        for token in range(number, number + 20):
            state.slots[0].add(token, state.trees)
        kept.append(sum(len(tree.text) for tree in state.trees))
    assert len(state.trees) == 2 and max(kept) <= 100 + 2 * 21 and min(kept[10:]) >= 50


def test_suffix_drafter_invalid_options_are_refused() -> None:
    target = tiny_target()
    wrong: tuple[dict[str, Any], ...] = ({"depth": 0}, {"past": -1}, {"factor": 0.5}, {"min_probability": 0.0})
    for options in (*wrong, {"factor": -1.0, "offset": 4.0}):
        with pytest.raises(UserError, match=r"^drafter\.\w+ is .*; set "):
            FAMILY.build(SuffixOptions(**options), target)
