"""The source files that a case depends on, so that an edit resets only the cases that it can change.

A case names the modules that it starts from. Their imports are followed through `drafttrain`, at any place in a file. Then the
operators that those modules call are followed into the CUDA files that define them, and these through their `#include "..."`
lines. Families are loaded by name at run time, so a case reaches only the families that it starts from. The benchmarks' own
files and the tests do not count.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TypeVar

from drafttrain.drafters import families

ROOT = Path(__file__).parents[2]
KERNELS = "drafttrain.kernels"  # the folder kernels/ of a checkout
SHARED = ("kernels/csrc/schema.h", "kernels/csrc/ops.cpp")  # they declare all operators
LOADER = "drafttrain.ops.library"  # it names an operator only to try the library; its users do not depend on that operator
DECODER: tuple[str, ...] = ("drafttrain.decoding.scheduler", "drafttrain.targets.load")
TRAINING = (*DECODER, "drafttrain.features.online", "drafttrain.objective.losses", "drafttrain.train.telemetry")

SCOPES = {"decoder": DECODER, "training": TRAINING}

CALL = re.compile(r"torch\.ops\.drafttrain\.(\w+)")
DEFINED = re.compile(r'm\.impl\("(\w+)"')
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

Node = TypeVar("Node")


@cache
def digest(modules: tuple[str, ...], root: Path = ROOT) -> str:
    """A hash of the contents of all files that these modules reach."""
    found = hashlib.sha256()
    for path in sorted(files(modules, root)):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


@cache
def files(modules: tuple[str, ...], root: Path = ROOT) -> frozenset[Path]:
    """The modules, everything that they import, and the kernels of the operators that these call."""
    found = closure(modules, lambda module: imports(module, root))
    paths = {path for module in found if (path := file_of(module, root))}
    operators = {name for module in found if module != LOADER for name in called(module, root)}
    return frozenset(paths | kernels(frozenset(operators), root))


def closure(first: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Everything that can be reached from the first ones, themselves included."""
    found: set[Node] = set()
    waiting = list(first)
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += following(node)
    return found


def file_of(module: str, root: Path) -> Path | None:
    """A module's file; None for a name that is no module of this package."""
    name = module.replace(KERNELS, "kernels", 1) if (module + ".").startswith(KERNELS + ".") else module
    base = root / name.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def imports(module: str, root: Path) -> frozenset[str]:
    """The package's modules that this one imports, in functions too but not only for type checkers, and the packages around
    those.
    """
    path = file_of(module, root)
    if path is None:
        return frozenset()
    named = {name for node in executed(ast.parse(path.read_text(encoding="utf-8"))) for name in targets(node)}
    around = {".".join(parts[:i]) for name in {*named, module} for parts in [name.split(".")] for i in range(1, len(parts))}
    return frozenset(name for name in named | around if file_of(name, root))


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from executed(node)


def targets(node: ast.AST) -> list[str]:
    """The modules that an import statement may name: `from a.b import c` names a.b, and a.b.c where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("drafttrain")]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drafttrain") and not node.level:
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@cache
def called(module: str, root: Path) -> frozenset[str]:
    path = file_of(module, root)
    return frozenset(CALL.findall(path.read_text(encoding="utf-8"))) if path else frozenset()


@cache
def kernels(operators: frozenset[str], root: Path) -> frozenset[Path]:
    """The CUDA files that define one of these operators, and the files that they include."""
    units = [unit for unit in sorted(root.glob("kernels/csrc/cuda/*.cu")) if operators & defined(unit)]
    shared = {root / name for name in SHARED} if units else set()
    return frozenset(closure(units, lambda path: included(path, root)) | shared)


@cache
def defined(unit: Path) -> frozenset[str]:
    return frozenset(DEFINED.findall(unit.read_text(encoding="utf-8")))


@cache
def included(path: Path, root: Path) -> frozenset[Path]:
    names = INCLUDE.findall(path.read_text(encoding="utf-8"))
    folders = (path.parent, root / "kernels" / "include")
    found = [Path(os.path.normpath(folder / name)) for name in names for folder in folders]
    return frozenset(file for file in found if file.is_file())


def of_family(name: str) -> tuple[str, ...]:
    """The modules of a family, and of the families that its default options name."""
    family = families()[name]
    defaults = [getattr(family.options(), f.name) for f in fields(family.options)]
    inner = [value["family"] for value in defaults if isinstance(value, dict) and "family" in value]
    return (family.make.__module__, *(module for other in inner for module in of_family(other)))
