"""The embedding, last norm and head of a target whose blocks run elsewhere. Their weights are given from outside."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from drafttrain.core.errors import UserError
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.targets import TargetOptions
from drafttrain.targets.devices import device_of
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.live import LiveTarget
from drafttrain.targets.load import DTYPES, dtype_of, reason
from drafttrain.targets.structure import find_blocks, set_depth, shape_of
from drafttrain.targets.weights import StoredTensors, model_class

SHAPES_ALONE = "the target was given as shapes alone, so its blocks cannot be run"


class EndsTarget(LiveTarget):
    """A target without blocks. Weights are NaN until they are given."""

    name = "ends"

    def __init__(self, config: Any, options: TargetOptions, tokenizer: Any = None) -> None:
        one_block_config = set_depth_of_copy(config)
        device = device_of(options.device)
        with torch.device(device), no_init_weights():
            model: Any = model_class(one_block_config).from_config(one_block_config, dtype=DTYPES[dtype_of(options)])
        super().__init__(model, tokenizer=tokenizer)
        end_modules: list[nn.Module] = [model.get_input_embeddings(), model.get_output_embeddings(), self.norm_module]
        find_blocks(model, 1).to("meta")
        self.shape, self.trees = shape_of(config.get_text_config()), True
        model.config = config
        end_param_ids = {id(p) for module in end_modules for p in module.parameters()}
        self.weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if id(p) in end_param_ids}
        self.given = False  # whether the weights are there
        for parameter in self.weights.values():
            parameter.data.fill_(torch.nan)

    @property
    def fingerprint(self) -> str:
        """Unknown: the blocks are elsewhere."""
        return ""

    def set(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights of embedding, norm and head; others may be among them. Raises UserError where one is missing."""
        missing_names = [name for name in self.weights if not self._source(name, weights)]
        if missing_names:
            raise UserError(
                f"set_ends needs the weights {', '.join(sorted(missing_names))}; name them as the model's state_dict() does"
            )
        for name, parameter in self.weights.items():
            weight = weights[self._source(name, weights)]
            if weight.shape != parameter.shape:
                raise UserError(f"set_ends: {name} is {list(weight.shape)}, the target's is {list(parameter.shape)}")
            parameter.data.copy_(weight)
        self.given = True

    def _source(self, name: str, weights: Mapping[str, Tensor]) -> str:
        """The name under which the weights hold this one, which may be tied to another; empty if they do not."""
        tied = [alias for alias, p in self.weights.items() if p is self.weights[name]]
        return next((alias for alias in [name, *tied] if alias in weights), "")

    def read(self, directory: Path) -> None:
        """Take the weights from a checkpoint's files, if all of them are there under the model's own names."""
        stored = StoredTensors.of(directory, f"target {str(directory)!r}")
        names = [name for name in self.weights if name in stored]
        tensors = {name: stored.read(name) for name in names}
        if all(self._source(name, tensors) for name in self.weights):
            self.set(tensors)

    def __call__(
        self,
        token_BN: Tensor,
        kv: Any,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        raise UserError(f"{SHAPES_ALONE}; give the states of your own forward pass")

    def frozen(self) -> HFTarget:
        raise UserError(f"{SHAPES_ALONE}; give the model itself")


def set_depth_of_copy(config: Any) -> Any:
    """The configuration of a model with one block and the same ends."""
    one_block_config = copy.deepcopy(config)
    set_depth(one_block_config, 1)
    return one_block_config


def ends_of(target: str | Path | PreTrainedConfig, options: TargetOptions, tokenizer: Any = None) -> EndsTarget:
    """The ends of the target at a directory or hub id, or with this configuration; a directory's weights are read.

    Raises UserError for a path without a usable configuration.
    """
    if isinstance(target, PreTrainedConfig):
        return EndsTarget(target, options, tokenizer)
    try:
        config = AutoConfig.from_pretrained(str(target), revision=options.revision, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # libraries raise errors of every kind for damaged files
        cause = reason(error, str(target), options.revision)
        raise UserError(f"target {str(target)!r} has no configuration that transformers can load: {cause}") from error
    ends_target = EndsTarget(config, options, tokenizer)
    if Path(target).is_dir() and any(Path(target).glob("*.safetensors*")):
        ends_target.read(Path(target))
    return ends_target
