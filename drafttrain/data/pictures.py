"""Images in the content of messages: the forms that published sets use, and where their files are."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError

IMAGE_KEYS = ("image", "image_url")  # types of a part
PLACE = "<image>"  # in the text of LLaMA-Factory's, ms-swift's and LLaVA's records, for the next of the record's `images`
SOURCES = ("image", "path", "url", "base64", "image_url")  # fields that hold the image
INLINE = "data:"
REMOTE = ("http://", "https://", "ftp://", "s3://", "gs://")
SHORTEST = 64  # characters of base64 without a prefix
Content = str | list[dict[str, str]]  # of a message: text, or parts of text and images


def image_part(origin: str, place: str, part: dict[str, Any]) -> dict[str, str]:
    """An image part with its source as written, {"type": "image", "image": ...}. Raises UserError for a part without one."""
    name = next((key for key in SOURCES if part.get(key) is not None), None)
    source = part.get(name) if name else None
    if isinstance(source, dict):  # {"image_url": {"url": ...}}, or {"bytes": ..., "path": ...} of `datasets`
        image_bytes = source.get("bytes")
        source = _inline(image_bytes) if isinstance(image_bytes, bytes) else source.get("url") or source.get("path")
    if not isinstance(source, str) or not source:
        shown = "nothing" if source is None else type(source).__name__
        raise UserError(f'{origin}: expected a path or base64 in the image of {place}, got {shown}; write {{"image": PATH}}')
    if name == "base64" and not source.startswith(INLINE):
        source = f"{INLINE}image;base64,{source}"
    return {"type": "image", "image": source}


def with_images(origin: str, messages: list[dict[str, Any]], filled: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages with the record's `images` in the places of `<image>`; without a place, before the first user turn's text.

    Raises UserError for another number of places than images, and for a record with sound or video.
    """
    if media_key := next((name for name in ("videos", "audios") if filled.get(name)), None):
        raise UserError(f"{origin}: expected text and images, got `{media_key}`; remove the record")
    slots = sum(text_of(message["content"]).count(PLACE) for message in messages)
    images = filled.get("images") or ([filled["image"]] if slots and "image" in filled else [])
    user_turns = [message for message in messages if message["role"] == "user"]
    if not images or not user_turns or sources_of(messages):
        return messages
    if not isinstance(images, list) or slots not in (0, len(images)):
        shown = f"{len(images)} images" if isinstance(images, list) else type(images).__name__
        raise UserError(f"{origin}: expected an image for each of {slots} {PLACE}, got {shown}; correct `images` or the text")
    image_parts = iter([image_part(origin, "images", {"type": "image", "image": image}) for image in images])
    if not slots:
        user_turns[0]["content"] = [*image_parts, {"type": "text", "text": user_turns[0]["content"]}]
    for message in messages if slots else ():
        first, *later_texts = text_of(message["content"]).split(PLACE)
        interleaved = [first, *(part for text in later_texts for part in (next(image_parts), text))]
        content_parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in interleaved if part]
        message["content"] = content_parts if later_texts else message["content"]
    return messages


def located(origin: str, message: dict[str, Any], folder: Path | None) -> Content:
    """A message's content with the absolute paths of its images. Raises UserError for a file that is not there."""
    content: Content = message["content"]
    if isinstance(content, str):
        return content
    if message["role"] != "user":
        raise UserError(f"{origin}: expected text in a turn of {message['role']}, got an image; only user turns have images")
    return [part | {"image": _source(origin, part["image"], folder)} if "image" in part else part for part in content]


def _source(origin: str, source: str, folder: Path | None) -> str:
    if source.startswith(INLINE):
        if ";base64," not in source[:100]:
            raise UserError(f"{origin}: expected data:image/...;base64,... in an image, got {source[:30]!r}; encode it so")
        return source
    if source.startswith(REMOTE):
        raise UserError(f"{origin}: expected an image file, got the address {source[:80]}; download it, and name the file")
    try:
        path = Path(source.removeprefix("file://")).expanduser()
        path = path if path.is_absolute() else (folder or Path.cwd()).absolute() / path
        if path.is_file():
            return str(path)
    except (OSError, ValueError):  # base64 makes no file name
        path = None
    if len(source) >= SHORTEST and _is_base64(source):
        return f"{INLINE}image;base64,{source}"
    raise UserError(f"{origin}: expected an image file at {path or source[:80]}, got nothing there; correct the path")


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return False


def _inline(content: bytes) -> str:
    return f"{INLINE}image;base64,{base64.b64encode(content).decode()}"


def sources_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sources of all images of messages, in order."""
    contents = (message["content"] for message in messages)
    return [part["image"] for content in contents if not isinstance(content, str) for part in content if "image" in part]


def text_of(content: Content) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
