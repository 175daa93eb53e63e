"""The parity check: an exported directory, read from its files alone, must draft as its checkpoint does.

Shapes: P points, K drafts, R recorded logits, V vocabulary.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.core.errors import ParityError
from drafttrain.drafters.checkpoint import filled
from drafttrain.export.files import DTYPES, ExportSource, Files
from drafttrain.export.ggufs import cast
from drafttrain.export.golden import Golden, drafted
from drafttrain.export.layouts.draft_model import merged
from drafttrain.export.layouts.gguf_models import facts_of
from drafttrain.export.opened import Opened
from drafttrain.export.readers import gguf_models
from drafttrain.export.readers.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors
from drafttrain.model.target import FINAL

TOLERANCE = 5e-5  # relative to a draft's largest logit (at least 1), for float32 sums in another order
SHOWN = 60  # characters of a value in a message
# tokenizers split these differently: contractions, numbers, scripts, marks, spaces and line ends
TEXT = "It's 12345.67, WE'VE 2 don't-cares:\n\n  x = f(a_1)\t+ 'y'  \r\n Größe नमस्ते 你好 🙂 ½ x\u0301... "
UNMARKED = "".join(letter for letter in TEXT if not unicodedata.category(letter).startswith("M"))

Reader = Callable[[Path, TargetParts, Sequence[Point]], Reading]


@dataclass(frozen=True, slots=True)
class Parity:
    """The result of the check."""

    drafts: int  # number of compared drafts
    gap: float  # largest difference of logits, in units of `TOLERANCE`
    changed: int  # drafts that the rounding of the exported weights changes


def check(directory: Path, read: Reader, files: Files, source: ExportSource, golden: Golden, expected: Golden) -> Parity:
    """Compare the files' drafts with the golden ones. expected: the golden drafts, or `rounded` ones. Raises ParityError."""
    try:
        reading = read(directory, target_parts(source.opened, files), points_of(golden))
    except MismatchError as mismatch:
        raise ParityError(mismatch.name, mismatch.text) from mismatch
    _check_facts(reading.facts, _expected_facts(golden, files))
    logits_PKV = torch.stack(reading.logits)
    gap_PK = gaps(logits_PKV, expected)
    worst = float(gap_PK.max())
    if not worst <= 1.0:  # NaN is no parity
        point, draft = divmod(int(gap_PK.nan_to_num(torch.inf).argmax()), gap_PK.shape[1])
        raise ParityError("logits", f"draft {draft + 1} at point {point + 1} is off by {worst:.3g} times the tolerance")
    check_tokens(logits_PKV, expected)
    return Parity(gap_PK.numel(), worst, int((expected.token_PKR[..., 0].cpu() != golden.draft_PK.cpu()).sum()))


def gaps(logits_PKV: Tensor, expected: Golden) -> Tensor:
    """[P, K] the largest difference of each draft's recorded logits and logsumexp, in units of `TOLERANCE`."""
    token_PKR, logit_PKR, lse_PK = (x.cpu() for x in (expected.token_PKR, expected.logit_PKR, expected.lse_PK))
    apart_PK = (logits_PKV.gather(-1, token_PKR) - logit_PKR).abs().amax(-1)
    apart_PK = torch.maximum(apart_PK, (logits_PKV.logsumexp(-1) - lse_PK).abs())
    return apart_PK / (TOLERANCE * logit_PKR.abs().amax(-1).clamp_min(1.0))


def check_tokens(logits_PKV: Tensor, expected: Golden) -> None:
    """Raise ParityError unless every draft is the expected token, up to ties within the tolerance."""
    wanted_PK, bound_PK = expected.token_PKR[..., 0].cpu(), expected.logit_PKR.cpu().abs().amax(-1).clamp_min(1.0) * TOLERANCE
    other_PK = logits_PKV.amax(-1) - logits_PKV.gather(-1, wanted_PK[..., None])[..., 0] > 2 * bound_PK
    if bool(other_PK.any()):
        raise ParityError("draft tokens", f"{int(other_PK.sum())} of {other_PK.numel()} differ")


def _expected_facts(golden: Golden, files: Files) -> dict[str, Any]:
    vocab = golden.facts["vocabulary"]
    ids = list(range(vocab)) if golden.ids is None else golden.ids.tolist()
    return golden.facts | {"d2t": ids} | files.facts


def _check_facts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in found.items():
        if value != expected[name]:
            got, wanted = (str(x) if len(str(x)) <= SHOWN else f"{str(x)[:SHOWN]}..." for x in (value, expected[name]))
            raise ParityError(name, f"the files have {got}, the checkpoint's drafts come from {wanted}")


def points_of(golden: Golden) -> list[Point]:
    """The points to draft from, in the readers' form."""
    points = []
    for row, count in enumerate(golden.count_P.tolist()):
        states = {k: x[row, :count].float().cpu() for k, x in golden.states.items()}
        final = states.pop(FINAL, None)
        text, root, drafts = golden.text_PT[row, :count], golden.root_P[row], golden.draft_PK[row]
        points.append(Point(text.cpu(), root.cpu(), drafts.cpu(), states, final))
    return points


def target_parts(opened: Opened, files: Files) -> TargetParts:
    """The target's part of a stack, for the readers."""
    model: Any = opened.loaded.target.model
    embed_VH = model.get_input_embeddings().weight.detach().float().cpu()
    tokenizer: Any = opened.loaded.tokenizer
    pieces = tokenizer.get_vocab() if files.tokenizer else None
    texts = [TEXT, f"{TEXT}{tokenizer.eos_token or ''}{TEXT}", UNMARKED] if files.tokenizer else []
    made = [(text, list(tokenizer(text, verbose=False)["input_ids"])) for text in texts]
    blocks, whole = opened.loaded.target.shape.blocks, partial(_whole_model, model)
    head_VH, dtype = opened.target.head_weight.cpu(), opened.loaded.target.dtype
    return TargetParts(embed_VH, head_VH, blocks, pieces, made, files.base, whole, dtype, partial(_modules, opened))


@torch.no_grad()
def _modules(opened: Opened) -> tuple[Tensor, Tensor | None]:
    """What the target's own modules give: all embeddings, and the bias of its head."""
    target = opened.target
    all_V = torch.arange(target.shape.vocab_size, device=target.device)
    bias = getattr(target.model.get_output_embeddings(), "bias", None)
    return target.embed(all_V).cpu(), None if bias is None else bias.detach().float().cpu()


def _whole_model(model: Any) -> tuple[Config, Tensors]:
    """The target as its own directory has it."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    weights = {name: tensor.detach().float().cpu() for name, tensor in merged(model).items()}
    return Config(config | {"architectures": [type(model).__name__]}), Tensors(Path(), load=lambda *_: weights)


def check_gguf_target(directory: Path, files: Files, source: ExportSource) -> None:
    """Raise ParityError unless a target written as GGUF has the target's settings and all its weights, bit for bit."""
    target = source.opened.loaded.target
    shape, model = target.shape, target.model
    try:
        found = gguf_models.facts(directory, files.weights, target_parts(source.opened, files))
        expected: dict[str, Any] = {"rope": shape.rope_theta, "norm": shape.norm_eps, "layers": shape.blocks}
        expected |= {"heads": [shape.heads, shape.kv_heads], "head_dim": shape.head_dim, "max positions": shape.max_positions}
        expected |= facts_of(model.config, shape.head_dim)
        _check_facts({name: found[name] for name in expected}, expected)
        left = merged(model)
        for name, tensor in gguf_models.weights(directory, files.weights):
            if name not in left or not torch.equal(tensor, cast(name, left.pop(name), DTYPES[source.dtype]).float()):
                raise ParityError("target", f"{name} was not saved as it is")
    except MismatchError as mismatch:
        raise ParityError(mismatch.name, mismatch.text) from mismatch
    if left:
        raise ParityError("target", f"{next(iter(left))} was not saved")


def check_model(directory: Path, model: Any) -> None:
    """Raise ParityError unless a model's saved weights equal its own, bit for bit. Of tied weights one is enough."""
    saved: set[int] = set()
    weights = dict(model.named_parameters(remove_duplicate=False))
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name not in weights or not torch.equal(opened.get_tensor(name), weights[name].detach().cpu()):
                    raise ParityError("target", f"{name} was not saved as it is")
                saved.add(weights[name].data_ptr())
    lost = [name for name, weight in weights.items() if weight.data_ptr() not in saved]
    if lost:
        raise ParityError("target", f"{lost[0]} was not saved")


@torch.no_grad()
def rounded(opened: Opened, golden: Golden, dtype: str) -> Golden:
    """The golden drafts' logits by our own code with weights rounded to this dtype, with adapters merged before.

    An export of fewer bits than float32 must give these, to the same tolerance. So the effect of rounding is known, and any
    other difference is an error. For float32 the golden material is returned unchanged.
    """
    if dtype == "float32":
        return golden
    from peft.tuners.lora import LoraLayer  # takes seconds, and few runs need it

    drafter = filled(opened.directory, opened.meta, opened.target, opened.tensors)
    for module in drafter.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    for parameter in drafter.parameters():
        parameter.data.copy_(parameter.data.to(DTYPES[dtype]).float())
    target = opened.loaded.target
    return drafted(drafter, golden.to(target.device), target.shape.vocab_size)
