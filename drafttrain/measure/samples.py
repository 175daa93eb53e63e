"""Sample outputs for the report, split into the text of accepted drafts and the text that the target added."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.decoding.request import Result
from drafttrain.measure.entry import Evidence
from drafttrain.measure.exactness import Match
from drafttrain.model.images import without_images

OUTPUTS = 8  # outputs per checkpoint: the first ones, because the prompts alternate between categories
PROMPT = 400  # characters of a prompt's end that are shown
HALF = "\ufffd"  # a tokenizer decodes an incomplete character to this


def samples(evidence: Evidence, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """`[accepted drafts, their text, the target's text]` for each verification of the first outputs."""
    indices = range(min(OUTPUTS, len(evidence.cases)))
    return [_sample(evidence, i, tokenizer) for i in indices]


def _sample(evidence: Evidence, i: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    case, result = evidence.cases[i], evidence.speculative[i]
    exact: Match | None = None if evidence.exact is None else evidence.exact[i]
    first, *rest = _pieces(result, tokenizer)
    return {
        "question_id": case.question_id,
        "category": case.category,
        "tau": result.tau if result.verifications else None,
        "exact": None if exact is None else exact.value,
        "prompt": str(tokenizer.decode(without_images(case.tokens), skip_special_tokens=True))[-PROMPT:],
        "first": first,
        "runs": [[drafts, *rest[2 * n : 2 * n + 2]] for n, drafts in enumerate(result.runs)],
    }


def _pieces(result: Result, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of the first token; then, for each verification, the text of its accepted drafts and the text that follows.

    A character of several tokens belongs to the piece with its last token.
    """
    ends, token_count = [1], 1
    for drafts, length in zip(result.runs, result.lengths, strict=True):
        ends += [token_count + drafts, token_count + length]
        token_count = ends[-1]
    pieces, previous_text = [], ""
    for end in ends:
        text = str(tokenizer.decode(result.tokens[:end], skip_special_tokens=True))
        complete_text = text if end == len(result.tokens) else text.rstrip(HALF)
        pieces.append(complete_text[len(previous_text) :])
        previous_text = complete_text
    return pieces
