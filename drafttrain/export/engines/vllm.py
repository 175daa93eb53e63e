"""vLLM on an exported drafter; the form of job and result is explained in drafttrain/export/engine.py.

Its counters are sums over all requests, so prompts run one by one, and what each adds is taken. They count a round before the
text is cut at its end.
"""

from __future__ import annotations

from importlib.metadata import packages_distributions, version
from typing import Any

METHODS = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash", "draft_model": "draft_model"}
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    if job["family"] not in METHODS:
        raise ValueError(f"no speculative method for the family {job['family']}")
    speculative = {
        "method": METHODS[job["family"]],
        "model": job["drafter"],
        "num_speculative_tokens": job["draft_length"],
    }
    longest = max(map(len, job["prompts"]))
    llm = LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=False,
        max_num_seqs=1,
        max_num_batched_tokens=max(2048, longest + job["draft_length"]),
        speculative_config=speculative,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"], detokenize=False
    )
    outputs, prompts, before = [], [], counters(llm)
    for prompt in job["prompts"]:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        outputs.append(list(answer.outputs[0].token_ids))
        now = counters(llm)
        prompts.append({"accepted": now[ACCEPTED] - before[ACCEPTED], "drafted": now[DRAFTED] - before[DRAFTED]})
        before = now
    return {
        "engine": "vllm",
        "versions": versions(),
        "outputs": outputs,
        "accepted": before[ACCEPTED],
        "drafted": before[DRAFTED],
        "accepted_by_position": before[BY_POSITION],
        "prompts": prompts,
        "begins": "plain",
        "ends": "whole",
        "notes": [],
    }


def counters(llm: Any) -> dict[str, Any]:
    """The speculative ones as they stand; zero before the first request."""
    found: dict[str, Any] = {DRAFTED: 0, ACCEPTED: 0, BY_POSITION: []}
    for metric in llm.get_metrics():
        if metric.name == BY_POSITION:
            found[BY_POSITION] = list(metric.values)
        elif metric.name in found:
            found[metric.name] = metric.value
    return found


def versions() -> dict[str, str]:
    """By distribution: which of vLLM's names is installed differs by its build."""
    names = [packages_distributions()["vllm"][0], "torch", "transformers"]
    return {name: version(name) for name in names}
