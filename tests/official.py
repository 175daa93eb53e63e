"""Published drafters' directories, written by hand from what their loaders read: no name or shape here comes from our exporter.

They fit the target of `tests.exports.loaded`: 64 tokens, width 32, four blocks, 4 heads over 2 KV heads of width 8, 48 inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.exports import loaded

V, H, D, INNER = 64, 32, 40, 48
Made = tuple[dict[str, Any], dict[str, Tensor], str]

LLAMA = {
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": INNER,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": V,
    "tie_word_embeddings": False,
}
IDS = "eagle_aux_hidden_state_layer_ids"


class Weights:
    """Random ones, the same each time."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * (1.2 / shape[-1] ** 0.5)

    def norm(self, width: int = H) -> Tensor:
        return 1 + 0.1 * torch.randn(width, generator=self.generator)

    def layer(self, prefix: str, reads: int = H, qk: bool = False) -> dict[str, Tensor]:
        found = {
            f"{prefix}.self_attn.q_proj.weight": self(32, reads),
            f"{prefix}.self_attn.k_proj.weight": self(16, reads),
            f"{prefix}.self_attn.v_proj.weight": self(16, reads),
            f"{prefix}.self_attn.o_proj.weight": self(H, 32),
            f"{prefix}.mlp.gate_proj.weight": self(INNER, H),
            f"{prefix}.mlp.up_proj.weight": self(INNER, H),
            f"{prefix}.mlp.down_proj.weight": self(H, INNER),
            f"{prefix}.post_attention_layernorm.weight": self.norm(),
        }
        if qk:
            found |= {f"{prefix}.self_attn.{x}_norm.weight": self.norm(8) for x in "qk"}
        return found


def offsets() -> tuple[Tensor, Tensor]:
    """(d2t, t2d): every draft token below 20 is its own, the others lie 24 further on."""
    d2t = torch.cat([torch.zeros(20, dtype=torch.int64), torch.full((20,), 24, dtype=torch.int64)])
    t2d = torch.tensor([i < 20 or i >= 44 for i in range(V)])
    return d2t, t2d


def eagle3(prefix: str = "midlayer") -> Made:
    w = Weights()
    d2t, t2d = offsets()
    tensors = {
        "fc.weight": w(H, 3 * H),
        **w.layer(prefix, 2 * H),
        f"{prefix}.hidden_norm.weight": w.norm(),
        f"{prefix}.input_layernorm.weight": w.norm(),
        "norm.weight": w.norm(),
        "lm_head.weight": w(D, H),
        "d2t": d2t,
        "t2d": t2d,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **LLAMA,
        "draft_vocab_size": D,
        "norm_before_residual": False,
        IDS: [1, 2, 3],
        "eagle_config": {"use_aux_hidden_state": True, IDS: [0, 1, 2]},
    }
    return config, tensors, "model.safetensors"


def eagle3_speculators() -> Made:
    _, tensors, file = eagle3("layers.0")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "transformer_layer_config": {"model_type": "llama", **LLAMA},
        "draft_vocab_size": D,
        "norm_before_residual": True,
        "target_hidden_size": H,
        IDS: [1, 2, 3],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/target", "architectures": ["X"]}},
    }
    return config, tensors | {"embed_tokens.weight": embedding()}, file


def eagle3_deepspec() -> Made:
    """As DeepSpec's trainer writes: a Qwen3 block, the target's matrices, and layer ids of outputs."""
    _, tensors, file = eagle3("layers.0")
    w = Weights(8)
    tensors |= {f"layers.0.self_attn.{x}_norm.weight": w.norm(8) for x in "qk"}
    for name in ("d2t", "t2d"):
        del tensors[name]
    config = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", **LLAMA, "layer_types": ["full_attention"]}
    config |= {"target_layer_ids": [0, 1, 2], "num_target_layers": 4, "ttt_length": 7, "step_loss_decay": 0.8}
    config |= {"draft_num_hidden_layers": 1, "target_model_name_or_path": "owner/target", "max_window_layers": 4}
    return config, tensors | copies(), file


def eagle3_latents() -> Made:
    """As kimi-k3-eagle3.1-mla: DeepSeek's attention, which reads 2 H, and a field of its target that no stack reads here."""
    w, ranks = Weights(), {"q_lora_rank": 10, "kv_lora_rank": 12}
    prefix, queries, expanded = "layers.0.self_attn", 4 * (6 + 4), 4 * (6 + 5)
    _, tensors, file = eagle3("layers.0")
    for name in ("d2t", "t2d", *(f"{prefix}.{x}_proj.weight" for x in "qkvo")):
        del tensors[name]
    tensors |= {
        f"{prefix}.q_a_proj.weight": w(10, 2 * H),
        f"{prefix}.q_a_layernorm.weight": w.norm(10),
        f"{prefix}.q_b_proj.weight": w(queries, 10),
        f"{prefix}.kv_a_proj_with_mqa.weight": w(12 + 4, 2 * H),
        f"{prefix}.kv_a_layernorm.weight": w.norm(12),
        f"{prefix}.kv_b_proj.weight": w(expanded, 12),
        f"{prefix}.o_proj.weight": w(H, 4 * 5),
        **{f"fc_norm.{i}.weight": w.norm() for i in range(3)},
        "lm_head.weight": w(V, H),
        "embed_tokens.weight": embedding(),
    }
    scaling = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
    config = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        **{key: value for key, value in LLAMA.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        **ranks,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "mla_use_nope": True,
        "rope_scaling": scaling | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "draft_vocab_size": V,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
        IDS: [1, 2, 3],
        "eagle_config": {"use_aux_hidden_state": True, IDS: [0, 1, 2], "use_mtp_layernorm": False},
    }
    return config, tensors, file


def embedding() -> Tensor:
    """The target's."""
    model: Any = loaded().target.model
    weight: Tensor = model.get_input_embeddings().weight.detach().clone()
    return weight


def peagle() -> Made:
    w, (config, tensors, file) = Weights(3), eagle3("layers.0")
    for i in (1, 2):
        tensors |= w.layer(f"layers.{i}") | {f"layers.{i}.input_layernorm.weight": w.norm()}
    tensors |= {"mask_hidden": w(1, 1, 3 * H), "embed_tokens.weight": w(V, H)}
    return config | {"num_hidden_layers": 3, "pard_token": 60}, tensors, file


def peagle_speculators() -> Made:
    _, tensors, file = peagle()
    config, _, _ = eagle3_speculators()
    layers = config["transformer_layer_config"] | {"num_hidden_layers": 3}
    asked = config["speculators_config"] | {"algorithm": "peagle"}
    config |= {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": 60}
    own = {"transformer_layer_config": layers, "speculators_config": asked, "embed_requires_grad": True}
    return config | own, tensors, file


def pard() -> Made:
    config, tensors, file = draft_model()
    return config | {"pard_token": 60, "spd_type": "pard"}, tensors, file


def eagle() -> Made:
    w = Weights()
    config = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", **LLAMA, "bias": False}
    return config, {"fc.weight": w(H, 2 * H), "fc.bias": w(H), **w.layer("layers.0")}, "model.safetensors"


def medusa_vllm() -> Made:
    w, tensors = Weights(), {}
    for i in range(3):
        tensors |= {
            f"blocks.{i}.layers.0.weight": w(H, H),
            f"blocks.{i}.layers.0.bias": w(H),
            f"lm_heads.{i}.weight": w(V, H),
        }
    sizes = {"hidden_size": H, "vocab_size": V, "truncated_vocab_size": V, "num_heads": 3, "num_hidden_layers": 1}
    return (
        {"architectures": ["MedusaModel"], "model_type": "medusa", **sizes, "medusa_fc_bias": True},
        tensors,
        "model.safetensors",
    )


def medusa_official() -> Made:
    w, tensors = Weights(), {}
    for i in range(3):
        tensors |= {f"{i}.0.linear.weight": w(H, H), f"{i}.0.linear.bias": w(H), f"{i}.1.weight": w(V, H)}
    config = {"base_model_name_or_path": "owner/target", "medusa_num_heads": 3, "medusa_num_layers": 1}
    return config, tensors, "medusa_lm_head.safetensors"


def hydra() -> Made:
    w, tensors = Weights(), {}
    for i in range(2):
        for name in ("linear", "res_connection"):
            tensors |= {f"hydra_mlp.{i}.0.{name}.weight": w(H, (i + 2) * H), f"hydra_mlp.{i}.0.{name}.bias": w(H)}
        tensors |= {f"hydra_mlp.{i}.1.linear.weight": w(H, H), f"hydra_mlp.{i}.1.linear.bias": w(H)}
        tensors |= {f"hydra_lm_head.{i}.weight": w(V, H), f"hydra_lm_head.{i}.bias": w(V)}
    tensors["input_embed_fn.weight"] = embedding()  # saved with the heads that read it
    config = {"hydra_num_heads": 2, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    return {**config, "hidden_state_offset": 0, "base_model_name_or_path": "owner/target"}, tensors, "hydra_lm_head.safetensors"


def redrafter() -> Made:
    w = Weights()
    tensors = {"rnn_w.weight": w(H, H), "rnn_u.weight": w(H, H), "rnn_u.bias": w(H), "lm_head.2.weight": w(V, 2 * H)}
    for j in range(2):
        tensors |= {f"lm_head.{j}.linear.weight": w(2 * H, 2 * H), f"lm_head.{j}.linear.bias": w(2 * H)}
    sizes = {"vocab_size": V, "hidden_size": H, "exit_dim": 2 * H, "num_draft_layers": 2, "num_lookback_tokens": 4}
    return {"model_type": "recurrent_drafting_drafter", **sizes, "rnn": True}, tensors, "model.safetensors"


def mlp_speculator() -> Made:
    w, tensors, inner = Weights(), {}, 24
    for i in range(3):
        tensors |= {
            f"speculator.emb.{i}.weight": w(V, inner),
            f"speculator.proj.{i}.weight": w(inner, inner if i else H),
            f"speculator.ln.{i}.weight": w.norm(inner),
            f"speculator.ln.{i}.bias": w(inner),
            f"speculator.head.{i}.weight": w(V, inner),
        }
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": H,
        "inner_dim": inner,
        "vocab_size": V,
        "n_predict": 3,
        "n_candidates": 4,
        "top_k_tokens_per_head": [4, 3, 2],
        "tie_weights": False,
        "scale_input": True,
    }
    return config, tensors, "model.safetensors"


def dflash() -> Made:
    w, tensors = Weights(), {}
    for i in range(2):
        tensors |= w.layer(f"layers.{i}", qk=True) | {f"layers.{i}.input_layernorm.weight": w.norm()}
    tensors |= {"fc.weight": w(H, 3 * H), "hidden_norm.weight": w.norm(), "norm.weight": w.norm()}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **LLAMA,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_size": 4,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1, 2]},
    }
    return config, tensors, "model.safetensors"


def dflash_speculators() -> Made:
    config, tensors, file = dflash()
    size, mask = config.pop("block_size"), config.pop("dflash_config")["mask_token_id"]
    for key in ("architectures", "num_target_layers"):
        config.pop(key)
    own = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": config,
        "draft_vocab_size": V,
        "target_hidden_size": H,
        "block_size": size,
        "mask_token_id": mask,
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "owner/target", "architectures": ["X"]}},
    }
    return own, tensors, file


def copies() -> dict[str, Tensor]:
    """The target's matrices, as some projects write them into a drafter's file."""
    return {"embed_tokens.weight": embedding(), "lm_head.weight": loaded().target.head_weight.detach().clone()}


def dflash_deepspec() -> Made:
    """As deepseek-ai's own: the class of their later drafters, without their heads."""
    config, tensors, file = dflash()
    config |= {"architectures": ["Qwen3DSparkModel"], **config.pop("dflash_config"), "tie_word_embeddings": False}
    config |= {"block_size": 4, "num_target_layers": 4, "markov_rank": 0, "enable_confidence_head": False}
    return config, tensors | copies(), file


def dspark() -> Made:
    config, tensors, file = dflash_deepspec()
    config |= {"markov_rank": 8, "markov_head_type": "vanilla", "sample_from_anchor": True}
    config |= {"enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 512}
    w = Weights(seed=4)
    tensors |= {"markov_head.markov_w1.weight": w(V, 8), "markov_head.markov_w2.weight": w(V, 8)}
    tensors |= {"confidence_head.proj.weight": w(1, H + 8), "confidence_head.proj.bias": w(1)}
    return config, tensors, file


def dspark_model_optimizer() -> Made:
    """As NVIDIA/Model-Optimizer's exporter writes it: a flat head, and its fields in `dflash_config`."""
    config, tensors, file = dflash()
    config["dflash_config"] |= {"projector_type": "dspark", "shift_label": True, "markov_rank": 8}
    config["dflash_config"] |= {"markov_head_type": "vanilla", "use_confidence_head": True}
    w = Weights(seed=4)
    tensors |= {"markov_w1.weight": w(V, 8), "markov_w2.weight": w(V, 8)}
    return config, tensors | {"confidence_proj.weight": w(1, H + 8), "confidence_proj.bias": w(1)}, file


def within(made: Made, *heads: str) -> Made:
    """With the heads within a module `logit_head`, as early files of SpecForge."""
    config, tensors, file = made
    return config, {f"logit_head.{name}" if name.startswith(heads) else name: x for name, x in tensors.items()}, file


def jetspec() -> Made:
    config, tensors, file = dflash()
    config["dflash_config"] |= {"causal_head": True, "causal": True}
    return config | {"is_causal": True}, tensors, file


def domino() -> Made:
    config, tensors, file = dflash()
    config["dflash_config"] |= {"projector_type": "domino", "shift_label": False, "pure_draft_prefix_len": 1}
    config["dflash_config"] |= {"gru_hidden_dim": 12, "emb_dim": 8}
    w = Weights(seed=6)
    tensors |= {"prefix_gru.weight_ih_l0": w(3 * 12, H), "prefix_gru.weight_hh_l0": w(3 * 12, 12)}
    tensors |= {"embed_proj.0.weight": w(8, H + 12), "embed_proj.2.weight": w(V, 8)}
    return config | {"emb_dim": 8}, tensors, file


def dflash2() -> Made:
    config, tensors, file = dflash()
    own, of_speculators, _ = dflash2_speculators()
    tensors |= {name: x for name, x in of_speculators.items() if "_conv" in name or "selector" in name}
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        config["dflash_config"][key] = own[key]
    return config | {"architectures": ["DFlash2DraftModel"]}, tensors, file


def dspark_speculators() -> Made:
    own, tensors, file = dflash_speculators()
    w = Weights(seed=4)
    own |= {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "sample_from_anchor": True}
    own |= {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
    own |= {"confidence_head_with_markov": True}
    own["speculators_config"] = {**own["speculators_config"], "algorithm": "dspark"}
    tensors |= {"markov_head.markov_w1.weight": w(V, 8), "markov_head.markov_w2.weight": w(V, 8)}
    tensors |= {"confidence_head.proj.weight": w(1, H + 8), "confidence_head.proj.bias": w(1)}
    return own, tensors, file


def dflash2_speculators() -> Made:
    own, tensors, file = dflash_speculators()
    w = Weights(seed=5)
    own |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
    own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
    own["speculators_config"] = {**own["speculators_config"], "algorithm": "dflash2"}
    for i in range(2):
        for part in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{i}.{part}.base_kernel"] = w(2, 2, H)
            tensors[f"layers.{i}.{part}.kernel_projection.weight"] = w(2 * 2 * H // 16, H)
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{name}"] = w(V, 8)
    tensors["candidate_selector.hidden_projection.weight"] = w(8, H)
    return own, tensors, file


def xpress() -> Made:
    config, tensors, file = dflash()
    w = Weights(seed=6)
    config |= {"architectures": ["Qwen3XPressModel"], "xpress_block_size": 4, "xpress_rank": 8, "xpress_mlp_hidden": 12}
    config |= {"xpress_topc": 0, "xpress_num_passes": 3, "sample_from_anchor": False}
    tensors |= {f"xpress_head.{name}.weight": w(V, 8) for name in ("w1", "w2")}
    tensors |= {f"xpress_head.{name}.weight": w(8, H) for name in ("down_h", "down_g")}
    tensors |= {"xpress_head.in_proj.weight": w(8, 24), "xpress_head.mix.L": w(8, 4, 4)}
    tensors |= {f"xpress_head.mlp.{name}_proj.weight": w(12, 8) for name in ("gate", "up")}
    return config, tensors | {"xpress_head.mlp.down_proj.weight": w(8, 12)}, file


def xpress_speculators() -> Made:
    own, tensors, file = dflash_speculators()
    w = Weights(seed=6)
    own |= {"architectures": ["XPressSpeculator"], "speculators_model_type": "xpress"}
    own |= {"xpress_rank": 8, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
    own["speculators_config"] = {**own["speculators_config"], "algorithm": "xpress"}
    tensors |= {f"refiner_head.{name}.weight": w(V, 8) for name in ("token_embed", "readout")}
    tensors |= {f"refiner_head.{name}.weight": w(8, H) for name in ("down_h", "down_g")}
    tensors |= {"refiner_head.in_proj.weight": w(8, 24), "refiner_head.mix_l": w(8, 4, 4)}
    tensors |= {f"refiner_head.mlp_{name}.weight": w(16, 8) for name in ("gate", "up")}
    return own, tensors | {"refiner_head.mlp_down.weight": w(8, 16)}, file


def lilicorr() -> Made:
    config, tensors, file = dflash()
    w, wide = Weights(seed=6), 16
    linears = {"token_proj": (wide, H), "pass_hidden_proj": (wide, H), "context_proj": (wide, H)}
    linears |= {"factor_input_proj": (wide, 3 * wide), "out_head": (12, wide), "in_head": (12, wide)}
    linears |= {"anchor_out_head": (12, wide), "feature_mlp.up_proj": (wide, 5), "feature_mlp.down_proj": (wide, wide)}
    own = {"feature_norm.weight": w.norm(5), "feature_norm.bias": w(5)}
    for i in range(2):
        name = f"layers.{i}"
        linears |= {f"{name}.attn.out_proj": (wide, wide), f"{name}.mlp.up_proj": (24, wide)}
        linears |= {f"{name}.mlp.down_proj": (wide, 24)}
        own |= {f"{name}.attn.in_proj_weight": w(3 * wide, wide), f"{name}.attn.in_proj_bias": w(3 * wide)}
        own |= {f"{name}.{part}_norm.weight": w.norm(wide) for part in ("attn", "mlp")}
    for name, shape in linears.items():
        own |= {f"{name}.weight": w(*shape), f"{name}.bias": w(shape[0])}
    own |= {"output_norm.weight": w.norm(wide), "anchor_norm.weight": w.norm(wide)}
    own |= {"slot_embedding": w(1, 1, 3, 1, wide), "rank_embedding": w(1, 1, 1, 4, wide)}
    own |= {"relative_slot_bias": w(2, 7), "same_slot_bias": w(2)}
    fields = {"candidate_topk": 4, "hidden_size": wide, "factor_dim": 12, "num_layers": 2, "num_heads": 2, "mlp_ratio": 1.5}
    fields |= {"logit_scale": 6.0, "vector_eps": 0.001}
    config["architectures"] = ["LiLiCorrDraftModel"]
    config["dflash_config"] |= {"projector_type": "lilicorr"} | {f"lilicorr_{name}": x for name, x in fields.items()}
    return config, tensors | {f"lilicorr.{name}": tensor for name, tensor in own.items()}, file


def dflash_transformers() -> Made:
    config, tensors, file = dflash()
    config |= {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    config |= config.pop("dflash_config")
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    return config, tensors, file


def draft_model() -> Made:
    w = Weights()
    tensors = {"model.embed_tokens.weight": w(V, H), "model.norm.weight": w.norm(), "lm_head.weight": w(V, H)}
    for i in range(2):
        tensors |= w.layer(f"model.layers.{i}") | {f"model.layers.{i}.input_layernorm.weight": w.norm()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA, "num_hidden_layers": 2}
    return config, tensors, "model.safetensors"


LAYOUTS: dict[str, Callable[[], Made]] = {
    "eagle3": eagle3,
    "eagle3, layers.0": lambda: eagle3("layers.0"),
    "eagle3, speculators": eagle3_speculators,
    "eagle3, DeepSpec": eagle3_deepspec,
    "eagle3, latents": eagle3_latents,
    "peagle": peagle,
    "peagle, speculators": peagle_speculators,
    "pard": pard,
    "eagle": eagle,
    "medusa, vllm": medusa_vllm,
    "medusa": medusa_official,
    "hydra": hydra,
    "redrafter": redrafter,
    "mlp_speculator": mlp_speculator,
    "dflash": dflash,
    "dflash, speculators": dflash_speculators,
    "dflash, transformers": dflash_transformers,
    "dflash, DeepSpec": dflash_deepspec,
    "dspark": dspark,
    "dspark, Model-Optimizer": dspark_model_optimizer,
    "dspark, early": lambda: within(dspark(), "markov_head", "confidence_head"),
    "domino, early": lambda: within(domino(), "prefix_gru", "embed_proj"),
    "dflash2": dflash2,
    "jetspec": jetspec,
    "domino": domino,
    "dspark, speculators": dspark_speculators,
    "dflash2, speculators": dflash2_speculators,
    "xpress": xpress,
    "xpress, speculators": xpress_speculators,
    "lilicorr": lilicorr,
    "draft_model": draft_model,
}


def put(folder: Path, made: Made) -> Path:
    """On disk; the format of the weights by the file's ending."""
    config, tensors, file = made
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, {"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    return folder
