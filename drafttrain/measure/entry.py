"""One checkpoint's figures under the report's keys (docs/report-schema.md), over all prompts and by slice; sample outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.core.intervals import tau_interval
from drafttrain.core.tree import Path
from drafttrain.data.pictures import text_of
from drafttrain.decoding.guards import counted, ends_in_loop, missed_stop
from drafttrain.decoding.request import Result
from drafttrain.measure.acceptance import Acceptance, pooled
from drafttrain.measure.bench import BASELINE, REFERENCE
from drafttrain.measure.cases import Case
from drafttrain.measure.exactness import Match
from drafttrain.measure.expected import FLAGGED_GAP, ExpectedTau, expected_tau, gap, predicted, rank_shares
from drafttrain.measure.speed import Race, Repeats, by_prompt, costs, over_repeats, seconds, speedup, throughput, tpot, ttft
from drafttrain.model.images import without_images
from drafttrain.objective.losses import Hits

Keys = dict[str, Any]
BASE = "base target"  # the slice of prompts without an adapter
OUTPUTS = 8  # outputs per checkpoint: the first ones, because the prompts alternate between categories
PROMPT = 400  # characters of a prompt's end that are shown
HALF = "\ufffd"  # a tokenizer decodes an incomplete character to this


@dataclass(frozen=True, slots=True)
class Evidence:
    """The results of one checkpoint's runs. All lists are in case order."""

    cases: Sequence[Case]
    plain: Sequence[Result]
    speculative: Sequence[Result]
    hits: Sequence[Hits] | None  # teacher-forced on the plain outputs; None when agreement does not predict the policy's tau
    paths: Sequence[Path]  # the proposal's paths, as `expected_tau` counts them
    sampled: bool  # see `expected_tau`
    exact: Sequence[Match] | None  # compared with plain decoding; None when outputs are sampled
    exact_reference: Sequence[Match] | None  # compared with transformers; None when not compared
    valid: Sequence[bool | None] = ()  # whether the output is the JSON asked for; None where the prompt asks for none
    plain_valid: Sequence[bool | None] = ()  # the same for plain decoding


def checkpoint_keys(evidence: Evidence, name: str, timed: Race, stop_ids: frozenset[int]) -> Keys:
    """Keys over all cases. Times come from one race."""
    keys = _of_cases(evidence, list(range(len(evidence.cases)))) | speed_keys(timed, name)
    keys["monitors"] = monitor_keys(evidence, stop_ids)
    times = {prefix: by_prompt(timed, contender) for prefix, contender in (("", name), ("baseline_", BASELINE))}
    keys["per_prompt"] = [
        _one(evidence, i, stop_ids)
        | {f"{prefix}decode_ms": _milli(decode_seconds.get(i)) for prefix, decode_seconds in times.items()}
        for i in range(len(evidence.cases))
    ]
    keys["rank_by_position"] = None
    if evidence.hits is not None and not evidence.sampled:
        keys["rank_by_position"] = rank_shares(evidence.hits, evidence.paths)
    keys["expected_tau_by_length"] = _by_length(evidence)
    if keys["expected_tau"] is not None and keys["draft_cost"] is not None:
        keys["predicted_speedup"] = keys["expected_tau"] / (keys["draft_cost"] + keys["verify_cost"])
        drift = gap(keys["predicted_speedup"], keys["speedup"])
        keys |= {"predicted_gap": drift, "predicted_gap_flagged": drift is not None and abs(drift) > FLAGGED_GAP}
    return keys


def _by_length(evidence: Evidence) -> list[float] | None:
    """Expected tau of a chain of one draft, of two and so on, as serving stacks draft; None where nothing is predicted."""
    hits = [h for h in evidence.hits or () if len(h.rank_MK)]
    if not hits:
        return None
    chains = [[(0,) * depth for depth in range(1, length + 1)] for length in range(1, hits[0].rank_MK.shape[1] + 1)]
    return [tau for chain in chains if (tau := expected_tau(hits, chain, evidence.sampled)) is not None]


def by_category(evidence: Evidence, name: str, timed: Race) -> list[Keys]:
    """A slice per category, and per public set, turn and adapter of the target where there are several.

    Times come from the waves that hold cases of the slice only.
    """
    slices = []
    for dimension, values in (
        ("category", [case.category for case in evidence.cases]),
        ("set", [case.origin or "other" for case in evidence.cases]),
        ("turn", [case.turn for case in evidence.cases]),
        ("adapter", [case.adapter or BASE for case in evidence.cases]),
    ):
        for value in dict.fromkeys(values) if dimension == "category" or len(set(values)) > 1 else ():
            indices = [i for i, case_value in enumerate(values) if case_value == value]
            keys = _of_cases(evidence, indices) | speed_keys(timed, name, set(indices))
            if dimension == "adapter":  # what is compared: does the drafter serve each of them?
                keys["tau_interval"] = tau_interval(counts_of([evidence.speculative[i] for i in indices]))
            slices.append({"by": dimension, "value": value, "batch_size": timed.batch_size} | keys)
    return slices


def by_batch_size(races: dict[int, Race], name: str) -> list[Keys]:
    """A slice per batch size, from the timed runs alone."""
    return [{"by": "batch_size", "value": size, "batch_size": size} | race_keys(timed, name) for size, timed in races.items()]


def race_keys(timed: Race, name: str) -> Keys:
    """Counts and times of one race. Counts are those of the first repeat: every repeat gives the same tokens."""
    laps, plain = timed.of(name)[0], timed.of(BASELINE)[0]
    pairs = [(a, b) for x, y in zip(laps, plain, strict=True) for a, b in zip(x.results, y.results, strict=True)]
    keys = acceptance_keys(pooled(a for a, _ in pairs), None) | speed_keys(timed, name)
    return keys | {"prompts": len(pairs), "exact_matches": sum(a.tokens == b.tokens for a, b in pairs)}


def acceptance_keys(counts: Acceptance, expected: ExpectedTau | None) -> Keys:
    """Acceptance and the counts behind it. A gap of the prediction is flagged when it is significant and above 10 %."""
    return {
        "tau": counts.tau,
        "expected_tau": None if expected is None else expected.tau,
        "expected_tau_interval": None if expected is None or expected.interval is None else list(expected.interval),
        "expected_gap": None if expected is None else expected.gap,
        "expected_gap_interval": None if expected is None or expected.gap_interval is None else list(expected.gap_interval),
        "expected_gap_flagged": expected is not None and expected.flagged,
        "alpha": counts.alpha,
        "alpha_by_position": [list(a) for a in counts.alpha_by_position],
        "offered_by_position": list(counts.offered),
        "accepted_by_position": list(counts.accepted),
        "drafted": sum(counts.offered),
        "accepted": sum(counts.accepted),
        "nodes": counts.nodes,
        "emitted": counts.emitted,
        "verifications": counts.verifications,
        "rejection_overhead": counts.rejection_overhead,
    }


def speed_keys(timed: Race, name: str, cases: set[int] | None = None) -> Keys:
    """Times of one contender and of the baseline; None where no wave was timed."""
    ours, baseline, reference = timed.of(name, cases), timed.of(BASELINE, cases), timed.of(REFERENCE, cases)
    ratio = speedup(baseline, ours)
    keys: Keys = {"speedup": None, "speedup_min": None, "speedup_max": None}
    if ratio is not None:
        keys = {"speedup": ratio.value, "speedup_min": ratio.low, "speedup_max": ratio.high}
    for prefix, laps in (("", ours), ("baseline_", baseline)):
        keys[f"{prefix}tokens_per_s"] = over_repeats(throughput, laps)
        keys[f"{prefix}tokens_per_s_end_to_end"] = over_repeats(lambda waves: throughput(waves, prefill=True), laps)
        keys[f"{prefix}ttft_ms"] = _milli(over_repeats(ttft, laps))
        keys[f"{prefix}tpot_ms"] = _milli(over_repeats(tpot, laps))
    keys["transformers_tokens_per_s"] = over_repeats(throughput, reference)
    keys["timed_prompts"] = len([r for lap in ours[0] for r in lap.results]) if ours else 0
    keys["repeats"] = len(ours)
    return keys | cost_keys(ours, baseline)


def cost_keys(ours: Repeats, baseline: Repeats) -> Keys:
    """Milliseconds per decode step, by part, and each part's cost in plain steps; None where nothing was timed."""
    cost, plain = costs(ours), costs(baseline)
    part_names = ("draft_ms", "verify_ms", "commit_ms", "host_ms")
    cost_names = ("plain_step_ms", "draft_cost", "verify_cost", "verify_nodes", "draft_share", "verify_share")
    if not cost.steps or not plain.steps:
        return dict.fromkeys((*part_names, "graphs", "capture_s", "capture_mib", *cost_names, "floor_fraction"))
    results = [r for lap in ours for wave in lap for r in wave.results]
    verifications = sum(r.verifications for r in results)
    part_ms = [1000 * part_seconds / cost.steps for part_seconds in (cost.draft, cost.verify, cost.commit, cost.host)]
    plain_ms = 1000 * seconds(plain) / plain.steps
    shares = (cost.draft / seconds(cost), cost.verify / seconds(cost))
    nodes = 1 + sum(r.nodes for r in results) / verifications
    return {
        **dict(zip(part_names, part_ms, strict=True)),
        "graphs": cost.captures,
        "capture_s": cost.capture_seconds,
        "capture_mib": cost.capture_bytes / 2**20,
        **dict(zip(cost_names, (plain_ms, part_ms[0] / plain_ms, part_ms[1] / plain_ms, nodes, *shares), strict=True)),
        "floor_fraction": None,
    }


def _of_cases(evidence: Evidence, indices: Sequence[int]) -> Keys:
    expected = all_positions_tau = None
    if evidence.hits is not None:
        hits, ours = [evidence.hits[i] for i in indices], [evidence.speculative[i] for i in indices]
        dialogues = [
            (case.adapter, case.origin, case.question_id, tuple(map(text_of, case.turns)))
            for case in (evidence.cases[i] for i in indices)
        ]
        expected = predicted(hits, evidence.paths, evidence.sampled, dialogues, counts_of(ours))
        all_positions_tau = expected_tau(hits, evidence.paths, evidence.sampled, visited=False)
    keys = acceptance_keys(pooled(evidence.speculative[i] for i in indices), expected)
    keys |= {"expected_tau_all_positions": all_positions_tau, "prompts": len(indices)}
    for prefix, matches in (("", evidence.exact), ("transformers_", evidence.exact_reference)):
        for key, match in (("exact_matches", Match.SAME), ("explained", Match.EXPLAINED), ("unexplained", Match.UNEXPLAINED)):
            keys[f"{prefix}{key}"] = None if matches is None else sum(matches[i] is match for i in indices)
    return keys


def counts_of(results: Sequence[Result]) -> torch.Tensor:
    """[C, 2] accepted drafts and verifications of each."""
    return torch.tensor([[r.emitted - r.verifications, r.verifications] for r in results])


def _one(evidence: Evidence, i: int, stop_ids: frozenset[int]) -> Keys:
    ours, plain = evidence.speculative[i], evidence.plain[i]
    return {
        "question_id": evidence.cases[i].question_id,
        "category": evidence.cases[i].category,
        "turn": evidence.cases[i].turn,
        "prompt": prompt_digest(evidence.cases[i].tokens, evidence.cases[i].adapter),
        "tokens": len(ours.tokens),
        "baseline_tokens": len(plain.tokens),
        "tau": pooled([ours]).tau,
        "emitted": ours.emitted,
        "verifications": ours.verifications,
        "drafted": sum(ours.offered),
        "accepted": sum(ours.accepted),
        "exact": None if evidence.exact is None else evidence.exact[i].value,
        "loop": ends_in_loop(ours.tokens, stop_ids),
        "baseline_loop": ends_in_loop(plain.tokens, stop_ids),
        "stop_missed": missed_stop(ours.tokens, stop_ids),
        "baseline_stop_missed": missed_stop(plain.tokens, stop_ids),
        "json_valid": evidence.valid[i] if evidence.valid else None,
        "baseline_json_valid": evidence.plain_valid[i] if evidence.plain_valid else None,
    }


def monitor_keys(evidence: Evidence, stop_ids: frozenset[int]) -> Keys:
    """The monitors' counts over all outputs and by category."""
    indices = range(len(evidence.cases))
    keys, names = _monitored(evidence, indices, stop_ids), [case.category for case in evidence.cases]
    keys["categories"] = [
        {"category": name} | _monitored(evidence, [i for i in indices if names[i] == name], stop_ids)
        for name in dict.fromkeys(names)
    ]
    return keys


def _monitored(evidence: Evidence, indices: Sequence[int], stop_ids: frozenset[int]) -> Keys:
    keys: Keys = {"prompts": len(indices)}
    for prefix, results, valid in (
        ("", evidence.speculative, evidence.valid),
        ("baseline_", evidence.plain, evidence.plain_valid),
    ):
        verdicts = [valid[i] for i in indices if valid and valid[i] is not None]
        counts = counted([results[i].tokens for i in indices], stop_ids)
        keys |= {f"{prefix}{key}": value for key, value in counts.items()}
        keys |= {"json_prompts": len(verdicts), f"{prefix}json_valid": sum(map(bool, verdicts)) if verdicts else None}
    return keys


def prompt_digest(tokens: Sequence[int], adapter: str | None = None) -> str:
    """A hash of a prompt's token ids, and of the adapter that is asked. It identifies the prompt across measurements and
    prompt files.
    """
    return hashlib.sha256(",".join(map(str, [*tokens, *([adapter] if adapter else [])])).encode()).hexdigest()[:16]


def _milli(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def samples(evidence: Evidence, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """`[accepted drafts, their text, the target's text]` for each verification of the first outputs."""
    indices = range(min(OUTPUTS, len(evidence.cases)))
    return [_sample(evidence, i, tokenizer) for i in indices]


def _sample(evidence: Evidence, i: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    case, result = evidence.cases[i], evidence.speculative[i]
    exact: Match | None = None if evidence.exact is None else evidence.exact[i]
    first, *rest = _pieces(result, tokenizer)
    return {
        "question_id": case.question_id,
        "category": case.category,
        "tau": result.tau if result.verifications else None,
        "exact": None if exact is None else exact.value,
        "prompt": str(tokenizer.decode(without_images(case.tokens), skip_special_tokens=True))[-PROMPT:],
        "first": first,
        "runs": [[drafts, *rest[2 * n : 2 * n + 2]] for n, drafts in enumerate(result.runs)],
    }


def _pieces(result: Result, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of the first token; then, for each verification, the text of its accepted drafts and the text that follows.

    A character of several tokens belongs to the piece with its last token.
    """
    ends, token_count = [1], 1
    for drafts, length in zip(result.runs, result.lengths, strict=True):
        ends += [token_count + drafts, token_count + length]
        token_count = ends[-1]
    pieces, previous_text = [], ""
    for end in ends:
        text = str(tokenizer.decode(result.tokens[:end], skip_special_tokens=True))
        complete_text = text if end == len(result.tokens) else text.rstrip(HALF)
        pieces.append(complete_text[len(previous_text) :])
        previous_text = complete_text
    return pieces
