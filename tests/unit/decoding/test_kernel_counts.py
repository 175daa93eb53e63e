"""Kernels that a proposal, and what a drafter stores, launch on a GPU, by the recorder: they bound a small drafter's speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.model import kv_storage
from drafttrain.model.attention import AttentionMetadata
from drafttrain.model.drafter import Commit
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget
from tests.helpers import prompts, tiny_model
from tests.recorder import recorded

ATTENTION = 2  # kernels of one tree attention at most: `attend` and `combine`

# family: options, kernels of one proposal at most
BOUNDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "eagle3 chain": ("eagle3", {"tree": "chain", "draft_length": 4}, 90),
    "eagle3 dynamic": ("eagle3", {"tree": "dynamic", "draft_length": 4, "width": 4, "nodes": 12}, 107),
    "eagle chain": ("eagle", {"tree": "chain", "draft_length": 4}, 83),
    "mtp chain": ("mtp", {"tree": "chain", "draft_length": 4}, 99),
    "dflash block": ("dflash", {"tree": "chain", "block_size": 16}, 96),
    "peagle": ("peagle", {}, 78),
    "hydra": ("hydra", {}, 90),
    "redrafter": ("redrafter", {}, 140),
    "jetspec best first": ("jetspec", {"tree": "best_first", "block_size": 16, "nodes": 63, "layers": 2}, 140),
    "dflash2 walk": ("dflash2", {"tree": "chain", "block_size": 16, "rank": 8, "layers": 2}, 220),
    "medusa": ("medusa", {}, 15),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Block by block, with append and attention apart. Collects the kernels of attention, which is not computed."""
    attended, made = list[int](), AttentionMetadata.__init__

    def apart(meta: AttentionMetadata, kv: Any, *rest: Any) -> None:
        made(meta, kv, *rest)
        meta.two_kernels, meta.compiled = kv is not None and kv.static and meta.compiled, False

    def attention(q_BNhD: Tensor, *_: Any) -> Tensor:
        attended.append(ATTENTION)
        return q_BNhD.new_empty(q_BNhD.shape).flatten(2)

    monkeypatch.setattr(library, "has_product", lambda: False)
    monkeypatch.setattr(AttentionMetadata, "__init__", apart)
    monkeypatch.setattr(kv_storage, "tree_attention", attention)
    return attended


@pytest.mark.skipif(not library.state().loaded, reason=library.state().text)
def test_proposal_launches_no_more_kernels_than_its_bound_and_observing_a_commit_one(
    as_on_a_gpu: list[int], subtests: pytest.Subtests
) -> None:
    target = FastTarget(tiny_model())
    for case, (name, options, most) in BOUNDS.items():
        with subtests.test(case):
            torch.manual_seed(0)
            family = families()[name]
            drafter = family.build(family.options(**options), target).eval().requires_grad_(False)
            decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=60, controls=Controls(read_every=1))
            session = Session(decoder, 1, 200)
            session.submit(Request(prompts(1, seed=9)[0], 0, 60, 4, frozenset()))
            session.step()
            session.step()
            step = session.decode_step
            assert step.state is not None
            sampling, before = step.slots.sampling(step.sampling, session.slot_B), len(as_on_a_gpu)
            with torch.inference_mode(), recorded() as calls:
                step.state.propose(session.slot_B, sampling)
            kernels = calls.kernels.total() + sum(as_on_a_gpu[before:])
            assert len(calls.calls) > 10 and kernels <= most, f"{kernels} kernels: {calls.kernels}"
            token_BA = torch.zeros(1, 1 + drafter.draft_length, dtype=torch.long)
            hidden = {key: torch.zeros(*token_BA.shape, target.shape.hidden_size) for key in drafter.taps.keys}
            commit = Commit(token_BA, token_BA, hidden, torch.ones(1, dtype=torch.long))
            with torch.inference_mode(), recorded() as calls:
                step.state.observe(commit, session.slot_B)
            assert calls.kernels.total() == 1, f"{calls.kernels} store what was accepted"
