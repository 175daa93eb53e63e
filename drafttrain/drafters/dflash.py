"""DFlash: a block of drafts in one pass, from masks behind the root and the target's fused states (arXiv 2602.06036).

Shapes: B rows, A anchors, S slots, M predictions, K drafts, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.batch import Anchors, Prediction, TrainBatch
from drafttrain.block_drafter import BlockDrafter, BlockShape, spread_taps
from drafttrain.drafters import Family
from drafttrain.dynamic import Grower, grown_from_slots
from drafttrain.errors import UserError
from drafttrain.layers import LayerOptions
from drafttrain.proposal import Proposal, Proposing, TreeOptions
from drafttrain.sampling import Sampling
from drafttrain.staged import OwnCache
from drafttrain.target import Target
from drafttrain.tree import DraftTree

CHUNK = 1024  # logits in memory at once where D-PACE asks for the drafter's confidence


@dataclass
class DFlashOptions(TreeOptions):
    """The block, how its slots weigh in training, and what is drafted of their choices."""

    family: str = "dflash"
    tree: str = "chain"
    width: int = 4  # as wide as a block of 16 can be
    block_size: int = 16  # slots, the anchor's included
    slots: str = "in_place"  # in_place: slot k predicts the token k after the anchor. shifted: the one k + 1 after it
    layers: int = 5
    taps: list[int] | None = None  # block outputs, from 0; None: five, evenly from 1 to n - 3
    mask_token: int | None = None  # an id that the target embeds; None: the last one
    anchors: int = 512  # blocks of a sequence in one step at most
    weights: str = "decay"  # decay: exp(-k / gamma) for draft k from 0. dpace: by the drafter's own confidence
    gamma: float | None = None  # None: 7, 5, 4 for blocks of 16, of 10, and smaller
    alpha: float = 0.5  # of dpace: 1 is no doubt in any draft, near 0 the drafter's own confidence
    layer: LayerOptions = field(default_factory=LayerOptions)


@dataclass
class DFlashState(OwnCache):
    """grower: of the proposals."""

    grower: Grower


class DFlash(BlockDrafter, Proposing):
    """Drafts are deterministic at any temperature, since slots do not know each other's tokens: a chain of argmaxes, or a tree
    of their likeliest tokens."""

    def __init__(self, options: DFlashOptions, target: Target) -> None:
        of = target.shape
        taps = spread_taps(of.blocks) if options.taps is None else tuple(options.taps)
        mask = of.vocab_size - 1 if options.mask_token is None else options.mask_token
        layer = LayerOptions.of(options.layer)
        super().__init__(
            BlockShape(options.block_size, options.layers, taps, mask, options.slots, options.anchors, layer), target
        )  # fmt: skip
        self.proposal = Proposal(options, self.draft_length, target, independent=True)
        if options.weights not in ("decay", "dpace"):
            raise UserError(f"drafter.weights is {options.weights!r}; choose decay or dpace")
        gamma = default_gamma(options.block_size) if options.gamma is None else options.gamma
        if not (gamma > 0.0 and 0.0 < options.alpha <= 1.0):
            raise UserError(f"drafter.gamma is {gamma}, drafter.alpha {options.alpha}; set gamma above 0, alpha in (0, 1]")
        self.alpha = options.alpha if options.weights == "dpace" else None
        decay = [math.exp(-step / gamma) for step in range(self.draft_length)]
        self.decay = [weight / sum(decay) for weight in decay]

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Draft i (from 0) predicts the token i + 2 after its source. In evaluation every source is an anchor.

        Where anchors were drawn, each stands for as many as there would be, so that the loss is that of all, in expectation.
        """
        anchors = batch.anchors(self.shape.anchors if self.training else None)
        state_BASH = self.states(batch, anchors)
        paced = None if self.alpha is None else self._paced(batch, anchors, state_BASH.detach(), self.alpha)
        for step, (slot, place_M, pairs) in enumerate(self.steps(batch, anchors)):
            hidden_MH = state_BASH[:, :, slot].flatten(0, 1)[place_M]
            weight = self.decay[step] if paced is None else paced[place_M, step]
            yield Prediction(step, pairs.source_M, pairs.label_M, hidden_MH, self.head, weight / anchors.share)

    @torch.no_grad()
    def _paced(self, batch: TrainBatch, anchors: Anchors, state_BASH: Tensor, alpha: float) -> Tensor:
        """[B * A, K] D-PACE's weights (arXiv 2605.18810): draft j weighs what the expected accepted length owes to it.

        Sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, q_i the probability of the true token.
        """
        token_P = batch.token_BT.flatten()
        confidence_PK = state_BASH.new_zeros(anchors.real_BA.numel(), self.draft_length, dtype=torch.float32)
        has_PK = torch.zeros_like(confidence_PK)
        for step, (slot, place_M, pairs) in enumerate(self.steps(batch, anchors)):
            hidden_MH, label_M = state_BASH[:, :, slot].flatten(0, 1)[place_M], token_P[pairs.label_M]
            for place, hidden, label in zip(*(x.split(CHUNK) for x in (place_M, hidden_MH, label_M)), strict=True):
                law = self.head(hidden).float().softmax(-1)
                confidence_PK[place, step] = law.gather(1, label[:, None])[:, 0]
            has_PK[place_M, step] = 1.0
        reached_PK = ((1.0 - alpha) * confidence_PK + alpha).cumprod(1) * has_PK
        return reached_PK.flip(1).cumsum(1).flip(1)

    def open(self, slots: int, max_len: int) -> DFlashState:
        cache = super().open(slots, max_len)
        return DFlashState(cache.kv, cache.staged, self.proposal.grower(cache.kv.length_S.device))

    def propose(self, state: DFlashState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        root_B, state_BSH = self.block(state, slot_B)
        first, drafts = self.shape.first, min(self.draft_length, depth or self.draft_length)
        logits_BKV = self.head(state_BSH[:, first : first + drafts])
        return grown_from_slots(state.grower, root_B, logits_BKV)


def default_gamma(size: int) -> float:
    """Of the official recipes, for blocks of 16, 10 and 8."""
    return 7.0 if size >= 16 else 5.0 if size >= 10 else 4.0


FAMILY = Family("dflash", DFlashOptions, DFlash)
