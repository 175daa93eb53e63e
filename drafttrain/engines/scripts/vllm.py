"""vLLM on an exported drafter. drafttrain/engines/process.py explains the form of job and result,
drafttrain/engines/timed_process.py that of a timed job.

Its counters are sums over all requests, so prompts run one by one, and the differences are taken. It counts a decode step
before the output is cut at its end.

Shapes: L layers, T positions, h heads of keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from itertools import count
from time import perf_counter
from typing import Any

METHODS = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash", "draft_model": "draft_model"}
METHODS |= {"dspark": "dspark"} | dict.fromkeys(("dflash2", "jetspec", "xpress", "lilicorr"), "dflash")
PARALLEL = {"peagle": "eagle3", "pard": "draft_model"}  # methods for families that draft in one pass
FAMILIES = (*METHODS, *PARALLEL)
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
STEPS = "vllm:spec_decode_num_drafts"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
COUNTS = {"verifications": STEPS, "drafted": DRAFTED, "accepted": ACCEPTED}
SHARE = 0.42  # of a GPU's memory: two engines, with and without speculation, and our own process share it


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    """Decode every prompt of a job."""
    from vllm import LLM

    notes = mended_key_norms(job)
    llm = LLM(
        **settings(job, "float32"),
        enforce_eager=True,
        async_scheduling=False,
        max_num_seqs=1,
        speculative_config=speculation(job),
    )
    sampling = sampling_of(job)
    outputs, prompts, before = [], [], counters(llm)
    for prompt in job["prompts"]:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        outputs.append(list(answer.outputs[0].token_ids))
        after = counters(llm)
        prompts.append({"accepted": after[ACCEPTED] - before[ACCEPTED], "drafted": after[DRAFTED] - before[DRAFTED]})
        before = after
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
        "notes": notes,
    }


@contextmanager
def opened(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[list[int]], dict[str, Any]]]]:
    """Its steps are called one by one, so that the time of each output's first token is seen."""
    from vllm import LLM

    timed, drafts = job["timed"], job["timed"]["speculative"]
    notes = mended_key_norms(job) if drafts else []
    llm_options: dict[str, Any] = {"gpu_memory_utilization": SHARE} if timed["device"] == "cuda" else {}
    if timed.get("eager"):
        llm_options["enforce_eager"] = True
    if drafts:
        llm_options["speculative_config"] = speculation(job)
    llm = LLM(**settings(job, timed["dtype"]), max_num_seqs=timed["batch"], **llm_options)
    engine, sampling, request_ids = llm.llm_engine, sampling_of(job), count()

    def answer(wave: list[int]) -> dict[str, Any]:
        counters_before, start_time = counters(llm), perf_counter()
        texts: dict[str, dict[str, Any]] = {}
        for i in wave:
            name = str(next(request_ids))
            texts[name] = {}
            engine.add_request(name, {"prompt_token_ids": job["prompts"][i]}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens, elapsed = list(output.outputs[0].token_ids), perf_counter() - start_time
                texts[output.request_id] = {"first": elapsed, "ahead": len(tokens)} | texts[output.request_id]
                texts[output.request_id] |= {"tokens": tokens, "ended": elapsed}
        return {"texts": list(texts.values()), **(spent(counters_before, counters(llm)) if drafts else dict.fromkeys(COUNTS))}

    yield {"versions": versions(), "notes": notes}, answer


def settings(job: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The engine's settings for this job."""
    longest = max(map(len, job["prompts"]))
    return {
        "model": job["target"],
        "dtype": dtype,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "max_num_batched_tokens": max(2048, longest + job["draft_length"]),
    }


def speculation(job: dict[str, Any]) -> dict[str, Any]:
    """The speculative configuration. Raises ValueError for a family without a method."""
    family = job["family"]
    if family not in METHODS | PARALLEL:
        raise ValueError(f"no speculative method for the family {family}")
    config = {"method": (METHODS | PARALLEL)[family], "model": job["drafter"], "num_speculative_tokens": job["draft_length"]}
    return config | ({"parallel_drafting": True} if family in PARALLEL else {})


def sampling_of(job: dict[str, Any]) -> Any:
    """Greedy sampling that ends at the job's stop tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"], detokenize=False)


def mended_key_norms(job: dict[str, Any]) -> list[str]:
    """Work around an error of vLLM 0.32 on CPUs, and return a note about it.

    DFlash norms the context's keys of all its layers at once, with one row of weights for each layer. On CPUs `rms_norm` uses
    the first row for all of them; on GPUs it is right. There the keys are normed layer by layer instead.
    """
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if METHODS.get(job["family"]) != "dflash" or not current_platform.is_cpu() or norms_rows_apart():
        return []
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(model: Any, k_LThD: Any) -> Any:
        out_LThD = torch.empty_like(k_LThD)
        for out_ThD, k_ThD, weight_D in zip(out_LThD, k_LThD, model._k_norm_weights, strict=True):
            _custom_ops.rms_norm(out_ThD, k_ThD, weight_D, model._rms_norm_eps)
        return out_LThD

    DFlashQwen3Model._normalize_context_k = normed
    return ["on CPUs vLLM norms the context's keys of every layer with the first layer's weights; this run corrects that"]


def norms_rows_apart() -> bool:
    """Whether `rms_norm` uses each row of weights."""
    import torch
    from vllm import _custom_ops

    x_LTD = torch.ones(2, 1, 32)
    weight_LD, out_LTD = torch.ones(2, 32) * torch.tensor([[1.0], [2.0]]), torch.empty_like(x_LTD)
    _custom_ops.rms_norm(out_LTD, x_LTD, weight_LD, 1e-6)
    return bool((out_LTD[1] > 1.5 * out_LTD[0]).all())


def counters(llm: Any) -> dict[str, Any]:
    """The speculative counters; zero before the first request."""
    values: dict[str, Any] = {STEPS: 0, DRAFTED: 0, ACCEPTED: 0, BY_POSITION: []}
    for metric in llm.get_metrics():
        if metric.name == BY_POSITION:
            values[BY_POSITION] = list(metric.values)
        elif metric.name in values:
            values[metric.name] = metric.value
    return values


def spent(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A wave's counts: the differences of the counters."""
    padded = [*before[BY_POSITION], *[0] * (len(after[BY_POSITION]) - len(before[BY_POSITION]))]
    by_position = [final - initial for final, initial in zip(after[BY_POSITION], padded, strict=True)]
    return {key: after[name] - before[name] for key, name in COUNTS.items()} | {"accepted_by_position": by_position}


def versions() -> dict[str, str]:
    """Versions by distribution. The name of vLLM's distribution depends on its build."""
    names = [packages_distributions()["vllm"][0], "torch", "transformers"]
    return {name: version(name) for name in names}
