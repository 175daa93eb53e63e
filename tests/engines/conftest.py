"""Drafters trained for a minute each, their exports, and the engines' Pythons."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drafttrain.engines.process import ENGINES, VENVS

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "outputs" / "engines"  # kept, so that only the first time takes long
FACTS = ROOT / "docs" / "engines.json"
COMMON = ("measure.enabled=false", "logger=none")
PLAIN = ("drafter.fc_norm=false", "drafter.norm_output=false", "drafter.target_layer_rule=official", "drafter.tree=chain")

# by what a test calls them: the recipe, steps, and what differs from it
DRAFTERS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "eagle3.1": ("eagle3", 300, ("drafter.draft_vocab=512",)),
    "eagle3": ("eagle3", 300, (*PLAIN, "drafter.draft_vocab=512")),
    "eagle3, whole vocabulary": ("eagle3", 300, PLAIN),
    "eagle3.1, other taps": ("eagle3", 200, ("drafter.draft_vocab=512", "drafter.target_layer_rule=official")),
    "eagle": ("eagle", 150, ()),
    "medusa": ("medusa", 150, ()),
    "dflash": ("dflash", 600, ()),
    "jetspec": ("jetspec", 600, ()),
    "dspark": ("dspark", 600, ()),
    "dflash2": ("dflash2", 600, ("drafter.candidates=12",)),  # llama.cpp takes k where k (k + 1) is at most the hidden size
    "draft_model": ("draft_model", 150, ()),
    "peagle": ("peagle", 400, ("drafter.tree=chain", "drafter.draft_vocab=512")),
    "peagle, plain": ("peagle", 400, ("drafter.tree=chain", "drafter.fc_norm=false", "drafter.target_layer_rule=official")),
    "pard": ("pard", 300, ("drafter.draft_length=4",)),
}


@cache
def trained(name: str) -> Path:
    """A checkpoint of this drafter for the embedded target, kept from an earlier run where there is one."""
    recipe, steps, more = DRAFTERS[name]
    overrides = [f"recipe={recipe}", f"train.steps={steps}", f"train.checkpoint_every={steps}", *more, *COMMON]
    place = RUNS / f"{recipe}-{hashlib.sha256(' '.join(overrides).encode()).hexdigest()[:8]}"
    if not (found := sorted(place.glob(f"*/*/checkpoints/step-{steps:05d}"))):
        command = [sys.executable, "-m", "drafttrain", "fit", *overrides, f"output={place}"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found = sorted(place.glob(f"*/*/checkpoints/step-{steps:05d}"))
    return found[-1]


def python_for(engine: str) -> str:
    """Skips the test, with the reason, where the engine is not installed."""
    folder = ROOT / VENVS / engine
    if (folder / "failed").is_file():
        pytest.skip((folder / "failed").read_text(encoding="utf-8"))
    own = folder / "bin" / "python"
    if not own.exists() and engine != "transformers":
        pytest.skip(f"{ENGINES[engine].label} is not installed; run make test-engines")
    return str(own if own.exists() else sys.executable)


@pytest.fixture
def verified(command: Callable[..., int], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run `drafttrain verify`; its exit code and report."""

    def verify(engine: str, drafter: str, out: Path, prompts: int = 6) -> tuple[int, dict[str, Any]]:
        code = command(
            "verify", f"engine={engine}", f"engine_python={python_for(engine)}", f"out={out}", f"checkpoint={trained(drafter)}",
            f"measure.limit={prompts}", "decode.max_new_tokens=48", f"output={tmp_path / 'reports'}",
        )  # fmt: skip
        reports = sorted(tmp_path.glob("reports/verify/*/verification.json"))
        return code, json.loads(reports[-1].read_text(encoding="utf-8")) if reports else {}

    return verify


def note(kind: str, name: str, facts: dict[str, Any]) -> None:
    """Renew one entry of docs/engines.json, from which docs/export.md gets its tables."""
    known: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.is_file() else {"runs": {}, "broken": {}}
    known[kind][name] = facts
    ordered = {kind: dict(sorted(entries.items())) for kind, entries in known.items()}
    FACTS.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")
