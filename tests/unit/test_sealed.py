"""Training goes on from checkpoints whose files are what was saved, and says which others it found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drafttrain.train.sealed import SUMS, damage, file_sums, newest_valid, seal

FILES = ("drafter.safetensors", "optimizer-00000.safetensors", "trainer.json")


def write(directory: Path) -> Path:
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(name.encode() * 100)
    seal(directory, file_sums(*(directory / name for name in FILES)))
    return directory


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "emptied": lambda file: file.write_bytes(b""),
    "removed": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", [*FILES, SUMS])
@pytest.mark.parametrize("how", DAMAGES)
def test_any_damage_to_any_file_is_seen_and_named(how: str, name: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "step-00001")
    assert damage(directory) is None
    DAMAGES[how](directory / name)
    assert name in (damage(directory) or "")


def test_the_newest_whole_one_is_taken_and_the_others_step_aside(tmp_path: Path) -> None:
    said: list[str] = []
    assert newest_valid(tmp_path, said.append) is None
    steps = [write(tmp_path / f"step-0000{step}") for step in (1, 2, 3, 4)]
    flip(steps[3] / FILES[1])
    (steps[2] / SUMS).unlink()
    assert newest_valid(tmp_path, said.append) == steps[1]
    assert [line.split(" is ")[0] for line in said] == ["checkpoint step-00004", "checkpoint step-00003"]
    assert FILES[1] in said[0] and SUMS in said[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("step-00001", "step-00002", "step-00003.damaged", "step-00004.damaged"),
    ]
    assert newest_valid(tmp_path, said.append) == steps[1] and len(said) == 2
