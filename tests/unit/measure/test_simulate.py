"""What acceptance and costs are worth: formulas against enumeration, against our verifiers, and against a report."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafttrain.commands import simulate as command_file
from drafttrain.commands.simulate import simulate
from drafttrain.core.errors import UserError
from drafttrain.core.tree import TreeShape, arrivals
from drafttrain.measure.flags import nothing_gains
from drafttrain.measure.simulate import SimulateOptions
from drafttrain.measure.simulate.formulas import (
    best_tree,
    distinct_experts,
    expected_tokens,
    full_tree,
    geometric_ranks,
    operations,
    speedup,
    tree_tokens,
)
from drafttrain.measure.simulate.scenario import MOST_BATCH, Experts, Scenario, StepCosts, sampled_chain, tree_trial
from drafttrain.measure.simulate.simulation import Measured, alpha_of, run_simulation, token_cost
from drafttrain.runs.options import RunOptions
from tests.runs import report, version_1, write

Command = Callable[..., int]


def test_expected_tokens_of_chain_equal_published_values() -> None:
    published = {(0.6, 5): 2.38, (0.7, 5): 2.94, (0.8, 5): 3.69, (0.9, 5): 4.69, (0.6, 4): 2.31, (0.7, 4): 2.77}
    for (alpha, K), tokens in published.items():
        assert expected_tokens([alpha] * K) == pytest.approx((1 - alpha ** (K + 1)) / (1 - alpha))
        assert expected_tokens([alpha] * K) == pytest.approx(tokens, abs=0.006)


def test_simulate_formulas_equal_leviathan_theorems() -> None:
    """Leviathan et al., arXiv 2211.17192: 3.8, 3.11, and table 1's row alpha 0.8, gamma 5."""
    alpha, K, c = 0.8, 5, 0.05
    tokens = expected_tokens([alpha] * K)
    assert speedup(tokens, K * c, 1.0) == pytest.approx((1 - alpha**6) / ((1 - alpha) * (K * c + 1)))
    assert operations(tokens, K, 0.0) == pytest.approx((1 - alpha) * (K + 1) / (1 - alpha**6))
    assert (round(speedup(tokens, 0.0, 1.0), 2), round(operations(tokens, K, 0.0), 2)) == (3.69, 1.63)
    assert expected_tokens([1.0] * 4) == 5.0 and expected_tokens([]) == 1.0 and expected_tokens([0.0]) == 1.0


def test_scenario_speedup_exceeds_one_only_if_alpha_exceeds_draft_cost() -> None:
    """Their corollary 3.9: with one draft (1 + alpha) / (1 + c)."""
    for alpha, c in ((0.3, 0.2), (0.2, 0.3)):
        shape = Scenario((alpha,), [], StepCosts(c, 0.0)).best_chain()
        assert (shape.speedup > 1.0) == (alpha > c)
    assert Scenario((0.3,), [], StepCosts(0.1, 0.0)).break_even_draft_cost() == pytest.approx(0.3)
    assert Scenario((0.3,), [], StepCosts(0.1, 0.0)).break_even_alpha() == pytest.approx(0.1, abs=1e-5)


def test_tree_tokens_and_best_tree_equal_enumeration() -> None:
    ranks = [[0.5, 0.2, 0.1], [0.6, 0.1], [0.9]]
    assert full_tree(2, 2) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert tree_tokens(ranks, full_tree(1, 3)) == pytest.approx(expected_tokens([0.5, 0.6, 0.9]))
    assert tree_tokens(geometric_ranks(0.7, 2, 3), full_tree(2, 3)) == pytest.approx(expected_tokens([1 - 0.3**2] * 3))
    every = [path for path in full_tree(3, 3) if tree_tokens(ranks, [path]) > 1.0]
    for nodes in range(1, 6):
        closed = [c for c in combinations(every, nodes) if all(p[:-1] in c for p in c if len(p) > 1)]
        most = max(tree_tokens(ranks, paths) for paths in closed)
        assert tree_tokens(ranks, best_tree(ranks, nodes)) == pytest.approx(most)
    assert len(best_tree(ranks, 99)) == len(every) and best_tree([], 3) == []


def test_tree_tokens_formula_equals_monte_carlo_estimate() -> None:
    ranks, random = [[0.5, 0.3], [0.4, 0.2]], np.random.default_rng(0)
    table = np.stack([random.choice(3, 40_000, p=[*row, 1 - sum(row)]) for row in ranks], 1)
    paths = [(0,), (1,), (0, 0), (1, 1)]
    counted = 1.0 + float(arrivals(torch.from_numpy(table), paths).sum(-1).mean())
    assert tree_tokens(ranks, paths) == pytest.approx(counted, abs=0.02)


def test_sampled_chain_through_verifier_gives_expected_tokens(subtests: pytest.Subtests) -> None:
    for alphas in ([0.7] * 5, [0.9, 0.5, 0.2], [1.0, 1.0], [0.0, 0.5]):
        with subtests.test(alphas=alphas):
            trial = sampled_chain(alphas, 20_000, seed=3)
            assert trial.formula == expected_tokens(alphas)
            assert trial.agrees and trial.error <= 0.02


@pytest.mark.parametrize("policy", ["greedy", "lossless", "coupled"])
def test_tree_trial_exact_policies_agree_with_formula(policy: str) -> None:
    ranks = [[0.5, 0.2, 0.1], [0.6, 0.1], [0.7]]
    trial = tree_trial(policy, ranks, best_tree(ranks, 8), 20_000, seed=5)
    assert trial.agrees and 0 < trial.error <= 0.02
    assert not replace(trial, formula=trial.formula + 0.1).agrees
    assert trial.shape == "tree of 8" and TreeShape.of(best_tree(ranks, 8)).max_depth == 3


def test_step_costs_verification_grows_with_batch_size() -> None:
    costs = StepCosts(0.0, 0.01)
    assert costs.verify(1, 7) == 1.0 and costs.verify(6) == pytest.approx(1.05)
    assert costs.verify(6, 100_000) == pytest.approx(6.0, abs=0.01)
    assert StepCosts(0.1, 0.0, 0.2, parallel=True).speedup(2.0, 4, 5) == pytest.approx(2 / 1.3)
    assert StepCosts(0.1, 0.0, 0.2).speedup(2.0, 4, 5) == pytest.approx(2 / 1.6)


def test_distinct_experts_of_known_models_equal_published_values() -> None:
    """gpt-oss-120b, DeepSeek-V3 and Qwen3-30B at 1, 4, 8 and 16 tokens."""
    for experts, chosen, found in ((128, 4, (4, 15, 29, 51)), (256, 8, (8, 31, 57, 102)), (128, 8, (8, 29, 52, 82))):
        assert tuple(round(distinct_experts(tokens, experts, chosen)) for tokens in (1, 4, 8, 16)) == found


def test_step_costs_with_experts_follow_distinct_expert_count() -> None:
    experts = Experts(128, 8, 0.8)
    costs = StepCosts(draft=0.05, token=0.0, experts=experts)
    assert experts.pass_cost(1) == pytest.approx(1.0) and experts.pass_cost(10**6) == pytest.approx(0.2 + 0.8 * 16)
    assert costs.verify(5) == pytest.approx(0.2 + 0.8 * distinct_experts(5, 128, 8) / 8)
    assert costs.verify(5, 4) == pytest.approx(experts.pass_cost(20) / experts.pass_cost(4))
    assert costs.verify(5) > costs.verify(5, 8) > costs.verify(5, 64) > 1.0  # a large batch reads them all anyway
    dense = replace(costs, experts=None)
    assert dense.verify(5) == 1.0


def test_break_even_batch_with_experts_is_last_crossing() -> None:
    """Chains may pay at large batches and not at small ones; from the break-even on they never do."""
    scenario = Scenario((0.5,), [[0.5]] * 10, StepCosts(0.1, 0.008, experts=Experts(128, 4, 0.9)))
    found = scenario.break_even_batch()
    assert found is not None and scenario.best_chain(1).speedup < 1.0 <= scenario.best_chain(found - 1).speedup
    assert all(scenario.best_chain(batch).speedup < 1.0 for batch in range(found, MOST_BATCH, 100))


def test_distinct_experts_formula_agrees_with_random_router() -> None:
    """A tiny mixture of experts with a random router and random states."""
    from tests.architectures import model_of

    torch.manual_seed(0)
    layer = model_of("Qwen3-MoE", num_experts=32, num_experts_per_tok=4).model.layers[0]
    chosen: list[torch.Tensor] = []
    layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[-1]))
    with torch.no_grad():
        for _ in range(100):
            layer.mlp(torch.randn(1, 16, 64))
    for tokens in (1, 4, 16):
        counted = [len(index_Tk[:tokens].unique()) for index_Tk in chosen]
        assert sum(counted) / len(counted) == pytest.approx(distinct_experts(tokens, 32, 4), rel=0.15)


def test_break_even_points_are_where_best_chain_speedup_is_one() -> None:
    scenario = Scenario((0.7,), [], StepCosts(0.05, 0.01, 0.02))
    batch, draft, alpha = scenario.break_even_batch(), scenario.break_even_draft_cost(), scenario.break_even_alpha()
    assert batch and draft and alpha
    assert scenario.best_chain(batch).speedup < 1.0 <= scenario.best_chain(batch - 1).speedup
    for cost, gains in ((draft - 1e-6, True), (draft + 1e-6, False)):
        assert (replace(scenario, costs=replace(scenario.costs, draft=cost)).best_chain().speedup >= 1.0) == gains
    assert scenario.at(alpha).best_chain().speedup == pytest.approx(1.0, abs=1e-4)
    assert Scenario((0.9,), [], StepCosts(0.0, 0.0)).break_even_batch() is None
    poor = Scenario((0.1,), [], StepCosts(0.5, 1.0))
    assert (poor.break_even_batch(), poor.break_even_draft_cost(), poor.break_even_alpha()) == (1, None, None)
    assert MOST_BATCH == 4096


def measured(**changes: Any) -> Measured:
    made = report(**changes)
    entry = made["checkpoints"][0]
    entry |= {"offered_by_position": [100, 60], "accepted_by_position": [70, 42], "verifications": 100, "tau": 2.12}
    return Measured.of("run", entry)


def test_nothing_gains_says_the_best_and_what_it_takes() -> None:
    entries = [report(2.0, speedup, entry__proposal="draft length 2")["checkpoints"][0] for speedup in (0.7, 0.9)]
    (said,) = nothing_gains(entries)
    tau = entries[1]["tau"]
    assert said.startswith(f"no drafter gains here. The best is step-00400 (draft length 2), 0.90x at tau {tau:.2f}. To gain")
    assert f"a tau above 1.77, or a draft cost below {tau - 1.575:.2f} plain steps (it is 0.20). Where" in said
    assert said.endswith(f"the same drafts give {tau / 1.275:.2f}x")
    entries[1]["verify_cost"] = 3.0
    assert "and no draft is cheap enough" in nothing_gains(entries)[0]
    assert nothing_gains([*entries, report()["checkpoints"][0]]) == []


def test_measured_report_reproduces_speedup_and_applies_changes() -> None:
    found = measured()
    assert found.alpha_K == (0.7, 0.6)  # 42 of the 70 that got so far, though only 60 of them were offered more
    tau, speed = found.expected()
    assert tau == pytest.approx(1 + 0.7 + 0.42) and speed == pytest.approx(2.12 / (0.2 + 1.5 + 0.3 / 4.0))
    assert found.token == pytest.approx((6.0 - 4.0) / (3 - 1) / 4.0)
    outcome = run_simulation(SimulateOptions(alpha="+0.05", trials=1000), found)
    assert outcome.requested_alpha_K == pytest.approx((0.75, 0.65)) and outcome.scenario.alpha_K == pytest.approx((0.75, 0.65))
    assert outcome.scenario.costs == StepCosts(0.1, found.token, pytest.approx(0.075))
    assert outcome.scenario.ranks[0] == pytest.approx([0.65, 0.2, 0.1])
    assert outcome.plain()["what_if"]["then"]["tau"] == pytest.approx(1 + 0.75 + 0.75 * 0.65)
    fixed = run_simulation(SimulateOptions(alpha="0.9", draft_cost=0.0, trials=1000), found)
    assert fixed.requested_alpha_K == (0.9, 0.9) and fixed.change is None and fixed.scenario.costs.draft == 0.0


def test_measured_tree_report_chain_alpha_excludes_branches() -> None:
    tree = measured(entry__verify_nodes=7.0)
    assert tree.chain_K == (0.6, 0.5) and measured().chain_K == (0.7, 0.6)
    assert run_simulation(SimulateOptions(trials=1000), tree).chains[1].tokens == pytest.approx(1 + 0.6 + 0.3)
    old = Measured.of("old", version_1(report(entry__verify_nodes=7.0))["checkpoints"][0])
    assert old.alpha_K == (0.7, 0.6) == old.chain_K and old.ranks is None


def test_token_cost_is_slope_over_batch_sizes() -> None:
    def part(batch: int) -> dict[str, Any]:
        line = {"batch_size": batch, "verify_nodes": 5.0, "by": "batch_size"}
        return line | {"plain_step_ms": 10 + 0.2 * (batch - 1), "verify_ms": 10 + 0.2 * (5 * batch - 1)}

    assert token_cost({"slices": [part(1), part(4), part(16)]}) == pytest.approx(0.02)
    assert token_cost(part(2) | {"slices": []}) == pytest.approx(0.02)
    assert token_cost(part(1) | {"slices": [], "verify_ms": 8.0}) == 0.0


def test_alpha_of_distinguishes_changes_from_values() -> None:
    found = [alpha_of(text) for text in (None, "0.8", "1", "+0.05", "-.1")]
    assert found == [(None, False), (0.8, False), (1.0, False), (0.05, True), (-0.1, True)]


def test_simulate_command_prints_result_and_writes_plot_and_json(
    command: Command, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = report()
    verified = made["checkpoints"][0]["verifications"]
    made["checkpoints"][0]["accepted_by_position"] = [int(0.7 * verified), int(0.42 * verified)]
    write(tmp_path / "run=1", made)
    asked = ("simulate.alpha=+0.05", "simulate.trials=1000", "out=a/b.png")
    assert command("simulate", "report=run=1/report.json", *asked) == 0
    said = capsys.readouterr().out
    assert "with alpha +0.05, all else as measured" in said and said.count("agrees") == 4
    assert "no speedup where a draft pass costs" in said and "no speedup from batch size" in said
    assert (tmp_path / "a/b.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "a/b.json").read_text(encoding="utf-8"))
    assert found["what_if"]["then"]["tau"] > found["what_if"]["now"]["tau"]
    assert len(found["chains"]) == 10 and found["batches"]["256"]["speedup"] < found["batches"]["1"]["speedup"]
    lengths = found["lengths_by_batch"]
    assert lengths["1"] == found["batches"]["1"]["depth"] and list(lengths.values())[-1] == 0, "none where plain is faster"
    assert f"best draft length by batch size: {lengths['1']} from 1, " in said and "measured" in said
    taken = tmp_path / "outputs/simulate/now.json"
    monkeypatch.setattr(command_file, "dated_path", lambda *asked: taken)
    taken.parent.mkdir(parents=True)
    taken.write_text("of another process that began in the same second")
    assert command("simulate", "simulate.alpha=0.8", "simulate.ranks=[[0.6,0.2],[0.5]]", "simulate.trials=1000") == 0
    assert "acceptance 0.80 at every position" in capsys.readouterr().out
    assert sorted(path.name for path in taken.parent.iterdir()) == ["now-2.json", "now-2.png", "now.json"]
    assert taken.read_text().startswith("of another")


def test_simulate_mistakes_are_named_in_one_line(
    command: Command, tmp_path: Path, capfd: Any, subtests: pytest.Subtests
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"alpha": "+0.05"}, "simulate.alpha is +0.05, a change, but there is no report to change; name one with report=FILE"),
        ({"alpha": "high"}, "simulate.alpha is 'high'; set an acceptance as 0.8"),
        ({"alpha": "1.5"}, "simulate.alpha is '1.5'"),
        ({"lengths": []}, "simulate.lengths is empty; give one or more"),
        ({"ranks": [[0.9, 0.2]]}, "simulate.ranks is [[0.9, 0.2]]; give the shares of the ranks"),
    ]
    mistakes = [(RunOptions(simulate=SimulateOptions(**given)), message) for given, message in wrong] + [
        (RunOptions(out="x.pdf"), "out is 'x.pdf'; name the picture with out=FILE.png"),
        (RunOptions(report="nowhere"), "no run 'nowhere'"),
        (RunOptions(report="runs"), "runs holds 2 reports; name one of them, such as report=runs/a"),
        (RunOptions(report="runs/a", checkpoint="x"), "report is 'runs/a' and checkpoint 'x'; leave one of them out"),
        (
            RunOptions(report="runs/b"),
            "runs/b step-00400: report.json has no speedup, verify_cost; name a report of a drafter",
        ),
    ]
    write(tmp_path / "runs/a", report())
    write(tmp_path / "runs/b", report(entry__speedup=None, entry__verify_cost=None))
    assert command("simulate", "simulate.ranks=3") == 2
    said = capfd.readouterr().err
    assert said.startswith("drafttrain: simulate.ranks is 3; give the shares of the ranks") and said.count("\n") == 1
    for given, message in mistakes:
        with subtests.test(message=message):
            with pytest.raises(UserError) as caught:
                simulate(given, {})
            assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
            assert not (tmp_path / "outputs").exists()


def test_simulate_notebook_outputs_equal_stored_outputs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(root / "scripts/run_notebook.py"))
    notebook = json.loads((root / "docs/simulate.ipynb").read_text(encoding="utf-8"))
    assert script["outputs_of"](notebook) == script["kept_outputs"](notebook)
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")
    notebook["cells"][1]["source"] = ["print(1)"]
    with pytest.raises(NameError):
        script["outputs_of"](notebook)
