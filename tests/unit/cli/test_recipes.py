"""Each recipe composes, says what it is, and differs from conf/ in what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from drafttrain.cli.config import register
from drafttrain.runs.options import RunOptions

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_composes(path: Path) -> None:
    register()
    with initialize_config_module("drafttrain.conf", version_base="1.3"):
        options = OmegaConf.to_object(compose("config", [f"recipe={path.stem}", *_given(path)]))
    assert isinstance(options, RunOptions)
    assert options.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_and_how_to_run_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines[0]) > 10
    assert f"#   drafttrain fit recipe={path.stem}" in [line.split(" data.path=")[0] for line in lines]
    assert any(line.startswith("# Hardware: ") for line in lines)
    assert "# @package _global_" in lines


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_diff(path: Path) -> None:
    register()
    body = OmegaConf.create(path.read_text())
    chosen = {key.removeprefix("override /"): value for entry in body.pop("defaults") for key, value in entry.items()}
    family, groups = chosen.pop("drafter"), chosen
    with initialize_config_module("drafttrain.conf", version_base="1.3"):
        plain = compose("config", [f"drafter={family}"] + [f"{key}={value}" for key, value in groups.items()])
    repeated = [key for key, value in _leaves(body) if OmegaConf.select(plain, key) == value]
    assert not repeated, f"the recipe repeats what conf/ says: {repeated}"


def _given(path: Path) -> list[str]:
    """A recipe that does not say what it trains on asks for it in its command."""
    return ["data.path=replies.jsonl"] if "override /data: file" in path.read_text() else []


def _leaves(node: object, prefix: str = "") -> list[tuple[str, object]]:
    if not OmegaConf.is_dict(node):
        return [(prefix.rstrip("."), node)]
    return [leaf for key, value in node.items() for leaf in _leaves(value, f"{prefix}{key}.")]
