"""Domino as SGLang reads it: DFlash's block, and a recurrent state over the tokens above that corrects the later drafts.

Shapes: K drafts, H hidden, G recurrent state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.export_oracles.dflash import of_zlab, slots, tokens_before
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors, each


def sglang(directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """SGLang's layout. It drafts one token fewer than a shifted block has; here its last slot is corrected too."""
    config, own, block = of_zlab(directory, "DFlashDraftModel", target, "sglang")
    own.expect("projector_type", "domino", "architecture")
    own.expect("pure_draft_prefix_len", 1, "config")
    shifted = own.get("shift_label", "config")
    if not isinstance(shifted, bool):
        raise MismatchError("config", f"shift_label is {shifted!r}, but SGLang takes true or false")
    state, rank = own.get("gru_hidden_dim", "config"), _rank(config, own)
    block, tensors = replace(block, first=0 if shifted else 1), Tensors(directory)
    states, (vocab, width) = slots(block, tensors, ("fc", "hidden_norm"), target), target.embed.shape
    recurrent = nn.GRU(width, state, bias=False, batch_first=True)
    recurrent.weight_ih_l0 = nn.Parameter(tensors.take("prefix_gru.weight_ih_l0", 3 * state, width, fails="config"))
    recurrent.weight_hh_l0 = nn.Parameter(tensors.take("prefix_gru.weight_hh_l0", 3 * state, state, fails="config"))
    down = tensors.take("embed_proj.0.weight", rank, block.shape.width + state, fails="config")
    up = tensors.take("embed_proj.2.weight", vocab, rank, fails="config")
    tensors.finish()

    def draft(point: Point) -> Tensor:
        state_KH = states(point)
        recurrent_KG = recurrent(target.embed[tokens_before(point, len(state_KH))][None])[0][0]
        corrected_KV = F.linear(F.silu(F.linear(torch.cat([state_KH, recurrent_KG], -1), down)), up)
        corrected_KV[0] = 0.0  # the first draft comes from its slot alone
        return F.linear(state_KH, target.head) + corrected_KV

    return Reading(each(points, draft), block.facts())


def _rank(config: Config, own: Config) -> int:
    rank: int = own.get("emb_dim", "config")
    if config.values.get("emb_dim", rank) != rank:
        raise MismatchError("config", f"emb_dim is {config.values['emb_dim']} at the top level, {rank} in dflash_config")
    return rank
