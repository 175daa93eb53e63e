"""Fields of block drafters' configurations, which some projects write at the top level and others in `dflash_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import TRAINED_FOR, same_size

NESTED = "dflash_config"
ROUNDING = 2**-7  # relative, of a factor in bfloat16


def field_of(found: Foreign, key: str, default: Any = None) -> Any:
    """A field's value in either place. Raises UserError where the places contradict each other."""
    inner = found.config.get(NESTED) or {}
    if not isinstance(inner, Mapping):
        raise UserError(f"{found.origin}: {NESTED} is {inner!r}; an object is needed")
    values = [holder[key] for holder in (found.config, inner) if holder.get(key) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise UserError(
            f"{found.origin}: {key} is {values[0]!r} at the top level and {values[1]!r} in {NESTED}; correct one of them"
        )
    return values[0] if values else default


def inside(found: Foreign, key: str) -> tuple[str, ...]:
    """Where the field is, as `Foreign.field` takes it."""
    field_of(found, key)
    top = found.config.get(key) is not None or NESTED not in found.config
    return () if top else (NESTED,)


def number_of(found: Foreign, key: str) -> int:
    """A count of at least 1 in either place. Raises UserError where it is missing or another value."""
    return found.number(key, *inside(found, key))


def causal_options(found: Foreign, windows: bool) -> dict[str, Any]:
    """Whether slots see later slots. windows: some layers have one.

    `is_causal` is for all layers, and counts first, as in vLLM and SGLang; then `causal` and `causal_head` in `dflash_config`.
    Without them layers with a window are causal, and the others not.
    """
    field_of(found, "causal")  # raises if dflash_config is no object
    inner = found.config.get(NESTED) or {}
    keys = {"is_causal": found.config.get("is_causal")} | {key: inner.get(key) for key in ("causal", "causal_head")}
    given = next((found.flag(key, value) for key, value in keys.items() if value is not None), None)
    return {"causal": bool(given)} | ({"causal_windows": given is None} if windows and not given else {})


def check_factor(found: Foreign, key: str, own: float, absent: float) -> None:
    """Raise UserError unless the files do to embeddings or logits what the target does to its own: drafters here use these.

    own: the target's factor or cap. absent: what loaders take where the field is missing.
    """
    value = field_of(found, key, absent)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{found.origin}: {key} is {value!r}; a number is needed")
    if not math.isclose(value, own, rel_tol=ROUNDING):
        raise UserError(
            f"{found.origin}: {key} is {value:g}, this target's own is {own:g}, which drafters here use; {TRAINED_FOR}"
        )


def check_vocabulary(found: Foreign, vocab: int) -> None:
    """Raise UserError for a drafter that drafts only some of the target's tokens."""
    size = field_of(found, "draft_vocab_size")
    if size is None and found.has("d2t"):
        size = len(found.tensors["d2t"])
    if isinstance(size, int) and size < vocab:
        raise UserError(
            f"{found.origin}: it drafts {size} of the target's {vocab} tokens, which here only dflash and dspark do, with an "
            "lm_head of their own; take one without a draft vocabulary"
        )
    same_size(found, "draft_vocab_size", size, vocab)
