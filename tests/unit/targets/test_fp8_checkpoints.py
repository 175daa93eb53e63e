"""FP8 checkpoints as they are published: kept in FP8, run by the fast runner, equal to their scheme in float64."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.core.errors import UserError
from drafttrain.model.target import FINAL, Taps
from drafttrain.ops.fp8 import Fp8Linear
from drafttrain.targets import TargetOptions
from drafttrain.targets.estimate import need_of, outline
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.load import LoadedTarget, load_target
from drafttrain.targets.structure import fingerprint_of
from drafttrain.train.engine_features import EngineFeatures
from tests.architectures import model_of
from tests.tokenizers import save_bytes_tokenizer

E4M3 = torch.float8_e4m3fn
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def compressed(strategy: str, dynamic: bool = True, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """As llm-compressor writes it."""
    shared = {"actorder": None, "block_structure": None, "group_size": None, "num_bits": 8, "observer_kwargs": {}}
    shared |= {"symmetric": True, "type": "float"}
    inputs = shared | {"dynamic": dynamic, "observer": None, "strategy": "token" if dynamic else "tensor"}
    weights = shared | {"dynamic": False, "observer": "minmax", "strategy": strategy}
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    settings = {"config_groups": {"group_0": group}, "format": "float-quantized", "ignore": ["lm_head", *ignore]}
    return settings | {"kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed"}


def tiles(strategy: str, shape: torch.Size) -> tuple[int, int]:
    """Rows and columns that share a scale of a weight."""
    return {"block": (128, 128), "channel": (1, shape[1]), "tensor": (shape[0], shape[1])}[strategy]


def widened(code_OI: Tensor, scale_PQ: Tensor) -> Tensor:
    rows, columns = (size // parts for size, parts in zip(code_OI.shape, scale_PQ.shape, strict=True))
    return code_OI.double() * scale_PQ.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


class Exact(nn.Module):
    """A linear map by its scheme in float64: activations have a scale for each token, or for each 128 of its numbers."""

    def __init__(self, weight_OI: Tensor, group: int) -> None:
        super().__init__()
        self.weight_OI, self.group = weight_OI, group

    def forward(self, x_I: Tensor) -> Tensor:
        x_GI = x_I.float().unflatten(-1, (-1, self.group))
        scale_G1 = x_GI.abs().amax(-1, keepdim=True) / 448
        return ((x_GI / scale_G1).to(E4M3).double() * scale_G1).flatten(-2) @ self.weight_OI.T


def saved(folder: Path, name: str, strategy: str, settings: dict[str, Any], kept: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Save a checkpoint; returns (the model with the weights that the codes stand for, the same by its scheme in float64)."""
    whole = model_of(name, **SIZES)
    whole.save_pretrained(folder)
    save_bytes_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    weights, exact = load_file(folder / "model.safetensors"), copy.deepcopy(whole).double()
    for path, linear in whole.named_modules():
        if not isinstance(linear, nn.Linear) or path == "lm_head" or path in kept:
            continue
        weight_OI = linear.weight.detach()
        rows, columns = tiles(strategy, weight_OI.shape)
        blocks = weight_OI.view(weight_OI.shape[0] // rows, rows, -1, columns)
        scale_PQ = blocks.abs().amax((1, 3)) / 448
        code_OI = (blocks / scale_PQ[:, None, :, None]).to(E4M3).view(weight_OI.shape)
        shape = {"block": scale_PQ.shape, "channel": scale_PQ.shape, "tensor": (1,)}[strategy]
        suffix = "weight_scale_inv" if strategy == "block" else "weight_scale"
        weights |= {f"{path}.weight": code_OI, f"{path}.{suffix}": scale_PQ.reshape(shape).clone()}
        wide_OI = widened(code_OI, scale_PQ)
        linear.weight.data = wide_OI.float()
        owner, _, last = path.rpartition(".")
        setattr(exact.get_submodule(owner), last, Exact(wide_OI, 128 if strategy == "block" else weight_OI.shape[1]))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return whole, exact


def loaded(folder: Path, **options: Any) -> LoadedTarget:
    return load_target(TargetOptions(name="hf", path=str(folder), **options))


def check(found: LoadedTarget, whole: Any, exact: Any) -> None:
    """The logits are the scheme's, and not those of unquantised activations. The fingerprint is that of the whole weights."""
    target = found.target
    assert isinstance(target, FastTarget) and found.description["runner_reason"] is None
    assert getattr(target.model.config, "quantization_config", None) is None
    logits = target(TOKENS, None, None, torch.arange(TOKENS.shape[1])[None], Taps()).logits_BRV
    with torch.no_grad():
        wanted, plain = exact(TOKENS).logits, whole(TOKENS).logits
    error, scheme = (float((x - wanted).norm() / wanted.norm()) for x in (logits.double(), plain.double()))
    # rounding before a product can move an activation to the next of its codes
    assert error < scheme / 2 and scheme < 0.2
    assert target.fingerprint == fingerprint_of(whole)


@pytest.mark.parametrize(("name", "strategy"), [("Llama", "channel"), ("Qwen3", "tensor")])
def test_compressed_tensors_checkpoint_equals_scheme_in_float64(name: str, strategy: str, tmp_path: Path) -> None:
    found = saved(tmp_path, name, strategy, compressed(strategy))
    target = loaded(tmp_path)
    check(target, *found)
    need = need_of(outline(TargetOptions(name="hf", path=str(tmp_path))), None, drafter=0, activations=0).target
    assert need == sum(p.numel() * p.element_size() for p in target.target.model.parameters())
    codes = [m.code for m in target.target.model.modules() if isinstance(m, Fp8Linear)]
    assert len(codes) == 7 * 4 and all(code.dtype == E4M3 for code in codes)


def test_compressed_tensors_ignored_maps_stay_whole_and_separate(tmp_path: Path) -> None:
    kept = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
    found = saved(tmp_path, "Llama", "channel", compressed("channel", ignore=kept), kept)
    target: Any = loaded(tmp_path).target
    check(loaded(tmp_path), *found)
    assert target._chain[0].qkv.quantised is None and target._chain[1].qkv.quantised is not None
    assert all(isinstance(target.model.get_submodule(name), nn.Linear) for name in kept)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_fp8_block_checkpoint_equals_scheme_in_float64_and_joins_blocks(name: str, tmp_path: Path) -> None:
    found = saved(tmp_path, name, "block", BLOCKS)
    target = loaded(tmp_path)
    check(target, *found)
    joint = target.target._chain[0].gate_up.quantised
    assert joint.scale.shape == (6, 2) and joint.scale.data_ptr() == target.target._chain[0].gate_up.parts[0].scale.data_ptr()


def test_fp8_checkpoints_of_other_schemes_are_left_to_transformers(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", "channel", compressed("channel", dynamic=False))
    # transformers, with the package of that name, asks for the scales of activations, which are not in the files
    with pytest.raises(UserError, match=r"^target\.path [^\n]*input_scale[^\n]*$"):
        loaded(tmp_path)


def test_fp8_target_reference_states_allow_engine_rounding_of_activations(tmp_path: Path) -> None:
    """An engine rounds some activations to the next code: 0.0015 of the norm, in float32 too, with vLLM on a CPU."""
    saved(tmp_path, "Llama", "channel", compressed("channel"))
    features: Any = SimpleNamespace(loaded=loaded(tmp_path), layers=SimpleNamespace(keys=(0, FINAL)))
    reference, _ = EngineFeatures._compared(features, TOKENS[0].numpy())
    served_TKH = torch.stack([reference.own[key] for key in reference.keys], 1)
    noise_TKH = torch.randn(served_TKH.shape, generator=torch.Generator().manual_seed(0))
    noise_TKH *= served_TKH.norm(dim=-1, keepdim=True) / noise_TKH.norm(dim=-1, keepdim=True)
    assert reference.fault(served_TKH + 0.005 * noise_TKH, str) is None
    assert reference.fault(served_TKH + 0.5 * noise_TKH, str) is not None


def test_fp8_checkpoint_damaged_or_quantised_again_is_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, "Llama", "channel", compressed("channel"))
    with pytest.raises(UserError, match=r"^target\.weights is int8, but the checkpoint's weights are in FP8 already; [^\n]*$"):
        loaded(tmp_path, weights="int8")
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    weights = load_file(file)
    save_file(weights | {f"{name}.weight_scale": torch.ones(3)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"^[^\n]*up_proj has scales of shape \(3,\) for a weight of 384 x 256; [^\n]*$"):
        loaded(tmp_path)
    save_file(weights | {f"{name}.weight": weights[f"{name}.weight"].float()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"^[^\n]*up_proj\.weight is F32 where its scales want F8_E4M3; [^\n]*$"):
        loaded(tmp_path)
