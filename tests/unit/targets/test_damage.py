"""A target whose files are damaged is refused in one line, whatever the libraries raise for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drafttrain.core.errors import UserError
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import EMBEDDED, load_target, load_tokenizer


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    for file in EMBEDDED.iterdir():
        (shutil.copy if file.suffix == ".json" else lambda source, place: Path(place).symlink_to(source))(
            file, folder / file.name
        )
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "x\x1b[2J"),
        ("rope_parameters", "x"),
        ("model_type", "x"),
        ("num_hidden_layers", "x"),
        ("hidden_size", -1),
        ("num_attention_heads", 0),
        ("vocab_size", None),
    ],
)
def test_a_config_with_odd_values(key: str, value: Any, target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=r"could not be loaded|do not fill|expected") as error:
        load_target(TargetOptions(name="hf", path=str(target)))
    assert "\x1b" not in str(error.value) and str(target) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
def test_a_damaged_tokenizer(content: bytes, target: Path) -> None:
    (target / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="has no tokenizer that transformers can load"):
        load_tokenizer(TargetOptions(name="hf", path=str(target)))
