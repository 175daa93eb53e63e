"""A node's logits in a tree, checked against those of its path alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drafttrain.core.tree import ancestors
from drafttrain.model.target import Taps
from drafttrain.targets.hf import HFTarget


def check_logits_by_path(target: HFTarget, nodes: int, checked: Iterable[int], gradients: bool, seed: int) -> None:
    """Two random trees behind texts of 9 and 4 tokens; the model itself reads each checked node's path without a cache.

    gradients: with them enabled, which plain torch serves in place of the compiled operators.
    """
    torch.manual_seed(seed)
    parent = torch.tensor([[-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)] for _ in range(2)])
    lengths, mask = torch.tensor([9, 4]), ancestors(parent)
    text, token = torch.randint(0, 64, (2, 9)), torch.randint(0, 64, (2, nodes))
    with torch.set_grad_enabled(gradients):
        kv = target.new_cache(2, 16 + nodes)
        target(text, kv, None, torch.arange(9).expand(2, 9), Taps(), lengths[:, None] - 1)
        kv.keep(torch.arange(9).expand(2, 9), lengths)
        found = target(token, kv, mask, lengths[:, None] + mask.sum(-1) - 1, Taps()).logits_BRV
    assert found is not None
    with torch.no_grad():
        for row in range(2):
            for node in checked:
                path = torch.cat([text[row, : lengths[row]], token[row, mask[row, node]]])
                wanted = target.model(path[None]).logits[0, -1]
                torch.testing.assert_close(found[row, node], wanted, rtol=1e-4, atol=1e-4)
