"""The rules on imports and names, read from the syntax trees."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests import syntax
from tests.syntax import PACKAGE, parsed

# A folder imports only from itself and from folders before it.
ORDER = (
    *("core", "ops", "model", "decoding", "targets", "features", "data", "drafters", "objective"),
    *("measure", "train", "engines", "export", "runs", "commands", "cli", "api"),
)
FILES = [path for path in syntax.FILES if path != PACKAGE / "__init__.py"]
FAMILY_HOMES = ("drafters", "export", "engines")
ONLY_IN = {"deepspeed": {"train/engine.py"}, "omegaconf": {"cli/main.py", "cli/config.py", "cli/error_messages.py"}}


def folder(path: Path) -> str:
    """The package's folder that a file belongs to; its own name for the two files outside of them."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
def edges() -> dict[str, set[str]]:
    """Of each module, the package's modules that it imports, anywhere in the file."""
    modules = {module(path): path for path in FILES}
    found = {}
    for name, path in modules.items():
        given = {full if full in modules else full.rpartition(".")[0] for full in imports(parsed(path))}
        found[name] = (given & set(modules)) - {name}
    return found


def test_package_root_has_two_files_and_known_folders() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ORDER)


def test_package_folder_imports_only_from_lower_folders() -> None:
    wrong = []
    for path in FILES:
        if path.parent != PACKAGE:
            allowed = ORDER[: ORDER.index(folder(path)) + 1]
            wrong += [f"{path}: {name}" for name in edges()[module(path)] if name.split(".")[1] not in allowed]
    assert not wrong, "imports from a later folder, see ORDER"


def test_package_has_no_circular_imports() -> None:
    """Not through others either, nor inside functions, where a circle would only be hidden."""
    left = dict(edges())
    while free := [name for name, given in left.items() if not given & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"a circle lies among {sorted(left)}"


def test_package_imports_deepspeed_and_omegaconf_only_where_allowed() -> None:
    wrong = []
    for path in FILES:
        place = str(path.relative_to(PACKAGE))
        wrong += [f"{place}: {n}" for n in imports(parsed(path)) if place not in ONLY_IN.get(n.split(".")[0], {place})]
    assert not wrong


def family_stems() -> set[str]:
    """The families' names without a version, but those that a library or the ends of file names have too."""
    files = (PACKAGE / "drafters").glob("*.py")
    families = [file.stem for file in files if "FAMILY = Family(" in file.read_text(encoding="utf-8")]
    return {re.sub(r"\d+$", "", name) for name in families} - {"hydra", "suffix"}


def named(stem: str, text: str) -> bool:
    return re.search(rf"(?<![a-z]){stem}", text, re.IGNORECASE) is not None


def test_package_names_families_only_in_allowed_folders() -> None:
    stems, wrong = family_stems(), []
    assert len(stems) > 10
    for path in FILES:
        if folder(path) in FAMILY_HOMES and path.stem != "__init__":
            continue
        whole = path.read_text(encoding="utf-8")
        if not any(named(stem, whole) for stem in stems):
            continue
        tree = ast.parse(whole)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""  # citations in docstrings are fine
        text = ast.unparse(tree)
        wrong += [f"{path}: {stem}" for stem in stems if named(stem, text)]
    assert not wrong


def test_package_has_no_bare_except() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong
