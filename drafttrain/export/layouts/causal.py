"""Whether slots see later slots of their block: in which layers, the keys that say so, and the stacks that read them.

Without a key vLLM, SGLang and z-lab's code take layers with a sliding window as causal, and the others not. `is_causal` is for
all layers, in each. vLLM reads `dflash_config.causal` too, where `is_causal` is missing. llama.cpp has one flag for all layers.
speculators has one for its layers with windows, which vLLM takes for all layers, except in DSpark.
"""

from __future__ import annotations

from drafttrain.export.files import ExportSource
from drafttrain.export.layouts.llama import windows_of

KEYED = ("vllm", "sglang", "llamacpp")  # stacks that read a flag of all layers


def windows(source: ExportSource) -> list[int | None]:
    """Each layer's sliding window; empty where no layer has one."""
    return windows_of(source.layer_shape, source.options["layers"])


def causal_layers(source: ExportSource) -> list[bool]:
    """Whether slots of each layer see no later slot of their block."""
    options = source.options
    if options.get("causal", False):
        return [True] * options["layers"]
    of_windows = bool(options.get("causal_windows", True))
    return [of_windows and window is not None for window in windows(source) or [None] * options["layers"]]


def causal_key(source: ExportSource) -> bool | None:
    """The value of `is_causal`; None where the stacks' own choice, layer by layer, is right."""
    if source.options.get("causal", False):
        return True
    return False if any(windows(source)) and not any(causal_layers(source)) else None


def refuse_causal(source: ExportSource, per_layer: bool = False, keyed: tuple[str, ...] = ()) -> str | None:
    """Why this stack would take other layers as causal than the drafter has; None where it takes the same.

    per_layer: in speculators' layout each layer is causal if it has a window, whatever its flag says. keyed: further stacks
    that read a flag of all layers.
    """
    whole, of_windows = source.options.get("causal", False), windows(source)
    if source.stack in KEYED + keyed or not (whole or any(of_windows)):
        return None
    causal = causal_layers(source)
    if source.stack == "transformers":
        where, option = ("all layers", "causal") if whole else ("its layers with windows", "causal_windows")
        reason = f"slots of {where} see no later slot; transformers' do: train with drafter.{option}=false"
        return reason if any(causal) else None
    if source.stack == "speculators":
        return _refuse_speculators(whole, of_windows, causal, per_layer)
    return f"slots see no later slot of their block, which {source.stack} is not known to read; train with drafter.causal=false"


def _refuse_speculators(whole: bool, of_windows: list[int | None], causal: list[bool], per_layer: bool) -> str | None:
    if whole and not (of_windows and all(of_windows)):
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
