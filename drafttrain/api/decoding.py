"""Decode with a drafter, and measure one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from drafttrain.api.drafter import LoadedDrafter, for_recipe, save_drafter
from drafttrain.api.settings import given, with_options
from drafttrain.cli.main import user_errors
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_text, new_directory
from drafttrain.core.limits import check_limits
from drafttrain.data.forms import conversation
from drafttrain.data.prompts import encode_messages
from drafttrain.data.reply_text import Continuation
from drafttrain.decoding.request import Result
from drafttrain.drafters.checkpoint import read_meta
from drafttrain.measure import DecodeOptions
from drafttrain.measure.decoding import decoder_of
from drafttrain.measure.runner import CheckpointRef
from drafttrain.runs.options import dated_path
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
        **options: More of the `decode` group: `top_p`, `top_k`, `seed`, `stop`, ... `draft_length` cuts the proposal as it was
            trained; what was tuned has no effect then.

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
    module = None if drafter is None else drafter.for_decoding()
    if module is not None and decode.draft_length is None:
        module.use_batch_size(batch_size)
    elif module is not None and drafter is not None and drafter.checkpoint is not None:  # a length by hand cuts the trained one
        module.use_decode_settings(read_meta(drafter.checkpoint).decode)
    decoder = decoder_of(loaded, decode, module)
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
    return list(cast(Sequence[int], prompt))


def _messages(loaded: LoadedTarget, prompt: Prompt, chat: bool) -> list[dict[str, Any]] | None:
    """The prompt as a conversation; None if it is plain text or token ids. Raises UserError for an empty text."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("a prompt is empty; give text")
        return [{"role": "user", "content": prompt}] if chat and loaded.tokenizer.chat_template else None
    if not prompt or not isinstance(prompt[0], Mapping):
        return None
    messages = [dict(message) for message in cast(Sequence[Mapping[str, Any]], prompt)]
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


PROMPTS, DRAFTER = "prompts.jsonl", "drafter"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The headline figures of a report. docs/metrics.md defines them all."""

    tau: float | None  # tokens per verification, the bonus token included; None without a verification
    alpha: float | None  # share of offered drafts that were accepted
    speedup: float | None  # plain decoding's time per token / this drafter's, median over the repeats; None if not timed
    tokens_per_s: float | None  # with the drafter, after each text's first token
    plain_tokens_per_s: float | None  # without
    prompts: int  # texts that were compared
    exact_matches: int | None  # texts whose tokens are plain decoding's; None when sampling
    folder: Path  # report.html, report.md, report.json
    report: dict[str, Any]  # report.json (docs/report-schema.md)

    @property
    def exact(self) -> bool | None:
        """Whether every text has plain decoding's tokens; None when sampling. In bfloat16 rounding can change a token."""
        return None if self.exact_matches is None else self.exact_matches == self.prompts


def measure_drafter(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    *,
    prompts: str | Path | Sequence[str | Sequence[str]] = "embedded",
    max_new_tokens: int | None = None,
    minutes: float | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Measurement:
    """Measure acceptance, speed and exactness against plain decoding of the same target, and write a report.

    Args:
        target: The target that the drafter was built for.
        drafter: The drafter. One that was not loaded from a checkpoint is saved to `<out>/drafter` first.
        prompts: A list of texts (or of lists of a user's turns), a prompt file, or public sets by name (`mt_bench`).
        max_new_tokens: Of each text (`decode.max_new_tokens`).
        minutes: Time budget (`measure.minutes`). When it is short, fewer repeats and prompts are timed.
        out: The report's folder. None: `outputs/measure/<time>`.
        settings: Any other key of the groups `measure` and `decode`: `{"decode": "sampling", "measure.batch_sizes": [1, 8]}`.
        quiet: Print nothing.

    Returns:
        The figures. With a drafter that adapts the target, `exact` compares with the adapted target.

    Raises:
        UserError: The prompts cannot be read, a setting is unknown, or the drafter is of another target.
    """
    from drafttrain.commands.measure import measure_run, measured, print_report, write_anew  # it imports DeepSpeed's callers

    drafter.check(target)
    overrides = given({"decode.max_new_tokens": max_new_tokens, "measure.minutes": minutes})
    options = for_recipe(drafter.recipe, {**drafter.settings, **overrides, **(settings or {})}, target).options
    is_named, base, console = isinstance(prompts, str | Path), dated_path("outputs", "measure"), Console(quiet=quiet)
    folder = Path(out) if out is not None else None
    if folder is not None:
        _keep(folder, prompts, drafter)
    elif not is_named or drafter.checkpoint is None:
        folder = new_directory(base, lambda staging_dir: _keep(staging_dir, prompts, drafter))
    options.prompts = str(prompts if is_named or folder is None else folder / PROMPTS)
    path = drafter.checkpoint or (folder or base) / DRAFTER
    refs = [CheckpointRef(path.name, path, None)]
    with user_errors():
        if folder is not None:
            report = measure_run(target, refs, options, folder, console)
        else:
            report = measured(target, refs, options, console)
            folder = write_anew(base, report, target)
            print_report(report, folder, console)
    entry = report["checkpoints"][0]
    return Measurement(
        tau=entry["tau"],
        alpha=entry["alpha"],
        speedup=entry["speedup"],
        tokens_per_s=entry["tokens_per_s"],
        plain_tokens_per_s=entry["baseline_tokens_per_s"],
        prompts=entry["prompts"],
        exact_matches=entry["exact_matches"],
        folder=folder,
        report=report,
    )


def _keep(folder: Path, prompts: str | Path | Sequence[str | Sequence[str]], drafter: LoadedDrafter) -> None:
    """Write what has no file yet next to the report, which names it: prompts given as texts, and the drafter."""
    if drafter.checkpoint is None:
        save_drafter(drafter, folder / DRAFTER)
    if isinstance(prompts, str | Path):
        return
    turns = [[prompt] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    lines = [json.dumps({"question_id": i, "category": "own", "turns": turn}) for i, turn in enumerate(turns, start=1)]
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / PROMPTS, "\n".join(lines) + "\n")
