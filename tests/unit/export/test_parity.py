"""Each known way to get an export wrong, put into a directory that was right: an independent reader says its name.

The gate on a user's machine, which reads by the format's importer, finds wrong values and wrong weights too. What it cannot
find is what importers take as well: a missing field with a usual value, another class, a form of d2t that converters write.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import ParityError
from drafttrain.core.files import LISTED
from drafttrain.export import exporter, parity
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.golden import Golden
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of
from tests.export_oracles import check as oracle
from tests.export_oracles.eagle3 import IDS
from tests.exports import opened, written

Values = dict[str, Any]
Weights = dict[str, Tensor]
Made = tuple[Opened, Golden, Path]
Change = Callable[[Values, Weights], Any]

LAYER = "midlayer.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """A right directory of a case for a stack, made once; it has gone through the gate, or it would not be there."""
    made: dict[tuple[str, str], Made] = {}

    def of(case: str, stack: str) -> Made:
        if (case, stack) not in made:
            folder = tmp_path_factory.mktemp("right")
            found, golden = opened(folder, case)
            written(found, golden, stack, folder / "out")
            made[case, stack] = found, golden, folder / "out"
        return made[case, stack]

    return of


def gate(found: Opened, golden: Golden, stack: str, directory: Path) -> None:
    """The check of an export on a user's machine, by the format's own reader."""
    to, source = format_of(found.meta.family, stack), ExportSource(found, stack, "float32")
    parity.check(directory, to, to.write(source), source, golden, golden)


def compare(found: Opened, golden: Golden, stack: str, directory: Path) -> None:
    """The check of the tests, by an independent reader of the stack."""
    oracle.check_export(directory, ExportSource(found, stack, "float32"), golden, golden)


def changed(right: Path, wrong: Path, change: Change) -> Path:
    shutil.copytree(right, wrong)
    (weights,) = wrong.glob("*.safetensors")
    config, tensors = json.loads((wrong / "config.json").read_text()), load_file(weights)
    change(config, tensors)
    (wrong / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, weights)
    (wrong / LISTED).unlink()  # as before it was written
    return wrong


def put(*keys: str, value: Any) -> Change:
    """Set a field of the configuration, inside others where there are several keys."""

    def change(config: Values, tensors: Weights) -> None:
        for key in keys[:-1]:
            config = config[key]
        config[keys[-1]] = value

    return change


def drop(*keys: str) -> Change:
    def change(config: Values, tensors: Weights) -> None:
        for key in keys[:-1]:
            config = config[key]
        del config[keys[-1]]

    return change


def lose(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def rename(before: str, after: str) -> Change:
    return lambda config, tensors: tensors.update({after: tensors.pop(before)})


def swap_halves(name: str) -> Change:
    """As if the two things joined before this matrix stood the other way round."""
    return lambda config, tensors: tensors.update({name: torch.cat(tensors[name].chunk(2, -1)[::-1], -1)})


def absolute(config: Values, tensors: Weights) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def unmarked(config: Values, tensors: Weights) -> None:
    tensors["t2d"] = tensors["t2d"].long()


def marked_more(config: Values, tensors: Weights) -> None:
    tensors["t2d"][int((~tensors["t2d"]).nonzero()[0])] = True


def moved(config: Values, tensors: Weights) -> None:
    """Every draft token means its neighbour, where both lists agree."""
    ids = (torch.arange(40) + tensors["d2t"] + 1) % 64
    tensors["d2t"] = ids - torch.arange(40)
    tensors["t2d"] = torch.zeros(64, dtype=torch.bool).index_fill(0, ids, True)


def shaken(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name] * 1.01})


def rolled(name: str) -> Change:
    """Every row is its neighbour's."""
    return lambda config, tensors: tensors.update({name: tensors[name].roll(1, 0)})


def switch(first: str, second: str) -> Change:
    return lambda config, tensors: tensors.update({first: tensors[second], second: tensors[first]})


E3, NORMED, SPEC = ("eagle3", "vllm"), ("eagle3-normed", "vllm"), ("eagle3", "speculators")
NESTED, INNER = ("eagle_config", IDS), "transformer_layer_config"
DFLASH, MUSE, LM = ("dflash", "vllm"), ("dflash", "transformers"), ("draft_model", "vllm")
BLOCKS, ONE, P = ("dflash", "speculators"), ("eagle", "lmdeploy"), ("peagle", "vllm")
DEEP, IN_PLACE, AUTHORS = ("dspark", "vllm"), ("dspark-in-place", "sglang"), ("dspark", "official")
DEEP_TRT, PART = ("dspark", "trtllm"), ("dflash-part", "vllm")
TWO_RAW, DOMINO, SHIFTED_DOMINO = ("dflash2", "vllm"), ("domino", "sglang"), ("domino-shifted", "sglang")
JET, CAUSAL = ("jetspec", "vllm"), ("dflash-causal", "sglang")
SPARK, TWO, PRESS = ("dspark", "speculators"), ("dflash2", "speculators"), ("xpress", "vllm")
LATTICE = ("lilicorr", "vllm")
SHIFTED: list[tuple[tuple[str, str], Change]] = [  # off by one in either direction, in each place that a stack looks at
    (E3, put(IDS, value=[0, 1, 2])),
    (E3, put(IDS, value=[2, 3, 4])),
    (E3, drop(IDS)),
    (("eagle3", "sglang"), put(*NESTED, value=[1, 2, 3])),
    (("eagle3", "trtllm"), put(*NESTED, value=[1, 2, 3])),
    (("eagle3", "openvino"), put(*NESTED, value=[1, 2, 3])),
    (SPEC, put(IDS, value=[0, 1, 2])),
    (DFLASH, put("dflash_config", "target_layer_ids", value=[1, 2, 3])),
    (MUSE, put("target_layer_ids", value=[1, 2, 3])),
    (BLOCKS, put("aux_hidden_state_layer_ids", value=[0, 1, 2])),
    (DEEP, put("target_layer_ids", value=[1, 2, 3])),
    (DEEP_TRT, put("dflash_config", "target_layer_ids", value=[1, 2, 3])),
    (TWO_RAW, put("dflash_config", "target_layer_ids", value=[1, 2, 3])),
    (DOMINO, put("dflash_config", "target_layer_ids", value=[1, 2, 3])),
]
TRAPS: list[tuple[tuple[str, str], str, Change]] = [
    *((where, "layer ids", change) for where, change in SHIFTED),
    (E3, "layer ids", put(IDS, value=[1, 2, 9])),
    (E3, "layer ids", put(IDS, value=[1, 2])),
    (E3, "layer ids", drop("eagle_config")),
    (("eagle3", "sglang"), "layer ids", drop(*NESTED)),
    (("eagle3-two", "vllm"), "layer ids", drop("num_aux_hidden_states")),
    (DFLASH, "layer ids", put("num_target_layers", value=3)),
    # the draft vocabulary
    (E3, "d2t", absolute),
    (E3, "d2t", moved),
    (E3, "d2t", unmarked),
    (E3, "d2t", marked_more),
    (E3, "tensors", lose("d2t")),
    (("eagle3-whole", "openvino"), "d2t", lose("d2t")),
    (E3, "vocabulary", drop("draft_vocab_size")),
    (E3, "vocabulary", put("vocab_size", value=65)),
    (SPEC, "d2t", absolute),
    # flags
    (E3, "norm flags", drop("norm_before_residual")),
    (E3, "norm flags", put("norm_before_residual", value=True)),
    (("eagle3", "sglang"), "norm flags", put("norm_before_residual", value=True)),
    (SPEC, "norm flags", drop("norm_before_residual")),
    (NORMED, "norm flags", drop("norm_output")),
    (NORMED, "tensors", drop("fc_norm")),
    (("eagle3-normed", "speculators"), "norm flags", drop("norm_output")),
    (("eagle3-normed", "speculators"), "tensors", drop("fc_norm")),
    (E3, "layer ids", put("eagle_config", "use_aux_hidden_state", value=False)),
    (E3, "config", put("tie_word_embeddings", value=True)),
    (SPEC, "config", put(INNER, "tie_word_embeddings", value=True)),
    (SPEC, "config", put("target_hidden_size", value=64)),
    (("eagle", "vllm"), "bias", put("bias", value=True)),
    (("eagle", "vllm"), "bias", lambda config, tensors: tensors["fc.bias"].add_(0.1)),
    (("eagle", "sglang"), "tensors", lose("fc.bias")),
    (("medusa", "vllm"), "bias", put("medusa_fc_bias", value=False)),
    # fields that an engine would replace by a default of its own
    *((E3, name, drop(key)) for name, key in (("rope", "rope_theta"), ("norm", "rms_norm_eps"), ("head_dim", "head_dim"))),
    (E3, "max positions", drop("max_position_embeddings")),
    (E3, "rope", put("rope_theta", value=500000.0)),
    (E3, "rope scaling", put("rope_scaling", value={"rope_type": "linear", "factor": 8.0})),
    (E3, "norm", put("rms_norm_eps", value=1e-5)),
    (E3, "head_dim", put("head_dim", value=16)),
    (E3, "heads", drop("num_key_value_heads")),
    (E3, "max positions", put("max_position_embeddings", value=256)),
    (SPEC, "rope", put(INNER, "rope_theta", value=500000.0)),
    (SPEC, "head_dim", drop(INNER, "head_dim")),
    (("eagle", "vllm"), "rope", drop("rope_theta")),
    (("eagle", "sglang"), "norm", put("rms_norm_eps", value=1e-5)),
    (DFLASH, "rope", put("rope_theta", value=500000.0)),
    (DFLASH, "max positions", drop("max_position_embeddings")),
    (MUSE, "layer types", drop("layer_types")),
    (DFLASH, "layer types", drop("layer_types")),
    (MUSE, "head_dim", put("head_dim", value=16)),
    (LM, "rope", put("rope_parameters", value={"rope_type": "default", "rope_theta": 500000.0})),
    (LM, "rope", drop("rope_parameters")),
    (LM, "rope scaling", put("rope_parameters", "rope_type", value="yarn")),
    (LM, "head_dim", drop("head_dim")),
    (LM, "max positions", put("max_position_embeddings", value=256)),
    (LM, "norm", put("rms_norm_eps", value=1e-5)),
    (BLOCKS, "rope", put(INNER, "rope_theta", value=500000.0)),
    (BLOCKS, "layer types", drop(INNER, "layer_types")),
    (BLOCKS, "config", put("sliding_window_non_causal", value=False)),
    (BLOCKS, "config", put("sample_from_anchor", value=True)),
    (BLOCKS, "mask token", put("mask_token_id", value=5)),
    (SPARK, "config", drop("sample_from_anchor")),
    (SPARK, "config", put("markov_rank", value=4)),
    (SPARK, "config", put("markov_head_type", value="gated")),
    (SPARK, "logits", switch("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")),
    (SPARK, "tensors", lose("confidence_head.proj.bias")),
    (TWO, "config", put("conv_kernel_size", value=3)),
    (TWO, "config", put("conv_group_size", value=8)),
    (TWO, "logits", put("selector_top_k", value=4)),
    (TWO, "logits", switch("layers.0.attention_conv.base_kernel", "layers.0.mlp_conv.base_kernel")),
    (TWO, "logits", shaken("candidate_selector.successor_codebook")),
    # the authors' layouts of the newer block drafters
    *((DEEP, "config", drop(key)) for key in ("sample_from_anchor", "markov_rank", "markov_head_type")),
    (DEEP, "slots", put("sample_from_anchor", value=False)),
    (IN_PLACE, "slots", put("sample_from_anchor", value=True)),
    (AUTHORS, "config", put("sample_from_anchor", value=False)),
    (AUTHORS, "config", drop("num_anchors")),
    (PART, "vocabulary", put("draft_vocab_size", value=39)),
    (PART, "vocabulary", drop("draft_vocab_size")),
    (PART, "d2t", lambda config, tensors: tensors["d2t"].add_(1)),
    (PART, "tensors", lose("lm_head.weight")),
    (DEEP, "layer ids", drop("dflash_config")),
    (DEEP_TRT, "slots", put("dflash_config", "shift_label", value=False)),
    (DEEP_TRT, "config", put("dflash_config", "causal", value=True)),
    (DEEP_TRT, "config", put("dspark_markov_head_type", value="gated")),
    (DEEP_TRT, "config", drop("markov_rank")),
    (DEEP_TRT, "block size", put("dspark_config", value={"block_size": 4})),
    (DEEP_TRT, "mask token", put("dflash_config", "mask_token_id", value=7)),
    (DEEP_TRT, "layer ids", put("dflash_config", "target_layer_ids", value=[1, 0, -1])),
    (AUTHORS, "tensors", lose("lm_head.weight")),
    (AUTHORS, "logits", shaken("lm_head.weight")),
    (DEEP, "architecture", put("architectures", value=["DSparkDraftModel"])),
    (
        DEEP,
        "layer ids",
        lambda config, tensors: config.update(dflash_config={"target_layer_ids": config.pop("target_layer_ids")}),
    ),
    (DEEP, "config", put("enable_confidence_head", value=False)),
    (DEEP, "tensors", lose("confidence_head.proj.bias")),
    (DEEP, "causal layers", put("is_causal", value=True)),
    (DEEP, "logits", switch("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")),
    (TWO_RAW, "architecture", put("architectures", value=["DFlashDraftModel"])),
    (TWO_RAW, "config", drop("dflash_config", "selector_top_k")),
    (TWO_RAW, "config", put("dflash_config", "conv_group_size", value=8)),
    (TWO_RAW, "config", put("sample_from_anchor", value=True)),
    (TWO_RAW, "logits", put("dflash_config", "selector_top_k", value=4)),
    (TWO_RAW, "tensors", rename("candidate_selector.predecessor_codebook", "candidate_selector.predecessor_codebook.weight")),
    (DOMINO, "architecture", drop("dflash_config", "projector_type")),
    (DOMINO, "config", drop("dflash_config", "shift_label")),
    (DOMINO, "config", put("dflash_config", "pure_draft_prefix_len", value=2)),
    (DOMINO, "config", put("dflash_config", "gru_hidden_dim", value=10)),
    (DOMINO, "config", put("emb_dim", value=9)),
    (DOMINO, "slots", put("dflash_config", "shift_label", value=True)),
    (SHIFTED_DOMINO, "slots", put("dflash_config", "shift_label", value=False)),
    (DOMINO, "logits", rolled("prefix_gru.weight_ih_l0")),
    (DOMINO, "logits", lambda c, t: t.update({"embed_proj.0.weight": t["embed_proj.0.weight"].roll(12, 1)})),
    # whether slots see later slots
    (CAUSAL, "causal layers", drop("is_causal")),
    (("jetspec", "sglang"), "causal layers", drop("is_causal")),
    (("jetspec", "official"), "causal layers", drop("dflash_config", "causal_head")),
    (JET, "causal layers", lambda config, tensors: (config.pop("is_causal"), config["dflash_config"].pop("causal"))),
    (JET, "causal layers", put("is_causal", value=False)),
    (("dspark-causal", "vllm"), "causal layers", drop("is_causal")),
    (("domino-causal", "sglang"), "causal layers", put("is_causal", value=False)),
    (("dspark-open-windows", "vllm"), "causal layers", drop("is_causal")),
    (DFLASH, "causal layers", put("is_causal", value=True)),
    (DFLASH, "causal layers", put("dflash_config", "causal", value=True)),
    (("dflash", "trtllm"), "config", put("is_causal", value=True)),
    (PRESS, "architecture", put("architectures", value=["DFlashDraftModel"])),
    (PRESS, "config", drop("sample_from_anchor")),
    (PRESS, "config", put("xpress_topc", value=512)),
    (PRESS, "config", put("xpress_rank", value=4)),
    (PRESS, "config", put("xpress_mlp_hidden", value=8)),
    (PRESS, "passes", put("xpress_num_passes", value=2)),
    (PRESS, "block size", put("xpress_block_size", value=5)),
    (PRESS, "logits", switch("xpress_head.w1.weight", "xpress_head.w2.weight")),
    (PRESS, "logits", switch("xpress_head.down_h.weight", "xpress_head.down_g.weight")),
    (PRESS, "logits", lambda config, tensors: tensors["xpress_head.mix.L"].add_(torch.eye(4))),
    (PRESS, "tensors", lose("xpress_head.mlp.up_proj.weight")),
    (LATTICE, "architecture", put("architectures", value=["DFlashDraftModel"])),
    (LATTICE, "architecture", drop("dflash_config", "projector_type")),
    (LATTICE, "config", drop("dflash_config", "lilicorr_logit_scale")),
    (LATTICE, "config", put("dflash_config", "lilicorr_candidate_topk", value=6)),
    (LATTICE, "config", put("dflash_config", "lilicorr_num_heads", value=3)),
    (LATTICE, "lilicorr_vector_eps", put("dflash_config", "lilicorr_vector_eps", value=1e-3)),
    (LATTICE, "lilicorr_logit_scale", put("dflash_config", "lilicorr_logit_scale", value=10.0)),
    (LATTICE, "tensors", rename("lilicorr.feature_norm.weight", "lilicorr.feature_mlp.0.weight")),
    (LATTICE, "logits", switch("lilicorr.in_head.weight", "lilicorr.out_head.weight")),
    (LATTICE, "logits", shaken("lilicorr.context_proj.weight")),
    (BLOCKS, "block size", drop("block_size")),
    (BLOCKS, "vocabulary", put("draft_vocab_size", value=32)),
    # names and shapes
    (BLOCKS, "architecture", put("speculators_model_type", value="dflash2")),
    (ONE, "architecture", put("architectures", value=["LlamaForCausalLMEagle"])),
    (ONE, "tensors", lose("embed_tokens.weight")),
    (ONE, "tensors", lambda config, tensors: tensors.update({"fc.bias": torch.zeros(32)})),
    (ONE, "logits", shaken("embed_tokens.weight")),
    (E3, "tensors", lose("midlayer.hidden_norm.weight")),
    (E3, "tensors", rename("norm.weight", "model.norm.weight")),
    (SPEC, "tensors", rename("layers.0.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight")),
    (SPEC, "architecture", put("model_type", value="llama")),
    (SPEC, "tensors", lose("embed_tokens.weight")),
    (SPEC, "architecture", drop("speculators_version")),
    (SPEC, "architecture", put("speculators_config", "algorithm", value="eagle")),
    (SPEC, "architecture", drop("speculators_config", "verifier", "name_or_path")),
    (SPEC, "architecture", drop(INNER, "model_type")),
    (E3, "architecture", put("architectures", value=["LlamaForCausalLM"])),
    (E3, "architecture", put("model_type", value="qwen3")),
    (("eagle3", "openvino"), "tensors", rename("midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight")),
    (DFLASH, "architecture", put("architectures", value=["DFlashSpeculator"])),
    (DFLASH, "tensors", lambda config, tensors: tensors.update({"lm_head.weight": torch.zeros(64, 32)})),
    (MUSE, "architecture", put("architectures", value=["DFlashDraftModel"])),
    (MUSE, "tensors", rename("encoder.fc.weight", "fc.weight")),
    (("eagle", "vllm"), "tensors", lambda config, tensors: tensors.update({"lm_head.weight": torch.zeros(64, 32)})),
    (("eagle", "vllm"), "tensors", lambda config, tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(32)})),
    (("eagle", "sglang"), "architecture", put("architectures", value=["LlamaForCausalLM"])),
    (("medusa", "vllm"), "vocabulary", put("truncated_vocab_size", value=32)),
    (("medusa", "vllm"), "tensors", put("num_heads", value=2)),
    (("medusa", "vllm"), "config", drop("hidden_size")),
    (("medusa", "tgi"), "tensors", put("medusa_num_heads", value=2)),
    (("medusa", "tgi"), "config", drop("base_model_name_or_path")),
    (("medusa", "tgi"), "architecture", put("architectures", value=["MedusaModel"])),
    (("medusa", "tgi"), "tensors", lose("1.0.linear.bias")),
    (("hydra", "official"), "tensors", put("hydra_num_layers", value=1)),
    (("hydra", "official"), "architecture", put("grounded_heads", value=False)),
    (("redrafter", "official"), "tensors", put("exit_dim", value=32)),
    (("redrafter", "official"), "config", put("rnn", value=False)),
    (("redrafter", "official"), "architecture", put("model_type", value="redrafter")),
    (("mlp_speculator", "tgi"), "architecture", put("model_type", value="mlp")),
    (("mlp_speculator", "official"), "tensors", put("inner_dim", value=24)),
    (("mlp_speculator", "official"), "tensors", put("n_predict", value=2)),
    (("mtp", "official"), "tensors", lose("model.layers.4.shared_head.norm.weight")),
    (("mtp", "official"), "config", put("num_hidden_layers", value=3)),
    (("mtp-qwen3", "speculators"), "architecture", put("transformer_layer_config", "model_type", value="llama")),
    (DFLASH, "mask token", put("dflash_config", "mask_token_id", value=5)),
    (DFLASH, "block size", put("block_size", value=6)),
    (LM, "tensors", lose("lm_head.weight")),
    (LM, "vocabulary", put("vocab_size", value=65)),
    # what nothing but the drafts themselves shows
    (E3, "logits", swap_halves(LAYER)),
    (E3, "logits", switch("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")),
    (E3, "logits", shaken("fc.weight")),
    (SPEC, "logits", lambda config, tensors: tensors.update({"embed_tokens.weight": tensors["embed_tokens.weight"].flip(0)})),
    (("eagle", "vllm"), "logits", swap_halves("fc.weight")),
    (("medusa", "vllm"), "logits", switch("blocks.0.layers.0.weight", "blocks.1.layers.0.weight")),
    (("medusa-deep", "tgi"), "logits", switch("0.0.linear.weight", "0.1.linear.weight")),
    (("hydra", "official"), "logits", switch("hydra_mlp.0.0.linear.weight", "hydra_mlp.0.0.res_connection.weight")),
    (("redrafter", "official"), "logits", switch("rnn_u.weight", "rnn_w.weight")),
    (("mtp", "official"), "logits", swap_halves("model.layers.4.eh_proj.weight")),
    (("mtp", "official"), "logits", switch("model.layers.4.enorm.weight", "model.layers.4.hnorm.weight")),
    (("mtp-qwen3", "speculators"), "logits", shaken("mtp_layers.0.final_layernorm.weight")),
    (("mlp_speculator", "official"), "logits", put("scale_input", value=False)),
    (("mlp_speculator", "official"), "logits", put("tie_weights", value=True)),
    (("mlp_speculator", "tgi"), "logits", switch("speculator.ln.0.weight", "speculator.ln.1.weight")),
    (DFLASH, "logits", switch("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")),
    (P, "mask token", drop("pard_token")),
    (P, "mask token", put("pard_token", value=62)),
    (P, "tensors", lose("mask_hidden")),
    (P, "logits", shaken("mask_hidden")),
    (P, "logits", rolled("embed_tokens.weight")),
    (P, "tensors", put("num_hidden_layers", value=1)),
    (P, "layer ids", put(IDS, value=[0, 1, 2])),
    (("peagle", "speculators"), "mask token", drop("mask_token_id")),
    (("pard", "vllm"), "mask token", put("pard_token", value=62)),
    (("pard", "trtllm"), "mask token", drop("pard_token")),
    (LM, "logits", shaken("model.norm.weight")),
    (LM, "logits", lambda config, tensors: tensors["lm_head.weight"].fill_(torch.nan)),
]


GATED: list[tuple[tuple[str, str], str, Change]] = [  # what the gate says of some of them
    (("eagle3", "sglang"), "files: .* its layer ids contradict each other", put(*NESTED, value=[1, 2, 3])),
    (BLOCKS, "files: .* aux_hidden_state_layer_ids", put("aux_hidden_state_layer_ids", value=[0, 1, 2])),
    (DFLASH, "layer ids: ", put("dflash_config", "target_layer_ids", value=[1, 2, 3])),
    (E3, "d2t: ", moved),
    (E3, "files: .* d2t gives the tokens that t2d marks neither as offsets nor as ids", marked_more),
    (E3, "norm flags: ", put("norm_before_residual", value=True)),
    (("eagle3-normed", "speculators"), "norm flags: ", drop("norm_output")),
    (E3, "rope: .* does not say rope_theta", drop("rope_theta")),
    (E3, "max positions: ", put("max_position_embeddings", value=256)),
    (E3, "files: .* lacks lm_head.weight", lose("lm_head.weight")),
    (E3, "files: .* has unknown tensors other.weight", rename("norm.weight", "other.weight")),
    (E3, "files: they are not recognised as portable", rename("fc.weight", "other.weight")),
    (("dspark-open-windows", "vllm"), "causal layers: ", drop("is_causal")),
    (LM, "files: .* holds NaN or infinity", lambda config, tensors: tensors["lm_head.weight"].fill_(torch.nan)),
]
TAKEN_AS_WELL = (  # names of failures some of which an importer does not see
    *("architecture", "bias", "causal layers", "config", "d2t", "head_dim", "layer ids", "layer types", "norm flags", "passes"),
    *("rope", "tensors", "vocabulary"),
)


@pytest.mark.parametrize("case", dict.fromkeys(case for (case, _), _, _ in TRAPS))
def test_parity_check_names_wrong_field_or_tensor(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Wrong layers show in the drafts, too, whatever the files say of themselves: neighbours' states give other logits."""
    found, golden = opened(tmp_path, case)
    for stack in dict.fromkeys(stack for (of, stack), _, _ in TRAPS if of == case):
        written(found, golden, stack, tmp_path / stack)
        traps = [(name, change) for where, name, change in TRAPS if where == (case, stack)]
        for number, (name, change) in enumerate(traps):
            with subtests.test(stack=stack, name=name, number=number):
                wrong = changed(tmp_path / stack, tmp_path / f"{stack}-{number}", change)
                with pytest.raises(ParityError, match=f"^Parity: {name}: ") as caught:
                    compare(found, golden, stack, wrong)
                assert caught.value.name == name
                if name not in TAKEN_AS_WELL:
                    with pytest.raises(ParityError, match=r"^Parity: "):
                        gate(found, golden, stack, wrong)
                if ((case, stack), change) in SHIFTED:
                    with monkeypatch.context() as patch, pytest.raises(ParityError, match=r"^Parity: logits: draft"):
                        patch.setattr(oracle, "check_facts", lambda *_: None)
                        compare(found, golden, stack, wrong)


def test_parity_check_finds_wrong_layer_ids_flags_and_fields(
    exported: Callable[[str, str], Made], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """The gate on a user's machine, by the importer, with the name of the setting or the importer's message."""
    for number, ((case, stack), says, change) in enumerate(GATED):
        with subtests.test(case=case, stack=stack, says=says):
            found, golden, right = exported(case, stack)
            with pytest.raises(ParityError, match=f"^Parity: {says}"):
                gate(found, golden, stack, changed(right, tmp_path / str(number), change))


def test_parity_check_unreadable_file_is_named(exported: Callable[[str, str], Made], tmp_path: Path) -> None:
    found, golden, right = exported(*E3)
    for number, (file, name) in enumerate((("model.safetensors", "tensors"), ("config.json", "config"))):
        wrong = tmp_path / str(number)
        shutil.copytree(right, wrong)
        (wrong / file).write_bytes((wrong / file).read_bytes()[:-30])
        (wrong / LISTED).unlink()
        with pytest.raises(ParityError, match=f"^Parity: {name}: {file} cannot be read"):
            compare(found, golden, "vllm", wrong)
        with pytest.raises(ParityError, match=f"^Parity: files: .*{file}: damaged"):
            gate(found, golden, "vllm", wrong)


@pytest.mark.parametrize(
    ("case", "stack", "keys"),
    [
        ("dflash-causal", "vllm", ("is_causal",)),
        ("dflash-causal", "vllm", ("dflash_config", "causal")),
        ("jetspec", "vllm", ("dflash_config", "causal_head")),
        ("jetspec", "official", ("is_causal",)),
    ],
)
def test_parity_check_ignores_causal_key_of_other_loader(
    case: str, stack: str, keys: tuple[str, ...], exported: Callable[[str, str], Made], tmp_path: Path
) -> None:
    """vLLM finds either of two keys, and the authors' code a third one."""
    found, golden, right = exported(case, stack)
    compare(found, golden, stack, changed(right, tmp_path / "other", drop(*keys)))


@pytest.mark.parametrize("harm", ["other", "absent", "damaged"])
def test_parity_check_wrong_tokenizer_is_detected(harm: str, exported: Callable[[str, str], Made], tmp_path: Path) -> None:
    found, golden, right = exported(*LM)
    shutil.copytree(right, tmp_path / "wrong")
    file = tmp_path / "wrong" / "tokenizer.json"
    text = file.read_text()
    file.unlink()
    if harm == "other":
        content = json.loads(text)
        content["model"]["vocab"] |= {"w3": 4, "w4": 3}
        file.write_text(json.dumps(content))
    elif harm == "damaged":
        file.write_text(text[:100])
    for check in (gate, compare):
        with pytest.raises(ParityError, match=r"^Parity: tokenizer: ('w3' is token 4 there, the target's is 3|tokenizer.json)"):
            check(found, golden, "vllm", tmp_path / "wrong")


def test_export_failed_parity_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, golden = opened(tmp_path / "run", "eagle3")
    right = exporter.write

    def wrong(directory: Path, files: Files, *rest: Any) -> None:
        files.config[IDS], files.config["eagle_config"][IDS] = [2, 3, 4], [1, 2, 3]
        right(directory, files, *rest)

    monkeypatch.setattr(exporter, "write", wrong)
    for stack in ("vllm", "all"):
        with pytest.raises(ParityError, match=r"layer ids: the files have \[2, 3, 4\], the checkpoint's .* \[1, 2, 3\]"):
            written(found, golden, stack, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("case", ["medusa", "eagle3-others"])
def test_export_of_untrained_copies_of_target_matrices_passes_parity(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded they are the target's up to their rounding, and still the drafter's own."""
    monkeypatch.setattr("tests.exports.shake", lambda *rest, **more: None)
    found, golden = opened(tmp_path / "run", case)
    assert written(found, golden, "vllm", tmp_path / "out", "bfloat16").written["vllm"].gap < 0.5


def test_parity_draft_token_within_tolerance_is_accepted(tmp_path: Path) -> None:
    """Beyond the recorded logits, too."""
    _, golden = opened(tmp_path, "medusa")
    logits = torch.full((2, 3, 64), -9.0).scatter(-1, golden.token_PKR, golden.logit_PKR)
    few = replace(golden, token_PKR=golden.token_PKR[..., :2], logit_PKR=golden.logit_PKR[..., :2])
    for more, fails in ((0.0, False), (parity.TOLERANCE, False), (0.1, True)):
        logits[0, 1, golden.token_PKR[0, 1, 5]] = few.logit_PKR[0, 1, 0] + more
        assert float(parity.gaps(logits, few)[0, 0]) < 1.0
        if not fails:
            parity.check_tokens(logits, few)
            continue
        with pytest.raises(ParityError, match="Parity: draft tokens: 1 of 6 differ"):
            parity.check_tokens(logits, few)


def test_export_golden_drafts_of_other_checkpoint_fail_parity(tmp_path: Path) -> None:
    found, _ = opened(tmp_path / "one", "eagle3")
    _, other = opened(tmp_path / "two", "eagle3", draft_vocab=39)
    with pytest.raises(ParityError, match="Parity: d2t"):
        written(found, other, "vllm", tmp_path / "out")
