"""Draft models, PARD and UNO: ordinary language models as directories of transformers, and peft adapters of them.

A draft model is written with the target's tokenizer, an adapter of it merged or by itself. PARD's configuration names the mask
token. UNO is an adapter of the target, without the target's weights. A draft model comes back as one from a directory: its
weights go into the checkpoint, configuration and tokenizer are read from their own place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from drafttrain.core.errors import UserError
from drafttrain.export.drafter_adapter import CONFIG, PEFT, WEIGHTS, check_plain, config_of, usual_lora
from drafttrain.export.external import ExternalCheckpoint, listed
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.format import ConvertedDrafter, Format, Importer, Renames, Rows, StackRow
from drafttrain.export.formats.eagle3 import MASK, mask_token
from drafttrain.model.target import Target

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # architectures of which exports are checked
LAYER = ".base_layer"
ADAPTER = "default"
BASE = "base"  # folder of an adapter's base model, in the adapter's directory
RENAMES = Renames({"lm.model.{rest}": "{rest}"})
ADAPTED = Renames({f"lm.model.{{path}}.lora_{x}.{ADAPTER}.weight": f"{PEFT}{{path}}.lora_{x}.weight" for x in "AB"})
UNO_NAMES = Renames({f"matrices.{{path}}.lora_{x}.weight": f"{PEFT}{{path}}.lora_{x}.weight" for x in "AB"})
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
MODELS = ("ForCausalLM", "LMHeadModel")
PLACES = ("source", "path", "revision", "hidden_size")
WHOLE = ("model.safetensors", "pytorch_model.bin")
NO_DRAFT_MODELS = "it does not draft with ordinary language models"
ONE_BY_ONE = "it would draft one token per pass and ignore the mask tokens; export a draft_model there"


def refuse(source: ExportSource) -> str | None:
    """Why this drafter cannot be exported; None where it can."""
    if source.drafter.language_model() is None:
        return "its tokens are not the target's, and it was not trained; give the stack drafter.path itself"
    config = _model(source).config
    return _refuse_kind(config, f"its architecture is {config.model_type}", "its")


def _refuse_kind(config: Any, kind: str, whose: str) -> str | None:
    """Why a model cannot be exported, or an adapter of it. kind, whose: the beginnings of the messages."""
    if config.model_type not in MODEL_TYPES:
        return f"{kind}, but exports can be checked only for {', '.join(MODEL_TYPES)}"
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return f"{whose} linear maps have biases, but exports can be checked only without them"
    return None


def refuse_uno(source: ExportSource) -> str | None:
    """Why this UNO drafter cannot be exported; None where it can."""
    config = source.target.model.config
    return _refuse_kind(config, f"the target is a {config.model_type}", "the target's")


def refuse_adapter(source: ExportSource) -> str | None:
    """Why its matrices cannot be exported as an adapter; None where they can."""
    if source.dtype != "float32":
        return f"dtype is {source.dtype}, but adapters are written in float32; leave dtype out"
    return refuse(source)


def adapter(source: ExportSource) -> Files:
    """The matrices, with a copy of their model in a folder unless that has a directory of its own."""
    tensors = {peft_name: x for name, x in source.tensors.items() if (peft_name := ADAPTED.theirs(name)) is not None}
    base_dir = _elsewhere(source)
    base_path = str(Path(source.place, BASE).absolute()) if base_dir is None else str(source.options["path"])
    config = config_of(tensors, source.options["lora_rank"], source.options["lora_alpha"], base_path)
    folders = {BASE: Files(_config(source), _own(_model(source)))} if base_dir is None else {}
    tokenizer = source.opened.loaded.tokenizer is not None
    return Files(config, tensors, WEIGHTS, tokenizer, config_file=CONFIG, folders=folders)


def _elsewhere(source: ExportSource) -> Path | None:
    """The base model's directory. None where it is a part of the target, or was resized to the target's vocabulary."""
    if source.options["source"] != "hf":
        return None
    path, revision = Path(source.options["path"]).expanduser(), source.options["revision"]
    if not path.is_dir():
        path = Path(str(cached_file(source.options["path"], "config.json", revision=revision))).parent
    size = json.loads((path / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    return path if size == source.shape.vocab_size and any(path.glob("*.safetensors")) else None


def files(source: ExportSource) -> Files:
    """A transformers directory with adapters merged."""
    return Files(_config(source), merged(_model(source)), tokenizer=source.opened.loaded.tokenizer is not None)


def _config(source: ExportSource) -> dict[str, Any]:
    model = _model(source)
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"architectures": [type(model).__name__], "torch_dtype": source.dtype}
    config.pop("dtype", None)
    config["vocab_size"] = source.shape.vocab_size
    return config


def _model(source: ExportSource) -> Any:
    lm: Any = source.drafter.language_model()
    return lm.model


def merged(model: Any) -> dict[str, Tensor]:
    """All weights under transformers' names, with adapters added in float32; tied weights once."""
    from peft.tuners.lora import LoraLayer  # takes seconds, and few runs need it

    tensors = _own(model)
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() + layer.get_delta_weight(ADAPTER).float()
    return tensors


def _own(model: Any) -> dict[str, Tensor]:
    """All weights without the adapters."""
    from peft.tuners.lora import LoraLayer

    tensors: dict[str, Tensor] = {}
    layers = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for name, tensor in model.state_dict().items():
        lora_layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if lora_layer is None:
            tensors[name] = tensor
        elif name.startswith(f"{lora_layer}{LAYER}."):
            tensors[name.replace(LAYER, "")] = tensor
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def parallel(source: ExportSource) -> Files:
    """PARD's directory, with the mask token, as the authors' code writes it."""
    model_files, mask = files(source), mask_token(source)
    return replace(model_files, config=model_files.config | {MASK: mask, "spd_type": "pard"})


def uno(source: ExportSource) -> Files:
    """UNO's matrices under peft's names."""
    tensors, options = UNO_NAMES.named(source.tensors), source.options
    config = config_of(tensors, options["lora_rank"], options["lora_alpha"], source.target_name)
    return Files(config, tensors, WEIGHTS, config_file=CONFIG)


def parallel_facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a PARD drafter must have again when it is read back."""
    return {"mask token": mask_token(source)}


def whole_model(found: ExternalCheckpoint) -> bool:
    """Whether this is a language model. Some drafter heads and layers are named like one, but have an `fc` or no embedding."""
    architectures = found.architectures or [""]
    has_embedding = any(name.endswith(EMBEDDINGS) for name in found.kinds)
    is_causal_lm = found.weights in WHOLE and architectures[0].endswith(MODELS) and has_embedding
    return is_causal_lm and not found.has("fc.weight")


def _plain(checkpoint: ExternalCheckpoint) -> bool:
    """Whether it is a language model that does not draft from masks."""
    return whole_model(checkpoint) and MASK not in checkpoint.config


def _adapter(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.adapter


def options(found: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """Options of a draft model in this directory."""
    return _from(str(found.directory.resolve()))


def _from(path: str, rank: int = 0, alpha: int = 16) -> dict[str, Any]:
    source_options = {"source": "hf", "path": path, "revision": None, "hidden_size": None}
    return source_options | {"lora_rank": rank, "lora_alpha": alpha}


def _adapter_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """Options from the adapter's configuration. Its base model is in the folder `base`, if exported there, or where it says."""
    check_plain(checkpoint)
    alpha = checkpoint.field("lora_alpha")
    if not isinstance(alpha, int | float) or int(alpha) != alpha:
        raise UserError(f"{checkpoint.origin}: lora_alpha is {alpha!r}; a whole number is needed")
    base_dir = checkpoint.directory.resolve() / "base"
    base_path = str(base_dir) if (base_dir / "config.json").is_file() else str(checkpoint.field("base_model_name_or_path"))
    return _from(base_path, checkpoint.number("r"), int(alpha))


def complete(draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """Tie the head, and use the embedding that was resized to the target's vocabulary when the model was read."""
    tensors, model = draft.tensors, draft.found.directory
    if not own:
        draft.notes.append(f"its tokenizer is not the target's: drafts are passed as text, and its weights stay in {model}")
        tensors.clear()
        return
    if draft.found.config.get("tie_word_embeddings"):
        _tie(draft, own)
    for name, tensor in own.items():
        saved_tensor = tensors.get(name)
        padded = (
            saved_tensor is not None
            and saved_tensor.ndim == 2
            and saved_tensor.shape[1:] == tensor.shape[1:]
            and saved_tensor.shape != tensor.shape
        )
        if padded and saved_tensor is not None and bool(tensor.isfinite().all()):
            tensors[name] = tensor.to(saved_tensor.dtype)


def _tie(draft: ConvertedDrafter, drafter_tensors: Mapping[str, Tensor]) -> None:
    """Store the tied head once. A head that differs from the embedding raises UserError, because it would be lost."""
    tensors = draft.tensors
    (embedding,) = [name for name in tensors if name.endswith(EMBEDDINGS)]
    head = next((name for name in drafter_tensors if name.endswith("lm_head.weight")), None)
    if head is None:
        return
    if head in tensors and not torch.equal(tensors[head], tensors[embedding]):
        raise UserError(
            f"{draft.found.origin}: config.json says tie_word_embeddings, but lm_head.weight is not the embedding; "
            "set tie_word_embeddings to false there, or remove the matrix"
        )
    tensors[head] = tensors[embedding]


def _complete_adapter(draft: ConvertedDrafter, drafter_tensors: Mapping[str, Tensor]) -> None:
    """Add the base model's weights, and fresh matrices, which change nothing, where the adapter has none."""
    adapter_names = set(draft.tensors)
    unknown_names = sorted(adapter_names - drafter_tensors.keys())
    matrices = {name for name in drafter_tensors if ".lora_" in name}
    if not matrices:
        raise UserError(
            f"{draft.found.origin}: its base model has another tokenizer than the target, so an adapter has no effect; "
            "set checkpoint= to the base model"
        )
    if not all(bool(x.isfinite().all()) for name, x in drafter_tensors.items() if ".lora_" not in name):
        raise UserError(
            f"{draft.found.origin}: its base model {draft.options['path']!r} has no safetensors weights; put them there"
        )
    if not unknown_names and (fresh_names := sorted(matrices - adapter_names)):
        draft.notes.append(f"the adapter has no matrices for {listed(fresh_names)}: fresh ones are used, which change nothing")
    draft.tensors |= {name: tensor for name, tensor in drafter_tensors.items() if name not in adapter_names}


def _knows_parallel(checkpoint: ExternalCheckpoint) -> bool:
    return whole_model(checkpoint) and MASK in checkpoint.config


def _parallel_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    checkpoint.wants("spd_type", checkpoint.config.get("spd_type"), (None, "pard"), "which reads more than tokens")
    return options(checkpoint, target) | {"mask_token": checkpoint.number(MASK)}


def _knows_uno(checkpoint: ExternalCheckpoint) -> bool:
    """Only an export of ours says that it is one: an adapter of a draft model looks the same."""
    return checkpoint.adapter and checkpoint.record.get("family") == "uno"


def _uno_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    check_plain(checkpoint)
    target_modules = sorted(checkpoint.field("target_modules"))
    return {
        "lora_rank": checkpoint.number("r"),
        "lora_alpha": float(checkpoint.field("lora_alpha")),
        "lora_targets": target_modules,
    }


PLAIN = Importer("transformers", "draft_model", _plain, options, RENAMES, complete=complete, places=PLACES, usual=None)
LORA = Importer(
    "peft adapter",
    "draft_model",
    _adapter,
    _adapter_options,
    ADAPTED,
    complete=_complete_adapter,
    places=PLACES,
    usual=usual_lora,
)
PARALLEL = Importer(
    "transformers", "pard", _knows_parallel, _parallel_options, RENAMES, complete=complete, places=PLACES, usual=None
)
UNO = Importer("peft adapter", "uno", _knows_uno, _uno_options, UNO_NAMES, usual=usual_lora)
IMPORTERS = [PLAIN, LORA, PARALLEL, UNO]


MODEL = Format(PLAIN.name, files, PLAIN, refuse)
MASKED = Format(PARALLEL.name, parallel, PARALLEL, refuse, parallel_facts)
MATRICES = Format(LORA.name, adapter, LORA, refuse_adapter)
ROWS: Rows = {
    "draft_model": {
        "vllm": StackRow(MODEL, "draft_model"),
        "sglang": StackRow(MODEL, "STANDALONE"),
        "trtllm": StackRow(MODEL, "Draft_Target"),
        "transformers": StackRow(replace(MODEL, adapter=MATRICES)),
        "openvino": StackRow(MODEL, "draft_model"),
        "lmdeploy": NO_DRAFT_MODELS,
        "official": "a draft model has no layout of its own; format=transformers writes it",
    },
    "pard": {
        "vllm": StackRow(MASKED, "draft_model", {"parallel_drafting": True}),
        "trtllm": StackRow(MASKED, "PARD"),
        **dict.fromkeys(("sglang", "transformers", "llamacpp", "openvino"), ONE_BY_ONE),
        "lmdeploy": NO_DRAFT_MODELS,
        "official": "its code runs only pairs that it knows by name; format=vllm writes the same files",
    },
    "uno": {
        "vllm": "its loader is an open pull request (55947); SGLang serves it",
        "sglang": StackRow(
            Format(UNO.name, uno, UNO, refuse_uno),
            "UNO",
            note="SGLang takes it with one process: leave tensor and pipeline parallelism at 1.",
        ),
        "official": "SGLang serves it; format=sglang writes it",
    },
}
