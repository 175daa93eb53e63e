"""Prefill: prompts enter the caches in chunks, and every request gets its first token.

Shapes: B prompts, S sequences (a prompt may have several), T prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.core.sampling import Lane
from drafttrain.decoding.step import DecodeStep
from drafttrain.model.drafter import Commit
from drafttrain.model.images import chunk_ends
from drafttrain.model.target import Taps
from drafttrain.ops.sampling import sample


class Prefill:
    """Treats a prompt as a chain that is accepted whole: causal passes over chunks, each observed by the drafter."""

    def __init__(self, step: DecodeStep, chunk: int, bounded: bool) -> None:
        """chunk: positions of one pass at most. bounded: the lengths of the drafter's caches are bounded by a graph runner."""
        self.decode_step, self.chunk, self.bounded = step, chunk, bounded

    def __call__(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(slot_S, root_S): the slots of each prompt's sequences, prompt by prompt, and their first tokens.

        Only the first slot of a prompt holds it in the target's cache.
        """
        decode, device = self.decode_step, self.decode_step.target.device
        rows = [torch.tensor(prompt, device=device) for prompt in prompts]
        token_BT, lengths = pad_sequence(rows, batch_first=True), [len(row) for row in rows]
        length_B = torch.tensor(lengths, device=device)
        row_S = torch.tensor([row for row, prompt_slots in enumerate(slots) for _ in prompt_slots], device=device)
        slot_S = torch.tensor([slot for prompt_slots in slots for slot in prompt_slots], device=device)
        decode.kv.use_static_length(None)
        decode.kv.rows(torch.tensor([prompt_slots[0] for prompt_slots in slots], device=device))
        decode.kv.reset(decode.kv.slot_B)
        if decode.state is not None:
            decode.state.reset(slot_S)
        last_BV: Tensor | None = None
        root_S = torch.zeros_like(slot_S)
        for start, stop in pairwise([0, *chunk_ends(prompts, self.chunk, decode.target.whole_images)]):
            chunk_BT = token_BT[:, start:stop]
            counts = [min(max(length - start, 0), chunk_BT.shape[1]) for length in lengths]
            count_B = (length_B - start).clamp(0, chunk_BT.shape[1])
            chunk_BV, hidden = self._pass(chunk_BT, count_B)
            decode.kv.extend(counts)
            ends_B1 = ((count_B > 0) & (start + count_B == length_B))[:, None]
            last_BV = chunk_BV if last_BV is None else torch.where(ends_B1, chunk_BV, last_BV)
            if any(start < length <= stop for length in lengths):
                root_S = self._first(last_BV[row_S], slot_S, token_BT.gather(1, length_B[:, None] - 1)[row_S], length_B[row_S])
            if decode.state is not None:
                token_ST = torch.cat([token_BT, token_BT[:, :1]], 1)[row_S].scatter(1, length_B[row_S, None], root_S[:, None])
                states = {key: state[row_S] for key, state in hidden.items()}
                commit = Commit(token_ST[:, start:stop], token_ST[:, start + 1 : stop + 1], states, count_B[row_S])
                for kv in decode.state.caches if self.bounded else ():
                    kv.use_static_length(start)
                decode.state.observe_prompt(commit, slot_S)
        return slot_S, root_S

    def _pass(self, chunk_BT: Tensor, count_B: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """One chunk through the target: the logits [B, V] at each row's last token of it, and the tapped states.

        Its keys and values are scratch positions of the target's cache, which the caller commits.
        """
        decode, column_T = self.decode_step, torch.arange(chunk_BT.shape[1], device=chunk_BT.device)
        position_BT = decode.kv.length_B[:, None] + column_T
        out = decode.target(chunk_BT, decode.kv, None, position_BT, decode.taps, (count_B - 1).clamp_min(0)[:, None])
        assert out.logits_BRV is not None
        return out.logits_BRV[:, 0], out.hidden

    def again(self, slot: int, text: Sequence[int]) -> None:
        """Fill the slot of the target's cache with this text, which is shorter than what it holds. Rows stay those in use."""
        kv, device = self.decode_step.kv, self.decode_step.target.device
        static, slot_B = kv.static_length, kv.slot_B
        kv.use_static_length(None)
        kv.rows(torch.tensor([slot], device=device))
        kv.reset(kv.slot_B)
        for start in range(0, len(text), self.chunk):
            chunk_1T = torch.tensor([text[start : start + self.chunk]], device=device)
            position_1T = start + torch.arange(chunk_1T.shape[1], device=device)[None]
            self.decode_step.target(chunk_1T, kv, None, position_1T, Taps(), chunk_1T[:, :0])
            kv.extend([chunk_1T.shape[1]])
        kv.use_static_length(static)
        kv.rows(slot_B)

    def _first(self, last_SV: Tensor, slot_S: Tensor, token_S1: Tensor, length_S: Tensor) -> Tensor:
        """The first token of every sequence, from the logits at its prompt's last token."""
        processors, slots = self.decode_step.logits_processors, self.decode_step.slots
        if not processors.idle:
            ancestor_S11 = torch.ones(len(slot_S), 1, 1, dtype=torch.bool, device=slot_S.device)
            last_SV = processors(last_SV[:, None], token_S1, ancestor_S11, slot_S, torch.zeros_like(slot_S))[:, 0]
        return sample(last_SV, slots.sampling(self.decode_step.sampling, slot_S), length_S, Lane.TARGET)
