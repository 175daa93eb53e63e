"""Sequences that processes hold together: they have the losses and gradients of one process, in every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.drafters import families
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.objective.lora_target import AdaptedObjective
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets.adapt import Adapter
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.train import TrainOptions
from drafttrain.train.engine import World, join_world, leave_world
from drafttrain.train.sharding import check_sequence_parallel, sequence_group
from tests.contract.test_families import NAMES, SHAPES
from tests.forked import launch
from tests.helpers import chosen, tiny_model
from tests.integration.test_training import arguments, by_adamw, fit, kill_after, last_weights, losses, once
from tests.tiny import shake

CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, SHAPES.get(name, {})) for name in NAMES}
CASES |= {
    "hydra++": ("hydra", {"heads": 3, "layers": 2, "prefix_layer": True}),
    "dflash, few anchors": ("dflash", SHAPES["dflash"] | {"anchors": 3, "weights": "dpace"}),
    "eagle beside a model": ("cascade", {"middle": {"family": "draft_model", "blocks": 2}, "inner": {"family": "eagle"}}),
    "peagle, dropped": ("peagle", SHAPES["peagle"] | {"retention": 0.6}),
    "pard, dropped": ("pard", SHAPES["pard"] | {"retention": 0.6}),
    **{f"{name}, windows": (name, SHAPES[name] | {"layer": {"sliding_window": 9}}) for name in ("eagle3", "peagle", "dflash")},
    **{f"{name}, sinks": (name, SHAPES[name] | {"layer": {"attention_sinks": True}}) for name in ("eagle3", "dflash")},
    "medusa2": ("medusa", {"heads": 3, "adapter": {"rank": 4}}),
    # as wide as the target: else its small embeddings leave candidates alike, and only rounding of attention biases' gradients
    "lilicorr": ("lilicorr", SHAPES["lilicorr"] | {"hidden_size": 32, "factor_dim": 24}),
}
# in two processes: steps, blocks, a whole model, heads, an adapter, recurrent ones, parallel ones that drop positions, few
# anchors, one composed of others, windows, sinks; all cases in four
QUICK = ("eagle3", "dflash", "draft_model", "hydra++", "medusa2", "mtp", "redrafter", "peagle, dropped", "pard, dropped")
QUICK += ("dflash, few anchors", "eagle beside a model", "eagle3, windows", "uno", "eagle3, sinks", "dflash, sinks")
BATCHES = ("ragged", "packed", "short")
RUNNERS = {"fast": (FastTarget, "llama"), "fast, sliding": (FastTarget, "mistral-sliding"), "hf": (HFTarget, "gemma3-sliding")}


def batch(kind: str) -> TrainBatch:
    """short: fewer positions a process than a label lies ahead, and none at all for the last."""
    lengths = {"ragged": [[37], [11]], "packed": [[9, 14, 6], [20, 8]], "short": [[5], [3]]}[kind]
    B, T = len(lengths), max(map(sum, lengths))
    token_BT = torch.randint(0, 64, (B, T), generator=torch.Generator().manual_seed(0))
    document_BT, position_BT = torch.full((B, T), -1), torch.arange(T).repeat(B, 1)
    for row, documents in enumerate(lengths):
        document_BT[row, : sum(documents)] = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
        position_BT[row, : sum(documents)] = torch.cat([torch.arange(n) for n in documents])
    mask_BT = (torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.8) & (document_BT >= 0)
    return TrainBatch(token_BT, position_BT, document_BT, mask_BT)


def outcome(objective: Objective, drafter: Drafter, target: HFTarget, given: TrainBatch) -> list[Tensor]:
    """Loss, counts, supervised tokens, and the gradients of all that is trained."""
    objective.zero_grad()
    filled = given if isinstance(objective, AdaptedObjective) else Online(target, drafter.taps).fill(given)
    loss, counts = objective(filled)
    loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in objective.parameters() if p.requires_grad]
    return [loss.detach(), counts.packed(), torch.tensor(float(given.supervised())), *gradients]


def differences(case: str, runner: str, world: World) -> dict[str, float]:
    """By kind of batch, the largest relative difference between what all processes have together and what one has."""
    name, shape = CASES[case]
    kind, model = RUNNERS[runner]
    target, train = kind(tiny_model(model)), TrainOptions(sequence_parallel=world.size)  # type: ignore[operator]
    torch.manual_seed(1)
    drafter = families()[name].build(families()[name].options(**shape), target).train()
    if not drafter.trained or not drafter.splits:
        return {}
    adapter = None if drafter.adapts is None else Adapter(target, drafter.adapts)
    shake([*drafter.parameters(), *(() if adapter is None else adapter.parameters())], 0.3, least=0.02)
    check_sequence_parallel(train, LossOptions(), target, drafter, adapter)
    group, options, found = sequence_group(train, world), LossOptions(chunk=16), {}
    assert group is not None
    objective = Objective(drafter, target, options) if adapter is None else AdaptedObjective(drafter, target, options, adapter)
    for which in BATCHES:
        whole = batch(which)
        ours = [world.sum(x) for x in outcome(objective, drafter, target, whole.part(group, drafter.label_offset))]
        alone = outcome(objective, drafter, target, whole)
        found[which] = max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(ours, alone, strict=True))
    return found


def compare(options: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world = join_world(torch.device("cpu"))
    found = {f"{case}, {runner}": differences(case, runner, world) for case, runner in resolved["asked"]}
    if world.first:
        Path(resolved["output"]).write_text(json.dumps(found))
    leave_world(world)


def compared(folder: Path, processes: int, asked: list[tuple[str, str]]) -> dict[str, dict[str, float]]:
    file = folder / "differences.json"
    launch(compare, RunOptions(launcher=LauncherOptions(nproc=processes)), {"output": str(file), "asked": asked})
    found: dict[str, dict[str, float]] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """As many processes as heads of the tiny targets, twice their KV heads."""
    families_here = [
        (case, "fast")
        for (case,) in chosen(request, test_sequence_parallel_four_processes_family_gradients_equal_one_process, "case")
    ]
    others = chosen(request, test_sequence_parallel_sliding_window_runner_gradients_equal_one_process, "case", "runner")
    return compared(tmp_path_factory.mktemp("four"), 4, [*families_here, *others])


@pytest.mark.slow
def test_sequence_parallel_two_processes_gradients_equal_one_process(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name, figures in compared(tmp_path, 2, [(case, "fast") for case in QUICK]).items():
        with subtests.test(name=name):
            assert set(figures) == set(BATCHES) and max(figures.values()) < 2e-5, figures


@pytest.mark.slow
@pytest.mark.sampled(case=["eagle3", "dflash"])
@pytest.mark.parametrize("case", CASES)
def test_sequence_parallel_four_processes_family_gradients_equal_one_process(
    case: str, four: dict[str, dict[str, float]]
) -> None:
    figures = four[f"{case}, fast"]
    if not figures:
        pytest.skip("trains nothing")
    assert set(figures) == set(BATCHES) and max(figures.values()) < 2e-5, figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "runner"),
    [
        ("medusa", "hf"),
        ("draft_model", "fast, sliding"),
        pytest.param("medusa", "fast, sliding", marks=pytest.mark.grid),
        pytest.param("draft_model", "hf", marks=pytest.mark.grid),
    ],
)
def test_sequence_parallel_sliding_window_runner_gradients_equal_one_process(
    case: str, runner: str, four: dict[str, dict[str, float]]
) -> None:
    figures = four[f"{case}, {runner}"]
    assert set(figures) == set(BATCHES) and max(figures.values()) < 2e-5, figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param("draft_model", ("deepspeed=zero2", "train.activation_checkpointing=true"), marks=pytest.mark.grid),
        ("eagle3", ("deepspeed=zero3", "target.placement=zero3")),
        ("eagle3", ("features=cached", "features.format=float32")),
    ],
)
def test_sequence_parallel_fit_of_two_pairs_equals_one_process(
    recipe: str, more: tuple[str, ...], material: Path, tmp_path: Path
) -> None:
    """Two pairs of processes, packed rows."""
    steps = (*by_adamw(recipe), "train.steps=4", "data.pack=true", "data.max_length=64", "decode.tree_nodes=4")
    one = once(material, *steps)
    pairs = fit(material, tmp_path / "pairs", *steps, *more, "launcher.nproc=4", "train.sequence_parallel=2")
    assert losses(pairs) == pytest.approx(losses(one), rel=1e-5)
    a, b = load_file(last_weights(one)), load_file(last_weights(pairs))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_sequence_parallel_run_resumes_killed_single_process_run(material: Path, tmp_path: Path) -> None:
    steps = (*by_adamw("eagle3"), "train.steps=6", "train.checkpoint_every=3")
    one = once(material, *steps)
    kill_after(arguments(material, tmp_path / "two", *steps, "resume=auto"), tmp_path / "two", lines=4)
    two = fit(material, tmp_path / "two", *steps, "resume=auto", "launcher.nproc=2", "train.sequence_parallel=2")
    assert len(list((tmp_path / "two").glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
