"""The report's warnings, one sentence each, and the choice of the best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import Any

from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure import cells

LOOPING = 0.2  # share of outputs that end in a loop, above which acceptance figures are too good
FEW = 200  # verifications below which a gap is not significant
NOTICED = 0.03  # relative difference from which a cause is named
POSSIBLE = 1.1  # times tau, above which a speedup is a fault of the timing
UNLIKELY = 0.001  # p-value below which a lossless policy's samples count as different


def flags(entry: dict[str, Any]) -> list[str]:
    """Warnings on one checkpoint's figures."""
    warnings, prompts = [], entry["prompts"]
    if (change := entry.get("target_change")) is not None:
        warnings.append(
            f"the target was trained too: the output is that of the adapted target, NOT of the original "
            f"({change['changed']} of {change['prompts']} plain outputs differ)"
        )
    if entry["expected_gap_flagged"]:
        warnings.append(
            f"expected tau {cells.expected(entry)} is {abs(entry['expected_gap']):.0%} "
            f"{'above' if entry['expected_gap'] > 0 else 'below'} the measured {entry['tau']:.2f}{_tau_causes(entry)}"
        )
    if entry.get("predicted_gap_flagged"):
        warnings.append(
            f"predicted speedup {entry['predicted_speedup']:.2f}x is {abs(entry['predicted_gap']):.0%} "
            f"{'above' if entry['predicted_gap'] > 0 else 'below'} the measured {entry['speedup']:.2f}x{_speed_causes(entry)}"
        )
    if entry["unexplained"]:
        warnings.append(f"{entry['unexplained']} of {prompts} greedy outputs differ from plain decoding without an explanation")
    if entry["transformers_unexplained"]:
        count = entry["transformers_unexplained"]
        warnings.append(f"{count} of {prompts} greedy outputs differ from transformers without an explanation")
    if entry["distribution_p_value"] is not None and entry["distribution_p_value"] < UNLIKELY:
        warnings.append(f"sampled tokens differ from plain sampling (p = {entry['distribution_p_value']:.2g})")
    loops = entry["monitors"]["loops"]
    if loops > LOOPING * prompts:
        warnings.append(f"{loops} of {prompts} outputs end in a loop, which makes acceptance look too good")
    if entry["exact_matches"] is not None or not POLICIES[entry["policy"]].lossless:  # else chance alone makes them differ
        for group in entry["monitors"].get("categories", ()):
            if group["json_prompts"] and group["json_valid"] != group["baseline_json_valid"]:
                ours, plain, total = group["json_valid"], group["baseline_json_valid"], group["json_prompts"]
                warnings.append(
                    f"{group['category']}: {ours} of {total} outputs are the JSON asked for; with plain decoding {plain} are"
                )
    if entry["speedup"] is not None and entry["speedup"] < 1.0:
        warnings.append(f"slower than plain decoding ({entry['speedup']:.2f}x){_break_even(entry)}")
    bound = max(entry["tau"] or 0.0, _timed_tau(entry)) if entry["speedup"] is not None else 0.0
    if entry["speedup"] is not None and entry["speedup"] > POSSIBLE * bound:
        warnings.append(
            f"speedup {entry['speedup']:.2f}x cannot be: a verification takes a plain step or more, so tau {bound:.2f} is the "
            "most; something slowed plain decoding down while it was timed, measure again on an idle machine"
        )
    return warnings


def broken_guarantees(report: dict[str, Any]) -> list[str]:
    """Sentences on lossless policies whose output was not that of the target."""
    violations = []
    for entry in report["checkpoints"]:
        if not POLICIES[entry["policy"]].lossless:
            continue
        claim, p_value = f"{entry['name']}: policy {entry['policy']} is lossless", entry["distribution_p_value"]
        if entry["unexplained"]:
            differ = f"{entry['unexplained']} of {entry['prompts']} outputs differ from plain decoding"
            violations.append(f"{claim}, but {differ} and rounding does not explain it")
        if p_value is not None and p_value < UNLIKELY:
            violations.append(f"{claim}, but its samples differ from plain sampling (p = {p_value:.2g})")
    return violations


def _tau_causes(entry: dict[str, Any]) -> str:
    """Likely causes of a gap, as an end of its sentence."""
    if entry["verifications"] < FEW:
        return f": {entry['verifications']} verifications are too few, measure more prompts"
    if entry["expected_gap"] < 0:
        return ": parts of the outputs may be much easier to draft than the average position, as in loops and copies"
    return (
        ": check for target states, positions or masks that differ between training and decoding, and for state that rejected "
        "drafts leave behind"
    )


def _break_even(entry: dict[str, Any]) -> str:
    """What it takes to gain here, and what the same drafts gain elsewhere, as an end of its sentence."""
    if entry["draft_cost"] is None:
        return ""
    draft, verify, overhead = _costs(entry)
    costs = (
        f"{draft + verify + overhead:.2f} plain steps here (draft {draft:.2f}, verification {verify:.2f}, rest {overhead:.2f})"
    )
    return (
        f": a step costs {costs}, and tau must be above that to gain; where a verification costs one plain step, the same "
        f"drafts give {_by_bytes(entry):.2f}x"
    )


def nothing_gains(entries: Sequence[dict[str, Any]]) -> list[str]:
    """If every row was timed and none is faster than plain decoding: the best, and what it would take to gain."""
    if any(e["speedup"] is None or e["speedup"] >= 1.0 or e["draft_cost"] is None for e in entries):
        return []
    top = max(entries, key=lambda e: e["speedup"])
    draft, verify, overhead = _costs(top)
    tau, rest = _timed_tau(top), verify + overhead
    drafts = (
        f"or a draft cost below {tau - rest:.2f} plain steps (it is {draft:.2f})"
        if tau > rest
        else f"and no draft is cheap enough at tau {tau:.2f}, because the rest of a step costs {rest:.2f} plain steps"
    )
    return [
        f"no drafter gains here. The best is {top['name']} ({top['proposal']}), {top['speedup']:.2f}x at tau {tau:.2f}. "
        f"To gain it needs a tau above {draft + rest:.2f}, {drafts}. Where a pass costs its bytes, as in small batches on a "
        f"GPU, a verification costs one plain step, and the same drafts give {_by_bytes(top):.2f}x"
    ]


def _costs(entry: dict[str, Any]) -> tuple[float, float, float]:
    """(draft, verification, rest) of a step in plain steps."""
    return entry["draft_cost"], entry["verify_cost"], (entry["commit_ms"] + entry["host_ms"]) / entry["plain_step_ms"]


def _by_bytes(entry: dict[str, Any]) -> float:
    """The speedup of the same drafts where a verification costs one plain step."""
    draft, _, overhead = _costs(entry)
    return _timed_tau(entry) / (1.0 + draft + overhead)


def _timed_tau(entry: dict[str, Any]) -> float:
    """Tau of the prompts whose decoding was timed."""
    timed = next(s for s in entry["slices"] if s["by"] == "batch_size" and s["value"] == entry["batch_size"])
    return float(timed["tau"] or 0.0)


def _speed_causes(entry: dict[str, Any]) -> str:
    """The causes of a gap that the figures show, as an end of its sentence."""
    timed = _timed_tau(entry)
    step = sum(entry[key] for key in ("draft_ms", "verify_ms", "commit_ms", "host_ms"))
    unmodelled_share, causes = (entry["commit_ms"] + entry["host_ms"]) / step, []
    if abs(entry["expected_gap"]) > NOTICED:
        causes.append(
            f"expected tau is {abs(entry['expected_gap']):.0%} {'above' if entry['expected_gap'] > 0 else 'below'} the measured"
        )
    if abs(entry["tau"] / timed - 1) > NOTICED:
        causes.append(f"tau is {timed:.2f} on the timed prompts and {entry['tau']:.2f} on all prompts")
    if unmodelled_share > NOTICED:
        causes.append(f"the prediction leaves out commit and host time, which take {unmodelled_share:.0%} of a step")
    return ": " + (
        "; ".join(causes) or "times differ between prompts and repeats; raise measure.timed_prompts and measure.repeats"
    )


def by_context(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on each checkpoint that was measured at several context lengths: beyond which one acceptance falls.

    A fall is a difference to the shortest context that is outside its 95 % interval, from those of both.
    """
    sentences = []
    for entry in entries:
        shortest, *longer = [s for s in entry["slices"] if s["by"] == "context" and s.get("tau_interval")] or [None]
        if not longer:
            continue
        fallen = next((i for i, s in enumerate(longer) if _falls(shortest, s)), None)
        last, shown = (longer[-1], longer[-1]) if fallen is None else ([shortest, *longer][fallen], longer[fallen])
        falls = f"does not clearly fall up to {last['value']:,}" if fallen is None else f"falls beyond {last['value']:,}"
        taus = ", ".join(f"{cells.tau(s)} at {s['value']:,}" for s in (shortest, shown))
        sentences.append(f"{entry['name']}: tau {falls} tokens of context: {taus}")
    return sentences


def _falls(short: dict[str, Any], long: dict[str, Any]) -> bool:
    half_widths = [s["tau_interval"][1] - s["tau"] for s in (short, long)]
    return bool(short["tau"] - long["tau"] > hypot(*half_widths))


def best(entries: Sequence[dict[str, Any]]) -> str:
    """The name of the best checkpoint: by speedup if one is above the range of every other, else by tau.

    Timings of checkpoints of one run often overlap; then tau, a count, decides, and speedup breaks ties. So it does where a
    short budget left one repeat, which has no range. A checkpoint of step 0 (before training) wins only with the higher tau.
    """
    trained = [e for e in entries if e.get("step") != 0] or list(entries)
    untrained = [e for e in entries if e.get("step") == 0 and all((e["tau"] or 0.0) > (t["tau"] or 0.0) for t in trained)]
    candidates = trained + untrained
    if all(e["speedup"] is not None and e["repeats"] > 1 for e in candidates):
        fastest = max(candidates, key=lambda e: e["speedup"])
        if all(fastest["speedup_min"] > e["speedup_max"] for e in candidates if e is not fastest):
            return str(fastest["name"])
    return str(max(candidates, key=lambda e: (e["tau"] or 0.0, e["speedup"] or 0.0))["name"])


def best_entry(report: dict[str, Any]) -> dict[str, Any]:
    """The best checkpoint's figures."""
    return next(entry for entry in report["checkpoints"] if entry["name"] == report["best"])


def distillation(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on the effect of training, if the drafter was measured before training too."""
    measured = [e for e in entries if e["tau"] is not None and e.get("step") is not None]
    untrained, trained = (
        max((e for e in measured if bool(e["step"]) is is_trained), key=lambda e: e["tau"], default=None)
        for is_trained in (False, True)
    )
    if untrained is None or trained is None:
        return []
    first, last = f"({untrained['name']})", f"({trained['name']})"
    if trained["tau"] > untrained["tau"]:
        return [f"distillation raised tau from {untrained['tau']:.2f} {first} to {trained['tau']:.2f} {last}"]
    return [f"distillation did not help: tau {untrained['tau']:.2f} before it {first}, {trained['tau']:.2f} after {last}"]
