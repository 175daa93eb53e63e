"""Low-rank matrices without their model: a directory that `peft.PeftModel.from_pretrained` loads, written and read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import ParityError
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import write_config
from drafttrain.export.format import Renames

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT = "base_model.model."  # peft's prefix of names
FRESH = (True, False, None, "gaussian", "orthogonal", "eva")  # ways to begin that leave the base model as it was
PLAIN = {"init_lora_weights": FRESH, "bias": ("none", None)}
PLAIN |= dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out"), (False, None))
EMPTY = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices")
MATRICES = Renames({f"{{path}}.lora_{x}.weight": f"{PEFT}{{path}}.lora_{x}.weight" for x in "AB"})


def config_of(names: Iterable[str], rank: int, alpha: float, base: str, whole_names: bool = False) -> dict[str, Any]:
    """adapter_config.json. names: of the matrices, in peft's form. base: directory or hub id of the model.

    whole_names: of a module that is no causal LM, with each adapted map by its whole name.
    """
    from peft import LoraConfig  # takes seconds, and few runs need it

    paths = {name.rpartition(".lora_")[0].removeprefix(PEFT) for name in names}
    target_modules = paths if whole_names else {path.rpartition(".")[2] for path in paths}
    lora_alpha = int(alpha) if alpha == int(alpha) else alpha
    config = LoraConfig(
        r=rank,
        lora_alpha=lora_alpha,  # type: ignore[arg-type]
        target_modules=sorted(target_modules),
        base_model_name_or_path=base,
        task_type=None if whole_names else "CAUSAL_LM",
        inference_mode=True,
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


def write_alone(directory: Path, matrices: dict[str, Tensor], rank: int, alpha: float, base: str) -> None:
    """Write the adapter of a model that is not exported itself. matrices: float32, under the names of a checkpoint.

    Raises ParityError unless they are read back bit for bit.
    """
    tensors = {str(MATRICES.theirs(name)): tensor.contiguous() for name, tensor in matrices.items()}
    directory.mkdir()
    write_config(directory / CONFIG, config_of(tensors, rank, alpha, base))
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    reloaded = load_file(directory / WEIGHTS)
    for name, tensor in sorted(tensors.items()):
        if name not in reloaded or not reloaded[name].equal(tensor):
            raise ParityError("target", f"{name} of the adapter was not saved as it is")


def check_plain(found: ExternalCheckpoint) -> None:
    """Raise UserError for an adapter that is not LoRA's two matrices for each map, of one rank."""
    found.wants("peft_type", found.field("peft_type"), ("LORA",), "but models here are adapted by LoRA")
    for key, allowed in PLAIN.items():
        found.wants(key, found.config.get(key), allowed, "but adapters here are plain LoRA")
    for key in EMPTY:
        found.wants(
            key, found.config.get(key) or None, (None, "nothing"), "but adapters here have one rank and no other weights"
        )


def usual_lora() -> Mapping[str, Any]:
    """What peft takes for fields that are missing."""
    from peft import LoraConfig  # takes seconds, and few runs need it

    return LoraConfig().to_dict()
