"""One conversation to token ids and the mask of what the target itself would have said.

Where a reply stands in the text comes from the template: from its own `{% generation %}` marks, else from rendering the
conversation up to the turn (with the generation prompt) and past it. Where it stands among the tokens comes from tokenising the
text up to there and comparing ids. Worked example, a template without marks:

    up to the reply    <s> [INST] hi [/INST]                          3 tokens behind <s>: the reply starts at 4
    past the reply     <s> [INST] hi [/INST] yes </s>                 it ends at 6, its end-of-turn token included
    whole              <s> [INST] hi [/INST] yes </s> [INST] ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from drafttrain.data.sources import ASSISTANT, Conversation
from drafttrain.errors import UserError

Marked = tuple[list[str], list[list[tuple[int, int]]]]  # texts, and the marked characters of each (transformers says str)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """token_ids: int32 [T]. mask: bool [T], True on supervised tokens; never on the first, which nothing precedes."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    truncated: bool = False

    @property
    def supervised(self) -> int:
        """How many tokens are supervised."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the [start, end) characters of each reply."""

    text: str
    replies: list[tuple[int, int]]


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    """At most `max_length` tokens; the mask is all False when no reply lies within them.

    Raises UserError when the tokenizer has no chat template, or one that refuses the conversation or hides its replies.
    """
    if conversation.text is not None:
        ids = _ids(tokenizer, conversation.text, special=True)
        mask = [True] * len(ids)
    else:
        ids, mask = _encode_chat(conversation, tokenizer)
    mask[:1] = [False] * len(mask[:1])
    cut = slice(max_length)
    return Encoded(np.array(ids[cut], np.int32), np.array(mask[cut], np.bool_), truncated=len(ids) > max_length)


def _encode_chat(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    template = chat_template(tokenizer, conversation.origin)
    rendered = (
        _render_marked(conversation, tokenizer, template)
        if MARKED.search(template)
        else _render_prefixes(conversation, tokenizer)
    )
    ids = _ids(tokenizer, rendered.text)
    mask = [False] * len(ids)
    for start, end in rendered.replies:
        # a token that prompt and reply share can never be drafted behind that prompt: supervision starts after it
        first = len(_ids(tokenizer, rendered.text[:start]))
        last = _common(_ids(tokenizer, rendered.text[:end]), ids)
        last = _end_of_turn(ids, first, last, tokenizer)
        mask[first:last] = [True] * len(mask[first:last])
    return ids, mask


def chat_template(tokenizer: PreTrainedTokenizerBase, origin: str) -> str:
    """The template that plain conversations use. Raises UserError when there is none."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{origin}: conversations need a chat template, and the tokenizer {tokenizer.name_or_path} has none; "
            "use a tokenizer with a chat_template, or `text` records"
        )
    return str(tokenizer.get_chat_template())


def _render_marked(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: str) -> Rendered:
    """From the marks' characters: transformers' own token mask loses or overruns replies whose edge is a trimmed space."""
    try:
        special: dict[str, Any] = tokenizer.special_tokens_map
        conversations: Any = [list(conversation.messages)]
        texts, marks = cast(
            Marked, render_jinja_template(conversations, chat_template=template, return_assistant_tokens_mask=True, **special)
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise _refused(conversation.origin, error) from error
    return Rendered(texts[0], marks[0])


def _render_prefixes(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    messages = conversation.messages
    text = _render(conversation, messages, tokenizer)
    replies = []
    for turn, message in enumerate(messages):
        if message["role"] != ASSISTANT or turn == 0:  # a reply to nothing has no prompt to be drafted from
            continue
        before = _render(conversation, messages[:turn], tokenizer, add_generation_prompt=True)
        after = text if turn + 1 == len(messages) else _render(conversation, messages[: turn + 1], tokenizer)
        if not (after.startswith(before) and text.startswith(after)):
            raise UserError(
                f"{conversation.origin}: the chat template cannot be masked reliably: turn {turn + 1} changes "
                "the text before it; add {% generation %} marks to the template, or use plain `text` records"
            )
        replies.append((len(before), len(after)))
    return Rendered(text, replies)


def _render(
    conversation: Conversation, messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, **how: Any
) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **how))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise _refused(conversation.origin, error) from error


def _refused(origin: str, error: Exception) -> UserError:
    return UserError(
        f"{origin}: the chat template refuses this conversation ({error}); correct its roles and their order, or remove it"
    )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _common(prefix: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix; shorter than `prefix` where its last token goes on into what follows."""
    return next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), min(len(prefix), len(ids)))


def _end_of_turn(ids: list[int], first: int, last: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where the target stops: after the end-of-turn token, also when marks leave it out, and before the blanks behind it."""
    if last < len(ids) and ids[last] == tokenizer.eos_token_id and ids[last - 1] != tokenizer.eos_token_id:
        return last + 1
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    end = next((i + 1 for i in range(last - 1, first - 1, -1) if ids[i] in special), None)
    return end if end is not None and not str(tokenizer.decode(ids[end:last])).strip() else last
