"""A second storage plugs into the KV cache, and nothing else knows: the tokens are those over pages."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.model import kv_storage
from drafttrain.model.drafter import Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.helpers import prompts, tiny_model, tiny_target
from tests.tiny import build
from tests.unit.model.contiguous_cache import ContiguousStorage, OnePageStorage

STORAGES = {"contiguous": ContiguousStorage, "one page per slot": OnePageStorage}
POLICIES = [("greedy", Sampling()), ("coupled", Sampling(0.8, seed=5))]


def decoded(
    target: HFTarget, drafter: Drafter | None, policy: str, sampling: Sampling, every: int | None, pages: int | None = None
) -> list[list[int]]:
    """Ragged prompts, longer than a prefill chunk, several samples of some, over three slots."""
    controls = Controls(read_every=every)
    decoder = Decoder(target, drafter, policy, sampling, frozenset({7}), 16, prefill_chunk=6, controls=controls)
    asked = [Request(prompt, 10 * i, 16, samples=1 + i % 2) for i, prompt in enumerate(prompts(4, seed=3, longest=40))]
    session = Session(decoder, 3, max(map(decoder.positions, asked)), pages)
    results = [result for request in asked for result in session.submit(request)]
    for _ in session:
        pass
    return [result.tokens for result in results]


@cache
def expected(name: str | None, runner: str) -> tuple[HFTarget, Drafter | None, list[list[list[int]]]]:
    """Target, drafter, and the tokens of each policy over the paged cache."""
    target = FastTarget(tiny_model()) if runner == "fast" else tiny_target()
    drafter = None if name is None else build(name, target, 0.3)
    return target, drafter, [decoded(target, drafter, policy, sampling, None) for policy, sampling in POLICIES]


@pytest.mark.sampled(name=["medusa", "eagle3", "draft_model"])  # trees; layers of the drafter's own; a model of its own
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("every", [None, 2], ids=["each step read at once", "static shapes"])
@pytest.mark.parametrize("runner", ["fast", "transformers"])
@pytest.mark.parametrize("name", [None, "medusa", "eagle3", "draft_model"])
def test_contiguous_cache_decodes_same_tokens_as_paged_cache(
    name: str | None, runner: str, every: int | None, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter, wanted = expected(name, runner)
    monkeypatch.setattr(kv_storage, "STORAGE", STORAGES[storage])
    assert isinstance(target.new_cache(1, 8).storage, ContiguousStorage)
    for policy, tokens, pages in zip(POLICIES, wanted, (None, 3), strict=True):  # in a pool slots are reserved and released
        assert decoded(target, drafter, *policy, every, pages) == tokens


@pytest.mark.parametrize("storage", STORAGES)
def test_contiguous_cache_keep_and_fork_equal_paged_cache(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def used() -> list[torch.Tensor]:
        kv = KVCache(2, 3, 20)
        new = torch.arange(2 * 2 * 2 * 3 * 4.0).view(2, 2, 2, 3, 4)  # [k or v, B, h, N, D]
        kv.rows(torch.tensor([2, 0]))
        for layer in range(2):
            kv.append(layer, new[0] + layer, new[1] - layer)
        kv.keep(torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1]))
        kv.fork(2, 1, 10)
        kv.rows(torch.tensor([1, 0, 2]))
        assert kv.length_B.tolist() == [2, 1, 2]
        return [pool[row, :, :length] for layer in range(2) for pool in kv.read(layer, 0) for row, length in ((0, 2), (1, 1))]

    wanted = used()
    monkeypatch.setattr(kv_storage, "STORAGE", STORAGES[storage])
    for found, paged in zip(used(), wanted, strict=True):
        assert torch.equal(found, paged)
