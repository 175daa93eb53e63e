"""Builds a decoder from the options. The baseline differs only in having no drafter."""

from __future__ import annotations

from dataclasses import replace

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.decoding.guards import Guard
from drafttrain.decoding.request import StopText
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.measure import DecodeOptions
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget


def sampling_of(decode: DecodeOptions) -> Sampling:
    """The sampling settings of these options."""
    return Sampling(
        decode.temperature,
        decode.top_k,
        decode.top_p,
        decode.seed,
        min_p=decode.min_p,
        repetition_penalty=decode.repetition_penalty,
        presence_penalty=decode.presence_penalty,
        frequency_penalty=decode.frequency_penalty,
        logit_bias=decode.logit_bias or {},
        draft_temperature=decode.draft_temperature,
    )


def stop_text_of(loaded: LoadedTarget, decode: DecodeOptions) -> StopText | None:
    """The strings that end an output; None without any."""
    tokenizer = loaded.tokenizer
    return StopText(tuple(decode.stop), lambda ids: str(tokenizer.decode(ids))) if decode.stop else None


def guard_of(loaded: LoadedTarget, decode: DecodeOptions) -> Guard:
    """The actions on outputs that go wrong. Raises ValueError for an unknown action."""
    options, tokenizer = decode.guard, loaded.tokenizer
    return Guard(options.loop, options.json, options.fence, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))


def idle_guards(decode: DecodeOptions) -> str | None:
    """A note on guards that have no effect under a lossless policy; None where there are none."""
    settings = [f"decode.guard.{name}=plain" for name in ("loop", "json") if getattr(decode.guard, name) == "plain"]
    if not settings or not (decode.policy in POLICIES and POLICIES[decode.policy].lossless):
        return None
    return (
        f"{' and '.join(settings)} has no effect: policy {decode.policy} is lossless, so plain decoding gives the same output; "
        "use stop to end it"
    )


def decoder_of(
    loaded: LoadedTarget,
    decode: DecodeOptions,
    drafter: Drafter | None,
    sampling: Sampling | None = None,
    max_new_tokens: int | None = None,
) -> Decoder:
    """A decoder of the target, with the drafter if there is one.

    sampling, max_new_tokens: instead of the options' values. Raises UserError for settings out of range or in conflict.
    """
    length = max_new_tokens or decode.max_new_tokens
    if not 0 <= decode.min_new_tokens <= decode.max_new_tokens:
        raise UserError(f"decode.min_new_tokens is {decode.min_new_tokens}; set it within 0 and decode.max_new_tokens")
    try:
        return Decoder(
            loaded.target,
            drafter,
            decode.policy,
            _drafting(sampling or sampling_of(decode), drafter),
            loaded.target.stop_ids,
            length,
            controls=Controls(
                depth_limit(decode, drafter), decode.window, parameter_of(decode), decode.fallback, decode.read_every
            ),
            min_new_tokens=min(decode.min_new_tokens, length),
            stop_text=stop_text_of(loaded, decode),
            guard=guard_of(loaded, decode),
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def parameter_of(decode: DecodeOptions) -> float | None:
    """The parameter of the policy, if it has one."""
    policy = POLICIES.get(decode.policy)
    return None if policy is None or policy.parameter is None else getattr(decode, policy.parameter)


def depth_limit(decode: DecodeOptions, drafter: Drafter | None) -> int | None:
    """The user's draft length, else the tuned one; None: as trained."""
    if decode.draft_length is not None or drafter is None:
        return decode.draft_length
    return drafter.proposal.preferred.draft_length


def _drafting(sampling: Sampling, drafter: Drafter | None) -> Sampling:
    """The sampling with the user's draft temperature, else the one tuned for this temperature."""
    preferred = None if drafter is None else drafter.proposal.preferred
    if preferred is None or sampling.draft_temperature is not None or sampling.temperature != preferred.temperature:
        return sampling
    return replace(sampling, draft_temperature=preferred.draft_temperature)
