"""The engines' scripts start the same kind of speculation as the commands in an export's README."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from drafttrain.engines.scripts import llamacpp, transformers, vllm
from drafttrain.engines.states_server import serve_arguments
from drafttrain.export.format import StackRow
from drafttrain.export.table import TABLE
from tests.helpers import tiny_model


def rows_of(stack: str) -> dict[str, StackRow]:
    """The rows of the families that a stack loads."""
    return {family: row for family, rows in TABLE.items() if isinstance(row := rows[stack], StackRow)}


def test_vllm_script_methods_equal_serve_commands() -> None:
    rows = rows_of("vllm")
    assert {family: row.method for family, row in rows.items()} == vllm.METHODS | vllm.PARALLEL
    assert set(vllm.PARALLEL) == {family for family, row in rows.items() if row.settings.get("parallel_drafting")}


def test_llamacpp_script_types_equal_serve_commands() -> None:
    assert {family: row.method for family, row in rows_of("llamacpp").items()} == llamacpp.KINDS


def test_vllm_script_sets_parallel_drafting_only_for_parallel_families() -> None:
    job = {"drafter": "exported", "draft_length": 4}
    assert vllm.speculation(job | {"family": "peagle"})["parallel_drafting"]
    assert "parallel_drafting" not in vllm.speculation(job | {"family": "jetspec"})


def test_transformers_script_of_target_with_own_generation_settings_generates_greedily(tmp_path: Path) -> None:
    model, job = tiny_model(), {"target": str(tmp_path), "family": "draft_model", "stop_ids": [63], "max_new_tokens": 6}
    model.save_pretrained(tmp_path)

    def text() -> list[int]:
        return transformers.generated(transformers.loaded(job, "float32", "cpu", False)[0], [5, 6, 7], job, {})

    wanted = text()
    GenerationConfig(suppress_tokens=wanted, repetition_penalty=2.0).save_pretrained(tmp_path)
    assert text() == wanted


def test_states_server_command_ignores_generation_settings_of_target() -> None:
    words = serve_arguments("model", [3], "folder", 8)
    assert words[words.index("--generation-config") + 1] == "vllm"
