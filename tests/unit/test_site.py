"""`make docs`: the site builds strictly, and a broken link or an orphan page ends the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PARTS = ("docs", "scripts", "drafttrain", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
        reason="MkDocs is not installed; make docs installs it",
    ),
]


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env=quiet)


def copied(root: Path, folder: Path) -> Path:
    """A copy whose documents can be changed."""
    for part in PARTS:
        if (root / part).is_dir() and part != "drafttrain":
            shutil.copytree(root / part, folder / part)
        else:
            (folder / part).symlink_to(root / part)
    return folder


def test_docs_site_builds_strictly(root: Path, tmp_path: Path) -> None:
    built = build(copied(root, tmp_path))
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "train_drafter" in reference and "Optimiser steps" in reference
    assert (tmp_path / "site" / "source" / "CONTRIBUTING.html").is_file()
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    assert not [page for page in pages if "fonts.googleapis.com" in page]


def test_docs_site_broken_link_or_orphan_page_fails_build(root: Path, tmp_path: Path) -> None:
    """A strict build names all that is wrong before it ends."""
    docs = copied(root, tmp_path) / "docs"
    with (docs / "log.md").open("a", encoding="utf-8") as log:
        log.write("\n[x](nope.md)\n\n[x](../drafttrain/nope.py)\n\n[x](data.md#nope)\n")
    (docs / "orphan.md").write_text("# Orphan\n", encoding="utf-8")
    built = build(tmp_path)
    assert built.returncode == 1
    missing = [complaint for complaint in ("nope.md", "nope.py", "#nope", "orphan.md") if complaint not in built.stderr]
    assert not missing, built.stderr
