"""Conversations in memory as training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drafttrain.api.drafter import LoadedDrafter, for_recipe
from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.data.dataset import collate, load_dataset, token_counts
from drafttrain.data.records import Listed
from drafttrain.model.batch import TrainBatch

Conversation = Mapping[str, Any]
NAME = "conversation"


def listed(conversations: Sequence[Conversation]) -> Listed:
    """Records in memory. Raises UserError for an empty list, and for something else than dictionaries."""
    rows = list(conversations)
    if not rows:
        raise UserError('no conversations; give dictionaries such as {"messages": [{"role": "user", "content": "..."}, ...]}')
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f'conversation {number} is a {type(row).__name__}; give a dictionary such as {{"messages": [...]}}')
    return Listed(NAME, map(dict, rows))


def batches(
    drafter: LoadedDrafter,
    conversations: Sequence[Conversation],
    *,
    batch_size: int = 8,
    epochs: int = 1,
    max_length: int | None = None,
    seed: int = 0,
) -> Iterator[TrainBatch]:
    """Turn conversations into batches for a training loop of your own.

    The tokenizer's chat template is applied. Assistant turns are supervised. Batches hold conversations of like lengths, in an
    order that follows from the seed. The last batch is filled up from the beginning of the next epoch.

    Args:
        drafter: The drafter to train. The first call lets its family prepare itself from the data, as some choose a vocabulary.
        conversations: Dictionaries `{"messages": [{"role": ..., "content": ...}, ...]}`, or another form of docs/data.md.
        batch_size: Conversations in a batch.
        epochs: Passes over the conversations.
        max_length: Tokens of a conversation. Later turns that do not fit are left out. None: as in the recipe, and the target's
            context at most.
        seed: Of the order.

    Yields:
        Batches on the target's device, without the target's states. `token_BT` and `mask_BT` are [batch, tokens];
        `mask_BT` is True on supervised tokens.

    Raises:
        UserError: A conversation cannot be used, or none has a supervised token, or the drafter cannot be trained.
    """
    drafter.check_trainable()
    if batch_size < 1 or epochs < 1:
        raise UserError(f"batch_size is {batch_size}, epochs {epochs}; set both to 1 or more")
    target = drafter.base
    options = for_recipe(drafter.recipe, drafter.settings, target).options.data
    length = min(max_length or options.max_length, target.target.shape.max_positions)
    options = replace(options, path=NAME, mix=[], max_length=length, held_out=0, seed=seed)
    check_limits("data", options)
    data = load_dataset(
        options,
        target.tokenizer,
        progress=False,
        records=listed(conversations),
        images=target.images,
        vocab_size=target.target.shape.vocab_size,
    )
    if not drafter.prepared:
        drafter.module.prepare(lambda: token_counts(data.train, target.target.shape.vocab_size))
        drafter.prepared = True
    return _batches(drafter, data, batch_size, epochs)


def _batches(drafter: LoadedDrafter, data: Any, batch_size: int, epochs: int) -> Iterator[TrainBatch]:
    pad, device = drafter.base.tokenizer.pad_token_id, drafter.base.target.device
    try:
        for step in range(-(-epochs * len(data.train) // batch_size)):
            yield collate(data.global_batch(step, batch_size), 0 if pad is None else pad).to(device)
    finally:
        data.close()
