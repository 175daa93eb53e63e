"""Convert another project's drafter to a checkpoint of ours, and keep it in the cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain import __version__
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory, cache_home, remove_directory
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import META, CheckpointMeta, TargetRecord, build, read_meta, renamed, save_drafter
from drafttrain.export.drafter_adapter import check_merged
from drafttrain.export.external import ExternalCheckpoint, check_unread, listed
from drafttrain.export.format import ConvertedDrafter, Importer
from drafttrain.export.table import recognised
from drafttrain.export.target_ends import TRAINED_FOR, check_shared
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget

DROPPED = {"adapter"}  # an option that does not return: a trained target was exported merged, as an ordinary target
UNKNOWN, UNSUPPORTED = "unknown tensors", "this layout is not supported"
FORM = 4  # version of the cache's content; a change converts everything again

Say = Callable[[str], None]


def converted(found: ExternalCheckpoint, loaded: LoadedTarget, say: Say) -> Path:
    """The directory of the checkpoint for this target. say: prints notes for the user.

    Raises UserError for a directory that is no drafter, not for this target, or damaged. Nothing is left in these cases.
    """
    row = recognised(found)
    check_merged(found.origin, found.record)
    final = cache_home() / "imports" / f"{found.directory.resolve().name}-{_key(found, loaded)}"
    if not (final / META).is_file():
        _keep(final, taken(row, found, loaded))
    about = read_meta(final).imported
    assert about is not None, "`imported` is always written"
    say(f"imported: {found.origin} ({about['layout']}, {row.family}, {about['dtype']})")
    if found.pickled:
        say(f"note: {found.weights} is a pickle; only its tensors were read, and they are kept as safetensors in {final}")
    for note in about["notes"]:
        say(f"note: {note}")
    return final


def taken(row: Importer, found: ExternalCheckpoint, loaded: LoadedTarget) -> tuple[CheckpointMeta, dict[str, Tensor]]:
    """The parts of our checkpoint. Options that the files do not determine come from the record of our own export, if there is
    one, or else from the family's defaults.
    """
    draft = _draft(row, found, loaded)
    record, determined = _record(found, row.family), dict(draft.options)
    known = {f.name for f in fields(families()[row.family].options)}
    others = {key: value for key, value in renamed(record.get("options", {})).items() if key in known - DROPPED}
    options = asdict(families()[row.family].options(**(others | determined)))
    meta = CheckpointMeta(row.family, options, {}, TargetRecord.of(loaded), step=0)
    drafter = _built(found, meta, loaded)
    own = drafter.state_dict()
    row.complete(draft, own)
    _check(row, draft, own)
    if row.usual is not None:
        check_unread(found, row.family, row.usual())
    drafter.use_decode_settings(record.get("decode", {}))
    about = {
        "from": found.origin,
        "layout": row.name,
        "dtype": row.dtype(found),
        "determined": sorted(determined.keys() - set(row.places)),
    }
    return (
        CheckpointMeta(row.family, options, drafter.decode_settings(), meta.target, 0, imported=about | {"notes": draft.notes}),
        draft.tensors,
    )


def _draft(row: Importer, found: ExternalCheckpoint, loaded: LoadedTarget) -> ConvertedDrafter:
    """The tensors under our names and in our form, without those that come from elsewhere."""
    tensors, strange, renames = dict[str, Tensor](), list[str](), row.names(found)
    shared = row.shared.keys() - row.own(found, loaded.target)
    for name, tensor in found.tensors.items():
        if name in shared:
            continue
        if (ours := renames.ours(name)) is None:
            strange.append(name)
        else:
            tensors[ours] = tensor
    if strange:
        raise UserError(
            f"{found.origin}: {found.weights} has {UNKNOWN} {listed(strange)}, for which drafters of {row.family} have no "
            f"place here ({row.name}); {UNSUPPORTED}"
        )
    options = row.options(found, loaded.target)  # before the shared tensors: their sizes may be those of a draft vocabulary
    for name in sorted(found.tensors.keys() & shared):
        check_shared(found, name, row.shared[name], loaded.target)
    draft = ConvertedDrafter(found, loaded.target, options, tensors)
    row.mend(draft)
    return draft


def _built(found: ExternalCheckpoint, meta: CheckpointMeta, loaded: LoadedTarget) -> Drafter:
    try:
        return build(found.directory, meta, loaded.target)
    except ValueError as error:  # UserError is one too: of options that do not fit this target
        raise UserError(f"{found.origin}: {error}") from error
    except (KeyError, TypeError, RuntimeError) as error:  # transformers' of other fields, torch's of sizes too large
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(
            f"{found.origin}: no drafter can be built from {found.config_name} ({reason}); correct it, or fetch it again"
        ) from error


def _check(row: Importer, draft: ConvertedDrafter, own: Mapping[str, Tensor]) -> None:
    """Raise UserError, with the directory's own names, unless these tensors fill the drafter."""
    found, given, renames = draft.found, draft.tensors, row.names(draft.found)

    def named(names: set[str]) -> str:
        return listed([renames.theirs(name) or name for name in names])

    missing, strange = set(own) - set(given), set(given) - set(own)
    if missing or strange:
        biases = " (biases: drafters here have none)" if all(name.endswith(".bias") for name in strange) else ""
        parts = [f"lacks {named(missing)}"] * bool(missing) + [f"has {UNKNOWN} {named(strange)}{biases}"] * bool(strange)
        mend = UNSUPPORTED if strange else "correct it, or fetch it again"
        raise UserError(f"{found.origin}: {found.weights} {' and '.join(parts)}, according to {found.config_name}; {mend}")
    for name, tensor in own.items():
        theirs = renames.theirs(name) or name
        if given[name].shape != tensor.shape:
            raise UserError(
                f"{found.origin}: {theirs} is {list(given[name].shape)}, by {found.config_name} and this target it should be "
                f"{list(tensor.shape)}; {TRAINED_FOR}"
            )
        if given[name].is_floating_point() != tensor.is_floating_point():
            raise UserError(f"{found.origin}: {theirs} is {given[name].dtype}, {tensor.dtype} is needed; {UNSUPPORTED}")


def _record(found: ExternalCheckpoint, family: str) -> dict[str, Any]:
    """The record that our own export of this family wrote into the directory; empty where there is none."""
    return found.record if found.record.get("family") == family else {}


def _key(found: ExternalCheckpoint, loaded: LoadedTarget) -> str:
    """A hash that differs for other files and for another target."""
    named, folders = found.config.get("base_model_name_or_path"), [found.directory]
    if found.adapter:  # its base model's weights are kept too
        bases = [found.directory / "base", *([Path(str(named)).expanduser()] if named else [])]
        folders += [place for place in bases if place.is_dir()]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    about = [FORM, __version__, str(found.directory.resolve()), stats, asdict(TargetRecord.of(loaded))]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _keep(final: Path, made: tuple[CheckpointMeta, dict[str, Tensor]]) -> None:
    """Write the checkpoint. Several processes may convert the same drafter at once; the first one to finish wins."""
    meta, tensors = made
    own = final.with_name(f"{final.name}.{os.getpid()}")
    with atomic_directory(
        own, f"free space under {final.parent}, or set XDG_CACHE_HOME to a directory on another disk"
    ) as aside:
        save_drafter(aside, tensors, meta)
    try:
        own.rename(final)
    except OSError:
        remove_directory(own)
        if not (final / META).is_file():
            raise
