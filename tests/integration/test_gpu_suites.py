"""The GPU suites without a GPU: rehearsed whole, with nothing but torch and transformers to import; and what they rest on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.losses import LossOptions, Objective
from drafttrain.proposal import KINDS
from drafttrain.targets import TargetOptions
from kernels.bench import bench, case, check, corpus, goals, ladder, pretrain, real_2, report, straight, throughput, train
from kernels.bench.cases import SMALL, checked, timed
from kernels.bench.distil import Asked
from kernels.bench.goals import GOALS
from kernels.bench.machine import Machine
from kernels.bench.real import FULL, Folder, Part, there
from kernels.bench.report import BEGIN, END
from kernels.bench.results import FAILED, PASSED, Entry, Results
from kernels.bench.steps import binary
from kernels.bench.suite import Job, RedError, Suite
from tests.helpers import tiny_target

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
runpy.run_module("kernels.bench." + sys.argv[0], run_name="__main__")
"""


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
    command = [getattr(sys, "_base_executable", sys.executable), "-m", f"kernels.bench.{arguments[0]}", *arguments[1:]]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_target_and_its_drafters_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafttrain is not installed; the first command without what it does not need."""
    checkout, real, results = tmp_path / "checkout", tmp_path / "real", tmp_path / "results"
    for name in ("drafttrain", "kernels", "docs", "benchmarks", "conf", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    before, given = contents(checkout), ("--rehearse", "--real", str(real))
    early = uninstalled(checkout, "real_2", *given)
    assert early.returncode == 1 and "run make gpu-real-1 first" in early.stderr and len(early.stderr.splitlines()) == 1

    first = run(checkout, "real_1", *given, "--results", str(results))
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    folder = Folder(real, replace(GPU, rehearsal=True))
    assert "gpu-real-2 will refuse: deepspeed, hydra," in first.stdout, "it runs without them"
    assert "rehearsed; no figures" in first.stdout and there(folder.data) and folder.conversations.stat().st_size < 1 << 20
    again = run(checkout, "real_1", *given)
    assert again.returncode == 0 and again.stdout.count(" is there\n") == 3
    entries = json.loads((results / "rehearsal.json").read_text())["real-1"]
    assert {entry["status"] for entry in entries.values()} == {PASSED} and not any(e["figures"] for e in entries.values())

    unchecked = uninstalled(checkout, "real_2", *given, "--results", str(results))
    assert unchecked.returncode == 1 and "run make gpu-check first" in unchecked.stderr
    second = uninstalled(checkout, "real_2", *given)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert not re.search(r"\d+(\.\d+)? ?(x|ms|us|µs|%|tokens/s)\b", first.stdout + second.stdout)
    for name in real_2.RECIPES:
        found = folder.row(name).figures
        assert found["tau"] >= 1.0 and found["steps"] >= 2 and found["parameters"] > 0 and set(found["batches"]) == {"1", "2"}
        assert found["trained_in"] == "bfloat16" and found["decodes_in"] and found["unexplained"] == 0
    assert contents(checkout) == before

    worker = real_2.Worker()
    with pytest.raises(RedError, match="no_such"):
        worker.ask(Asked("no_such", (), tmp_path / "bad", 1, 0.0, TargetOptions(), threads=1))
    assert worker.pool is None, "its process goes, whatever state it is in"
    monkeypatch.setattr(real_2, "LIMIT", 0.1)
    with pytest.raises(RedError, match="not done after"):
        worker.ask(Asked("medusa", (), tmp_path / "bad", 1, 0.0, TargetOptions(), threads=1))


def test_what_was_made_from_another_part_is_not_taken(tmp_path: Path) -> None:
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


def test_the_text_is_cut_at_lines_and_the_target_has_its_size() -> None:
    lines = [f"{i:02d} {'x' * 20}\n" for i in range(40)]
    pieces = corpus.prompts("".join(lines), 50)
    assert len(pieces) > 3 and all(len(p) >= 50 and "\n".join(p.split("\n")) in "".join(lines) for p in pieces)
    assert [p[:2] for p in pieces] == sorted({p[:2] for p in pieces}) and not any(p.endswith("\n") for p in pieces)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM(pretrain.config_of(FULL, FULL.vocab, 0))
    assert 280e6 < sum(p.numel() for p in model.parameters()) < 320e6


@pytest.mark.slow
def test_all_three_are_rehearsed(tmp_path: Path) -> None:
    """In a copy of the checkout, which they leave as it was."""
    checkout, kept = tmp_path / "checkout", tmp_path / "kept"
    for name in ("drafttrain", "kernels", "docs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    before, folder = contents(checkout), ("--rehearse", "--results", str(kept))
    refused = run(checkout, "bench", *folder)
    assert refused.returncode == 1 and "run make gpu-check first" in refused.stderr and len(refused.stderr.splitlines()) == 1
    for name in ("check", "bench", "train"):
        done = run(checkout, name, *folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "REHEARSAL" in done.stdout and "rehearsed; no figures" in done.stdout and "cases are left" not in done.stdout
        assert not re.search(r"\d+(\.\d+)? ?(x|ms|us|µs|%|tokens/s)\b", done.stdout)
    known = json.loads((kept / "rehearsal.json").read_text())
    entries = [entry for section in ("check", "bench", "train") for entry in known[section].values()]
    assert len(entries) > 80 and not any(entry["figures"] for entry in entries)
    assert {path.name for path in kept.iterdir()} == {"rehearsal.json", "performance.md"}
    assert "no figures" in (kept / "performance.md").read_text()
    again = run(checkout, "check", *folder)
    assert again.returncode == 0 and not re.search(r"^passed ", again.stdout, re.MULTILINE)
    assert run(checkout, "train", "--rehearse", "--only", "loss kl").returncode == 0
    assert contents(checkout) == before


def test_without_a_gpu_they_say_so_in_one_line() -> None:
    done = run(ROOT, "check")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu-check: no GPU") and len(done.stderr.splitlines()) == 1


def test_make_takes_the_python_that_is_named() -> None:
    def said(*arguments: str) -> str:
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "-n", *arguments]
        return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout

    asked = said("gpu-bench", "PYTHON=python3", "REHEARSE=1", "RESULTS=here", "FORCE=1")
    assert " ".join(asked.split()) == "python3 -m kernels.bench.bench --rehearse --force --results here"
    for name in ("check", "bench", "train", "real_1", "real_2"):
        assert f"-m kernels.bench.{name}" in said(f"gpu-{name.replace('_', '-')}", "REAL=there") and "--real there" in said(
            "gpu-real-2", "REAL=there"
        )


def test_every_family_goes_up_the_ladder() -> None:
    """Rehearsed too; with every kind of tree that it has, captured unless it says that it cannot be."""
    rehearsed = {rung.drafter for rung in ladder.rungs(replace(GPU, rehearsal=True)) if rung.policy == "greedy"}
    assert {rung.drafter for rung in ladder.rungs(GPU)} == rehearsed == {ladder.PLAIN, *ladder.variants()}
    assert set(families()) < rehearsed
    assert set(ladder.shapes(families()["eagle3"].options)) == set(KINDS) - {"chain"}
    assert set(ladder.shapes(families()["medusa"].options)) == set(KINDS)
    machine = replace(GPU, rehearsal=True)
    target = ladder.target_of("llama-tiny", "float32", machine)
    outside = {name for name in ("cascade", "medusa", "redrafter") if not ladder.variants()[name](target).captured}
    assert outside == {"cascade"}
    rung = ladder.Rung("llama-tiny", "float32", "cascade", "greedy")
    assert ladder.check(rung, machine)["host_gap_ms"] > 0.0 and "host_gap_ms" not in ladder.check(
        replace(rung, drafter="medusa"), machine
    )


def test_cases_have_names_of_their_own_and_goals_name_cases() -> None:
    for jobs in (check.jobs(GPU), bench.jobs(GPU), train.jobs(GPU)):
        names = [job.name for job in jobs]
        assert len(set(names)) == len(names)
    for section, suite in (("bench", bench), ("train", train)):
        names = [job.name for job in suite.jobs(GPU)]
        named = {goal.case for goal in GOALS if goal.section == section}
        assert named <= set(names)
        assert max(map(names.index, named)) < 10, "goals come first"
    assert {c.op for c in checked(False)} >= {c.op for c in timed(False)}


@pytest.mark.parametrize("one", SMALL, ids=lambda c: c.name)
def test_a_case_sees_what_is_wrong(one: case.Case) -> None:
    """A wrong element, one that nobody wrote, and a draw from elsewhere."""
    device, dtype = torch.device("cpu"), torch.float32
    with torch.no_grad():
        given = one.inputs(dtype, device, seed=1)
        expected = one.exact(case.widened(given))
        out = one.run(given)
        assert case.complaint(expected, out) is None
        assert one.moved(dtype) > 0
        for name, good in out.items():
            for bad in (case.poison(good.clone()), wrong(good)):
                if good.is_floating_point() or bool(((bad >= 0) & (bad < 16)).all()):
                    assert case.complaint(expected, out | {name: bad}) is not None, name


def wrong(x: torch.Tensor) -> torch.Tensor:
    """One entry is off."""
    bad = x.clone()
    at = (0,) * bad.ndim
    bad[at] = (
        ~bad[at] if bad.dtype == torch.bool else bad[at] + x.abs().max() + 1 if x.is_floating_point() else 15 - bad[at] % 15
    )
    return bad


def test_draws_and_ranks() -> None:
    law = torch.tensor([[0.25, 0.0, 0.5, 0.25]], dtype=torch.float64)
    for number, fits in ((0.1, {0}), (0.25, {0, 2}), (0.5, {2}), (0.75, {2, 3}), (0.9, {3})):
        draw = case.Draw(law, torch.tensor([number], dtype=torch.float64))
        assert {t for t in range(4) if draw.complaint(torch.tensor([t])) is None} == fits
    ranks = case.Ranks(torch.tensor([[1.0, 5.0, 3.0, 2.99]], dtype=torch.float64), 0.01)
    assert ranks.complaint(torch.tensor([[1, 2]])) is None and ranks.complaint(torch.tensor([[1, 3]])) is None
    assert ranks.complaint(torch.tensor([[1, 0]])) and ranks.complaint(torch.tensor([[1, 1]]))


def test_fresh_memory_is_poisoned_and_twins_refuse() -> None:
    from drafttrain.ops import gated

    with case.poisoned():
        found = [torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(4)]
        assert all(bool(x.isnan().all()) for x in found) and torch.empty(2, dtype=torch.long).tolist() == [-77, -77]
    assert not torch.zeros(2).new_empty(0).isnan().any()
    with pytest.raises(AssertionError, match="twin"), case.without_twins((gated,)):
        gated.reference(torch.ones(2))
    assert gated.reference(torch.ones(1, 2)).shape == (1, 1)


@pytest.mark.parametrize("family", straight.LOSSES)
def test_the_straightforward_loss_is_the_objective(family: str) -> None:
    """In float32, with its gradients."""
    target = tiny_target()
    options = throughput.SMALL[family] | ({"draft_vocab": 24} if family == "eagle3" else {})
    torch.manual_seed(0)
    drafter = families()[family].build(families()[family].options(**options), target).train()
    drafter.prepare(lambda: torch.arange(64))
    for parameter in drafter.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    batch = throughput.random_batch(2, 17, 64, torch.device("cpu"), seed=1)
    filled, found = Online(target, drafter.taps).fill(batch), []
    for loss in (Objective(drafter, target, LossOptions(chunk=5))(filled)[0], straight.LOSSES[family](drafter, target, batch)):
        drafter.zero_grad()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
    assert found[0][1].keys() == found[1][1].keys() and len(found[0][1]) > 3 and found[0][0] > 0.1
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_a_step_without_room_is_tried_on_fewer_rows() -> None:
    machine, tried = replace(GPU, rehearsal=True), list[int]()

    def step(rows: int, most: int) -> None:
        tried.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError

    assert throughput.fitting(partial(step, most=2), 8, machine) == (2, 0) and tried == [8, 4, 2]
    assert throughput.fitting(partial(step, most=0), 4, machine) == (0, 0)


def test_results_hold_for_their_sources_and_torch(tmp_path: Path) -> None:
    results = Results(tmp_path, GPU)
    results.put("check", "a", "operators", Entry(PASSED, {"us": 1.5}))
    assert (tmp_path / "a-gpu-80gb.json").exists()
    again = Results(tmp_path, GPU)
    assert again.of("check", "a", "operators") == Entry(PASSED, {"us": 1.5})
    assert again.of("check", "a", "decoder") is None and again.of("check", "b", "operators") is None
    assert Results(tmp_path, replace(GPU, facts={"torch": "0"})).of("check", "a", "operators") is None


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def job(name: str) -> Job:
        def work() -> dict[str, Any]:
            ran.append(name)
            if name == "red":
                raise RedError("wrong")
            return {}

        return Job(name, "group", "operators", work)

    jobs = [job(name) for name in ("first", "red", "last")]

    def go(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["check", "--rehearse", "--results", str(tmp_path), *arguments])
        return Suite("check", "").run(jobs)

    assert go("--only", "first") == 0 and ran == ["first"]
    assert go("--budget", "-1") == 0 and ran == ["first"]
    assert go() == 1 and ran == ["first", "red", "last"]
    assert go() == 1 and ran[3:] == ["red"]
    assert go("--force") == 1 and ran[4:] == ["first", "red", "last"]
    monkeypatch.setattr(sys, "argv", ["check", "--rehearse", "--results", str(tmp_path)])
    assert Suite("bench", "").undone("check", jobs) == ["red"]


def test_the_page_keeps_what_stands_around_its_tables(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results, attention = Results(tmp_path, GPU), GOALS[5]
    results.put("bench", goals.STEP, "decoder", Entry(PASSED, {"1": step(0.8), "64": step(0.7) | {"over_plain": 1.3}}))
    figures = {"us": 2.0, "bytes": 10, "bandwidth_share": 0.7, "cold": True}
    results.put("bench", attention.case, "operators", Entry(PASSED, figures))
    results.put("bench", "generate m context=7", "decoder", Entry(PASSED, {"ours_ms": 1.0, "theirs_ms": 3.0}))
    for name, status in (("a", PASSED), ("b", FAILED)):
        results.put("check", name, "operators", Entry(status))
    loss = {"fused_ms": 1.0, "plain_ms": 2.0, "fused_bytes": 1, "plain_bytes": 4}
    results.put("train", "loss kl", "decoder", Entry(PASSED, loss))
    steps = {"rows": 4, "tokens_per_s": 9000.0, "mfu": 0.5, "peak_bytes": 3 << 30, "eager_rows": 0, "eager_bytes": 0}
    results.put("train", GOALS[-1].case, "training", Entry(PASSED, steps))
    steps = steps | {"eager_rows": 2, "eager_bytes": 5 << 30, "eager_tokens_per_s": 3000.0, "times": 3.0, "mfu": 0.4}
    results.put("train", GOALS[-2].case, "training", Entry(PASSED, steps))
    results.put(
        "train", "drafter x", "decoder", Entry(PASSED, {"tokens_per_s": 9.0, "first_loss": 2.0, "last_loss": 1.0, "steps": 3})
    )
    real = {"text": {"files": 9, "tokens": 90, "vocabulary": 8}, "data": {"conversations": 4, "written_tokens": 40}}
    real["target"] = {"parameters": 3, "trained_tokens": 80, "seconds": 7.0, "tokens_per_s": 11.0, "first_loss": 9.0}
    real["target"] |= {"last_loss": 3.0, "held_loss": None}
    for name, numbers in real.items():
        results.put("real-1", f"real {name}", "decoder", Entry(PASSED, numbers))
    for name, tau in (("slow", 1.25), ("fast", 3.5)):
        results.put("real-2", f"distil {name}", "decoder", Entry(PASSED, distilled(tau)))
    results.put("real-2", "distil bad", "decoder", Entry(FAILED, note="why"))
    gap = {"near_ties": 0, "round_ms": 2.0, "host_gap_ms": 0.5}
    results.put("check", "texts m float32 c greedy", "decoder", Entry(PASSED, gap))
    report.write(tmp_path, GPU)
    text = page.read_text()
    assert "80 tokens of 9 Python sources" in text and text.index("| fast | 3.50 |") < text.index("| slow | 1.25 |")
    assert "0.80 0.60 | 0.30 | 1.10 | 7.0 | 2.00 | 1.50 | 40/40 | 2 | 1,000 | bfloat16 | float32 | 70 | 9,000 |" in text
    assert "| bad | failed |" in text and "| texts m float32 c greedy | 2.000 | 0.500 | 25.0 % |" in text
    assert len({line.count("|") for line in text.split("Drafters distilled")[1].split("\n\n")[1].splitlines()}) == 1
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert f"| {GOALS[0].text} | >= 75.0 % | 80.0 % | reached |" in text and "| 80.0 % | missed |" in text
    assert "| 1.30x | missed |" in text and "70.0 % | reached" in text and report.NONE in text
    assert "| medusa | Llama-3.1-8B | 8192 | 4 | 9,000 | 50.0 % | 3.0 | out of memory |  | 0 |  |" in text
    assert "| medusa | Llama-3.1-8B | 2048 | 4 | 9,000 | 40.0 % | 3.0 | 3,000 | 5.0 | 2 | 3.00 |" in text
    assert f"| {GOALS[-1].text} | >= 45.0 % | 50.0 % | reached |" in text and "| >= 45.0 % | 40.0 % | missed |" in text
    assert "1 failed, 2 passed" in text and "| generate | 1.000 | 3.000 | 3.00 |" in text and "| 25.0 % |" in text
    report.write(tmp_path, GPU)
    assert page.read_text() == text


def distilled(tau: float) -> dict[str, Any]:
    found = {"tau": tau, "expected_tau": None, "alpha": [0.8, 0.6], "draft_cost": 0.3, "verify_cost": 1.1, "verify_nodes": 7.0}
    found |= {"speedup": 2.0, "batches": {"1": {"speedup": 2.0}, "8": {"speedup": 1.5}}, "exact": "40/40", "loops": 2}
    return found | {"parameters": 1000, "trained_in": "bfloat16", "decodes_in": "float32", "steps": 70, "tokens_per_s": 9000.0}


def step(share: float) -> dict[str, Any]:
    return {"ms": 1.0, "floor_share": share, "over_plain": 1.0, "capture_seconds": 1.0, "capture_bytes": 1 << 20}


def test_the_timed_trees() -> None:
    assert binary(1) == [] and binary(4) == [(0,), (1,), (0, 0)]
    assert len(binary(64)) == 63 and max(map(len, binary(64))) == 6
