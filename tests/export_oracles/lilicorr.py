"""LiLiCorr as SGLang and vLLM read it: DFlash's block, and a network that scores the candidates of all slots together.

Shapes: K drafts, C candidates, L = K C, D width, F factors, h heads, d width of a head, H hidden, V vocabulary, c tokens of a
text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.export_oracles.dflash import DraftBlockShape, Reader, of_zlab, slots
from tests.export_oracles.layer import rms
from tests.export_oracles.parts import MismatchError, Point, Reading, TargetParts, Tensors, each

NUMBERS = ("candidate_topk", "hidden_size", "factor_dim", "num_layers", "num_heads")
REALS = ("mlp_ratio", "logit_scale", "vector_eps")
Score = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def reader(stack: str) -> Reader:
    """The layout of ModelOpt's exports, as this stack reads it."""
    return partial(_read, stack)


def _read(stack: str, directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """Loaders have no defaults for the network's fields."""
    _, own, block = of_zlab(directory, "LiLiCorrDraftModel", target, stack)
    own.expect("projector_type", "lilicorr", "architecture")
    fields = {name: own.get(f"lilicorr_{name}", "config") for name in (*NUMBERS, *REALS)}
    candidates = fields["candidate_topk"]
    if candidates not in (1, 2, 4, 8, 16):
        raise MismatchError("config", f"lilicorr_candidate_topk is {candidates}, but loaders take powers of 2 up to 16")
    tensors, context = Tensors(directory), _context(directory, block, target)
    states = slots(block, tensors, ("fc", "hidden_norm"), target)
    score = _network(tensors, fields, block)
    tensors.finish()

    def draft(point: Point) -> Tensor:
        state_KH, logits_KV = states(point), F.linear(states(point), target.head)
        log_q_KC, token_KC = logits_KV.log_softmax(-1).topk(candidates)
        start_C, pair_JCC = score(target.embed[token_KC], log_q_KC, state_KH, context(point))
        rows, before = [start_C], _place(token_KC[0], point.drafts[0])
        for slot in range(1, len(token_KC)):
            rows.append(pair_JCC[slot - 1, before])
            before = _place(token_KC[slot], point.drafts[slot])
        return torch.full_like(logits_KV, -torch.inf).scatter(1, token_KC, torch.stack(rows))

    return Reading(each(points, draft), block.facts() | {f"lilicorr_{name}": value for name, value in fields.items()})


def _place(token_C: Tensor, token: Tensor) -> int:
    """A token's place among the candidates; the first one's, if it is none."""
    return int((token_C == token).int().argmax())


def _context(directory: Path, block: DraftBlockShape, target: TargetParts) -> Callable[[Point], Tensor]:
    """[H] of a point: the fused state of the text's last token, which slots see too."""
    tensors, shape = Tensors(directory), block.shape
    fc = tensors.take("fc.weight", shape.width, len(block.taken) * target.embed.shape[1], fails="layer ids")
    norm = tensors.take("hidden_norm.weight", shape.width)
    return lambda point: rms(F.linear(torch.cat([point.layer(k)[-1] for k in block.taken]), fc), norm, shape.eps)


def _layer_norm(tensors: Tensors, name: str, width: int) -> tuple[Tensor, Tensor]:
    """Weight and bias."""
    return tensors.take(f"{name}.weight", width), tensors.take(f"{name}.bias", width)


def _network(tensors: Tensors, fields: dict[str, Any], block: DraftBlockShape) -> Score:
    """(start_C, pair_JCC) from embeddings and log-probabilities of candidates, states, and the context before the block."""
    width, factors, heads = fields["hidden_size"], fields["factor_dim"], fields["num_heads"]
    hidden, eps, slots_K, C = block.shape.width, block.shape.eps, block.size - 1, fields["candidate_topk"]
    if width % heads:
        raise MismatchError("config", f"lilicorr_hidden_size {width} is no multiple of lilicorr_num_heads {heads}")
    inner = int(width * fields["mlp_ratio"])

    def linear(name: str, into: int, out: int) -> Callable[[Tensor], Tensor]:
        weight, bias = tensors.linear(f"lilicorr.{name}", out, into)
        return lambda x: F.linear(x, weight, bias)

    def norm(name: str) -> Callable[[Tensor], Tensor]:
        weight = tensors.take(f"lilicorr.{name}.weight", width)
        return lambda x: rms(x, weight, eps)

    def mlp(name: str, into: int, between: int) -> Callable[[Tensor], Tensor]:
        up, down = linear(f"{name}.up_proj", into, between), linear(f"{name}.down_proj", between, width)
        return lambda x: down(F.silu(up(x)))

    def layer(i: int) -> Callable[[Tensor, Tensor], Tensor]:
        name = f"layers.{i}"
        before, after, gated = norm(f"{name}.attn_norm"), norm(f"{name}.mlp_norm"), mlp(f"{name}.mlp", width, inner)
        joint = tensors.take(f"lilicorr.{name}.attn.in_proj_weight", 3 * width, width)
        shift = tensors.take(f"lilicorr.{name}.attn.in_proj_bias", 3 * width)
        out = linear(f"{name}.attn.out_proj", width, width)

        def run(x_LD: Tensor, bias_hLL: Tensor) -> Tensor:
            q_hLd, k_hLd, v_hLd = F.linear(before(x_LD), joint, shift).view(len(x_LD), 3, heads, -1).permute(1, 2, 0, 3)
            share_hLL = (q_hLd @ k_hLd.transpose(1, 2) / math.sqrt(width // heads) + bias_hLL).softmax(-1)
            x_LD = x_LD + out((share_hLL @ v_hLd).transpose(0, 1).flatten(1))
            return x_LD + gated(after(x_LD))

        return run

    token = (lambda x: x) if width == hidden else linear("token_proj", hidden, width)
    state, context = linear("pass_hidden_proj", hidden, width), linear("context_proj", hidden, width)
    feature_norm, feature = _layer_norm(tensors, "lilicorr.feature_norm", 5), mlp("feature_mlp", 5, width)
    by_slot = tensors.take("lilicorr.slot_embedding", 1, 1, slots_K, 1, width, fails="config")[0, 0]
    by_rank = tensors.take("lilicorr.rank_embedding", 1, 1, 1, C, width, fails="config")[0, 0]
    apart_hS = tensors.take("lilicorr.relative_slot_bias", heads, 2 * block.size - 1, fails="config")
    same_h = tensors.take("lilicorr.same_slot_bias", heads, fails="config")
    layers = [layer(i) for i in range(fields["num_layers"])]
    last, anchor_norm, joined = norm("output_norm"), norm("anchor_norm"), linear("factor_input_proj", 3 * width, width)
    leave, enter, begin = (linear(f"{name}_head", width, factors) for name in ("out", "in", "anchor_out"))
    slot_L = torch.arange(slots_K).repeat_interleave(C)
    back_LL = slot_L[:, None] - slot_L
    bias_hLL = apart_hS[:, back_LL + block.size - 1] + same_h[:, None, None] * (back_LL == 0)

    def unit(x_F: Tensor) -> Tensor:
        return x_F / x_F.norm(dim=-1, keepdim=True).clamp_min(fields["vector_eps"])

    def score(embed_KCH: Tensor, log_q_KC: Tensor, state_KH: Tensor, context_H: Tensor) -> tuple[Tensor, Tensor]:
        rank_C = torch.arange(C, dtype=torch.float32)
        columns = [log_q_KC, log_q_KC.exp(), log_q_KC - log_q_KC[:, :1]]
        columns += [x_C.expand_as(log_q_KC) for x_C in (rank_C / max(C - 1, 1), (rank_C == 0).float())]
        feature_KC5 = F.layer_norm(torch.stack(columns, -1), (5,), *feature_norm)
        x_KCD = token(embed_KCH) + state(state_KH)[:, None] + feature(feature_KC5) + by_slot + by_rank
        x_LD = x_KCD.flatten(0, 1)
        for run in layers:
            x_LD = run(x_LD, bias_hLL)
        anchor_D = anchor_norm(context(context_H))
        y_LD = last(x_LD)
        factor_LD = F.silu(joined(torch.cat([y_LD, anchor_D.expand_as(y_LD), y_LD * anchor_D], -1)))
        out_KCF, in_KCF = (unit(head(factor_LD)).view(slots_K, C, -1) for head in (leave, enter))
        start_C = in_KCF[0] @ unit(begin(anchor_D))
        return fields["logit_scale"] * start_C, fields["logit_scale"] * out_KCF[:-1] @ in_KCF[1:].transpose(1, 2)

    return score
