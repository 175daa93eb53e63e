"""Quantised weights in compressed-tensors' layout, as vLLM and SGLang load them, written and read by the library of that name.

The linear maps of a drafter's layers are quantised. Its head, embedding and `fc` are not: engines build some of these without
quantisation, and `fc` runs once for a verified text, not for each draft, on states with outliers.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.export.files import Files

KEY = "quantization_config"  # of config.json
METHOD = "compressed-tensors"
SCHEMES = {"fp8": "FP8_DYNAMIC", "int8": "W8A8", "int4": "W4A16"}  # the library's names
SAID = {  # in a model card
    "fp8": "weights in e4m3 with a scale per row, activations in e4m3 token by token in the engine",
    "int8": "weights in 8 bits with a scale per row, activations in 8 bits token by token in the engine",
    "int4": "weights in 4 bits with a scale per group of inputs",
}
ACTIVATIONS = ("fp8", "int8")  # schemes with which engines round activations too
TOLERANCE = 0.1  # of the accepted drafts: an engine that rounds activations may accept so many more or fewer
GROUPS = (128, 64, 32)  # inputs that share a scale of int4, of those that engines' kernels know
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
MAPS = re.compile(r".*_proj\.weight")  # in every layout that is written quantised, as in our checkpoints
SCALE = ".weight_scale"
INSTALL = "pip install 'drafttrain[quantize]'"


def check_library(what: str) -> None:
    """Raise UserError without the library. what: needs it."""
    if find_spec("compressed_tensors") is None:
        raise UserError(f"{what} needs {METHOD}, which is not installed; {INSTALL}")


def group_of(tensors: Mapping[str, Tensor]) -> int | None:
    """The largest group that divides the inputs of all maps; None where none does."""
    sizes = [x.shape[1] for name, x in tensors.items() if MAPS.fullmatch(name)]
    return next((group for group in GROUPS if not any(size % group for size in sizes)), None)


@dataclass(frozen=True, slots=True)
class Compression:
    """A scheme of quantisation, with the library's scheme and the compressor of its format."""

    scheme: Any
    format: str

    @staticmethod
    def of(kind: str, tensors: Mapping[str, Tensor]) -> Compression:
        """kind: fp8, int8 or int4. tensors: of the drafter."""
        # the library takes seconds to import, and few runs need it
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import preset_name_to_scheme

        scheme = preset_name_to_scheme(SCHEMES[kind], ["Linear"])
        if scheme.weights.group_size is not None:
            scheme.weights = scheme.weights.model_copy(update={"group_size": group_of(tensors)})
        return Compression(scheme, str(infer_module_format(nn.Linear, scheme).value))

    @staticmethod
    def in_config(config: dict[str, Any], origin: str) -> Compression | None:
        """The scheme of a configuration, which is taken out of it; None without one, or with one of another library.

        Raises UserError for schemes that are not read here.
        """
        settings = config.get(KEY)
        if not isinstance(settings, Mapping) or settings.get("quant_method") != METHOD:
            return None
        check_library(f"{origin} is quantised, which")
        from compressed_tensors.quantization import QuantizationConfig

        try:
            read = QuantizationConfig.model_validate(json.loads(json.dumps(config.pop(KEY))))
        except ValueError as error:
            raise UserError(f"{origin}: {KEY} cannot be read ({' '.join(str(error).split())[:120]}); correct it") from error
        if len(read.config_groups) != 1 or read.format not in FORMATS or read.kv_cache_scheme is not None:
            raise UserError(
                f"{origin}: {KEY} has {len(read.config_groups)} groups in the format {read.format!r}; one group in "
                f"{', '.join(FORMATS)}, and an unquantised cache, can be imported"
            )
        return Compression(next(iter(read.config_groups.values())), str(read.format))

    @torch.no_grad()
    def compress(self, weight_OI: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors that replace a map's weight, by the last parts of their names.

        dtype: of the scales of groups, which engines read in the model's dtype. Those of rows are in float32.
        """
        from compressed_tensors.quantization.utils import calculate_qparams

        args, weight_OI = self.scheme.weights, weight_OI.float()
        low_OG, high_OG = weight_OI.unflatten(1, (-1, args.group_size or weight_OI.shape[1])).aminmax(dim=-1)
        scale_OG, zero_OG = calculate_qparams(low_OG, high_OG, args)
        stored_OG = scale_OG.to(torch.float32 if args.group_size is None else dtype)
        weights = {"weight": weight_OI, "weight_scale": stored_OG.float(), "weight_zero_point": zero_OG}
        return self._compressor.compress(weights, self.scheme) | {"weight_scale": stored_OG}

    @torch.no_grad()
    def widen(self, parts: Mapping[str, Tensor]) -> Tensor:
        """[O, I] in float32: the weight that these tensors are."""
        weight_OI: Tensor = self._compressor.decompress({**parts, "weight_scale": parts["weight_scale"].float()}, self.scheme)[
            "weight"
        ]
        return weight_OI

    def rounded(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """[O, I] in float32: a map's weight as an export has it."""
        return self.widen(self.compress(weight_OI, dtype))

    @property
    def _compressor(self) -> Any:
        from compressed_tensors.compressors import BaseCompressor

        return BaseCompressor.get_value_from_registry(self.format)

    def config(self, whole: Iterable[str]) -> dict[str, Any]:
        """The entry of config.json. whole: modules with matrices that are not quantised; engines put prefixes before names."""
        from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

        entry: dict[str, Any] = QuantizationConfig(
            config_groups={"group_0": self.scheme},
            format=self.format,
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=[text for name in whole for text in (name, rf"re:.*\.{re.escape(name)}$")],
        ).model_dump(mode="json", exclude_none=True)
        return entry

    def files(self, files: Files, dtype: torch.dtype) -> Files:
        """The same files with quantised weights."""
        tensors, parts = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in files.tensors.items():
            if MAPS.fullmatch(name):
                stem = name.removesuffix("weight")
                parts |= {stem + key: part for key, part in self.compress(tensor, dtype).items()}
            else:
                tensors[name] = tensor
        whole = [name.removesuffix(".weight") for name, x in tensors.items() if x.ndim == 2 and name.endswith(".weight")]
        config = files.config | {KEY: self.config(whole)}
        return replace(files, config=config, tensors=tensors | parts, as_is=(*files.as_is, *parts))

    def names(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Kinds of stored tensors as those of the weights that they are, in float32."""
        stems = {name.removesuffix(SCALE) for name in kinds if name.endswith(SCALE)}
        plain = {name: kind for name, kind in kinds.items() if not _part(name, stems)}
        return plain | {f"{stem}.weight": "F32" for stem in stems}

    def widened(self, tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
        """Stored tensors with weights widened. Raises UserError for tensors that are no weight of the scheme."""
        stems = {name.removesuffix(SCALE): dict[str, Tensor]() for name in tensors if name.endswith(SCALE)}
        for name, tensor in tensors.items():
            if _part(name, stems):
                stem, _, key = name.rpartition(".")
                stems[stem][key] = tensor
        plain = {name: tensor for name, tensor in tensors.items() if not _part(name, stems)}
        for stem, parts in stems.items():
            try:
                plain[f"{stem}.weight"] = self.widen(parts)
            except (KeyError, ValueError, RuntimeError, AssertionError, TypeError) as error:
                raise UserError(
                    f"{origin}: {stem} is no weight in {self.format} ({' '.join(str(error).split())[:120]}); fetch it again"
                ) from error
        return plain


@torch.no_grad()
def narrow_weights(drafter: nn.Module, dtype: torch.dtype, compression: Compression | None = None) -> None:
    """Give a drafter's weights the values that they have in an export."""
    for name, parameter in drafter.named_parameters():
        quantised = compression is not None and MAPS.fullmatch(name)
        parameter.copy_(compression.rounded(parameter, dtype) if compression and quantised else parameter.to(dtype))


def _part(name: str, stems: Iterable[str]) -> bool:
    """Whether a tensor is a part of a quantised weight."""
    stem, _, key = name.rpartition(".")
    return stem in stems and key.startswith("weight")
