"""Statistics of a data set for `inspect`: counts, lengths, and conversations cut into supervised and unsupervised pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import Encoded
from drafttrain.data.provenance import template_hash
from drafttrain.data.reply_text import text_following
from drafttrain.data.sources import Conversation
from drafttrain.data.templates import MARKED
from drafttrain.model.images import without_images

BINS = 12  # of the histogram
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Consecutive tokens as text, all supervised or none."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation to be shown."""

    origin: str
    pieces: list[TextPiece]
    tokens: int  # number of tokens
    supervised: int  # number of supervised tokens
    truncated: bool


@dataclass(frozen=True, slots=True)
class Bin:
    """The conversations of `first` to `last` tokens."""

    first: int
    last: int
    count: int


@dataclass
class Statistics:
    """Counts over conversations, filled by `add`."""

    lengths: list[int] = field(default_factory=list)  # tokens of each conversation
    supervised: list[int] = field(default_factory=list)  # supervised tokens of each conversation, 0 included
    truncated: int = 0
    turns: int = 0

    def add(self, conversation: Conversation, encoded: Encoded) -> None:
        """Count a conversation."""
        self.lengths.append(len(encoded.token_ids))
        self.supervised.append(encoded.supervised)
        self.truncated += encoded.truncated
        self.turns += len(conversation.messages)

    def rows(self) -> list[tuple[str, str]]:
        """(name, figure) of each count."""
        count, tokens, supervised = len(self.lengths), sum(self.lengths), sum(self.supervised)
        low, middle, high = (int(x) for x in np.quantile(self.lengths, QUANTILES))
        return [
            ("conversations", f"{count:,}"),
            ("without a supervised token", f"{sum(not s for s in self.supervised):,}"),
            ("truncated to data.max_length", f"{self.truncated:,} ({self.truncated / count:.1%})"),
            ("turns", f"{self.turns:,}"),
            ("tokens", f"{tokens:,}"),
            ("supervised tokens", f"{supervised:,} ({supervised / max(tokens, 1):.1%})"),
            ("length: 5 %, median, 95 %, longest", f"{low:,}, {middle:,}, {high:,}, {max(self.lengths):,} tokens"),
        ]

    def histogram(self) -> list[Bin]:
        """Bins of equal width from the shortest to the longest conversation."""
        low, high = min(self.lengths), max(self.lengths)
        width = max(1, -(-(high - low + 1) // BINS))
        counts = np.bincount((np.array(self.lengths) - low) // width)
        return [Bin(low + i * width, min(high, low + (i + 1) * width - 1), int(count)) for i, count in enumerate(counts)]


def template_rows(tokenizer: PreTrainedTokenizerBase, source: str, given: str | None = None) -> list[tuple[str, str]]:
    """(name, value) rows: the template, and the source of the masks. given: a template that replaces the tokenizer's."""
    template = given or (tokenizer.chat_template and str(tokenizer.get_chat_template()))
    if not template:
        return [("tokenizer", source), ("chat template", "none: `text` records only")]
    masks = "its own generation marks" if MARKED.search(template) else "rendered prefixes"
    return [
        ("tokenizer", source),
        ("chat template", f"sha256 {str(template_hash(template))[:16]}"),
        ("masks from", masks),
    ]


def sample_of(conversation: Conversation, encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """The tokens as they are trained on, special tokens included, decoded piece by piece."""
    ids, mask = encoded.token_ids.tolist(), encoded.mask
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    pieces = [
        TextPiece(text_following(tokenizer, ids[:start], without_images(ids[start:end]), special=True), bool(mask[start]))
        for start, end in pairwise(edges)
        if end > start
    ]
    return Sample(conversation.origin, pieces, len(ids), encoded.supervised, encoded.truncated)


def chosen(count: int, wanted: int, seed: int) -> list[int]:
    """Indices of the conversations to show: a random sample of `count`. Every prefix of it is a random sample too."""
    return np.random.default_rng([seed % 2**64, 2]).permutation(count)[:wanted].tolist()
