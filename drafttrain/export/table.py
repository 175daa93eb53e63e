"""Which stack loads which family: one row per pair, a layout and its reader, or the reason why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from drafttrain.core.errors import UserError
from drafttrain.export.files import Files, Source
from drafttrain.export.layouts import (
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle,
    eagle3,
    gguf,
    hydra,
    medusa,
    mlp_speculator,
    mtp,
    pard,
    peagle,
    redrafter,
)
from drafttrain.export.parity import Reader
from drafttrain.export.readers import causal_lm
from drafttrain.export.readers import dflash as read_dflash
from drafttrain.export.readers import dflash2 as read_dflash2
from drafttrain.export.readers import dspark as read_dspark
from drafttrain.export.readers import eagle as read_eagle
from drafttrain.export.readers import eagle3 as read_eagle3
from drafttrain.export.readers import gguf as read_gguf
from drafttrain.export.readers import hydra as read_hydra
from drafttrain.export.readers import medusa as read_medusa
from drafttrain.export.readers import mlp_speculator as read_mlp_speculator
from drafttrain.export.readers import mtp as read_mtp
from drafttrain.export.readers import peagle as read_peagle
from drafttrain.export.readers import redrafter as read_redrafter

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
}


def never(source: Source) -> str | None:
    """Nothing that could be refused."""
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """name: in the support matrix. write: makes its files. read: the stack's own way to read them. refuse: why a drafter of the
    family cannot go there; None where it can. adapter: with adapter=true in its place.
    """

    name: str
    write: Callable[[Source], Files]
    read: Reader
    refuse: Callable[[Source], str | None] = never
    adapter: Layout | None = None


Row = Layout | str

ENGINE_ENDED = "its engine backend, the only one with this family, ended with 1.2"
NOT_SPECULATORS = "no type of its own for this family"
ONLY_HEADS = "of these families it loads Medusa and MLP speculators alone"
GENERATE = "its generate() takes draft models and DFlash alone"
NOT_STRICT = "it loads the names that it knows and says nothing of others; not written until it can be run"
NO_LOADER = "no loader of this family"
OWN_MODULES = "it reads the modules that targets of some architectures come with, none beside others"
SAME_EXIT = "the target alone is needed, and no stack reads an adapter; transformers: generate(assistant_early_exit=blocks)"
ONE_BY_ONE = "it would draft one token a pass, as if it had learnt no masks; export a draft_model there"
SPECULATORS = "it reads format=speculators"
UNREAD = "what its loader reads is not known here"


def _eagle3(stack: str) -> Layout:
    return Layout("portable", eagle3.portable, read_eagle3.portable(stack), eagle3.refuse)


def _plain() -> Layout:
    return Layout("transformers", draft_model.files, causal_lm.read, draft_model.refuse)


def _adapter() -> Layout:
    return Layout("peft adapter", draft_model.adapter, causal_lm.adapter, draft_model.refuse_adapter)


def _pard() -> Layout:
    return Layout("transformers", pard.files, causal_lm.parallel, draft_model.refuse)


def _dflash() -> Layout:
    return Layout("z-lab", dflash.zlab, read_dflash.zlab, dflash.refuse)


def _eagle(stack: str) -> Layout:
    return Layout("EAGLE-1", eagle.files, read_eagle.reader(stack), eagle.refuse)


def _heads(stack: str) -> Layout:
    return Layout("medusa_lm_head", medusa.official, read_medusa.official(stack), medusa.refuse)


def _block(speculators: Layout) -> dict[str, Row]:
    """Of the newer block drafters."""
    return {
        "vllm": SPECULATORS,
        **dict.fromkeys(("sglang", "trtllm"), UNREAD),
        "speculators": speculators,
        "transformers": GENERATE,
        **dict.fromkeys(("llamacpp", "openvino"), NO_LOADER),
        "tgi": ONLY_HEADS,
        "lmdeploy": NO_LOADER,
        "official": UNREAD,
    }


def _stages() -> Layout:
    return Layout("MLPSpeculator", mlp_speculator.files, read_mlp_speculator.read)


TABLE: dict[str, dict[str, Row]] = {
    "eagle3": {
        "vllm": _eagle3("vllm"),
        "sglang": _eagle3("sglang"),
        "trtllm": _eagle3("trtllm"),
        "speculators": Layout("speculators", eagle3.speculators, read_eagle3.speculators, eagle3.refuse),
        "transformers": GENERATE,
        "llamacpp": Layout("GGUF", gguf.eagle3_files, read_gguf.eagle3_draft, gguf.refuse_eagle3),
        "openvino": _eagle3("openvino"),
        "tgi": ONLY_HEADS,
        "lmdeploy": Layout("portable", eagle3.lmdeploy, read_eagle3.portable("lmdeploy"), eagle3.refuse),
        "official": NOT_STRICT,
    },
    "peagle": {
        "vllm": Layout("portable", peagle.portable, read_peagle.portable, peagle.refuse),
        **dict.fromkeys(("sglang", "trtllm"), NO_LOADER),
        "speculators": Layout("speculators", peagle.speculators, read_peagle.speculators, peagle.refuse),
        "transformers": GENERATE,
        **dict.fromkeys(("llamacpp", "openvino"), NO_LOADER),
        "tgi": ONLY_HEADS,
        "lmdeploy": NO_LOADER,
        "official": "the authors serve it in vLLM; format=vllm writes it",
    },
    "eagle": {
        "vllm": _eagle("vllm"),
        "sglang": _eagle("sglang"),
        "trtllm": ENGINE_ENDED,
        "speculators": NOT_SPECULATORS,
        "transformers": GENERATE,
        "llamacpp": NO_LOADER,
        "openvino": NO_LOADER,
        "tgi": ONLY_HEADS,
        "lmdeploy": _eagle("lmdeploy"),
        "official": NOT_STRICT,
    },
    "medusa": {
        "vllm": Layout("MedusaModel", medusa.vllm, read_medusa.vllm, medusa.refuse),
        "sglang": NO_LOADER,
        "trtllm": ENGINE_ENDED,
        "speculators": NOT_SPECULATORS,
        "transformers": GENERATE,
        "llamacpp": NO_LOADER,
        "openvino": NO_LOADER,
        "tgi": _heads("tgi"),
        "lmdeploy": NO_LOADER,
        "official": _heads("official"),
    },
    "hydra": {
        **dict.fromkeys(("vllm", "sglang", "trtllm"), NO_LOADER),
        "speculators": NOT_SPECULATORS,
        "transformers": GENERATE,
        **dict.fromkeys(("llamacpp", "openvino"), NO_LOADER),
        "tgi": ONLY_HEADS,
        "lmdeploy": NO_LOADER,
        "official": Layout("hydra_lm_head", hydra.files, read_hydra.read, hydra.refuse),
    },
    "redrafter": {
        **dict.fromkeys(("vllm", "sglang"), NO_LOADER),
        "trtllm": ENGINE_ENDED,
        "speculators": NOT_SPECULATORS,
        "transformers": GENERATE,
        **dict.fromkeys(("llamacpp", "openvino"), NO_LOADER),
        "tgi": ONLY_HEADS,
        "lmdeploy": NO_LOADER,
        "official": Layout("recurrent_drafting", redrafter.files, read_redrafter.read),
    },
    "mlp_speculator": {
        **dict.fromkeys(("vllm", "sglang", "trtllm"), NO_LOADER),
        "speculators": NOT_SPECULATORS,
        "transformers": GENERATE,
        **dict.fromkeys(("llamacpp", "openvino"), NO_LOADER),
        "tgi": _stages(),
        "lmdeploy": NO_LOADER,
        "official": _stages(),
    },
    "dflash": {
        "vllm": _dflash(),
        "sglang": _dflash(),
        "trtllm": _dflash(),
        "speculators": Layout("speculators", dflash.speculators, read_dflash.speculators, dflash.refuse),
        "transformers": Layout("muse_glimmer_assistant", dflash.transformers, read_dflash.transformers, dflash.refuse),
        "llamacpp": Layout("GGUF", gguf.dflash_files, read_gguf.dflash_draft, gguf.refuse_dflash),
        "openvino": _dflash(),
        "tgi": ONLY_HEADS,
        "lmdeploy": Layout("z-lab", dflash.lmdeploy, read_dflash.lmdeploy, dflash.lmdeploy_refuse),
        "official": _dflash(),
    },
    "dspark": _block(Layout("speculators", dspark.speculators, read_dspark.speculators, dflash.refuse_last)),
    "dflash2": _block(Layout("speculators", dflash2.speculators, read_dflash2.speculators, dflash.refuse_last)),
    "draft_model": {
        "vllm": _plain(),
        "sglang": _plain(),
        "trtllm": _plain(),
        "speculators": NOT_SPECULATORS,
        "transformers": replace(_plain(), adapter=_adapter()),
        "llamacpp": Layout("GGUF", gguf.model_files, read_gguf.model, gguf.refuse_model),
        "openvino": _plain(),
        "tgi": ONLY_HEADS,
        "lmdeploy": "it drafts with no ordinary language model",
        "official": "a draft model is nobody's own layout; format=transformers writes it",
    },
    "mtp": {
        **dict.fromkeys(("vllm", "sglang", "trtllm"), OWN_MODULES),
        "speculators": Layout("speculators", mtp.speculators, read_mtp.speculators, mtp.refuse),
        "transformers": GENERATE,
        "llamacpp": OWN_MODULES,
        "openvino": NO_LOADER,
        "tgi": ONLY_HEADS,
        "lmdeploy": OWN_MODULES,
        "official": Layout("DeepSeek", mtp.deepseek, read_mtp.deepseek, mtp.refuse),
    },
    "early_exit": dict.fromkeys(STACKS, SAME_EXIT),
    "pard": {
        "vllm": _pard(),
        "sglang": ONE_BY_ONE,
        "trtllm": _pard(),
        "speculators": NOT_SPECULATORS,
        **dict.fromkeys(("transformers", "llamacpp", "openvino"), ONE_BY_ONE),
        "tgi": ONLY_HEADS,
        "lmdeploy": "it drafts with no ordinary language model",
        "official": "its code runs the pairs that it knows by name; format=vllm writes what it writes",
    },
    "prompt_lookup": dict.fromkeys(STACKS, "nothing is trained; turn on the stack's own n-gram drafting"),
    "suffix": dict.fromkeys(STACKS, "nothing is trained; turn on the stack's own suffix or n-gram drafting"),
    "cascade": dict.fromkeys(STACKS, "no stack runs drafters together; train and export its middle or inner one by itself"),
}


NO_ROW = "no layout is written for it yet; add its row to drafttrain/export/table.py"


def rows(family: str) -> dict[str, Row]:
    """A family's rows by stack; for a family without rows the reason is that it has none."""
    return TABLE.get(family) or dict.fromkeys(
        STACKS, "no layout is written for it yet; add its row to drafttrain/export/table.py"
    )


def loads(family: str) -> list[str]:
    """The stacks that load a family."""
    return [stack for stack, row in rows(family).items() if isinstance(row, Layout)]


def asked(family: str, stack: str) -> list[str]:
    """The stacks to export to. stack: one, or `all`.

    Raises UserError for an unknown stack, one that does not load the family, and a family that none loads.
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
        raise UserError(f"{family} cannot be exported to {stack}: {reason}; {', '.join(able)} load it")
    return [stack]


def layout(family: str, stack: str) -> Layout:
    found = rows(family)[stack]
    assert isinstance(found, Layout), "asked for what `loads` names"
    return found
