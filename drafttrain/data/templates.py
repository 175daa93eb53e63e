"""A conversation as text, and where in it the target speaks: what its chat template says, never what it looks like.

A reply's place comes from the template's own `{% generation %}` marks, else from rendering the conversation up to the turn
(with the generation prompt) and past it. Worked example, a template without marks:

    up to the reply    <s> [INST] hi [/INST]
    past the reply     <s> [INST] hi [/INST] yes </s>                 so the reply is ` yes </s>`
    whole              <s> [INST] hi [/INST] yes </s> [INST] ...

Some templates change a turn once another follows: they leave out its thoughts, or move the system turn to the last user turn.
A reply then stands in the whole text as the target never said it, so it gets a text of its own that ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from drafttrain.core.errors import UserError
from drafttrain.data.bounds import TooLongError, bounded
from drafttrain.data.forms import ASSISTANT, Conversation

Messages = Sequence[dict[str, Any]]
Marked = tuple[list[str], list[list[tuple[int, int]]]]  # texts, and the marked characters of each (transformers says str)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAKES_THOUGHTS = re.compile(r"reasoning_content|\.thinking\b|\[['\"]thinking['\"]\]")
THOUGHT = re.compile(r"^(\s*<think>)?.*?</think>\s*", re.DOTALL)
WAY_OUT = "correct its roles and their order, or remove it"
DATE_CODES = "aAbBdmyYHIMSpj"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text, and the [start, end) characters of each reply in it that is learnt from."""

    text: str
    replies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """text: a template instead of the tokenizer's own; thinking: keep | drop; date: of today, for templates that print it."""

    text: str | None = None
    thinking: str = "keep"
    date: str = "2026-01-01"


@dataclass(frozen=True, slots=True)
class _Reply:
    """The text up to a reply, and past it."""

    before: str
    after: str


class Template:
    """The chat template that conversations are rendered with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions) -> None:
        if options.thinking not in ("keep", "drop"):
            raise UserError(f"data.thinking is {options.thinking!r}; set it to keep or drop")
        self.tokenizer, self.options = tokenizer, options
        self.told: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking"), False) if options.thinking == "drop" else {}
        self._special = special_tokens(tokenizer)
        self._dated: dict[bool, str] = {}
        self._whose = whose(tokenizer) if options.text is None else "data.template"

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The fewest texts in which every reply stands as it was said, in order; one for most templates.

        Raises UserError when there is no template, or one that refuses the conversation or hides its replies.
        """
        template = self._text(conversation)
        messages = self._messages(conversation, template)
        if MARKED.search(template):
            # transformers' own token mask loses or overruns replies whose edge is a trimmed space, so: the marks' characters
            return [Rendered(*self._run(conversation, messages, marks=True))]
        whole, _ = self._run(conversation, messages)
        return _standing(whole, self._replies(conversation, messages, whole))

    def _text(self, conversation: Conversation) -> str:
        """With tools, the tokenizer may have another."""
        tooled = bool(conversation.tools)
        if tooled not in self._dated:
            own = self.options.text or chat_template(self.tokenizer, conversation.origin, conversation.tools)
            self._dated[tooled] = dated(own, self.options.date)
        return self._dated[tooled]

    def _messages(self, conversation: Conversation, template: str) -> list[dict[str, Any]]:
        """With thoughts where the template looks for them, or without any."""
        takes, messages = TAKES_THOUGHTS.search(template), []
        for message in conversation.messages:
            thought = message.get("reasoning_content")
            if message["role"] != ASSISTANT or (self.options.thinking == "keep" and (thought is None or takes)):
                messages.append(message if thought is None else message | {"thinking": thought})
                continue
            rest = {key: value for key, value in message.items() if key != "reasoning_content"}
            if self.options.thinking == "drop":
                rest["content"] = THOUGHT.sub("", message["content"], count=1)
            else:
                rest["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            messages.append(rest)
        return messages

    def _replies(self, conversation: Conversation, messages: Messages, whole: str) -> list[_Reply]:
        found = []
        for turn, message in enumerate(messages):
            if message["role"] != ASSISTANT or turn == 0:  # a reply to nothing has no prompt to be drafted from
                continue
            before, _ = self._run(conversation, messages[:turn], add_generation_prompt=True)
            after = whole if turn + 1 == len(messages) else self._run(conversation, messages[: turn + 1])[0]
            if not after.startswith(before):
                raise UserError(
                    f"{conversation.origin}: the chat template cannot be masked reliably: turn {turn + 1} changes the text "
                    "before it; set data.template=FILE to one with {% generation %} marks around replies, or use `text` records"
                )
            found.append(_Reply(before, after[: self._end(message, after, len(before))]))
        return found

    def _end(self, message: dict[str, Any], after: str, start: int) -> int:
        """Behind the special token that ends the turn, where its content is the last before one; some templates write more
        there when no turn follows."""
        if self._special is None or message.get("tool_calls") or not message["content"].strip():
            return len(after)
        content = message["content"].strip()
        for token in self._special.finditer(after, start):
            if after[start : token.start()].rstrip().endswith(content):
                return token.end()
        return len(after)

    def _run(
        self, conversation: Conversation, messages: Messages, marks: bool = False, **how: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the marked characters of it."""
        special: dict[str, Any] = self.tokenizer.special_tokens_map
        chats: Any = [list(messages)]
        text = self._text(conversation)
        with template_errors(f"{conversation.origin}: the chat template refuses this conversation", self._whose, WAY_OUT):
            texts, marked = cast(
                Marked,
                render_jinja_template(
                    chats,
                    tools=list(conversation.tools) or None,
                    chat_template=text,
                    return_assistant_tokens_mask=marks,
                    **special,
                    **self.told,
                    **how,
                ),
            )
        return texts[0], marked[0] if marks else []


@contextmanager
def template_errors(refused: str, whose: str, way_out: str) -> Iterator[None]:
    """While a template runs: bounded, and what it raises becomes a UserError.

    refused: the message where the template itself says no. whose: where it comes from, for what it does wrong.
    """
    try:
        with bounded():
            yield
    except UserError:
        raise
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise UserError(f"{refused} ({_short(error)}); {way_out}") from error
    except (Exception, TooLongError) as error:  # a template is a program, and may fail as any does
        kind = "" if isinstance(error, TooLongError) else f"{type(error).__name__}: "
        raise UserError(f"{refused}: {whose} fails ({kind}{_short(error)}); mend the template") from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def _standing(whole: str, replies: Sequence[_Reply]) -> list[Rendered]:
    """The whole text with the replies that it holds unchanged, and for those that it does not the texts that end with them."""
    left, texts = list(replies), []
    for text in (whole, *(reply.after for reply in reversed(replies))):
        here = [reply for reply in left if text.startswith(reply.after)]
        left = [reply for reply in left if reply not in here]
        if here:
            texts.append(Rendered(text, [(len(reply.before), len(reply.after)) for reply in here]))
    return texts[::-1] or [Rendered(whole, [])]


def whose(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own template, for a message."""
    return f"the template of the tokenizer {getattr(tokenizer, 'name_or_path', None) or 'without a name'}"


def chat_template(tokenizer: PreTrainedTokenizerBase, origin: str, tools: Sequence[dict[str, Any]] = ()) -> str:
    """The tokenizer's own template. Raises UserError when there is none."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{origin}: conversations need a chat template, and the tokenizer {tokenizer.name_or_path} has none; use a "
            "tokenizer with a chat_template, set data.template=FILE, or use `text` records"
        )
    return str(tokenizer.get_chat_template(tools=list(tools) or None))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """What finds those around which the tokenizer splits a text before anything else; None where there are none."""
    contents = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and not token.normalized]
    longest_first = sorted(filter(None, contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def dated(template: str, day: str) -> str:
    """The template with a macro for `strftime_now`, which is else today, so that the same text has the same tokens tomorrow."""
    if "strftime_now" not in template:
        return template
    try:
        at = date.fromisoformat(day)
    except ValueError as error:
        raise UserError(f"data.date is {day!r} ({error}); write it as 2026-01-31") from error
    written = "".join(f"|replace('%{code}', '{at.strftime('%' + code)}')" for code in DATE_CODES)
    unpadded = f"|replace('%-d', '{at.day}')|replace('%-m', '{at.month}')"
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{unpadded}{written} }}}}{{%- endmacro -%}}{{{{ '' }}}}{template}"


def read_template(path: str | None) -> str | None:
    """The Jinja file that data.template names."""
    if path is None:
        return None
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.template={path}: expected a Jinja file in UTF-8, got none ({error}); correct the path"
        ) from error
