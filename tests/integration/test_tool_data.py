"""Agents' data: a target answers conversations with tools, a drafter learns its calls, and prompts with tools measure it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.data.chat import Encoder
from drafttrain.data.forms import conversation
from drafttrain.measure.entry import prompt_digest
from tests.unit.data.templates import STYLES

Command = Callable[..., int]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}}
    for name, key in (("weather", "place"), ("time", "zone"))
]


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(*calls: tuple[str, str]) -> dict[str, Any]:
    keys = {"weather": "place", "time": "zone"}
    functions = [{"name": name, "arguments": json.dumps({keys[name]: value})} for name, value in calls]
    return said("") | {"tool_calls": [{"id": f"call_{i}", "type": "function", "function": f} for i, f in enumerate(functions)]}


def results(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": content, "tool_call_id": f"call_{i}"} for i, content in enumerate(contents)]


ROME, OSLO = asked("How warm is it in Rome?"), asked("And in Oslo?")
BOTH, DAY = asked("Is it warmer in Rome or in Oslo?"), asked("Is it day in Rome?")
LATE, HELLO = asked("Is it late?"), asked("Hello!")
WRITTEN = [  # what the target writes
    [ROME, called(("weather", "Rome")), *results("21"), said("It is 21 degrees."), OSLO, called(("weather", "Oslo"))],
    [BOTH, called(("weather", "Rome"), ("weather", "Oslo")), *results("21", "7"), said("In Rome.")],
    [DAY, called(("time", "CET")), *results("noon"), called(("weather", "Rome")), *results("sun"), said("Yes, and sunny.")],
    [OSLO, called(("weather", "Oslo")), *results("7"), said("Seven degrees.")],
    [LATE, called(("weather", "Rome"))],
    [HELLO, said("Hello, how can I help you?")],
]
RECORDED = [  # the last two do not fit
    [WRITTEN[0][0], called(("weather", "Roma")), *WRITTEN[0][2:3], said("Warm."), *WRITTEN[0][4:]],
    *WRITTEN[1:4],
    [LATE, called(("time", "UTC")), *results("midnight"), said("Yes.")],
    [HELLO, called(("time", "UTC")), *results("noon"), said("Good day!")],
]


def write(path: Path, conversations: list[list[dict[str, Any]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages, "tools": TOOLS}) + "\n" for messages in conversations))
    return path


def tool_target(folder: Path) -> Path:
    """A small target that has learnt `WRITTEN` by heart."""
    style, bpe = STYLES["qwen3"], Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(style.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([style.template, json.dumps([WRITTEN, TOOLS])], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=style.eos, chat_template=style.template)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, **shape)
    model, encoder = LlamaForCausalLM(config), Encoder(tokenizer, 512)
    records = [conversation("x:1", {"messages": messages, "tools": TOOLS}) for messages in WRITTEN]
    rows = [row for record in records for row in encoder(record).split()]
    ids = torch.full((len(rows), max(len(row.token_ids) for row in rows)), tokenizer.eos_token_id)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row.token_ids)] = torch.as_tensor(row.token_ids)
        labels[i, : len(row.token_ids)] = torch.where(torch.as_tensor(row.mask), torch.as_tensor(row.token_ids), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.01:
            break
    assert loss < 0.01
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_drafter_of_prepared_calls_is_measured_on_tool_prompts(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("target=hf", f"target.path={tool_target(tmp_path / 'target')}")
    write(tmp_path / "agents.jsonl", RECORDED)
    lengths = ("prepare.max_length=512", "prepare.max_new_tokens=96")
    assert command("prepare", *target, "data.path=agents.jsonl", "out=answered", *lengths) == 0
    assert "kept: 6 of 6 texts, 12 replies\nended: 1 other calls, 1 no call for the results\n" in capsys.readouterr().out
    answered = [json.loads(line)["messages"] for line in (tmp_path / "answered" / "part-00000.jsonl").read_text().splitlines()]
    for messages, written in zip(answered, WRITTEN, strict=True):
        assert [message["role"] for message in messages] == [message["role"] for message in written]
        for message, wanted in zip(messages, conversation("x:1", {"messages": written}).messages, strict=True):
            calls = [[call["function"] for call in m.get("tool_calls", [])] for m in (message, wanted)]
            assert calls[0] == calls[1] and message["content"].removeprefix("<think>\n\n</think>").strip() == wanted["content"]

    small = ("data.held_out=1", "data.max_length=512", "train.steps=20", "train.micro_batch=2", "train.global_batch=2")
    quick = ("measure.tune=off", "measure.minutes=0.2", "measure.batch_sizes=[1]", "decode.max_new_tokens=40")
    prompts = [[ROME], [BOTH], [DAY], [LATE]]
    write(tmp_path / "prompts.jsonl", prompts)
    fitted = ("fit", "recipe=medusa", *target, "data.path=answered", "data.supervise=[call]", *small, *quick)
    assert command(*fitted, "prompts=prompts.jsonl", "measure.limit=1", "output=run") == 0
    assert "data: 5 conversations" in capsys.readouterr().out  # one has no call
    assert command("measure", "checkpoint=run/medusa", "prompts=prompts.jsonl", *quick) == 0
    report = max(tmp_path.rglob("report.json"), key=lambda path: path.stat().st_mtime_ns)
    (entry,) = json.loads(report.read_text())["checkpoints"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "target")
    texts = [tokenizer.apply_chat_template(m, tools=TOOLS, add_generation_prompt=True, tokenize=False) for m in prompts]
    digests = {prompt_digest(tokenizer(text)["input_ids"]) for text in texts}
    assert {line["prompt"] for line in entry["per_prompt"]} == digests and entry["exact_matches"] == 4
    assert entry["tau"] > 1.5  # calls are alike, and the prompts' are among those learnt
