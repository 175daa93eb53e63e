"""Divergence between the target distribution p and the draft distribution q, from both models' logits, with its gradient.

Shapes: C predictions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.ops import jit, library

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # [C] from log q_CV, log p_CV and label_C; differentiable in log q
FUSED = ("ce", "kl", "rkl", "jsd", "tvd", "lk")  # losses whose gradients are written by hand, here and as kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = {"cpu": 1 << 20}  # logits per pass of the twin, so that its intermediate results stay in the processor's cache
ETA = 3.0  # of lk_hybrid, as in the paper
COMPILED = {"kl": 0, "ce": 1, "tvd": 2}  # divergences of the CPU operator, by its numbers
ELSEWHERE = 1 << 24  # logits per pass on other devices: few launches, and little memory compared with a chunk


class Scores(NamedTuple):
    """Loss, top-1 agreement and overlap of each prediction."""

    loss_C: Tensor  # nats; tvd: within 0 and 1
    top1_C: Tensor  # whether p and q have the same most likely token
    acceptance_C: Tensor  # sum min(p, q)
    grad_logits_CV: Tensor | None  # dloss/dlogits


def scores(
    logits_CV: Tensor,
    target_logits_CV: Tensor,
    label_C: Tensor,
    name: str,
    want_grad: bool,
    out: Tensor | None = None,
    row_C: Tensor | None = None,
    whole_C: Tensor | None = None,
    grad_output_C: Tensor | None = None,
) -> Scores:
    """The loss `name` (`LOSSES`) of each prediction, its top-1 agreement and overlap, and the gradient in the logits' dtype if
    wanted. Raises ValueError for an unknown name.

    target_logits_CV may hold -inf. Among equally likely tokens the lowest index counts. out: receives the gradient; it may be
    logits_CV itself, which halves the memory. row_C: the row of target_logits_CV that each prediction is compared with; None:
    its own. No copy of all these rows is made. whole_C: log-sum-exp of the target's logits over a vocabulary of which these are
    a part; the overlap is then the one over all of it, where q has nothing outside the part. Not with row_C.
    grad_output_C: each row's gradient is multiplied by it.
    """
    if want_grad and out is None:
        out = torch.empty_like(logits_CV)
    if row_C is not None:
        assert whole_C is None
        return _of_rows(logits_CV, target_logits_CV, label_C, name, out if want_grad else None, row_C, grad_output_C)
    if name not in FUSED or not _serves(logits_CV, target_logits_CV, out):
        # before the gradient takes the logits' place
        acceptance_C = None if whole_C is None else _overlap_by_rows(logits_CV, target_logits_CV, whole_C)
        compiled = name in COMPILED and _compiled(logits_CV, target_logits_CV, label_C, out if want_grad else None)
        implementation = _on_cpu if compiled else _by_rows
        scored = implementation(logits_CV, target_logits_CV, label_C, name, out if want_grad else None)
        if grad_output_C is not None and scored.grad_logits_CV is not None:
            scored.grad_logits_CV.mul_(grad_output_C[:, None].to(scored.grad_logits_CV.dtype))
        return scored if acceptance_C is None else scored._replace(acceptance_C=acceptance_C)
    from drafttrain.kernels.triton import divergence as kernels

    scored = Scores(
        torch.empty_like(label_C, dtype=torch.float32),
        torch.empty_like(label_C, dtype=torch.bool),
        torch.empty_like(label_C, dtype=torch.float32),
        out if want_grad else None,
    )
    if len(label_C):
        kernels.launch(logits_CV, target_logits_CV, label_C, name, *scored, whole_C, grad_output_C).run()
    return scored


def _serves(logits_CV: Tensor, target_logits_CV: Tensor, out: Tensor | None) -> bool:
    tensors = [logits_CV, target_logits_CV] + ([] if out is None else [out])
    return all(x.dtype in DTYPES and x.stride(1) == 1 for x in tensors) and jit.serves(logits_CV)


def _compiled(logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor, out: Tensor | None) -> bool:
    tensors = [logits_CV, target_logits_CV] + ([] if out is None else [out])
    supported = all(x.device.type == "cpu" and x.dtype in DTYPES and x.is_contiguous() for x in tensors)
    return supported and label_C.is_contiguous() and library.serves(logits_CV)


def _on_cpu(logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor, name: str, out: Tensor | None) -> Scores:
    """By the compiled operator, which takes float32; other types are converted, some rows at a time."""
    loss_C, top1_C, acceptance_C = (torch.empty(len(label_C), dtype=t) for t in (torch.float32, torch.bool, torch.float32))
    single = all(x.dtype == torch.float32 for x in (logits_CV, target_logits_CV))
    rows = max(1, len(label_C)) if single else rows_at_once(logits_CV)
    for start in range(0, len(label_C), rows):
        chunk = slice(start, start + rows)
        logits_RV, grad_logits_RV = logits_CV[chunk].float(), None if out is None else out[chunk]
        wide_RV = (
            grad_logits_RV if grad_logits_RV is None or grad_logits_RV.dtype == torch.float32 else torch.empty_like(logits_RV)
        )
        outputs = loss_C[chunk], top1_C[chunk], acceptance_C[chunk], wide_RV
        torch.ops.drafttrain.divergence(logits_RV, target_logits_CV[chunk].float(), label_C[chunk], COMPILED[name], *outputs)
        if grad_logits_RV is not None and wide_RV is not None and wide_RV is not grad_logits_RV:
            grad_logits_RV.copy_(wide_RV)
    return Scores(loss_C, top1_C, acceptance_C, out)


def overlap(logits_CV: Tensor, target_logits_CV: Tensor, whole_C: Tensor) -> Tensor:
    """[C] sum min(p, q) over the whole vocabulary, as `scores` with whole_C; differentiable."""
    p_CV = (target_logits_CV.float() - whole_C[:, None]).exp()
    return torch.minimum(logits_CV.float().softmax(-1), p_CV).sum(-1)


def _overlap_by_rows(logits_CV: Tensor, target_logits_CV: Tensor, whole_C: Tensor) -> Tensor:
    """`overlap` on a part of the rows at a time."""
    rows = rows_at_once(logits_CV)
    chunks = zip(*(torch.split(x, rows) for x in (logits_CV, target_logits_CV, whole_C)), strict=True)
    return torch.cat([overlap(*chunk) for chunk in chunks])


def rows_at_once(logits_CV: Tensor) -> int:
    """Rows of these logits that plain torch works on at a time."""
    return max(1, AT_ONCE.get(logits_CV.device.type, ELSEWHERE) // max(1, logits_CV.shape[1]))


class Summary(NamedTuple):
    """Of rows of logits."""

    log_sum_C: Tensor  # log-sum-exp, in float32
    best_C: Tensor  # the likeliest token; the lowest one among equally likely ones


def summary(logits_CV: Tensor) -> Summary:
    """The `Summary` of each row of [C, V]: on a GPU one kernel, which reads the logits once."""
    if not _serves(logits_CV, logits_CV, None) or not len(logits_CV):
        return reference_summary(logits_CV)
    from drafttrain.kernels.triton import divergence as kernels

    row_summary = Summary(*(logits_CV.new_empty(len(logits_CV), dtype=dtype) for dtype in (torch.float32, torch.long)))
    kernels.summarise(logits_CV, *row_summary).run()
    return row_summary


def reference_summary(logits_CV: Tensor) -> Summary:
    """The plain-torch twin of `summary`, on a part of the rows at a time."""
    chunks = (logits_RV.float() for logits_RV in torch.split(logits_CV, rows_at_once(logits_CV)))
    log_sums, bests = zip(*((logits_RV.logsumexp(-1), logits_RV.argmax(-1)) for logits_RV in chunks), strict=True)
    return Summary(torch.cat(log_sums), torch.cat(bests))


def _of_rows(
    logits_CV: Tensor,
    target_logits_UV: Tensor,
    label_C: Tensor,
    name: str,
    out: Tensor | None,
    row_C: Tensor,
    grad_output_C: Tensor | None,
) -> Scores:
    """`scores` with chosen rows of the target's logits, which are copied for a part of the predictions at a time."""
    chunk_scores, rows = list[Scores](), rows_at_once(logits_CV)
    for start in range(0, max(len(label_C), 1), rows):
        chunk = slice(start, start + rows)
        grad_logits_RV, grad_output_R = (None if x is None else x[chunk] for x in (out, grad_output_C))
        chunk_inputs = (logits_CV[chunk], target_logits_UV[row_C[chunk]], label_C[chunk], name, out is not None, grad_logits_RV)
        chunk_scores.append(scores(*chunk_inputs, grad_output_C=grad_output_R))
    loss_C, top1_C, acceptance_C, _ = zip(*chunk_scores, strict=True)
    return Scores(torch.cat(loss_C), torch.cat(top1_C), torch.cat(acceptance_C), out)


def _by_rows(logits_CV: Tensor, target_logits_CV: Tensor, label_C: Tensor, name: str, out: Tensor | None) -> Scores:
    """`reference` on a part of the rows at a time, so that its memory does not grow with their number."""
    rows = rows_at_once(logits_CV)
    chunk_scores: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(label_C), 1), rows):
        chunk = slice(start, start + rows)
        grad_logits_RV = None if out is None else out[chunk]
        chunk_scores.append(
            reference(logits_CV[chunk], target_logits_CV[chunk], label_C[chunk], name, out is not None, grad_logits_RV)[:3]
        )
    loss_C, top1_C, acceptance_C = (torch.cat([columns[i] for columns in chunk_scores]) for i in range(3))
    return Scores(loss_C, top1_C, acceptance_C, out)


def reference(
    logits_CV: Tensor,
    target_logits_CV: Tensor,
    label_C: Tensor,
    name: str,
    want_grad: bool,
    out: Tensor | None = None,
) -> Scores:
    """The plain-torch twin of `scores`."""
    logits_CV, target_logits_CV, dtype = logits_CV.float(), target_logits_CV.float(), logits_CV.dtype
    log_q_CV, log_p_CV = logits_CV.log_softmax(-1), target_logits_CV.log_softmax(-1)
    top1_C = logits_CV.argmax(-1) == target_logits_CV.argmax(-1)  # on a CPU slow in half precision
    q_CV, p_CV = log_q_CV.exp(), log_p_CV.exp()
    acceptance_C = torch.minimum(q_CV, p_CV).sum(-1)
    if want_grad and name not in FUSED:
        loss_C, grad_logits_CV = _differentiated(name, logits_CV, log_p_CV, label_C)
    else:
        loss_C = divergence(name, log_q_CV, log_p_CV, label_C)
    if not want_grad:
        return Scores(loss_C, top1_C, acceptance_C, None)
    if name == "kl":
        grad_logits_CV = q_CV.sub_(p_CV)
    elif name == "ce":
        grad_logits_CV = q_CV.scatter_add_(1, label_C[:, None], -torch.ones_like(q_CV[:, :1]))
    elif name in ("rkl", "jsd"):
        log_r_CV = log_p_CV if name == "rkl" else _log_mean(log_q_CV, log_p_CV)
        pull_CV = torch.where(q_CV > 0, log_q_CV - log_r_CV, 0.0).mul_(1.0 if name == "rkl" else 0.5)
        grad_logits_CV = pull_CV.sub_(torch.linalg.vecdot(q_CV, pull_CV)[:, None]).mul_(q_CV)
    elif name in FUSED:
        # lk divides by the overlap, in the log domain because the overlap may underflow
        lift_C1 = loss_C[:, None] if name == "lk" else torch.zeros_like(loss_C[:, None])
        pull_CV = torch.where(log_q_CV < log_p_CV, (log_q_CV + lift_C1).exp(), 0.0)
        grad_logits_CV = q_CV.mul_(pull_CV.sum(-1, keepdim=True)).sub_(pull_CV)
    return Scores(loss_C, top1_C, acceptance_C, grad_logits_CV.to(dtype) if out is None else out.copy_(grad_logits_CV))


def cross_entropy(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """-log q(label)."""
    return -log_q_CV.gather(1, label_C[:, None])[:, 0]


def forward_kl(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """KL(p || q)."""
    return _relative(log_p_CV, log_q_CV)


def reverse_kl(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """KL(q || p)."""
    return _relative(log_q_CV, log_p_CV)


def jensen_shannon(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """The mean of KL(p || m) and KL(q || m), m = (p + q) / 2 (arXiv 2310.08461)."""
    log_m_CV = _log_mean(log_q_CV, log_p_CV)
    return 0.5 * (_relative(log_p_CV, log_m_CV) + _relative(log_q_CV, log_m_CV))


def total_variation(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """1 - sum min(p, q)."""
    return (log_p_CV.exp() - log_q_CV.exp()).clamp_min(0.0).sum(-1)


def log_acceptance(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """-log sum min(p, q) (arXiv 2602.23881), the `nla` of speculators."""
    return -torch.minimum(log_p_CV, log_q_CV).logsumexp(-1)


def hybrid_acceptance(log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w) TVD with w = exp(-3 sum min(p, q)), which has no gradient (arXiv 2602.23881)."""
    distance_C = total_variation(log_q_CV, log_p_CV, label_C)
    weight_C = (ETA * (distance_C.detach() - 1.0)).exp()
    return weight_C * forward_kl(log_q_CV, log_p_CV, label_C) + (1.0 - weight_C) * distance_C


# A new loss is a row here. Autograd differentiates it, some rows at a time, on every device.
LOSSES: dict[str, Loss] = {
    "ce": cross_entropy,
    "kl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
    "lk": log_acceptance,
    "lk_hybrid": hybrid_acceptance,
}
# Losses that do not read the label. Over a draft vocabulary they are learnt where the target's choice is in it, others only
# where the data's token is in it too.
OF_DISTRIBUTIONS = {"kl", "rkl", "jsd", "tvd", "lk", "lk_hybrid"}


def divergence(name: str, log_q_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> Tensor:
    """[C] the loss `name` from log-probabilities; differentiable. Raises ValueError for an unknown name."""
    if name not in LOSSES:
        raise ValueError(f"loss.name is {name!r}; choose {', '.join(LOSSES)}")
    return LOSSES[name](log_q_CV, log_p_CV, label_C)


def _differentiated(name: str, logits_CV: Tensor, log_p_CV: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor]:
    """(loss_C, dloss/dlogits) by autograd."""
    with torch.enable_grad():
        leaf_CV = logits_CV.detach().requires_grad_()
        loss_C = divergence(name, leaf_CV.log_softmax(-1), log_p_CV, label_C)
        (grad_logits_CV,) = torch.autograd.grad(loss_C.sum(), leaf_CV)
    return loss_C.detach(), grad_logits_CV


def _relative(log_a_CV: Tensor, log_b_CV: Tensor) -> Tensor:
    """KL(a || b), with 0 log 0 = 0."""
    log_ratio_CV = (log_a_CV - log_b_CV).nan_to_num_(0.0, posinf=torch.inf, neginf=0.0)
    entropy_C: Tensor = torch.linalg.vecdot(log_a_CV.exp(), log_ratio_CV)
    return entropy_C


def _log_mean(log_q_CV: Tensor, log_p_CV: Tensor) -> Tensor:
    """log of (p + q) / 2."""
    return torch.logaddexp(log_q_CV, log_p_CV) - math.log(2.0)
