"""Tokenised conversations, and which of them make up which training step.

A step's batch is a function of (seed, step) alone: a resumed run needs no state of the data, and every process draws the same
batch and takes its rows of it. Shapes: B sequences, T positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from drafttrain.batch import TrainBatch
from drafttrain.data import DataOptions
from drafttrain.data.chat import Encoded, encode
from drafttrain.data.sources import Conversation, read_conversations
from drafttrain.errors import UserError

WINDOW = 16  # batches that are sorted by length together
BAR_FROM = 2000  # conversations: fewer are tokenised before a bar would be read


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """train and held_out never share a conversation. summary: what the report says of the data (`summarise`)."""

    train: list[Encoded]
    held_out: list[Encoded]
    summary: dict[str, Any]
    seed: int = 0
    _orders: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)  # of the epochs in use

    def order(self, epoch: int, size: int) -> list[int]:
        """The training conversations' order in this epoch (from 0): shuffled, then batches of like lengths.

        Each window of `WINDOW` batches is sorted by length and its batches shuffled, so that little of a batch is padding.
        """
        if (epoch, size) in self._orders:
            return self._orders[epoch, size]
        generator = _generator(self.seed, 1 + epoch)
        shuffled, order = [int(i) for i in generator.permutation(len(self.train))], []
        for start in range(0, len(shuffled), WINDOW * size):
            window = sorted(shuffled[start : start + WINDOW * size], key=lambda i: len(self.train[i].token_ids))
            batches = [window[i : i + size] for i in range(0, len(window), size)]
            for b in generator.permutation(len(window) // size):
                order += batches[b]
            order += window[len(window) // size * size :]
        while len(self._orders) > 1:  # a batch spans two epochs at most, unless the data is smaller than a batch
            self._orders.pop(next(iter(self._orders)))
        self._orders[epoch, size] = order
        return order

    def global_batch(self, step: int, size: int) -> list[Encoded]:
        """The `size` conversations of this step (from 0), for all processes together. Batches run on across epochs."""
        first, batch = step * size, []
        for place in range(first, first + size):
            epoch, index = divmod(place, len(self.train))
            batch.append(self.train[self.order(epoch, size)[index]])
        return batch


def load_dataset(options: DataOptions, tokenizer: PreTrainedTokenizerBase, progress: bool = True) -> Dataset:
    """Read, tokenise and split. Raises UserError for unusable records, and when too few are left to train on."""
    _check_options(options)
    conversations = read_conversations(options)
    encoded = [encode(c, tokenizer, options.max_length) for c in _with_bar(conversations, progress)]
    kept = [e for e in encoded if e.supervised]
    if not kept:
        raise UserError(
            f"data.path={options.path}: none of {len(encoded)} conversations has a supervised token within its first "
            f"data.max_length={options.max_length}; raise data.max_length, or check that the replies are not empty"
        )
    if len(kept) <= options.held_out:
        raise UserError(
            f"data.path={options.path}: {len(kept)} usable conversations with data.held_out={options.held_out} leave none "
            f"to train on; set data.held_out below {len(kept)}"
        )
    order = [int(i) for i in _generator(options.seed, 0).permutation(len(kept))]
    apart = set(order[: options.held_out])
    train = [e for i, e in enumerate(kept) if i not in apart]
    return Dataset(train, [kept[i] for i in sorted(apart)], summarise(conversations, encoded), options.seed)


def collate(rows: Sequence[Encoded], pad_id: int) -> TrainBatch:
    """Right-pad to the longest row. Every row is one document, number 0; padding is document -1."""
    B, T = len(rows), max(len(row.token_ids) for row in rows)
    token_BT = torch.full((B, T), pad_id, dtype=torch.long)
    document_BT = torch.full((B, T), -1, dtype=torch.long)
    mask_BT = torch.zeros((B, T), dtype=torch.bool)
    for b, row in enumerate(rows):
        length = len(row.token_ids)
        token_BT[b, :length] = torch.from_numpy(row.token_ids)
        document_BT[b, :length] = 0
        mask_BT[b, :length] = torch.from_numpy(row.mask)
    return TrainBatch(token_BT, torch.arange(T).expand(B, T).contiguous(), document_BT, mask_BT)


def token_counts(rows: Sequence[Encoded], vocab_size: int) -> torch.Tensor:
    """[V] how often each token is supervised."""
    total = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        total += np.bincount(row.token_ids[row.mask], minlength=vocab_size)
    return torch.from_numpy(total)


def shard(batch: Sequence[Encoded], rank: int, world: int, micro_batch: int) -> list[list[Encoded]]:
    """This process's rows of a global batch (rank, rank + world, ...) in micro-batches; as many for every process."""
    if len(batch) % (micro_batch * world):
        raise UserError(
            f"train.global_batch={len(batch)} must be a multiple of train.micro_batch={micro_batch} x {world} processes; "
            f"set it to {micro_batch * world * max(1, round(len(batch) / (micro_batch * world)))}"
        )
    rows = list(batch[rank::world])
    return [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]


def check_supervised(count: int, step: int) -> None:
    """Raise UserError when a step's global batch has nothing to learn from: its loss would be 0 / 0."""
    if count == 0:
        raise UserError(
            f"step {step}: expected supervised tokens, got a batch whose loss mask selects nothing (its replies are cut off "
            "or too short to draft); raise data.max_length or train.global_batch"
        )


def summarise(conversations: Sequence[Conversation], encoded: Sequence[Encoded]) -> dict[str, Any]:
    """Counts for the report. Tokens, length and truncations are of the kept conversations; sha256 is of all the text read."""
    kept = [e for e in encoded if e.supervised]
    tokens = sum(len(e.token_ids) for e in kept)
    return {
        "conversations": len(kept),
        "dropped": len(encoded) - len(kept),
        "truncated": sum(e.truncated for e in kept),
        "tokens": tokens,
        "supervised_tokens": sum(e.supervised for e in kept),
        "mean_length": tokens / max(1, len(kept)),
        "sha256": _digest(conversations),
    }


def _digest(conversations: Sequence[Conversation]) -> str:
    """Of the text alone, so that the same records in another file or format have the same digest."""
    digest = hashlib.sha256()
    for conversation in conversations:
        content = (
            conversation.text if conversation.text is not None else [[m["role"], m["content"]] for m in conversation.messages]
        )
        digest.update(json.dumps(content).encode() + b"\n")
    return digest.hexdigest()


def _check_options(options: DataOptions) -> None:
    if options.max_length < 2:
        raise UserError(f"data.max_length must be at least 2, got {options.max_length}; raise it")
    if options.held_out < 0:
        raise UserError(f"data.held_out must not be negative, got {options.held_out}; set it to 0 or more")


def _with_bar(conversations: Sequence[Conversation], progress: bool) -> Iterable[Conversation]:
    if not progress or len(conversations) < BAR_FROM:
        return conversations
    return track(conversations, "tokenising", console=Console(stderr=True))


def _generator(seed: int, stream: int) -> np.random.Generator:
    """Independent streams of one seed: 0 sets conversations apart, 1 + e orders epoch e."""
    return np.random.default_rng([seed % 2**64, stream])
