"""Models whose blocks hold FP8, 8- or 4-bit weights, made here or stored so (FP8). The quantised model is the target.

int8 and int4 quantise weights alone, which are widened for each product. FP8 quantises activations too, token by token
(`ops.fp8`). So a row's result never depends on the rest of its batch, as exact decoding requires. Embedding, norms and head
keep their dtype. Shapes: I in, O out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.ops.fp8 import BLOCK, Fp8Linear, why_widened
from drafttrain.ops.fp8_rows import E4M3
from drafttrain.ops.quantised import BITS, Quantised, stored_bytes
from drafttrain.targets.pieces import CheckpointFiles, OpenFiles
from drafttrain.targets.structure import find_blocks, fingerprint_of, shape_of
from drafttrain.targets.weights import AGAIN, model_class

FP8 = "fp8"
KINDS = (FP8, *BITS)  # of weights


class QuantisedLinear(nn.Module):
    """A linear map with quantised weights."""

    def __init__(self, linear: nn.Linear, bits: int, device: torch.device) -> None:
        super().__init__()
        product = Quantised(linear.weight.to(device), bits, packed=False)
        product.code = self.code = nn.Parameter(product.code, requires_grad=False)
        product.scale = self.scale = nn.Parameter(product.scale, requires_grad=False)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product = product

    def forward(self, x_I: Tensor) -> Tensor:
        return F.linear(x_I, self._product.widened(x_I.dtype), self.bias)


@torch.no_grad()
def quantise(model: Any, kind: str, device: torch.device) -> str:
    """Replace the blocks' linear maps one at a time, so that the device never holds all original weights.

    Returns the quantised model's fingerprint: that of the original weights, a dash, and the kind. Raises UserError for a model
    without linear maps in its blocks.
    """
    if is_quantised(model):
        raise UserError(f"target.weights is {kind}, but the checkpoint's weights are in FP8 already; set target.weights=null")
    original_fingerprint = fingerprint_of(model)
    model.requires_grad_(False).eval()
    blocks = find_blocks(model, shape_of(model.config.get_text_config()).blocks)
    linears = [
        (parent, name, child)
        for parent in blocks.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    if not linears:
        raise UserError(f"target.weights quantises linear maps, {type(model).__name__} has none in its blocks; leave it out")
    for parent, name, linear in linears:
        quantised_linear = Fp8Linear.of(linear, device) if kind == FP8 else QuantisedLinear(linear, BITS[kind], device)
        setattr(parent, name, quantised_linear)
    return f"{original_fingerprint}-{kind}"


def weight_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of a quantised weight with its scales."""
    return outputs * (inputs + 4) if kind == FP8 else stored_bytes(outputs, inputs, BITS[kind])


def why_slow(model: Any) -> str | None:
    """Why the model's quantised weights save memory and no time; None: they save time, or are whole."""
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        return "weights are widened for each product"
    fp8_linears = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    fault = why_widened(model.device, model.dtype, any(linear.blocks for linear in fp8_linears)) if fp8_linears else None
    return fault and f"weights are widened for each product ({fault})"


def rounded_to(target: Any) -> torch.dtype:
    """The dtype whose rounding changes a target's logits most: e4m3 where activations are quantised to it."""
    fp8 = any(isinstance(module, Fp8Linear) for module in target.model.modules())
    dtype: torch.dtype = E4M3 if fp8 else target.dtype
    return dtype


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantisedLinear | Fp8Linear) for module in model.modules())


def check_whole(model: nn.Module, what: str) -> None:
    """Raise UserError for a model with quantised weights. what: a drafter does that needs whole ones."""
    if is_quantised(model):
        raise UserError(
            f"this drafter {what}, whose weights are quantised; choose a family with its own layers, or leave target.weights "
            "out"
        )


def whole_fingerprint(fingerprint: str) -> str:
    """The fingerprint of the weights before quantisation."""
    return fingerprint.partition("-")[0]


def weights_of(fingerprint: str) -> str:
    """The quantisation that a fingerprint names, or `whole`."""
    return fingerprint.partition("-")[2] or "whole"


# entries of a configuration that must have these values; others are free, or name what the files show anyway
WEIGHTS = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "group_size": None, "block_structure": None}
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True, "strategy": "token"}
BLOCKS = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "scale_fmt": None}
OF_BLOCKS, OF_ROWS = ".weight_scale_inv", ".weight_scale"  # what the names of scales end with
STORED = "F8_E4M3"  # safetensors' name of the codes' dtype


@dataclass(frozen=True, slots=True)
class Fp8Checkpoint:
    """The linear maps of a checkpoint that are in FP8, kept as they are stored: the codes and their scales.

    Two formats: compressed-tensors with `float-quantized` weights, whose scales are of rows or of whole tensors, and `fp8` in
    blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8), both with activations that are quantised when they come. transformers loads
    the rest: the codes as numbers, which every dtype holds exactly, into a model without quantisation. Other formats are left
    to it.
    """

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
