"""Medusa's decoding: all heads as one product give what each head gives, whether they are copied or views."""

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.drafters.medusa import Medusa, MedusaOptions
from tests.helpers import tiny_target

TREE = [[0], [1], [0, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.sampled
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("init", ["copy", "share"])
def test_medusa_stacked_heads_draft_same_tokens_as_single_heads(init: str, frozen: bool) -> None:
    target = tiny_target()
    drafter = Medusa(MedusaOptions(heads=3, layers=2, init=init, paths=TREE), target).eval()
    torch.manual_seed(4)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    drafter.requires_grad_(not frozen)
    before = [p.detach().clone() for p in drafter.parameters()]
    state = drafter.open(2, 32)
    state.hidden_SH.copy_(torch.randn_like(state.hidden_SH))
    with torch.no_grad():
        tree = state.propose(torch.arange(2), Sampling())
        best = [drafter._output(k)(drafter.heads[k](state.hidden_SH)).topk(2).indices for k in range(3)]
    paths = sorted(TREE, key=lambda p: (len(p), p))
    expected = torch.stack([best[len(p) - 1][:, p[-1]] for p in paths], 1)
    assert torch.equal(tree.token_BN[:, 1:], expected)
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.parameters(), strict=True))


def test_medusa_frozen_heads_are_stacked_once_and_trained_heads_anew() -> None:
    drafter = Medusa(MedusaOptions(heads=2), tiny_target()).eval().requires_grad_(False)
    stack = drafter.open(1, 32).stack
    assert drafter.open(1, 32).stack is stack
    drafter.load_state_dict({name: tensor + 1.0 for name, tensor in drafter.state_dict().items()})
    assert drafter.open(1, 32).stack is stack and torch.equal(stack.output_KVH[1], drafter.heads[1].output.weight)
    drafter.requires_grad_(True)
    anew = drafter.open(1, 32).stack
    assert anew is not stack and drafter.heads[1].output.weight.data_ptr() != anew.output_KVH[1].data_ptr()
