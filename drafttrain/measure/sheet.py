"""A blind comparison sheet for lossy policies: plain and speculative outputs side by side, in random order.

`sheet.html` and `sheet.csv` show the outputs as A and B; `sheet-key.csv` is the key.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.core.files import atomic_write_text
from drafttrain.measure import cells
from drafttrain.measure.flags import best_entry
from drafttrain.measure.markdown import render
from drafttrain.model.images import without_images

if TYPE_CHECKING:  # `compare` and `simulate` read reports without loading a model
    from transformers import PreTrainedTokenizerBase

    from drafttrain.measure.entry import Evidence

PAIRS = 50  # pairs of a sheet at most: a person reads them in an hour
PLAIN, SPECULATIVE = "plain", "speculative"


def outputs(evidence: Evidence, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Both outputs of the first prompts whose outputs differ. The prompts are spread over the categories."""

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(without_images(tokens), skip_special_tokens=True))

    differing = []
    for case, plain, ours in zip(evidence.cases, evidence.plain, evidence.speculative, strict=True):
        pair = {PLAIN: text(plain.tokens), SPECULATIVE: text(ours.tokens)}
        if pair[PLAIN] != pair[SPECULATIVE]:
            differing.append({"question_id": case.question_id, "category": case.category, "prompt": text(case.tokens)} | pair)
    return differing[:PAIRS]


def write_sheet(folder: Path, report: dict[str, Any]) -> list[Path]:
    """Write the best checkpoint's sheet; returns the files. Nothing is written if no outputs differ.

    Raises UserError on a full disk.
    """
    best = best_entry(report)
    pairs = best.get("outputs") or []
    if not pairs:
        return []
    draw = random.Random(hashlib.sha256(best["path"].encode()).digest())
    items, key = [], []
    for number, pair in enumerate(draw.sample(pairs, len(pairs)), start=1):
        order = draw.sample((PLAIN, SPECULATIVE), 2)
        items.append({"number": number, "prompt": pair["prompt"], "A": pair[order[0]], "B": pair[order[1]]})
        key.append({"number": number, "question_id": pair["question_id"], "A": order[0], "B": order[1]})
    files = [folder / name for name in ("sheet.html", "sheet.csv", "sheet-key.csv")]
    atomic_write_text(files[0], render("sheet.html", items=items))
    atomic_write_text(
        files[1], cells.csv_text(("number", "prompt", "A", "B", "better"), [[*item.values(), None] for item in items])
    )
    atomic_write_text(files[2], cells.csv_text(("number", "question_id", "A", "B"), [list(line.values()) for line in key]))
    return files
