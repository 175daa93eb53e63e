"""A drafter survives the disk bit for bit, and nothing damaged, foreign or half-written is taken for one."""

import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory, write_sealed_json
from drafttrain.drafters import Family, checkpoint
from drafttrain.drafters.checkpoint import (
    CheckpointMeta,
    TargetRecord,
    load_drafter,
    prune,
    read_meta,
    read_weights,
    save_drafter,
)
from drafttrain.drafters.tuned_settings import TUNED, keep_tuned, tuned_settings
from drafttrain.model.shapes import TargetShape


@dataclass
class ToyOptions:
    family: str = "toy"
    width: int = 3
    target_layer_ids: tuple[int, ...] = (1, 2)


class Toy(nn.Module):
    """As much of a drafter as a checkpoint touches."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__()
        assert isinstance(options.target_layer_ids, tuple)
        self.head = nn.Linear(options.width, 2)
        self.register_buffer("counts", torch.zeros(4, dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.settings: dict[str, Any] = {}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def use_batch_size(self, batch_size: int) -> None:
        """Nothing was tuned."""


@dataclass
class ToyTarget:
    shape: TargetShape
    fingerprint: str = "f" * 64
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32


SHAPE = TargetShape(11, 8, 2, 2, 1, 4, 16, 64, 10000.0, 1e-5)
RECORD = TargetRecord("hf", "/models/toy", None, "float32", 11, 8, 2, "f" * 64)
META = CheckpointMeta("toy", dataclasses.asdict(ToyOptions()), {"paths": [[0], [0, 1]]}, RECORD, step=400)


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Family("toy", ToyOptions, lambda options, _: Toy(options))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(checkpoint, "families", lambda: {"toy": toy})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, state(), META)


def target(**changes: Any) -> Any:
    fingerprint = changes.pop("fingerprint", "f" * 64)
    return ToyTarget(dataclasses.replace(SHAPE, **changes), fingerprint)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    toy = Toy(ToyOptions())
    toy.counts += 7
    return toy.state_dict()


def write_checkpoint(run_dir: Path, tensors: dict[str, torch.Tensor], meta: CheckpointMeta) -> Path:
    """As the trainer writes one."""
    final = run_dir / checkpoint.checkpoint_name(meta.step)
    with atomic_directory(final) as aside:
        save_drafter(aside, tensors, meta)
    return final


def test_checkpoint_save_and_load_round_trip_keeps_weights_and_meta(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["drafter.json", "drafter.safetensors"]
    assert saved.name == "step-00400"
    drafter, meta = load_drafter(saved, target())
    assert not drafter.training
    assert drafter.settings == {"paths": [[0], [0, 1]]}
    assert dataclasses.replace(meta, sha256="") == dataclasses.replace(
        META, options={**META.options, "target_layer_ids": [1, 2]}
    )
    loaded = drafter.state_dict()
    assert loaded.keys() == {"head.weight", "head.bias", "counts"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state().items())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in read_weights(saved).items())


def test_read_meta_option_of_earlier_version_has_its_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint.RENAMED, "breadth", "width")
    path = write_checkpoint(tmp_path, state(), dataclasses.replace(META, options={"family": "toy", "breadth": 3}))
    assert read_meta(path).options == {"family": "toy", "width": 3}
    assert load_drafter(path, target())[0].state_dict().keys() == {"head.weight", "head.bias", "counts"}


def test_load_drafter_places_weights_on_target_device(saved: Path) -> None:
    drafter, _ = load_drafter(saved, dataclasses.replace(target(), device=torch.device("meta")))
    assert all(tensor.is_meta for tensor in (*drafter.parameters(), *drafter.buffers()))


def test_save_drafter_shared_and_strided_tensors_are_written_in_full(tmp_path: Path) -> None:
    weight = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)
    path = write_checkpoint(tmp_path, {"a": weight, "b": weight, "c": weight.t()}, META)
    stored = load_file(path / checkpoint.WEIGHTS)
    assert {name: t.dtype for name, t in stored.items()} == dict.fromkeys("abc", torch.bfloat16)
    assert torch.equal(stored["c"], weight.t())
    assert torch.equal(stored["a"], stored["b"])


def test_load_drafter_for_other_target_is_refused(saved: Path, subtests: pytest.Subtests) -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"vocab_size": 12}, "its vocabulary is 11, this target's is 12"),
        ({"hidden_size": 16}, "its hidden size is 8, this target's is 16"),
        ({"blocks": 3}, "its number of blocks is 2, this target's is 3"),
        ({"fingerprint": "e" * 64}, r"its weight fingerprint is ffffffffffff\.\.\., this target's is eeeeeeeeeeee"),
    )
    for change, says in changes:
        message = rf"checkpoint of another target: {says}.*; load .* trained for \(/models/toy\)"
        with subtests.test(change=change), pytest.raises(UserError, match=message):
            load_drafter(saved, target(**change))


def replace_weights(path: Path, content: bytes) -> None:
    """New weights under a matching sha256, as if they had been saved so."""
    (path / checkpoint.WEIGHTS).write_bytes(content)
    edit_meta(path, sha256=checkpoint.hashlib.sha256(content).hexdigest())


def edit_meta(path: Path, **changes: Any) -> None:
    """As if it had been saved so."""
    file = path / checkpoint.META
    content = json.loads(file.read_text()) | changes
    del content["checksum"]
    write_sealed_json(file, content)


def test_load_drafter_missing_unexpected_or_misshapen_tensors_are_named(saved: Path) -> None:
    whole = state()
    renamed = {"head.weight": whole["head.weight"], "counts": whole["counts"], "bias": torch.zeros(2)}
    cases = {
        r"lacks counts, head.bias;": {"head.weight": whole["head.weight"]},
        r"has unexpected extra;": {**whole, "extra": torch.zeros(1)},
        r"lacks head.bias and has unexpected bias;": renamed,
        r"head.weight is \[3, 2\], this drafter's is \[2, 3\];": {**whole, "head.weight": torch.zeros(3, 2)},
    }
    for says, tensors in cases.items():
        replace_weights(saved, save(tensors))
        with pytest.raises(UserError, match=says):
            load_drafter(saved, target())


def test_load_drafter_truncated_weights_are_refused(saved: Path, subtests: pytest.Subtests) -> None:
    file = saved / checkpoint.WEIGHTS
    whole, message = file.read_bytes(), r"drafter.safetensors: damaged or cut off: sha256 .*; use another checkpoint"
    for cut in (0, 5, 60, -1):
        file.write_bytes(whole[:cut])
        with subtests.test(cut=cut), pytest.raises(UserError, match=message):
            load_drafter(saved, target())


def test_load_drafter_pickled_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    torch.save({"head.weight": torch.zeros(2, 3)}, tmp_path / "pickle")
    replace_weights(saved, (tmp_path / "pickle").read_bytes())
    with pytest.raises(UserError, match="expected safetensors, got something else"):
        load_drafter(saved, target())


def test_load_drafter_invalid_description_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a checkpoint, got no drafter.json there; .* such as .*step-00400"):
        load_drafter(tmp_path, target())
    for changes, says in [
        ({"family": "toi"}, r"unknown family 'toi'; did you mean toy\?"),
        ({"family": "zzz"}, "unknown family 'zzz'; known: toy"),
        ({"options": {"widht": 3}}, "toy has no option widht; load it with drafttrain"),
        ({"schema_version": 99}, "schema_version 99 is newer than 1; update drafttrain"),
        ({"target": {}}, "expected a drafter's description, got something else"),
        ({"surplus": 1}, "expected a drafter's description"),
        ({"options": "x"}, r"expected a drafter's description, got something else \(options is 'x'\)"),
        ({"step": "x"}, "step is 'x'"),
        ({"family": None}, "family is None"),
    ]:
        before = (saved / checkpoint.META).read_text()
        edit_meta(saved, **changes)
        with pytest.raises(UserError, match=says):
            load_drafter(saved, target())
        (saved / checkpoint.META).write_text(before)
    (saved / checkpoint.WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"expected drafter.safetensors next to drafter.json, got none"):
        load_drafter(saved, target())
    for content in ("", "[]", "{"):
        (saved / checkpoint.META).write_text(content)
        with pytest.raises(UserError, match="expected a drafter's description"):
            load_drafter(saved, target())


def write_steps(run_dir: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(run_dir, state(), dataclasses.replace(META, step=step))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_list_checkpoints_sorts_by_step_and_skips_other_entries(tmp_path: Path) -> None:
    write_steps(tmp_path, 100000, 200, 99999)
    (tmp_path / "step-00300.tmp-77").mkdir()
    (tmp_path / "step-00500").write_text("a file")
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step-00200", "step-99999", "step-100000"]


def test_prune_keeps_last_and_named_checkpoints(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-00005.tmp-1").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    removed = prune(tmp_path, keep_last=2, keep={"step-00001"})
    assert [p.name for p in removed] == ["step-00002"]
    assert names(tmp_path) == ["metrics.jsonl", "step-00001", "step-00003", "step-00004"]
    prune(tmp_path, keep_last=0, keep=set())
    assert names(tmp_path) == ["metrics.jsonl"]


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(name, fail)


@pytest.fixture(params=["os.fsync", "pathlib.Path.write_bytes"])
def failing(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.sampled
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_save_drafter_disk_full_is_one_line_and_keeps_previous_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, code: int
) -> None:
    write_steps(tmp_path, 1, 2)
    before = (tmp_path / "step-00002" / checkpoint.META).read_bytes()
    fail_at(monkeypatch, failing, code)
    for step in (2, 3):  # one that replaces a checkpoint, one that is new
        says = rf"^disk full while writing .*step-0000{step}.*previous checkpoints are; free space"
        with pytest.raises(UserError, match=says) as caught:
            write_steps(tmp_path, step)
        assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00001", "step-00002"]
    assert (tmp_path / "step-00002" / checkpoint.META).read_bytes() == before


def test_save_drafter_other_os_error_is_not_reported_as_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "os.fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write_steps(tmp_path, 1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", [checkpoint.META, TUNED])
def test_checkpoint_json_changed_byte_is_refused_or_changes_nothing(name: str, saved: Path) -> None:
    """Every byte of the file, each to one of five others in turn."""
    settings = {"draft_length": 2, "paths": [[0], [0, 1]], "draft_temperature": 0.7, "temperature": 0.8}
    keep_tuned(saved, {1: settings, 4: {"speedup": 1.5}}, {"objective": "tpot", "environment": {"device": "cpu"}})
    file, wanted = saved / name, (read_meta(saved), tuned_settings(saved))
    before, found = file.read_bytes(), 0
    for at in range(len(before)):
        byte = (before[at] ^ 1, before[at] ^ 32, ord("0"), ord(" "), 0xFF)[at % 5]
        file.write_bytes(before[:at] + bytes([byte]) + before[at + 1 :])
        try:
            assert (read_meta(saved), tuned_settings(saved)) == wanted, (at, byte)
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            found += 1
    assert found > len(before) / 2


def test_read_meta_edited_file_is_refused_until_checksum_is_removed(saved: Path) -> None:
    file = saved / checkpoint.META
    content = json.loads(file.read_text()) | {"step": 7}
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r'If you changed it on purpose, remove its line "checksum"'):
        read_meta(saved)
    del content["checksum"]
    file.write_text(json.dumps(content))
    assert read_meta(saved).step == 7


NO_SETTINGS = ["[]", "null", "{", '"x"', "{}", '{"settings": null}', '{"settings": [1]}', "[" * 100_000]
NO_SETTINGS += ['{"batch_sizes": {}}', '{"batch_sizes": null}', '{"batch_sizes": {"x": {}}}', '{"batch_sizes": {"1": 2}}']
WRONG = [("paths", value) for value in ("null", "3", "[3]", "[[true]]", "[[]]", "[[-1]]")]
WRONG += [("draft_length", value) for value in ('"2"', "-1", "true", "1.5")]
WRONG += [("temperature", "NaN"), ("draft_temperature", "-0.5"), ("lenght", "2"), ("speedup", "-1.0")]


def test_tuned_settings_invalid_file_is_refused(saved: Path, subtests: pytest.Subtests) -> None:
    message = rf"{TUNED}: expected what drafttrain tune writes, got .*; delete it"
    for content in (*NO_SETTINGS, *(f'{{"settings": {{"{name}": {value}}}}}' for name, value in WRONG)):
        (saved / TUNED).write_text(content)
        with subtests.test(content=content[:60]), pytest.raises(UserError, match=message):
            tuned_settings(saved)
