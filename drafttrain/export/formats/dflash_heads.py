"""Block drafters in DFlash's layout with a head of their own after the block: Domino, XPress and LiLiCorr.

Domino has the head's shape in `dflash_config`, as SGLang and its trainers write it. XPress has the refiner's sizes at the top
level, as vLLM reads them; speculators' layout of it is read, not written. LiLiCorr has the network's shape in `dflash_config`,
as ModelOpt writes it. Older versions of ModelOpt have other names of tensors, which are read too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.export.block_fields import NESTED, field_of, inside, number_of
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource, Files, Reads
from drafttrain.export.format import SAME, Format, Importer, Renames, Rows, StackRow, wrapped
from drafttrain.export.formats import dflash
from drafttrain.export.formats.dflash import COPIES, SHIFTED, facts, speculators_options, zlab_config, zlab_options
from drafttrain.export.speculators import TYPE, speculators_type
from drafttrain.export.target_ends import refuse_logits
from drafttrain.model.target import Target

PREFIX = 1  # drafts from their slot alone; SGLang refuses another number
WRAPPED_GRU = "logit_head.prefix_gru.weight_ih_l0"  # of early files of SpecForge


def domino_refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this Domino drafter; None where it can. Slots may be shifted."""
    return dflash.refuse_last(source, reads) or refuse_logits(source)


def domino(source: ExportSource) -> Files:
    """Domino's layout. `shift_label` says whether slots are shifted. verl-SpeCo has the head's shape at the top level."""
    options = source.options
    head_fields = {
        "projector_type": "domino",
        "shift_label": options["slots"] == "shifted",
        "pure_draft_prefix_len": PREFIX,
        "gru_hidden_dim": options["state"],
        "emb_dim": options["rank"],
    }
    return Files(zlab_config(source, "DFlashDraftModel", **head_fields) | head_fields, source.tensors)


def _knows_domino(checkpoint: ExternalCheckpoint) -> bool:
    has_names = checkpoint.has("prefix_gru.weight_ih_l0", "embed_proj.0.weight") or checkpoint.has(WRAPPED_GRU)
    return has_names and TYPE not in checkpoint.config


def _domino_names(checkpoint: ExternalCheckpoint) -> Renames:
    return wrapped("prefix_gru", "embed_proj") if checkpoint.has(WRAPPED_GRU) else SAME


def _domino_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    shifted = checkpoint.field("shift_label", *inside(checkpoint, "shift_label"))
    if not isinstance(shifted, bool):
        raise UserError(f"{checkpoint.origin}: shift_label is {shifted!r}; true or false is needed")
    prefix_length = field_of(checkpoint, "pure_draft_prefix_len", PREFIX)
    checkpoint.wants(
        "pure_draft_prefix_len", prefix_length, (PREFIX,), "but here only the first draft comes from its slot alone"
    )
    return zlab_options(checkpoint, target) | {
        "slots": "shifted" if shifted else "in_place",
        "state": number_of(checkpoint, "gru_hidden_dim"),
        "rank": number_of(checkpoint, "emb_dim"),
    }


DOMINO = Importer("Domino", "domino", _knows_domino, _domino_options, _domino_names, COPIES)


HEAD = "xpress_head"
REFINER = Renames(
    {
        f"{HEAD}.w1.weight": "refiner_head.token_embed.weight",
        f"{HEAD}.w2.weight": "refiner_head.readout.weight",
        f"{HEAD}.mix.L": "refiner_head.mix_l",
        f"{HEAD}.mlp.gate_proj.weight": "refiner_head.mlp_gate.weight",
        f"{HEAD}.mlp.up_proj.weight": "refiner_head.mlp_up.weight",
        f"{HEAD}.mlp.down_proj.weight": "refiner_head.mlp_down.weight",
        f"{HEAD}.{{rest}}": "refiner_head.{rest}",
        "{rest}": "{rest}",
    }
)


def added_refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this drafter, which adds to the head's logits; None where it can."""
    return dflash.refuse(source, reads) or refuse_logits(source)


def xpress(source: ExportSource) -> Files:
    """vLLM's layout. Its drafts are the decoder's if it scores the whole vocabulary and runs a pass for each draft."""
    files, slots = dflash.zlab(source), source.options["block_size"]
    xpress_fields: dict[str, Any] = {
        "architectures": ["Qwen3XPressModel"],
        "xpress_block_size": slots,
        "xpress_rank": source.options["rank"],
        "xpress_mlp_hidden": source.drafter.resolved_options()["mlp_hidden"],
        "xpress_topc": 0,
        "xpress_num_passes": slots - 1,
        "sample_from_anchor": False,
    }
    return replace(files, config=files.config | xpress_fields)


def _knows_xpress(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.has(f"{HEAD}.w1.weight", f"{HEAD}.mix.L")


def _xpress_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """The number of passes and of scored tokens are settings of vLLM, not of the drafter."""
    options = zlab_options(checkpoint, target) | _in_place(checkpoint)
    block_size = checkpoint.config.get("xpress_block_size")
    checkpoint.wants("xpress_block_size", block_size, (None, options["block_size"]), "but the blocks have another size")
    return options | {"rank": checkpoint.number("xpress_rank"), "mlp_hidden": checkpoint.number("xpress_mlp_hidden")}


def _xpress_speculators_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    rank, mlp_ratio = checkpoint.number("xpress_rank"), checkpoint.number("xpress_mlp_ratio")
    return speculators_options(checkpoint, target) | _in_place(checkpoint) | {"rank": rank, "mlp_hidden": mlp_ratio * rank}


def _in_place(checkpoint: ExternalCheckpoint) -> dict[str, Any]:
    checkpoint.wants(SHIFTED, checkpoint.config.get(SHIFTED), (None, False), "but slot 0 of this family drafts nothing")
    return {"slots": "in_place"}


XPRESS = Importer("vLLM", "xpress", _knows_xpress, _xpress_options, shared=COPIES)
XPRESS_SPECULATORS = Importer("speculators", "xpress", speculators_type("xpress"), _xpress_speculators_options, REFINER, COPIES)


FIELDS = {  # our options by their names in `dflash_config`
    "lilicorr_candidate_topk": "candidates",
    "lilicorr_hidden_size": "hidden_size",
    "lilicorr_factor_dim": "factor_dim",
    "lilicorr_num_layers": "corrector_layers",
    "lilicorr_num_heads": "heads",
    "lilicorr_mlp_ratio": "mlp_ratio",
    "lilicorr_logit_scale": "logit_scale",
    "lilicorr_vector_eps": "vector_eps",
}
ATTENTION = {"lilicorr.layers.{i}.attn.in_proj.{part}": "lilicorr.layers.{i}.attn.in_proj_{part}"}
LATTICE = Renames(ATTENTION | {"{rest}": "{rest}"})
REALS = ("mlp_ratio", "logit_scale", "vector_eps")  # options that need not be whole numbers
NUMBERED = Renames(  # names of older exports
    ATTENTION
    | {
        "lilicorr.feature_norm.{part}": "lilicorr.feature_mlp.0.{part}",
        "lilicorr.feature_mlp.up_proj.{part}": "lilicorr.feature_mlp.1.{part}",
        "lilicorr.feature_mlp.down_proj.{part}": "lilicorr.feature_mlp.3.{part}",
        "lilicorr.layers.{i}.mlp.up_proj.{part}": "lilicorr.layers.{i}.mlp.0.{part}",
        "lilicorr.layers.{i}.mlp.down_proj.{part}": "lilicorr.layers.{i}.mlp.2.{part}",
        "{rest}": "{rest}",
    }
)


def lilicorr_refuse(source: ExportSource, reads: Reads) -> str | None:
    """Why a stack cannot load this LiLiCorr drafter; None where it can."""
    if source.options["causal"]:
        return "its slots see no later slots, but loaders let them see their whole block; train with drafter.causal=false"
    return added_refuse(source, reads)


def lilicorr(source: ExportSource) -> Files:
    """The layout of ModelOpt's exports."""
    config = zlab_config(source, "LiLiCorrDraftModel", projector_type="lilicorr", **_shape(source))
    return Files(config, LATTICE.named(source.tensors))


def _shape(source: ExportSource) -> dict[str, Any]:
    """The network's fields."""
    return {key: source.options[option] for key, option in FIELDS.items()}


def lilicorr_facts(source: ExportSource) -> dict[str, Any]:
    """The settings that a drafter must have again when it is read back."""
    return facts(source) | _shape(source)


def _knows_lilicorr(checkpoint: ExternalCheckpoint) -> bool:
    return checkpoint.has("lilicorr.out_head.weight", "lilicorr.anchor_out_head.weight") and TYPE not in checkpoint.config


def _lilicorr_options(checkpoint: ExternalCheckpoint, target: Target) -> dict[str, Any]:
    """Width 0 is the target's."""
    kernel_size = field_of(checkpoint, "conv_kernel_size")
    checkpoint.wants("conv_kernel_size", kernel_size, (None, 0), "but layers of this family have no convolutions here")
    head_options: dict[str, Any] = {}
    for key, option in FIELDS.items():
        if option in REALS:
            head_options[option] = _real(checkpoint, key)
        elif option == "hidden_size" and checkpoint.field(key, NESTED) == 0:
            head_options[option] = target.shape.hidden_size
        else:
            head_options[option] = checkpoint.number(key, NESTED)
    return zlab_options(checkpoint, target) | head_options


def _real(checkpoint: ExternalCheckpoint, key: str) -> float:
    value = checkpoint.field(key, NESTED)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{checkpoint.origin}: {key} is {value!r}; a number is needed")
    return float(value)


def _lilicorr_names(checkpoint: ExternalCheckpoint) -> Renames:
    return NUMBERED if checkpoint.has("lilicorr.feature_mlp.0.weight") else LATTICE


LILICORR = Importer("LiLiCorr", "lilicorr", _knows_lilicorr, _lilicorr_options, _lilicorr_names, COPIES)
IMPORTERS = [DOMINO, XPRESS, XPRESS_SPECULATORS, LILICORR]


def _lilicorr(*reads: str) -> Format:
    """reads: what the stack is known to read, as in DFlash's rows."""
    return Format(LILICORR.name, lilicorr, LILICORR, partial(lilicorr_refuse, reads=frozenset(reads)), lilicorr_facts)


_DOMINO = partial(domino_refuse, reads=frozenset(dflash.SGLANG))
_XPRESS = partial(added_refuse, reads=frozenset(dflash.VLLM))
ROWS: Rows = {
    "domino": {
        "sglang": StackRow(
            Format(DOMINO.name, domino, DOMINO, _DOMINO, facts),
            "DFLASH",
            note="SGLang needs CUDA and bfloat16 here. It leaves the last slot of a shifted block unused.",
        ),
        "trtllm": "its main branch has a loader (speculative/domino.py), which these files were not checked with",
        "official": "SGLang serves it; format=sglang writes it",
    },
    "xpress": {
        "vllm": StackRow(Format(XPRESS.name, xpress, XPRESS, _XPRESS, facts), "dflash"),
        "speculators": "no engine loads its layout of this family; vLLM reads format=vllm",
        "official": "the authors serve it in vLLM; format=vllm writes it",
    },
    "lilicorr": {
        "vllm": StackRow(_lilicorr(*dflash.VLLM), "dflash"),
        "sglang": StackRow(
            _lilicorr(*dflash.SGLANG),
            "DFLASH",
            note="With SGLANG_ENABLE_LILICORR_SAMPLING=1 drafts are sampled where the request samples.",
        ),
        "trtllm": "its development branch has a loader, which these files were not checked with",
        "llamacpp": "builds up to 11434, the one that exports are checked with, have no loader for this family",
        "official": "its trainer serves nothing; format=vllm or sglang writes the files that it would export",
    },
}
