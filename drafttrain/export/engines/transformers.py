"""transformers' assisted generation with an exported drafter; the form of job and result is explained in
drafttrain/export/engine.py.

Its candidate generators are told after every verification how many drafts matched; that is recorded.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

ASSISTANTS = {"draft_model": "AutoModelForCausalLM", "dflash": "AutoModel"}


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    import transformers

    family = job["family"]
    if family not in ASSISTANTS:
        raise ValueError(f"generate() takes no drafter of the family {family}")
    target = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    assistant = getattr(transformers, ASSISTANTS[family]).from_pretrained(job["drafter"], dtype=torch.float32).eval()
    kind = {"speculation_type": "dflash"} if family == "dflash" else {}
    if family == "dflash" and assistant.config.block_size != job["draft_length"] + 1:
        raise ValueError(f"blocks of {assistant.config.block_size} draft {assistant.config.block_size - 1} tokens, no others")
    if family == "draft_model":
        settings = {"num_assistant_tokens": job["draft_length"], "num_assistant_tokens_schedule": "constant"}
        assistant.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    rounds = recorded(target)
    outputs, counts = [], []
    for prompt in job["prompts"]:
        rounds.clear()
        ids = torch.tensor([prompt])
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, do_sample=False,
            max_new_tokens=job["max_new_tokens"], eos_token_id=job["stop_ids"] or None, **kind,
        )  # fmt: skip
        outputs.append(text[0, len(prompt) :].tolist())
        counts.append(list(rounds))
    matched = [accepted for text in counts for _, accepted in text]
    return {
        "engine": "transformers",
        "versions": {"transformers": version("transformers"), "torch": version("torch")},
        "outputs": outputs,
        "accepted": sum(matched),
        "drafted": sum(drafted for text in counts for drafted, _ in text),
        "accepted_by_position": [sum(accepted > i for accepted in matched) for i in range(job["draft_length"])],
        "prompts": [{"accepted": sum(a for _, a in text), "drafted": sum(d for d, _ in text)} for text in counts],
        "begins": "plain" if family == "dflash" else "drafted",
        "ends": "capped",
        "notes": [],
    }


def recorded(target: Any) -> list[tuple[int, int]]:
    """(drafted, accepted) of every verification to come, in a list that grows."""
    rounds: list[tuple[int, int]] = []
    make = target._get_candidate_generator

    def made(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        update = generator.update_candidate_strategy

        def told(input_ids: Any, scores: Any, num_matches: Any) -> Any:
            rounds.append((scores.shape[1] - 1, int(num_matches)))
            return update(input_ids, scores, num_matches)

        generator.update_candidate_strategy = told
        return generator

    target._get_candidate_generator = made
    return rounds
