"""The benchmarks rehearsed at tiny sizes, and what their figures rest on. No time is looked at."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from benchmarks import projection, rivals, train
from benchmarks.common import DiffersError, interleaved, peak, ratio
from benchmarks.train import Found, Settings
from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import trainable
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.train.telemetry import Flops
from tests.helpers import tiny_target


@pytest.mark.slow
def test_train_benchmark_steps_run_and_write_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["steps", "--divide", "64", "--repeats", "1", "--results", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "steps.json").read_text())
    assert record["torch"] == torch.__version__ and record["divide"] == 64
    assert record["steps"] and all(figure["tokens_per_s"][0] > 0 for figure in record["steps"])
    assert "not timed" not in capsys.readouterr().out


def test_train_benchmark_rivals_without_interpreter_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["rivals", "--divide", "64", "--repeats", "1", "--results", str(tmp_path)]) == 0
    assert "rivals need --rivals PYTHON, an interpreter with specforge and speculators; left out" in capsys.readouterr().out


def test_train_benchmark_differing_results_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differs(settings: Settings) -> Found:
        raise DiffersError("losses are 1 and 2")

    monkeypatch.setitem(train.SECTIONS, "steps", differs)
    assert train.main(["steps", "--results", str(tmp_path)]) == 1
    assert "steps not timed: losses are 1 and 2" in capsys.readouterr().out and not list(tmp_path.iterdir())
    for bad in (["step"], ["--repeats", "0"], ["--divide", "0"]):
        with pytest.raises(SystemExit) as ended:
            train.main(bad)
        assert ended.value.code == 2


def test_ratio_is_median_of_interleaved_runs() -> None:
    order: list[str] = []
    figures = interleaved(2, lambda: order.append("a") or float(len(order)), lambda: order.append("b") or 1.0)  # type: ignore[func-returns-value]
    assert order == ["a", "b"] * 3 and figures == [[3.0, 5.0], [1.0, 1.0]]
    line = ratio("a / b", *figures, "{:.0f} / {:.0f}", at_least=4.5)
    assert (line.value, line.low, line.high, line.figures, line.goal) == (4.0, 3.0, 5.0, "4 / 1", ">= 4.5 MISSED")


def test_peak_counts_tensors_alive_at_once() -> None:
    size = 1 << 20

    def work() -> torch.Tensor:
        for _ in range(3):
            kept = torch.zeros(size, dtype=torch.uint8) + 1
        return kept

    assert 2 * size <= peak(work) <= 3 * size + 4096


def test_projection_operations_equal_counted_flops() -> None:
    target, family = tiny_target(), families()["eagle3"]
    drafter = family.build(family.options(steps=3, draft_vocab=40), target).train()
    drafter.prepare(lambda: torch.arange(64))
    token = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(0))
    batch = TrainBatch(token, torch.arange(256).expand(2, 256), torch.zeros_like(token), token >= 0)
    counter, objective = Flops(), Objective(drafter, target, LossOptions())
    with counter.counting(batch):
        objective(Online(target, drafter.taps).fill(batch))[0].backward()
    sizes = projection.Sizes.of(target, drafter)
    assert counter.per_position is not None
    assert sizes.operations(512, 0) == pytest.approx(512 * counter.per_position, rel=0.02)  # the last positions have no label
    assert 4 * trainable(drafter) == sizes.G
    shape = (2, 4, 256, sizes.A // 4)  # torch counts no attention on a CPU
    forward, backward = sdpa_flop_count(shape, shape, shape), sdpa_backward_flop_count(shape, shape, shape, shape)
    attention = sizes.L * forward + sizes.K * (forward + backward)
    assert sizes.operations(512, 256) - sizes.operations(512, 0) == attention


def test_projection_sizes_give_expected_bytes() -> None:
    sizes = projection.Sizes(N=1000, L=3, A=8, V=64, H=16, B=2000, K=2, F=100, W=300, D=32, G=4000)
    assert sizes.of_gradients(1) == 0 and sizes.of_gradients(4) == 6000
    assert sizes.of_target(100, 8, "replicated") == 0 and sizes.of_target(100, 8, "zero3") == 1750
    assert sizes.of_target(100, 8, "tensor_parallel") == 8 * 7 * 3 * 100 * 16
    assert [projection.shared_by(64, name) for name in ("zero3", "tensor_parallel")] == [64, 8]


def test_projection_main_prints_plans_of_8b_and_70b_targets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = list(projection.plans())
    monkeypatch.setattr(projection, "plans", lambda: plans)
    monkeypatch.setattr("sys.argv", ["projection", "--mfu", "0.5"])
    assert projection.main() == 0
    said = capsys.readouterr().out
    assert "mfu 50% (assumed)" in said and said.count("tensor_parallel") == 4 and said.count("replicated") == 4
    eight, seventy = (plan for plan, _ in plans[::2])
    assert 7.9e9 < sum(p.numel() for p in eight.outline.model.parameters()) < 8.1e9
    assert 70e9 < sum(p.numel() for p in seventy.outline.model.parameters()) < 71e9
    assert eight.seconds(8, "replicated", 0.5)[0] == pytest.approx(2 * eight.seconds(64, "replicated", 1.0)[0])


def beside(recipe: str, who: str, chain: float, tree: float) -> dict[str, object]:
    figures = {"tau_chain": chain, "tau_tree": tree, "expected_tau": 2.0, "tokens_per_s": 1234.5}
    return {"target": "embedded", "recipe": recipe, "who": who, "steps": 600, "seed": 0} | figures


def test_rivals_table_lists_ours_first() -> None:
    rows = [
        beside("eagle3", "speculators", 2.0, 2.5),
        beside("eagle3", "speculators lr 0.005", 2.2, 2.9),
        beside("eagle3", "ours", 2.2, 2.8),
        beside("dflash", "ours", 1.5, 2.0),
    ]
    assert rivals.table(rows).splitlines()[2:4] == [
        "| embedded | `dflash` | ours | 600 | 1.50 | 2.00 | 2.00 | 1,234 |",
        "| embedded | `eagle3` | ours | 600 | 2.20 | 2.80 | 2.00 | 1,234 |",
    ]


def test_rivals_settings_add_given_learning_rate_to_default() -> None:
    given = argparse.Namespace(target="models/small", recipes=["dflash"], rates=[5e-3], steps=300, seed=0)
    asked = list(rivals.settings(given))
    assert [(s.target, s.who, s.rate) for s in asked] == [
        ("small", "ours", None),
        ("small", "speculators", None),
        ("small", "speculators lr 0.005", 0.005),
    ]
    assert rivals.recipe_options("dflash").block_size == 6


def test_rivals_main_without_speculators_prints_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    assert rivals.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"speculators is not installed; {rivals.INSTALL}\n"
    assert rivals.main(["--out", str(tmp_path), "--table"]) == 0


def test_rivals_dense_mask_equals_its_rule() -> None:
    mask = rivals.dense_mask(lambda b, h, q, k: q >= k, Q_LEN=2, KV_LEN=3)
    assert mask.tolist() == [[[[True, False, False], [True, True, False]]]]
