"""Checks once, at load time, whether a model is exact with our cache and masks.

Shapes: B rows, N nodes, T prompt positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.model.target import Taps, Target

PROMPTS = (5, 3)  # prompt lengths of the probe's rows
CHAIN, TREE = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)), ((0,), (0, 1), (0, 2), (0, 1, 3))  # paths of its four nodes


class Probed(Target, Protocol):
    """A target that can be compared with its own model."""

    model: Any
    recurrent: bool  # some layers keep a state instead of keys and values: nodes follow one another, whatever their parents are

    def reference_logits(self) -> dict[tuple[int, ...], Tensor]:
        """`reference_logits` of its model."""
        ...


def _probed(vocab_size: int) -> tuple[Tensor, Tensor]:
    """(prompt_BT, node_BN) of the probe."""
    generator = torch.Generator().manual_seed(0)
    prompt_BT = torch.randint(0, vocab_size, (2, max(PROMPTS)), generator=generator)
    return prompt_BT, torch.randint(0, vocab_size, (2, 4), generator=generator)


def _sequence(prompt_BT: Tensor, node_BN: Tensor, row: int, path: tuple[int, ...]) -> tuple[int, ...]:
    return (*prompt_BT[row, : PROMPTS[row]].tolist(), *node_BN[row, list(path)].tolist())


@torch.no_grad()
def reference_logits(model: Any) -> dict[tuple[int, ...], Tensor]:
    """The last logits [V] of the model's own forward without a cache, by sequence, for every sequence of the probe."""
    inputs = _probed(model.config.get_text_config().vocab_size)
    sequences = {_sequence(*inputs, row, path) for row in range(len(PROMPTS)) for path in CHAIN + TREE}
    rows = {ids: torch.tensor([ids], device=model.device) for ids in sorted(sequences)}
    return {ids: model(row, use_cache=False).logits[0, -1].float() for ids, row in rows.items()}


@torch.no_grad()
def probe(target: Probed) -> bool:
    """Whether ragged trees are exact: each node's logits equal those of its path alone. Raises UserError when chains fail.

    Rows of 5 and 3 committed tokens verify a root, two children and a grandchild at once. The reference is the model's own
    forward over the row's prefix and the node's path.
    """
    expected = target.reference_logits()
    if _worst_gap(target, expected, CHAIN) > 1.0:
        raise UserError(
            f"{type(target.model).__name__} gives other logits with a cache than without one; "
            "this architecture cannot be decoded exactly, choose another target"
        )
    return not target.recurrent and _worst_gap(target, expected, TREE) <= 1.0


def _worst_gap(target: Probed, expected: dict[tuple[int, ...], Tensor], paths: tuple[tuple[int, ...], ...]) -> float:
    """Largest difference between logits with and without a cache, in units of the dtype's rounding tolerance."""
    inputs, device = _probed(target.shape.vocab_size), target.device
    prompt_BT, node_BN = (tokens.to(device) for tokens in inputs)
    kv, arange_T, count_B = target.new_cache(2, 16), torch.arange(5, device=device), torch.tensor(PROMPTS, device=device)
    target(prompt_BT, kv, None, arange_T.expand(2, 5), Taps(), count_B[:, None] - 1)
    kv.keep(arange_T.expand(2, 5), count_B)
    ancestor_BNN = torch.zeros(2, 4, 4, dtype=torch.bool, device=device)
    for path in paths:
        ancestor_BNN[:, path[-1], list(path)] = True
    position_BN = count_B[:, None] + ancestor_BNN.sum(-1) - 1
    logits_BNV = target(node_BN, kv, ancestor_BNN, position_BN, Taps()).logits_BRV
    assert logits_BNV is not None
    gaps = []
    for row in range(len(PROMPTS)):
        for path in paths:
            expected_V = expected[_sequence(*inputs, row, path)].to(device)
            gaps.append((logits_BNV[row, path[-1]].float() - expected_V).abs().max() / expected_V.abs().max().clamp_min(1.0))
    return float(torch.stack(gaps).max()) / (200 * torch.finfo(target.dtype).eps)
