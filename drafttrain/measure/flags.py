"""What a reader of the report must not miss, in one sentence each; and which checkpoint is best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.decoding.acceptance import POLICIES
from drafttrain.measure import cells

LOOPING = 0.2  # share of outputs that end in a loop, above which acceptance figures flatter
FEW = 200  # verifications that a gap needs to mean something
NOTICED = 0.03  # share of a difference from which its cause is named
UNLIKELY = 0.001  # p-value below which a lossless policy's samples are called different


def flags(entry: dict[str, Any]) -> list[str]:
    """Warnings on one checkpoint's figures; an empty list is good news."""
    found, prompts = [], entry["prompts"]
    if (change := entry.get("target_change")) is not None:
        found.append(
            f"the target was trained too: output is the adapted target's, NOT the original's "
            f"({change['changed']} of {change['prompts']} plain outputs differ)"
        )
    if entry["expected_gap_flagged"]:
        found.append(
            f"expected tau {cells.expected(entry)} is {abs(entry['expected_gap']):.0%} "
            f"{'above' if entry['expected_gap'] > 0 else 'below'} the measured {entry['tau']:.2f}{_tau_causes(entry)}"
        )
    if entry.get("predicted_gap_flagged"):
        found.append(
            f"predicted speedup {entry['predicted_speedup']:.2f}x is {abs(entry['predicted_gap']):.0%} "
            f"{'above' if entry['predicted_gap'] > 0 else 'below'} the measured {entry['speedup']:.2f}x{_speed_causes(entry)}"
        )
    if entry["unexplained"]:
        found.append(f"{entry['unexplained']} of {prompts} greedy outputs differ from plain decoding without an explanation")
    if entry["transformers_unexplained"]:
        count = entry["transformers_unexplained"]
        found.append(f"{count} of {prompts} greedy outputs differ from transformers without an explanation")
    if entry["distribution_p_value"] is not None and entry["distribution_p_value"] < UNLIKELY:
        found.append(f"sampled tokens differ from plain sampling (p = {entry['distribution_p_value']:.2g})")
    loops = entry["monitors"]["loops"]
    if loops > LOOPING * prompts:
        found.append(f"{loops} of {prompts} outputs end in a loop, which makes acceptance look good for nothing")
    if entry["exact_matches"] is not None or not POLICIES[entry["policy"]].lossless:  # else chance alone makes them differ
        for part in entry["monitors"].get("categories", ()):
            if part["json_prompts"] and part["json_valid"] != part["baseline_json_valid"]:
                ours, plain, asked = part["json_valid"], part["baseline_json_valid"], part["json_prompts"]
                found.append(f"{part['category']}: {ours} of {asked} outputs are the JSON asked for, plainly decoded {plain}")
    if entry["speedup"] is not None and entry["speedup"] < 1.0:
        found.append(f"slower than plain decoding ({entry['speedup']:.2f}x)")
    return found


def broken_guarantees(report: dict[str, Any]) -> list[str]:
    """Where a policy that is said to be lossless was found not to be, in a sentence each."""
    found = []
    for entry in report["checkpoints"]:
        if not POLICIES[entry["policy"]].lossless:
            continue
        said, p_value = f"{entry['name']}: policy {entry['policy']} is lossless", entry["distribution_p_value"]
        if entry["unexplained"]:
            differ = f"{entry['unexplained']} of {entry['prompts']} outputs are not plain decoding's"
            found.append(f"{said}, {differ}, and rounding does not explain it")
        if p_value is not None and p_value < UNLIKELY:
            found.append(f"{said}, its samples are not plain sampling's (p = {p_value:.2g})")
    return found


def _tau_causes(entry: dict[str, Any]) -> str:
    """What to look at first, as the figures stand."""
    if entry["verifications"] < FEW:
        return f": {entry['verifications']} verifications say little, measure more prompts"
    if entry["expected_gap"] < 0:
        return ": the prompts' text may be easier to draft than its average position, as in loops and copies"
    return (
        ": look for target states, positions or masks that differ between training and decoding, or what rejected drafts leave"
    )


def _speed_causes(entry: dict[str, Any]) -> str:
    """The parts of the difference that the figures show."""
    timed = next(s for s in entry["slices"] if s["by"] == "batch_size" and s["value"] == entry["batch_size"])["tau"]
    step = sum(entry[key] for key in ("draft_ms", "verify_ms", "commit_ms", "host_ms"))
    unpaid, causes = (entry["commit_ms"] + entry["host_ms"]) / step, []
    if abs(entry["expected_gap"]) > NOTICED:
        causes.append(
            f"expected tau is {abs(entry['expected_gap']):.0%} {'above' if entry['expected_gap'] > 0 else 'below'} the measured"
        )
    if abs(entry["tau"] / timed - 1) > NOTICED:
        causes.append(f"the timed prompts' tau is {timed:.2f}, that of all {entry['tau']:.2f}")
    if unpaid > NOTICED:
        causes.append(f"committing and the host, which it leaves out, take {unpaid:.0%} of a step")
    return ": " + (
        "; ".join(causes) or "times differ between prompts and repeats; raise measure.timed_prompts and measure.repeats"
    )


def best(entries: Sequence[dict[str, Any]]) -> str:
    """The name of the best checkpoint: by speedup where one stands clear of every other's range, else by tau.

    Timings of checkpoints of one run often overlap; tau, a count, then decides, and speedup breaks its ties. One of step 0,
    from before any training, must have the higher tau.
    """
    trained = [e for e in entries if e.get("step") != 0] or list(entries)
    untrained = [e for e in entries if e.get("step") == 0 and all((e["tau"] or 0.0) > (t["tau"] or 0.0) for t in trained)]
    candidates = trained + untrained
    if all(e["speedup"] is not None for e in candidates):
        fastest = max(candidates, key=lambda e: e["speedup"])
        if all(fastest["speedup_min"] > e["speedup_max"] for e in candidates if e is not fastest):
            return str(fastest["name"])
    return str(max(candidates, key=lambda e: (e["tau"] or 0.0, e["speedup"] or 0.0))["name"])


def distillation(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on what training gave a drafter that was measured before it too; none where there is nothing to compare."""
    known = [e for e in entries if e["tau"] is not None and e.get("step") is not None]
    before, after = (
        max((e for e in known if bool(e["step"]) is t), key=lambda e: e["tau"], default=None) for t in (False, True)
    )
    if before is None or after is None:
        return []
    first, last = f"({before['name']})", f"({after['name']})"
    if after["tau"] > before["tau"]:
        return [f"distillation raised tau from {before['tau']:.2f} {first} to {after['tau']:.2f} {last}"]
    return [f"distillation did not help: tau {before['tau']:.2f} before it {first}, {after['tau']:.2f} after {last}"]
