"""MTP: DeepSeek's names, as a layer after the target's own, and the layout of speculators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.llama import llama_fields, refuse_windows
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.speculators import header
from drafttrain.export.layouts.target_ends import refuse_bias
from drafttrain.targets.shallow import final_norm

SPECULATORS = Renames(
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
    place = f"model.layers.{blocks}"
    return Renames({"norm.{rest}": place + ".shared_head.norm.{rest}", "module.{rest}": place + ".{rest}"})


def refuse(source: ExportSource) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if not _plain(_norm(source), source.shape.hidden_size, source.shape.norm_eps):
        return "the target's last norm is no plain RMS norm, the only one that the layout can hold"
    if (reason := refuse_windows(source) or refuse_bias(source)) is not None:
        return reason
    if source.stack == "official":
        return _refuse_deepseek(source)
    lacking = [name for name in ("norm_output", "qk_norm") if not source.options.get(name)]
    if lacking:
        settings = " and ".join(f"drafter.{name}=true" for name in lacking)
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
        "num_nextn_predict_layers": 1,
        "use_qk_norm": bool(source.options.get("qk_norm")),
        "base_model_name_or_path": source.target_name,
    }
    return Files(config, _named(source, deepseek_names(source.shape.blocks)))


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    inner = {"model_type": "qwen3", **llama_fields(source.layer_shape, 1, source.dtype)}
    config = {
        **header(source, "mtp", "MTPDraftModel"),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": inner | {"layer_types": ["full_attention"], "use_sliding_window": False},
    }
    return Files(config, _named(source, SPECULATORS))


def _named(source: ExportSource, names: Renames) -> dict[str, Tensor]:
    """The module's tensors, with the target's last norm as the module's."""
    weight: Tensor = _norm(source).weight.detach()  # type: ignore[operator]
    return source.named(names) | {str(names.theirs("norm.weight")): weight}


def _norm(source: ExportSource) -> nn.Module:
    return final_norm(source.target.model, source.shape.blocks)


@torch.no_grad()
def _plain(norm: nn.Module, width: int, eps: float) -> bool:
    """Whether the norm is x / rms(x) * weight."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    x_2H = torch.linspace(-1.0, 2.0, 2 * width, device=weight.device).view(2, width)
    wanted_2H = x_2H * torch.rsqrt(x_2H.square().mean(-1, keepdim=True) + eps) * weight.float()
    return torch.allclose(norm(x_2H.to(weight.dtype)).float(), wanted_2H, rtol=2e-2, atol=1e-3)
