"""The serving stacks that load each family: one row per pair, with a layout and its reader or the reason why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drafttrain.core.errors import UserError
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.layouts import (
    dflash,
    dflash2,
    domino,
    draft_model,
    dspark,
    eagle,
    eagle3,
    gguf,
    hydra,
    jetspec,
    lilicorr,
    medusa,
    mlp_speculator,
    mtp,
    pard,
    peagle,
    redrafter,
    stitched,
    uno,
    xpress,
)
from drafttrain.export.layouts.target_ends import refuse_embedding
from drafttrain.export.parity import Reader
from drafttrain.export.readers import causal_lm
from drafttrain.export.readers import dflash as read_dflash
from drafttrain.export.readers import dflash2 as read_dflash2
from drafttrain.export.readers import domino as read_domino
from drafttrain.export.readers import dspark as read_dspark
from drafttrain.export.readers import eagle as read_eagle
from drafttrain.export.readers import eagle3 as read_eagle3
from drafttrain.export.readers import gguf as read_gguf
from drafttrain.export.readers import hydra as read_hydra
from drafttrain.export.readers import jetspec as read_jetspec
from drafttrain.export.readers import lilicorr as read_lilicorr
from drafttrain.export.readers import medusa as read_medusa
from drafttrain.export.readers import mlp_speculator as read_mlp_speculator
from drafttrain.export.readers import mtp as read_mtp
from drafttrain.export.readers import peagle as read_peagle
from drafttrain.export.readers import redrafter as read_redrafter
from drafttrain.export.readers import stitched as read_stitched
from drafttrain.export.readers import uno as read_uno
from drafttrain.export.readers import xpress as read_xpress

STACKS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "speculators",
    "transformers": "transformers",
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "tgi": "text-generation-inference",
    "lmdeploy": "LMDeploy",
    "official": "the authors' code",
    "stitched": "the target's own files",
}


def never(source: ExportSource) -> str | None:
    """For layouts that can hold every drafter of the family."""
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of exported files."""

    name: str  # in the support matrix
    write: Callable[[ExportSource], Files]  # makes the files
    read: Reader  # reads them back as the stack does
    refuse: Callable[[ExportSource], str | None] = never  # why one drafter of the family cannot be exported; None where it can
    adapter: Layout | None = None  # the layout that replaces this one with adapter=true
    apart: bool = False  # it holds a drafter's LoRA next to the drafter (`export/drafter_adapter.py`)


Row = Layout | str
SERVING = ("vllm", "sglang", "official")  # stacks that read the newer block drafters in their authors' layouts

ENGINE_ENDED = "its engine backend, the only one with this family, ended with version 1.2"
NOT_SPECULATORS = "it has no type for this family"
ONLY_HEADS = "of these families it loads only Medusa and MLP speculators"
GENERATE = "its generate() takes only draft models, DFlash, and modules that some targets come with"
NOT_STRICT = "its loader ignores tensor names that it does not know; nothing is written until it can be run"
NO_LOADER = "it has no loader for this family"
NO_DRAFT_MODELS = "it does not draft with ordinary language models"
OWN_MODULES = "it reads modules that come with targets of some architectures, and no others"
SAME_EXIT = "only the target is needed, and no stack reads an adapter; transformers: generate(assistant_early_exit=blocks)"
ONE_BY_ONE = "it would draft one token per pass and ignore the mask tokens; export a draft_model there"
NO_CAUSAL = "it is not known to read that the slots of a block see no later slots"
GENERATE_MTP = "its generate(use_mtp=True) reads only modules that come with DeepSeek-V3, GLM-4.5 and a few other targets"
NOT_OWN = "only modules that targets come with are written back into them"
STITCHED = "it reads the module from the target's own files; format=stitched writes those"
UNREAD = "the format that its loader reads is not known"
NO_RELEASE = "no released engine loads it"
SERVED_BLOCKS = "engines load dflash, dflash2 and dspark"
NO_ENGINE = "no engine loads its layout of this family; vLLM reads format=vllm"


def _eagle3(stack: str) -> Layout:
    return Layout("portable", eagle3.portable, read_eagle3.portable(stack), eagle3.refuse)


def _plain() -> Layout:
    return Layout("transformers", draft_model.files, causal_lm.read, draft_model.refuse)


def _adapter() -> Layout:
    return Layout("peft adapter", draft_model.adapter, causal_lm.adapter, draft_model.refuse_adapter)


def _pard() -> Layout:
    return Layout("transformers", pard.files, causal_lm.parallel, draft_model.refuse)


def _dflash(stack: str) -> Layout:
    return Layout("z-lab", dflash.zlab, read_dflash.zlab(stack), dflash.refuse)


def _dspark(stack: str) -> Layout:
    return Layout("DeepSpec", dspark.deepspec, read_dspark.deepspec(stack), dspark.refuse)


def _dflash2(stack: str) -> Layout:
    return Layout("z-lab", dflash2.zlab, read_dflash2.zlab(stack), dflash2.refuse)


def _jetspec(stack: str) -> Layout:
    return Layout("JetSpec", jetspec.files, read_jetspec.reader(stack), jetspec.refuse)


def _lilicorr(stack: str) -> Layout:
    return Layout("LiLiCorr", lilicorr.files, read_lilicorr.reader(stack), lilicorr.refuse)


def _eagle(stack: str) -> Layout:
    return Layout("EAGLE-1", eagle.files, read_eagle.reader(stack), eagle.refuse)


def _stages() -> Layout:
    return Layout("MLPSpeculator", mlp_speculator.files, read_mlp_speculator.read)


def _row(**cells: Row) -> dict[str, Row]:
    """A family's cells, in the order of `STACKS`. A stack that is not named has no loader, for its usual reason."""
    usual = {"speculators": NOT_SPECULATORS, "transformers": GENERATE, "tgi": ONLY_HEADS, "stitched": NOT_OWN}
    return {stack: cells.get(stack, usual.get(stack, NO_LOADER)) for stack in STACKS}


TABLE: dict[str, dict[str, Row]] = {
    "eagle3": _row(
        vllm=_eagle3("vllm"),
        sglang=_eagle3("sglang"),
        trtllm=_eagle3("trtllm"),
        speculators=Layout("speculators", eagle3.speculators, read_eagle3.speculators, eagle3.refuse),
        llamacpp=Layout("GGUF", gguf.eagle3_files, read_gguf.eagle3_draft, gguf.refuse_eagle3),
        openvino=Layout("portable", eagle3.mapped, read_eagle3.portable("openvino"), eagle3.refuse),
        lmdeploy=Layout("portable", eagle3.lmdeploy, read_eagle3.portable("lmdeploy"), eagle3.refuse),
        official=NOT_STRICT,
    ),
    "peagle": _row(
        vllm=Layout("portable", peagle.portable, read_peagle.portable, peagle.refuse),
        speculators=Layout("speculators", peagle.speculators, read_peagle.speculators, peagle.refuse),
        official="the authors serve it in vLLM; format=vllm writes it",
    ),
    "eagle": _row(
        vllm=_eagle("vllm"), sglang=_eagle("sglang"), trtllm=ENGINE_ENDED, lmdeploy=_eagle("lmdeploy"), official=NOT_STRICT
    ),
    "medusa": _row(
        vllm=Layout("MedusaModel", medusa.vllm, read_medusa.vllm, medusa.refuse),
        trtllm=ENGINE_ENDED,
        tgi=Layout("medusa_lm_head", medusa.official, read_medusa.official, medusa.refuse),
        official="its code reads a pickle alone, builds five heads whatever the files say, and drops output matrices",
    ),
    "hydra": _row(official=Layout("hydra_lm_head", hydra.files, read_hydra.read, hydra.refuse)),
    "redrafter": _row(
        trtllm=ENGINE_ENDED, official=Layout("recurrent_drafting", redrafter.files, read_redrafter.read, refuse_embedding)
    ),
    "mlp_speculator": _row(tgi=_stages(), official=_stages()),
    "dflash": _row(
        **{stack: _dflash(stack) for stack in ("vllm", "sglang", "trtllm", "openvino", "official")},
        speculators=Layout("speculators", dflash.speculators, read_dflash.speculators, dflash.refuse),
        transformers=Layout("muse_glimmer_assistant", dflash.transformers, read_dflash.transformers, dflash.refuse),
        llamacpp=Layout("GGUF", gguf.dflash_files, read_gguf.dflash_draft, gguf.refuse_dflash),
        lmdeploy=Layout("z-lab", dflash.lmdeploy, read_dflash.lmdeploy, dflash.lmdeploy_refuse),
    ),
    "dspark": _row(
        **{stack: _dspark(stack) for stack in SERVING},
        trtllm=Layout("DeepSpec", dspark.trtllm, read_dspark.trtllm, dspark.refuse),
        speculators=Layout("speculators", dspark.speculators, read_dspark.speculators, dspark.refuse),
        llamacpp=Layout("GGUF", gguf.dspark_files, read_gguf.dspark_draft, gguf.refuse_dspark),
    ),
    "dflash2": _row(
        **{stack: _dflash2(stack) for stack in SERVING},
        trtllm=UNREAD,
        speculators=Layout("speculators", dflash2.speculators, read_dflash2.speculators, dflash2.refuse_speculators),
        llamacpp=Layout("GGUF", gguf.dflash2_files, read_gguf.dflash2_draft, gguf.refuse_dflash2),
    ),
    "jetspec": _row(
        **{stack: _jetspec(stack) for stack in SERVING},
        **dict.fromkeys(("trtllm", "openvino", "lmdeploy"), NO_CAUSAL),
        speculators="its flag for causal blocks is only of layers with sliding windows",
        transformers="its DFlash has no key for causal blocks: slots see their whole block",
        llamacpp=Layout("GGUF", gguf.dflash_files, read_gguf.dflash_draft, gguf.refuse_jetspec),
    ),
    "domino": _row(
        sglang=Layout("Domino", domino.files, read_domino.sglang, domino.refuse),
        trtllm="its main branch has a loader (speculative/domino.py), which these files were not checked with",
        official="SGLang serves it; format=sglang writes it",
    ),
    "xpress": _row(
        vllm=Layout("vLLM", xpress.vllm, read_xpress.vllm, xpress.refuse),
        speculators=NO_ENGINE,
        official="the authors serve it in vLLM; format=vllm writes it",
    ),
    "lilicorr": _row(
        **{stack: _lilicorr(stack) for stack in ("vllm", "sglang")},
        trtllm="its development branch has a loader, which these files were not checked with",
        llamacpp="builds up to 11434, the one that exports are checked with, have no loader for this family",
        official="its trainer serves nothing; format=vllm or sglang writes the files that it would export",
    ),
    "dflare": dict.fromkeys(STACKS, f"{NO_RELEASE}; {SERVED_BLOCKS}"),
    "dfly": dict.fromkeys(STACKS, f"{NO_RELEASE} (vLLM's pull request 50246 is open); {SERVED_BLOCKS}"),
    "draft_model": _row(
        **{stack: _plain() for stack in ("vllm", "sglang", "trtllm", "openvino")},
        transformers=replace(_plain(), adapter=_adapter()),
        llamacpp=Layout("GGUF", gguf.model_files, read_gguf.model, gguf.refuse_model),
        lmdeploy=NO_DRAFT_MODELS,
        official="a draft model has no layout of its own; format=transformers writes it",
    ),
    "mtp": _row(
        **dict.fromkeys(("vllm", "sglang", "trtllm", "llamacpp", "lmdeploy"), OWN_MODULES),
        speculators=Layout("speculators", mtp.speculators, read_mtp.speculators, mtp.refuse),
        transformers=GENERATE_MTP,
        official=Layout("DeepSeek", mtp.deepseek, read_mtp.deepseek, mtp.refuse),
    ),
    "mtp_native": _row(
        **dict.fromkeys(("vllm", "sglang", "trtllm", "llamacpp", "transformers", "official"), STITCHED),
        speculators="its trainer has a form for such modules, which it merges into the target itself; use format=stitched",
        stitched=Layout("stitched", stitched.files, read_stitched.read, stitched.refuse),
    ),
    "uno": _row(
        vllm="its loader is an open pull request (55947); SGLang serves it",
        sglang=Layout("peft adapter", uno.files, read_uno.sglang, uno.refuse),
        official="SGLang serves it; format=sglang writes it",
    ),
    "early_exit": dict.fromkeys(STACKS, SAME_EXIT),
    "pard": _row(
        vllm=_pard(),
        trtllm=_pard(),
        **dict.fromkeys(("sglang", "transformers", "llamacpp", "openvino"), ONE_BY_ONE),
        lmdeploy=NO_DRAFT_MODELS,
        official="its code runs only pairs that it knows by name; format=vllm writes the same files",
    ),
    "prompt_lookup": dict.fromkeys(STACKS, "it has no trained weights; turn on the stack's own n-gram drafting"),
    "suffix": dict.fromkeys(STACKS, "it has no trained weights; turn on the stack's own suffix or n-gram drafting"),
    "cascade": dict.fromkeys(STACKS, "no stack combines drafters; train and export its middle or inner drafter by itself"),
}


NO_ROW = "no layout is written for it yet; add its row to drafttrain/export/table.py"


def rows(family: str) -> dict[str, Row]:
    """A family's rows by stack; for a family without rows the reason is that it has none."""
    return TABLE.get(family) or dict.fromkeys(STACKS, NO_ROW)


def loads(family: str) -> list[str]:
    """The stacks that load a family."""
    return [stack for stack, row in rows(family).items() if isinstance(row, Layout)]


def load_it(stacks: Sequence[str]) -> str:
    """Words for a message: these stacks load it."""
    return f"{', '.join(stacks)} {'loads' if len(stacks) == 1 else 'load'} it"


def stacks_for(family: str, stack: str) -> list[str]:
    """The stacks to export to. stack: one of them, or `all`.

    Raises UserError for an unknown stack, for one that does not load the family, and for a family that no stack loads.
    """
    if stack != "all" and stack not in STACKS:
        raise UserError(f"format is {stack!r}; choose one of {', '.join(STACKS)}, or all")
    able = loads(family)
    if not able:
        raise UserError(f"{family} cannot be exported: {next(iter(rows(family).values()))}")
    if stack == "all":
        return able
    reason = rows(family)[stack]
    if isinstance(reason, str):
        raise UserError(f"{family} cannot be exported to {stack}: {reason}; {load_it(able)}")
    return [stack]


def layout(family: str, stack: str) -> Layout:
    """The layout of a family for a stack that loads it."""
    found = rows(family)[stack]
    assert isinstance(found, Layout), "the stack is one of `loads`"
    return found
