"""The plan of the GPU suites: what runs first, what a red check blocks, what a stage leaves to the end, what an edit resets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import bench, check, goals, ladder, report, sources, train
from benchmarks.gpu.cases import checked
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import DeadError, Limits, Runner, Stage, ordered
from benchmarks.gpu.results import BLOCKED, CHECK, FAILED, PASSED, Entry, Job, RedError, Results
from benchmarks.gpu.stages import Arguments, mark_dead
from drafttrain.drafters import families
from drafttrain.drafters.options import TREES

ROOT = Path(__file__).parents[2]
GPU = Machine(torch.device("cpu"), False, "A GPU 80GB", {"torch": torch.__version__})
NORM = ("drafttrain.ops.rms_norm",)


class Bench:
    """Jobs that say that they ran; those named in `red` fail."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran, self.red = folder, list[str](), set[str]()

    def job(self, name: str, section: str = "bench", group: str = "group", **more: Any) -> Job:
        def work() -> dict[str, Any]:
            self.ran.append(name)
            if name in self.red:
                raise RedError("wrong")
            return {"us": 1.0}

        return Job(name, group, NORM, work, section=section, **more)

    def run(self, stages: list[Stage], checks: list[Job], budget: float = 60.0, **more: Any) -> Runner:
        self.ran.clear()
        runner = Runner(Results(self.folder, replace(GPU, rehearsal=True)), checks, Limits(budget, **more))
        runner.run(stages)
        return runner


def test_gpu_runner_failed_check_blocks_only_dependent_cases(tmp_path: Path) -> None:
    some = Bench(tmp_path)
    checks = [some.job(name, CHECK, group) for name, group in (("c1", "op1"), ("c2", "op2"), ("c3", "op3"))]
    first, second = some.job("first", needs=("c1",)), some.job("second", needs=("c2",), heeds=("op2",))
    third = some.job("third", heeds=("op3",))
    stages = [Stage("all", (first, second, third))]
    some.red = {"c1"}
    runner = some.run(stages, checks)
    assert some.ran == ["c1", "c2", "second", "third"], "each one's checks come first, the others' not at all"
    blocked = runner.entry(first)
    assert blocked == Entry(BLOCKED, note="its check is red: c1") and runner.entry(second) == Entry(PASSED, {"us": 1.0})
    some.run(stages, checks)
    assert some.ran == ["c1"], "only what is red is tried again"
    some.red = set()
    some.run(stages, checks)
    assert some.ran == ["c1", "first"]
    some.red = {"c3"}
    third = some.job("third anew", heeds=("op3",))
    some.run([Stage("checks", (checks[2],)), Stage("all", (third,))], checks)
    assert some.ran == ["c3"]


@pytest.mark.slow
def test_gpu_runner_stage_over_its_budget_yields_to_later_stages(tmp_path: Path) -> None:
    some = Bench(tmp_path)
    slow, quick = Stage("slow", (some.job("a"), some.job("b")), minutes=0.0), Stage("quick", (some.job("c"),), minutes=1.0)
    stages = [slow, quick, Stage("rest", (some.job("r"),))]
    some.run(stages, [])
    assert some.ran == ["c", "a", "b", "r"]
    assert some.run(stages, []).entry(slow.jobs[0]) is not None and some.ran == []
    spent = Results(tmp_path, replace(GPU, rehearsal=True)).known["spent"]["seconds"]
    assert set(spent) == {"slow", "quick"}, "a stage's share holds over all commands"
    some.run([Stage("long", (some.job("e", seconds=90.0), some.job("f", seconds=30.0)))], [])
    assert some.ran == ["f"], "what would go on long after the budget does not begin"
    some.run([Stage("other", (some.job("d"),))], [], budget=-1.0)
    assert some.ran == []


@pytest.mark.slow
def test_gpu_runner_failed_cases_are_retried_last_or_not_at_all(tmp_path: Path) -> None:
    some = Bench(tmp_path)
    some.red, checks = {"c"}, [some.job("c", CHECK)]
    stages = [Stage("one", (some.job("x", needs=("c",)), some.job("y")))]
    some.run([Stage("check", (checks[0],))], checks)
    some.run(stages, checks, retry=False)
    assert some.ran == ["y"]
    some.red = set()
    some.run([Stage("one", (*stages[0].jobs, some.job("z")))], checks)
    assert some.ran == ["z", "c", "x"]


@pytest.mark.slow
def test_gpu_runner_dead_device_ends_run_and_next_process_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some, note = Bench(tmp_path), tmp_path / "running.json"
    some.red, checks = {"c"}, [some.job("c", CHECK)]
    stages = [Stage("one", (some.job("x", needs=("c",)), some.job("y"), some.job("z")))]

    def dead(machine: Machine) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch, pytest.raises(DeadError):
        patch.setattr(Machine, "wait", dead)
        some.run(stages, checks)
    assert some.ran == ["c"]
    runner = some.run(stages, checks, retry=False)
    assert some.ran == ["y", "z"] and runner.entry(stages[0].jobs[0]) == Entry(BLOCKED, note="its check is red: c")

    note.write_text('{"section": "bench", "name": "w"}')
    jobs, results = (some.job("v"), some.job("w")), Results(tmp_path, replace(GPU, rehearsal=True))
    runner = Runner(results, checks, Limits(60.0, retry=False), note)
    mark_dead(runner, [Stage("one", jobs)], arguments(watched=note, dead="its process ended with code -11"))
    runner.run([Stage("one", jobs)])
    assert some.ran[2:] == ["v"] and runner.entry(jobs[1]) == Entry(FAILED, note="its process ended with code -11")
    assert not note.exists()


def arguments(**given: Any) -> Arguments:
    fixed = {"rehearse": True, "force": False, "results": None, "budget": 60.0, "only": "", "real": Path("nowhere")}
    return Arguments(**fixed | {"minutes": 1.0, "section": "", "stages": ""} | given)


OPERATOR = next(goal for goal in goals.GOALS if goal.unit == "us")


def test_gpu_report_hides_figures_whose_check_failed(tmp_path: Path) -> None:
    results, name = Results(tmp_path, GPU), OPERATOR.case
    operator, one = Job(name, "op", NORM, dict, section="bench", needs=("c",)), Job("c", "op", NORM, dict, section=CHECK)
    results.put(one, Entry(PASSED))
    results.put(operator, Entry(PASSED, {"us": 2.0, "bytes": 1, "roofline_share": 0.5, "cold": True}))
    row = f"| {report.usual(name)} |"
    assert "2.0 µs" in report.goals_text(results.known) and f"{row} 2.00 µs |" in report.tables(tmp_path)
    results.put(one, Entry(FAILED, note="wrong"))
    line = next(line for line in report.goals_text(results.known).splitlines() if line.startswith(OPERATOR.text))
    assert report.NONE in line and line.endswith("blocked: its check is red: c")
    assert row not in report.tables(tmp_path) and "blocked: its check is red: c" in report.tables(tmp_path)


def test_gpu_cases_name_existing_checks() -> None:
    checks = {job.name: job for job in check.jobs(GPU)}
    groups = {job.group for job in checks.values()}
    for suite in (bench, train):
        for job in suite.jobs(GPU):
            assert job.needs and set(job.needs) <= set(checks) and set(job.heeds) <= groups, job.name
            assert len(job.needs) < 56, "a few"
    for case in checked(False):
        op = case.op.removesuffix("_log").removesuffix("_blocks")
        modules = checks[check.name_of(case, case.dtypes[0])].modules
        assert any(name.endswith(f".{op}") or hasattr(import_module(name), op) for name in modules), op
    first = [job for job in bench.jobs(GPU)[:8] if job.name == goals.STEP]
    assert first and len(ordered([Stage("one", (first[0],))], checks)) < 36


def test_gpu_ladder_early_texts_cover_families_policies_and_dtypes() -> None:
    early = ladder.early(GPU)
    assert 25 <= len(early) <= 40 and set(early) <= set(ladder.rungs(GPU)) and len(set(early)) == len(early)
    assert {rung.drafter.partition("-")[0] for rung in early} == {ladder.PLAIN, *families()}
    assert {rung.policy for rung in early} == {"greedy", *ladder.SAMPLED} and {rung.dtype for rung in early} == set(
        ladder.DTYPES
    )
    known = families()
    parts = [rung.drafter.partition("-") for rung in early if rung.drafter != ladder.PLAIN]
    assert {shape or getattr(known[name].options(), "tree", "chain") for name, _, shape in parts} == set(TREES)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    for name in ("drafttrain", "kernels", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "assets", "results"))
    (tmp_path / "README.md").write_text("read me")
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for found in (
        sources.digest,
        sources.files,
        sources.imports,
        sources.called,
        sources.kernels,
        sources.defined,
        sources.included,
    ):
        found.cache_clear()


RESETS: dict[str, set[str]] = {
    "README.md": set(),
    "benchmarks/gpu/check.py": set(),
    "drafttrain/drafters/medusa.py": {"medusa"},
    "drafttrain/ops/divergence.py": {"divergence", "training"},
    "kernels/triton/divergence.py": {"divergence", "training"},
    "kernels/triton/tree_attention.py": {"tree_attention", "plain", "medusa", "eagle3", "training"},
    "kernels/csrc/cuda/trees.cu": {"tree_links", "eagle3", "medusa"},
    "kernels/include/drafttrain/rows.cuh": {"rms_norm", "plain", "medusa", "eagle3", "training"},
    "kernels/csrc/schema.h": {"rms_norm", "tree_links", "tree_attention", "plain", "medusa", "eagle3", "training"},
    "drafttrain/decoding/step.py": {"plain", "medusa", "eagle3", "training"},
    "drafttrain/drafters/common/proposal.py": {"medusa", "eagle3"},
    "drafttrain/train/telemetry.py": {"training"},
}


@pytest.mark.slow
def test_gpu_source_digest_changes_only_for_affected_cases(checkout: Path, subtests: pytest.Subtests) -> None:
    cases = {op: (f"drafttrain.ops.{op}",) for op in ("rms_norm", "tree_attention", "divergence")}
    cases["tree_links"] = ("drafttrain.ops.build_tree",)
    cases |= {name: (*sources.DECODER, *sources.of_family(name)) for name in ("medusa", "eagle3")}
    cases |= {"plain": sources.DECODER, "training": sources.TRAINING}

    def digests() -> dict[str, str]:
        forget()
        return {name: sources.digest(modules, checkout) for name, modules in cases.items()}

    before = digests()
    for name, reset in RESETS.items():
        file, content = checkout / name, (checkout / name).read_bytes()
        with subtests.test(file=name):
            file.write_bytes(content + b"\n")
            after = digests()
            assert {name for name in cases if before[name] != after[name]} == reset
        file.write_bytes(content)
    assert digests() == before


def test_gpu_sources_of_composed_family_include_inner_families() -> None:
    assert set(sources.of_family("cascade")) == {
        f"drafttrain.drafters.{n}" for n in ("cascade", "draft_model", "prompt_lookup")
    }
    reached = {str(path.relative_to(ROOT)) for path in sources.files((*sources.DECODER, *sources.of_family("medusa")))}
    assert "drafttrain/drafters/medusa.py" in reached and "drafttrain/drafters/eagle.py" not in reached
    assert "kernels/include/drafttrain/accept.cuh" in reached and "drafttrain/decoding/step.py" in reached
