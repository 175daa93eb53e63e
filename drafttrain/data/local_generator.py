"""The target answers prompts in this process. With continuous batching a finished text frees its slot for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data.generation_jobs import TOO_LONG, Dialogue, GenerationJob, TokenTurn
from drafttrain.data.prompts import encode_messages
from drafttrain.data.reply_text import Continuation
from drafttrain.data.rules import Reply
from drafttrain.decoding.decoder import Decoder
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Session
from drafttrain.targets.images import TEXT_ONLY, Images

Finished = Callable[[Dialogue], None]  # called for every text that has ended
Tick = Callable[[int], None]  # called with numbers of new tokens


@dataclass(frozen=True)
class LocalGenerator:
    """Generates texts with our own decoder. Temperatures run one after another, since a session has a single one."""

    decoder_at: Callable[[float], Decoder]  # a decoder for this temperature, with the limits of a reply
    tokenizer: PreTrainedTokenizerBase
    max_length: int  # tokens of a conversation, including a reply of maximal length
    batch_size: int  # texts decoded together
    images: Images = TEXT_ONLY  # of the target

    def answer(self, jobs: Sequence[GenerationJob], finished: Finished, tick: Tick) -> None:
        """Generate every job's text."""
        for temperature in sorted({job.temperature for job in jobs}):
            self._answer(temperature, [job for job in jobs if job.temperature == temperature], finished, tick)

    def _answer(self, temperature: float, jobs: list[GenerationJob], finished: Finished, tick: Tick) -> None:
        decoder, slots = self.decoder_at(temperature), min(self.batch_size, len(jobs))
        session = Session(decoder, slots, self.max_length + decoder.scratch)
        pending_jobs, active = iter(jobs), _ActiveDialogues(self.tokenizer, self.max_length, session, self.images)
        while active.fill(pending_jobs, 2 * slots, finished):
            for chunk in session.step():
                tick(len(chunk.tokens))
                if chunk.result.ended_by:
                    active.end(chunk.result, finished)


class _ActiveDialogues:
    """The dialogues that a session works on, by their pending results."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, session: Session, images: Images = TEXT_ONLY
    ) -> None:
        self.tokenizer, self.max_length, self.session, self.images = tokenizer, max_length, session, images
        self.open: dict[int, tuple[Dialogue, Result, list[int]]] = {}  # with the ids of the prompt

    def fill(self, jobs: Iterator[GenerationJob], most: int, finished: Finished) -> bool:
        """Start jobs until `most` are open. Returns whether any is. More than the slots are opened, so that no slot waits."""
        while len(self.open) < most and (job := next(jobs, None)) is not None:
            self.submit(Dialogue(job), finished)
        return bool(self.open)

    def submit(self, dialogue: Dialogue, finished: Finished) -> None:
        """Queue the dialogue's next turn, or report that it has ended."""
        messages = dialogue.next_prompt()
        if messages is not None:
            try:
                tokens = encode_messages(self.tokenizer, messages, self.images, arguments=dialogue.job.script.arguments)
                request = self.session.decoder.request(tokens, dialogue.job.seed)
            except UserError as error:  # some templates refuse system turns; other prompts may pass
                dialogue.fail(str(error))
            else:
                if len(tokens) + request.max_new_tokens <= self.max_length:
                    # positions continue from turn to turn, so that no noise is used twice
                    (result,) = self.session.submit(request)
                    self.open[id(result)] = (dialogue, result, tokens)
                    return
                dialogue.fail(TOO_LONG)
        finished(dialogue)

    def end(self, result: Result, finished: Finished) -> None:
        """Take a reply. Several chunks of one step may belong to it; only the first counts."""
        dialogue, _, prompt = self.open.pop(id(result), (None, None, []))
        if dialogue is None:
            return
        ids = result.tokens[:-1] if result.ended_by == "stop" else result.tokens
        arguments = dialogue.job.script.arguments
        text = Continuation.of_messages(self.tokenizer, prompt, dialogue.messages, self.images, arguments).text(ids)
        dialogue.add_reply(Reply(text, str(result.ended_by)), len(result.tokens), TokenTurn(prompt, result.tokens))
        self.submit(dialogue, finished)
