"""A transformers model from its files: these are looked at first, and every tensor is accounted for afterwards.

transformers fills what a checkpoint lacks with random numbers, and says so in its log alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from drafttrain.core.checksums import check_listed
from drafttrain.core.errors import UserError

INDEX = "model.safetensors.index.json"
AGAIN = "get its files again"
SHOWN = 3  # names in a message

# tensors that checkpoints hold and models have no use for, beside those that transformers leaves out itself
SPARE = re.compile(
    r"rotary_emb\.inv_freq$"  # computed from the configuration
    r"|\.(attn|attention)\.(masked_bias|bias)$"  # causal masks, saved by old versions
    r"|^(model\.)?(vision|visual|audio|multi_modal|image)\w*\."  # what reads other things than text
)


def load_model(path: str, origin: str, **settings: Any) -> Any:
    """The causal LM at a directory or hub id, every parameter filled from its safetensors files.

    origin: what the user calls it, for messages. settings: of `from_pretrained`. Raises UserError for files that are damaged or
    lie elsewhere, and for weights that do not fill the architecture, with their names.
    """
    if Path(path).is_dir():
        check_files(Path(path), origin)
        if not int(os.environ.get("LOCAL_RANK", 0)):  # once on each machine
            check_listed(Path(path), AGAIN, is_weights)
    level, load = logging.get_verbosity(), cast(Any, AutoModelForCausalLM.from_pretrained)
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the report of what is missing is ours to make
    logging.disable_progress_bar()  # of a library that is called from Python, whose caller has not asked for any
    try:
        model, found = load(
            path, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )  # shapes that do not match are refused below, by their names
    except SafetensorError as error:
        raise UserError(f"{origin}: its weights are damaged ({one_line(error)}); {AGAIN}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    _account(model, found, origin)
    return model


def check_settings(directory: str) -> None:
    """Raise UserError unless an export's configuration and tokenizer are what was written."""
    check_listed(Path(directory), AGAIN, lambda name: not is_weights(name))


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def check_files(directory: Path, origin: str) -> None:
    """Raise UserError for weight files that are missing, damaged, or outside of the directory."""
    index = directory / INDEX
    files = listed_files(index, origin) if index.is_file() else sorted(directory.glob("model*.safetensors"))
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{origin}: {file.name} is damaged or cut off ({one_line(error)}); {AGAIN}") from error


def listed_files(index: Path, origin: str) -> list[Path]:
    """The weight files that an index names, each once. Raises UserError for another file than an index, for names that lead out
    of its directory, and for files that are not there.

    Links lead out too, but for those that the hub's cache is made of.
    """
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{origin}: {index.name} is no index of weights ({one_line(error)}); {AGAIN}") from error
    folder, files = index.parent, [index.parent / name for name in sorted(names)]
    home = folder.resolve()
    allowed = home.parent.parent if home.parent.name == "snapshots" else home
    for name, file in zip(sorted(names), files, strict=True):
        if Path(name).name != name or not file.resolve().is_relative_to(allowed):
            raise UserError(f"{origin}: {index.name} names {name!r}; only files beside it are read; {AGAIN}")
        if not file.is_file():
            raise UserError(f"{origin}: {index.name} names {name!r}, which is not there; {AGAIN}")
    return files


def _account(model: Any, found: Any, origin: str) -> None:
    """Raise UserError for tensors that the model needs and the files do not have, or the other way round."""
    found = found if isinstance(found, dict) else vars(found)
    mismatched = [key[0] if isinstance(key, tuple) else key for key in found.get("mismatched_keys", ())]
    spare = [name for name in found.get("unexpected_keys", ()) if not (SPARE.search(name) or _drafts(name, model.config))]
    wrong = {"lack": found.get("missing_keys", ()), "have in another shape": mismatched, "have and it does not know": spare}
    said = [f"{what} {_named(names)}" for what, names in wrong.items() if names]
    if said:
        kind = type(model).__name__
        raise UserError(f"{origin}: its files do not fill {kind}: they {'; they '.join(said)}; {AGAIN}, or mend config.json")


def _drafts(name: str, config: Any) -> bool:
    """Whether a tensor belongs to the layers behind the last one that some checkpoints bring to draft with."""
    config = config.get_text_config()
    number = re.search(r"\blayers\.(\d+)\.", name)
    extra = getattr(config, "num_nextn_predict_layers", None) or 0
    return number is not None and config.num_hidden_layers <= int(number[1]) < config.num_hidden_layers + extra


def _named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def one_line(error: BaseException, length: int = 200) -> str:
    return " ".join(str(error).split())[:length]
