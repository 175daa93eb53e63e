"""The commands that an export's README gives: what the directory itself cannot say."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from drafttrain.drafters import families
from drafttrain.export import serve
from drafttrain.export.files import Source
from drafttrain.export.table import loads
from drafttrain.model.shapes import LayerShape
from tests.exports import opened, written

SAYS = {  # what serves three drafts; the taps of these drafters are the outputs of blocks 0, 1 and 2, the inputs of 1, 2 and 3
    ("eagle3", "vllm"): ['"method": "eagle3"', '"num_speculative_tokens": 3'],
    ("eagle3", "sglang"): ["--speculative-algorithm EAGLE3", "-num-steps 3 ", "-eagle-topk 1 ", "-num-draft-tokens 4"],
    ("eagle3", "trtllm"): ["decoding_type: Eagle3", "max_draft_len: 3", "eagle3_layers_to_capture: [0, 1, 2]"],
    ("eagle3", "openvino"): ['set_rt_info("0 1 2", "hidden_layers_list")'],
    ("eagle3", "llamacpp"): ["--spec-type draft-eagle3", "--spec-draft-n-max 3", "--spec-draft-p-min 0", "add --parallel 1"],
    ("eagle", "vllm"): ['"method": "eagle"', '"num_speculative_tokens": 3'],
    ("eagle", "lmdeploy"): ["--speculative-algorithm eagle ", "--speculative-num-draft-tokens 3"],
    ("medusa", "vllm"): ['"method": "medusa"', '"num_speculative_tokens": 3'],
    ("medusa", "tgi"): ["--speculate 3"],
    ("dflash", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],  # of blocks of four
    ("dflash", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("dflash", "trtllm"): ["decoding_type: DFlash", "max_draft_len: 3"],
    ("dflash", "transformers"): ['speculation_type="dflash"'],
    ("dflash", "llamacpp"): ["--spec-type draft-dflash", "--spec-draft-n-max 3"],
    ("dspark", "vllm"): ['"method": "dspark"', '"num_speculative_tokens": 3'],  # of blocks of three, shifted
    ("dspark", "sglang"): ["--speculative-algorithm DSPARK", "--speculative-draft-model-path"],
    ("dspark-in-place", "sglang"): ["--speculative-algorithm DSPARK", "--speculative-dspark-block-size 3"],  # of blocks of four
    ("dspark", "trtllm"): ["decoding_type: DSpark", "max_draft_len: 3", "speculative_model: "],
    ("dspark", "llamacpp"): ["--spec-type draft-dspark", "--spec-draft-n-max 3"],
    ("dspark", "official"): ["Qwen3DSparkModel"],
    ("dflash2", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("dflash2", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("dflash2-unlike", "llamacpp"): ["--spec-type draft-dflash", "--spec-draft-n-max 2"],
    ("jetspec", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("jetspec", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("domino", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4", "CUDA and bfloat16"],
    ("domino-shifted", "sglang"): ["--speculative-num-draft-tokens 3", "leaves the last slot of a shifted block unused"],
    ("xpress", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("lilicorr", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("lilicorr", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("draft_model", "vllm"): ['"method": "draft_model"', '"num_speculative_tokens": 3'],
    ("uno", "sglang"): ["--speculative-algorithm UNO --uno-lora-path", "--speculative-num-draft-tokens 4", "parallelism at 1"],
    ("draft_model", "sglang"): ["--speculative-algorithm STANDALONE"],
    ("draft_model", "trtllm"): ["decoding_type: Draft_Target"],
    ("draft_model", "llamacpp"): ["--spec-type draft-simple"],
}


@pytest.mark.parametrize(("case", "stack"), SAYS)
def test_the_command_says_what_the_directory_does_not(case: str, stack: str, tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", case)
    written(found, golden, stack, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert [text for text in SAYS[case, stack] if text not in card] == [], card


DRAFTER, TARGET = "my drafters/it's $5", "my targets/a: b"
EVERY = [(family, stack) for family in families() for stack in loads(family)]


def source_of(family: str, stack: str, **shape: Any) -> Source:
    """What the commands read of a source. shape: of the drafter's layers."""
    layers = LayerShape(64, 32, 4, 4, 2, 8, 48, 512, 1e4, 1e-5, **shape)
    drafter = SimpleNamespace(draft_length=3, resolved_options=lambda: {"mask_token": 5})
    options = {"block_size": 4, "slots": "in_place", "layers": 2}
    opened = SimpleNamespace(meta=SimpleNamespace(family=family))
    fields = {"stack": stack, "target_name": TARGET, "layer_inputs": [1, 2], "options": options, "layer_shape": layers}
    return cast(Source, SimpleNamespace(opened=opened, drafter=drafter, **fields))


def named(line: str) -> set[str]:
    """The paths of a line of Python, or else of a command of the shell."""
    try:
        return {
            node.value for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    except SyntaxError:
        return set(shlex.split(line, comments=True))


@pytest.mark.parametrize(("family", "stack"), EVERY)
def test_names_of_directories_are_quoted(family: str, stack: str) -> None:
    """Each is one word of the shell, one text of Python, or one value of YAML or JSON."""
    said = serve.command(source_of(family, stack), DRAFTER)
    if match := re.search(r"<<'END'\n(.*)END\n(.*)", said, re.DOTALL):
        assert yaml.safe_load(match[1])["speculative_config"]["speculative_model"] == DRAFTER
        said = match[2]
    words = {word for line in said.split("\n") for word in named(line)}
    objects = [json.loads(word) for word in words if word.startswith("{")]
    words |= {str(value) for held in objects for value in held.values()}
    given = {word for word in words if " " in word and not word.startswith("{")}
    assert given and all(word.startswith((DRAFTER, TARGET)) for word in given - {"0 1"}), said


@pytest.mark.parametrize(
    ("family", "stack"), [("dflash", "vllm"), ("dspark", "vllm"), ("jetspec", "vllm"), ("dflash2", "speculators")]
)
def test_mixed_layers_of_blocks_need_the_second_runner_of_vllm(family: str, stack: str) -> None:
    def begins(**shape: Any) -> bool:
        return serve.command(source_of(family, stack, **shape), "x").startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve ")

    assert begins(sliding_window=5, full_attention_layers=(1,))
    assert not begins(sliding_window=5) and not begins() and not begins(sliding_window=5, full_attention_layers=(0, 1))
