"""A drafter for a target with LoRA adapters: data answered by each, trained over a mix, measured for each in one report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.data.prompts import encode_messages
from drafttrain.targets.load import EMBEDDED

SMALL = ("data.held_out=2", "data.max_length=256", "train.steps=4", "train.micro_batch=3", "train.global_batch=6")
QUICK = ("measure.minutes=0.1", "measure.batch_sizes=[1,3]", "measure.repeats=1", "decode.max_new_tokens=12")
ASKED = ["Write a function that adds two numbers.", "Sort a list.", "Read a file.", "Count words.", "Reverse a string."]


def adapter(folder: Path, seed: int) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    return str(folder)


def generated(folder: str | None, ids: list[int], most: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    model = model if folder is None else PeftModel.from_pretrained(model, folder)
    return model.generate(input_ids=torch.tensor([ids]), max_new_tokens=most, do_sample=False)[0, len(ids) :].tolist()


@pytest.mark.slow
def test_drafter_for_target_with_adapters_is_trained_and_measured_for_each(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {name: adapter(tmp_path / name, seed) for seed, name in enumerate(("sql", "chat"))}
    named = "target.adapters={" + ",".join(f"{name}:{folder}" for name, folder in folders.items()) + "}"
    names = [None, "sql", "chat"]
    records = [{"turns": [text]} | ({"adapter": name} if name else {}) for text in ASKED for name in names]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    # prepare: each prompt is answered by its adapter
    prepared = ("data.path=prompts.jsonl", "out=answered", "prepare.max_new_tokens=8", "prepare.drop=[]")
    assert command("prepare", *prepared) == 2
    assert "the adapter 'chat' is none of target.adapters (none is set)" in capsys.readouterr().err
    assert command("prepare", named, *prepared) == 0
    answers = [json.loads(line) for line in (tmp_path / "answered" / "part-00000.jsonl").read_text().splitlines()]
    assert [answer.get("adapter") for answer in answers] == [record.get("adapter") for record in records]
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    for answer in answers[:3]:
        ids = encode_messages(tokenizer, answer["messages"][:1])
        assert answer["documents"][0]["input_ids"][len(ids) :] == generated(folders.get(answer.get("adapter")), ids, 8)

    # fit: over the mix, by the column and by a source's adapter
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"prompt": t, "response": "return 1"}) + "\n" for t in ASKED))
    mix = "data.mix=[{path:answered},{path:plain.jsonl,adapter:sql}]"
    fitted = ("fit", "recipe=eagle3", *SMALL, *QUICK, "prompts=prompts.jsonl", "output=run", "measure.tune=off")
    for wrong, message in (
        (("target.adapters={sql:nowhere}",), "which has no adapter_config.json"),
        ((named, "features=cached"), "target.adapters need the target in the trainer, features=cached"),
        ((named, "data.pack=true"), "set data.pack=false"),
        ((named, "measure.every=2", "measure.engine=vllm"), "measured by our own decoder alone, but the engine is vllm"),
        ((), "the adapter 'chat' is none of target.adapters"),
    ):
        assert command(*fitted, mix, *wrong) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert command(*fitted, mix, named) == 0

    # measure: a row for each adapter, and the texts are those of the target with the adapter
    for report in map(json.loads, (path.read_text() for path in tmp_path.rglob("report.json"))):
        (entry,) = report["checkpoints"]
        slices = {s["value"]: s for s in entry["slices"] if s["by"] == "adapter"}
        assert list(slices) == ["base target", "sql", "chat"] and set(report["target"]["adapters"]) == {"sql", "chat"}
        assert all(s["prompts"] == s["exact_matches"] == s["transformers_exact_matches"] == 5 for s in slices.values())
        assert sum(s["verifications"] for s in slices.values()) == entry["verifications"]
        assert len({prompt["prompt"] for prompt in entry["per_prompt"]}) == 15, "the same text is asked three times"
    assert "by the target's adapter" in capsys.readouterr().out
    assert command("generate", "checkpoint=run/eagle3", named, "prompt=Sort a list.") == 2
    assert "target.adapters has sql, chat, but generate uses one" in capsys.readouterr().err
    only = f"target.adapters={{chat:{folders['chat']}}}"
    assert command("generate", "checkpoint=run/eagle3", only, "prompt=Sort a list.", "decode.max_new_tokens=8") == 0
    text = tokenizer.decode(generated(folders["chat"], encode_messages(tokenizer, [{"role": "user", "content": ASKED[1]}]), 8))
    assert text.strip()[:10] in capsys.readouterr().out
