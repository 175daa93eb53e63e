"""The wheel alone, outside the checkout: the command finds its configuration, recipes and embedded target inside."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment that holds the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "outputs", "*.egg-info", "__pycache__")
    shutil.copytree(root, folder / "source", ignore=ignored)
    run = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*run, "wheel", "--no-deps", "-w", str(folder), str(folder / "source")], check=True)
    shutil.rmtree(folder / "source")
    venv.create(folder / "env", symlinks=True, with_pip=False)
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*run, "--python", str(folder / "env"), "install", "--no-deps", str(wheel)], check=True)
    here = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    (packages / "others.pth").write_text(f"{here}\n")  # a plain path: .pth files in it, an editable install's too, are not read
    return folder / "env" / "bin"


def drafttrain(installed: Path, cwd: Path, *arguments: str) -> str:
    done = subprocess.run(
        [installed / "drafttrain", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_command_finds_recipes_and_configuration(installed: Path, tmp_path: Path, root: Path) -> None:
    shown = drafttrain(installed, tmp_path, "--help")
    assert all(path.stem in shown for path in (root / "recipes").glob("*.yaml"))
    assert "family: eagle3" in drafttrain(installed, tmp_path, "fit", "recipe=eagle3", "--cfg", "job")
    assert not list(tmp_path.iterdir())


def test_wheel_contains_every_data_file(installed: Path, tmp_path: Path, root: Path) -> None:
    code = "import drafttrain, pathlib; print(pathlib.Path(drafttrain.__file__).parent)"
    found = subprocess.run([installed / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    package = Path(found.stdout.strip())
    assert installed.parent in package.parents
    expected = {path.relative_to(root / "drafttrain") for path in (root / "drafttrain").rglob("*")}
    expected |= {
        path.relative_to(root)
        for name in ("conf", "recipes", "kernels/include", "kernels/csrc")
        for path in (root / name).rglob("*")
    }
    missing = [path for path in expected if "__pycache__" not in path.parts and not (package / path).exists()]
    assert not [path for path in missing if path.suffix], missing
