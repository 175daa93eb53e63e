"""Which stacks draft for targets of text and images, by family: read from the loaders of vLLM 0.33 and SGLang 0.5.23."""

from __future__ import annotations

from drafttrain.targets.vision import ARCHITECTURES

QWEN = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
SERVED = {
    ("eagle3", "vllm"): QWEN,
    ("eagle3", "sglang"): (*QWEN, "Gemma3ForConditionalGeneration"),
    ("dflash", "vllm"): QWEN[1:],
    ("dflash", "sglang"): QWEN[1:],
}


def refuse(family: str, stack: str, architecture: str) -> str | None:
    """Why a stack does not draft for this target; None where it does, and for targets of text alone."""
    if architecture not in ARCHITECTURES or architecture in SERVED.get((family, stack), ()):
        return None
    able = sorted({name for (own, name), served in SERVED.items() if own == family and architecture in served})
    way_out = f"export to {' or '.join(able)}" if able else "measure it with drafttrain measure"
    return f"it is not known to draft with this family for {architecture}, which reads images; {way_out}"
