"""Where a target's weights lie changes nothing: every architecture spread (ZeRO-3) or split over two processes, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.architectures import model_of
from drafttrain.core.errors import UserError
from drafttrain.model.target import FINAL, Taps
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import load_target
from drafttrain.targets.parallel import Part
from drafttrain.train.engine import join_world, leave_world
from drafttrain.train.sharding import ZeroShards
from tests.contract.test_targets import EXACT, runner_of
from tests.forked import launch
from tests.tokenizers import save_bytes_tokenizer

PLACEMENTS = ("zero3", "tensor_parallel")
TAPS = Taps((0, 1), final=True)
SPLIT = {"Llama", "Mistral", "Qwen2", "Qwen3"}  # the others are not, with the reason


@torch.no_grad()
def states(target: HFTarget) -> list[torch.Tensor]:
    """Logits and tapped states of two rows with a cache, chunk by chunk."""
    token_BT = torch.arange(2 * 24).view(2, 24).mul(7) % 60
    kv, position_BT = target.new_cache(2, 32), torch.arange(24).expand(2, 24)
    found = []
    for begin in (0, 16):
        here = slice(begin, begin + (16 if begin == 0 else 8))
        out = target(token_BT[:, here], kv, None, position_BT[:, here], TAPS)
        width = out.hidden[FINAL].shape[1]
        kv.keep(torch.arange(width).expand(2, width), torch.full((2,), width))
        assert out.logits_BRV is not None
        found += [out.logits_BRV, *(out.hidden[key] for key in sorted(out.hidden))]
    return found


def compare(options: RunOptions, resolved: dict[str, Any]) -> None:
    """The largest difference to one process's states, by architecture and placement, or why it is refused."""
    torch.set_num_threads(1)
    world = join_world(torch.device("cpu"))
    found: dict[str, dict[str, float | str]] = {}
    for name in EXACT:
        path = TargetOptions(name="hf", path=str(Path(resolved["folder"]) / slug(name)))
        model = model_of(name)
        expected = states(runner_of(model)(model))
        here = found[name] = {}
        for placement in PLACEMENTS:
            try:
                spread = placement == "zero3"
                given: dict[str, Any] = (
                    {"shards": ZeroShards(torch.float32)} if spread else {"part": Part(world.rank, world.size)}
                )
                pairs = zip(states(load_target(path, **given).target), expected, strict=True)
                here[placement] = max(float((own - wanted).abs().max()) for own, wanted in pairs)
            except UserError as error:
                here[placement] = str(error)
    (Path(resolved["folder"]) / f"{world.rank}.json").write_text(json.dumps(found))
    leave_world(world)


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float | str]]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("architectures")
    for name in EXACT:
        model_of(name).save_pretrained(folder / slug(name))
        save_bytes_tokenizer(folder / slug(name))
    launch(compare, RunOptions(launcher=LauncherOptions(nproc=2)), {"folder": str(folder)})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", EXACT)
def test_two_processes_have_the_states_of_one(name: str, placement: str, both: list[dict[str, Any]]) -> None:
    for found in both:
        result = found[name][placement]
        if placement == "tensor_parallel" and name not in SPLIT:
            assert isinstance(result, str) and "\n" not in result
            assert result.startswith("target.tensor_parallel") and result.endswith("leave target.tensor_parallel out")
        else:
            assert isinstance(result, float) and result < 1e-4, result
