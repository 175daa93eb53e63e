"""Tiny random models of every architecture that the project knows, for the contract of targets.

A row is data: how its configuration is made, and what is expected when it is loaded as a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as t

from drafttrain.targets.weights import model_class

WINDOW = 8  # of layers with a window or a chunk; the contract's prompts are longer
SCALE = 0.08  # of the weights: logits reach 2 or so, and greedy text is no constant


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the contract."""

    name: str  # as people call it
    make: Callable[..., Any]  # the configuration; takes fields that replace its own, vocab_size for example
    refused: str | None = None  # why it is refused as a target, as its error says; None: it decodes exactly
    recomputed: bool = False  # of those that are refused so: every step computes the text anew, by the model's own forward
    trees: bool = True  # False: draft trees are refused, chains are exact
    captured: bool = True  # False: transformers' forward does what no CUDA graph can hold
    shown: str = ""  # what a reader should know about the row


PLAIN = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
GATED = PLAIN | {"num_key_value_heads": 2, "intermediate_size": 96}
WIDE = GATED | {"head_dim": 16}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = FEW | {"n_routed_experts": 8, "topk_group": 1}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
NEMOTRON = {k: v for k, v in WIDE.items() if "layers" not in k} | {
    "layers_block_type": ["mamba", "moe", "attention", "mamba"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 32,
}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
ALTERNATING = ["sliding_attention", "full_attention"]
NO_INPUTS = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}  # Gemma-4's, of layers
EYE = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "depth": 3, "out_hidden_size": 64}
IMAGE = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # where defaults exceed the vocabulary
# a selection that leaves positions out, by so many heads that no two positions have the same score
SPARSE = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4}
KIMI_DELTA = {"linear_head_dim": 16, "linear_num_heads": 4}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


def of(kind: str, *parts: dict[str, Any], **fields: Any) -> Callable[..., Any]:
    """Makes configurations of a class of transformers from these fields; later parts replace earlier ones."""
    merged: dict[str, Any] = {}
    for part in (*parts, fields):
        merged |= part
    return lambda **changes: getattr(t, kind)(**merged | changes)


def composite(kind: str, text: dict[str, Any], **fields: Any) -> Callable[..., Any]:
    """As `of`, for a configuration with a text part, which the changes concern."""
    return lambda **changes: getattr(t, kind)(text_config=text | changes, **fields)


NO_ATTENTION = "no attention heads"
ROWS = (
    Architecture("Llama", of("LlamaConfig", WIDE)),
    Architecture("Mistral", of("MistralConfig", WIDE, sliding_window=WINDOW)),
    Architecture("Qwen2", of("Qwen2Config", GATED)),
    Architecture("Qwen3", of("Qwen3Config", WIDE)),
    Architecture("Gemma-2", of("Gemma2Config", WIDE, sliding_window=WINDOW, query_pre_attn_scalar=16)),
    Architecture(
        "Gemma-3 (text)",
        of("Gemma3TextConfig", WIDE, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=ALTERNATING * 2),
    ),
    Architecture(
        "Gemma-4 (text)",
        of(
            "Gemma4TextConfig",
            WIDE,
            num_hidden_layers=6,
            vocab_size_per_layer_input=64,
            global_head_dim=32,
            sliding_window=WINDOW,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            layer_types=ALTERNATING * 3,
        ),
    ),
    Architecture(
        "Gemma-4 (MoE)",
        of(
            "Gemma4TextConfig",
            WIDE,
            NO_INPUTS,
            sliding_window=WINDOW,
            num_kv_shared_layers=0,
            layer_types=ALTERNATING * 2,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
    ),
    Architecture("Phi-2", of("PhiConfig", PLAIN, intermediate_size=96)),
    Architecture("Phi-3, Phi-4", of("Phi3Config", GATED, sliding_window=WINDOW, pad_token_id=0)),
    Architecture("OLMo-2", of("Olmo2Config", GATED)),
    Architecture("OLMo-3", of("Olmo3Config", GATED, sliding_window=WINDOW, layer_types=ALTERNATING * 2)),
    Architecture("GPT-2", of("GPT2Config", vocab_size=64, n_embd=64, n_layer=4, n_head=4, n_positions=512)),
    Architecture("GPT-NeoX", of("GPTNeoXConfig", PLAIN, intermediate_size=96)),
    Architecture("OPT", of("OPTConfig", PLAIN, ffn_dim=96, word_embed_proj_dim=64)),
    Architecture("Falcon", of("FalconConfig", PLAIN, new_decoder_architecture=False, alibi=False), captured=False),
    Architecture("StableLM", of("StableLmConfig", GATED)),
    Architecture("Cohere-2", of("Cohere2Config", WIDE, sliding_window=WINDOW, layer_types=ALTERNATING * 2)),
    Architecture("Ernie-4.5", of("Ernie4_5Config", WIDE)),
    Architecture("Exaone-4", of("Exaone4Config", GATED, sliding_window=WINDOW, sliding_window_pattern=2)),
    Architecture("Granite-3", of("GraniteConfig", GATED, logits_scaling=4.0)),
    Architecture("Hunyuan (dense)", of("HunYuanDenseV1Config", WIDE)),
    Architecture("Seed-OSS", of("SeedOssConfig", WIDE)),
    Architecture("Mixtral", of("MixtralConfig", WIDE, num_experts_per_tok=2, num_local_experts=4)),
    Architecture("Qwen2-MoE", of("Qwen2MoeConfig", GATED, FEW, num_experts=4, shared_expert_intermediate_size=32)),
    Architecture("Qwen3-MoE", of("Qwen3MoeConfig", WIDE, FEW, num_experts=4)),
    Architecture("GLM-4.5 (MoE)", of("Glm4MoeConfig", WIDE, ROUTED, n_group=1, first_k_dense_replace=1)),
    Architecture("GLM-4.7-Flash", of("Glm4MoeLiteConfig", GATED, LATENT, ROUTED, n_group=1)),
    Architecture("Ernie-4.5 (MoE)", of("Ernie4_5_MoeConfig", GATED, moe_k=2, moe_num_experts=8, moe_intermediate_size=32)),
    Architecture("Hunyuan (MoE)", of("HunYuanMoEV1Config", WIDE, num_experts=8, moe_topk=2)),
    Architecture("MiMo-V2-Flash", of("MiMoV2FlashConfig", WIDE, ROUTED, v_head_dim=12, sliding_window=WINDOW)),
    Architecture("gpt-oss", of("GptOssConfig", WIDE, num_experts_per_tok=2, num_local_experts=4, sliding_window=WINDOW)),
    Architecture("MiniMax-M2", of("MiniMaxM2Config", WIDE, num_experts_per_tok=2, num_local_experts=4)),
    Architecture(
        "MiniMax-M3",
        of(
            "MiniMaxM3VLTextConfig",
            WIDE,
            num_experts_per_tok=2,
            num_local_experts=4,
            dense_intermediate_size=96,
            shared_intermediate_size=32,
            rotary_dim=8,
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=4,
            index_topk_blocks=2,
            layer_types=["full_attention", *["minimax_m3_sparse"] * 3],
        ),
        "its index chooses blocks of places",
        recomputed=True,
    ),
    Architecture("DeepSeek-V2", of("DeepseekV2Config", GATED, LATENT, ROUTED, n_group=1, first_k_dense_replace=1)),
    Architecture("DeepSeek-V3", of("DeepseekV3Config", GATED, LATENT, ROUTED, n_group=2, first_k_dense_replace=1)),
    Architecture(
        "Kimi-K2",
        of(
            "DeepseekV3Config",
            GATED,
            LATENT,
            ROUTED,
            n_group=1,
            n_routed_experts=12,
            routed_scaling_factor=2.827,
            first_k_dense_replace=1,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        ),
    ),
    Architecture(
        "GLM-5",
        of(
            "GlmMoeDsaConfig",
            GATED,
            LATENT,
            ROUTED,
            SPARSE,
            n_group=1,
            pad_token_id=0,
            indexer_types=["full", "shared", "full", "full"],
        ),
    ),
    Architecture("DeepSeek-V3.2", of("DeepseekV32Config", GATED, LATENT, ROUTED, SPARSE, n_group=1)),
    Architecture(
        "DeepSeek-V4",
        of(
            "DeepseekV4Config",
            PLAIN,
            SPARSE | {"index_topk": 2},
            FEW,
            head_dim=16,
            num_key_value_heads=1,
            q_lora_rank=32,
            n_routed_experts=8,
            sliding_window=WINDOW,
            o_groups=2,
            o_lora_rank=16,
            partial_rotary_factor=0.5,
            compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            num_hash_layers=1,
        ),
        "its layers cache whole windows",
        recomputed=True,
    ),
    Architecture(
        "Kimi-K2.5",
        composite(
            "Kimi_K25Config",
            GATED | LATENT | ROUTED | {"n_group": 2, "first_k_dense_replace": 1, "model_type": "deepseek_v3"},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
                "pos_emb_height": 8,
                "pos_emb_width": 8,
            },
            image_token_id=60,
            projection_hidden_size=32,
            tie_word_embeddings=False,
        ),
    ),
    Architecture(
        "Ministral-3",
        composite("Mistral3Config", WIDE | {"model_type": "ministral3"}, vision_config=PIXTRAL, image_token_index=60),
    ),
    Architecture(
        "Mistral Small 4",
        composite(
            "Mistral3Config",
            GATED | LATENT | ROUTED | {"n_group": 1, "model_type": "mistral4"},
            vision_config=PIXTRAL,
            image_token_index=60,
        ),
    ),
    Architecture(
        "Mistral Large 4",
        composite(
            "MistralLarge4Config",
            GATED
            | LATENT
            | ROUTED
            | SPARSE
            | {"n_group": 1, "kv_source_layers": [0, 0, 2, 3], "indexer_types": ["full", "shared", "full", "full"]},
            vision_config=PIXTRAL,
            image_token_index=60,
        ),
    ),
    Architecture(
        "Llama-4 (text)",
        of("Llama4TextConfig", WIDE, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=WINDOW),
    ),
    Architecture(
        "Gemma-3 (images)",
        composite(
            "Gemma3Config",
            WIDE | {"sliding_window": WINDOW},
            mm_tokens_per_image=4,
            image_token_index=60,
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
            },
        ),
    ),
    Architecture(
        "Qwen2.5-VL",
        composite(
            "Qwen2_5_VLConfig", GATED | SECTIONS, vision_config=EYE | {"fullatt_block_indexes": [1], "window_size": 16}, **IMAGE
        ),
    ),
    Architecture(
        "Qwen3-VL",
        composite(
            "Qwen3VLConfig",
            WIDE | SECTIONS,
            vision_config=EYE | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
            **IMAGE,
        ),
    ),
    Architecture(
        "Qwen3-Next", of("Qwen3NextConfig", WIDE, DELTA, FEW, shared_expert_intermediate_size=32, num_experts=8), trees=False
    ),
    Architecture("Qwen3.5 (text)", of("Qwen3_5TextConfig", WIDE, DELTA), trees=False),
    Architecture(
        "Qwen3.5 (MoE)",
        of("Qwen3_5MoeTextConfig", WIDE, DELTA, FEW, shared_expert_intermediate_size=32, num_experts=8),
        trees=False,
    ),
    Architecture("OLMo hybrid", of("OlmoHybridConfig", GATED, DELTA, MARKS, linear_num_key_heads=4), trees=False),
    Architecture(
        "Kimi-Linear",
        of(
            "KimiLinearConfig",
            GATED,
            LATENT | {"q_lora_rank": None},
            FEW,
            KIMI_DELTA,
            MARKS,
            num_local_experts=8,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        ),
        trees=False,
    ),
    Architecture(
        "Ling-3",
        of(
            "BailingHybridConfig",
            GATED,
            LATENT,
            ROUTED,
            MARKS,
            head_dim=16,
            n_group=2,
            layer_group_size=2,
            first_k_dense_replace=1,
        ),
        trees=False,
    ),
    Architecture(
        "GLM-5.3-Flash",
        composite(
            "Glm5NextConfig",
            GATED
            | LATENT
            | ROUTED
            | SPARSE
            | KIMI_DELTA
            | MARKS
            | {
                "n_group": 1,
                "qk_rope_head_dim": 0,
                "index_kpool": 2,
                "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "indexed_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            },
            vision_config=EYE | {"image_size": 16, "projection_intermediate_size": 48},
        ),
        "its index pools positions",
        recomputed=True,
    ),
    Architecture("Nemotron-H", of("NemotronHConfig", NEMOTRON, ROUTED), trees=False),
    Architecture("Nemotron-3", of("NemotronHConfig", NEMOTRON, ROUTED, moe_latent_size=32), trees=False),
    Architecture("Bamba", of("BambaConfig", GATED, SSM, attn_layer_indices=[2]), trees=False),
    Architecture(
        "Granite-4 (hybrid)",
        of(
            "GraniteMoeHybridConfig",
            GATED,
            SSM,
            num_experts_per_tok=2,
            num_local_experts=4,
            shared_intermediate_size=32,
            layer_types=["mamba", "mamba", "attention", "mamba"],
        ),
        trees=False,
    ),
    Architecture(
        "Granite-4 (dense)",
        of("GraniteMoeHybridConfig", GATED, num_local_experts=0, shared_intermediate_size=96, layer_types=["attention"] * 4),
    ),
    Architecture("Falcon-H1", of("FalconH1Config", WIDE, SSM, mamba_d_ssm=128), trees=False),
    Architecture("LFM2", of("Lfm2Config", GATED, layer_types=["conv", "conv", "full_attention", "conv"]), trees=False),
    Architecture(
        "LFM2 (MoE)",
        of(
            "Lfm2MoeConfig",
            GATED,
            FEW,
            num_experts=8,
            num_dense_layers=1,
            layer_types=["conv", "conv", "full_attention", "conv"],
        ),
        trees=False,
    ),
    Architecture(
        "LFM3",
        of(
            "Lfm3Config",
            WIDE,
            MARKS,
            sliding_window=WINDOW,
            layer_types=["conv", "conv", "full_attention", "sliding_attention"],
        ),
        trees=False,
    ),
    Architecture(
        "Jamba",
        of(
            "JambaConfig",
            GATED,
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_dt_rank=8,
        ),
        trees=False,
    ),
    Architecture(
        "Gemma-4 assistant",
        composite("Gemma4AssistantConfig", WIDE | NO_INPUTS | {"model_type": "gemma4_text", "layer_types": ALTERNATING * 2}),
        "keys and values of another model",
    ),
    Architecture(
        "Mamba-2",
        of(
            "Mamba2Config",
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=3,
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=1,
            chunk_size=16,
        ),
        NO_ATTENTION,
    ),
    Architecture(
        "RWKV-4", of("RwkvConfig", vocab_size=64, hidden_size=64, num_hidden_layers=3, context_length=64), NO_ATTENTION
    ),
    Architecture("Bloom", of("BloomConfig", vocab_size=64, hidden_size=64, n_layer=2, n_head=4), "alibi", recomputed=True),
    Architecture("MPT", of("MptConfig", vocab_size=64, d_model=64, n_layers=4, n_heads=4, max_seq_len=512), trees=False),
)
ARCHITECTURES = {row.name: row for row in ROWS}


def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model in eval mode. Matrices are N(0, SCALE): with transformers' own small weights recurrences do nothing."""
    config = ARCHITECTURES[name].make(**changes)
    torch.manual_seed(seed)
    model = model_class(config).from_config(config, attn_implementation="eager" if name == "Gemma-2" else None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SCALE)
    return model.eval().float()
