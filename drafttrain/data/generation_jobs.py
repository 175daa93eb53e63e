"""The texts that `prepare` generates: distinct prompts, jobs for each prompt, running dialogues, our generator.

A text's temperature and noise depend only on (seed, prompt, sample number). The order of the prompts, the number of processes
and restarts do not change a text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.data import PrepareOptions
from drafttrain.data.forms import ADAPTER, ARGUMENTS, ASSISTANT, TOOLS, Conversation
from drafttrain.data.pictures import Content, sources_of, text_of
from drafttrain.data.prompts import encode_messages
from drafttrain.data.reply_text import Continuation, Reply, text_alone, text_following
from drafttrain.data.tool_calls import NO_CALL, UNREADABLE, Call, CallReader, fitted, parsed_calls
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.model.images import without_images
from drafttrain.targets.images import TEXT_ONLY, Images

PROMPT_ROLES, TOOL = ("system", "developer", "user"), "tool"
TOO_LONG = "too_long"  # reason of a failed turn: it leaves no room for a reply
LINKS = ("name", "tool_call_id")  # fields of a result that say which call it answers
Message = dict[str, Any]  # role, and the content: text, or parts of text and images


@dataclass(frozen=True, slots=True)
class PromptScript:
    """A conversation without its replies. The target replies after each user turn, and after the results of its calls."""

    id: str  # hash of the text
    messages: tuple[Message, ...]  # those of the assistant have only calls, which the next messages answer
    origin: str  # file and line, for messages
    arguments: dict[str, Any] = field(default_factory=dict)  # for the chat template
    tools: tuple[dict[str, Any], ...] = ()
    adapter: str | None = None  # LoRA adapter of the target that answers


@dataclass(frozen=True, slots=True)
class PromptScripts:
    """All distinct prompts."""

    scripts: list[PromptScript]
    skipped: Counter[str]  # number of other conversations by the reason why they were skipped

    @property
    def digest(self) -> str:
        """sha256 of all prompts, in order."""
        return hashlib.sha256("".join(script.id for script in self.scripts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One text to generate."""

    script: PromptScript
    sample: int  # number of the text among those of its prompt
    temperature: float
    seed: int  # seed of its noise

    @property
    def id(self) -> str:
        """Name of the text in the journal."""
        return f"{self.script.id}-{self.sample}"


def read_scripts(conversations: Iterable[Conversation], unusable: int = 0, calls: bool = True) -> PromptScripts:
    """The conversations' prompts.

    unusable: number of records that are no conversation, which are counted too. calls: whether the target's calls can be read;
    if not, conversations with calls are skipped.

    Raises UserError when no prompt is left.
    """
    scripts: dict[str, PromptScript] = {}
    skipped: Counter[str] = Counter(unusable=unusable)
    for conversation in conversations:
        if (reason := _unusable(conversation, calls)) is not None:
            skipped[reason] += 1
            continue
        script, arguments, tools = _script(conversation), conversation.arguments, conversation.tools
        extras = [extra for extra in (arguments, tools, conversation.adapter) if extra]
        text = json.dumps([*([m["role"], _stripped(m["content"]), *_links(m)] for m in script), *extras])
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        skipped["duplicate"] += name in scripts
        scripts.setdefault(name, PromptScript(name, script, conversation.origin, arguments, tools, conversation.adapter))
    if not scripts:
        skip_summary = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no record"
        raise UserError(f"data.path has no prompt to ask ({skip_summary}); give conversations with user turns")
    return PromptScripts(list(scripts.values()), +skipped)


def has_calls(conversation: Conversation) -> bool:
    """Whether the conversation has tool calls or their results."""
    return any(message["role"] == TOOL or "tool_calls" in message for message in conversation.messages)


def _script(conversation: Conversation) -> tuple[Message, ...]:
    """The messages without the assistant's, of which only calls remain that results follow."""
    script: list[Message] = []
    for message in conversation.messages:
        calls = message.get("tool_calls", [])
        if message["role"] != ASSISTANT:
            kept = ("role", "content", *(LINKS if message["role"] == TOOL else ()))
            script.append({key: message[key] for key in kept if key in message})
        elif calls and script and script[-1]["role"] == ASSISTANT:
            script[-1]["tool_calls"] += calls
        elif calls:
            script.append({"role": ASSISTANT, "content": "", "tool_calls": [*calls]})
    following = [*(message["role"] for message in script[1:]), ""]
    return tuple(m for m, role in zip(script, following, strict=True) if m["role"] != ASSISTANT or role == TOOL)


def _links(message: Message) -> list[Any]:
    """What decides how results fit to calls."""
    calls = [[call.get("id"), call["function"]["name"]] for call in message.get("tool_calls", [])]
    return [calls] if calls else [message[key] for key in LINKS if key in message]


def _stripped(content: Content) -> Content:
    return content.strip() if isinstance(content, str) else content


def _unusable(conversation: Conversation, calls: bool) -> str | None:
    """Why a conversation is skipped; None if it is used."""
    roles = [message["role"] for message in conversation.messages]
    if not roles:
        return "plain text"
    if not calls and has_calls(conversation):
        return "with tools"
    if any(role not in (*PROMPT_ROLES, ASSISTANT, TOOL) for role in roles):
        return "of other roles"
    if not any(m["role"] == "user" and text_of(m["content"]).strip() for m in conversation.messages):
        return "without a user turn"
    return None


def jobs_of(scripts: Iterable[PromptScript], options: PrepareOptions) -> Iterator[GenerationJob]:
    """All texts to generate, prompt by prompt. A prompt gets one greedy text at most, since a second one would be the same."""
    weights = options.weights or [1.0] * len(options.temperatures)
    thresholds = [cumulative / sum(weights) for cumulative in accumulate(weights)]
    for script in scripts:
        greedy = False
        for sample in range(options.samples):
            hash_bytes = hashlib.sha256(f"{options.seed}/{script.id}/{sample}".encode()).digest()
            draw = int.from_bytes(hash_bytes[:8]) / 2**64
            temperature = next(
                (t for t, threshold in zip(options.temperatures, thresholds, strict=True) if draw < threshold), None
            )
            temperature = options.temperatures[-1] if temperature is None else temperature
            if temperature > 0 or not greedy:
                # 31 bits: every server accepts such a seed
                yield GenerationJob(script, sample, temperature, int.from_bytes(hash_bytes[8:12]) >> 1)
            greedy = greedy or temperature == 0


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """A prompt as the target read it, and its reply as it wrote it, the end-of-turn token included."""

    prompt: list[int]
    reply: list[int]


def packed_turns(turns: Sequence[TokenTurn]) -> list[list[Any]]:
    """[number of first ids as in the turn before, the prompt's others, reply] of each turn: prompts grow from turn to turn."""
    packed, previous_ids = list[list[Any]](), list[int]()
    for turn in turns:
        pairs = enumerate(zip(previous_ids, turn.prompt, strict=False))
        common_prefix = next((i for i, (a, b) in pairs if a != b), min(len(previous_ids), len(turn.prompt)))
        packed.append([common_prefix, turn.prompt[common_prefix:], turn.reply])
        previous_ids = [*turn.prompt, *turn.reply]
    return packed


def documents_of(packed: Sequence[Sequence[Any]]) -> list[dict[str, list[int]]]:
    """The fewest texts that contain every reply after its own prompt, as `input_ids` and `loss_mask`.

    A turn that continues all ids of the one before stays in its text. Others, such as after a template that changes earlier
    turns, begin one of their own.
    """
    documents = list[dict[str, list[int]]]()
    for common_prefix, prompt_ids, reply in packed:
        ids = documents[-1]["input_ids"] if documents else []
        if not documents or common_prefix < len(ids):
            documents.append({"input_ids": ids[:common_prefix], "loss_mask": [0] * common_prefix})
        documents[-1]["input_ids"] += [*prompt_ids, *reply]
        documents[-1]["loss_mask"] += [0] * len(prompt_ids) + [1] * len(reply)
    return documents


@dataclass(slots=True)
class Dialogue:
    """A running job. Its user turns are sent one by one, each with the earlier turns and replies, and so are tool results."""

    job: GenerationJob
    messages: list[Message] = field(default_factory=list)  # turns and replies so far
    finish: list[str] = field(default_factory=list)  # finish reason of each reply
    tokens: list[int] = field(default_factory=list)  # number of tokens of each reply
    turns: list[TokenTurn | None] = field(default_factory=list)  # of each reply; None where its tokens are not known
    failed: str | None = None  # why the dialogue failed, if it did
    ended: str | None = None  # why it ended before its script, if it did
    _at: int = 0  # position in the script

    def next_prompt(self) -> list[Message] | None:
        """The conversation up to the next user turn or the results of calls; None when the dialogue has ended."""
        script, prompt = self.job.script.messages, list(self.messages)
        if self.failed or self.ended or self._at == len(script) or (self.finish and self.finish[-1] != "stop"):
            return None
        if self.finish:
            fitting = fitted(prompt[-1].get("tool_calls", []), *self._recorded())
            if isinstance(fitting, str):
                self.ended = fitting
                return None
            calls, results = fitting
            if results:
                self.messages = [*prompt[:-1], prompt[-1] | {"tool_calls": calls}, *results]
                self._at += 1 + len(results)
                return list(self.messages)
        for index in range(self._at, len(script)):
            if script[index]["role"] not in PROMPT_ROLES:
                self.ended = NO_CALL
                return None
            prompt.append(script[index])
            if script[index]["role"] == "user":
                self.messages, self._at = prompt, index + 1
                return list(prompt)
        return None

    def _recorded(self) -> tuple[list[Call], list[Message]]:
        """The calls that the record has next, and their results."""
        following = self.job.script.messages[self._at :]
        calls = following[0].get("tool_calls", [])
        return calls, list(takewhile(lambda message: message["role"] == TOOL, following[1 if calls else 0 :]))

    def add_reply(self, reply: Reply, tokens: int, turn: TokenTurn | None = None) -> None:
        """Append the target's reply to the last prompt. One with an unreadable call is left out, and ends the dialogue."""
        if reply.calls is None:
            self.ended = UNREADABLE
            return
        self.turns.append(turn)
        message: Message = {"role": ASSISTANT, "content": reply.text}
        message |= {"tool_calls": list(reply.calls)} if reply.calls else {}
        message |= {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        self.messages.append(message)
        self.finish.append(reply.finish)
        self.tokens.append(tokens)

    def fail(self, reason: str) -> None:
        """End the dialogue. Earlier turns are kept."""
        self.failed = reason

    def record(self) -> dict[str, Any]:
        """The journal's record: the conversation up to its last reply, and the reason if it failed."""
        job = self.job
        entry: dict[str, Any] = {"id": job.id, "prompt_id": job.script.id, "sample": job.sample}
        if self.failed is not None:
            entry["failed"] = self.failed
        entry |= {"ended": self.ended} if self.ended else {}
        if not self.finish:
            return entry
        last = max(i for i, m in enumerate(self.messages) if m["role"] == ASSISTANT)
        entry |= {"temperature": job.temperature, "seed": job.seed, "messages": self.messages[: last + 1]}
        entry |= {"finish": self.finish, "tokens": self.tokens}
        entry |= {ARGUMENTS: job.script.arguments} if job.script.arguments else {}
        entry |= {TOOLS: list(job.script.tools)} if job.script.tools else {}
        entry |= {ADAPTER: job.script.adapter} if job.script.adapter else {}
        token_turns = [turn for turn in self.turns if turn is not None]
        lacks_tokens = len(token_turns) < len(self.turns) or sources_of(self.messages)  # ids of images are this process's own
        return entry if lacks_tokens else entry | {"turns": packed_turns(token_turns)}


Finished = Callable[[Dialogue], None]  # called for every text that has ended
Tick = Callable[[int], None]  # called with numbers of new tokens


@dataclass(frozen=True)
class LocalGenerator:
    """The target answers prompts in this process, by our own decoder.

    With continuous batching a finished text frees its slot for the next. Adapters and temperatures run one after another, since
    a session has a single one.
    """

    decoder_at: Callable[[str | None, float], Decoder]  # for this adapter and temperature, with the limits of a reply
    tokenizer: PreTrainedTokenizerBase
    max_length: int  # tokens of a conversation, including a reply of maximal length
    batch_size: int  # texts decoded together
    images: Images = TEXT_ONLY  # of the target

    def answer(self, jobs: Sequence[GenerationJob], finished: Finished, tick: Tick) -> None:
        """Generate every job's text."""
        groups: dict[tuple[str, float], list[GenerationJob]] = {}
        for job in jobs:
            groups.setdefault((job.script.adapter or "", job.temperature), []).append(job)
        for (adapter, temperature), group in sorted(groups.items(), key=lambda item: item[0]):
            self._answer(self.decoder_at(adapter or None, temperature), group, finished, tick)

    def _answer(self, decoder: Decoder, jobs: list[GenerationJob], finished: Finished, tick: Tick) -> None:
        slots = min(self.batch_size, len(jobs))
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
        self.calls = cache(lambda: CallReader.of(tokenizer))
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
                script = dialogue.job.script
                tokens = encode_messages(self.tokenizer, messages, self.images, arguments=script.arguments, tools=script.tools)
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
        dialogue.add_reply(self._reply(dialogue, prompt, result), len(result.tokens), TokenTurn(prompt, result.tokens))
        self.submit(dialogue, finished)

    def _reply(self, dialogue: Dialogue, prompt: list[int], result: Result) -> Reply:
        ids, script = result.tokens[:-1] if result.ended_by == "stop" else result.tokens, dialogue.job.script
        continuation = Continuation.of_messages(
            self.tokenizer, prompt, dialogue.messages, self.images, script.arguments, script.tools
        )
        reply = Reply(continuation.text(ids), str(result.ended_by))
        if not script.tools or reply.finish != "stop" or (reader := self.calls()) is None:
            return reply
        text = text_following(self.tokenizer, continuation.context(ids), ids, special=True)
        before = text_alone(self.tokenizer, without_images(prompt), special=True)
        if not (fields := reader.read(text, before, script.tools)):
            return reply
        calls = fields["tool_calls"] and parsed_calls(fields["tool_calls"])
        return Reply(fields["content"], reply.finish, calls, fields.get("reasoning_content"))
