"""A separate draft model: a small causal LM with its own KV cache, distilled (arXiv 2211.17192, 2302.01318, 2310.08461). One
with another tokenizer than the target's drafts text (`TranslatedDraft`).

Shapes: B rows, N tokens of one pass, T positions, A committed positions, K drafts, M predictions, R logit rows, H hidden, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.autoregressive import Autoregressive
from drafttrain.drafters.common.proposal import TreeProposal
from drafttrain.drafters.options import DraftModelOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.model.drafter import Commit, Drafter, FrozenRef, RevertibleState
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import FINAL, Taps, Target
from drafttrain.ops.quantised import BITS, cost
from drafttrain.targets.companion import companion, from_scratch

UNFINISHED = "\ufffd"  # a tokenizer decodes a part of a character to this
PART = 4  # tokens that one unfinished character has at most
BEFORE = 16  # draft tokens that are decoded together with the new ones: some decoders change the beginning of a text
WINDOW = 96  # characters before the new text that are encoded with it
CHUNK = 64  # columns of one pass


@dataclass(frozen=True, slots=True)
class Translation:
    """Translates between two tokenizers of transformers. Special tokens are left out, except the beginning of a sequence."""

    target: Any
    draft: Any

    def to_draft(self, token: Sequence[int]) -> list[int]:
        """The draft model's tokens for the target's text, without an unfinished last character."""
        bos = self.draft.bos_token_id
        first = [bos] if bos is not None and bos in self.draft("", verbose=False)["input_ids"] else []
        return first + _ids(self.draft, self._text(token))

    def to_target(self, token: Sequence[int], known: Sequence[int], written: Sequence[int]) -> list[int]:
        """Target tokens that continue `token`, for the tokens `written` by the draft model after `known`; empty if the two
        tokenisations do not meet at the end of the text.

        Target text `the ca`, draft `t sat`: `the cat sat` begins with the tokens of `the ca` only if `ca` and `t` stay
        separate; the tokens after them are then the drafts. If `cat` is one token, there is nothing to draft.
        """
        ends = [i for i, t in enumerate(written) if t == self.draft.eos_token_id]
        written = list(written[: ends[0]]) if ends else list(written)
        text, partial_ids = self._text(token), self._part(token)
        new_text = self._added(known[-BEFORE:], written)
        if partial_ids is None or not (new_text or ends):
            return []
        before_ids, after_ids = (_ids(self.target, tail) for tail in (text[-WINDOW:], text[-WINDOW:] + new_text))
        prefix_length = len(before_ids)
        if (
            common(before_ids, after_ids) < prefix_length
            or after_ids[prefix_length : prefix_length + len(partial_ids)] != partial_ids
        ):
            return []
        stop = self.target.eos_token_id
        return after_ids[prefix_length + len(partial_ids) :] + ([stop] if ends and stop is not None else [])

    def _added(self, context_ids: Sequence[int], draft_ids: Sequence[int]) -> str:
        context_text, full_text = _text(self.draft, context_ids), _text(self.draft, [*context_ids, *draft_ids])
        return full_text[len(context_text) :].rstrip(UNFINISHED) if full_text.startswith(context_text) else ""

    def _text(self, token: Sequence[int]) -> str:
        return _text(self.target, token).rstrip(UNFINISHED)

    def _part(self, token: Sequence[int]) -> list[int] | None:
        """The tokens at the end that are a part of a character, mostly none; None if that cannot be found out."""
        for size in range(min(PART, len(token)) + 1):
            if not _text(self.target, token[: len(token) - size]).endswith(UNFINISHED):
                return list(token[len(token) - size :])
        return None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def recent(token: list[int], most: int) -> list[int]:
    """At most `most` of the last tokens. The start moves by half of that at a time, so that a cache of them stays useful."""
    step = max(1, most // 2)
    return token if len(token) <= most else token[-(-(len(token) - most) // step) * step :]


class TranslatedDraft(Drafter):
    """Greedy chains of a frozen LM that has another tokenizer than the target's: its drafts are translated as text.

    This is universal assisted decoding (transformers; arXiv 2502.05202, string-level exact match). The drafts are
    deterministic, so that a lossless policy stays lossless whatever the translation gives.

    Sequences are encoded anew in each decode step, on the host. Only tokens after the longest common prefix with the cache are
    computed.
    """

    captured = False
    trained = False
    revertible = True
    remark = "the draft model has another tokenizer: it is not trained, and its drafts go over as text, on the host"

    def __init__(self, lm: Any, translation: Translation, draft_length: int) -> None:
        super().__init__(Proposal(draft_length))
        self.taps, self.translation = Taps(), translation
        self._lm = FrozenRef(lm.requires_grad_(False).eval())

    @property
    def lm(self) -> Any:
        return self._lm.module

    def predict(self, batch: TrainBatch) -> Iterator[Prediction]:
        return iter(())

    def open(self, slots: int, max_len: int) -> TranslatedState:
        return TranslatedState(self, slots, max_len)


class TranslatedState(RevertibleState):
    """By slot: the target's tokens, root included, and the draft model's tokens whose keys are in the cache."""

    def __init__(self, drafter: TranslatedDraft, slots: int, max_len: int) -> None:
        lm, longest = drafter.lm, max(2 * max_len, CHUNK)  # another tokenizer may need more tokens
        self.drafter = drafter
        self.context = max(1, min(lm.shape.max_positions - drafter.draft_length, longest))  # tokens that the draft model reads
        self.kv: KVCache = lm.new_cache(slots, self.context + drafter.draft_length + CHUNK)
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.cached: list[list[int]] = [[] for _ in range(slots)]

    def reset(self, slot_R: Tensor) -> None:
        self.kv.reset(slot_R)
        for slot in slot_R.tolist():
            self.tokens[slot], self.cached[slot] = [], []

    def observe(self, commit: Commit, slot_B: Tensor) -> None:
        rows = zip(slot_B.tolist(), commit.count_B.tolist(), commit.token_BA.tolist(), commit.next_BA.tolist(), strict=True)
        for slot, count, token, next_tokens in rows:
            if count:
                self.tokens[slot] = (self.tokens[slot] or token[:1]) + next_tokens[:count]

    def snapshot(self, slot_B: Tensor) -> list[list[int]]:
        return [self.tokens[slot] for slot in slot_B.tolist()]

    def restore(self, slot_B: Tensor, snapshot: list[list[int]]) -> None:
        for slot, tokens in zip(slot_B.tolist(), snapshot, strict=True):
            self.tokens[slot] = tokens

    def propose(self, slot_B: Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        translation, longest = self.drafter.translation, self.drafter.draft_length
        sequences = [self.tokens[slot] for slot in slot_B.tolist()]
        contexts = [recent(translation.to_draft(tokens), self.context) for tokens in sequences]
        draft_tokens = self._write(slot_B, contexts)
        steps = min(longest, depth or longest)
        drafts = [translation.to_target(*row)[:steps] for row in zip(sequences, contexts, draft_tokens, strict=True)]
        rows = [[tokens[-1], *draft, *[0] * (steps - len(draft))] for tokens, draft in zip(sequences, drafts, strict=True)]
        count_B = torch.tensor([1 + len(draft) for draft in drafts], device=slot_B.device)
        return DraftTree.chain(torch.tensor(rows, device=slot_B.device), count_B)

    def _write(self, slot_B: Tensor, contexts: list[list[int]]) -> list[list[int]]:
        """The `draft_length` tokens that the model writes after each row's tokens; none for a row without tokens."""
        kv, slots, device = self.kv, slot_B.tolist(), slot_B.device
        kv.rows(slot_B)
        cached_lengths = [
            max(0, min(common(self.cached[s], row), len(row) - 1)) for s, row in zip(slots, contexts, strict=True)
        ]
        kv.crop(torch.tensor(cached_lengths, device=device))
        uncached = [row[n:] for row, n in zip(contexts, cached_lengths, strict=True)]
        logits_BV: Tensor | None = None
        for start in range(0, max(map(len, uncached)), CHUNK):
            piece = [row[start : start + CHUNK] for row in uncached]
            count_B = torch.tensor([len(row) for row in piece], device=device)
            columns = max(map(len, piece))
            token_BN = torch.tensor([[*row, *[0] * (columns - len(row))] for row in piece], device=device)
            chunk_logits_BV = self._run(token_BN, count_B)
            logits_BV = chunk_logits_BV if logits_BV is None else torch.where(count_B[:, None] > 0, chunk_logits_BV, logits_BV)
        if logits_BV is None:
            return [[] for _ in contexts]
        active_B, columns_BK = torch.tensor([bool(row) for row in contexts], device=device).long(), [logits_BV.argmax(-1)]
        for _ in range(self.drafter.draft_length - 1):
            columns_BK.append(self._run(columns_BK[-1][:, None], active_B).argmax(-1))
        draft_tokens = [row if k else [] for row, k in zip(torch.stack(columns_BK, 1).tolist(), contexts, strict=True)]
        for slot, row, draft in zip(slots, contexts, draft_tokens, strict=True):
            self.cached[slot] = row + draft[:-1]
        return draft_tokens

    def _run(self, token_BN: Tensor, count_B: Tensor) -> Tensor:
        """[B, V] logits at each row's last token; its `count` tokens stay in the cache."""
        lm, kv, column_N = self.drafter.lm, self.kv, torch.arange(token_BN.shape[1], device=token_BN.device)
        position_BN = (kv.length_B[:, None] + column_N).clamp_max(lm.shape.max_positions - 1)
        last_B1 = (count_B - 1).clamp_min(0)[:, None]
        logits_BRV: Tensor = lm(token_BN, kv, None, position_BN, Taps(), last_B1).logits_BRV
        kv.keep(column_N.expand_as(token_BN), count_B)
        return logits_BRV[:, 0]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _text(tokenizer: Any, token: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token), skip_special_tokens=True, clean_up_tokenization_spaces=False))


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


FAMILY = Family("draft_model", DraftModelOptions, build, early=1)
