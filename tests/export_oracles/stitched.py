"""A target's own module, read from the target's directory as serving stacks read it.

The block is transformers' class of the architecture. It runs over whole sequences, without a cache.

Shapes: c tokens of a text, N positions so far, H hidden.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, each


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """How an architecture's module is read."""

    code: str  # the architecture in transformers
    classes: str  # prefix of its classes' names
    names: tuple[str, str, str, str, str]  # norm of the embedding, of the state, projection, last norm; the block's prefix
    count: str = "num_nextn_predict_layers"
    hidden_first: bool = False


# {n}: the number of a block after the target's last; {i}: the module's
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
N = "model.layers.{n}"
DEEPSEEK = (f"{N}.enorm", f"{N}.hnorm", f"{N}.eh_proj", f"{N}.shared_head.norm", N)
M = "model.mtp_layers.{i}"
MIMO = (f"{M}.token_layernorm", f"{M}.hidden_layernorm", f"{M}.input_proj", f"{M}.final_layernorm", M)
KINDS = {
    "deepseek_v3": ModuleKind("deepseek_v3", "DeepseekV3", DEEPSEEK),
    "glm4_moe": ModuleKind("glm4_moe", "Glm4Moe", DEEPSEEK),
    "qwen3_next": ModuleKind("qwen3_next", "Qwen3Next", QWEN),
    **{f"qwen3_5{end}": ModuleKind("qwen3_5", "Qwen3_5", QWEN, "mtp_num_hidden_layers") for end in ("", "_text")},
    **{f"qwen3_5_moe{end}": ModuleKind("qwen3_5_moe", "Qwen3_5Moe", QWEN, "mtp_num_hidden_layers") for end in ("", "_text")},
    "mimo": ModuleKind("qwen2", "Qwen2", MIMO, hidden_first=True),
}


@dataclass(frozen=True, slots=True)
class StitchedModule:
    """A loaded module."""

    block: Any
    rotary: Any
    token_norm: Any
    hidden_norm: Any
    norm: Any
    projection: Tensor
    hidden_first: bool


def read(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """The module's drafts."""
    whole = Config.of(directory)
    values = whole.values if "num_hidden_layers" in whole.values else whole.inside("text_config", "config").values
    config = Config(values)
    kind = KINDS.get(str(config.get("model_type", "architecture")))
    if kind is None:
        raise MismatchError("architecture", f"no module of a {values['model_type']} is read")
    config.expect("num_hidden_layers", target.blocks, "config")
    count = int(config.get(kind.count, "config"))
    both = [_module(directory, kind, values, number, target) for number in range(count)]
    if not both:
        raise MismatchError("config", f"config.json has {kind.count} 0")
    modules = [module for module, _ in both]
    return Reading(each(points, lambda point: _draft(modules, target, point)), both[0][1])


def _facts(config: Any) -> dict[str, Any]:
    """The settings of a transformers configuration that the drafts depend on."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {
        "vocabulary": config.vocab_size,
        "rope": float(config.rope_parameters["rope_theta"]),
        "norm": config.rms_norm_eps,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "heads": [heads, kv_heads],
        "max positions": config.max_position_embeddings,
    }


def _module(
    directory: Path, kind: ModuleKind, values: dict[str, Any], number: int, target: TargetParts
) -> tuple[StitchedModule, dict[str, Any]]:
    code = importlib.import_module(f"transformers.models.{kind.code}.modeling_{kind.code}")
    configs = importlib.import_module(f"transformers.models.{kind.code}.configuration_{kind.code}")
    made = getattr(configs, f"{kind.classes}TextConfig", None) or getattr(configs, f"{kind.classes}Config")
    config = made(**{name: x for name, x in values.items() if name not in ("model_type", "architectures", "auto_map")})
    facts, last = _facts(config), config.num_hidden_layers
    config._attn_implementation = config._experts_implementation = "eager"
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, "full_attention"]
    block, norm = getattr(code, f"{kind.classes}DecoderLayer")(config, last), getattr(code, f"{kind.classes}RMSNorm")
    rotary = getattr(code, f"{kind.classes}TextRotaryEmbedding", None) or getattr(code, f"{kind.classes}RotaryEmbedding")
    names = [name.format(n=last + number, i=number) for name in kind.names]
    tensors = _tensors(directory, names)
    norms = [norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
    for one, name in zip(norms, (names[0], names[1], names[3]), strict=True):
        _load(one, name, tensors)
    projection = tensors.pop(f"{names[2]}.weight", None)
    if projection is None or projection.shape != (config.hidden_size, 2 * config.hidden_size):
        raise MismatchError("tensors", f"{names[2]}.weight is missing, or not twice as wide as the target's states")
    _load(block, names[4], tensors)
    for name, shared in (("embed_tokens", target.embed), ("shared_head.head", target.head)):  # some stacks read these copies
        copy = tensors.pop(f"{names[4]}.{name}.weight", None)
        if copy is not None and not torch.equal(copy, shared):
            raise MismatchError("tensors", f"{names[4]}.{name}.weight is not the target's, which the module was trained with")
    if tensors:
        raise MismatchError("tensors", f"{', '.join(sorted(tensors)[:4])}: no stack reads them")
    return StitchedModule(block.eval(), rotary(config), norms[0], norms[1], norms[2], projection, kind.hidden_first), facts


def _tensors(directory: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """All tensors whose names begin so, in float32."""
    index, starts = directory / "model.safetensors.index.json", tuple(f"{name}." for name in names)
    found: dict[str, Tensor] = {}
    try:
        files = ["model.safetensors"]
        if index.is_file():
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted({file for name, file in listed.items() if name.startswith(starts)})
        for file in files:
            with safe_open(directory / file, "pt") as opened:
                found |= {name: opened.get_tensor(name).float() for name in opened.keys() if name.startswith(starts)}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise MismatchError("tensors", f"the weights cannot be read ({error})") from error
    return found


def _load(module: torch.nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Fill a module. Matrices of experts that are stored one by one are put together."""
    for name, own in module.state_dict().items():
        theirs = f"{prefix}.{name}"
        if theirs not in tensors and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            owner, _, last = theirs.rpartition(".")
            parts = ("down_proj",) if last == "down_proj" else ("gate_proj", "up_proj")
            each_of = [[tensors.pop(f"{owner}.{e}.{part}.weight", None) for part in parts] for e in range(len(own))]
            if any(x is None for row in each_of for x in row):
                raise MismatchError("tensors", f"{theirs}: matrices of some experts are missing")
            tensors[theirs] = torch.stack([torch.cat(row) for row in each_of])  # type: ignore[arg-type]
        if theirs not in tensors:
            raise MismatchError("tensors", f"{theirs} is missing")
        tensor = tensors.pop(theirs)
        if tensor.shape != own.shape:
            raise MismatchError("tensors", f"{theirs} is {list(tensor.shape)}, the configuration gives {list(own.shape)}")
        own.copy_(tensor)


def _draft(modules: Sequence[StitchedModule], target: TargetParts, point: Point) -> Tensor:
    """One module reads its own last output at the position after. Of several, each reads all outputs of the one before, and the
    tokens that are one later."""
    token_N, state_NH, logits, joined = point.shifted, point.last(), list[Tensor](), list[Tensor]()
    for step, draft in enumerate(point.drafts):
        module = modules[step % len(modules)]
        both = [module.token_norm(target.embed[token_N]), module.hidden_norm(state_NH)]
        joined.append(F.linear(torch.cat(both[::-1] if module.hidden_first else both, -1), module.projection))
        x_1NH = torch.cat(joined if len(modules) == 1 else joined[-1:])[None]
        N = x_1NH.shape[1]
        mask = torch.full((N, N), torch.finfo(torch.float32).min).triu(1)[None, None]
        angles = module.rotary(x_1NH, torch.arange(N)[None])
        out_NH = module.norm(module.block(x_1NH, attention_mask=mask, position_embeddings=angles)[0])
        logits.append(F.linear(out_NH[-1:], target.head)[0])
        if len(modules) == 1:
            state_NH, token_N = out_NH[-1:], draft[None]
        else:
            state_NH, token_N = out_NH, torch.cat([token_N[1:], draft[None]])
    return torch.stack(logits)
