"""`import drafttrain`: its names, and what it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import drafttrain

HEAVY = ("torch", "transformers", "deepspeed", "hydra", "omegaconf", "datasets", "rich", "numpy")


def test_import_drafttrain_loads_no_torch() -> None:
    code = f"import sys, drafttrain; dir(drafttrain); print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_package_names_load_no_deepspeed() -> None:
    code = "import sys, drafttrain as dt; [getattr(dt, name) for name in dt.HOMES]; print('deepspeed' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_package_names_are_exported_and_documented() -> None:
    assert set(drafttrain.__all__) <= set(dir(drafttrain))
    for name in drafttrain.HOMES:
        assert getattr(drafttrain, name).__doc__, name
        assert getattr(drafttrain, name).__name__ == name


def test_package_names_differ_from_folders() -> None:
    """An import of a folder would replace a name that is called like it."""
    folders = {path.name for path in Path(drafttrain.__file__).parent.iterdir() if path.is_dir()}
    assert not folders & set(drafttrain.HOMES)


def test_package_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(drafttrain, "no_such_name")
