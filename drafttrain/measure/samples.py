"""Some outputs for the report, in runs: what one verification accepted of the drafts, and what the target added."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.decoding.request import Result
from drafttrain.measure.entry import Evidence
from drafttrain.measure.exactness import Match

TEXTS = 8  # of a checkpoint; prompts are spread over the categories, so that the first ones are a fair choice
PROMPT = 400  # characters of a prompt's end that are shown
HALF = "\ufffd"  # what a tokenizer decodes a part of a character to


def samples(evidence: Evidence, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """`[accepted drafts, their text, the target's text]` for each verification of the first outputs."""
    chosen = range(min(TEXTS, len(evidence.cases)))
    return [_sample(evidence, i, tokenizer) for i in chosen]


def _sample(evidence: Evidence, i: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    case, result = evidence.cases[i], evidence.speculative[i]
    exact: Match | None = None if evidence.exact is None else evidence.exact[i]
    first, *rest = _pieces(result, tokenizer)
    return {
        "question_id": case.question_id,
        "category": case.category,
        "tau": result.tau if result.verifications else None,
        "exact": None if exact is None else exact.value,
        "prompt": str(tokenizer.decode(case.tokens, skip_special_tokens=True))[-PROMPT:],
        "first": first,
        "runs": [[drafts, *rest[2 * n : 2 * n + 2]] for n, drafts in enumerate(result.runs)],
    }


def _pieces(result: Result, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of the first token, then of each verification's accepted drafts and of what the target added, in turn.

    A character of several tokens belongs to the piece that completes it.
    """
    ends, at = [1], 1
    for drafts, length in zip(result.runs, result.lengths, strict=True):
        ends += [at + drafts, at + length]
        at = ends[-1]
    texts, given = [], ""
    for end in ends:
        text = str(tokenizer.decode(result.tokens[:end], skip_special_tokens=True))
        whole = text if end == len(result.tokens) else text.rstrip(HALF)
        texts.append(whole[len(given) :])
        given = whole
    return texts
