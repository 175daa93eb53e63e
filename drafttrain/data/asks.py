"""What is asked of the target: conversations without their replies, each once, and the texts that are to be written of each.

Which temperature and which noise a text gets is a function of (seed, its prompt, its number) alone: neither the order of the
prompts, nor how many processes share them, nor a restart changes a text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.data import PrepareOptions
from drafttrain.data.rules import Reply
from drafttrain.data.sources import ASSISTANT, Conversation

ASKED = ("system", "developer", "user")
TOO_LONG = "too_long"  # why a turn was not asked: it leaves no room for a reply
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation without its replies: one comes after each user turn. id: a hash of the text."""

    id: str
    script: tuple[Message, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class Asks:
    """asks: each prompt once. skipped: conversations by the reason why they are not among them."""

    asks: list[Ask]
    skipped: Counter[str]

    @property
    def digest(self) -> str:
        """sha256 of all prompts, in order."""
        return hashlib.sha256("".join(ask.id for ask in self.asks).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Job:
    """One text to be written: the sample-th of its prompt. seed: of its noise."""

    ask: Ask
    sample: int
    temperature: float
    seed: int

    @property
    def id(self) -> str:
        return f"{self.ask.id}-{self.sample}"


def read_asks(conversations: Iterable[Conversation]) -> Asks:
    """The conversations' prompts. Turns of tools depend on replies that are asked anew: such conversations are left out.

    Raises UserError when no prompt is left.
    """
    asks: dict[str, Ask] = {}
    skipped: Counter[str] = Counter()
    for conversation in conversations:
        if (reason := _unusable(conversation)) is not None:
            skipped[reason] += 1
            continue
        script = tuple({"role": m["role"], "content": m["content"]} for m in conversation.messages if m["role"] != ASSISTANT)
        text = json.dumps([[m["role"], m["content"].strip()] for m in script])
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        skipped["duplicate"] += name in asks
        asks.setdefault(name, Ask(name, script, conversation.origin))
    if not asks:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no record"
        raise UserError(f"data.path has no prompt to ask ({reasons}); give conversations with user turns")
    return Asks(list(asks.values()), +skipped)


def _unusable(conversation: Conversation) -> str | None:
    roles = [message["role"] for message in conversation.messages]
    if not roles:
        return "plain text"
    if any(role not in (*ASKED, ASSISTANT) for role in roles) or any("tool_calls" in m for m in conversation.messages):
        return "with tools"
    if not any(m["role"] == "user" and m["content"].strip() for m in conversation.messages):
        return "without a user turn"
    return None


def jobs_of(asks: Iterable[Ask], options: PrepareOptions) -> Iterator[Job]:
    """Every text to be written, prompt by prompt. A second greedy text of a prompt would be the first one again: it is not."""
    weights = options.weights or [1.0] * len(options.temperatures)
    bounds = [bound / sum(weights) for bound in accumulate(weights)]
    for ask in asks:
        greedy = False
        for sample in range(options.samples):
            word = hashlib.sha256(f"{options.seed}/{ask.id}/{sample}".encode()).digest()
            share = int.from_bytes(word[:8]) / 2**64
            temperature = next((t for t, b in zip(options.temperatures, bounds, strict=True) if share < b), None)
            temperature = options.temperatures[-1] if temperature is None else temperature
            if temperature > 0 or not greedy:
                # 31 bits: what every server takes as a seed
                yield Job(ask, sample, temperature, int.from_bytes(word[8:12]) >> 1)
            greedy = greedy or temperature == 0


@dataclass(slots=True)
class Dialogue:
    """A job under way: its user turns are asked one by one, each with the replies to those before it."""

    job: Job
    messages: list[Message] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of each reply
    failed: str | None = None
    _at: int = 0  # in the script

    def ask(self) -> list[Message] | None:
        """The conversation up to the next user turn; None when it has ended."""
        if self.failed or (self.finish and self.finish[-1] != "stop"):
            return None
        script, asked = self.job.ask.script, list(self.messages)
        for at in range(self._at, len(script)):
            asked.append(script[at])
            if script[at]["role"] == "user":
                self.messages, self._at = asked, at + 1
                return list(asked)
        return None

    def take(self, reply: Reply, tokens: int) -> None:
        self.messages.append({"role": ASSISTANT, "content": reply.text})
        self.finish.append(reply.finish)
        self.tokens.append(tokens)

    def fail(self, reason: str) -> None:
        """No further turn is asked; the turns before are kept."""
        self.failed = reason

    def record(self) -> dict[str, Any]:
        """What the journal keeps: the conversation up to its last reply, or why there is none."""
        job = self.job
        about: dict[str, Any] = {"id": job.id, "prompt_id": job.ask.id, "sample": job.sample}
        if self.failed is not None:
            about["failed"] = self.failed
        if not self.finish:
            return about
        last = max(i for i, m in enumerate(self.messages) if m["role"] == ASSISTANT)
        about |= {"temperature": job.temperature, "seed": job.seed, "messages": self.messages[: last + 1]}
        return about | {"finish": self.finish, "tokens": self.tokens}
