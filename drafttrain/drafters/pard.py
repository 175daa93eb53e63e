"""PARD: a small language model that drafts all tokens in one pass, from mask tokens after the text (arXiv 2504.18583).

Shapes: B rows, T positions, N columns of one pass, K drafts, H hidden, M predictions, V vocabulary.

After the root x[t+1] come K - 1 mask tokens: mask d, at position t + 1 + d, predicts x[t+2+d]. It sees the text up to the
root, and the masks before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.autoregressive import AutoregressiveState
from drafttrain.drafters.common.pending import with_root
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.draft_model import DraftModel, Model, check, model_of
from drafttrain.drafters.options import PardOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.mask_chains import Chains, Retention
from drafttrain.model.target import FINAL, Taps, Target


def build(options: PardOptions, target: Target) -> Drafter:
    """Raises UserError for options that contradict each other, and for a model that cannot be loaded or cannot draft."""
    check(options)
    draft_model = model_of(options, target, "chain")  # whatever the tree: it is made of one chain's choices
    if draft_model.translation is not None:
        raise UserError(
            f"drafter.path {options.path!r} has another tokenizer than the target, and masks are tokens of the target's; "
            "choose a model of the target's tokenizer"
        )
    return Pard(options, TreeProposal(options, options.draft_length, target, independent=True), draft_model)


class Pard(DraftModel):
    """Drafts are deterministic at any temperature, since masks do not know each other's tokens."""

    def __init__(self, options: PardOptions, proposal: TreeProposal, found: Model) -> None:
        super().__init__(options, proposal, found)
        self.samples, self.starts_usable = False, False  # it has never seen a mask
        self.retention = Retention(options.retention, options.least_retention)
        vocab = self.lm.shape.vocab_size
        self.mask_token = vocab - 1 if options.mask_token is None else options.mask_token
        if not 0 <= self.mask_token < vocab:
            raise UserError(f"drafter.mask_token is {self.mask_token}; the draft model embeds 0..{vocab - 1}")

    def resolved_options(self) -> dict[str, Any]:
        return {"mask_token": self.mask_token}

    @property
    def _slots(self) -> int:
        return self.draft_length - 1

    def training_positions(self, length: int) -> int:
        return round(length * (1 + sum(self.retention.shares(self._slots))))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Draft d (from 0) predicts the token d + 2 after its source. In evaluation every anchor has all masks."""
        shares = self.retention.shares(self._slots) if self.training else None
        chains = Chains.append_to(batch, shares, self._slots, root=True)
        token_BN, no_rows_B0 = chains.append_masks(batch.token_BT, self.mask_token), batch.token_BT[:, :0]
        position_BN = chains.position_BN.clamp_max(self.lm.shape.max_positions - 1)
        final_BNH = self.lm(token_BN, None, chains, position_BN, Taps(final=True), no_rows_B0).hidden[FINAL]
        pairs = batch.future(2)
        hidden_MH = final_BNH[:, : chains.columns].flatten(0, 1)[
            batch.teacher_index(pairs.label_M)
        ]  # of the column of the root
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self.lm.head)
        for depth, pairs, hidden_MH in chains.steps(batch, final_BNH):
            yield Prediction(depth, pairs.source_M, pairs.label_M, hidden_MH, self.lm.head)

    @property
    def max_new_positions(self) -> int:
        """Accepted positions, the root, and the masks after it."""
        return max(super().max_new_positions, 2 * self.draft_length + 1)

    @property
    def scratch_positions(self) -> int:
        """Masks take positions after the text, even if few of their drafts become nodes."""
        return self.draft_length

    def open(self, slots: int, max_len: int) -> PardState:
        return PardState(self, slots, max_len)


class PardState(AutoregressiveState):
    """One pass gives all drafts of a proposal."""

    def __init__(self, drafter: Pard, slots: int, max_len: int) -> None:
        super().__init__(drafter, slots, max_len)
        self.pard = drafter
        self.grower = drafter.proposal.grower(self.kv.device)

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, kv = self.pard, self.kv
        drafts = min(drafter.draft_length, depth or drafter.draft_length)
        kv.rows(slot_B)
        token_BN, last_B = with_root(self.take_pending(slot_B))
        token_BN = F.pad(token_BN, (0, drafts - 1))
        column_N, last_B1 = torch.arange(token_BN.shape[1], device=token_BN.device), last_B[:, None]
        token_BN = torch.where(column_N <= last_B1, token_BN, drafter.mask_token)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(drafter.lm.shape.max_positions - 1)
        row_BK = last_B1 + torch.arange(drafts, device=token_BN.device)
        logits_BKV = drafter.lm(token_BN, kv, None, position_BN, Taps(), row_BK).logits_BRV
        kv.keep(column_N.expand_as(token_BN), last_B)  # the root's keys are scratch: the next commit brings it again
        assert self.grower is not None, "made with the state"
        return self.grower.from_slots(token_BN.gather(1, last_B1)[:, 0], logits_BKV, None, sampling)


FAMILY = Family("pard", PardOptions, build)
