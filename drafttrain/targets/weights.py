"""The weights of a checkpoint: loads a transformers model from its files. Files are checked before, and every tensor is
accounted for afterwards.

transformers itself fills missing tensors with random numbers and reports this only in its log. Tensors that it leaves out of
its models are read by name (`StoredTensors`).
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import cached_file, logging

from drafttrain.core.errors import UserError
from drafttrain.core.files import check_listed

INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = f"{PICKLED}.index.json"
AGAIN = "get its files again"
SHOWN = 3  # names in a message

# tensors of checkpoints that models do not use, in addition to those that transformers ignores itself
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$"  # computed from the configuration
    r"|\.(attn|attention)\.(masked_bias|bias)$"  # causal masks, saved by old versions
    r"|^(model\.)?(vision|visual|audio|multi_modal|image)\w*\."  # encoders of other modalities than text
)
DTYPES = {  # by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def load_model(path: str, origin: str, read: Callable[..., tuple[Any, Any]] | None = None, **settings: Any) -> Any:
    """The causal LM at a directory or hub id, every parameter filled from its safetensors files, or from `pytorch_model.bin`
    where there are none.

    origin: the name that messages use for it. read: replaces `from_pretrained`, whose arguments are `settings`. Raises
    UserError for damaged files, files outside the directory, and weights that do not fill the architecture, with their names.
    """
    safe = not is_pickled(Path(path))
    if Path(path).is_dir():
        if safe:
            check_files(Path(path), origin)
        elif (index := Path(path) / PICKLED_INDEX).is_file():
            listed_files(index, origin)
        if not int(os.environ.get("LOCAL_RANK", 0)):  # once on each machine
            check_listed(Path(path), AGAIN, is_weights)
    shared = {name: settings[name] for name in ("revision", "trust_remote_code") if name in settings}
    load = read or model_class(AutoConfig.from_pretrained(path, **shared)).from_pretrained
    try:
        return filled(load, path, origin, safe, **settings)
    except OSError as error:
        if Path(path).is_dir() or "cannot be loaded with `safetensors`" not in str(error):
            raise
        return filled(load, path, origin, False, **settings)  # of a hub repository that has no safetensors


def filled(load: Callable[..., tuple[Any, Any]], path: str | None, origin: str, safe: bool = True, **settings: Any) -> Any:
    """The model that a `from_pretrained` gives, every parameter filled; otherwise as `load_model`.

    safe: from safetensors. Otherwise from a pickle, of which torch's loader reads tensors alone: it runs no code.
    """
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # transformers would ask the hub to convert a repository
    level, had_progress_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # `_check_filled` reports missing tensors
    logging.disable_progress_bar()  # callers have not asked for one
    try:
        model, loading_info = load(
            path, use_safetensors=safe, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )  # `_check_filled` refuses mismatched shapes by name
    except SafetensorError as error:
        raise UserError(f"{origin}: its weights are damaged ({one_line(error)}); {AGAIN}") from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise UserError(
            f"{origin}: its {PICKLED} is damaged, or holds more than tensors, which is never read because it could run code; "
            f"{AGAIN}, as safetensors where there are some"
        ) from error
    finally:
        logging.set_verbosity(level)
        if had_progress_bar:
            logging.enable_progress_bar()
    _check_filled(model, loading_info, origin)
    compressor: Any = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is not None:  # of compressed-tensors, which waits for a forward pass of the whole model
        compressor.decompress_model(model)
        for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
            linear.weight.data = linear.weight.data.to(model.get_input_embeddings().weight.dtype)  # FP4 is widened to bfloat16
    return model


def model_class(config: Any) -> Any:
    """transformers' class that loads a model of this configuration: that of models of text and images where it must."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def check_settings(directory: str) -> None:
    """Raise UserError if an export's configuration or tokenizer differs from what was written."""
    check_listed(Path(directory), AGAIN, lambda name: not is_weights(name))


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def is_pickled(directory: Path) -> bool:
    """Whether this is a directory whose only weights are pickles."""
    has_pickle = any((directory / name).is_file() for name in (PICKLED, PICKLED_INDEX))
    return has_pickle and not any(directory.glob("*.safetensors*"))  # an index counts


def check_files(directory: Path, origin: str) -> list[Path]:
    """The model's weight files. Raises UserError for files that are missing, damaged, or outside the directory."""
    index = directory / INDEX
    files = listed_files(index, origin) if index.is_file() else sorted(directory.glob("model*.safetensors"))
    for file in files:
        try:
            with safe_open(file, "pt") as handle:
                handle.keys()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{origin}: {file.name} is damaged or cut off ({one_line(error)}); {AGAIN}") from error
    return files


def listed_files(index: Path, origin: str) -> list[Path]:
    """The weight files that an index names, each once.

    Raises UserError for a file that is not an index, for names outside its directory, and for missing files. Links may not lead
    outside the directory either, except those of the hub's cache.
    """
    names = set(listed_weights(index, origin).values())
    folder, files = index.parent, [index.parent / name for name in sorted(names)]
    real_folder = folder.resolve()
    allowed_root = real_folder.parent.parent if real_folder.parent.name == "snapshots" else real_folder
    for name, file in zip(sorted(names), files, strict=True):
        if not file.resolve().is_relative_to(allowed_root):
            raise UserError(f"{origin}: {index.name} names {name!r}; only files next to it are read; {AGAIN}")
        if not file.is_file():
            raise UserError(f"{origin}: {index.name} names {name!r}, which is not there; {AGAIN}")
    return files


def listed_weights(index: Path, origin: str) -> dict[str, str]:
    """The name of the file of each tensor that an index lists. Raises UserError for a file that is not an index."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{origin}: {index.name} is no index of weights ({one_line(error)}); {AGAIN}") from error
    if foreign_files := [file for file in files.values() if Path(file).name != file]:
        raise UserError(f"{origin}: {index.name} names {foreign_files[0]!r}; only files next to it are read; {AGAIN}")
    return files


def _check_filled(model: Any, loading_info: Any, origin: str) -> None:
    """Raise UserError for tensors that the model needs and the files lack, or the other way round."""
    loading_info = loading_info if isinstance(loading_info, dict) else vars(loading_info)
    mismatched = [key[0] if isinstance(key, tuple) else key for key in loading_info.get("mismatched_keys", ())]
    unexpected = [name for name in loading_info.get("unexpected_keys", ()) if not _is_ignored(name, model.config)]
    names_by_fault = {
        "lack": loading_info.get("missing_keys", ()),
        "have in another shape": mismatched,
        "have and it does not know": unexpected,
    }
    faults = [f"{fault} {_named(names)}" for fault, names in names_by_fault.items() if names]
    if faults:
        architecture = type(model).__name__
        raise UserError(
            f"{origin}: its files do not fill {architecture}: they {'; they '.join(faults)}; {AGAIN}, or mend config.json"
        )


def check_known(names: Iterable[str], model: Any, origin: str) -> None:
    """Raise UserError for tensors of a checkpoint that the model has no use for, as `load_model` does."""
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = [name for name in names if not any(pattern.search(name) for pattern in patterns)]
    _check_filled(model, {"unexpected_keys": unexpected}, origin)


def _is_ignored(name: str, config: Any) -> bool:
    """Whether the model has no use for a tensor, such as one of the draft layers after a checkpoint's last layer."""
    if IGNORED.search(name):
        return True
    config = config.get_text_config()
    number = re.search(r"\blayers\.(\d+)\.", name)
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    return number is not None and config.num_hidden_layers <= int(number[1]) < config.num_hidden_layers + extra


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    suffix = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + suffix


def one_line(error: BaseException, length: int = 200) -> str:
    """An error's text in one line, cut to `length` characters."""
    return " ".join(str(error).split())[:length]


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors in a directory. No tensor is read before it is asked for."""

    directory: Path
    files: dict[str, Path]  # by name

    @staticmethod
    def of(directory: Path, origin: str) -> StoredTensors:
        """origin: the name that messages use for it. Raises UserError for damaged files, and files outside the directory."""
        weight_files = check_files(directory, origin)
        if not weight_files:
            raise UserError(
                f"{origin}: no safetensors files are in {directory}, which are read here piece by piece; save the model again "
                "with save_pretrained(), or load it whole (target.placement=replicated)"
            )
        if (directory / INDEX).is_file():
            weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return StoredTensors(directory, {name: directory / file for name, file in weight_map.items()})
        files: dict[str, Path] = {}
        for file in weight_files:
            with safe_open(file, "pt") as handle:
                files |= dict.fromkeys(handle.keys(), file)
        return StoredTensors(directory, files)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        with safe_open(self.files[name], "pt") as handle:
            return DTYPES[handle.get_slice(name).get_dtype()]


def directory_of(model: Any) -> Path | None:
    """The directory that a transformers model was loaded from; None for one that was made in memory."""
    name = str(getattr(model.config, "name_or_path", None) or "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        file = cached_file(name, "config.json", revision=getattr(model.config, "_commit_hash", None), local_files_only=True)
    except OSError:
        return None
    return None if file is None else Path(file).parent
