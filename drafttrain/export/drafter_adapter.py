"""The LoRA of a drafter as a peft adapter: its matrices on the names of an exported drafter, with that drafter in `base/`.

No serving stack loads an adapter of a drafter. `merge` makes an ordinary export of it, and the parity check reads that one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory
from drafttrain.drafters.common.drafter_lora import PREFIX, matrices_of
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.ggufs import SUFFIX
from drafttrain.export.layouts.adapter import CONFIG, PEFT, WEIGHTS, config_of
from drafttrain.export.readers.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors
from drafttrain.export.table import Layout

BASE = "base"  # folder of the exported drafter
KIND = "peft adapter of "  # begins the name of its layout
MERGE = "from drafttrain.export.drafter_adapter import merge\nmerge(adapter={adapter!r}, out={merged!r})"
TEXT = (
    "The files are a peft adapter of the drafter in `base`. No serving stack loads an adapter of a drafter: merge it, and "
    "serve the result."
)


def adapter_of(whole: Layout) -> Layout:
    """The layout of the adapter on the names of this layout."""
    return Layout(f"{KIND}{whole.name}", partial(_write, whole), partial(_read, whole), partial(_refuse, whole), apart=True)


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

    Raises MismatchError for files that do not fit together, UserError where `out` is there already. Then nothing is written.
    """
    directory, out = Path(adapter), Path(out)
    if out.exists():
        raise UserError(f"{out} is there already; name another directory, or remove it")
    config = Config.of(directory, CONFIG)
    config.expect("peft_type", "LORA", "architecture")
    for key, value in (("bias", "none"), ("use_rslora", False), ("use_dora", False), ("fan_in_fan_out", False)):
        config.expect(key, value, "config")
    rank, matrices = config.get("r", "config"), Tensors(directory, WEIGHTS)
    scale = config.get("lora_alpha", "config") / rank
    paths = sorted(name.removesuffix(".lora_A.weight") for name in matrices.left if name.endswith(".lora_A.weight"))
    config.expect("target_modules", [path.removeprefix(PEFT) for path in paths], "config")
    with atomic_directory(out) as folder:
        shutil.copytree(directory / BASE, folder, dirs_exist_ok=True)
        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            for path in [path for path in paths if f"{path.removeprefix(PEFT)}.weight" in tensors]:
                down, up = matrices.take(f"{path}.lora_A.weight", rank, -1), matrices.take(f"{path}.lora_B.weight", -1, rank)
                name = f"{path.removeprefix(PEFT)}.weight"
                if tensors[name].shape != (len(up), down.shape[1]):
                    raise MismatchError("tensors", f"{name} is {list(tensors[name].shape)}, its matrices give another shape")
                tensors[name] = tensors[name].float() + (up @ down) * scale
            save_file(tensors, file, {"format": "pt"})
        matrices.finish()


def _read(whole: Layout, directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        merge(directory, Path(folder) / "merged")
        return whole.read(Path(folder) / "merged", target, points)


def _write(whole: Layout, source: ExportSource) -> Files:
    base = whole.write(_of_base(source))
    tensors: dict[str, Tensor] = {}
    for path, pair in matrices_of(source.opened.apart).items():
        weight = source.opened.apart[f"{path}.weight"]
        for theirs in (name.removesuffix(".weight") for name, tensor in base.tensors.items() if tensor is weight):
            tensors |= {f"{PEFT}{theirs}.lora_{which}.weight": x.clone() for which, x in zip("AB", pair, strict=True)}
    lora, place = source.opened.meta.lora, str(Path(source.place, BASE).absolute())
    assert lora is not None, "refused before"
    config = config_of(tensors, lora["rank"], lora["alpha"], place, whole_names=True)
    return Files(config, tensors, WEIGHTS, base.tokenizer, base.facts, CONFIG, folders={BASE: base})


def _refuse(whole: Layout, source: ExportSource) -> str | None:
    if source.dtype != "float32":
        return f"dtype is {source.dtype}, but adapters are written in float32; leave dtype out"
    reason = whole.refuse(source)
    if reason is not None:
        return reason
    base = whole.write(_of_base(source))
    if base.weights.endswith(SUFFIX):
        return "its files are GGUF, in which weights have other names and orders; leave adapter out to export it merged"
    kept = {id(tensor) for name, tensor in base.tensors.items() if name.endswith(".weight")}
    for path in matrices_of(source.opened.apart):
        if id(source.opened.apart[f"{path}.weight"]) not in kept:
            return f"its layout does not hold {path}.weight as a linear map's weight; leave adapter out to export it merged"
    return None


def _of_base(source: ExportSource) -> ExportSource:
    """The drafter without its LoRA."""
    own = {name: tensor for name, tensor in source.opened.apart.items() if not name.startswith(PREFIX)}
    return replace(source, opened=replace(source.opened, tensors=own))
