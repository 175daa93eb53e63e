"""One conversation to token ids and the mask of what the target itself would have said.

Where a reply stands in the text is the template's matter (`templates`); where it stands among the tokens comes from tokenising
the text up to there and comparing ids. Worked example:

    up to the reply    <s> [INST] hi [/INST]                          3 tokens behind <s>: the reply starts at 4
    past the reply     <s> [INST] hi [/INST] yes </s>                 it ends at 6, its end-of-turn token included
    whole              <s> [INST] hi [/INST] yes </s> [INST] ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from drafttrain.data.forms import Conversation
from drafttrain.data.templates import Rendered, Template, TemplateOptions, special_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """token_ids: int32 [T]. mask: bool [T], True on supervised tokens; never on a first one, which nothing precedes.

    starts: where its documents begin, of which each is a conversation by itself; one, unless several are packed or the
    conversation's replies stand in several texts. truncated: whether a reply or some of it did not fit.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: bool = False
    starts: tuple[int, ...] = (0,)

    @property
    def documents(self) -> list[NDArray[np.int32]]:
        """Each document's token ids."""
        return np.split(self.token_ids, self.starts[1:])

    @property
    def supervised(self) -> int:
        """How many tokens are supervised."""
        return int(self.mask.sum())

    def split(self) -> list[Encoded]:
        """Its documents, each by itself."""
        if len(self.starts) == 1:
            return [self]
        masks = np.split(self.mask, self.starts[1:])
        return [Encoded(ids, mask, self.truncated) for ids, mask in zip(self.documents, masks, strict=True)]


def join(documents: Sequence[Encoded]) -> Encoded:
    """One row of them all."""
    if len(documents) == 1:
        return documents[0]
    starts = np.cumsum([0, *(len(d.token_ids) for d in documents[:-1])]).tolist()
    token_ids, mask = (np.concatenate([getattr(d, name) for d in documents]) for name in ("token_ids", "mask"))
    return Encoded(token_ids, mask, any(d.truncated for d in documents), tuple(starts))


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    """As `Encoder`, with the tokenizer's own template."""
    return Encoder(tokenizer, max_length)(conversation)


@dataclass(frozen=True, slots=True)
class Edge:
    """A place in a text whose ids are known. size: ids that the text up to there has by itself; common: those of them that the
    whole begins with. piece: the text up to there, from the id `wall` on.
    """

    wall: int
    size: int
    common: int
    piece: str


class Encoder:
    """Conversations to rows of at most `max_length` tokens a document."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, options: TemplateOptions | None = None) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.template = Template(tokenizer, options or TemplateOptions())
        added = tokenizer.added_tokens_decoder
        self.special = {i for i, token in added.items() if token.special}
        self._wall = special_tokens(tokenizer)
        self._walls = {token.content: i for i, token in added.items() if token.special and not token.normalized}

    def __call__(self, conversation: Conversation) -> Encoded:
        """The mask is all False when no reply lies within `max_length`.

        Turns are kept whole: what does not fit is left out from a turn on. Only a first reply that is too long by itself is
        cut, as plain text is. Raises UserError when the template is missing, refuses the conversation or hides its replies.
        """
        if conversation.text is not None:
            (ids,) = self._ids([conversation.text], special=True)
            return _masked(ids, [(0, len(ids))], self.max_length)
        texts = self.template.render(conversation)
        documents = [self._document(text, first=i == 0) for i, text in enumerate(texts)]
        kept = [document for document in documents if document.supervised]
        row = join(kept or documents[:1])
        return replace(row, truncated=any(document.truncated for document in documents))

    def _document(self, rendered: Rendered, first: bool) -> Encoded:
        """first: it holds the conversation's first reply, which may be cut."""
        ids, edges = self._edges(rendered)
        replies = [
            (behind := self._behind(ids, begin), self._end_of_turn(ids, behind, end.common))
            for begin, end in zip(edges[::2], edges[1::2], strict=True)
        ]
        whole = [end for _, end in replies if end <= self.max_length]
        if len(ids) <= self.max_length or (not whole and first):
            return _masked(ids, replies, self.max_length)
        return replace(_masked(ids, replies, max(whole, default=1)), truncated=len(whole) < len(replies))

    def _edges(self, rendered: Rendered) -> tuple[list[int], list[Edge]]:
        """The text's ids, and where among them each reply begins and ends, in turn.

        The texts up to there are tokenised from the last special token before, not from their beginning: a tokenizer splits a
        text at these before anything else, so that they are the same ids, and no square of the length.
        """
        text, at = rendered.text, [edge for reply in rendered.replies for edge in reply]
        walls = [] if self._wall is None else [(m.start(), m.end(), self._walls[m[0]]) for m in self._wall.finditer(text)]
        before = [bisect_right(walls, edge, key=lambda wall: wall[1]) - 1 for edge in at]
        pieces = [text[walls[b][0] if b >= 0 else 0 : edge] for b, edge in zip(before, at, strict=True)]
        ids, *tails = self._ids([text, *pieces])
        wall_ids = set(self._walls.values())
        found = [(i, token) for i, token in enumerate(ids) if token in wall_ids]
        if [token for _, token in found] != [wall[2] for wall in walls]:  # another tokenizer than those that are known
            found, before, tails = [], [-1] * len(at), self._ids([text[:edge] for edge in at])
            pieces = [text[:edge] for edge in at]
        firsts = [found[b][0] if b >= 0 else 0 for b in before]
        return ids, [
            Edge(first, first + len(tail), first + _common(tail, ids[first : first + len(tail)]), piece)
            for first, tail, piece in zip(firsts, tails, pieces, strict=True)
        ]

    def _behind(self, ids: list[int], edge: Edge) -> int:
        """The first id behind the prompt. One that prompt and reply share can never be drafted behind that prompt, and how many
        ids the prompt has then is told by their text."""
        if edge.common == edge.size:
            return edge.size
        for end in range(edge.common + 1, len(ids)):
            if len(str(self.tokenizer.decode(ids[edge.wall : end]))) >= len(edge.piece):
                return end
        return edge.size

    def _ids(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        as_it_is = backend is not None and backend.truncation is None and backend.padding is None
        if backend is not None and as_it_is and not special and not self.tokenizer.split_special_tokens:
            # the same ids without the offsets and objects that transformers asks for: a quarter of the time of all this
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        encoded = self.tokenizer(
            list(texts), add_special_tokens=special, verbose=False, return_attention_mask=False, return_token_type_ids=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def _end_of_turn(self, ids: list[int], first: int, last: int) -> int:
        """Where the target stops: after the end-of-turn token, also when marks leave it out, and before the blanks behind
        it."""
        eos = self.tokenizer.eos_token_id
        if last < len(ids) and ids[last] == eos and ids[last - 1] != eos:
            return last + 1
        end = next((i + 1 for i in range(last - 1, first - 1, -1) if ids[i] in self.special), None)
        return end if end is not None and not str(self.tokenizer.decode(ids[end:last])).strip() else last


def _masked(ids: Sequence[int], replies: Sequence[tuple[int, int]], length: int) -> Encoded:
    """The first `length` ids."""
    mask = np.zeros(len(ids), np.bool_)
    for first, last in replies:
        mask[first:last] = True
    mask[:1] = False
    return Encoded(np.array(ids[:length], np.int32), mask[:length], truncated=len(ids) > length)


def _common(prefix: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix; shorter than `prefix` where its last token goes on into what follows."""
    return next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), min(len(prefix), len(ids)))
