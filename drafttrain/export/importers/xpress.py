"""XPress: vLLM's layout and that of speculators."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.dflash import COPIES, SHIFTED, speculators_options, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer, speculators
from drafttrain.export.layouts.xpress import HEAD, SPECULATORS
from drafttrain.model.target import Target


def _vllm(found: Foreign) -> bool:
    return found.has(f"{HEAD}.w1.weight", f"{HEAD}.mix.L")


def _vllm_options(found: Foreign, target: Target) -> dict[str, Any]:
    """The number of passes and of scored tokens are settings of vLLM, not of the drafter."""
    options = zlab_options(found, target) | _in_place(found)
    size = found.config.get("xpress_block_size")
    found.wants("xpress_block_size", size, (None, options["block_size"]), "but the blocks have another size")
    return options | {"rank": found.number("xpress_rank"), "mlp_hidden": found.number("xpress_mlp_hidden")}


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    rank, ratio = found.number("xpress_rank"), found.number("xpress_mlp_ratio")
    return speculators_options(found, target) | _in_place(found) | {"rank": rank, "mlp_hidden": ratio * rank}


def _in_place(found: Foreign) -> dict[str, Any]:
    found.wants(SHIFTED, found.config.get(SHIFTED), (None, False), "but slot 0 of this family drafts nothing")
    return {"slots": "in_place"}


ROWS = [
    Importer("vLLM", "xpress", _vllm, _vllm_options, shared=COPIES),
    Importer("speculators", "xpress", speculators("xpress"), _speculators_options, SPECULATORS, COPIES),
]
