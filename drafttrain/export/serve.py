"""The command that serves a target with an exported drafter, by stack and family."""

from __future__ import annotations

import json

from drafttrain.export.files import Source

VLLM = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash", "draft_model": "draft_model"}
VLLM |= {"peagle": "eagle3", "pard": "draft_model"}
PARALLEL = ("peagle", "pard")  # which vLLM has to be told
SGLANG = {"eagle3": "EAGLE3", "eagle": "EAGLE", "dflash": "DFLASH", "draft_model": "STANDALONE"}
TRTLLM = {"eagle3": "Eagle3", "dflash": "DFlash", "draft_model": "Draft_Target", "pard": "PARD"}
LLAMACPP = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "draft_model": "draft-simple"}
BY_NAME = ("vllm", "sglang", "trtllm", "speculators", "transformers", "tgi", "lmdeploy")  # that load from the hub themselves
NOTES = {
    ("vllm", "medusa"): "vLLM up to 0.32 loads Medusa heads; 0.33 no longer does.",
    ("speculators", "peagle"): "vLLM 0.33 takes a hub id as the verifier; 0.32 a local path too.",
    ("speculators", "eagle3"): "vLLM 0.33 takes a hub id as the verifier; 0.32 a local path too.",
    ("official", "hydra"): "The authors' code reads a pickle; the first line writes it from the safetensors file.",
}

TARGET_NOTE = "target.gguf is the target in the same form: export with with_target=true writes it, llama.cpp's converter too."


def command(source: Source, directory: str) -> str:
    """What to type. directory: of the exported drafter."""
    family, target, drafts = source.opened.meta.family, source.target_name, source.drafter.draft_length
    return _COMMANDS[source.stack](source, family, target, directory, drafts)


def note(family: str, stack: str) -> str | None:
    return NOTES.get((stack, family), TARGET_NOTE if stack == "llamacpp" else None)


def _vllm(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    asked = {"method": VLLM[family], "model": directory, "num_speculative_tokens": drafts}
    if family in PARALLEL:
        asked["parallel_drafting"] = True
    return f"vllm serve {target} --speculative-config '{json.dumps(asked)}'"


def _sglang(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    steps = "" if family == "dflash" else f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 "
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {SGLANG[family]} "
        f"--speculative-draft-model-path {directory} {steps}--speculative-num-draft-tokens {drafts + 1}"
    )


def _trtllm(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    lines = [f"decoding_type: {TRTLLM[family]}", f"max_draft_len: {drafts}", f"speculative_model: {directory}"]
    if family == "eagle3":
        lines.append(f"eagle3_layers_to_capture: {[k - 1 for k in source.layer_inputs]}")
    if family == "pard":
        lines.append(f"mask_token_id: {source.drafter.resolved_options()['mask_token']}")
    body = "\n".join(f"  {line}" for line in lines)
    return f"cat > spec.yaml <<END\nspeculative_config:\n{body}\nEND\ntrtllm-serve {target} --config spec.yaml"


def _speculators(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    if family == "mtp":
        return f'speculators.SpeculatorModel.from_pretrained("{directory}")'
    return f"vllm serve {directory}"


def _transformers(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    kind = ', speculation_type="dflash"' if family == "dflash" else ""
    model = "AutoModel" if family == "dflash" else "AutoModelForCausalLM"
    return (
        f'assistant = {model}.from_pretrained("{directory}")\n'
        f'target = AutoModelForCausalLM.from_pretrained("{target}")\n'
        f"target.generate(**inputs, assistant_model=assistant{kind})"
    )


def _openvino(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    convert = f"optimum-cli export openvino -m {directory} --task text-generation-with-past"
    if family == "draft_model":
        return f'{convert} ov-draft\nopenvino_genai.draft_model("ov-draft", "CPU")'
    lines = [f"{convert} --trust-remote-code ov-draft"]
    if family == "eagle3":
        ids = " ".join(str(k - 1) for k in source.layer_inputs)
        lines += [
            'model = openvino.Core().read_model("ov-draft/openvino_model.xml")',
            f'model.set_rt_info("{ids}", "hidden_layers_list")',
            'openvino.save_model(model, "ov-draft-eagle3/openvino_model.xml")',
        ]
    last = "ov-draft-eagle3" if family == "eagle3" else "ov-draft"
    return "\n".join([*lines, f'openvino_genai.draft_model("{last}", "CPU")'])


def _llamacpp(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    """p-min 0: drafts are made whatever their probability; without a maximum it drafts three."""
    options = f"--spec-type {LLAMACPP[family]} --spec-draft-n-max {drafts} --spec-draft-p-min 0"
    return f"llama-server -m {directory}/target.gguf -md {directory}/draft.gguf {options}"


def _tgi(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    return f"text-generation-launcher --model-id {directory} --speculate {drafts}"


def _lmdeploy(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    return (
        f"lmdeploy serve api_server {target} --backend pytorch --speculative-algorithm {family} "
        f"--speculative-draft-model {directory} --speculative-num-draft-tokens {drafts}"
    )


def _official(source: Source, family: str, target: str, directory: str, drafts: int) -> str:
    if family == "hydra":
        file = f"{directory}/hydra_lm_head"
        return (
            f'torch.save(safetensors.torch.load_file("{file}.safetensors"), "{file}.pt")\n'
            f'HydraModel.from_pretrained("{directory}", base_model="{target}")'
        )
    if family == "medusa":
        return f'MedusaModel.from_pretrained("{directory}", base_model="{target}")'
    if family == "redrafter":
        return f'recurrent_drafting.modeling_drafter.Drafter.from_pretrained("{directory}")'
    if family == "mtp":
        return f"cp {directory}/model.safetensors {target}/mtp.safetensors  # num_nextn_predict_layers: into config.json"
    if family == "mlp_speculator":
        return f'fms_extras.models.hf.modeling_mlp_speculator.MLPSpeculatorPreTrainedModel.from_pretrained("{directory}")'
    return f'DFlashDraftModel.from_pretrained("{directory}")'


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
    "official": _official,
}
