"""A random target on disk, and texts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny_model


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a byte tokenizer, and texts of uneven length."""
    folder = tmp_path_factory.mktemp("material")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c in "abcdefghijklmnopqrstuvwxyz0123456789"]
    bpe.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=40, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder / "target")
    tiny_model().save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(40):
        size = int(torch.randint(12, 60, (1,), generator=generator))
        letters = torch.randint(0, 26, (size,), generator=generator).tolist()
        lines.append(json.dumps({"text": "".join(chr(97 + c) for c in letters)}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder
