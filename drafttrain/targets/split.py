"""Targets that several processes share: each holds a slice of every block and of the head (arXiv 1909.08053, section 3), or a
shard of all weights of the blocks (`ShardedTarget`).

Of slices, the q, k, v, gate and up projections keep this process's output rows (whole heads). The projections after them keep
the input columns that belong to those rows, and one all-reduce follows each of them. The head keeps a slice of the vocabulary,
which a gather completes. Embedding and norms are whole on every process.

Shapes: B rows, N positions, T columns of a sequence, R logit rows, H hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from drafttrain.core.errors import UserError
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.low_rank import LowRank
from drafttrain.model.masks import Documents
from drafttrain.model.shapes import TargetShape
from drafttrain.model.target import Taps, TargetOut
from drafttrain.targets.attention import LayerMasks
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.parallel import Part
from drafttrain.targets.probe import Reference, reference_of
from drafttrain.targets.structure import find_backbone, find_blocks, fingerprint_of, shape_of


class Shards(Protocol):
    """The library that shards weights; training provides it."""

    def loading(self) -> AbstractContextManager[None]:
        """A context in which a model is sharded while it is loaded: only one parameter at a time is whole."""
        ...

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which these parameters are whole on every process."""
        ...

    def start(self, blocks: nn.ModuleList) -> nn.Module:
        """A module that calls its first argument with the others: one pass over the blocks, which gathers and drops weights."""
        ...

    def free(self) -> None:
        """Drop this process's shards. The model cannot be used afterwards."""
        ...


class ShardedTarget(HFTarget):
    """A frozen target whose blocks' weights are sharded over the training processes (ZeRO-3, arXiv 1910.02054, section 5.3).

    Every process runs its own batch. A block's weights are gathered before it runs and dropped afterwards. All processes make
    the same calls in the same order. Embedding, last norm and head are whole on every process: losses and drafters read them
    throughout a step, in numbers of chunks that differ between processes, so that sharding them would not lower the peak.

    The model was loaded within `shards.loading()`.
    """

    def __init__(self, model: PreTrainedModel, shards: Shards, stop_ids: frozenset[int] = frozenset()) -> None:
        self.shards = shards
        model.requires_grad_(False).eval()
        blocks = find_blocks(model, shape_of(model.config.get_text_config()).blocks)
        make_whole(model, blocks, shards)
        one_pass(find_backbone(model, len(blocks)), shards.start(blocks))
        super().__init__(model, stop_ids)

    capture_reason = "its weights are spread over processes"

    def _fingerprint(self) -> str:
        return fingerprint_of(self.model, lambda parameter: self.shards.gathered([parameter]))

    def pruned(self, blocks: int) -> HFTarget:
        first = list(find_blocks(self.model, self.shape.blocks))[: max(blocks, 0)]
        with self.shards.gathered(p for block in first for p in block.parameters()):
            return super().pruned(blocks)

    def shallow(self, blocks: int) -> NoReturn:
        raise UserError(
            "this drafter runs the target's first blocks by themselves, and they are sharded over processes; choose a family "
            "with its own layers, or a target that fits one device"
        )

    def with_added(self, added: Mapping[str, LowRank]) -> NoReturn:
        raise UserError(
            "this drafter trains through the target's blocks, and they are sharded over processes; choose a family with its "
            "own layers, or set target.placement=replicated"
        )

    def _trainable(self, model: PreTrainedModel) -> HFTarget:
        runner = HFTarget if why_not(model) else FastTarget
        return runner(model, self.stop_ids, frozen=False)

    def free(self) -> None:
        self.shards.free()
        super().free()


@torch.no_grad()
def make_whole(model: PreTrainedModel, blocks: nn.ModuleList, shards: Shards) -> None:
    """Replace all parameters outside the blocks by unsharded ones. Tied parameters stay tied."""
    block_param_ids, unsharded = {id(p) for p in blocks.parameters()}, dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in block_param_ids:
                continue
            if id(parameter) not in unsharded:
                with shards.gathered([parameter]):
                    unsharded[id(parameter)] = nn.Parameter(parameter.data.clone(), requires_grad=False)
            setattr(module, name, unsharded[id(parameter)])


def one_pass(backbone: Any, trunk: nn.Module) -> None:
    """Send every forward of the backbone through the trunk."""
    original_forward = backbone.forward

    @wraps(original_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs: Tensor | Any = trunk(original_forward, *args, **kwargs)
        return outputs

    backbone.forward = forward


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Facts about the whole model, taken before it is split."""

    fingerprint: str
    # on the CPU, where it was loaded, unless tied to the embedding: drafters start from it, no step reads it
    head_weight: Tensor
    reference: Reference  # the probe's


class SplitTarget(FastTarget):
    """One process's part of a FastTarget. All processes of its group make the same calls in the same order."""

    splits_head = True

    def __init__(self, model: PreTrainedModel, whole: WholeModel, part: Part, stop_ids: frozenset[int] = frozenset()) -> None:
        self.part, self.whole = part, whole
        super().__init__(model, stop_ids)

    @property
    def head_weight(self) -> Tensor:
        return self.whole.head_weight

    def _fingerprint(self) -> str:
        return self.whole.fingerprint

    def reference(self, draw: int = 0) -> Reference | None:
        return self.whole.reference if draw == self.whole.reference.draw else None

    def pruned(self, blocks: int) -> NoReturn:
        raise UserError(
            f"this drafter copies whole blocks of the target, and each of {self.part.size} processes that share it "
            "holds a slice of them; choose a family with its own layers, or a target that fits one device"
        )


def split_target(
    model: PreTrainedModel,
    part: Part,
    device: torch.device,
    stop_ids: frozenset[int] = frozenset(),
    kind: type[SplitTarget] = SplitTarget,
) -> SplitTarget:
    """Split a whole model where it was loaded and move this process's part to the device, which never holds more than that."""
    model.requires_grad_(False).eval()
    whole_model = whole_model_of(model, part)
    split_blocks(model, part)
    if kind.splits_head:
        split_head(model, part)
    return kind(model.to(device), whole_model, part, stop_ids)  # type: ignore[arg-type]


def whole_model_of(model: Any, part: Part) -> WholeModel:
    """Facts about the model before it is split.

    Only the first process runs the whole model's forward, with all cores while the others wait. So the others need not read all
    weights.
    """
    threads = torch.get_num_threads()
    if part.first:
        torch.set_num_threads(max(threads, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))
    reach = LayerMasks(model.config.get_text_config()).longest
    reference = part.share(reference_of(model, reach) if part.first else Reference({}, 0.0))
    torch.set_num_threads(threads)
    return WholeModel(fingerprint_of(model), model.get_output_embeddings().weight, reference)


def check_divides(shape: TargetShape, size: int) -> None:
    """Raise UserError unless `size` processes can share a target of this shape."""
    for dimension, count in (("KV heads", shape.kv_heads), ("MLP rows", shape.intermediate_size)):
        if count % size:
            sizes = [n for n in range(2, shape.kv_heads + 1) if shape.kv_heads % n == shape.intermediate_size % n == 0]
            advice = f"set it to {' or '.join(map(str, sizes))}" if sizes else "this target runs in one process, leave it out"
            raise UserError(
                f"target.tensor_parallel is {size}, which does not divide the target's {count} {dimension}; {advice}"
            )


@torch.no_grad()
def split_blocks(model: Any, part: Part) -> None:
    """Keep copies of this process's slices of a Llama-like model's blocks; the rest is freed on the way.

    The model's own forward stays correct in lock step: a hook on each sliced module completes its product.
    """
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _keep_rows(linear, part)
        for linear in (attention.o_proj, mlp.down_proj):
            _keep_columns(linear, part)
            linear.register_forward_hook(lambda module, args, out: part.sum(out))


@torch.no_grad()
def split_head(model: Any, part: Part) -> None:
    """Keep this process's rows of the head; a hook gathers the logits of all processes."""
    head, vocabulary = model.get_output_embeddings(), model.get_output_embeddings().out_features
    _keep_rows(head, part)
    head.register_forward_hook(lambda module, args, out: part.joined(out, vocabulary))


def _keep_rows(linear: nn.Linear, part: Part) -> None:
    """Keep this process's output rows. If the number does not divide, the last process's rows are padded with zeros."""
    rows = -(-linear.out_features // part.size)
    start = min(part.rank * rows, linear.out_features)

    def filled(p: Tensor) -> Tensor:
        local_rows = p[start : start + rows]
        return F.pad(local_rows, (0, 0) * (p.ndim - 1) + (0, rows - len(local_rows))).clone()

    _put(linear, filled(linear.weight), None if linear.bias is None else filled(linear.bias))


def _keep_columns(linear: nn.Linear, part: Part) -> None:
    """Keep this process's input columns. Only the first process keeps the bias, since the all-reduce would add it up."""
    weight = linear.weight.chunk(part.size, 1)[part.rank].clone(memory_format=torch.contiguous_format)
    bias = None if linear.bias is None else linear.bias * (1.0 if part.first else 0.0)
    _put(linear, weight, bias)


def _put(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    linear.out_features, linear.in_features = weight.shape


class RoundRobinTarget(SplitTarget):
    """A split target in training: each process has its own batch, and all compute the batches one after another.

    In turn k all run process k's batch, each with its slices, and process k keeps the result. The work per token is that of a
    whole target, divided among the processes. Batches and their arithmetic are those of replicated targets, and no batch is
    padded to the length of another. Embedding, last norm and head are whole on every process.

    With a cache as SplitTarget: the same input everywhere. Without one, each process passes its own sequences.
    """

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
