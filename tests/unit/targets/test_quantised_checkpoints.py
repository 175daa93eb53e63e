"""Targets whose checkpoints are quantised: what transformers loads is a target like any other, what it cannot is one line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.export.compressed import MAPS, Compression
from drafttrain.model.target import Taps
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target
from tests.architectures import model_of
from tests.helpers import prompts
from tests.tiny import build
from tests.tokenizers import save_bytes_tokenizer

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of E2M1; the highest bit is the sign
GROUP = 32  # values that share a scale in MXFP4
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]}
NEEDED = {"awq": "gptqmodel", "gptq": "optimum", "compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes"}


def saved(folder: Path, model: Any, quantisation: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a model whose configuration has this entry; returns its weights for `packed`."""
    model.save_pretrained(folder)
    save_bytes_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return load_file(folder / "model.safetensors")


def loaded(folder: Path) -> LoadedTarget:
    return load_target(TargetOptions(name="hf", path=str(folder)))


def fp8(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights in E4M3, a scale for each block of 16 x 16, what they stand for)."""
    rows, columns = weight_OI.shape
    blocks = weight_OI.view(rows // 16, 16, columns // 16, 16)
    scale = blocks.abs().amax((1, 3)) / 448
    small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return small.view(rows, columns), scale, (small.float() * scale[:, None, :, None]).view(rows, columns)


def mxfp4(weight_EIO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks [E, O, I / 32, 16] of two values a byte, scales [E, O, I / 32] with a bias of 127, what they stand for)."""
    groups = weight_EIO.transpose(1, 2).reshape(weight_EIO.shape[0], weight_EIO.shape[2], -1, GROUP)
    exponent = (groups.abs().amax(-1) / 6).clamp_min(2.0**-100).log2().ceil()
    scaled = groups / exponent.exp2()[..., None]
    index = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    code = (index + 8 * (scaled < 0)).to(torch.uint8)
    value = FP4[index] * torch.where(scaled < 0, -1.0, 1.0) * exponent.exp2()[..., None]
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8), value.flatten(2).transpose(1, 2)


def check(target: Any, reference: Any) -> None:
    """States, logits and greedy text of a target are those of a model with the weights that the numbers stand for."""
    token_1T, position_1T = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), torch.arange(8)[None]
    out = target(token_1T, None, None, position_1T, Taps((1,), final=True))
    with torch.no_grad():
        theirs = reference(token_1T, output_hidden_states=True)
    torch.testing.assert_close(out.hidden[1].float(), theirs.hidden_states[2], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out.logits_BRV.float(), theirs.logits, rtol=2e-3, atol=2e-3)
    asked = prompts(2, vocab=36)
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=12).run(asked, 2).results
    drafted = Decoder(target, build("medusa", target, 1.0), "greedy", Sampling(), max_new_tokens=12).run(asked, 2).results
    assert [r.tokens for r in plain] == [r.tokens for r in drafted]


def test_fp8_block_checkpoint_equals_dequantised_model(tmp_path: Path) -> None:
    model = model_of("Llama")
    weights = saved(tmp_path, model, FP8)
    with torch.no_grad():
        for name, linear in model.named_modules():
            if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                small, scale, whole = fp8(linear.weight)
                weights |= {f"{name}.weight": small, f"{name}.weight_scale_inv": scale}
                linear.weight.copy_(whole)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    check(loaded(tmp_path).target, model)


def test_mxfp4_expert_checkpoint_equals_dequantised_model(tmp_path: Path) -> None:
    model = model_of("gpt-oss")
    weights = saved(tmp_path, model, MXFP4)
    with torch.no_grad():
        for name, experts in model.named_modules():
            for part in ("gate_up_proj", "down_proj") if name.endswith(".experts") else ():
                whole = getattr(experts, part)
                blocks, scales, value = mxfp4(whole)
                del weights[f"{name}.{part}"]
                weights |= {f"{name}.{part}_blocks": blocks.contiguous(), f"{name}.{part}_scales": scales.contiguous()}
                whole.copy_(value)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    check(loaded(tmp_path).target, model)


def test_quantised_checkpoint_missing_package_is_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for method, package in NEEDED.items():
        settings: dict[str, Any] = {"bits": 4, "group_size": 16} if method in ("awq", "gptq") else {"config_groups": {}}
        settings = {"load_in_4bit": True} if method == "bitsandbytes" else settings
        saved(tmp_path, model_of("Llama"), {"quant_method": method} | settings)
        with subtests.test(method=method):
            if find_spec(package):
                pytest.skip(f"{package} is installed")
            with pytest.raises(UserError, match=rf"^target\.path [^\n]*{package.replace('_', '.')}[^\n]*$"):
                loaded(tmp_path)


@pytest.mark.slow
def test_packed_compressed_tensors_checkpoint_equals_dequantised_model(tmp_path: Path) -> None:
    """Its library would widen the weights in the model's own forward pass, which a target does not call."""
    model = model_of("Llama")
    weights = {name: x for name, x in model.state_dict().items() if MAPS.fullmatch(name)}
    int4 = Compression.of("int4", weights)
    stored = saved(tmp_path, model, int4.config(["lm_head"]))
    for name, weight in weights.items():
        parts = int4.compress(weight, torch.float32)
        stored |= {name.removesuffix("weight") + key: part for key, part in parts.items()}
        del stored[name]
        model.get_parameter(name).data.copy_(int4.widen(parts))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    check(loaded(tmp_path).target, model)


def test_quantised_checkpoint_of_unknown_method_is_refused(tmp_path: Path) -> None:
    weights = saved(tmp_path, model_of("Llama"), {"quant_method": "unheard-of"})
    packed = {f"{name}_packed" if "q_proj" in name else name: tensor for name, tensor in weights.items()}
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"^[^\n]*q_proj[^\n]*$"):
        loaded(tmp_path)
