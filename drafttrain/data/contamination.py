"""Evaluation prompts that stand in the training data: word n-grams in common, exactly, as GPT-3 counted them (arXiv 2005.14165,
appendix C).

A prompt's share is that of its n-grams found in one training conversation: of a copy 1, of a copy with a few words changed
still most. Exact n-grams need the prompts' alone in memory, and find a prompt within a longer text, which MinHash, made for
texts of like size, does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import Prompt
from drafttrain.data.sources import Conversation, Source

EAST = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without blanks: each character counts as a word
WORD = re.compile(rf"[{EAST}]|[^\W{EAST}]+")
Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A prompt, and the training conversation that holds the largest share of its n-grams."""

    question_id: str
    category: str
    share: float
    origin: str
    text: str  # the prompt's first turn


@dataclass(frozen=True, slots=True)
class Contamination:
    """What evaluation prompts stand in `searched` of the data's `records`. ngram, overlap: what counted as a copy."""

    copies: tuple[Copy, ...]
    prompts: int
    searched: int
    records: int
    ngram: int
    overlap: float

    @property
    def summary(self) -> dict[str, Any]:
        """The report's `training.data.contamination`."""
        return asdict(self) | {"copies": [asdict(copy) for copy in self.copies]}

    def line(self) -> str | None:
        """A warning; None where there is nothing to warn of."""
        if not self.copies:
            return None
        first = self.copies[0]
        return (
            f"warning: {len(self.copies)} of {self.prompts} evaluation prompts stand in the training data, {first.question_id} "
            f"in {first.origin}; drafttrain inspect lists them, what is measured on them is too good"
        )


def contamination(sources: Sequence[Source], prompts: Sequence[Prompt], ngram: int, overlap: float, most: int) -> Contamination:
    """Of at most so many conversations of each source, spread over all of it."""
    searched = 0

    def read() -> Iterator[Conversation]:
        nonlocal searched
        for source in sources:
            for number in np.linspace(
                0, len(source.records), min(most, len(source.records)), endpoint=False, dtype=int
            ).tolist():
                try:
                    conversation = source.conversation(number)
                except UserError:  # a record that cannot be used, which preparation counts
                    continue
                searched += 1
                yield conversation

    found = tuple(copies(prompts, read(), ngram, overlap))
    records = sum(len(source.records) for source in sources)
    return Contamination(found, len(prompts), searched, records, ngram, overlap)


def copies(prompts: Sequence[Prompt], conversations: Iterable[Conversation], n: int, least: float) -> list[Copy]:
    """The prompts of which at least this share is found, the largest share first. n: words of an n-gram.

    A prompt of fewer words is found where it is a whole turn.
    """
    known: dict[Gram, list[int]] = {}
    sizes = []
    for number, prompt in enumerate(prompts):
        own = {gram for turn in prompt.turns for gram in _grams(turn, n)}
        sizes.append(len(own))
        for gram in own:
            known.setdefault(gram, []).append(number)
    best: dict[int, tuple[int, str]] = {}
    for conversation in conversations:
        found = {gram for text in _texts(conversation) for gram in _grams(text, n) if gram in known}
        for number, count in Counter(number for gram in found for number in known[gram]).items():
            if count > best.get(number, (0, ""))[0]:
                best[number] = count, conversation.origin
    found_copies = [
        Copy(str(prompts[i].question_id), prompts[i].category, count / sizes[i], origin, prompts[i].turns[0])
        for i, (count, origin) in best.items()
        if count >= least * sizes[i]
    ]
    return sorted(found_copies, key=lambda copy: -copy.share)


def _texts(conversation: Conversation) -> Iterator[str]:
    if conversation.text is not None:
        yield conversation.text
    yield from (message["content"] for message in conversation.messages)


def _grams(text: str, n: int) -> Iterable[Gram]:
    words = WORD.findall(text.lower())
    if len(words) < n:
        return [tuple(words)] if words else []
    return zip(*(words[i:] for i in range(n)), strict=False)
