"""DFlash: the authors' (z-lab) layout, which most serving stacks read, and the layouts of transformers and speculators."""

from __future__ import annotations

from typing import Any

from drafttrain.export.files import Files, Source
from drafttrain.export.layouts.llama import llama_fields, refuse_last_block, refuse_windows, window_fields, windows_of
from drafttrain.export.layouts.renames import Renames
from drafttrain.export.layouts.speculators import header

SERVED = ("vllm", "sglang", "transformers", "speculators")  # stacks that read sliding windows
TRANSFORMERS = Renames(
    {"fc.{rest}": "encoder.fc.{rest}", "hidden_norm.{rest}": "encoder.output_norm_enc.{rest}", "{rest}": "{rest}"}
)


def refuse(source: Source) -> str | None:
    """Why this stack cannot load this drafter; None where it can."""
    if source.options["slots"] != "in_place":
        return "its slots are shifted, but loaders of this family read them in place; train with drafter.slots=in_place"
    return refuse_last(source)


def refuse_last(source: Source) -> str | None:
    """Why a stack that accepts shifted slots cannot load this drafter; None where it can."""
    return refuse_last_block(source, ("vllm", "lmdeploy")) or _refuse_windows(source)


def refuse_per_layer(source: Source) -> str | None:
    """As `refuse_last`, for a stack that takes layers with windows as causal and the others not, whatever the flag says."""
    if (reason := refuse_last_block(source, ("vllm", "lmdeploy")) or refuse_windows(source, SERVED)) is not None:
        return reason
    if any(_windows(source)) and not _causal(source):
        return "vLLM makes slots of its layers with windows causal; train with drafter.causal_windows=true"
    return None


def _refuse_windows(source: Source) -> str | None:
    """transformers' sliding layers see the whole block. vLLM reads one flag of speculators' layout for all layers."""
    if (reason := refuse_windows(source, SERVED)) is not None:
        return reason
    windows, causal = _windows(source), _causal(source)
    if not any(windows):
        return None
    if source.stack == "transformers" and causal:
        return "slots of its layers with windows see no later slot; transformers' do: train with drafter.causal_windows=false"
    if source.stack == "speculators" and causal and not all(windows):
        return (
            "vLLM would read all layers of this layout as causal, those without a window too; use format=vllm, or train "
            "without drafter.layer.full_attention_layers"
        )
    return None


def _windows(source: Source) -> list[int | None]:
    return windows_of(source.layer_shape, source.options["layers"])


def _causal(source: Source) -> bool:
    """Whether slots of layers with windows see no later slot."""
    return bool(source.options.get("causal_windows", True))


def lmdeploy_refuse(source: Source) -> str | None:
    """Why LMDeploy cannot load this drafter. Of the targets known here it captures only Qwen3's states."""
    kind = source.opened.loaded.target.model.config.model_type
    if kind != "qwen3":
        return f"LMDeploy captures no states of {kind} targets for this family, only of qwen3"
    if source.layer_inputs != sorted(source.layer_inputs):
        return "its taps do not ascend, as LMDeploy requires; train with ascending drafter.taps"
    return refuse(source)


def lmdeploy(source: Source) -> Files:
    """The authors' layout, with the block size in `dflash_config`, as in their newer versions."""
    files = zlab(source)
    files.config["dflash_config"]["block_size"] = source.options["block_size"]
    return files


def zlab(source: Source) -> Files:
    """The authors' layout."""
    return Files(zlab_config(source, "DFlashDraftModel"), source.tensors, facts=facts(source))


def zlab_config(source: Source, architecture: str, **inner: Any) -> dict[str, Any]:
    """config.json of the authors' layout. inner: further fields of `dflash_config`."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **_fields(source),
        **({"is_causal": False} if any(_windows(source)) and not _causal(source) else {}),
        "num_target_layers": source.shape.blocks,
        "dflash_config": {"mask_token_id": mask_token(source), "target_layer_ids": _ids(source), **inner},
    }


def transformers(source: Source) -> Files:
    """transformers' layout."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **_fields(source),
        "mask_token_id": mask_token(source),
        "target_layer_ids": _ids(source),
    }
    if any(_windows(source)):
        config["sliding_window"] -= 1  # it counts the positions before a query, without its own
    return Files(config, source.named(TRANSFORMERS), facts=facts(source))


def speculators(source: Source) -> Files:
    """speculators' layout."""
    return Files(speculators_config(source, "dflash", "DFlashSpeculator"), source.tensors, facts=facts(source))


def speculators_config(source: Source, algorithm: str, architecture: str) -> dict[str, Any]:
    """Speculators' configuration. Its layer ids name the blocks that read the states, unlike the authors' ids."""
    layers = source.options["layers"]
    inner = {"model_type": "qwen3", **llama_fields(source.layer_shape, layers, source.dtype)}
    return {
        **header(source, algorithm, architecture),
        "transformer_layer_config": inner | _kinds(source),
        "draft_vocab_size": source.shape.vocab_size,
        "target_hidden_size": source.shape.hidden_size,
        "block_size": source.options["block_size"],
        "mask_token_id": mask_token(source),
        "aux_hidden_state_layer_ids": source.layer_inputs,
        "sample_from_anchor": source.options["slots"] == "shifted",
        # with false vLLM would treat the block as causal, in all layers
        "sliding_window_non_causal": not (any(_windows(source)) and _causal(source)),
    }


def _fields(source: Source) -> dict[str, Any]:
    layers = source.options["layers"]
    return {
        **llama_fields(source.layer_shape, layers, source.dtype),
        "block_size": source.options["block_size"],
        **_kinds(source),
    }


def _kinds(source: Source) -> dict[str, Any]:
    """What kind of attention each layer has. Written always, because stacks have different defaults."""
    layers = source.options["layers"]
    full = {"layer_types": ["full_attention"] * layers, "use_sliding_window": False}
    return full | window_fields(source.layer_shape, layers)


def _ids(source: Source) -> list[int]:
    return [k - 1 for k in source.layer_inputs]


def mask_token(source: Source) -> int:
    """The mask token; by default the last token of the vocabulary."""
    mask = source.options["mask_token"]
    return source.shape.vocab_size - 1 if mask is None else int(mask)


def facts(source: Source) -> dict[str, Any]:
    """The facts that the reader must find in addition to the golden ones."""
    windows = _windows(source)
    own = {"windows": windows, "causal windows": _causal(source)} if any(windows) else {}
    return {"block size": source.options["block_size"], "mask token": mask_token(source), **own}
