"""Attention of drafters in training compared with torch's own attention under a dense mask, forward and backward.

unrolled: the attention of drafters trained on their own outputs (`drafttrain/model/unrolled_attention.py`), at the last of k
steps, with queries of T positions and keys of k T. The alternative joins the keys of all steps under a mask of [T, k T].

blocks: the attention of block drafters (`drafttrain/model/blockwise_attention.py`), with A blocks of S slots, each with its
own part of a context of T positions. The alternative takes all A S slots at once under a mask of [A S, T + A S].

Both alternatives are `scaled_dot_product_attention`, with whichever kernel supports a mask.

Shapes: T positions, A blocks, S slots, h heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import DiffersError, Work
from benchmarks.contest import Cell, Entrant, cells_table, contest, draw, record
from benchmarks.section import Found, Settings
from drafttrain.model.batch import Context
from drafttrain.model.blockwise_attention import blockwise_attention
from drafttrain.model.unrolled_attention import unrolled

LENGTHS = (512, 1024, 2048, 4096, 8192)
STEPS = 4
SLOTS, MOST_BLOCKS = 16, 512
UNROLLED, BLOCKS = f"unrolled, {STEPS} steps", f"blocks of {SLOTS}"
HEADS = {"cpu": (4, 64), "cuda": (32, 128)}  # number of heads, and their width
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Attend = Callable[..., Tensor]


def dense_unrolled(q_BhTD: Tensor, *both: Tensor) -> Tensor:
    T, steps = q_BhTD.shape[2], len(both) // 2
    own_TT = torch.eye(T, dtype=torch.bool, device=q_BhTD.device)
    mask_TP = torch.cat([torch.ones_like(own_TT).tril(), *[own_TT] * (steps - 1)], 1)
    return F.scaled_dot_product_attention(q_BhTD, torch.cat(both[:steps], 2), torch.cat(both[steps:], 2), mask_TP)


def ours_unrolled(q_BhTD: Tensor, *both: Tensor) -> Tensor:
    steps = len(both) // 2
    return unrolled(q_BhTD, both[:steps], both[steps:], None)


def dense_blocks(
    seen: Context, q_BhASD: Tensor, k_BhASD: Tensor, v_BhASD: Tensor, context_k_BhTD: Tensor, context_v_BhTD: Tensor
) -> Tensor:
    A, S = q_BhASD.shape[2:4]
    own_RR = torch.eye(A, dtype=torch.bool, device=q_BhASD.device).repeat_interleave(S, 0).repeat_interleave(S, 1)
    seen_BAT = seen.seen(context_k_BhTD.shape[2])
    mask_B1RP = torch.cat([seen_BAT.repeat_interleave(S, 1), own_RR[None]], 2)[:, None]
    keys, values = (torch.cat([c, x.flatten(2, 3)], 2) for c, x in ((context_k_BhTD, k_BhASD), (context_v_BhTD, v_BhASD)))
    return F.scaled_dot_product_attention(q_BhASD.flatten(2, 3), keys, values, mask_B1RP).unflatten(2, (A, S))


def ours_blocks(seen: Context, *inputs: Tensor) -> Tensor:
    return blockwise_attention(*inputs, seen)


def attention(settings: Settings) -> Found:
    device, lengths = settings.device, [settings.of(length, 16) for length in LENGTHS]
    kinds: dict[str, list[Entrant]] = {UNROLLED: [], BLOCKS: []}
    for T in lengths:
        A, check = min(MOST_BLOCKS, max(2, T // SLOTS)), not kinds[UNROLLED]
        kinds[UNROLLED].append(Entrant({"T": T}, T * T, partial(_unrolled, device, T, check)))
        kinds[BLOCKS].append(Entrant({"T": T, "blocks": A}, A * SLOTS * (T + A * SLOTS), partial(_blocks, device, T, A, check)))
    found: dict[str, list[Cell]] = {}
    for name, entrants in kinds.items():
        found[name] = []
        for cell in contest(entrants, settings.device, settings.repeats):
            settings.say(f"{name}, T {cell.size['T']:,}: {cell.ours_seconds:.3f} s")
            found[name].append(cell)
    tables = [cells_table(f"attention, {name}", "ours", "dense mask", cells) for name, cells in found.items()]
    panels = [(name, "T", [("", cells)]) for name, cells in found.items()]
    plot = partial(draw, panels=panels, ours="ours", other="dense mask")
    return Found(tables, {name: record(cells) for name, cells in found.items()}, plot)


def _unrolled(device: torch.device, length: int, check: bool) -> tuple[Work, Work]:
    heads, width = HEADS[device.type]
    inputs = [_random(device, 1, heads, length, width) for _ in range(1 + 2 * STEPS)]
    return _works(ours_unrolled, dense_unrolled, inputs, check)


def _blocks(device: torch.device, length: int, blocks: int, check: bool) -> tuple[Work, Work]:
    heads, width = HEADS[device.type]
    own = [_random(device, 1, heads, blocks, SLOTS, width) for _ in range(3)]
    context = [_random(device, 1, heads, length, width) for _ in range(2)]
    anchor_1A = torch.linspace(0, length - 1, blocks, device=device).long()[None]
    seen = Context(torch.zeros_like(anchor_1A), anchor_1A)
    return _works(partial(ours_blocks, seen), partial(dense_blocks, seen), own + context, check)


def _random(device: torch.device, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def _works(ours: Attend, dense: Attend, inputs: list[Tensor], check: bool) -> tuple[Work, Work]:
    """The work of both sides. Raises DiffersError where outputs or gradients differ."""
    grad = torch.randn_like(ours(*inputs).detach())

    def gradients(attend: Attend) -> list[Tensor]:
        return list(torch.autograd.grad(attend(*inputs), inputs, grad))

    if check:
        for a, b in zip(gradients(ours), gradients(dense), strict=True):
            apart = float((a.double() - b.double()).norm() / b.double().norm())
            if not apart <= CLOSE[b.dtype]:
                raise DiffersError(f"gradients are {apart:.1e} apart")
    return partial(gradients, ours), partial(gradients, dense)
