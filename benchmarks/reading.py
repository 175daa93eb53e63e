"""Reading cached features while the batch before them trains, compared with one after the other.

The conversations and their states are random, in a folder that is removed. The step waits as long as a read, as a host waits
for a GPU. It leaves the reading thread all cores, which is the best case. The data comes from the page cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from benchmarks.common import DiffersError, interleaved, lines_table, plain, ratio
from benchmarks.section import Found, Settings
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate
from drafttrain.features.cached import Cached
from drafttrain.features.store import FeatureFormat, FeatureStore, ShardLayout
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL

TEXTS, LENGTH, HIDDEN, ROWS = 64, 1024, 1024, 4


def reading(settings: Settings) -> Found:
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 1000, settings.of(LENGTH, 8)).astype(np.int32) for _ in range(settings.of(TEXTS, 8))]
    with TemporaryDirectory() as folder:
        store = written(Path(folder), texts, settings.of(HIDDEN, 8))
        batches = [collate([Encoded(t, t >= 0) for t in texts[i : i + ROWS]], 0) for i in range(0, len(texts), ROWS)]
        serial, ahead = (Cached(store, settings.device, torch.bfloat16) for _ in range(2))
        for number, batch in enumerate(batches):
            found, wanted = ahead.fill(batch), serial.fill(batch)
            ahead.begin(batches[(number + 1) % len(batches)])
            if not all(torch.equal(found.hidden[key], state) for key, state in wanted.hidden.items()):
                raise DiffersError(f"batch {number} has other states when it is read ahead")
        wait = seconds(serial, batches, 0.0, ahead=False) / len(batches)
        runs = (lambda: seconds(ahead, batches, wait, ahead=True), lambda: seconds(serial, batches, wait, ahead=False))
        line = ratio("cached features, ahead / in turn", *interleaved(settings.repeats, *runs), "{:.2f} / {:.2f} s")
        ahead.close()
    settings.say(f"{line.name}: {line.value:.2f}")
    return Found([lines_table([line])], {"lines": plain([line])})


def written(folder: Path, texts: Sequence[np.ndarray], hidden: int) -> FeatureStore:
    """Write random states of these conversations."""
    form = FeatureFormat((1, FINAL), "bfloat16", hidden)
    store = FeatureStore(folder, ShardLayout.of(texts, form.bytes), form, {})
    store.folder.mkdir()
    for number in store.numbers:
        columns = store.buffers(number)
        store.write(number, {name: torch.randn(column.shape).to(column.dtype) for name, column in columns.items()})
    return store


def seconds(features: Cached, batches: Sequence[TrainBatch], wait: float, ahead: bool) -> float:
    """Seconds of a step of `wait` seconds for each batch."""
    began = perf_counter()
    for number, batch in enumerate(batches):
        features.fill(batch)
        if ahead and number + 1 < len(batches):
            features.begin(batches[number + 1])
        if wait:
            time.sleep(wait)
    return perf_counter() - began
