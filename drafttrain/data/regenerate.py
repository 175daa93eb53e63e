"""The target answers prompts in this process, through the decoder's continuous batching: a text that ends makes room for the
next turn or the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.asks import TOO_LONG, Dialogue, Job
from drafttrain.data.prompts import encode_messages
from drafttrain.data.rules import Reply
from drafttrain.decoding.decoder import Decoder
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Session

Finished = Callable[[Dialogue], None]  # told of every text that has ended
Tick = Callable[[int], None]  # told of tokens as they come


@dataclass(frozen=True)
class Engine:
    """decoder_at: a decoder for this temperature, with the bounds of a reply. max_length: tokens of a conversation, a longest
    reply included.

    One temperature is decoded after the other, since a session has one.
    """

    decoder_at: Callable[[float], Decoder]
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    batch_size: int

    def answer(self, jobs: Sequence[Job], finished: Finished, tick: Tick) -> None:
        """Write every job's text."""
        for temperature in sorted({job.temperature for job in jobs}):
            self._answer(temperature, [job for job in jobs if job.temperature == temperature], finished, tick)

    def _answer(self, temperature: float, jobs: list[Job], finished: Finished, tick: Tick) -> None:
        decoder, slots = self.decoder_at(temperature), min(self.batch_size, len(jobs))
        session = Session(decoder, slots, self.max_length + decoder.scratch)
        waiting, under_way = iter(jobs), _UnderWay(self.tokenizer, self.max_length, session)
        while under_way.fill(waiting, 2 * slots, finished):
            for chunk in session.step():
                tick(len(chunk.tokens))
                if chunk.result.ended_by:
                    under_way.end(chunk.result, finished)


class _UnderWay:
    """The dialogues that a session works on, by the result that is awaited."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, session: Session) -> None:
        self.tokenizer, self.max_length, self.session = tokenizer, max_length, session
        self.open: dict[int, tuple[Dialogue, Result]] = {}

    def fill(self, jobs: Iterator[Job], most: int, finished: Finished) -> bool:
        """Begin jobs until so many are open; whether any is. More than there are slots, so that a free one never waits."""
        while len(self.open) < most and (job := next(jobs, None)) is not None:
            self.ask(Dialogue(job), finished)
        return bool(self.open)

    def ask(self, dialogue: Dialogue, finished: Finished) -> None:
        """Queue the dialogue's next turn, or report that it has ended."""
        messages = dialogue.ask()
        if messages is not None:
            try:
                tokens = encode_messages(self.tokenizer, messages)
            except UserError as error:  # some templates take no system turn: other prompts may pass
                dialogue.fail(str(error))
            else:
                request = self.session.decoder.request(tokens, dialogue.job.seed)
                if len(tokens) + request.max_new_tokens <= self.max_length:
                    # positions go on from turn to turn: no noise is used twice
                    (result,) = self.session.submit(request)
                    self.open[id(result)] = (dialogue, result)
                    return
                dialogue.fail(TOO_LONG)
        finished(dialogue)

    def end(self, result: Result, finished: Finished) -> None:
        """Take a reply; of the chunks that one step gives, several may belong to it."""
        dialogue, _ = self.open.pop(id(result), (None, None))
        if dialogue is None:
            return
        ids = result.tokens[:-1] if result.ended_by == "stop" else result.tokens
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        dialogue.take(Reply(text, str(result.ended_by)), len(result.tokens))
        self.ask(dialogue, finished)
