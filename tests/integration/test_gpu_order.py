"""The order of the GPU suites: what depends on what, what an edit resets, what a run leaves to the next one, the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import goals, report
from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import Limits, Runner, Stage
from benchmarks.gpu.report import BEGIN, END
from benchmarks.gpu.results import FAILED, PASSED, Entry, Job, RedError, Results

GPU = Machine(torch.device("cpu"), False, "A GPU 80GB", {"torch": torch.__version__})  # its cases, not its work
NORM = ("drafttrain.ops.rms_norm",)
TREES = ("drafttrain.ops.build_tree",)


def test_gpu_results_hold_only_for_same_sources_and_torch_version(tmp_path: Path) -> None:
    results = Results(tmp_path, GPU)
    job = Job("a", "group", NORM, dict, section="check")
    results.put(job, Entry(PASSED, {"us": 1.5}))
    assert (tmp_path / "a-gpu-80gb.json").exists()
    again = Results(tmp_path, GPU)
    assert again.of(job) == Entry(PASSED, {"us": 1.5})
    assert again.of(replace(job, scope=TREES)) is None and again.of(replace(job, name="b")) is None
    assert Results(tmp_path, replace(GPU, facts={"torch": "0"})).of(job) is None


def test_gpu_suite_rerun_executes_only_missing_and_failed_cases(tmp_path: Path) -> None:
    ran: list[str] = []

    def job(name: str) -> Job:
        def work() -> dict[str, Any]:
            ran.append(name)
            if name == "red":
                raise RedError("wrong")
            return {}

        return Job(name, "group", NORM, work, section="check")

    jobs = tuple(job(name) for name in ("first", "red", "last"))

    def go(jobs: tuple[Job, ...] = jobs, budget: float = 60.0, force: bool = False) -> None:
        Runner(Results(tmp_path, replace(GPU, rehearsal=True)), (), Limits(budget, force)).run([Stage("all", jobs)])

    go(jobs[:1])
    assert ran == ["first"]
    go(budget=-1.0)
    assert ran == ["first"]
    go()
    assert ran == ["first", "red", "last"]
    go()
    assert ran[3:] == ["red"]
    go(force=True)
    assert ran[4:] == ["first", "red", "last"]


def test_gpu_report_page_renews_tables_and_keeps_surrounding_text(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    results, attention = Results(tmp_path, GPU), next(goal for goal in GOALS if goal.case.startswith("tree_attention"))

    def put(section: str, name: str, entry: Entry, **more: Any) -> None:
        results.put(Job(name, "group", NORM, dict, section=section, **more), entry)

    put("bench", goals.STEP, Entry(PASSED, {"spread": 0.05, "1": step(0.8), "64": step(0.7) | {"over_plain": 1.3}}))
    figures = {"us": 2.0, "bytes": 10, "roofline_share": 0.7, "cold": True, "spread": 0.04}
    put("bench", attention.case, Entry(PASSED, figures))
    drafting = {"ms": 8.0, "draft_ms": 1.5, "plain_ms": 5.0, "over_plain": 1.6, "nodes": 60, "draft_length": 6}
    put("bench", "drafting eagle3 m context=7", Entry(PASSED, drafting | {"parameters": 9000, "floor_share": 0.7}))
    put("bench", "drafting eagle3 m context=7 weights=fp8", Entry(PASSED, drafting | {"parameters": 1, "over_plain": 1.9}))
    for name, status in (("a", PASSED), ("b", FAILED)):
        put("check", name, Entry(status))
    loss = {"fused_ms": 1.0, "plain_ms": 2.0, "fused_bytes": 1, "plain_bytes": 4}
    put("train", "loss kl", Entry(PASSED, loss))
    steps = {"rows": 4, "tokens_per_s": 9000.0, "mfu": 0.5, "peak_bytes": 3 << 30}
    put("train", GOALS[-1].case, Entry(PASSED, steps))
    put("train", GOALS[-2].case, Entry(PASSED, steps | {"mfu": 0.4}))
    put("train", "drafter x", Entry(PASSED, {"tokens_per_s": 9.0, "first_loss": 2.0, "last_loss": 1.0, "steps": 3}))
    real = {"text": {"files": 9, "tokens": 90, "vocabulary": 8}, "data": {"conversations": 4, "written_tokens": 40}}
    real["target"] = {"parameters": 3, "trained_tokens": 80, "seconds": 7.0, "tokens_per_s": 11.0, "first_loss": 9.0}
    real["target"] |= {"last_loss": 3.0, "held_loss": None}
    for name, numbers in real.items():
        put("real-1", f"real {name}", Entry(PASSED, numbers))
    for name, tau in (("slow", 1.25), ("fast", 3.5)):
        put("real-2", f"distil {name}", Entry(PASSED, distilled(tau)))
    put("real-2", "distil bad", Entry(FAILED, note="why"))
    report.write(tmp_path, GPU)
    text = page.read_text()
    assert "80 tokens of 9 Python sources" in text and text.index("| fast | 3.50 |") < text.index("| slow | 1.25 |")
    assert "0.80 0.60 | 7.0 | 2.10 | 2.00 | 1.50 | 1.90 | 1.40 | 40/40 | 2 | 1,000 | 70 | 9,000 |" in text
    assert "| bad | failed |" in text
    assert len({line.count("|") for line in text.split("Drafters distilled")[1].split("\n\n")[1].splitlines()}) == 1
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert f"| {GOALS[0].text} | >= 80.0 % | 80.0 % (unsteady ceiling) | reached |" in text
    assert GOALS[0].on("NVIDIA H100 80GB HBM3").wanted == ">= 84.0 %"
    assert "speedup of the best drafter | >= 1.50x | 1.40x | missed |" in text
    assert "| 1.30x | missed |" in text and "| 2.0 µs | reached |" in text
    unknown = text.split("Goals not measured: ")[1].splitlines()[0]
    assert GOALS[4].text in unknown and GOALS[0].text not in unknown and "has changed since" not in text
    assert f"| {report.usual(GOALS[-1].case)} | 9,000 tokens/s | MFU 50.0 % |  | 3.0 GiB |" in text
    assert f"| {report.usual(GOALS[-2].case)} | 9,000 tokens/s | MFU 40.0 % |  | 3.0 GiB |" in text
    assert f"| {GOALS[-1].text} | >= 45.0 % | 50.0 % | reached |" in text and "| >= 45.0 % | 40.0 % | missed |" in text
    assert "1 failed, 1 passed" in text
    assert "| loss kl | 1.0 ms |  | 2.00 times plain torch | 25.0 % of its memory |" in text
    assert "| 8.000 ms | 70.0 % | 1.600 plain steps | 60 nodes, draft length 6, drafting 1.500 ms |" in text
    assert "weights=fp8 | 8.000 ms | not measured | 1.900 plain steps |" in text
    assert f"| {report.usual(attention.case)} | 2.00 µs | 70.0 % (unsteady ceiling) |  | 0.000 MB, from memory |" in text
    assert len({line.count("|") for line in text.split("Figures:")[1].split("\n\n")[1].splitlines()}) == 1
    assert "| training medusa context=8192 |" in text and "Llama-3.1-8B" not in text.split("Figures:")[1]
    report.write(tmp_path, GPU)
    assert page.read_text() == text


def distilled(tau: float) -> dict[str, Any]:
    found = {"tau": tau, "expected_tau": None, "alpha": [0.8, 0.6], "verify_nodes": 7.0, "exact": "40/40", "loops": 2}
    found |= {"batches": {"1": {"tau": 2.1, "speedup": 2.0}, "8": {"tau": 2.1, "speedup": 1.5}}}
    found |= {"sampled": {"0.8": {"tau": 1.9, "speedup": 1.4}}, "parameters": 1000, "steps": 70, "tokens_per_s": 9000.0}
    return found


def step(share: float) -> dict[str, Any]:
    return {"ms": 1.0, "floor_share": share, "over_plain": 1.0, "capture_seconds": 1.0, "capture_bytes": 1 << 20}
