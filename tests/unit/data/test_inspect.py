"""`drafttrain inspect`, and the search for evaluation prompts in the training data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from drafttrain.commands import inspect as inspect_file
from drafttrain.data import DataOptions, InspectOptions, SourceOptions
from drafttrain.data.contamination import contamination, copies
from drafttrain.data.prompts import Prompt, load_prompts
from drafttrain.data.sources import Conversation, open_sources
from drafttrain.measure.markdown import COUNTS, data_section
from tests.helpers import read_conversations

FOX = "The quick brown fox jumps over the lazy dog while the old cat sleeps near the warm stove all day"
CHINESE = "请解释什么是投机解码以及它为什么能够加快大型语言模型的推理速度"


def said(origin: str, *turns: str) -> Conversation:
    return Conversation(origin, tuple({"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)))


def asked(*turns: str, name: str = "p") -> Prompt:
    return Prompt(name, "c", list(turns))


def test_contamination_embedded_data_holds_no_embedded_prompt() -> None:
    how = InspectOptions()
    assert copies(load_prompts("embedded", None), read_conversations(DataOptions()), how.ngram, how.overlap) == []


def test_contamination_copies_are_found_despite_case_blanks_and_edits() -> None:
    prompts = [
        asked(FOX, name="fox"),
        asked(CHINESE, name="chinese"),
        asked("What is new?", name="short"),
        asked("x " * 30, name="no"),
    ]
    conversations = [
        said("1", "Tell me a story.", "Once: " + FOX.upper().replace(" ", "\n  ") + "!"),
        said("2", FOX.replace("stove", "fire")),
        said("3", "问题:" + CHINESE + "。谢谢"),
        said("4", "what is NEW"),
        said("5", "And so, what is new? Everything is."),
        Conversation("6", text="nothing of it"),
    ]
    found = {copy.question_id: copy for copy in copies(prompts, conversations, 8, 0.5)}
    assert {name: (copy.origin, copy.share) for name, copy in found.items()} == {
        "fox": ("1", 1.0), "chinese": ("3", 1.0), "short": ("4", 1.0)
    }  # fmt: skip
    (changed,) = copies(prompts[:1], conversations[1:2], 8, 0.5)
    assert changed.share == pytest.approx(10 / 13)  # of its 13 sequences, those that do not reach the changed word
    assert not copies(prompts[:1], conversations[1:2], 8, 0.8)
    (plain,) = copies([asked(FOX)], [Conversation("7", text=f"a b {FOX} c d")], 8, 1.0)
    assert plain.origin == "7"


def test_contamination_searches_all_sources_and_reports_copies(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(10)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": 3}) + "\n" + json.dumps({"text": f"so {FOX}"}) + "\n")
    sources = open_sources(DataOptions(mix=[SourceOptions(str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl")]))
    found = contamination(sources, [asked(FOX, name="fox"), asked("x " * 30, name="no")], 8, 0.5, 4)
    assert (found.searched, found.records, found.prompts) == (5, 12, 2), "4 of a, and the sound one of b"
    assert "1 of 2 evaluation prompts are in the training data, the first is prompt fox" in str(found.line())
    copy = f"{tmp_path / 'b.jsonl'}:2"
    assert found.summary["copies"][0]["origin"] == copy
    report = dict.fromkeys(COUNTS, 0) | {"path": "x", "sources": [], "supervised_fraction": 1, "lengths": [[1, 2]]}
    text = data_section(report | {"contamination": found.summary})
    assert "1 of 2 evaluation prompts" in text and f"| fox | c | 100% | {copy} |" in text
    assert "5 of 12 records were searched" in text
    nothing = contamination(sources[:1], [asked(FOX)], 8, 0.5, 4)
    assert nothing.line() is None and "0 of 1 evaluation prompts" in data_section(report | {"contamination": nothing.summary})


class Page(HTMLParser):
    """What the page asks of a browser, and what it marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.marked: list[str] = []
        self.links: list[str] = []
        self.inside = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside += tag == "mark"
        self.links += [str(value) for name, value in attributes if name in ("src", "href")]
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag == "mark"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.marked[-1] += data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": f"Say {i} <b>&"},
                {"role": "assistant", "content": f"reply {i} <script>x</script>"},
            ]
        }
        for i in range(9)
    ]
    records.append({"messages": [{"role": "user", "content": FOX}, {"role": "assistant", "content": "y " * 400}]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_inspect_terminal_and_page_show_supervised_tokens_and_copies(
    command: Callable[..., int], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question_id": 7, "turns": [FOX]}) + "\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    line = [f"data.path={data}", "prompts=prompts.jsonl", "data.max_length=300", "out=look.html", "inspect.samples=10"]
    assert command("inspect", *line) == 0
    shown = capsys.readouterr().out
    coloured = re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", shown, re.DOTALL)
    assert any(re.fullmatch(r"reply \d <script>x</script><\|im_end\|>", piece) for piece in coloured)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert re.search(r"conversations +10\s", plain) and re.search(r"truncated to data.max_length +1 \(10.0%\)", plain)
    assert "1 of 1 prompts (prompts.jsonl) with 50% or more" in plain and "100%  prompt 7" in plain
    assert "replies by" in plain and "unknown (there is no provenance.json)" in plain

    text = (tmp_path / "look.html").read_text()
    page = Page(text)
    assert set(page.links) <= {"data:,"} and "url(" not in text and "://" not in text and "<script" not in text
    assert sorted(m for m in page.marked if m.startswith("reply")) == [
        f"reply {i} <script>x</script><|im_end|>" for i in range(9)
    ]
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert f"{data}:10" in unescape(text) and "1 of 1 prompts" in text


def test_inspect_histogram_counts_every_conversation(
    command: Callable[..., int], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, other = (tmp_path / "outputs" / "inspect" / name for name in ("now.html", "now-2.html"))
    monkeypatch.setattr(inspect_file, "dated_path", lambda *asked: page)
    page.parent.mkdir(parents=True)
    page.write_text("of another process that began in the same second")
    assert command("inspect", f"data.path={data}") == 0
    assert page.read_text().startswith("of another")
    page = other
    counts = re.search(r'<div class="histogram">(.*?)</div>\s*<h2>', page.read_text(), re.DOTALL)
    assert counts is not None
    numbers = [int(n) for n in re.findall(r"</div></span><span>(\d+)</span>", counts[1].replace("\n", ""))]
    assert sum(numbers) == 10 and numbers[0] == 9 and numbers[-1] == 1


MISTAKES = [
    (["data.path=none.jsonl"], "none.jsonl"),
    (["out=page.txt"], "name the page with out=FILE.html"),
    (["inspect.overlap=0"], "inspect.overlap is 0; set it above 0 and at most 1"),
    (["data.max_length=1"], "data.max_length is 1; set it to 2 or more"),
    (["prompts=none.jsonl"], "none.jsonl"),
    (["target=hf", "target.path=/nowhere"], "target.path '/nowhere' does not exist"),
]


def test_inspect_mistake_is_refused_in_one_line(
    command: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments, line in MISTAKES:
        with subtests.test(arguments=arguments):
            code, err = command("inspect", *arguments), capfd.readouterr().err
            assert code == 2 and line in err and err.count("\n") == 1
            assert not list(tmp_path.iterdir())


def test_inspect_long_conversation_is_cut_on_terminal_only(
    command: Callable[..., int], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect_file, "SHOWN", 200)
    assert command("inspect", f"data.path={data}", "inspect.samples=10", "out=look.html") == 0
    assert re.search(r"\.\.\. \d+ characters more", capsys.readouterr().out)
    assert ("y " * 399 + "y") in (tmp_path / "look.html").read_text()
