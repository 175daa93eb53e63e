"""Runs side by side: what is refused, what is called a difference, and the files."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
import wandb_workspaces.reports.v2 as wr

from drafttrain.commands.compare import compare
from drafttrain.core.errors import UserError
from drafttrain.measure.compare import CompareOptions
from drafttrain.measure.compare.columns import cell_rows, figure_rows, header
from drafttrain.measure.compare.ranking import Pair, frontier, holm, interval, permutation_p, ranked, speedup, tau
from drafttrain.measure.compare.runs import RunReport, find_runs, rows_of
from drafttrain.runs.options import RunOptions
from tests.reports import engine_of
from tests.runs import report, save_run, trained, version_1, write

Command = Callable[..., int]
FAST = CompareOptions(samples=500)


def compared(*reports: dict[str, Any], **options: Any) -> Any:
    rows = rows_of([RunReport(f"runs/{i}", made) for i, made in enumerate(reports)], "best")
    return ranked(rows, CompareOptions(**({"samples": 500} | options)))


def by_hand(a_PC: np.ndarray, b_PC: np.ndarray) -> float:
    """The exact permutation p-value, one exchange at a time."""
    gaps = []
    for swaps in product([False, True], repeat=len(a_PC)):
        first = [y if swap else x for x, y, swap in zip(a_PC, b_PC, swaps, strict=True)]
        second = [x if swap else y for x, y, swap in zip(a_PC, b_PC, swaps, strict=True)]
        gaps.append(
            abs(sum(x[0] for x in first) / sum(x[1] for x in first) - sum(y[0] for y in second) / sum(y[1] for y in second))
        )
    return sum(gap >= gaps[0] - 1e-12 for gap in gaps) / len(gaps)


def test_permutation_p_equals_exact_enumeration() -> None:
    random = np.random.default_rng(1)
    for _ in range(5):
        a_PC, b_PC = (random.integers(5, 60, (7, 2)).astype(float) for _ in range(2))
        assert permutation_p(a_PC, b_PC, tau, 100, 0) == pytest.approx(by_hand(a_PC, b_PC), abs=1e-12)
    assert permutation_p(a_PC, a_PC, tau, 100, 0) == 1.0


def test_permutation_p_is_uniform_under_null_and_small_otherwise() -> None:
    random, found = np.random.default_rng(2), []
    for trial in range(300):
        verifications_P = random.integers(15, 40, 30).astype(float)
        a_PC, b_PC = (np.stack([verifications_P * random.normal(2.0, 0.2, 30), verifications_P], 1) for _ in range(2))
        found.append(permutation_p(a_PC, b_PC, tau, 200, trial))
    assert 0.02 < np.mean(np.array(found) < 0.05) < 0.09
    assert 0.4 < np.mean(found) < 0.6
    b_PC[:, 0] *= 1.5
    assert permutation_p(a_PC, b_PC, tau, 2000, 0) == pytest.approx(1 / 2001)


def test_holm_corrects_p_values_and_keeps_order() -> None:
    given = [0.01, 0.04, 0.03, None]
    pairs = holm([Pair(0, i + 1, "tau", 9, p=p) for i, p in enumerate(given)])
    assert [p.corrected for p in pairs] == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06), None]
    assert holm([Pair(0, 1, "tau", 9, p=0.7), Pair(0, 2, "tau", 9, p=0.8)])[1].corrected == 1.0


def test_interval_covers_true_tau_at_nominal_rate() -> None:
    inside = 0
    for seed in range(60):
        (row,) = rows_of([RunReport("x", report(tau=2.2, count=40, seed=seed))], "best")
        found = interval(row, tau, 500, seed)
        assert found is not None and found.low < row.entry["tau"] < found.high
        inside += found.low <= 2.2 <= found.high
    assert 50 <= inside <= 60


def test_frontier_contains_exactly_undominated_points() -> None:
    random = np.random.default_rng(3)
    points = [(i, float(random.integers(0, 6)), float(random.integers(0, 6))) for i in range(40)]
    for i, cost, speed in points:
        better = [j for j, c, s in points if c <= cost and s >= speed and (c, s) != (cost, speed)]
        assert (i in frontier(points)) == (not better)
    assert frontier([]) == frozenset()


def test_compare_verdicts_state_order_and_significance() -> None:
    found = compared(report(2.0, 1.2, seed=1), report(2.0, 1.21, seed=2), report(3.0, 2.0, seed=3), sort="tau")
    assert found.rows[0].label == "runs/2"
    assert re.fullmatch(r"behind \(p = 0\.00\d+\)", found.against_first(1)) or found.against_first(1) == "behind (p < 0.001)"
    between = next(p for p in found.pairs if p.figure == "tau" and p.first == 1)
    assert between.verdict(0.05).startswith("not distinguishable (p = ")
    assert between.difference == pytest.approx(found.rows[1].entry["tau"] - found.rows[2].entry["tau"])
    assert between.prompts == 24
    turned = compared(report(2.0, 1.2), report(3.0, 2.0, seed=3), sort="name")
    assert turned.tested == "speedup" and turned.against_first(1).startswith("ahead")


def test_compare_speedup_is_relative_to_baseline_of_same_run() -> None:
    """Twice as slow a machine on both sides changes nothing."""
    fast, slow = report(2.0, 1.5, seed=1), report(2.0, 1.5, seed=1)
    for prompt in slow["checkpoints"][0]["per_prompt"]:
        prompt["decode_ms"] *= 2
        prompt["baseline_decode_ms"] *= 2
    pair = next(p for p in compared(fast, slow).pairs if p.figure == speedup.__name__)
    assert (pair.difference, pair.p) == (pytest.approx(0.0), 1.0)


def test_ranking_of_different_conditions_is_refused_unless_mixed(subtests: pytest.Subtests) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"environment__processor": "Other CPU"}, "hardware (Example CPU; Other CPU)"),
        ({"environment__accelerator": "NVIDIA X"}, "hardware (Example CPU; NVIDIA X)"),
        ({"environment__threads": 8}, "threads (1; 8)"),
        ({"target__fingerprint": "beef"}, "target (f00d; beef)"),
        ({"target__dtype": "bfloat16"}, "target's dtype (float32; bfloat16)"),
        ({"entry__policy": "lossless"}, "policy (greedy; lossless)"),
        ({"entry__temperature": 1.0}, "temperature (0.0; 1.0)"),
        ({"entry__batch_size": 4}, "batch size (1; 4)"),
        ({"measure__decode": {"max_new_tokens": 64, "top_k": 0}}, "max_new_tokens (128; 64)"),
        ({"count": 23}, "prompts (embedded, 24 of digest"),
    ]
    for change, named in changes:
        with subtests.test(named=named):
            with pytest.raises(UserError, match=re.escape(f"they differ in {named}")):
                compared(report(), report(**change))
            mixed = compared(report(), report(**change), mixed=True)
            assert len(mixed.rows) == 2 and any(named in note for note in mixed.notes)


def test_compare_different_prompts_are_refused_despite_equal_names() -> None:
    other = report()
    for prompt in other["checkpoints"][0]["per_prompt"]:
        prompt["prompt"] = "e" * 16
    with pytest.raises(UserError, match="differ in prompts"):
        compared(report(), other)
    pairs = compared(report(), other, mixed=True).pairs
    assert {pair.verdict(0.05) for pair in pairs} == {"too few prompts in common (0)"}


def test_compare_version_1_reports_have_no_significance_tests() -> None:
    found = compared(version_1(report(2.0)), version_1(report(3.0, 1.9)))
    assert [row.entry["speedup"] for row in found.rows] == [1.9, 1.5]
    assert found.against_first(1) == "no figures by prompt"
    assert found.tau_intervals == [None, None]
    assert any("of an old version" in note for note in found.notes)
    assert found.points() == []


def test_compare_cost_is_of_checkpoint_or_of_whole_run() -> None:
    made = report()
    rows = rows_of([RunReport("a", made), RunReport("b", version_1(made) | {"training": {"tokens": 7}})], "best")
    assert rows[0].cost("hours") == pytest.approx(120 / 3600)
    assert [row.cost("flops") for row in rows] == [None, None]
    assert [row.cost("tokens") for row in rows] == [50_000, 7]
    assert ranked([rows[0]], FAST).cost == "hours"


def test_compare_engine_results_add_columns_to_measured_run() -> None:
    engines = [engine_of("openvino", "OpenVINO GenAI"), engine_of("vllm", "vLLM", error="it did not start")]
    without, measured = report(2.0), report(2.4, 1.9) | {"engines": engines}
    comparison = compared(without, measured)
    said = "OpenVINO GenAI 1.20x [1.10-1.30], 240 / 200 tokens/s, tau 2.00"
    assert header(comparison)[-1] == "engines" and [row[-1] for row in cell_rows(comparison)] == [said, "-"]
    names, lines = figure_rows(comparison)
    assert [line[names.index("openvino_tau")] for line in lines] == [2.0, None] and "vllm_tau" not in names
    assert header(compared(without, report(2.4, 1.9)))[-1] != "engines"


def test_compare_sort_option_orders_rows() -> None:
    made = [
        report(2.0, 1.9, entry__parameters=5),
        report(3.0, 1.2, seed=1, entry__parameters=3),
        report(2.5, 1.5, seed=2, entry__parameters=9, entry__speedup=None),
    ]
    order = {
        sort: [row.label[-1] for row in compared(*made, sort=sort).rows] for sort in ("speedup", "tau", "parameters", "name")
    }
    assert order == {"speedup": ["0", "1", "2"], "tau": ["1", "2", "0"], "parameters": ["1", "0", "2"], "name": ["0", "1", "2"]}


class Page(HTMLParser):
    """Tags that are open, and links to anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.abouts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given[k] or "" for k in ("src", "href", "xlink:href") if k in given]
        self.abouts += [given["data-about"] or ""] if "data-about" in given else []
        if tag not in ("meta", "link", "line", "circle", "polyline", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_compare_command_writes_csv_markdown_and_html(command: Command, tmp_path: Path, capsys: Any) -> None:
    for name, (tau_, rate) in {"lr=0.1, x": (2.0, 0.001), "b <i>": (2.6, 0.0003)}.items():
        write(tmp_path / "runs" / name, report(tau_, tau_ / 1.5), f"train: {{lr: {rate}}}\noutput: {name!r}\n")
    (tmp_path / "runs" / "unmeasured").mkdir()
    (tmp_path / "runs" / "unmeasured" / "run.json").write_text("{}", encoding="utf-8")
    assert command("compare", "runs", "compare.samples=500", "out=it's out") == 0
    said = capsys.readouterr().out
    assert "behind" in said and "train.lr=0.0003" in said and "runs/unmeasured" in said
    folder = tmp_path / "it's out"
    written = {"compare.csv", "pairs.csv", "compare.md", "compare.html", "runs.csv", "runs.html"}
    assert {file.name for file in folder.iterdir()} == written
    lines = list(csv.DictReader((folder / "compare.csv").open(encoding="utf-8")))
    assert [line["run"] for line in lines] == ["runs/b <i>", "runs/lr=0.1, x"]
    assert [line["train.lr"] for line in lines] == ["0.0003", "0.001"]
    assert float(lines[0]["speedup"]) == pytest.approx(2.6 / 1.5) and float(lines[0]["training_hours"]) == pytest.approx(1 / 30)
    pairs = list(csv.DictReader((folder / "pairs.csv").open(encoding="utf-8")))
    assert [pair["figure"] for pair in pairs] == ["speedup", "tau"] and float(pairs[1]["low"]) > 0
    text = (folder / "compare.md").read_text(encoding="utf-8")
    assert "| 1 | runs/b <i> |" in text and "| behind (p = 0.002) |" in text and "runs/unmeasured" in text
    text = (folder / "compare.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == [] and page.links == ["data:,"] and "://" not in text and "b <i>" not in text
    assert len(page.abouts) == 4 and all("1.73x" in a or "1.33x" in a for a in page.abouts)


def test_compare_unmeasured_runs_are_listed_by_expected_tau(command: Command, tmp_path: Path, capsys: Any) -> None:
    trained(tmp_path / "runs/a", 1.4, 0.001)
    trained(tmp_path / "runs/b", 1.9, 0.002)
    trained(tmp_path / "runs/begun", None, 0.003)
    (tmp_path / "runs/b/run.json").write_text("{")  # damaged: whether it has finished is not known
    assert command("compare", "runs/a", "runs/b", "runs/begun", "out=out") == 0
    said = capsys.readouterr().out
    assert "3 runs by expected tau" in said and "1.90" in said and "train.lr=0.002" in said
    lines = list(csv.DictReader((tmp_path / "out/runs.csv").open(encoding="utf-8")))
    assert [line["run"] for line in lines] == ["runs/b", "runs/a", "runs/begun"]
    first = {
        "family": "medusa",
        "target": "tiny",
        "steps": "80 of 100",
        "expected tau": "1.90 (1.80 to 2.00)",
        "speedup [min-max]": "-",
    }
    assert lines[0].items() >= (first | {"differs in": "train.lr=0.002"}).items()
    assert lines[2]["steps"] == "-" and {file.name for file in (tmp_path / "out").iterdir()} == {"runs.csv", "runs.html"}


def test_compare_folder_of_different_conditions_is_listed_not_ranked(command: Command, tmp_path: Path, capsys: Any) -> None:
    for name, made in {"a": report(2.0, 1.4), "b": report(2.4, 1.7, environment__threads=9)}.items():
        write(tmp_path / "runs" / name, made)
        save_run(tmp_path / "runs" / name, "train: {lr: 0.1}\n")
    (tmp_path / "runs/b/report.html").write_text("", encoding="utf-8")
    trained(tmp_path / "runs/c", 1.5, 0.2)
    assert command("compare", "runs", "out=it's out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "3 runs by speedup" in said
        and "not ranked, because they were measured under different conditions: threads (1; 9)" in said
    )
    lines = list(csv.DictReader((tmp_path / "it's out/runs.csv").open(encoding="utf-8")))
    assert [(line["run"], line["speedup [min-max]"]) for line in lines] == [
        ("runs/b", "1.70x [1.60-1.80]"), ("runs/a", "1.40x [1.30-1.50]"), ("runs/c", "-"),
    ]  # fmt: skip
    page = Page()
    page.feed((tmp_path / "it's out/runs.html").read_text(encoding="utf-8"))
    assert page.open == [] and page.links == ["data:,", "../runs/b/report.html"]
    assert command("compare", "runs", "compare.mixed=true", "compare.samples=100") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ranks mean little" in said and "wrote runs/runs.html" in said, "without out=, into the folder"
    assert 'href="b/report.html"' in (tmp_path / "runs/runs.html").read_text(encoding="utf-8")


def test_compare_runs_are_found_by_path_glob_and_checkpoint(
    command: Command, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for name in ("a/run", "b/run", "b/lr=1", "c/deep/er/lr=2"):
        write(tmp_path / name, report())
    (tmp_path / "a/run/checkpoints/step-00400").mkdir(parents=True)
    (tmp_path / "a/run/checkpoints/step-00400/drafter.json").write_text("{}", encoding="utf-8")
    cases: dict[tuple[str, ...], list[str]] = {
        ("a/run", "b/run"): ["a/run", "b/run"],
        ("a/run", "./a/run/report.json", "a/*"): ["a/run"],
        ("**",): ["a/run", "b/lr=1", "b/run", "c/deep/er/lr=2"],
        ("b/lr=*",): ["b/lr=1"],
        ("b/lr=1",): ["b/lr=1"],
        ("a/run/checkpoints/step-00400",): ["a/run"],
        (".",): ["a/run", "b/lr=1", "b/run", "c/deep/er/lr=2"],
    }
    # words with "=" are runs here, and no keys
    assert command("compare", "b/lr=1", "c/*/*/lr=*", "compare.checkpoints=all", "compare.samples=100", "out=out") == 0
    lines = csv.DictReader((tmp_path / "out/compare.csv").open(encoding="utf-8"))
    assert sorted(line["where"] for line in lines) == ["b/lr=1", "c/deep/er/lr=2"]
    for words, found in cases.items():
        with subtests.test(words=words):
            rows = [rows_of(find_runs(words).reports, checkpoints) for checkpoints in ("best", "all")]
            assert [sorted(str(Path(row.run.where)) for row in own) for own in rows] == [found, found]


def test_compare_mistakes_are_named_in_one_line(
    command: Command, tmp_path: Path, capfd: Any, subtests: pytest.Subtests
) -> None:
    mistakes: list[tuple[list[str], dict[str, Any], str]] = [
        (["no*here"], {}, "'no*here' matches 0 paths, but none has a report.json"),
        (["empty"], {}, "empty has no report.json; measure it"),
        (["torn"], {}, "torn/report.json cannot be read as a report"),
        (["other"], {}, "other/report.json is not the report of a measurement"),
        (["newer"], {}, "newer/report.json: schema_version 99 is newer than 2; update drafttrain"),
        (["fine"], {"out": "fine/report.json"}, "out is 'fine/report.json', a file"),
        (
            ["fine", "slow"],
            {},
            "the runs were measured under different conditions and cannot be ranked; they differ in threads (1; 9)",
        ),
        (["run/checkpoints/step-00009"], {}, "run/checkpoints/step-00009 was not measured by its run; name the folder"),
    ]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "fine", report())
    write(tmp_path / "slow", report(environment__threads=9))
    write(tmp_path / "newer", report() | {"schema_version": 99})
    write(tmp_path / "other", {"a": 1})
    write(tmp_path / "torn", {})
    (tmp_path / "torn/report.json").write_text('{"schema', encoding="utf-8")
    (tmp_path / "run/checkpoints/step-00009").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00009/drafter.json").write_text("{}", encoding="utf-8")
    assert command("compare", "nowhere", "out=out") == 2
    said = capfd.readouterr().err
    assert said.startswith("drafttrain: no run 'nowhere': not a path, a glob, or a W&B run") and said.count("\n") == 1
    for runs, given, message in mistakes:
        with subtests.test(message=message):
            out = given.pop("out", "out")
            with pytest.raises(UserError) as caught:
                compare(RunOptions(runs=runs, compare=CompareOptions(**given), out=out), {})
            assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
            assert not (tmp_path / "out").exists()


class Weights:
    """W&B's public API, of one run."""

    def __init__(self, made: dict[str, Any] | None) -> None:
        self.made = made

    def run(self, path: str) -> Any:
        if path != "me/drafttrain/abc123":
            raise wandb.errors.CommError(f"could not find run <Run {path}\n(not found)>")
        other = SimpleNamespace(type="drafter")
        old = SimpleNamespace(type="report", version="v9", download=None)
        new = SimpleNamespace(type="report", version="v10", download=self.download)
        artifacts = [other] if self.made is None else [old, other, new]
        return SimpleNamespace(config={"train": {"lr": 0.5}}, logged_artifacts=lambda: artifacts)

    def download(self, root: str) -> None:
        (Path(root) / "report.json").write_text(json.dumps(self.made), encoding="utf-8")


def test_compare_command_reads_wandb_run_and_reports_missing_ones(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    write(tmp_path / "here", report(2.0, 1.2), "train: {lr: 0.1}\n")
    monkeypatch.setattr(wandb, "Api", lambda: Weights(report(3.0, 2.0, seed=1)))
    assert command("compare", "here", "me/drafttrain/abc123", "compare.samples=500", "out=out") == 0
    lines = list(csv.DictReader((tmp_path / "out/compare.csv").open(encoding="utf-8")))
    assert [line["where"] for line in lines] == ["me/drafttrain/abc123", "here"]
    assert [line["train.lr"] for line in lines] == ["0.5", "0.1"]
    assert command("compare", "https://wandb.ai/me/drafttrain/runs/abc123", "compare.samples=500") == 0
    capfd.readouterr()
    assert command("compare", "me/drafttrain/other") == 2
    assert "cannot read W&B run me/drafttrain/other: could not find run" in capfd.readouterr().err
    monkeypatch.setattr(wandb, "Api", lambda: Weights(None))
    assert command("compare", "me/drafttrain/abc123") == 2
    assert "W&B run me/drafttrain/abc123 has no report" in capfd.readouterr().err


def test_compare_command_saves_wandb_report_and_names_errors(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    write(tmp_path / "here", report(2.0, 1.2), "train: {lr: 0.1}\n")
    write(tmp_path / "logged", report(2.5, 1.5, seed=2), "train: {lr: 0.2}\n")
    noted = {"entity": "me", "project": "drafts", "id": "xyz", "group": None}
    (tmp_path / "logged/wandb.json").write_text(json.dumps(noted), encoding="utf-8")
    monkeypatch.setattr(wandb, "Api", lambda: Weights(report(3.0, 2.0, seed=1)))
    saved: list[Any] = []
    monkeypatch.setattr(wr.Report, "save", lambda made: saved.append(made))
    monkeypatch.setattr(wr.Report, "url", "https://wandb.ai/me/all/reports/1")
    words = ["here", "logged", "me/drafttrain/abc123", "compare.samples=500", "compare.cost=tokens"]
    assert command("compare", *words, "compare.wandb=me/all") == 0
    assert (
        "saved https://wandb.ai/me/all/reports/1 (these runs are not at W&B and are in its table only: here)"
        in capfd.readouterr().out
    )
    (made,) = saved
    _, grid, _, table = made.blocks
    assert (made.entity, made.project) == ("me", "all") and "## Pairs" in table.text and "| 3 |" in table.text
    assert [(r.entity, r.project, "abc123" in r.filters, "xyz" in r.filters) for r in grid.runsets] == [
        ("me", "drafttrain", True, False), ("me", "drafts", False, True)
    ]  # fmt: skip
    assert [panel.title for panel in grid.panels] == ["tau", "speedup", "speedup over training tokens"]
    assert grid.panels[2].x == wr.SummaryMetric("training_tokens")

    def refused(_: Any) -> None:
        raise wandb.errors.CommError("permission\ndenied")

    monkeypatch.setattr(wr.Report, "save", refused)
    assert command("compare", *words, "compare.wandb=me/all") == 2
    assert "cannot save the report in me/all: permission denied; check the name" in capfd.readouterr().err
    assert command("compare", *words, "compare.wandb=all") == 2
    assert "compare.wandb is 'all'; name a project as ENTITY/PROJECT" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert command("compare", *words, "compare.wandb=me/all") == 2
    assert "pip install 'drafttrain[reports]'" in capfd.readouterr().err
