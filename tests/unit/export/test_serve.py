"""The commands that an export's README gives: what the directory itself cannot say."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from drafttrain.drafters import families
from drafttrain.export.files import ExportSource
from drafttrain.export.serve import STACKS
from drafttrain.export.table import loads, serving_command
from drafttrain.model.shapes import LayerShape

DRAFTER, TARGET = "my drafters/it's $5", "my targets/a: b"
EVERY = [(family, stack) for family in families() for stack in loads(family)]


def source_of(family: str, stack: str, **shape: Any) -> ExportSource:
    """What the commands read of a source. shape: of the drafter's layers."""
    layers = LayerShape(64, 32, 4, 4, 2, 8, 48, 512, 1e4, 1e-5, **shape)
    drafter = SimpleNamespace(draft_length=3, tuned={}, resolved_options=lambda: {"mask_token": 5})
    options = {"block_size": 4, "slots": "in_place", "layers": 2}
    meta = SimpleNamespace(family=family, options=options, target=SimpleNamespace(dtype="bfloat16"))
    opened = SimpleNamespace(meta=meta, drafter=drafter)
    fields = {"stack": stack, "target_name": TARGET, "layer_inputs": [1, 2], "options": options, "layer_shape": layers}
    return cast(ExportSource, SimpleNamespace(opened=opened, drafter=drafter, **fields))


def named(line: str) -> set[str]:
    """The paths of a line of Python, or else of a command of the shell."""
    try:
        return {
            node.value for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    except SyntaxError:
        return set(shlex.split(line, comments=True))


def test_serve_command_quotes_directory_names(subtests: pytest.Subtests) -> None:
    """Each is one word of the shell, one text of Python, or one value of YAML or JSON."""
    for family, stack in EVERY:
        with subtests.test(family=family, stack=stack):
            said = serving_command(source_of(family, stack), DRAFTER)
            if match := re.search(r"<<'END'\n(.*)END\n(.*)", said, re.DOTALL):
                assert yaml.safe_load(match[1])["speculative_config"]["speculative_model"] == DRAFTER
                said = match[2]
            words = {word for line in said.split("\n") for word in named(line)}
            objects = [json.loads(word) for word in words if word.startswith("{")]
            words |= {str(value) for held in objects for value in held.values()}
            given = {word for word in words if " " in word and not word.startswith("{")}
            assert given and all(word.startswith((DRAFTER, TARGET)) for word in given - {"0 1"}), said


def test_serve_command_of_shell_is_read_by_bash(subtests: pytest.Subtests) -> None:
    for family, stack in EVERY:
        if stack != "official" and not STACKS[stack].python:
            with subtests.test(family=family, stack=stack):
                said = serving_command(source_of(family, stack), DRAFTER)
                checked = subprocess.run(["bash", "-n", "-c", said], capture_output=True, text=True, check=False)
                assert (checked.returncode, checked.stderr) == (0, "")


def test_serve_command_keeps_target_in_float32_that_was_measured_in_it() -> None:
    for family, stack in (("eagle3", "vllm"), ("eagle3", "sglang"), ("mtp_native", "stitched"), ("peagle", "speculators")):
        source: Any = source_of(family, stack)
        assert "--dtype" not in serving_command(source, DRAFTER)
        source.opened.meta.target.dtype = "float32"
        assert all(line.endswith(" --dtype float32") for line in serving_command(source, DRAFTER).split("\n"))


def test_serve_command_has_tuned_length_of_chain_and_whole_block() -> None:
    source: Any = source_of("eagle3", "vllm")
    source.drafter.tuned = {0: {"draft_length": 1}}
    assert "'num_speculative_tokens': 3" in serving_command(source, DRAFTER).replace('"', "'"), "the block's"
    del source.options["block_size"]
    assert "'num_speculative_tokens': 1" in serving_command(source, DRAFTER).replace('"', "'")


def test_serve_command_has_lengths_by_batch_size_where_engine_reads_them() -> None:
    def said(family: str, stack: str, **tuned: dict[str, Any]) -> str:
        source: Any = source_of(family, stack)
        del source.options["block_size"]
        source.drafter.tuned = {int(size.removeprefix("b")): settings for size, settings in tuned.items()}
        return serving_command(source, DRAFTER)

    chosen = {"b2": {"draft_length": 2, "speedup": 1.5}, "b8": {"draft_length": 3, "speedup": 1.2}, "b32": {"speedup": 0.9}}
    config = json.loads(shlex.split(said("eagle3", "vllm", **chosen))[-1])
    assert config["num_speculative_tokens"] == 3, "the largest that vLLM may take"
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 7, 2], [8, 31, 3], [32, 65536, 0]]
    falling = {"b1": {"speedup": 1.5}, "b4": {"draft_length": 2, "speedup": 1.2}, "b16": {"draft_length": 1, "speedup": 0.9}}
    spec = re.search(r"<<'END'\n(.*)END\n", said("eagle3", "trtllm", **falling), re.DOTALL)
    assert spec is not None
    schedule = yaml.safe_load(spec[1])["speculative_config"]["draft_len_schedule"]
    assert schedule == {1: 3, 3: 3, 15: 2, 65536: 0}, "each length holds up to its batch size"
    assert "schedule" not in said("eagle3", "trtllm", **chosen), "TensorRT-LLM takes lengths that fall"
    adaptive, command = said("eagle3", "sglang", **chosen).removeprefix("cat > adaptive.json <<'END'\n").split("\nEND\n")
    assert json.loads(adaptive) == {str(n): {"candidate_steps": [k]} for n, k in ((1, 2), (8, 3), (32, 0))}
    words = shlex.split(command)
    assert words[-3:] == ["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"]
    assert words[words.index("--speculative-num-steps") + 1] == "2", "one of the candidates, which SGLang asks for"
    for family, stack in (("medusa", "vllm"), ("peagle", "vllm")):
        assert "65536" not in said(family, stack, **falling), "no table is known there"
    assert "65536" not in said("eagle3", "vllm", b1={"draft_length": 2}, b4={"draft_length": 2})


def test_serve_command_mixed_windows_use_second_vllm_runner(subtests: pytest.Subtests) -> None:
    def begins(family: str, stack: str, **shape: Any) -> bool:
        said = serving_command(source_of(family, stack, **shape), "x")
        return said.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve ")

    for pair in (("dflash", "vllm"), ("dspark", "vllm"), ("jetspec", "vllm"), ("dflash2", "speculators")):
        with subtests.test(pair=pair):
            assert begins(*pair, sliding_window=5, full_attention_layers=(1,))
            assert not begins(*pair, sliding_window=5) and not begins(*pair)
            assert not begins(*pair, sliding_window=5, full_attention_layers=(0, 1))
