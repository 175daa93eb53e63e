"""The engines' scripts start the same kind of speculation as the commands in an export's README."""

from __future__ import annotations

from drafttrain.engines.scripts import llamacpp, vllm
from drafttrain.export import serve


def test_vllm_script_methods_equal_serve_commands() -> None:
    assert vllm.METHODS | vllm.PARALLEL == serve.VLLM
    assert set(vllm.PARALLEL) == set(serve.PARALLEL)


def test_llamacpp_script_types_equal_serve_commands() -> None:
    assert llamacpp.KINDS == serve.LLAMACPP


def test_vllm_script_sets_parallel_drafting_only_for_parallel_families() -> None:
    job = {"drafter": "exported", "draft_length": 4}
    assert vllm.speculation(job | {"family": "peagle"})["parallel_drafting"]
    assert "parallel_drafting" not in vllm.speculation(job | {"family": "jetspec"})
