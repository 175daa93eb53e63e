"""OpenVINO GenAI on an exported drafter; the form of job and result is explained in drafttrain/engines/process.py, that of a
timed one in drafttrain/engines/timed_process.py.

Target and drafter are converted first, by optimum-intel, as the exported directory's README says. Its metrics of EAGLE-3 and
draft models leave out the round that ends a text.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

FAMILIES = ("draft_model", "eagle3", "dflash")
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # else bfloat16 and a cache of int8
PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "transformers")


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    pipeline, settings = pipeline_of(job, EXACT, True), settings_of(job, True)
    outputs, counts = [], []
    for prompt in job["prompts"]:
        answer = answered(pipeline, prompt, settings)
        outputs.append(list(answer.tokens[0]))
        metrics = answer.extended_perf_metrics
        counts.append({"accepted": metrics.get_num_accepted_tokens(), "drafted": metrics.get_num_draft_tokens()})
    return {
        "engine": "openvino",
        "versions": {name: version(name) for name in PACKAGES},
        "outputs": outputs,
        "accepted": sum(count["accepted"] for count in counts),
        "drafted": sum(count["drafted"] for count in counts),
        "accepted_by_position": None,
        "prompts": counts,
        "begins": "plain",
        "ends": "capped" if job["family"] == "dflash" else "none",
        "notes": [],
    }


@contextmanager
def opened(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[list[int]], dict[str, Any]]]]:
    """Its metrics list how many tokens each pass of the target gave, the prefill's first."""
    timed, drafts = job["timed"], job["timed"]["speculative"]
    width = PRECISION[timed["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": width, "KV_CACHE_PRECISION": width, "INFERENCE_NUM_THREADS": timed["threads"]}
    pipeline, settings = pipeline_of(job, properties, drafts), settings_of(job, drafts)

    def answer(wave: list[int]) -> dict[str, Any]:
        (prompt,) = (job["prompts"][i] for i in wave)
        began = perf_counter()
        found = answered(pipeline, prompt, settings)
        ended, metrics = perf_counter() - began, found.perf_metrics
        text = {"tokens": list(found.tokens[0]), "first": metrics.get_ttft().mean / 1000, "ended": ended, "ahead": 1}
        counts: dict[str, int | None] = dict.fromkeys(("verifications", "drafted", "accepted"))
        if drafts:
            passes, told = metrics.raw_metrics.m_batch_sizes, found.extended_perf_metrics
            counts = {"verifications": len(passes) - 1, "drafted": told.get_num_draft_tokens() or None}  # DFlash: not counted
            counts["accepted"] = told.get_num_accepted_tokens()
        return {"texts": [text], **counts}

    notes = [] if timed["device"] == "cpu" else ["OpenVINO was run on the CPU"]
    yield {"versions": {name: version(name) for name in PACKAGES}, "notes": notes}, answer


def pipeline_of(job: dict[str, Any], properties: dict[str, Any], drafts: bool) -> Any:
    """What is converted already is there."""
    import openvino_genai

    if job["family"] not in FAMILIES:
        raise ValueError(f"no drafters of the family {job['family']}; it takes {', '.join(FAMILIES)}")
    target = Path(job["scratch"]) / "target"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # which DFlash refuses
    if code := sorted(file.name for file in Path(job["drafter"]).rglob("*.py")):
        raise ValueError(f"the exported directory holds code, {code[0]}, which is not run; export again")
    if not target.exists():
        converted(job["target"], target, trusted=False)
    if not drafts:
        return openvino_genai.LLMPipeline(str(target), "CPU", scheduler_config=scheduler, **properties)
    drafter = converted(job["drafter"], Path(job["scratch"]) / "drafter", trusted=True)
    if job["family"] == "eagle3":
        name_layers(drafter, [k - 1 for k in job["facts"]["layer_inputs"]])
    draft = openvino_genai.draft_model(str(drafter), "CPU", **properties)
    return openvino_genai.LLMPipeline(str(target), "CPU", draft_model=draft, scheduler_config=scheduler, **properties)


def converted(source: str, place: Path, trusted: bool) -> Path:
    """In float32. A drafter's architecture is one of optimum-intel's own, which it asks `trust_remote_code` for: trusted is a
    directory that holds no code. What a target brings with it is never run."""
    from optimum.exporters.openvino import main_export

    main_export(
        source, str(place), task="text-generation-with-past", trust_remote_code=trusted, library_name="transformers",
        convert_tokenizer=not Path(source).is_dir() or (Path(source) / "tokenizer.json").is_file(),
    )  # fmt: skip
    return place


def name_layers(place: Path, layers: list[int]) -> None:
    """Tell the pipeline which of the target's blocks' outputs the drafter reads."""
    import openvino

    core, aside = openvino.Core(), place.with_name(f"{place.name}-layers")
    aside.mkdir()
    model = core.read_model(str(place / "openvino_model.xml"))
    model.set_rt_info(" ".join(map(str, layers)), "hidden_layers_list")
    openvino.save_model(model, str(aside / "openvino_model.xml"), compress_to_fp16=False)
    del model
    for file in aside.iterdir():
        shutil.move(file, place / file.name)


def settings_of(job: dict[str, Any], drafts: bool) -> Any:
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    settings.do_sample = False
    settings.max_new_tokens = job["max_new_tokens"]
    if drafts:
        settings.num_assistant_tokens = job["draft_length"]
    if job["stop_ids"]:
        settings.eos_token_id = job["stop_ids"][0]
        settings.stop_token_ids = set(job["stop_ids"])
    else:
        settings.ignore_eos = True
    return settings


def answered(pipeline: Any, prompt: list[int], settings: Any) -> Any:
    import numpy
    import openvino
    import openvino_genai

    ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
    mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
    return pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), settings)
