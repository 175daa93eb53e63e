"""OpenVINO GenAI on an exported drafter; the form of job and result is explained in drafttrain/export/engine.py.

Target and drafter are converted first, by optimum-intel, as the exported directory's README says. Its metrics of EAGLE-3 and
draft models leave out the round that ends a text.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

FAMILIES = ("draft_model", "eagle3", "dflash")
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # else bfloat16 and a cache of int8
PACKAGES = ("openvino-genai", "openvino", "optimum-intel", "transformers")


def decoded(job: dict[str, Any]) -> dict[str, Any]:
    import openvino_genai

    if job["family"] not in FAMILIES:
        raise ValueError(f"no drafters of the family {job['family']}; it takes {', '.join(FAMILIES)}")
    scratch = Path(job["scratch"])
    if code := sorted(file.name for file in Path(job["drafter"]).rglob("*.py")):
        raise ValueError(f"the exported directory holds code, {code[0]}, which is not run; export again")
    target = converted(job["target"], scratch / "target", trusted=False)
    drafter = converted(job["drafter"], scratch / "drafter", trusted=True)
    if job["family"] == "eagle3":
        name_layers(drafter, [k - 1 for k in job["facts"]["layer_inputs"]])
    draft = openvino_genai.draft_model(str(drafter), "CPU", **EXACT)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # which DFlash refuses
    pipeline = openvino_genai.LLMPipeline(str(target), "CPU", draft_model=draft, scheduler_config=scheduler, **EXACT)
    settings = settings_of(job)
    outputs, counts = [], []
    for prompt in job["prompts"]:
        tokens, accepted, drafted = answered(pipeline, prompt, settings)
        outputs.append(tokens)
        counts.append({"accepted": accepted, "drafted": drafted})
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


def settings_of(job: dict[str, Any]) -> Any:
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    settings.do_sample = False
    settings.max_new_tokens = job["max_new_tokens"]
    settings.num_assistant_tokens = job["draft_length"]
    if job["stop_ids"]:
        settings.eos_token_id = job["stop_ids"][0]
        settings.stop_token_ids = set(job["stop_ids"])
    else:
        settings.ignore_eos = True
    return settings


def answered(pipeline: Any, prompt: list[int], settings: Any) -> tuple[list[int], int, int]:
    """The text's tokens, and how many drafts were accepted and offered."""
    import numpy
    import openvino
    import openvino_genai

    ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
    mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
    answer = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), settings)
    metrics = answer.extended_perf_metrics
    return list(answer.tokens[0]), metrics.get_num_accepted_tokens(), metrics.get_num_draft_tokens()
