"""Medusa: K heads on the target's last state, each predicting one position further (arXiv 2401.10774).

Shapes: B rows, N tree nodes, K heads, R ranks, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.drafter import Commit, Drafter
from drafttrain.drafters import Family
from drafttrain.errors import UserError
from drafttrain.layers import ResidualBlock
from drafttrain.ops.residual_heads import ResidualHeads, ranked, residual
from drafttrain.sampling import Sampling
from drafttrain.target import FINAL, LoraSpec, Taps, Target
from drafttrain.tree import DraftTree, Path, TreeShape, tuned_paths


@dataclass
class MedusaOptions:
    """K residual heads and how they start."""

    family: str = "medusa"
    heads: int = 4
    layers: int = 1  # residual blocks per head
    init: str = "copy"  # copy: own output matrices, from the target's. share: the target's own, frozen
    head_decay: float = 0.8  # head k (from 1) weighs head_decay ** k in the loss
    tree: list[list[int]] | None = None  # rank paths; None: searched on held-out text after training
    adapter: LoraSpec = field(default_factory=lambda: LoraSpec(rank=0))  # Medusa-2, from rank 1: the target is trained too


class MedusaHead(nn.Module):
    """`layers` distinct residual blocks, then the output matrix (section 2.1.1; the official code ties the blocks)."""

    def __init__(self, width: int, vocab: int, layers: int, own_output: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(layers))
        self.output = nn.Linear(width, vocab, bias=False) if own_output else None

    def forward(self, x_H: Tensor) -> Tensor:
        for block in self.blocks:
            x_H = block(x_H)
        return x_H


class Stack:
    """All heads' weights by kind, [K, out, in], so that decoding computes each layer of all heads as one product.

    Frozen heads become views of it, so that it takes no memory of its own; those in training are copied.
    """

    def __init__(self, heads: Sequence[MedusaHead]) -> None:
        self.heads = heads
        linears = zip(*([block.linear for block in head.blocks] for head in heads), strict=True)
        self.blocks = [(joined([m.weight for m in layer]), joined([m.bias for m in layer])) for layer in linears]
        outputs = [head.output.weight for head in heads if head.output is not None]
        self.output_KVH = joined(outputs) if outputs else None
        frozen = not next(heads[0].parameters()).requires_grad
        self.fused = None if self.output_KVH is None else ResidualHeads(self.blocks, self.output_KVH, frozen)

    @property
    def current(self) -> bool:
        """Whether the heads are still views of this."""
        first = next(self.heads[0].parameters())
        return not first.requires_grad and first.data_ptr() == self.blocks[0][0].data_ptr()


def joined(parameters: list[Tensor]) -> Tensor:
    whole = torch.stack([p.detach() for p in parameters])
    if not parameters[0].requires_grad:
        for p, part in zip(parameters, whole, strict=True):
            p.data = part
    return whole


@dataclass
class MedusaState:
    """The target's post-norm state at the last committed position, and the root token, per slot."""

    hidden_SH: Tensor
    root_S: Tensor
    shapes: list[TreeShape]  # by depth - 1, on the drafter's device; the last is the whole tree
    stack: Stack


class Medusa(Drafter):
    """Static-tree drafter: every head reads the same state, so the tree's tokens cost one pass."""

    def __init__(self, options: MedusaOptions, target: Target) -> None:
        super().__init__()
        shape = target.shape
        if options.heads < 1 or options.layers < 1:
            raise UserError(f"drafter.heads is {options.heads}, drafter.layers {options.layers}; both must be 1 or more")
        if options.heads + 2 > shape.max_positions:
            raise UserError(
                f"drafter.heads is {options.heads}; a context of {shape.max_positions} allows {shape.max_positions - 2}"
            )
        if options.init not in ("copy", "share"):
            raise UserError(f"drafter.init is {options.init!r}; choose copy or share")
        self.taps, self.draft_length, self.decay = Taps(final=True), options.heads, options.head_decay
        self.adapts = LoraSpec.of(options.adapter)
        own = options.init == "copy"
        heads = [MedusaHead(shape.hidden_size, shape.vocab_size, options.layers, own) for _ in range(options.heads)]
        for head in heads:
            if head.output is not None:
                head.output.weight.data.copy_(target.head_weight.detach())
        self.heads = nn.ModuleList(heads)
        self._width = shape.hidden_size
        self._target = [target]  # in a list: read, never trained or saved with the drafter
        self._fixed = options.tree is not None
        self._stack: Stack | None = None
        self.shape = self._checked(options.tree or [[0] * d for d in range(1, options.heads + 1)])

    def _checked(self, paths: Sequence[Sequence[int]]) -> TreeShape:
        shape = TreeShape.of(paths)
        if shape.max_depth > self.draft_length:
            raise UserError(
                f"drafter.tree reaches depth {shape.max_depth}; {self.draft_length} heads allow {self.draft_length}"
            )
        return shape

    def _output(self, k: int) -> Callable[[Tensor], Tensor]:
        """Head k's output matrix: its own, or the target's, which works in the target's dtype."""
        own: nn.Linear | None = self.heads[k].output  # type: ignore[assignment]
        return own if own is not None else self._shared

    def _shared(self, hidden_H: Tensor) -> Tensor:
        target = self._target[0]
        return target.head(hidden_H.to(target.head_weight.dtype))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Head k (from 0) predicts the token k + 2 positions after its source: one past the root for the first."""
        hidden_MH = batch.hidden[FINAL].flatten(0, 1)
        for k, head in enumerate(self.heads):
            pairs = batch.future(k + 2)
            yield Prediction(
                step=k,
                source_M=pairs.source_M,
                label_M=pairs.label_M,
                hidden_MH=head(hidden_MH[pairs.source_M]),
                head=self._output(k),
                weight=self.decay ** (k + 1),
            )

    def open(self, slots: int, max_len: int) -> MedusaState:
        like = next(self.heads.parameters())
        root_S = torch.zeros(slots, dtype=torch.long, device=like.device)
        if self._stack is None or not self._stack.current:
            self._stack = Stack(list(self.heads))  # type: ignore[arg-type]
        shapes = [
            TreeShape.of([p for p in self.shape.paths if len(p) <= depth]).to(like.device)
            for depth in range(1, self.shape.max_depth + 1)
        ]
        return MedusaState(like.new_zeros(slots, self._width), root_S, shapes, self._stack)

    def reset(self, state: MedusaState, slot_R: Tensor) -> None:
        state.hidden_SH[slot_R], state.root_S[slot_R] = 0.0, 0

    def observe(self, state: MedusaState, commit: Commit, slot_B: Tensor) -> None:
        last_B1, new_B1 = (commit.count_B - 1).clamp_min(0)[:, None], (commit.count_B > 0)[:, None]
        state_B1H = commit.hidden[FINAL].gather(1, last_B1[..., None].expand(-1, -1, self._width))
        held_BH, held_B = state.hidden_SH[slot_B], state.root_S[slot_B]  # of rows without a new position
        state.hidden_SH[slot_B] = torch.where(new_B1, state_B1H[:, 0].to(held_BH.dtype), held_BH)
        state.root_S[slot_B] = torch.where(new_B1[:, 0], commit.next_BA.gather(1, last_B1)[:, 0], held_B)

    def propose(self, state: MedusaState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        shape = state.shapes[min(depth or len(state.shapes), len(state.shapes)) - 1]
        state_BH, stack, ranks = state.hidden_SH[slot_B], state.stack, shape.max_rank + 1
        if stack.fused is not None:
            top_KBR = stack.fused.top(state_BH, shape.max_depth, ranks)
        else:
            top_KBR = ranked(self._shared(residual(stack.blocks, state_BH, shape.max_depth)), ranks)
        draft_BN = top_KBR[shape.depth_N[1:] - 1, :, shape.rank_N[1:]].T
        return DraftTree.static(torch.cat([state.root_S[slot_B][:, None], draft_BN], 1), shape)

    def mark(self, state: MedusaState, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        return state.hidden_SH[slot_B], state.root_S[slot_B]

    def rewind(self, state: MedusaState, slot_B: Tensor, mark: tuple[Tensor, Tensor]) -> None:
        state.hidden_SH[slot_B], state.root_S[slot_B] = mark

    def paths(self) -> list[Path]:
        return list(self.shape.paths)

    def tune(self, texts: Sequence[Tensor], nodes: int) -> None:
        if not self._fixed:
            self.shape = self._checked(tuned_paths(texts, nodes) or [(0,)])

    def decode_settings(self) -> dict[str, Any]:
        return {"tree": [list(p) for p in self.shape.paths]}

    def use_decode_settings(self, settings: dict[str, Any]) -> None:
        if "tree" in settings:
            self.shape = self._checked(settings["tree"])


FAMILY = Family("medusa", MedusaOptions, Medusa)
