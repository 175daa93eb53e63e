"""Finds evaluation prompts in the training data by exact word n-grams, as GPT-3 did (arXiv 2005.14165, appendix C).

A prompt's share is the share of its n-grams that occur in one training conversation. It is 1 for a copy, and still high for a
copy with a few changed words. Exact n-grams keep only the prompts' n-grams in memory, and find a prompt inside a longer text.
MinHash compares texts of similar size and does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from drafttrain.core.errors import UserError
from drafttrain.data.pictures import text_of
from drafttrain.data.prompts import Prompt
from drafttrain.data.sources import Conversation, Source

EAST = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without blanks: each character counts as a word
WORD = re.compile(rf"[{EAST}]|[^\W{EAST}]+")
Gram = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A prompt, and the training conversation that contains the largest share of its n-grams."""

    question_id: str
    category: str
    share: float
    origin: str
    text: str  # the prompt's first turn


@dataclass(frozen=True, slots=True)
class Contamination:
    """Evaluation prompts that were found in the training data."""

    copies: tuple[Copy, ...]
    prompts: int  # number of evaluation prompts
    searched: int  # number of conversations that were searched
    records: int  # number of conversations in the data
    ngram: int  # words per n-gram
    overlap: float  # smallest share that counts as a copy

    @property
    def summary(self) -> dict[str, Any]:
        """The report's `training.data.contamination`."""
        return asdict(self) | {"copies": [asdict(copy) for copy in self.copies]}

    def line(self) -> str | None:
        """A warning for the user; None if nothing was found."""
        if not self.copies:
            return None
        first = self.copies[0]
        return (
            f"warning: {len(self.copies)} of {self.prompts} evaluation prompts are in the training data, the first is "
            f"prompt {first.question_id}, in {first.origin}; drafttrain inspect with the same prompts lists them, and results "
            "on them are too good"
        )


def contamination(sources: Sequence[Source], prompts: Sequence[Prompt], ngram: int, overlap: float, most: int) -> Contamination:
    """Search at most `most` conversations of each source, spread evenly over it."""
    searched = 0

    def read() -> Iterator[Conversation]:
        nonlocal searched
        for source in sources:
            for record_index in np.linspace(
                0, len(source.records), min(most, len(source.records)), endpoint=False, dtype=int
            ).tolist():
                try:
                    conversation = source.conversation(record_index)
                except UserError:  # preparation counts unusable records
                    continue
                searched += 1
                yield conversation

    matches = tuple(copies(prompts, read(), ngram, overlap))
    records = sum(len(source.records) for source in sources)
    return Contamination(matches, len(prompts), searched, records, ngram, overlap)


def copies(prompts: Sequence[Prompt], conversations: Iterable[Conversation], n: int, least: float) -> list[Copy]:
    """The prompts of which at least the share `least` is found, the largest share first. n: words per n-gram.

    A prompt with fewer words is found only as a whole turn.
    """
    gram_prompts: dict[Gram, list[int]] = {}
    sizes = []
    for index, prompt in enumerate(prompts):
        prompt_grams = {gram for turn in prompt.turns for gram in _grams(text_of(turn), n)}
        sizes.append(len(prompt_grams))
        for gram in prompt_grams:
            gram_prompts.setdefault(gram, []).append(index)
    best_match: dict[int, tuple[int, str]] = {}
    for conversation in conversations:
        shared = {gram for text in _texts(conversation) for gram in _grams(text, n) if gram in gram_prompts}
        for index, count in Counter(index for gram in shared for index in gram_prompts[gram]).items():
            if count > best_match.get(index, (0, ""))[0]:
                best_match[index] = count, conversation.origin
    matches = [
        Copy(str(prompts[i].question_id), prompts[i].category, count / sizes[i], origin, text_of(prompts[i].turns[0]))
        for i, (count, origin) in best_match.items()
        if count >= least * sizes[i]
    ]
    return sorted(matches, key=lambda copy: -copy.share)


def _texts(conversation: Conversation) -> Iterator[str]:
    if conversation.text is not None:
        yield conversation.text
    yield from (text_of(message["content"]) for message in conversation.messages)


def _grams(text: str, n: int) -> Iterable[Gram]:
    words = WORD.findall(text.lower())
    if len(words) < n:
        return [tuple(words)] if words else []
    return zip(*(words[i:] for i in range(n)), strict=False)
