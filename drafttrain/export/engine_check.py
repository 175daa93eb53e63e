"""The engine check: does an engine draft with an export as our decoder does with its checkpoint?

The engine must give the target's own output, and accept as many drafts in every sequence as our decoder's greedy chains. The
output alone tells little, because verification corrects a broken drafter's drafts.

Shapes: B rows, R logit rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch

from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters.checkpoint import filled
from drafttrain.engines.process import EngineResult, PromptCounts
from drafttrain.export.compressed import Compression, narrow_weights
from drafttrain.export.files import DTYPES
from drafttrain.export.opened import Opened
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Target, TargetOut

GREEDY = Sampling(0.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a sequence: one of these tokens, or a number of tokens."""

    stop_ids: frozenset[int]
    max_new_tokens: int

    def of(self, tokens: Sequence[int]) -> int:
        """The number of tokens up to the end."""
        stops = (i + 1 for i, token in enumerate(tokens) if token in self.stop_ids)
        return min(next(stops, len(tokens)), self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class DecodedSequence:
    """A sequence decoded past its end."""

    tokens: list[int]
    accepted: list[int]  # accepted drafts of each decode step
    first: int  # tokens before the first decode step

    def counted(self, ending: Ending, ends: str) -> list[int]:
        """Accepted drafts of each decode step that belongs to the sequence. ends: the count of the last step, as for an engine
        (`drafttrain.engines.process`).

        Example: a sequence of 5 tokens, the first from the prefill. Steps that accept 2 and 3 drafts yield 3 and 4 tokens, of
        which 3 and 1 are kept. The last step counts 3 as `whole`, 1 as `cut`, 0 as `capped`, and 0 as `none`.
        """
        end, position, counts = ending.of(self.tokens), self.first, list[int]()
        for accepted in self.accepted:
            if position >= end:
                break
            kept_tokens, is_last = min(accepted + 1, end - position), position + accepted + 1 >= end
            accepted_by_end = {"whole": accepted, "cut": min(accepted, kept_tokens), "capped": kept_tokens - 1, "none": 0}
            counts.append(accepted_by_end[ends] if is_last else accepted)
            position += accepted + 1
        return counts


class ForcedFirstToken:
    """A target whose prefill yields a given token, for an engine that drafts after the prompt's own last token.

    The prompt is given without that token.
    """

    def __init__(self, target: Target, token: int) -> None:
        self._target, self._token = target, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, token_BN: Any, kv: Any, ancestor_BNN: Any, *args: Any, **kwargs: Any) -> TargetOut:
        out = self._target(token_BN, kv, ancestor_BNN, *args, **kwargs)
        if ancestor_BNN is not None or kv is None or out.logits_BRV is None:
            return out
        logits_BRV = torch.full_like(out.logits_BRV, -torch.inf)
        logits_BRV[..., self._token] = 0.0
        return TargetOut(logits_BRV, out.hidden)


def chain_drafter(opened: Opened, draft_length: int, dtype: str, quantize: str | None = None) -> Drafter:
    """The checkpoint's drafter with weights rounded or quantised as they were exported, drafting one chain.

    Raises UserError for a length that the drafter does not support.
    """
    options = opened.meta.options | ({"tree": "chain", "paths": None} if "tree" in opened.meta.options else {})
    meta = dataclasses.replace(opened.meta, options=options, decode={})
    drafter = filled(opened.directory, meta, opened.loaded.target, opened.tensors).requires_grad_(False)
    if not 1 <= draft_length <= drafter.draft_length:
        raise UserError(
            f"decode.draft_length is {draft_length}; this drafter drafts {drafter.draft_length}, set it from 1 to that"
        )
    compression = None if quantize is None else Compression.of(quantize, opened.tensors)
    narrow_weights(drafter, DTYPES[dtype], compression)
    return drafter


def decoded(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    ending: Ending,
    length: int,
    begins: str,
    sampling: Sampling = GREEDY,
) -> DecodedSequence:
    """The decode steps of one prompt, up to the one that ends the sequence. length: of the chains. begins: `plain` or
    `drafted`, as for an engine.

    Raises UserError for a prompt that leaves no room for an answer.
    """
    if begins == "drafted" and len(prompt) < 2:
        raise UserError("a prompt has one token, and this engine drafts from the first token on; make it longer")
    forced = begins == "drafted"
    decode_target: Any = ForcedFirstToken(target, prompt[-1]) if forced else target
    controls = Controls(draft_length=length, capture=False)
    max_new_tokens = ending.max_new_tokens + length + 1 + forced  # so that no counted step is cut off
    decoder = Decoder(decode_target, drafter, "greedy", sampling, max_new_tokens=max_new_tokens, controls=controls)
    request = decoder.request(prompt[:-1] if forced else prompt)
    try:
        session = Session(decoder, 1, decoder.positions(request))
    except ValueError as error:
        raise UserError(str(error)) from error
    (result,) = session.submit(request)
    accepted = [chunk.drafted for chunk in session][1:]
    return DecodedSequence(result.tokens[forced:], accepted, 0 if forced else 1)


def plain(target: Target, prompts: Sequence[Sequence[int]], ending: Ending) -> list[list[int]]:
    """The target's own greedy output for each prompt."""
    decoder = Decoder(target, None, "greedy", GREEDY, ending.stop_ids, ending.max_new_tokens)
    return [result.tokens for result in decoder.run(prompts).results]


@dataclass(frozen=True, slots=True)
class SequenceCheck:
    """One sequence."""

    prompt: str
    tokens: int  # number of tokens of the target's own output
    differs: int | None  # index of the engine's first token that differs from the target's own; None: equal
    ours: int  # accepted drafts by our count
    theirs: int | None  # accepted drafts by the engine's count; None if it counts only sums

    @property
    def holds(self) -> bool:
        """Whether output and accepted drafts agree."""
        return self.differs is None and self.theirs in (None, self.ours)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The sums over all sequences, and each of them."""

    engine: str
    versions: dict[str, str]
    draft_length: int
    ours: int
    theirs: int
    tau: float | None  # tokens per decode step in our decoder, past the sequences' ends too; None without steps
    ours_by_position: list[int]  # accepted drafts by position; as many positions as the engine counts
    theirs_by_position: list[int]
    lines: list[SequenceCheck]
    tolerance: float = 0.0  # share of the accepted drafts that may differ

    @property
    def same_texts(self) -> int:
        """The number of sequences with the target's own output."""
        return sum(line.differs is None for line in self.lines)

    @property
    def holds(self) -> bool:
        """Whether everything agrees."""
        if self.tolerance:
            close = abs(self.theirs - self.ours) <= max(1.0, self.tolerance * self.ours)
            return close and self.same_texts == len(self.lines)
        same = self.ours == self.theirs and self.ours_by_position == self.theirs_by_position
        return same and all(line.holds for line in self.lines)

    def check(self) -> None:
        """Raise ParityError, naming the difference, unless the check holds."""
        if self.same_texts < len(self.lines):
            raise ParityError(
                "output", f"{len(self.lines) - self.same_texts} of {len(self.lines)} texts are not the target's own"
            )
        if not self.holds:
            sums = f"{self.engine} accepts {self.theirs}, our decoder {self.ours} of the same chains"
            raise ParityError("accepted drafts", sums if self.ours != self.theirs else f"{sums}, but {self._difference()}")

    def _difference(self) -> str:
        """The part that differs although the sums are equal."""
        mismatches = [line for line in self.lines if not line.holds]
        if mismatches:
            line = mismatches[0]
            return f"not of the same texts: of prompt {line.prompt} it accepts {line.theirs}, we {line.ours}"
        return f"not at the same positions: {self.theirs_by_position} there, {self.ours_by_position} here"

    def as_json(self) -> dict[str, Any]:
        """The check as the content of verification.json."""
        return asdict(self) | {"holds": self.holds, "same_texts": self.same_texts}


def engine_check(
    outcome: EngineResult,
    names: Sequence[str],
    own: Sequence[Sequence[int]],
    sequences: Sequence[DecodedSequence],
    ending: Ending,
    draft_length: int,
    tolerance: float = 0.0,
) -> EngineCheck:
    """Compare an engine's result with our own. names: of the prompts. own: the target's plain greedy output. sequences: our
    decode steps, which begin as the engine's do. tolerance: as in `EngineCheck`.
    """
    lines, counts, accepted_counts = [], list[int](), list[int]()
    engine_counts: Sequence[PromptCounts | None] = outcome.prompts or [None] * len(names)
    for name, target_tokens, engine_tokens, sequence, prompt_counts in zip(
        names, own, outcome.outputs, sequences, engine_counts, strict=True
    ):
        step_counts = sequence.counted(ending, outcome.ends)
        counts += step_counts
        accepted_counts += sequence.counted(ending, "whole")
        differs = first_difference(target_tokens, engine_tokens, ending.stop_ids)
        lines.append(
            SequenceCheck(
                name, len(target_tokens), differs, sum(step_counts), None if prompt_counts is None else prompt_counts.accepted
            )
        )
    by_position = outcome.accepted_by_position or []
    return EngineCheck(
        outcome.engine,
        outcome.versions,
        draft_length,
        sum(counts),
        outcome.accepted,
        1.0 + sum(accepted_counts) / len(accepted_counts) if accepted_counts else None,
        [sum(count > i for count in counts) for i in range(len(by_position))],
        by_position,
        lines,
        tolerance,
    )


def first_difference(text: Sequence[int], output: Sequence[int], stop_ids: frozenset[int]) -> int | None:
    """Index of the first token that differs; None for the same output. The token that ended it may be left out."""
    target_ids, engine_ids = ([*tokens[:-1], *(t for t in tokens[-1:] if t not in stop_ids)] for tokens in (text, output))
    return next((i for i, (a, b) in enumerate(zip_longest(target_ids, engine_ids)) if a != b), None)
