"""The parity check: an exported directory, read back from its files alone, must draft as its checkpoint does.

The files are read by the format's importer, as a published drafter would be, or by its `read` where it has none. What comes
back is a drafter of ours. It must have the settings of the checkpoint's drafter, and give its golden drafts and logits.

Shapes: P points, K drafts, R recorded logits, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.core.errors import ParityError, UserError
from drafttrain.drafters.checkpoint import filled
from drafttrain.export.compressed import Compression, narrow_weights
from drafttrain.export.convert import taken
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import DTYPES, ExportSource, Files
from drafttrain.export.format import Format, Importer, ReadBack
from drafttrain.export.golden import Golden, check_facts, drafted, facts_of, followed
from drafttrain.export.layers import written_fields
from drafttrain.export.opened import Opened
from drafttrain.export.serve import draft_lengths
from drafttrain.measure.expected import expected_tau, forced_hits
from drafttrain.model.drafter import Drafter

TOLERANCE = 5e-5  # relative to a draft's largest logit (at least 1), for float32 sums in another order


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of the check."""

    drafts: int  # number of compared drafts
    gap: float  # largest difference of logits, in units of `TOLERANCE`
    changed: int  # drafts that the rounding of the exported weights changes
    tau: tuple[float, float] | None = None  # expected tau before and after quantisation


def check(directory: Path, to: Format, files: Files, source: ExportSource, golden: Golden, expected: Golden) -> Parity:
    """Compare the files' drafts with the golden ones. expected: the golden drafts, or `rounded` ones. Raises ParityError."""
    if files.tokenizer:
        check_tokenizer(directory, source.opened.loaded.tokenizer.get_vocab())
    try:
        readback = read_back(directory, to, source)
        reopened = _opened_again(directory, readback, source)
    except (UserError, OSError, ValueError) as error:
        raise ParityError("files", str(error)) from error
    vocab = golden.facts["vocabulary"]
    _check_settings(reopened, to, readback, source, golden)
    logits_PKV, ids_D = followed(reopened.drafter, golden.to(reopened.target.device), vocab)
    check_facts({"d2t": _ids(ids_D, vocab)}, {"d2t": _ids(golden.ids, vocab)})
    return compared(logits_PKV.cpu(), golden, expected)


def read_back(directory: Path, to: Format, source: ExportSource) -> ReadBack:
    """The drafter in the files. What they do not determine, such as the length of a chain, is the checkpoint's.

    Raises UserError or ParityError for files that cannot be read.
    """
    meta = source.opened.meta
    with to.opened(directory) as folder:
        if not isinstance(to.read, Importer):
            return to.read(folder, source)
        record = {"family": meta.family, "options": meta.options}
        checkpoint = ExternalCheckpoint(folder, "the written directory", record)
        if not to.read.knows(checkpoint):
            raise ParityError("files", f"they are not recognised as {to.name}: {checkpoint.summary()}")
        facts = {} if source.drafter.layer_shape is None else written_fields(checkpoint.config)
        return ReadBack(*taken(to.read, checkpoint, source.opened.loaded), facts)


def _opened_again(directory: Path, readback: ReadBack, source: ExportSource) -> ExportSource:
    """The source of an export whose checkpoint is what was read back."""
    checkpoint = source.opened
    drafter = filled(directory, readback.meta, checkpoint.target, readback.tensors).requires_grad_(False)
    return replace(source, opened=replace(checkpoint, meta=readback.meta, drafter=drafter, tensors=readback.tensors))


def _check_settings(
    reopened: ExportSource, export_format: Format, readback: ReadBack, source: ExportSource, golden: Golden
) -> None:
    expected = golden.facts | export_format.facts(source)
    check_facts(facts_of(reopened.opened) | export_format.facts(reopened) | readback.facts, expected)


def _ids(ids_D: Tensor | None, vocab: int) -> list[int]:
    return list(range(vocab)) if ids_D is None else ids_D.tolist()


def compared(logits_PKV: Tensor, golden: Golden, expected: Golden) -> Parity:
    """The result for these logits. expected: as for `check`. Raises ParityError where they differ."""
    gap_PK = gaps(logits_PKV, expected)
    max_gap = float(gap_PK.max())
    if not max_gap <= 1.0:  # NaN is no parity
        point, draft = divmod(int(gap_PK.nan_to_num(torch.inf).argmax()), gap_PK.shape[1])
        raise ParityError("logits", f"draft {draft + 1} at point {point + 1} is off by {max_gap:.3g} times the tolerance")
    check_tokens(logits_PKV, expected)
    return Parity(gap_PK.numel(), max_gap, int((expected.token_PKR[..., 0].cpu() != golden.draft_PK.cpu()).sum()))


def gaps(logits_PKV: Tensor, expected: Golden) -> Tensor:
    """[P, K] the largest difference of each draft's recorded logits and logsumexp, in units of `TOLERANCE`."""
    token_PKR, logit_PKR, lse_PK = (x.cpu() for x in (expected.token_PKR, expected.logit_PKR, expected.lse_PK))
    gap_PK = (logits_PKV.gather(-1, token_PKR) - logit_PKR).abs().amax(-1)
    gap_PK = torch.maximum(gap_PK, (logits_PKV.logsumexp(-1) - lse_PK).abs())
    return gap_PK / (TOLERANCE * logit_PKR.abs().amax(-1).clamp_min(1.0))


def check_tokens(logits_PKV: Tensor, expected: Golden) -> None:
    """Raise ParityError unless every draft is the expected token, up to ties within the tolerance."""
    expected_PK, bound_PK = expected.token_PKR[..., 0].cpu(), expected.logit_PKR.cpu().abs().amax(-1).clamp_min(1.0) * TOLERANCE
    differs_PK = logits_PKV.amax(-1) - logits_PKV.gather(-1, expected_PK[..., None])[..., 0] > 2 * bound_PK
    if bool(differs_PK.any()):
        raise ParityError("draft tokens", f"{int(differs_PK.sum())} of {differs_PK.numel()} differ")


def check_tokenizer(directory: Path, pieces: dict[str, int]) -> None:
    """Raise ParityError unless tokenizer.json gives these pieces of the target's tokenizer their ids."""
    try:
        content: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        file_vocab = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        file_vocab = file_vocab | {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParityError("tokenizer", f"tokenizer.json cannot be read ({error})") from error
    if file_vocab != pieces:
        mismatch = next(piece for piece in {**file_vocab, **pieces} if file_vocab.get(piece) != pieces.get(piece))
        raise ParityError(
            "tokenizer", f"{mismatch!r} is token {file_vocab.get(mismatch)} there, the target's is {pieces.get(mismatch)}"
        )


def check_model(directory: Path, model: Any) -> None:
    """Raise ParityError unless a model's saved weights equal its own, bit for bit. Of tied weights one is enough."""
    saved_pointers: set[int] = set()
    weights = dict(model.named_parameters(remove_duplicate=False))
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                if name not in weights or not torch.equal(reader.get_tensor(name), weights[name].detach().cpu()):
                    raise ParityError("target", f"{name} was not saved as it is")
                saved_pointers.add(weights[name].data_ptr())
    missing = [name for name, weight in weights.items() if weight.data_ptr() not in saved_pointers]
    if missing:
        raise ParityError("target", f"{missing[0]} was not saved")


@torch.no_grad()
def rounded(opened: Opened, golden: Golden, dtype: str) -> Golden:
    """The golden drafts' logits by our own code with weights rounded to this dtype, with adapters merged before.

    An export of fewer bits than float32 must give these, to the same tolerance. So the effect of rounding is known, and any
    other difference is an error. For float32 the golden material is returned unchanged.
    """
    return golden if dtype == "float32" else drafts_of(rounded_drafter(opened, dtype), opened, golden)


def drafts_of(drafter: Drafter, opened: Opened, golden: Golden) -> Golden:
    """The golden material with this drafter's logits along the golden drafts."""
    target = opened.loaded.target
    return drafted(drafter, golden.to(target.device), target.shape.vocab_size)


@torch.no_grad()
def rounded_drafter(opened: Opened, dtype: str, compression: Compression | None = None) -> Drafter:
    """The drafter in float32, with weights as an export has them."""
    from peft.tuners.lora import LoraLayer  # takes seconds, and few runs need it

    drafter = filled(opened.directory, opened.meta, opened.target, opened.tensors)
    for module in drafter.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    narrow_weights(drafter, DTYPES[dtype], compression)
    return drafter


def tau_change(
    opened: Opened, quantised: Drafter, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> tuple[float, float] | None:
    """Expected tau of the chain that stacks draft, by the drafter and by the quantised one, on these outputs of the target.

    None for outputs that are too short.
    """
    length, device = next(iter(draft_lengths(opened).values())), opened.loaded.target.device
    chain = [(0,) * depth for depth in range(1, length + 1)]
    before, after = (
        expected_tau(forced_hits(opened.target, drafter, prompts, outputs, device), chain, sampled=False)
        for drafter in (opened.drafter, quantised)
    )
    return None if before is None or after is None else (before, after)
