"""A drafter on disk. `step-00400/` holds `drafter.safetensors` (its own tensors) and `drafter.json` (everything else).

Where the target was trained too, `drafter.safetensors` also holds the matrices of its adapter, under `adapter.`. A drafter
trained by LoRA has its own matrices there, under `lora.`; loading merges them (`common/drafter_lora.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafttrain import __version__
from drafttrain.core.errors import UserError
from drafttrain.core.files import read_sealed_json, remove_directory, remove_leftovers, write_sealed_json
from drafttrain.drafters import META, families
from drafttrain.drafters.common.drafter_lora import merged
from drafttrain.drafters.options import RENAMED
from drafttrain.drafters.tuned_settings import tuned_settings, with_tuned
from drafttrain.model.drafter import Drafter
from drafttrain.model.lora import LoraOptions, LoraSpec
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import Target
from drafttrain.targets.adapt import Adapter, adapted
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import whole_fingerprint

SCHEMA_VERSION = 1
WEIGHTS = "drafter.safetensors"
ADAPTER = "adapter."
TEMPLATE = "chat_template.jinja"  # in a run's directory: `data.template`
LEFT_OUT = ("adapter", "imported", "lora")  # fields of the description that are left out where there is nothing to say
NAME = re.compile(r"step-(\d+)")
ANOTHER = "use another checkpoint of the run, or train it again"


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The target a drafter was trained for; the original one, where it was trained too."""

    name: str
    path: str | None
    revision: str | None
    dtype: str
    vocab_size: int
    hidden_size: int
    blocks: int
    fingerprint: str
    weights: str | None = None  # int8, int4: they were quantised
    image_inputs: str | None = None  # what the drafter read at images; left out for targets of text alone

    @staticmethod
    def of(loaded: LoadedTarget) -> TargetRecord:
        description, shape = loaded.description, loaded.target.shape
        return TargetRecord(
            name=description["name"],
            path=description["path"],
            revision=description["revision"],
            dtype=description["dtype"],
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            blocks=shape.blocks,
            fingerprint=loaded.target.fingerprint,
            weights=description["weights"],
            image_inputs=description.get("image_inputs"),
        )


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """The content of `drafter.json`. `save_drafter` fills in the last three fields."""

    family: str
    options: dict[str, Any]
    decode: dict[str, Any]
    target: TargetRecord
    step: int
    adapter: dict[str, Any] | None = None  # the `LoraSpec` of a target that was trained too; left out if it was not
    imported: dict[str, Any] | None = None  # the origin of a published drafter; left out for our own
    lora: dict[str, Any] | None = None  # the `LoraOptions` of a drafter trained by LoRA; left out for others
    schema_version: int = SCHEMA_VERSION
    version: str = __version__
    sha256: str = ""


def checkpoint_name(step: int) -> str:
    """Directory name of a step's checkpoint; sorts like the step up to 99999."""
    return f"step-{step:05d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint's directory."""
    return int(checkpoint.name.split("-")[1])


def template_of(checkpoint: Path) -> Path | None:
    """The chat template that the checkpoint's run had in place of the tokenizer's own; None where it had none."""
    checkpoints = checkpoint.resolve().parent
    file = checkpoints.parent / TEMPLATE
    return file if checkpoints.name == "checkpoints" and file.is_file() else None


def save_drafter(directory: Path, state: Mapping[str, Tensor], meta: CheckpointMeta) -> CheckpointMeta:
    """Write both files into an existing directory (`atomic_directory` makes it appear whole) and give the completed meta.

    state: the drafter's tensors, and its adapter's (`adapter_state`).
    """
    # clones, because safetensors refuses tensors that share memory
    weights = save({name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()})
    completed = dataclasses.replace(
        meta, sha256=hashlib.sha256(weights).hexdigest(), version=__version__, schema_version=SCHEMA_VERSION
    )
    (directory / WEIGHTS).write_bytes(weights)
    content = dataclasses.asdict(completed)
    if content["target"]["image_inputs"] is None:
        del content["target"]["image_inputs"]
    write_sealed_json(directory / META, {k: v for k, v in content.items() if k not in LEFT_OUT or v is not None})
    return completed


def load_drafter(directory: Path, target: Target) -> tuple[Drafter, CheckpointMeta]:
    """Build the drafter for this target and fill every tensor, in evaluation mode, where the target is and in its precision.

    Raises UserError for a damaged or incomplete checkpoint, an unknown family, another target than it was trained for, and
    where the target was trained too (`load_checkpoint` loads both).
    """
    meta = read_meta(directory)
    if meta.adapter is not None:
        raise UserError(
            f"{directory}: its drafts are for an adapted target, and the original alone is loaded here; measure it with "
            f"drafttrain measure checkpoint={directory}, or take a checkpoint without an adapter"
        )
    check_target(directory, meta.target, target)
    return filled(directory, meta, target, _read_weights(directory, meta)), meta


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint's drafter and the target that it drafts for: the one that was given, or an adapted copy of it.

    matrices: parameters of the adapter.
    """

    loaded: LoadedTarget
    drafter: Drafter
    meta: CheckpointMeta
    matrices: int = 0


def load_checkpoint(directory: Path, loaded: LoadedTarget, tuned: bool = True) -> Restored:
    """As `load_drafter`, with the adapted target where the checkpoint holds an adapter. loaded: the original, left as it is.

    The copy has weights of its own where the adapter changes them, and shares all others. tuned: False: the drafter proposes
    as it was trained, whatever `drafttrain tune` has found.
    """
    meta = read_meta(directory)
    spec = None if meta.adapter is None else LoraSpec.of(meta.adapter)
    check_target(directory, meta.target, loaded.target)
    state = _read_weights(directory, meta)
    if spec is None:
        return Restored(loaded, filled(directory, meta, loaded.target, state, tuned), meta)
    adapter = Adapter(loaded.target, spec)
    count, adapted_target = _take_matrices(directory, state, adapter), adapted(loaded, adapter)
    return Restored(adapted_target, filled(directory, meta, adapted_target.target, state, tuned), meta, count)


def adapter_state(adapter: Adapter | None) -> dict[str, Tensor]:
    """Its matrices under the names they have in a checkpoint; nothing without one."""
    return {} if adapter is None else {f"{ADAPTER}{name}": tensor for name, tensor in adapter.state_dict().items()}


def _take_matrices(directory: Path, state: dict[str, Tensor], adapter: Adapter, way_out: str = ANOTHER) -> int:
    """Move the adapter's matrices out of a checkpoint's tensors into it; how many parameters they are."""
    matrices = {name: state.pop(name) for name in list(state) if name.startswith(ADAPTER)}
    _check_state(directory, adapter_state(adapter), matrices, way_out)
    adapter.load_state_dict({name.removeprefix(ADAPTER): tensor for name, tensor in matrices.items()})
    return sum(m.numel() for m in matrices.values())


def filled(directory: Path, meta: CheckpointMeta, target: Target, state: Mapping[str, Tensor], tuned: bool = True) -> Drafter:
    """The checkpoint's drafter with these tensors, those of the target's adapter taken out; otherwise as `load_drafter`.

    state: with the drafter's own LoRA, if it has one, or with that merged. tuned: as for `load_checkpoint`.
    """
    drafter, state = build(directory, meta, target), merged(state, meta.lora)
    _check_state(directory, drafter.state_dict(), state)
    drafter.load_state_dict(state, strict=True)
    drafter.use_decode_settings(meta.decode)
    if tuned:
        drafter.tuned = {n: with_tuned(meta.decode, settings) for n, settings in tuned_settings(directory).items()}
    drafter.use_batch_size(1)
    return drafter.to(target.device, target.dtype).eval()


def start_weights(directory: Path, drafter: Drafter, adapter: Adapter | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint that this drafter, of the same family and whichever target, can start its training from; the
    adapter takes up its own at once, where the checkpoint has any.

    Raises UserError for a damaged checkpoint, and for tensors that do not fill this drafter.
    """
    meta = read_meta(directory)
    state, way_out = _read_weights(directory, meta), "give the options it was trained with, or leave out train.init"
    if adapter is not None and meta.adapter is not None:
        _take_matrices(directory, state, adapter, way_out)
    state = merged(state, meta.lora)
    _check_state(directory, drafter.state_dict(), state, way_out)
    return state


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors as they were saved, those of adapters apart. Raises UserError for a damaged file."""
    return _read_weights(directory, read_meta(directory))


def read_meta(directory: Path) -> CheckpointMeta:
    """Parse `drafter.json`. Raises UserError when it is absent, unreadable or of a newer schema."""
    file = directory / META
    if not file.is_file():
        raise UserError(
            f"{directory}: expected a checkpoint, got no {META} there; name a step-NNNNN directory of a run{_near(directory)}"
        )
    content = read_sealed_json(file, "a drafter's description", ANOTHER)
    try:
        is_newer = content["schema_version"] > SCHEMA_VERSION
        if not is_newer:
            return _checked(CheckpointMeta(**{**content, "target": TargetRecord(**content["target"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file}: expected a drafter's description, got something else ({error}); {ANOTHER}") from error
    raise UserError(f"{file}: schema_version {content['schema_version']} is newer than {SCHEMA_VERSION}; update drafttrain")


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, by their names of today."""
    return {RENAMED.get(name, name): value for name, value in options.items()}


def _checked(meta: CheckpointMeta) -> CheckpointMeta:
    """Raises TypeError for a field of another type than its own: a file changed by hand has no checksum."""
    field_types = {"family": str, "options": dict, "decode": dict, "step": int, "sha256": str}
    field_types |= {name: dict for name in LEFT_OUT if getattr(meta, name) is not None}
    for name, field_type in field_types.items():
        if not isinstance(value := getattr(meta, name), field_type):
            raise TypeError(f"{name} is {value!r:.60}")
    LoraOptions(**(meta.lora or {}))  # also for an unknown setting
    import_info = meta.imported or {}
    determined = (
        {"determined": [RENAMED.get(name, name) for name in import_info["determined"]]} if "determined" in import_info else {}
    )
    return replace(meta, options=renamed(meta.options), imported=import_info | determined if import_info else meta.imported)


def check_target(directory: Path, trained: TargetRecord, target: Target) -> None:
    """Raise UserError unless this is the target that the checkpoint was trained for, or the same with quantised weights."""
    check_shape(directory, trained, target.shape)
    fingerprints = whole_fingerprint(trained.fingerprint), whole_fingerprint(target.fingerprint)
    _check_same(directory, trained, {"weight fingerprint": fingerprints})


def check_shape(directory: Path, trained: TargetRecord, shape: TargetShape) -> None:
    """Raise UserError unless a target of this shape can be the one that the checkpoint is for; weights are not read."""
    pairs = {
        "vocabulary": (trained.vocab_size, shape.vocab_size),
        "hidden size": (trained.hidden_size, shape.hidden_size),
        "number of blocks": (trained.blocks, shape.blocks),
    }
    _check_same(directory, trained, pairs)


def _check_same(directory: Path, trained: TargetRecord, pairs: Mapping[str, tuple[object, object]]) -> None:
    """pairs: by what they are, the checkpoint's value and this target's."""
    for setting, (expected, actual) in pairs.items():
        if expected != actual:
            raise UserError(
                f"{directory}: checkpoint of another target: its {setting} is {_short(expected)}, this target's is "
                f"{_short(actual)}; load the target it was trained for ({trained.path or trained.name}), or train a drafter "
                "for this one"
            )


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The `step-*` directories by step; those being written or removed are not among them."""
    matches = {path: NAME.fullmatch(path.name) for path in run_dir.glob("step-*") if path.is_dir()}
    return sorted((path for path, match in matches.items() if match), key=step_of)


def prune(run_dir: Path, keep_last: int, keep: set[str]) -> list[Path]:
    """Remove checkpoints but the last `keep_last` and those named in `keep`, and what killed runs left. Gives the removed."""
    remove_leftovers(run_dir)
    checkpoints = list_checkpoints(run_dir)
    removed = [path for path in checkpoints[: max(0, len(checkpoints) - keep_last)] if path.name not in keep]
    for path in removed:
        remove_directory(path)
    return removed


def _read_bytes(directory: Path, meta: CheckpointMeta) -> bytes:
    file = directory / WEIGHTS
    if not file.is_file():
        raise UserError(f"{directory}: expected {WEIGHTS} next to {META}, got none; {ANOTHER}")
    weights = file.read_bytes()
    sha256 = hashlib.sha256(weights).hexdigest()
    if sha256 != meta.sha256:
        raise UserError(f"{file}: damaged or cut off: sha256 {_short(sha256)}, {META} says {_short(meta.sha256)}; {ANOTHER}")
    return weights


def _read_weights(directory: Path, meta: CheckpointMeta) -> dict[str, Tensor]:
    try:
        return load(_read_bytes(directory, meta))
    except SafetensorError as error:
        raise UserError(f"{directory / WEIGHTS}: expected safetensors, got something else ({error}); {ANOTHER}") from error


def build(directory: Path, meta: CheckpointMeta, target: Target) -> Drafter:
    """A fresh drafter with the family and options of the checkpoint. Raises UserError for an unknown family or option."""
    options = options_of(directory, meta)
    return families()[meta.family].build(options, target)


def options_of(directory: Path, meta: CheckpointMeta) -> Any:
    """The family's options object of a checkpoint. Raises UserError for an unknown family or option."""
    if meta.family not in families():
        close_names = difflib.get_close_matches(meta.family, families(), n=1)
        hint = f"did you mean {close_names[0]}?" if close_names else f"known: {', '.join(families())}"
        raise UserError(f"{directory / META}: unknown family '{meta.family}'; {hint}")
    family = families()[meta.family]
    option_fields = {f.name: f for f in dataclasses.fields(family.options)}
    unknown = sorted(meta.options.keys() - option_fields.keys())
    if unknown:
        raise UserError(
            f"{directory / META}: {meta.family} has no option {', '.join(unknown)}; load it with drafttrain {meta.version}"
        )
    # JSON has no tuples
    values = {name: tuple(v) if isinstance(option_fields[name].default, tuple) else v for name, v in meta.options.items()}
    return family.options(**values)


def _check_state(directory: Path, expected: Mapping[str, Tensor], state: Mapping[str, Tensor], way_out: str = ANOTHER) -> None:
    file = directory / WEIGHTS
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or unexpected:
        missing_text = f"lacks {_list(missing)}" if missing else ""
        unexpected_text = f"has unexpected {_list(unexpected)}" if unexpected else ""
        raise UserError(
            f"{file}: does not fill this drafter: {' and '.join(filter(None, (missing_text, unexpected_text)))}; {way_out}"
        )
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            raise UserError(f"{file}: {name} is {list(state[name].shape)}, this drafter's is {list(tensor.shape)}; {way_out}")


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else f"{text[:12]}..."


def _near(directory: Path) -> str:
    checkpoints = list_checkpoints(directory) if directory.is_dir() else []
    return f", such as {checkpoints[-1]}" if checkpoints else ""
