"""transformers' assisted generation with an exported drafter; the form of job and result is explained in
drafttrain/engines/process.py, that of a timed one in drafttrain/engines/timed_process.py.

Its candidate generators are told after every verification how many drafts matched; that is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch

ASSISTANTS = {"draft_model": "AutoModelForCausalLM", "dflash": "AutoModel"}


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    target, assisted = loaded(job, "float32", "cpu", True)
    rounds = recorded(target)
    outputs, counts = [], []
    for prompt in job["prompts"]:
        rounds.clear()
        outputs.append(generated(target, prompt, job, assisted))
        counts.append([(drafted, accepted) for drafted, accepted, _ in rounds])
    matched = [accepted for text in counts for _, accepted in text]
    return {
        "engine": "transformers",
        "versions": versions(),
        "outputs": outputs,
        "accepted": sum(matched),
        "drafted": sum(drafted for text in counts for drafted, _ in text),
        "accepted_by_position": [sum(accepted > i for accepted in matched) for i in range(job["draft_length"])],
        "prompts": [{"accepted": sum(a for _, a in text), "drafted": sum(d for d, _ in text)} for text in counts],
        "begins": begins(job["family"]),
        "ends": "capped",
        "notes": [],
    }


@contextmanager
def opened(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[list[int]], dict[str, Any]]]]:
    timed = job["timed"]
    torch.set_num_threads(timed["threads"])
    drafts, behind = timed["speculative"], begins(job["family"]) == "plain"
    target, assisted = loaded(job, timed["dtype"], timed["device"], drafts)
    rounds, watch = recorded(target), Stopwatch()

    def answer(wave: list[int]) -> dict[str, Any]:
        (prompt,) = (job["prompts"][i] for i in wave)
        rounds.clear()
        watch.first, began = None, perf_counter()
        tokens = generated(target, prompt, job, assisted if drafts else {"stopping_criteria": [watch]})
        ended = perf_counter()
        ahead, first = (1 + rounds[0][1], rounds[0][2]) if rounds else (1, watch.first or ended)
        text = {"tokens": tokens, "first": first - began, "ended": ended - began, "ahead": min(ahead, len(tokens))}
        told = rounds[behind:]  # where nothing is drafted behind the prompt itself, the first one is the prefill
        counts = (len(told), sum(d for d, _, _ in told), sum(a for _, a, _ in told)) if drafts else (None, None, None)
        return {"texts": [text], **dict(zip(("verifications", "drafted", "accepted"), counts, strict=True))}

    yield {"versions": versions(), "begins": begins(job["family"])}, answer


def loaded(job: dict[str, Any], dtype: str, device: str, drafts: bool) -> tuple[Any, dict[str, Any]]:
    """The target, and what generate() is told beside it, so that it drafts."""
    import transformers

    family, width = job["family"], getattr(torch, dtype)
    if family not in ASSISTANTS:
        raise ValueError(f"generate() takes no drafter of the family {family}")
    target: Any = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=width)
    target = target.to(device).eval()
    if not drafts:
        return target, {}
    assistant = getattr(transformers, ASSISTANTS[family]).from_pretrained(job["drafter"], dtype=width).to(device).eval()
    if family == "dflash" and assistant.config.block_size != job["draft_length"] + 1:
        raise ValueError(f"blocks of {assistant.config.block_size} draft {assistant.config.block_size - 1} tokens, no others")
    if family == "draft_model":
        settings = {"num_assistant_tokens": job["draft_length"], "num_assistant_tokens_schedule": "constant"}
        assistant.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    kind = {"speculation_type": "dflash"} if family == "dflash" else {}
    return target, {"assistant_model": assistant, **kind}


def generated(target: Any, prompt: list[int], job: dict[str, Any], more: dict[str, Any]) -> list[int]:
    ids = torch.tensor([prompt], device=target.device)
    text = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=job["max_new_tokens"],
        eos_token_id=job["stop_ids"] or None, **more,
    )  # fmt: skip
    tokens: list[int] = text[0, len(prompt) :].tolist()
    return tokens


def begins(family: str) -> str:
    return "plain" if family == "dflash" else "drafted"


def versions() -> dict[str, str]:
    return {"transformers": version("transformers"), "torch": version("torch")}


class Stopwatch:
    """A stopping criterion that stops nothing, and notes when the first token is there."""

    first: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        self.first = self.first or perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def recorded(target: Any) -> list[tuple[int, int, float]]:
    """(drafted, accepted, when) of every verification to come, in a list that grows."""
    rounds: list[tuple[int, int, float]] = []
    make = target._get_candidate_generator

    def made(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        update = generator.update_candidate_strategy

        def told(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            rounds.append((scores.shape[1] - 1, int(num_matches), perf_counter()))
            return update(input_ids, scores, num_matches)

        generator.update_candidate_strategy = told
        return generator

    target._get_candidate_generator = made
    return rounds
