"""Prompts enter the caches, in chunks, and every text gets its first token.

Shapes: B prompts, S texts (a prompt may have several), T prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.core.sampling import Lane
from drafttrain.decoding.step import Round
from drafttrain.model.drafter import Commit
from drafttrain.ops.sample import sample


class Prefill:
    """A prompt is a chain that is accepted whole: causal passes over chunks, each read by the drafter for all its texts.

    chunk: positions of one pass at most. bounded: the drafter's caches have bounds, set by rounds that run ahead of the host.
    """

    def __init__(self, round: Round, chunk: int, bounded: bool) -> None:
        self.round, self.chunk, self.bounded = round, chunk, bounded

    def __call__(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(slot_S, root_S): prompt by prompt the slots of its texts, and their first tokens.

        The target's cache holds a prompt in the first of its slots alone.
        """
        round, device = self.round, self.round.target.device
        rows = [torch.tensor(prompt, device=device) for prompt in prompts]
        token_BT, lengths = pad_sequence(rows, batch_first=True), [len(row) for row in rows]
        length_B = torch.tensor(lengths, device=device)
        row_S = torch.tensor([row for row, own in enumerate(slots) for _ in own], device=device)
        slot_S = torch.tensor([slot for own in slots for slot in own], device=device)
        round.kv.use_static_length(None)
        round.kv.rows(torch.tensor([own[0] for own in slots], device=device))
        round.kv.reset(round.kv.slot_B)
        if round.drafter:
            round.drafter.reset(round.state, slot_S)
        last_BV: Tensor | None = None
        root_S = torch.zeros_like(slot_S)
        for start in range(0, token_BT.shape[1], self.chunk):
            chunk_BT = token_BT[:, start : start + self.chunk]
            stop = start + chunk_BT.shape[1]
            count_B = (length_B - start).clamp(0, chunk_BT.shape[1])
            chunk_BV, hidden = self._pass(chunk_BT, count_B)
            ends_B1 = ((count_B > 0) & (start + count_B == length_B))[:, None]
            last_BV = chunk_BV if last_BV is None else torch.where(ends_B1, chunk_BV, last_BV)
            if any(start < length <= stop for length in lengths):
                root_S = self._first(last_BV[row_S], slot_S, token_BT.gather(1, length_B[:, None] - 1)[row_S], length_B[row_S])
            if round.drafter:
                known_ST = torch.cat([token_BT, token_BT[:, :1]], 1)[row_S].scatter(1, length_B[row_S, None], root_S[:, None])
                states = {key: state[row_S] for key, state in hidden.items()}
                commit = Commit(known_ST[:, start:stop], known_ST[:, start + 1 : stop + 1], states, count_B[row_S])
                for kv in round.drafter.caches(round.state) if self.bounded else ():
                    kv.use_static_length(start)
                round.drafter.read(round.state, commit, slot_S)
        return slot_S, root_S

    def _pass(self, chunk_BT: Tensor, count_B: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """One chunk through the target and into its cache: the logits [B, V] at its last token, and the tapped states."""
        round, column_T = self.round, torch.arange(chunk_BT.shape[1], device=chunk_BT.device)
        position_BT = round.kv.length_B[:, None] + column_T
        out = round.target(chunk_BT, round.kv, None, position_BT, round.taps, (count_B - 1).clamp_min(0)[:, None])
        assert out.logits_BRV is not None
        round.kv.keep(column_T.expand_as(chunk_BT), count_B)
        return out.logits_BRV[:, 0], out.hidden

    def _first(self, last_SV: Tensor, slot_S: Tensor, token_S1: Tensor, length_S: Tensor) -> Tensor:
        """The first token of every text, from the logits at its prompt's last token."""
        processors, slots = self.round.processors, self.round.slots
        if not processors.idle:
            one_S11 = torch.ones(len(slot_S), 1, 1, dtype=torch.bool, device=slot_S.device)
            last_SV = processors(last_SV[:, None], token_S1, one_S11, slot_S, torch.zeros_like(slot_S))[:, 0]
        return sample(last_SV, slots.sampling(self.round.sampling, slot_S), length_S, Lane.TARGET)
