"""Statistics of a data set: what `inspect` shows, a report's facts, and how many tokens a reduced draft vocabulary covers.

A token outside the drafter's vocabulary can never be drafted. So a position's acceptance is at most the share that is covered.
In return the output matrix has fewer rows (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import Encoded
from drafttrain.data.pool import Conversations
from drafttrain.data.provenance import template_hash
from drafttrain.data.reply_text import text_following
from drafttrain.data.sources import Conversation
from drafttrain.data.templates import MARKED
from drafttrain.model.images import without_images

BINS = 12  # of the histogram
QUANTILES = (0.05, 0.5, 0.95)
ENOUGH = 0.99  # share of the supervised tokens that a recommended vocabulary covers
STEP = 64  # sizes are multiples of this, for efficient matrix products


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


def summarise(conversations: Conversations) -> dict[str, Any]:
    """Facts about the conversations that are prepared by now.

    Tokens, lengths and truncations are those of usable conversations. `dropped` are conversations without a reply within the
    length, and `rejected` unusable records. `documents` are rows before packing; with some templates a conversation has
    several. `lengths` has pairs [at most this many tokens, rows]. `sha256` is that of all text, once all is prepared.
    """
    total, source_counts = Counter[str](), [Counter[str]() for _ in conversations.sources]
    forms = [Counter[str]() for _ in conversations.sources]
    digests = np.zeros(conversations.count, "S16")
    lengths = []
    for block_index, prepared in enumerate(conversations.blocks):
        numbers, indices = conversations.entries_of(block_index)
        block, usable_indices = prepared.block, indices[conversations.documents_C[numbers] > 0]
        source_counts[prepared.source] += Counter(
            prepared=len(numbers),
            conversations=len(usable_indices),
            truncated=int(block.truncated_N[usable_indices].sum()),
            tokens=int(block.tokens_N[usable_indices].sum()),
            supervised_tokens=int(block.supervised_N[usable_indices].sum()),
        )
        forms[prepared.source].update(form for form in np.array(block.column("form"), object)[indices] if form)
        digests[numbers] = np.array(block.column("digest"), "S16")[indices]
        lengths.append(block.lengths(usable_indices))
    for counts in source_counts:
        total += counts
    length_D = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    usable_count, rejected = total["conversations"], len(conversations.faults)
    return {
        "records": conversations.count,
        "prepared": total["prepared"],
        "conversations": usable_count,
        "dropped": total["prepared"] - usable_count - rejected,
        "rejected": rejected,
        "truncated": total["truncated"],
        "documents": len(length_D),
        "tokens": total["tokens"],
        "supervised_tokens": total["supervised_tokens"],
        "supervised_fraction": total["supervised_tokens"] / max(1, total["tokens"]),
        "mean_length": total["tokens"] / max(1, usable_count),
        "lengths": _length_histogram(length_D, conversations.encoder.max_length),
        "sources": [
            {
                "path": source.name,
                "records": len(source.records),
                "weight": source.weight,
                "commit": source.commit,
                "forms": dict(form_counts),
                "conversations": counts["conversations"],
                "supervised_tokens": counts["supervised_tokens"],
            }
            for source, counts, form_counts in zip(conversations.sources, source_counts, forms, strict=True)
        ],
        "sha256": hashlib.sha256(digests.tobytes()).hexdigest() if conversations.complete else None,
    }


def _length_histogram(length_D: NDArray[np.int64], most: int) -> list[list[int]]:
    """Numbers of rows of at most 32, 64, 128, ... tokens, and of at most `most`."""
    edges = [edge for edge in (2**exponent for exponent in range(5, 31)) if edge < most] + [most]
    counts = np.bincount(np.searchsorted(edges, length_D), minlength=len(edges))
    return [[edge, int(count)] for edge, count in zip(edges, counts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Coverage:
    """How many supervised tokens the most frequent ones cover."""

    vocabulary: int  # size of the target's vocabulary
    seen: int  # number of distinct supervised tokens
    curve: list[tuple[int, float]]  # (size, share of supervised tokens that the `size` most frequent ones cover)
    recommended: int  # smallest multiple of `STEP` that covers `ENOUGH`, at most the whole vocabulary
    recommended_share: float
    covered_V: Tensor

    def share(self, size: int) -> float:
        """Share of the supervised tokens that the `size` most frequent ones cover."""
        return float(self.covered_V[min(size, self.vocabulary) - 1])

    def as_dict(self) -> dict[str, Any]:
        """The figures for a report."""
        names = ("vocabulary", "seen", "recommended", "recommended_share")
        return {name: getattr(self, name) for name in names} | {"curve": [list(point) for point in self.curve]}


def coverage(counts_V: Tensor) -> Coverage | None:
    """The coverage for these counts per token (`token_counts`); None if all are 0."""
    vocabulary, total = len(counts_V), int(counts_V.sum())
    if not total:
        return None
    covered_V = counts_V.sort(descending=True).values.cumsum(0).double() / total
    sizes = [size for size in (2**exponent for exponent in range(6, 30)) if size < vocabulary] + [vocabulary]
    needed_tokens = int(torch.searchsorted(covered_V, torch.tensor(ENOUGH, dtype=torch.float64))) + 1
    recommended = min(-(-needed_tokens // STEP) * STEP, vocabulary)
    curve = [(size, float(covered_V[size - 1])) for size in sizes]
    return Coverage(vocabulary, int((counts_V > 0).sum()), curve, recommended, float(covered_V[recommended - 1]), covered_V)
