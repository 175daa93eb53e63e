"""Tokenizers of tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARK = "▁"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
WORDS = ["a", "boy", "named", "Tim", "hi", "USER", "ASSISTANT"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyzTUSERAIN.,:!é\n", MARK]


def save_bytes_tokenizer(folder: Path) -> None:
    """Letters and digits, one token each: 38 with <eos> and <pad>."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c in "abcdefghijklmnopqrstuvwxyz0123456789"]
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def _marked(normalizer: Any = None, cut: Any = None, decoder: Any = None) -> Tokenizer:
    """Words and letters with a mark for the space before them, and bytes for all other characters."""
    pieces = list(dict.fromkeys([*(MARK + word for word in WORDS), *WORDS, *LETTERS]))
    scores = [*((piece, 0.0) for piece in SPECIAL), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    scores += [(piece, -10.0 if len(piece) == 1 else -5.0 - 0.1 / len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if cut is not None:
        tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoder
    return tokenizer


def _bytes() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return bpe


def _fused(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _words(model: Any, decoder: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoder
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    cut = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return _marked(None, cut, decoder)


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A small tokenizer of this kind, a name of `KINDS`, without a template."""
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


PIECES = {piece: i for i, piece in enumerate([*SPECIAL, *WORDS, *(f"##{c}" for c in LETTERS), *LETTERS, "[", "]", "/", "INST"])}
KINDS: dict[str, Any] = {
    "bytes": _bytes,  # GPT-2, Llama-3, Qwen
    "llama": lambda: _marked(  # Llama-2, Mistral and TinyLlama: a mark at the start of every text between special tokens
        normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]),
        None,
        _fused(decoders.Strip(" ", 1, 0)),
    ),
    "gemma": lambda: _marked(normalizers.Replace(" ", MARK), None, _fused()),
    "metaspace, always": lambda: _metaspace("always"),
    "metaspace, first": lambda: _metaspace("first"),
    "metaspace, never": lambda: _metaspace("never"),
    "wordpiece": lambda: _words(models.WordPiece(PIECES, unk_token="<unk>"), decoders.WordPiece(cleanup=False)),
    "words": lambda: _words(models.WordLevel(PIECES, unk_token="<unk>")),
}
