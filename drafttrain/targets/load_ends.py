"""Loads the embedding, last norm and output matrix of a target, and finds out on its first block how the whole would be run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.targets import TargetOptions
from drafttrain.targets.devices import bind, device_of
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.frozen_ends import FastEnds, FrozenEnds, ProbedEnds, WholeSize
from drafttrain.targets.load import (
    DTYPES,
    LoadedTarget,
    check_options,
    check_pair,
    compared,
    dtype_of,
    keep_freed_memory,
    path_of,
    reason,
    runner_of,
    stop_ids_of,
    tokenizer_of,
)
from drafttrain.targets.parallel import WHOLE
from drafttrain.targets.pieces import Pieces
from drafttrain.targets.shallow import first_blocks
from drafttrain.targets.vision import ARCHITECTURES
from drafttrain.targets.weights import check_settings

Share = Callable[[Any], Any]  # rank 0's value, on every process


@dataclass(frozen=True, slots=True)
class LoadedEnds:
    """The ends of a target, and the rest of its checkpoint, piece by piece."""

    loaded: LoadedTarget
    target: FrozenEnds
    pieces: Pieces


def load_ends(options: TargetOptions, first: bool = True, share: Share = lambda value: value) -> LoadedEnds:
    """Load them. All processes call it together; the first runs the first block once, and `share` gives its value to all.

    Raises UserError as `load_target` does, and for models that cannot be loaded in pieces.
    """
    path, device = path_of(options), device_of(options.device)
    check_options(options)
    bind(device)
    check_settings(path)
    pieces, model, tokenizer = _explained(options, lambda: _read(options, path))
    if device.type == "cpu":
        keep_freed_memory()
    stop_ids = stop_ids_of(model, tokenizer)
    probed: ProbedEnds | str | None = None
    if first:
        try:
            probed = _explained(options, lambda: _probed(options, model, pieces, stop_ids))
        except UserError as error:
            probed = str(error)
    probed = share(probed)
    if not isinstance(probed, ProbedEnds):
        raise UserError(str(probed))
    target = (FastEnds if probed.fast else FrozenEnds)(model, stop_ids, probed, WholeSize(pieces.parameters, pieces.bytes))
    check_pair(path, tokenizer, target.shape.vocab_size)
    target.tokenizer = tokenizer
    return LoadedEnds(LoadedTarget(target, tokenizer, path, _description(options, target, probed)), target, pieces)


def _read(options: TargetOptions, path: str) -> tuple[Pieces, Any, PreTrainedTokenizerBase]:
    pieces = Pieces(
        path,
        f"target.path {path!r}",
        options.revision,
        options.trust_remote_code,
        dtype=DTYPES[dtype_of(options)],
        attn_implementation=None if options.attention == "auto" else options.attention,
    )
    return pieces, pieces.outside(device_of(options.device)), tokenizer_of(path, options)


def _explained(options: TargetOptions, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (UserError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # libraries raise errors of every kind for damaged files, and models for missing blocks
        path = path_of(options)
        raise UserError(
            f"target.path {path!r} could not be loaded in pieces: {reason(error, path, options.revision)}; set "
            "features.target=whole"
        ) from error


@torch.no_grad()
def _probed(options: TargetOptions, model: Any, pieces: Pieces, stop_ids: frozenset[int]) -> ProbedEnds:
    """What the probe of a target of the first block shows. It decides which runner the whole target would have."""
    blocks = model.get_submodule(pieces.prefix)
    outline = blocks[0]
    blocks[0] = pieces.block(0).to(device_of(options.device))
    try:
        one_block_model = first_blocks(model, pieces.count, 1)
    finally:
        blocks[0] = outline
    target, failed = compared(runner_of(options.runner, one_block_model, WHOLE), one_block_model, stop_ids)
    return ProbedEnds(isinstance(target, FastTarget), failed, target.chains_reason, target.generations)


def _description(options: TargetOptions, target: FrozenEnds, probed: ProbedEnds) -> dict[str, Any]:
    """As of a whole target, without what running its blocks would show."""
    option_names = ("name", "path", "revision", "dtype", "weights", "tensor_parallel", "expert_parallel")
    description = {name: getattr(options, name) for name in option_names} | {"dtype": dtype_of(options)}
    description |= {
        "runner": target.name,
        "runner_reason": None,
        "chains_reason": probed.chains_reason,
        "attention_reason": None,
        "capture_reason": None,
        "architecture": type(target.model).__name__,
        "parameters": target.size.parameters,
        "fingerprint": target.fingerprint,
    }
    if type(target.model).__name__ in ARCHITECTURES:
        description["image_inputs"] = options.image_inputs
    return description | asdict(target.shape)
