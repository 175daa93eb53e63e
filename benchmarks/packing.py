"""Rows that hold several conversations compared with one conversation per row, in random order and grouped by length.

It uses the embedded target and its data: the same conversations, with about as many tokens in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.common import DiffersError, Line, interleaved, lines_table, plain, ratio
from benchmarks.loop import Rows, Training
from benchmarks.section import Found, Settings
from drafttrain.data import DataOptions
from drafttrain.data.dataset import load_dataset, pack
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

CONVERSATIONS, BATCH = 192, 16
FAMILIES = ("draft_model", "eagle3")


def packing(settings: Settings) -> Found:
    lines = []
    for line in measured(settings):
        settings.say(f"{line.name}: {line.value:.2f}")
        lines.append(line)
    return Found([lines_table(lines)], {"lines": plain(lines)})


def measured(settings: Settings) -> Iterator[Line]:
    loaded = load_target(TargetOptions(device=str(settings.device)))
    count, batch = settings.of(CONVERSATIONS, 8), settings.of(BATCH, 4)
    options = DataOptions(group_by_length=False, limit=settings.limit)
    data = load_dataset(options, loaded.tokenizer, progress=False)
    chosen = data.global_batch(0, count)  # real lengths: a random draw
    grouped = replace(data, train=chosen, group_by_length=True, conversations=None, mixture=None, _order=[])
    rows = pack(chosen, options.max_length)
    tokens = sum(len(row.token_ids) for row in chosen)
    share = max(1, round(batch * len(rows) / count))
    padded = [chosen[i : i + batch] for i in range(0, count, batch)]
    ordered = [grouped.global_batch(step, batch) for step in range(count // batch)]
    packed = [rows[i : i + share] for i in range(0, len(rows), share)]

    def full(batches: Sequence[Rows]) -> str:
        return f"{tokens / sum(len(b) * max(len(row.token_ids) for row in b) for b in batches):.0%} full"

    for family in FAMILIES:
        training = Training(family, loaded)
        losses = [training.loss(batches) for batches in (padded, ordered, packed)]
        if max(losses) - min(losses) > 1e-4 * max(losses):
            raise DiffersError(f"{family}: losses of padded, grouped and packed batches are {losses}")
        ours, *rates = interleaved(settings.repeats, *(training.rate(batches) for batches in (packed, padded, ordered)))
        for name, others, rate, goal in (
            ("in random order", padded, rates[0], 1.7),
            ("grouped by length", ordered, rates[1], None),
        ):
            units = "{:,.0f} / {:,.0f} tokens/s, " + f"{full(packed)} / {full(others)}"
            yield ratio(f"{family}, packed / padded {name}", ours, rate, units, goal)
