"""A draft model with another tokenizer than the target's: what it writes is text, and goes over as text.

As universal assisted decoding does it (transformers; arXiv 2502.05202, string-level exact match): the drafts are deterministic,
so that a lossless policy stays lossless whatever the translation gives.

Shapes: B rows, N tokens fed, R logit rows, V the draft model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.frozen_ref import FrozenRef
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import Taps

UNFINISHED = "\ufffd"  # what a tokenizer decodes a part of a character to
PART = 4  # tokens that one unfinished character has at most
BEHIND = 16  # draft tokens before the new ones that are decoded with them: some decoders change a text's beginning
WINDOW = 96  # characters before the new text that are encoded with it
CHUNK = 64  # columns fed at once


@dataclass(frozen=True, slots=True)
class Translation:
    """Two tokenizers of transformers. Special tokens are no text: they are left out, but a sequence's beginning stays."""

    target: Any
    draft: Any

    def to_draft(self, token: Sequence[int]) -> list[int]:
        """The draft model's tokens of the target's text; a last character that is not finished waits."""
        begin = self.draft.bos_token_id
        first = [begin] if begin is not None and begin in self.draft("", verbose=False)["input_ids"] else []
        return first + _ids(self.draft, self._text(token))

    def to_target(self, token: Sequence[int], known: Sequence[int], written: Sequence[int]) -> list[int]:
        """Target tokens that continue `token`, for what the draft model wrote behind `known`; empty where the two
        tokenisations do not meet at the end of the text.

        Target text `the ca`, draft `t sat`: `the cat sat` begins with the tokens of `the ca` only if `ca` and `t` stay apart;
        the tokens behind them are then the drafts. If `cat` is one token, there is none to draft.
        """
        ends = [i for i, t in enumerate(written) if t == self.draft.eos_token_id]
        written = list(written[: ends[0]]) if ends else list(written)
        text, part = self._text(token), self._part(token)
        new = self._added(known[-BEHIND:], written)
        if part is None or not (new or ends):
            return []
        before, after = (_ids(self.target, tail) for tail in (text[-WINDOW:], text[-WINDOW:] + new))
        meet = len(before)
        if common(before, after) < meet or after[meet : meet + len(part)] != part:
            return []
        stop = self.target.eos_token_id
        return after[meet + len(part) :] + ([stop] if ends and stop is not None else [])

    def _added(self, known: Sequence[int], written: Sequence[int]) -> str:
        before, after = _text(self.draft, known), _text(self.draft, [*known, *written])
        return after[len(before) :].rstrip(UNFINISHED) if after.startswith(before) else ""

    def _text(self, token: Sequence[int]) -> str:
        return _text(self.target, token).rstrip(UNFINISHED)

    def _part(self, token: Sequence[int]) -> list[int] | None:
        """The tokens at the end that make up a part of a character: mostly none. None: there is no telling."""
        for size in range(min(PART, len(token)) + 1):
            if not _text(self.target, token[: len(token) - size]).endswith(UNFINISHED):
                return list(token[len(token) - size :])
        return None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def recent(token: list[int], most: int) -> list[int]:
    """At most `most` of the last tokens. The cut moves by half of that at a time, so that a cache of them stays of use."""
    step = max(1, most // 2)
    return token if len(token) <= most else token[-(-(len(token) - most) // step) * step :]


@dataclass
class TranslatedState:
    """By slot: the target's tokens, root included, and the draft model's tokens whose keys are in the cache."""

    kv: KVCache
    text: list[list[int]]
    held: list[list[int]]
    room: int  # tokens of context for the draft model


class TranslatedDraft(Drafter):
    """Greedy chains of a frozen LM that speaks other tokens. Texts are encoded anew each round, on the host; only tokens behind
    the longest common prefix with the cache are computed.
    """

    captured = False
    trained = False
    remark = "the draft model has another tokenizer: it is not trained, and its drafts go over as text, on the host"

    def __init__(self, lm: Any, translation: Translation, draft_length: int) -> None:
        super().__init__()
        self.taps, self.draft_length, self.translation = Taps(), draft_length, translation
        self._lm = FrozenRef(lm.requires_grad_(False).eval())

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        return iter(())

    def open(self, slots: int, max_len: int) -> TranslatedState:
        lm, longest = self._lm.module, max(2 * max_len, CHUNK)  # another tokenizer may need more tokens
        room = max(1, min(lm.shape.max_positions - self.draft_length, longest))
        kv = lm.new_cache(slots, room + self.draft_length + CHUNK)
        return TranslatedState(kv, [[] for _ in range(slots)], [[] for _ in range(slots)], room)

    def reset(self, state: TranslatedState, slot_R: Tensor) -> None:
        state.kv.reset(slot_R)
        for slot in slot_R.tolist():
            state.text[slot], state.held[slot] = [], []

    def observe(self, state: TranslatedState, commit: Commit, slot_B: Tensor) -> None:
        rows = zip(slot_B.tolist(), commit.count_B.tolist(), commit.token_BA.tolist(), commit.next_BA.tolist(), strict=True)
        for slot, count, token, after in rows:
            if count:
                state.text[slot] = (state.text[slot] or token[:1]) + after[:count]

    def mark(self, state: TranslatedState, slot_B: Tensor) -> list[list[int]]:
        return [state.text[slot] for slot in slot_B.tolist()]

    def rewind(self, state: TranslatedState, slot_B: Tensor, mark: list[list[int]]) -> None:
        for slot, text in zip(slot_B.tolist(), mark, strict=True):
            state.text[slot] = text

    def propose(self, state: TranslatedState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        texts = [state.text[slot] for slot in slot_B.tolist()]
        known = [recent(self.translation.to_draft(text), state.room) for text in texts]
        written = self._write(state, slot_B, known)
        steps = min(self.draft_length, depth or self.draft_length)
        drafts = [self.translation.to_target(*row)[:steps] for row in zip(texts, known, written, strict=True)]
        rows = [[text[-1], *draft, *[0] * (steps - len(draft))] for text, draft in zip(texts, drafts, strict=True)]
        count_B = torch.tensor([1 + len(draft) for draft in drafts], device=slot_B.device)
        return DraftTree.chain(torch.tensor(rows, device=slot_B.device), count_B)

    def _write(self, state: TranslatedState, slot_B: Tensor, known: list[list[int]]) -> list[list[int]]:
        """What the model writes behind each row's tokens, `draft_length` of its own; nothing where there are none."""
        kv, slots, device = state.kv, slot_B.tolist(), slot_B.device
        kv.rows(slot_B)
        begin = [max(0, min(common(state.held[s], row), len(row) - 1)) for s, row in zip(slots, known, strict=True)]
        kv.crop(torch.tensor(begin, device=device))
        rest = [row[n:] for row, n in zip(known, begin, strict=True)]
        logits_BV: Tensor | None = None
        for start in range(0, max(map(len, rest)), CHUNK):
            piece = [row[start : start + CHUNK] for row in rest]
            count_B = torch.tensor([len(row) for row in piece], device=device)
            columns = max(map(len, piece))
            token_BN = torch.tensor([[*row, *[0] * (columns - len(row))] for row in piece], device=device)
            found_BV = self._feed(kv, token_BN, count_B)
            logits_BV = found_BV if logits_BV is None else torch.where(count_B[:, None] > 0, found_BV, logits_BV)
        if logits_BV is None:
            return [[] for _ in known]
        live_B, columns_BK = torch.tensor([bool(row) for row in known], device=device).long(), [logits_BV.argmax(-1)]
        for _ in range(self.draft_length - 1):
            columns_BK.append(self._feed(kv, columns_BK[-1][:, None], live_B).argmax(-1))
        written = [row if k else [] for row, k in zip(torch.stack(columns_BK, 1).tolist(), known, strict=True)]
        for slot, row, new in zip(slots, known, written, strict=True):
            state.held[slot] = row + new[:-1]
        return written

    def _feed(self, kv: KVCache, token_BN: Tensor, count_B: Tensor) -> Tensor:
        """[B, V] logits at each row's last token; its `count` tokens stay in the cache."""
        lm, column_N = self._lm.module, torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(lm.shape.max_positions - 1)
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        logits_BRV: Tensor = lm(token_BN, kv, None, position_BN, Taps(), last_B1).logits_BRV
        kv.keep(column_N.expand_as(token_BN), count_B)
        return logits_BRV[:, 0]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _text(tokenizer: Any, token: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token), skip_special_tokens=True, clean_up_tokenization_spaces=False))
