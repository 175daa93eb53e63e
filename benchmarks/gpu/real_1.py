"""`make gpu-real-1`: pretrain a target and let it write data: the input of `make gpu-real-2`.

Text: the Python sources of this machine. Target: about 300 million parameters, pretrained for the minutes that are left. Data:
its own continuations of prompts from files that it was not trained on, sampled by the decoder. Parts that exist are used
unchanged.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu import report
from benchmarks.gpu.corpus import collect
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.pretrain import pretrain
from benchmarks.gpu.real import Folder, Part, Scale, lacking, scale_of, there
from benchmarks.gpu.suite import Job, RedError, Suite
from drafttrain.measure import DecodeOptions
from drafttrain.measure.decoding import decoder_of
from drafttrain.ops import library
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target

SECTION = "real-1"
TEMPERATURE = 0.8  # of the data, because greedy texts of a small model repeat themselves
SAVING = 40.0  # seconds reserved for the rest, in addition to pretraining and decoding
LEAST_PRETRAINING = 5.0
LEAST_SECONDS = 240.0  # that must be left for pretraining to begin: a target that learnt less says little about drafters
SAID = 20.0


class Maker:
    """Makes the parts one after the other, with one clock."""

    def __init__(self, folder: Folder, machine: Machine, anew: bool) -> None:
        self.folder, self.machine, self.scale, self.anew = folder, machine, scale_of(machine), anew
        self.began: float | None = None  # when the first part was asked for
        self.remaining: Callable[[], float] = lambda: inf  # seconds until the command is to end

    def clock(self) -> float:
        """Seconds since the start."""
        self.began = self.began or perf_counter()
        return perf_counter() - self.began

    def text(self) -> dict[str, Any]:
        """Raises RedError where the tokenizer changes when it is loaded again."""
        self.clock()
        found = self._made(self.folder.text, partial(collect, self.folder.text, self.scale))
        tokenizer = AutoTokenizer.from_pretrained(self.folder.text.path)
        sample = json.loads((self.folder.text.path / "asked.json").read_text(encoding="utf-8"))[0]
        if len(tokenizer) != found["vocabulary"] or tokenizer.decode(tokenizer(sample)["input_ids"]) != sample:
            raise RedError("the tokenizer does not give a text back")
        return found

    def target(self) -> dict[str, Any]:
        rest = min(self.scale.seconds - self.clock(), self.remaining()) - self.scale.answering - SAVING
        seconds = max(LEAST_PRETRAINING, min(self.scale.most_pretraining, rest))
        return self._made(self.folder.target, lambda: pretrain(self.folder, self.scale, seconds, self.machine))

    def data(self) -> dict[str, Any]:
        return self._made(self.folder.data, lambda: answers(self.folder, self.scale, self.machine))

    def _made(self, part: Part, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a part that exists, or is made now."""
        if self.anew or part.record is None:
            return make()
        print(f"{part.path} is there", flush=True)
        return part.figures


def answers(folder: Folder, scale: Scale, machine: Machine) -> dict[str, Any]:
    """Write the target's continuations, wave by wave until the time is used up. Raises RedError where there are too few."""
    options = TargetOptions("hf", str(folder.target.path), dtype="bfloat16", device=str(machine.device))
    loaded = load_target(options)
    decoder = decoder_of(loaded, DecodeOptions("lossless", TEMPERATURE, seed=1, max_new_tokens=scale.reply), None)
    asked: list[str] = json.loads((folder.text.path / "asked.json").read_text(encoding="utf-8"))
    records: list[dict[str, str]] = []
    written, began = 0, perf_counter()
    said = began
    for start in range(0, len(asked), scale.batch):
        if perf_counter() - began > scale.answering:
            break
        wave = asked[start : start + scale.batch]
        ids = [fitting(loaded, text, scale.reply) for text in wave]
        for text, result in zip(wave, decoder.run(ids, len(ids), first_request=start).results, strict=True):
            written += len(result.tokens)
            records += record(text, result.tokens, loaded.tokenizer)
        if perf_counter() - said > SAID:
            said = perf_counter()
            print(f"data: {start + len(wave)} of {len(asked)} prompts, {written:,} tokens", flush=True)
    taken = perf_counter() - began
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
    least = {"target": 0.0 if maker.machine.rehearsal else LEAST_SECONDS}
    return [
        Job(f"real {name}", "material", "decoder", runs[name], partial(there, part), seconds=least.get(name, 0.0))
        for name, part in parts.items()
    ]


def main() -> int:
    disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # before `quiet` says otherwise: all cores learn and tokenise
    suite = Suite(SECTION, __doc__.splitlines()[0])
    maker = Maker(Folder(suite.arguments.real, suite.machine), suite.machine, suite.arguments.force)
    print(f"folder: {maker.folder.path}; operators: {library.state_on(suite.machine.device).text}", flush=True)
    if missing := lacking():
        print(f"note: gpu-real-2 will refuse: {', '.join(missing)} cannot be imported", flush=True)
    code = suite.run(jobs(maker))
    if not suite.machine.rehearsal:
        print("\n".join(report.material(suite.results.known.get(SECTION, {}))), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
