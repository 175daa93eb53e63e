"""A tokenizer in llama.cpp's form inside a GGUF file: byte-level BPE, the kind of Llama 3, Qwen and GPT-2.

llama.cpp identifies the rule that splits a text into words by a name, and derives settings from that name. So a tokenizer can
be written only if its rule has a name there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from drafttrain.core.errors import UserError

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s" + CONTRACTIONS + "?|"
O200K = LETTERS % ("*", "+") + LETTERS % ("+", "*") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
GPT2, DIGITS = "gpt-2's own", "digit by digit"

# (rules that split a text, whether a word that is a piece is used without merging) -> llama.cpp's name
NAMES = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((O200K,), False): "gpt-4o",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
CONVERTER = "llama.cpp's convert_hf_to_gguf.py supports more of them, and reads a directory of format=vllm"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of tokenizer.json that are written."""

    model: dict[str, Any]
    name: str  # of the pre-tokenizer in llama.cpp
    added: list[dict[str, Any]]  # the added tokens


def refuse(tokenizer: Any) -> str | None:
    """Why llama.cpp cannot have this tokenizer; None where it can."""
    found = _parts(tokenizer)
    return found if isinstance(found, str) else None


def fields(tokenizer: Any, vocab: int, stop_ids: frozenset[int]) -> dict[str, Any]:
    """The tokenizer's GGUF fields. vocab: rows of the embedding, which may exceed the tokenizer's tokens. stop_ids: end
    tokens.
    """
    parts = _parts(tokenizer)
    assert not isinstance(parts, str), "`refuse` was called before"
    if len(tokenizer) > vocab:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the target {vocab}, and llama.cpp needs a row for each; "
            "remove the tokens that the target does not have from the tokenizer"
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab)], [UNUSED] * vocab
    for piece, i in parts.model["vocab"].items():
        tokens[i], kinds[i] = piece, NORMAL
    for added in parts.added:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [x if isinstance(x, str) else " ".join(x) for x in parts.model["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": parts.name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    return found | _special(tokenizer, stop_ids)


def _special(tokenizer: Any, stop_ids: frozenset[int]) -> dict[str, Any]:
    """The special tokens. llama.cpp has its own defaults for missing ones, such as token 11 for the end of a text."""
    eos = tokenizer.eos_token_id
    found: dict[str, Any] = {"tokenizer.ggml.eos_token_id": eos}
    others = sorted(stop_ids - {eos})
    named = {"bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id, "eot": others[0] if others else None}
    found |= {f"tokenizer.ggml.{name}_token_id": i for name, i in named.items() if i is not None}
    ids = tokenizer("a")["input_ids"]
    found["tokenizer.ggml.add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    found["tokenizer.ggml.add_eos_token"] = bool(ids) and ids[-1] == eos
    if isinstance(tokenizer.chat_template, str):
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _parts(tokenizer: Any) -> _Parts | str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return f"the target's tokenizer is no fast one, but GGUF files are written from tokenizer.json; {CONVERTER}"
    content = json.loads(backend.to_str())
    model, added = content["model"], content["added_tokens"]
    if model["type"] != "BPE" or model.get("byte_fallback") or not model["merges"]:
        kind = f"{model['type']}, {'with byte fallback' if model.get('byte_fallback') else 'no merges'}"
        return f"the target's tokenizer is no byte-level BPE ({kind if model['type'] == 'BPE' else model['type']}); {CONVERTER}"
    if (content["normalizer"] or {}).get("type", "NFC") != "NFC":
        return (
            f"the target's tokenizer normalizes texts ({content['normalizer']['type']}), which llama.cpp does not; {CONVERTER}"
        )
    name = NAMES.get((_cuts(content["pre_tokenizer"]), bool(model.get("ignore_merges"))))
    if name is None:
        return f"the target's tokenizer splits texts by a rule that is not known here; {CONVERTER}"
    if tokenizer.eos_token_id is None:
        return "the target's tokenizer has no end token, and llama.cpp would use token 11 instead; set its eos_token"
    return _Parts(model, name, added)


def _cuts(pre: dict[str, Any] | None) -> tuple[str, ...]:
    """The rules that split a text, in order, without the last step to bytes. Empty for an unknown kind of rule."""
    if pre is None:
        return ()
    steps: list[dict[str, Any]] = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    if steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return ()
    cuts = []
    for step in steps[:-1]:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            cuts.append(step["pattern"].get("Regex", ""))
        elif step["type"] == "Digits" and step["individual_digits"]:
            cuts.append(DIGITS)
        else:
            return ()
    return tuple(cuts) + ((GPT2,) if steps[-1]["use_regex"] else ())
