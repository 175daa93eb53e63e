"""Write a checkpoint for some stacks, each directory through the gate, and move them into place together or not at all."""

from __future__ import annotations

import glob
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.tuners.lora import LoraLayer

from drafttrain import __version__
from drafttrain.core.checksums import list_files
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory, remove_abandoned
from drafttrain.export.card import card
from drafttrain.export.files import DTYPES, Source, write
from drafttrain.export.golden import Golden
from drafttrain.export.hub import Repository
from drafttrain.export.layouts import gguf
from drafttrain.export.layouts.adapter import write_alone
from drafttrain.export.opened import Opened
from drafttrain.export.parity import Parity, check, check_gguf_target, check_model, rounded
from drafttrain.export.table import TABLE, Layout, layout, loads

RECORD, TARGET, CARD = "drafttrain.json", "target", "README.md"
GGUF = "llamacpp"  # the stack that reads targets in a form of its own


@dataclass(frozen=True, slots=True)
class Wanted:
    """out: the directory to make; each of several stacks gets one inside, by its name. dtype: of the weights. with_target: the
    target too, for the stack that reads one file of each. repository: where it is uploaded to later. adapter: what was trained
    by low-rank matrices is not merged.
    """

    stacks: list[str]
    out: Path
    dtype: str
    several: bool
    overwrite: bool = False
    max_shard_size: str = "5GB"
    with_target: bool = False
    repository: Repository | None = None
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of each stack: the parity of what was written, or the reason why nothing was."""

    written: dict[str, Parity]
    refused: dict[str, str]


def check_wanted(wanted: Wanted) -> None:
    """Raise UserError for what is wrong whatever the checkpoint is."""
    if wanted.dtype not in DTYPES:
        raise UserError(f"dtype is {wanted.dtype!r}; choose one of {', '.join(DTYPES)}")
    if wanted.with_target and GGUF not in wanted.stacks:
        raise UserError(f"with_target=true writes the target as GGUF, which format={GGUF} alone reads; leave it out")
    if wanted.repository is not None:
        if wanted.several:
            raise UserError(
                "push_to_hub is given with format=all; stacks load a repository from its top, so choose one of them"
            )
        wanted.repository.check()
    out = wanted.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not wanted.overwrite:
        raise UserError(f"out is {str(out)!r}, which exists; name another directory, or add overwrite=true")
    if not (out / RECORD).is_file():
        raise UserError(f"out is {str(out)!r}, which no export has written (no {RECORD} there), so it stays; name another one")


def refusals(opened: Opened, wanted: Wanted) -> dict[str, str]:
    """Stack -> why this very drafter cannot go there, though others of its family can. Raises UserError where all refuse it."""
    reasons = {stack: _refusal(opened, stack, wanted) for stack in wanted.stacks}
    if wanted.with_target and reasons.get(GGUF, "refused") is None:
        why = gguf.refuse_target(Source(opened, GGUF, wanted.dtype), opened.loaded.target.model)
        reasons[GGUF] = None if why is None else f"the target cannot be written as GGUF: {why}; leave out with_target"
    found = {stack: reason for stack, reason in reasons.items() if reason is not None}
    if len(found) == len(reasons):
        raise UserError(_nowhere(opened, wanted, found))
    return found


def _apart(opened: Opened, wanted: Wanted) -> bool:
    """Whether the drafter's own matrices are exported; those of a target that was trained too concern the target alone."""
    if not wanted.adapter or opened.meta.adapter is not None:
        return False
    if not any(isinstance(module, LoraLayer) for module in opened.drafter.modules()):
        raise UserError(f"adapter=true, and nothing of this {opened.meta.family} drafter is a low-rank adapter; leave it out")
    return True


def _to(opened: Opened, stack: str, wanted: Wanted) -> Layout | None:
    """None: the stack takes no adapter."""
    whole = layout(opened.meta.family, stack)
    return whole.adapter if _apart(opened, wanted) else whole


def _refusal(opened: Opened, stack: str, wanted: Wanted) -> str | None:
    to = _to(opened, stack, wanted)
    if to is None:
        return "it takes no adapter as a drafter; leave adapter out, and it is merged"
    return to.refuse(Source(opened, stack, wanted.dtype))


def export(opened: Opened, golden: Golden, wanted: Wanted) -> Exported:
    """Raises UserError for a drafter that goes nowhere, bad weights and a full disk, ParityError where what was written drafts
    otherwise; nothing is left then.
    """
    refused, family = refusals(opened, wanted), opened.meta.family
    able = [stack for stack in wanted.stacks if stack not in refused]
    written, expected = dict[str, Parity](), rounded(opened, golden, wanted.dtype)
    remove_abandoned(wanted.out.parent, f"{glob.escape(wanted.out.name)}.tmp-*")
    with atomic_directory(wanted.out, f"free space under {wanted.out.parent}, or name another out=") as aside:
        merged, matrices = (None, None) if opened.meta.adapter is None else _write_target(aside, opened, wanted)
        for stack in able:
            folder, place = (aside / stack, wanted.out / stack) if wanted.several else (aside, wanted.out)
            folder.mkdir(exist_ok=True)
            source, to = Source(opened, stack, wanted.dtype, merged, matrices, str(place)), _to(opened, stack, wanted)
            assert to is not None, "refused above"
            files = to.write(source)
            write(folder, files, source, wanted.max_shard_size)
            written[stack] = check(folder, to.read, files, source, golden, expected)
            if wanted.with_target and stack == GGUF:
                _write_gguf_target(folder, source, wanted)
            _describe(folder, wanted.repository or str(place), to, source, written[stack])
        if wanted.several:
            listed = {stack: row for stack, row in TABLE[family].items() if isinstance(row, str)} | refused
            _record(aside, {"version": __version__, "written": able, "refused": listed})
            return Exported(written, listed)
    return Exported(written, {})


def _write_target(aside: Path, opened: Opened, wanted: Wanted) -> tuple[str, str | None]:
    """(the target that was trained with the drafter, where it will lie; where its matrices lie, for it to be made from).

    Merged, in its own dtype, or as a peft adapter, in float32.
    """
    root = str(wanted.out) if wanted.repository is None else wanted.repository.folder
    if wanted.adapter and opened.meta.adapter is not None:
        spec = opened.meta.adapter
        write_alone(aside / TARGET, opened.matrices, spec["rank"], spec["alpha"], opened.loaded.path)
        list_files(aside / TARGET)
        return f"{root}/{TARGET}-merged", f"{root}/{TARGET}"
    model: Any = opened.loaded.target.model
    model.save_pretrained(aside / TARGET, max_shard_size=wanted.max_shard_size)
    opened.loaded.tokenizer.save_pretrained(aside / TARGET)
    check_model(aside / TARGET, model)
    list_files(aside / TARGET)
    return f"{root}/{TARGET}", None


def _write_gguf_target(folder: Path, source: Source, wanted: Wanted) -> None:
    files = gguf.target_files(source)
    write(folder, files, source, wanted.max_shard_size)
    check_gguf_target(folder, files, source)


def _describe(folder: Path, place: str | Repository, to: Layout, source: Source, parity: Parity) -> None:
    (folder / CARD).write_text(card(source, to.name, place, parity), encoding="utf-8")
    about: dict[str, Any] = {"version": __version__, "stack": source.stack, "layout": to.name, "dtype": source.dtype}
    meta = source.opened.meta  # options and decode settings: what the layout has no place for, an import finds here
    about |= {"family": meta.family, "checkpoint": meta.sha256, "options": meta.options, "decode": meta.decode}
    _record(folder, about)


def _record(folder: Path, about: dict[str, Any]) -> None:
    """What marks a directory as one that `overwrite` may replace, and then the checksums of all but the model card."""
    (folder / RECORD).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    list_files(folder, without=(CARD,))


def _nowhere(opened: Opened, wanted: Wanted, refused: dict[str, str]) -> str:
    family, stack = opened.meta.family, wanted.stacks[0]
    if wanted.several:
        return f"no stack loads this {family} drafter: " + "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    others = [other for other in loads(family) if other != stack]
    fit = [other for other in others if _refusal(opened, other, wanted) is None]
    loaders = f"{', '.join(fit)} load it as it is" if fit else "no other stack loads it as it is"
    return f"this {family} drafter cannot be exported to {stack}: {refused[stack]}; {loaders}"
