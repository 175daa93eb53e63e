"""Each recipe composes, says what it is, and differs from conf/ in what it writes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from drafttrain.cli.config import TARGETS
from drafttrain.runs.options import RunOptions
from tests import helpers
from tests.composing import compose
from tests.unit.cli.choices import CHOICES, choice

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
FEW = [path for path in RECIPES if path.stem in (*helpers.FEW, "eagle3_llama31_8b")]  # the last asks for data


@pytest.mark.parametrize("paths", [FEW, pytest.param(RECIPES, marks=pytest.mark.slow)], ids=["few", "every"])
def test_recipe_composes_into_run_options(paths: list[Path], subtests: pytest.Subtests) -> None:
    for path in paths:
        with subtests.test(recipe=path.stem):
            options = OmegaConf.to_object(compose([f"recipe={path.stem}", *_given(path)]))
            assert isinstance(options, RunOptions)
            assert options.name == path.stem


def test_recipe_states_purpose_command_and_hardware(subtests: pytest.Subtests) -> None:
    for path in RECIPES:
        with subtests.test(recipe=path.stem):
            lines = path.read_text().splitlines()
            assert lines[0].startswith("# ")
            assert len(lines[0]) > 10
            assert f"#   drafttrain fit recipe={path.stem}" in [line.split(" data.path=")[0] for line in lines]
            assert any(line.startswith("# Hardware: ") for line in lines)
            assert "# @package _global_" in lines


def test_recipe_repeats_no_default_of_config(subtests: pytest.Subtests) -> None:
    """And names only keys that there are, with values of their types."""
    for path in RECIPES:
        with subtests.test(recipe=path.stem):
            body = OmegaConf.create(path.read_text())
            plain, sections = _plain(_chosen(path)), [body.pop(target) for target in TARGETS if target in body]
            for part in (body, *sections):
                part.pop("defaults", None)
            for part in (body, *sections):
                repeated = [key for key, value in _leaves(part) if _select(plain, key) == value]
                assert not repeated, f"the recipe repeats what conf/ says: {repeated}"
                for key, value in part.items():
                    OmegaConf.merge({key: plain[key]}, {key: value})


def test_recipe_of_family_is_that_of_published_targets_but_for_target_and_data(subtests: pytest.Subtests) -> None:
    """What suits the embedded target reaches no other. A family's steps follow the data, its taps the target's depth."""
    own = ("name", "target", "data", "measure", "auto", "deepspeed", "recipe", "drafter.target_layer", "train.checkpoint_every")
    own += ("train.steps", "train.epochs", "train.least_steps", "train.lr_width", "train.precision")
    for path in RECIPES:
        family, _, model = path.stem.partition("_")
        if model in ("llama31_8b", "qwen3_8b"):
            with subtests.test(recipe=path.stem):
                published, general = (
                    dict(_leaves(compose([f"recipe={name}", "target=hf", "target.path=DIR", "data.path=FILE"])))
                    for name in (path.stem, family)
                )
                assert {k for k in published | general if published.get(k) != general.get(k) and not k.startswith(own)} == set()


def _chosen(path: Path) -> dict[str, str]:
    """The groups that a recipe chooses, itself or by the recipe that it adds to."""
    entries = OmegaConf.create(path.read_text()).defaults
    bases = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
    chosen = {
        key.removeprefix("override /"): name
        for entry in entries
        if entry not in ("_self_", *bases)
        for key, name in entry.items()
    }
    return {key: name for base in bases for key, name in _chosen(path.with_stem(base)).items()} | chosen


def _plain(chosen: dict[str, str]) -> dict[str, object]:
    """What conf/ says with these choices. Where each is of a group of its own, the parts are there already."""
    if set(chosen) <= set(CHOICES):
        return dict(_defaults().items()) | {group: choice(group, name) for group, name in chosen.items()}
    return dict(compose([f"{group}={name}" for group, name in chosen.items()]).items())


@cache
def _defaults() -> DictConfig:
    return compose([])


def _select(plain: dict[str, object], key: str) -> object:
    head, _, rest = key.partition(".")
    return OmegaConf.select(plain[head], rest) if rest else plain[head]


def _given(path: Path) -> list[str]:
    """A recipe that does not say what it trains on asks for it in its command."""
    return ["data.path=replies.jsonl"] if _chosen(path).get("data") == "file" else []


def _leaves(node: object, prefix: str = "") -> list[tuple[str, object]]:
    if not OmegaConf.is_dict(node):
        return [(prefix.rstrip("."), node)]
    return [leaf for key, value in node.items() for leaf in _leaves(value, f"{prefix}{key}.")]
