"""Prompt files in three forms, and prompts as the target is given them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.core.errors import UserError
from drafttrain.data.prompts import Prompt, encode_prompt, load_prompts
from drafttrain.measure.cases import encode_cases, follow_ups

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'no' %}{{ raise_exception('refused') }}{% endif %}"
    "{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


def word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = ["unk", "user", "assistant", "a", "b", "c", "no"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="unk", chat_template=template)


def write(path: Path, *records: Any) -> str:
    content = "".join(json.dumps(r) + "\n" for r in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def test_load_prompts_reads_three_record_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl.gz",
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["c"]},
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "pass"},
        {"question": "how many?", "answer": "#### 4"},
    )
    assert load_prompts(path) == [
        Prompt(81, "writing", ["a", "b"], reference=["c"]),
        Prompt("HumanEval/0", "mixed", ["def f():"]),
        Prompt(3, "mixed", ["how many?"]),
    ]
    assert len(load_prompts(path, limit=2)) == 2


def test_load_prompts_embedded_reads_asset_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "prompts.jsonl", {"question_id": "q", "category": "code", "turns": ["a"]})
    monkeypatch.setattr("drafttrain.data.prompts.ASSETS", tmp_path)
    assert load_prompts("embedded") == [Prompt("q", "code", ["a"])]


MALFORMED: list[tuple[Any, str]] = [
    ({"question_id": 1}, "expected `turns`.* got question_id; write"),
    ({"turns": []}, "expected `turns`"),
    ({"turns": "a"}, "expected `turns`"),
    ({"turns": ["a", 2]}, "expected `turns`"),
    ({"prompt": 5}, "expected `turns`"),
    ({"turns": [" \n"]}, "expected text in the first turn, got a blank string"),
    ([], "expected a JSON object, got list"),
    ({"function": "f", "question": [["q"], [{"role": "user"}]]}, "expected `turns`"),
]


def test_load_prompts_malformed_line_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for record, says in MALFORMED:
        path = write(tmp_path / "p.jsonl", {"turns": ["a"]}, record)
        with subtests.test(record=record), pytest.raises(UserError, match=rf"^{path}:2: {says}"):
            load_prompts(path)


def test_load_prompts_missing_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "prompts.jsonl", {"turns": ["a"]})
    with pytest.raises(UserError, match=r"did you mean prompts.jsonl\?"):
        load_prompts(str(tmp_path / "promts.jsonl"))


@pytest.mark.parametrize("prompts", [3, None, [], [1, 2]])
def test_load_prompts_what_names_none_is_refused(prompts: Any) -> None:
    with pytest.raises(UserError, match=r"measure.prompts is .*; name embedded, a file, or one or more of"):
        load_prompts(prompts)


def test_encode_prompt_renders_turns_up_to_next_reply() -> None:
    chat, plain = word_tokenizer(TEMPLATE), word_tokenizer(None)
    assert chat.decode(encode_prompt(chat, ["a", "b"])) == "user a assistant"
    assert chat.decode(encode_prompt(chat, ["a", "b"], replies=["c"])) == "user a assistant c user b assistant"
    assert plain.decode(encode_prompt(plain, ["a b"])) == "a b"
    with pytest.raises(UserError, match="the chat template refuses the prompt 'no'"):
        encode_prompt(chat, ["no"])


def test_load_prompts_tools_of_record_reach_the_template(tmp_path: Path) -> None:
    """Of turns and of messages, and before a later turn too."""
    tool = {"type": "function", "function": {"name": "b"}}
    asked = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}
    path = write(tmp_path / "p.jsonl", {"turns": ["a", "a"], "tools": [tool]}, asked | {"functions": [tool["function"]]})
    chat = word_tokenizer("{% for t in tools or [] %}{{ t.function.name + ' ' }}{% endfor %}" + TEMPLATE)
    first, second = load_prompts(path)
    assert first.tools == second.tools == (tool,) and second.turns == ["a"]
    cases, _ = encode_cases([first, second], chat, 100)
    assert {chat.decode(case.tokens) for case in cases} == {"b user a assistant"}
    (later,), _ = follow_ups(cases[:1], [chat("c")["input_ids"]], chat, 100, None)
    assert chat.decode(later.tokens) == "b user a assistant c user a assistant"


def test_load_prompts_names_have_escaped_control_characters(tmp_path: Path) -> None:
    """They are shown on consoles; what the user says goes to the target as it is."""
    record = {"question_id": "a\x1b[2J", "category": "b\x07\u202e", "turns": ["c\x1b[2J"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    (prompt,) = load_prompts(str(tmp_path / "a.jsonl"))
    assert (prompt.question_id, prompt.category, prompt.turns) == ("a\\x1b[2J", "b\\x07\\u202e", ["c\x1b[2J"])
