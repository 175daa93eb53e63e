"""The rules on imports and names, read from the syntax trees."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests import syntax
from tests.syntax import PACKAGE, parsed, statements

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


@cache
def imports(path: Path) -> list[str]:
    """Full names of the modules that a file imports, `from drafttrain import x` as drafttrain.x."""
    names = []
    for node in statements(path):
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
        given = {full if full in modules else full.rpartition(".")[0] for full in imports(path)}
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


@cache
def bound(path: Path) -> set[str]:
    """The names that a file binds, at any depth."""
    names: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return names


def test_scripts_and_benchmarks_import_names_that_exist() -> None:
    """Nobody runs all of them when a name moves."""
    modules, wrong = {module(path): path for path in syntax.FILES}, []
    for path in (*PACKAGE.parent.glob("scripts/*.py"), *PACKAGE.parent.glob("benchmarks/**/*.py")):
        for name in imports(path):
            home, _, last = name.rpartition(".")
            exists = name in modules or (home in modules and last in bound(modules[home]))
            if home.split(".")[0] == "drafttrain" and not exists:
                wrong.append(f"{path}: {name}")
    assert not wrong


def test_package_imports_deepspeed_and_omegaconf_only_where_allowed() -> None:
    wrong = []
    for path in FILES:
        place = str(path.relative_to(PACKAGE))
        wrong += [f"{place}: {n}" for n in imports(path) if place not in ONLY_IN.get(n.split(".")[0], {place})]
    assert not wrong


def family_stems() -> set[str]:
    """The families' names without a version, but those that a library or the ends of file names have too."""
    files = (PACKAGE / "drafters").glob("*.py")
    families = [file.stem for file in files if "FAMILY = Family(" in file.read_text(encoding="utf-8")]
    return {re.sub(r"\d+$", "", name) for name in families} - {"hydra", "suffix"}


def names_in(path: Path) -> str:
    """The names and texts in a file, one a line. Comments are left out, and docstrings, where citations are fine."""
    nodes = list(ast.walk(parsed(path)))
    quoted = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    fields = (value for node in nodes if id(node) not in quoted for value in vars(node).values())
    given = (x for value in fields for x in (value if isinstance(value, list) else [value]))
    return "\n".join(str(x) for x in given if isinstance(x, str | bytes))


def test_package_names_families_only_in_allowed_folders() -> None:
    stems = family_stems()
    assert len(stems) > 10
    family, wrong = re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(stems))})", re.IGNORECASE), []
    for path in FILES:
        if folder(path) in FAMILY_HOMES and path.stem != "__init__":
            continue
        if family.search(path.read_text(encoding="utf-8")):
            wrong += [f"{path}: {name}" for name in family.findall(names_in(path))]
    assert not wrong


def test_package_has_no_bare_except() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in statements(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong
