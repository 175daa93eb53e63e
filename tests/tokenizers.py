"""A tokenizer for targets of tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def save_bytes_tokenizer(folder: Path) -> None:
    """Letters and digits, one token each: 38 with <eos> and <pad>."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c in "abcdefghijklmnopqrstuvwxyz0123456789"]
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
