"""Tokens in, tokens out: what is kept of a reply is its tokens, and its text gives them again after its prompt."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafttrain.api import decoding
from drafttrain.commands.generate import Stream
from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.forms import Conversation, conversation
from drafttrain.data.generation_jobs import TokenTurn, documents_of, packed_turns
from drafttrain.data.prompts import encode_messages
from drafttrain.data.reply_text import Continuation
from drafttrain.data.statistics import sample_of
from drafttrain.data.templates import TemplateOptions
from drafttrain.decoding.request import Chunk, Result
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_tokenizer
from tests.tokenizers import KINDS, tokenizer_of

MODELS = Path(__file__).parents[4] / "shared" / "data" / "models"
REAL = [name for name in ("stories260K", "babyllama-361") if (MODELS / name).is_dir()]
ALL = [*KINDS, "embedded", *REAL]
ASK = "{% for m in messages %}{% if m['role'] == 'user' %}"
TEMPLATES = {  # the prompt ends without a space, and the reply follows as it is
    "[/INST]": ASK
    + "{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}",
    "ASSISTANT:": ASK + "{{ '<s>USER: ' + m['content'] + ' ' }}{% else %}{{ 'ASSISTANT:' + m['content'] + '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
}


def tokenizer(name: str) -> Any:
    if name in KINDS:
        return tokenizer_of(name)
    return load_tokenizer(TargetOptions() if name == "embedded" else TargetOptions(name="hf", path=str(MODELS / name)))


def test_reply_text_after_plain_prompt_gives_its_tokens_again(subtests: pytest.Subtests) -> None:
    for name in ALL:
        own, checked = tokenizer(name), 0
        for prompt in ("a boy", "a boy ", "hi\n", "a boy,", "é", "<s>a"):
            before = list(own(prompt)["input_ids"])
            for reply in (" named Tim.", "named", " é!\n hi", "\nhi", "  a", "寒い", " 寒"):
                ids = list(own(prompt + reply)["input_ids"])
                if ids[: len(before)] != before or own.unk_token_id in ids:
                    continue  # its first token covers the end of the prompt, or it has no text
                with subtests.test(tokenizer=name, prompt=prompt, reply=reply):
                    found = Continuation.of_ids(own, before).text(ids[len(before) :])
                    assert list(own(prompt + found)["input_ids"]) == ids
                    checked += 1
        assert checked > 20


def test_reply_text_after_template_gives_its_tokens_again(subtests: pytest.Subtests) -> None:
    asked = [{"role": "user", "content": "hi"}]
    for name, template in ((name, template) for name in KINDS for template in TEMPLATES.values()):
        own = tokenizer(name)
        own.chat_template = template
        before = encode_messages(own, asked)
        for reply in ("named Tim.", " named", "é", " a"):
            ids = encode_messages(own, asked, reply=reply)[:-1]
            if ids[: len(before)] == before:
                with subtests.test(tokenizer=name, template=template, reply=reply):
                    found = Continuation.of_messages(own, before, asked).text(ids[len(before) :])
                    assert encode_messages(own, asked, reply=found)[:-1] == ids
        own.chat_template = None


def test_generate_stream_and_api_decode_reply_after_its_prompt(subtests: pytest.Subtests) -> None:
    for name in KINDS:
        own = tokenizer(name)
        before, ids = (list(own(text)["input_ids"]) for text in ("a boy", "a boy named Tim"))
        loaded: Any = SimpleNamespace(tokenizer=own, target=SimpleNamespace(stop_ids=frozenset({own.eos_token_id})))
        following, reply = Continuation.of_ids(own, before), ids[len(before) :]
        with subtests.test(tokenizer=name):
            text = following.text(reply)
            assert text == " named Tim"
            stream, end = Stream(loaded, following), own.eos_token_id
            assert "".join(stream.styled(Chunk(Result(0, 1), [token], 0)).plain for token in [*reply, end]) == text
            result = Result(0, len(before), tokens=[*reply, end], ended_by="stop")
            found = decoding._generation(loaded, result, decoding._continuation(loaded, "a boy", before, False), False)
            assert found.text == text


def test_sample_of_conversation_shows_the_space_before_a_reply() -> None:
    for name in KINDS:
        own = tokenizer(name)
        before, ids = (list(own(text)["input_ids"]) for text in ("a boy", "a boy named Tim"))
        row = Encoded(np.array(ids, np.int32), np.arange(len(ids)) >= len(before))
        shown = sample_of(Conversation("x:1"), row, own)
        assert [(piece.text, piece.supervised) for piece in shown.pieces] == [("a boy", False), (" named Tim", True)]


def record_of(own: Any, turns: list[TokenTurn]) -> dict[str, Any]:
    """A record of `prepare`, as it is read from its file."""
    messages = [{"role": role, "content": "x"} for _ in turns for role in ("user", "assistant")]
    packed = json.loads(json.dumps(packed_turns(turns)))
    fingerprint = Encoder(own, 2).fingerprint
    return json.loads(json.dumps({"messages": messages, "documents": documents_of(packed), "tokenizer": fingerprint}))


def test_prepared_tokens_of_any_tokenizer_are_trained_unchanged(subtests: pytest.Subtests) -> None:
    draw = random.Random(5)
    for name in ALL:
        own = tokenizer(name)

        def some(count: int, size: int = len(own)) -> list[int]:
            return [draw.randrange(size) for _ in range(count)]

        with subtests.test(tokenizer=name):
            first = TokenTurn(some(5), some(4))
            second = TokenTurn([*first.prompt, *first.reply, *some(3)], some(6))  # it continues the first
            third = TokenTurn([*second.prompt[:7], *some(2)], some(3))  # a template that changes earlier turns
            row = Encoder(own, 100)(conversation("x:1", record_of(own, [first, second, third])))
            assert [ids.tolist() for ids in row.documents] == [
                [*second.prompt, *second.reply],
                [*third.prompt, *third.reply],
            ]
            assert row.mask.tolist() == [
                *([False] * 5 + [True] * 4 + [False] * 3 + [True] * 6),
                *([False] * 9 + [True] * 3),
            ]


def test_prepared_tokens_beyond_length_keep_whole_turns() -> None:
    own = tokenizer("bytes")
    first = TokenTurn([1, 2, 3], [4, 5])
    record = record_of(own, [first, TokenTurn([1, 2, 3, 4, 5, 6], [7, 8])])
    rows = [Encoder(own, length)(conversation("x:1", record)) for length in (4, 7, 8)]
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert [row.supervised for row in rows] == [1, 2, 4] and [row.truncated for row in rows] == [True, True, False]


def test_prepared_tokens_of_another_tokenizer_or_template_give_way_to_text() -> None:
    own = tokenizer("bytes")
    found = conversation("x:1", record_of(own, [TokenTurn([5, 6], [7, 8])]))
    template = TEMPLATES["ASSISTANT:"]
    text = Encoder(own, 100, TemplateOptions(template))(found)
    assert "USER" in own.decode(text.token_ids)
    assert Encoder(tokenizer("gemma"), 100, TemplateOptions(template))(found).token_ids.tolist() != [5, 6, 7, 8]
    assert Encoder(own, 100)(found).token_ids.tolist() == [5, 6, 7, 8]
