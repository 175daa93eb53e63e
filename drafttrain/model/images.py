"""Token ids of images. Every row of an image has an id of its own, after all ids of a vocabulary.

An id names the image, by a hash of its content, and the row of its features. So a sequence of ids says all that a target's
states depend on, wherever it is stored or cut. Worked example, an image of 3 rows whose hash is h, in the text `a b`:

    placeholders    a   p        p          p          b
    ids             a   h + 0    h + 1      h + 2      b          h = FIRST + 2**16 * (46 bits of the hash)

Shapes: any. Ids are int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

FIRST = 1 << 62  # the smallest id of an image
ROW_BITS = 16
HASH_BITS = 46
MOST_ROWS = 1 << ROW_BITS  # of one image


def base_of(digest: bytes) -> int:
    """The id of an image's first row, from a hash of its content."""
    return FIRST | (int.from_bytes(digest[:8]) % (1 << HASH_BITS)) << ROW_BITS


def bases(token: Any) -> Any:
    """The id of the first row of each id's image. For integers, arrays and tensors of ids of images."""
    return token >> ROW_BITS << ROW_BITS


def rows(token: Any) -> Any:
    """The row of each id in its image."""
    return token & (MOST_ROWS - 1)


def has_images(token: Iterable[int]) -> bool:
    """Whether a sequence holds an image."""
    return max(token, default=0) >= FIRST


def with_placeholders(token: Iterable[int], placeholder: int) -> list[int]:
    """The same sequence with the target's own placeholder at every row of an image."""
    return [placeholder if t >= FIRST else t for t in token]


def without_images(token: Iterable[int]) -> list[int]:
    """The text of a sequence: ids that a tokenizer knows."""
    return [t for t in token if t < FIRST]


def spans(token: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) of each image of a sequence. An image begins at its row 0 or at the sequence's beginning."""
    image_spans: list[tuple[int, int]] = []
    for i, t in enumerate(token):
        if t < FIRST:
            continue
        if image_spans and image_spans[-1][1] == i and rows(t):
            image_spans[-1] = image_spans[-1][0], i + 1
        else:
            image_spans.append((i, i + 1))
    return image_spans


def chunk_ends(prompts: Sequence[Sequence[int]], chunk: int, whole: bool) -> list[int]:
    """Where chunks of `chunk` positions end, for prompts that are read together.

    whole: no image is cut. A chunk ends before an image that does not fit; one that does not fit into any chunk makes a longer
    one. Worked example, chunk 4, an image at 2 to 5: chunks end at 2, then at 6.
    """
    longest = max(map(len, prompts))
    if not whole:
        return [min(start + chunk, longest) for start in range(0, longest, chunk)]
    images = [span for prompt in prompts for span in spans(prompt)]
    ends, start = list[int](), 0
    while start < longest:
        stop = min(start + chunk, longest)
        while cut := [first for first, last in images if first < stop < last]:
            stop = min(cut)
        if stop <= start:
            stop = min(start + chunk, longest)
            while cut := [last for first, last in images if first < stop < last]:
                stop = max(cut)
        ends.append(stop)
        start = stop
    return ends
