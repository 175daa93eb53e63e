"""MTP: one module under DeepSeek's names, as a layer after the target's own, or in the layout of speculators."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import ConvertedDrafter, Format, Importer, Renames, Rows, StackRow
from drafttrain.export.layers import layer_options, llama_fields, refuse_windows
from drafttrain.export.speculators import INNER, TYPE, header, speculators_type
from drafttrain.export.target_ends import NORM, check_shared, refuse_bias, same_size
from drafttrain.model.target import Target
from drafttrain.targets.shallow import final_norm

MODULES = "num_nextn_predict_layers"
OWN_MODULES = "it reads modules that come with targets of some architectures, and no others"
GENERATE = "its generate(use_mtp=True) reads only modules that come with DeepSeek-V3, GLM-4.5 and a few other targets"
CODE = "cp {source} {into}  # num_nextn_predict_layers: into config.json"
SPECULATORS_NAMES = Renames(
    {
        "module.enorm.{rest}": "mtp_layers.0.token_layernorm.{rest}",
        "module.hnorm.{rest}": "mtp_layers.0.hidden_layernorm.{rest}",
        "module.eh_proj.{rest}": "mtp_layers.0.input_proj.{rest}",
        "norm.{rest}": "mtp_layers.0.final_layernorm.{rest}",
        "module.{rest}": "mtp_layers.0.{rest}",
    }
)


def deepseek_names(blocks: int) -> Renames:
    """The names in DeepSeek's layout. blocks: of the target; the module is numbered as the next one."""
    layer_prefix = f"model.layers.{blocks}"
    return Renames({"norm.{rest}": layer_prefix + ".shared_head.norm.{rest}", "module.{rest}": layer_prefix + ".{rest}"})


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if not _plain(_norm(source), source.shape.hidden_size, source.shape.norm_eps):
        return "the target's last norm is no plain RMS norm, the only one that the layout can hold"
    if (reason := refuse_windows(source) or refuse_bias(source)) is not None:
        return reason
    if source.stack == "official":
        return _refuse_deepseek(source)
    missing_options = [name for name in ("norm_output", "qk_norm") if not source.options.get(name)]
    if missing_options:
        settings = " and ".join(f"drafter.{name}=true" for name in missing_options)
        return f"{source.stack} reads Qwen3's blocks and passes the normed output to the next depth; train with {settings}"
    return None


def _refuse_deepseek(source: ExportSource) -> str | None:
    if source.options.get("norm_output"):
        return "DeepSeek's modules read their last output without a norm; train with drafter.norm_output=false"
    return None


def deepseek(source: ExportSource) -> Files:
    """The layer that a target's own directory would have after its last one."""
    config = {
        **llama_fields(source.layer_shape, source.shape.blocks, source.dtype),
        MODULES: 1,
        "use_qk_norm": bool(source.options.get("qk_norm")),
        "base_model_name_or_path": source.target_name,
    }
    return Files(config, _named(source, deepseek_names(source.shape.blocks)))


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    layer_config = {"model_type": "qwen3", **llama_fields(source.layer_shape, 1, source.dtype)}
    config = {
        **header(source, "mtp", "MTPDraftModel"),
        MODULES: 1,
        "transformer_layer_config": layer_config | {"layer_types": ["full_attention"], "use_sliding_window": False},
    }
    return Files(config, _named(source, SPECULATORS_NAMES))


def _named(source: ExportSource, names: Renames) -> dict[str, Tensor]:
    """The module's tensors, with the target's last norm as the module's."""
    weight: Tensor = _norm(source).weight.detach()  # type: ignore[operator]
    return names.named(source.tensors) | {str(names.theirs("norm.weight")): weight}


def _norm(source: ExportSource) -> nn.Module:
    return final_norm(source.target.model, source.shape.blocks)


@torch.no_grad()
def _plain(norm: nn.Module, width: int, eps: float) -> bool:
    """Whether the norm is x / rms(x) * weight."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    if weight.is_meta:  # before training, of a target whose weights are not read: another norm shows with any weights
        norm = copy.deepcopy(norm).to_empty(device="cpu")
        weight = norm.weight.fill_(1.5)  # type: ignore[operator]
    x_2H = torch.linspace(-1.0, 2.0, 2 * width, device=weight.device).view(2, width)
    expected_2H = x_2H * torch.rsqrt(x_2H.square().mean(-1, keepdim=True) + eps) * weight.float()
    return torch.allclose(norm(x_2H.to(weight.dtype)).float(), expected_2H, rtol=2e-2, atol=1e-3)


def _knows_deepseek(checkpoint: ExternalCheckpoint) -> bool:
    return any(name.endswith(".eh_proj.weight") for name in checkpoint.kinds)


def _deepseek_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    checkpoint.wants(MODULES, checkpoint.config.get(MODULES), (1,), "but here one module drafts every depth")
    same_size(checkpoint, "number of blocks", checkpoint.number("num_hidden_layers"), target.shape.blocks)
    has_qk_norm = any(name.endswith(".self_attn.q_norm.weight") for name in checkpoint.kinds)
    return {"norm_output": False, "qk_norm": has_qk_norm, "layer": layer_options(checkpoint, checkpoint.config, target)}


def _speculators_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    checkpoint.wants(MODULES, checkpoint.config.get(MODULES, 1), (1,), "but here one module drafts every depth")
    layer_config = checkpoint.object(INNER)
    checkpoint.wants(
        f"{INNER}'s model_type", layer_config.get("model_type"), ("qwen3",), "but only Qwen3's blocks are supported here"
    )
    return {"norm_output": True, "qk_norm": True, "layer": layer_options(checkpoint, layer_config, target, "qwen3")}


def _deepseek_names(checkpoint: ExternalCheckpoint) -> Renames:
    return deepseek_names(checkpoint.number("num_hidden_layers"))


def _mend(draft: ConvertedDrafter) -> None:
    """Check that the norm before the head is the target's, and drop it."""
    names = SPECULATORS_NAMES if TYPE in draft.found.config else _deepseek_names(draft.found)
    if draft.tensors.pop("norm.weight", None) is not None:
        check_shared(draft.found, str(names.theirs("norm.weight")), NORM, draft.target)


DEEPSEEK = Importer("DeepSeek", "mtp", _knows_deepseek, _deepseek_options, _deepseek_names, mend=_mend)
SPECULATORS = Importer("speculators", "mtp", speculators_type("mtp"), _speculators_options, SPECULATORS_NAMES, mend=_mend)
IMPORTERS = [DEEPSEEK, SPECULATORS]
ROWS: Rows = {
    "mtp": {
        **dict.fromkeys(("vllm", "sglang", "trtllm", "llamacpp", "lmdeploy"), OWN_MODULES),
        "speculators": StackRow(Format(SPECULATORS.name, speculators, SPECULATORS, refuse)),
        "transformers": GENERATE,
        "official": StackRow(Format(DEEPSEEK.name, deepseek, DEEPSEEK, refuse), CODE),
    }
}
