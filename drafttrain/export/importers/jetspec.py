"""JetSpec: DFlash's layout, with its own key for causal blocks."""

from __future__ import annotations

from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.dflash import COPIES, causal_head, plain, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer
from drafttrain.model.target import Target


def _knows(found: Foreign) -> bool:
    return plain(found) and causal_head(found)


def _options(found: Foreign, target: Target) -> dict[str, Any]:
    options = zlab_options(found, target)
    if not options["causal"]:
        raise UserError(
            f"{found.origin}: dflash_config's causal_head is true, but is_causal or causal, which engines follow, is false; "
            "correct one of them"
        )
    return options


ROWS = [Importer("JetSpec", "jetspec", _knows, _options, shared=COPIES)]
