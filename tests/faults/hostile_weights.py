"""Hostile indexes, safetensors and pickles, and code that comes with a model."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
from pathlib import Path

from tests.faults.attack import INSPECT, MARKER, MEASURE, OURS, PROMPTS, TARGET, Line, command, judged, run
from tests.faults.campaign import TryResult
from tests.faults.material import MEASURING, TRAINING

ELSEWHERE = (
    *("../elsewhere.safetensors", "/etc/passwd", "/dev/zero", "/dev/stdin", "../" * 40 + "etc/hostname"),
    *("missing.safetensors", "config.json", "model.safetensors.index.json", "", ".", "a\0b", "x" * 5000),
    *(3, None, ["x"], {"a": 1}),
)


def hostile_index(draw: random.Random, folder: Path) -> TryResult:
    """An index of weights that names files elsewhere, or is no index."""
    file = folder / "target" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    weights = index["weight_map"]
    name = draw.choice(sorted(weights))
    shutil.copy(folder / "target" / weights[name], folder / "elsewhere.safetensors")
    there = draw.choice([*ELSEWHERE, str(folder / "elsewhere.safetensors")])
    how = draw.randrange(6)
    if how == 0:
        for key in weights:
            weights[key] = there
    elif how == 1:
        index["weight_map"] = draw.choice([None, [], 3, "x", {}])
    elif how == 2:
        index = draw.choice([[], {}, None, "x", {"metadata": {}}])
    elif how == 3:
        weights["lm_head.weight.more"] = there
    else:
        weights[name] = there
    file.write_text(json.dumps(index))
    line = command(draw)
    while line[0] == "inspect":
        line = command(draw)
    ended = run(line, folder)
    return judged(f"index, {line[0]}", f"{how}, {name} in {there!r:.60}; {' '.join(line)}", ended, folder)


def hostile_safetensors(draw: random.Random, folder: Path) -> TryResult:
    """A header that claims too much."""
    checkpoint = draw.random() < 0.5
    place = folder / ("medusa/step-00006" if checkpoint else "target")
    file = draw.choice(sorted(place.glob("*.safetensors")))
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    how = draw.randrange(9)
    if how == 0:
        header[name]["shape"] = [2**40, 2**40]
    elif how == 1:
        header[name]["data_offsets"] = draw.choice([[0, 2**62], [-4, 4], [8, 4], [0, 0], "x", None])
    elif how == 2:
        header[name]["dtype"] = draw.choice(["F128", "", None, "I8", "BOOL"])
    elif how == 3:
        other = draw.choice(names)
        header[name]["data_offsets"] = header[other]["data_offsets"]
    elif how == 4:
        header["../../x"] = header.pop(name)
    elif how == 5:
        header["__metadata__"] = {"format": "\x1b[2J", "a": "b" * 10**6}
    text = json.dumps(header).encode()
    if how == 6:
        text = b"[" * 100_000
    claimed = draw.choice([2**63, 2**64 - 1, len(text) + 10**9, 0]) if how == 7 else len(text)
    file.write_bytes(struct.pack("<Q", claimed) + text + (b"" if how == 8 else body))
    line = (*MEASURE, OURS, "output=result")
    ended = run(line, folder)
    what = "safetensors of a checkpoint" if checkpoint else "safetensors of a target"
    return judged(what, f"{how} in {file.name}, {name}; {' '.join(line)}", ended, folder)


class Payload:
    """Unpickled, it makes the marker."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.place, "w")


def hostile_pickle(draw: random.Random, folder: Path) -> TryResult:
    """A pickle in place of weights, states or data."""
    import torch

    content = pickle.dumps(Payload(folder / MARKER))
    if draw.random() < 0.5:
        torch.save({"a": Payload(folder / MARKER)}, folder / "x.pt")
        content = (folder / "x.pt").read_bytes()
        (folder / "x.pt").unlink()
    where = draw.randrange(8)
    line: Line = (*MEASURE, OURS, "output=result")
    refuse = True
    if where == 0:
        for file in (folder / "target").glob("*.safetensors*"):
            file.unlink()
        (folder / "target" / "pytorch_model.bin").write_bytes(content)
    elif where == 1:
        (folder / "target" / "pytorch_model.bin").write_bytes(content)
        refuse = False
    elif where == 2:
        file = draw.choice(sorted((folder / "target").glob("*.safetensors")))
        file.write_bytes(content)
    elif where == 3:
        file = draw.choice(sorted((folder / "medusa" / "step-00006").iterdir()))
        file.write_bytes(content)
        refuse = file.name in ("drafter.json", "drafter.safetensors")
    elif where == 4:
        (folder / "published").mkdir()
        (folder / "published" / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 32}')
        (folder / "published" / draw.choice(["medusa_lm_head.pt", "pytorch_model.bin"])).write_bytes(content)
        line = (*MEASURE, "checkpoint=published", "output=result")
    elif where == 5:
        name = draw.choice(
            ["data.pkl", "data.arrow", "data.parquet", "data.jsonl", "data.jsonl.gz", "data.json", "data.csv", "data.pt"]
        )
        (folder / f"own-{name}").write_bytes(content)
        line = (*INSPECT, f"data.path=own-{name}")
    elif where == 6:
        name = draw.choice(["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
        (folder / "target" / name).write_bytes(content)
        refuse = name != "generation_config.json"
    else:
        (folder / "features").mkdir()
        (folder / "features" / "x.pt").write_bytes(content)
        name = draw.choice(["prompts.jsonl", "data.jsonl"])
        (folder / name).write_bytes(content)
        cached = ("features=cached", "features.dir=features", "train.steps=1")
        line = (
            "fit",
            *TARGET,
            "data.path=data.jsonl",
            *TRAINING,
            "recipe=medusa",
            PROMPTS,
            *MEASURING,
            *cached,
            "output=result",
        )
        refuse = False
    ended = run(line, folder)
    return judged(f"pickle, {line[0]}", f"place {where}; {' '.join(line)}", ended, folder, refuse)


def foreign_code(draw: random.Random, folder: Path) -> TryResult:
    """Python that comes with a model must not run without `target.trust_remote_code=true`."""
    code = f"open({str(folder / MARKER)!r}, 'w')\n"
    target = folder / "target"
    for name in (
        "modeling_own.py",
        "configuration_own.py",
        "tokenization_own.py",
        "__init__.py",
        "conftest.py",
        "drafttrain.py",
        "sitecustomize.py",
    ):
        (target / name).write_text(code)
        (folder / name).write_text(code)
        (folder / "medusa" / "step-00006" / name).write_text(code)
    config = json.loads((target / "config.json").read_text())
    how = draw.randrange(4)
    if how in (0, 2):
        config["auto_map"] = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
        config["model_type"] = draw.choice(["own", "llama"])
    if how in (1, 2):
        tokens = json.loads((target / "tokenizer_config.json").read_text())
        tokens["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", None]}
        tokens["tokenizer_class"] = draw.choice(["Own", "PreTrainedTokenizerFast"])
        (target / "tokenizer_config.json").write_text(json.dumps(tokens))
    if how == 3:
        config["architectures"] = ["modeling_own.Own"]
    (target / "config.json").write_text(json.dumps(config))
    line = command(draw)
    ended = run(line, folder)
    return judged(f"code with a model, {line[0]}", f"{how}; {' '.join(line)}", ended, folder)
