"""DSpark: the layouts of the authors (DeepSpec), also with the fields in `dflash_config`, and of speculators."""

from __future__ import annotations

from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.block_fields import field_of, number_of
from drafttrain.export.importers.dflash import PART, SHIFTED, speculators_options, zlab_options
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.eagle3 import store_vocabulary
from drafttrain.export.importers.row import TYPE, ConvertedDrafter, Importer, speculators
from drafttrain.model.target import Target

SHIFT = "shift_label"


def _deepspec(found: Foreign) -> bool:
    return found.has("markov_head.markov_w1.weight") and TYPE not in found.config


def _deepspec_options(found: Foreign, target: Target) -> dict[str, Any]:
    """Some files have `shift_label` for `sample_from_anchor`."""
    shifted, given = found.flag(SHIFT, field_of(found, SHIFT, True)), field_of(found, SHIFTED)
    if field_of(found, SHIFT) is not None and given not in (None, shifted):
        raise UserError(f"{found.origin}: {SHIFT} is {shifted} and {SHIFTED} {given}, which contradict each other; correct one")
    return zlab_options(found, target, shifted, part=True) | _own(found)


def _note(draft: ConvertedDrafter) -> None:
    """All loaders have the same default for these files, unlike for speculators'."""
    store_vocabulary(draft)
    if field_of(draft.found, SHIFTED) is None and field_of(draft.found, SHIFT) is None:
        draft.notes.append(f"{draft.found.config_name} does not say {SHIFTED}: true, as vLLM, SGLang and llama.cpp take it")


def _speculators_options(found: Foreign, target: Target) -> dict[str, Any]:
    return speculators_options(found, target, shifted=None, part=True) | _own(found)


def _own(found: Foreign) -> dict[str, Any]:
    kind = field_of(found, "markov_head_type", "vanilla")
    found.wants("markov_head_type", kind, ("vanilla",), "but here the token before gives a plain bias")
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        found.wants(key, field_of(found, key, True), (True,), "but the confidence here reads the state and the token before")
    return {"rank": number_of(found, "markov_rank")}


ROWS = [
    Importer("DeepSpec", "dspark", _deepspec, _deepspec_options, **PART | {"mend": _note}),
    Importer("speculators", "dspark", speculators("dspark"), _speculators_options, **PART),
]
