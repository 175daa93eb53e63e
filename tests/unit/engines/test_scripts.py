"""The engines' scripts start the same kind of speculation as the commands in an export's README."""

from __future__ import annotations

from drafttrain.engines.scripts import llamacpp, vllm
from drafttrain.export import serve


def test_vllm_knows_the_method_of_each_exported_family() -> None:
    assert vllm.METHODS | vllm.PARALLEL == serve.VLLM
    assert set(vllm.PARALLEL) == set(serve.PARALLEL)


def test_llamacpp_knows_the_type_of_each_exported_family() -> None:
    assert llamacpp.KINDS == serve.LLAMACPP


def test_vllm_drafts_in_one_pass_where_the_command_says_so() -> None:
    job = {"drafter": "exported", "draft_length": 4}
    assert vllm.speculation(job | {"family": "peagle"})["parallel_drafting"]
    assert "parallel_drafting" not in vllm.speculation(job | {"family": "jetspec"})
