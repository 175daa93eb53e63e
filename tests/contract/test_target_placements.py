"""Where a target's weights lie changes nothing: every architecture spread (ZeRO-3), split or placed by experts, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.model.target import FINAL, Taps
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.experts import DispatchedTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import load_target
from drafttrain.targets.parallel import Part
from drafttrain.train.engine import join_world, leave_world
from drafttrain.train.sharding import ZeroShards
from tests.architectures import model_of
from tests.contract.test_targets import EXACT, runner_of
from tests.forked import launch
from tests.tokenizers import save_bytes_tokenizer

# a whole target of each kind: split and dense, routed, with latent attention, with recurrent layers, and refused by both
FEW = ("Llama", "Qwen3-MoE", "DeepSeek-V3", "Qwen3-Next", "GPT-2")
PLACEMENTS = ("zero3", "tensor_parallel", "expert_parallel")
TAPS = Taps((0, 1), final=True)
SPLIT = {"Llama", "Mistral", "Qwen2", "Qwen3", "Seed-OSS"}  # the others are not, with the reason
ROUTED = {
    "Mixtral",
    "Qwen2-MoE",
    "Qwen3-MoE",
    "GLM-4.5 (MoE)",
    "gpt-oss",
    "MiniMax-M2",
    "DeepSeek-V2",
    "DeepSeek-V3",
    "Kimi-K2",
}
ROUTED |= {"Gemma-4 (MoE)", "GLM-4.7-Flash", "Ernie-4.5 (MoE)", "Hunyuan (MoE)", "MiMo-V2-Flash", "DeepSeek-V3.2", "Kimi-K2.5"}
ROUTED |= {"Mistral Small 4", "Mistral Large 4", "Qwen3.5 (MoE)", "Kimi-Linear", "Ling-3", "Nemotron-3", "LFM2 (MoE)"}
ROUTED |= {"GLM-5", "Qwen3-Next", "Nemotron-H", "Granite-4 (hybrid)", "Jamba"}  # as `SPLIT`


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


@torch.no_grad()
def own_states(target: HFTarget, rank: int) -> list[torch.Tensor]:
    """Logits and tapped states of sequences that no other process has: two rows in the first, one in the second."""
    generator = torch.Generator().manual_seed(rank)
    token_BT = torch.randint(0, 60, (2 - rank, 20 + 3 * rank), generator=generator)
    out = target(token_BT, None, None, torch.arange(token_BT.shape[1]).expand_as(token_BT), TAPS)
    assert out.logits_BRV is not None
    return [out.logits_BRV, *(out.hidden[key] for key in sorted(out.hidden))]


def compare(options: RunOptions, resolved: dict[str, Any]) -> None:
    """The largest difference to one process's states, by architecture and placement, or why it is refused."""
    torch.set_num_threads(1)
    world = join_world(torch.device("cpu"))
    found: dict[str, dict[str, float | str]] = {}
    for name in resolved["names"]:
        path = TargetOptions(name="hf", path=str(Path(resolved["folder"]) / slug(name)))
        model, part = model_of(name), Part(world.rank, world.size)
        whole = runner_of(model)(model)
        expected, here = states(whole), found.setdefault(name, {})
        for placement in PLACEMENTS:
            try:
                given: dict[str, Any] = {"shards": ZeroShards(torch.float32)} if placement == "zero3" else {"part": part}
                together = replace(path, expert_parallel=2) if placement == "expert_parallel" else path
                target = load_target(together, **given).target
                here[placement] = furthest(states(target), expected)
                if placement == "expert_parallel":
                    assert target.fingerprint == whole.fingerprint
                    own = own_states(load_target(path, part, kind=DispatchedTarget).target, part.rank)
                    here[placement] = max(here[placement], furthest(own, own_states(whole, part.rank)))
            except UserError as error:
                here[placement] = str(error)
    (Path(resolved["folder"]) / f"{world.rank}.json").write_text(json.dumps(found))
    leave_world(world)


def furthest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((own - wanted).abs().max()) for own, wanted in zip(found, expected, strict=True))


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, pytest.param(EXACT, marks=pytest.mark.grid)], ids=["few", "every"])
def test_target_divided_over_processes_has_states_of_one(
    names: Sequence[str], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """One launch for all architectures and placements."""
    for name in names:
        model_of(name).save_pretrained(tmp_path / slug(name))
        save_bytes_tokenizer(tmp_path / slug(name))
    launch(compare, RunOptions(launcher=LauncherOptions(nproc=2)), {"folder": str(tmp_path), "names": list(names)})
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name, placement, found in product(names, PLACEMENTS, both):
        with subtests.test(name=name, placement=placement):
            result = found[name][placement]
            if placement != "zero3" and name not in (SPLIT if placement == "tensor_parallel" else ROUTED):
                assert isinstance(result, str) and "\n" not in result
                assert result.startswith(f"target.{placement}") and result.endswith(f"leave target.{placement} out")
            else:
                assert isinstance(result, float) and result < 1e-4, result
