"""Trains a tiny Qwen3.5 to say what drawn pictures show, on a CPU in some minutes: a target to try drafters on images with.

    python -m benchmarks.image_target --out DIR --steps 600

DIR is a directory of transformers, with the embedded target's tokenizer. The pictures are drawn as `benchmarks.image_prompts`
draws them, from another seed.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from benchmarks import image_prompts
from drafttrain.data import DataOptions
from drafttrain.data.dataset import collate, load_dataset
from drafttrain.targets.images import ImageReader
from drafttrain.targets.load import EMBEDDED
from drafttrain.targets.vision import VisionTarget

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEXT = "{{ message['content'] + '<|im_end|>' }}{% endif %}"  # how the embedded template writes a user's turn
PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endif %}"
)


def tokenizer_with_images() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    before, after = tokenizer.chat_template.rsplit(TEXT, 1)
    tokenizer.chat_template = before + PARTS + after
    return tokenizer


def config_for(tokenizer: Any) -> Qwen3_5Config:
    """Four blocks of 128 units, two of them recurrent, and a tower of two blocks; a picture has 35 rows."""
    begin, end, image, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]}
    linear = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
    text = linear | {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
        "eos_token_id": tokenizer.eos_token_id,
    }
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
    tower |= {"patch_size": 16, "num_position_embeddings": 256}
    ids = {"vision_start_token_id": begin, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    return Qwen3_5Config(text_config=text, vision_config=tower, **ids)


def trained(steps: int, rows: int, seed: int) -> tuple[Any, Any, Any]:
    """(model, tokenizer, image processor)."""
    torch.manual_seed(seed)
    tokenizer, processor = tokenizer_with_images(), Qwen2VLImageProcessorPil(patch_size=16, max_pixels=224 * 160)
    model: Any = Qwen3_5ForConditionalGeneration(config_for(tokenizer))
    image = MARKS[2]
    reader = ImageReader(processor, image, tokenizer.convert_tokens_to_ids(image), image)
    target = VisionTarget(model, frozen=False, reader=reader)  # makes the model's inputs
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps)
    with TemporaryDirectory() as folder:
        image_prompts.write(Path(folder), steps * rows // 4, 0, seed, replies=True)  # each is seen four times
        data = load_dataset(DataOptions(path=f"{folder}/data.jsonl", held_out=1, cache=folder), tokenizer, images=reader)
        for step in range(steps):
            batch = collate(data.global_batch(step, rows), tokenizer.pad_token_id)
            logits_BTV = model.train()(**target.generation_inputs(batch.token_BT)).logits
            label_BT = batch.token_BT.masked_fill(~batch.mask_BT, -100)[:, 1:]
            loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), label_BT.flatten())
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if step % 50 == 0 or step == steps - 1:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval(), tokenizer, processor


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=8, help="pictures in a step")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    for part in trained(given.steps, given.rows, given.seed):
        part.save_pretrained(given.out)


if __name__ == "__main__":
    main()
