"""Compares a directory, read by an independent reader, with a checkpoint's golden drafts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import ParityError
from drafttrain.export import drafter_adapter
from drafttrain.export.files import DTYPES, ExportSource
from drafttrain.export.formats.transformers import merged
from drafttrain.export.gguf_file import cast
from drafttrain.export.gguf_models import facts_of
from drafttrain.export.gguf_tokenizer import encoded
from drafttrain.export.golden import Golden, check_facts
from drafttrain.export.opened import Opened
from drafttrain.export.parity import Parity, compared
from drafttrain.export.table import format_of
from drafttrain.export.target_ends import logit_ends
from drafttrain.model.target import FINAL
from tests.export_oracles import (
    causal_lm,
    dflash,
    dflash2,
    domino,
    dspark,
    eagle,
    eagle3,
    gguf,
    gguf_models,
    hydra,
    jetspec,
    lilicorr,
    medusa,
    mlp_speculator,
    mtp,
    peagle,
    redrafter,
    stitched,
    uno,
    xpress,
)
from tests.export_oracles.parts import Config, MismatchError, Point, Reading, TargetParts, Tensors

Reader = Callable[[Path, TargetParts, Sequence[Point]], Reading]

READERS: dict[str, dict[str, Reader]] = {
    "eagle3": {stack: eagle3.portable(stack) for stack in ("vllm", "sglang", "trtllm", "openvino", "lmdeploy")}
    | {"speculators": eagle3.speculators, "llamacpp": gguf.eagle3_draft},
    "peagle": {"vllm": peagle.portable, "speculators": peagle.speculators},
    "eagle": {stack: eagle.reader(stack) for stack in ("vllm", "sglang", "lmdeploy")},
    "medusa": {"vllm": medusa.vllm, "tgi": medusa.official},
    "hydra": {"official": hydra.read},
    "redrafter": {"official": redrafter.read},
    "mlp_speculator": {"tgi": mlp_speculator.read, "official": mlp_speculator.read},
    "dflash": {stack: dflash.zlab(stack) for stack in ("vllm", "sglang", "trtllm", "openvino", "official")}
    | {"speculators": dflash.speculators, "transformers": dflash.transformers}
    | {"llamacpp": gguf.dflash_draft, "lmdeploy": dflash.lmdeploy},
    "dspark": {stack: dspark.deepspec(stack) for stack in ("vllm", "sglang", "official")}
    | {"trtllm": dspark.trtllm, "speculators": dspark.speculators, "llamacpp": gguf.dspark_draft},
    "dflash2": {stack: dflash2.zlab(stack) for stack in ("vllm", "sglang", "official")}
    | {"speculators": dflash2.speculators, "llamacpp": gguf.dflash2_draft},
    "jetspec": {stack: jetspec.reader(stack) for stack in ("vllm", "sglang", "official")} | {"llamacpp": gguf.dflash_draft},
    "domino": {"sglang": domino.sglang},
    "xpress": {"vllm": xpress.vllm},
    "lilicorr": {stack: lilicorr.reader(stack) for stack in ("vllm", "sglang")},
    "draft_model": dict.fromkeys(("vllm", "sglang", "trtllm", "transformers", "openvino"), causal_lm.read)
    | {"llamacpp": gguf.model},
    "mtp": {"speculators": mtp.speculators, "official": mtp.deepseek},
    "mtp_native": {"stitched": stitched.read},
    "uno": {"sglang": uno.sglang},
    "pard": {"vllm": causal_lm.parallel, "trtllm": causal_lm.parallel},
}
TOKENIZERS = ("draft_model", "pard")  # families whose directories have the target's tokenizer


def check_export(directory: Path, source: ExportSource, golden: Golden, expected: Golden, adapter: bool = False) -> Parity:
    """Raise ParityError unless a written directory drafts as its checkpoint. expected: as for `parity.check`.

    adapter: it was written with adapter=true.
    """
    family = source.opened.meta.family
    read = READERS[family][source.stack]
    apart = adapter and source.opened.meta.adapter is None
    if apart and source.opened.meta.lora is None:
        read = causal_lm.adapter
    elif apart:
        read = partial(_merged, read)
    return check(directory, read, source, golden, expected)


def _merged(read: Reader, directory: Path, target: TargetParts, points: Sequence[Point]) -> Reading:
    """An adapter of a drafter, read after its user has merged it."""
    with tempfile.TemporaryDirectory() as folder:
        drafter_adapter.merge(directory, Path(folder) / "merged")
        return read(Path(folder) / "merged", target, points)


def check(directory: Path, read: Reader, source: ExportSource, golden: Golden, expected: Golden) -> Parity:
    """The same with this reader."""
    try:
        reading = read(directory, parts_of(source), points_of(golden))
    except MismatchError as mismatch:
        raise ParityError(mismatch.name, mismatch.text) from mismatch
    vocab = golden.facts["vocabulary"]
    ids = list(range(vocab)) if golden.ids is None else golden.ids.tolist()
    own = format_of(source.opened.meta.family, source.stack).facts(source)
    check_facts(reading.facts, golden.facts | {"d2t": ids} | own | _of_stacks(source))
    return compared(torch.stack(reading.logits), golden, expected)


def _of_stacks(source: ExportSource) -> dict[str, Any]:
    """What only a stack's reader finds in the files: settings of the stack, and of the target."""
    scale, cap = logit_ends(source.target)
    passes = source.options.get("block_size", 1) - 1
    return {"soft cap": cap, "factor of logits": None if scale == 1.0 else scale, "passes": passes}


def points_of(golden: Golden) -> list[Point]:
    """The points to draft from, in the readers' form."""
    points = []
    for row, count in enumerate(golden.count_P.tolist()):
        states = {k: x[row, :count].float().cpu() for k, x in golden.states.items()}
        final = states.pop(FINAL, None)
        text, root, drafts = golden.text_PT[row, :count], golden.root_P[row], golden.draft_PK[row]
        points.append(Point(text.cpu(), root.cpu(), drafts.cpu(), states, final))
    return points


def parts_of(source: ExportSource) -> TargetParts:
    """The target's part of a stack, for the reader of a written directory."""
    gguf_file = source.stack == "llamacpp"
    return target_parts(source.opened, gguf_file or source.opened.meta.family in TOKENIZERS, base_of(source))


def base_of(source: ExportSource) -> Path | None:
    """The directory of a draft model that was trained from one elsewhere."""
    return Path(source.options["path"]) if source.options.get("source") == "hf" else None


def target_parts(opened: Opened, tokenizer: bool = False, base: Path | None = None) -> TargetParts:
    """The target's part of a stack. tokenizer: the files hold it. base: directory of an adapter's base model."""
    model: Any = opened.loaded.target.model
    embed_VH = model.get_input_embeddings().weight.detach().float().cpu()
    own: Any = opened.loaded.tokenizer
    pieces = own.get_vocab() if tokenizer and own is not None else None
    texts = encoded(own) if pieces is not None else []
    blocks, whole = opened.loaded.target.shape.blocks, partial(_whole_model, model)
    head_VH, dtype = opened.target.head_weight.cpu(), opened.loaded.target.dtype
    return TargetParts(embed_VH, head_VH, blocks, pieces, texts, base, whole, dtype, partial(_modules, opened))


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


def check_gguf_target(directory: Path, source: ExportSource) -> None:
    """Raise ParityError unless a target written as GGUF has the target's settings and all its weights, bit for bit."""
    target = source.opened.loaded.target
    shape, model = target.shape, target.model
    try:
        found = gguf_models.facts(directory, "target.gguf", target_parts(source.opened, tokenizer=True))
        expected: dict[str, Any] = {"rope": shape.rope_theta, "norm": shape.norm_eps, "layers": shape.blocks}
        expected |= {"heads": [shape.heads, shape.kv_heads], "head_dim": shape.head_dim, "max positions": shape.max_positions}
        expected |= {name: value for name, value in facts_of(model.config, shape.head_dim).items() if name in found}
        check_facts({name: found[name] for name in expected}, expected)
        left = merged(model)
        for name, tensor in gguf_models.weights(directory, "target.gguf"):
            if name not in left or not torch.equal(tensor, cast(name, left.pop(name), DTYPES[source.dtype]).float()):
                raise ParityError("target", f"{name} was not saved as it is")
    except MismatchError as mismatch:
        raise ParityError(mismatch.name, mismatch.text) from mismatch
    if left:
        raise ParityError("target", f"{next(iter(left))} was not saved")
