"""Public prompt sets in their published forms, from files and from the hub, and what a record asks of its reply."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from drafttrain.core.errors import UserError
from drafttrain.data.forms import tools_of
from drafttrain.data.prompts import FEW, SETS, SPEED_CONFIGS, SPEED_MASK, Prompt, load_prompts, named_prompts

PUBLIC = Path(os.environ.get("DRAFTTRAIN_TEST_DATA", Path(__file__).parents[4] / "shared" / "data")) / "prompts"
FORMS: dict[str, tuple[dict[str, Any], Prompt]] = {  # one record as it is published, and the prompt it gives
    "spec_bench": (
        {"question_id": 241, "category": "summarization", "turns": ["Summarize: A b."], "reference": ["B."]},
        Prompt(241, "summarization", ["Summarize: A b."], reference=["B."], origin="spec_bench"),
    ),
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        Prompt(81, "writing", ["Write.", "Rewrite."], origin="mt_bench"),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n", "test": "", "entry_point": "f"},
        Prompt("HumanEval/0", "humaneval", ["def f():\n"], reference="    pass\n", origin="humaneval"),
    ),
    "gsm8k": (
        {"question": "1 + 1?", "answer": "It is <<1+1=2>>2\n#### 2"},
        Prompt(1, "gsm8k", ["1 + 1?"], reference="It is <<1+1=2>>2\n#### 2", origin="gsm8k"),
    ),
    "math500": (
        {"problem": "Find $x$.", "solution": "$x=1$", "answer": "1", "subject": "Algebra", "level": 2, "unique_id": "test/a/1"},
        Prompt("test/a/1", "Algebra", ["Find $x$."], reference="$x=1$", origin="math500"),
    ),
    "aime25": (
        {"problem": "Find $x$.", "answer": "70", "id": "0"},
        Prompt("0", "aime25", ["Find $x$."], reference="70", origin="aime25"),
    ),
    "mbpp": (
        {"task_id": 11, "text": "Write f.", "code": "def f(): 1", "test_list": ["assert f()", "assert f(2)"]},
        Prompt(
            11,
            "mbpp",
            ["Write f.\nYour code should pass these tests:\n\nassert f()\nassert f(2)"],
            reference="def f(): 1",
            origin="mbpp",
        ),
    ),
    "livecodebench": (
        {"question_id": "abc", "question_content": "Sort.", "starter_code": "def f():", "difficulty": "easy"},
        Prompt("abc", "easy", ["Sort.\n\nBegin with this code:\n\ndef f():"], origin="livecodebench"),
    ),
    "bfcl": (
        {
            "id": "multiple_0",
            "question": [[{"role": "user", "content": "Area?"}]],
            "function": [
                {
                    "name": "area",
                    "parameters": {"type": "dict", "properties": {"type": {"type": "float"}}, "required": ["type"]},
                }
            ],
        },
        Prompt(
            "multiple_0",
            "bfcl",
            ["Area?"],
            origin="bfcl",
            tools=tools_of(
                "",
                {
                    "tools": [
                        {
                            "name": "area",
                            "parameters": {
                                "type": "object",
                                "properties": {"type": {"type": "number"}},
                                "required": ["type"],
                            },
                        }
                    ]
                },
            ),
        ),
    ),
    "arena_hard": (
        {"question_id": "f00", "category": "arena-hard-v0.1", "cluster": "SQL", "turns": [{"content": "Join."}]},
        Prompt("f00", "arena-hard-v0.1", ["Join."], origin="arena_hard"),
    ),
    **{
        name: (
            {"question_id": "s1", "category": "coding", "sub_category": None, "turns": ["Sort."], "source": "x"},
            Prompt("s1", "coding", ["Sort."], origin=name),
        )
        for name in SPEED_CONFIGS
    },
    "alpaca": (
        {"instruction": "Translate.", "input": "Haus", "output": "house", "text": "Below is ..."},
        Prompt(1, "alpaca", ["Translate.\n\nHaus"], reference="house", origin="alpaca"),
    ),
    "cnn_dm": (
        {"article": "A dog.", "highlights": "Dog.", "id": "f00"},
        Prompt("f00", "cnn_dm", ["Summarize: A dog."], reference="Dog.", origin="cnn_dm"),
    ),
}


def write(path: Path, record: dict[str, Any]) -> Path:
    text = json.dumps([record] if path.suffix == ".json" else record).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_prompt_sets_all_have_example_record() -> None:
    assert set(FORMS) == set(SETS)


@pytest.mark.sampled  # `data/files.py` reads the endings, whatever the set is
@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_load_prompts_local_file_in_published_form_is_read(tmp_path: Path, name: str, ending: str) -> None:
    record, wanted = FORMS[name]
    file = write(tmp_path / f"test.{ending}", record)
    assert load_prompts(f"{name}:{file}") == [wanted]
    (told,) = load_prompts(str(file))  # by its fields alone
    assert (told.turns, told.tools) == (wanted.turns, wanted.tools) and told.origin is None


@pytest.mark.parametrize("name", [name for name in sorted(SETS) if SETS[name].hub])
def test_load_prompts_hub_set_reads_its_split_up_to_limit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked, (record, wanted) = [], FORMS[name]

    def load(hub: str, **how: Any) -> list[dict[str, Any]]:
        asked.append((hub, how["name"], how["split"], how["streaming"]))
        return [record] * 100

    monkeypatch.setattr(datasets, "load_dataset", load)
    chosen = SETS[name]
    assert load_prompts(name, 2)[0] == wanted and len(load_prompts(name, 2)) == 2
    assert len(load_prompts(name)) == (FEW if chosen.most else 100)
    assert asked[0] == (chosen.hub, chosen.config, chosen.split, True) and asked[2][3] == (chosen.most is not None)


def test_load_prompts_hub_mt_bench_prompt_field_becomes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"prompt": ["Write.", "Rewrite."], "prompt_id": 3, "category": "writing", "reference": []}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [record])
    assert load_prompts("mt_bench") == [Prompt(1, "writing", ["Write.", "Rewrite."], reference=[], origin="mt_bench")]


def test_load_prompts_masked_records_are_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, wanted = FORMS["speed_bench"]
    masked = record | {"turns": [f"{SPEED_MASK} USING SPECDEC_BENCH"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [masked, record, masked, record])
    assert load_prompts("speed_bench") == [wanted] * 2 and load_prompts("speed_bench", 1) == [wanted]
    assert capsys.readouterr().err.count("note: speed_bench: 2 masked prompts are left out") == 1
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(masked)}\n{json.dumps(record)}\n")
    for limit in (None, 1):
        assert load_prompts(f"speed_bench:{tmp_path / 'x.jsonl'}", limit) == [wanted]


def test_load_prompts_hub_set_without_network_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub\nat all")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        UserError, match=r"^prompt set gsm8k: openai/gsm8k cannot be loaded .* measure\.prompts=gsm8k:FILE$"
    ) as error:
        load_prompts("gsm8k")
    assert "\n" not in str(error.value)
    with pytest.raises(
        UserError, match=r"download https://.*/spec_bench/question\.jsonl, and give the file as .*=spec_bench:FILE$"
    ):
        load_prompts("spec_bench")


def test_load_prompts_several_sets_are_read_in_order(tmp_path: Path) -> None:
    files = [f"{name}:{write(tmp_path / f'{name}.jsonl', FORMS[name][0])}" for name in ("gsm8k", "cnn_dm")]
    found = load_prompts([*files, "embedded"], 1)
    assert [p.origin for p in found] == ["gsm8k", "cnn_dm", None] and named_prompts(files) == ", ".join(files)
    for bad in ([], [3]):
        with pytest.raises(UserError, match="name embedded, a file, or one or more of spec_bench"):
            load_prompts(bad)


def test_load_prompts_record_of_other_form_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", {"question": "1?"})
    with pytest.raises(UserError, match="expected the fields of humaneval, got question"):
        load_prompts(f"humaneval:{file}")


REPLIES: list[tuple[dict[str, Any], Any]] = [
    ({"format": "json"}, ("json", ())),
    ({"format": "json", "required": ["a"]}, ("json", ("a",))),
    ({"format": "json", "schema": {"type": "object", "required": ["a", "b"]}}, ("json", ("a", "b"))),
    ({"format": "json", "schema": {"type": "array"}}, ("json", ())),
    ({}, (None, ())),
    ({"format": "yaml"}, "expected json in `format`, got 'yaml'"),
    ({"required": ["a"]}, 'with "format": "json", got'),
    ({"format": "json", "required": "a"}, "expected a list of keys in `required`"),
]


def test_load_prompts_reply_format_and_keys_are_read_or_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for extra, wanted in REPLIES:
        file = write(tmp_path / "p.jsonl", {"turns": ["a"]} | extra)
        with subtests.test(extra=extra):
            if isinstance(wanted, str):
                with pytest.raises(UserError, match=wanted):
                    load_prompts(str(file))
            else:
                (prompt,) = load_prompts(str(file))
                assert (prompt.format, prompt.required) == wanted


@pytest.mark.parametrize(
    ("name", "file", "count", "categories"),
    [
        ("spec_bench", "spec_bench_question.jsonl", 480, 13),
        ("mt_bench", "mt_bench_question.jsonl", 80, 8),
        ("humaneval", "HumanEval.jsonl.gz", 164, 1),
        ("gsm8k", "gsm8k_test.jsonl", 1319, 1),
    ],
)
def test_load_prompts_published_files_have_all_prompts(name: str, file: str, count: int, categories: int) -> None:
    if not (PUBLIC / file).exists():
        pytest.skip(f"no {PUBLIC / file}")
    found = load_prompts(f"{name}:{PUBLIC / file}")
    assert len(found) == count and len({p.category for p in found}) == categories
    assert all(len(p.turns) == (2 if name == "mt_bench" else len(p.turns)) for p in found)
    assert len({p.question_id for p in found}) == count and any(p.reference for p in found)
