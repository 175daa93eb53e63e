"""Drafters of few attention layers that read a token and the state before it, and feed their own state back.

Shapes: B rows, T positions, A pending positions, W nodes, M predictions, h heads, D head width, H hidden, I input width of
attention, V the drafter's vocabulary.

At index t the layer reads the token x[t+1] and the state at t: the target's state where it is known, else the layer's own. Its
output at t is the state of t + 1, from which x[t+2] is predicted. In training on own outputs, step i reads at index t the token
x[t+1+i] and its own state of step i-1 *at the same index*, and predicts x[t+2+i].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.dynamic_tree import Scored, TreeLevel
from drafttrain.drafters.common.pending import CachedState
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.model.batch import Pairs, TrainBatch
from drafttrain.model.cached_layers import CachedLayers, FusedLayers
from drafttrain.model.drafter import Candidates, Commit, Drafter, FrozenRef, draft_chain
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.layers import Attention, DecoderLayer, recomputed
from drafttrain.model.target import Target
from drafttrain.model.unrolled_attention import unrolled


class Passes(Protocol):
    """A session's KV cache of a drafter's layers, as `CachedLayers`."""

    kv: KVCache

    def meta(
        self, position_BN: Tensor, ancestor_BNN: Tensor | None = None, bits_BNw: Tensor | None = None, earlier: int = 0
    ) -> Any:
        """What the layers' `run` needs to know of one pass; arguments as for `CachedLayers.meta`."""
        ...

    def after_prefix(self, columns: int) -> Tensor:
        """As `CachedPositions.after_prefix`."""
        ...

    def keep_first(self, count_B: Tensor) -> None:
        """As `CachedPositions.keep_first`."""
        ...


class Runs(Protocol):
    """Layers in decoding."""

    def run(self, x_BNH: Tensor, meta: Any, read_BNX: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(x, delta), as `FusedLayers.run`; delta None: the output is x."""
        ...


class FeedsBack(Drafter):
    """A family gives what is before its layers (`fuse`, `enter`), what is after them (`normed`, `head`), and the layers: in
    training (`unroll`) and in decoding (`decoding_layers`, `passes`)."""

    proposal: TreeProposal
    revertible = True
    norm_output = False  # the normed state goes to the next step too
    _target: FrozenRef[Target]

    def __init__(self, proposal: TreeProposal, target: Target, steps: int) -> None:
        """steps: of training on own outputs."""
        super().__init__(proposal)
        self.samples = proposal.kind == "chain"
        self.steps, self._target = steps, FrozenRef(target)

    @property
    @abstractmethod
    def decoding_layers(self) -> Runs:
        """The layers as decoding runs them."""

    @abstractmethod
    def passes(self, slots: int, positions: int) -> Passes:
        """An empty cache of the layers."""

    @abstractmethod
    def unroll(
        self, batch: TrainBatch, state_BTH: Tensor, steps: int, detach: bool = False
    ) -> Iterator[tuple[int, Pairs, Tensor]]:
        """(step, pairs, new state [M, H] at their sources) of each step. detach: no gradient flows from step to step."""

    @abstractmethod
    def fuse(self, hidden: dict[int, Tensor]) -> Tensor:
        """[..., H] the state at committed positions, from the target's states there."""

    @abstractmethod
    def enter(self, token_BN: Tensor, state_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual, [B, N, H]; the input of attention, [B, N, I])."""

    @abstractmethod
    def normed(self, x_H: Tensor, delta_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + delta, the input of the head), both [..., H]. The sum is the layer's output."""

    @abstractmethod
    def head(self, normed_H: Tensor) -> Tensor:
        """[..., V] logits."""

    def fed_back(self, state_H: Tensor) -> Tensor:
        """[..., H] the new state, from the layer's output: for `logits` and for the next step."""
        return self.normed(state_H)[1].to(state_H.dtype) if self.norm_output else state_H

    def logits(self, state_H: Tensor) -> Tensor:
        """[..., V] from a state of `fed_back`."""
        return self.head(state_H if self.norm_output else self.normed(state_H)[1])

    def scored(self, x_BNH: Tensor, delta_BNH: Tensor | None) -> Scored:
        """The scores of nodes whose layer output is x + delta."""
        state_BNH, normed_BNH = self.normed(x_BNH, delta_BNH)
        return Scored(self.head(normed_BNH), normed_BNH.to(state_BNH.dtype) if self.norm_output else state_BNH)

    @property
    def ids(self) -> Tensor | None:
        """[V] the target's ids of the drafter's vocabulary, ascending; None: it is the target's."""
        return None

    def embed(self, token_BN: Tensor, like: Tensor) -> Tensor:
        return self._target.module.embed(token_BN).to(like.dtype)

    def candidates(self, rows: int, drafts: int) -> Candidates | None:
        """The drafter's vocabulary, if it is not the target's."""
        if self.ids is None:
            return None
        return Candidates(self.ids.expand(rows, drafts, -1), self._target.module.shape.vocab_size)

    def training_positions(self, length: int) -> int:
        return length * self.draft_length

    @property
    def predicted_steps(self) -> int:
        """Steps of `predict`. In evaluation at least as many as decoding proposes, so that every depth is predicted."""
        return self.steps if self.training else max(self.steps, self.draft_length)

    @property
    def label_offset(self) -> int:
        return self.predicted_steps + 1

    def open(self, slots: int, max_len: int) -> CachedState:
        return RecurrentState(self, slots, max_len)


class Recurrent(FeedsBack):
    """A family gives its first layer of ours as `layer`, and those after it, if any, as `further`."""

    images = True

    @property
    @abstractmethod
    def layer(self) -> DecoderLayer: ...

    @property
    def further(self) -> Sequence[DecoderLayer]:
        """The layers that read the output of the one before."""
        return ()

    def leave(self, residual_BNH: Tensor, attended_BNH: Tensor, number: int = 0) -> Tensor:
        """[B, N, H] a layer's output, from the residual and attention's output.

        Of the last layer it is the new state: for `logits` and for the next step.
        """
        layer = self.further[number - 1] if number else self.layer
        out_BNH = layer.leave(residual_BNH, attended_BNH)
        return out_BNH if number < len(self.further) else self.fed_back(out_BNH)

    @cached_property
    def fused_layers(self) -> FusedLayers:
        """The layers as decoding runs them."""
        return FusedLayers([self.layer, *self.further])

    @property
    def decoding_layers(self) -> FusedLayers:
        return self.fused_layers

    def passes(self, slots: int, positions: int) -> CachedLayers:
        return CachedLayers(self.fused_layers, slots, positions, window=self.fused_layers.window)

    def unroll(
        self, batch: TrainBatch, state_BTH: Tensor, steps: int, detach: bool = False
    ) -> Iterator[tuple[int, Pairs, Tensor]]:
        layers = [self.layer, *self.further]
        attentions = [UnrolledAttention(layer.self_attn, batch) for layer in layers]
        keys, values = [list[Tensor]() for _ in layers], [list[Tensor]() for _ in layers]

        def advance(token_BT: Tensor, state_BTH: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
            tensors_per_layer, new_keys_values = len(past) // len(layers), list[Tensor]()
            residual_BTH, read_BTI = self.enter(token_BT, state_BTH)
            for layer_index, layer in enumerate(layers):
                if layer_index:
                    residual_BTH, read_BTI = state_BTH, layer.input_layernorm(state_BTH)
                attended_BTH, *layer_keys_values = attentions[layer_index].step(
                    read_BTI, past[layer_index * tensors_per_layer : (layer_index + 1) * tensors_per_layer]
                )
                state_BTH = self.leave(residual_BTH, attended_BTH, layer_index)
                new_keys_values += layer_keys_values
            return state_BTH, *new_keys_values

        for step in range(steps):
            past = [x for layer_tensors in zip(keys, values, strict=True) for tensors in layer_tensors for x in tensors]
            state_BTH, *new_keys_values = recomputed(self.recomputes, advance, batch.after(1 + step), state_BTH, *past)
            for layer_index in range(len(layers)):
                keys[layer_index].append(new_keys_values[2 * layer_index])
                values[layer_index].append(new_keys_values[2 * layer_index + 1])
            pairs = batch.future(2 + step)
            yield step, pairs, state_BTH.flatten(0, 1)[pairs.source_M]
            state_BTH = state_BTH.detach() if detach else state_BTH


class RecurrentState(CachedState):
    """After each verification the accepted positions are processed again with the target's states: drafted positions are
    scratch, and none of them stays in the cache."""

    def __init__(self, drafter: FeedsBack, slots: int, max_len: int) -> None:
        proposal, layers = drafter.proposal, drafter.decoding_layers
        self.cached = drafter.passes(slots, max_len + proposal.scratch_positions)
        super().__init__(self.cached.kv, slots, drafter.draft_length)
        self.drafter, self.layers = drafter, layers
        self.grower = None if proposal.kind == "chain" else proposal.grower(self.kv.device)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        self.kv.rows(slot_B)
        self._process(commit)

    def _process(self, commit: Commit) -> Tensor:
        """[B, N, H] the layer's output at the pending positions, the first `count` of which stay in the cache."""
        drafter, cached = self.drafter, self.cached
        meta = cached.meta(cached.after_prefix(commit.next_BA.shape[1]))
        residual_BAH, read_BAI = drafter.enter(commit.next_BA, drafter.fuse(commit.hidden))
        x_BAH, delta_BAH = self.layers.run(residual_BAH, meta, read_BAI)
        cached.keep_first(commit.count_B)
        return x_BAH if delta_BAH is None else x_BAH + delta_BAH

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, kv = self.drafter, self.kv
        kv.rows(slot_B)
        pending = self.take_pending(slot_B)
        root_B, out_BAH = pending.root_B, self._process(pending)
        last_B1H = out_BAH.gather(1, pending.last_B1[..., None].expand(-1, 1, out_BAH.shape[-1]))
        first, score = drafter.scored(last_B1H, None), NodeScorer(self)
        if self.grower is not None:
            return self.grower.grow(root_B, first, score, drafter.ids, sampling, depth)
        latest = [first]

        def advance(token_B: Tensor) -> Tensor:
            latest[0] = score(TreeLevel(token_B[:, None], latest[0].state_BWH, score.nodes + 1, None))
            return latest[0].logits_BWV[:, 0]

        steps = min(drafter.draft_length, depth or drafter.draft_length)
        among = drafter.candidates(len(root_B), steps)
        return draft_chain(root_B, first.logits_BWV[:, 0], advance, steps, sampling, kv.length_B, among)


class NodeScorer:
    """Scores the generations of one proposal.

    The nodes are scratch positions after the committed prefix, and those of each generation follow those of the one before. The
    cache's length does not grow: nothing has to be rolled back, and the next commit overwrites them.
    """

    def __init__(self, state: RecurrentState) -> None:
        self.state, self.nodes = state, 0

    def __call__(self, nodes: TreeLevel) -> Scored:
        state, (B, W) = self.state, nodes.token_BW.shape
        position_BW = (state.kv.length_B + (nodes.depth - 1))[:, None].expand(B, W)
        meta = state.cached.meta(position_BW, bits_BNw=nodes.bits_BWw, earlier=self.nodes)
        self.nodes += W
        residual_BWH, read_BWI = state.drafter.enter(nodes.token_BW, nodes.state_BWH)
        return state.drafter.scored(*state.layers.run(residual_BWH, meta, read_BWI))


class UnrolledAttention:
    """Attention in training on own outputs: step i at index t sees step 0 over 0..t, and only index t of steps 1..i."""

    def __init__(self, attention: Attention, batch: TrainBatch) -> None:
        self.attention, self.position_BT = attention, batch.position_BT
        self.documents = batch.sees()
        self.span = batch.span

    def step(self, read_BTI: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(the output, [B, T, H]; this step's keys and values, of as many heads as the attention has for them). past: those of
        the earlier steps, all keys first.

        Where several processes hold a sequence together, keys and values are those of all positions, for this process's heads.
        """
        steps = len(past) // 2
        q_BhTD, k_BhTD, v_BhTD = self.attention.qkv(read_BTI, self.position_BT + steps)
        if self.span is not None:
            q_BhTD, k_BhTD, v_BhTD = (self.span.gather(x) for x in (q_BhTD, k_BhTD, v_BhTD))
        keys, values = [*past[:steps], k_BhTD], [*past[steps:], v_BhTD]
        sinks_h = self.attention.sinks if self.span is None else self.span.of_heads(self.attention.sinks)
        out_BhTD = unrolled(q_BhTD, keys, values, self.documents, self.attention.shape.window, sinks_h)
        return self.attention.out(out_BhTD if self.span is None else self.span.scatter(out_BhTD)), k_BhTD, v_BhTD
