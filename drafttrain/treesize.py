"""Floor 2: how many nodes a static tree should have on this machine.

Shapes: N nodes (root included), K draft depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from drafttrain.drafter import Commit, Drafter
from drafttrain.sampling import Sampling
from drafttrain.target import Target
from drafttrain.tree import expected_nodes, tuned_paths

CANDIDATES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # drafts, the root not counted
CONTEXT = 128  # committed positions at which costs are taken


def best_nodes(target: Target, drafter: Drafter, texts: Sequence[Tensor], candidates: Sequence[int] = CANDIDATES) -> int:
    """The node count of most tokens a second at batch size 1: expected tokens a step / (a proposal + a verification).

    texts: as for `Drafter.tune`. Both costs are measured here, so the choice holds for this machine and dtype alone.
    """
    draft, rates = proposal_seconds(target, drafter), {}
    verify = verification_seconds(target, drafter, [n + 1 for n in candidates])
    for nodes in candidates:
        paths = tuned_paths(texts, nodes)
        if paths:
            rates[nodes] = (1.0 + expected_nodes(texts, paths)) / (draft + verify[nodes + 1])
    return max(rates, key=lambda n: rates[n]) if rates else candidates[0]


@torch.inference_mode()
def verification_seconds(
    target: Target, drafter: Drafter, sizes: Sequence[int], repeats: int = 15, batch: int = 1
) -> dict[int, float]:
    """Median seconds of one verification of `batch` rows by node count, all sizes in turn."""
    device, most = target.device, max(sizes)
    kv = target.new_cache(batch, CONTEXT + most)
    position_BT = torch.arange(CONTEXT, device=device).expand(batch, -1)
    target(torch.ones_like(position_BT), kv, None, position_BT, drafter.taps, position_BT[:, :0])
    kv.keep(position_BT, torch.full((batch,), CONTEXT, device=device))
    spent: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats + 1):
        for size in sizes:
            ancestor_BNN = torch.ones(size, size, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
            at_BN = (CONTEXT + torch.arange(size, device=device)).expand(batch, -1)
            began = perf_counter()
            out = target(torch.ones_like(at_BN), kv, ancestor_BNN, at_BN, drafter.taps)
            assert out.logits_BRV is not None
            out.logits_BRV[0, -1, 0].item()  # waits for a device that works ahead
            spent[size].append(perf_counter() - began)
    return {size: median(times[1:]) for size, times in spent.items()}


@torch.inference_mode()
def proposal_seconds(target: Target, drafter: Drafter, repeats: int = 15, batch: int = 1, depth: int | None = None) -> float:
    """Median seconds of a proposal for `batch` rows, no deeper than `depth`; after each, one more token is observed."""
    device, spent = target.device, []
    state, slot_B = drafter.open(batch, CONTEXT + drafter.max_nodes + repeats + 1), torch.arange(batch, device=device)
    width = target.shape.hidden_size
    for step in range(repeats + 1):
        length = CONTEXT if step == 0 else 1
        token_BA = torch.ones(batch, length, dtype=torch.long, device=device)
        hidden = {key: torch.zeros(batch, length, width, device=device) for key in drafter.taps.keys}
        bring = drafter.read if step == 0 else drafter.observe
        bring(state, Commit(token_BA, token_BA, hidden, torch.full((batch,), length, device=device)), slot_B)
        began = perf_counter()
        tree = drafter.propose(state, slot_B, Sampling(), depth)
        int(tree.token_BN[0, -1])
        spent.append(perf_counter() - began)
    return median(spent[1:])
