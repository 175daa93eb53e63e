"""A checkpoint of another target is refused before anything is read or computed that takes long."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, adapter_state, save_drafter
from drafttrain.drafters.medusa import Medusa, MedusaOptions
from drafttrain.measure.bench import Bench
from drafttrain.model.lora import LoraSpec
from drafttrain.targets import TargetOptions, load
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.load import load_target
from tests.helpers import tiny_model


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is read or decoded")


def checkpoint(material: Path, folder: Path, spec: LoraSpec | None) -> Path:
    """Of the target in `material`, in `folder`."""
    loaded = load_target(TargetOptions(path=str(material / "target")))
    options = MedusaOptions(heads=2) if spec is None else MedusaOptions(heads=2, adapter=spec)
    drafter = Medusa(options, loaded.target)
    adapter = None if spec is None else Adapter(loaded.target, spec)
    folder.mkdir()
    meta = CheckpointMeta(
        "medusa", asdict(options), drafter.decode_settings(), TargetRecord.of(loaded), 3, None if spec is None else asdict(spec)
    )
    save_drafter(folder, {**drafter.state_dict(), **adapter_state(adapter)}, meta)
    return folder


def test_checkpoint_of_target_with_other_shape_is_refused_before_load(
    material: Path, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests,
) -> None:  # fmt: skip
    given = checkpoint(material, tmp_path / "step-00003", None)
    monkeypatch.setattr(load, "load_model", never)
    more = {"measure": (), "tune": (), "generate": ("prompt=hi",), "export": ("format=vllm", f"out={tmp_path / 'out'}")}
    for name, words in more.items():
        with subtests.test(name=name):
            assert command(name, f"checkpoint={given}", f"target.path={load.EMBEDDED}", "logger=none", *words) == 2
            said = capsys.readouterr().err.strip()
            assert "checkpoint of another target: its vocabulary is 64, this target's is 2048" in said and "\n" not in said


@pytest.mark.parametrize("spec", [None, LoraSpec(rank=4)])
def test_measure_checkpoint_with_other_fingerprint_is_refused_before_decode(
    spec: LoraSpec | None, material: Path, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = checkpoint(material, tmp_path / "step-00003", spec)
    other = tmp_path / "other"
    shutil.copytree(material / "target", other)
    model = tiny_model(seed=1)
    model.save_pretrained(other)  # type: ignore[operator]
    assert not torch.equal(next(model.parameters()), next(tiny_model().parameters()))
    monkeypatch.setattr(Bench, "decode_all", never)
    assert command("measure", f"checkpoint={given}", f"target.path={other}", "logger=none") == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "checkpoint of another target: its weight fingerprint is" in said[-1]
    assert not Path("outputs/measure").exists()
