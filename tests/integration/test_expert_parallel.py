"""A mixture of experts over two processes: losses and reports are those of whole copies, and each process reads its share."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.experts import DispatchedTarget, dispatched, find_experts, summed
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.targets.parallel import Part
from drafttrain.targets.split import part_among_neighbours
from drafttrain.train.engine import join_world, leave_world
from tests.architectures import model_of
from tests.forked import launch
from tests.integration.test_placement import TRAIN, fit_with_little_memory, options_of, trained
from tests.reports import counted
from tests.tokenizers import save_bytes_tokenizer

NAMES = ("Qwen3-MoE", "gpt-oss")  # each expert in tensors of its own; all in one tensor, with biases
TWO = RunOptions(launcher=LauncherOptions(nproc=2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for name in NAMES:
        model_of(name, vocab_size=512).save_pretrained(folder / name)
        save_bytes_tokenizer(folder / name)
    return folder


def options(path: Path, **more: Any) -> TargetOptions:
    return TargetOptions(name="hf", path=str(path), **more)


def expert(state_SH: Tensor, number_SK: Tensor, weight_SK: Tensor, first: int) -> Tensor:
    """Expert e multiplies by e + 1."""
    return state_SH * (first + number_SK + 1) * weight_SK


def combined(part: Part) -> list[bool]:
    """Whether sums are right where processes have tokens of other numbers, one of them none, and experts have none."""
    right = []
    for case, counts in enumerate([(5, 3), (0, 4), (4, 0), (0, 0), (6, 6)]):
        generator = torch.Generator().manual_seed(case)
        tokens = [(torch.randn(T, 8, generator=generator), torch.rand(T, 2, generator=generator)) for T in counts]
        chosen = [torch.randint(0, 4, (T, 2), generator=generator) for T in counts]
        chosen = [torch.full_like(expert_TK, 3) if case == 4 else expert_TK for expert_TK in chosen]
        (x_TH, weight_TK), expert_TK = tokens[part.rank], chosen[part.rank]
        wanted_TH = x_TH * ((expert_TK + 1) * weight_TK).sum(1, keepdim=True)
        found_TH = dispatched(part, lambda *pairs: expert(*pairs, 2 * part.rank), 2, x_TH, expert_TK, weight_TK)
        right.append(torch.allclose(found_TH, wanted_TH))
        (x_TH, weight_TK), expert_TK = tokens[0], chosen[0]
        wanted_TH = x_TH * ((expert_TK + 1) * weight_TK).sum(1, keepdim=True)
        found_TH = summed(part, lambda *pairs: expert(*pairs, 2 * part.rank), 2, x_TH, expert_TK, weight_TK)
        right.append(torch.allclose(found_TH, wanted_TH))
    return right


def train_everywhere(run: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    world, folder = join_world(torch.device("cpu")), Path(resolved["folder"])
    found: dict[str, Any] = {"combined": combined(part_among_neighbours(2))}
    for name in NAMES:
        target = options(Path(resolved["saved"]) / name)
        ways: dict[str, LoadedTarget] = {
            "whole": load_target(target),
            "shared": load_target(target, part_among_neighbours(2), kind=DispatchedTarget),
        }
        found[name] = {way: trained(loaded, "unrolled", world, folder / way, resolved["data"]) for way, loaded in ways.items()}
        found[name]["parameters"] = [loaded.description["parameters"] for loaded in ways.values()]
        found[name]["stored"] = [stored(loaded) for loaded in ways.values()]
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    leave_world(world)


def stored(loaded: LoadedTarget) -> int:
    """Bytes behind the experts' parameters, all of a tensor that they are a view of included."""
    modules = find_experts(loaded.target.model)
    return sum(p.untyped_storage().nbytes() for module in modules for p in module.parameters(recurse=False))


@pytest.fixture(scope="module")
def both(saved: Path, material: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("found")
    launch(train_everywhere, TWO, {"saved": str(saved), "data": str(material / "data.jsonl"), "folder": str(folder)})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_expert_dispatch_with_uneven_token_counts_equals_expected_sums(both: list[dict[str, Any]]) -> None:
    assert all(all(found["combined"]) for found in both)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_expert_parallel_losses_equal_replicated_with_half_expert_bytes(name: str, both: list[dict[str, Any]]) -> None:
    for found in (f[name] for f in both):
        assert len(found["shared"]) == TRAIN.steps
        assert found["shared"] == pytest.approx(found["whole"], rel=1e-5)
        assert found["parameters"][0] == found["parameters"][1]
        assert found["stored"][1] == found["stored"][0] // 2


@pytest.mark.slow
def test_expert_parallel_run_is_measured_sharded_when_memory_is_short(saved: Path, material: Path, tmp_path: Path) -> None:
    reports = []
    for way, free in (("replicated", 10**9), ("expert_parallel", 1)):
        run = options_of(tmp_path / way, way)
        data = replace(run.data, path=str(material / "data.jsonl"))
        run = replace(run, target=options(saved / NAMES[0], placement=way), data=data)
        launch(fit_with_little_memory, run, {"free": free})
        (file,) = (tmp_path / way).glob("*/*/report.json")
        reports.append(json.loads(file.read_text()))
    assert [report["target"]["expert_parallel"] for report in reports] == [1, 2]
    assert counted(reports[0]["checkpoints"][0]) == counted(reports[1]["checkpoints"][0])


def test_expert_parallel_load_needs_only_experts_of_this_rank(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint that lacks half of the experts, this process loads the other half, and misses one of its own."""
    for file in (saved / NAMES[0]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    left = {name: weight for name, weight in weights.items() if not any(f"experts.{n}." in name for n in (2, 3))}
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(Part, "sum", lambda self, x: x)  # the other process would have added its values
    whole = load_target(options(saved / NAMES[0])).target.model
    shared = load_target(options(tmp_path, expert_parallel=2), Part(0, 2)).target.model
    kept = dict(shared.named_parameters())
    assert Counter(kept[name].shape == p.shape for name, p in whole.named_parameters())[False] == 2 * 4
    assert all(torch.equal(kept[name], p[: len(kept[name])]) for name, p in whole.named_parameters())
    with pytest.raises(UserError, match=r"they (lack|have in another shape) model\.layers\.0\.mlp\.experts"):
        load_target(options(tmp_path, expert_parallel=2), Part(1, 2))


CANNOT_BE_SHARED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 3, r"^target\.expert_parallel is 3, which does not divide the target's 4 experts; set it to 2 or 4$"),
    ({"runner": "fast"}, 2, r"^target\.runner=fast needs whole blocks, .*; set target\.runner=hf$"),
    ({"weights": "int8"}, 2, r"^target\.weights=int8 needs the whole target in every process"),
    ({"tensor_parallel": 2}, 2, r"^target\.tensor_parallel is 2 and target\.expert_parallel 2, .*; leave one out$"),
    ({"name": "embedded", "path": None}, 2, r"^target\.expert_parallel is 2, but Llama.* no routed experts.*_parallel out$"),
]


def test_expert_parallel_unsupported_options_are_refused(saved: Path, subtests: pytest.Subtests) -> None:
    for more, size, line in CANNOT_BE_SHARED:
        with subtests.test(**more), pytest.raises(UserError, match=line):
            load_target(replace(options(saved / NAMES[0], expert_parallel=size), **more), Part(0, size))
