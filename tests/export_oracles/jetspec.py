"""JetSpec as its stacks read it: DFlash's files, with causal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.export_oracles import dflash
from tests.export_oracles.dflash import Reader
from tests.export_oracles.parts import Config, Point, Reading, TargetParts, Tensors

NAMES = ("fc", "hidden_norm")


def reader(stack: str) -> Reader:
    """As this stack reads them. The authors' code takes `dflash_config.causal_head`, the others their keys of DFlash."""
    return _official if stack == "official" else dflash.zlab(stack)


def _official(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    config = Config.of(directory)
    own = config.inside("dflash_config", "layer ids")
    dflash.check_raw(config, "DFlashDraftModel", target)
    config.expect("layer_types", ["full_attention"] * config.get("num_hidden_layers", "config"), "layer types")
    block = dflash.raw_block(config, own, None)
    block = replace(block, causal=bool(own.values.get("causal_head", False)))
    return dflash.reading(block, Tensors(directory), NAMES, target, points)
