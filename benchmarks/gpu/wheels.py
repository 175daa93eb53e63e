"""`make gpu-wheels`: the packages that drafttrain needs in addition to torch, transformers and Triton, as wheels in one
folder.

The folder goes to a machine without network, in at most 64 MiB. There `provide` unpacks missing packages into a separate
folder, so that the machine's packages do not change. Packages in `HEAVY` would not fit; the suites do without them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]  # this file imports nothing that a machine may lack
FOLDER = ROOT / "wheels"
TARGET = ROOT / "outputs" / "packages"
MANIFEST = "manifest.json"
MOST = 64 << 20  # bytes of all wheels
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
CONSTRAINTS = ROOT / "constraints.txt"

SOURCES = ("antlr4-python3-runtime", "deepspeed")  # PyPI has no wheels of these: they are built, and run everywhere
WHEELS = (  # without dependencies: torch and transformers themselves ask for jinja2, packaging, pyyaml, regex and others
    "accelerate", "annotated-types", "datasets", "dill", "einops", "hjson", "hydra-core", "markdown-it-py", "mdurl", "msgpack",
    "multiprocess", "ninja", "omegaconf", "peft", "psutil", "py-cpuinfo", "pyarrow", "pydantic", "pydantic-core", "pygments",
    "python-dateutil", "rich", "typing-inspection", "xxhash",
)  # fmt: skip
HEAVY = {  # bytes for Python 3.12; what does without it
    "llguidance": "3 MB: no `decode.guard.json`, no count of valid JSON; the suites use neither",
    "matplotlib": "with its own dependencies 25 MB: reports have no figures",
    "pandas": "12 MB: `datasets` reads nothing; the suites read JSON lines",
    "wandb": "20 MB: runs log to files, `logger=none`",
}


class WheelError(Exception):
    """The folder cannot be made; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Request:
    """The machine that the wheels are for."""

    python: str  # 3.12
    platforms: tuple[str, ...]
    folder: Path

    def download(self, names: Sequence[str]) -> None:
        where = [word for platform in self.platforms for word in ("--platform", platform)]
        wanted = ["--python-version", self.python, *where, "--only-binary=:all:", "-c", str(CONSTRAINTS)]
        pip("download", "--no-deps", "-q", "-d", str(self.folder), *wanted, *names)

    def build(self, name: str) -> None:
        """Raises WheelError for a wheel that runs only on this machine."""
        pinned = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}==")]
        with tempfile.TemporaryDirectory() as aside:
            pip("wheel", "--no-deps", "-q", "-w", aside, *(pinned or [name]), DS_BUILD_OPS="0")
            for wheel in Path(aside).glob("*.whl"):
                if not wheel.name.endswith("-none-any.whl"):
                    raise WheelError(f"{wheel.name} was built for this machine alone")
                shutil.copy(wheel, self.folder)


def pip(*arguments: str, **environment: str) -> None:
    """Run pip. Raises WheelError with its last message."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line or "No module" in line]
        raise WheelError(" ".join((errors or lines or ["pip said nothing"])[-1].split())[:300])


def collect(request: Request, names: Sequence[str], sources: Sequence[str], most: int) -> int:
    """Fill the folder and write the manifest; returns the bytes of all wheels. Raises WheelError, also for too many bytes."""
    request.folder.mkdir(parents=True, exist_ok=True)
    for old in request.folder.glob("*.whl"):
        old.unlink()
    request.download(names)
    for name in sources:
        request.build(name)
    return sealed(request, most)


def sealed(request: Request, most: int) -> int:
    """The manifest of the folder's files."""
    found = sorted(request.folder.glob("*.whl"))
    total = sum(path.stat().st_size for path in found)
    if total > most:
        largest = max(found, key=lambda path: path.stat().st_size)
        raise WheelError(f"{total / 2**20:.1f} MiB of wheels exceed {most / 2**20:.0f} MiB; {largest.name} is the largest")
    files = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in found
    ]
    record = {"python": request.python, "platforms": list(request.platforms), "bytes": total, "files": files, "left_out": HEAVY}
    (request.folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return total


def provide(folder: Path = FOLDER, target: Path = TARGET) -> str | None:
    """Make missing packages importable from the wheels, for this process and its children. Returns a message."""
    wheels = {distribution(path.name): path for path in sorted(folder.glob("*.whl"))}
    place = target / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    if wheels:
        added(place)
    absent = [path for name, path in wheels.items() if not present(name)]
    if not absent:
        return None
    try:
        where = ["--no-index", "--find-links", str(folder), "--target", str(place)]
        pip("install", "--no-deps", "--no-compile", "-q", *where, *map(str, absent))
    except WheelError as error:
        return f"wheels in {folder} do not fit here: {error}"
    invalidate_caches()
    return f"{len(absent)} packages unpacked from {folder} into {place}"


def added(place: Path) -> None:
    """Append to the search path, so that the machine's own packages come first."""
    if str(place) not in sys.path:
        sys.path.append(str(place))
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, before), str(place)])


def distribution(wheel: str) -> str:
    """The distribution's name, from a wheel's file name."""
    return normal(wheel.split("-")[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def present(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--platform", default="", help="tag of the platform there, in place of Linux on x86-64")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--there", default="", help="packages that are there already and need no wheel, separated by commas")
    given = parser.parse_args(None if arguments is None else [*arguments])
    there = {normal(name) for name in given.there.split(",") if name}
    request = Request(given.python, (given.platform,) if given.platform else PLATFORMS, given.folder)
    try:
        names, built = ([name for name in of if name not in there] for of in (WHEELS, SOURCES))
        total = collect(request, names, built, MOST)
    except WheelError as error:
        print(f"gpu-wheels: {error}", file=sys.stderr)
        return 1
    count = len(list(request.folder.glob("*.whl")))
    print(f"{request.folder}: {count} wheels for Python {request.python}, {total / 2**20:.1f} MiB")
    print(*(f"left out: {name}, {why}" for name, why in HEAVY.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
