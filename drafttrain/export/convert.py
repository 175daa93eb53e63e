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
    importer = recognised(found)
    check_merged(found.origin, found.record)
    cached_dir = cache_home() / "imports" / f"{found.directory.resolve().name}-{_key(found, loaded)}"
    if not (cached_dir / META).is_file():
        _keep(cached_dir, taken(importer, found, loaded))
    imported = read_meta(cached_dir).imported
    assert imported is not None, "`imported` is always written"
    say(f"imported: {found.origin} ({imported['layout']}, {importer.family}, {imported['dtype']})")
    if found.pickled:
        say(f"note: {found.weights} is a pickle; only its tensors were read, and they are kept as safetensors in {cached_dir}")
    for note in imported["notes"]:
        say(f"note: {note}")
    return cached_dir


def taken(row: Importer, found: ExternalCheckpoint, loaded: LoadedTarget) -> tuple[CheckpointMeta, dict[str, Tensor]]:
    """The parts of our checkpoint. Options that the files do not determine come from the record of our own export, if there is
    one, or else from the family's defaults.
    """
    if row.usual is None and found.compression is not None:
        raise UserError(f"{found.origin}: a quantised language model cannot be imported as a drafter; name the unquantised one")
    draft = _draft(row, found, loaded)
    record, determined = _record(found, row.family), dict(draft.options)
    option_names = {f.name for f in fields(families()[row.family].options)}
    recorded_options = {
        key: value for key, value in renamed(record.get("options", {})).items() if key in option_names - DROPPED
    }
    options = asdict(families()[row.family].options(**(recorded_options | determined)))
    meta = CheckpointMeta(row.family, options, {}, TargetRecord.of(loaded), step=0)
    drafter = _built(found, meta, loaded)
    drafter_tensors = drafter.state_dict()
    row.complete(draft, drafter_tensors)
    _check(row, draft, drafter_tensors)
    if row.usual is not None:
        check_unread(found, row.family, row.usual())
    drafter.use_decode_settings(record.get("decode", {}))
    import_info = {
        "from": found.origin,
        "layout": row.name,
        "dtype": row.dtype(found),
        "determined": sorted(determined.keys() - set(row.places)),
    }
    return (
        CheckpointMeta(
            row.family, options, drafter.decode_settings(), meta.target, 0, imported=import_info | {"notes": draft.notes}
        ),
        draft.tensors,
    )


def _draft(importer: Importer, checkpoint: ExternalCheckpoint, loaded: LoadedTarget) -> ConvertedDrafter:
    """The tensors under our names and in our form, without those that come from elsewhere."""
    tensors, unknown_names, renames = dict[str, Tensor](), list[str](), importer.names(checkpoint)
    shared_names = importer.shared.keys() - importer.own(checkpoint, loaded.target)
    for name, tensor in checkpoint.tensors.items():
        if name in shared_names:
            continue
        if (our_name := renames.ours(name)) is None:
            unknown_names.append(name)
        else:
            tensors[our_name] = tensor
    if unknown_names:
        raise UserError(
            f"{checkpoint.origin}: {checkpoint.weights} has {UNKNOWN} {listed(unknown_names)}, for which drafters of "
            f"{importer.family} have no place here ({importer.name}); {UNSUPPORTED}"
        )
    # before the shared tensors: their sizes may be those of a draft vocabulary
    options = importer.options(checkpoint, loaded.target)
    for name in sorted(checkpoint.tensors.keys() & shared_names):
        check_shared(checkpoint, name, importer.shared[name], loaded.target)
    draft = ConvertedDrafter(checkpoint, loaded.target, options, tensors)
    importer.mend(draft)
    return draft


def _built(checkpoint: ExternalCheckpoint, meta: CheckpointMeta, loaded: LoadedTarget) -> Drafter:
    try:
        return build(checkpoint.directory, meta, loaded.target)
    except ValueError as error:  # UserError is one too: of options that do not fit this target
        raise UserError(f"{checkpoint.origin}: {error}") from error
    except (KeyError, TypeError, RuntimeError) as error:  # transformers' of other fields, torch's of sizes too large
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(
            f"{checkpoint.origin}: no drafter can be built from {checkpoint.config_name} ({reason}); correct it, or fetch it "
            "again"
        ) from error


def _check(importer: Importer, draft: ConvertedDrafter, drafter_tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError, with the directory's own names, unless these tensors fill the drafter."""
    checkpoint, tensors, renames = draft.found, draft.tensors, importer.names(draft.found)

    def named(names: set[str]) -> str:
        return listed([renames.theirs(name) or name for name in names])

    missing, unknown = set(drafter_tensors) - set(tensors), set(tensors) - set(drafter_tensors)
    if missing or unknown:
        biases = " (biases: drafters here have none)" if all(name.endswith(".bias") for name in unknown) else ""
        problems = [f"lacks {named(missing)}"] * bool(missing) + [f"has {UNKNOWN} {named(unknown)}{biases}"] * bool(unknown)
        remedy = UNSUPPORTED if unknown else "correct it, or fetch it again"
        raise UserError(
            f"{checkpoint.origin}: {checkpoint.weights} {' and '.join(problems)}, according to {checkpoint.config_name}; "
            f"{remedy}"
        )
    for name, tensor in drafter_tensors.items():
        their_name = renames.theirs(name) or name
        if tensors[name].shape != tensor.shape:
            raise UserError(
                f"{checkpoint.origin}: {their_name} is {list(tensors[name].shape)}, by {checkpoint.config_name} and this "
                f"target it should be {list(tensor.shape)}; {TRAINED_FOR}"
            )
        if tensors[name].is_floating_point() != tensor.is_floating_point():
            raise UserError(
                f"{checkpoint.origin}: {their_name} is {tensors[name].dtype}, {tensor.dtype} is needed; {UNSUPPORTED}"
            )


def _record(checkpoint: ExternalCheckpoint, family: str) -> dict[str, Any]:
    """The record that our own export of this family wrote into the directory; empty where there is none."""
    return checkpoint.record if checkpoint.record.get("family") == family else {}


def _key(checkpoint: ExternalCheckpoint, loaded: LoadedTarget) -> str:
    """A hash that differs for other files and for another target."""
    base_name, folders = checkpoint.config.get("base_model_name_or_path"), [checkpoint.directory]
    if checkpoint.adapter:  # its base model's weights are kept too
        base_dirs = [checkpoint.directory / "base", *([Path(str(base_name)).expanduser()] if base_name else [])]
        folders += [directory for directory in base_dirs if directory.is_dir()]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    fingerprint = [FORM, __version__, str(checkpoint.directory.resolve()), stats, asdict(TargetRecord.of(loaded))]
    return hashlib.sha256(json.dumps(fingerprint).encode()).hexdigest()[:16]


def _keep(final_dir: Path, meta_and_tensors: tuple[CheckpointMeta, dict[str, Tensor]]) -> None:
    """Write the checkpoint. Several processes may convert the same drafter at once; the first one to finish wins."""
    meta, tensors = meta_and_tensors
    temporary_dir = final_dir.with_name(f"{final_dir.name}.{os.getpid()}")
    with atomic_directory(
        temporary_dir, f"free space under {final_dir.parent}, or set XDG_CACHE_HOME to a directory on another disk"
    ) as staging_dir:
        save_drafter(staging_dir, tensors, meta)
    try:
        temporary_dir.rename(final_dir)
    except OSError:
        remove_directory(temporary_dir)
        if not (final_dir / META).is_file():
            raise
