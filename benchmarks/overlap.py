"""Starting the target's states of the next batch before the drafter's step (`target.prefetch`), compared with one after the
other.

It uses the embedded target and its data. On a CPU both do the same work in another order, and the ratio shows the cost of
that. On a GPU the target has its own stream.
"""

from __future__ import annotations

from benchmarks.common import DiffersError, interleaved, lines_table, plain, ratio
from benchmarks.loop import Training
from benchmarks.section import Found, Settings
from drafttrain.data import DataOptions
from drafttrain.data.dataset import load_dataset
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

STEPS, BATCH = 12, 8
FAMILIES = ("medusa", "eagle3", "draft_model")


def overlap(settings: Settings) -> Found:
    loaded, lines = load_target(TargetOptions(device=str(settings.device))), []
    data = load_dataset(DataOptions(limit=settings.limit), loaded.tokenizer, progress=False)
    batches = [data.global_batch(step, settings.of(BATCH, 2)) for step in range(settings.of(STEPS, 2))]
    for family in FAMILIES:
        on, off = (Training(family, loaded).losses(batches[:2], ahead) for ahead in (True, False))
        if on != off:
            raise DiffersError(f"{family}: losses with prefetch are {on}, without {off}")
        training = Training(family, loaded)
        found = interleaved(settings.repeats, training.rate(batches, ahead=True), training.rate(batches))
        lines.append(ratio(f"{family}, prefetch on / off", *found, "{:,.0f} / {:,.0f} tokens/s"))
        settings.say(f"{lines[-1].name}: {lines[-1].value:.2f}")
    return Found([lines_table(lines)], {"lines": plain(lines)})
