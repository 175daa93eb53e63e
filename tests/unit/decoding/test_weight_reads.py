"""Bytes of weights that a step reads: product by product, as the floor of a report counts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.decoder import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.decoding.weight_reads import WeightReads
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import build
from tests.helpers import prompts, tiny_model
from tests.recorder import cpu_graphs

__all__ = ["cpu_graphs"]


def size(*modules: nn.Module) -> int:
    """Bytes of all linear maps."""
    linear = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
    return sum(p.nbytes for m in linear for p in m.parameters())


@torch.inference_mode()
def test_weight_reads_counts_each_product_but_no_embedding_lookup() -> None:
    first_HH, second_VH, table_VH = torch.randn(8, 8), torch.randn(32, 8), torch.randn(32, 8)
    with WeightReads() as reads:
        x_H = F.embedding(torch.tensor([3]), table_VH)
        x_H = F.linear(x_H, first_HH)
        for _ in range(3):
            x_H = F.linear(F.linear(x_H, second_VH), second_VH[:, :8].t())
        x_H @ x_H.t()
    repeated = second_VH.nbytes
    assert reads.bytes() == first_HH.nbytes + 3 * 2 * repeated
    assert reads.bytes(cached=repeated - 1) == reads.bytes()
    assert reads.bytes(cached=repeated) == first_HH.nbytes + repeated


@pytest.mark.parametrize(("name", "passes"), [(None, 0), ("medusa", 0), ("eagle", 4)])
def test_captured_step_reads_target_weights_once_and_head_in_each_drafter_pass(
    name: str | None, passes: int, monkeypatch: pytest.MonkeyPatch, cpu_graphs: None
) -> None:
    monkeypatch.setattr(library, "has_product", lambda: False)  # blocks run one by one, as on a GPU
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # so that no weight is packed
    target = FastTarget(tiny_model())
    drafter = None if name is None else build(name, target, 0.3)
    decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=6, controls=Controls(read_every=1))
    decoder.captures = True
    costs = decoder.run(prompts(1), 1).costs
    head = size(target.model.get_output_embeddings())
    own = 0 if drafter is None else size(drafter)
    expected = size(target.model) + (own if not passes else passes * (own + head))
    assert costs.steps and costs.weight_bytes == expected * costs.steps
