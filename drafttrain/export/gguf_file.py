"""GGUF files, written and read tensor by tensor, with the `gguf` library's container and our own names and fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from drafttrain.core.errors import ParityError, UserError

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

    ggml_types = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16, torch.int64: Kind.I64}
    writer = GGUFWriter(file, fields[ARCHITECTURE])
    try:
        for key, value in fields.items():
            _add(writer, key, value)
        for name, tensor in tensors.items():
            stored_dtype = _stored(name, tensor, tensor.dtype if name in as_is else dtype)
            writer.add_tensor_info(
                name, list(tensor.shape), np.dtype(np.float32), tensor.numel() * stored_dtype.itemsize, ggml_types[stored_dtype]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in _arrays(file.name, tensors, dtype, as_is):
            writer.write_tensor_data(array)
    finally:
        writer.close()


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on the CPU in this dtype; integers and codes of 8 bits keep theirs. Raises UserError for weights that
    the dtype cannot hold.
    """
    cpu_tensor = tensor.detach().cpu()
    if not cpu_tensor.is_floating_point() or cpu_tensor.element_size() == 1:
        return cpu_tensor.contiguous().clone()
    rounded = cpu_tensor.to(dtype)
    if not bool(rounded.isfinite().all()):
        dtype_name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"{name} reaches {cpu_tensor.abs().max():.3g}, more than {dtype_name} holds; export with dtype=bfloat16 or float32"
        )
    return rounded.contiguous().clone()


def _arrays(name: str, tensors: dict[str, Tensor], dtype: torch.dtype, as_is: tuple[str, ...]) -> Iterator[Any]:
    show_progress = sum(x.numel() * x.element_size() for x in tensors.values()) > LONG
    for key, tensor in track(tensors.items(), description=name, disable=not show_progress):
        weight_dtype = tensor.dtype if key in as_is else dtype
        stored = cast(key, tensor, torch.float32 if key == FACTORS else weight_dtype).to(_stored(key, tensor, weight_dtype))
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


class GgufFile:
    """A written file. Its fields must be there when they are asked for: llama.cpp has defaults of its own for many."""

    def __init__(self, file: Path, fields: dict[str, Any] | None = None) -> None:
        self.file, self.fields = file, fields or {}
        if fields is None:
            self.fields = self._read("config", lambda reader: {k: _value(x) for k, x in reader.fields.items()})

    @property
    def architecture(self) -> str:
        """The kind of model."""
        return str(self.get(ARCHITECTURE, "architecture"))

    def get(self, key: str, name: str) -> Any:
        """A field's value. Raises ParityError where it is missing. name: of the failure."""
        if self.fields.get(key) is None:
            raise ParityError(name, f"{self.file.name} does not say {key}")
        return self.fields[key]

    def own(self, key: str, name: str) -> Any:
        """A field of the file's architecture. Raises ParityError as `get` does."""
        return self.get(f"{self.architecture}.{key}", name)

    def expect(self, key: str, value: Any, name: str) -> None:
        """Raise ParityError unless a field has this value."""
        if (actual := self.fields.get(key)) != value:
            raise ParityError(name, f"{self.file.name} has {key} {actual!r}, {value!r} is needed")

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        tensor_names: list[str] = self._read("tensors", lambda reader: [x.name for x in reader.tensors])
        return tensor_names

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors one by one, floats in float32. Raises ParityError for a type that llama.cpp does not take there."""
        for stored in self._read("tensors", lambda reader: reader.tensors):
            yield stored.name, _tensor(stored)

    def _read(self, what: str, of: Callable[[Any], Any]) -> Any:
        """What `of` takes from the file. what: the name of the failure for one that cannot be read."""
        from gguf import GGUFReader

        try:
            return of(GGUFReader(self.file))
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ParityError(what, f"{self.file.name} cannot be read ({error})") from error


def _value(field: Any) -> Any:
    """A field's value. float32 numbers become the decimals that they were written from."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _tensor(stored: Any) -> Tensor:
    ggml_type, array = stored.tensor_type.name, np.array(stored.data)
    if ggml_type not in ("F32", "F16", "BF16", "I64"):
        raise ParityError("tensors", f"{stored.name} is {ggml_type}, which is not written here")
    if ggml_type not in ("F32", "I64") and array.ndim != 2 and not stored.name.endswith(EXPERTS):
        raise ParityError(
            "tensors", f"{stored.name} has {array.ndim} dimensions and is {ggml_type}, but llama.cpp takes float32"
        )
    tensor = torch.from_numpy(array)
    return tensor if ggml_type == "I64" else (tensor.view(torch.bfloat16) if ggml_type == "BF16" else tensor).float()
