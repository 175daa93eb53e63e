"""Measures checkpoints of one target against its plain decoding, within a time budget, and counts what guards did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from drafttrain.core.console import Watch
from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.prompts import Prompt, read_documents
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.decoding.guards import JSON, LOOP, QUALITY, valid_json
from drafttrain.decoding.request import Result
from drafttrain.drafters.checkpoint import check_target, load_checkpoint, read_meta
from drafttrain.drafters.tuned_settings import TUNED
from drafttrain.measure import DecodeOptions, GuardOptions, MeasureOptions
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Budget, Case, encode_cases, follow_ups, left_out_notes
from drafttrain.measure.decoding import decoder_of, depth_limit, idle_guards
from drafttrain.measure.entry import Evidence, Keys, by_batch_size, by_category, checkpoint_keys, monitor_keys, samples
from drafttrain.measure.expected import confidence_error, counted_paths
from drafttrain.measure.flags import by_context, distillation, flags, nothing_gains
from drafttrain.measure.quality import Original
from drafttrain.measure.sheet import outputs as sheet_outputs
from drafttrain.measure.slices import at_temperature, conditions, context_lengths, other_slices
from drafttrain.measure.speed import Race, step_floor
from drafttrain.measure.tuning import ProposalShape, tuning_notes
from drafttrain.model.drafter import Drafter, check_images, trainable
from drafttrain.model.images import has_images
from drafttrain.targets.adapt import check_whole
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import weights_of


def valid_outputs(bench: Bench, cases: Sequence[Case], results: Sequence[Result]) -> list[bool | None]:
    """Whether each output is the JSON that its prompt asks for; None for prompts that ask for none."""
    tokenizer, fence = bench.loaded.tokenizer, bench.decode.guard.fence
    return [
        valid_json(str(tokenizer.decode(r.tokens, skip_special_tokens=True)), case.required, fence) if case.as_json else None
        for case, r in zip(cases, results, strict=True)
    ]


def without_guards(bench: Bench) -> Bench | None:
    """The bench with all guards off; None if none is on."""
    guard = bench.decode.guard
    if guard.loop == guard.json == "off":
        return None
    return replace(bench, decode=replace(bench.decode, guard=GuardOptions(fence=guard.fence)))


def guard_keys(bench: Bench, evidence: Evidence, free: Sequence[Result]) -> Keys:
    """The report's `guards`: how often guards acted, and the outputs' quality with and without.

    free: the outputs without guards.
    """
    names = [case.category for case in evidence.cases]
    keys: Keys = {
        name: {
            "action": getattr(bench.decode.guard, name),
            "acted": _acted(evidence.speculative, name),
            "baseline_acted": _acted(evidence.plain, name),
        }
        for name in (LOOP, JSON)
    }
    keys["categories"] = []
    for category in dict.fromkeys(names):
        category_results = [
            r for r, case_category in zip(evidence.speculative, names, strict=True) if case_category == category
        ]
        keys["categories"].append(
            {"category": category, "prompts": len(category_results)} | {n: _acted(category_results, n) for n in (LOOP, JSON)}
        )
    keys["with"] = _quality(bench, evidence)
    keys["without"] = _quality(bench, replace(evidence, speculative=free, valid=valid_outputs(bench, evidence.cases, free)))
    return keys


def _acted(results: Sequence[Result], guard: str) -> int:
    return sum(act.guard == guard for result in results for act in result.acts)


def _quality(bench: Bench, evidence: Evidence) -> Keys:
    monitors = monitor_keys(evidence, bench.loaded.target.stop_ids)
    log_likelihood = bench.log_likelihood(evidence.cases, evidence.speculative)
    tokens = sum(len(r.tokens) for r in evidence.speculative)
    return {key: monitors[key] for key in QUALITY} | {"tokens": tokens, "log_likelihood": log_likelihood}


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint to measure."""

    name: str  # its name in the report
    path: Path  # its directory
    step: int | None  # its training step; None when unknown
    tuned: bool = True  # False: with the proposal that it was trained for, whatever tuning has found


def measure_checkpoints(
    loaded: LoadedTarget,
    checkpoints: Sequence[CheckpointRef],
    prompts: Sequence[Prompt],
    decode: DecodeOptions,
    options: MeasureOptions,
    watch: Watch,
    held_out: Sequence[Encoded] = (),
) -> dict[str, Any]:
    """Measure the checkpoints and return the report's keys `checkpoints` and `measure`.

    Checkpoints of an unchanged target are measured together. A checkpoint that adapts the target is measured alone, against
    plain decoding of its adapted target, within its share of the budget.
    held_out: conversations for the perplexity of adapted targets.
    Raises UserError for settings or prompts that cannot be measured.
    """
    if not checkpoints:
        raise UserError("there is no checkpoint to measure; give at least one")
    for checkpoint in checkpoints:
        check_target(checkpoint.path, read_meta(checkpoint.path).target, loaded.target)
    check_measurement(loaded, None, decode, options)
    max_prompt_tokens = loaded.target.shape.max_positions - decode.max_new_tokens
    cases, left_out = encode_cases(prompts, loaded.tokenizer, max_prompt_tokens, loaded.images)
    loaded.check_adapters(case.adapter for case in cases)
    notes = left_out_notes(left_out, len(prompts), max_prompt_tokens)
    if reason := loaded.description.get("chains_reason"):
        notes.append(f"the target verifies chains, not trees, so drafts are chains: {reason}")
    if reason := loaded.description.get("attention_reason"):
        notes.append(f"target.attention is eager: {reason}")
    if reason := loaded.description.get("capture_reason"):
        notes.append(f"decode steps run without CUDA graphs: {reason}")
    notes.extend(_other_weights(loaded, checkpoints))
    notes.extend(filter(None, [idle_guards(decode)]))
    if options.transformers and (decode.presence_penalty or decode.frequency_penalty):
        notes.append("transformers was left out: it has no presence and no frequency penalty")
    start_time = monotonic()
    adapted = [c for c in checkpoints if read_meta(c.path).adapter is not None]
    groups = [group for group in ([c for c in checkpoints if c not in adapted], *([c] for c in adapted)) if group]
    share = 60 * options.minutes / (len(groups) + bool(adapted))
    bench = Bench(loaded, decode, options, Budget(share, notes=notes), watch)
    original = None
    if adapted:
        check_whole(loaded.target)
        plain = bench.decode_all("original target", None, cases, passes=2)
        original = Original(loaded, [c.tokens for c in cases], [r.tokens for r in plain], held_out)
    entries_by_name: dict[str, Keys] = {}
    for group in groups:
        entries_by_name |= _group(
            replace(bench, budget=Budget(share, notes=notes)), group, cases, None if group[0] not in adapted else original
        )
    order = [str(c.path) for c in checkpoints]
    entries = sorted(entries_by_name.values(), key=lambda entry: order.index(entry["path"]))
    notes.extend([*distillation(entries), *nothing_gains(entries), *by_context(entries)])
    run_info = {"seconds": monotonic() - start_time, "notes": list(dict.fromkeys(notes)), "decode": asdict(decode)}
    return {"checkpoints": entries, "measure": asdict(options) | run_info}


def _group(
    bench: Bench, checkpoints: Sequence[CheckpointRef], cases: Sequence[Case], original: Original | None
) -> dict[str, Keys]:
    """The report's entries of checkpoints that share a target, and of their variants, by name.

    original: the unchanged target, where the checkpoints have an adapted one; the report compares the two.
    """
    by_hand = bench.decode.draft_length is not None
    restored = {c.name: load_checkpoint(c.path, bench.loaded, c.tuned and not by_hand) for c in checkpoints}
    if by_hand and any((c.path / TUNED).is_file() for c in checkpoints):
        bench.budget.notes.append(
            f"decode.draft_length is set: drafts are the trained ones, cut to it, and {TUNED} has no effect"
        )
    first, with_images = checkpoints[0].name, any(has_images(case.tokens) for case in cases)
    for loaded_checkpoint in restored.values():
        check_images(loaded_checkpoint.drafter, with_images)
    if original is not None:
        watch, label = bench.watch, f"{first}: "
        bench = replace(
            bench,
            loaded=restored[first].loaded,
            watch=lambda stage, *counts: watch(label + stage.removeprefix(label), *counts),  # a separate progress bar
        )
    checkpoints, drafters = _rows(checkpoints, {name: r.drafter for name, r in restored.items()})
    for drafter in drafters.values():
        drafter.use_batch_size(bench.options.batch_sizes[0])
        bench.decoder(drafter)  # raises for settings that it cannot decode with, before the baseline takes its time
        bench.budget.notes.extend(tuning_notes(drafter, bench.options.batch_sizes))
    if bench.decode.draft_temperature is not None and not any(drafter.samples for drafter in drafters.values()):
        bench.budget.notes.append("decode.draft_temperature has no effect: the drafts are not sampled")
    first_turns = len(cases)
    cases, plain, reference = _baseline(bench, cases, passes=len(checkpoints) + 1)
    parameters = {name: trainable(drafter) for name, drafter in drafters.items()}
    for drafter in drafters.values():
        drafter.requires_grad_(False)  # the drafters only decode from here on
    evidence = {name: _evidence(bench, name, drafter, cases, plain, reference) for name, drafter in drafters.items()}
    extras = {name: _extras(bench, name, drafter, evidence[name]) for name, drafter in drafters.items()}
    extra_conditions = conditions(bench, cases)
    races = bench.races(drafters, cases, others=len(extra_conditions))
    condition_slices = other_slices(extra_conditions, drafters)
    entries = [_entry(bench, c, drafters[c.name], evidence[c.name], races) | extras[c.name] for c in checkpoints]
    change = None if original is None else original.change(restored[first], [r.tokens for r in plain[:first_turns]])
    for entry in entries:
        entry["parameters"] = parameters[entry["name"]]
        entry["target_change"] = change
        entry["slices"] += condition_slices[entry["name"]]
        entry["flags"] = flags(entry)
    return {entry["name"]: entry for entry in entries}


def _rows(
    checkpoints: Sequence[CheckpointRef], drafters: Mapping[str, Drafter]
) -> tuple[list[CheckpointRef], dict[str, Drafter]]:
    """A row for every checkpoint's drafter, each followed by rows for its variants."""
    refs, rows = [], {}
    for checkpoint in checkpoints:
        drafter = drafters[checkpoint.name]
        for name, row in {"": drafter, **drafter.variants()}.items():
            refs.append(replace(checkpoint, name=f"{checkpoint.name} {name}".strip()))
            rows[refs[-1].name] = row
    return refs, rows


def _other_weights(loaded: LoadedTarget, checkpoints: Sequence[CheckpointRef]) -> list[str]:
    """Notes on checkpoints that were trained for this model with weights of another precision."""
    current, notes = weights_of(loaded.target.fingerprint), []
    for checkpoint in checkpoints:
        trained = weights_of(read_meta(checkpoint.path).target.fingerprint)
        if trained != current and checkpoint.tuned:
            notes.append(
                f"{checkpoint.name} was trained for this target with {trained} weights; here the target has {current} weights"
            )
    return notes


def check_measurement(loaded: LoadedTarget, drafter: Drafter | None, decode: DecodeOptions, options: MeasureOptions) -> None:
    """Raise UserError for settings that cannot be measured. `fit` calls this before training too.

    drafter: the drafter that will be measured; None if it is not known yet.
    """
    if not options.batch_sizes:
        raise UserError("measure.batch_sizes is empty; give one or more sizes")
    if decode.max_new_tokens < 2:
        raise UserError(
            f"decode.max_new_tokens is {decode.max_new_tokens}; set it to 2 or more, because the prefill gives the first token"
        )
    for temperature in dict.fromkeys([decode.temperature, *options.temperatures]):
        decoder_of(loaded, decode if temperature == decode.temperature else at_temperature(decode, temperature), drafter)
    if context_lengths(options.contexts, loaded.target.shape.max_positions - decode.max_new_tokens):
        read_documents(options.documents)


def _baseline(bench: Bench, cases: Sequence[Case], passes: int) -> tuple[list[Case], list[Result], list[list[int]] | None]:
    """(cases, plain outputs, transformers' outputs or None): the baseline that every drafter is compared with.

    The cases are the given first turns (fewer, when the budget is short), then the dialogues' further turns. Each further turn
    follows the target's own plain replies.
    """
    with_reference = bench.with_transformers
    plain = bench.decode_all("plain decoding", None, cases, passes + with_reference)
    if len(plain) < len(cases):
        bench.budget.notes.append(
            f"acceptance was measured on {len(plain)} of {len(cases)} prompts by measure.minutes={bench.options.minutes:g}"
        )
    all_cases = turn = list(cases[: len(plain)])
    replies, max_prompt_tokens = plain, bench.loaded.target.shape.max_positions - bench.decode.max_new_tokens
    while True:
        outputs = [r.tokens for r in replies]
        loaded = bench.loaded
        turn, left_out = follow_ups(turn, outputs, loaded.tokenizer, max_prompt_tokens, bench.options.turns, loaded.images)
        bench.budget.notes.extend(left_out_notes(left_out, len(turn) + len(left_out), max_prompt_tokens, "further turns"))
        if not turn:
            return all_cases, plain, bench.reference(all_cases, plain) if with_reference else None
        replies = bench.decode_all(f"plain decoding, turn {turn[0].turn}", None, turn, first=len(all_cases))
        all_cases, plain = [*all_cases, *turn], [*plain, *replies]


def _evidence(
    bench: Bench, name: str, drafter: Drafter, cases: Sequence[Case], plain: Sequence[Result], reference: list[list[int]] | None
) -> Evidence:
    """One checkpoint's run over all cases, its teacher-forced hits on the plain outputs, and the comparison of tokens."""
    ours = bench.decode_all(f"{name}: acceptance", drafter, cases)
    limits = [depth for depth in (depth_limit(bench.decode, drafter), bench.decode.window) if depth is not None]
    tokens = [r.tokens for r in ours]
    sampled = not bench.sampling.greedy and drafter.samples
    identical = POLICIES[bench.decode.policy].repeats_plain(bench.sampling)
    hits = bench.hits(drafter, cases, plain) if bench.agreement_predicts(drafter) else None
    return Evidence(
        cases=cases,
        plain=plain,
        speculative=ours,
        hits=hits,
        paths=counted_paths(drafter, hits, min(limits, default=None)),
        sampled=sampled,
        exact=bench.matches(cases, tokens, [r.tokens for r in plain]) if identical else None,
        exact_reference=None if reference is None else bench.matches(cases, tokens, reference),
        valid=valid_outputs(bench, cases, ours),
        plain_valid=valid_outputs(bench, cases, plain),
    )


def _extras(bench: Bench, name: str, drafter: Drafter, evidence: Evidence) -> Keys:
    """Keys that only some measurements have; None in the others.

    distribution_p_value: under lossless sampling. quality_delta: nats per token, under a lossy policy. guards: where one is on.
    confidence_error: of drafters with a confidence head.
    """
    keys: Keys = {"distribution_p_value": None, "quality_delta": None, "guards": None}
    if free := without_guards(bench):
        outputs = free.decode_all(f"{name}: without guards", drafter, evidence.cases)
        keys["guards"] = guard_keys(bench, evidence, outputs)
    keys["confidence_error"] = confidence_error(drafter, evidence.hits or [], evidence.sampled)
    if not POLICIES[bench.decode.policy].lossless:
        ours, plain = (bench.log_likelihood(evidence.cases, results) for results in (evidence.speculative, evidence.plain))
        keys["quality_delta"] = None if ours is None or plain is None else ours - plain
    elif not bench.sampling.greedy:
        keys["distribution_p_value"] = bench.distribution_p(drafter, evidence.cases[0])
    return keys


def _entry(bench: Bench, checkpoint: CheckpointRef, drafter: Drafter, evidence: Evidence, races: dict[int, Race]) -> Keys:
    first = races[bench.options.batch_sizes[0]]
    stop_ids = bench.loaded.target.stop_ids
    head: Keys = {"name": checkpoint.name, "path": str(checkpoint.path), "step": checkpoint.step, "tuned": checkpoint.tuned}
    keys = head | checkpoint_keys(evidence, checkpoint.name, first, stop_ids)
    keys["samples"] = samples(evidence, bench.loaded.tokenizer)
    keys["outputs"] = [] if POLICIES[bench.decode.policy].lossless else sheet_outputs(evidence, bench.loaded.tokenizer)
    keys |= {"policy": bench.decode.policy, "temperature": bench.decode.temperature, "batch_size": first.batch_size}
    keys["slices"] = by_category(evidence, checkpoint.name, first) + by_batch_size(races, checkpoint.name)
    for slice_keys in (keys, *(s for s in keys["slices"] if s["by"] == "batch_size")):
        slice_keys["floor_fraction"] = _floor_fraction(bench, races[slice_keys["batch_size"]], checkpoint.name, slice_keys)
        slice_keys["proposal"] = _proposal(bench, drafter, slice_keys["batch_size"])
    return keys


def _proposal(bench: Bench, drafter: Drafter, batch_size: int) -> str:
    """What is drafted for so many requests at a time."""
    drafter.use_batch_size(batch_size)
    return str(ProposalShape.of(drafter, depth_limit(bench.decode, drafter) or drafter.draft_length))


def _floor_fraction(bench: Bench, timed: Race, name: str, keys: Keys) -> float | None:
    target, wave = bench.loaded.target, timed.of(name)[0][0]
    floor = step_floor(target.cache_bytes(), wave, target.device)
    if floor is None:
        return None
    return 1000 * floor / (keys["draft_ms"] + keys["verify_ms"] + keys["commit_ms"] + keys["host_ms"])
