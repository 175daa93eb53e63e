"""OpenVINO GenAI on an exported drafter. drafttrain/engines/process.py explains the form of job and result,
drafttrain/engines/timed_process.py that of a timed job.

optimum-intel first converts target and drafter, as the exported directory's README says. For EAGLE-3 and draft models its
metrics leave out the last decode step of an output.
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
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # by default bfloat16 and an int8 cache
PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "transformers")


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    """Decode every prompt of a job."""
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
    """Its metrics list the tokens of each pass of the target, the prefill first."""
    timed, drafts = job["timed"], job["timed"]["speculative"]
    width = PRECISION[timed["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": width, "KV_CACHE_PRECISION": width, "INFERENCE_NUM_THREADS": timed["threads"]}
    pipeline, settings = pipeline_of(job, properties, drafts), settings_of(job, drafts)

    def answer(wave: list[int]) -> dict[str, Any]:
        (prompt,) = (job["prompts"][i] for i in wave)
        start_time = perf_counter()
        reply = answered(pipeline, prompt, settings)
        end_time, metrics = perf_counter() - start_time, reply.perf_metrics
        text = {"tokens": list(reply.tokens[0]), "first": metrics.get_ttft().mean / 1000, "ended": end_time, "ahead": 1}
        counts: dict[str, int | None] = dict.fromkeys(("verifications", "drafted", "accepted"))
        if drafts:
            passes, extended = metrics.raw_metrics.m_batch_sizes, reply.extended_perf_metrics
            counts = {"verifications": len(passes) - 1, "drafted": extended.get_num_draft_tokens() or None}  # None for DFlash
            counts["accepted"] = extended.get_num_accepted_tokens()
        return {"texts": [text], **counts}

    notes = [] if timed["device"] == "cpu" else ["OpenVINO was run on the CPU"]
    yield {"versions": {name: version(name) for name in PACKAGES}, "notes": notes}, answer


def pipeline_of(job: dict[str, Any], properties: dict[str, Any], drafts: bool) -> Any:
    """The pipeline. Files that are already converted are used again."""
    import openvino_genai

    if job["family"] not in FAMILIES:
        raise ValueError(f"no drafters of the family {job['family']}; it takes {', '.join(FAMILIES)}")
    target = Path(job["scratch"]) / "target"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # DFlash refuses prefix caching
    if code := sorted(file.name for file in Path(job["drafter"]).rglob("*.py")):
        raise ValueError(f"the exported directory has code in it ({code[0]}), which is not run; export again")
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
    """Convert a model to float32.

    optimum-intel asks for `trust_remote_code` even for its own drafter architectures. So trusted may be true only for a
    directory without code. Code that comes with a target is never run.
    """
    from optimum.exporters.openvino import main_export

    main_export(
        source, str(place), task="text-generation-with-past", trust_remote_code=trusted, library_name="transformers",
        convert_tokenizer=not Path(source).is_dir() or (Path(source) / "tokenizer.json").is_file(),
    )  # fmt: skip
    return place


def name_layers(place: Path, layers: list[int]) -> None:
    """Store the numbers of the target's blocks whose outputs the drafter reads."""
    import openvino

    core, staging_dir = openvino.Core(), place.with_name(f"{place.name}-layers")
    staging_dir.mkdir()
    model = core.read_model(str(place / "openvino_model.xml"))
    model.set_rt_info(" ".join(map(str, layers)), "hidden_layers_list")
    openvino.save_model(model, str(staging_dir / "openvino_model.xml"), compress_to_fp16=False)
    del model
    for file in staging_dir.iterdir():
        shutil.move(file, place / file.name)


def settings_of(job: dict[str, Any], drafts: bool) -> Any:
    """The settings of generation. drafts: with speculation."""
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
    """The pipeline's answer for one prompt."""
    import numpy
    import openvino
    import openvino_genai

    ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
    mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
    return pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), settings)
