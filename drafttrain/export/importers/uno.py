"""UNO: a peft adapter of the target. Only an export of ours says so: an adapter of a draft model looks the same."""

from __future__ import annotations

from typing import Any

from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.draft_model import check_plain, usual_lora
from drafttrain.export.importers.row import Importer
from drafttrain.export.layouts.uno import RENAMES
from drafttrain.model.target import Target


def _knows(found: Foreign) -> bool:
    return found.adapter and found.record.get("family") == "uno"


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    check_plain(found)
    kinds = sorted(found.field("target_modules"))
    return {"lora_rank": found.number("r"), "lora_alpha": float(found.field("lora_alpha")), "lora_targets": kinds}


ROWS = [Importer("peft adapter", "uno", _knows, _options, RENAMES, usual=usual_lora)]
