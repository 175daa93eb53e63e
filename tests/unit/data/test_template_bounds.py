"""Chat templates that divide by zero, call themselves, or build without end: one line, in bounded time and memory."""

from __future__ import annotations

import resource
import signal
from typing import Any

import pytest
from transformers import AutoTokenizer

from drafttrain.core.errors import UserError
from drafttrain.data import templates
from drafttrain.data.chat import Encoder
from drafttrain.data.forms import Conversation
from drafttrain.data.prompts import encode_messages
from drafttrain.data.templates import TemplateOptions, TooLongError, bounded
from drafttrain.targets.load import EMBEDDED

HOSTILE = {
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "recursion": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    "range": ("{% for i in range(10 ** 9) %}{{ i }}{% endfor %}", "OverflowError"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.1 seconds"),
    "power": ("{{ 10 ** (10 ** 8) }}", "more than 0.1 seconds|MemoryError"),
    "string": ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
    "doubling": (
        "{% set n = namespace(s='abcdefgh') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "MemoryError",
    ),
    "field": ("{{ messages[0].content.nothing.there }}", "UndefinedError|has no attribute"),
    "syntax": ("{% for %}", "Expected"),
}
TALK = Conversation("data.jsonl:3", messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}))


@pytest.fixture(scope="module")
def embedded() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture
def tokenizer(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With little memory for its template, which is put back."""
    monkeypatch.setattr(templates, "SIZE", 64 << 20)
    monkeypatch.setattr(embedded, "chat_template", embedded.chat_template)
    return embedded


def test_template_hostile_code_is_refused_in_one_line(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for name, (template, said) in HOSTILE.items():
        tokenizer.chat_template = template
        # only what ends by its time gets little: on a slow machine another fault must come first
        monkeypatch.setattr(templates, "SECONDS", 0.1 if "seconds" in said else 60.0)
        ways = [lambda: encode_messages(tokenizer, [dict(TALK.messages[0])]), lambda: Encoder(tokenizer, 64)(TALK)]
        if name == "division":  # the user's own template is bounded by the same call
            ways.insert(0, lambda template=template: Encoder(tokenizer, 64, TemplateOptions(template))(TALK))
        with subtests.test(name=name):
            for way in ways:
                with pytest.raises(UserError, match=said) as error:
                    way()
                assert "\n" not in str(error.value) and len(str(error.value)) < 500
            assert "data.jsonl:3" in str(error.value) and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
            assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0.0


def test_template_failure_names_tokenizer_or_option(tokenizer: Any) -> None:
    tokenizer.chat_template = HOSTILE["division"][0]
    with pytest.raises(UserError, match=f"the template of the tokenizer {EMBEDDED} fails"):
        Encoder(tokenizer, 64)(TALK)
    with pytest.raises(UserError, match=r"data\.template fails"):
        Encoder(tokenizer, 64, TemplateOptions(tokenizer.chat_template))(TALK)


def test_bounded_restores_time_and_memory_limits() -> None:
    for _ in range(3):
        with pytest.raises(TooLongError), bounded(0.05):
            while True:
                pass
        with pytest.raises(MemoryError), bounded(size=16 << 20):
            bytearray(1 << 30)
    with bounded(0.05):
        pass
    assert len(bytearray(1 << 28)) == 1 << 28
