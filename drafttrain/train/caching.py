"""Prepares cached features before training: checks those on disk, and computes the missing ones in all processes.

The target runs once over all conversations, and each process computes whole shards.

Shapes: B rows, T positions, N positions without padding.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.prompt import Confirm
from torch import Tensor

from drafttrain.core.console import counting
from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, collate
from drafttrain.data.server import base_of
from drafttrain.features import FeatureOptions
from drafttrain.features.cached import Cached
from drafttrain.features.online import Online
from drafttrain.features.store import ABSENT, LOG_REST, FeatureFormat, FeatureStore, Ids, ShardLayout
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Taps
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import TrainOptions
from drafttrain.train.engine import World
from drafttrain.train.progress import Console

MIB, GIB = 2**20, 2**30
WAYS_OUT = "set features.format=float8, features.distribution=top_k, data.limit or features.dir, or features=online"
Batch = Callable[[Sequence[Ids]], TrainBatch]


def check_features(options: FeatureOptions, drafter: Drafter, train: TrainOptions, vocab_size: int) -> None:
    """Raise UserError for bad settings, and where training needs states that cannot be computed in advance."""
    options.check(vocab_size)
    if options.name == "online":
        return
    reasons = {
        "this drafter trains nothing": not drafter.trained,
        "train.on_policy writes new replies in every step": train.on_policy > 0,
        "the drafter's adapter changes the target in every step": drafter.adapts is not None,
    }
    action = {"cached": "stores the target's states", "engine": "requests the target's states"}[options.name]
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise UserError(f"features={options.name} {action} in advance, but {reason}; set features=online")
    if options.name == "engine":
        _check_engine(options, train)
    elif options.distribution == "top_k" and drafter.taps.final:
        raise UserError(
            "features.distribution=top_k stores no final state, but this drafter reads it; set features.distribution=hidden"
        )


def _check_engine(options: FeatureOptions, train: TrainOptions) -> None:
    named_urls = [(f"features.{name}", url) for name in ("servers", "final_servers") for url in getattr(options, name)]
    for name, url in named_urls or [("features=engine", "http://localhost")]:  # before servers are started: they take minutes
        base_of(url, name, "features.key_env")
    if train.sequence_parallel > 1:
        raise UserError(
            f"train.sequence_parallel is {train.sequence_parallel}, but with features=engine every process of a group would "
            "request the states of whole sequences; set features=cached or online"
        )


@dataclass(frozen=True)
class Caching:
    """Prepares the features of a data set."""

    options: FeatureOptions
    loaded: LoadedTarget
    taps: Taps
    root: Path  # the features get a folder below it
    micro_batch: int  # conversations in one pass of the target

    def features(self, data: Dataset, world: World, console: Console) -> Cached:
        """The features of all conversations, complete on disk.

        Raises UserError if the disk has too little space or the user does not agree.
        """
        rows = [*data.train, *data.held_out]
        store, target = self._store(rows), self.loaded.target
        missing = self._missing(store, world, console)
        if missing:
            positions = self.micro_batch * max(len(row.token_ids) for row in rows)
            self._write(store, ShardWriter(store, Online(target, self.taps), self._collate, positions), missing, world, console)
        for shard in store.numbers:
            if fault := store.fault(shard, verify=False):
                raise UserError(f"{store.file(shard)} is {fault}; set features.dir to a directory that all processes share")
        size = f"{store.bytes(store.numbers) / GIB:,.2f} GiB"
        console.say(f"features: {size} in {store.folder}; training reads them and does not run the target's blocks")
        return Cached(store, target.device, target.dtype)

    def _store(self, rows: Sequence[Encoded]) -> FeatureStore:
        target, sparse = self.loaded.target, self.options.distribution == "top_k"
        keys = (self.taps if sparse else self.taps | Taps(final=True)).keys
        feature_format = FeatureFormat(keys, self.options.format, target.shape.hidden_size, self.options.k if sparse else 0)
        layout = ShardLayout.of((document for row in rows for document in row.documents), feature_format.bytes)
        description = {"target": target.fingerprint, "dtype": self.loaded.description["dtype"]}
        return FeatureStore(self.root.resolve(), layout, feature_format, description)

    def _collate(self, sequences: Sequence[Ids]) -> TrainBatch:
        pad = self.loaded.tokenizer.pad_token_id
        return collate([Encoded(ids, np.ones(len(ids), np.bool_)) for ids in sequences], 0 if pad is None else pad)

    def _missing(self, store: FeatureStore, world: World, console: Console) -> list[int]:
        """Numbers of the shards that are missing or damaged. Every process checks its share."""
        flag_S = torch.zeros(len(store.numbers), dtype=torch.long, device=self.loaded.target.device)
        size = store.bytes(store.numbers)
        shown = console.rich if store.folder.exists() and size > GIB else None
        with counting(shown, "checking features", round(size / MIB), "MiB/s") as advance:
            for shard in store.numbers[world.rank :: world.size]:
                flag_S[shard] = store.fault(shard, self.options.verify) is not None
                advance(world.size * store.bytes([shard]) / MIB)
        missing: list[int] = world.sum(flag_S).nonzero()[:, 0].tolist()
        for shard in missing if world.first else ():
            fault = store.fault(shard, self.options.verify)
            if fault not in (None, ABSENT):
                console.say(f"features: {store.file(shard)} is damaged ({fault}) and will be computed again")
        return missing

    def _write(self, store: FeatureStore, writer: ShardWriter, missing: list[int], world: World, console: Console) -> None:
        tokens = sum(store.layout.tokens(shard) for shard in missing)
        trial = writer.trial(missing, world.size)
        free_bytes = shutil.disk_usage(next(p for p in store.folder.parents if p.exists())).free
        needed_size, duration = f"{store.bytes(missing) / GIB:,.2f} GiB", timedelta(seconds=round(trial.seconds))
        top_k_note = (
            ""
            if trial.dropped_mass is None
            else f" (top {store.form.top} tokens: {1 - trial.dropped_mass:.1%} of the target's probability)"
        )
        console.say(
            f"features: {tokens:,} tokens of {store.form.bytes:,} bytes each{top_k_note} need {needed_size}; {self.root} has "
            f"{free_bytes / GIB:,.2f} GiB free; about {duration} at {tokens / trial.seconds:,.0f} tokens/s"
        )
        if refusal := world.share(self._refusal(store.bytes(missing), free_bytes, console) if world.first else None):
            raise UserError(refusal)
        with store.writing() if world.first else nullcontext():
            if world.first:
                store.describe(self.loaded.description)
            world.wait()
            local_tokens = sum(store.layout.tokens(shard) for shard in missing[world.rank :: world.size])
            with counting(console.rich, "features", tokens, "tokens/s") as advance:
                writer.write(missing, world.rank, world.size, lambda count: advance(count * tokens / local_tokens))
            world.wait()

    def _refusal(self, needed_bytes: int, free_bytes: int, console: Console) -> str | None:
        """Why the features cannot be written; None if they can."""
        size = f"the target's states need {needed_bytes / GIB:,.2f} GiB"
        if needed_bytes > free_bytes:
            return f"{size}, but {self.root} has only {free_bytes / GIB:,.2f} GiB free; {WAYS_OUT}"
        if self.options.yes or needed_bytes <= self.options.confirm_above * GIB:
            return None
        if console.rich is None or not (console.rich.is_terminal and sys.stdin.isatty()):
            return (
                f"{size}, more than features.confirm_above={self.options.confirm_above:g}; add features.yes=true, or {WAYS_OUT}"
            )
        confirmed = Confirm.ask(f"write {needed_bytes / GIB:,.2f} GiB to {self.root}?", console=console.rich, default=False)
        return None if confirmed else f"{size}, and you did not agree; {WAYS_OUT}"


@dataclass(frozen=True, slots=True)
class TimedTrial:
    """Extrapolation from one timed forward."""

    seconds: float  # expected time for all missing shards
    dropped_mass: float | None  # mean probability outside the stored top-k tokens; None: the final state is stored


class ShardWriter:
    """Computes and writes shards.

    positions: tokens of one forward, padding included. batch: collates conversations. All processes run the same number of
    forwards, so that a target that is split over processes can compute.
    """

    def __init__(self, store: FeatureStore, online: Online, batch: Batch, positions: int) -> None:
        self.store, self.online, self.batch, self.positions = store, online, batch, positions

    def trial(self, missing: Sequence[int], size: int) -> TimedTrial:
        """Extrapolate the time of these shards on `size` processes, from one forward of medium length after a warm-up."""
        layout = self.store.layout
        passes = layout.passes(missing[len(missing) // 2], self.positions)
        sequences = passes[len(passes) // 2]
        self._columns(sequences)
        start_time = perf_counter()
        columns = self._columns(sequences)
        scale = sum(map(layout.tokens, missing)) / (size * sum(map(len, sequences)))
        dropped_mass = float(columns[LOG_REST].exp().mean()) if LOG_REST in columns else None
        return TimedTrial((perf_counter() - start_time) * scale, dropped_mass)

    def write(self, missing: Sequence[int], rank: int, size: int, advance: Callable[[int], None]) -> None:
        """Write this process's share of the missing shards. advance: called with the tokens that are done.

        Raises UserError on a full disk; complete shards are kept.
        """
        layout = self.store.layout
        shards = [missing[process::size] for process in range(size)]
        remaining_passes = max(
            sum(len(layout.passes(shard, self.positions)) for shard in process_shards) for process_shards in shards
        )
        for shard in shards[rank]:
            buffers, offset = self.store.buffers(shard), 0
            for sequences in layout.passes(shard, self.positions):
                tokens = sum(map(len, sequences))
                for name, column in self._columns(sequences).items():
                    buffers[name][offset : offset + tokens] = column
                offset, remaining_passes = offset + tokens, remaining_passes - 1
                advance(tokens)
            self.store.write(shard, buffers)
        for _ in range(remaining_passes):
            self._columns(layout.sequences[:1])

    @torch.no_grad()
    def _columns(self, sequences: Sequence[Ids]) -> dict[str, Tensor]:
        """The stored columns of some conversations, on the CPU."""
        filled = self.online.fill(self.batch(sequences))
        real_BT = filled.document_BT >= 0
        hidden = {key: state_BTH[real_BT] for key, state_BTH in filled.hidden.items()}
        return {name: column.cpu() for name, column in self.store.form.encode(hidden, self.online.target).items()}
