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
    total, each = Counter[str](), [Counter[str]() for _ in conversations.sources]
    forms = [Counter[str]() for _ in conversations.sources]
    digests = np.zeros(conversations.count, "S16")
    lengths = []
    for number, done in enumerate(conversations.blocks):
        numbers, places = conversations.entries_of(number)
        block, usable = done.block, places[conversations.documents_C[numbers] > 0]
        each[done.source] += Counter(
            prepared=len(numbers),
            conversations=len(usable),
            truncated=int(block.truncated_N[usable].sum()),
            tokens=int(block.tokens_N[usable].sum()),
            supervised_tokens=int(block.supervised_N[usable].sum()),
        )
        forms[done.source].update(form for form in np.array(block.column("form"), object)[places] if form)
        digests[numbers] = np.array(block.column("digest"), "S16")[places]
        lengths.append(block.lengths(usable))
    for counted in each:
        total += counted
    length_D = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    kept, rejected = total["conversations"], len(conversations.faults)
    return {
        "records": conversations.count,
        "prepared": total["prepared"],
        "conversations": kept,
        "dropped": total["prepared"] - kept - rejected,
        "rejected": rejected,
        "truncated": total["truncated"],
        "documents": len(length_D),
        "tokens": total["tokens"],
        "supervised_tokens": total["supervised_tokens"],
        "supervised_fraction": total["supervised_tokens"] / max(1, total["tokens"]),
        "mean_length": total["tokens"] / max(1, kept),
        "lengths": _histogram(length_D, conversations.encoder.max_length),
        "sources": [
            {
                "path": source.name,
                "records": len(source.records),
                "weight": source.weight,
                "commit": source.commit,
                "forms": dict(found),
                "conversations": counted["conversations"],
                "supervised_tokens": counted["supervised_tokens"],
            }
            for source, counted, found in zip(conversations.sources, each, forms, strict=True)
        ],
        "sha256": hashlib.sha256(digests.tobytes()).hexdigest() if conversations.complete else None,
    }


def _histogram(length_D: NDArray[np.int64], most: int) -> list[list[int]]:
    """Numbers of rows of at most 32, 64, 128, ... tokens, and of at most `most`."""
    edges = [edge for edge in (2**power for power in range(5, 31)) if edge < most] + [most]
    counts = np.bincount(np.searchsorted(edges, length_D), minlength=len(edges))
    return [[edge, int(count)] for edge, count in zip(edges, counts, strict=True)]
