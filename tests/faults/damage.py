"""Damage to bytes and files, decided by a random generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path


def damaged(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The bytes with one bit, one byte or a run of them changed, cut off or grown; and the name of the damage."""
    if not content:
        return b"\0", "grown"
    i, kind = draw.randrange(len(content)), draw.randrange(7)
    if kind == 0:
        return content[:i] + bytes([content[i] ^ 1 << draw.randrange(8)]) + content[i + 1 :], "bit flip"
    if kind == 1:
        return content[:i] + bytes([content[i] ^ draw.randint(1, 255)]) + content[i + 1 :], "byte flip"
    if kind == 2:
        size = min(draw.choice([2, 8, 64, 4096]), len(content) - i)
        return content[:i] + bytes(size) + content[i + size :], "zeros"
    if kind == 3:
        size = draw.choice([1, 8, 512])
        return content[:i] + draw.randbytes(size) + content[i + size :], "noise"
    if kind == 4:
        return content[: draw.choice([0, 1, i, len(content) - 1])], "truncation"
    if kind == 5:
        return content + draw.randbytes(draw.choice([1, 64])), "growth"
    size = draw.choice([1, 16, 256])
    return content[:i] + content[i + size :], "hole"


def strike(files: Sequence[Path], draw: random.Random) -> tuple[list[Path], str]:
    """Damage one of these files, delete it, or swap it with another. Returns which ones and how; an empty list: nothing
    changed.
    """
    file = draw.choice(files)
    kind = draw.random()
    if kind < 0.1:
        file.unlink()
        return [file], "deletion"
    if kind < 0.18 and len(files) > 1:
        other = draw.choice([one for one in files if one != file])
        first, second = file.read_bytes(), other.read_bytes()
        file.write_bytes(second)
        other.write_bytes(first)
        return ([file, other] if first != second else []), "swap"
    before = file.read_bytes()
    after, how = damaged(before, draw)
    file.write_bytes(after)
    return ([file] if after != before else []), how
