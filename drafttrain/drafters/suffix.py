"""Suffix decoding: the draft is the most frequent continuation of the text's last tokens, in this text or in earlier ones;
nothing is trained (arXiv 2411.04975).

Shapes: S slots, B rows, K drafts.

A suffix tree holds every piece of a text up to a depth, and for each piece how often each token came next. A piece that
occurred once is a place in the text, not a node, so a tree has about as many nodes as pieces that occurred twice:

    text     a b c a b                 root -+- a -- b -- (2)      (2): as the text goes on after place 2
    ends     b, a b: they              |     +- b -- (2)
             occurred before           +- c (2)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.options import SuffixOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, RevertibleState
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps, Target

END = -1  # separates two texts of one tree
UNDONE = 512  # tokens that can be removed again without rebuilding a tree


class Node:
    """The tokens that followed a piece: how often each one, and its node, or its place if it followed once.

    best: the most frequent token, the latest of equally frequent ones.
    """

    __slots__ = ("below", "best", "count", "total")

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self.below: dict[int, Cursor] = {}
        self.best, self.total = END, 0

    def add(self, token: int) -> None:
        count = self.count[token] = self.count.get(token, 0) + 1
        self.total += 1
        if count >= self.count.get(self.best, 0):
            self.best = token


@dataclass(frozen=True, slots=True)
class Touched:
    """The former values of a node that got one more token."""

    node: Node
    token: int
    below: Cursor | None
    best: int

    def restore(self) -> None:
        node, token = self.node, self.token
        node.best = self.best
        node.total -= 1
        node.count[token] -= 1
        if self.below is None:
            del node.below[token], node.count[token]
        else:
            node.below[token] = self.below


Cursor = Node | int  # a node, or a place of the text
Change = tuple[list[Node], list[Touched]]  # the ends before, and what the token changed


class SuffixTree:
    """Texts, and every piece of them of at most `depth` tokens.

    ends: nodes of the last text's endings that occurred before, the longest first; the i-th from the back has i tokens.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.text, self.root = depth, list[int](), Node()
        self.ends: list[Node] = []

    def add(self, token: int) -> Change:
        """Append a token to the last text. Gives the change for `take_back`."""
        index, previous_ends, ends, touched = len(self.text), self.ends, [], []
        self.text.append(token)
        for node in (*previous_ends, self.root):
            child = node.below.get(token)
            touched.append(Touched(node, token, child, node.best))
            node.add(token)
            if child is None:
                node.below[token] = index
                continue
            if isinstance(child, int):
                node.below[token] = child = self._opened(child)
            ends.append(child)
        self.ends = ends[-self.depth :] if len(ends) > self.depth else ends
        return previous_ends, touched

    def _opened(self, index: int) -> Node:
        """The node of a piece that occurred a second time, with the token that followed it the first time."""
        node, next_token = Node(), self.text[index + 1]
        node.add(next_token)
        node.below[next_token] = index + 1
        return node

    def take_back(self, change: Change) -> None:
        self.text.pop()
        self.ends, touched = change
        for node in reversed(touched):
            node.restore()

    def append(self, text: Sequence[int]) -> None:
        """Add another whole text."""
        self.ends = []
        for token in text:
            self.add(token)
        self.text.append(END)
        self.ends = []

    def step(self, cursor: Cursor, token: int) -> Cursor | None:
        """The cursor one token further; None: the piece did not occur."""
        if isinstance(cursor, Node):
            return cursor.below.get(token)
        next_index = cursor + 1
        return next_index if next_index < len(self.text) and self.text[next_index] == token else None

    def follow(self, cursor: Cursor, most: int, least: float) -> tuple[list[int], float]:
        """At most `most` tokens that followed most often, and the sum of the probabilities that the draft reaches each."""
        draft: list[int] = []
        probability, score = 1.0, 0.0
        while len(draft) < most:
            if isinstance(cursor, Node):
                token = cursor.best
                probability *= cursor.count[token] / cursor.total
                child = cursor.below[token]
            else:
                child = cursor + 1
                token = self.text[child] if child < len(self.text) else END
            if token == END or probability < least:
                break
            draft.append(token)
            score += probability
            cursor = child
        return draft, score


@dataclass
class Slot:
    """A text and its tree."""

    own: SuffixTree
    written: int = 0  # where the reply begins
    # for each tree of earlier texts: the cursors of this text's endings, the longest first
    past: list[tuple[SuffixTree, list[Cursor]]] = field(default_factory=list)
    # the changes of the last tokens
    undo: deque[tuple[Change, list[tuple[SuffixTree, list[Cursor]]]]] = field(default_factory=lambda: deque(maxlen=UNDONE))

    def add(self, token: int, trees: Sequence[SuffixTree]) -> None:
        """Append a token, and follow it in these trees too."""
        previous = self.past
        self.undo.append((self.own.add(token), previous))
        cursors_by_tree = {id(tree): cursors for tree, cursors in previous}
        self.past = []
        for tree in trees:
            stepped = (tree.step(cursor, token) for cursor in (*cursors_by_tree.get(id(tree), ()), tree.root))
            ends = [cursor for cursor in stepped if cursor is not None]
            self.past.append((tree, ends[-tree.depth :]))


class Suffix(Drafter):
    """Proposes chains, found on the host: the best continuation of the text's endings, in its own tree and in earlier ones."""

    captured = False
    trained = False
    revertible = True

    def __init__(self, options: SuffixOptions, target: Target) -> None:
        if options.factor + options.offset < 1:
            raise UserError(
                f"drafter.factor is {options.factor:g}, drafter.offset {options.offset:g}; set factor + offset to 1 or more"
            )
        super().__init__(Proposal(options.draft_length))
        self.taps, self.options = Taps(), options

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        return iter(())

    def open(self, slots: int, max_len: int) -> SuffixState:
        return SuffixState(self.options, slots)


class SuffixState(RevertibleState):
    """One tree for each slot, and at most two of earlier texts, so that memory is bounded and the latest texts stay."""

    def __init__(self, options: SuffixOptions, slots: int) -> None:
        self.options = options
        self.slots = [Slot(SuffixTree(options.depth)) for _ in range(slots)]
        self.trees = [SuffixTree(options.depth)] if options.past else []  # of earlier texts, the older first

    def reset(self, slot_R: Tensor) -> None:
        """A text that leaves its slot becomes one of the earlier texts."""
        for slot_id in slot_R.tolist():
            slot = self.slots[slot_id]
            if self.trees:
                self.trees[-1].append(slot.own.text[slot.written :])
                if len(self.trees[-1].text) > self.options.past // 2:
                    self.trees = [self.trees[-1], SuffixTree(self.options.depth)]
            self.slots[slot_id] = Slot(SuffixTree(self.options.depth))

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        rows = zip(slot_B.tolist(), commit.count_B.tolist(), commit.token_BA.tolist(), commit.next_BA.tolist(), strict=True)
        for slot_id, count, token, next_tokens in rows:
            slot = self.slots[slot_id]
            first = [] if slot.own.text else token[:1]
            for new_token in [*first, *next_tokens[:count]] if count else ():
                slot.add(new_token, self.trees)

    def observe_prompt(self, commit: Commit, slot_B: Tensor) -> None:
        self.observe(commit, slot_B)
        for slot_id in slot_B.tolist():
            self.slots[slot_id].written = max(0, len(self.slots[slot_id].own.text) - 1)

    def snapshot(self, slot_B: Tensor) -> list[int]:
        return [len(self.slots[slot_id].own.text) for slot_id in slot_B.tolist()]

    def restore(self, slot_B: Tensor, snapshot: list[int]) -> None:
        for slot_id, length in zip(slot_B.tolist(), snapshot, strict=True):
            slot = self.slots[slot_id]
            while len(slot.own.text) > length:
                change, slot.past = slot.undo.pop()
                slot.own.take_back(change)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        steps = min(self.options.draft_length, depth or self.options.draft_length)
        slots = [self.slots[slot_id] for slot_id in slot_B.tolist()]
        drafts = [self._draft(slot, steps) for slot in slots]
        rows = [
            [*(slot.own.text or [0])[-1:], *draft, *[0] * (steps - len(draft))]
            for slot, draft in zip(slots, drafts, strict=True)
        ]
        count_B = torch.tensor([1 + len(draft) for draft in drafts], device=slot_B.device)
        return DraftTree.chain(torch.tensor(rows, device=slot_B.device), count_B)

    def _draft(self, slot: Slot, steps: int) -> list[int]:
        """The draft with the most expected accepted tokens, over all ends and trees."""
        best: list[int] = []
        best_score = 0.0
        own_tree: tuple[SuffixTree, list[Cursor]] = (slot.own, [*slot.own.ends])
        for tree, ends in (own_tree, *slot.past):
            for cursor_index, cursor in enumerate(ends):
                max_tokens = int(self.options.factor * (len(ends) - cursor_index) + self.options.offset)
                draft, score = tree.follow(cursor, min(steps, max_tokens), self.options.min_probability)
                if score > best_score:
                    best, best_score = draft, score
        return best


FAMILY = Family(
    "suffix",
    SuffixOptions,
    Suffix,
    unserved="it has no trained weights; turn on the stack's own suffix or n-gram drafting",
)
