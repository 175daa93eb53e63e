"""docs/engine.md and docs/online.md: every command composes, what it asks for is accepted, and every option exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from drafttrain.cli.config import compose_run, known_keys
from drafttrain.cli.launch import check_launcher
from tests.unit.test_readme import shell, spans

TEXTS = [(Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8") for page in ("engine.md", "online.md")]
OPTION = re.compile(r"\b((?:features|launcher|measure|train|data|target|decode)\.(?!md\b)[a-z_]+(?:\.[a-z_]+)?)")


def commands() -> list[str]:
    lines = (line for text in TEXTS for line in [*shell(text), *spans(text)])
    return list(dict.fromkeys(line for line in lines if line.startswith("drafttrain ") and "..." not in line))


def test_docs_command_composes_and_is_accepted(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)  # left by a test that trained in this process
    for line in commands():
        with subtests.test(line=line):
            _, name, *words = shlex.split(line)
            recipe = next((word.removeprefix("recipe=") for word in words if word.startswith("recipe=")), None)
            rest = [word for word in words if not word.startswith("recipe=")]
            options = compose_run(recipe, rest if "data=ultrachat" in rest else ["data.path=x", *rest]).options
            if name == "fit":
                options.features.check(32_000)
                if not any(word.startswith("launcher=slurm") for word in words):  # there each node gets a command of its own
                    check_launcher(options)


def test_docs_pages_contain_commands() -> None:
    assert len(commands()) >= 14


def test_docs_every_named_option_exists() -> None:
    known = set(known_keys())
    for text in TEXTS:
        assert set(OPTION.findall(text)) <= known
