"""Conversations with images: their forms, what is refused, their tokens, masks and keys, and the replies of the target."""

from __future__ import annotations

import base64
import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.data import DataOptions, PrepareOptions
from drafttrain.data.chat import Encoder
from drafttrain.data.dataset import load_dataset
from drafttrain.data.forms import conversation
from drafttrain.data.generation_jobs import Dialogue, LocalGenerator, jobs_of, read_scripts
from drafttrain.data.pictures import sources_of
from drafttrain.data.pool import Conversations, Workers
from drafttrain.data.prompts import encode_prompt, load_prompts
from drafttrain.data.server import Server, ServerOptions
from drafttrain.data.sources import open_sources
from drafttrain.data.store import BlockStore, RecordBlock, encode_block
from drafttrain.data.templates import TemplateOptions
from drafttrain.decoding.scheduler import Decoder
from drafttrain.features.store import key_of
from drafttrain.model.images import FIRST, bases, with_placeholders, without_images
from drafttrain.targets.images import ImageReader, NoImages, image_reader
from tests.helpers import read_conversations
from tests.images import config_of, inline, picture, processor_of, tokenizer_of, vision_target, write_conversations

YES = {"role": "assistant", "content": "yes"}


def reader_of(name: str, folder: Path) -> ImageReader:
    processor_of(name).save_pretrained(folder)
    reader = image_reader(str(folder), config_of(name), tokenizer_of(name))
    assert isinstance(reader, ImageReader)
    return reader


def options_of(folder: Path, *records: dict[str, Any]) -> DataOptions:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return DataOptions(path=str(file), held_out=0, cache=str(folder / "cache"))


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asking(part: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [part, {"type": "text", "text": "what"}]}, YES]}


def test_images_of_record_take_their_places_in_text(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """As LLaMA-Factory, ms-swift, TRL and LLaVA write them."""
    a, b = (str(picture(tmp_path / f"{name}.png")) for name in "ab")
    first, second = ({"type": "image", "image": file} for file in (a, b))

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    for record, content in (
        ({"images": ["a.png", "b.png"], "messages": [said("x<image>y<image>"), YES]}, [text("x"), first, text("y"), second]),
        ({"images": ["a.png"], "messages": [said("what"), YES]}, [first, text("what")]),
        ({"image": "b.png", "conversations": [{"from": "human", "value": "<image>what"}, YES]}, [second, text("what")]),
        ({"images": [], "image": "none.png", "messages": [said("what"), YES]}, "what"),
    ):
        with subtests.test(record=record):
            assert conversation("x:1", record, folder=tmp_path).messages == (said(content), YES)
    for record, says in (
        ({"images": ["a.png"], "messages": [said("<image><image>"), YES]}, "an image for each of 2 <image>, got 1 images"),
        ({"videos": ["a.mp4"], "messages": [said("<video>"), YES]}, "expected text and images, got `videos`"),
    ):
        with subtests.test(record=record), pytest.raises(UserError, match=f"^x:1: .*{says}"):
            conversation("x:1", record, folder=tmp_path)


def test_image_part_in_any_form_is_read_as_same_image(tmp_path: Path) -> None:
    """A path is relative to the file's folder; base64 comes with a prefix or without."""
    file = picture(tmp_path / "a.png")
    bare = base64.b64encode(file.read_bytes()).decode()
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": str(file)},
        {"type": "image", "url": f"file://{file}"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image", "image": inline(file)},
        {"type": "image", "image": bare},
        {"type": "image", "base64": bare},
    ]
    found = read_conversations(options_of(tmp_path, *map(asking, forms)))
    sources = [sources_of(conversation.messages)[0] for conversation in found]
    assert sources[:4] == [str(file)] * 4
    reader = reader_of("qwen3_vl", tmp_path)
    assert len({reader.read(source, "x").digest for source in sources}) == 1


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image", "image": "no.png"}, "user", r"data.jsonl:1: expected an image file at .*/no.png, got nothing there"),
    (
        {"type": "image", "image": "https://x.org/a.png"},
        "user",
        "expected an image file, got the address https://x.org/a.png",
    ),
    ({"type": "image"}, "user", "expected a path or base64 in the image of .*, got nothing"),
    ({"type": "image", "image": 3}, "user", "expected a path or base64 in the image of .*, got int"),
    ({"type": "image", "image": "data:image/png,x"}, "user", "expected data:image/...;base64"),
    ({"type": "image", "image": "a.png"}, "assistant", "expected text in a turn of assistant, got an image"),
    ({"type": "video", "video": "a.mp4"}, "user", "expected text and image parts in .*, got video"),
]


def test_image_part_malformed_is_refused_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    picture(tmp_path / "a.png")
    for part, role, says in WRONG:
        with subtests.test(part=part, role=role):
            with pytest.raises(UserError, match=says) as caught:
                read_conversations(options_of(tmp_path, asking(part, role)))
            assert "\n" not in str(caught.value)


def test_image_reader_unreadable_or_changed_file_is_refused(tmp_path: Path) -> None:
    reader, file = reader_of("qwen3_vl", tmp_path), picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("text")
    with pytest.raises(UserError, match=r"x:1: expected an image in .*b.png, got something else \(cannot identify.* the file"):
        reader.read(str(tmp_path / "b.png"), "x:1")
    with pytest.raises(UserError, match="expected base64 in its image"):
        reader.read("data:image/png;base64,?", "x:1")
    Image.new("RGB", (900, 2)).save(tmp_path / "thin.png")
    with pytest.raises(UserError, match="aspect ratio"):
        reader.read(str(tmp_path / "thin.png"), "x:1")
    image = reader.read(str(file), "x:1")
    picture(file, seed=9)
    with pytest.raises(UserError, match="has changed since it was read"):
        reader.pixels(image.base)
    with pytest.raises(UserError, match="was not read in this process"):
        reader.pixels(FIRST)


def test_load_dataset_image_for_text_only_target_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    options = options_of(tmp_path, asking({"type": "image", "image": "a.png"}))
    with pytest.raises(UserError, match=r"data.jsonl:1: it has an image, but the target reads text alone; choose a target"):
        load_dataset(options, tokenizer_of("qwen3_vl"), progress=False)


def test_image_reader_without_pillow_names_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return own(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    found = image_reader(str(tmp_path), config_of("qwen3_vl"), tokenizer_of("qwen3_vl"))
    with pytest.raises(UserError, match=r"x:1: it has an image, but images need pillow.*pip install 'drafttrain\[vision\]'"):
        found.expand("", ["a.png"], "x:1")


def test_image_reader_target_without_image_processor_reads_no_images(tmp_path: Path) -> None:
    found = image_reader(str(tmp_path), config_of("qwen3_vl"), tokenizer_of("qwen3_vl"))
    assert isinstance(found, NoImages) and "no image processor" in found.reason


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "gemma4"])
def test_encoder_image_rows_are_placed_and_never_supervised(name: str, tmp_path: Path) -> None:
    """The ids are the processor's; replies are supervised, rows of images never are."""
    reader, tokenizer, file = reader_of(name, tmp_path), tokenizer_of(name), picture(tmp_path / "a.png")
    turns = [asking({"type": "image", "image": "a.png"})["messages"], asking({"type": "image", "image": "a.png"})["messages"]]
    (conversation,) = read_conversations(options_of(tmp_path, {"messages": [*turns[0], *turns[1]]}))
    row = Encoder(tokenizer, 512, TemplateOptions(), reader)(conversation)
    image = reader.read(str(file), "x")
    rows = "<image>" * image.rows
    expected = f"<user><begin>{rows}<end>what<eos><assistant>yes<eos>" * 2
    assert with_placeholders(row.token_ids.tolist(), 120) == tokenizer(expected, add_special_tokens=False)["input_ids"]
    inside = row.token_ids >= FIRST
    assert inside.sum() == 2 * image.rows and set(bases(row.token_ids[inside])) == {image.base}
    assert not row.mask[inside].any()
    assert tokenizer.decode(row.token_ids[row.mask]).split() == ["yes", "<eos>"] * 2


def test_encoder_images_with_generation_marks_equal_plain_template(tmp_path: Path) -> None:
    reader, tokenizer = reader_of("qwen3_vl", tmp_path), tokenizer_of("qwen3_vl")
    picture(tmp_path / "a.png")
    (conversation,) = read_conversations(options_of(tmp_path, asking({"type": "image", "image": "a.png"})))
    plain = Encoder(tokenizer, 512, TemplateOptions(), reader)(conversation)
    reply = "{{ m.content }}"
    marked = (
        "{%- for m in messages -%}<{{ m.role }}>{%- if m.content is string -%}{% generation %}"
        + reply
        + "<eos>{% endgeneration %}"
        "{%- else -%}<begin><image><end>what<eos>{%- endif -%}{%- endfor -%}"
    )
    row = Encoder(tokenizer, 512, TemplateOptions(marked), reader)(conversation)
    assert row.token_ids.tolist() == plain.token_ids.tolist() and row.mask.tolist() == plain.mask.tolist()


def test_encoder_image_placeholder_in_text_is_refused(tmp_path: Path) -> None:
    reader = reader_of("qwen3_vl", tmp_path)
    picture(tmp_path / "a.png")
    record = asking({"type": "image", "image": "a.png"})
    record["messages"][0]["content"][1]["text"] = "what is <image>"
    (conversation,) = read_conversations(options_of(tmp_path, record))
    with pytest.raises(UserError, match="expected 1 places for images in its text, got 2"):
        Encoder(tokenizer_of("qwen3_vl"), 512, TemplateOptions(), reader)(conversation)


def test_store_block_keeps_images_for_fresh_reader(tmp_path: Path) -> None:
    """A block on disk gives the same rows, to a process that has not read the images; text has the columns of before."""
    write_conversations(tmp_path, 3)
    options = DataOptions(path=str(tmp_path / "data.jsonl"), cache=str(tmp_path / "cache"))
    (source,), reader = open_sources(options), reader_of("qwen3_vl", tmp_path)
    encoder = Encoder(tokenizer_of("qwen3_vl"), 512, TemplateOptions(), reader)
    block = encode_block(source, encoder, [0, 1, 2])
    assert block.has_images and not block.batch["fault"].drop_null()
    store = BlockStore(tmp_path / "store")
    again = store.read(store.write(block))
    assert isinstance(again, RecordBlock)
    fresh = reader_of("qwen3_vl", tmp_path)
    for number in range(3):
        row = encoder(source.conversation(number))
        assert again.row(number).token_ids.tolist() == row.token_ids.tolist()
        assert again.row(number).mask.tolist() == row.mask.tolist()
    conversations = Conversations([source], Encoder(encoder.tokenizer, 512, TemplateOptions(), fresh), Workers(tmp_path / "c"))
    conversations.wait(np.arange(3))
    conversations.close()
    assert fresh.known.keys() == reader.known.keys()
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "what"}, YES]}) + "\n")
    (source,) = open_sources(options)
    plain = encode_block(source, encoder, [0])
    assert not plain.has_images and "images" not in plain.batch.schema.names and plain.row(0).token_ids.dtype == np.int32


def test_feature_cache_key_differs_between_images(tmp_path: Path) -> None:
    reader = reader_of("qwen3_vl", tmp_path)
    a, b = (reader.read(str(picture(tmp_path / f"{i}.png", i)), "x") for i in (1, 2))
    assert a.rows == b.rows
    keys = {key_of(np.array([5, *range(image.base, image.base + image.rows)], np.int64)) for image in (a, b)}
    assert len(keys) == 2
    assert key_of(np.array([5, 6], np.int64)) == key_of(np.array([5, 6], np.int32))


def test_encode_prompt_with_images_follows_chat_template(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    part, file = {"type": "image", "image": "a.png"}, tmp_path / "p.jsonl"
    lines: list[dict[str, Any]] = [
        {"turns": [[part, {"type": "text", "text": "what"}], "how"]},
        asking(part),
        {"prompt": "how"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = load_prompts(str(file))
    assert first.turns[0] == second.turns[0] and first.turns[1] == "how" and third.turns == ["how"]
    reader, tokenizer = reader_of("qwen3_vl", tmp_path), tokenizer_of("qwen3_vl")
    ids = encode_prompt(tokenizer, first.turns, ["yes"], reader)
    assert (
        tokenizer.decode(without_images(ids))
        == "<user> <begin> <end> what <eos> <assistant> yes <eos> <user> how <eos> <assistant>"
    )
    with pytest.raises(UserError, match="reads text alone"):
        encode_prompt(tokenizer, first.turns)


def test_generator_image_prompts_give_absolute_paths_and_server_base64(tmp_path: Path) -> None:
    """Records have absolute paths, so that they can be moved to another folder. A server gets the same turns as base64."""
    write_conversations(tmp_path, 2, replies=False)
    target = vision_target("qwen3_vl", tmp_path)
    assert target.reader is not None
    scripts = read_scripts(read_conversations(DataOptions(path=str(tmp_path / "data.jsonl")), replies=False))
    jobs, found = list(jobs_of(scripts.scripts, PrepareOptions())), list[Dialogue]()
    decoder = Decoder(target, None, "greedy", Sampling(), frozenset(), 4)
    generator = LocalGenerator(lambda _, t: decoder, tokenizer_of("qwen3_vl"), 64, 2, target.reader)
    generator.answer(jobs, found.append, lambda tokens: None)
    records = [dialogue.record() for dialogue in found]
    assert all(Path(sources_of(record["messages"])[0]).is_absolute() for record in records)
    assert all(record["messages"][-1]["role"] == "assistant" for record in records)
    body = Server(ServerOptions("http://x", "m", None, 1, 1.0, 1.0, 4, 1.0, 0))._body(jobs[0], [*jobs[0].script.messages])
    assert body["messages"][0]["content"][0]["image_url"]["url"] == inline(tmp_path / "0.png")
