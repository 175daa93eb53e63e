"""Early exit against the target's own blocks; its adapter starts as nothing and is all that is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.drafters import families
from drafttrain.drafters.early_exit import EarlyExit, EarlyExitOptions
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.contract import test_families as contract
from tests.helpers import prompts, tiny_model, tiny_target, watch_proposals

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def drafts(target: HFTarget, drafter: EarlyExit, prompt: list[int]) -> list[int]:
    """The root and the first drafts behind a prompt."""
    seen = watch_proposals(drafter)
    contract.decode(target, drafter, [prompt], 1, tokens=8)
    found: list[int] = seen[0].token_BN[0].tolist()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3-sliding"])
@pytest.mark.parametrize("adapter", [False, True])
def test_early_exit_fresh_drafts_equal_model_of_first_blocks(name: str, adapter: bool) -> None:
    """As transformers' early exit does: the model with fewer layers, its own norm and head."""
    target = tiny_target(name)
    drafter = EarlyExit(EarlyExitOptions(blocks=2, adapter=adapter, draft_length=5), target).eval()
    root, *found = drafts(target, drafter, TEXT)
    cut: Any = target.shallow(2).model
    text = [*TEXT, root]
    with torch.no_grad():
        for token in found:
            assert token == int(cut(torch.tensor([text])).logits[0, -1].argmax())
            text.append(token)
    assert root == int(target.model(torch.tensor([TEXT])).logits[0, -1].argmax())


def test_early_exit_checkpoint_holds_only_adapter() -> None:
    target = FastTarget(tiny_model())
    assert dict(EarlyExit(EarlyExitOptions(), target).state_dict()) == {}
    with_adapter = EarlyExit(EarlyExitOptions(adapter=True), target)
    assert {name.split(".")[0] for name in with_adapter.state_dict()} == {"adapter"}
    assert with_adapter.trained and not EarlyExit(EarlyExitOptions(), target).trained
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize(("blocks", "exit_after"), [(4, 1), (12, 4)])
def test_early_exit_default_is_third_of_blocks(blocks: int, exit_after: int) -> None:
    model: Any = tiny_model()
    model.config.num_hidden_layers = blocks
    torch.manual_seed(0)
    drafter = EarlyExit(EarlyExitOptions(), HFTarget(type(model)(model.config)))
    assert drafter.resolved_options() == {"blocks": exit_after}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.SHAPES, "early_exit", {"blocks": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        contract.test_drafter_coupled_output_equals_plain_sampling,
        contract.test_drafter_depth_limit_cuts_same_draft_tree,
        contract.test_drafter_restored_state_proposes_same_tokens,
        contract.test_drafter_proposal_has_distribution_only_if_sampled,
    ],
)
def test_early_exit_without_adapter_passes_family_contract(check: Callable[[str], None], plain: None) -> None:
    check("early_exit")


def test_early_exit_without_adapter_reloaded_drafts_same_tokens(tmp_path: Path, plain: None) -> None:
    contract.test_drafter_reloaded_checkpoint_drafts_same_tokens("early_exit", tmp_path)


@pytest.mark.parametrize("adapter", [False, True])
def test_early_exit_as_cascade_middle_output_equals_plain_decoding(adapter: bool) -> None:
    """Plain it can verify what a cheaper drafter drafts; with an adapter both draft into one tree."""
    target, asked, family = tiny_target(), prompts(3, seed=2), families()["cascade"]
    middle = {"family": "early_exit", "blocks": 2, "adapter": adapter}
    drafter = family.build(family.options(middle=middle, inner={"family": "prompt_lookup"}), target).eval()
    assert (type(drafter).__name__ == "Cascade") != adapter
    ours, wanted = (contract.decode(target, d, asked, 2, sampling=Sampling(), tokens=20) for d in (drafter, None))
    assert [r.tokens for r in ours] == [r.tokens for r in wanted]
