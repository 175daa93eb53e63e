"""Tiny random models of text and images, their tokenizers and image processors, and pictures to ask about."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.data.chat import Encoded
from drafttrain.targets.images import ImageReader, image_reader
from drafttrain.targets.vision import VisionTarget

VOCAB = 128
SPECIAL = {119: "<eos>", 120: "<image>", 121: "<video>", 122: "<begin>", 123: "<end>", 124: "<user>", 125: "<assistant>"}
TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 119, "pad_token_id": 0}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOWER = {"hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "patch_size": 4, "depth": 3}
IDS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
GEMMA_4 = {"gemma4": None, "gemma4_whole": "vision"}  # the value that says whether the rows of an image see each other
NAMES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", *GEMMA_4)
WORDS = [
    "red",
    "green",
    "blue",
    "circle",
    "square",
    "line",
    "bar",
    "how",
    "many",
    "is",
    "the",
    "which",
    "largest",
    "colour",
    "of",
    "shape",
    "count",
    "what",
    "yes",
    "no",
    "one",
    "two",
    "three",
]
TEMPLATE = (
    "{%- for m in messages -%}<{{ m.role }}>"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}PLACE{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<eos>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


def config_of(name: str) -> Any:
    """A configuration of four blocks and a vision tower."""
    t: Any = transformers
    windows = {"head_dim": 16, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}
    encoder = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
    if name in GEMMA_4:
        shared = {"global_head_dim": 32, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8}
        shared |= {"vocab_size_per_layer_input": VOCAB, "use_bidirectional_attention": GEMMA_4[name]}
        windows["layer_types"] = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
        return t.Gemma4Config(
            text_config=TEXT | windows | shared | {"tie_word_embeddings": False},
            vision_config=encoder | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2},
            tie_word_embeddings=False,
            image_token_id=120,
            video_token_id=121,
            boi_token_id=122,
            eoi_token_id=123,
        )
    if name == "gemma3":
        text = TEXT | windows | {"query_pre_attn_scalar": 16}
        tower = encoder | {"image_size": 16}
        return t.Gemma3Config(
            text_config=text | {"tie_word_embeddings": False},
            vision_config=tower,
            tie_word_embeddings=False,
            mm_tokens_per_image=4,
            image_token_index=120,
            eos_token_id=119,
            boi_token_index=122,
        )
    routed = ROUTED if name.endswith("moe") else {}
    if name.startswith("qwen3_vl"):
        tower = TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        kind = t.Qwen3VLMoeConfig if routed else t.Qwen3VLConfig
        return kind(text_config=TEXT | ROPE | {"head_dim": 16} | routed, vision_config=tower, **IDS)
    if name.startswith("qwen3_5"):
        text = TEXT | ROPE | DELTA | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2} | routed
        kind = t.Qwen3_5MoeConfig if routed else t.Qwen3_5Config
        return kind(text_config=text, vision_config=TOWER | {"num_position_embeddings": 64}, **IDS)
    if name == "qwen2_vl":
        tower = {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "depth": 2, "mlp_ratio": 2}
        return t.Qwen2VLConfig(text_config=TEXT | ROPE, vision_config=tower, **IDS)
    return t.Qwen2_5_VLConfig(
        text_config=TEXT | ROPE, vision_config=TOWER | {"fullatt_block_indexes": [1], "window_size": 16}, **IDS
    )


def model_of(name: str, seed: int = 0) -> Any:
    """Random, with weights large enough that its greedy text is no constant and follows the image."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config_of(name))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / parameter.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = 119
    return model.eval()


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Words are tokens; unknown ones share a token. Its template writes the image's place as the model's own does."""
    known = ["<unk>", *dict.fromkeys([*WORDS, *map(str, range(10))])]
    words = known + [f"w{i}" for i in range(len(known), min(SPECIAL))]
    vocab = {word: i for i, word in enumerate(words)} | {word: i for i, word in SPECIAL.items()}
    vocab |= {f"<unused{i}>": i for i in range(VOCAB) if i not in vocab.values()}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    extra = {"boi_token": "<begin>", "eoi_token": "<end>", "image_token": "<image>"} if name.startswith("gemma") else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<unk>", unk_token="<unk>", extra_special_tokens=extra
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL.values())[1:]})
    place = "<begin>" if name == "gemma3" else "<image>" if extra else "<begin><image><end>"
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    return tokenizer


def processor_of(name: str) -> Any:
    if name == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=4)
    if name in GEMMA_4:
        return transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, do_resize=False, max_soft_tokens=70)
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=4096
    )


def write_target(name: str, folder: Path, seed: int = 0) -> Path:
    """A directory that transformers and `target.path` load."""
    model_of(name, seed).save_pretrained(folder)
    tokenizer_of(name).save_pretrained(folder)
    processor_of(name).save_pretrained(folder)
    return folder


def vision_target(name: str, folder: Path, stop: frozenset[int] = frozenset()) -> VisionTarget:
    """A target with its reader. folder: where the processor is saved."""
    processor_of(name).save_pretrained(folder)
    reader = image_reader(str(folder), config_of(name), tokenizer_of(name))
    assert isinstance(reader, ImageReader)
    return VisionTarget(model_of(name), stop, reader=reader)


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (24, 16)) -> Path:
    """A picture of noise, `size` wide and high."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def inline(path: Path) -> str:
    """A picture as base64."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def sequence(target: VisionTarget, pictures: list[str | Path], seed: int = 0, text: int = 5) -> list[int]:
    """A prompt: `text` random words, an image, more words, the next image ..., words."""
    generator = np.random.default_rng(seed)
    reader, found = target.reader, generator.integers(1, 110, text).tolist()
    assert reader is not None
    for source in pictures:
        image = reader.read(str(source), "test")
        found += [122, *range(image.base, image.base + image.rows), 123, *generator.integers(1, 110, text).tolist()]
    return found


def encoded(prompt: list[int]) -> Encoded:
    """A training row of a prompt, without supervised tokens."""
    return Encoded(np.array(prompt, np.int64), np.zeros(len(prompt), np.bool_))


def write_conversations(folder: Path, count: int, replies: bool = True) -> Path:
    """A file of conversations with a picture each, next to it."""
    lines = []
    for number in range(count):
        picture(folder / f"{number}.png", number, (16 + 8 * (number % 3), 16))
        words = " ".join(WORDS[(number + i) % len(WORDS)] for i in range(12))
        question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"what is the shape {number % 10}"}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
        lines.append(json.dumps({"messages": turns + [{"role": "assistant", "content": words}] * replies}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "data.jsonl"
