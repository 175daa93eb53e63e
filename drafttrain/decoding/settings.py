"""The settings of a scheduler: target, drafter, policy, and limits of all its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.acceptance import policy_for
from drafttrain.decoding.draft_length import Cut, Fallback
from drafttrain.decoding.graph_runner import RING, capturable
from drafttrain.decoding.guards import Guard
from drafttrain.decoding.request import Request, StopText
from drafttrain.model.drafter import Drafter
from drafttrain.model.images import FIRST, has_images
from drafttrain.model.target import Target


@dataclass(frozen=True, slots=True)
class Controls:
    """How decode steps run."""

    draft_length: int | None = None  # deepest proposal; None: as trained
    window: int | None = None  # drafts of a path that one verification gets at most
    parameter: float | None = None  # of policies that have one; None: its default
    fallback: bool = False  # draft and verify only as far as it saves time (`Fallback`, `Cut`)
    read_every: int | None = None  # steps launched before the host reads earlier results; None: 1 where steps are captured as
    # CUDA graphs, elsewhere each step is run and read by itself
    capture: bool = True  # False for weights that change soon

    def __post_init__(self) -> None:
        if self.read_every is not None and not 1 <= self.read_every <= RING:
            raise ValueError(f"decode.read_every is {self.read_every}; set it within 1 and {RING}, or leave it out")
        for name in ("draft_length", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"decode.{name} is {value}; set it to 1 or more, or leave it out")


class DecoderSettings:
    """Target, drafter, policy and settings of a session. drafter None: plain decoding with the same target, cache and sampler.

    `prefill_chunk` bounds the positions of one prefill pass. stop_ids and the parameters named like those of `Request` are
    for `request`. Guards with action `plain` are off if the output is plain decoding's anyway: without a drafter, or with a
    lossless policy.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: str,
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        max_new_tokens: int = 128,
        prefill_chunk: int = 512,
        controls: Controls = Controls(),
        min_new_tokens: int = 0,
        stop_text: StopText | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.target, self.drafter, self.controls = target, drafter, controls
        self.policy = policy_for(policy, sampling, controls.parameter)
        self.sampling = replace(sampling, shared_noise=self.policy.keyed)
        if drafter is not None and not target.trees and any(set(path) != {0} for path in drafter.proposal.paths):
            raise UserError("the drafter proposes trees; this target's architecture is exact for chains only: draft a chain")
        if drafter is not None:
            _check_depth(controls, drafter.draft_length)
        if unknown := [token for token in sampling.logit_bias if not 0 <= token < target.shape.vocab_size]:
            raise ValueError(
                f"decode.logit_bias has token {unknown[0]}; the target has token ids from 0 to {target.shape.vocab_size - 1}"
            )
        self.prefill_chunk = prefill_chunk
        self._text: dict[str, Any] = {"stop_ids": stop_ids, "max_new_tokens": max_new_tokens}
        self._text |= {"min_new_tokens": min_new_tokens, "stop_text": stop_text}
        guard = guard or Guard()
        self.guard = guard.without("plain") if drafter is None or self.policy.lossless else guard
        self.may_fall_back = self.guard != self.guard.without("plain")
        self.captures = controls.capture and capturable(target, drafter)
        self.read_every = controls.read_every or (1 if self.captures else None)
        self.reach = 1 + (drafter.draft_length if drafter else 0)  # tokens of one decode step at most
        # a proposal may reach past the last token that counts, and steps may begin before the host knows that a text has
        # ended: their scratch positions need room too
        largest = 1 if drafter is None else drafter.max_new_positions if self.read_every else drafter.proposal.max_nodes
        self.scratch = largest + (2 * self.reach if self.read_every else 0)
        self.fallback, self.cut = None, None
        if drafter is not None and controls.fallback:
            self.cut = Cut()
            self.fallback = Fallback(min(drafter.draft_length, controls.draft_length or drafter.draft_length))

    def positions(self, request: Request) -> int:
        """Cache positions that one text of this request may need. Raises ValueError for one that the target cannot hold."""
        text, limit = len(request.prompt) + request.max_new_tokens, self.target.shape.max_positions
        if not self.fits(request):
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens + max_new_tokens {request.max_new_tokens} exceed the target's "
                f"{limit}; shorten the prompt or lower decode.max_new_tokens"
            )
        return text + self.scratch

    def fits(self, request: Request) -> bool:
        """Whether the target has positions for the prompt and an answer of full length."""
        return len(request.prompt) + request.max_new_tokens <= self.target.shape.max_positions

    def request(self, prompt: Sequence[int], key: int = 0, as_json: bool = False) -> Request:
        """A request with the decoder's own limits. as_json: its text is meant to be JSON.

        Raises ValueError for a prompt with images that the target or the drafter cannot read, UserError for one with a token
        that the target does not have: some tokenizers have a few more tokens than their model.
        """
        if (highest := max((i for i in prompt if i < FIRST), default=0)) >= (count := self.target.shape.vocab_size):
            raise UserError(f"a prompt has token {highest}, which is none of the target's {count}; remove it from the text")
        if has_images(prompt) and (self.target.placeholder is None or (self.drafter is not None and not self.drafter.images)):
            raise ValueError("a prompt has an image, but the target or the drafter reads text alone; leave the image out")
        return Request(prompt, key, **self._text, guard=self.guard.of(as_json))


def _check_depth(controls: Controls, deepest: int) -> None:
    """Raise ValueError for limits beyond the drafter's deepest proposal: a report would name what no draft reaches."""
    for name in ("draft_length", "window"):
        limit = getattr(controls, name)
        if limit is not None and limit > deepest:
            raise ValueError(
                f"decode.{name} is {limit}, but this drafter drafts {deepest} tokens ahead at most; set it to {deepest} or "
                "less, or leave it out"
            )
