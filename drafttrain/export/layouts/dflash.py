"""DFlash: the authors' (z-lab) layout, which most serving stacks read, and the layouts of transformers and speculators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts.causal import causal_key, causal_layers, refuse_causal, windows
from drafttrain.export.layouts.llama import llama_fields, refuse_last_block, refuse_windows, window_fields
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.speculators import header
from drafttrain.export.layouts.target_ends import refuse_bias, refuse_embedding

SERVED = ("vllm", "sglang", "transformers", "speculators")  # stacks that read sliding windows
PARTS = ("vllm", "sglang", "speculators")  # stacks that read a vocabulary of the drafter's own
LAST = ("vllm", "lmdeploy")  # stacks that give out the last block's output
TRANSFORMERS = Renames(
    {"fc.{rest}": "encoder.fc.{rest}", "hidden_norm.{rest}": "encoder.output_norm_enc.{rest}", "{rest}": "{rest}"}
)


def refuse(source: ExportSource, scaled: tuple[str, ...] = ()) -> str | None:
    """Why this stack cannot load this drafter; None where it can. scaled: as in `refuse_embedding`."""
    return refuse_shifted(source) or refuse_sorted(source) or refuse_last(source, scaled=scaled, keyed=("official",))


def refuse_sorted(source: ExportSource) -> str | None:
    """Why TensorRT-LLM, which sorts the layer ids, would join the states in another order; None where it does not."""
    if source.stack != "trtllm" or source.layer_inputs == sorted(source.layer_inputs):
        return None
    return "its taps do not ascend, but TensorRT-LLM sorts them; train with ascending drafter.taps"


def refuse_shifted(source: ExportSource) -> str | None:
    """Why shifted slots cannot be loaded; None for slots in place."""
    if source.options["slots"] == "in_place":
        return None
    return "its slots are shifted, but loaders of this family read them in place; train with drafter.slots=in_place"


def refuse_last(
    source: ExportSource, per_layer: bool = False, scaled: tuple[str, ...] = (), keyed: tuple[str, ...] = ()
) -> str | None:
    """Why a stack that accepts shifted slots cannot load this drafter; None where it can.

    per_layer: as in `refuse_causal`. scaled: as in `refuse_embedding`. keyed: further stacks that read windows and `is_causal`.
    """
    if source.options.get("draft_vocab") is not None and source.stack not in PARTS:
        return f"it drafts a part of the vocabulary, which {source.stack} does not read; train with drafter.draft_vocab=null"
    windowed = refuse_windows(source, SERVED + keyed)
    taps = refuse_last_block(source, LAST) or windowed or refuse_causal(source, per_layer, keyed)
    return taps or refuse_embedding(source, scaled) or refuse_bias(source)


def lmdeploy_refuse(source: ExportSource) -> str | None:
    """Why LMDeploy cannot load this drafter. Of the targets known here it captures only Qwen3's states."""
    kind = source.target.model.config.model_type
    if kind != "qwen3":
        return f"LMDeploy captures no states of {kind} targets for this family, only of qwen3"
    if source.layer_inputs != sorted(source.layer_inputs):
        return "its taps do not ascend, as LMDeploy requires; train with ascending drafter.taps"
    return refuse(source)


def lmdeploy(source: ExportSource) -> Files:
    """The authors' layout, with the block size in `dflash_config`, as in their newer versions."""
    files = zlab(source)
    files.config["dflash_config"]["block_size"] = source.options["block_size"]
    return files


def zlab(source: ExportSource) -> Files:
    """The authors' layout."""
    return Files(zlab_config(source, "DFlashDraftModel"), vocabulary_typed(source), facts=facts(source))


def vocabulary_typed(source: ExportSource) -> dict[str, Tensor]:
    """The drafter's tensors, with the names of its own tokens, if it has them, in the types that loaders take."""
    types = {"d2t": torch.int64, "t2d": torch.bool}
    return {name: x.to(types[name]) if name in types else x for name, x in source.tensors.items()}


def zlab_config(source: ExportSource, architecture: str, **inner: Any) -> dict[str, Any]:
    """config.json of the authors' layout. inner: further fields of `dflash_config`."""
    key = causal_key(source)
    own = {"mask_token_id": mask_token(source), "target_layer_ids": outputs(source)}
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **block_fields(source),
        **({} if key is None else {"is_causal": key}),
        "num_target_layers": source.shape.blocks,
        **vocabulary_field(source),
        "dflash_config": own | ({} if key is None else {"causal": key}) | inner,
    }


def vocabulary_field(source: ExportSource) -> dict[str, Any]:
    """The size of the drafter's own vocabulary; nothing where it is the target's."""
    size = source.options.get("draft_vocab")
    return {} if size is None else {"draft_vocab_size": size}


def transformers(source: ExportSource) -> Files:
    """transformers' layout."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **block_fields(source),
        "mask_token_id": mask_token(source),
        "target_layer_ids": outputs(source),
    }
    if any(windows(source)):
        config["sliding_window"] -= 1  # it counts the positions before a query, without its own
    return Files(config, source.named(TRANSFORMERS), facts=facts(source))


def speculators(source: ExportSource) -> Files:
    """speculators' layout."""
    config = speculators_config(source, "dflash", "DFlashSpeculator")
    return Files(config, vocabulary_typed(source), facts=facts(source))


def speculators_config(source: ExportSource, algorithm: str, architecture: str) -> dict[str, Any]:
    """Speculators' configuration. Its layer ids name the blocks that read the states, unlike the authors' ids."""
    layers = source.options["layers"]
    inner = {"model_type": "qwen3", **llama_fields(source.layer_shape, layers, source.dtype)}
    return {
        **header(source, algorithm, architecture),
        "transformer_layer_config": inner | _kinds(source),
        "draft_vocab_size": source.shape.vocab_size,
        **vocabulary_field(source),
        "target_hidden_size": source.shape.hidden_size,
        "block_size": source.options["block_size"],
        "mask_token_id": mask_token(source),
        "aux_hidden_state_layer_ids": source.layer_inputs,
        "sample_from_anchor": source.options["slots"] == "shifted",
        # with false vLLM would treat the block as causal, in all layers
        "sliding_window_non_causal": not any(causal_layers(source)),
    }


def block_fields(source: ExportSource) -> dict[str, Any]:
    """The fields of the layers and of the block that the authors' and transformers' layouts share."""
    layers = source.options["layers"]
    return {
        **llama_fields(source.layer_shape, layers, source.dtype),
        "block_size": source.options["block_size"],
        **_kinds(source),
    }


def _kinds(source: ExportSource) -> dict[str, Any]:
    """What kind of attention each layer has. Written always, because stacks have different defaults."""
    layers = source.options["layers"]
    full = {"layer_types": ["full_attention"] * layers, "use_sliding_window": False}
    return full | window_fields(source.layer_shape, layers)


def outputs(source: ExportSource) -> list[int]:
    """The layer ids as blocks whose outputs are read."""
    return [k - 1 for k in source.layer_inputs]


def mask_token(source: ExportSource) -> int:
    """The mask token; by default the last token of the vocabulary."""
    mask = source.options["mask_token"]
    return source.shape.vocab_size - 1 if mask is None else int(mask)


def facts(source: ExportSource) -> dict[str, Any]:
    """The facts that the reader must find in addition to the golden ones."""
    own = {"windows": windows(source)} if any(windows(source)) else {}
    options = source.options
    return {
        "block size": options["block_size"],
        "mask token": mask_token(source),
        "causal layers": causal_layers(source),
        "slots": options["slots"],
        **own,
    }
