"""Renders a conversation with its chat template and finds the replies in the text, without assumptions about its format.

A reply's place comes from the template's `{% generation %}` marks, or else from rendering the conversation up to the turn (with
the generation prompt) and past it. Worked example, a template without marks:

    up to the reply    <s> [INST] hi [/INST]
    past the reply     <s> [INST] hi [/INST] yes </s>                 so the reply is ` yes </s>`
    whole              <s> [INST] hi [/INST] yes </s> [INST] ...

Some templates change a turn once another turn follows. They drop its reasoning, or move the system turn to the last user turn.
The whole text then contains a reply that the target never wrote in this form. Such a reply gets a separate text, which ends
with it.

Templates come with a target or its data, and are programs: they run within limits of time and memory (`bounded`).
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from drafttrain.core.errors import UserError
from drafttrain.data import REPLY_PARTS
from drafttrain.data.forms import ASSISTANT, Conversation
from drafttrain.data.pictures import sources_of
from drafttrain.data.turns import LEARN
from drafttrain.targets.images import TEXT_ONLY, ImageRef, Images

Messages = Sequence[dict[str, Any]]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAKES_THOUGHTS = re.compile(r"reasoning_content|\.thinking\b|\[['\"]thinking['\"]\]")
THOUGHT = re.compile(r"^(\s*<think>)?.*?</think>\s*", re.DOTALL)
WAY_OUT = "correct its roles and their order, or remove it"
DATE_CODES = "aAbBdmyYHIMSpj"
SECONDS = 20.0  # of processor time
SIZE = 1 << 30  # bytes in addition to what the process uses already
STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text and its supervised replies."""

    text: str
    replies: list[tuple[int, int]]  # [start, end) characters of each reply, or of each part of one
    images: tuple[ImageRef, ...] = ()  # of the conversation, in order; the text may hold only the first of them


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How conversations are rendered."""

    text: str | None = None  # a template instead of the tokenizer's own
    thinking: str = "keep"  # keep | drop
    supervise: tuple[str, ...] = REPLY_PARTS  # parts of the replies
    date: str = "2026-01-01"  # today's date for templates that print it

    @property
    def partial(self) -> bool:
        """Whether parts of replies are not supervised."""
        return set(self.supervise) != set(REPLY_PARTS)


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply in a text."""

    after: str  # the text up to the reply's end
    spans: list[tuple[int, int]]  # what is supervised


class Template:
    """The chat template that renders conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions, images: Images = TEXT_ONLY) -> None:
        self.tokenizer, self.options, self.images = tokenizer, options, images
        self.arguments: dict[str, Any] = (
            dict.fromkeys(("enable_thinking", "thinking"), False) if options.thinking == "drop" else {}
        )
        self._special = special_tokens(tokenizer)
        self._dated: dict[bool, str] = {}
        self._origin = template_origin(tokenizer) if options.text is None else "data.template"

    def render(self, conversation: Conversation) -> list[Rendered]:
        """The fewest texts that contain every reply unchanged, in order. For most templates this is one text.

        Raises UserError when the template is missing, refuses the conversation or hides its replies.
        """
        template = self._text(conversation)
        messages = self._messages(conversation, template)
        if MARKED.search(template):
            # transformers' own token mask is wrong at trimmed spaces, so this uses the marked characters instead
            text, marked, pictures = self._run(conversation, messages, marks=True)
            return [Rendered(text, self._learnt_marks(conversation, messages, text, marked), pictures)]
        full_text, _, pictures = self._run(conversation, messages)
        return _rendered_texts(full_text, self._replies(conversation, messages, full_text), pictures)

    def _learnt_marks(
        self, conversation: Conversation, messages: Messages, text: str, marked: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The marks of the replies that the data lets be learnt, or of their supervised parts."""
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not self.options.partial and all(conversation.learnt(turn) for turn in turns):
            return marked
        if len(marked) != len(turns):
            what = "parts of replies are" if self.options.partial else "some replies are not"
            raise UserError(
                f"{conversation.origin}: {what} to be learnt, and the template marks {len(marked)} parts of "
                f"{len(turns)} replies; give data.template=FILE without generation marks, or remove the record"
            )
        pairs = [(mark, messages[turn]) for mark, turn in zip(marked, turns, strict=True) if conversation.learnt(turn)]
        return [span for mark, message in pairs for span in self._spans(message, text, *mark)]

    def _spans(self, message: dict[str, Any], text: str, start: int, end: int) -> list[tuple[int, int]]:
        """[start, end) characters of what is supervised in a reply.

        Reasoning comes first, marks included, then the reply's text, then calls. The end token belongs to the last of them.
        """
        if not self.options.partial:
            return [(start, end)]
        written, content = text[start:end], THOUGHT.sub("", message["content"], count=1).strip()
        thought, reasoning = THOUGHT.match(written), (message.get("reasoning_content") or "").strip()
        # without such marks, the text or the calls begin after the reasoning and the marks that the template has for it
        reply = thought.end() if thought else written.find(reasoning) + len(reasoning) if reasoning in written else 0
        place = written.find(content, reply) if content else -1
        call = reply if place < 0 else place + len(content)
        reply = place if reply and place >= 0 else reply
        call = call if message.get("tool_calls") else len(written)
        if not reasoning and not re.sub(r"</?think>", "", thought[0] if thought else "").strip():
            edges_reasoning = (reply, reply)  # the marks of thoughts that are empty
        else:
            edges_reasoning = (0, reply)
        edges = {"reasoning": edges_reasoning, "reply": (reply, call), "call": (call, len(written))}
        spans = list[tuple[int, int]]()
        for first, last in (edges[part] for part in edges if part in self.options.supervise):
            if spans and spans[-1][1] == start + first:
                spans[-1] = (spans[-1][0], start + last)
            elif first < last:
                spans.append((start + first, start + last))
        return spans

    def _text(self, conversation: Conversation) -> str:
        """The template's text. The tokenizer may have another one for conversations with tools."""
        has_tools = bool(conversation.tools)
        if has_tools not in self._dated:
            template = self.options.text or chat_template(self.tokenizer, conversation.origin, conversation.tools)
            self._dated[has_tools] = dated(template, self.options.date)
        return self._dated[has_tools]

    def _messages(self, conversation: Conversation, template: str) -> list[dict[str, Any]]:
        """The messages with reasoning in the form that the template reads, or without any."""
        reads_thoughts, messages = TAKES_THOUGHTS.search(template), []
        for original in conversation.messages:
            message = {key: value for key, value in original.items() if key != LEARN}
            reasoning = message.get("reasoning_content")
            if message["role"] != ASSISTANT or (self.options.thinking == "keep" and (reasoning is None or reads_thoughts)):
                messages.append(message if reasoning is None else message | {"thinking": reasoning})
                continue
            plain_message = {key: value for key, value in message.items() if key != "reasoning_content"}
            if self.options.thinking == "drop":
                plain_message["content"] = THOUGHT.sub("", message["content"], count=1)
            else:
                plain_message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
            messages.append(plain_message)
        return messages

    def _replies(self, conversation: Conversation, messages: Messages, full_text: str) -> list[_Reply]:
        replies = []
        for turn, message in enumerate(messages):
            # a reply to nothing has no prompt to be drafted from
            if message["role"] != ASSISTANT or turn == 0 or not conversation.learnt(turn):
                continue
            prompt = self._run(conversation, messages[:turn], add_generation_prompt=True)[0]
            completed = full_text if turn + 1 == len(messages) else self._run(conversation, messages[: turn + 1])[0]
            if not completed.startswith(prompt):
                raise UserError(
                    f"{conversation.origin}: the chat template cannot be masked reliably: turn {turn + 1} changes the text "
                    "before it; set data.template=FILE to one with {% generation %} marks around replies, or use `text` records"
                )
            end = self._end(message, completed, len(prompt))
            replies.append(_Reply(completed[:end], self._spans(message, completed, len(prompt), end)))
        return replies

    def _end(self, message: dict[str, Any], text: str, start: int) -> int:
        """After the special token that follows the content. Some templates write more after it when no turn follows."""
        if self._special is None or message.get("tool_calls") or not message["content"].strip():
            return len(text)
        content = message["content"].strip()
        for token in self._special.finditer(text, start):
            if text[start : token.start()].rstrip().endswith(content):
                return token.end()
        return len(text)

    def _run(
        self, conversation: Conversation, messages: Messages, marks: bool = False, **template_options: Any
    ) -> tuple[str, list[tuple[int, int]], tuple[ImageRef, ...]]:
        """The rendered text with the tokens of its images, its marked characters, and the images."""
        text, render = self._text(conversation), cast(Any, render_jinja_template)  # its annotations exclude marks
        with template_errors(f"{conversation.origin}: the chat template refuses this conversation", self._origin, WAY_OUT):
            (rendered,), marked = render(
                [list(messages)],
                tools=list(conversation.tools) or None,
                chat_template=text,
                return_assistant_tokens_mask=marks,
                **(self.tokenizer.special_tokens_map | conversation.arguments | self.arguments | template_options),
            )
        marked_spans: list[tuple[int, int]] = marked[0] if marks else []
        if not (sources := sources_of(messages)):
            return rendered, marked_spans, ()
        expanded = self.images.expand(rendered, sources, conversation.origin, [edge for span in marked_spans for edge in span])
        return expanded.text, list(zip(expanded.edges[::2], expanded.edges[1::2], strict=True)), expanded.images


@contextmanager
def template_errors(refused: str, origin: str, way_out: str) -> Iterator[None]:
    """A context for running a template: it bounds time and memory, and turns errors into UserErrors.

    refused: message for errors that the template raises itself. origin: where the template comes from, for its other errors.
    """
    import jinja2  # a machine that only decodes may lack it

    try:
        with bounded():
            yield
    except UserError:
        raise
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise UserError(f"{refused} ({_short(error)}); {way_out}") from error
    except (Exception, TooLongError) as error:  # a template is a program and may raise anything
        error_type = "" if isinstance(error, TooLongError) else f"{type(error).__name__}: "
        raise UserError(f"{refused}: {origin} fails ({error_type}{_short(error)}); mend the template") from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def _rendered_texts(full_text: str, replies: Sequence[_Reply], images: tuple[ImageRef, ...]) -> list[Rendered]:
    """The whole text with the replies that it contains unchanged, and for each other reply a text that ends with it."""
    remaining, texts = list(replies), []
    for text in (full_text, *(reply.after for reply in reversed(replies))):
        contained = [reply for reply in remaining if text.startswith(reply.after)]
        remaining = [reply for reply in remaining if reply not in contained]
        if contained:
            texts.append(Rendered(text, [span for reply in contained for span in reply.spans], images))
    return texts[::-1] or [Rendered(full_text, [], images)]


def template_origin(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own template, named for an error message."""
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
    """A pattern for the tokens at which the tokenizer splits a text first; None where there are none."""
    token_texts = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special and not token.normalized]
    longest_first = sorted(filter(None, token_texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def dated(template: str, day: str) -> str:
    """The template with a macro `strftime_now` for this day, so that the same conversation has the same tokens on every day."""
    if "strftime_now" not in template:
        return template
    try:
        parsed_day = date.fromisoformat(day)
    except ValueError as error:
        raise UserError(f"data.date is {day!r} ({error}); write it as 2026-01-31") from error
    padded = "".join(f"|replace('%{code}', '{parsed_day.strftime('%' + code)}')" for code in DATE_CODES)
    unpadded = f"|replace('%-d', '{parsed_day.day}')|replace('%-m', '{parsed_day.month}')"
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{unpadded}{padded} }}}}{{%- endmacro -%}}{{{{ '' }}}}{template}"


class TooLongError(BaseException):
    """The time is used up. Not an Exception, because the bounded program may catch those, as Jinja's optimiser does."""


@contextmanager
def bounded(seconds: float | None = None, size: int | None = None) -> Iterator[None]:
    """End the code inside with TooLongError or MemoryError when it exceeds these limits; None: `SECONDS` and `SIZE`.

    Time is limited only in a process's main thread, memory only on Linux.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "ITIMER_VIRTUAL"):
            stack.enter_context(_time(SECONDS if seconds is None else seconds))
        if STATM.is_file():
            stack.enter_context(_memory(SIZE if size is None else size))
        yield


@contextmanager
def _time(seconds: float) -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise TooLongError(f"it takes more than {seconds:g} seconds")

    previous_handler = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)  # repeated, in case the error is caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)


@contextmanager
def _memory(size: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    requested_limit = int(STATM.read_text().split()[0]) * resource.getpagesize() + size
    soft_limit = requested_limit if soft == resource.RLIM_INFINITY else min(requested_limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
