"""Tokenizers inside GGUF files: each kind that llama.cpp has a name for makes the same tokens, others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from drafttrain.core.errors import ParityError, UserError
from drafttrain.data.prompts import load_prompts
from drafttrain.export import gguf_tokenizer as layout
from drafttrain.export.gguf_file import GgufFile
from drafttrain.export.gguf_tokenizer import TEXT, UNMARKED_TEXT, check_tokenizer
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + END
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + END
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s" + CONTRACTIONS + "?"
O200K = CASED % ("*", "+") + "|" + CASED % ("+", "*") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern: str) -> Any:
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), BYTES])


CUTS = {
    "gpt-2": WORDS,
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), WORDS]),
    "llama-bpe": split(LLAMA3),
    "smaug-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "gpt-4o": split(O200K),
}


@cache
def texts() -> list[str]:
    asked = [turn for prompt in load_prompts("embedded", 12) for turn in prompt.turns]
    return [
        TEXT,
        UNMARKED_TEXT,
        "",
        " ",
        "\n\n\n",
        "  two  spaces ",
        "I'LL say 'tis 1000000 times",
        "<|end|>a<|end|><|mine|> b",
        *asked,
    ]


@cache
def trained(name: str) -> Any:
    """A byte-level BPE of a few hundred pieces, with two added tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = CUTS[name], decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken("<|mine|>", normalized=False)])
    if name == "llama-bpe":
        begun = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begun)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>")


def check(found: dict[str, Any], tokenizer: Any, rows: int | None = None) -> None:
    """Try the tokenizer in these fields of a file. rows: of the target's embedding."""
    made = [(text, list(tokenizer(text)["input_ids"])) for text in texts()]
    check_tokenizer(GgufFile(Path("draft.gguf"), found), rows or len(tokenizer), tokenizer.get_vocab(), made)


def fields(tokenizer: Any, rows: int | None = None) -> dict[str, Any]:
    return layout.fields(tokenizer, rows or len(tokenizer), frozenset({tokenizer.eos_token_id}))


def test_gguf_tokenizer_fields_give_same_tokens(subtests: pytest.Subtests) -> None:
    for name in CUTS:
        tokenizer = trained(name)
        with subtests.test(name=name):
            assert layout.refuse(tokenizer) is None
            found, last = fields(tokenizer, len(tokenizer) + 3), f"[PAD{len(tokenizer) + 2}]"
            assert found["tokenizer.ggml.pre"] == name
            assert found["tokenizer.ggml.tokens"][-1] == last and found["tokenizer.ggml.token_type"][-1] == 5
            assert found["tokenizer.ggml.add_bos_token"] is (name == "llama-bpe")
            check(found, tokenizer, len(tokenizer) + 3)


def test_gguf_tokenizer_of_embedded_target_gives_same_tokens() -> None:
    loaded = load_target(TargetOptions())
    tokenizer: Any = loaded.tokenizer
    found = layout.fields(tokenizer, loaded.target.shape.vocab_size, loaded.target.stop_ids)
    assert found["tokenizer.ggml.pre"] == "gpt-2" and found["tokenizer.ggml.eos_token_id"] == 3
    assert found["tokenizer.ggml.eot_token_id"] == 0 and found["tokenizer.chat_template"] == tokenizer.chat_template
    assert [found["tokenizer.ggml.token_type"][i] for i in range(8)] == [3] * 6 + [1] * 2
    check(found, tokenizer)


def test_gguf_tokenizer_with_more_tokens_than_target_is_refused() -> None:
    with pytest.raises(UserError, match=r"llama\.cpp needs a row for each"):
        fields(trained("qwen2"), len(trained("qwen2")) - 1)


def harmed(change: Callable[[dict[str, Any]], Any], name: str = "qwen2") -> None:
    found = fields(trained(name))
    change(found)
    check(found, trained(name))


HARMS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("qwen2", lambda f: f.update({"tokenizer.ggml.pre": "gpt-2"})),
    ("llama-bpe", lambda f: f.update({"tokenizer.ggml.pre": "qwen2"})),
    ("gpt-2", lambda f: f.update({"tokenizer.ggml.pre": "smollm"})),
    ("qwen2", lambda f: f["tokenizer.ggml.merges"].reverse()),
    ("qwen2", lambda f: f["tokenizer.ggml.merges"].pop(0)),
    ("qwen2", lambda f: f.update({"tokenizer.ggml.add_bos_token": True})),
    ("llama-bpe", lambda f: f.update({"tokenizer.ggml.add_bos_token": False})),
    ("qwen2", lambda f: f["tokenizer.ggml.token_type"].__setitem__(1, 1)),
    ("qwen2", lambda f: f["tokenizer.ggml.tokens"].pop()),
]


def test_gguf_tokenizer_changed_field_is_detected(subtests: pytest.Subtests) -> None:
    for number, (name, change) in enumerate(HARMS):
        with subtests.test(name=name, number=number):
            with pytest.raises(ParityError) as caught:
                harmed(change, name)
            assert caught.value.name == "tokenizer"


def test_gguf_tokenizer_ignore_merges_pre_name_is_detected() -> None:
    """It differs for a piece that no merges lead to."""
    tokenizer = trained("smaug-bpe")
    content, ids = fields(tokenizer), tokenizer.get_vocab()
    word = next(piece for piece in sorted(ids) if len(piece) > 5 and piece.isalpha() and piece.isascii())
    merges = [merge for merge in content["tokenizer.ggml.merges"] if merge.replace(" ", "") != word]
    content |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.pre": "llama-bpe"}
    with pytest.raises(ParityError, match=rf"is \[{ids[word]}\] there"):
        check_tokenizer(GgufFile(Path("draft.gguf"), content), len(tokenizer), ids, [(word, [0])])


def made(model: Any, cut: Any, **more: Any) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = cut
    if "normalizer" in more:
        tokenizer.normalizer = more.pop("normalizer")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "a", **more})


def bpe(**options: Any) -> Any:
    return models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], **options)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: made(models.WordLevel({"a": 0, "b": 1}, "a"), WORDS),
        r"no byte-level BPE \(WordLevel\); .*convert_hf_to_gguf",
    ),
    (lambda: made(bpe(byte_fallback=True), WORDS), r"no byte-level BPE \(BPE, with byte fallback\)"),
    (lambda: made(models.BPE({"a": 0}, []), WORDS), r"no byte-level BPE \(BPE, no merges\)"),
    (lambda: made(bpe(), WORDS, normalizer=normalizers.Lowercase()), r"normalizes texts \(Lowercase\)"),
    (lambda: made(bpe(), pre.Whitespace()), "splits texts by a rule that is not known here"),
    (lambda: made(bpe(), pre.ByteLevel(add_prefix_space=True)), "splits texts by a rule that is not known here"),
    (lambda: made(bpe(), split(r"\w+")), "splits texts by a rule that is not known here"),
    (lambda: made(bpe(), pre.Sequence([])), "splits texts by a rule that is not known here"),
    (lambda: made(bpe(), None), "splits texts by a rule that is not known here"),
    (lambda: made(bpe(ignore_merges=True), WORDS), "splits texts by a rule that is not known here"),
    (lambda: made(bpe(), WORDS, eos_token=None), "has no end token, and llama.cpp would use token 11"),
    (lambda: object(), "is no fast one"),
]


def test_gguf_tokenizer_unsupported_type_is_refused(subtests: pytest.Subtests) -> None:
    for number, (tokenizer, says) in enumerate(REFUSED):
        with subtests.test(says=says, number=number):
            assert re.search(says, layout.refuse(tokenizer()) or "")


def test_gguf_tokenizer_nfc_normalizer_is_accepted() -> None:
    """Qwen's tokenizer asks for it; llama.cpp's own converter leaves it out too."""
    assert layout.refuse(made(bpe(), WORDS, normalizer=normalizers.NFC())) is None
