"""Frozen targets: how they are loaded and run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from drafttrain.core.errors import UserError
from drafttrain.core.limits import at_least, choice


@dataclass
class TargetOptions:
    """Which target to load, and how."""

    # embedded: the model in the wheel. hf: any transformers causal LM at `path`; a path implies hf
    name: str = choice("embedded", "hf")
    path: str | None = None  # directory or hub id, for hf
    revision: str | None = None
    # float32 | bfloat16 | float16 | auto: bfloat16 on a GPU, else float32
    dtype: str = choice("float32", "bfloat16", "float16", "auto")
    # fp8, int8, int4: quantise the blocks' linear maps at load time; the result is the target
    weights: str | None = choice(None, "fp8", "int8", "int4")
    device: str = "auto"  # auto | cpu | cuda | cuda:1 ... | xpu
    # transformers' attn_implementation: sdpa | eager. auto: sdpa where the model has it, else eager
    attention: str = choice("auto", "sdpa", "eager")
    # fast: our own forward, for the Llama family. hf: transformers'. auto: fast where it can
    runner: str = choice("auto", "fast", "hf")
    trust_remote_code: bool = False
    # processes that share one target, each with its own GPU; equals the number of started processes
    tensor_parallel: int = at_least(1, 1)
    # as tensor_parallel, for a mixture of experts: each process has a share of every block's experts
    expert_parallel: int = at_least(1, 1)
    prefetch: bool = False  # fit: start the next batch's target forward before the drafter's step; on a GPU both overlap
    # what drafters read at an image's tokens: the target's image embeddings (fused), or the embedding of its placeholder token
    # (docs/images.md)
    image_inputs: str = choice("fused", "placeholder")
    # LoRA adapters that the target is served with: {NAME: FOLDER}; data and prompts name theirs in a column `adapter`
    adapters: dict[str, str] = field(default_factory=dict)
    # fit: replicated | zero3 | tensor_parallel | expert_parallel; auto: from free memory
    placement: str = choice("auto", "replicated", "zero3", "tensor_parallel", "expert_parallel")

    def __post_init__(self) -> None:
        if self.path is not None and self.name == "embedded":
            self.name = "hf"

    @property
    def shared_by(self) -> tuple[str, int]:
        """The setting that makes processes share one target, and their number."""
        if self.expert_parallel != 1:
            return "target.expert_parallel", self.expert_parallel
        return "target.tensor_parallel", self.tensor_parallel


def check_there(options: TargetOptions) -> None:
    """Raise UserError for a path that does not exist, and that is no hub id."""
    path = options.path
    if options.name != "hf" or not path or os.path.exists(os.path.expanduser(path)):
        return
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"target.path {path!r} does not exist; set it to a model directory or a hub id")


def unknown_adapter(name: str, known: Iterable[str]) -> str:
    """The message for an adapter that the target does not have."""
    names = ", ".join(known)
    return f"the adapter {name!r} is none of target.adapters ({names or 'none is set'}); set target.adapters={{{name}: FOLDER}}"
