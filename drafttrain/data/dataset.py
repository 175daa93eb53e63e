"""Tokenised conversations, and the rows of each training step.

A step's batch depends only on (seed, step). So a resumed run needs no data state, and every process draws the same batch and
takes its own rows from it. Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from drafttrain.core.console import counting
from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.files import read_template
from drafttrain.data.order import Mixture, Order, Packed, SingleRows, generator, pack
from drafttrain.data.pool import Conversations, PoolRows, Workers
from drafttrain.data.records import Records
from drafttrain.data.sources import Faults, Source, cache_folder, open_sources
from drafttrain.data.statistics import summarise
from drafttrain.data.templates import TemplateOptions
from drafttrain.data.workers import spare_cores
from drafttrain.model.batch import TrainBatch
from drafttrain.targets.images import TEXT_ONLY, Images

__all__ = ["Dataset", "Encoded", "check_supervised", "collate", "encoder_of", "load_dataset", "pack", "shard", "token_counts"]

T = TypeVar("T")
LARGE = 8192  # records; larger data is prepared by several processes while training runs
FIRST = 2048  # records that training waits for, in addition to the held-out ones
HELD_OUT, SHARE = 64, 8  # without data.held_out one conversation of SHARE is held out, HELD_OUT at most
BAR_FROM = 2000  # conversations; fewer need no progress bar
COUNTED = 1024  # rows whose tokens are counted in one call


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Training rows and held-out rows, which never share a conversation. A packed row holds several conversations."""

    train: Sequence[Encoded]
    held_out: list[Encoded]
    summary: dict[str, Any]  # facts for the report about the data prepared so far (`summarise`)
    seed: int = 0
    group_by_length: bool = True
    conversations: Conversations | None = None  # the rows' conversations; None if there are only rows
    mixture: Mixture | None = None
    _order: list[Order] = field(default_factory=list, repr=False)

    @property
    def preparing(self) -> bool:
        """Whether some conversations are not prepared yet."""
        return self.conversations is not None and not self.conversations.complete

    def report(self) -> dict[str, Any]:
        """The summary of the data prepared by now."""
        return self.summary if self.conversations is None else self.summary | summarise(self.conversations)

    def close(self) -> None:
        """Stop the preparation."""
        if self.conversations is not None:
            self.conversations.close()

    @property
    def has_images(self) -> bool:
        """Whether a conversation that is prepared by now has an image."""
        blocks = () if self.conversations is None else self.conversations.blocks
        return any(prepared.block.has_images for prepared in blocks)

    @property
    def rows(self) -> Order:
        """The order of `train`'s rows over all epochs."""
        if not self._order:
            groups = self.train if isinstance(self.train, PoolRows) else SingleRows(len(self.train))
            lengths = self.train if self.group_by_length else None
            self._order.append(Order(self.seed, self.mixture or Mixture((groups.size,)), groups, lengths))
        return self._order[0]

    def order(self, epoch: int, size: int) -> list[int]:
        """The training rows' order in this epoch (from 0), in batches of `size`. Waits until all rows are prepared."""
        return self.rows.epoch(epoch, size).all()

    def global_batch(self, step: int, size: int) -> list[Encoded]:
        """The `size` rows of this step (from 0), for all processes together. A batch may span two epochs."""
        return [self.train[self.rows.row(position, size)] for position in range(step * size, (step + 1) * size)]

    def origin(self, place: int, size: int) -> str:
        """The records of the row at this place of all epochs, in batches of `size`, as messages name them."""
        row = self.rows.row(place, size)
        return self.train.origin(row) if isinstance(self.train, PoolRows | Packed) else f"row {row + 1}"


def load_dataset(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    progress: bool = True,
    leads: bool = True,
    records: Records | None = None,
    images: Images = TEXT_ONLY,
    vocab_size: int | None = None,
    adapters: Sequence[str] | None = None,
) -> Dataset:
    """Read, tokenise and split the data. Raises UserError for unusable records, and when too few are left to train on.

    Of large data it waits only for the beginning of the first epoch. The rest is prepared while training runs, until `close`.
    Packing needs all of it. leads: this process prepares the data, and the others of its machine read it.
    records: conversations in memory, used instead of those that the options name. images: of the target. vocab_size: tokens
    that the target has; a conversation with another one is unusable, and so is one of an adapter that is not in `adapters`.
    """
    sources = open_sources(options) if records is None else [Source(options.path, records, options.form, None)]
    encoder = encoder_of(options, tokenizer, images, vocab_size, adapters)
    conversations = Conversations(sources, encoder, _workers(options, sources, leads), Faults.of(options, sources))
    try:
        return _dataset(options, conversations, progress)
    except BaseException:
        conversations.close()
        raise


def encoder_of(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    images: Images = TEXT_ONLY,
    vocab_size: int | None = None,
    adapters: Sequence[str] | None = None,
) -> Encoder:
    """Converts conversations to rows, with the template that the options name."""
    template = TemplateOptions(read_template(options.template), options.thinking, tuple(options.supervise), options.date)
    return Encoder(tokenizer, options.max_length, template, images, vocab_size, adapters)


def tokenising(total: int) -> AbstractContextManager[Callable[[float], None]]:
    """Progress of tokenising so many conversations, on stderr; a few need none."""
    return counting(Console(stderr=True) if total >= BAR_FROM else None, "tokenising", total)


def _dataset(options: DataOptions, conversations: Conversations, progress: bool) -> Dataset:
    count, prepare_all = conversations.count, options.pack or conversations.workers.folder is None
    held_out_count = min(HELD_OUT, max(1, count // SHARE), count - 1) if options.held_out is None else options.held_out
    if not prepare_all and count <= held_out_count:
        raise _none_left(conversations, count, held_out_count)
    missing = conversations.missing if prepare_all else min(conversations.missing, held_out_count + FIRST)
    with tokenising(missing if progress else 0) as advance:
        if prepare_all:
            conversations.wait(np.arange(count), advance)
        held_out_numbers = _held_out_numbers(options, conversations, held_out_count, advance)
        rows = PoolRows(conversations, np.setdiff1d(np.arange(count), held_out_numbers))
        mixture = _mixture(options, conversations, rows.numbers, held_out_count)
        first_epoch = rows.numbers[mixture.epoch(0)[generator(options.seed, 1).permutation(rows.size)]]
        conversations.request(first_epoch)
        conversations.wait(first_epoch[:FIRST], advance)
        conversations.request(rows.numbers)
    if conversations.complete:
        _check_enough(options, conversations, len(rows), held_out_count)
    held_out = [row for index in held_out_numbers.tolist() for row in conversations.rows(index)]
    summary = summarise(conversations) | {"held_out": len(held_out_numbers)}
    if not options.pack:
        return Dataset(rows, held_out, summary, options.seed, options.group_by_length, conversations, mixture)
    packed = pack(rows, options.max_length, [row for index in mixture.epoch(0).tolist() for row in rows.rows(index)])
    summary["packing"] = {"rows": len(packed), "efficiency": packed.tokens / (len(packed) * options.max_length)}
    return Dataset(packed, held_out, summary, options.seed, options.group_by_length, conversations)


def _held_out_numbers(
    options: DataOptions, conversations: Conversations, count: int, advance: Callable[[int], None]
) -> NDArray[np.int64]:
    """`count` held-out conversations, ascending: the first usable ones in a shuffle of all, or of each source by weight."""
    shuffled = generator(options.seed, 0).permutation(conversations.count)
    mixture = _mixture(options, conversations, np.arange(conversations.count), count)
    if mixture.weights is None:
        quotas = [(shuffled, count)]
    else:
        source_of = np.searchsorted(conversations.first, shuffled, side="right") - 1
        quotas = [(shuffled[source_of == source], quota) for source, quota in enumerate(mixture.shares(count))]
    held_out: list[int] = []
    for numbers, quota in quotas:
        start, previous_count = 0, len(held_out)
        while (remaining := quota - (len(held_out) - previous_count)) and start < len(numbers):
            requested = numbers[start : start + remaining]
            conversations.request(requested)
            conversations.wait(requested, advance)
            held_out += [index for index in requested.tolist() if conversations.documents_C[index]]
            start += remaining
    return np.array(sorted(held_out), np.int64)


def _mixture(options: DataOptions, conversations: Conversations, numbers: NDArray[np.int64], held_out: int) -> Mixture:
    """The mixture of these conversations. Raises UserError if a source has none left."""
    sizes = np.diff(np.searchsorted(numbers, conversations.first)).tolist()
    weights = tuple(source.weight for source in conversations.sources if source.weight is not None)
    if weights and 0 in sizes:
        name = conversations.sources[sizes.index(0)].name
        raise UserError(f"data.held_out={held_out} takes all of {name}; lower it, or leave the source out")
    return Mixture(tuple(sizes), weights or None, options.seed)


def _workers(options: DataOptions, sources: Sequence[Source], leads: bool) -> Workers:
    if options.workers is None and sum(len(source.records) for source in sources) < LARGE:
        return Workers()
    return Workers(cache_folder(options), options.workers or spare_cores(), leads)


def _check_enough(options: DataOptions, conversations: Conversations, rows: int, held_out: int) -> None:
    usable_count = int((conversations.documents_C > 0).sum())
    if not usable_count:
        raise UserError(
            f"{conversations.name}: none of {conversations.count} conversations has a supervised token within its first "
            f"data.max_length={options.max_length}; raise data.max_length, or check that the replies are "
            f"not empty and that data.supervise names parts of them"
        )
    if not rows:
        raise _none_left(conversations, usable_count, held_out)


def _none_left(conversations: Conversations, usable_count: int, held_out: int) -> UserError:
    return UserError(
        f"{conversations.name}: {usable_count} usable conversations with data.held_out={held_out} leave none to train on; set "
        f"data.held_out below {usable_count}"
    )


def collate(rows: Sequence[Encoded], pad_id: int, multiple: int = 1, most: int | None = None) -> TrainBatch:
    """Right-pad to the longest row. Documents of a row count from 0, and positions start at 0 in each. Padding is document -1.

    multiple: the length is rounded up to one of it, but not above `most`.

    Worked example, the rows `a b c | d e` and `f g`:

        token      a b c d e     f g
        document   0 0 0 1 1     0 0 -1 -1 -1
        position   0 1 2 0 1     0 1  2  3  4
    """
    B, longest = len(rows), max(len(row.token_ids) for row in rows)
    rounded_length = -(-longest // multiple) * multiple
    T = rounded_length if most is None else max(longest, min(rounded_length, most))
    token_BT = np.full((B, T), pad_id, np.int64)
    document_BT = np.full((B, T), -1, np.int64)
    mask_BT = np.zeros((B, T), np.bool_)
    position_BT = np.tile(np.arange(T), (B, 1))
    for b, row in enumerate(rows):
        length = len(row.token_ids)
        token_BT[b, :length] = row.token_ids
        mask_BT[b, :length] = row.mask
        for document_index, (start, stop) in enumerate(zip(row.starts, (*row.starts[1:], length), strict=True)):
            document_BT[b, start:stop] = document_index
            position_BT[b, start:stop] = np.arange(stop - start)
    token, position, document, mask = map(torch.from_numpy, (token_BT, position_BT, document_BT, mask_BT))
    return TrainBatch(token, position, document, mask, adapters=tuple(row.adapter for row in rows))


def token_counts(rows: Sequence[Encoded], vocab_size: int) -> torch.Tensor:
    """[V] how often each token is supervised."""
    total, buffered_ids = np.zeros(vocab_size, dtype=np.int64), []
    for i, row in enumerate(rows, start=1):
        buffered_ids.append(row.token_ids[row.mask])
        if i % COUNTED == 0 or i == len(rows):
            total += np.bincount(np.concatenate(buffered_ids), minlength=vocab_size)
            buffered_ids = []
    return torch.from_numpy(total)


def shard(batch: Sequence[T], rank: int, world: int, micro_batch: int) -> list[list[T]]:
    """This process's rows of a global batch (rank, rank + world, ...) in micro-batches; the same number for every process."""
    if len(batch) % (micro_batch * world):
        raise UserError(
            f"train.global_batch={len(batch)} must be a multiple of train.micro_batch={micro_batch} x {world} processes; "
            f"set it to {micro_batch * world * max(1, round(len(batch) / (micro_batch * world)))}"
        )
    rows = list(batch[rank::world])
    return [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]


def check_supervised(count: int, step: int) -> None:
    """Raise UserError if a step's global batch has no supervised token. Its loss would be 0 / 0."""
    if count == 0:
        raise UserError(
            f"step {step}: expected supervised tokens, got a batch whose loss mask selects nothing (its replies are cut off "
            "or too short to draft); raise data.max_length or train.global_batch"
        )
