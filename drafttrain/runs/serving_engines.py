"""Measures serving engines (`drafttrain measure ... engine=NAME`) on the prompts that our decoder was timed on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafttrain.core.checksums import check_listed
from drafttrain.core.errors import UserError
from drafttrain.core.progress import Watch, stages
from drafttrain.data.pictures import sources_of
from drafttrain.data.prompts import Prompt, encode_prompt
from drafttrain.data.server import base_of
from drafttrain.engines.answers import TimedEngine
from drafttrain.engines.http import CHAT, TOKENS, EndpointOptions, context_of, endpoint
from drafttrain.engines.measurement import FIGURES, SPECULATIVE, OwnDecoding, TimingOptions, measured
from drafttrain.engines.process import ENGINES, EngineJob, python_of
from drafttrain.engines.timed_process import serving
from drafttrain.export import golden
from drafttrain.export.engine_check import Ending, chain_drafter, decoded
from drafttrain.export.exporter import GGUF, TARGET, ExportSettings, refusals
from drafttrain.export.exporter import export as export_to
from drafttrain.export.opened import Opened
from drafttrain.export.table import loads, stacks_for
from drafttrain.measure.bench import BASELINE
from drafttrain.measure.cases import encode_cases, left_out_notes
from drafttrain.measure.entry import prompt_digest
from drafttrain.measure.flags import best_entry
from drafttrain.measure.report import Report
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import weights_of

ALL = "all"
ENDPOINTS = {"http": "HTTP endpoint", "sglang": "SGLang"}
TIMED = [name for name, engine in ENGINES.items() if engine.serves]
AS_DECODED = {"policy": "greedy", "temperature": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "stop": []}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engines to measure."""

    pythons: dict[str, Path] = field(default_factory=dict)  # by engine that runs here: the Python that has it
    endpoints: dict[str, dict[str, EndpointOptions]] = field(default_factory=dict)  # by engine that is a server: its endpoints
    notes: list[str] = field(default_factory=list)  # engines left out, with the reason
    every: bool = False  # engine=all: leave out engines that cannot run, instead of raising an error

    @staticmethod
    def of(options: RunOptions, family: str) -> EngineChoice:
        """The engines that the options name.

        Raises UserError for an engine that is unknown, is not installed, or does not load the family, and for settings that
        engines do not support. With engine=all, such engines are left out.
        """
        names = _names(options)
        choice = EngineChoice(every=options.engine == ALL)
        if names:
            _check(options, names)
            if any(sources_of([{"content": turn} for turn in p.turns]) for p in measurement_prompts(options)):
                raise UserError("engines are measured with prompts of text alone, and there are images; leave one of both out")
        for name in names:
            if name in ENDPOINTS:
                choice.endpoints[name] = _places(options, name)
                continue
            try:
                stacks_of(name, family)
                choice.pythons[name] = python_of(name, options.engine_python)
            except UserError as error:
                choice.leave_out(name, error)
        return choice

    def leave_out(self, name: str, error: UserError) -> None:
        """Note that an engine is left out; raises the error if the user named the engine."""
        if not self.every:
            raise error
        self.notes.append(f"{ENGINES[name].label} was left out: {error}")

    def __bool__(self) -> bool:
        return bool(self.pythons or self.endpoints or self.notes)


@dataclass(frozen=True, slots=True)
class EngineExport:
    """A temporary export that an engine loads."""

    out: Path
    stack: str
    dtype: str


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """The inputs of every engine."""

    options: RunOptions
    opened: Opened
    prompts: list[Prompt]  # those that our decoder was timed on
    ids: list[list[int]]  # the prompts as token ids
    ending: Ending
    length: int  # of the drafted chains
    dtype: str
    here: Callable[[str], OwnDecoding]  # our decoder's outputs with the same chains

    def terms(self, label: str, batches: bool, watch: Watch) -> TimingOptions:
        """The settings of an engine's measurement. batches: whether the engine decodes batches."""
        measure = self.options.measure
        return TimingOptions(
            label, len(self.ids), measure.batch_sizes if batches else [1], measure.repeats, 60 * measure.minutes, self.length,
            self.ending.stop_ids, watch,
        )  # fmt: skip


@contextmanager
def exports(choice: EngineChoice, directory: Path, loaded: LoadedTarget) -> Iterator[dict[str, EngineExport]]:
    """Export the checkpoint for each engine, with the checks of `export`. Raises UserError and ParityError as `export` does."""
    with tempfile.TemporaryDirectory(prefix="drafttrain-engines-") as folder:
        if not choice.pythons:
            yield {}
            return
        if (width := weights_of(loaded.target.fingerprint)) != "whole":
            raise UserError(
                f"the target has {width} weights here, but engines load whole weights; leave out target.weights or engine"
            )
        opened = Opened.of(directory, loaded)
        material = golden.stored(directory) or golden.made(opened, golden.sequences_for(loaded))
        dtype, done = str(loaded.target.dtype).removeprefix("torch."), {}
        for name in choice.pythons:
            try:
                wanted = wanted_export(opened, name, Path(folder) / name, dtype)
            except UserError as error:
                choice.leave_out(name, error)
                continue
            export_to(opened, material, wanted)
            done[name] = EngineExport(wanted.out, wanted.stacks[0], dtype)
        del opened, material
        yield done


def measure_engines(
    choice: EngineChoice, ready: dict[str, EngineExport], report: Report, directory: Path, loaded: LoadedTarget,
    options: RunOptions, console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """The report's `engines`. An engine that fails has the reason in `error` and no figures."""
    entries = []
    with stages(console) as watch:
        watch("our chains", 0, 1, 0)
        inputs = _inputs(choice, report, directory, loaded, options)
        inputs.here("plain")
        watch("our chains", 1, 1, 0)
        for name in (*ready, *choice.endpoints):
            label = ENDPOINTS[name] if name in ENDPOINTS else ENGINES[name].label
            entry: dict[str, Any] = {"engine": name, "label": label}
            entry |= dict.fromkeys(("stack", "url", "dtype", "threads", "error"))
            entry |= dict.fromkeys(FIGURES)
            try:
                if name in ENDPOINTS:
                    entry |= _over_network(inputs, label, choice.endpoints[name], watch)
                else:
                    entry |= _in_process(inputs, name, choice.pythons[name], ready[name], watch)
            except UserError as error:
                entry |= {"error": str(error), "flags": [], "notes": [], "slices": [], "versions": {}}
            entries.append(entry)
    return entries


def target_place(out: Path, opened: Opened) -> str:
    """Path of the target that the engine serves. An adapted target is the merged one that was exported with the drafter."""
    if opened.meta.adapter is None:
        path = Path(opened.loaded.path).expanduser()
        return str(path.absolute()) if path.exists() else opened.loaded.path
    places = [folder / TARGET for folder in (out, out.parent)]
    found = next((place for place in places if (place / "config.json").is_file()), None)
    if found is None:
        raise UserError(f"the target was trained with this drafter, but {out} has no {TARGET} next to it; export it again")
    check_listed(found, "export again")
    return str(found)


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


def check_greedy(options: RunOptions) -> None:
    """Raise UserError for decode settings that engines are not measured with."""
    for key, wanted in AS_DECODED.items():
        if (got := getattr(options.decode, key)) != wanted:
            raise UserError(
                f"decode.{key} is {got!r}, but engines are measured with greedy decoding, {wanted!r}; leave one of both out"
            )


def _check(options: RunOptions, names: Sequence[str]) -> None:
    check_greedy(options)
    setting, size = options.target.shared_by
    if size > 1:
        raise UserError(f"{setting} is {size}, but engines load the whole target; leave one out")
    if options.engine_python is not None and len([name for name in names if name not in ENDPOINTS]) > 1:
        raise UserError("engine_python names the Python of one engine, but there are several; measure them one by one")
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
            f"engine={name} needs a server; name one or both with engine_url=URL (with speculation) and engine_plain_url=URL "
            "(without)"
        )
    return found


def stacks_of(name: str, family: str) -> list[str]:
    """The stacks whose exports this engine loads for this family. Raises UserError if there is none."""
    able = [stack for stack in ENGINES[name].loads if stack in loads(family)]
    return able or stacks_for(family, ENGINES[name].loads[0])


def wanted_export(opened: Opened, name: str, out: Path, dtype: str) -> ExportSettings:
    """The export for the first stack that accepts this drafter. Raises the first stack's UserError if none does."""
    errors = []
    for stack in stacks_of(name, opened.meta.family):
        wanted = ExportSettings([stack], out, dtype, False, with_target=stack == GGUF)
        try:
            refusals(opened, wanted)
            return wanted
        except UserError as error:
            errors.append(error)
    raise errors[0]


def chain_room(loaded: LoadedTarget, max_new_tokens: int, length: int) -> int:
    """Tokens of the longest prompt that leaves room for an answer, and for a chain that a step drafts past its end."""
    return loaded.target.shape.max_positions - max_new_tokens - length - 2


def _inputs(choice: EngineChoice, report: Report, directory: Path, loaded: LoadedTarget, options: RunOptions) -> EngineInputs:
    """The inputs of every engine: the timed prompts, and our decoder's outputs for them."""
    opened = Opened.of(directory, loaded)
    length = options.decode.draft_length or opened.drafter.draft_length
    prompts, room = measurement_prompts(options), chain_room(loaded, options.decode.max_new_tokens, length)
    by_digest = {prompt_digest(encode_prompt(loaded.tokenizer, prompt.turns)): prompt for prompt in prompts}
    timed = {line["prompt"] for line in best_entry(report)["per_prompt"] if line["decode_ms"] is not None}
    cases, left_out = encode_cases(prompts, loaded.tokenizer, room)
    choice.notes.extend(left_out_notes(left_out, len(prompts), room, "prompts for engines"))
    ids = [case.tokens for case in cases if prompt_digest(case.tokens) in timed]
    if not ids:
        raise UserError("no timed prompt leaves room for a drafted chain after it; give shorter prompts")
    ending = Ending(loaded.target.stop_ids, options.decode.max_new_tokens)
    dtype = str(loaded.target.dtype).removeprefix("torch.")
    chosen = [by_digest[prompt_digest(tokens)] for tokens in ids]
    return EngineInputs(options, opened, chosen, ids, ending, length, dtype, own_decoding(opened, ids, ending, length, dtype))


def own_decoding(opened: Opened, ids: list[list[int]], ending: Ending, length: int, dtype: str) -> Callable[[str], OwnDecoding]:
    target, drafter = opened.loaded.target, chain_drafter(opened, length, dtype)

    @cache
    def decode(begins: str) -> OwnDecoding:
        outputs = [decoded(target, drafter, prompt, ending, length, begins) for prompt in ids]
        tokens = [one.tokens[: ending.of(one.tokens)] for one in outputs]
        strings = [str(opened.loaded.tokenizer.decode(own, skip_special_tokens=True)) for own in tokens]
        emitted = [max(0, len(own) - one.first) for own, one in zip(tokens, outputs, strict=True)]
        return OwnDecoding(tokens, strings, emitted, [one.counted(ending, "whole") for one in outputs])

    return decode


def _in_process(inputs: EngineInputs, name: str, python: Path, export: EngineExport, watch: Watch) -> dict[str, Any]:
    engine, threads, opened = ENGINES[name], torch.get_num_threads(), inputs.opened
    terms = inputs.terms(engine.label, engine.batches, watch)
    timed = {"dtype": export.dtype, "threads": threads, "device": opened.loaded.target.device.type, "batch": max(terms.sizes)}

    def job(speculative: bool) -> EngineJob:
        return EngineJob(
            target=target_place(export.out, opened),
            drafter=str(export.out),
            family=opened.meta.family,
            layout=export.stack,
            draft_length=inputs.length,
            max_new_tokens=inputs.ending.max_new_tokens,
            stop_ids=sorted(inputs.ending.stop_ids),
            prompts=inputs.ids,
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
        found = measured(sides, inputs.here, terms)
    return {"stack": export.stack, "dtype": export.dtype, "threads": threads} | found


def _over_network(inputs: EngineInputs, label: str, places: dict[str, EndpointOptions], watch: Watch) -> dict[str, Any]:
    first, longest = next(iter(places.values())), [length for where in places.values() if (length := context_of(where))]
    inputs, notes = _within(inputs, min(longest)) if longest else (inputs, [])
    terms = inputs.terms(label, True, watch)
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in inputs.prompts]
    prompts: Any = chats if first.api == CHAT else inputs.ids
    with ExitStack() as open_now:
        sides: dict[str, TimedEngine] = {
            side: open_now.enter_context(endpoint(where, prompts, inputs.ending.max_new_tokens, max(terms.sizes)))
            for side, where in places.items()
        }
        found = measured(sides, inputs.here, terms)
    found["notes"] += notes
    drafts = found["drafted"] / found["verifications"] if found["drafted"] and found["verifications"] else inputs.length
    if abs(drafts - inputs.length) > 0.5:
        found["notes"].append(f"{label} drafted {drafts:.1f} tokens per verification; our chains have {inputs.length}")
    return {"url": " ".join(where.url for where in places.values())} | found


def _within(inputs: EngineInputs, positions: int) -> tuple[EngineInputs, list[str]]:
    """(the inputs without the prompts that leave no room for an answer in so many positions, a note on these)."""
    room = positions - inputs.ending.max_new_tokens
    kept = [i for i, ids in enumerate(inputs.ids) if len(ids) <= room]
    left_out = [str(prompt.question_id) for i, prompt in enumerate(inputs.prompts) if i not in kept]
    if not left_out:
        return inputs, []
    if not kept:
        raise UserError(
            f"the server's context of {positions} tokens leaves room for {max(room, 0)} with decode.max_new_tokens, and no "
            "timed prompt fits; start it with a longer one, or lower decode.max_new_tokens"
        )
    ids = [inputs.ids[i] for i in kept]
    here = own_decoding(inputs.opened, ids, inputs.ending, inputs.length, inputs.dtype)
    fitting = replace(inputs, prompts=[inputs.prompts[i] for i in kept], ids=ids, here=here)
    return fitting, left_out_notes(left_out, len(inputs.ids), room, "timed prompts")
