"""Who answers the prompts of `prepare`, our own decoder or a server, and what decides the texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.data import PrepareOptions
from drafttrain.data.asks import Dialogue, Job
from drafttrain.data.provenance import template_hash
from drafttrain.data.regenerate import Engine
from drafttrain.data.server import Server, ServerOptions, model_of
from drafttrain.data.templates import chat_template, read_template
from drafttrain.decoding.decoder import Decoder
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget, load_target, load_tokenizer
from drafttrain.targets.parallel import Part


class Answerer(Protocol):
    def answer(self, jobs: list[Job], finished: Callable[[Dialogue], None], tick: Callable[[int], None]) -> None: ...


def sampling_at(asked: PrepareOptions, temperature: float) -> Sampling:
    return Sampling(temperature, asked.top_k, asked.top_p, asked.seed)


def decoder_answerer(options: RunOptions, part: Part | None) -> tuple[Answerer, dict[str, Any]]:
    """Our own decoder, and what decides its texts."""
    loaded = load_target(options.target) if part is None else load_target(options.target, part)
    if options.data.template is not None:
        loaded.tokenizer.chat_template = read_template(options.data.template)
    template = chat_template(loaded.tokenizer, f"data.path={options.data.path}")
    asked = options.prepare
    longest = min(asked.max_length, loaded.target.shape.max_positions)
    if asked.max_new_tokens >= longest:
        raise UserError(
            f"prepare.max_new_tokens is {asked.max_new_tokens}, a conversation has room for {longest} tokens "
            "(prepare.max_length, and the target's context); set it lower"
        )
    engine = Engine(lambda t: _decoder(loaded, asked, t), loaded.tokenizer, longest, asked.batch_size)
    names = ("name", "path", "revision", "dtype", "weights", "architecture", "fingerprint")
    target = {name: loaded.description[name] for name in names}
    return engine, _about(target, None, template, asked, longest)


def _decoder(loaded: LoadedTarget, asked: PrepareOptions, temperature: float) -> Decoder:
    policy = "coupled" if temperature else "greedy"  # the noise of a position is the request's, whoever it is decoded with
    sampling = sampling_at(asked, temperature)
    return Decoder(loaded.target, None, policy, sampling, loaded.target.stop_ids, asked.max_new_tokens)


def server_answerer(options: RunOptions) -> tuple[Answerer, dict[str, Any]]:
    """The server, and what decides its texts as far as it is known: its weights and its template are its own affair."""
    asked, target = options.prepare, options.target
    assert asked.server is not None
    key = os.environ.get(asked.key_env) or None
    reached = ServerOptions(
        asked.server, asked.model, key, asked.concurrency, asked.timeout, asked.patience,
        asked.max_new_tokens, asked.top_p, asked.top_k,
    )  # fmt: skip
    model = model_of(reached)
    named = target.name != "embedded"
    template = chat_template(load_tokenizer(target), f"data.path={options.data.path}") if named else None
    target_served = {
        "name": "served",
        "path": target.path if named else model,
        "revision": target.revision,
        "fingerprint": None,
    }
    about = _about(target_served, model, template, asked, None)
    return Server(replace(reached, model=model)), about


def _about(
    target: dict[str, Any], served_as: str | None, template: str | None, asked: PrepareOptions, longest: int | None
) -> dict[str, Any]:
    """What decides the texts: of the provenance record, the part that must not change between runs that share a journal."""
    names = ("temperatures", "weights", "top_p", "top_k", "seed", "max_new_tokens")
    sampling = {name: getattr(asked, name) for name in names} | {"max_length": longest}
    return {"target": target, "served_as": served_as, "template": template_hash(template), "sampling": sampling}
