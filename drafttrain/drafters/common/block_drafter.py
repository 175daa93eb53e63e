"""The backbone of block drafters, which draft a whole block in one pass (arXiv 2602.06036).

Shapes: B rows, T positions, A anchors of a row or pending positions, C of them at once, S slots of a block, h heads, D head
width, H hidden.

A block is the root, its anchor, followed by mask tokens. Every slot sees the whole block and, in every layer, the context: the
target's tapped states strictly before the anchor. With S = 4 and the root r after the text `p q`:

    slot                   0     1     2     3
    token                  r     mask  mask  mask
    rotary position        2     3     4     5
    in_place predicts      -     3     4     5       3 drafts
    shifted predicts       3     4     5     6       4 drafts

The family defines the head, its loss, and how drafts are chosen from the slots' states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.sequence_shard import Span, pieces
from drafttrain.core.tree import DraftTree
from drafttrain.drafters.common.calibration import PlattCalibration
from drafttrain.drafters.common.draft_vocabulary import DraftVocabulary
from drafttrain.drafters.common.dynamic_tree import Score, Scored, TreeLevel
from drafttrain.drafters.common.pending import CachedState
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.options import BlockOptions
from drafttrain.model.attention import AttentionMetadata
from drafttrain.model.batch import Anchors, Context, Pairs, Prediction, TrainBatch
from drafttrain.model.blockwise_attention import Rule, blockwise_attention
from drafttrain.model.cached_layers import CachedLayers, FusedLayers
from drafttrain.model.drafter import Candidates, Commit, FrozenRef, confidence_of, draft_chain
from drafttrain.model.layers import ContextAttention, DecoderLayer, Linear, RMSNorm, recomputed
from drafttrain.model.recurrent_state import Bare, Convolved
from drafttrain.model.shapes import LayerOptions, TargetShape
from drafttrain.model.target import Taps, Target
from drafttrain.ops.rms_norm import norm

CONVENTIONS = {"in_place": 1, "shifted": 0}  # name -> the slot of the first draft


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The resolved block options. Raises UserError for a block that cannot be."""

    size: int  # slots of a block, the anchor's included
    layers: int
    taps: tuple[int, ...]
    mask_token: int
    slots: str = "in_place"  # which token a slot predicts
    anchors: int = 512  # blocks of a sequence in training at most
    layer: LayerOptions = field(default_factory=LayerOptions)

    @staticmethod
    def of(options: BlockOptions, target: TargetShape) -> BlockShape:
        return BlockShape(
            options.block_size,
            options.layers,
            spread_taps(target.blocks, options.TAPS) if options.target_layer_ids is None else tuple(options.target_layer_ids),
            target.vocab_size - 1 if options.mask_token is None else options.mask_token,
            options.slots,
            options.anchors,
            LayerOptions.of(options.layer),
        )

    def __post_init__(self) -> None:
        if not self.taps:
            raise UserError("drafter.target_layer_ids is []; name at least one block, or set it to null")

    @property
    def first(self) -> int:
        """The slot of the first draft."""
        return CONVENTIONS[self.slots]

    @property
    def drafts(self) -> int:
        return self.size - self.first


def spread_taps(blocks: int, count: int = 5) -> tuple[int, ...]:
    """The official choice: `count` blocks from the second to the third from the end, evenly; shallow targets give fewer.

    Of 36 blocks: 1, 9, 17, 25, 33.
    """
    first, last = min(1, blocks - 1), max(blocks - 3, 0)
    if count == 1 or last <= first:
        return (blocks // 2,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


EVALUATED = 8192  # slots that go through a layer at once where no gradient is kept
STD = 0.02  # of matrices at the start, as the published modules' initializer_range
CHUNK = 1024  # logits in memory at once where D-PACE asks for the drafter's confidence


Choices = Callable[[int, Tensor], Tensor]  # (draft from 0, [B, W] tokens before it) -> [B, W or 1, V or C] its logits
Inputs = Callable[[int, Tensor, Pairs], Tensor]  # (draft from 0, its anchors [M], its labels) -> [M, X] inputs of the head


@dataclass(frozen=True, slots=True)
class Walk:
    """How drafts that depend on those above are chosen, one after the other."""

    score: Score
    candidates: Candidates | None = None  # what the logits of `score` are of; None: the whole vocabulary


def stateless(choose: Choices) -> Score:
    """Scores nodes that carry no state."""

    def score(nodes: TreeLevel) -> Scored:
        logits_BWV = choose(nodes.depth, nodes.token_BW)
        return Scored(logits_BWV, nodes.state_BWH[:, :1].expand(-1, logits_BWV.shape[1], -1))

    return score


class BlockLayer(DecoderLayer):
    """A decoder layer whose keys and values are those of the context and of the block, by one projection.

    With `own_context_maps` the context has projections of its own.
    """

    def __init__(
        self,
        shape: TargetShape,
        group: int | None,
        number: int,
        causal: bool,
        causal_windows: bool,
        own_context_maps: bool = False,
    ) -> None:
        """group: of the convolutions around attention and MLP; None: there are none. number: of the layer, from 0.

        causal: slots see no later slot of their block; causal_windows: where the layer has a sliding window.
        """
        super().__init__(shape, qk_norm=True, number=number)
        if own_context_maps:
            self.self_attn = ContextAttention(self.self_attn.shape)
        window = self.self_attn.shape.window
        self.rule = Rule(chained=causal or (window is not None and causal_windows), window=window)
        convolutions = (Bare() if group is None else Convolved(shape.hidden_size, group) for _ in range(2))
        self.attention_conv, self.mlp_conv = convolutions
        self.convolved = group is not None

    def around(self, x_SH: Tensor, attention: Callable[[Tensor], Tensor], mlp: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., S, H]: the layer, of whatever attention and MLP."""
        x_SH = x_SH + self.attention_conv(self.input_layernorm(x_SH), attention)
        out_SH: Tensor = x_SH + self.mlp_conv(self.post_attention_layernorm(x_SH), mlp)
        return out_SH

    def uncached(
        self, x_BASH: Tensor, position_BAS: Tensor, context: tuple[Tensor, Tensor], seen: Context, span: Span | None = None
    ) -> Tensor:
        """Many blocks per row, each with its own part of one context, whose keys and values [B, h_kv, T, D] are given.

        seen: the context that each block sees; with `span` (rows shared by processes) that of the blocks of all processes.
        """
        return self.around(x_BASH, lambda in_BASH: self._attended(in_BASH, position_BAS, context, seen, span), self.mlp)

    def _attended(
        self, x_BASH: Tensor, position_BAS: Tensor, context: tuple[Tensor, Tensor], anchor_context: Context, span: Span | None
    ) -> Tensor:
        B, A, S, _ = x_BASH.shape
        qkv = self.self_attn.qkv(x_BASH.flatten(1, 2), position_BAS.flatten(1))
        sinks_h = self.self_attn.sinks
        if span is None:
            q_BhASD, k_BhASD, v_BhASD = (x.unflatten(2, (A, S)) for x in qkv)
        else:
            q_BhASD, k_BhASD, v_BhASD = (span.heads(x).unflatten(2, (-1, S)) for x in qkv)
            context, sinks_h = (span.gather(context[0]), span.gather(context[1])), span.of_heads(sinks_h)
        out_BhASD = blockwise_attention(q_BhASD, k_BhASD, v_BhASD, *context, anchor_context, self.rule, sinks_h)
        out_BhXD = out_BhASD.flatten(2, 3)
        return self.self_attn.out(out_BhXD if span is None else span.positions(out_BhXD)).unflatten(1, (A, S))


class BlockDrafter(DraftVocabulary):
    """fc, hidden_norm, layers and norm are named as in the official code. Embedding and head are the target's, but for the head
    where a part of the vocabulary is drafted.

    A family says how a draft is chosen: from a slot's state alone, from the token before it too (`head_input`, `choices`), or
    from all tokens above it (`head_inputs`, `root_state`, `walk`). It may also say what its layers read of the target
    (`add_context`, `contexts`).
    """

    proposal: TreeProposal
    layer_shape: TargetShape
    visible: Sequence[float] = ()  # of training, as in `TrainBatch.anchors`
    unbroken = False  # in training a block ends before its first token that is not supervised
    revertible = True
    images = True

    def __init__(
        self,
        options: BlockOptions,
        target: Target,
        walks: bool = False,
        group: int | None = None,
        own_context_maps: bool = False,
        draft_vocab: int | None = None,
    ) -> None:
        """walks: drafts depend on the one before, so above temperature 0 a chain is sampled token by token. group and
        own_context_maps: as in `BlockLayer`. draft_vocab: of the drafter's own head; None: it has none."""
        shape = BlockShape.of(options, target.shape)
        layer_shape = shape.layer.shape(target.shape)
        super().__init__(TreeProposal(options, shape.drafts, target, independent=not walks))
        self.shape, self.layer_shape, self.taps = shape, layer_shape, Taps(shape.taps)
        self.walks, self.samples = walks, walks and options.tree == "chain"
        self.decay, self.alpha = options.decay(self.draft_length), options.alpha if options.weights == "dpace" else None
        self.taps.check(layer_shape.blocks)
        if not 0 <= shape.mask_token < layer_shape.vocab_size:
            raise UserError(f"drafter.mask_token is {shape.mask_token}; the target embeds 0..{layer_shape.vocab_size - 1}")
        if self.draft_length + 2 > layer_shape.max_positions:
            raise UserError(
                f"drafter.block_size is {shape.size}; the target has {layer_shape.max_positions} positions: lower it"
            )
        context_maps = self.add_context()
        layer_shape.check_window(shape.layers, self.draft_length)
        rules = options.causal, options.causal_windows
        self.layers = nn.ModuleList(BlockLayer(layer_shape, group, i, *rules, own_context_maps) for i in range(shape.layers))
        self.fused_layers = FusedLayers(self.all_layers())
        self.norm = RMSNorm(layer_shape.hidden_size, layer_shape.norm_eps)
        modules = [*context_maps, *(module for layer in self.all_layers() for module in (layer.self_attn, layer.mlp))]
        for linear in (m for module in modules for m in module.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=STD)
        self._target = FrozenRef(target)
        if draft_vocab is None:
            self.add_vocabulary(None)
        else:
            self.add_head(draft_vocab)
        self.confident = options.confident()
        if self.confident:
            self.calibration = PlattCalibration(self.draft_length)

    def resolved_options(self) -> dict[str, Any]:
        layer_options = LayerOptions.between(self.layer_shape, self._target.module.shape)
        return {"target_layer_ids": list(self.shape.taps), "mask_token": self.shape.mask_token, "layer": asdict(layer_options)}

    def training_positions(self, length: int) -> int:
        return length + min(length, self.shape.anchors) * self.shape.size

    def head_input(self, state_H: Tensor, before: Tensor) -> Tensor:
        """[..., X] the input of `head` for one draft. state_H: of its slot. before: the token before it."""
        return state_H

    def head(self, input_X: Tensor) -> Tensor:
        """[..., V] logits of a draft."""
        return self.slot_logits(input_X)

    def slot_logits(self, state_H: Tensor) -> Tensor:
        """[..., V] logits of a slot's state alone, by the target's head in the target's dtype, or by the drafter's own."""
        if self.d2t is not None:
            logits_D: Tensor = self.lm_head(state_H)
            return logits_D
        target = self._target.module
        return target.head(state_H.to(target.head_weight.dtype))

    def choices(self, state_BKH: Tensor) -> Choices:
        """The choices of all drafting slots. A family whose drafts depend on those above computes here what does not."""
        raise AssertionError("defined by every family that walks; other drafts are chosen from the slots' logits alone")

    def walk(self, state_BSH: Tensor, drafts: int, pending: Commit) -> Walk:
        """Scores nodes down to `drafts` levels, first the root, which has depth 0 and `root_state`.

        state_BSH: of all slots. pending: the positions before the root that were processed last.
        """
        return Walk(stateless(self.choices(self.drafting(state_BSH, drafts))), self.candidates(len(state_BSH), drafts))

    def root_state(self, state_BSH: Tensor) -> Tensor:
        """[B, 1, X] the state with which a walk begins, for families that carry one from node to node."""
        return state_BSH[:, :1, :0]

    def head_inputs(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor) -> Inputs:
        """The inputs of `head` for each draft, given the true tokens above it. state_BASH: of all slots."""
        token_P = batch.token_BT.flatten()

        def of(draft: int, index_M: Tensor, pairs: Pairs) -> Tensor:
            state_MH = state_BASH[:, :, self.shape.first + draft].flatten(0, 1)[index_M]
            return self.head_input(state_MH, token_P[batch.teacher_index(pairs.label_M)])

        return of

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Draft i (from 0) predicts the token i + 2 after its source. In evaluation every source is an anchor.

        Where anchors were sampled, each counts for its share of all, so that the expected loss is that of all anchors.
        """
        anchors = batch.anchors(self.shape.anchors, self.visible) if self.training else batch.anchors()
        yield from self.predictions(batch, anchors, self.states(batch, anchors))

    def predictions(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor) -> Iterator[Prediction]:
        """`predict`, from the states of all slots."""
        inputs = self.head_inputs(batch, anchors, state_BASH)
        weight_PK = self._after_visible(anchors) if self.alpha is None else self._paced(batch, anchors, inputs, self.alpha)
        for step, (index_M, pairs) in enumerate(self.steps(batch, anchors)):
            weight = self.decay[step] if weight_PK is None else weight_PK[index_M, step]
            input_MX = inputs(step, index_M, pairs)
            weight = weight / anchors.share
            yield Prediction(step, pairs.source_M, pairs.label_M, input_MX, self.head, weight, vocab_D=self.ids)

    def _after_visible(self, anchors: Anchors) -> Tensor | None:
        """[B * A, K] the decay from each block's first draft on, which follows its true tokens; None: that is draft 0."""
        if anchors.visible_BA is None:
            return None
        draft_K = torch.arange(self.draft_length, device=anchors.visible_BA.device)
        later_PK = draft_K + 1 - anchors.visible_BA.flatten()[:, None]
        return torch.tensor(self.decay, device=draft_K.device)[later_PK.clamp_min(0)]

    @torch.no_grad()
    def _paced(self, batch: TrainBatch, anchors: Anchors, inputs: Inputs, alpha: float) -> Tensor:
        """[B * A, K] D-PACE's weights (arXiv 2605.18810): draft j weighs its part of the expected accepted length.

        Sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, q_i the probability of the true token. A draft
        without a label is in neither the sum nor the products.
        """
        token_P = batch.token_BT.flatten()
        factor_PK = torch.ones(anchors.real_BA.numel(), self.draft_length, device=token_P.device)
        labelled_PK = torch.zeros_like(factor_PK)
        for step, (index_M, pairs) in enumerate(self.steps(batch, anchors)):
            label_M, input_MX = token_P[pairs.label_M], inputs(step, index_M, pairs)
            for rows in pieces(self, len(index_M), CHUNK, token_P.device):
                q_CV = self.head(input_MX[rows]).float().softmax(-1)
                factor_PK[index_M[rows], step] = (1.0 - alpha) * self._true(q_CV, label_M[rows]) + alpha
            labelled_PK[index_M, step] = 1.0
        reached_PK = factor_PK.cumprod(1) * labelled_PK
        return reached_PK.flip(1).cumsum(1).flip(1)

    def _true(self, q_CV: Tensor, token_C: Tensor) -> Tensor:
        """[C] the probability of these tokens; 0 outside of the drafter's vocabulary."""
        ids_D = self.ids
        if ids_D is None:
            return q_CV.gather(1, token_C[:, None])[:, 0]
        index_C = torch.searchsorted(ids_D, token_C).clamp_max(len(ids_D) - 1)
        return q_CV.gather(1, index_C[:, None])[:, 0] * (ids_D[index_C] == token_C)

    def states(self, batch: TrainBatch, anchors: Anchors) -> Tensor:
        """[B, A, S, H] every slot's final state, for training and for expected acceptance."""
        contexts, sees = self.contexts(batch.hidden), batch.context(anchors)
        x_BASH, position_BAS = self._embedded_anchors(batch, anchors), self.positions(anchors.position_BA)
        single_pass = torch.is_grad_enabled() or batch.span is not None
        at_once = sees.last_BA.shape[1] if single_pass else max(1, EVALUATED // self.shape.size)
        for layer, context_BTH in zip(self.all_layers(), contexts, strict=True):
            context = layer.self_attn.kv(context_BTH, batch.position_BT)
            block_chunks = zip(x_BASH.split(at_once, 1), position_BAS.split(at_once, 1), sees.split(at_once), strict=True)
            outputs = [
                recomputed(self.recomputes, layer.uncached, x, p, context, chunk_context, batch.span)
                for x, p, chunk_context in block_chunks
            ]
            x_BASH = torch.cat(outputs, 1)
        state_BASH: Tensor = self.norm(x_BASH)
        return state_BASH

    def _embedded_anchors(self, batch: TrainBatch, anchors: Anchors) -> Tensor:
        """[B, A, S, H] embeddings of the anchors' blocks, with their true tokens."""
        if anchors.visible_BA is None:
            return self.embedded_block(anchors.token_BA)
        token_BAS = torch.stack([batch.after(1 + slot).gather(1, anchors.source_BA) for slot in range(self.shape.size)], -1)
        masked_BAS = torch.arange(self.shape.size, device=token_BAS.device) >= anchors.visible_BA[..., None]
        return self._embedded(token_BAS.masked_fill(masked_BAS, self.shape.mask_token))

    def steps(self, batch: TrainBatch, anchors: Anchors) -> Iterator[tuple[Tensor, Pairs]]:
        """(index_M, pairs) of each draft in order: its anchors and its labels."""
        for step in range(self.draft_length):
            yield batch.future_of(anchors, 2 + step, self.unbroken)

    def drafting(self, state_BSH: Tensor, drafts: int) -> Tensor:
        """[B, K, H] the states of the slots that make the first drafts."""
        return state_BSH[:, self.shape.first : self.shape.first + drafts]

    def with_confidence(self, chain: DraftTree, state_BKH: Tensor, logits: Iterable[Tensor]) -> DraftTree:
        """The chain with the drafter's confidence in each draft, where it has one. logits: [B, V] of each draft."""
        if not self.confident:
            return chain
        return self.calibrated(chain, confidence_of(torch.stack([*logits], 1)))

    def calibrated(self, chain: DraftTree, logit_BK: Tensor) -> DraftTree:
        """The chain with probabilities of acceptance by the logits of the drafter's confidences."""
        assert self.calibration is not None
        confidence_BK = self.calibration.acceptance_probability(logit_BK, chain.q_BNV is not None)
        return replace(chain, confidence_BN=F.pad(confidence_BK, (1, 0), value=1.0))

    def open(self, slots: int, max_len: int) -> BlockState:
        return BlockState(self, slots, max_len)

    def add_context(self) -> list[nn.Linear]:
        """Add the modules that `contexts` needs. Returns their linear maps."""
        width = self.layer_shape.hidden_size
        self.fc = Linear(len(self.shape.taps) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, self.layer_shape.norm_eps)
        return [self.fc]

    def contexts(self, hidden: dict[int, Tensor]) -> list[Tensor]:
        """For each layer [..., H] what its keys and values of the context are made of."""
        return [self.context(hidden)] * self.shape.layers

    def context(self, hidden: dict[int, Tensor]) -> Tensor:
        """[..., H] the context that all layers share."""
        context_H: Tensor = self.hidden_norm(self.fc(torch.cat(self.tapped(hidden), -1)))
        return context_H

    def tapped(self, hidden: dict[int, Tensor]) -> list[Tensor]:
        """The tapped states [..., H] in the drafter's dtype."""
        return [hidden[b].to(self.norm.weight.dtype) for b in self.shape.taps]

    def embedded_block(self, root: Tensor) -> Tensor:
        """[..., S, H] embeddings of blocks with these roots [...]."""
        mask = torch.full_like(root, self.shape.mask_token)[..., None].expand(*root.shape, self.shape.size - 1)
        return self._embedded(torch.cat([root[..., None], mask], -1))

    def _embedded(self, token_S: Tensor) -> Tensor:
        return self._target.module.embed(token_S).to(self.norm.weight.dtype)

    def positions(self, root: Tensor) -> Tensor:
        """[..., S] rotary positions of blocks whose roots have these positions."""
        return root[..., None] + torch.arange(self.shape.size, device=root.device)

    def all_layers(self) -> list[BlockLayer]:
        return list(self.layers)  # type: ignore[arg-type]


class BlockState(CachedState):
    """The cache holds the context. The block's keys are scratch after it."""

    def __init__(self, drafter: BlockDrafter, slots: int, max_len: int) -> None:
        """The block takes its positions after the context, even if few of its drafts become nodes."""
        layers = drafter.fused_layers
        self.cached = CachedLayers(layers, slots, max_len + drafter.shape.size, window=layers.window)
        super().__init__(self.cached.kv, slots, drafter.draft_length)
        self.drafter, self.grower = drafter, drafter.proposal.grower(self.kv.device)
        self._chained = [layer.rule.chained for layer in drafter.all_layers()]
        self._whole_SS = torch.ones(drafter.shape.size, drafter.shape.size, dtype=torch.bool, device=self.kv.device)

    def consume(self, commit: Commit, slot_B: Tensor) -> None:
        """Write the context's keys and values of every layer. Nothing else is computed: no layer changes the context."""
        self.kv.rows(slot_B)
        contexts = self.drafter.contexts(commit.hidden)
        self.drafter.fused_layers.write(contexts, self.cached.meta(self.cached.after_prefix(contexts[0].shape[1])))
        self.cached.keep_first(commit.count_B)

    def block(self, slot_B: Tensor) -> tuple[Commit, Tensor]:
        """(pending, state_BSH): the final state of every slot, after the pending positions were processed."""
        drafter, pending = self.drafter, self.take_pending(slot_B)
        self.consume(pending, slot_B)
        x_BSH = drafter.embedded_block(pending.root_B)
        metas, layers = self._metas(drafter.positions(self.kv.length_B)), drafter.all_layers()
        if not layers[0].convolved:
            return pending, norm(drafter.norm, *drafter.fused_layers.run(x_BSH, metas))[1]
        for layer_index, (layer, block, meta) in enumerate(zip(layers, drafter.fused_layers.chain, metas, strict=True)):
            x_BSH = layer.around(x_BSH, lambda in_BSH: block.attention(in_BSH, meta, layer_index), block.mlp)  # noqa: B023
        return pending, drafter.norm(x_BSH)

    def _metas(self, position_BS: Tensor) -> list[AttentionMetadata]:
        """Each layer's metadata: slots see their whole block, or the slots up to themselves."""
        block_BSS = self._whole_SS.expand(len(position_BS), -1, -1)
        meta_by_chained = {
            chained: self.cached.meta(position_BS, None if chained else block_BSS) for chained in set(self._chained)
        }
        return [meta_by_chained[chained] for chained in self._chained]

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, (pending, state_BSH) = self.drafter, self.block(slot_B)
        root_B = pending.root_B
        drafts = min(drafter.draft_length, depth or drafter.draft_length)
        if not drafter.walks:
            state_BKH = drafter.drafting(state_BSH, drafts)
            logits_BKV = drafter.slot_logits(state_BKH)
            tree = self.grower.from_slots(root_B, logits_BKV, drafter.ids, sampling, depth)
            return drafter.with_confidence(tree, state_BKH, logits_BKV.unbind(1))
        walk = drafter.walk(state_BSH, drafts, pending)
        score, among = walk.score, walk.candidates
        first_scored = score(TreeLevel(root_B[:, None], drafter.root_state(state_BSH), 0, None))
        if not drafter.samples:
            return self.grower.grow(root_B, first_scored, score, among, sampling, depth)
        scored = [first_scored]

        def advance(token_B: Tensor) -> Tensor:
            scored.append(score(TreeLevel(token_B[:, None], scored[-1].state_BWH, len(scored), None)))
            return scored[-1].logits_BWV[:, 0]

        chain = draft_chain(root_B, first_scored.logits_BWV[:, 0], advance, drafts, sampling, self.kv.length_B, among)
        logits = (depth.logits_BWV[:, 0] for depth in scored)
        return drafter.with_confidence(chain, drafter.drafting(state_BSH, drafts), logits)
