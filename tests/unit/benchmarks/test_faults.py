"""A fault campaign notices faults that are planted, and makes a try again by its seed. One of each kind of fault is fast."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.core.files import atomic_write_text, remove_abandoned
from drafttrain.data import forms, templates, turns
from drafttrain.targets.load import EMBEDDED
from tests.faults import attack, campaign, data, files, hostile_templates, kill, material
from tests.faults.campaign import ACCEPTED, FAILURE, REFUSED, UNCHANGED, TryResult, failed
from tests.faults.child import forked

Work = Callable[[], int]
SEEDS = (1, 5, 10, 18, 20, 23)  # of tries whose signals come before chosen changes to files


def refuse(line: str) -> int:
    print(f"drafttrain: {line}", file=sys.stderr)
    return 2


@pytest.mark.parametrize(
    ("work", "fault"),
    [
        (lambda: [][1], "a traceback: IndexError: list index out of range"),
        pytest.param(lambda: 0, None, marks=pytest.mark.slow),
        pytest.param(lambda: refuse("mend a.json"), None, marks=pytest.mark.slow),
        pytest.param(lambda: next(iter(int, 1)) or bool(sum(iter(int, 1))), "no end within", marks=pytest.mark.slow),
        pytest.param(lambda: os.kill(os.getpid(), 9) or 0, "ended by signal 9", marks=pytest.mark.slow),
        pytest.param(lambda: len(bytearray(8 << 30)), "a traceback: MemoryError", marks=pytest.mark.slow),
    ],
)
def test_broken_reports_traceback_hang_signal_and_memory_error(work: Work, fault: str | None, tmp_path: Path) -> None:
    patience = 0.5 if fault == "no end within" else 60.0
    found = campaign.broken(forked(work, tmp_path, tmp_path / "said").wait(patience))
    assert found is None if fault is None else (found or "").startswith(fault)


@pytest.mark.slow
def test_broken_reports_child_processes_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.child.GRACE", 0.3)

    def work() -> int:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return 0

    ended = forked(work, tmp_path, tmp_path / "said").wait()
    assert len(ended.left) == 1 and "processes are left" in (campaign.broken(ended) or "")


@pytest.mark.slow
def test_forked_child_keeps_temporary_folders_of_parent_and_removes_those_it_made(tmp_path: Path) -> None:
    folders = []

    def work() -> int:
        folders.append(tempfile.TemporaryDirectory(dir=tmp_path))
        made = Path(tempfile.mkdtemp(dir=tmp_path))
        atexit.register(shutil.rmtree, made)
        print(folders[-1].name, made, sep="\n")
        return 0

    with tempfile.TemporaryDirectory() as kept:
        registered = Path(tempfile.mkdtemp(dir=kept))
        remove = atexit.register(lambda: shutil.rmtree(registered))
        ended = forked(work, tmp_path, tmp_path / "said").wait()
        assert Path(kept).is_dir() and registered.is_dir()
        atexit.unregister(remove)
    own = ended.out.split()
    assert len(own) == 2 and not any(Path(folder).exists() for folder in own)


class Toy(kill.Kill):
    """Kills a command that writes ten files and goes on where it was."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.commands = [kill.Command("toy", ("toy",), kill.of_folder("out"), kill.sound_json)]


def toy(fault: str) -> Callable[[Sequence[str]], Work]:
    def write(out: Path, i: int, again: bool) -> None:
        content = json.dumps([i, fault == "changes" and again])
        if fault == "tears":
            (out / f"{i}.json").write_text(content[:2])
            with (out / f"{i}.json").open("a") as file:
                file.write(content[2:])
        elif not (out / f"{i}.json").exists():
            atomic_write_text(out / f"{i}.json", content)

    def work() -> int:
        try:
            out, again = Path("out"), Path("out").exists()
            out.mkdir(exist_ok=True)
            if fault != "leaves":
                remove_abandoned(out)
            for i in range(10):
                write(out, i, again)
            (out / "last").touch()
        except KeyboardInterrupt:
            print("drafttrain: interrupted", file=sys.stderr)
            return 130
        return 0

    return lambda arguments: work


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("changes", "became"),
        pytest.param("", "", marks=pytest.mark.slow),
        pytest.param("tears", "half-written", marks=pytest.mark.slow),
        pytest.param("leaves", "tmp-", marks=pytest.mark.slow),
    ],
)
def test_kill_tries_fail_only_with_planted_fault(
    fault: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "cli", toy(fault))
    kind = Toy(tmp_path)
    outcomes = [outcome for seed in SEEDS for outcome in campaign.tried(kind, seed, tmp_path)]
    assert {one.result for one in outcomes} <= {UNCHANGED, FAILURE}, outcomes
    bad = [one for one in outcomes if one.result == FAILURE]
    assert bool(bad) == bool(fault), bad
    assert all(said in one.got for one in bad) and len({one.what for one in outcomes}) > 1


class Sealed(files.Files):
    """One file with a checksum, and a command that prints it."""

    def __init__(self, folder: Path, own: str | None = None) -> None:
        super().__init__()
        self.folder = folder / "material"
        (self.folder / "sealed").mkdir(parents=True)
        content = bytes(range(256))
        (self.folder / "sealed" / "a.bin").write_bytes(content)
        (self.folder / "sealed" / "sum").write_text(hashlib.sha256(content).hexdigest())
        reader = files.Reader("print", ("print",), files.said)
        self.artifacts = [files.Artifact("sealed", "sealed", ("sealed",), (reader,), own)]


def printing(check: bool, names: bool = True) -> Callable[[Sequence[str]], Work]:
    def work() -> int:
        content = Path("sealed/a.bin").read_bytes() if Path("sealed/a.bin").exists() else b""
        seal = Path("sealed/sum").read_bytes() if Path("sealed/sum").exists() else b""
        if check and hashlib.sha256(content).hexdigest().encode() != seal:
            return refuse(f"{'sealed/a.bin: its sum is not that of sealed/sum' if names else 'damaged'}; write it again")
        print(sum(content))
        return 0

    return lambda arguments: work


@pytest.mark.slow
def test_file_damage_tries_fail_only_with_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(place: str, check: bool, names: bool = True, own: str | None = None) -> set[str]:
        monkeypatch.setattr(material, "cli", printing(check, names))
        kind = Sealed(tmp_path / place, own)
        return {one.result for seed in range(4) for one in campaign.tried(kind, seed, tmp_path / place)}

    assert results("checked", check=True) <= {REFUSED, UNCHANGED}
    assert FAILURE in results("unchecked", check=False), "a reader that ignores a checksum"
    assert FAILURE in results("riddles", check=True, names=False), "a line that names no file"
    assert results("own", check=False, own="data") <= {REFUSED, ACCEPTED}


@pytest.mark.slow
def test_malformed_data_tries_report_planted_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = data.Data()
    kind.folder = tmp_path / "material"
    kind.folder.mkdir()
    (kind.folder / "target").symlink_to(EMBEDDED)
    draw = random.Random(1)
    contents = [("line.jsonl", data.mutated_line(draw) + b"\n") for _ in range(40)]

    def outcomes() -> list[TryResult]:
        folder = tmp_path / f"try-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return kind._all("lines", contents, folder)

    clean = [one for one in outcomes() if one.result != FAILURE]
    assert {one.result for one in clean} == {REFUSED, UNCHANGED} and len(clean) > 30
    with monkeypatch.context() as planted:
        for module in (forms, turns):
            planted.setattr(module, "string", lambda origin, name, value: value.strip())
        assert any("AttributeError" in one.got for one in outcomes() if one.result == FAILURE)


@pytest.mark.slow
def test_template_attack_without_bounds_is_reported_as_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are taken away."""
    monkeypatch.setattr(attack, "LATE", 1.0)
    monkeypatch.setattr(attack, "SECONDS", 0.2)

    def rendering(bound: bool) -> Callable[[Sequence[str]], Work]:
        def work() -> int:
            from contextlib import nullcontext

            import jinja2

            with templates.template_errors("a.jsonl", "own.jinja", "mend it") if bound else nullcontext():
                jinja2.Template(hostile_templates.PLAIN[4]).render()
            return 0

        def explained() -> int:
            try:
                return work()
            except ValueError as error:
                return refuse(str(error))

        return lambda arguments: explained

    for bound in (True, False):
        monkeypatch.setattr(attack, "cli", rendering(bound))
        ended = attack.run(("toy",), tmp_path)
        outcome = attack.judged("template, toy", "", ended, tmp_path, refuse=True)
        assert outcome.result == (REFUSED if bound else FAILURE), outcome
    assert "no end within" in outcome.got


def test_attack_verdict_reports_foreign_code_and_raw_escapes(tmp_path: Path) -> None:
    ended = forked(lambda: print("\x1b[2J") or 0, tmp_path, tmp_path / "said").wait()
    assert "'\\x1b'" in attack.judged("x, measure", "", ended, tmp_path).got
    assert attack.judged("x, generate", "", ended, tmp_path).result == UNCHANGED, "the model's text is written as it is"
    (tmp_path / attack.MARKER).touch()
    assert "foreign code" in attack.judged("x, generate", "", ended, tmp_path).got


class Dice:
    """Fails by the generator alone."""

    name = "dice"

    def prepare(self, folder: Path) -> None: ...

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        number = draw.randrange(10**9)
        if number % 3 == 0:
            raise ValueError(f"a bug of the campaign: {number}")
        return [failed("dice", "even", str(number)) if number % 2 else TryResult("dice", UNCHANGED, got=str(number), count=5)]


def test_fault_campaign_seed_repeats_same_failure(tmp_path: Path) -> None:
    counts = campaign.run([Dice()], 1.0, 4, tmp_path, Console(file=StringIO()), most=30)["dice"]
    assert counts.attempts == 30 and counts.total(FAILURE) == len(counts.failures) > 5
    record = json.loads((tmp_path / "result.json").read_text())["kinds"]["dice"]
    assert record["tries"] == counts.total() and record["failures"] == len(record["failed"])
    again = list(campaign.again(tmp_path / "result.json"))
    assert len(again) == len(counts.failures) and all(4_000_000 <= seed < 4_000_030 for _, seed in again)
    for (_, seed), failure in zip(again, counts.failures, strict=True):
        (outcome,) = campaign.tried(Dice(), seed, tmp_path)
        assert (outcome.result, outcome.what) == (FAILURE, failure["what"])
        assert outcome.got.splitlines()[-1] == failure["got"].splitlines()[-1]
    assert data.mutated_line(random.Random("data 7")) == data.mutated_line(random.Random("data 7"))
    assert hostile_templates.template(random.Random("x")) == hostile_templates.template(random.Random("x"))
