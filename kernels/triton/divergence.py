"""Divergence of the draft distribution from the target's, and its gradient, from logits; no probability is kept in memory.

One program reads the two rows of one prediction two or three times: for the normalisers and most likely tokens, for the sums
that need these, and again for a gradient that needs those sums. Every lane keeps its own running values, joined after the last
step, so that no step waits for another.

Shapes: V the lanes of one step over the vocabulary. q = softmax(logits), p = softmax(target).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from drafttrain.kernels.triton.launch import Launch
from torch import Tensor

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # not -inf: x - LOWEST is never NaN
STEP = 2048


@triton.jit
def _normalise(row, vocabulary, STEP: tl.constexpr):
    """(log sum exp, index of the greatest value, the lowest among equals)."""
    top_V, sum_V, best_V = tl.full([STEP], LOWEST, tl.float32), tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.int32)
    for start in range(0, vocabulary, STEP):
        at_V = start + tl.arange(0, STEP)
        x_V = tl.load(row + at_V, mask=at_V < vocabulary, other=float("-inf")).to(tl.float32)
        more_V, scale_V = x_V > top_V, tl.exp(-tl.abs(x_V - top_V))
        sum_V = tl.where(more_V, sum_V * scale_V + 1.0, sum_V + scale_V)
        top_V, best_V = tl.where(more_V, x_V, top_V), tl.where(more_V, at_V, best_V)
    top = tl.max(top_V, 0)
    log_sum = top + tl.log(tl.sum(sum_V * tl.exp(top_V - top), 0))
    return log_sum, tl.min(tl.where(top_V == top, best_V, vocabulary), 0)


@triton.jit
def summary(row, log_sum, best, vocabulary, row_C, STEP: tl.constexpr):
    """The log-sum-exp of a row, and the index of its greatest value, the lowest among equals."""
    c = tl.program_id(0).to(tl.int64)
    found, at = _normalise(row + c * row_C, vocabulary, STEP)
    tl.store(log_sum + c, found)
    tl.store(best + c, at.to(tl.int64))


@triton.jit
def _log_probs(start, logits, target, log_sum_q, log_sum_p, vocabulary, STEP: tl.constexpr):
    """(index, log q, log p) of one step; minus infinity past the row's end."""
    at_V = start + tl.arange(0, STEP)
    log_q_V = tl.load(logits + at_V, mask=at_V < vocabulary, other=float("-inf")).to(tl.float32) - log_sum_q
    log_p_V = tl.load(target + at_V, mask=at_V < vocabulary, other=float("-inf")).to(tl.float32) - log_sum_p
    return at_V, log_q_V, log_p_V


@triton.jit
def _shift(whole, log_sum_p, WHOLE: tl.constexpr):
    """What turns log p over the row into log p over the vocabulary that the row is a part of."""
    return log_sum_p - tl.load(whole) if WHOLE else 0.0


@triton.jit
def pointwise(
    logits, target, label, loss, hit, mass, slope, whole, gain, vocabulary, logits_C, target_C, slope_C,
    NAME: tl.constexpr, SLOPE: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """ce and kl: the slope at a token depends on p and q at that token only, so it is written in the same pass."""
    c = tl.program_id(0).to(tl.int64)
    logits, target, slope, token = logits + c * logits_C, target + c * target_C, slope + c * slope_C, tl.load(label + c)
    log_sum_q, best_q = _normalise(logits, vocabulary, STEP)
    log_sum_p, best_p = _normalise(target, vocabulary, STEP)
    shift, factor = _shift(whole + c, log_sum_p, WHOLE), tl.load(gain + c) if GAIN else 1.0
    loss_V, mass_V = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)
    for start in range(0, vocabulary, STEP):
        at_V, log_q_V, log_p_V = _log_probs(start, logits, target, log_sum_q, log_sum_p, vocabulary, STEP)
        q_V, p_V = tl.exp(log_q_V), tl.exp(log_p_V)
        mass_V += tl.minimum(q_V, tl.exp(log_p_V + shift) if WHOLE else p_V)
        if NAME == "ce":
            loss_V += tl.where(at_V == token, -log_q_V, 0.0)
            slope_V = q_V - tl.where(at_V == token, 1.0, 0.0)
        else:
            loss_V += tl.where(p_V > 0, p_V * (log_p_V - log_q_V), 0.0)
            slope_V = q_V - p_V
        if SLOPE:
            tl.store(slope + at_V, (slope_V * factor).to(slope.dtype.element_ty), mask=at_V < vocabulary)
    tl.store(loss + c, tl.sum(loss_V, 0))
    tl.store(mass + c, tl.sum(mass_V, 0))
    tl.store(hit + c, best_q == best_p)


@triton.jit
def overlap(
    logits, target, label, loss, hit, mass, slope, whole, gain, vocabulary, logits_C, target_C, slope_C,
    NAME: tl.constexpr, SLOPE: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """tvd and lk. The overlap of distributions far apart underflows, so it is summed in the log domain too, for lk and its
    slope.
    """
    c = tl.program_id(0).to(tl.int64)
    logits, target, slope = logits + c * logits_C, target + c * target_C, slope + c * slope_C
    log_sum_q, best_q = _normalise(logits, vocabulary, STEP)
    log_sum_p, best_p = _normalise(target, vocabulary, STEP)
    shift, factor = _shift(whole + c, log_sum_p, WHOLE), tl.load(gain + c) if GAIN else 1.0
    whole_V = tl.zeros([STEP], tl.float32)
    mass_V, excess_V, top_V = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32), tl.full([STEP], LOWEST, tl.float32)
    sum_V, below_V = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)  # of min(p, q); of q where it is below p
    for start in range(0, vocabulary, STEP):
        _, log_q_V, log_p_V = _log_probs(start, logits, target, log_sum_q, log_sum_p, vocabulary, STEP)
        q_V, p_V, least_V = tl.exp(log_q_V), tl.exp(log_p_V), tl.minimum(log_q_V, log_p_V)
        mass_V += tl.minimum(q_V, p_V)
        excess_V += tl.maximum(p_V - q_V, 0.0)
        if WHOLE:
            whole_V += tl.minimum(q_V, tl.exp(log_p_V + shift))
        more_V, scale_V = least_V > top_V, tl.exp(-tl.abs(least_V - top_V))
        keep_V, add_V = tl.where(more_V, scale_V, 1.0), tl.where(more_V, 1.0, scale_V)
        sum_V = sum_V * keep_V + add_V
        below_V = below_V * keep_V + tl.where(log_q_V < log_p_V, add_V, 0.0)
        top_V = tl.maximum(top_V, least_V)
    top = tl.max(top_V, 0)
    scale_V = tl.exp(top_V - top)
    total, shared = tl.sum(sum_V * scale_V, 0), tl.sum(mass_V, 0)
    below = tl.sum(below_V * scale_V, 0) / tl.where(total > 0, total, 1.0)
    if NAME == "lk":
        lift = -top - tl.log(total)
        tl.store(loss + c, lift)
    else:
        lift, below = 0.0, below * shared
        tl.store(loss + c, tl.sum(excess_V, 0))
    tl.store(mass + c, tl.sum(whole_V, 0) if WHOLE else shared)
    tl.store(hit + c, best_q == best_p)
    if SLOPE:
        for start in range(0, vocabulary, STEP):
            at_V, log_q_V, log_p_V = _log_probs(start, logits, target, log_sum_q, log_sum_p, vocabulary, STEP)
            pull_V = tl.where(log_q_V < log_p_V, tl.exp(log_q_V + lift), 0.0)
            slope_V = tl.exp(log_q_V) * below - pull_V
            tl.store(slope + at_V, (slope_V * factor).to(slope.dtype.element_ty), mask=at_V < vocabulary)


@triton.jit
def _pull(log_q_V, log_p_V, NAME: tl.constexpr):
    """(each token's part of the loss, dloss/dq up to a constant); 0 for tokens without q."""
    q_V, p_V = tl.exp(log_q_V), tl.exp(log_p_V)
    if NAME == "rkl":
        pull_V = tl.where(q_V > 0, log_q_V - log_p_V, 0.0)
        part_V = q_V * pull_V
    else:
        log_m_V = tl.log((q_V + p_V) * 0.5)
        pull_V = tl.where(q_V > 0, 0.5 * (log_q_V - log_m_V), 0.0)
        part_V = q_V * pull_V + tl.where(p_V > 0, 0.5 * p_V * (log_p_V - log_m_V), 0.0)
    return part_V, pull_V


@triton.jit
def curved(
    logits, target, label, loss, hit, mass, slope, whole, gain, vocabulary, logits_C, target_C, slope_C,
    NAME: tl.constexpr, SLOPE: tl.constexpr, WHOLE: tl.constexpr, GAIN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """rkl and jsd: the slope at a token is q times the difference of dloss/dq from its mean under q."""
    c = tl.program_id(0).to(tl.int64)
    logits, target, slope = logits + c * logits_C, target + c * target_C, slope + c * slope_C
    log_sum_q, best_q = _normalise(logits, vocabulary, STEP)
    log_sum_p, best_p = _normalise(target, vocabulary, STEP)
    shift, factor = _shift(whole + c, log_sum_p, WHOLE), tl.load(gain + c) if GAIN else 1.0
    loss_V, mass_V, mean_V = tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32), tl.zeros([STEP], tl.float32)
    for start in range(0, vocabulary, STEP):
        _, log_q_V, log_p_V = _log_probs(start, logits, target, log_sum_q, log_sum_p, vocabulary, STEP)
        part_V, pull_V = _pull(log_q_V, log_p_V, NAME)
        loss_V += part_V
        mean_V += tl.exp(log_q_V) * pull_V
        mass_V += tl.minimum(tl.exp(log_q_V), tl.exp(log_p_V + shift))
    mean = tl.sum(mean_V, 0)
    tl.store(loss + c, tl.sum(loss_V, 0))
    tl.store(mass + c, tl.sum(mass_V, 0))
    tl.store(hit + c, best_q == best_p)
    if SLOPE:
        for start in range(0, vocabulary, STEP):
            at_V, log_q_V, log_p_V = _log_probs(start, logits, target, log_sum_q, log_sum_p, vocabulary, STEP)
            _, pull_V = _pull(log_q_V, log_p_V, NAME)
            slope_V = tl.exp(log_q_V) * (pull_V - mean)
            tl.store(slope + at_V, (slope_V * factor).to(slope.dtype.element_ty), mask=at_V < vocabulary)


def summarise(logits_CV: Tensor, log_sum_C: Tensor, best_C: Tensor) -> Launch:
    """The launch that fills the log-sum-exp of each row, and the index of its greatest value."""
    C, V = logits_CV.shape
    arguments = {"row": logits_CV, "log_sum": log_sum_C, "best": best_C, "vocabulary": V, "row_C": logits_CV.stride(0)}
    return Launch(summary, (C,), arguments | {"STEP": min(STEP, max(triton.next_power_of_2(V), 128))}, 8)


KERNELS = {"ce": pointwise, "kl": pointwise, "tvd": overlap, "lk": overlap, "rkl": curved, "jsd": curved}


def launch(
    logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor, name: str,
    loss_C: Tensor, hit_C: Tensor, mass_C: Tensor, slope_CV: Tensor | None, whole_C: Tensor | None = None,
    gain_C: Tensor | None = None,
) -> Launch:  # fmt: skip
    """The launch that fills loss, hit, mass and slope. slope_CV may be logits_CV, since every step reads its part before
    writing it. whole_C, gain_C: as for `ops.divergence.scores`.
    """
    C, V = logits_CV.shape
    out_CV = logits_CV if slope_CV is None else slope_CV
    arguments = {
        "logits": logits_CV, "target": target_logits_CV, "label": label_C.contiguous(), "loss": loss_C,
        "hit": hit_C, "mass": mass_C, "slope": out_CV, "whole": loss_C if whole_C is None else whole_C.contiguous(),
        "gain": loss_C if gain_C is None else gain_C.contiguous(), "GAIN": gain_C is not None,
        "vocabulary": V, "logits_C": logits_CV.stride(0), "target_C": target_logits_CV.stride(0),
        "slope_C": out_CV.stride(0), "NAME": name, "SLOPE": slope_CV is not None, "WHOLE": whole_C is not None,
        "STEP": min(STEP, max(triton.next_power_of_2(V), 128)),
    }  # fmt: skip
    return Launch(KERNELS[name], (C,), arguments, 8)
