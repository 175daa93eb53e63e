"""Decode with a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from drafttrain.api.drafter import LoadedDrafter
from drafttrain.api.settings import with_options
from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.data.forms import conversation
from drafttrain.data.prompts import encode_messages
from drafttrain.data.reply_text import Continuation
from drafttrain.decoding.request import Result
from drafttrain.measure import DecodeOptions
from drafttrain.measure.decoding import decoder_of
from drafttrain.targets.load import LoadedTarget

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Generation:
    """The text that follows one prompt."""

    text: str  # without special tokens; with the space before its first word, if the prompt ends without one
    tokens: list[int]  # new token ids, the stop token included
    accepted: list[int]  # accepted draft tokens of each decode step; empty without a drafter
    tau: float  # tokens per decode step, the bonus token included; NaN without a decode step
    ended_by: str  # stop: a stop token. text: a stop string. length: max_new_tokens


def generate(
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    temperature: float = 0.0,
    policy: str | None = None,
    chat: bool = True,
    **options: Any,
) -> list[Generation]:
    """Decode prompts, `batch_size` together. A finished text makes room for the next prompt.

    Args:
        target: The target.
        drafter: The drafter, or None for plain decoding.
        prompts: Of each text: a string, a list of messages that ends with a user's and may hold images, or token ids.
        max_new_tokens: Of each text.
        batch_size: Texts that are decoded together.
        temperature: 0 is greedy decoding.
        policy: How drafts are accepted: `greedy`, `lossless`, `coupled`, `typical` or `threshold` (docs/decoder.md). None:
            `greedy` at temperature 0, else `lossless`. These two leave the target's output as it is.
        chat: Apply the tokenizer's chat template, if it has one, to strings. False continues them.
        **options: More of the `decode` group: `top_p`, `top_k`, `seed`, `draft_length`, `stop`, ...

    Returns:
        One result per prompt, in their order.

    Raises:
        UserError: A prompt is empty or too long, an option is unknown or out of range, or the drafter is of another target.
    """
    overrides = {"max_new_tokens": max_new_tokens, "temperature": temperature, **options}
    decode = with_options(DecodeOptions(policy=policy or ("lossless" if temperature else "greedy")), overrides, "generate")
    check_limits("decode", decode)
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; set it to 1 or more")
    if drafter is not None:
        drafter.check(target)
    loaded = target if drafter is None else drafter.target
    decoder = decoder_of(loaded, decode, None if drafter is None else drafter.for_decoding())
    try:
        prompt_list = list(prompts)
        ids = [tokens_of(loaded, prompt, chat) for prompt in prompt_list]
        results = decoder.run(ids, batch_size).results
    except ValueError as error:  # an empty prompt, or one that leaves no room
        raise UserError(str(error)) from error
    continuations = [_continuation(loaded, *prompt_and_ids, chat) for prompt_and_ids in zip(prompt_list, ids, strict=True)]
    return [
        _generation(loaded, *result_and_continuation, drafter is not None)
        for result_and_continuation in zip(results, continuations, strict=True)
    ]


def tokens_of(loaded: LoadedTarget, prompt: Prompt, chat: bool) -> list[int]:
    """The token ids of a prompt. Raises UserError for an empty text."""
    tokenizer = loaded.tokenizer
    if (messages := _messages(loaded, prompt, chat)) is not None:
        return encode_messages(tokenizer, messages, loaded.images)
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    return list(cast("Sequence[int]", prompt))


def _messages(loaded: LoadedTarget, prompt: Prompt, chat: bool) -> list[dict[str, Any]] | None:
    """The prompt as a conversation; None if it is plain text or token ids. Raises UserError for an empty text."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("a prompt is empty; give text")
        return [{"role": "user", "content": prompt}] if chat and loaded.tokenizer.chat_template else None
    if not prompt or not isinstance(prompt[0], Mapping):
        return None
    messages = [dict(message) for message in cast("Sequence[Mapping[str, Any]]", prompt)]
    if any(isinstance(message.get("content"), list) for message in messages):
        messages = list(conversation("a prompt", {"messages": messages}, "messages", replies=False).messages)
    return messages


def _continuation(loaded: LoadedTarget, prompt: Prompt, ids: list[int], chat: bool) -> Continuation:
    """What follows the prompt with these ids."""
    messages = _messages(loaded, prompt, chat)
    if messages is None:
        return Continuation.of_ids(loaded.tokenizer, ids)
    return Continuation.of_messages(loaded.tokenizer, ids, messages, loaded.images)


def _generation(loaded: LoadedTarget, result: Result, continuation: Continuation, drafts: bool) -> Generation:
    text = continuation.text([token for token in result.tokens if token not in loaded.target.stop_ids])
    return Generation(text, result.tokens, result.runs if drafts else [], result.tau, result.ended_by or "length")
