"""The target of `make gpu-real` and its data, from which `real_2.py` distils drafters; and the folder that the stages hand on.

Text: the Python sources of this machine. Target: about 300 million parameters, pretrained for the minutes that are left. Data:
its own continuations of prompts from files that it was not trained on, sampled by the decoder. Text and target are made by a
process of their own (`pretrain.py`).

Each stage writes one part, complete or not at all, with a `record.json` about its source. Its figures are reused, and a part
that was made from another source than the present one is made again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.results import Job, RedError
from benchmarks.gpu.sources import ROOT
from drafttrain.core.files import atomic_directory, atomic_write_json
from drafttrain.measure import DecodeOptions
from drafttrain.measure.decoding import decoder_of
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target

SECTION = "real-1"
TEMPERATURE = 0.8  # of the data, because greedy texts of a small model repeat themselves
LEAST_SECONDS = 150.0  # that must be left for pretraining to begin: a target that learnt less says little about drafters
POLL = 0.1
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


class Maker:
    """Makes the parts. remaining: seconds until the command is to end."""

    def __init__(self, folder: Folder, machine: Machine, anew: bool, remaining: Callable[[], float]) -> None:
        self.folder, self.machine, self.scale, self.anew = folder, machine, scale_of(machine), anew
        self.remaining = remaining
        self.process: subprocess.Popen[bytes] | None = None
        self.seconds = 0.0  # of the whole suite, from `begin` on

    def begin(self) -> None:
        """Start the process that makes text and target, unless they are there."""
        if self.seconds:
            return
        self.seconds = min(self.scale.seconds, self.remaining())
        if self.anew:
            shutil.rmtree(self.folder.text.path, ignore_errors=True)  # and with it all that was made from it
        if there(self.folder.target):
            return
        ends = time() + self.scale.pretrained * self.seconds
        command = [sys.executable, "-m", "benchmarks.gpu.pretrain", str(self.folder.real), str(ends)]
        self.process = subprocess.Popen([*command, *(["--rehearse"] if self.machine.rehearsal else [])], cwd=ROOT)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def text(self) -> dict[str, Any]:
        """Raises RedError where the tokenizer changes when it is loaded again."""
        found = self._awaited(self.folder.text)
        tokenizer = AutoTokenizer.from_pretrained(self.folder.text.path)
        sample = json.loads((self.folder.text.path / "asked.json").read_text(encoding="utf-8"))[0]
        if len(tokenizer) != found["vocabulary"] or tokenizer.decode(tokenizer(sample)["input_ids"]) != sample:
            raise RedError("the tokenizer does not give a text back")
        return found

    def target(self) -> dict[str, Any]:
        return self._awaited(self.folder.target)

    def data(self) -> dict[str, Any]:
        self.begin()
        if there(self.folder.data):
            print(f"{self.folder.data.path} is there", flush=True)
            return self.folder.data.figures
        return answers(self.folder, self.scale, self.machine, self.scale.answering * self.seconds)

    def _awaited(self, part: Part) -> dict[str, Any]:
        """The figures of a part that exists, or that the process makes. Raises RedError where it ends without, or is late."""
        self.begin()
        if there(part) and self.process is None:
            print(f"{part.path} is there", flush=True)
        while not there(part):
            code = None if self.process is None else self.process.poll()
            if (self.process is None or code is not None) and not there(part):
                raise RedError(f"the process that makes {part.path.name} ended with code {code}")
            if self.remaining() < 0.0 and not self.machine.rehearsal:
                raise RedError(f"no {part.path.name} within the time")
            sleep(POLL)
        return part.figures


def answers(folder: Folder, scale: Scale, machine: Machine, seconds: float) -> dict[str, Any]:
    """Write the target's continuations, wave by wave until the time is used up. Raises RedError where there are too few."""
    began = perf_counter()
    options = TargetOptions("hf", str(folder.target.path), dtype="bfloat16", device=str(machine.device))
    loaded = load_target(options)
    decoder = decoder_of(loaded, DecodeOptions("lossless", TEMPERATURE, seed=1, max_new_tokens=scale.reply), None)
    asked: list[str] = json.loads((folder.text.path / "asked.json").read_text(encoding="utf-8"))
    records: list[dict[str, str]] = []
    written, started = 0, perf_counter()
    for start in range(0, len(asked), scale.batch):
        if perf_counter() - began > seconds and len(records) >= scale.batch:
            break
        wave = asked[start : start + scale.batch]
        ids = [fitting(loaded, text, scale.reply) for text in wave]
        for text, result in zip(wave, decoder.run(ids, len(ids), first_request=start).results, strict=True):
            written += len(result.tokens)
            records += record(text, result.tokens, loaded.tokenizer)
    taken = perf_counter() - started
    if len(records) < scale.batch:
        raise RedError(f"{len(records)} conversations in {taken:.0f} seconds")
    figures = {"conversations": len(records), "written_tokens": written, "written_tokens_per_s": written / taken}
    with folder.data.written(figures) as aside:
        write(aside / folder.conversations.name, records)
    return figures


def fitting(loaded: LoadedTarget, text: str, reply: int) -> list[int]:
    """A prompt's tokens; only the last ones where the reply would not fit after all of them."""
    ids: list[int] = loaded.tokenizer(text, verbose=False)["input_ids"]
    return ids[-(loaded.target.shape.max_positions - reply) :]


def record(prompt: str, reply: list[int], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """One conversation; none for an empty reply. The end token is a part of a reply that ended."""
    text = str(tokenizer.decode(reply))
    return [{"prompt": prompt, "response": text}] if len(reply) > 1 and text.strip() else []


def write(path: Path, records: list[dict[str, str]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def jobs(maker: Maker) -> list[Job]:
    parts = {"text": maker.folder.text, "target": maker.folder.target, "data": maker.folder.data}
    runs = {"text": maker.text, "target": maker.target, "data": maker.data}
    least = {"text": 0.0 if maker.machine.rehearsal else LEAST_SECONDS}
    return [
        Job(f"real {name}", "material", "decoder", runs[name], partial(there, part), seconds=least.get(name, 0.0))
        for name, part in parts.items()
    ]
