"""A separate draft model: a small causal LM with its own KV cache, distilled (arXiv 2211.17192, 2302.01318, 2310.08461).

Shapes: B rows, N tokens of one pass, T positions, M predictions, R logit rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.drafters import Family
from drafttrain.drafters.common.autoregressive import Autoregressive
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.common.translation import TranslatedDraft, Translation
from drafttrain.drafters.options import DraftModelOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.ops.quantised import BITS, cost
from drafttrain.targets.companion import companion, from_scratch


@dataclass(frozen=True, slots=True)
class Model:
    """The language model that drafts."""

    lm: Any
    missing: str | None = None  # why it has no weights of its own
    translation: Translation | None = None  # for a model of another tokenizer


def build(options: DraftModelOptions, target: Target) -> Drafter:
    """Raises UserError for options that contradict each other, and for a model that cannot be loaded or cannot draft."""
    check(options)
    proposal = TreeProposal(options, options.draft_length, target)
    draft_model = model_of(options, target, proposal.kind)
    if draft_model.translation is not None:
        return TranslatedDraft(draft_model.lm, draft_model.translation, options.draft_length)
    return DraftModel(options, proposal, draft_model)


def model_of(options: DraftModelOptions, target: Target, kind: str) -> Model:
    """kind: of its proposals. Raises UserError for a model that cannot make them, or has no weights."""
    if options.source == "pruned":
        return Model(target.pruned(options.blocks))
    if options.source == "scratch":
        return Model(from_scratch(target, options.blocks, options.hidden_size))
    candidate = companion(target, str(options.path), options.revision)
    if kind != "chain" and not (candidate.same_tokens and candidate.model.trees):
        limitation = (
            "architecture is exact for chains only"
            if candidate.same_tokens
            else "tokenizer is another one, its drafts are text"
        )
        raise UserError(f"drafter.tree is {kind!r}, and the {limitation} of drafter.path {options.path!r}; set it to chain")
    if candidate.same_tokens:
        return Model(candidate.model, candidate.missing)
    if candidate.missing is not None:
        raise UserError(
            f"drafter.path {options.path!r} has no weights, which a model of another tokenizer needs: {candidate.missing}"
        )
    if candidate.model.recurrent:
        raise UserError(
            f"drafter.path {options.path!r} has another tokenizer and recurrent layers, whose state cannot go back when its "
            "text is encoded anew; choose a draft model of the target's tokenizer, or one without such layers"
        )
    if options.lora_rank:
        raise UserError(
            "drafter.lora_rank adapts what is trained, a model of another tokenizer is not; set drafter.lora_rank=0"
        )
    if options.quantize is not None:
        raise UserError("drafter.quantize needs a draft model of the target's tokenizer; set drafter.quantize=null")
    return Model(candidate.model, translation=Translation(target.tokenizer, candidate.tokenizer))


def check(options: DraftModelOptions) -> None:
    if (options.source == "hf") != bool(options.path):
        requirement = "needs drafter.path, a model directory or a hub id" if options.source == "hf" else "reads no drafter.path"
        raise UserError(f"drafter.source={options.source} {requirement}; drafter.source=hf and drafter.path go together")
    if options.hidden_size is not None and options.source != "scratch":
        raise UserError(
            f"drafter.hidden_size is {options.hidden_size}, and drafter.source={options.source} keeps its own; leave it out"
        )
    if options.lora_rank and options.source == "scratch":
        raise UserError("drafter.lora_rank adapts trained weights, drafter.source=scratch has none; set lora_rank=0")


class DraftModel(Autoregressive):
    """A model with its own cache; its chains are sampled at a temperature above 0 and carry the distribution q of every draft.

    missing: why the model has no weights of its own; it can then be filled from a checkpoint, but not trained.
    """

    def __init__(self, options: DraftModelOptions, proposal: TreeProposal, found: Model) -> None:
        super().__init__(proposal)
        lm, self.taps = found.lm, Taps()
        self.lm, self.missing, self.path = lm, found.missing, options.path
        self.starts_usable = options.source != "scratch"
        self.quantize = options.quantize
        lm.bits = BITS[options.quantize] if options.quantize else None
        self.remark = cost(options.quantize, lm.device) if options.quantize else ""
        if options.lora_rank:
            lm.adapt(options.lora_rank, options.lora_alpha)

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        if self.missing is not None:
            raise UserError(f"drafter.path {self.path!r} has a configuration but no weights to train: {self.missing}")

    @property
    def captured(self) -> bool:
        return bool(self.lm.captured)

    def language_model(self) -> Target:
        model: Target = self.lm
        return model

    def new_caches(self, slots: int, max_len: int) -> list[KVCache]:
        return [self.lm.new_cache(slots, max_len)]

    def run(
        self, caches: list[KVCache], token_BN: Tensor, ancestor_BNN: Tensor | None, position_BN: Tensor, row_BR: Tensor
    ) -> Tensor | None:
        logits_BRV: Tensor | None = self.lm(token_BN, caches[0], ancestor_BNN, position_BN, Taps(), row_BR).logits_BRV
        return logits_BRV

    @property
    def generations(self) -> bool:
        return bool(self.lm.generations)

    @property
    def last_position(self) -> int:
        return int(self.lm.shape.max_positions) - 1

    def variants(self) -> dict[str, Drafter]:
        if self.quantize is None:
            return {}
        unquantised = copy.deepcopy(self)
        unquantised.quantize, unquantised.lm.bits, unquantised.remark = None, None, ""
        return {"unquantised": unquantised}

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Teacher-forced next tokens: the same model drafts every depth, so one prediction covers all."""
        no_rows_B0 = batch.token_BT[:, :0]
        position_BT = batch.position_BT.clamp_max(self.lm.shape.max_positions - 1)
        final_BTH = self.lm(batch.token_BT, None, batch.sees(), position_BT, Taps(final=True), no_rows_B0).hidden[FINAL]
        pairs = batch.future(1)
        hidden_MH = final_BTH.flatten(0, 1)[pairs.source_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self.lm.head, every_step=True)


FAMILY = Family("draft_model", DraftModelOptions, build)
