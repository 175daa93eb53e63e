"""Architectures that need eager attention or a cache of their own run from loading to measuring; one that cannot is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.targets import TargetOptions
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import load_target
from tests.architectures import model_of as hybrid
from tests.helpers import COMMON, GATED, prompts

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(**GATED, sliding_window=6, query_pre_attn_scalar=8),
    "gpt_oss": GptOssConfig(**GATED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "deepseek_v3": DeepseekV3Config(**COMMON, **LATENT, **EXPERTS, intermediate_size=48, moe_intermediate_size=16),
}


def model_of(name: str) -> PreTrainedModel:
    """Random, with weights large enough that its greedy text is no constant."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=1.2 / parameter.shape[-1] ** 0.5)
    return model.eval()


@pytest.fixture
def on_disk(material: Path, tmp_path: Path) -> Callable[[PreTrainedModel], Path]:
    def save(model: PreTrainedModel) -> Path:
        shutil.copytree(material / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        model.save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    return save


@pytest.mark.parametrize("name", CONFIGS)
def test_eager_or_latent_attention_target_greedy_text_equals_generate(name: str) -> None:
    model = model_of(name)
    asked, target = prompts(3, seed=2), HFTarget(model)
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(p) :]
        for p in asked
    ]
    results = Decoder(target, None, "greedy", Sampling(), frozenset(), 24, prefill_chunk=5).run(asked, batch_size=3).results
    assert target.trees and [r.tokens for r in results] == [w.tolist() for w in wanted]


@pytest.mark.slow
@pytest.mark.sampled(name=["gemma2", "deepseek_v3"])  # contract/test_targets.py has two steps of every architecture
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gemma2", "medusa"),
        ("gpt_oss", "eagle3"),
        ("deepseek_v3", "medusa"),
        ("deepseek_v3", "eagle3"),
    ],
)
def test_fit_eager_or_latent_attention_target_reports_exact_matches(
    name: str, recipe: str, material: Path, on_disk: Callable[[PreTrainedModel], Path], command: Callable[..., int],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    target = on_disk(model_of(name))
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"turns": [f"word {i}"]}) + "\n" for i in range(3)))
    chosen = (f"recipe={recipe}", f"target.path={target}", f"data.path={material / 'data.jsonl'}", f"prompts={asked}")
    small = ("train.steps=3", "train.global_batch=4", "train.micro_batch=4", "decode.max_new_tokens=12", "decode.tree_nodes=6")
    few = (
        "measure.minutes=0.1",
        "measure.tune=off",
        "measure.repeats=1",
        "data.held_out=4",
        f"output={tmp_path / 'out'}",
        "logger=none",
    )
    assert command("fit", *chosen, *small, *few) == 0
    eager = "target.attention is eager: transformers has no sdpa for"
    assert (eager in capsys.readouterr().out) == (name != "deepseek_v3")
    (report,) = (tmp_path / "out").rglob("report.json")
    (entry,) = json.loads(report.read_text())["checkpoints"]
    assert entry["exact_matches"] == entry["transformers_exact_matches"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("Qwen3-Next", "eagle3"),
        ("Granite-4 (hybrid)", "medusa"),
        pytest.param("Qwen3-Next", "medusa", marks=pytest.mark.grid),
        pytest.param("LFM2", "eagle3", marks=pytest.mark.grid),
    ],
)
def test_fit_recurrent_target_drafts_chains_exactly_and_refuses_packing(
    name: str, recipe: str, material: Path, on_disk: Callable[[PreTrainedModel], Path], command: Callable[..., int],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By path alone: the recipes' trees become chains. Packed rows are refused."""
    target = on_disk(hybrid(name))
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"turns": [f"word {i}"]}) + "\n" for i in range(3)))
    chosen = (f"recipe={recipe}", f"target.path={target}", f"data.path={material / 'data.jsonl'}", f"prompts={asked}")
    small = ("train.steps=3", "train.global_batch=4", "train.micro_batch=4", "decode.max_new_tokens=12")
    few = (
        "measure.minutes=0.1",
        "measure.tune=off",
        "measure.repeats=1",
        "data.held_out=4",
        f"output={tmp_path / 'out'}",
        "logger=none",
    )
    assert command("fit", *chosen, *small, *few) == 0
    (report,) = (tmp_path / "out").rglob("report.json")
    found = json.loads(report.read_text())
    assert "this target verifies chains, not trees, so drafts are chains" in capsys.readouterr().out
    (entry,) = found["checkpoints"]
    assert entry["exact_matches"] == entry["transformers_exact_matches"] == 3
    assert found["target"]["state_bytes_per_request"] > 0 and found["target"]["kv_bytes_per_position"] > 0
    capsys.readouterr()
    assert command("fit", *chosen, *small, *few, "data.pack=true") == 2
    error = capsys.readouterr().err.strip()
    assert "set data.pack=false" in error and "\n" not in error


def test_load_target_unsupported_attention_implementation_is_refused(on_disk: Callable[[PreTrainedModel], Path]) -> None:
    path = str(on_disk(model_of("gemma2")))
    with pytest.raises(UserError, match=r"target\.attention=sdpa.*set target\.attention=eager") as error:
        load_target(TargetOptions(path=path, attention="sdpa"))
    assert len(str(error.value)) < 150 + len(path)


def test_load_target_architecture_that_no_cache_serves_is_recomputed(on_disk: Callable[[PreTrainedModel], Path]) -> None:
    path = on_disk(AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)))
    loaded = load_target(TargetOptions(path=str(path)))
    assert loaded.description["runner"] == "recomputed" and "its alibi biases" in loaded.description["chains_reason"]
    with pytest.raises(UserError, match=r"BloomForCausalLM is not one of"):
        load_target(TargetOptions(path=str(path), runner="fast"))
