"""Fields of block drafters: written, and read where some projects write them at the top level and others in `dflash_config`.

Whether slots see later slots of their block depends on keys, and on the stacks that read them. Without a key vLLM, SGLang and
z-lab's code take layers with a sliding window as causal, and the others not. `is_causal` is for all layers, in each. vLLM reads
`dflash_config.causal` too, where `is_causal` is missing. llama.cpp has one flag for all layers. speculators has one for its
layers with windows, which vLLM takes for all layers, except in DSpark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Reads
from drafttrain.export.layers import windows_of
from drafttrain.export.target_ends import TRAINED_FOR, same_size

NESTED = "dflash_config"
ROUNDING = 2**-7  # relative, of a factor in bfloat16


def windows(source: ExportSource) -> list[int | None]:
    """Each layer's sliding window; empty where no layer has one."""
    return windows_of(source.layer_shape, source.options["layers"])


def causal_layers(source: ExportSource) -> list[bool]:
    """Whether slots of each layer see no later slot of their block."""
    options = source.options
    if options.get("causal", False):
        return [True] * options["layers"]
    causal_windows = bool(options.get("causal_windows", True))
    return [causal_windows and window is not None for window in windows(source) or [None] * options["layers"]]


def causal_key(source: ExportSource) -> bool | None:
    """The value of `is_causal`; None where the stacks' own choice, layer by layer, is right."""
    if source.options.get("causal", False):
        return True
    return False if any(windows(source)) and not any(causal_layers(source)) else None


def refuse_causal(source: ExportSource, reads: Reads, per_layer: bool = False) -> str | None:
    """Why this stack would take other layers as causal than the drafter has; None where it takes the same.

    reads: has "causal" for stacks that read a flag of all layers. per_layer: in speculators' layout each layer is causal if it
    has a window, whatever its flag says.
    """
    all_causal, layer_windows = source.options.get("causal", False), windows(source)
    if "causal" in reads or not (all_causal or any(layer_windows)):
        return None
    causal = causal_layers(source)
    if source.stack == "transformers":
        scope, option = ("all layers", "causal") if all_causal else ("its layers with windows", "causal_windows")
        reason = f"slots of {scope} see no later slot; transformers' do: train with drafter.{option}=false"
        return reason if any(causal) else None
    if source.stack == "speculators":
        return _refuse_speculators(all_causal, layer_windows, causal, per_layer)
    return f"slots see no later slot of their block, which {source.stack} is not known to read; train with drafter.causal=false"


def _refuse_speculators(all_causal: bool, layer_windows: list[int | None], causal: list[bool], per_layer: bool) -> str | None:
    if all_causal and not (layer_windows and all(layer_windows)):
        return (
            "slots of all layers see no later slot; speculators has a flag only for layers with windows: use format=vllm, or "
            "train with drafter.causal=false"
        )
    if per_layer and not any(causal):
        return "vLLM makes slots of its layers with windows causal; use format=vllm, or train with drafter.causal_windows=true"
    if not per_layer and any(causal) and not all(causal):
        return (
            "vLLM would read all layers of this layout as causal, those without a window too; use format=vllm, or train "
            "without drafter.layer.full_attention_layers"
        )
    return None


def field_of(found: ExternalCheckpoint, key: str, default: Any = None) -> Any:
    """A field's value in either place. Raises UserError where the places contradict each other."""
    dflash_config = found.config.get(NESTED) or {}
    if not isinstance(dflash_config, Mapping):
        raise UserError(f"{found.origin}: {NESTED} is {dflash_config!r}; an object is needed")
    values = [section[key] for section in (found.config, dflash_config) if section.get(key) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise UserError(
            f"{found.origin}: {key} is {values[0]!r} at the top level and {values[1]!r} in {NESTED}; correct one of them"
        )
    return values[0] if values else default


def inside(found: ExternalCheckpoint, key: str) -> tuple[str, ...]:
    """Where the field is, as `ExternalCheckpoint.field` takes it."""
    field_of(found, key)
    top_level = found.config.get(key) is not None or NESTED not in found.config
    return () if top_level else (NESTED,)


def number_of(found: ExternalCheckpoint, key: str) -> int:
    """A count of at least 1 in either place. Raises UserError where it is missing or another value."""
    return found.number(key, *inside(found, key))


def causal_options(found: ExternalCheckpoint, windows: bool) -> dict[str, Any]:
    """Whether slots see later slots. windows: some layers have one.

    `is_causal` is for all layers, and counts first, as in vLLM and SGLang; then `causal` and `causal_head` in `dflash_config`.
    Without them layers with a window are causal, and the others not.
    """
    field_of(found, "causal")  # raises if dflash_config is no object
    dflash_config = found.config.get(NESTED) or {}
    flags = {"is_causal": found.config.get("is_causal")} | {key: dflash_config.get(key) for key in ("causal", "causal_head")}
    causal = next((found.flag(key, value) for key, value in flags.items() if value is not None), None)
    return {"causal": bool(causal)} | ({"causal_windows": causal is None} if windows and not causal else {})


def check_factor(found: ExternalCheckpoint, key: str, own: float, absent: float) -> None:
    """Raise UserError unless the files do to embeddings or logits what the target does to its own: drafters here use these.

    own: the target's factor or cap. absent: what loaders take where the field is missing.
    """
    value = field_of(found, key, absent)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{found.origin}: {key} is {value!r}; a number is needed")
    if not math.isclose(value, own, rel_tol=ROUNDING):
        raise UserError(
            f"{found.origin}: {key} is {value:g}, this target's own is {own:g}, which drafters here use; {TRAINED_FOR}"
        )


def check_vocabulary(found: ExternalCheckpoint, vocab: int) -> None:
    """Raise UserError for a drafter that drafts only some of the target's tokens."""
    size = field_of(found, "draft_vocab_size")
    if size is None and found.has("d2t"):
        size = len(found.tensors["d2t"])
    if isinstance(size, int) and size < vocab:
        raise UserError(
            f"{found.origin}: it drafts {size} of the target's {vocab} tokens, which here only dflash and dspark do, with an "
            "lm_head of their own; take one without a draft vocabulary"
        )
    same_size(found, "draft_vocab_size", size, vocab)
