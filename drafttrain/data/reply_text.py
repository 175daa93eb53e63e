"""The text of the tokens that follow a prompt, and rules for replies.

Tokenizers that mark the start of a word (SentencePiece, Metaspace) decode the mark to a space, but drop it at the start of a
text. A reply that is decoded alone may thus lose its first space. Worked example, the prompt `a boy` and the reply `▁named`:

    alone        `named`      after the prompt it would be read as `a boynamed`
    following    ` named`     right here; after `[/INST]` some of these tokenizers read it as two spaces
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import encode_messages
from drafttrain.decoding.guards import tail_run
from drafttrain.model.images import without_images
from drafttrain.targets.images import TEXT_ONLY, Images

TAIL = 32  # tokens of a prompt that are decoded with the tokens that follow
UNFINISHED = "\ufffd"  # a tokenizer decodes an incomplete character to this


def text_alone(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], special: bool = False) -> str:
    """The ids' text. special: with special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def text_following(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int], special: bool = False) -> str:
    """The text that the ids add to that of the ids before them."""
    context = tail_of(tokenizer, before)
    context_text, full_text = (text_alone(tokenizer, token_ids, special) for token_ids in (context, [*context, *ids]))
    return full_text[len(context_text) :] if full_text.startswith(context_text) else text_alone(tokenizer, ids, special)


def tail_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The last ids of a text, from a whole character on."""
    tail = without_images(list(ids[-TAIL:]))
    while tail and text_alone(tokenizer, tail, special=True).startswith(UNFINISHED):
        tail = tail[1:]
    return tail


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows one prompt."""

    tokenizer: PreTrainedTokenizerBase
    prompt: list[int]
    encode: Callable[[str], list[int]]  # ids of the prompt, followed by a reply of this text

    @staticmethod
    def of_messages(
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        images: Images = TEXT_ONLY,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Continuation:
        """Of a conversation whose ids are `prompt`. arguments, tools: for the template."""
        return Continuation(
            tokenizer, list(prompt), lambda reply: encode_messages(tokenizer, messages, images, reply, arguments, tools)
        )

    @staticmethod
    def of_ids(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Continuation:
        """Of a plain text, given by its ids."""
        text = text_alone(tokenizer, without_images(list(prompt)), special=True)

        def encode(reply: str) -> list[int]:
            return list(tokenizer(text + reply, add_special_tokens=False, verbose=False)["input_ids"])

        return Continuation(tokenizer, encode(""), encode)

    def text(self, ids: Sequence[int]) -> str:
        """The text of these ids as a reply: the one that, written after the prompt, gives them again."""
        return text_following(self.tokenizer, self.context(ids), ids)

    def context(self, ids: Sequence[int]) -> list[int]:
        """The ids to decode before the reply `ids`, whose own text is to be taken off; none if the reply is decoded alone."""
        isolated_text, continued_text = text_alone(self.tokenizer, ids), text_following(self.tokenizer, self.prompt, ids)
        if isolated_text == continued_text or self._agreement(isolated_text, ids) >= self._agreement(continued_text, ids):
            return []
        return tail_of(self.tokenizer, self.prompt)

    def _agreement(self, text: str, ids: Sequence[int]) -> int:
        """How many of the first tokens of prompt and reply a reply of this text gives again."""
        try:
            reencoded = self.encode(text)
        except UserError:  # a template that refuses the reply
            return 0
        pairs = enumerate(zip(reencoded, [*self.prompt, *ids], strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(reencoded), len(self.prompt) + len(ids)))


LONGEST_PERIOD = 400  # characters: a paragraph
LEAST_CHARACTERS = 120  # shorter repetition is ordinary text: a ruler, a row of a table
OPENING = 300  # characters in which a refusal is searched for
REFUSAL = re.compile(
    r"as an ai( language)? model"
    r"|\bi(['’]m| am) (really |so |very )?sorry,? (but )?(i|as an)\b"
    r"|\bi (can['’]t|cannot|can not|won['’]t|will not)"
    r" (assist|help|fulfil|comply|provide|create|generate|write|answer|discuss|engage|support|continue|do that)"
    r"|\bi(['’]m| am) (unable|not able) to (assist|help|fulfil|comply|provide|create|generate|write|answer|discuss|engage)"
    r"|\bi must (respectfully )?decline",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply of the target."""

    text: str
    finish: str  # stop, length if it ran out of tokens, or another finish reason of the server
    calls: tuple[dict[str, Any], ...] | None = ()  # of tools; None: one of them is unreadable
    reasoning: str | None = None  # where a parser took it out of the text


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a conversation."""

    kept: int  # number of replies before the first dropped one
    fault: str | None  # the rule that drops that reply
    found: frozenset[str]  # all rules that any reply breaks


def truncated(reply: Reply) -> bool:
    """The reply is cut off. A template would append an end of turn that the target did not write."""
    return reply.finish != "stop"


def loop(reply: Reply) -> bool:
    """The reply ends in three or more copies of one piece of text, over 120 characters or more."""
    text = reply.text.rstrip()
    return any(tail_run(text, n) >= LEAST_CHARACTERS for n in range(1, LONGEST_PERIOD + 1))


def refusal(reply: Reply) -> bool:
    """The reply begins with a refusal, in English."""
    return REFUSAL.search(reply.text[:OPENING]) is not None


def empty(reply: Reply) -> bool:
    """The reply is blank."""
    return not reply.text.strip()


# each finds one fault; `prepare.drop` selects those that drop a reply
RULES: dict[str, Callable[[Reply], bool]] = {"empty": empty, "truncated": truncated, "loop": loop, "refusal": refusal}


def judge(replies: Sequence[Reply], drop: Sequence[str]) -> Judged:
    """Judge a conversation's replies, in order. It is kept up to the first reply that breaks a rule of `drop`."""
    broken_rules = [[name for name, is_broken in RULES.items() if is_broken(reply)] for reply in replies]
    violations = frozenset(name for names in broken_rules for name in names)
    for kept_count, names in enumerate(broken_rules):
        if fault := next((name for name in names if name in drop), None):
            return Judged(kept_count, fault, violations)
    return Judged(len(replies), None, violations)
