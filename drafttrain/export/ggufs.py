"""Write a GGUF file tensor by tensor, with the `gguf` library's container and our own names and fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from drafttrain.core.errors import UserError

SUFFIX = ".gguf"
ARCHITECTURE = "general.architecture"
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # general.file_type, by the dtype of most tensors
FACTORS = "rope_freqs.weight"
EXPERTS = "_exps.weight"  # how names of experts' matrices end, which have three dimensions
SMALL = ("ffn_gate_inp.weight", "shortconv.conv.weight")  # matrices that llama.cpp takes, or keeps, in float32
LONG = 2**28  # bytes from which on a progress bar is shown


def write_gguf(
    file: Path, fields: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, as_is: tuple[str, ...] = ()
) -> None:
    """Write fields and tensors. fields: by their full keys, with the architecture. Plain integers become uint32, floats
    float32.

    Matrices are stored in `dtype`. Vectors, biases, and kernels of three dimensions, are rounded to it too but stored in
    float32, the only type that llama.cpp adds and multiplies element by element. Rotary factors, which are no weights, integers
    and the tensors `as_is`, which are stored in their own dtype, are not rounded. Raises UserError for weights that the dtype
    cannot hold.
    """
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter

    kinds = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16, torch.int64: Kind.I64}
    writer = GGUFWriter(file, fields[ARCHITECTURE])
    try:
        for key, value in fields.items():
            _add(writer, key, value)
        for name, tensor in tensors.items():
            stored = _stored(name, tensor, tensor.dtype if name in as_is else dtype)
            writer.add_tensor_info(
                name, list(tensor.shape), np.dtype(np.float32), tensor.numel() * stored.itemsize, kinds[stored]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in _arrays(file.name, tensors, dtype, as_is):
            writer.write_tensor_data(array)
    finally:
        writer.close()


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on the CPU in this dtype; integers keep theirs. Raises UserError for weights that the dtype cannot
    hold.
    """
    own = tensor.detach().cpu()
    if not own.is_floating_point():
        return own.contiguous().clone()
    rounded = own.to(dtype)
    if not bool(rounded.isfinite().all()):
        narrow = str(dtype).removeprefix("torch.")
        raise UserError(
            f"{name} reaches {own.abs().max():.3g}, more than {narrow} holds; export with dtype=bfloat16 or float32"
        )
    return rounded.contiguous().clone()


def _arrays(name: str, tensors: dict[str, Tensor], dtype: torch.dtype, as_is: tuple[str, ...]) -> Iterator[Any]:
    long = sum(x.numel() * x.element_size() for x in tensors.values()) > LONG
    for key, tensor in track(tensors.items(), description=name, disable=not long):
        own = tensor.dtype if key in as_is else dtype
        stored = cast(key, tensor, torch.float32 if key == FACTORS else own).to(_stored(key, tensor, own))
        yield (stored.view(torch.uint8) if stored.dtype == torch.bfloat16 else stored).numpy()  # numpy has no bfloat16


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.int64
    matrix = tensor.ndim == 2 and not name.endswith((".bias", *SMALL))
    return dtype if matrix or name.endswith(EXPERTS) else torch.float32


def _add(writer: Any, key: str, value: Any) -> None:
    if key == ARCHITECTURE:
        return  # the library writes it itself
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list) and value, f"{key} is {value!r}"
        writer.add_array(key, value)
