"""The serving stacks, and the command with which each serves a target with an exported drafter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

import yaml

from drafttrain.drafters.tuned_settings import draft_up_to
from drafttrain.export.files import ExportSource
from drafttrain.export.layers import windows_of
from drafttrain.export.opened import Opened

BLOCKS = ("dflash", "dspark")  # methods of vLLM whose layers can have caches of several kinds, in its second runner alone
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER=1"
DYNAMIC = ("eagle", "eagle3", "dflash")  # methods of vLLM whose draft length may follow the batch size
ADAPTIVE = ("EAGLE", "EAGLE3")  # algorithms of SGLang whose draft length may follow the batch size
LARGEST = 65536  # requests at a time

NO_LOADER = "it has no loader for this family"
NOT_SPECULATORS = "it has no type for this family"
ONLY_HEADS = "of these families it loads only Medusa and MLP speculators"
GENERATE = "its generate() takes only draft models, DFlash, and modules that some targets come with"
NOT_OWN = "only modules that targets come with are written back into them"


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """The parts of a command line."""

    source: ExportSource
    directory: str  # of the exported drafter
    target: str  # directory or hub id
    drafts: int  # length of a chain
    method: str  # the stack's name of this way of drafting
    settings: Mapping[str, Any]  # further settings
    ranges: Sequence[tuple[int, int, int]] = ()  # (first batch size, last, length of a chain), where lengths differ

    @property
    def dtype(self) -> str:
        """The flag that keeps a target in float32 if it was measured so; vLLM and SGLang round it without."""
        return " --dtype float32" if self.source.opened.meta.target.dtype == "float32" else ""


@dataclass(frozen=True, slots=True)
class ServingStack:
    """A serving stack."""

    name: str
    command: Callable[[ServingCommand], str]  # the command, or the lines of Python
    usual: str = NO_LOADER  # why it does not load a family, where the family's rows say nothing of it
    by_name: bool = False  # it loads a hub id itself
    python: bool = False  # its command is Python
    any_scaling: bool = False  # it reads every rotary scaling of a drafter's layers, or the format refuses those it does not
    template: str | None = None  # the flag of a file with a chat template


def draft_lengths(opened: Opened) -> dict[int, int]:
    """The length of the chain from each tuned batch size on; 0 where drafting does not gain, never at the smallest."""
    tuned, whole = opened.drafter.tuned or {1: {}}, opened.drafter.draft_length
    largest, lengths = draft_up_to(tuned), dict.fromkeys(sorted(tuned), whole)
    if "block_size" not in opened.meta.options:  # stacks draft a chain; of a block they take the whole
        lengths = {size: min(whole, tuned[size].get("draft_length", whole)) for size in lengths}
    return {size: 0 if largest and size > largest else length for size, length in lengths.items()}


def _vllm(served: ServingCommand) -> str:
    """vLLM's command."""
    config = {"method": served.method, "model": served.directory, "num_speculative_tokens": served.drafts} | {**served.settings}
    if served.ranges and served.method in DYNAMIC and "parallel_drafting" not in served.settings:
        config["num_speculative_tokens"] = max(length for *_, length in served.ranges)
        config["num_speculative_tokens_per_batch_size"] = served.ranges
    return f"{_runner(served)}vllm serve {quote(served.target)} --speculative-config {quote(json.dumps(config))}{served.dtype}"


def _runner(served: ServingCommand) -> str:
    """What a command of vLLM begins with. Its first runner, the default of older versions, refuses drafters of blocks in which
    some layers have windows and others none.
    """
    if served.method not in BLOCKS:
        return ""
    windows = windows_of(served.source.layer_shape, served.source.options["layers"])
    return f"{SECOND_RUNNER} " if any(windows) and not all(windows) else ""


def _sglang(served: ServingCommand) -> str:
    if served.method == "UNO":  # the root and the random tokens after it; no other model drafts
        return (
            f"python -m sglang.launch_server --model-path {quote(served.target)} --speculative-algorithm UNO "
            f"--uno-lora-path {quote(served.directory)} --speculative-num-draft-tokens {served.drafts}{served.dtype}"
        )
    command = (
        f"python -m sglang.launch_server --model-path {quote(served.target)} --speculative-algorithm {served.method} "
        f"--speculative-draft-model-path {quote(served.directory)}{_sglang_lengths(served)}{served.dtype}"
    )
    if not served.ranges or served.method not in ADAPTIVE:
        return command
    steps = {str(first): {"candidate_steps": [length]} for first, _, length in served.ranges}
    adaptive = " --speculative-adaptive --speculative-adaptive-config adaptive.json"
    return f"cat > adaptive.json <<'END'\n{json.dumps(steps)}\nEND\n{command}{adaptive}"


def _sglang_lengths(served: ServingCommand) -> str:
    """DFLASH counts a block's slots. DSPARK takes the block's size as the number of drafts: blocks in place have one less."""
    if served.method == "DFLASH":
        return f" --speculative-num-draft-tokens {served.source.options['block_size']}"
    if served.method == "DSPARK":
        return "" if served.source.options["slots"] == "shifted" else f" --speculative-dspark-block-size {served.drafts}"
    steps = f" --speculative-num-steps {served.drafts} --speculative-eagle-topk 1"
    return f"{steps} --speculative-num-draft-tokens {served.drafts + 1}"


def _trtllm(served: ServingCommand) -> str:
    lines = [f"decoding_type: {served.method}", f"max_draft_len: {served.drafts}"]
    lines.append(f"speculative_model: {_scalar(served.directory)}")
    if served.method == "Eagle3":
        lines.append(f"eagle3_layers_to_capture: {[k - 1 for k in served.source.layer_inputs]}")
        lengths = [length for *_, length in served.ranges]
        if lengths and lengths == sorted(lengths, reverse=True):  # no others are allowed; each holds up to its batch size
            schedule = ", ".join(f"{last}: {length}" for _, last, length in [(1, 1, lengths[0]), *served.ranges])
            lines.append(f"draft_len_schedule: {{{schedule}}}")
    if served.method == "PARD":
        lines.append(f"mask_token_id: {served.source.drafter.resolved_options()['mask_token']}")
    body = "\n".join(f"  {line}" for line in lines)
    return f"cat > spec.yaml <<'END'\nspeculative_config:\n{body}\nEND\ntrtllm-serve {quote(served.target)} --config spec.yaml"


def _scalar(text: str) -> str:
    """A text in YAML, in one line."""
    dumped: str = yaml.safe_dump(text, width=len(text) + 2, allow_unicode=True)
    return dumped.removesuffix("...\n").rstrip("\n")


def _speculators(served: ServingCommand) -> str:
    """vLLM serves them, and reads the verifier from the files. Without a method of vLLM's the library loads them."""
    if not served.method:
        load = f"speculators.SpeculatorModel.from_pretrained({served.directory!r})"
        return f"python - <<'END'\nimport speculators\n{load}\nEND"
    return f"{_runner(served)}vllm serve {quote(served.directory)}{served.dtype}"


def _transformers(served: ServingCommand) -> str:
    auto_class, speculation_argument = (
        ("AutoModel", ', speculation_type="dflash"') if served.method == "dflash" else ("AutoModelForCausalLM", "")
    )
    return (
        f"assistant = {auto_class}.from_pretrained({served.directory!r})\n"
        f"target = AutoModelForCausalLM.from_pretrained({served.target!r})\n"
        f"target.generate(**inputs, assistant_model=assistant{speculation_argument})"
    )


def _openvino(served: ServingCommand) -> str:
    convert_command, model_dir = "optimum-cli export openvino --task text-generation-with-past -m", "ov-draft"
    trust = "" if served.method == "draft_model" else "--trust-remote-code "  # optimum asks for it, for files without code too
    lines = [
        f"{convert_command} {quote(served.target)} ov-target",
        f"{convert_command} {quote(served.directory)} {trust}ov-draft",
    ]
    lines += ["python - <<'END'", "import openvino, openvino_genai"]
    if served.method == "eagle3":
        ids, model_dir = " ".join(str(k - 1) for k in served.source.layer_inputs), "ov-draft-eagle3"
        lines += [
            'model = openvino.Core().read_model("ov-draft/openvino_model.xml")',
            f'model.set_rt_info("{ids}", "hidden_layers_list")',
            f'openvino.save_model(model, "{model_dir}/openvino_model.xml")',
        ]
    lines += [
        f'draft = openvino_genai.draft_model("{model_dir}", "CPU")',
        'pipeline = openvino_genai.LLMPipeline("ov-target", "CPU", draft_model=draft)',
    ]
    return "\n".join([*lines, 'print(pipeline.generate("Hello", max_new_tokens=64))', "END"])


def _llamacpp(served: ServingCommand) -> str:
    """With p-min 0 it drafts tokens of any probability; without a maximum it would draft three."""
    options = f"--spec-type {served.method} --spec-draft-n-max {served.drafts} --spec-draft-p-min 0"
    target, draft = (quote(f"{served.directory}/{name}.gguf") for name in ("target", "draft"))
    return f"llama-server -m {target} -md {draft} {options}"


def _tgi(served: ServingCommand) -> str:
    return f"text-generation-launcher --model-id {quote(served.directory)} --speculate {served.drafts}"


def _lmdeploy(served: ServingCommand) -> str:
    return (
        f"lmdeploy serve api_server {quote(served.target)} --backend pytorch --speculative-algorithm {served.method} "
        f"--speculative-draft-model {quote(served.directory)} --speculative-num-draft-tokens {served.drafts}"
    )


def _official(served: ServingCommand) -> str:
    """The method is the lines that load a drafter with its authors' code, with places for names of files, which are quoted."""
    return served.method.format(
        directory=served.directory,
        target=served.target,
        safe=f"{served.directory}/hydra_lm_head.safetensors",
        pickle=f"{served.directory}/hydra_lm_head.pt",
        source=quote(f"{served.directory}/model.safetensors"),
        into=quote(f"{served.target}/mtp.safetensors"),
    )


def _stitched(served: ServingCommand) -> str:
    """The target that is served is the exported directory."""
    config = {"method": "mtp", "num_speculative_tokens": served.drafts}
    return (
        f"vllm serve {quote(served.directory)} --speculative-config {quote(json.dumps(config))}{served.dtype}\n"
        f"python -m sglang.launch_server --model-path {quote(served.directory)} --speculative-algorithm EAGLE"
        f" --speculative-num-steps {served.drafts} --speculative-eagle-topk 1"
        f" --speculative-num-draft-tokens {served.drafts + 1}{served.dtype}"
    )


STACKS = {
    "vllm": ServingStack("vLLM", _vllm, by_name=True, template="--chat-template"),
    "sglang": ServingStack("SGLang", _sglang, by_name=True, template="--chat-template"),
    "trtllm": ServingStack("TensorRT-LLM", _trtllm, by_name=True),
    "speculators": ServingStack("speculators", _speculators, NOT_SPECULATORS, by_name=True, any_scaling=True),
    "transformers": ServingStack("transformers", _transformers, GENERATE, by_name=True, python=True, any_scaling=True),
    "llamacpp": ServingStack("llama.cpp", _llamacpp, any_scaling=True, template="--jinja --chat-template-file"),
    "openvino": ServingStack("OpenVINO GenAI", _openvino, any_scaling=True),
    "tgi": ServingStack("text-generation-inference", _tgi, ONLY_HEADS, by_name=True),
    "lmdeploy": ServingStack("LMDeploy", _lmdeploy, by_name=True),
    "official": ServingStack("the authors' code", _official, python=True, any_scaling=True),
    "stitched": ServingStack("the target's own files", _stitched, NOT_OWN, any_scaling=True),
}
