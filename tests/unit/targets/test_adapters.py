"""A target with LoRA adapters: each one's text is peft's, and what drafters or the loader cannot use is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps
from drafttrain.targets import TargetOptions
from drafttrain.targets.adapters import with_adapter
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import check_options, load_target
from tests.helpers import tiny_model

GREEDY, TEXT = Sampling(0.0), [3, 1, 4, 1, 5]
SETTINGS: dict[str, dict[str, Any]] = {
    "qv": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"up_proj": 3}},
}


def saved(folder: Path, name: str = "llama", seed: int = 1, **settings: Any) -> str:
    """The folder of a random adapter of the tiny model."""
    model: Any = tiny_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's weights are transposed
        torch.manual_seed(seed)
        settings = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", "init_lora_weights": False} | settings
        get_peft_model(model, LoraConfig(**settings)).save_pretrained(folder)
    return str(folder)


def generated(target: HFTarget) -> list[int]:
    return Decoder(target, None, "greedy", GREEDY, frozenset(), 12).run([TEXT]).results[0].tokens


@pytest.mark.parametrize(
    ("runner", "name", "settings"),
    [
        (FastTarget, "llama", SETTINGS["qv"]),
        (FastTarget, "llama", SETTINGS["all"]),
        (HFTarget, "llama", SETTINGS["all"]),
        (HFTarget, "gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    ],
)
def test_target_with_adapter_writes_what_peft_generates(
    runner: type[HFTarget], name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    target, folder = runner(tiny_model(name)), saved(tmp_path, name, **settings)
    before = generated(target)
    adapted = with_adapter(target, "sql", folder)
    peft_model: Any = PeftModel.from_pretrained(tiny_model(name), folder)
    expected = peft_model.generate(input_ids=torch.tensor([TEXT]), max_new_tokens=12, do_sample=False)[0, len(TEXT) :]
    assert type(adapted) is runner
    assert generated(adapted) == expected.tolist() != before
    assert generated(target) == before, "the base stays as it is"
    assert adapted.fingerprint != target.fingerprint


def test_target_with_adapter_of_maps_that_fast_runner_fuses_runs_transformers_forward(tmp_path: Path) -> None:
    target = FastTarget(tiny_model())
    target.with_added = lambda added: (_ for _ in ()).throw(UserError("it cannot"))  # type: ignore[method-assign]
    assert type(with_adapter(target, "sql", saved(tmp_path, **SETTINGS["qv"]))) is HFTarget


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "changes .*lm_head.*; expected LoRA matrices on linear maps"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes .*embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "changes .*lm_head"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "changes .*lora_magnitude_vector"),
        ({"target_modules": ["q_proj"], "bias": "lora_only"}, "changes .*bias"),
    ],
)
def test_adapter_of_more_than_lora_on_blocks_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    name = "phi" if "bias" in settings else "llama"  # its maps have biases
    folder = saved(tmp_path, name, **settings)
    with pytest.raises(UserError, match=message):
        with_adapter(HFTarget(tiny_model(name)), "sql", folder)


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.adapters: sql at .* does not fit this target"):
        with_adapter(HFTarget(tiny_model("gpt2")), "sql", saved(tmp_path, **SETTINGS["qv"]))


def test_adapter_that_starts_from_changed_weights_is_refused(tmp_path: Path) -> None:
    """peft would subtract the first matrices from the target's weights, which all its adapters share."""
    target = HFTarget(tiny_model())
    folder = saved(tmp_path, **SETTINGS["qv"] | {"init_lora_weights": "olora"})
    before = [p.clone() for p in target.model.parameters()]
    with pytest.raises(UserError, match="init_lora_weights=olora changes the target's own weights"):
        with_adapter(target, "sql", folder)
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_target_options_with_adapters_are_checked(tmp_path: Path) -> None:
    folder = saved(tmp_path, **SETTINGS["qv"])
    check_options(TargetOptions(adapters={"sql": folder}))
    with pytest.raises(UserError, match=r"not target\.weights=int8; leave one out"):
        check_options(TargetOptions(adapters={"sql": folder}, weights="int8"))
    with pytest.raises(UserError, match="not processes that share one; leave one out"):
        check_options(TargetOptions(adapters={"sql": folder}), shared=True)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match=r"which has no adapter_model.safetensors; name the folder"):
        load_target(TargetOptions(adapters={"sql": folder}))


@pytest.mark.parametrize("runner", [FastTarget, HFTarget])
def test_drafters_that_use_targets_own_layers_are_refused_with_adapters(runner: type[HFTarget]) -> None:
    target = runner(tiny_model())
    target.has_adapters = True
    for use in (lambda: target.shallow(1), lambda: target.with_added({})):
        with pytest.raises(UserError, match=r"leave target\.adapters out, or choose another family"):
            use()


def test_online_fills_each_row_by_its_own_adapter(tmp_path: Path) -> None:
    target = FastTarget(tiny_model())
    adapters = {name: with_adapter(target, name, saved(tmp_path / name, **SETTINGS[name])) for name in SETTINGS}
    token_BT = torch.randint(0, 64, (5, 7), generator=torch.Generator().manual_seed(0))
    position_BT, document_BT = torch.arange(7).expand(5, -1), torch.zeros_like(token_BT)
    document_BT[1, 4:] = -1  # padding
    names = ("qv", None, "all", "qv", None)
    batch = TrainBatch(token_BT, position_BT, document_BT, document_BT >= 0, adapters=names)
    filled = Online(target, Taps((1,)), adapters).fill(batch).hidden
    for row, name in enumerate(names):
        own_target, own_row = target if name is None else adapters[name], replace(batch.only([row]), adapters=())
        alone = Online(own_target, Taps((1,))).fill(own_row).hidden
        for key, states_BTH in filled.items():
            real_T = document_BT[row] >= 0
            torch.testing.assert_close(states_BTH[row][real_T], alone[key][0][real_T])
    base = Online(target, Taps((1,))).fill(replace(batch, adapters=())).hidden
    assert not torch.allclose(filled[1][0], base[1][0])
