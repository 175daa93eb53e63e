"""What the parts of `make gpu-real` hand on: a folder of files, and the sizes of everything in it.

Each stage writes one part, complete or not at all, with a `record.json` about its source. Its figures are reused, and a part
that was made from another source than the present one is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine
from drafttrain.core.files import atomic_directory, atomic_write_json

END = "<|endoftext|>"
RECORD = "record.json"
# packages that `drafttrain fit` needs in addition to torch, in this suite
PACKAGES = ("deepspeed", "hydra", "jinja2", "markdown_it", "omegaconf", "peft", "psutil", "pyarrow", "rich")
# the reply goes on where the prompt ends: records of both keep their boundary, and a prompt alone is plain text
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes and times of the suite. Lengths and batches are in tokens and rows, times in seconds."""

    text: int  # characters of sources at most
    taught: int  # of these, characters that the tokenizer learns from
    vocab: int
    model: dict[str, int]
    length: int  # of a pretraining step's rows
    rows: int  # of a pretraining step
    micro: int  # rows of a micro-batch
    rate: float
    prompt: int  # characters of a prompt at least
    reply: int
    batch: int
    asked: int  # prompts to distil from at most
    measured: int  # prompts to measure by at most
    seconds: float  # of gpu-real in all, at most
    pretrained: float  # the share of them after which pretraining ends
    answering: float  # the share of them that the data takes
    least: float  # seconds of pretraining and of each drafter's training at least
    distilled: float  # of each drafter's training at most
    around: float  # of a drafter's turn on the GPU besides its training: checkpoint, target, measurement
    distil: tuple[str, ...]  # settings that all drafters share


def shape(hidden: int, blocks: int, inner: int, heads: int, kv_heads: int) -> dict[str, int]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": blocks, "intermediate_size": inner, "head_dim": hidden // heads}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


# A drafter's layer against 24 blocks costs what it costs against published targets' 32. A narrower target would learn more in
# the same time, but its steps would be launches alone; a wider one would learn too little for its texts to say anything.
FULL = Scale(
    text=100_000_000, taught=24_000_000, vocab=24_576, model=shape(1024, 24, 2816, 16, 4) | {"max_position_embeddings": 2048},
    length=1024, rows=16, micro=16, rate=8e-4, prompt=600, reply=256, batch=256, asked=10_240, measured=64,
    seconds=350.0, pretrained=0.36, answering=0.09, least=12.0, distilled=60.0, around=21.0,
    distil=(
        "train.global_batch=16", "train.micro_batch=16", "data.held_out=64", "data.max_length=640", "decode.max_new_tokens=128",
        "decode.tree_nodes=32", "loss.chunk=4096", "measure.minutes=0.3", "measure.batch_sizes=[1,8]",
        "measure.temperatures=[0.8]", "measure.timed_prompts=8",
    ),
)  # fmt: skip
TINY = Scale(
    text=1_500_000, taught=300_000, vocab=1024, model=shape(128, 4, 352, 4, 2) | {"max_position_embeddings": 256},
    length=64, rows=4, micro=2, rate=3e-3, prompt=80, reply=24, batch=8, asked=24, measured=3,
    seconds=20.0, pretrained=0.1, answering=0.15, least=8.0, distilled=1.0, around=1.0,
    distil=(
        "train.global_batch=2", "train.micro_batch=2", "data.held_out=4", "data.max_length=96", "decode.max_new_tokens=8",
        "decode.tree_nodes=6", "measure.minutes=0.01", "measure.batch_sizes=[1,2]", "measure.temperatures=[0.8]",
        "measure.timed_prompts=2", "measure.repeats=1",
    ),
)  # fmt: skip


def lacking() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


def scale_of(machine: Machine) -> Scale:
    return TINY if machine.rehearsal else FULL


class MissingError(Exception):
    """A part is missing, or was made from another source; the message says which, and how to make it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One directory of the folder."""

    path: Path
    source: Part | None = None  # the part that it is made from

    @property
    def record(self) -> dict[str, Any] | None:
        """Its record; None where it is incomplete or its source has changed."""
        try:
            found: dict[str, Any] = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        files = {self.path / name: size for name, size in found["files"].items()}
        whole = all(path.is_file() and path.stat().st_size == size for path, size in files.items())
        current = self.source is None or ((of := self.source.record) is not None and of["name"] == found["source"])
        return found if whole and current else None

    @property
    def figures(self) -> dict[str, Any]:
        """Its figures. Raises MissingError."""
        record = self.record
        if record is None:
            what = f"no {self.path.name} in {self.path.parent}, or none from what lies beside it"
            raise MissingError(f"{what}; run make gpu-real on this machine with this REAL")
        found: dict[str, Any] = record["figures"]
        return found

    @contextmanager
    def written(self, figures: dict[str, Any]) -> Iterator[Path]:
        """Yield an empty directory that replaces this part at the end, with `figures`, which may be filled meanwhile, in its
        record.
        """
        source = None if self.source is None else (self.source.record or {}).get("name")
        with atomic_directory(self.path) as aside:
            yield aside
            files = {str(path.relative_to(aside)): path.stat().st_size for path in sorted(aside.rglob("*")) if path.is_file()}
            known = {"figures": figures, "files": files, "source": source}
            name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
            atomic_write_json(aside / RECORD, known | {"name": name})


def there(part: Part) -> bool:
    return part.record is not None


class Folder:
    """text: tokens, tokenizer, prompts. target: a transformers directory. data: the target's output. Rehearsals have other
    folders.
    """

    def __init__(self, real: Path, machine: Machine) -> None:
        self.real = real
        self.path = real / ("rehearsal" if machine.rehearsal else "full")
        self.text = Part(self.path / "text")
        self.target = Part(self.path / "target", self.text)
        self.data = Part(self.path / "data", self.target)

    def row(self, recipe: str) -> Part:
        """The figures of a drafter of this recipe, next to its run."""
        return Part(self.path / "runs" / recipe / "row", self.data)

    @property
    def conversations(self) -> Path:
        return self.data.path / "data.jsonl.gz"

    @property
    def prompts(self) -> Path:
        return self.text.path / "measure.jsonl"
