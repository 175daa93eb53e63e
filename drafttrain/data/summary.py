"""A report's facts about the data: counts, lengths, record forms, and token frequencies."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafttrain.data.pool import Conversations


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
        "lengths": _histogram(length_D, conversations.encoder.max_length),
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


def _histogram(length_D: NDArray[np.int64], most: int) -> list[list[int]]:
    """Numbers of rows of at most 32, 64, 128, ... tokens, and of at most `most`."""
    edges = [edge for edge in (2**exponent for exponent in range(5, 31)) if edge < most] + [most]
    counts = np.bincount(np.searchsorted(edges, length_D), minlength=len(edges))
    return [[edge, int(count)] for edge, count in zip(edges, counts, strict=True)]
