"""llama.cpp serves targets of other kinds than Llama, written by us, and accepts as many drafts of their drafters as we do.

Shapes: R rows of text, T tokens of a row, B rows of a batch.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafttrain.targets.load import EMBEDDED
from tests.engines.conftest import note, python_for
from tests.engines.test_engines import ROW

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SIZES = {
    "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048, "pad_token_id": 5, "bos_token_id": 0,
    "eos_token_id": [3, 0], "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# by model type: what differs. llama.cpp rounds the limits of YaRN, which the configuration here says too
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**EXPERTS, "sliding_window": 24, "rope_parameters": YARN},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "head_dim": 16, "block_auto_adjust_ff_dim": False},
    "hunyuan_v1_dense": {},
    "minimax_m2": {**EXPERTS, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}
PLAIN = ("drafter.fc_norm=false", "drafter.norm_output=false", "drafter.target_layer_ids=[0,1,2]", "drafter.tree=chain")
WIDTH = 96  # tokens of a row of the target's training
QUIET = ("measure.enabled=false", "logger=none")


def target_of(kind: str, folder: Path) -> Path:
    """A small model with the embedded target's tokenizer, trained for a moment: drafts for a random one are seldom accepted."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind]))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5 if "conv.conv" in name else 0.6 * parameter.shape[-1] ** -0.5)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows_RT = texts()
    for _ in range(120):
        some_BT = rows_RT[torch.randint(len(rows_RT), (8,))]
        model(input_ids=some_BT, labels=some_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ours = shutil.ignore_patterns("*.safetensors", "config.json", "generation_config.json")
    shutil.copytree(EMBEDDED, folder / kind, ignore=ours)
    model.eval().save_pretrained(folder / kind)
    return folder / kind


@cache
def texts() -> Tensor:
    """[R, T] tokens of the embedded conversations, one after the other."""
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    with gzip.open(EMBEDDED.parent / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        told = [json.loads(line)["messages"] for line in islice(file, 600)]
    ids = [i for turns in told for i in tokenizer.apply_chat_template(turns, return_dict=False)]
    return torch.tensor(ids[: len(ids) // WIDTH * WIDTH]).view(-1, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_llamacpp_target_architecture_accepts_same_drafts_as_decoder(
    kind: str, command: Callable[..., int], tmp_path: Path
) -> None:
    python = python_for("llamacpp")
    target = f"target.path={target_of(kind, tmp_path)}"
    steps = ("train.steps=60", "train.checkpoint_every=60", "drafter.norm_before_residual=true", f"output={tmp_path / 'run'}")
    assert command("fit", "recipe=eagle3", "drafter.draft_vocab=512", target, *PLAIN, *QUIET, *steps) == 0
    (checkpoint,) = (tmp_path / "run").glob("*/*/checkpoints/step-*")
    out, given = f"out={tmp_path / 'out'}", f"checkpoint={checkpoint}"
    assert command("export", given, "format=llamacpp", "with_target=true", out, target) == 0
    wanted = ("measure.limit=6", "decode.max_new_tokens=48", f"output={tmp_path}")
    assert command("verify", "engine=llamacpp", f"engine_python={python}", given, out, target, *wanted) == 0
    (file,) = tmp_path.glob("verify/*/verification.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["holds"] and report["same_texts"] == len(report["lines"]) == 6
    assert report["ours"] == report["theirs"] > 0
    row = {key: report[key] for key in ROW} | {"options": f"target: {kind}", "prompts": 6, "tau": round(report["tau"], 2)}
    note("runs", f"llamacpp: eagle3, {kind}", row)
