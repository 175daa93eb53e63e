"""Converts a conversation to token ids and the mask of the tokens that the target itself wrote.

`templates` finds a reply's place in the text. Its place among the tokens comes from tokenising the text up to there and
comparing ids. Worked example:

    up to the reply    <s> [INST] hi [/INST]                          3 tokens after <s>: the reply starts at 4
    past the reply     <s> [INST] hi [/INST] yes </s>                 it ends at 6, its end-of-turn token included
    whole              <s> [INST] hi [/INST] yes </s> [INST] ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.forms import Conversation
from drafttrain.data.provenance import tokenizer_hash
from drafttrain.data.templates import Rendered, Template, TemplateOptions, special_tokens
from drafttrain.model.images import FIRST
from drafttrain.targets import unknown_adapter
from drafttrain.targets.images import TEXT_ONLY, ImageRef, Images


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Token ids and loss mask of one row."""

    token_ids: NDArray[Any]  # [T], int32; int64 with ids of images (`model.images`)
    mask: NDArray[np.bool_]  # bool [T], True on supervised tokens; never on a document's first token, which nothing precedes
    truncated: bool = False  # whether a reply or a part of one did not fit
    # first tokens of the row's documents; several if conversations are packed or replies need separate texts
    starts: tuple[int, ...] = (0,)
    images: tuple[ImageRef, ...] = ()  # that were read for it; empty for rows that come from prepared data
    adapter: str | None = None  # LoRA adapter of the target whose text it is; None: of the target itself

    @property
    def documents(self) -> list[NDArray[Any]]:
        """Each document's token ids."""
        return np.split(self.token_ids, self.starts[1:])

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return int(self.mask.sum())

    @property
    def last_reply(self) -> int:
        """The position at which the last supervised run begins: 5 in the mask 0 1 1 0 0 1 1 1; 0 if there is none."""
        run_starts = np.flatnonzero(self.mask[1:] & ~self.mask[:-1]) + 1  # a first token is never supervised
        return int(run_starts[-1]) if len(run_starts) else 0

    def split(self) -> list[Encoded]:
        """The documents as separate rows."""
        if len(self.starts) == 1:
            return [self]
        masks = np.split(self.mask, self.starts[1:])
        pairs = zip(self.documents, masks, strict=True)
        return [Encoded(ids, mask, self.truncated, adapter=self.adapter) for ids, mask in pairs]


def join(documents: Sequence[Encoded]) -> Encoded:
    """One row of all these documents."""
    if len(documents) == 1:
        return documents[0]
    starts = np.cumsum([0, *(len(d.token_ids) for d in documents[:-1])]).tolist()
    token_ids, mask = (np.concatenate([getattr(d, name) for d in documents]) for name in ("token_ids", "mask"))
    images = tuple(dict.fromkeys(image for d in documents for image in d.images))
    return Encoded(token_ids, mask, any(d.truncated for d in documents), tuple(starts), images, documents[0].adapter)


@dataclass(frozen=True, slots=True)
class Boundary:
    """An edge of a reply: a place in a text, and its place among the text's ids."""

    anchor: int  # index of the last special token before it, from which `piece` is tokenised
    size: int  # number of ids of the text up to the edge, tokenised by itself
    common: int  # how many of them the whole text's ids start with
    piece: str  # text from `anchor` to the edge


class Encoder:
    """Converts conversations to rows of at most `max_length` tokens per document."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        options: TemplateOptions | None = None,
        images: Images = TEXT_ONLY,
        vocab_size: int | None = None,
        adapters: Sequence[str] | None = None,
    ) -> None:
        """vocab_size: tokens that the target has; None: not known. adapters: the names of its LoRA adapters; None: any."""
        self.tokenizer, self.max_length, self.images, self.vocab_size = tokenizer, max_length, images, vocab_size
        self.adapters = adapters
        self.template = Template(tokenizer, options or TemplateOptions(), images)
        added_tokens = tokenizer.added_tokens_decoder
        self.special = {i for i, token in added_tokens.items() if token.special}
        self._anchor_pattern = special_tokens(tokenizer)
        self._anchor_ids = {token.content: i for i, token in added_tokens.items() if token.special and not token.normalized}

    def __call__(self, conversation: Conversation) -> Encoded:
        """The conversation's row. The mask is all False when no reply fits into `max_length`.

        Turns are kept whole: a conversation that does not fit is cut before a turn. Only a first reply that is too long by
        itself is cut inside, as plain text is. Raises UserError when the template is missing, refuses the conversation or hides
        its replies, and for a token that the target does not have.
        """
        adapter = conversation.adapter
        if adapter is not None and self.adapters is not None and adapter not in self.adapters:
            raise UserError(f"{conversation.origin}: {unknown_adapter(adapter, self.adapters)}")
        row = replace(self._row_of(conversation), adapter=adapter)
        text_ids = row.token_ids[row.token_ids < FIRST]
        if self.vocab_size is not None and text_ids.size and (max_id := int(text_ids.max())) >= self.vocab_size:
            raise UserError(
                f"{conversation.origin}: token {max_id} ({self.tokenizer.decode([max_id])!r:.40}) is none of the target's "
                f"{self.vocab_size}; remove it from the text, or the record"
            )
        return row

    def _row_of(self, conversation: Conversation) -> Encoded:
        if conversation.text is not None and conversation.spans:
            return self._document(Rendered(conversation.text, list(conversation.spans)), True, conversation.origin)
        if conversation.text is not None:
            (ids,) = self._ids([conversation.text], special=True)
            return _masked(ids, [(0, len(ids))], self.max_length)
        if self._takes_tokens(conversation):
            documents = [self._row(text.ids, _runs(text.mask), i == 0) for i, text in enumerate(conversation.tokens)]
        else:
            texts = self.template.render(conversation)
            documents = [self._document(text, i == 0, conversation.origin) for i, text in enumerate(texts)]
        supervised = [document for document in documents if document.supervised]
        row = join(supervised or documents[:1])
        return replace(row, truncated=any(document.truncated for document in documents))

    def _document(self, rendered: Rendered, first: bool, origin: str) -> Encoded:
        """The row of one text. first: it contains the conversation's first reply, which may be cut."""
        ids, boundaries = self._edges(rendered)
        replies = [
            (start := self._reply_start(ids, begin), self._end_of_turn(ids, start, end.common))
            for begin, end in zip(boundaries[::2], boundaries[1::2], strict=True)
        ]
        token_ids = self.images.ids(ids, rendered.images, origin)
        return replace(self._row(token_ids, replies, first), images=rendered.images)

    def _row(self, ids: Sequence[int] | NDArray[Any], replies: Sequence[tuple[int, int]], first: bool) -> Encoded:
        fitting_ends = [end for _, end in replies if end <= self.max_length]
        if len(ids) <= self.max_length or (not fitting_ends and first):
            return _masked(ids, replies, self.max_length)
        row = _masked(ids, replies, max(fitting_ends, default=1))
        return replace(row, truncated=len(fitting_ends) < len(replies))

    def _takes_tokens(self, conversation: Conversation) -> bool:
        """Whether the conversation's own tokens are used: they are this tokenizer's, with the template that is asked for."""
        if not conversation.tokens or conversation.tokenizer is None:
            return bool(conversation.tokens)
        options = self.template.options
        return options.thinking == "keep" and not options.partial and conversation.tokenizer == self.fingerprint

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the tokenizer and the template."""
        return tokenizer_hash(self.tokenizer, self.template.options.text or self.tokenizer.chat_template)

    def _edges(self, rendered: Rendered) -> tuple[list[int], list[Boundary]]:
        """The text's ids, and the boundaries of its replies: start and end in turn.

        Each text up to a boundary is tokenised from the last special token before it instead of from the beginning. A tokenizer
        splits a text at special tokens first, so the ids are the same, and the cost stays linear in the length.
        """
        text, offsets = rendered.text, [offset for reply in rendered.replies for offset in reply]
        anchors = (
            []
            if self._anchor_pattern is None
            else [(m.start(), m.end(), self._anchor_ids[m[0]]) for m in self._anchor_pattern.finditer(text)]
        )
        previous = [bisect_right(anchors, offset, key=lambda anchor: anchor[1]) - 1 for offset in offsets]
        segments = [text[anchors[i][0] if i >= 0 else 0 : offset] for i, offset in zip(previous, offsets, strict=True)]
        ids, *segment_ids = self._ids([text, *segments])
        anchor_ids = set(self._anchor_ids.values())
        id_anchors = [(i, token) for i, token in enumerate(ids) if token in anchor_ids]
        if [token for _, token in id_anchors] != [anchor[2] for anchor in anchors]:  # a tokenizer that splits in another way
            id_anchors, previous, segment_ids = [], [-1] * len(offsets), self._ids([text[:offset] for offset in offsets])
            segments = [text[:offset] for offset in offsets]
        segment_starts = [id_anchors[i][0] if i >= 0 else 0 for i in previous]
        return ids, [
            Boundary(start, start + len(tail_ids), start + _common(tail_ids, ids[start : start + len(tail_ids)]), segment)
            for start, tail_ids, segment in zip(segment_starts, segment_ids, segments, strict=True)
        ]

    def _reply_start(self, ids: list[int], boundary: Boundary) -> int:
        """Index of the first id after the prompt.

        An id that covers the end of the prompt and the beginning of the reply can never be drafted after that prompt. Then the
        decoded text shows how many ids the prompt takes.
        """
        if boundary.common == boundary.size:
            return boundary.size
        for end in range(boundary.common + 1, len(ids)):
            if len(str(self.tokenizer.decode(ids[boundary.anchor : end]))) >= len(boundary.piece):
                return end
        return boundary.size

    def _ids(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        default_splitting = not special and not self.tokenizer.split_special_tokens
        if default_splitting and backend is not None and backend.truncation is None and backend.padding is None:
            # same ids without the offsets and objects that transformers requests: a quarter of the time
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        encoded = self.tokenizer(
            list(texts), add_special_tokens=special, verbose=False, return_attention_mask=False, return_token_type_ids=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def _end_of_turn(self, ids: list[int], first: int, last: int) -> int:
        """Index after the end-of-turn token, which the marks may exclude, and before the blanks that follow it."""
        eos = self.tokenizer.eos_token_id
        if last < len(ids) and ids[last] == eos and ids[last - 1] != eos:
            return last + 1
        end = next((i + 1 for i in range(last - 1, first - 1, -1) if ids[i] in self.special), None)
        return end if end is not None and not str(self.tokenizer.decode(ids[end:last])).strip() else last


def _masked(ids: Sequence[int] | NDArray[Any], replies: Sequence[tuple[int, int]], length: int) -> Encoded:
    """The first `length` ids with the replies' mask, which never covers an image."""
    ids = ids if isinstance(ids, np.ndarray) else np.array(ids, np.int32)
    mask = np.zeros(len(ids), np.bool_)
    for first, last in replies:
        mask[first:last] = True
    mask[:1] = False
    if ids.dtype == np.int64:
        mask &= ids < FIRST
    return Encoded(ids[:length], mask[:length], truncated=len(ids) > length)


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _common(prefix: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix; less than that of `prefix` if its last token merges with the text that follows."""
    return next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), min(len(prefix), len(ids)))
