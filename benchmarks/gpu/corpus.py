"""Text for pretraining: the Python sources of this machine, each text once, with a part set apart by file; a tokenizer;
tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.real import END, TEMPLATE, Part, Scale
from benchmarks.gpu.sources import ROOT

LEAST, MOST, WIDE = 400, 300_000, 120  # characters of a file, and of its mean line at most: longer ones are tables
APART = 10  # one file in this many is no pretraining text
MEASURED = 8  # one in this many of these is only for the measurement
READ, CHUNK = 1024, 2048  # files read, and texts tokenised, at once
SPACING = 2  # a prompt's length in texts of a file between two prompts


def roots() -> list[Path]:
    """The folders of Python's own modules and of installed packages."""
    named = [sysconfig.get_path("stdlib"), *site.getsitepackages(), *sys.path]
    found = dict.fromkeys(Path(name).resolve() for name in named if name and Path(name).is_dir())
    return [path for path in found if path != ROOT]


def files() -> Iterator[Path]:
    seen: set[str] = set()
    for root in roots():
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(name for name in inner if name != "__pycache__" and not name.startswith("."))
            for name in sorted(names):
                if name.endswith(".py") and (path := os.path.join(folder, name)) not in seen:
                    seen.add(path)
                    yield Path(path)


def read(path: Path) -> str | None:
    """A source's text; None for an unusual one."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    ordinary = LEAST <= len(text) <= MOST and len(text) <= WIDE * (1 + text.count("\n"))
    return text + "\n" if ordinary and END not in text else None


def texts(most: int) -> list[str]:
    """Every text once, up to this many characters, in an order that depends only on their contents."""
    found: dict[str, str] = {}
    held, paths = 0, files()
    with ThreadPoolExecutor() as readers:
        while held < most and (some := list(islice(paths, READ))):
            for text in filter(None, readers.map(read, some)):
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest not in found and held < most:
                    found[digest] = text
                    held += len(text)
    return [found[digest] for digest in sorted(found)]


def learnt(sample: Sequence[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. Its chat template concatenates messages, so that a reply continues the prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator(sample, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    made.chat_template = TEMPLATE
    return made


def tokens(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> NDArray[np.uint16]:
    """All texts in one row, each followed by the end token."""
    end, rows = tokenizer.eos_token_id, []
    for start in range(0, len(sources), CHUNK):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(list(sources[start : start + CHUNK])):
            rows += [np.array(encoding.ids, np.uint16), np.array([end], np.uint16)]
    return np.concatenate(rows)


def prompts(source: str, least: int) -> list[str]:
    """Pieces of a text of at least this many characters, which begin and end with a line and are far enough apart."""
    found, piece, skipped = [], "", 0
    for line in source.splitlines(keepends=True):
        if skipped > 0:
            skipped -= len(line)
            continue
        piece += line
        if len(piece) >= least:
            found.append(piece.rstrip())
            piece, skipped = "", SPACING * least
    return found


def spread(items: list[str], count: int) -> list[str]:
    """This many of them, evenly spaced."""
    return [items[i * len(items) // count] for i in range(count)] if len(items) > count else items


def collect(part: Part, scale: Scale) -> dict[str, Any]:
    """Write tokens, tokenizer and prompts."""
    sources = texts(scale.text)
    apart, kept = sources[::APART], [text for i, text in enumerate(sources) if i % APART]
    measured, asked = apart[::MEASURED], [text for i, text in enumerate(apart) if i % MEASURED]
    few = scale.taught * len(kept) // max(1, sum(map(len, kept)))
    tokenizer = learnt(kept[: max(1, few)], scale.vocab)
    rows, held = tokens(kept, tokenizer), tokens(measured, tokenizer)
    figures: dict[str, Any] = {"files": len(sources), "characters": sum(map(len, sources)), "tokens": len(rows)}
    figures |= {"vocabulary": len(tokenizer), "apart": len(apart)}
    with part.written(figures) as folder:
        np.save(folder / "tokens.npy", rows)
        np.save(folder / "held.npy", held)
        tokenizer.save_pretrained(folder)
        questions = [piece for text in asked for piece in prompts(text, scale.prompt)][: scale.asked]
        (folder / "asked.json").write_text(json.dumps(questions), encoding="utf-8")
        pieces = spread([piece for text in measured for piece in prompts(text, scale.prompt)], scale.measured)
        lines = [json.dumps({"question_id": i, "category": "python", "turns": [piece]}) for i, piece in enumerate(pieces)]
        (folder / "measure.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        figures |= {"prompts": len(questions), "measured": len(pieces)}
    return figures
