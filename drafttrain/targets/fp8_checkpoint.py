"""Checkpoints with linear maps in FP8, which are kept as they are stored: the codes and their scales.

Two formats: compressed-tensors with `float-quantized` weights, whose scales are of rows or of whole tensors, and `fp8` in
blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8), both with activations that are quantised when they come. transformers loads the
rest: the codes as numbers, which every dtype holds exactly, into a model without quantisation. Other formats are left to it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.ops.fp8 import BLOCK, Fp8Linear
from drafttrain.ops.fp8_rows import E4M3
from drafttrain.targets.pieces import CheckpointFiles, OpenFiles
from drafttrain.targets.weights import AGAIN, model_class

# entries of a configuration that must have these values; others are free, or name what the files show anyway
WEIGHTS = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "group_size": None, "block_structure": None}
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True, "strategy": "token"}
BLOCKS = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "scale_fmt": None}
OF_BLOCKS, OF_ROWS = ".weight_scale_inv", ".weight_scale"  # what the names of scales end with
STORED = "F8_E4M3"  # safetensors' name of the codes' dtype


@dataclass(frozen=True, slots=True)
class Fp8Checkpoint:
    """The linear maps of a checkpoint that are in FP8."""

    config: Any  # transformers' configuration, without quantisation
    files: CheckpointFiles
    suffix: str  # of the scales' names
    names: tuple[str, ...]  # of the maps

    @staticmethod
    def of(config: Any, place: str, revision: str | None, trust_remote_code: bool) -> Fp8Checkpoint | None:
        """None for other checkpoints, and for maps that are not modules of their own here, as those of joined experts."""
        suffix = _suffix(getattr(config, "quantization_config", None))
        if suffix is None:
            return None
        bare = copy.deepcopy(config)
        del bare.quantization_config
        with torch.device("meta"):
            outline = model_class(bare).from_config(bare, trust_remote_code=trust_remote_code)
        maps = {name: module for name, module in outline.named_modules() if isinstance(module, nn.Linear)}
        files = CheckpointFiles.of(place, getattr(config, "_commit_hash", None) or revision, f"target.path {place!r}")
        names = tuple(sorted(name.removesuffix(suffix) for name in files.names if name.endswith(suffix)))
        if not names or any(name not in maps or name + ".weight" not in files.names for name in names):
            return None
        if suffix == OF_BLOCKS and any(size % BLOCK for name in names for size in maps[name].weight.shape):
            return None
        return Fp8Checkpoint(bare, files, suffix, names)

    def load(self, path: str, **settings: Any) -> tuple[Any, Any]:
        """(model, transformers' report on its tensors), as `from_pretrained`. Raises UserError for scales of other shapes."""
        model, report = model_class(self.config).from_pretrained(path, config=self.config, **settings)
        with OpenFiles(self.files) as open_files:
            for name in self.names:
                parent, _, last = name.rpartition(".")
                dtype_name = open_files.slice(f"{name}.weight").get_dtype()
                if dtype_name != STORED:
                    raise UserError(f"{path}: {name}.weight is {dtype_name} where its scales want {STORED}; {AGAIN}")
                scale, linear = open_files.slice(f"{name}{self.suffix}")[...], model.get_submodule(name)
                fp8_linear = _made(linear, scale, self.suffix == OF_BLOCKS, f"{path}: {name}")
                setattr(model.get_submodule(parent), last, fp8_linear)
        report = dict(report if isinstance(report, dict) else vars(report))
        scales = {f"{name}{self.suffix}" for name in self.names}
        report["unexpected_keys"] = [name for name in report.get("unexpected_keys", ()) if name not in scales]
        return model, report


@torch.no_grad()
def _made(linear: Any, scale: Tensor, blocks: bool, origin: str) -> Fp8Linear:
    """A map whose weight holds the codes. scale: of blocks, of rows, or one of the whole tensor."""
    outputs, inputs = linear.weight.shape
    if not blocks:
        scale = scale.flatten().repeat(outputs if scale.numel() == 1 else 1)
    expected_shape = (outputs // BLOCK, inputs // BLOCK) if blocks else (outputs,)
    if scale.shape != expected_shape:
        raise UserError(f"{origin} has scales of shape {tuple(scale.shape)} for a weight of {outputs} x {inputs}; {AGAIN}")
    return Fp8Linear(linear.weight.to(E4M3), scale.float().contiguous(), linear.bias)


def holds_fp8(config: Any) -> bool:
    """Whether the configuration is that of a checkpoint in one of the two formats."""
    return _suffix(getattr(config, "quantization_config", None)) is not None


def _suffix(settings: Any) -> str | None:
    """What the names of the scales end with; None: another format."""
    if not isinstance(settings, Mapping):
        return None
    if settings.get("quant_method") == "fp8":
        return OF_BLOCKS if _agrees(settings, BLOCKS) and settings.get("fmt") in (None, "e4m3") else None
    groups = list((settings.get("config_groups") or {}).values())
    if settings.get("quant_method") != "compressed-tensors" or settings.get("format") != "float-quantized" or len(groups) != 1:
        return None
    weights, inputs = (groups[0].get(section) or {} for section in ("weights", "input_activations"))
    simple = not (groups[0].get("output_activations") or settings.get("kv_cache_scheme") or settings.get("sparsity_config"))
    agree = _agrees(weights, WEIGHTS) and _agrees(inputs, ACTIVATIONS) and weights.get("strategy") in ("channel", "tensor")
    return OF_ROWS if simple and agree and groups[0].get("targets") == ["Linear"] else None


def _agrees(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(settings.get(name) == value for name, value in expected.items())
