"""Export a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from drafttrain.api.settings import composed, given
from drafttrain.cli.main import user_errors
from drafttrain.targets.load import LoadedTarget


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
