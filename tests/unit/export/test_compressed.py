"""Exports with quantised weights, in compressed-tensors' layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.errors import UserError
from drafttrain.export.compressed import KEY
from drafttrain.export.convert import taken
from drafttrain.export.exporter import ExportSettings, check_wanted, refusals
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.formats.transformers import PLAIN
from drafttrain.export.opened import Opened
from drafttrain.runs import checkpoint_source
from tests.exports import checkpoint, embedded, loaded

Command = Callable[..., int]
TENSOR = {"symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
# what vLLM's and SGLang's loaders read to choose a scheme: the format, and the arguments of weights and activations
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8": ("float-quantized", TENSOR | {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKEN | {"type": "float"}),
    "int8": ("int-quantized", TENSOR | {"num_bits": 8, "type": "int", "strategy": "channel"}, TOKEN | {"type": "int"}),
    "int4": ("pack-quantized", TENSOR | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}, None),
}
MAPS = [f"midlayer.self_attn.{name}_proj" for name in "qkvo"] + [f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")]


def unpacked(stored: dict[str, torch.Tensor], name: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(a map's weight, its scales for every input), from the stored tensors by their definition."""
    scale_OG = stored[f"{name}.weight_scale"].float()
    if kind != "int4":
        code_OI = stored[f"{name}.weight"].float()
    else:  # eight values in a word, the first in its lowest bits, with 8 added
        word_OW = stored[f"{name}.weight_packed"]
        code_OI = ((word_OW[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1).float() - 8
        assert stored[f"{name}.weight_shape"].tolist() == list(code_OI.shape)
    scale_OI = scale_OG.repeat_interleave(code_OI.shape[1] // scale_OG.shape[1], 1)
    return code_OI * scale_OI, scale_OI


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMES)
def test_quantised_export_is_within_rounding_and_is_read_back(
    kind: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = embedded()
    monkeypatch.setattr(checkpoint_source, "load_target", lambda *_: target)
    trained = checkpoint(tmp_path, "eagle3-whole", target)
    words = (f"checkpoint={trained}", "format=all", "out=out", "dtype=bfloat16", f"quantize={kind}", "measure.limit=2")
    assert command("export", *words) == 0
    said = capsys.readouterr().out
    record = json.loads(Path("out/vllm/drafttrain.json").read_text())
    before, after = record["expected_tau"]
    line = f"expected tau {before:.2f} -> {after:.2f} ({kind})"
    assert line in said and line in Path("out/vllm/README.md").read_text() and record["quantize"] == kind
    assert "trtllm: not exported, trtllm is not known to read quantised weights of this family; leave quantize out" in said
    assert Path("out/sglang/model.safetensors").read_bytes() == Path("out/vllm/model.safetensors").read_bytes()

    settings = json.loads(Path("out/vllm/config.json").read_text())[KEY]
    form, weights, activations = SCHEMES[kind]
    (group,) = settings["config_groups"].values()
    assert (settings["quant_method"], settings["format"], group["targets"]) == ("compressed-tensors", form, ["Linear"])
    assert group["weights"] == weights and group.get("input_activations") == activations
    assert {"lm_head", "fc", r"re:.*\.fc$"} <= set(settings["ignore"])

    stored, own = load_file("out/vllm/model.safetensors"), load_file(trained / "drafter.safetensors")
    read = ExternalCheckpoint(Path("out/vllm"))
    assert set(read.kinds) == set(read.tensors) == set(own)
    for name, tensor in own.items():
        stem = name.removesuffix(".weight")
        if stem not in MAPS:
            assert torch.equal(stored[name], tensor.bfloat16() if tensor.is_floating_point() else tensor)
            continue
        weight_OI, scale_OI = unpacked(stored, stem, kind)
        assert torch.equal(read.tensors[name], weight_OI)
        # e4m3 has 4 significant bits; 0.05: the largest value of a group may lie beyond the last code, and scales are rounded
        step_OI = torch.maximum(tensor.abs() / 16, scale_OI * 2**-10) if kind == "fp8" else 0.55 * scale_OI
        assert bool(((weight_OI - tensor).abs() <= step_OI).all())

    assert command("export", "checkpoint=out/vllm", "format=sglang", "out=again", f"quantize={kind}", "measure.limit=2") == 0
    assert "imported: out/vllm (portable, eagle3, float32)" in capsys.readouterr().out


def test_quantised_export_that_no_engine_loads_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    cases = [
        ("medusa", "vllm", "fp8", "vllm is not known to read quantised weights of this family; leave quantize out"),
        ("eagle3", "trtllm", "int8", "leave quantize out; vllm, sglang load it unchanged"),
        ("eagle3-unlike", "vllm", "int4", "do not divide into groups of 128, 64 or 32; choose quantize=int8 or fp8"),
        ("eagle3-latent", "vllm", "fp8", "vllm is not known to read quantised weights of latent attention; leave quantize out"),
    ]
    target = loaded()
    for case, stack, kind, reason in cases:
        found = Opened.of(checkpoint(tmp_path / case, case, target), target)
        with subtests.test(case=case, stack=stack), pytest.raises(UserError, match=reason):
            refusals(found, ExportSettings([stack], tmp_path / "out", "float32", False, quantize=kind))


def test_quantise_without_library_or_with_adapter_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(**more: Any) -> ExportSettings:
        return ExportSettings(["vllm"], tmp_path / "out", "float32", False, quantize="fp8", **more)

    with pytest.raises(UserError, match="quantize is fp8, but with adapter=true no weights are merged; leave one out"):
        check_wanted(wanted(adapter=True))
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(UserError, match=r"quantize=fp8 needs compressed-tensors.*; pip install 'drafttrain\[quantize\]'"):
        check_wanted(wanted())
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
    (tmp_path / "config.json").write_text(json.dumps({KEY: settings}))
    with pytest.raises(UserError, match="is quantised, which needs compressed-tensors"):
        ExternalCheckpoint(tmp_path)


@pytest.mark.slow
def test_quantised_import_of_other_schemes_or_damaged_weights_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    good = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"a": group}}
    save_file({"x_proj.weight": torch.ones(4, 4), "x_proj.weight_scale": torch.ones(3, 1)}, tmp_path / "model.safetensors")
    cases = [
        ({"config_groups": {"a": group, "b": group}}, "has 2 groups in the format 'float-quantized'; one group in float-"),
        ({"format": "nvfp4-pack-quantized"}, "has 1 groups in the format 'nvfp4-pack-quantized'"),
        ({"config_groups": {"a": 3}}, "quantization_config cannot be read"),
        ({}, "x_proj is no weight in float-quantized"),
    ]
    for changes, reason in cases:
        (tmp_path / "config.json").write_text(json.dumps({KEY: good | changes}))
        with subtests.test(reason=reason), pytest.raises(UserError, match=reason):
            _ = ExternalCheckpoint(tmp_path).tensors
    with pytest.raises(UserError, match="a quantised language model cannot be imported as a drafter; name the unquantised one"):
        taken(PLAIN, ExternalCheckpoint(tmp_path), embedded())
