"""The command that serves a target with an exported drafter, by stack and family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from shlex import quote

import yaml

from drafttrain.export.files import ExportSource
from drafttrain.export.layouts.llama import windows_of

VLLM = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash", "draft_model": "draft_model"}
VLLM |= {
    "peagle": "eagle3",
    "pard": "draft_model",
    "dspark": "dspark",
    "dflash2": "dflash",
    "jetspec": "dflash",
    "xpress": "dflash",
    "lilicorr": "dflash",
}
PARALLEL = ("peagle", "pard")  # families that need parallel_drafting in vLLM
BLOCKS = ("dflash", "dspark")  # methods of vLLM whose layers can have caches of several kinds, in its second runner alone
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER=1"
SGLANG = {"eagle3": "EAGLE3", "eagle": "EAGLE", "dflash": "DFLASH", "draft_model": "STANDALONE"}
SGLANG |= {"dspark": "DSPARK", "uno": "UNO"} | dict.fromkeys(("dflash2", "jetspec", "domino", "lilicorr"), "DFLASH")
TRTLLM = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark", "draft_model": "Draft_Target", "pard": "PARD"}
LLAMACPP = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "draft_model": "draft-simple"}
LLAMACPP |= {"dspark": "draft-dspark", "dflash2": "draft-dflash", "jetspec": "draft-dflash"}
BY_NAME = ("vllm", "sglang", "trtllm", "speculators", "transformers", "tgi", "lmdeploy")  # stacks that load a hub id themselves
NOTES = {
    ("vllm", "medusa"): "vLLM up to 0.32 loads Medusa heads; 0.33 no longer does.",
    ("speculators", "peagle"): "vLLM 0.33 takes a hub id as the verifier; 0.32 a local path too.",
    ("speculators", "eagle3"): "vLLM 0.33 takes a hub id as the verifier; 0.32 a local path too.",
    ("sglang", "domino"): "SGLang needs CUDA and bfloat16 here. It leaves the last slot of a shifted block unused.",
    ("sglang", "lilicorr"): "With SGLANG_ENABLE_LILICORR_SAMPLING=1 drafts are sampled where the request samples.",
    ("sglang", "uno"): "SGLang takes it with one process: leave tensor and pipeline parallelism at 1.",
    ("official", "hydra"): "The authors' code reads a pickle. The first two lines write it from the safetensors file.",
}
TARGET_NOTE = "target.gguf is the target as GGUF. Export with with_target=true writes it, and so does llama.cpp's converter."
ONE_AT_A_TIME = (
    "Build 11434 accepts far fewer drafts while it decodes several requests; add --parallel 1 to serve one at a time."
)
NOTES |= {("llamacpp", "eagle3"): f"{TARGET_NOTE} {ONE_AT_A_TIME}"}

# The lines that load a drafter with its authors' code: of Python, except for those of `mtp`. Names of files are quoted.
OFFICIAL = {
    "hydra": "weights = safetensors.torch.load_file({safe!r})\n"
    "torch.save(weights, {pickle!r})\n"
    "HydraModel.from_pretrained({directory!r}, base_model={target!r})",
    "redrafter": "recurrent_drafting.modeling_drafter.Drafter.from_pretrained({directory!r})",
    "mtp": "cp {source} {into}  # num_nextn_predict_layers: into config.json",
    "mlp_speculator": "fms_extras.models.hf.modeling_mlp_speculator.MLPSpeculatorPreTrainedModel"
    ".from_pretrained({directory!r})",
    **dict.fromkeys(("dflash", "jetspec"), "DFlashDraftModel.from_pretrained({directory!r})"),
    "dflash2": "DFlash2DraftModel.from_pretrained({directory!r})",
    "dspark": "Qwen3DSparkModel.from_pretrained({directory!r})",
}


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """The parts of a command line."""

    source: ExportSource
    directory: str  # of the exported drafter
    target: str  # directory or hub id
    family: str
    drafts: int  # length of a chain


def command(source: ExportSource, directory: str) -> str:
    """The command, or the lines of Python, that serve the target with the drafter in this directory."""
    family = source.opened.meta.family
    served = ServingCommand(source, directory, source.target_name, family, source.drafter.draft_length)
    if source.stack != "official":
        return _COMMANDS[source.stack](served)
    return OFFICIAL[family].format(
        directory=directory,
        target=served.target,
        safe=f"{directory}/hydra_lm_head.safetensors",
        pickle=f"{directory}/hydra_lm_head.pt",
        source=quote(f"{directory}/model.safetensors"),
        into=quote(f"{served.target}/mtp.safetensors"),
    )


def note(family: str, stack: str) -> str | None:
    """A remark for below the command; None where there is none."""
    return NOTES.get((stack, family), TARGET_NOTE if stack == "llamacpp" else None)


def _vllm(served: ServingCommand) -> str:
    config = {"method": VLLM[served.family], "model": served.directory, "num_speculative_tokens": served.drafts}
    if served.family in PARALLEL:
        config["parallel_drafting"] = True
    return f"{_runner(served)}vllm serve {quote(served.target)} --speculative-config {quote(json.dumps(config))}"


def _runner(served: ServingCommand) -> str:
    """What a command of vLLM begins with. Its first runner, the default of older versions, refuses drafters of blocks in which
    some layers have windows and others none.
    """
    if VLLM.get(served.family) not in BLOCKS:
        return ""
    windows = windows_of(served.source.layer_shape, served.source.options["layers"])
    return f"{SECOND_RUNNER} " if any(windows) and not all(windows) else ""


def _sglang(served: ServingCommand) -> str:
    if SGLANG[served.family] == "UNO":  # the root and the random tokens after it; no other model drafts
        return (
            f"python -m sglang.launch_server --model-path {quote(served.target)} --speculative-algorithm UNO "
            f"--uno-lora-path {quote(served.directory)} --speculative-num-draft-tokens {served.drafts}"
        )
    return (
        f"python -m sglang.launch_server --model-path {quote(served.target)} --speculative-algorithm {SGLANG[served.family]} "
        f"--speculative-draft-model-path {quote(served.directory)}{_sglang_lengths(served)}"
    )


def _sglang_lengths(served: ServingCommand) -> str:
    """DFLASH counts a block's slots. DSPARK takes the block's size as the number of drafts: blocks in place have one less."""
    kind = SGLANG[served.family]
    if kind == "DFLASH":
        return f" --speculative-num-draft-tokens {served.source.options['block_size']}"
    if kind == "DSPARK":
        return "" if served.source.options["slots"] == "shifted" else f" --speculative-dspark-block-size {served.drafts}"
    steps = f" --speculative-num-steps {served.drafts} --speculative-eagle-topk 1"
    return f"{steps} --speculative-num-draft-tokens {served.drafts + 1}"


def _trtllm(served: ServingCommand) -> str:
    lines = [f"decoding_type: {TRTLLM[served.family]}", f"max_draft_len: {served.drafts}"]
    lines.append(f"speculative_model: {_scalar(served.directory)}")
    if served.family == "eagle3":
        lines.append(f"eagle3_layers_to_capture: {[k - 1 for k in served.source.layer_inputs]}")
    if served.family == "pard":
        lines.append(f"mask_token_id: {served.source.drafter.resolved_options()['mask_token']}")
    body = "\n".join(f"  {line}" for line in lines)
    return f"cat > spec.yaml <<'END'\nspeculative_config:\n{body}\nEND\ntrtllm-serve {quote(served.target)} --config spec.yaml"


def _scalar(text: str) -> str:
    """A text in YAML, in one line."""
    dumped: str = yaml.safe_dump(text, width=len(text) + 2, allow_unicode=True)
    return dumped.removesuffix("...\n").rstrip("\n")


def _speculators(served: ServingCommand) -> str:
    if served.family == "mtp":
        return f"speculators.SpeculatorModel.from_pretrained({served.directory!r})"
    return f"{_runner(served)}vllm serve {quote(served.directory)}"


def _transformers(served: ServingCommand) -> str:
    model, kind = ("AutoModel", ', speculation_type="dflash"') if served.family == "dflash" else ("AutoModelForCausalLM", "")
    return (
        f"assistant = {model}.from_pretrained({served.directory!r})\n"
        f"target = AutoModelForCausalLM.from_pretrained({served.target!r})\n"
        f"target.generate(**inputs, assistant_model=assistant{kind})"
    )


def _openvino(served: ServingCommand) -> str:
    convert = f"optimum-cli export openvino -m {quote(served.directory)} --task text-generation-with-past"
    if served.family == "draft_model":
        return f'{convert} ov-draft\nopenvino_genai.draft_model("ov-draft", "CPU")'
    lines, last = [f"{convert} --trust-remote-code ov-draft"], "ov-draft"
    if served.family == "eagle3":
        ids, last = " ".join(str(k - 1) for k in served.source.layer_inputs), "ov-draft-eagle3"
        lines += [
            'model = openvino.Core().read_model("ov-draft/openvino_model.xml")',
            f'model.set_rt_info("{ids}", "hidden_layers_list")',
            f'openvino.save_model(model, "{last}/openvino_model.xml")',
        ]
    return "\n".join([*lines, f'openvino_genai.draft_model("{last}", "CPU")'])


def _llamacpp(served: ServingCommand) -> str:
    """With p-min 0 it drafts tokens of any probability; without a maximum it would draft three."""
    options = f"--spec-type {LLAMACPP[served.family]} --spec-draft-n-max {served.drafts} --spec-draft-p-min 0"
    target, draft = (quote(f"{served.directory}/{name}.gguf") for name in ("target", "draft"))
    return f"llama-server -m {target} -md {draft} {options}"


def _tgi(served: ServingCommand) -> str:
    return f"text-generation-launcher --model-id {quote(served.directory)} --speculate {served.drafts}"


def _lmdeploy(served: ServingCommand) -> str:
    return (
        f"lmdeploy serve api_server {quote(served.target)} --backend pytorch --speculative-algorithm {served.family} "
        f"--speculative-draft-model {quote(served.directory)} --speculative-num-draft-tokens {served.drafts}"
    )


def _stitched(served: ServingCommand) -> str:
    """The target that is served is the exported directory."""
    config = {"method": "mtp", "num_speculative_tokens": served.drafts}
    return (
        f"vllm serve {quote(served.directory)} --speculative-config {quote(json.dumps(config))}\n"
        f"python -m sglang.launch_server --model-path {quote(served.directory)} --speculative-algorithm EAGLE"
        f" --speculative-num-steps {served.drafts} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {served.drafts + 1}"
    )


_COMMANDS = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "speculators": _speculators,
    "transformers": _transformers,
    "openvino": _openvino,
    "llamacpp": _llamacpp,
    "tgi": _tgi,
    "lmdeploy": _lmdeploy,
    "stitched": _stitched,
}
