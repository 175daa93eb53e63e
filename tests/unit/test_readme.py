"""README and the pages for newcomers: every command composes, every file and make target that they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.cli import config
from drafttrain.cli.help import COMMANDS, recipe_files
from drafttrain.export.files import ExportSource
from drafttrain.export.table import serving_command
from drafttrain.runs.options import RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from tests import composing

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/python.md", "docs/glossary.md")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
ELSEWHERE = re.compile(r"server=|engine|nproc|_8b|--help|doctor|drafttrain auto")  # what is not here, or has its own test
QUICK = ("decode.max_new_tokens=16", "measure.minutes=0.1", "measure.limit=2", "target.dtype=float32")
SMALLER = {
    "prepare": ("prepare.max_new_tokens=8", "prepare.drop=[]"),
    "fit": (
        "train.steps=20",
        "train.lr=1e-2",
        "train.global_batch=2",
        "train.micro_batch=1",
        "data.limit=4",
        "logger=none",
        *QUICK,
    ),
    "measure": QUICK,
    "tune": ("decode.max_new_tokens=16", "tune.minutes=0.05"),
}
PLACEHOLDERS = {"recipe=NAME": "recipe=medusa", "$TARGET": "./DIR", "$RUN": "outputs/eagle3", " target=DIR": " target=./DIR"}


def spans(text: str) -> list[str]:
    """What is set as code within the lines."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def shell(text: str) -> list[str]:
    """Lines of the shell, without comments."""
    blocks = "\n".join(body for kind, body in FENCE.findall(text) if kind == "bash").replace("\\\n", " ")
    return [line.partition(" #")[0].strip() for line in blocks.splitlines()]


def commands() -> list[str]:
    found: dict[str, None] = {}
    for text in TEXTS.values():
        for line in [*shell(text), *spans(text)]:
            name, _, rest = line.removeprefix("drafttrain ").partition(" ")
            if line.startswith("drafttrain ") and not name.startswith("-"):
                assert name in COMMANDS, line
                if rest and "..." not in rest:
                    found[line] = None
    return list(found)


def test_readme_pages_contain_commands() -> None:
    assert len(commands()) > 20


def test_readme_command_composes(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    (tmp_path / "my" / "recipes").mkdir(parents=True)
    (tmp_path / "my" / "recipes" / "wide.yaml").write_text("name: wide\n")
    for line in sorted(commands(), key=lambda line: "--config-dir" in line):  # after a folder's recipes all is registered again
        with subtests.test(line=line):
            for shown, given in PLACEHOLDERS.items():
                line = line.replace(shown, given)
            words = shlex.split(line)[1:]
            if "-m" in words:  # of a sweep the first job
                words = [word.partition(",")[0] for word in words if word != "-m"]
            shows = [] if "--cfg" in words else ["--cfg", "job"]
            assert command(*words, *shows) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_readme_commands_run_one_after_the_other(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those that need no server, no engine and no second process, for a random target and with less of everything."""
    embedded = load_target(TargetOptions())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}
    shape = LlamaConfig(vocab_size=embedded.target.shape.vocab_size, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "target")
    embedded.tokenizer.save_pretrained(tmp_path / "target")
    lines = [line for page in ("docs/quickstart.md", "README.md") for line in [*shell(TEXTS[page]), *spans(TEXTS[page])]]
    for line in dict.fromkeys(lines):
        if not line.startswith(("drafttrain ", "echo ")) or ELSEWHERE.search(line):
            continue
        for shown, given in (PLACEHOLDERS | {"$TARGET": "./target", "prompts=FILE": "prompts=questions.jsonl"}).items():
            line = line.replace(shown, given)
        if line.startswith("echo "):
            subprocess.run(line, shell=True, check=True)
            file = tmp_path / line.split()[-1]
            text = file.read_text()
            file.write_text("".join(text.replace("?", f" {i}?") for i in range(4)))
        else:
            name, *words = shlex.split(line)[1:]
            assert command(name, *words, *SMALLER.get(name, ())) == 0, f"{line}: {capsys.readouterr().err}"


def test_readme_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page, text in TEXTS.items():
        for line in [*shell(text), *spans(text)]:
            if line.startswith("make "):
                assert line.split()[1] in targets, f"{page}: {line}"


def test_readme_linked_files_exist() -> None:
    """Those that are linked, and those whose path is set as code."""
    for page, text in TEXTS.items():
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
        paths = [ROOT / span for span in spans(text) if re.fullmatch(r"(drafttrain|conf|recipes|docs|scripts)/[\w./-]*", span)]
        for path in [*((ROOT / page).parent / link for link in links if link), *paths]:
            assert path.exists(), f"{page}: {path}"


def test_readme_named_recipes_exist() -> None:
    recipes = set(recipe_files(None)) | {"wide"}
    for text in TEXTS.values():
        named = set(re.findall(r"recipe=(\w+)", text)) - {"NAME"}
        assert named <= recipes


def test_readme_has_at_most_130_lines() -> None:
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 130


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> RunOptions:
    """The recipe that README trains."""
    composing.compose_quickly(monkeypatch)
    return config.compose_run("eagle3_llama31_8b", ["data.path=x"]).options


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_readme_serve_commands_equal_export(stack: str, trained: RunOptions) -> None:
    """With the draft length of the recipe that README trains."""
    drafter = SimpleNamespace(draft_length=trained.drafter.draft_length, tuned={})
    meta = SimpleNamespace(family=trained.drafter.family, options={}, target=SimpleNamespace(dtype="bfloat16"))
    opened = SimpleNamespace(meta=meta, drafter=drafter)
    source: Any = SimpleNamespace(opened=opened, stack=stack, target_name=trained.target.path, options={})
    command = serving_command(cast(ExportSource, source), f"exported/{stack}")
    assert command in shell(TEXTS["README.md"])
    assert command.replace(str(trained.target.path), "$TARGET") in shell(TEXTS["docs/quickstart.md"])


def test_readme_figures_follow_recipe_and_scaling_docs(trained: RunOptions) -> None:
    """Time in README: the recipe's tokens by the projection's hours for 10⁹ tokens."""
    text = TEXTS["README.md"]
    assert (
        f"{trained.train.steps:,} steps of {trained.train.global_batch} conversations of {trained.data.max_length:,} tokens"
        in text
    )
    tokens = trained.train.steps * trained.train.global_batch * trained.data.max_length
    scaling = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    memory, hours = re.findall(r"^\| 8B \| 2,048 \| 8 \| `replicated` \| ([\d.]+) GB .* ([\d.]+) \|$", scaling, re.MULTILINE)[0]
    spent = tokens / 1e9 * float(hours)
    assert f"{tokens / 1e9:.2f}·10⁹ tokens" in text and f"{hours} hours for 10⁹ tokens" in text
    assert f"| fit | {spent:.1f} hours, {8 * spent:.0f} GPU hours, at most | {memory} GB |" in text
    assert f"and {trained.measure.minutes:g} at the end of `fit`" in text
