"""Images of conversations: their files, the tokens that stand for them in a prompt, and their pixels for the target.

Images are prepared by the target's own image processor. Those that work without torchvision are used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drafttrain.core.errors import UserError
from drafttrain.model.images import FIRST, MOST_ROWS, base_of

INLINE = "data:"  # a source with this prefix holds the image itself
PIXELS = ("pixel_values", "image_grid_thw", "image_position_ids")  # of what a processor gives: inputs of the target
INSTALL = "pip install 'drafttrain[vision]'"


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that was read: what is needed to make its pixels again."""

    source: str  # an absolute path, or data:...;base64,...
    digest: str  # hash of its content and of the processor's settings, hexadecimal
    rows: int  # positions that it takes in a sequence

    @property
    def base(self) -> int:
        """The id of its first row."""
        return base_of(bytes.fromhex(self.digest))


@dataclass(frozen=True, slots=True)
class Expanded:
    """A rendered text in which every image has its tokens."""

    text: str
    edges: list[int]  # where each asked-for character of the rendered text is now
    images: tuple[ImageRef, ...] = ()


class Images(Protocol):
    """Turns the images of conversations into tokens."""

    def expand(self, text: str, sources: Sequence[str], origin: str, edges: Sequence[int] = ()) -> Expanded:
        """The text with each image's place replaced by its tokens. Raises UserError for an image that cannot be used.

        sources: of its images, in order. edges: characters of the text whose new places are wanted.
        """
        ...

    def ids(self, token: Sequence[int], images: Sequence[ImageRef], origin: str) -> NDArray[Any]:
        """The sequence with the ids of the images' rows (`model.images`) instead of placeholders; int32 without images."""
        ...

    def add(self, images: Iterable[ImageRef]) -> None:
        """Images that were read before, so that the target finds their pixels."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the processor's settings; empty where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class NoImages:
    """Of a target that reads text alone."""

    reason: str = "the target reads text alone"
    digest: str = ""

    def expand(self, text: str, sources: Sequence[str], origin: str, edges: Sequence[int] = ()) -> Expanded:
        raise UserError(f"{origin}: it has an image, but {self.reason}; choose a target with images, or remove the record")

    def ids(self, token: Sequence[int], images: Sequence[ImageRef], origin: str) -> NDArray[Any]:
        return np.array(token, np.int32)

    def add(self, images: Iterable[ImageRef]) -> None:
        pass


TEXT_ONLY = NoImages()


@dataclass
class ImageReader:
    """The images of one target. Workers get it by pickle."""

    processor: Any  # transformers' image processor
    token: str  # stands for one row of an image in the target's text
    token_id: int
    place: str  # what the chat template writes for an image
    before: str = ""  # written before and after an image's rows
    after: str = ""
    fixed: int | None = None  # rows of every image; None: they depend on its size
    known: dict[int, ImageRef] = field(default_factory=dict)  # by the id of the first row
    _by_source: dict[str, ImageRef] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"known": {}, "_by_source": {}}

    @cached_property
    def digest(self) -> str:
        settings = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()

    def expand(self, text: str, sources: Sequence[str], origin: str, edges: Sequence[int] = ()) -> Expanded:
        spans = [m.span() for m in re.finditer(re.escape(self.place), text)]
        if len(spans) != len(sources):
            raise UserError(
                f"{origin}: expected {len(sources)} places for images in its text, got {len(spans)}; the chat template must "
                f"write {self.place} once for each image, and no text may contain it"
            )
        images = tuple(self.read(source, origin) for source in sources)
        pieces, cursor, shift, moves = list[str](), 0, 0, list[tuple[int, int]]()
        for (start, stop), image in zip(spans, images, strict=True):
            image_text = f"{self.before}{self.token * image.rows}{self.after}"
            pieces += [text[cursor:start], image_text]
            cursor, shift = stop, shift + len(image_text) - (stop - start)
            moves.append((stop, shift))
        shifts = [next((offset for stop, offset in reversed(moves) if edge >= stop), 0) for edge in edges]
        return Expanded(
            "".join([*pieces, text[cursor:]]), [edge + offset for edge, offset in zip(edges, shifts, strict=True)], images
        )

    def ids(self, token: Sequence[int], images: Sequence[ImageRef], origin: str) -> NDArray[Any]:
        if not images:
            return np.array(token, np.int32)
        token_ids = np.array(token, np.int64)
        row_index = np.flatnonzero(token_ids == self.token_id)
        rows = np.concatenate([image.base + np.arange(image.rows) for image in images])[: len(row_index)]
        if len(rows) < len(row_index):
            raise UserError(
                f"{origin}: {self.token} is in its text {len(row_index) - len(rows)} times without an image; remove it"
            )
        token_ids[row_index] = rows
        return token_ids

    def read(self, source: str, origin: str) -> ImageRef:
        """Open an image and count its rows. Raises UserError that names the origin."""
        name = _version_of(source)
        if name not in self._by_source:
            content = content_of(source, origin)
            digest = self._digest(content)
            processed = self._processed(content, source, origin)
            rows = self.fixed or self._rows(processed)
            if rows > MOST_ROWS:
                raise UserError(f"{origin}: image {named(source)} has {rows:,} rows, more than {MOST_ROWS:,}; make it smaller")
            self._by_source[name] = ImageRef(source, digest, rows)
            self.add([self._by_source[name]])
        return self._by_source[name]

    def add(self, images: Iterable[ImageRef]) -> None:
        for image in images:
            registered = self.known.setdefault(image.base, image)
            if registered.digest != image.digest:
                raise UserError(
                    f"images {named(image.source)} and {named(registered.source)} have hashes that agree; change one"
                )

    def pixels(self, base: int) -> dict[str, Any]:
        """The target's inputs for the image whose first row has this id. Raises UserError if its file has changed."""
        content = self.content(base)
        processed = self._processed(content, self.known[base].source, "image")
        return {name: processed[name] for name in PIXELS if name in processed}

    def content(self, base: int) -> bytes:
        """The file of the image whose first row has this id. Raises UserError as `pixels`."""
        image = self.known.get(base)
        if image is None:
            raise UserError("a sequence holds an image that was not read in this process; read its conversation again")
        content = content_of(image.source, "image")
        if self._digest(content) != image.digest:
            raise UserError(
                f"image {named(image.source)} has changed since it was read; put it back, or set data.cache to a new folder"
            )
        return content

    def _rows(self, processed: Any) -> int:
        if "num_soft_tokens_per_image" in processed:
            return int(processed["num_soft_tokens_per_image"][0])
        return int(processed["image_grid_thw"][0].prod()) // self.processor.merge_size**2

    def _digest(self, content: bytes) -> str:
        return hashlib.sha256(self.digest.encode() + content).hexdigest()[:32]

    def _processed(self, content: bytes, source: str, origin: str) -> Any:
        from PIL import Image, ImageOps

        try:
            with Image.open(io.BytesIO(content)) as image_file:
                picture = ImageOps.exif_transpose(image_file).convert("RGB")
            processed = self.processor(images=[picture], return_tensors="pt")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = " ".join(str(error).split())[:120].replace(str(io.BytesIO), "")
            raise UserError(
                f"{origin}: expected an image in {named(source)}, got something else ({_unnamed(reason)}); convert it to PNG "
                "or JPEG"
            ) from error
        if "num_crops" in processed and int(processed["num_crops"][0]):
            raise UserError(
                f"{origin}: the target's image processor cuts images into crops; set do_pan_and_scan to false in it"
            )
        return processed


def _version_of(source: str) -> str:
    """A name of an image's file as it is now."""
    if source.startswith(INLINE) or not (path := Path(source)).is_file():
        return source
    stat = path.stat()
    return f"{source}:{stat.st_mtime_ns}:{stat.st_size}"


def _unnamed(reason: str) -> str:
    """The reason without the address of a buffer."""
    return re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "the file", reason)


def named(source: str) -> str:
    """An image's source for a message."""
    return "the record itself" if source.startswith(INLINE) else source


def content_of(source: str, origin: str) -> bytes:
    """The bytes of an image. Raises UserError for a file that cannot be read, and for damaged base64."""
    if source.startswith(INLINE):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(
                f"{origin}: expected base64 in its image, got other characters ({error}); write it again"
            ) from error
    try:
        return Path(source).read_bytes()
    except OSError as error:
        problem = "nothing there" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise UserError(f"{origin}: expected an image file at {source}, got {problem}; correct the path") from error


def image_reader(path: str, config: Any, tokenizer: Any, **shared: Any) -> Images:
    """The images of the target at a path, or the reason why it has none. config: transformers' configuration of the target."""
    from transformers import AutoImageProcessor
    from transformers.utils import logging

    try:
        import PIL  # noqa: F401
    except ImportError:
        return NoImages(f"images need pillow, which is missing: {INSTALL}")
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        processor = AutoImageProcessor.from_pretrained(path, **shared)
    except Exception as error:  # libraries raise errors of every kind for damaged files
        return NoImages(f"{path} has no image processor that can be loaded ({' '.join(str(error).split())[:160]})")
    finally:
        logging.set_verbosity(level)
    token_id = int(config.image_token_id)
    token, begin_token = tokenizer.convert_ids_to_tokens(token_id), getattr(tokenizer, "boi_token", None)
    if begin_token is None:
        return ImageReader(processor, token, token_id, token)
    end_token, fixed = getattr(tokenizer, "eoi_token", ""), getattr(config, "mm_tokens_per_image", None)
    if fixed is None:
        return ImageReader(processor, token, token_id, token, begin_token, end_token)
    return ImageReader(processor, token, token_id, begin_token, f"\n\n{begin_token}", f"{end_token}\n\n", int(fixed))


__all__ = ["FIRST", "TEXT_ONLY", "Expanded", "ImageReader", "ImageRef", "Images", "NoImages", "content_of", "image_reader"]
