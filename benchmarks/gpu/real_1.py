"""The first part of `make gpu-real`: pretrain a target and let it write data, from which `real_2.py` distils drafters.

Text: the Python sources of this machine. Target: about 300 million parameters, pretrained for the minutes that are left. Data:
its own continuations of prompts from files that it was not trained on, sampled by the decoder. Parts that exist are used
unchanged. Text and target are made by a process of their own (`pretrain.py`).
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.real import Folder, Part, Scale, scale_of, there
from benchmarks.gpu.sources import ROOT
from benchmarks.gpu.suite import Job, RedError
from drafttrain.measure import DecodeOptions
from drafttrain.measure.decoding import decoder_of
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target

SECTION = "real-1"
TEMPERATURE = 0.8  # of the data, because greedy texts of a small model repeat themselves
LEAST_SECONDS = 150.0  # that must be left for pretraining to begin: a target that learnt less says little about drafters
SAID = 20.0
POLL = 0.1


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
    said = started
    for start in range(0, len(asked), scale.batch):
        if perf_counter() - began > seconds and len(records) >= scale.batch:
            break
        wave = asked[start : start + scale.batch]
        ids = [fitting(loaded, text, scale.reply) for text in wave]
        for text, result in zip(wave, decoder.run(ids, len(ids), first_request=start).results, strict=True):
            written += len(result.tokens)
            records += record(text, result.tokens, loaded.tokenizer)
        if perf_counter() - said > SAID:
            said = perf_counter()
            print(f"data: {start + len(wave)} of {len(asked)} prompts, {written:,} tokens", flush=True)
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
