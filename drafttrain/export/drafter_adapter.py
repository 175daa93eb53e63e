"""Peft adapters: matrices without their model, and a drafter's LoRA by an exported drafter's names, with that in `base/`.

No serving stack loads an adapter of a drafter. `merge` makes an ordinary export of it, and the parity check reads that one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.files import atomic_directory
from drafttrain.drafters.common.drafter_lora import PREFIX, matrices_of
from drafttrain.export.external import ExternalCheckpoint, listed
from drafttrain.export.files import ExportSource, Files, write_config
from drafttrain.export.format import Format, Renames
from drafttrain.export.gguf_file import SUFFIX

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
    """Write the adapter of a model that is not exported itself: `peft.PeftModel.from_pretrained` loads the directory.

    matrices: float32, under the names of a checkpoint. Raises ParityError unless they are read back bit for bit.
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


BASE = "base"  # folder of the exported drafter
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
KIND = "peft adapter of "  # begins the name of its layout
MERGE = "from drafttrain.export.drafter_adapter import merge\nmerge(adapter={adapter!r}, out={merged!r})"
TEXT = (
    "The files are a peft adapter of the drafter in `base`. No serving stack loads an adapter of a drafter: merge it, and "
    "serve the result."
)


def adapter_of(whole: Format) -> Format:
    """The format of the adapter on the names of this format."""
    write, refuse = partial(_write, whole), partial(_refuse, whole)
    return replace(whole, name=f"{KIND}{whole.name}", write=write, refuse=refuse, apart=True, opened=_merged)


def about(place: str) -> str:
    """The model card's words. place: of the export."""
    return f"{TEXT}\n\n```python\n{MERGE.format(adapter=place, merged=merged_place(place))}\n```"


def merged_place(place: str) -> str:
    """Where the card's lines write the merged drafter."""
    return f"{place}-merged"


def check_merged(name: str, record: Mapping[str, Any]) -> None:
    """Raise UserError for an exported adapter. name: of the directory. record: its drafttrain.json."""
    if str(record.get("layout")).startswith(KIND):
        raise UserError(f"{name} is an adapter of a drafter, which is read merged; its README.md has the lines that merge it")


def merge(adapter: str | Path, out: str | Path) -> None:
    """Copy the drafter in an exported adapter's `base`, with the matrices' products added to its weights in float32.

    Raises UserError for files that do not fit together, and where `out` is there already. Then nothing is written.
    """
    directory, out = Path(adapter), Path(out)
    if out.exists():
        raise UserError(f"{out} is there already; name another directory, or remove it")
    checkpoint = ExternalCheckpoint(directory)
    checkpoint.wants("peft_type", checkpoint.field("peft_type"), ("LORA",), "which is no adapter of an exported drafter")
    check_plain(checkpoint)
    matrices = dict(checkpoint.tensors)
    scale = checkpoint.field("lora_alpha") / checkpoint.number("r")
    paths = sorted(name.removesuffix(DOWN) for name in matrices if name.endswith(DOWN))
    module_names = [path.removeprefix(PEFT) for path in paths]
    if checkpoint.config.get("target_modules") != module_names:
        raise UserError(
            f"{checkpoint.origin}: target_modules is {checkpoint.config.get('target_modules')!r}, its tensors are of "
            f"{module_names}"
        )
    with atomic_directory(out) as folder:
        shutil.copytree(directory / BASE, folder, dirs_exist_ok=True)
        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            for path in [path for path in paths if f"{path.removeprefix(PEFT)}.weight" in tensors]:
                name = f"{path.removeprefix(PEFT)}.weight"
                tensors[name] = tensors[name].float() + _product(checkpoint, matrices, path, tensors[name]) * scale
            save_file(tensors, file, {"format": "pt"})
        if matrices:
            raise UserError(f"{checkpoint.origin}: the drafter in {BASE} has no weights for {listed(list(matrices))}")


def _product(checkpoint: ExternalCheckpoint, matrices: dict[str, Tensor], path: str, weight: Tensor) -> Tensor:
    """What an adapter adds to a weight; its matrices are taken out. Raises UserError for other shapes than the weight's."""
    down, up = matrices.pop(path + DOWN), matrices.pop(path + UP, None)
    rank = checkpoint.number("r")
    if up is None or weight.shape != (len(up), down.shape[1]) or not len(down) == up.shape[1] == rank:
        raise UserError(
            f"{checkpoint.origin}: the matrices of {path} are not of rank {rank} for a weight of {list(weight.shape)}"
        )
    return up.float() @ down.float()


@contextmanager
def _merged(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        merge(directory, Path(folder) / "merged")
        yield Path(folder) / "merged"


def _write(drafter_format: Format, source: ExportSource) -> Files:
    base_files = drafter_format.write(_of_base(source))
    tensors: dict[str, Tensor] = {}
    for path, lora_pair in matrices_of(source.opened.apart).items():
        weight = source.opened.apart[f"{path}.weight"]
        for module_name in (name.removesuffix(".weight") for name, tensor in base_files.tensors.items() if tensor is weight):
            tensors |= {
                f"{PEFT}{module_name}.lora_{letter}.weight": x.clone() for letter, x in zip("AB", lora_pair, strict=True)
            }
    lora, base_path = source.opened.meta.lora, str(Path(source.place, BASE).absolute())
    assert lora is not None, "refused before"
    config = config_of(tensors, lora["rank"], lora["alpha"], base_path, whole_names=True)
    return Files(config, tensors, WEIGHTS, base_files.tokenizer, CONFIG, folders={BASE: base_files})


def _refuse(drafter_format: Format, source: ExportSource) -> str | None:
    if source.dtype != "float32":
        return f"dtype is {source.dtype}, but adapters are written in float32; leave dtype out"
    reason = drafter_format.refuse(source)
    if reason is not None:
        return reason
    base_files = drafter_format.write(_of_base(source))
    if base_files.weights.endswith(SUFFIX):
        return "its files are GGUF, in which weights have other names and orders; leave adapter out to export it merged"
    weight_ids = {id(tensor) for name, tensor in base_files.tensors.items() if name.endswith(".weight")}
    for path in matrices_of(source.opened.apart):
        if id(source.opened.apart[f"{path}.weight"]) not in weight_ids:
            return f"its layout does not hold {path}.weight as a linear map's weight; leave adapter out to export it merged"
    return None


def _of_base(source: ExportSource) -> ExportSource:
    """The drafter without its LoRA."""
    base_tensors = {name: tensor for name, tensor in source.opened.apart.items() if not name.startswith(PREFIX)}
    return replace(source, opened=replace(source.opened, tensors=base_tensors))
