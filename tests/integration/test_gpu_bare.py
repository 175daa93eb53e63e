"""`make gpu` from start to end where Python holds torch, transformers and Triton alone, beside a folder of wheels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import goals, gpu, real, real_2, stages, wheels
from benchmarks.gpu.plan import Stage
from benchmarks.gpu.real import Folder
from benchmarks.gpu.results import PASSED, SKIPPED
from benchmarks.gpu.wheels import HEAVY, SOURCES, WHEELS, Request, WheelError, normal
from drafttrain.drafters import families
from tests.integration.test_gpu_suites import GPU, check_distilled, contents, copied

ROOT = Path(__file__).parents[2]
GIVEN = ("torch", "transformers", "triton", "setuptools")
LACKING = (
    "deepspeed",
    "hydra",
    "omegaconf",
    "antlr4",
    "datasets",
    "dill",
    "multiprocess",
    "hjson",
    "wandb",
    "peft",
    "pyarrow",
    "matplotlib",
)


def closure(names: Iterable[str]) -> set[str]:
    """These distributions and all that they ask for on this machine."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = normal(waiting.pop())
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            parsed = [Requirement(line) for line in asked]
            waiting += [r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def files(name: str) -> Iterator[tuple[Path, str]]:
    """(where it lies, its path) of each installed file but programs."""
    found = metadata.distribution(name)
    for file in found.files or []:
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            yield Path(str(found.locate_file(file))), str(file)


def bare(folder: Path) -> dict[str, str]:
    """The environment of a Python that finds these packages alone."""
    for name in closure(GIVEN):
        for path, file in files(name):
            top = file.split("/")[0]
            there, whole = folder / top, Path(str(path)[: len(str(path)) - len(file)]) / top
            if not there.exists():
                there.symlink_to(whole)
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "MAKE", "MFLAGS", "PIP_", "VIRTUAL_ENV"))
    }
    return kept | {
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def packed(folder: Path) -> list[str]:
    """Wheels of what is installed here and missing there, as `make gpu-wheels` names them."""
    folder.mkdir()
    names = [name for name in (*WHEELS, *SOURCES) if name not in closure(GIVEN)]
    for name in names:
        label = f"{name.replace('-', '_')}-{metadata.version(name)}-py3-none-any.whl"
        with zipfile.ZipFile(folder / label, "w") as wheel:
            for path, file in files(name):
                wheel.write(path, file)
    return names


@pytest.mark.grid  # minutes: every case of every suite; test_gpu_suites rehearses each kind
@pytest.mark.timeout(3600)
def test_make_gpu_rehearsal_in_bare_python_environment_passes(tmp_path: Path) -> None:
    checkout, results, packages = tmp_path / "checkout", tmp_path / "results", tmp_path / "packages"
    copied(checkout, "drafttrain", "kernels", "docs", "benchmarks", "conf", "recipes")
    shutil.copy(ROOT / "Makefile", checkout)
    packages.mkdir()
    base, python = getattr(sys, "_base_executable", sys.executable), tmp_path / "venv" / "bin" / "python"
    subprocess.run([base, "-m", "venv", tmp_path / "venv"], check=True)
    environment = bare(packages)
    listed = f"from importlib.util import find_spec; print([n for n in {LACKING} if find_spec(n)])"
    there = subprocess.run([python, "-c", listed], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == "[]", "it is bare"
    names, before = packed(checkout / "wheels"), contents(checkout)

    def make(*arguments: str) -> str:
        given = ["REHEARSE=1", f"PYTHON={python}", f"RESULTS={results}", f"REAL={tmp_path / 'real'}"]
        command = ["make", "gpu", *given, *arguments]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    first = make("BUDGET=0.1")
    assert f"{len(names)} packages unpacked" in first and "cases are left" in first and "\ngoal " in first
    said = make("BUDGET=45")
    assert "packages unpacked" not in said and "cases are left" not in said and "REHEARSAL: no goal is measured" in said
    assert not re.search(r"\d+(\.\d+)? ?(ms|us|tokens/s)\b", said)
    known = json.loads((results / "rehearsal.json").read_text())
    sections = ("check", "bench", "train", "real-1", "real-2")
    ended = {name: entry for section in sections for name, entry in known[section].items()}
    assert {entry["status"] for entry in ended.values()} == {PASSED, SKIPPED} and not any(e["figures"] for e in ended.values())
    assert len(ended) > 80 and "no figures" in (results / "performance.md").read_text()
    passed = {name for name, entry in ended.items() if entry["status"] == PASSED}
    assert {f"distil {name}" for name in real_2.RECIPES} <= passed
    check_distilled(Folder(tmp_path / "real", replace(GPU, rehearsal=True)), real_2.RECIPES)
    assert {name.split()[1] for name in ended if name.startswith("drafting ")} == set(families())
    assert sum(name.startswith("processes ") for name in passed) == 3
    again = make()
    assert not re.search(r"^(passed|failed|skipped) ", again, re.MULTILINE), "nothing is run twice"
    unpacked = checkout / "outputs"
    assert {path: x for path, x in contents(checkout).items() if unpacked not in path.parents} == before


def test_gpu_wheels_above_size_limit_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(request: Request, names: list[str]) -> None:
        for name in names:
            (request.folder / f"{name}-1-py3-none-any.whl").write_bytes(b"x" * 1000)

    monkeypatch.setattr(Request, "download", download)
    request = Request("3.12", wheels.PLATFORMS, tmp_path / "wheels")
    assert wheels.collect(request, ("a", "b"), (), most=2000) == 2000
    manifest = json.loads((tmp_path / "wheels" / wheels.MANIFEST).read_text())
    assert manifest["python"] == "3.12" and [file["bytes"] for file in manifest["files"]] == [1000, 1000]
    assert all(len(file["sha256"]) == 64 for file in manifest["files"]) and set(manifest["left_out"]) == set(HEAVY)
    with pytest.raises(WheelError, match="exceed"):
        wheels.collect(request, ("a", "b", "c"), (), most=2000)
    monkeypatch.setattr(wheels, "MOST", 10)
    assert wheels.main(["--folder", str(tmp_path / "more"), "--there", ",".join([*WHEELS[1:], *SOURCES])]) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and said.err.startswith("gpu-wheels: ") and "exceed" in said.err


def test_gpu_wheels_provide_unpacks_only_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = tmp_path / "wheels", tmp_path / "packages"
    folder.mkdir()
    for name in ("torch", "no_such_thing"):
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}_here.py", "VALUE = 7\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    assert "1 packages unpacked" in str(wheels.provide(folder, target))
    import no_such_thing_here

    assert no_such_thing_here.VALUE == 7 and not list(target.glob("*/torch_here.py"))
    assert wheels.provide(folder, target) is None and os.environ["PYTHONPATH"].startswith(str(target))
    assert wheels.provide(tmp_path / "nothing", target) is None


def test_gpu_watch_crashed_case_is_reported_and_worker_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The watching process, with a stand-in for the one that works."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "note = sys.argv[sys.argv.index('--watched') + 1]\n"
        "if '--dead' in sys.argv:\n"
        "    print('dead:', sys.argv[sys.argv.index('--dead') + 1], json.load(open(note))['name'], '--force' in sys.argv)\n"
        "    sys.exit(0)\n"
        "json.dump({'section': 'check', 'name': 'bad'}, open(note, 'w'))\n"
        "os.abort()\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: popen([command[0], str(script), *command[3:]]))
    assert gpu.watch(["--rehearse", "--force"], 10.0) == 0
    assert "dead: its process ended with code -6 bad False" in capfd.readouterr().out


@cache
def planned(word: str = "") -> list[Stage]:
    import torch

    from benchmarks.gpu.machine import Machine

    machine = Machine(torch.device("cpu"), False, "A GPU 80GB", {"torch": torch.__version__})
    folder, remaining = Folder(Path("nowhere"), machine), partial(float, 360)
    maker = real.Maker(folder, machine, False, remaining)
    return stages.stages(machine, maker, real_2.turns_of(folder, machine, remaining), word)


def test_gpu_stages_cases_are_unique_and_in_expected_order() -> None:
    assert sum(stage.minutes or 0.0 for stage in planned()) <= gpu.MINUTES
    cases = {stage.name: [job.name for job in stage.jobs] for stage in planned()}
    every = [name for names in cases.values() for name in names]
    assert len(every) == len(set(every)) > 1000
    first, second, *_, last = cases.values()
    assert first[0] == goals.STEP and {goal.case for goal in goals.GOALS if goal.section == "bench"} <= set(first)
    assert [name.split()[0] for name in first[-2:]] == ["rival", "rival"] and len(first) == 16
    assert second == cases[stages.REAL] and sum(stage.minutes or 0.0 for stage in planned()[:2]) <= 11
    assert len(cases["drafters' steps"]) >= 15 and len(cases["training steps"]) == 6 and len(cases["several processes"]) == 3
    assert all(name.startswith("texts ") for name in last)
    real = [name.split()[0] for name in cases[stages.REAL]]
    assert real[-7:] == ["real"] * 3 + ["distil"] * 4 and real.count("texts") == 4
    (alone,) = planned(stages.REAL)
    names = [job.name for job in alone.jobs]
    assert names[-7].startswith("real ") and {need for job in alone.jobs for need in job.needs} == set(names[:-7])
