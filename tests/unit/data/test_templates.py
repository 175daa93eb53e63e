"""Masks of many chat templates: the supervised tokens, decoded, are the replies with their end-of-turn tokens, and nothing
else."""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded, Encoder
from drafttrain.data.files import read_template
from drafttrain.data.forms import Conversation
from drafttrain.data.forms import conversation as parsed
from drafttrain.data.statistics import template_rows
from drafttrain.data.templates import Template, TemplateOptions, special_tokens
from tests.unit.data.templates import CHATML, STYLES

MODELS = Path(__file__).parents[4] / "shared" / "data" / "models"
TEXTS = ["user: hello there, how are you?", "assistant: I am well, thank you.", "\n\n def f(x):\n    return x + 1\n", "system"]
REPLIES = ("Well, thank you!", "  def f(x):\n      return x\n\n", "It is 5 °C; 寒い.")


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few words, with the style's special tokens."""
    style = STYLES[name]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(style.special), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS * 5, trainer)
    bos = next((t for t in style.special if "begin" in t.lower() or "bos" in t.lower() or t == "<s>"), None)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=style.eos, chat_template=style.template)


def chat(*contents: str, system: str | None = None, **more: Any) -> Conversation:
    """Contents alternate between user and assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation("data.jsonl:7", tuple(([{"role": "system", "content": system}] if system else []) + turns), **more)


def runs(row: Encoded, decoder: PreTrainedTokenizerBase) -> list[str]:
    """The text of every run of supervised tokens, document after document."""
    found: list[list[int]] = []
    for document in row.split():
        before = False
        for token, supervised in zip(document.token_ids.tolist(), document.mask.tolist(), strict=True):
            if supervised:
                found += [] if before else [[]]
                found[-1].append(token)
            before = supervised
    return [decoder.decode(run) for run in found]


def expected(name: str, *replies: str) -> list[str]:
    style = STYLES[name]
    return [style.reply.format(reply.strip() if style.trims else reply) for reply in replies]


def unthought(text: str) -> str:
    """Without the empty thoughts that a template writes before a reply that has none."""
    return text.removeprefix("<think>\n\n</think>\n\n")


def conversation(name: str) -> Conversation:
    asked = ("Hi", "Write f", "And the weather?")
    turns = [text for pair in zip(asked, REPLIES, strict=True) for text in pair]
    return chat(*turns, system="Be short." if STYLES[name].system else None)


def test_template_replies_are_supervised_and_follow_serving_prompt(subtests: pytest.Subtests) -> None:
    """Before a reply's first supervised token stands the rendered prompt, and at most blanks that are one token with its
    end.
    """
    for name in STYLES:
        said, shown = conversation(name), tokenizer(name)
        with subtests.test(name=name):
            row = Encoder(shown, 10_000)(said)
            assert [unthought(run) for run in runs(row, shown)] == expected(name, *REPLIES)
            assert not row.truncated
            prompts = [_prompt(said, turn, shown) for turn, m in enumerate(said.messages) if m["role"] == "assistant"]
            found = []
            for document in row.split():
                starts = [i for i in range(1, len(document.mask)) if document.mask[i] and not document.mask[i - 1]]
                found += [shown.decode(document.token_ids[:start]) for start in starts]
            for before, prompt in zip(found, prompts, strict=True):
                assert before.startswith(prompt) and not before.removeprefix(prompt).strip()


def _prompt(said: Conversation, turn: int, shown: PreTrainedTokenizerBase) -> str:
    template = Template(shown, TemplateOptions())._text(said)
    messages = list(said.messages[:turn])
    return str(shown.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False))


# prefixes; a date and trimming; a text for each reply, with thoughts and without; marks
@pytest.mark.sampled(name=["chatml", "llama3.1", "qwen3", "deepseek-v3", "smollm-marked"])
@pytest.mark.parametrize("name", STYLES)
def test_encoder_any_max_length_keeps_whole_turns(name: str) -> None:
    """At any length: the first replies whole, or, where not even the first fits, its beginning."""
    whole, shown, counts = expected(name, *REPLIES), tokenizer(name), set()
    masks = [[*document.mask.tolist(), False] for document in Encoder(shown, 10_000)(conversation(name)).split()]
    ends = [i for mask in masks for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]
    lengths = {end + more for end in ends for more in range(-3, 4)} | set(range(2, 400, 40))
    for length in sorted(lengths):
        row = Encoder(shown, length)(conversation(name))
        assert all(len(ids) <= length for ids in row.documents)
        found = [unthought(run) for run in runs(row, shown)]
        if len(found) == 1 and found != whole[:1]:
            assert row.truncated
        else:
            assert found == whole[: len(found)]
            assert row.truncated == (len(found) < len(whole))
        counts.add(len(found))
    assert counts == {0, 1, 2, 3}


text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)
content = st.lists(st.one_of(text, st.sampled_from(["</s>", "<|im_end|>", "[INST]", "<think>", "\n", "user"])), max_size=4).map(
    "".join
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(content, min_size=6, max_size=6), st.sampled_from(sorted(set(STYLES) - {"qwen3", "deepseek-v3"})))
def test_encoder_reply_edges_equal_tokenization_of_whole_prefix(contents: list[str], name: str) -> None:
    encoder = Encoder(tokenizer(name), 10_000)
    for rendered in encoder.template.render(chat(*contents)):
        ids, edges = encoder._edges(rendered)
        for at, edge in zip((e for reply in rendered.replies for e in reply), edges, strict=True):
            prefix = tokenizer(name)(rendered.text[:at], add_special_tokens=False)["input_ids"]
            same = next((i for i, (a, b) in enumerate(zip(prefix, ids, strict=False)) if a != b), min(len(prefix), len(ids)))
            assert (edge.common, edge.size) == (same, len(prefix))


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_encoder_system_turn_refused_by_template_names_record(name: str) -> None:
    with pytest.raises(UserError, match=r"^data.jsonl:7: the chat template refuses this conversation .*; correct its roles"):
        Encoder(tokenizer(name), 100)(chat("Hi", "Yes", system="Be short."))


def test_encoder_system_turn_moved_by_template_is_refused() -> None:
    """As Mistral's third template: with a reply behind it, the system turn is nowhere."""
    with pytest.raises(UserError, match=r"^data.jsonl:7: .* cannot be masked reliably: turn 3 "):
        Encoder(tokenizer("mistral-v3"), 100)(chat("Hi", "Yes", system="Be short."))


def test_encoder_qwen3_thinking_of_each_reply_is_supervised() -> None:
    """Qwen3 leaves out the thoughts of earlier turns: each reply gets the text that ends with it."""
    said = chat("a", "<think>\nhm\n</think>\n\nb", "c", "d")
    messages = (*said.messages[:3], said.messages[3] | {"reasoning_content": "so"})
    row = Encoder(tokenizer("qwen3"), 1000)(Conversation("x:1", messages))
    assert runs(row, tokenizer("qwen3")) == ["<think>\nhm\n</think>\n\nb<|im_end|>", "<think>\nso\n</think>\n\nd<|im_end|>"]
    first, second = (tokenizer("qwen3").decode(ids) for ids in row.documents)
    assert (
        "hm" in first and "hm" not in second and second.startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<")
    )


def test_encoder_thinking_drop_leaves_reasoning_out() -> None:
    said = chat("a", "<think>\nhm\n</think>\n\nb", "c", "d")
    messages = (*said.messages[:3], said.messages[3] | {"reasoning_content": "so"})
    row = Encoder(tokenizer("qwen3"), 1000, TemplateOptions(thinking="drop"))(Conversation("x:1", messages))
    assert runs(row, tokenizer("qwen3")) == ["b<|im_end|>", "d<|im_end|>"]
    assert all("<think>\n\n</think>\n\n" in tokenizer("qwen3").decode(ids) for ids in row.documents)


def test_encoder_chat_template_kwargs_of_record_reach_its_template_alone() -> None:
    """TRL's field. What the command asks for comes first."""
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

    def replies(arguments: Any, **options: Any) -> list[str]:
        encoder = Encoder(tokenizer("qwen3"), 1000, TemplateOptions(**options))
        return runs(encoder(parsed("x:1", turns | {"chat_template_kwargs": arguments})), tokenizer("qwen3"))

    told = ["b<|im_end|>"]  # the prompt holds the empty thoughts
    assert replies({"enable_thinking": False}) == replies('{"enable_thinking": false}') == told
    assert replies({"enable_thinking": True}) == replies({}) == replies(None) == ["<think>\n\n</think>\n\nb<|im_end|>"]
    assert replies({"enable_thinking": True}, thinking="drop") == told


def test_encoder_template_without_thinking_puts_reasoning_into_reply() -> None:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "hm"})
    row = Encoder(tokenizer("chatml"), 1000)(Conversation("x:1", messages))
    assert runs(row, tokenizer("chatml")) == ["<think>\nhm\n</think>\n\nb<|im_end|>"]


def test_encoder_generation_prompt_without_matching_reply_is_refused(tmp_path: Path) -> None:
    """As DeepSeek-R1's: the generation prompt opens thoughts, of which a rendered reply has lost every sign."""
    shown = PreTrainedTokenizerFast(tokenizer_object=tokenizer("chatml").backend_tokenizer, eos_token="<|im_end|>")
    shown.chat_template = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    with pytest.raises(UserError, match=r"^data.jsonl:7: .* cannot be masked reliably: turn 2 .*; set data.template=FILE"):
        Encoder(shown, 100)(chat("a", "b"))
    (tmp_path / "mended.jinja").write_text(STYLES["smollm-marked"].template)
    mended = Encoder(shown, 100, TemplateOptions(read_template(str(tmp_path / "mended.jinja"))))
    assert runs(mended(chat("a", "b")), shown) == ["b<|im_end|>"]
    with pytest.raises(UserError, match=r"data.template=none.jinja: expected a Jinja file in UTF-8, got none"):
        read_template("none.jinja")


@pytest.mark.parametrize(
    ("name", "written"), [("llama3.1", "Today Date: 31 Jan 2026"), ("granite", "Today's Date: January 31, 2026.")]
)
def test_encoder_template_date_equals_configured_date(name: str, written: str) -> None:
    row = Encoder(tokenizer(name), 1000, TemplateOptions(date="2026-01-31"))(chat("a", "b"))
    assert written in tokenizer(name).decode(row.token_ids)
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    date, rendered = "", ""
    while date != str(datetime.now().date()):  # midnight may pass
        date, rendered = str(datetime.now().date()), tokenizer(name).apply_chat_template(prompt, tokenize=False)
    today = Encoder(tokenizer(name), 1000, TemplateOptions(date=date))(chat("a", "b"))
    assert rendered == tokenizer(name).decode(today.token_ids)
    with pytest.raises(UserError, match=r"data.date is 'today'"):
        Encoder(tokenizer(name), 1000, TemplateOptions(date="today"))(chat("a", "b"))


@pytest.mark.parametrize("name", ["qwen3", "llama3.1"])
def test_encoder_tools_and_tool_calls_reach_template(name: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
    messages = (
        {"role": "user", "content": "And in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "21 °C"},
        {"role": "assistant", "content": "Warm."},
    )
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    row = Encoder(tokenizer(name), 1000)(Conversation("x:1", messages, tools=(tool,)))
    asked, answered = (unthought(run) for run in runs(row, tokenizer(name)))
    assert '"name": "weather"' in asked and '{"place": "Rome"}' in asked
    assert answered == expected(name, "Warm.")[0]
    assert '{"type": "function"' in tokenizer(name).decode(row.documents[0])


BLANKS = re.compile(r"\n+(?=<tool_call>|$)")
MARKED_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


@pytest.mark.parametrize("template", [STYLES["qwen3"].template, MARKED_CALLS])
def test_encoder_supervises_named_parts_of_replies(template: str, subtests: pytest.Subtests) -> None:
    """Reasoning with its marks, text, calls; the end token belongs to the last part of a turn.

    Blanks between two parts may be a token that the first part alone does not end with.
    """
    call = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
    messages = (
        {"role": "user", "content": "And in Rome?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "a tool", "tool_calls": [call]},
        {"role": "tool", "content": "21 °C"},
        {"role": "assistant", "content": "", "reasoning_content": "two tools", "tool_calls": [call, call]},
        {"role": "tool", "content": "22 °C"},
        {"role": "assistant", "content": "Warm.", "reasoning_content": "warm"},
    )
    shown = PreTrainedTokenizerFast(tokenizer_object=tokenizer("qwen3").backend_tokenizer, eos_token="<|im_end|>")
    shown.chat_template = template
    thoughts = [f"<think>\n{thought}\n</think>\n\n" for thought in ("a tool", "two tools", "warm")]
    written = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
    expected = {
        ("reasoning",): thoughts,
        ("call",): [f"{written}<|im_end|>", f"{written}{written}<|im_end|>"],
        ("reply",): ["Let me see.", "Warm.<|im_end|>"],
        ("reply", "call"): [f"Let me see.{written}<|im_end|>", f"{written}{written}<|im_end|>", "Warm.<|im_end|>"],
        ("call", "reasoning"): [
            thoughts[0], f"{written}<|im_end|>", f"{thoughts[1]}{written}{written}<|im_end|>", thoughts[2],
        ],
    }  # fmt: skip
    for parts, found in expected.items():
        with subtests.test(parts=parts):
            row = Encoder(shown, 2000, TemplateOptions(supervise=parts))(Conversation("x:1", messages))
            assert [BLANKS.sub("", run) for run in runs(row, shown)] == [BLANKS.sub("", run) for run in found]
    silent = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."})
    assert not Encoder(shown, 2000, TemplateOptions(supervise=("reasoning",)))(Conversation("x:1", silent)).supervised
    without = Encoder(shown, 2000, TemplateOptions(supervise=("call",)))(Conversation("x:1", (messages[0], messages[5])))
    assert not without.supervised and not without.truncated


def test_encoder_parts_of_prepared_conversation_come_from_its_text() -> None:
    """Its tokens do not say which part they are of; without parts they are used."""
    shown = tokenizer("qwen3")
    record = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}],
        "documents": [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}],
        "tokenizer": Encoder(shown, 100).fingerprint,
    }
    assert Encoder(shown, 100)(parsed("x:1", record)).token_ids.tolist() == [5, 6, 7]
    row = Encoder(shown, 100, TemplateOptions(supervise=("reply",)))(parsed("x:1", record))
    assert runs(row, shown) == ["b<|im_end|>"]


@pytest.mark.parametrize("model", ["stories260K", "babyllama-361"])
def test_encoder_published_tokenizer_edges_equal_whole_text_tokens(model: str) -> None:
    """Sentencepiece-like, with a blank before every text: pieces after a special token are what they are in the whole text."""
    if not (MODELS / model).is_dir():
        pytest.skip(f"needs the public models in {MODELS}")
    shown = AutoTokenizer.from_pretrained(MODELS / model)
    shown.chat_template = STYLES["llama2"].template
    encoder = Encoder(shown, 1000)
    for said in (chat("once upon", " a time", "there was", "a girl\n\n"), chat("Hi there", "yes")):
        (rendered,) = encoder.template.render(said)
        ids, edges = encoder._edges(rendered)
        for at, edge in zip((e for reply in rendered.replies for e in reply), edges, strict=True):
            assert edge.size == len(shown(rendered.text[:at], add_special_tokens=False)["input_ids"])
        assert ids == shown(rendered.text, add_special_tokens=False)["input_ids"]
        assert len(runs(encoder(said), shown)) == len(said.messages) // 2


def test_template_rows_say_where_masks_come_from() -> None:
    found = tokenizer(next(iter(STYLES)))
    marked = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    ways = [dict(template_rows(found, "here", given))["masks from"] for given in (None, marked)]
    assert ways == ["rendered prefixes", "its own generation marks"]
    without = SimpleNamespace(chat_template=None)
    assert template_rows(without, "here")[1] == ("chat template", "none: `text` records only")  # type: ignore[arg-type]


def test_special_tokens_pattern_leaves_out_normalized_and_ordinary_added_tokens() -> None:
    added = tokenizer.__wrapped__("chatml")
    added.add_tokens([AddedToken("<ordinary>", normalized=False), AddedToken("<normal>", special=True, normalized=True)])
    pattern = special_tokens(added)
    assert pattern is not None
    assert pattern.findall("<ordinary> <normal> <|im_end|>") == ["<|im_end|>"]
