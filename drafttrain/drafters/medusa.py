"""Medusa: K heads on the target's last state, each predicting one position further (arXiv 2401.10774).

Shapes: B rows, N tree nodes, K heads, R ranks, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.dynamic_tree import StaticTree
from drafttrain.drafters.common.pending import LastState
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.options import MedusaOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter, FrozenRef
from drafttrain.model.layers import ResidualBlock, recomputed
from drafttrain.model.lora import LoraSpec
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.ops.residual_heads import ResidualHeads, ranked, residual


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

    Frozen heads become views of these tensors, so that they take no extra memory; heads in training are copied.
    """

    def __init__(self, heads: Sequence[MedusaHead]) -> None:
        self.heads = heads
        linears = zip(*([block.linear for block in head.blocks] for head in heads), strict=True)
        self.blocks = [(joined([m.weight for m in layer]), joined([m.bias for m in layer])) for layer in linears]
        outputs = [head.output.weight for head in heads if head.output is not None]
        self.output_KVH = joined(outputs) if outputs else None
        self.fused = None if self.output_KVH is None else ResidualHeads(self.blocks, self.output_KVH)

    @property
    def current(self) -> bool:
        """Whether the heads are still views of these tensors."""
        first = next(self.heads[0].parameters())
        return not first.requires_grad and first.data_ptr() == self.blocks[0][0].data_ptr()


def joined(parameters: list[Tensor]) -> Tensor:
    stacked = torch.stack([p.detach() for p in parameters])
    if not parameters[0].requires_grad:
        for p, view in zip(parameters, stacked, strict=True):
            p.data = view
    return stacked


class Medusa(Drafter):
    """Every head reads the same state, so that all tokens of a tree, static or dynamic, cost one pass."""

    proposal: TreeProposal
    revertible = True
    images = True

    def __init__(self, options: MedusaOptions, target: Target) -> None:
        shape = target.shape
        if options.heads + 2 > shape.max_positions:
            raise UserError(
                f"drafter.heads is {options.heads}; a context of {shape.max_positions} allows {shape.max_positions - 2}"
            )
        adapts = LoraSpec.of(options.adapter)
        super().__init__(TreeProposal(options, options.heads, target, independent=True))
        self.taps, self.decay, self.adapts = Taps(final=True), options.head_decay, adapts
        copies_head = options.init == "copy"
        heads = [MedusaHead(shape.hidden_size, shape.vocab_size, options.layers, copies_head) for _ in range(options.heads)]
        for head in heads:
            if head.output is not None:
                head.output.weight.data.copy_(target.head_weight.detach())
        self.heads = nn.ModuleList(heads)
        self.width = shape.hidden_size
        self._target = FrozenRef(target)
        self._stack: Stack | None = None

    def _output(self, k: int) -> Callable[[Tensor], Tensor]:
        """Head k's output matrix: its own, or the target's, which works in the target's dtype."""
        output: nn.Linear | None = self.heads[k].output  # type: ignore[assignment]
        return output if output is not None else self.shared_head

    def shared_head(self, hidden_H: Tensor) -> Tensor:
        """[..., V] logits by the target's head."""
        target = self._target.module
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
                hidden_MH=recomputed(self.recomputes, head, hidden_MH[pairs.source_M]),
                head=self._output(k),
                weight=self.decay ** (k + 1),
            )

    def stack(self) -> Stack:
        """The heads' weights as decoding needs them; made again where the heads have changed."""
        if self._stack is None or not self._stack.current:
            self._stack = Stack(list(self.heads))  # type: ignore[arg-type]
        return self._stack

    def open(self, slots: int, max_len: int) -> MedusaState:
        return MedusaState(self, slots)


class MedusaState(LastState):
    """The state that the heads read, and the tree that their choices make."""

    def __init__(self, drafter: Medusa, slots: int) -> None:
        parameter = next(drafter.heads.parameters())
        self.stack = drafter.stack()
        super().__init__(slots, drafter.width, parameter)
        self.drafter, self.grower = drafter, drafter.proposal.grower(parameter.device)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        state_BH, root_B = self.hidden_SH[slot_B], self.root_S[slot_B]
        if not isinstance(self.grower, StaticTree):
            return self._grown(state_BH, root_B, sampling, depth)
        shapes, stack = self.grower.shapes, self.stack
        shape = shapes[min(depth or len(shapes), len(shapes)) - 1]
        ranks = shape.max_rank + 1
        if stack.fused is not None:
            top_KBR = stack.fused.top(state_BH, shape.max_depth, ranks)
        else:
            top_KBR = ranked(self.drafter.shared_head(residual(stack.blocks, state_BH, shape.max_depth)), ranks)
        draft_BN = top_KBR[shape.depth_N[1:] - 1, :, shape.rank_N[1:]].T
        return DraftTree.static(torch.cat([root_B[:, None], draft_BN], 1), shape)

    def _grown(self, state_BH: Tensor, root_B: Tensor, sampling: Sampling, depth: int | None) -> DraftTree:
        """The likeliest paths by the product of the heads' probabilities: heads do not see each other's choices."""
        stack, longest = self.stack, self.drafter.draft_length
        x_KBH = residual(stack.blocks, state_BH, min(longest, depth or longest))
        if stack.output_KVH is None:
            logits_KBV = self.drafter.shared_head(x_KBH)
        else:
            logits_KBV = torch.bmm(x_KBH, stack.output_KVH[: len(x_KBH)].transpose(1, 2))
        return self.grower.from_slots(root_B, logits_KBV.transpose(0, 1), None, sampling)


FAMILY = Family("medusa", MedusaOptions, Medusa, early=3)
