"""Build, load and save a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from drafttrain.api.settings import composed, for_drafter, given
from drafttrain.cli.main import user_errors
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory
from drafttrain.drafters.checkpoint import (
    CheckpointMeta,
    TargetRecord,
    filled,
    load_checkpoint,
    options_of,
    read_meta,
    start_weights,
)
from drafttrain.drafters.checkpoint import save_drafter as save_weights
from drafttrain.model.drafter import Drafter
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.derived import for_target
from drafttrain.runs.placement import built
from drafttrain.targets.load import LoadedTarget


@dataclass
class LoadedDrafter:
    """A drafter and the target that it drafts for."""

    module: Drafter  # the torch module; its parameters are what is trained
    target: LoadedTarget  # an adapted copy of `base` where the drafter came with an adapter of the target, else `base`
    base: LoadedTarget  # the target as it was loaded
    family: str  # as in `drafter=<family>`
    options: Any  # the family's options dataclass
    recipe: str | None = None  # the recipe whose training settings `train_drafter` takes
    settings: dict[str, Any] = field(default_factory=dict)  # what was changed of the recipe, by key
    checkpoint: Path | None = None  # where it was loaded from; None: it can be trained
    prepared: bool = False  # whether the family has prepared itself from training data

    def meta(self, step: int = 0) -> CheckpointMeta:
        """What a checkpoint says of this drafter. step: of its training."""
        record = TargetRecord.of(self.base)
        return CheckpointMeta(self.family, asdict(self.options), self.module.decode_settings(), record, step)

    def for_decoding(self) -> Drafter:
        """The module that decodes: in evaluation mode and the target's dtype. Of a drafter that can be trained it is a copy."""
        if self.checkpoint is not None:
            return self.module
        decoding_copy = filled(Path("a new drafter"), self.meta(), self.base.target, self.module.state_dict())
        return decoding_copy.requires_grad_(False)

    def check(self, target: LoadedTarget) -> None:
        """Raise UserError unless this is the target that the drafter was built for."""
        if self.base.target.fingerprint != target.target.fingerprint:
            raise UserError(f"the drafter was built for {self.base.path}, the target given is {target.path}; give the first")

    def check_trainable(self) -> None:
        """Raise UserError for a drafter without parameters to train, and for one that was loaded for decoding."""
        if not self.module.trained:
            raise UserError(f"{self.family} trains nothing; decode with it, or build another family")
        if self.checkpoint is not None:
            raise UserError(
                f"the drafter from {self.checkpoint} was loaded for decoding; use load_drafter(path, target, trainable=True)"
            )


def build_drafter(recipe: str, target: LoadedTarget, *, seed: int = 0, **options: Any) -> LoadedDrafter:
    """Build a drafter with fresh weights, on the target's device, in float32.

    Args:
        recipe: A recipe as in `drafttrain fit recipe=NAME`. Each family has one of its name: `medusa`, `eagle3`, `dflash`, ...
            The recipe also holds the training settings that `train_drafter` starts from.
        target: The target that it will draft for.
        seed: Of the initial weights. Equal seeds give equal weights.
        **options: Options of the family (`drafttrain/drafters/options.py`), such as `heads=4`.

    Returns:
        A drafter that can be trained. `.module` is a torch module.

    Raises:
        UserError: There is no such recipe or option, or the options do not fit the target.
    """
    settings = {f"drafter.{name}": value for name, value in options.items()}
    run = for_recipe(recipe, settings, target)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = built(run.options, target.target).to(target.target.device)
    family = run.options.drafter.family
    return LoadedDrafter(module, target, target, family, run.options.drafter, recipe, settings)


def for_recipe(recipe: str | None, settings: dict[str, Any], target: LoadedTarget) -> Any:
    """A recipe's configuration for this target, and for data that is in memory."""
    run = composed(recipe, {"target": target.description["name"], "data.path": "memory", **settings})
    return for_drafter(run, target, for_target(run.options, target.target.shape).drafter)


def load_drafter(checkpoint: str | Path, target: LoadedTarget, *, trainable: bool = False) -> LoadedDrafter:
    """Load a drafter from a checkpoint of a run, or a published drafter from a directory or hub id.

    Args:
        checkpoint: A `step-NNNNN` directory, what `save_drafter` wrote, or a published drafter (docs/export.md, "Importing").
        target: The target that it was trained for.
        trainable: False: for decoding, in the target's dtype and in evaluation mode. True: its weights as they were saved, to
            be trained further.

    Returns:
        The drafter. Where it was trained together with an adapter of the target, `.target` is the adapted target.

    Raises:
        UserError: The checkpoint is missing, damaged or of another target, or it has an adapter and `trainable` is set.
    """
    source = CheckpointSource.of(str(checkpoint))
    directory = source.checkpoint(target, _silent)
    meta = read_meta(directory)
    options = options_of(directory, meta)
    settings = {"drafter": meta.family, "name": meta.family}
    if not trainable:
        restored = load_checkpoint(directory, target)
        module = restored.drafter.requires_grad_(False)
        return LoadedDrafter(module, restored.loaded, target, meta.family, options, None, settings, directory, prepared=True)
    if meta.adapter is not None:
        raise UserError(
            f"{directory} has an adapter of the target; build a drafter of its recipe and train it with "
            f'settings={{"train.init": "{directory}"}}'
        )
    run = for_drafter(composed(None, {**settings, "data.path": "memory"}), target, options)
    module = built(run.options, target.target)
    module.load_state_dict(start_weights(directory, module))
    module.use_decode_settings(meta.decode)
    module.to(target.target.device)
    return LoadedDrafter(module, target, target, meta.family, options, None, settings, None, prepared=True)


def save_drafter(drafter: LoadedDrafter, directory: str | Path, *, step: int = 0) -> Path:
    """Save a drafter as a checkpoint that `load_drafter` and every command reads.

    Args:
        drafter: One that can be trained: from `build_drafter`, or from `load_drafter(..., trainable=True)`.
        directory: The directory to make. It appears whole or not at all.
        step: The optimiser step, for the record.

    Returns:
        The directory.

    Raises:
        UserError: The directory exists, or the drafter is a loaded checkpoint already.
    """
    path = Path(directory).expanduser()
    if drafter.checkpoint is not None:
        raise UserError(f"the drafter is the checkpoint {drafter.checkpoint}; copy that directory")
    if path.exists():
        raise UserError(f"{path} exists; name a directory that does not")
    with atomic_directory(path) as staging_dir:
        save_weights(staging_dir, drafter.module.state_dict(), drafter.meta(step))
    return path


def _silent(text: str) -> None:
    """Importing a published drafter prints what it found; a library does not."""


def export_drafter(
    checkpoint: str | Path,
    stack: str,
    out: str | Path,
    *,
    target: LoadedTarget | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Path:
    """Write a checkpoint for a serving stack, read it back, and compare its drafts with the checkpoint's.

    Args:
        checkpoint: A checkpoint of a run, what `save_drafter` wrote, or a published drafter.
        stack: `vllm`, `sglang`, `trtllm`, `speculators`, `transformers`, `llamacpp`, `openvino`, `tgi`, `lmdeploy`, `official`,
            `stitched`, or `all` that load the drafter.
        out: The directory to make. With `all` each stack has a directory in it.
        target: The target, if it is in memory. None: the one that the checkpoint names is loaded.
        dtype: Of the weights: `float32`, `bfloat16` or `float16`. None: the target's dtype in training.
        overwrite: Replace an earlier export in `out`.
        settings: Any other key that `drafttrain export` takes, such as `{"max_shard_size": "2GB"}`.
        quiet: Print nothing.

    Returns:
        `out`. Its README.md has the command that serves it.

    Raises:
        UserError: The checkpoint is missing, damaged or of another target, or the stack does not load this drafter.
        ParityError: The written files do not draft as the checkpoint does. They are removed.
    """
    from drafttrain.commands.export import export

    overrides = given({"checkpoint": str(checkpoint), "format": stack, "out": str(out), "dtype": dtype})
    run = composed(None, {**overrides, "overwrite": overwrite, "logger": "none", **(settings or {})})
    with ExitStack() as stack_of_contexts:
        if quiet:
            stack_of_contexts.enter_context(redirect_stdout(StringIO()))
        stack_of_contexts.enter_context(user_errors())
        exported_dir = export(run.options, run.resolved, target)
        assert exported_dir is not None, "export.plan is for the command line"
        return exported_dir
