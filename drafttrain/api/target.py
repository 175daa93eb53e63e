"""Load a target."""

from __future__ import annotations

from pathlib import Path

from drafttrain.core.limits import check_limits
from drafttrain.targets import TargetOptions
from drafttrain.targets import load as targets
from drafttrain.targets.load import LoadedTarget


def load_target(
    path: str | Path = "embedded",
    *,
    dtype: str = "float32",
    device: str = "auto",
    revision: str | None = None,
    weights: str | None = None,
    attention: str = "auto",
    runner: str = "auto",
    trust_remote_code: bool = False,
) -> LoadedTarget:
    """Load a frozen target with its tokenizer.

    Args:
        path: `embedded` (the 5.5M-parameter model in the package), a directory, or a hub id of a transformers causal LM.
        dtype: `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...
        revision: branch, tag or commit on the hub.
        weights: `fp8`, `int8` or `int4` quantises the linear maps of the blocks. The quantised model is then the target.
        attention: transformers' `attn_implementation`: `sdpa`, `eager`, or `auto`.
        runner: `fast` (drafttrain's own forward, for the Llama family), `hf` (transformers'), or `auto`.
        trust_remote_code: run code that comes with the model.

    Returns:
        The target. `.tokenizer` is its tokenizer, `.description` names its shape and its weights.

    Raises:
        UserError: The path has no usable model, or two options contradict each other.
    """
    name = "embedded" if str(path) == "embedded" else "hf"
    options = TargetOptions(
        name=name,
        path=None if name == "embedded" else str(path),
        revision=revision,
        dtype=dtype,
        weights=weights,
        device=device,
        attention=attention,
        runner=runner,
        trust_remote_code=trust_remote_code,
    )
    check_limits("target", options)
    return targets.load_target(options)
