"""Padded rows of another training loop as a batch, and a bounded buffer of sequences that a loop has fed, each with the
version of the target that made its states; or a record of the loop's own passes.

Shapes: B rows, T columns of the loop's tensors or positions of a sequence, N columns of the batch, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from drafttrain.core.errors import UserError
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.targets.live import LiveTarget
from drafttrain.targets.structure import CACHES, find_blocks

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


@dataclass(frozen=True, slots=True)
class ReplayedSequence:
    """One sequence."""

    token_T: Tensor
    mask_T: Tensor
    hidden: dict[int, Tensor]  # [T, H] by tap; empty: the target computes them when they are needed
    version: int  # of the target


class Replay:
    """Holds at most `capacity` sequences: a new one takes the place of the oldest."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.samples: deque[ReplayedSequence] = deque(maxlen=capacity)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, batch: TrainBatch, version: int) -> None:
        """Add every row of a right-padded batch."""
        for b, length in enumerate((batch.document_BT >= 0).sum(1).tolist()):
            hidden = {key: h[b, :length].clone() for key, h in batch.hidden.items()}
            if length > 1:
                self.samples.append(ReplayedSequence(batch.token_BT[b, :length], batch.mask_BT[b, :length], hidden, version))

    def state_dict(self) -> dict[str, Any]:
        """The sequences, and where the draws are."""
        samples = [[s.token_T, s.mask_T, s.hidden, s.version] for s in self.samples]
        return {"samples": samples, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Hold the sequences of a state instead, on this device."""
        self.samples = deque(maxlen=self.samples.maxlen)
        for token_T, mask_T, hidden, version in state["samples"]:
            states = {key: h.to(device) for key, h in hidden.items()}
            self.samples.append(ReplayedSequence(token_T.to(device), mask_T.to(device), states, version))
        self._generator.set_state(state["generator"])

    def drop_before(self, version: int) -> int:
        """Drop the samples of earlier versions; how many they were."""
        recent = [sample for sample in self.samples if sample.version >= version]
        dropped = len(self.samples) - len(recent)
        if dropped:
            self.samples = deque(recent, self.samples.maxlen)
        return dropped

    def draw(self, rows: int) -> TrainBatch | None:
        """A batch of at most so many different samples, all with states or all without; None: there is no sample."""
        if not self.samples:
            return None
        order = torch.randperm(len(self.samples), generator=self._generator).tolist()
        first = self.samples[order[0]]
        samples = [self.samples[i] for i in order if self.samples[i].hidden.keys() == first.hidden.keys()][:rows]
        token_BN = pad_sequence([sample.token_T for sample in samples], batch_first=True)
        mask_BN = pad_sequence([sample.mask_T for sample in samples], batch_first=True)
        real_BN = pad_sequence([torch.ones_like(sample.token_T) for sample in samples], batch_first=True)
        hidden = {key: pad_sequence([sample.hidden[key] for sample in samples], batch_first=True) for key in first.hidden}
        return batch_of(token_BN, real_BN, mask_BN, hidden)


NOT_A_TARGET = -100  # of transformers' labels


@dataclass(slots=True)
class Recorded:
    """One training pass of the model."""

    token_BT: Tensor
    attention_BT: Tensor | None
    mask_BT: Tensor | None  # supervised tokens, from the pass's labels; None: there were no labels
    hidden: dict[int, Tensor] = field(default_factory=dict)  # [B, T, H] by tap, detached


class PassRecorder:
    """Records tokens and states of a model's own training passes, so that a drafter needs no pass of its own.

    Hooks on the model record its passes with gradients over whole sequences, at most the `keep` last ones. Passes without
    gradients, such as generation, are not recorded, and recomputation of checkpointed blocks is not either.
    """

    def __init__(self, target: LiveTarget, taps: Taps, keep: int) -> None:
        self.passes: deque[Recorded] = deque(maxlen=keep)
        self._open: Recorded | None = None
        self._keys = taps.keys
        blocks = find_blocks(target.model, target.shape.blocks)
        self._handles = [
            target.outer.register_forward_pre_hook(self._begin, with_kwargs=True),
            target.outer.register_forward_hook(self._end, always_call=True),
            target.backbone.module.register_forward_hook(self._final),
            *(blocks[number].register_forward_hook(self._block(number)) for number in taps.blocks),
        ]

    def take(self) -> list[Recorded]:
        """The recorded passes, oldest first; they are forgotten here."""
        passes = list(self.passes)
        self.passes.clear()
        return passes

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_BT = kwargs.get("input_ids", args[0] if args else None)
        has_cache = any(kwargs.get(name) is not None for name in CACHES)
        is_training_pass = torch.is_grad_enabled() and module.training and not has_cache
        if not is_training_pass or token_BT is None or kwargs.get("position_ids") is not None:
            self._open = None
            return
        labels = kwargs.get("labels")
        mask_BT = None if labels is None else labels != NOT_A_TARGET
        self._open = Recorded(token_BT.detach(), kwargs.get("attention_mask"), mask_BT)

    def _block(self, block: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if self._open is not None:
                self._open.hidden[block] = (output[0] if isinstance(output, tuple) else output).detach()

        return keep

    def _final(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open is not None:
            self._open.hidden[FINAL] = output[0].detach()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        recorded, self._open = self._open, None
        if recorded is not None and all(key in recorded.hidden for key in (*self._keys, FINAL)):
            self.passes.append(recorded)
