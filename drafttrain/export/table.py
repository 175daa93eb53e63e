"""Which serving stacks load each family, in which format, or why not: the rows of all formats."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.core.errors import UserError
from drafttrain.drafters import families
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource
from drafttrain.export.format import Format, Importer, Rows, StackRow
from drafttrain.export.formats import (
    dflash,
    dflash2,
    dflash_heads,
    dspark,
    eagle,
    eagle3,
    gguf,
    hydra,
    medusa,
    mlp_speculator,
    mtp,
    redrafter,
    stitched,
    transformers,
)
from drafttrain.export.serve import LARGEST, STACKS, ServingCommand, draft_lengths
from drafttrain.targets.vision import ARCHITECTURES

HEADS = (eagle3, eagle, medusa, hydra, redrafter, mlp_speculator)
BLOCKS = (dflash, dspark, dflash2, dflash_heads)
MODELS = (transformers, mtp)
IMPORTERS: list[Importer] = [importer for module in (*HEADS, mtp, *BLOCKS, transformers) for importer in module.IMPORTERS]

NO_ROW = "no layout is written for it yet; add its rows to a file of drafttrain/export/formats"


def joined(formats: Sequence[Rows]) -> Rows:
    """All rows. A stack that no row names has no loader, for its usual reason."""
    table: Rows = {}
    for format_rows in formats:
        for family, row in format_rows.items():
            table.setdefault(family, {}).update(row)
    return {family: {name: row.get(name, stack.usual) for name, stack in STACKS.items()} for family, row in table.items()}


TABLE: Rows = joined([module.ROWS for module in (*HEADS, *BLOCKS, *MODELS, stitched, gguf)])
TABLE |= {name: dict.fromkeys(STACKS, family.unserved) for name, family in families().items() if family.unserved}


def rows(family: str) -> dict[str, StackRow | str]:
    """A family's rows by stack; for a family without rows the reason is that it has none."""
    return TABLE.get(family) or dict.fromkeys(STACKS, NO_ROW)


def loads(family: str) -> list[str]:
    """The stacks that load a family."""
    return [stack for stack, row in rows(family).items() if isinstance(row, StackRow)]


def load_it(stacks: Sequence[str]) -> str:
    """Words for a message: these stacks load it."""
    return f"{', '.join(stacks)} {'loads' if len(stacks) == 1 else 'load'} it"


def stacks_for(family: str, stack: str) -> list[str]:
    """The stacks to export to. stack: one of them, or `all`.

    Raises UserError for an unknown stack, for one that does not load the family, and for a family that no stack loads.
    """
    if stack != "all" and stack not in STACKS:
        raise UserError(f"format is {stack!r}; choose one of {', '.join(STACKS)}, or all")
    supported = loads(family)
    if not supported:
        raise UserError(f"{family} cannot be exported: {next(iter(rows(family).values()))}")
    if stack == "all":
        return supported
    reason = rows(family)[stack]
    if isinstance(reason, str):
        raise UserError(f"{family} cannot be exported to {stack}: {reason}; {load_it(supported)}")
    return [stack]


def row_of(family: str, stack: str) -> StackRow:
    """The row of a family for a stack that loads it."""
    row = rows(family)[stack]
    assert isinstance(row, StackRow), "the stack is one of `loads`"
    return row


def format_of(family: str, stack: str) -> Format:
    """The format of a family for a stack that loads it."""
    return row_of(family, stack).format


def refuse_pictures(source: ExportSource) -> str | None:
    """Why a stack does not draft for a target that reads images; None where it does, and for targets of text, even if they can
    read images too."""
    family, architecture = source.opened.meta.family, source.target_architecture
    if architecture not in ARCHITECTURES or ARCHITECTURES[architecture].text:
        return None
    if architecture in row_of(family, source.stack).pictures:
        return None
    supported = sorted(name for name in loads(family) if architecture in row_of(family, name).pictures)
    advice = f"export to {' or '.join(supported)}" if supported else "measure it with drafttrain measure"
    return f"it is not known to draft with this family for {architecture}, which reads images; {advice}"


def serving_command(source: ExportSource, directory: str, target: str | None = None) -> str:
    """The command, or the lines of Python, that serve the target with the drafter in this directory.

    target: its place; None: as the checkpoint has it.
    """
    row, lengths = row_of(source.opened.meta.family, source.stack), draft_lengths(source.opened)
    first, *others = lengths
    ranges = zip([1, *others], [*(size - 1 for size in others), LARGEST], lengths.values(), strict=True)
    table = list(ranges) if len(set(lengths.values())) > 1 else []
    return STACKS[source.stack].command(
        ServingCommand(source, directory, target or source.target_name, lengths[first], row.method, row.settings, table)
    )


def recognised(found: ExternalCheckpoint) -> Importer:
    """The format of a directory. Raises UserError where none, or more than one, recognises it.

    Files that several families could have written are of the family that our own export's record names.
    """
    matches = [row for row in IMPORTERS if row.knows(found)]
    matches = [row for row in matches if row.family == found.record.get("family")] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = " and ".join(f"{row.name} ({row.family})" for row in matches)
        raise UserError(f"{found.origin}: could be {names}: {found.summary()}; keep one drafter's files in a directory")
    layouts = ", ".join(dict.fromkeys(f"{row.name} ({row.family})" for row in IMPORTERS))
    raise UserError(f"{found.origin}: no known kind of drafter: {found.summary()}; known: {layouts}")
