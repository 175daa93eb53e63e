"""Hooks of mkdocs.yml: pages for files outside docs/ that documents link to, and folders in the navigation.

Documents link to files of the repository (CONTRIBUTING.md, a schema, a kernel's README), which a code host shows. The site gets
a page for each of these, under source/, and the links lead there. A link to a file that does not exist stays as it is, and
`mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
DOCS = "docs"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCES = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Entries of the navigation such as `decisions/*` become all pages of that folder, in the order of their names."""
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(value) for title, value in entry.items()}
    if not isinstance(entry, list):
        return entry
    named = {item for item in entry if isinstance(item, str)}
    return [name for item in entry for name in (_matching(item, named) if isinstance(item, str) else [_expanded(item)])]


def _matching(pattern: str, named: set[str]) -> list[str]:
    if "*" not in pattern:
        return [pattern]
    found = sorted(path.relative_to(ROOT / DOCS).as_posix() for path in (ROOT / DOCS).glob(f"{pattern}.md"))
    return [name for name in found if name not in named]


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside docs/ that a page links to, and for those that these link to."""
    left = [posixpath.join(DOCS, file.src_uri) for file in files.documentation_pages()]
    seen = set(left)
    while left:
        path = left.pop()
        for linked in _outside(path):
            if linked not in seen:
                seen.add(linked)
                left.append(linked)
                file = File.generated(config, _page_of(linked), content=_content(linked))
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the repository lead to their pages in the site."""
    uri = page.file.src_uri
    path = uri.removeprefix("source/").removesuffix(".txt.md") if uri.startswith("source/") else posixpath.join(DOCS, uri)

    def led(found: re.Match[str]) -> str:
        target = _target(path, found[1])
        if target.startswith(f"{DOCS}/"):
            inside = target.removeprefix(f"{DOCS}/")
        else:
            inside = _page_of(target)
            if files.get_file_from_path(inside) is None:
                return found[0]
        return posixpath.relpath(inside, posixpath.dirname(uri) or ".") + (found[2] or "")

    parts = FENCES.split(markdown)
    return "".join(part if i % 2 else LINK.sub(led, part) for i, part in enumerate(parts))


def _outside(path: str) -> Iterator[str]:
    """Files outside docs/ that a file links to, as paths in the repository."""
    if not path.endswith(".md"):
        return
    text = FENCES.sub("", (ROOT / path).read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        target = _target(path, found[1])
        if not target.startswith((f"{DOCS}/", "..")) and (ROOT / target).is_file():
            yield target


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _page_of(path: str) -> str:
    """Where a file of the repository is in the site; files that are no Markdown get a page that shows them."""
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.txt.md"


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{Path(path).suffix.removeprefix('.') or 'text'}\n{text}\n````\n"
