"""Prepared conversations: blocks of Arrow, read where they lie, in memory or in files that appear whole.

A file is 64 bytes, which name it and hold the sha256 of the rest, and then an Arrow file. Those of earlier versions are Arrow
files alone.

A folder of blocks belongs to one content, tokenizer, template and length (`key_of`); which records its blocks hold is written
in them. So runs with other seeds, mixtures or held-out conversations share it, and a run that was killed has lost no finished
block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc
from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_file
from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.forms import Conversation
from drafttrain.data.records import NO_ROOM
from drafttrain.data.sources import Source

HEAD, BARE = b"drafttrain block", b"ARROW1"  # what a file begins with; an older one
AT = 64  # bytes at which Arrow begins: a multiple of what it aligns to
VERSION = 1  # of what is in a block: another one, another folder
SCHEMA = pa.schema(
    {
        "record": pa.int64(),
        "token_ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.uint8()),
        "starts": pa.list_(pa.int32()),
        "truncated": pa.bool_(),
        "form": pa.string(),
        "digest": pa.binary(16),
        "fault": pa.string(),
    }
)


class Block:
    """Some records of one source. record_N: their numbers; form, digest, fault: what is known of each besides its tokens."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.record_N = batch["record"].to_numpy()
        self._ids, self._mask = (batch[name].flatten().to_numpy() for name in ("token_ids", "mask"))
        self._edges = batch["token_ids"].offsets.to_numpy()
        self.truncated_N = batch["truncated"].to_numpy(zero_copy_only=False)

    def __len__(self) -> int:
        return len(self.record_N)

    def row(self, n: int) -> Encoded:
        """No copy: its arrays are read-only."""
        cut = slice(self._edges[n], self._edges[n + 1])
        starts = tuple(self.batch["starts"][n].as_py())
        return Encoded(self._ids[cut], self._mask[cut].view(np.bool_), bool(self.truncated_N[n]), starts)

    @property
    def tokens_N(self) -> NDArray[np.int32]:
        tokens: NDArray[np.int32] = np.diff(self._edges)
        return tokens

    @property
    def supervised_N(self) -> NDArray[np.int64]:
        supervised: NDArray[np.int64] = np.diff(np.concatenate([[0], np.cumsum(self._mask, dtype=np.int64)])[self._edges])
        return supervised

    @property
    def documents_N(self) -> NDArray[np.int32]:
        """How many rows each record gives; none without a supervised token."""
        return np.where(self.supervised_N > 0, np.diff(self.batch["starts"].offsets.to_numpy()), 0).astype(np.int32)

    def lengths(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of all documents of these records."""
        starts = self.batch["starts"].take(pa.array(places)).to_pylist()
        tokens = self.tokens_N[places].tolist()
        ends = (np.diff([*row, size]) for row, size in zip(starts, tokens, strict=True))
        return np.concatenate([np.zeros(0, np.int64), *ends])

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self.batch[name].to_pylist()
        return values

    @property
    def sound_N(self) -> NDArray[np.bool_]:
        """Which records nothing is wrong with."""
        sound: NDArray[np.bool_] = self.batch["fault"].is_null().to_numpy(zero_copy_only=False)
        return sound


def encode_block(source: Source, encoder: Encoder, numbers: Sequence[int]) -> Block:
    """These records of a source, prepared. What is wrong with one stands in its place."""
    rows = [{"record": number, **_encoded(source, encoder, number)} for number in numbers]
    columns = [pa.array([row[name] for row in rows], type=SCHEMA.field(name).type) for name in SCHEMA.names]
    return Block(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))


def _encoded(source: Source, encoder: Encoder, number: int) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(SCHEMA.names[1:]) | {"token_ids": [], "mask": [], "starts": [], "truncated": False}
    try:
        conversation = source.conversation(number)
        encoded = encoder(conversation)
    except UserError as error:
        return row | {"fault": str(error), "digest": bytes(16)}
    row |= {"form": conversation.form, "digest": _digest(conversation), "truncated": encoded.truncated}
    if not encoded.supervised and not encoded.truncated:
        return row | {"fault": f"{conversation.origin}: expected supervised tokens, got a reply of none; fill it, or remove it"}
    return row | {"token_ids": encoded.token_ids, "mask": encoded.mask.view(np.uint8), "starts": list(encoded.starts)}


def _digest(conversation: Conversation) -> bytes:
    """Of the text alone, so that the same record in another file or form has the same."""
    said: Any = conversation.text if conversation.text is not None else conversation.messages
    content = json.dumps([said, conversation.tools] if conversation.tools else said, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Store:
    """The blocks of one source, in a folder that others may read and write at the same time."""

    folder: Path

    def names(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.arrow")}

    def name(self, numbers: Sequence[int]) -> str:
        """Of the block that holds these."""
        return hashlib.blake2b(np.asarray(numbers, "<i8").tobytes(), digest_size=12).hexdigest() + ".arrow"

    def write(self, block: Block) -> str:
        name = self.name(block.record_N)
        sink = pa.BufferOutputStream()
        with ipc.new_file(sink, SCHEMA) as writer:
            writer.write_batch(block.batch)
        content = sink.getvalue()
        with atomic_file(self.folder / name, NO_ROOM) as file:
            file.write((HEAD + hashlib.sha256(content).digest()).ljust(AT, b"\0"))
            file.write(content)
        return name

    def read(self, name: str) -> Block | None:
        """None for a file that is gone, or not what was written: `remove` it, and it is prepared again."""
        try:
            with pa.memory_map(str(self.folder / name)) as source:
                content = _checked(source.read_buffer())
            return None if content is None else Block(ipc.open_file(pa.BufferReader(content)).get_batch(0))
        except (pa.ArrowException, OSError):
            return None

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


def _checked(whole: Any) -> Any | None:
    """The Arrow file in these bytes, which are not copied; None where they are not what was written."""
    head = bytes(whole[:AT])
    if head.startswith(BARE):
        return whole
    content = whole[AT:]
    digest = head[len(HEAD) : len(HEAD) + 32]
    return content if head.startswith(HEAD) and hashlib.sha256(content).digest() == digest else None


def key_of(source: Source, encoder: Encoder) -> str:
    """A name for all that decides what a source's records become."""
    parts = [VERSION, source.records.digest, source.form, encoder.max_length, asdict(encoder.template.options)]
    parts += [tokenizer_digest(encoder.tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of its vocabulary, its rules and its template."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = [rules, tokenizer.chat_template, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def blocks_in(store: Store, names: Iterable[str]) -> dict[str, Block]:
    """Those of these files that are what was written."""
    ordered = sorted(names)
    with ThreadPoolExecutor() as threads:  # hashing lets other threads run
        found = zip(ordered, threads.map(store.read, ordered), strict=True)
        return {name: block for name, block in found if block is not None}
