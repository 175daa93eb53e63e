"""A server's own counts of speculative decoding: differences of its counters in /metrics, or the counts in its answers.

Names as in vllm/v1/spec_decode/metrics.py (0.32) and in SGLang 0.5.23: sglang/srt/observability/metrics_collector.py, and
`SpecTokensDetails` of sglang/srt/entrypoints/openai/protocol.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import sleep
from typing import Any

LOOKS, PAUSE = 20, 0.05  # reads of the counters until they include a wave, and the seconds between two reads
ASK_DETAILS = {"return_spec_tokens_details": True}  # what makes SGLang send its counts with an answer
DOES_NOT_ADD_UP = "no acceptance by position: the server's counts by position are not its number of accepted drafts"
POSITION = re.compile(r'\bposition="(\d+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Names of a server's Prometheus counters, without `_total`."""

    generated: str
    verifications: str
    drafted: str | None = None
    accepted: str | None = None
    by_position: str | None = None  # accepted drafts, with a label `position` from 0


STARTED = "process_start_time_seconds"  # of prometheus_client, where one process counts
SPEC = "vllm:spec_decode_num_"
KNOWN = (
    Counters(
        "vllm:generation_tokens", f"{SPEC}drafts", f"{SPEC}draft_tokens", f"{SPEC}accepted_tokens",
        f"{SPEC}accepted_tokens_per_pos",
    ),
    Counters("sglang:generation_tokens", "sglang:spec_verify_calls"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counted:
    """A wave's counts, as `WaveOutputs` have them; None where they are not known. notes: the reasons."""

    verifications: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_by_position: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Counters since the server's start: `generated`, `verifications`, and `drafted`, `accepted` where it has them."""

    sums: dict[str, float]
    by_position: dict[int, float] = field(default_factory=dict)  # empty where it does not count positions
    started: float | None = None  # when the server's process started, where it says so

    def since(self, before: CounterReading) -> CounterReading:
        """What was counted after another reading."""
        sums = {name: value - before.sums.get(name, 0.0) for name, value in self.sums.items()}
        return CounterReading(
            sums, {position: value - before.by_position.get(position, 0.0) for position, value in self.by_position.items()}
        )

    def restarted_since(self, before: CounterReading) -> bool:
        """Whether it is another process that counts, or a counter went down."""
        delta = self.since(before)
        return self.started != before.started or min(*delta.sums.values(), *delta.by_position.values()) < 0


def read(text: str | None) -> CounterReading | str:
    """The counters in the text of /metrics (None: there is no such page), or why there are none."""
    if text is None:
        return "the server has no /metrics (SGLang: --enable-metrics)"
    metrics = prometheus(text)
    for counter_names in KNOWN:
        names = {key: getattr(counter_names, key) for key in ("generated", "verifications", "drafted", "accepted")}
        values = {key: metrics.get(name) for key, name in names.items() if name is not None}
        if all(value is not None for value in values.values()):
            sums = {key: value for key, value in values.items() if value is not None}
            return CounterReading(sums, prometheus_by_position(text, counter_names.by_position), metrics.get(STARTED))
    return "the server's /metrics does not count verifications as vLLM or SGLang do; was it started with speculation?"


def counted(before: CounterReading | str, look: Callable[[], str | None], tokens: int) -> Counted:
    """The counts of a wave that generated `tokens`. They change a little after its last token was sent, so look again.

    before: the reading before the wave. None are known where other clients were served too, or the server was restarted.
    """
    if isinstance(before, str):
        return _unknown(before)
    for looks_left in reversed(range(LOOKS)):
        reading = read(look())
        if isinstance(reading, str):
            return _unknown(reading)
        if reading.restarted_since(before):
            return _unknown("the server was restarted meanwhile, so its counters began anew")
        delta = reading.since(before)
        generated = int(delta.sums.pop("generated"))
        if generated >= tokens:
            break
        if looks_left:
            sleep(PAUSE)
    if generated > tokens:
        return _unknown(f"the server generated {generated - tokens} tokens for other clients meanwhile")
    if generated < tokens:
        return _unknown(f"the server counts {generated} of the {tokens} tokens that it sent")
    return _of_sums(delta)


def of_answers(details: Sequence[dict[str, Any] | None], lengths: Sequence[int]) -> Counted | None:
    """The counts that a server sent with each answer, which other clients do not change; None where it sent none.

    An answer of one token, which the prefill yields, has no counts.
    """
    if any(row is None and length > 1 for row, length in zip(details, lengths, strict=True)) or not any(details):
        return None
    sent = [row for row in details if row is not None]
    histograms = [row.get("spec_correct_drafts_histogram") or [] for row in sent]  # [n]: decode steps that accepted n drafts
    names = ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
    steps, drafted, accepted = (sum(int(row.get(name) or 0) for row in sent) for name in names)
    positions = range(max(0, *(len(histogram) - 1 for histogram in histograms), -(-drafted // steps) if steps else 0))
    by_position = tuple(sum(sum(histogram[i + 1 :]) for histogram in histograms) for i in positions)
    if sum(by_position) != accepted:
        return Counted(steps, drafted, accepted, None, (DOES_NOT_ADD_UP,))
    return Counted(steps, drafted, accepted, by_position)


def prometheus(text: str) -> dict[str, float]:
    """The values by name, without `_total`, summed over labels."""
    values: dict[str, float] = {}
    for name, _, value in _samples(text):
        values[name] = values.get(name, 0.0) + value
    return values


def prometheus_by_position(text: str, wanted: str | None) -> dict[int, float]:
    """The values of one counter by its label `position`, summed over the other labels."""
    values: dict[int, float] = {}
    for name, labels, value in _samples(text):
        if name == wanted and (position := POSITION.search(labels)):
            values[int(position[1])] = values.get(int(position[1]), 0.0) + value
    return values


def _unknown(reason: str) -> Counted:
    return Counted(notes=(f"no tau and no acceptance: {reason}",))


def _of_sums(delta: CounterReading) -> Counted:
    steps, drafted, accepted = (delta.sums.get(name) for name in ("verifications", "drafted", "accepted"))
    counts = Counted(_whole(steps), _whole(drafted), _whole(accepted))
    if not delta.by_position:
        return replace(counts, notes=("no acceptance by position: the server counts only sums",))
    by_position = tuple(int(delta.by_position.get(i, 0.0)) for i in range(max(delta.by_position) + 1))
    if sum(by_position) != counts.accepted:
        return replace(counts, notes=(DOES_NOT_ADD_UP,))
    return replace(counts, accepted_by_position=by_position)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _samples(text: str) -> list[tuple[str, str, float]]:
    """(name without `_total`, labels, value) of each line that has them."""
    samples = []
    for line in text.splitlines():
        name, _, value = line.partition("#")[0].strip().rpartition(" ")
        metric, _, labels = name.partition("{")
        try:
            samples.append((metric.removesuffix("_total"), labels, float(value)))
        except ValueError:
            continue
    return samples
