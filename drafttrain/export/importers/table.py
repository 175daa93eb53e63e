"""All layouts that can be imported. Exactly one must recognise a directory."""

from __future__ import annotations

from drafttrain.core.errors import UserError
from drafttrain.export.importers import (
    dflash,
    dflash2,
    domino,
    draft_model,
    dspark,
    eagle,
    eagle3,
    hydra,
    jetspec,
    lilicorr,
    medusa,
    mlp_speculator,
    mtp,
    pard,
    peagle,
    redrafter,
    uno,
    xpress,
)
from drafttrain.export.importers.directory import Foreign
from drafttrain.export.importers.row import Importer

HEADS = (eagle3, peagle, eagle, medusa, hydra, redrafter, mlp_speculator, mtp)
BLOCKS = (dflash, dspark, dflash2, jetspec, domino, xpress, lilicorr)
MODULES = (*HEADS, *BLOCKS, draft_model, pard, uno)
IMPORTERS: list[Importer] = [row for module in MODULES for row in module.ROWS]


def recognised(found: Foreign) -> Importer:
    """The layout of a directory. Raises UserError where none, or more than one, recognises it.

    Files that several families could have written are of the family that our own export's record names.
    """
    fits = [row for row in IMPORTERS if row.knows(found)]
    fits = [row for row in fits if row.family == found.record.get("family")] or fits
    if len(fits) == 1:
        return fits[0]
    if fits:
        named = " and ".join(f"{row.name} ({row.family})" for row in fits)
        raise UserError(f"{found.origin}: could be {named}: {found.summary()}; keep one drafter's files in a directory")
    layouts = ", ".join(dict.fromkeys(f"{row.name} ({row.family})" for row in IMPORTERS))
    raise UserError(f"{found.origin}: no known kind of drafter: {found.summary()}; known: {layouts}")
