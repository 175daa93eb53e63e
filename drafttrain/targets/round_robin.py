"""A split target for training: each process has its own batch, and all processes compute the batches one after another.

In turn k all processes run process k's batch, each with its slices, and process k keeps the result. The work per token is that
of a whole target, divided among the processes. Batches and their arithmetic are those of replicated targets, and no batch is
padded to the length of another. Embedding, last norm and head are whole on every process.

Shapes: B rows, N positions, R logit rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import Documents
from drafttrain.model.target import Taps, TargetOut
from drafttrain.targets.parallel import Part
from drafttrain.targets.split import SplitTarget


class RoundRobinTarget(SplitTarget):
    """With a cache as SplitTarget: the same input everywhere. Without one, each process passes its own sequences."""

    splits_head = False

    @property
    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def head(self, hidden_H: Tensor) -> Tensor:
        return self._head(hidden_H)

    def forward(
        self,
        token_BN: Tensor,
        kv: KVCache | None,
        ancestor_BNN: Tensor | Documents | None,
        position_BN: Tensor,
        taps: Taps,
        logit_row_BR: Tensor | None = None,
    ) -> TargetOut:
        if kv is not None:
            return super().forward(token_BN, kv, ancestor_BNN, position_BN, taps, logit_row_BR)
        assert not isinstance(ancestor_BNN, Tensor), "whole sequences are causal within their documents"
        shapes, local_out = self._shapes(token_BN, ancestor_BNN is not None), None
        for turn, (B, N, has_documents) in enumerate(shapes):
            is_local = turn == self.part.rank
            tokens_BN = self._broadcast(turn, token_BN if is_local else token_BN.new_empty(B, N))
            positions_BN = self._broadcast(turn, position_BN if is_local else position_BN.new_empty(B, N))
            sees = None
            if has_documents:
                number_BN = ancestor_BNN.number_BT if is_local and ancestor_BNN is not None else torch.empty_like(tokens_BN)
                sees = Documents(self._broadcast(turn, number_BN))
            rows_BR = logit_row_BR if is_local else tokens_BN[:, :0]
            out = super().forward(tokens_BN, None, sees, positions_BN, taps, rows_BR)
            local_out = out if is_local else local_out
        assert local_out is not None
        return local_out

    def _shapes(self, token_BN: Tensor, has_documents: bool) -> list[list[int]]:
        """[rows, positions, whether a row holds several documents] of every process's batch."""
        local_shape = torch.tensor([*token_BN.shape, has_documents], device=token_BN.device)
        all_3 = [torch.empty_like(local_shape) for _ in range(self.part.size)]
        distributed.all_gather(all_3, local_shape, group=self.part.group)
        return torch.stack(all_3).tolist()

    def _broadcast(self, turn: int, tensor: Tensor) -> Tensor:
        """Process `turn`'s tensor, on every process."""
        tensor = tensor.contiguous()
        distributed.broadcast(tensor, group=self.part.group, group_src=turn)
        return tensor


def part_among_neighbours(size: int) -> Part:
    """This process's part among `size` neighbours of the default group, which share a target.

    The default group's size must be a multiple of `size`.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    groups = [distributed.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return Part(rank % size, size, groups[rank // size])
