"""The two ways to answer the prompts of `prepare`: our decoder, or a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.data import PrepareOptions
from drafttrain.data.files import read_template
from drafttrain.data.forms import TOKENIZER
from drafttrain.data.generation_jobs import Dialogue, GenerationJob, LocalGenerator, PromptScripts
from drafttrain.data.provenance import template_hash, tokenizer_hash
from drafttrain.data.server import Server, ServerOptions, model_of
from drafttrain.data.templates import chat_template
from drafttrain.data.tool_calls import CallReader
from drafttrain.decoding.scheduler import Decoder
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget, load_target, load_tokenizer
from drafttrain.targets.parallel import Part

NEW_TOKENS = 1024  # of one reply, if nothing is given


class Answerer(Protocol):
    """Answers prompts: calls `finished` for each dialogue, and `tick` with the number of new tokens."""

    def answer(self, jobs: list[GenerationJob], finished: Callable[[Dialogue], None], tick: Callable[[int], None]) -> None: ...


def sampling_at(prepare: PrepareOptions, temperature: float) -> Sampling:
    """The sampling settings at a temperature. Raises ValueError for values out of range."""
    return Sampling(temperature, prepare.top_k, prepare.top_p, prepare.seed)


def reads_calls(options: RunOptions) -> bool:
    """Whether the target's tool calls can be read in its replies."""
    tokenizer = load_tokenizer(options.target)
    if options.data.template is not None:
        tokenizer.chat_template = read_template(options.data.template)
    return CallReader.of(tokenizer) is not None


def decoder_answerer(options: RunOptions, scripts: PromptScripts, part: Part | None) -> tuple[Answerer, dict[str, Any]]:
    """(our decoder, the settings that determine its replies). part: of a shared target."""
    loaded = load_target(options.target) if part is None else load_target(options.target, part)
    if options.data.template is not None:
        loaded.tokenizer.chat_template = read_template(options.data.template)
    template = _template(loaded.tokenizer, scripts)
    longest = min(options.prepare.max_length, loaded.target.shape.max_positions)
    prepare = with_new_tokens(options.prepare, longest)
    loaded.check_adapters(script.adapter for script in scripts.scripts)
    engine = LocalGenerator(
        lambda adapter, t: _decoder(loaded.of(adapter), prepare, t),
        loaded.tokenizer,
        longest,
        prepare.batch_size,
        loaded.images,
    )
    names = ("name", "path", "revision", "dtype", "weights", "architecture", "fingerprint")
    target = {name: loaded.description[name] for name in (*names, "adapters") if name in loaded.description}
    return engine, _record(target, None, template, prepare, longest, loaded.tokenizer)


def _template(tokenizer: PreTrainedTokenizerBase, scripts: PromptScripts) -> str | None:
    """The chat template. Without one a single prompt is plain text; raises UserError for conversations."""
    conversations = [script for script in scripts.scripts if len(script.messages) > 1 or script.tools]
    if not tokenizer.chat_template and not conversations:
        return None
    return chat_template(tokenizer, (conversations or scripts.scripts)[0].origin)


def with_new_tokens(prepare: PrepareOptions, longest: int | None = None) -> PrepareOptions:
    """The options with a limit of new tokens. longest: tokens of a conversation; half of them where the default has no room.

    Raises UserError for a given limit that leaves no room for a prompt.
    """
    max_new_tokens = prepare.max_new_tokens
    if max_new_tokens is None:
        default_limit = NEW_TOKENS if longest is None or longest > NEW_TOKENS else max(1, longest // 2)
        return replace(prepare, max_new_tokens=default_limit)
    if longest is not None and max_new_tokens >= longest:
        raise UserError(
            f"prepare.max_new_tokens is {max_new_tokens}, but a conversation has room for {longest} tokens "
            "(prepare.max_length, and the target's context); set it lower"
        )
    return prepare


def _decoder(loaded: LoadedTarget, prepare: PrepareOptions, temperature: float) -> Decoder:
    policy = "coupled" if temperature else "greedy"  # noise is keyed by request, so a reply does not depend on its batch
    sampling = sampling_at(prepare, temperature)
    return Decoder(loaded.target, None, policy, sampling, loaded.target.stop_ids, prepare.max_new_tokens or NEW_TOKENS)


def server_answerer(options: RunOptions, scripts: PromptScripts) -> tuple[Answerer, dict[str, Any]]:
    """(the server, the known settings that determine its replies). Its weights and template are not known."""
    prepare, target = with_new_tokens(options.prepare), options.target
    assert prepare.server is not None and prepare.max_new_tokens is not None
    key = os.environ.get(prepare.key_env) or None
    server = ServerOptions(
        prepare.server, prepare.model, key, prepare.concurrency, prepare.timeout, prepare.patience,
        prepare.max_new_tokens, prepare.top_p, prepare.top_k,
    )  # fmt: skip
    model, engine = model_of(server)
    tokenizer = load_tokenizer(target) if target.name != "embedded" else None
    template = None if tokenizer is None else _template(tokenizer, scripts)
    target_served = {
        "name": "served",
        "path": model if tokenizer is None else target.path,
        "revision": target.revision,
        "fingerprint": None,
    }
    record = _record(target_served, model, template, prepare, None, tokenizer)
    plain = tokenizer is not None and template is None
    return Server(replace(server, model=model), engine, tokenizer, plain), record


def _record(
    target: dict[str, Any],
    served_as: str | None,
    template: str | None,
    prepare: PrepareOptions,
    longest: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """The part of the provenance record that determines the replies. It must be equal for runs that share a journal."""
    names = ("temperatures", "weights", "top_p", "top_k", "seed", "max_new_tokens")
    sampling = {name: getattr(prepare, name) for name in names} | {"max_length": longest}
    record = {"target": target, "served_as": served_as, "template": template_hash(template), "sampling": sampling}
    return record if tokenizer is None else record | {TOKENIZER: tokenizer_hash(tokenizer, tokenizer.chat_template)}
