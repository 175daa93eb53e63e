"""docs/targets.md: its table is what loading the architectures shows."""

from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES, ROWS
from tests.targets import BEGIN, END, facts_of, renewed, table

PAGE = Path(__file__).parents[3] / "docs" / "targets.md"


CELLS = {
    "Llama": "| Llama | `LlamaForCausalLM` | fast | trees | yes | yes | no |",
    "Mixtral": "| Mixtral | `MixtralForCausalLM` | fast | trees | asked at load | no | yes |",
    "MPT": "| MPT | `MptForCausalLM` | transformers | chains | yes | no | no |",
    "Falcon": "| Falcon | `FalconForCausalLM` | transformers | trees | no | no | no |",
    "Bloom": "| Bloom | `BloomForCausalLM` | recomputed | chains | no | no | no |",
}


@pytest.mark.sampled(name=["Llama"])
@pytest.mark.parametrize("name", CELLS)
def test_targets_page_row_equals_facts_of_loaded_model(name: str) -> None:
    assert CELLS[name] in table([facts_of(ARCHITECTURES[name])])
    page = PAGE.read_text(encoding="utf-8")
    assert all(cells in page for cells in CELLS.values())


def test_targets_page_says_why_steps_are_recomputed_and_keeps_surrounding_text() -> None:
    text = renewed(f"before\n{BEGIN}\nold\n{END}\nafter", [facts_of(ARCHITECTURES["Bloom"])])
    assert CELLS["Bloom"] in text
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter") and "old" not in text
    assert "- Bloom: BloomForCausalLM cannot decode with our KV cache (its alibi biases" in text
    assert "- Falcon: modeling_falcon.py, line " in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_targets_page_equals_generated_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert renewed(page, [facts_of(row) for row in ROWS]) == page, "run `make targets`"
