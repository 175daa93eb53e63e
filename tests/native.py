"""Tiny targets that come with an MTP module, with files as each architecture names them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

WIDTH = 32


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig  # type: ignore[assignment]
    _keys_to_ignore_on_load_unexpected = (r"^model\.mtp_layers",)


AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)

COMMON: dict[str, Any] = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 512}
WIDE = COMMON | {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CONFIGS: dict[str, Any] = {  # with one block more than the target has: the module's
    "mimo": MiMoConfig(**COMMON),
    "qwen3_5": Qwen3_5TextConfig(**WIDE, **DELTA, **KINDS),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**WIDE, **DELTA, **KINDS, **MIXED),
    "qwen3_next": Qwen3NextConfig(**WIDE, **DELTA, **KINDS, **MIXED),
    "glm4_moe": Glm4MoeConfig(**WIDE, **EXPERTS, first_k_dense_replace=1),
    "glm4_moe, dense": Glm4MoeConfig(**WIDE, **EXPERTS, first_k_dense_replace=9),
    "deepseek_v3": DeepseekV3Config(**COMMON | LATENT | {"num_key_value_heads": 4}, **EXPERTS, first_k_dense_replace=1),
}
LAST = 3  # the number of the module's block in the longer model
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0.")
DEEPSEEK = tuple(f"model.layers.{LAST}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""))
MIMO = tuple(
    f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "")
)
QWENS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
NAMES = {"mimo": MIMO} | dict.fromkeys(QWENS, QWEN) | dict.fromkeys(("glm4_moe", "glm4_moe, dense", "deepseek_v3"), DEEPSEEK)
COUNTS = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "mtp_num_hidden_layers")

COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of what DeepSeek's modules share with the target


@dataclass(frozen=True)
class Native:
    """A target's directory, and what its module computes."""

    directory: Path
    whole: Any  # the model with the module's block as its last
    parts: dict[str, Tensor]  # by the last names in the files' order: enorm, hnorm, eh_proj, norm
    kind: str

    def out(self, embedded_BTH: Tensor, state_BTH: Tensor) -> Tensor:
        """[B, T, H] the output of the module's last norm: one pass over whole sequences."""
        both = [self.normed("enorm", embedded_BTH), self.normed("hnorm", state_BTH)]
        joined = torch.cat(both[::-1] if self.kind == "mimo" else both, -1) @ self.parts["eh_proj"].T
        T = joined.shape[1]
        mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None]
        angles = self.whole.model.rotary_emb(joined, torch.arange(T)[None])
        return self.normed("norm", self.whole.model.layers[LAST](joined, attention_mask=mask, position_embeddings=angles))

    def normed(self, name: str, x: Tensor) -> Tensor:
        weight = self.parts[name] + (1.0 if self.kind in QWENS else 0.0)
        eps = self.whole.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def second(name: str) -> str:
    """The name in the second module of one in the first."""
    return name.replace(f"model.layers.{LAST}.", f"model.layers.{LAST + 1}.").replace("mtp_layers.0.", "mtp_layers.1.")


def native(kind: str, directory: Path, module: bool = True, dtype: torch.dtype = torch.float32, twice: bool = False) -> Native:
    """Write a target with its module, or without. twice: with another one, whose weights are the first's in another order."""
    torch.manual_seed(5)
    whole: Any = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), attn_implementation="sdpa").eval()
    for parameter in whole.parameters():
        noise = torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.2)
        parameter.data = (parameter.data + noise if parameter.ndim == 1 else noise).to(dtype).float()
    whole.to(dtype).save_pretrained(directory, max_shard_size="24KB")
    whole.float()
    names, scale = NAMES[kind], 1.0 if QWEN is not NAMES[kind] else 0.0
    parts = {part: (scale + 0.2 * torch.randn(WIDTH)).to(dtype) for part in ("enorm", "hnorm", "norm")}
    parts["eh_proj"] = (0.2 * torch.randn(WIDTH, 2 * WIDTH)).to(dtype)
    ours = dict(zip(("enorm", "hnorm", "eh_proj", "norm"), names, strict=False))
    index, old = {}, f"model.layers.{LAST}."
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        tensors = {(names[4] + n[len(old) :] if n.startswith(old) else n): x for n, x in load_file(file).items()}
        if number == 1 and names is DEEPSEEK:  # these files have copies of what the module shares
            copies = {"embed_tokens": whole.model.embed_tokens, "shared_head.head": whole.lm_head}
            tensors |= {f"{names[4]}{name}.weight": layer.weight.detach().to(dtype).clone() for name, layer in copies.items()}
        if number == 1:
            tensors |= {f"{ours[part]}.weight": x for part, x in parts.items()}
        if not module:
            tensors = {n: x for n, x in tensors.items() if not n.startswith((names[4], *names[:4]))}
        if twice:
            own = {n: x for n, x in tensors.items() if n.startswith((names[4], *names[:4]))}
            tensors |= {second(n): x.clone() if n.endswith(COPIES) else x.flip(-1).contiguous() for n, x in own.items()}
        save_file(tensors, file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": LAST, COUNTS.get(kind, "num_nextn_predict_layers"): int(module) + int(twice)}
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:LAST]
    (directory / "config.json").write_text(json.dumps(config))
    return Native(directory, whole, {name: x.float() for name, x in parts.items()}, kind)
