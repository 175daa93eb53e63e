"""UNO: the target is its own drafter, by a LoRA that applies to the drafting positions alone (SGLang's `UNO` algorithm).

Shapes: B rows, N columns of one pass, X random tokens of a row, K drafts, P positions, M predictions, H hidden, V vocabulary.

A drafting pass reads the root x[t+1] and K - 1 random tokens after it, with causal attention. With K = 4 and the root r after
the text `p q`:

    token       p     q     r       random  random  random
    position    0     1     2       3       4       5
    weights     base  base  base    LoRA    LoRA    LoRA
    predicts                3       4       5       6

The root's output is the target's own distribution of the next token, so that the first draft is always accepted. A random
position gives a marginal distribution of its token, whatever the tokens between are. The tokens are random, not a mask token,
so that the LoRA learns to ignore them, and no embedding has to be trained.

The design:

- The matrices are the only parameters. The target's weights stay where they are and are never written
  (`targets/adapt.py`); keys and values of the text are those of the base weights.
- Training is one pass over the text, followed by the random tokens of all anchors (`model/mask_chains.py`), by the target's
  own runner with its own attention. No training recipe has been published; this one is ours.
- Decoding has a cache of its own, as every drafter that is a language model: the decoder gives a drafter the target's states,
  not its cache. The text is computed a second time, with the random tokens of the next pass.
- Random tokens are a function of the position in decoding and evaluation: neither the batch, nor an earlier step, nor a
  captured graph changes them. In training they also depend on the anchor's tokens and the step: it gets new ones each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Lane, Sampling, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.autoregressive import Autoregressive, AutoregressiveState
from drafttrain.drafters.common.pending import with_root
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.options import UnoOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import FrozenRef, draft_chain
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.lora import LoraOptions
from drafttrain.model.mask_chains import Chains, Retention
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.adapt import PositionLora
from drafttrain.targets.hf import HFTarget

UNLIKELY = 30.0  # what the logits of tokens lose that the target's greedy choice rules out


def random_tokens(position_M: Tensor, vocab: int, seed: int = 0, key_M: Tensor | None = None) -> Tensor:
    """[M] a token of the vocabulary for each position, each token as likely; a function of the arguments."""
    return (uniform(Sampling(seed=seed, key_B=key_M), position_M, Lane.INPUT) * vocab).long()


class Uno(Autoregressive):
    """At a temperature above 0 each draft of a chain is sampled from its marginal distribution, which the chain carries."""

    def __init__(self, options: UnoOptions, target: HFTarget) -> None:
        super().__init__(TreeProposal(options, options.draft_length, target, independent=True))
        if self.draft_length + 2 > target.shape.max_positions:
            raise UserError(
                f"drafter.draft_length is {self.draft_length}; a context of {target.shape.max_positions} allows "
                f"{target.shape.max_positions - 2}"
            )
        self.taps, self.retention = Taps(), Retention(options.retention, options.least_retention)
        lora = LoraOptions(options.lora_rank, options.lora_alpha, list(options.lora_targets))
        self.matrices = PositionLora(target, lora)
        self._target = FrozenRef(target)
        self._random_P: Tensor | None = None

    @property
    def generations(self) -> bool:
        return self._target.module.generations

    @property
    def last_position(self) -> int:
        return self._target.module.shape.max_positions - 1

    @property
    def _slots(self) -> int:
        return self.draft_length - 1

    def recompute(self) -> None:
        super().recompute()
        self.matrices.recompute()

    def resolved_options(self) -> dict[str, Any]:
        return {"lora_targets": self.matrices.kinds}

    def training_positions(self, length: int) -> int:
        return round(length * (1 + sum(self.retention.shares(self._slots))))

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Draft d (from 0) predicts the token d + 2 after its source. In evaluation every anchor has all random tokens.

        Draft 0 is the target's own, so nothing is learnt from it.
        """
        shares = self.retention.shares(self._slots) if self.training else None
        chains = Chains.append_to(batch, shares, self._slots, root=True)
        position_BN = chains.position_BN.clamp_max(self.last_position)
        random_BX = self._random_of(batch, chains, position_BN[:, chains.columns :])
        token_BN, no_rows_B0 = torch.cat([batch.token_BT, random_BX], 1), batch.token_BT[:, :0]
        adapted_BN = (torch.arange(token_BN.shape[1], device=token_BN.device) >= chains.columns).expand_as(token_BN)
        out = self.matrices.run(token_BN, None, chains, position_BN, adapted_BN, Taps(final=True), no_rows_B0)
        final_BNH, head, pairs = out.hidden[FINAL], self._target.module.head, batch.future(2)
        root_M = batch.teacher_index(pairs.label_M)
        root_state_MH = final_BNH[:, : chains.columns].detach().flatten(0, 1)[root_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, root_state_MH, head, weight=0.0)
        for depth, pairs, hidden_MH in chains.steps(batch, final_BNH):
            yield Prediction(depth, pairs.source_M, pairs.label_M, hidden_MH, head)

    def _random_of(self, batch: TrainBatch, chains: Chains, position_BX: Tensor) -> Tensor:
        """[B, X] the random tokens of all chains."""
        if not self.training:
            return self.random_table()[position_BX]
        anchors = [group.anchors.source_BA.repeat_interleave(group.size, 1) for group in chains.groups]
        if not anchors:
            return position_BX
        # of the text and the step, and of no generator: a resumed run and another packing draw the same
        source_BX = torch.cat(anchors, 1)
        key_BX = batch.token_BT.gather(1, source_BX) * self._vocab + batch.after(1).gather(1, source_BX)
        seed = int(batch.progress * 2**32)
        return random_tokens(position_BX.flatten(), self._vocab, seed, key_BX.flatten()).view_as(position_BX)

    def random_table(self) -> Tensor:
        """[P] the random token of each position, made once: captured graphs of earlier sessions read them there."""
        device, table = self._target.module.device, self._random_P
        if table is None or table.device != device:
            with torch.inference_mode(False):
                table = self._random_P = random_tokens(torch.arange(self.last_position + 1, device=device), self._vocab)
        return table

    @property
    def _vocab(self) -> int:
        return self._target.module.shape.vocab_size

    def new_caches(self, slots: int, max_len: int) -> list[KVCache]:
        return [self._target.module.new_cache(slots, max_len)]

    def run(
        self, caches: list[KVCache], token_BN: Tensor, ancestor_BNN: Tensor | None, position_BN: Tensor, row_BR: Tensor
    ) -> Tensor | None:
        """The base weights alone, for texts."""
        return self._target.module(token_BN, caches[0], ancestor_BNN, position_BN, Taps(), row_BR).logits_BRV

    @property
    def max_new_positions(self) -> int:
        """Accepted positions, the root, and the random tokens after it."""
        return max(super().max_new_positions, 2 * self.draft_length + 1)

    @property
    def scratch_positions(self) -> int:
        """Random tokens take positions after the text, even if few of their drafts become nodes."""
        return self.draft_length

    def open(self, slots: int, max_len: int) -> UnoState:
        self.matrices.refresh()
        return UnoState(self, slots, max_len)


class UnoState(AutoregressiveState):
    """One pass gives all drafts of a proposal."""

    def __init__(self, drafter: Uno, slots: int, max_len: int) -> None:
        super().__init__(drafter, slots, max_len)
        self.uno, self.random_P = drafter, drafter.random_table()

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafts = min(self.uno.draft_length, depth or self.uno.draft_length)
        self.kv.rows(slot_B)
        token_BN, last_B = with_root(self.take_pending(slot_B))
        root_B = token_BN.gather(1, last_B[:, None])[:, 0]
        logits_BKV = self._drafting_pass(token_BN, last_B, drafts)
        if self.grower is not None:
            if sampling.greedy:
                logits_BKV = torch.cat([decided(logits_BKV[:, :1]), logits_BKV[:, 1:]], 1)
            return self.grower.from_slots(root_B, logits_BKV, None, sampling)
        draft = count(1)

        def advance(token_B: Tensor) -> Tensor:
            return logits_BKV[:, next(draft)]

        return draft_chain(root_B, logits_BKV[:, 0], advance, drafts, sampling, self.kv.length_B)

    def _drafting_pass(self, token_BN: Tensor, last_B: Tensor, drafts: int) -> Tensor:
        """[B, K, V] logits. token_BN: accepted tokens, which stay cached, and the root, which is at column last_B."""
        drafter, kv, last_B1 = self.uno, self.kv, last_B[:, None]
        token_BN = F.pad(token_BN, (0, drafts - 1))
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(drafter.last_position)
        random_BN = column_N > last_B1
        token_BN = torch.where(random_BN, self.random_P[position_BN], token_BN)
        row_BK = last_B1 + torch.arange(drafts, device=token_BN.device)
        logits_BKV = drafter.matrices.run(token_BN, kv, None, position_BN, random_BN, Taps(), row_BK).logits_BRV
        assert logits_BKV is not None
        kv.advance(last_B)  # the root's keys are scratch: the next commit brings it again
        return logits_BKV


def decided(logits_V: Tensor) -> Tensor:
    """[..., V] the logits with all tokens but the likeliest far below it: a greedy target takes that one."""
    best_1 = logits_V.argmax(-1, keepdim=True)
    return (logits_V - UNLIKELY).scatter(-1, best_1, logits_V.gather(-1, best_1))


def build(options: UnoOptions, target: Any) -> Uno:
    return Uno(options, target)


FAMILY = Family("uno", UnoOptions, build)
