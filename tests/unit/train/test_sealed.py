"""Training goes on from checkpoints whose files are what was saved, and says which others it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafttrain.commands.measure import training_cost
from drafttrain.core.errors import UserError
from drafttrain.core.files import CHECKSUM, write_sealed_json
from drafttrain.train.checkpoint_manager import PROGRESS, SUMS, Progress, damage, file_sums, newest_valid, seal
from tests.damage import refused

FILES = ("drafter.safetensors", "optimizer-00000.safetensors", "trainer.json")


def write(directory: Path) -> Path:
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(name.encode() * 4)
    seal(directory, file_sums(*(directory / name for name in FILES)))
    return directory


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_newest_valid_skips_and_renames_damaged_checkpoints(tmp_path: Path) -> None:
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


def test_checkpoint_changed_byte_of_any_file_is_refused_or_without_effect(tmp_path: Path) -> None:
    directory = write(tmp_path / "step-00001")
    listed = (directory / SUMS).read_bytes()

    def read() -> bytes:
        if (found := damage(directory)) is not None:
            raise UserError(found)
        return listed

    assert refused([directory / SUMS], read)[SUMS] > 0.9  # but for spaces and line feeds
    assert set(refused([directory / name for name in FILES], read, 40).values()) == {1.0}  # the content says nothing


def test_checksums_json_edited_names_or_values_are_detected(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """As in checkpoints of earlier versions, whose list had no checksum of its own; and with one that was left as it was."""
    directory = write(tmp_path / "step-00001")
    content = json.loads((directory / SUMS).read_text())
    seal = {CHECKSUM: content.pop(CHECKSUM)}
    (directory / SUMS).write_text(json.dumps(content))
    assert damage(directory) is None
    another_name = {name.replace("00000", "00001"): value for name, value in content.items()}
    edits = {
        "another name": another_name,
        "another name, sealed": another_name | seal,
        "a name less": {name: value for name, value in content.items() if name != FILES[1]},
        "a name more": content | {"other": "0"},
        "another case": {name: value.upper() for name, value in content.items()},
        "none": {},
    }
    for how, edited in edits.items():
        with subtests.test(how):
            (directory / SUMS).write_text(json.dumps(edited))
            assert damage(directory) is not None


def test_checkpoint_unlisted_optimizer_shard_is_damage_and_later_files_are_not(tmp_path: Path) -> None:
    directory = write(tmp_path / "step-00001")
    for name in ("decode.json", "golden.safetensors", "notes.txt"):
        (directory / name).write_text("{}")
    assert damage(directory) is None
    (directory / "optimizer-00001.safetensors").write_bytes(b"x")
    assert damage(directory) == f"optimizer-00001.safetensors is not in {SUMS}"


def test_trainer_json_changed_byte_is_refused_or_without_effect(tmp_path: Path) -> None:
    content = {"step": 1200, "tokens": 345678, "seconds": 12.5, "device": "cpu", "loss": 1.25, "measured_tau": 2.5}
    write_sealed_json(tmp_path / PROGRESS, content)

    def read() -> tuple[Progress, dict[str, Any] | None]:
        return Progress.of(tmp_path), training_cost(tmp_path)

    assert refused([tmp_path / PROGRESS], read)[PROGRESS] > 0.8
    (tmp_path / PROGRESS).write_text(json.dumps(content))  # as earlier versions wrote it
    assert Progress.of(tmp_path) == Progress(**content)
    (tmp_path / PROGRESS).unlink()
    assert training_cost(tmp_path) is None  # a drafter of other people


def test_checkpoint_edited_file_without_checksum_entry_is_accepted(tmp_path: Path) -> None:
    directory = write(tmp_path / "step-00001")
    (directory / "trainer.json").write_text("{}")
    assert "trainer.json is damaged" in (damage(directory) or "")
    content = json.loads((directory / SUMS).read_text())
    del content[CHECKSUM], content["trainer.json"]
    (directory / SUMS).write_text(json.dumps(content))
    assert damage(directory) is None
