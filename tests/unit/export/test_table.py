"""The rows of the support matrix: a stack that reads an existing format is a row in that format's file, and a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.core.errors import UserError
from drafttrain.export import table
from drafttrain.export.exporter import ExportSettings, export
from drafttrain.export.files import ExportSource
from drafttrain.export.format import StackRow
from drafttrain.export.formats import eagle3
from drafttrain.export.formats.eagle3 import PORTABLE, eagle3_format, portable
from drafttrain.export.serve import STACKS, ServingStack
from tests.export_oracles import eagle3 as reader
from tests.export_oracles.check import check
from tests.exports import opened

STACK = ServingStack("My stack", lambda served: f"mystack {served.target} --draft {served.directory} --drafts {served.drafts}")
ROW = StackRow(eagle3_format(portable, PORTABLE, "fc_norm", "other layers"), note="It needs a GPU.")


@pytest.fixture
def mystack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up stack that reads EAGLE-3's portable layout: all that a new one needs."""
    monkeypatch.setitem(STACKS, "mystack", STACK)
    monkeypatch.setitem(eagle3.ROWS["eagle3"], "mystack", ROW)
    monkeypatch.setattr(table, "TABLE", table.joined([eagle3.ROWS]))


@pytest.mark.usefixtures("mystack")
def test_export_to_new_stack_of_existing_format_passes_parity(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "eagle3")
    out = tmp_path / "out"
    exported = export(found, golden, ExportSettings(table.stacks_for("eagle3", "mystack"), out, "float32", False))
    assert exported.written["mystack"].drafts == golden.draft_PK.numel() and exported.written["mystack"].gap < 0.5
    check(out, reader.portable("sglang"), ExportSource(found, "mystack", "float32"), golden, golden)
    card = (out / "README.md").read_text()
    assert f"```bash\nmystack targets/tiny --draft {out} --drafts 3\n```\n" in card and card.endswith("\n\nIt needs a GPU.\n")


@pytest.mark.usefixtures("mystack")
def test_new_stack_refuses_what_its_row_does_not_read(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "eagle3-normed")
    with pytest.raises(UserError, match=r"it has norm_output, which mystack does not read; .*vllm, sglang, trtllm, spec"):
        export(found, golden, ExportSettings(["mystack"], tmp_path / "out", "float32", False))
    with pytest.raises(UserError, match="peagle cannot be exported to mystack: it has no loader for this family; vllm, spec"):
        table.stacks_for("peagle", "mystack")
