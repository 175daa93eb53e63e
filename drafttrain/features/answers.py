"""Answers that the target writes in an engine: the request for one, and what is checked of it.

Shapes: T tokens, A tokens of an answer, K keys of states, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

# The request says all of these: what it leaves out, vLLM takes from the model's generation_config.json.
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

GAP, GAPS = (
    1.0,
    0.1,
)  # greedy: share of tokens that may be so many nats less likely than the likeliest; rounding swaps near ones
DEVIATIONS, ROUNDING = 6.0, 0.05  # sampled: standard deviations of an answer's log-likelihood, and nats a token


class AnswerError(Exception):
    """An answer that is not whole. Another request may give a good one."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How the target writes answers."""

    temperature: float  # 0: greedy
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # tokens that end an answer
    longest: int  # tokens of a prompt and its answer


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A prompt to be continued. The same request gets the same answer, but for the engine's rounding."""

    prompt: list[int]
    seed: int  # of the answer's noise
    room: int  # tokens of the longest answer
    writing: Writing

    def fields(self) -> dict[str, Any]:
        """The fields of vLLM's completion request. Only the trainer's own stop ids end an answer."""
        writing = self.writing
        sampling = PLAIN_SAMPLING | {"temperature": writing.temperature, "seed": self.seed, "max_tokens": self.room}
        stopping = {"stop_token_ids": list(writing.stop_ids), "ignore_eos": True}
        states = {"return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}
        return sampling | stopping | states

    def read(self, answer: Any) -> list[int]:
        """The answer's token ids, its end token included.

        Raises KeyError, IndexError, TypeError or ValueError for another form, and AnswerError for an answer that is not whole.
        """
        choice = answer["choices"][0]
        ids, finish = [int(i) for i in choice["token_ids"]], choice["finish_reason"]
        stopped = finish == "stop" and ids[-1:] and ids[-1] in self.writing.stop_ids and len(ids) <= self.room
        if not stopped and not (finish == "length" and len(ids) == self.room):
            raise AnswerError(f"an answer of {len(ids)} tokens that ended by {finish!r}, at most {self.room} were asked for")
        return ids


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and the states of the prompt and of the answer without its last token, which the engine never computes."""

    token_ids: list[int]
    hidden_TKH: Tensor

    def cut(self, writing: Writing) -> bool:
        """Whether it ended without an end token."""
        return self.token_ids[-1] not in writing.stop_ids


def unlikely(logits_AV: Tensor, token_A: Tensor, temperature: float) -> str | None:
    """Why the target does not write these tokens where it has these logits; None where it may.

    A greedy answer has the likeliest tokens. The log-likelihood of a sampled one scatters around the distributions' negative
    entropies; it is hardly ever more than 6 standard deviations below.
    """
    logits_AV = logits_AV.double()
    if temperature == 0:
        gap_A = logits_AV.amax(1) - logits_AV.gather(1, token_A[:, None])[:, 0]
        fraction = float((gap_A > GAP).double().mean())
        return None if fraction <= GAPS else f"{fraction:.0%} of a greedy answer's tokens are not the target's likeliest"
    log_p_AV = (logits_AV / temperature).log_softmax(1)
    p_AV = log_p_AV.exp()
    mean_A = (p_AV * log_p_AV.clamp_min(-1e4)).sum(1)
    variance_A = (p_AV * (log_p_AV.clamp_min(-1e4) - mean_A[:, None]) ** 2).sum(1)
    log_p = float(log_p_AV.gather(1, token_A[:, None]).sum())
    expected, deviation = float(mean_A.sum()), float(variance_A.sum().sqrt())
    if log_p >= expected - DEVIATIONS * deviation - ROUNDING * len(token_A):
        return None
    return (
        f"its log-likelihood under the target is {log_p / len(token_A):.2f} nats a token, that of answers which the target "
        f"samples is {expected / len(token_A):.2f}"
    )
