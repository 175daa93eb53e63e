"""transformers' assisted generation with an exported drafter. drafttrain/engines/process.py explains the form of job and
result, drafttrain/engines/timed_process.py that of a timed job.

After every decode step, transformers passes the number of matching drafts to its candidate generator. That is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch

ASSISTANTS = {"draft_model": "AutoModelForCausalLM", "dflash": "AutoModel"}
STITCHED = "mtp_native"  # the exported directory is the target with its module, which generate() reads itself
FAMILIES = (*ASSISTANTS, STITCHED)


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    """Decode every prompt of a job."""
    target, draft_kwargs = loaded(job, "float32", "cpu", True)
    steps = recorded(target)
    outputs, counts = [], []
    for prompt in job["prompts"]:
        steps.clear()
        outputs.append(generated(target, prompt, job, draft_kwargs))
        counts.append([(drafted, accepted) for drafted, accepted, _ in steps])
    matched = [accepted for text in counts for _, accepted in text]
    return {
        "engine": "transformers",
        "versions": versions(),
        "outputs": outputs,
        "accepted": sum(matched),
        "drafted": sum(drafted for text in counts for drafted, _ in text),
        "accepted_by_position": by_position(matched, job),
        "prompts": [{"accepted": sum(a for _, a in text), "drafted": sum(d for d, _ in text)} for text in counts],
        "begins": begins(job["family"]),
        "ends": "capped",
        "notes": [],
    }


@contextmanager
def opened(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[list[int]], dict[str, Any]]]]:
    """A target that is ready to answer one prompt at a time."""
    timed = job["timed"]
    torch.set_num_threads(timed["threads"])
    drafts, prefill_steps = timed["speculative"], begins(job["family"]) == "plain"
    target, draft_kwargs = loaded(job, timed["dtype"], timed["device"], drafts)
    steps, watch = recorded(target), Stopwatch()

    def answer(wave: list[int]) -> dict[str, Any]:
        (prompt,) = (job["prompts"][i] for i in wave)
        steps.clear()
        watch.first, start = None, perf_counter()
        tokens = generated(target, prompt, job, draft_kwargs if drafts else {"stopping_criteria": [watch]})
        end = perf_counter()
        ahead, first = (1 + steps[0][1], steps[0][2]) if steps else (1, watch.first or end)
        text = {"tokens": tokens, "first": first - start, "ended": end - start, "ahead": min(ahead, len(tokens))}
        counted_steps = steps[prefill_steps:]  # where no drafts follow the prompt itself, the first step is the prefill
        matched = [accepted for _, accepted, _ in counted_steps]
        counts: dict[str, Any] = {
            "verifications": len(counted_steps),
            "drafted": sum(d for d, _, _ in counted_steps),
            "accepted": sum(matched),
        }
        counts["accepted_by_position"] = by_position(matched, job)
        return {"texts": [text], **(counts if drafts else dict.fromkeys(counts))}

    yield {"versions": versions(), "begins": begins(job["family"])}, answer


def loaded(job: dict[str, Any], dtype: str, device: str, drafts: bool) -> tuple[Any, dict[str, Any]]:
    """The target, and the arguments that make generate() draft."""
    import transformers

    family, width = job["family"], getattr(torch, dtype)
    if family not in (*ASSISTANTS, STITCHED):
        raise ValueError(f"generate() takes no drafters of the family {family}")
    model_path = job["drafter"] if family == STITCHED else job["target"]
    target: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=width)
    target = target.to(device).eval()
    pad = min(job["stop_ids"], default=0)
    target.generation_config = transformers.GenerationConfig(pad_token_id=pad)  # the file's would change what is generated
    if not drafts:
        return target, {}
    if family == STITCHED:
        check_modules(target, job["draft_length"])
        return target, {"use_mtp": True}
    assistant = getattr(transformers, ASSISTANTS[family]).from_pretrained(job["drafter"], dtype=width).to(device).eval()
    if family == "dflash" and assistant.config.block_size != job["draft_length"] + 1:
        raise ValueError(f"blocks of {assistant.config.block_size} always draft {assistant.config.block_size - 1} tokens")
    if family == "draft_model":
        settings = {"num_assistant_tokens": job["draft_length"], "num_assistant_tokens_schedule": "constant"}
        assistant.generation_config = transformers.GenerationConfig(**settings, assistant_confidence_threshold=0.0)
    speculation = {"speculation_type": "dflash"} if family == "dflash" else {}
    return target, {"assistant_model": assistant, **speculation}


def check_modules(target: Any, length: int) -> None:
    """generate() drafts one token with each of the target's modules."""
    modules = getattr(target.config.get_text_config(), "num_mtp_layers", None)
    if not modules:
        raise ValueError(f"generate(use_mtp=True) reads no modules of {type(target).__name__}")
    if modules != length:
        raise ValueError(f"{modules} module always drafts {modules} token; set decode.draft_length={modules}")


def generated(target: Any, prompt: list[int], job: dict[str, Any], more: dict[str, Any]) -> list[int]:
    """New tokens for one prompt. more: further arguments of generate()."""
    ids = torch.tensor([prompt], device=target.device)
    text = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=job["max_new_tokens"],
        eos_token_id=job["stop_ids"] or None, **more,
    )  # fmt: skip
    tokens: list[int] = text[0, len(prompt) :].tolist()
    return tokens


def by_position(matched: list[int], job: dict[str, Any]) -> list[int]:
    """Decode steps that accepted the draft at each position. matched: accepted drafts of each step."""
    return [sum(accepted > i for accepted in matched) for i in range(job["draft_length"])]


def begins(family: str) -> str:
    """Where the first drafts follow: `plain` after a token of the prefill, `drafted` after the prompt."""
    return "plain" if family in ("dflash", STITCHED) else "drafted"


def versions() -> dict[str, str]:
    """Versions by distribution."""
    return {"transformers": version("transformers"), "torch": version("torch")}


class Stopwatch:
    """A stopping criterion that never stops; it notes the time of the first token."""

    first: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        self.first = self.first or perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def recorded(target: Any) -> list[tuple[int, int, float]]:
    """(drafted, accepted, time) of every following decode step, in a list that grows."""
    steps: list[tuple[int, int, float]] = []
    make_generator = target._get_candidate_generator

    def made(*args: Any, **kwargs: Any) -> Any:
        generator = make_generator(*args, **kwargs)
        update = generator.update_candidate_strategy

        def updated(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            steps.append((scores.shape[1] - 1, int(num_matches), perf_counter()))
            return update(input_ids, scores, num_matches)

        generator.update_candidate_strategy = updated
        return generator

    target._get_candidate_generator = made
    return steps
