"""Prompt lookup in the texts of slots: what followed an earlier occurrence of a text's last tokens.

Shapes: S slots, B rows, P places of a text, K tokens copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops import library


def look_up(
    text_SP: Tensor, length_S: Tensor, power_P: Tensor, slot_B: Tensor, most: int | None, least: int, steps: int
) -> tuple[Tensor, Tensor]:
    """(token [B, K + 1], count [B]): each text's last token, at place `length`, and K = `steps` tokens that followed the latest
    of the longest earlier occurrences of its end; `count` of them are real, the last token too.

    most: tokens of an occurrence at most; None: any number. least: fewer are none. power_P: `powers(P)`.
    """
    if slot_B.device.type != "cpu" or not library.serves_on(slot_B.device):
        return reference(text_SP, length_S, power_P, slot_B, most, least, steps)
    token_BN, count_B = slot_B.new_empty(len(slot_B), 1 + steps), slot_B.new_empty(len(slot_B))
    torch.ops.drafttrain.look_up(text_SP, length_S, slot_B, most or 0, least, token_BN, count_B)
    return token_BN, count_B


def reference(
    text_SP: Tensor, length_S: Tensor, power_P: Tensor, slot_B: Tensor, most: int | None, least: int, steps: int
) -> tuple[Tensor, Tensor]:
    """The plain-torch twin of `look_up`, without a sync: it compares the end of each text with every place in it."""
    text_BP, root_B = text_SP[slot_B], length_S[slot_B]
    matched_BP = suffixes(text_BP, root_B, power_P) if most is None else ngrams(text_BP, root_B, most)
    source_B, matched_B = latest_longest(matched_BP, root_B, least)
    copied_B = torch.where(matched_B, (root_B - source_B).clamp_max(steps), 0)
    index_BK = source_B[:, None] + torch.arange(1, steps + 1, device=slot_B.device)
    draft_BK = text_BP.gather(1, index_BK.clamp_max(text_BP.shape[1] - 1))
    return torch.cat([text_BP.gather(1, root_B[:, None]), draft_BK], 1), 1 + copied_B


def latest_longest(matched_BP: Tensor, root_B: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """(end_B, matched_B): where the longest match before the root ends, the last of equally long ones; whether it has `least`
    tokens."""
    index_P = torch.arange(matched_BP.shape[1], device=root_B.device)
    possible_BP = (matched_BP >= least) & (index_P < root_B[:, None])
    best_B, end_B = torch.where(possible_BP, matched_BP * len(index_P) + index_P, -1).max(1)
    return end_B, best_B >= 0


def ngrams(text_BP: Tensor, root_B: Tensor, most: int) -> Tensor:
    """[B, P] how many of the last tokens up to the root, `most` at most, also end at each place.

    In `a b c a b` with root the last `b`: 0 2 0 0 2.
    """
    index_P = torch.arange(text_BP.shape[1], device=text_BP.device)
    matched_BP, equal_BP = torch.zeros_like(text_BP), torch.ones_like(text_BP, dtype=torch.bool)
    for offset in range(most):
        token_B1 = text_BP.gather(1, (root_B - offset).clamp_min(0)[:, None])
        inside_BP = (index_P >= offset) & (root_B >= offset)[:, None]
        equal_BP = equal_BP & inside_BP & (text_BP.roll(offset, 1) == token_B1)
        matched_BP = matched_BP + equal_BP
    return matched_BP


_BASE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no power of it vanishes modulo 2 ** 64


def powers(count: int, device: torch.device) -> Tensor:
    """[count] int64: powers of the hash's base, modulo 2 ** 64."""
    base = torch.full((count,), _BASE, dtype=torch.long, device=device)
    base[0] = 1
    return base.cumprod(0)


def suffixes(text_BP: Tensor, root_B: Tensor, power_P: Tensor) -> Tensor:
    """`ngrams` without a limit: log P comparisons of hashes instead of one for each length.

    The hash of a piece is the sum of token * base ** place, modulo 2 ** 64; two pieces are the same where their hashes are,
    moved to one place. Tokens that differ and hash alike would make a bad draft, no wrong text.
    """
    P = text_BP.shape[1]
    index_BP = torch.arange(P, device=text_BP.device).expand_as(text_BP)
    prefix_hash_BP = torch.nn.functional.pad(((text_BP + 1) * power_P).cumsum(1), (1, 0))  # of the first p tokens, p to P
    end_hash_BP, root_B1 = prefix_hash_BP[:, 1:], root_B[:, None]
    root_hash_B1, shift_BP = prefix_hash_BP.gather(1, root_B1 + 1), power_P[(root_B1 - index_BP).clamp_min(0)]
    matched_BP = torch.zeros_like(text_BP)
    for bit in reversed(range(P.bit_length())):
        longer_BP = matched_BP + (1 << bit)
        piece_hash_BP = end_hash_BP - prefix_hash_BP.gather(1, (index_BP + 1 - longer_BP).clamp_min(0))
        suffix_hash_BP = root_hash_B1 - prefix_hash_BP.gather(1, (root_B1 + 1 - longer_BP).clamp_min(0))
        equal_BP = (longer_BP <= index_BP + 1) & (index_BP <= root_B1) & (piece_hash_BP * shift_BP == suffix_hash_BP)
        matched_BP = torch.where(equal_BP, longer_BP, matched_BP)
    return matched_BP
