"""Draws prompts with images: shapes to count and bar charts to read. Nothing is downloaded.

    python -m benchmarks.image_prompts --out DIR --count 200

DIR/data.jsonl: conversations without replies, for `drafttrain prepare`. DIR/prompts.jsonl: other prompts, for `measure`. Images
are in DIR/images. The same seed gives the same files. `benchmarks.image_target` trains a target on such pictures.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE = (448, 320)  # pixels, wide and high
COLOURS = ("red", "green", "blue", "orange", "purple", "black")
SHAPES = ("circle", "square", "triangle")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August")
COUNTING = (
    "How many {shape}s are in the picture? Name the colour of each.",
    "Describe every shape in this picture, from left to right, with its colour.",
    "Which colour occurs most often here? Explain how you counted.",
    "Write a short story about the shapes that you see.",
)
READING = (
    "Which month has the highest bar, and which the lowest? Give both values.",
    "List the values of all bars as a table.",
    "Describe the trend of this chart in three sentences.",
    "Write Python code that draws this chart with matplotlib.",
)


def shapes(draw: random.Random) -> tuple[Image.Image, str, str]:
    """A picture of shapes, a question, and what is in the picture."""
    picture = Image.new("RGB", SIZE, "white")
    pen, size, shown = ImageDraw.Draw(picture), 56, dict[int, str]()
    for column in draw.sample(range(7), draw.randint(3, 7)):
        left, top = 8 + column * 62, draw.randrange(8, SIZE[1] - size - 8)
        box, colour, shape = (left, top, left + size, top + size), draw.choice(COLOURS), draw.choice(SHAPES)
        shown[column] = f"a {colour} {shape}"
        if shape == "circle":
            pen.ellipse(box, fill=colour)
        elif shape == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], fill=colour)
    seen = f"From left to right I see {', '.join(shown[column] for column in sorted(shown))}."
    return picture, draw.choice(COUNTING).format(shape=draw.choice(SHAPES)), seen


def chart(draw: random.Random) -> tuple[Image.Image, str, str]:
    """A bar chart, a question, and what the chart shows."""
    picture = Image.new("RGB", SIZE, "white")
    pen, base, count = ImageDraw.Draw(picture), SIZE[1] - 40, draw.randint(4, len(MONTHS))
    wide, shown = (SIZE[0] - 40) // count, list[str]()
    pen.line([(24, 16), (24, base), (SIZE[0] - 8, base)], fill="black", width=2)
    for column in range(count):
        value, left = draw.randint(5, 100), 32 + column * wide
        top = base - round(value / 100 * (base - 32))
        shown.append(f"{MONTHS[column]} {value}")
        pen.rectangle((left, top, left + wide - 12, base - 2), fill=draw.choice(COLOURS))
        pen.text((left, top - 14), str(value), fill="black")
        pen.text((left, base + 8), MONTHS[column][:3], fill="black")
    return picture, draw.choice(READING), f"The bars show {', '.join(shown)}."


KINDS = {"shapes": shapes, "chart": chart}


def write(out: Path, count: int, prompts: int, seed: int, replies: bool = False) -> None:
    """Write `count` conversations and `prompts` evaluation prompts, half of each kind. replies: that say what is shown."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    for name, number in (("data", count), ("prompts", prompts)):
        lines = [_line(out, name, i, random.Random(f"{seed}/{name}/{i}"), replies) for i in range(number)]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _line(out: Path, name: str, number: int, draw: random.Random, replies: bool) -> dict[str, Any]:
    kind = list(KINDS)[number % len(KINDS)]
    picture, question, shown = KINDS[kind](draw)
    place = f"images/{name}-{number:05}.png"
    picture.save(out / place)
    content = [{"type": "image", "image": place}, {"type": "text", "text": question}]
    if name == "data":
        reply = [{"role": "assistant", "content": shown}] if replies else []
        return {"messages": [{"role": "user", "content": content}, *reply]}
    return {"question_id": number, "category": kind, "turns": [content]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--count", type=int, default=200, help="conversations for training")
    parser.add_argument("--prompts", type=int, default=32, help="prompts for measuring")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    write(given.out, given.count, given.prompts, given.seed)
    print(f"{given.count} conversations and {given.prompts} prompts in {given.out}")


if __name__ == "__main__":
    main()
