"""Attention of a drafter that is trained on its own outputs: step i at index t sees step 0 causally over 0..t, and index t
alone of steps 1..i (arXiv 2503.01840, section 3.1; the aligned forwards of arXiv 2408.15766 see the same).

No [T, T] tensor outlives a block of rows. A fused kernel computes attention to step 0's keys. Scores of the later steps are
products of one index's query and key; they are merged with the kernel's result by log-sum-exp. Memory is O(T) for each step.
The backward pass gives the fused kernel the merged output and log-sum-exp, so that it recomputes the merged softmax.

Shapes: B rows, T positions, R rows of a block, P keys of a block, h heads, g KV heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from drafttrain.model.causal_attention import by_document, sinks_gradient, with_sinks
from drafttrain.model.masks import Documents
from drafttrain.ops.later_steps import dot, merged, merged_backward, wide

ROWS = 256  # queries whose scores are in memory at once, where there is no fused kernel
aten = torch.ops.aten


def unrolled(
    q_BhTD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    documents: Documents | None,
    window: int | None = None,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """[B, h, T, D]: attention of the last step's queries to keys and values [B, g, T, D] of each step; g divides h.

    documents: step 0's keys are seen within one document, and each is computed alone; None: every row is one. window: rotary
    positions that a query sees at most, its own included, more than there are steps; None: all. Step i's query at index t has
    the position t + i. sinks_h: one more score per head, whose share of the softmax adds nothing. Scores of keys are scaled by
    D ** -0.5.
    """
    first = _first_window(window, len(keys))

    def whole(q_BhTD: Tensor, *keys_values: Tensor) -> Tensor:
        out_BhTD: Tensor = _Unrolled.apply(q_BhTD, len(keys), first, sinks_h, *keys_values)
        return out_BhTD

    return by_document(whole, documents, q_BhTD, *keys, *values)


def _first_window(window: int | None, steps: int) -> int | None:
    """Indices that the last step's queries see of step 0, their own included."""
    if window is None:
        return None
    assert window >= steps, "the keys of all steps at a query's own index are within its window"
    return window - steps + 1


class _Unrolled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BhTD: Tensor, steps: int, window: int | None, sinks_h: Tensor | None, *keys_values: Tensor
    ) -> Tensor:
        keys, values = keys_values[:steps], keys_values[steps:]
        out_BhTD, joint_BhT = _causal(q_BhTD, keys[0], values[0], window)
        if sinks_h is not None:
            out_BhTD, joint_BhT = with_sinks(out_BhTD, joint_BhT, sinks_h[:, None])
        if steps > 1:
            out_BhTD, joint_BhT = merged(q_BhTD, out_BhTD, joint_BhT, keys[1:], values[1:])
        ctx.steps, ctx.window = steps, window
        ctx.save_for_backward(q_BhTD, out_BhTD, joint_BhT, sinks_h, *keys_values)
        return out_BhTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_BhTD = grads[0].contiguous()
        q_BhTD, out_BhTD, joint_BhT, sinks_h, *keys_values = ctx.saved_tensors
        keys, values = keys_values[: ctx.steps], keys_values[ctx.steps :]
        to_sinks = None
        if sinks_h is not None:
            to_sinks = sinks_gradient(grad_BhTD, out_BhTD, joint_BhT, sinks_h[:, None]).sum(1).to(sinks_h.dtype)
        to_q, to_k, to_v = _causal_backward(grad_BhTD, q_BhTD, keys[0], values[0], out_BhTD, joint_BhT, ctx.window)
        if ctx.steps == 1:
            return to_q, None, None, to_sinks, to_k, to_v
        to_q, to_keys, to_values = merged_backward(grad_BhTD, q_BhTD, out_BhTD, joint_BhT, keys[1:], values[1:], to_q)
        return to_q, None, None, to_sinks, to_k, *to_keys, to_v, *to_values


def _repeated(x_BgTD: Tensor, heads: int) -> Tensor:
    return x_BgTD.repeat_interleave(heads // x_BgTD.shape[1], 1)


def _shared(x_BhTD: Tensor, kv_heads: int) -> Tensor:
    """[B, g, T, D] the sum over the heads that share a KV head."""
    return x_BhTD if x_BhTD.shape[1] == kv_heads else x_BhTD.unflatten(1, (kv_heads, -1)).sum(2)


def _causal(q_BhTD: Tensor, k_BhTD: Tensor, v_BhTD: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp of the scores [B, h, T])."""
    kernel = _kernel(q_BhTD, window)
    if kernel is None or not _shares_keys(q_BhTD):
        k_BhTD, v_BhTD = (_repeated(x, q_BhTD.shape[1]) for x in (k_BhTD, v_BhTD))
    if kernel is not None:
        out_BhTD, lse_BhT = kernel(q_BhTD, k_BhTD, v_BhTD)
        return out_BhTD, lse_BhT[..., : q_BhTD.shape[2]]
    out_BhTD, lse_BhT = torch.empty_like(q_BhTD), wide(q_BhTD[..., 0]).clone()
    for query_slice, key_slice, score_BhRP in _blocks(q_BhTD, k_BhTD, window):
        lse_BhT[:, :, query_slice] = score_BhRP.logsumexp(-1)
        out_BhTD[:, :, query_slice] = score_BhRP.softmax(-1).to(q_BhTD.dtype) @ v_BhTD[:, :, key_slice]
    return out_BhTD, lse_BhT


def _causal_backward(
    grad_BhTD: Tensor,
    q_BhTD: Tensor,
    k_BhTD: Tensor,
    v_BhTD: Tensor,
    out_BhTD: Tensor,
    lse_BhT: Tensor,
    window: int | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v; the log-sum-exp and the output may include terms of later steps."""
    kernel, kv_heads = _kernel(q_BhTD, window), k_BhTD.shape[1]
    if kernel is not None and _shares_keys(q_BhTD):
        return _fused_backward(grad_BhTD, q_BhTD, k_BhTD, v_BhTD, out_BhTD, lse_BhT)
    k_BhTD, v_BhTD = (_repeated(x, q_BhTD.shape[1]) for x in (k_BhTD, v_BhTD))
    if kernel is not None:
        to_q, to_k, to_v = _fused_backward(grad_BhTD, q_BhTD, k_BhTD, v_BhTD, out_BhTD, lse_BhT)
        return to_q, _shared(to_k, kv_heads), _shared(to_v, kv_heads)
    to_q, to_k, to_v = torch.empty_like(q_BhTD), torch.zeros_like(k_BhTD), torch.zeros_like(v_BhTD)
    mean_BhT, scale = dot(grad_BhTD, out_BhTD), q_BhTD.shape[-1] ** -0.5
    for query_slice, key_slice, score_BhRP in _blocks(q_BhTD, k_BhTD, window):
        share_BhRP = (score_BhRP - lse_BhT[:, :, query_slice, None]).exp()
        to_share_BhRP = (
            wide(grad_BhTD[:, :, query_slice] @ v_BhTD[:, :, key_slice].transpose(-1, -2)) - mean_BhT[:, :, query_slice, None]
        )
        slope_BhRP = (share_BhRP * to_share_BhRP * scale).to(q_BhTD.dtype)
        to_q[:, :, query_slice] = slope_BhRP @ k_BhTD[:, :, key_slice]
        to_k[:, :, key_slice] += slope_BhRP.transpose(-1, -2) @ q_BhTD[:, :, query_slice]
        to_v[:, :, key_slice] += share_BhRP.to(q_BhTD.dtype).transpose(-1, -2) @ grad_BhTD[:, :, query_slice]
    return to_q, _shared(to_k, kv_heads), _shared(to_v, kv_heads)


def _blocks(q_BhTD: Tensor, k_BhTD: Tensor, window: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, keys, their scores), block by block; scores of keys that are not seen are minus infinity."""
    T, device = q_BhTD.shape[2], q_BhTD.device
    max_distance = T if window is None else window
    for start in range(0, T, ROWS):
        stop = min(start + ROWS, T)
        query_slice, key_slice = slice(start, stop), slice(max(0, start - max_distance + 1), stop)
        score_BhRP = wide(q_BhTD[:, :, query_slice] @ k_BhTD[:, :, key_slice].transpose(-1, -2)) * q_BhTD.shape[-1] ** -0.5
        distance_RP = torch.arange(start, stop, device=device)[:, None] - torch.arange(key_slice.start, stop, device=device)
        yield query_slice, key_slice, score_BhRP.masked_fill((distance_RP < 0) | (distance_RP >= max_distance), -torch.inf)


def _kernel(q_BhTD: Tensor, window: int | None) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A fused causal attention that also returns its log-sum-exp; None: there is none for these queries, compute in blocks.

    The kernels have no window, so texts that are longer than theirs are computed in blocks. So are all on ROCm: the layout of
    its kernels' log-sum-exp is not known to be NVIDIA's.
    """
    if window is not None and window < q_BhTD.shape[2]:
        return None
    if q_BhTD.device.type == "cpu":
        return lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[:2]
    if not q_BhTD.is_cuda or torch.version.hip is not None or q_BhTD.shape[-1] % 8 or q_BhTD.dtype == torch.float64:
        return None
    if _flash(q_BhTD):
        return lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]
    return lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[:2]


def _shares_keys(q_BhTD: Tensor) -> bool:
    """Whether the kernel takes fewer heads of keys and values than of queries; the memory-efficient one does not."""
    return _cpu_kernel_shares_keys() if q_BhTD.device.type == "cpu" else _flash(q_BhTD)


@cache
def _cpu_kernel_shares_keys() -> bool:
    """Whether this version of torch has a kernel for CPUs that gives all heads the only KV head's values."""
    x_1218 = torch.arange(16.0).view(1, 2, 1, 8)  # one position: the output is the value; a second KV head is in memory
    out_1218, _ = aten._scaled_dot_product_flash_attention_for_cpu(x_1218, x_1218[:, :1], x_1218[:, :1], 0.0, True)
    return bool((out_1218 == x_1218[:, :1]).all())


def _flash(q_BhTD: Tensor) -> bool:
    return q_BhTD.dtype in (torch.float16, torch.bfloat16) and q_BhTD.shape[-1] <= 256


def _fused_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BhT: Tensor) -> tuple[Tensor, ...]:
    if not q.is_cuda:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse_BhT, 0.0, True)
        return tuple(gradients)
    T, seed = q.shape[2], torch.zeros(2, dtype=torch.uint64, device=q.device)  # read only where there is dropout
    if _flash(q):
        flash = aten._scaled_dot_product_flash_attention_backward
        return tuple(flash(grad, q, k, v, out, lse_BhT, None, None, T, T, 0.0, True, seed, seed))
    padded_BhT, seed = torch.nn.functional.pad(lse_BhT, (0, -T % 32), value=torch.inf), seed.long()  # the kernel's layout
    efficient, grad_input_mask = aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
    return tuple(efficient(grad, q, k, v, None, out, padded_BhT, seed[0], seed[1], 0.0, grad_input_mask, True)[:3])


def reference(
    q_BhTD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    documents: Documents | None,
    window: int | None = None,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """The twin of `unrolled`: all scores at once."""
    first = _first_window(window, len(keys))
    keys, values = ([_repeated(x, q_BhTD.shape[1]) for x in tensors] for tensors in (keys, values))
    T, scale = q_BhTD.shape[2], q_BhTD.shape[-1] ** -0.5
    mask_BTT = torch.ones(1, T, T, dtype=torch.bool, device=q_BhTD.device).tril()
    if documents is not None:
        mask_BTT = documents.dense()
    if first is not None:
        mask_BTT = mask_BTT.triu(1 - first)
    first_BhTT = (q_BhTD @ keys[0].transpose(-1, -2) * scale).masked_fill(~mask_BTT[:, None], -torch.inf)
    step_score_iBhT1 = [(q_BhTD * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
    sinks = [] if sinks_h is None else [sinks_h.to(q_BhTD.dtype).view(-1, 1, 1).expand(len(q_BhTD), -1, T, -1)]
    share_BhTP = wide(torch.cat([first_BhTT, *step_score_iBhT1, *sinks], -1)).softmax(-1).to(q_BhTD.dtype)
    out_BhTD = share_BhTP[..., :T] @ values[0]
    for i, value_BhTD in enumerate(values[1:]):
        out_BhTD = out_BhTD + share_BhTP[..., T + i : T + i + 1] * value_BhTD
    return out_BhTD
