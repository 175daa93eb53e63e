"""The material for the tries: a random target, conversations, prompts, and the commands' output for them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.faults.child import Ended, forked
from tests.faults.composed import cli

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TRAINING = (
    "logger=none",
    "data.held_out=4",
    "data.max_length=96",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.log_every=50",
    "train.steps=6",
    "train.checkpoint_every=2",
)
MEASURING = (
    "measure.limit=3",
    "measure.timed_prompts=1",
    "measure.repeats=1",
    "measure.minutes=0.005",
    "measure.tune=off",
    "measure.batch_sizes=[1]",
    "measure.transformers=false",
    "decode.max_new_tokens=12",
)


class MaterialError(Exception):
    """The material for tries could not be made."""


def make_target(folder: Path) -> int:
    """A random Llama in three shards of weights, with a tokenizer of bytes and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(
        [],
        trainers.BpeTrainer(
            vocab_size=260, special_tokens=["<eos>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>", model_max_length=512)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=0, pad_token_id=1, bos_token_id=0,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.copy_(torch.randn(parameter.shape) * 1.2 / parameter.shape[1] ** 0.5)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=1, bos_token_id=0)
    model.save_pretrained(folder, max_shard_size="70KB")
    return 0


def make_data(folder: Path) -> None:
    """Conversations to train on, and prompts to be answered and to measure on."""
    draw = random.Random(0)

    def text(least: int, most: int) -> str:
        words = ("".join(draw.choices(LETTERS, k=draw.randint(2, 7))) for _ in range(draw.randint(least, most)))
        return " ".join(words)

    lines = [
        {"messages": [{"role": "user", "content": text(1, 4)}, {"role": "assistant", "content": text(3, 9)}]} for _ in range(40)
    ]
    prompts = [{"question_id": i, "category": "ab"[i % 2], "turns": [text(2, 4)]} for i in range(6)]
    for name, records in (("data.jsonl", lines), ("prompts.jsonl", prompts)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def run(arguments: Sequence[str], folder: Path, said: Path | None = None) -> Ended:
    """`drafttrain ARGUMENTS` in a child."""
    return forked(cli(arguments), folder, said or folder / "said").wait()


def must(arguments: Sequence[str], folder: Path) -> None:
    """Run a command that has to succeed."""
    ended = run(arguments, folder)
    shutil.rmtree(folder / "said")
    if ended.code:
        raise MaterialError(
            f"drafttrain {' '.join(arguments)}: exit code {ended.code}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
        )


def base(folder: Path) -> None:
    """Make `target/`, `data.jsonl` and `prompts.jsonl` in this folder if they are missing."""
    if (folder / "prompts.jsonl").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = forked(lambda: make_target(folder / "target"), folder, folder / "said").wait()
    if ended.code:
        raise MaterialError(f"the target: {ended.err}")
    shutil.rmtree(folder / "said")
    make_data(folder)


def only_run(outputs: Path) -> Path:
    """The one run's directory under an output folder."""
    runs = sorted(outputs.glob("*/*/run.json"))
    if len(runs) != 1:
        raise MaterialError(f"{outputs} holds {len(runs)} runs, not one")
    return runs[0].parent
