"""The options of jetspec."""

from __future__ import annotations

from dataclasses import dataclass

from drafttrain.drafters.common.options import BlockOptions


@dataclass
class JetSpecOptions(BlockOptions):
    family: str = "jetspec"
    tree: str = "best_first"
    causal: bool = True
    weights: str = "uniform"


OPTIONS = JetSpecOptions
