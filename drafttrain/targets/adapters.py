"""A target with the LoRA adapters that it is served with, each as a frozen target of its own over the same weights.

vLLM chooses one by name for each request (`--lora-modules`). The base's weights stay where they are: a target with an adapter
adds the products of its matrices to the outputs of the linear maps, as vLLM and peft do without merging.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drafttrain.core.errors import UserError
from drafttrain.model.low_rank import LowRank, Scale
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.probe import InexactError, probe
from drafttrain.targets.shallow import weight_sharing_copy
from drafttrain.targets.structure import find_blocks, fingerprint_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of peft
MATRICES = (".lora_A.weight", ".lora_B.weight")
OF_MATRICES = ("gaussian", "eva", "orthogonal")  # ways to start that leave the target's weights as they are
NAME = "default"  # peft's name for a single adapter


def check_adapters(folders: Mapping[str, str]) -> None:
    """Raise UserError for a folder that is no LoRA adapter in safetensors."""
    for name, folder in folders.items():
        path = Path(folder).expanduser()
        if missing := next((file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()), None):
            raise UserError(
                f"target.adapters: {name} is {folder!r}, which has no {missing}; name the folder of a peft LoRA adapter that "
                "was saved with save_pretrained()"
            )


def with_adapter(target: HFTarget, name: str, folder: str) -> HFTarget:
    """The target with this adapter. Raises UserError for one that does not fit it, or that is more than LoRA on its blocks."""
    model, layers = _adapted(target, name, folder)
    adapted = _fast(target, model, layers) if not target.hooked else None
    if adapted is None:
        try:
            adapted = target._view(model) if target.hooked else HFTarget(model, target.stop_ids)
        except InexactError as error:
            raise UserError(f"target.adapters: {name} at {folder!r}: {error}") from error
    adapted.fingerprint, adapted.tokenizer = fingerprint_of(model), target.tokenizer
    return adapted


def _adapted(target: HFTarget, name: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """(transformers' model with peft's layers over the target's weights, these layers by the names of their maps)."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict  # takes seconds, and few runs need it
    from peft.tuners.lora import LoraLayer
    from safetensors import safe_open

    path = str(Path(folder).expanduser())
    try:
        config: Any = PeftConfig.from_pretrained(path)
        start = getattr(config, "init_lora_weights", True)
        if isinstance(start, str) and start not in OF_MATRICES:  # peft would write to the weights that the base shares
            raise UserError(f"init_lora_weights={start} changes the target's own weights, until peft has converted it")
        config.init_lora_weights = True
        with warnings.catch_warnings(), safe_open(str(Path(path) / WEIGHTS), "pt") as file:
            warnings.simplefilter("ignore")  # peft warns of what is refused below
            given = set(file.keys())
            peft_model = PeftModel.from_pretrained(weight_sharing_copy(target.model), path, NAME, config=config)
            loaded = set(get_peft_model_state_dict(peft_model, adapter_name=NAME))
    except Exception as error:  # peft and safetensors raise errors of every kind for what does not fit
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"target.adapters: {name} at {folder!r} does not fit this target: {reason}; give another") from error
    model: Any = peft_model.get_base_model()
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    block_ids = {id(module) for module in find_blocks(model, target.shape.blocks).modules()}
    others = sorted(key for key in given if not key.endswith(MATRICES))
    others += [path for path, layer in layers.items() if id(layer) not in block_ids]
    if others or not given:
        raise UserError(
            f"target.adapters: {name} at {folder!r} changes {others[0] if others else 'nothing'}; expected LoRA matrices on "
            "linear maps of the blocks alone, because drafters share the target's embedding and head"
        )
    if given != loaded:
        odd = sorted(given ^ loaded)[0]
        raise UserError(f"target.adapters: {name} at {folder!r} is for another model ({odd} has no counterpart); give another")
    return model, layers


@torch.no_grad()
def _fast(target: HFTarget, model: Any, layers: Mapping[str, Any]) -> HFTarget | None:
    """The target's own forward with the adapter; None where it cannot add to these maps, and transformers' forward takes over.

    Its `model` is peft's, which the probe and transformers' `generate` compare with.
    """
    scale, added = Scale(), dict[str, LowRank]()
    scale.factor_BN1, scale.decodes = torch.ones(1, 1, 1, device=target.device, dtype=target.dtype), True
    for name, layer in layers.items():
        a_RI, b_OR = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        low_rank = LowRank(a_RI.shape[1], b_OR.shape[0], len(a_RI), scale).to(target.device, target.dtype)
        low_rank.lora_A.weight.copy_(a_RI)
        low_rank.lora_B.weight.copy_(b_OR * layer.scaling[NAME])
        added[name] = low_rank.requires_grad_(False)
    try:
        view = target.with_added(added)
        view._modules = {**view._modules, "model": model.requires_grad_(False).eval()}  # a shallow copy shares this dictionary
        view.refresh_added()
        probe(view)
    except UserError:
        return None
    return view
