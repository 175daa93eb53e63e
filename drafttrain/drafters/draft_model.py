"""A separate draft model: a small causal LM with a cache of its own, distilled (arXiv 2211.17192, 2302.01318, 2310.08461).

Shapes: B rows, N tree nodes, A staged positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.drafter import Commit, Drafter, draft_chain
from drafttrain.drafters import Family
from drafttrain.errors import UserError
from drafttrain.kv import KVCache
from drafttrain.ops.quantised import BITS
from drafttrain.sampling import Sampling
from drafttrain.staged import CachedDrafter, OwnCache, Staged, with_root
from drafttrain.target import FINAL, Taps, Target
from drafttrain.translation import TranslatedDraft, Translation
from drafttrain.tree import DraftTree


@dataclass
class DraftModelOptions:
    """Where the draft model comes from, which of its weights are trained, and how far it drafts."""

    family: str = "draft_model"
    source: str = "pruned"  # pruned: the target's first blocks. scratch: its architecture, fresh weights. hf: `path`
    path: str | None = None  # hf: directory or hub id of a causal LM, safetensors
    revision: str | None = None
    blocks: int = 3  # pruned, scratch
    width: int | None = None  # scratch: hidden size; null: the target's
    lora_rank: int = 0  # of adapters on every linear map but the head (arXiv 2106.09685); 0: all weights are trained
    lora_alpha: int = 16  # adapters count alpha / rank
    quantize: str | None = None  # int8, int4: of the weights that it decodes with; measured beside those as they are
    draft_length: int = 4


def build(options: DraftModelOptions, target: Target) -> Drafter:
    """Raises UserError for options that contradict each other, and for a model that cannot be loaded or cannot draft."""
    _check(options)
    if options.source == "pruned":
        return DraftModel(options, target.pruned(options.blocks))
    if options.source == "scratch":
        return DraftModel(options, target.scratch(options.blocks, options.width))
    found = target.companion(str(options.path), options.revision)
    if found.same_tokens:
        return DraftModel(options, found.model, found.missing)
    if found.missing is not None:
        raise UserError(
            f"drafter.path {options.path!r} has no weights, which a model of another tokenizer needs: {found.missing}"
        )
    if options.lora_rank:
        raise UserError(
            "drafter.lora_rank adapts what is trained, a model of another tokenizer is not; set drafter.lora_rank=0"
        )
    if options.quantize is not None:
        raise UserError("drafter.quantize needs a draft model of the target's tokenizer; set drafter.quantize=null")
    return TranslatedDraft(found.model, Translation(target.tokenizer, found.tokenizer), options.draft_length)


def _check(options: DraftModelOptions) -> None:
    if options.draft_length < 1:
        raise UserError(f"drafter.draft_length is {options.draft_length}; set it to 1 or more")
    if options.source not in ("pruned", "scratch", "hf"):
        raise UserError(f"drafter.source is {options.source!r}; choose pruned, scratch or hf")
    if (options.source == "hf") != bool(options.path):
        needs = "needs drafter.path, a model directory or a hub id" if options.source == "hf" else "reads no drafter.path"
        raise UserError(f"drafter.source={options.source} {needs}; drafter.source=hf and drafter.path go together")
    if options.quantize not in (None, *BITS):
        raise UserError(f"drafter.quantize is {options.quantize!r}; choose {' or '.join(BITS)}, or null")
    if options.width is not None and options.source != "scratch":
        raise UserError(f"drafter.width is {options.width}, and drafter.source={options.source} keeps its own; leave it out")
    if options.lora_rank < 0 or options.lora_alpha <= 0:
        raise UserError(
            f"drafter.lora_rank is {options.lora_rank}, lora_alpha {options.lora_alpha}; "
            "set the rank to 1 or more (0: no adapters) and alpha above 0"
        )
    if options.lora_rank and options.source == "scratch":
        raise UserError("drafter.lora_rank adapts trained weights, drafter.source=scratch has none; set lora_rank=0")


class DraftModel(CachedDrafter):
    """Chain drafter with its own cache; at temperature above 0 it samples and reports the law q of every draft.

    missing: why the model's own weights are not there; it can then be filled from a checkpoint, and not be trained.
    """

    samples = True

    def __init__(self, options: DraftModelOptions, lm: Any, missing: str | None = None) -> None:
        super().__init__()
        self.taps, self.draft_length = Taps(), options.draft_length
        self.lm, self.missing, self.path = lm, missing, options.path
        self.starts_usable = options.source != "scratch"
        self.quantize = options.quantize
        lm.bits = BITS[options.quantize] if options.quantize else None
        if options.lora_rank:
            lm.adapt(options.lora_rank, options.lora_alpha)

    def prepare(self, counts: Callable[[], Tensor]) -> None:
        if self.missing is not None:
            raise UserError(f"drafter.path {self.path!r} has a configuration but no weights to train: {self.missing}")

    def variants(self) -> dict[str, Drafter]:
        if self.quantize is None:
            return {}
        plain = copy.deepcopy(self)
        plain.quantize = plain.lm.bits = None
        return {"unquantised": plain}

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        """Teacher-forced next tokens: the same model drafts every depth, so one prediction stands for all."""
        no_rows_B0 = batch.token_BT[:, :0]
        position_BT = batch.position_BT.clamp_max(self.lm.shape.max_positions - 1)
        final_BTH = self.lm(batch.token_BT, None, batch.sees(), position_BT, Taps(final=True), no_rows_B0).hidden[FINAL]
        pairs = batch.future(1)
        hidden_MH = final_BTH.flatten(0, 1)[pairs.source_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, hidden_MH, self.lm.head, every_step=True)

    def language_model(self) -> Target:
        model: Target = self.lm
        return model

    def open(self, slots: int, max_len: int) -> OwnCache:
        kv = self.lm.new_cache(slots, max_len)
        return OwnCache(kv, Staged(slots, self.draft_length, kv.length_S.device))

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        no_rows_B0 = commit.token_BA[:, :0]
        self._feed(state.kv, commit.token_BA, commit.count_B, no_rows_B0)

    def propose(self, state: OwnCache, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv = state.kv
        kv.rows(slot_B)
        token_BN, last_B = with_root(self.staged(state, slot_B))
        logits_BV = self._feed(kv, token_BN, last_B + 1, last_B[:, None])
        committed_B = kv.length_B - 1  # the root's keys are scratch: the next commit brings it again

        def advance(token_B: Tensor) -> Tensor:
            return self._feed(kv, token_B[:, None], torch.ones_like(token_B), torch.zeros_like(token_B)[:, None])

        steps = min(self.draft_length, depth or self.draft_length)
        root_B = token_BN.gather(1, last_B[:, None])[:, 0]
        tree = draft_chain(root_B, logits_BV, advance, steps, sampling, committed_B)
        kv.rollback(committed_B)
        return tree

    def _feed(self, kv: KVCache, token_BN: Tensor, count_B: Tensor, row_BR: Tensor) -> Tensor:
        """[B, V] logits at the one row asked for, if any; the first `count` tokens stay in the cache."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(self.lm.shape.max_positions - 1)
        logits_BRV = self.lm(token_BN, kv, None, position_BN, Taps(), row_BR).logits_BRV
        kv.keep(column_N.expand_as(token_BN), count_B)
        return logits_BRV[:, 0] if row_BR.shape[1] else row_BR


FAMILY = Family("draft_model", DraftModelOptions, build)
