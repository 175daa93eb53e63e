"""Floor 4: what a reader of the report must not miss, in one sentence each; and which checkpoint is best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOOPING = 0.2  # share of outputs that end in a loop, above which acceptance figures flatter
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
            f"expected tau {entry['expected_tau']:.2f} is {abs(entry['expected_gap']):.0%} "
            f"{'above' if entry['expected_gap'] > 0 else 'below'} the measured {entry['tau']:.2f}"
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
    if entry["speedup"] is not None and entry["speedup"] < 1.0:
        found.append(f"slower than plain decoding ({entry['speedup']:.2f}x)")
    return found


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
