"""Prepared conversations as Arrow blocks, in memory or in files, which are read in place and written atomically.

A file starts with 64 bytes, a magic string and the sha256 of the rest. An Arrow file follows. Files of earlier versions are
Arrow files only.

A folder of blocks belongs to one content, tokenizer, template and length (`key_of`). Each block names its records. So runs with
other seeds, mixtures or held-out conversations share the folder, and a killed run loses no finished block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_file
from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.forms import ADAPTER, Conversation
from drafttrain.data.provenance import tokenizer_hash
from drafttrain.data.records import NO_ROOM
from drafttrain.data.sources import Source
from drafttrain.model.images import FIRST, bases, rows, spans
from drafttrain.targets.images import ImageRef

MAGIC, OLD_MAGIC = b"drafttrain block", b"ARROW1"  # first bytes of a file; of a file of earlier versions
HEADER = 64  # bytes before the Arrow file, a multiple of its alignment
IMAGES = "images"  # a column
VERSION = 2  # version of a block's content; every version has its own folder
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


SPANS = pa.list_(pa.struct({"at": pa.int32(), "row": pa.int32(), "count": pa.int32(), "image": pa.string()}))  # of `ImageRef`
OPTIONAL = pa.schema({IMAGES: SPANS, ADAPTER: pa.string()})  # columns of blocks with a record that has such


class RecordBlock:
    """Some prepared records of one source. record_N: their numbers."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.record_N = batch["record"].to_numpy()
        self._ids, self._mask = (batch[name].flatten().to_numpy() for name in ("token_ids", "mask"))
        self._edges = batch["token_ids"].offsets.to_numpy()
        self._spans, self._adapters = (batch[name] if name in batch.schema.names else None for name in OPTIONAL.names)
        self.truncated_N = batch["truncated"].to_numpy(zero_copy_only=False)

    def __len__(self) -> int:
        return len(self.record_N)

    def row(self, n: int) -> Encoded:
        """The documents of the n-th record. The arrays are read-only views."""
        token_range = slice(self._edges[n], self._edges[n + 1])
        starts = tuple(self.batch["starts"][n].as_py())
        ids = self._ids[token_range]
        if self._spans is not None and (image_spans := self._spans[n].as_py()):
            ids = ids.astype(np.int64)
            for span in image_spans:
                image = ImageRef(**json.loads(span["image"]))
                ids[span["at"] : span["at"] + span["count"]] = image.base + span["row"] + np.arange(span["count"])
        adapter = None if self._adapters is None else self._adapters[n].as_py()
        return Encoded(ids, self._mask[token_range].view(np.bool_), bool(self.truncated_N[n]), starts, adapter=adapter)

    @property
    def has_images(self) -> bool:
        return self._spans is not None

    def images(self) -> Iterator[ImageRef]:
        """All images of the records."""
        for record_spans in () if self._spans is None else self._spans:
            for span in record_spans.as_py() or ():
                yield ImageRef(**json.loads(span["image"]))

    @property
    def tokens_N(self) -> NDArray[np.int32]:
        """Tokens of each record."""
        tokens: NDArray[np.int32] = np.diff(self._edges)
        return tokens

    @property
    def supervised_N(self) -> NDArray[np.int64]:
        """Supervised tokens of each record."""
        supervised: NDArray[np.int64] = np.diff(np.concatenate([[0], np.cumsum(self._mask, dtype=np.int64)])[self._edges])
        return supervised

    @property
    def documents_N(self) -> NDArray[np.int32]:
        """Rows of each record; 0 without a supervised token."""
        return np.where(self.supervised_N > 0, np.diff(self.batch["starts"].offsets.to_numpy()), 0).astype(np.int32)

    def lengths(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of all documents of these records."""
        starts = self.batch["starts"].take(pa.array(places)).to_pylist()
        tokens = self.tokens_N[places].tolist()
        ends = (np.diff([*row, size]) for row, size in zip(starts, tokens, strict=True))
        return np.concatenate([np.zeros(0, np.int64), *ends])

    def column(self, name: str) -> list[Any]:
        """A column of the Arrow batch as Python values."""
        values: list[Any] = self.batch[name].to_pylist()
        return values

    @property
    def sound_N(self) -> NDArray[np.bool_]:
        """Whether each record is free of faults."""
        sound: NDArray[np.bool_] = self.batch["fault"].is_null().to_numpy(zero_copy_only=False)
        return sound


def encode_block(source: Source, encoder: Encoder, numbers: Sequence[int]) -> RecordBlock:
    """Prepare these records of a source. A faulty record has its error message in the column `fault`."""
    records = [{"record": record_number, **_encoded(source, encoder, record_number)} for record_number in numbers]
    schema = pa.schema([*SCHEMA, *(column for column in OPTIONAL if any(row[column.name] for row in records))])
    columns = [pa.array([row[name] for row in records], type=schema.field(name).type) for name in schema.names]
    return RecordBlock(pa.RecordBatch.from_arrays(columns, schema=schema))


def _encoded(source: Source, encoder: Encoder, record_number: int) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys([*SCHEMA.names[1:], *OPTIONAL.names]) | {
        "token_ids": [],
        "mask": [],
        "starts": [],
        "truncated": False,
    }
    try:
        conversation = source.conversation(record_number)
        encoded = encoder(conversation)
    except UserError as error:
        return row | {"fault": str(error), "digest": bytes(16)}
    row |= {"form": conversation.form, "digest": _digest(conversation), "truncated": encoded.truncated}
    row[ADAPTER] = conversation.adapter
    if not encoded.supervised and not encoded.truncated and not encoder.template.options.partial:
        return row | {"fault": f"{conversation.origin}: expected supervised tokens, got a reply of none; fill it, or remove it"}
    row |= {"mask": encoded.mask.view(np.uint8), "starts": list(encoded.starts)}
    if not encoded.images:
        return row | {"token_ids": encoded.token_ids}
    ids, image_by_base, image_spans = encoded.token_ids, {image.base: image for image in encoded.images}, []
    for start, stop in spans(ids.tolist()):
        first_id = int(ids[start])
        image = json.dumps(asdict(image_by_base[bases(first_id)]))
        image_spans.append({"at": start, "row": rows(first_id), "count": stop - start, "image": image})
    return row | {"token_ids": np.where(ids < FIRST, ids, 0).astype(np.int32), IMAGES: image_spans}


def _digest(conversation: Conversation) -> bytes:
    """Hash of the text only, so that the same record has the same hash in every file and form."""
    text: Any = conversation.text if conversation.text is not None else conversation.messages
    if conversation.spans:
        text = [text, conversation.spans]
    if not text:
        text = [[tokens.ids.tolist(), tokens.mask.tolist()] for tokens in conversation.tokens]
    extras = [extra for extra in (conversation.tools, conversation.arguments) if extra]
    content = json.dumps([text, *extras] if extras else text, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class BlockStore:
    """The blocks of one source, in a folder that other processes may read and write at the same time."""

    folder: Path

    def names(self) -> set[str]:
        """Names of all files."""
        return {path.name for path in self.folder.glob("*.arrow")}

    def name(self, numbers: Sequence[int]) -> str:
        """File name of the block of these records."""
        return hashlib.blake2b(np.asarray(numbers, "<i8").tobytes(), digest_size=12).hexdigest() + ".arrow"

    def write(self, block: RecordBlock) -> str:
        """Write a block atomically. Returns its name."""
        name = self.name(block.record_N)
        buffer = pa.BufferOutputStream()
        with ipc.new_file(buffer, block.batch.schema) as writer:
            writer.write_batch(block.batch)
        content = buffer.getvalue()
        with atomic_file(self.folder / name, NO_ROOM) as file:
            file.write((MAGIC + hashlib.sha256(content).digest()).ljust(HEADER, b"\0"))
            file.write(content)
        return name

    def read(self, name: str) -> RecordBlock | None:
        """The block in a file; None if the file is missing or damaged. `remove` a damaged file to prepare it again."""
        try:
            with pa.memory_map(str(self.folder / name)) as source:
                content = _checked(source.read_buffer())
            return None if content is None else RecordBlock(ipc.open_file(pa.BufferReader(content)).get_batch(0))
        except (pa.ArrowException, OSError):
            return None

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self.folder / name).unlink(missing_ok=True)


def _checked(raw: Any) -> Any | None:
    """The Arrow file in these bytes, without a copy; None if they are damaged."""
    header = bytes(raw[:HEADER])
    if header.startswith(OLD_MAGIC):
        return raw
    content = raw[HEADER:]
    digest = header[len(MAGIC) : len(MAGIC) + 32]
    return content if header.startswith(MAGIC) and hashlib.sha256(content).digest() == digest else None


def key_of(source: Source, encoder: Encoder) -> str:
    """A hash of everything that decides the result of preparing a source."""
    key_fields = [VERSION, source.records.digest, source.form, encoder.max_length, asdict(encoder.template.options)]
    key_fields += [tokenizer_hash(encoder.tokenizer, encoder.tokenizer.chat_template), encoder.vocab_size]
    key_fields += [encoder.images.digest] if encoder.images.digest else []
    key_fields += [[source.adapter, *(encoder.adapters or ())]] if source.adapter or encoder.adapters else []
    return hashlib.sha256(json.dumps(key_fields).encode()).hexdigest()[:32]


def blocks_in(store: BlockStore, names: Iterable[str]) -> dict[str, RecordBlock]:
    """The blocks of these files, without damaged ones."""
    sorted_names = sorted(names)
    with ThreadPoolExecutor() as threads:  # hashing releases the GIL
        blocks = zip(sorted_names, threads.map(store.read, sorted_names), strict=True)
        return {name: block for name, block in blocks if block is not None}
