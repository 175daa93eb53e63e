"""The house's rules on imports and names, read from the syntax trees."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "drafttrain"
FLOORS = [
    (
        *(
            "errors",
            "atomic",
            "checksums",
            "page",
            "fingerprint",
            "served",
            "tree",
            "kv",
            "sampling",
            "span",
            "batch",
            "chains",
            "ops",
        ),
        *("repetition", "jsontext", "intervals"),
    ),
    (
        *("target", "layers", "drafter", "staged", "tip", "request", "processors", "fallback", "guard"),
        *("autoregressive", "best_first", "block_drafter", "block_options", "calibration", "convolution"),
        *("dynamic", "proposal", "recurrent", "translation", "merged"),
    ),
    ("verify", "rounds", "ahead", "prefill", "session", "speculate", "treesize"),
    ("drafters", "targets", "data", "features", "law", "outcome", "losses", "adapted", "checkpoint"),
    ("train", "measure", "export"),
    ("commands",),
    ("config", "complaints", "cli", "__main__"),
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
FAMILY_HOMES = ("drafters", "export")
ONLY_IN = {"deepspeed": {"train/engine.py"}, "omegaconf": {"cli.py", "config.py", "complaints.py"}}


def unit(path: Path) -> str:
    """The file or folder of the package that a file belongs to: what has a floor."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.Module) -> list[str]:
    """Full names of the imported modules, `from drafttrain import x` as drafttrain.x."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = unit(path)
    assert own in FLOOR, f"{own} has no floor; give it one here and in the architecture"
    for name in imports(parse(path)):
        parts = name.split(".")
        if parts[0] != "drafttrain" or len(parts) == 1 or parts[1] not in FLOOR or parts[1] == own:
            continue
        other = parts[1]
        assert FLOOR[other] <= FLOOR[own], f"{own} (floor {FLOOR[own]}) imports {name} (floor {FLOOR[other]}): upwards"
        folders = (PACKAGE / own).is_dir() and (PACKAGE / other).is_dir()
        assert FLOOR[other] < FLOOR[own] or not folders, f"{own} imports {name}: sideways between folders"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_deepspeed_and_omegaconf_stay_where_they_belong(path: Path) -> None:
    for name in imports(parse(path)):
        homes = ONLY_IN.get(name.split(".")[0])
        assert homes is None or str(path.relative_to(PACKAGE)) in homes, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_family_is_named_outside_its_place(path: Path) -> None:
    if unit(path) in FAMILY_HOMES and path.stem != "__init__":
        return
    tree = parse(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # citations in docstrings are fine
    families = [file.stem for file in (PACKAGE / "drafters").glob("[!_]*.py")]
    stems = {re.sub(r"\d+$", "", name) for name in families} - {
        "hydra",
        "suffix",
    }  # a library and the ends of file names are called so too
    found = {stem for stem in stems if re.search(rf"(?<![a-z]){stem}", ast.unparse(tree), re.IGNORECASE)}
    assert not found, f"{path} names {found}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_bare_except(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler) and node.type is None]
