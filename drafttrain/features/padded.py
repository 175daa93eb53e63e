"""Padded rows of another training loop as a batch.

Shapes: B rows, T columns of the loop's tensors, N columns of the batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Target

SEARCHED = 256  # tokens among which there is one whose embedding is finite


def batch_of(
    token_BT: Tensor, attention_BT: Tensor | None, mask_BT: Tensor | None, hidden: Mapping[int, Tensor] | None = None
) -> TrainBatch:
    """A batch of one document a row. Padding may be on either side: real tokens move to the row's beginning, states with them.

    attention_BT: nonzero on real tokens; None: all are. mask_BT: nonzero on supervised tokens; None: all real ones. A row's
    first token follows from nothing and is not supervised.

    Worked example:

        token       - - a b c     d e f - -
        the batch   a b c         d e f

    Raises UserError for tensors whose shapes do not fit together.
    """
    if token_BT.ndim != 2 or token_BT.is_floating_point():
        raise UserError(f"tokens are {list(token_BT.shape)} of {token_BT.dtype}; give integers [rows, positions]")
    real_BT = (torch.ones_like(token_BT) if attention_BT is None else attention_BT.to(token_BT.device)) != 0
    supervised_BT = real_BT if mask_BT is None else mask_BT != 0
    for name, tensor in (("attention", real_BT), ("mask", supervised_BT)):
        _check(name, tensor.shape, token_BT.shape)
    hidden = dict(hidden or {})
    for key, state_BTH in hidden.items():
        _check(f"state {key}", state_BTH.shape[:2], token_BT.shape)
    supervised_BT = supervised_BT.to(token_BT.device)
    order_BT = (~real_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(1, int(real_BT.sum(1).max()))]
    needs_move = bool(
        (order_BT != torch.arange(order_BT.shape[1], device=order_BT.device)).logical_and(real_BT.gather(1, order_BT)).any()
    )

    def placed(x: Tensor) -> Tensor:
        index = order_BT.to(x.device)
        if not needs_move:
            return x[:, : index.shape[1]]
        return x.gather(1, index if x.ndim == 2 else index[..., None].expand(-1, -1, x.shape[-1]))

    real_BN = placed(real_BT)
    token_BN = placed(token_BT).masked_fill(~real_BN, 0).long()
    mask_BN = placed(supervised_BT) & real_BN
    mask_BN[:, 0] = False
    document_BN = torch.where(real_BN, 0, -1)
    position_BN = torch.arange(token_BN.shape[1], device=token_BN.device).expand_as(token_BN).contiguous()
    return TrainBatch(token_BN, position_BN, document_BN, mask_BN, {key: placed(h.detach()) for key, h in hidden.items()})


def rows_of(batch: TrainBatch, first: int, last: int) -> TrainBatch:
    """The rows from `first` to before `last`."""
    rows = slice(first, last)
    hidden = {key: state_BTH[rows] for key, state_BTH in batch.hidden.items()}
    return TrainBatch(batch.token_BT[rows], batch.position_BT[rows], batch.document_BT[rows], batch.mask_BT[rows], hidden)


@torch.no_grad()
def finite_token(target: Target) -> int:
    """The lowest token whose embedding is finite, for padding in the place of a row that is left out."""
    token_N = torch.arange(min(SEARCHED, target.shape.vocab_size), device=target.device)
    return int(target.embed(token_N).isfinite().all(-1).to(torch.uint8).argmax())


def _check(name: str, shape: torch.Size, expected: torch.Size) -> None:
    if shape != expected:
        raise UserError(f"{name} is of {list(shape)}, the tokens are {list(expected)}; give one value for each token")
