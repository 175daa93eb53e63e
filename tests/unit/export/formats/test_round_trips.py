"""What was exported comes back bit by bit, and goes out again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.core.files import LISTED
from drafttrain.export import convert
from drafttrain.export.convert import converted
from drafttrain.export.exporter import RECORD
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import DTYPES
from drafttrain.export.format import Renames
from drafttrain.export.golden import Golden, made
from drafttrain.export.opened import Opened
from drafttrain.export.table import IMPORTERS, TABLE, format_of, loads
from drafttrain.targets.load import LoadedTarget
from tests.exports import CASES, GOES_TO, TEXTS, deep, loaded, opened, written

NOT_BACK = ("llamacpp", "stitched")  # GGUF is not imported; of a stitched target `drafter.source` reads the module
TAPPED = {"eagle3": "deep", "dflash": "qwen3"}  # the targets whose states LMDeploy gives out to these
# of each family the case with the most options that are not the default
FAST = (
    *(
        "dspark-part",
        "eagle3-others",
        "eagle3-unlike",
        "eagle3-latent-queries",
        "peagle-normed",
        "pard-lora",
        "eagle-bias",
        "medusa-deep",
        "hydra",
        "redrafter",
        "mlp_speculator-tied",
    ),
    *("mtp-qwen3", "dflash-causal-windows", "dflash-sinks", "dspark-in-place", "dflash2-unlike", "jetspec-windows"),
    *("domino-shifted", "xpress-unlike", "lilicorr-wide", "draft_model-lora", "uno-few"),
)
ROUNDED = ("eagle3-unlike", "draft_model-lora")  # in CI also in bfloat16: weights are cast in one place for all
WIDE = {("eagle", "lmdeploy"), *(("medusa-shared", stack) for stack in GOES_TO["medusa"])}  # these keep the target's precision
RECORDED = ("uno",)  # without our record it could be the adapter of a draft model
ELSEWHERE = ("source", "path", "blocks", "lora_rank", "lora_alpha")  # a language model comes back as one from a directory


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by case and target, opened once each."""

    @cache
    def open_case(case: str, target: str) -> tuple[Opened, Golden, LoadedTarget]:
        of = deep() if target == "deep" else loaded(target)
        more: dict[str, Any] = {"target_layer_ids": None} if target == "deep" else {}
        return *opened(tmp_path_factory.mktemp("run"), case, of, **more), of

    return open_case


def imported(directory: Path, target: LoadedTarget) -> Opened:
    return Opened.of(converted(ExternalCheckpoint(directory), target, lambda text: None), target)


def weights_of(directory: Path) -> dict[str, Tensor]:
    return {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}


def check_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def network(found: Opened) -> dict[str, Any]:
    """Its options, those that were left to a rule as they came out."""
    return found.meta.options | found.drafter.resolved_options()


def trips() -> Iterator[Any]:
    """(case, stack, dtype). In CI each case once, for the last of its stacks, and each writer of a family once."""
    goes = GOES_TO | {"medusa-shared": GOES_TO["medusa"]}
    goes |= {case: [*goes[case], "lmdeploy"] for case in TAPPED}
    back = {case: [stack for stack in stacks if stack not in NOT_BACK] for case, stacks in goes.items()}
    proved = {(CASES[case][0], format_of(CASES[case][0], stacks[-1]).write) for case, stacks in back.items()}
    for case, stacks in back.items():
        family = CASES[case][0]
        for stack in stacks:
            last, writer = stack == stacks[-1], (family, format_of(family, stack).write)
            slow = pytest.mark.slow if last or writer not in proved else pytest.mark.grid
            yield pytest.param(case, stack, "float32", marks=[] if last and case in FAST else slow)
            proved.add(writer)
            if (case, stack) not in WIDE:
                slow = pytest.mark.slow if last and case in ROUNDED else pytest.mark.grid
                yield pytest.param(case, stack, "bfloat16", marks=slow)


@pytest.mark.parametrize(("case", "stack", "dtype"), trips())
def test_import_of_each_export_restores_weights_and_options(
    case: str, stack: str, dtype: str, exported: Any, tmp_path: Path
) -> None:
    """Weights bit by bit in the exported dtype, and options: all, and without our record those that the layout can tell."""
    out, family = tmp_path / "out", CASES[case][0]
    found, golden, target = exported(case, TAPPED[case] if stack == "lmdeploy" and case in TAPPED else "llama")
    written(found, golden, stack, out, dtype)
    again = imported(out, target)
    kept = ELSEWHERE if family in ("draft_model", "pard") else ()
    assert {k: v for k, v in network(again).items() if k not in kept} == {
        k: v for k, v in network(found).items() if k not in kept
    }
    wanted = {f"lm.model.{n}": x for n, x in weights_of(out).items()} if kept else found.tensors
    check_same(again.tensors, {n: x.to(DTYPES[dtype]) if x.is_floating_point() else x for n, x in wanted.items()})
    drafts = made(again, TEXTS)
    if dtype == "float32":
        assert torch.equal(drafts.draft_PK, golden.draft_PK)
    written(again, drafts, stack, tmp_path / "again", dtype)
    check_same(weights_of(out), weights_of(tmp_path / "again"))
    if family in RECORDED:
        return
    for name in (RECORD, LISTED):
        (out / name).unlink()
    bare = imported(out, target)
    check_same(bare.tensors, again.tensors)
    about = bare.meta.imported
    assert about is not None and about["dtype"] == dtype
    assert {k: network(bare)[k] for k in about["determined"]} == {k: network(again)[k] for k in about["determined"]}


def test_importers_cover_every_exported_layout() -> None:
    names = {(row.family, row.name) for row in IMPORTERS}
    pairs = {(family, stack) for family in TABLE for stack in loads(family) if stack not in NOT_BACK}
    assert {(family, format_of(family, stack).name) for family, stack in pairs} <= names
    assert pairs == {(CASES[case][0], stack) for case, stack, _ in (trip.values for trip in trips())}


def test_renames_map_tensor_names_both_ways() -> None:
    renames = Renames({"a.{i}.b.{part}": "{i}.{part}.x", "c.{rest}": "{rest}"})
    assert renames.theirs("a.12.b.bias") == "12.bias.x" and renames.ours("12.bias.x") == "a.12.b.bias"
    assert renames.theirs("c.d.e") == "d.e" and renames.ours("d.e") == "c.d.e"
    assert renames.theirs("b") is None
