"""The options of draft_model."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import TreeOptions


@dataclass
class DraftModelOptions(TreeOptions):
    """Where the draft model comes from, which of its weights are trained, and how it drafts."""

    family: str = "draft_model"
    tree: str = "chain"
    source: str = "pruned"  # pruned: the target's first blocks. scratch: its architecture, fresh weights. hf: `path`
    path: str | None = None  # hf: directory or hub id of a causal LM, safetensors
    revision: str | None = None
    blocks: int = 3  # pruned, scratch
    hidden_size: int | None = None  # scratch; null: the target's
    lora_rank: int = 0  # of adapters on every linear map but the head (arXiv 2106.09685); 0: all weights are trained
    lora_alpha: int = 16  # adapters count alpha / rank
    quantize: str | None = None  # int8, int4: of the weights that it decodes with; measured next to the unquantised ones
    draft_length: int = 4


OPTIONS = DraftModelOptions
