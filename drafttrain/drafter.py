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

    @property
    def tunable(self) -> bool:
        """Whether `tune` chooses anything."""
        return type(self).tune is not Drafter.tune

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

    def excess(self, slot_B: Tensor, most: int, chunk: int = 512) -> Iterator[tuple[Tensor, Commit]]:
        """Take what slots have staged beyond `most` positions, oldest first: a prompt, or what an idle drafter missed.

        One slot at a time, (its number [1], at most `chunk` positions): beside others' few new positions a prompt would widen
        every row.
        """
        for slot in slot_B.tolist():
            waiting = sum(len(part[0]) for part in self._parts[slot]) - most
            if waiting <= 0:
                continue
            token, after, hidden = self._joined(slot)
            self._parts[slot] = [(token[waiting:], after[waiting:], {k: h[waiting:] for k, h in hidden.items()})]
            for start in range(0, waiting, chunk):
                here = slice(start, min(start + chunk, waiting))
                states = {k: h[None, here] for k, h in hidden.items()}
                count_1 = torch.tensor([here.stop - start], device=token.device)
                yield (
                    torch.tensor([slot], device=slot_B.device),
                    Commit(token[None, here], after[None, here], states, count_1),
                )

    def take(self, slot_B: Tensor) -> Commit:
        """The staged positions of these slots, left-aligned and padded with zeros; they are staged no more."""
        rows = [self._joined(slot) for slot in slot_B.tolist()]
        self.clear(slot_B)
        pad = nn.utils.rnn.pad_sequence
        hidden = {k: pad([row[2][k] for row in rows], batch_first=True) for k in rows[0][2]}
        count_B = torch.tensor([len(row[0]) for row in rows], device=rows[0][0].device)
        token_BA, next_BA = (pad([row[i] for row in rows], batch_first=True) for i in (0, 1))  # type: ignore[misc]
        return Commit(token_BA, next_BA, hidden, count_B)

    def _joined(self, slot: int) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        parts = self._parts[slot]
        if len(parts) == 1:
            return parts[0]
        hidden = {k: torch.cat([part[2][k] for part in parts]) for k in parts[0][2]}
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), hidden


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
