"""Fresh drafters of every family for a random target of four blocks, for the contract tests and the fault campaigns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.model.drafter import Drafter
from drafttrain.targets.hf import HFTarget

NAMES = sorted(families())
SHAPES: dict[str, dict[str, Any]] = {
    "medusa": {"heads": 3, "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "eagle3": {"target_layer_ids": [0, 1, 3], "draft_length": 4},
    "eagle": {
        "steps": 3,
        "tree": "static",
        "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]],
    },
    "draft_model": {"blocks": 3},
    "hydra": {"heads": 3, "layers": 2, "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]},
    "redrafter": {"width": 3, "length": 3, "dropped": True},
    "peagle": {"target_layer_ids": [0, 1, 3], "draft_length": 4, "layers": 2, "retention": 1.0},
    "pard": {"blocks": 3, "draft_length": 4, "retention": 1.0},
    "uno": {"draft_length": 3, "retention": 1.0},
    "dflash": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3]},
    "dspark": {"block_size": 4, "layers": 2, "target_layer_ids": [0, 1, 3], "rank": 8},
    "dflash2": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3], "rank": 8, "candidates": 8},
    "domino": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3], "rank": 8, "state": 12},
    "xpress": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3], "rank": 8},
    "dflare": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3]},
    "dfly": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3], "hidden_correction_size": 12},
    "lilicorr": {
        "block_size": 5,
        "layers": 2,
        "target_layer_ids": [0, 1, 3],
        "candidates": 8,
        "hidden_size": 16,
        "factor_dim": 12,
        "heads": 2,
        "divergence_weight": 0.5,
    },
    "jetspec": {"block_size": 5, "layers": 2, "target_layer_ids": [0, 1, 3], "tree": "chain"},
    "mlp_speculator": {"paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]},
    "prompt_lookup": {"draft_length": 5},
    "suffix": {"depth": 4, "draft_length": 5, "past": 0},
    "mtp": {"tree": "static", "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]},
    "mtp_native": {"source": "fresh", "tree": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]},
    "early_exit": {"blocks": 2, "adapter": True},
    "cascade": {"middle": {"family": "draft_model", "blocks": 3}, "inner": {"family": "prompt_lookup", "draft_length": 7}},
}


def built(name: str, target: HFTarget, small: bool = False, **options: Any) -> Drafter:
    """A fresh drafter with the family's default options, or with those of its small shape where the defaults do not fit.

    small: of its small shape in any case. options: replace its own. Raises UserError where neither fits the target.
    """
    family = families()[name]
    shape = SHAPES.get(name, {})
    if not small:
        try:
            return family.build(family.options(**options), target)
        except UserError:
            if not shape:
                raise
    return family.build(family.options(**shaped(name, options)), target)


def shaped(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The family's small shape with these options. Its paths are a static tree's, and other trees take none."""
    static = options.get("tree", "static") == "static"
    return {key: value for key, value in SHAPES.get(name, {}).items() if static or key != "paths"} | options


def build(name: str, target: HFTarget, noise: float = 0.0, **options: Any) -> Drafter:
    """A fresh drafter. With noise its weights are perturbed, so that none has a special value. options: replace its own."""
    family = families()[name]
    torch.manual_seed(1)
    drafter = family.build(family.options(**shaped(name, options)), target)
    shake(drafter.parameters(), noise, least=0.02)
    return drafter.eval()


def shake(parameters: Iterable[torch.nn.Parameter], noise: float, least: float = 0.0) -> None:
    """Add noise in proportion to each parameter's spread, which counts as `least` or more."""
    for parameter in parameters:
        spread = parameter.data.std() if parameter.numel() > 1 else parameter.data.new_zeros(())
        parameter.data.add_(noise * torch.randn_like(parameter) * spread.clamp_min(least))
