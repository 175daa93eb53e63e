"""A separate draft model: a small causal LM with a cache of its own, distilled (arXiv 2211.17192, 2302.01318, 2310.08461).

Shapes: B rows, N tree nodes, A staged positions, W nodes fed at once, M nodes fed so far, R logit rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import Prediction, TrainBatch
from drafttrain.drafter import Commit, Drafter, draft_chain
from drafttrain.drafters import Family
from drafttrain.dynamic import Generation, Grower, Scored
from drafttrain.errors import UserError
from drafttrain.kv import KVCache
from drafttrain.ops.quantised import BITS
from drafttrain.ops.tree_attention import ancestors_of
from drafttrain.proposal import Proposal, Proposing, TreeOptions
from drafttrain.sampling import Sampling
from drafttrain.staged import CachedDrafter, OwnCache, Staged, with_root
from drafttrain.target import FINAL, Taps, Target
from drafttrain.translation import TranslatedDraft, Translation
from drafttrain.tree import DraftTree


@dataclass
class DraftModelOptions(TreeOptions):
    """Where the draft model comes from, which of its weights are trained, and how it drafts."""

    family: str = "draft_model"
    tree: str = "chain"
    source: str = "pruned"  # pruned: the target's first blocks. scratch: its architecture, fresh weights. hf: `path`
    path: str | None = None  # hf: directory or hub id of a causal LM, safetensors
    revision: str | None = None
    blocks: int = 3  # pruned, scratch
    hidden_size: int | None = None  # scratch; null: the target's
    lora_rank: int = 0  # of adapters on every linear map but the head (arXiv 2106.09685); 0: all weights are trained
    lora_alpha: int = 16  # adapters count alpha / rank
    quantize: str | None = None  # int8, int4: of the weights that it decodes with; measured beside those as they are
    draft_length: int = 4


def build(options: DraftModelOptions, target: Target) -> Drafter:
    """Raises UserError for options that contradict each other, and for a model that cannot be loaded or cannot draft."""
    _check(options)
    proposal = Proposal(options, options.draft_length, target)
    if options.source == "pruned":
        return DraftModel(options, proposal, target.pruned(options.blocks))
    if options.source == "scratch":
        return DraftModel(options, proposal, target.scratch(options.blocks, options.hidden_size))
    found = target.companion(str(options.path), options.revision)
    if proposal.kind != "chain" and not (found.same_tokens and found.model.trees):
        why = "architecture is exact for chains only" if found.same_tokens else "tokenizer is another one, its drafts are text"
        raise UserError(f"drafter.tree is {proposal.kind!r}, and the {why} of drafter.path {options.path!r}; set it to chain")
    if found.same_tokens:
        return DraftModel(options, proposal, found.model, found.missing)
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
    if options.hidden_size is not None and options.source != "scratch":
        raise UserError(
            f"drafter.hidden_size is {options.hidden_size}, and drafter.source={options.source} keeps its own; leave it out"
        )
    if options.lora_rank < 0 or options.lora_alpha <= 0:
        raise UserError(
            f"drafter.lora_rank is {options.lora_rank}, lora_alpha {options.lora_alpha}; "
            "set the rank to 1 or more (0: no adapters) and alpha above 0"
        )
    if options.lora_rank and options.source == "scratch":
        raise UserError("drafter.lora_rank adapts trained weights, drafter.source=scratch has none; set lora_rank=0")


@dataclass
class DraftModelState(OwnCache):
    """grower: of the proposals; None: chains."""

    grower: Grower | None


@dataclass
class Above:
    """The nodes fed so far in one proposal, root excluded."""

    token_BM: Tensor
    bits_BM: Tensor
    depth_BM: Tensor

    @staticmethod
    def of(root_B: Tensor) -> Above:
        return Above(*(root_B.new_empty(len(root_B), 0) for _ in range(3)))

    def add(self, nodes: Generation) -> None:
        self.token_BM = torch.cat([self.token_BM, nodes.token_BW], 1)
        self.bits_BM = torch.cat([self.bits_BM, nodes.bits_BW], 1)
        self.depth_BM = torch.cat([self.depth_BM, torch.full_like(nodes.token_BW, nodes.depth)], 1)


class DraftModel(CachedDrafter, Proposing):
    """A model with its own cache; its chains are sampled at temperature above 0, and report the law q of every draft.

    missing: why the model's own weights are not there; it can then be filled from a checkpoint, and not be trained.
    """

    def __init__(self, options: DraftModelOptions, proposal: Proposal, lm: Any, missing: str | None = None) -> None:
        super().__init__()
        self.taps, self.draft_length = Taps(), options.draft_length
        self.proposal, self.samples = proposal, proposal.kind == "chain"
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

    def open(self, slots: int, max_len: int) -> DraftModelState:
        chain = self.proposal.kind == "chain"
        kv = self.lm.new_cache(slots, max_len if chain else max_len + self.proposal.fed)
        device = kv.length_S.device
        grower = None if chain else self.proposal.grower(device)
        return DraftModelState(kv, Staged(slots, self.draft_length, device), grower)

    def consume(self, state: OwnCache, commit: Commit, slot_B: Tensor) -> None:
        state.kv.rows(slot_B)
        no_rows_B0 = commit.token_BA[:, :0]
        self._feed(state.kv, commit.token_BA, commit.count_B, no_rows_B0)

    def propose(self, state: DraftModelState, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        kv = state.kv
        kv.rows(slot_B)
        token_BN, last_B = with_root(self.staged(state, slot_B))
        logits_BV = self._feed(kv, token_BN, last_B + 1, last_B[:, None])
        committed_B = kv.length_B - 1  # the root's keys are scratch: the next commit brings it again

        root_B = token_BN.gather(1, last_B[:, None])[:, 0]
        if state.grower is None:
            tree = self._chain(kv, root_B, logits_BV, depth, sampling)
        else:
            first = Scored(logits_BV[:, None], logits_BV[:, None, :0])
            tree = state.grower.grow(root_B, first, partial(self._score, kv, Above.of(root_B)), None, depth)
        kv.rollback(committed_B)
        return tree

    def _chain(self, kv: KVCache, root_B: Tensor, logits_BV: Tensor, depth: int | None, sampling: Sampling) -> DraftTree:
        def advance(token_B: Tensor) -> Tensor:
            return self._feed(kv, token_B[:, None], torch.ones_like(token_B), torch.zeros_like(token_B)[:, None])

        steps = min(self.draft_length, depth or self.draft_length)
        return draft_chain(root_B, logits_BV, advance, steps, sampling, kv.length_B - 1)

    def _score(self, kv: KVCache, above: Above, nodes: Generation) -> Scored:
        """The generations before are computed again beside this one: no pass leaves keys behind that siblings could see."""
        W = nodes.token_BW.shape[1]
        above.add(nodes)
        M = above.token_BM.shape[1]
        position_BM = (kv.length_B[:, None] + above.depth_BM - 1).clamp_max(self.lm.shape.max_positions - 1)
        row_BW = torch.arange(M - W, M, device=position_BM.device).expand(len(position_BM), W)
        out = self.lm(above.token_BM, kv, ancestors_of(above.bits_BM), position_BM, Taps(), row_BW)
        return Scored(out.logits_BRV, out.logits_BRV[..., :0])  # the model's state is its cache

    def _feed(self, kv: KVCache, token_BN: Tensor, count_B: Tensor, row_BR: Tensor) -> Tensor:
        """[B, V] logits at the one row asked for, if any; the first `count` tokens stay in the cache."""
        column_N = torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(self.lm.shape.max_positions - 1)
        logits_BRV = self.lm(token_BN, kv, None, position_BN, Taps(), row_BR).logits_BRV
        kv.keep(column_N.expand_as(token_BN), count_B)
        return logits_BRV[:, 0] if row_BR.shape[1] else row_BR


FAMILY = Family("draft_model", DraftModelOptions, build)
