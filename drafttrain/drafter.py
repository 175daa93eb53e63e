"""Floor 1: what every drafter family is.

Shapes: B rows, A committed positions, N tree nodes, S slots, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.sampling import Lane, Sampling, law, pick, uniform
from drafttrain.target import Taps
from drafttrain.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Commit:
    """Newly verified positions, root first, all aligned on A: row b has count_B[b] of them, the rest is padding.

    token_BA: the token at a position. next_BA: the token that follows it (accepted drafts, then the bonus token).
    hidden: by tap key, [B, A, H], the target's state at the position.
    """

    token_BA: Tensor
    next_BA: Tensor
    hidden: dict[int, Tensor]
    count_B: Tensor


class Drafter(nn.Module, ABC):
    """Trained by `predict`, decoded by `open`, `observe`, `propose`. State is passed, never kept on the module."""

    taps: Taps
    draft_length: int  # K: depth of the deepest proposal

    @abstractmethod
    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """What is predicted for which label, one step (or head) at a time, in drafting order."""

    @abstractmethod
    def open(self, slots: int, max_len: int) -> Any:
        """State for this many concurrent requests."""

    @abstractmethod
    def reset(self, state: Any, slot_R: Tensor) -> None:
        """New requests enter these slots."""

    @abstractmethod
    def observe(self, state: Any, commit: Commit, slot_B: Tensor) -> None:
        """Stage what was accepted for these slots. Computes nothing, so that an idle drafter costs nothing."""

    @abstractmethod
    def propose(self, state: Any, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        """A tree per slot, no deeper than `depth` (from 1) where one is given. Its first pass consumes the staged positions."""

    def decode_settings(self) -> dict[str, Any]:
        """What decoding needs beyond weights and configuration (a searched tree, say); JSON values only."""
        return {}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        """Take up what `decode_settings` gave."""

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        """Choose the proposal's shape from each held-out text's teacher-forced ranks [samples, K], in text order, and a
        node budget (root excluded)."""

    def paths(self) -> list[tuple[int, ...]]:
        """The rank paths that greedy decoding proposes; a chain unless a family says otherwise."""
        return [(0,) * d for d in range(1, self.draft_length + 1)]

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest proposal, root included: what a cache must have room for."""
        return len(self.paths()) + 1


def trainable(drafter: nn.Module) -> int:
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


class Staged:
    """Committed positions that a drafter with its own cache has not consumed yet, per slot, in order."""

    def __init__(self, slots: int) -> None:
        self._parts: list[list[tuple[Tensor, Tensor, dict[int, Tensor]]]] = [[] for _ in range(slots)]

    def clear(self, slot_R: Tensor) -> None:
        for slot in slot_R.tolist():
            self._parts[slot] = []

    def add(self, commit: Commit, slot_B: Tensor) -> None:
        for row, (slot, count) in enumerate(zip(slot_B.tolist(), commit.count_B.tolist(), strict=True)):
            if count:
                hidden = {k: h[row, :count] for k, h in commit.hidden.items()}
                self._parts[slot].append((commit.token_BA[row, :count], commit.next_BA[row, :count], hidden))

    def take(self, slot_B: Tensor) -> Commit:
        """The staged positions of these slots, left-aligned and padded with zeros; they are staged no more."""
        rows = [self._parts[slot] for slot in slot_B.tolist()]
        self.clear(slot_B)
        token = [torch.cat([p[0] for p in parts]) for parts in rows]
        after = [torch.cat([p[1] for p in parts]) for parts in rows]
        pad = nn.utils.rnn.pad_sequence
        hidden = {k: pad([torch.cat([p[2][k] for p in parts]) for parts in rows], batch_first=True) for k in rows[0][0][2]}
        count_B = torch.tensor([len(t) for t in token], device=token[0].device)
        return Commit(pad(token, batch_first=True), pad(after, batch_first=True), hidden, count_B)


def with_root(commit: Commit) -> tuple[Tensor, Tensor]:
    """(token_BN, last_B): each row's staged tokens with its root behind them, and the root's column.

    Staged `a b` whose next tokens are `b r` become `a b r`, root column 2.
    """
    rows_B = torch.arange(len(commit.count_B), device=commit.count_B.device)
    root_B = commit.next_BA[rows_B, commit.count_B - 1]
    token_BN = torch.cat([commit.token_BA, torch.zeros_like(commit.token_BA[:, :1])], 1)
    token_BN[rows_B, commit.count_B] = root_B
    return token_BN, commit.count_B


def draft_chain(
    root_B: Tensor, logits_BV: Tensor, advance: Callable[[Tensor], Tensor], steps: int, sampling: Sampling, position_B: Tensor
) -> DraftTree:
    """A chain of `steps` drafts below the root: argmax when greedy, else drawn from q, which the tree carries.

    logits_BV: for the first draft. advance: token_B of the last draft -> logits for the next. position_B: of the root.
    With `sampling.shared_noise` a draft is drawn with the number that the verifier will use at its position.
    """
    tokens, laws, sampling = [root_B], [], sampling.drafting
    for step in range(steps):
        if step:
            logits_BV = advance(tokens[-1])
        if sampling.greedy:
            tokens.append(logits_BV.argmax(-1))
        else:
            laws.append(law(logits_BV, sampling))
            if sampling.shared_noise:
                draw_B = uniform(sampling, position_B + step + 1, Lane.TARGET)
            else:
                draw_B = uniform(sampling, position_B, Lane.DRAFT, draw=step)
            tokens.append(pick(laws[-1], draw_B))
    return DraftTree.chain(torch.stack(tokens, 1), q_BNV=torch.stack([*laws, laws[-1]], 1) if laws else None)
