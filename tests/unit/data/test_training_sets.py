"""The named data sets: their entries, `conf/data` and `docs/data.md` agree. Rows: `integration/test_training_sets.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from drafttrain.cli.help import general_help
from drafttrain.core.errors import UserError
from drafttrain.data import SourceOptions
from drafttrain.data.sources import TRAINING_SETS, named_set, on_the_hub


def test_training_set_config_and_docs_agree_with_entry(root: Path, subtests: pytest.Subtests) -> None:
    table = (root / "docs" / "data.md").read_text().splitlines()
    for name, chosen in TRAINING_SETS.items():
        text = (root / "conf" / "data" / f"{name}.yaml").read_text()
        with subtests.test(name=name):
            row, *_ = [line for line in table if line.startswith(f"| `{name}` |")]
            for place in (text.splitlines()[0], row):
                assert chosen.hub in place
                assert chosen.rows is None or f"{chosen.rows:,}" in place
                assert chosen.size is None or chosen.size in place
                assert words(chosen.licence) in words(place)
                assert chosen.gated == ("gated" in place)
            assert yaml.safe_load(text)["path"] == name
            assert all(f"`{column}`" in row for column in chosen.columns)


def words(text: str) -> str:
    """Licences are written with blanks and points, or with hyphens."""
    return text.lower().replace("-", " ").replace(".", "").replace("llama 31", "llama31")


def test_training_sets_each_data_config_has_entry(root: Path) -> None:
    files = {path.stem for path in (root / "conf" / "data").glob("*.yaml")}
    assert files == {*TRAINING_SETS, "embedded", "file"}


def test_help_lists_every_training_set() -> None:
    lines = general_help().splitlines()
    for name, chosen in TRAINING_SETS.items():
        (line,) = [line for line in lines if line.startswith(f"    {name} ")]
        assert chosen.hub in line


def test_training_set_name_resolves_to_hub_id_split_and_files() -> None:
    assert on_the_hub(SourceOptions("ultrachat", limit=3)) == SourceOptions(
        "HuggingFaceH4/ultrachat_200k", split="train_sft", limit=3
    )
    assert on_the_hub(SourceOptions("nemotron", split="math")).split == "math"
    assert str(on_the_hub(SourceOptions("sharegpt")).files).endswith("_split.json")
    assert on_the_hub(SourceOptions("owner/set")) == SourceOptions("owner/set")
    with pytest.raises(UserError, match=r"data.split=codes: nemotron has chat, code, math, stem; name one of them"):
        on_the_hub(SourceOptions("nemotron", split="codes"))


def test_training_set_name_yields_to_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_set("magpie") is not None
    Path("magpie").mkdir()
    assert named_set("magpie") is None


def test_training_set_summary_states_licence_rows_and_size() -> None:
    assert TRAINING_SETS["ultrachat"].summary == (
        "HuggingFaceH4/ultrachat_200k (train_sft), licence mit, 207,865 rows, 1.40 GB of text"
    )
    assert TRAINING_SETS["magpie"].summary.endswith("licence llama3.1, rows unknown, 1.01 GB")
    assert re.search(r"gated$", TRAINING_SETS["nemotron"].summary)
