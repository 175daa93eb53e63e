"""Golden drafts of a checkpoint: the drafter's greedy drafts and logits at some points, with the target's states there.

An export must draft the same. The code that trains computes them: `Drafter.predict` along the drafter's own chain.

Shapes: P points, T positions, K drafts, V vocabulary, R recorded logits of a draft, H hidden.

A point is a text with the target's states, the root after it (the target's own choice), and then K drafts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.files import atomic_write_bytes, remove_abandoned, sealed, unsealed
from drafttrain.data.prompts import load_prompts
from drafttrain.drafters.checkpoint import read_meta
from drafttrain.export.opened import Opened
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.model.shapes import LayerShape, TargetShape
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.frozen_ends import FrozenEnds
from drafttrain.targets.load import LoadedTarget

GOLDEN = "golden.safetensors"
TEXTS, LONGEST, SHORTEST = 3, 24, 12  # number of prompts, and tokens of the two texts made from each
WHOLE, RECORDED = 4096, 256  # vocabularies up to WHOLE are recorded in full, of larger ones the RECORDED greatest logits
TENSORS = ("text_PT", "count_P", "root_P", "draft_PK", "token_PKR", "logit_PKR", "lse_PK")
STATE = "state."
FINAL_STATE = "final"
SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Golden:
    """Golden drafts, and the material to make them again."""

    text_PT: Tensor  # right-padded
    count_P: Tensor  # real tokens of each text
    root_P: Tensor
    draft_PK: Tensor
    token_PKR: Tensor  # most likely tokens of every draft in target ids, the draft itself first
    logit_PKR: Tensor  # their logits
    lse_PK: Tensor  # logsumexp of all logits
    # [P, T, H] by k, the input of block k (n of n blocks: the last output), and by FINAL, the post-norm output
    states: dict[int, Tensor] = field(default_factory=dict)
    ids: Tensor | None = None  # target ids of the drafter's own vocabulary, if it has one
    facts: dict[str, Any] = field(default_factory=dict)  # the settings that the drafts depend on, as plain data
    sha256: str = ""  # of the weights

    def to(self, device: torch.device) -> Golden:
        """The same with tensors on this device."""
        tensors: dict[str, Any] = {name: getattr(self, name).to(device) for name in TENSORS}
        ids = None if self.ids is None else self.ids.to(device)
        return replace(self, **tensors, states={k: x.to(device) for k, x in self.states.items()}, ids=ids)


def stored(directory: Path) -> Golden | None:
    """The checkpoint's golden drafts; None if it has none, or if they are of other weights. Raises UserError for a damaged
    file.
    """
    file = directory / GOLDEN
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as reader:
            metadata = unsealed(json.loads(reader.metadata()["drafttrain"]))
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        if metadata is None or metadata.pop("tensors", None) not in (None, _digest(tensors)):
            raise ValueError("its checksum is not that of its contents")
        states = {_key(name): tensors.pop(name) for name in list(tensors) if name.startswith(STATE)}
        golden = Golden(**tensors, states=states, **metadata)
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: damaged or cut off ({error}); delete it, and export makes it again") from error
    return golden if golden.sha256 == read_meta(directory).sha256 else None


def store(directory: Path, golden: Golden) -> None:
    """Write the golden drafts next to the checkpoint's weights. Raises UserError on a full disk."""
    tensors = {name: getattr(golden, name) for name in TENSORS} | ({} if golden.ids is None else {"ids": golden.ids})
    tensors |= {f"{STATE}{FINAL_STATE if k == FINAL else k}": x for k, x in golden.states.items()}
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    metadata = sealed({"facts": golden.facts, "sha256": golden.sha256, "tensors": _digest(tensors)})
    content = save(tensors, {"drafttrain": json.dumps(metadata)})
    remove_abandoned(directory, f"{GOLDEN}.tmp-*")
    atomic_write_bytes(directory / GOLDEN, content, f"the checkpoint is whole; free space under {directory}")


def _digest(tensors: dict[str, Tensor]) -> str:
    """sha256 of all names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sequences_for(loaded: LoadedTarget) -> list[list[int]]:
    """The first tokens of embedded prompts. Where the tokenizer makes too few tokens, made-up ones fill them.

    Of a target without blocks: beginnings of the text whose states it knows.
    """
    if isinstance(loaded.target, FrozenEnds) and loaded.target.known is not None:
        return [loaded.target.known.ids[:length] for length in range(SHORTEST, LONGEST + 1, (LONGEST - SHORTEST) // TEXTS)]
    vocab, texts = loaded.target.shape.vocab_size, []
    for number, prompt in enumerate(load_prompts("embedded", TEXTS)):
        prompt_ids = list(loaded.tokenizer(prompt.turns[0], add_special_tokens=False, verbose=False)["input_ids"])
        filler_ids = [(7919 * (i + 1) + 104729 * number) % vocab for i in range(LONGEST)]
        texts += [(prompt_ids + filler_ids)[:LONGEST], (prompt_ids + filler_ids)[:SHORTEST]]
    return texts


@torch.no_grad()
def made(opened: Opened, texts: Sequence[Sequence[int]]) -> Golden:
    """Run the target over these texts and let the drafter draft after each."""
    target, drafter, device = opened.target, opened.drafter, opened.loaded.target.device
    max_tokens = target.shape.max_positions - drafter.draft_length - 1
    rows = [torch.tensor(text[:max_tokens], device=device) for text in texts]
    text_PT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    count_P = torch.tensor([len(row) for row in rows], device=device)
    state_keys = _wanted(drafter.taps, target.shape.blocks)
    blocks = tuple(sorted(k - 1 for k in state_keys if k > 0))
    position_PT = torch.arange(text_PT.shape[1], device=device).expand_as(text_PT)
    out = target(text_PT, None, None, position_PT, Taps(blocks, FINAL in state_keys), (count_P - 1)[:, None])
    hidden_states = {block + 1 if block != FINAL else FINAL: x for block, x in out.hidden.items()}
    states = hidden_states | ({0: opened.loaded.target.embed(text_PT)} if 0 in state_keys else {})
    root_P = out.logits_BRV[:, 0].argmax(-1)
    empty = torch.empty(0, device=device)
    undrafted = Golden(text_PT, count_P, root_P, empty, empty, empty, empty, states, sha256=opened.meta.sha256)
    golden = drafted(drafter, undrafted, target.shape.vocab_size)
    return replace(golden, facts=facts_of(opened))


def facts_of(opened: Opened) -> dict[str, Any]:
    """The settings that an export can get wrong, with their values. layer ids: by k, as in `Golden.states`."""
    shape, taps, model = opened.shape, opened.drafter.taps, opened.drafter.language_model()
    facts: dict[str, Any] = {
        "vocabulary": opened.loaded.target.shape.vocab_size,
        "rope": shape.rope_theta,
        "rope scaling": _scaling(shape) if model is None else _model_scaling(model),
        "norm": shape.norm_eps,
        "head_dim": shape.head_dim,
        "heads": [shape.heads, shape.kv_heads],
        "max positions": shape.max_positions,
    }
    return facts | ({"layer ids": [block + 1 for block in taps.blocks]} if taps.blocks else {})


def check_facts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise ParityError for a setting of exported files that is not the checkpoint's."""
    for name, value in found.items():
        if value != expected[name]:
            actual_text, expected_text = (
                str(x) if len(str(x)) <= SHOWN else f"{str(x)[:SHOWN]}..." for x in (value, expected[name])
            )
            raise ParityError(name, f"the files have {actual_text}, the checkpoint's drafts come from {expected_text}")


@torch.no_grad()
def drafted(drafter: Drafter, golden: Golden, vocab: int) -> Golden:
    """The golden material with this drafter's logits. The drafter drafts freely where no drafts are given, else it follows
    them.
    """
    logits_PKV, ids, draft_PK = _chain(drafter, golden, vocab)
    finite = int((logits_PKV > -torch.inf).sum(-1).min())  # some families give logits for a few tokens only
    top = logits_PKV.topk(finite if finite <= WHOLE else RECORDED)
    return replace(
        golden,
        draft_PK=draft_PK,
        token_PKR=top.indices,
        logit_PKR=top.values,
        lse_PK=logits_PKV.logsumexp(-1),
        ids=ids,
    )


@torch.no_grad()
def followed(drafter: Drafter, golden: Golden, vocab: int) -> tuple[Tensor, Tensor | None]:
    """([P, K, V] this drafter's logits along the golden drafts, target ids of the drafter's own vocabulary, if it has one)."""
    logits_PKV, ids, _ = _chain(drafter, golden, vocab)
    return logits_PKV, ids


def _chain(drafter: Drafter, golden: Golden, vocab: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """([P, K, V] logits, the target ids of the drafter's own vocabulary, [P, K] drafts)."""
    T, K, device = golden.text_PT.shape[1], drafter.draft_length, golden.text_PT.device
    width, count_P = T + 1 + K, golden.count_P
    column_T = torch.arange(width, device=device)
    token_PT = F.pad(golden.text_PT, (0, 1 + K)).scatter(1, count_P[:, None], golden.root_P[:, None])
    slot_PK = count_P[:, None] + 1 + torch.arange(K, device=device)
    teacher_forced = golden.draft_PK.numel() > 0
    if teacher_forced:
        token_PT = token_PT.scatter(1, slot_PK, golden.draft_PK)
    row_P = torch.arange(len(count_P), device=device)
    document_PT = torch.where(column_T < count_P[:, None] + 1 + K, row_P[:, None], -1)
    states = {(k - 1 if k != FINAL else FINAL): F.pad(x, (0, 0, 0, 1 + K)).float() for k, x in golden.states.items() if k != 0}
    logits, ids = [], None
    for step in range(K):
        batch = TrainBatch(token_PT, column_T.expand_as(token_PT), document_PT, document_PT >= 0, states)
        logits_PV, ids = _predicted(drafter, batch, step, count_P - 1, slot_PK[:, step], vocab)
        logits.append(logits_PV)
        if not teacher_forced:
            token_PT = token_PT.scatter(1, slot_PK[:, step, None], logits_PV.argmax(-1, keepdim=True))
    return torch.stack(logits, 1).float(), ids, token_PT.gather(1, slot_PK)


def _predicted(
    drafter: Drafter, batch: TrainBatch, step: int, source_P: Tensor, label_P: Tensor, vocab: int
) -> tuple[Tensor, Tensor | None]:
    """([P, V] logits of a draft, the target ids of the drafter's own vocabulary)."""
    start_P = torch.arange(len(source_P), device=source_P.device) * batch.token_BT.shape[1]
    for prediction in drafter.predict(batch):
        if not prediction.counted or not (prediction.step == step or prediction.every_step):
            continue
        hit_PM = (start_P + label_P)[:, None] == prediction.label_M
        if not prediction.every_step:
            hit_PM &= (start_P + source_P)[:, None] == prediction.source_M
        assert bool((hit_PM.sum(1) == 1).all()), "each point's draft has exactly one prediction"
        logits_PD = prediction.head(prediction.hidden_MH[hit_PM.long().argmax(1)])
        return prediction.whole(logits_PD, vocab), prediction.vocab_D
    raise AssertionError(f"no prediction is for draft {step}")


def _wanted(taps: Taps, blocks: int) -> set[int]:
    """The tapped states and their neighbours, so that reading a wrong layer changes the figures."""
    tapped = [block + 1 for block in taps.blocks] + ([blocks] if taps.final else [])
    neighbours = {k + d for k in tapped for d in (-1, 0, 1) if 0 <= k + d <= blocks}
    return neighbours | ({FINAL} if tapped else set())


def _scaling(shape: TargetShape) -> str:
    """The kind of rotary scaling of a drafter's own layers."""
    scaling = shape.rope_scaling if isinstance(shape, LayerShape) else None
    return str((scaling or {}).get("rope_type", "default"))


def _model_scaling(model: Any) -> str:
    """The kind of rotary scaling of a transformers model."""
    rope = getattr(model.model.config.get_text_config(), "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))


def _key(name: str) -> int:
    suffix = name.removeprefix(STATE)
    return FINAL if suffix == FINAL_STATE else int(suffix)
