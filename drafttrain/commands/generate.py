"""`drafttrain generate [checkpoint=DIR] [prompt=TEXT]`: completes a prompt or chats, streaming."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from drafttrain.core.console import print_line
from drafttrain.core.errors import UserError
from drafttrain.data.prompts import dialogue, encode_messages
from drafttrain.data.reply_text import UNFINISHED, Continuation, text_alone
from drafttrain.decoding.request import Chunk, Request, Result
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.drafters.checkpoint import load_checkpoint
from drafttrain.measure.decoding import decoder_of, idle_guards
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.targets.parallel import Part

DRAFTED, STATUS = "green", "dim"


def generate(options: RunOptions, resolved: dict[str, Any]) -> None:
    """Answer `prompt` or standard input. On a terminal without a prompt, chat until end of input.

    Raises UserError for a checkpoint that is missing, damaged or of another target, and for a prompt that is too long.
    """
    setting, size = options.target.shared_by
    if size > 1 and options.prompt is None:
        raise UserError(f"the processes of {setting} cannot share a terminal or standard input; give prompt=TEXT")
    with shared_target(options, "generate") as part:
        _generate(options, part)


def _generate(options: RunOptions, part: Part) -> None:
    source = None if options.checkpoint is None else CheckpointSource.of(options.checkpoint)
    loaded = load_target(options.target, part) if source is None else source.load(options.target, part)
    drafter = None
    if len(loaded.adapters) > 1:
        raise UserError(f"target.adapters has {', '.join(loaded.adapters)}, but generate uses one; leave the others out")
    if source is not None:
        directory = source.checkpoint(loaded, partial(print_line, Console(stderr=True), style=STATUS))
        restored = load_checkpoint(directory, loaded, tuned=options.decode.draft_length is None)
        loaded, drafter = restored.loaded, restored.drafter.requires_grad_(False)
    loaded = loaded.of(next(iter(loaded.adapters), None))
    writer = ReplyWriter(loaded, decoder_of(loaded, options.decode, drafter), Console(), chat=options.chat)
    if drafter is not None and drafter.adapts is not None:
        writer.note("the target was trained with this drafter: the output is that of the adapted target, not of the original")
    if drafter is None:
        writer.note("no checkpoint: plain decoding; add checkpoint=DIR to draft")
    if remark := idle_guards(options.decode):
        writer.note(remark)
    if options.prompt is not None or not sys.stdin.isatty():
        result = writer.answer(sys.stdin.read() if options.prompt is None else options.prompt)
        part.check(result.tokens)
        return
    writer.note("end with Ctrl-D; accepted draft tokens are green")
    while (line := read_line(writer.console)) is not None:
        if line.strip():
            writer.answer(line)


def read_line(console: Console) -> str | None:
    """A line from the user; None at the end of input."""
    try:
        return console.input("[bold]> [/bold]")
    except EOFError:
        console.print()
        return None


class ReplyWriter:
    """Decodes replies and writes them as they are generated."""

    def __init__(self, loaded: LoadedTarget, decoder: Decoder, console: Console, chat: bool) -> None:
        """chat: remember turns, and apply the tokenizer's chat template if it has one."""
        self.loaded, self.decoder, self.console = loaded, decoder, console
        self.chat = chat and bool(loaded.tokenizer.chat_template)
        self.turns: list[str] = []
        self.replies: list[str] = []
        self.status = Console(stderr=True)

    def note(self, text: str) -> None:
        """Print a line to stderr."""
        print_line(self.status, text, STATUS)

    def answer(self, prompt: str) -> Result:
        """Stream the reply to a prompt, then print a line of counts to stderr."""
        if not prompt.strip():
            raise UserError("the prompt is empty; give prompt=TEXT, or text on standard input")
        self.turns.append(prompt)
        request, following = self._request()
        try:
            session = Session(self.decoder, 1, self.decoder.positions(request))
        except ValueError as error:
            raise UserError(str(error)) from error
        (result,) = session.submit(request)
        stream = Stream(self.loaded, following)
        with self._screen() as show:
            for chunk in session:
                show(stream.styled(chunk), result)
        self.replies.append(stream.text)
        self.note(status(result, self.decoder.drafter is not None))
        return result

    def _request(self) -> tuple[Request, Continuation]:
        """The last turn's request, and what its reply continues.

        A chat that has grown beyond the target's context loses its oldest turns.
        """
        tokenizer, before = self.loaded.tokenizer, len(self.replies)
        while True:
            if self.chat:
                messages = dialogue(self.turns, self.replies)
                tokens = encode_messages(tokenizer, messages)
                following = Continuation.of_messages(tokenizer, tokens, messages)
            else:
                tokens = list(tokenizer(self.turns[-1], verbose=False)["input_ids"])
                following = Continuation.of_ids(tokenizer, tokens)
            request = self.decoder.request(tokens, key=before, as_json=True)
            if not self.chat or not self.replies or self.decoder.fits(request):
                break
            del self.turns[0], self.replies[0]
        if left_out := before - len(self.replies):
            self.note(f"the target's context is full: the oldest {left_out} of {before + 1} turns were left out")
        return request, following

    @contextmanager
    def _screen(self) -> Iterator[Any]:
        """Yields a function that shows a piece of text.

        On a terminal, the text grows above a status line, with control characters escaped. Otherwise the raw text is written.
        """
        if not self.console.is_terminal:
            yield lambda text, result: (self.console.file.write(text.plain), self.console.file.flush())
            self.console.print()
            return
        whole, drafts = Text(), self.decoder.drafter is not None
        with Live(console=self.console, auto_refresh=False, vertical_overflow="visible") as live:

            def show(text: Text, result: Result) -> None:
                whole.append_text(text)
                live.update(Group(whole, Text(status(result, drafts), style=STATUS)), refresh=True)

            yield show
            live.update(whole, refresh=True)


class Stream:
    """Decodes the tokens that follow a prompt to text piece by piece. An incomplete character waits for its next tokens."""

    def __init__(self, loaded: LoadedTarget, following: Continuation | None = None) -> None:
        """following: the prompt; None: there is none."""
        self._tokenizer, self._stop, self._following = loaded.tokenizer, loaded.target.stop_ids, following
        self._tokens: list[int] = []
        self._context: list[int] = []  # tokens that are decoded before them
        self._shown = ""  # text of both that was already returned
        self.text = ""

    def styled(self, chunk: Chunk) -> Text:
        """The text that the chunk adds, with drafted tokens coloured."""
        text = Text()
        for i, token in enumerate(chunk.tokens):
            text.append(self._piece(token), style=DRAFTED if i < chunk.drafted else "")
        return text

    def _piece(self, token: int) -> str:
        if token in self._stop:
            return ""
        self._tokens.append(token)
        if not self.text:
            self._begin([] if self._following is None else self._following.context(self._tokens))
        now = self._decoded([*self._context, *self._tokens])
        if now.endswith(UNFINISHED):
            return ""
        piece, self._shown = now[len(self._shown) :], now
        self.text += piece
        if now.endswith("\n") and len(self._tokens) > 64:  # start again at a new line, so that cost does not grow with length
            # keep the last token: some tokenizers drop a space at the beginning of a text
            self._begin(self._tokens[-1:])
            self._tokens = []
        return piece

    def _begin(self, context: list[int]) -> None:
        self._context, self._shown = context, self._decoded(context) if context else ""

    def _decoded(self, tokens: list[int]) -> str:
        return text_alone(self._tokenizer, tokens)


def status(result: Result, drafts: bool) -> str:
    """Tokens, tau and speed so far."""
    spent = result.ended - result.first
    parts = [f"{len(result.tokens)} tokens"]
    if drafts and result.verifications:
        parts.append(f"{result.verifications} verifications, tau {result.tau:.2f}")
    if spent > 0:
        parts.append(f"{(len(result.tokens) - 1) / spent:,.0f} tokens/s")
    for act in result.acts:
        fault = {"loop": "a loop", "json": "broken JSON"}[act.guard]
        parts.append(f"{fault} after token {act.kept}: " + ("ended" if act.action == "stop" else "plain decoding from there"))
    return ", ".join(parts)
