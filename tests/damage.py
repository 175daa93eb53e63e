"""Files damaged in every way that a disk or a copy damages them, and what becomes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from drafttrain.core.errors import UserError

MASKS = (1, 32, 4, 128)  # 32 is another case of a letter


def harmed(file: Path, most: int, until: int | None = None) -> Iterator[str]:
    """The file with each byte changed, or a fixed sample of so many; longer; cut off; emptied; removed; then whole again.

    until: of the first so many bytes alone.
    """
    whole = file.read_bytes()
    among = range(len(whole))[:until]
    draw = random.Random(file.name)
    places = sorted(draw.sample(among, min(most, len(among))))
    try:
        for at in places:
            byte = draw.choice([*(whole[at] ^ mask for mask in MASKS), *(set(b'0e" ') - {whole[at]})])
            file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            yield f"byte {at} of {file.name} became {byte:#04x}"
        file.write_bytes(whole + b"x")
        yield f"{file.name} has a byte more"
        for length in {0, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:length])
            yield f"{file.name} was cut off behind {length} bytes"
        file.unlink()
        yield f"{file.name} was removed"
    finally:
        file.write_bytes(whole)


def refused(files: Iterable[Path], read: Callable[[], object], most: int = 400, removed: bool = True) -> dict[str, float]:
    """How often `read` refuses each file when it is damaged, in one line that names it: 1.0 is always. Whatever it does not
    refuse it must give as if nothing were.

    read: what must stay the same, comparable. removed: with the file gone too.
    """
    wanted, shares = read(), dict[str, float]()
    for file in files:
        count = tried = 0
        for how in harmed(file, most):
            if not removed and how.endswith("removed"):
                continue
            tried += 1
            try:
                assert read() == wanted, how
            except UserError as error:
                assert file.name in str(error), (how, str(error))
                assert "\n" not in str(error), (how, str(error))
                count += 1
        shares[file.name] = count / tried
    return shares
