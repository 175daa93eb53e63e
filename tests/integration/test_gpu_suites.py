"""The GPU suites without a GPU: rehearsed whole, with nothing but torch and transformers to import; and what they rest on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu import bench, case, check, ladder, pretrain, real_2, stages, throughput, train
from benchmarks.gpu.cases import SMALL, checked, timed
from benchmarks.gpu.distil import Asked
from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import REHEARSED
from benchmarks.gpu.real import FULL, Folder, Part, there
from benchmarks.gpu.results import PASSED, RedError
from benchmarks.gpu.steps import binary
from drafttrain.drafters import families
from drafttrain.drafters.options import TREES
from drafttrain.model.drafter import Drafter
from drafttrain.targets import TargetOptions
from drafttrain.train.telemetry import Flops

ROOT = Path(__file__).parents[2]
FOREIGN = (
    "datasets",
    "deepspeed",
    "hydra",
    "hypothesis",
    "jinja2",
    "matplotlib",
    "omegaconf",
    "peft",
    "pytest",
    "rich",
    "wandb",
)
GPU = Machine(torch.device("cpu"), False, "A GPU 80GB", {"torch": torch.__version__})  # its cases, not its work

# as on a machine where nothing is installed but torch and transformers, this checkout neither
BARE = f"""
import runpy, sys
sys.meta_path = [f for f in sys.meta_path if "drafttrain" not in getattr(f, "__module__", "") + getattr(f, "__name__", "")]
sys.modules.update(dict.fromkeys({FOREIGN!r}))
sys.argv = sys.argv[1:]
runpy.run_module("benchmarks.gpu." + sys.argv[0], run_name="__main__")
"""


def copied(checkout: Path, *folders: str) -> None:
    """These folders, and what the suites build their tiny models with: it may need no package of the tests."""
    for name in folders:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests").mkdir()
    for name in ("__init__.py", "architectures.py", "tiny.py"):
        shutil.copy(ROOT / "tests" / name, checkout / "tests")


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", BARE, *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def uninstalled(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As on a machine that has everything but this checkout installed: what packages ask to be run at start-up is not."""
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": packages}
    command = [getattr(sys, "_base_executable", sys.executable), "-m", f"benchmarks.gpu.{arguments[0]}", *arguments[1:]]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def check_distilled(folder: Folder, names: Iterable[str]) -> None:
    for name in names:
        found = folder.row(name).figures
        assert found["tau"] >= 1.0 and found["steps"] >= 2 and found["parameters"] > 0 and set(found["batches"]) == {"1", "2"}
        assert found["trained_in"] == "bfloat16" and found["decodes_in"] and found["unexplained"] == 0


@pytest.mark.slow
def test_gpu_real_target_and_drafter_rehearsal_runs_uninstalled(tmp_path: Path) -> None:
    """Where drafttrain is not installed; the target and its data without the packages that they do not need. `test_gpu_bare`
    distils every drafter."""
    checkout, real, results = tmp_path / "checkout", tmp_path / "real", tmp_path / "results"
    copied(checkout, "drafttrain", "kernels", "docs", "benchmarks", "conf", "recipes")
    before, given = contents(checkout), ("stages", "--stages", "real target", "--rehearse", "--real", str(real))
    early = uninstalled(checkout, *given, "--only", "distil medusa")
    assert early.returncode == 0 and "run make gpu-real on this machine" in early.stdout

    first = run(checkout, *given, "--only", "real ", "--results", str(results))
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    folder = Folder(real, replace(GPU, rehearsal=True))
    assert "rehearsed; no figures" in first.stdout and there(folder.data) and folder.conversations.stat().st_size < 1 << 20
    again = run(checkout, *given, "--only", "real ")
    assert again.returncode == 0 and again.stdout.count(" is there\n") == 3
    entries = json.loads((results / "rehearsal.json").read_text())["real-1"]
    assert {entry["status"] for entry in entries.values()} == {PASSED} and not any(e["figures"] for e in entries.values())

    second = uninstalled(checkout, *given, "--only", "distil medusa")
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert not re.search(r"\d+(\.\d+)? ?(ms|us|tokens/s)\b", first.stdout + second.stdout)
    check_distilled(folder, ["medusa"])
    assert contents(checkout) == before

    worker = real_2.Worker(Asked("no_such", (), tmp_path / "bad", 1, TargetOptions(device="cpu"), threads=1))
    worker.prepare()
    with pytest.raises(RedError, match=r"ended with code 2; .*no_such"):
        worker.wait(120.0)
    worker = real_2.Worker(replace(worker.asked, recipe="medusa"))
    with pytest.raises(RedError, match="not done after"):
        worker.wait(0.1)
    assert worker.process.returncode, "it goes, whatever state it is in"


def test_gpu_turns_divide_remaining_time_among_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    given, left = list[tuple[str, float]](), [200.0]

    class Stand:
        """A process that fails where its recipe is bad, and uses up its turn otherwise."""

        def __init__(self, asked: Asked) -> None:
            self.asked, self.ready = asked, asked.recipe != "bad"

        def prepare(self) -> None:
            pass

        def wait(self, seconds: float) -> None:
            if not self.ready:
                raise RedError("no")

        def train(self, seconds: float) -> dict[str, Any]:
            given.append((self.asked.recipe, seconds))
            left[0] -= seconds + 20.0
            return {}

        def end(self) -> None:
            pass

    monkeypatch.setattr(real_2, "Worker", Stand)
    scale = replace(FULL, least=10.0, distilled=60.0, around=20.0)
    names = ("one", "bad", "two", "three", "four")
    turns = real_2.Turns([Asked(n, (), Path(n), 1, TargetOptions()) for n in names], scale, lambda: left[0])
    turns.start(names[:4])
    turns.train("one")
    with pytest.raises(RedError):
        turns.train("bad")
    for name in names[2:]:
        turns.train(name)
    assert given == [("one", 30.0), ("two", 55.0), ("three", 55.0), ("four", 10.0)]


def test_gpu_real_folder_part_is_invalid_after_its_source_changes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, GPU)
    for part, text in ((folder.text, "one"), (folder.target, "weights"), (folder.data, "said")):
        assert not there(part)
        with part.written({"figure": 1}) as aside:
            (aside / "file").write_text(text)
        assert there(part) and part.figures == {"figure": 1}
    (folder.data.path / "file").write_text("cut off")
    assert not there(folder.data) and there(folder.target)
    with folder.text.written({"figure": 2}) as aside:
        (aside / "file").write_text("another")
    assert not there(folder.target) and not there(Part(tmp_path / "full" / "none", folder.text))


def test_gpu_corpus_prompts_cut_at_lines_and_target_has_300m_parameters() -> None:
    lines = [f"{i:02d} {'x' * 20}\n" for i in range(40)]
    pieces = pretrain.prompts("".join(lines), 50)
    assert len(pieces) > 3 and all(len(p) >= 50 and "\n".join(p.split("\n")) in "".join(lines) for p in pieces)
    assert [p[:2] for p in pieces] == sorted({p[:2] for p in pieces}) and not any(p.endswith("\n") for p in pieces)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(pretrain.config_of(FULL, FULL.vocab, 0))
    assert 280e6 < sum(p.numel() for p in model.parameters()) < 320e6


@pytest.mark.slow
def test_gpu_check_bench_and_train_rehearsals_leave_checkout_unchanged(tmp_path: Path) -> None:
    """In a copy of the checkout, which they leave as it was. `test_gpu_bare` rehearses all cases."""
    checkout, kept = tmp_path / "checkout", tmp_path / "kept"
    copied(checkout, "drafttrain", "kernels", "benchmarks", "docs")
    before, folder = contents(checkout), ("--rehearse", "--results", str(kept))
    few = {"check": "gated", "bench": "gated", "train": "loss kl"}
    for name, only in few.items():
        done = run(checkout, "stages", *folder, "--section", name, "--only", only)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "REHEARSAL" in done.stdout and "rehearsed; no figures" in done.stdout and "cases are left" not in done.stdout
        assert not re.search(r"\d+(\.\d+)? ?(ms|us|tokens/s)\b", done.stdout)
    assert re.search(r"^passed  divergence loss=kl .*\n(.*\n)*passed  loss kl$", done.stdout, re.MULTILINE), (
        "its checks come first"
    )
    known = json.loads((kept / "rehearsal.json").read_text())
    assert set(known["train"]) == {"loss kl"}
    entries = [entry for section in ("check", "bench", "train") for entry in known[section].values()]
    assert len(entries) > 8 and not any(entry["figures"] for entry in entries)
    assert {path.name for path in kept.iterdir()} == {"rehearsal.json", "performance.md"}
    assert "no figures" in (kept / "performance.md").read_text()
    again = run(checkout, "stages", *folder, "--section", "check", "--only", few["check"])
    assert again.returncode == 0 and not re.search(r"^passed ", again.stdout, re.MULTILINE)
    assert contents(checkout) == before


def test_gpu_check_without_gpu_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert stages.work() == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("gpu: no GPU") and len(said.err.splitlines()) == 1


def test_make_gpu_targets_use_named_python_and_options() -> None:
    def said(*arguments: str) -> str:
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "-n", *arguments]
        return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout

    asked = said("gpu-bench", "PYTHON=python3", "REHEARSE=1", "RESULTS=here", "FORCE=1")
    assert " ".join(asked.split()) == "python3 -m benchmarks.gpu.gpu --rehearse --force --results here --section bench"
    asked = said("gpu", "PYTHON=python3", "BUDGET=9", "REAL=there")
    assert " ".join(asked.split()) == "python3 -m benchmarks.gpu.gpu --real there --minutes 9"
    assert (
        " ".join(said("gpu-real", "PYTHON=python3").split())
        == 'python3 -m benchmarks.gpu.gpu --stages "real target" --minutes 6'
    )
    asked = said("gpu-wheels", "PYTHON=python3", "PYTHON_VERSION=3.11", "THERE=pyarrow,pandas")
    assert " ".join(asked.split()) == "python3 -m benchmarks.gpu.wheels --python 3.11 --there pyarrow,pandas"
    for name in ("check", "bench", "train"):
        assert f"--section {name}" in said(f"gpu-{name}")


def test_gpu_ladder_contains_every_family_and_tree_shape(drafters: dict[str, Drafter | ladder.SkipError]) -> None:
    """Rehearsed too; with every kind of tree that it has, captured unless it says that it cannot be."""
    rehearsed = {rung.drafter for rung in ladder.rungs(replace(GPU, rehearsal=True)) if rung.policy == "greedy"}
    assert {rung.drafter for rung in ladder.rungs(GPU)} == rehearsed == {ladder.PLAIN, *ladder.variants()}
    assert set(families()) < rehearsed
    assert set(ladder.shapes(families()["eagle3"].options)) == set(TREES) - {"chain"}
    assert set(ladder.shapes(families()["medusa"].options)) == set(TREES)
    built = {name: drafters[name] for name in families()}
    assert {name for name, drafter in built.items() if isinstance(drafter, Drafter) and not drafter.captured} == {"suffix"}
    assert not [drafter for drafter in built.values() if isinstance(drafter, ladder.SkipError)]


@pytest.fixture(scope="module")
def drafters() -> dict[str, Drafter | ladder.SkipError]:
    """Every drafter of the ladder, on one small target."""
    target, found = ladder.target_of("llama-tiny", "float32", replace(GPU, rehearsal=True)), {}
    for name, build in ladder.variants().items():
        try:
            found[name] = build(target)
        except ladder.SkipError as error:
            found[name] = error
    return found


def test_gpu_ladder_drafter_has_tree_shape_of_its_name(
    drafters: dict[str, Drafter | ladder.SkipError], subtests: pytest.Subtests
) -> None:
    """Also where the small shape of a family has another one."""
    for name, drafter in drafters.items():
        family, _, kind = name.partition("-")
        with subtests.test(name=name):
            if isinstance(drafter, ladder.SkipError):
                assert kind == "best_first", drafter
                continue
            wanted = kind or getattr(families()[family].options(), "tree", None)
            assert wanted is None or getattr(drafter.proposal, "kind", None) == wanted


def test_ladder_early_texts_skip_no_drafter(drafters: dict[str, Drafter | ladder.SkipError]) -> None:
    """As where a family has no such tree."""
    assert not [rung for rung in ladder.early(GPU) if isinstance(drafters.get(rung.drafter), ladder.SkipError)]


def test_gpu_case_names_are_unique_and_goals_name_existing_cases() -> None:
    for jobs in (check.jobs(GPU), bench.jobs(GPU), train.jobs(GPU)):
        names = [job.name for job in jobs]
        assert len(set(names)) == len(names)
    for section, suite in (("bench", bench), ("train", train)):
        names = [job.name for job in suite.jobs(GPU)]
        named = {goal.case for goal in GOALS if goal.section == section}
        assert named <= set(names)
        assert max(map(names.index, named)) < 16, "goals come first"
    assert {c.op for c in checked(False)} >= {c.op for c in timed(False)}


def test_gpu_case_detects_wrong_or_unwritten_output_elements(subtests: pytest.Subtests) -> None:
    """A wrong element, one that nobody wrote, and a draw from elsewhere."""
    for one in SMALL:
        with subtests.test(case=one.name), torch.no_grad():
            given = one.inputs(torch.float32, torch.device("cpu"), seed=1)
            expected = one.exact(case.widened(given))
            out = one.run(given)
            assert case.complaint(expected, out) is None
            assert one.moved(torch.float32) > 0
            for name, good in out.items():
                for bad in (case.poison(good.clone()), wrong(good)):
                    if good.is_floating_point() or bool(((bad >= 0) & (bad < 16)).all()):
                        assert case.complaint(expected, out | {name: bad}) is not None, name


def wrong(x: torch.Tensor) -> torch.Tensor:
    """One entry is off."""
    bad = x.clone()
    at = (0,) * bad.ndim
    bad[at] = (
        ~bad[at] if bad.dtype == torch.bool else bad[at] + x.abs().max() + 1 if x.is_floating_point() else (bad[at] + 1) % 16
    )
    return bad


def test_gpu_draw_and_rank_checks_accept_only_valid_choices() -> None:
    law = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=torch.float64)
    for number, fits in ((0.1, {0}), (0.25, {0, 2}), (0.5, {2}), (0.75, {2, 3}), (0.9, {3})):
        draw = case.Draw(law, torch.tensor([number], dtype=torch.float64))
        assert {t for t in range(4) if draw.complaint(torch.tensor([t])) is None} == fits
    ranks = case.Ranks(torch.tensor([[1.0, 5.0, 3.0, 2.99]], dtype=torch.float64), 0.01)
    assert ranks.complaint(torch.tensor([[1, 2]])) is None and ranks.complaint(torch.tensor([[1, 3]])) is None
    assert ranks.complaint(torch.tensor([[1, 0]])) and ranks.complaint(torch.tensor([[1, 1]]))


def test_gpu_case_poisons_fresh_memory_and_forbids_reference_operator() -> None:
    from drafttrain.ops import gated

    with case.poisoned():
        found = [torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(4)]
        assert all(bool(x.isnan().all()) for x in found) and torch.empty(2, dtype=torch.long).tolist() == [-77, -77]
    assert not torch.zeros(2).new_empty(0).isnan().any()
    with pytest.raises(AssertionError, match="twin"), case.without_twins(("drafttrain.ops.gated.reference",)):
        gated.reference(torch.ones(2))
    for one in SMALL:  # each twin is there
        with case.without_twins(one.twins):
            pass
    assert gated.reference(torch.ones(1, 2)).shape == (1, 1)


@pytest.mark.parametrize("family", throughput.SMALL)
def test_gpu_training_step_runs_target_head_once_and_counts_flops(family: str) -> None:
    """And no less: the count took it away once for every further draft depth, as if it still ran for each."""
    machine = Machine(torch.device("cpu"), True, "rehearsal", {})
    training = throughput.Training(throughput.Setting(family, next(iter(REHEARSED)), 24), machine)
    ran, head = list[int](), type(training.target).head

    def counted(target: Any, x_BNH: torch.Tensor) -> torch.Tensor:
        ran.append(x_BNH[..., 0].numel())
        return head(target, x_BNH)

    with mock.patch.object(type(training.target), "head", counted):
        training.step()
    assert sum(ran) <= training.batch.token_BT.numel()  # positions
    counter = Flops()
    with counter.counting(training.batch):
        loss, _ = training.objective(training.online.fill(training.batch))
        loss.backward()
    assert training.flops == counter.of(training.batch)


def test_gpu_binary_draft_tree_has_requested_nodes_and_depth() -> None:
    assert binary(1) == [] and binary(4) == [(0,), (1,), (0, 0)]
    assert len(binary(64)) == 63 and max(map(len, binary(64))) == 6
