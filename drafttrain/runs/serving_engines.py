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

from drafttrain.core.console import Watch, stages
from drafttrain.core.errors import UserError
from drafttrain.core.files import check_listed
from drafttrain.core.sampling import Sampling
from drafttrain.data.pictures import sources_of
from drafttrain.data.prompts import Prompt, encode_prompt
from drafttrain.engines.answers import TimedEngine
from drafttrain.engines.http import CHAT, EndpointOptions, context_of, endpoint
from drafttrain.engines.measurement import FIGURES, SPECULATIVE, OwnDecoding, TimingOptions, measured
from drafttrain.engines.process import ENGINES, EngineJob, python_of
from drafttrain.engines.timed_process import serving
from drafttrain.export import golden
from drafttrain.export.engine_check import GREEDY, Ending, chain_drafter, decoded
from drafttrain.export.exporter import GGUF, TARGET, ExportSettings, refusals
from drafttrain.export.exporter import export as export_to
from drafttrain.export.opened import Opened
from drafttrain.export.serve import draft_lengths
from drafttrain.export.table import loads, stacks_for
from drafttrain.measure.bench import BASELINE
from drafttrain.measure.cases import encode_cases, left_out_notes
from drafttrain.measure.decoding import sampling_of
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
AS_DECODED = {"policy": "greedy", "temperature": 0.0, "min_new_tokens": 0, "stop": []}
PENALTIES = {  # that servers take too
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}


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
            prompts = measurement_prompts(options)
            if any(sources_of([{"content": turn} for turn in p.turns]) for p in prompts):
                raise UserError("engines are measured with prompts of text alone, and there are images; leave one of both out")
            if options.engine_api == CHAT and any(p.tools for p in prompts):
                raise UserError("engine_api=chat sends no tools, and there are prompts with tools; set engine_api=tokens")
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
    here: Callable[..., OwnDecoding]  # our decoder's outputs with the same chains

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
        checkpoint = Opened.of(directory, loaded)
        material = golden.stored(directory) or golden.made(checkpoint, golden.sequences_for(loaded))
        dtype, exported = str(loaded.target.dtype).removeprefix("torch."), {}
        for name in choice.pythons:
            try:
                export_settings = wanted_export(checkpoint, name, Path(folder) / name, dtype)
            except UserError as error:
                choice.leave_out(name, error)
                continue
            export_to(checkpoint, material, export_settings)
            exported[name] = EngineExport(export_settings.out, export_settings.stacks[0], dtype)
        del checkpoint, material
        yield exported


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
    candidates = [folder / TARGET for folder in (out, out.parent)]
    target_folder = next((candidate for candidate in candidates if (candidate / "config.json").is_file()), None)
    if target_folder is None:
        raise UserError(f"the target was trained with this drafter, but {out} has no {TARGET} next to it; export it again")
    check_listed(target_folder, "export again")
    return str(target_folder)


def _names(options: RunOptions) -> list[str]:
    if options.engine is None:
        return []
    if options.engine == ALL:
        return TIMED
    names = [options.engine] if isinstance(options.engine, str) else list(options.engine)
    valid_names = [*TIMED, *ENDPOINTS]
    if unknown := [name for name in names if name not in valid_names]:
        raise UserError(f"engine is {str(unknown[0])!r}; measure takes {', '.join(valid_names)}, a list of them, or {ALL}")
    return list(dict.fromkeys(names))


def check_greedy(options: RunOptions, servers: bool = False) -> None:
    """Raise UserError for decode settings that engines are not measured with. servers: the engines are servers."""
    for key, expected in (AS_DECODED | ({} if servers else PENALTIES)).items():
        if (actual := getattr(options.decode, key)) != expected:
            servers_take = ", or measure a server (engine=http), which takes it" if key in PENALTIES else ""
            raise UserError(
                f"decode.{key} is {actual!r}, but engines are measured with greedy decoding, {expected!r}; "
                f"leave one of both out{servers_take}"
            )


def _check(options: RunOptions, names: Sequence[str]) -> None:
    check_greedy(options, servers=all(name in ENDPOINTS for name in names))
    setting, size = options.target.shared_by
    if size > 1:
        raise UserError(f"{setting} is {size}, but engines load the whole target; leave one out")
    if options.engine_python is not None and len([name for name in names if name not in ENDPOINTS]) > 1:
        raise UserError("engine_python names the Python of one engine, but there are several; measure them one by one")


def _places(options: RunOptions, name: str) -> dict[str, EndpointOptions]:
    urls = {SPECULATIVE: ("engine_url", options.engine_url), BASELINE: ("engine_plain_url", options.engine_plain_url)}
    key = os.environ.get(options.engine_key_env) or None
    penalties = {name: value for name in PENALTIES if (value := getattr(options.decode, name)) != PENALTIES[name]}
    endpoints = {
        side: EndpointOptions(url, setting, options.engine_model, key, options.engine_api, penalties)
        for side, (setting, url) in urls.items()
        if url is not None
    }
    for server in endpoints.values():
        context_of(server)  # a server that does not answer is said before anything is measured here
    if not endpoints:
        raise UserError(
            f"engine={name} needs a server; name one or both with engine_url=URL (with speculation) and engine_plain_url=URL "
            "(without)"
        )
    return endpoints


def stacks_of(name: str, family: str) -> list[str]:
    """The stacks whose exports this engine loads for this family. Raises UserError if there is none."""
    loadable = [stack for stack in ENGINES[name].loads if stack in loads(family)]
    return loadable or stacks_for(family, ENGINES[name].loads[0])


def wanted_export(opened: Opened, name: str, out: Path, dtype: str) -> ExportSettings:
    """The export for the first stack that accepts this drafter. Raises the first stack's UserError if none does."""
    errors = []
    for stack in stacks_of(name, opened.meta.family):
        export_settings = ExportSettings([stack], out, dtype, False, with_target=stack == GGUF)
        try:
            refusals(opened, export_settings)
            return export_settings
        except UserError as error:
            errors.append(error)
    raise errors[0]


def chain_room(loaded: LoadedTarget, max_new_tokens: int, length: int) -> int:
    """Tokens of the longest prompt that leaves room for an answer, and for a chain that a step drafts past its end."""
    return loaded.target.shape.max_positions - max_new_tokens - length - 2


def _inputs(choice: EngineChoice, report: Report, directory: Path, loaded: LoadedTarget, options: RunOptions) -> EngineInputs:
    """The inputs of every engine: the timed prompts, and our decoder's outputs for them."""
    checkpoint = Opened.of(directory, loaded)
    length = options.decode.draft_length or next(iter(draft_lengths(checkpoint).values()))
    prompts, max_prompt_tokens = measurement_prompts(options), chain_room(loaded, options.decode.max_new_tokens, length)
    by_digest = {prompt_digest(encode_prompt(loaded.tokenizer, prompt.turns, tools=prompt.tools)): prompt for prompt in prompts}
    timed_digests = {line["prompt"] for line in best_entry(report)["per_prompt"] if line["decode_ms"] is not None}
    cases, left_out = encode_cases(prompts, loaded.tokenizer, max_prompt_tokens)
    choice.notes.extend(left_out_notes(left_out, len(prompts), max_prompt_tokens, "prompts for engines"))
    ids = [case.tokens for case in cases if prompt_digest(case.tokens) in timed_digests]
    if not ids:
        raise UserError("no timed prompt leaves room for a drafted chain after it; give shorter prompts")
    ending = Ending(loaded.target.stop_ids, options.decode.max_new_tokens)
    dtype = str(loaded.target.dtype).removeprefix("torch.")
    timed_prompts = [by_digest[prompt_digest(tokens)] for tokens in ids]
    return EngineInputs(
        options, checkpoint, timed_prompts, ids, ending, length, dtype,
        own_decoding(checkpoint, ids, ending, length, dtype, sampling_of(options.decode)),
    )  # fmt: skip


def own_decoding(
    opened: Opened, ids: list[list[int]], ending: Ending, length: int, dtype: str, sampling: Sampling = GREEDY
) -> Callable[..., OwnDecoding]:
    """Our greedy decoding, by how an engine begins and by the length of its chains (at most `length`). sampling: penalties."""
    target, drafter = opened.loaded.target, chain_drafter(opened, length, dtype)

    @cache
    def decode(begins: str, drafts: int = length) -> OwnDecoding:
        outputs = [decoded(target, drafter, prompt, ending, drafts, begins, sampling) for prompt in ids]
        tokens = [output.tokens[: ending.of(output.tokens)] for output in outputs]
        strings = [str(opened.loaded.tokenizer.decode(token_ids, skip_special_tokens=True)) for token_ids in tokens]
        emitted = [max(0, len(token_ids) - output.first) for token_ids, output in zip(tokens, outputs, strict=True)]
        return OwnDecoding(tokens, strings, emitted, [output.counted(ending, "whole") for output in outputs])

    return decode


def _in_process(inputs: EngineInputs, name: str, python: Path, export: EngineExport, watch: Watch) -> dict[str, Any]:
    engine, threads, checkpoint = ENGINES[name], torch.get_num_threads(), inputs.opened
    terms = inputs.terms(engine.label, engine.batches, watch)
    timed = {
        "dtype": export.dtype,
        "threads": threads,
        "device": checkpoint.loaded.target.device.type,
        "batch": max(terms.sizes),
    }

    def job(speculative: bool) -> EngineJob:
        return EngineJob(
            target=target_place(export.out, checkpoint),
            drafter=str(export.out),
            family=checkpoint.meta.family,
            layout=export.stack,
            draft_length=inputs.length,
            max_new_tokens=inputs.ending.max_new_tokens,
            stop_ids=sorted(inputs.ending.stop_ids),
            prompts=inputs.ids,
            facts={"layer_inputs": [block + 1 for block in checkpoint.drafter.taps.blocks]},
            timed=timed | {"speculative": speculative},
        )

    with tempfile.TemporaryDirectory(prefix="drafttrain-engine-") as folder, ExitStack() as stack:
        engines: dict[str, TimedEngine] = {}
        for engines_ready, side in enumerate((SPECULATIVE, BASELINE), start=1):
            watch(f"{engine.label}: ready", engines_ready - 1, 2, 0)
            engine_process = serving(name, python, job(side == SPECULATIVE), Path(folder) / side)
            engines[side] = stack.enter_context(engine_process)
            watch(f"{engine.label}: ready", engines_ready, 2, 0)
        figures = measured(engines, inputs.here, terms)
    return {"stack": export.stack, "dtype": export.dtype, "threads": threads} | figures


def _over_network(inputs: EngineInputs, label: str, endpoints: dict[str, EndpointOptions], watch: Watch) -> dict[str, Any]:
    first, context_lengths = (
        next(iter(endpoints.values())),
        [length for server in endpoints.values() if (length := context_of(server))],
    )
    inputs, notes = _within(inputs, min(context_lengths)) if context_lengths else (inputs, [])
    terms = inputs.terms(label, True, watch)
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in inputs.prompts]
    prompts: Any = chats if first.api == CHAT else inputs.ids
    with ExitStack() as stack:
        engines: dict[str, TimedEngine] = {
            side: stack.enter_context(endpoint(server, prompts, inputs.ending.max_new_tokens, max(terms.sizes)))
            for side, server in endpoints.items()
        }
        figures = measured(engines, inputs.here, terms)
    figures["notes"] += notes
    drafts = figures["drafted"] / figures["verifications"] if figures["drafted"] and figures["verifications"] else inputs.length
    if abs(drafts - inputs.length) > 0.5:
        figures["notes"].append(f"{label} drafted {drafts:.1f} tokens per verification; our chains have {inputs.length}")
    return {"url": " ".join(server.url for server in endpoints.values())} | figures


def _within(inputs: EngineInputs, positions: int) -> tuple[EngineInputs, list[str]]:
    """(the inputs without the prompts that leave no room for an answer in so many positions, a note on these)."""
    max_prompt_tokens = positions - inputs.ending.max_new_tokens
    kept_indices = [i for i, ids in enumerate(inputs.ids) if len(ids) <= max_prompt_tokens]
    left_out = [str(prompt.question_id) for i, prompt in enumerate(inputs.prompts) if i not in kept_indices]
    if not left_out:
        return inputs, []
    if not kept_indices:
        raise UserError(
            f"the server's context of {positions} tokens leaves room for {max(max_prompt_tokens, 0)} with "
            "decode.max_new_tokens, and no timed prompt fits; start it with a longer one, or lower decode.max_new_tokens"
        )
    ids = [inputs.ids[i] for i in kept_indices]
    sampling = sampling_of(inputs.options.decode)
    our_decoding = own_decoding(inputs.opened, ids, inputs.ending, inputs.length, inputs.dtype, sampling)
    fitting = replace(inputs, prompts=[inputs.prompts[i] for i in kept_indices], ids=ids, here=our_decoding)
    return fitting, left_out_notes(left_out, len(inputs.ids), max_prompt_tokens, "timed prompts")
