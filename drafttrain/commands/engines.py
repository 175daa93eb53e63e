"""`drafttrain measure ... engine=NAME`: serving engines decode the prompts that our decoder was timed on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafttrain.commands.verify import target_place
from drafttrain.core.errors import UserError
from drafttrain.data.prompts import Prompt, encode_prompt, load_prompts
from drafttrain.data.server import base_of
from drafttrain.engines.answers import TimedEngine
from drafttrain.engines.http import CHAT, TOKENS, EndpointOptions, endpoint
from drafttrain.engines.measurement import FIGURES, SPECULATIVE, OwnDecoding, TimingOptions, measured
from drafttrain.engines.process import ENGINES, EngineJob, python_of
from drafttrain.engines.timed_process import serving
from drafttrain.export import golden
from drafttrain.export.chain import Ending, chain_drafter, decoded
from drafttrain.export.exporter import GGUF, Wanted, refusals
from drafttrain.export.exporter import export as export_to
from drafttrain.export.opened import Opened
from drafttrain.export.table import loads, stacks_for
from drafttrain.measure.bench import BASELINE, Watch
from drafttrain.measure.cases import encode_cases
from drafttrain.measure.entry import prompt_digest
from drafttrain.measure.report import Report
from drafttrain.runs.options import RunOptions
from drafttrain.runs.progress import watching
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import weights_of

ALL = "all"
ENDPOINTS = {"http": "HTTP endpoint", "sglang": "SGLang"}
TIMED = [name for name, engine in ENGINES.items() if engine.serves]
AS_DECODED = {"policy": "greedy", "temperature": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "stop": []}


@dataclass(frozen=True, slots=True)
class Asked:
    """pythons: of engines that run here; endpoints: of those asked over the network. every: whoever cannot is left out,
    and notes say so.
    """

    pythons: dict[str, Path] = field(default_factory=dict)
    endpoints: dict[str, dict[str, EndpointOptions]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    every: bool = False

    @staticmethod
    def of(options: RunOptions, family: str) -> Asked:
        """Raises UserError for an engine that is not known, not installed, or loads no such drafter, and for settings that it
        cannot follow; with engine=all such engines are left out."""
        names = _names(options)
        asked = Asked(every=options.engine == ALL)
        if names:
            _check(options, names)
        for name in names:
            if name in ENDPOINTS:
                asked.endpoints[name] = _places(options, name)
                continue
            try:
                _loaded_by(name, family)
                asked.pythons[name] = python_of(name, options.engine_python)
            except UserError as error:
                asked.leave_out(name, error)
        return asked

    def leave_out(self, name: str, error: UserError) -> None:
        """Raises the error where the engine was named."""
        if not self.every:
            raise error
        self.notes.append(f"{ENGINES[name].label} was left out: {error}")

    def __bool__(self) -> bool:
        return bool(self.pythons or self.endpoints or self.notes)


@dataclass(frozen=True, slots=True)
class Exported:
    """A directory that an engine loads, for the time of the measurement."""

    out: Path
    stack: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Beside:
    """What all engines are given: the prompts that our decoder was timed on."""

    options: RunOptions
    opened: Opened
    prompts: list[Prompt]
    ids: list[list[int]]
    ending: Ending
    length: int
    dtype: str
    here: Callable[[str], OwnDecoding]

    def terms(self, label: str, batches: bool, watch: Watch) -> TimingOptions:
        measure = self.options.measure
        return TimingOptions(
            label, len(self.ids), measure.batch_sizes if batches else [1], measure.repeats, 60 * measure.minutes, self.length,
            self.ending.stop_ids, watch,
        )  # fmt: skip


@contextmanager
def exports(asked: Asked, directory: Path, loaded: LoadedTarget) -> Iterator[dict[str, Exported]]:
    """The checkpoint as each engine loads it, through the gate. Raises UserError and ParityError as `export` does."""
    with tempfile.TemporaryDirectory(prefix="drafttrain-engines-") as folder:
        if not asked.pythons:
            yield {}
            return
        if (width := weights_of(loaded.target.fingerprint)) != "whole":
            raise UserError(f"the target has {width} weights here, engines load whole ones; leave out target.weights or engine")
        opened = Opened.of(directory, loaded)
        material = golden.stored(directory) or golden.made(opened, golden.sequences_for(loaded))
        dtype, done = str(loaded.target.dtype).removeprefix("torch."), {}
        for name in asked.pythons:
            try:
                wanted = _wanted(opened, name, Path(folder) / name, dtype)
            except UserError as error:
                asked.leave_out(name, error)
                continue
            export_to(opened, material, wanted)
            done[name] = Exported(wanted.out, wanted.stacks[0], dtype)
        del opened, material
        yield done


def beside(
    asked: Asked, ready: dict[str, Exported], report: Report, directory: Path, loaded: LoadedTarget, options: RunOptions,
    console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """The report's `engines`. What fails has the reason in `error`, and no figures."""
    entries = []
    with watching(console) as watch:
        watch("our chains", 0, 1, 0)
        given = _given(report, directory, loaded, options)
        given.here("plain")
        watch("our chains", 1, 1, 0)
        for name in (*ready, *asked.endpoints):
            label = ENDPOINTS[name] if name in ENDPOINTS else ENGINES[name].label
            entry: dict[str, Any] = {"engine": name, "label": label}
            entry |= dict.fromkeys(("stack", "url", "dtype", "threads", "error"))
            entry |= dict.fromkeys(FIGURES)
            try:
                if name in ENDPOINTS:
                    entry |= _over_network(given, label, asked.endpoints[name], watch)
                else:
                    entry |= _in_process(given, name, asked.pythons[name], ready[name], watch)
            except UserError as error:
                entry |= {"error": str(error), "flags": [], "notes": [], "slices": [], "versions": {}}
            entries.append(entry)
    return entries


def _names(options: RunOptions) -> list[str]:
    if options.engine is None:
        return []
    if options.engine == ALL:
        return TIMED
    names = [options.engine] if isinstance(options.engine, str) else list(options.engine)
    known = [*TIMED, *ENDPOINTS]
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"engine is {str(wrong[0])!r}; measure takes {', '.join(known)}, a list of them, or {ALL}")
    return list(dict.fromkeys(names))


def _check(options: RunOptions, names: Sequence[str]) -> None:
    for key, wanted in AS_DECODED.items():
        if (got := getattr(options.decode, key)) != wanted:
            raise UserError(f"decode.{key} is {got!r}, engines are measured greedily, with {wanted!r}; leave it out, or engine")
    if options.target.tensor_parallel > 1:
        raise UserError(
            f"target.tensor_parallel is {options.target.tensor_parallel}, engines load the whole target; leave one out"
        )
    if options.engine_python is not None and len([name for name in names if name not in ENDPOINTS]) > 1:
        raise UserError("engine_python names the Python of one engine, and several are to run; measure them one by one")
    if options.engine_api not in (TOKENS, CHAT):
        raise UserError(f"engine_api is {options.engine_api!r}; choose {TOKENS} or {CHAT}")


def _places(options: RunOptions, name: str) -> dict[str, EndpointOptions]:
    urls = {SPECULATIVE: ("engine_url", options.engine_url), BASELINE: ("engine_plain_url", options.engine_plain_url)}
    key = os.environ.get(options.engine_key_env) or None
    found = {
        side: EndpointOptions(url, setting, options.engine_model, key, options.engine_api)
        for side, (setting, url) in urls.items()
        if url is not None
    }
    for where in found.values():
        base_of(where.url, where.name, "engine_key_env")
    if not found:
        raise UserError(
            f"engine={name} is asked over the network; name its servers with engine_url=URL (with speculation) and "
            "engine_plain_url=URL (without), or one of them"
        )
    return found


def _loaded_by(name: str, family: str) -> list[str]:
    """Stacks by which the engine can load such a drafter. Raises UserError where there is none."""
    able = [stack for stack in ENGINES[name].loads if stack in loads(family)]
    return able or stacks_for(family, ENGINES[name].loads[0])


def _wanted(opened: Opened, name: str, out: Path, dtype: str) -> Wanted:
    """For the first stack that takes this very drafter. Raises the first one's UserError where none does."""
    errors = []
    for stack in _loaded_by(name, opened.meta.family):
        wanted = Wanted([stack], out, dtype, False, with_target=stack == GGUF)
        try:
            refusals(opened, wanted)
            return wanted
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _given(report: Report, directory: Path, loaded: LoadedTarget, options: RunOptions) -> Beside:
    """The prompts that our decoder was timed on, and what it does with chains of them."""
    opened = Opened.of(directory, loaded)
    length, room = options.decode.draft_length or opened.drafter.draft_length, loaded.target.shape.max_positions
    prompts = load_prompts(options.prompts or options.measure.prompts, options.measure.limit)
    by_digest = {prompt_digest(encode_prompt(loaded.tokenizer, prompt.turns)): prompt for prompt in prompts}
    best = next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])
    timed = {line["prompt"] for line in best["per_prompt"] if line["decode_ms"] is not None}
    cases, _ = encode_cases(prompts, loaded.tokenizer, room - options.decode.max_new_tokens - length - 2)
    ids = [case.tokens for case in cases if prompt_digest(case.tokens) in timed]
    if not ids:
        raise UserError("no prompt that was timed leaves room for a chain behind it; give shorter prompts")
    ending = Ending(loaded.target.stop_ids, options.decode.max_new_tokens)
    dtype = str(loaded.target.dtype).removeprefix("torch.")
    chosen = [by_digest[prompt_digest(tokens)] for tokens in ids]
    return Beside(options, opened, chosen, ids, ending, length, dtype, _here(opened, ids, ending, length, dtype))


def _here(opened: Opened, ids: list[list[int]], ending: Ending, length: int, dtype: str) -> Callable[[str], OwnDecoding]:
    target, drafter = opened.loaded.target, chain_drafter(opened, length, dtype)

    @cache
    def decode(begins: str) -> OwnDecoding:
        sequences = [decoded(target, drafter, prompt, ending, length, begins) for prompt in ids]
        texts = [one.tokens[: ending.of(one.tokens)] for one in sequences]
        letters = [str(opened.loaded.tokenizer.decode(text, skip_special_tokens=True)) for text in texts]
        emitted = [max(0, len(text) - one.first) for text, one in zip(texts, sequences, strict=True)]
        return OwnDecoding(texts, letters, emitted, [len(one.counted(ending, "cut")) for one in sequences])

    return decode


def _in_process(given: Beside, name: str, python: Path, export: Exported, watch: Watch) -> dict[str, Any]:
    engine, threads, opened = ENGINES[name], torch.get_num_threads(), given.opened
    terms = given.terms(engine.label, engine.batches, watch)
    timed = {"dtype": export.dtype, "threads": threads, "device": opened.loaded.target.device.type, "batch": max(terms.sizes)}

    def job(speculative: bool) -> EngineJob:
        return EngineJob(
            target=target_place(export.out, opened),
            drafter=str(export.out),
            family=opened.meta.family,
            layout=export.stack,
            draft_length=given.length,
            max_new_tokens=given.ending.max_new_tokens,
            stop_ids=sorted(given.ending.stop_ids),
            prompts=given.ids,
            facts={"layer_inputs": [block + 1 for block in opened.drafter.taps.blocks]},
            timed=timed | {"speculative": speculative},
        )

    with tempfile.TemporaryDirectory(prefix="drafttrain-engine-") as folder, ExitStack() as open_now:
        sides: dict[str, TimedEngine] = {}
        for done, side in enumerate((SPECULATIVE, BASELINE), start=1):
            watch(f"{engine.label}: ready", done - 1, 2, 0)
            started = serving(name, python, job(side == SPECULATIVE), Path(folder) / side)
            sides[side] = open_now.enter_context(started)
            watch(f"{engine.label}: ready", done, 2, 0)
        found = measured(sides, given.here, terms)
    return {"stack": export.stack, "dtype": export.dtype, "threads": threads} | found


def _over_network(given: Beside, label: str, places: dict[str, EndpointOptions], watch: Watch) -> dict[str, Any]:
    terms, first = given.terms(label, True, watch), next(iter(places.values()))
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in given.prompts]
    prompts: Any = chats if first.api == CHAT else given.ids
    with ExitStack() as open_now:
        sides: dict[str, TimedEngine] = {
            side: open_now.enter_context(endpoint(where, prompts, given.ending.max_new_tokens, max(terms.sizes)))
            for side, where in places.items()
        }
        found = measured(sides, given.here, terms)
    if SPECULATIVE in places and found["tau"] is None:
        found["notes"].append(f"{label} does not say how many verifications there were, or served others too: no tau")
    return {"url": " ".join(where.url for where in places.values())} | found
