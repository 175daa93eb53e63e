"""transformers models as targets: exact for ragged batches and trees, or refused in one line."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.medusa import Medusa, MedusaOptions
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets import TargetOptions
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import RecomputedTarget, load_target, stop_ids_of
from tests.architectures import SCALE, WIDE
from tests.helpers import ARCHITECTURES, prompts, tiny_model, tiny_target


@pytest.mark.sampled(name=("mistral-sliding", "gpt2", "opt"))  # a window, and learned positions
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hf_target_plain_greedy_decoding_equals_generate(name: str) -> None:

    target, asked = tiny_target(name), prompts(3, seed=2)
    results = Decoder(target, None, "greedy", Sampling(), frozenset(), 24, prefill_chunk=5).run(asked, batch_size=3).results
    for prompt, result in zip(asked, results, strict=True):
        wanted = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert result.tokens == wanted[0, len(prompt) :].tolist()


def test_hf_target_hidden_states_by_layer_equal_transformers() -> None:
    target = tiny_target()
    token, position = torch.tensor([prompts(1, longest=12)[0] + [1, 2]]), None
    position = torch.arange(token.shape[1])[None]
    out = target(token, None, None, position, Taps((0, 2), final=True))
    wanted = target.model(token, output_hidden_states=True).hidden_states
    torch.testing.assert_close(out.hidden[0], wanted[1])
    torch.testing.assert_close(out.hidden[2], wanted[3])
    torch.testing.assert_close(out.hidden[FINAL], wanted[-1])
    torch.testing.assert_close(out.logits_BRV, target.model(token).logits)
    assert set(out.hidden) == {0, 2, FINAL}


EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
CAPPED = WIDE | {"output_multiplier": 0.2, "final_logit_softcapping": 2.0, "sliding_window": 8}
SCALED: dict[str, dict[str, Any]] = {  # by model type: one divides by `logits_scaling`, one multiplies by it
    "granite": {name: size for name, size in WIDE.items() if name != "head_dim"} | {"logits_scaling": 4.0},
    "hyperclovax": WIDE | {"logits_scaling": 0.25},
    "muse_glimmer": {
        "text_config": CAPPED,
        "vision_config": EYE,
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
        "image_token_id": 60,
        "video_token_id": 61,
    },
}


@pytest.mark.parametrize("kind", SCALED)
def test_hf_target_scaled_logits_equal_transformers(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **SCALED[kind])
    of = transformers.AutoModelForImageTextToText if kind == "muse_glimmer" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = of.from_config(config).eval().float()
    for matrix in (p for p in model.parameters() if p.ndim >= 2):
        torch.nn.init.normal_(matrix, std=SCALE)
    token = torch.randint(0, 60, (2, 20))
    found = HFTarget(model)(token, None, None, torch.arange(20).expand(2, 20), Taps()).logits_BRV
    torch.testing.assert_close(found, model(token).logits, rtol=1e-4, atol=1e-4)


def test_hf_target_pruned_copy_equals_first_blocks_and_is_trainable() -> None:
    target = tiny_target()
    copy = target.pruned(2)
    token = torch.tensor([[3, 1, 4, 1, 5]])
    middle = target(token, None, None, torch.arange(5)[None], Taps((1,))).hidden[1]
    torch.testing.assert_close(copy(token, None, None, torch.arange(5)[None], Taps((1,))).hidden[1], middle)
    assert all(p.requires_grad for p in copy.parameters()) and not any(p.requires_grad for p in target.parameters())
    with pytest.raises(UserError, match=r"choose 1\.\.4"):
        target.pruned(5)


def test_target_layer_ids_outside_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"exceed the target's 4 blocks"):
        Taps((1, 4)).check(4)


def test_hf_target_inexact_architecture_is_refused_in_one_line() -> None:
    from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

    bloom = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    mamba = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    for config, reason in ((bloom, "cannot decode with our KV cache"), (mamba, "no attention heads")):
        with pytest.raises(UserError, match=reason) as refused:
            HFTarget(AutoModelForCausalLM.from_config(config))
        assert "\n" not in str(refused.value) and "choose another target" in str(refused.value)


SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v4", {"num_hidden_layers": 2}, "its layers cache whole windows of positions as one entry"),
    (
        "minimax",
        {"num_key_value_heads": 2, "head_dim": 16},
        "its recurrent layers keep their state in a way that is not known here",
    ),
    (
        "inkling_text",
        {"num_key_value_heads": 2, "head_dim": 16},
        "its layers of type hybrid_sliding are not known here: KeyError: ",
    ),
]


@pytest.mark.sampled(kind=["deepseek_v4", "inkling_text"])
@pytest.mark.parametrize(("kind", "more", "reason"), UNKNOWN)
def test_hf_target_unknown_kind_of_state_is_refused_by_name_at_once(
    kind: str, more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the references, whose long prompts took a minute."""
    config = transformers.CONFIG_MAPPING[kind](**SMALL | EXPERTS | {"intermediate_size": 96} | more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 2e7
    model(torch.tensor([[5, 6, 7]]), use_cache=False)
    monkeypatch.setattr(HFTarget, "reference", lambda *_: pytest.fail("it is not needed"))
    with pytest.raises(UserError, match=reason) as refused:
        HFTarget(model)
    assert type(model).__name__ in str(refused.value) and "\n" not in str(refused.value)
    assert "features=engine features.target=ends" in str(refused.value)


@pytest.mark.sampled(kind=["minimax"])
@pytest.mark.parametrize(("kind", "more"), [case[:2] for case in UNKNOWN if case[0] != "inkling_text"])
def test_recomputed_target_decodes_unknown_kind_of_state_as_the_model_does(kind: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SMALL | EXPERTS | {"intermediate_size": 96} | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    target, asked = RecomputedTarget(model, why="it is tested"), [[3, 1, 4, 1, 5], [9, 2]]
    drafter = Medusa(MedusaOptions(heads=2, paths=[[0], [0, 0]]), target)
    results = Decoder(target, drafter, "greedy", Sampling(), frozenset(), 7).run(asked, batch_size=2).results
    with torch.no_grad():
        for prompt, result in zip(asked, results, strict=True):
            text = torch.tensor([prompt])
            for _ in range(7):
                text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            assert result.tokens == text[0, len(prompt) :].tolist()
    assert not target.trees and "it is tested" in str(target.chains_reason)


@pytest.mark.parametrize("kind", ["afmoe", "doge"])
def test_hf_target_attention_called_by_keywords_is_exact(kind: str) -> None:
    more = {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**SMALL | more))
    assert HFTarget(model).trees


def test_hf_target_model_ignoring_mask_decodes_chains_only() -> None:
    from transformers import AutoModelForCausalLM, MptConfig

    model = AutoModelForCausalLM.from_config(MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64))
    target = HFTarget(model)
    assert not target.trees
    tree, chain = (Medusa(MedusaOptions(heads=2, paths=t), target) for t in ([[0], [1]], [[0], [0, 0]]))
    with pytest.raises(UserError, match="exact for chains only"):
        Decoder(target, tree, "greedy", Sampling(), frozenset(), 8)
    plain, ours = (
        Decoder(target, d, "greedy", Sampling(), frozenset(), 8).run([[3, 1, 4]]).results[0].tokens for d in (None, chain)
    )
    assert ours == plain


def test_load_target_missing_files_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"needs target\.path"):
        load_target(TargetOptions(name="hf"))
    with pytest.raises(UserError, match="does not exist"):
        load_target(TargetOptions(name="hf", path=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"no config\.json"):
        load_target(TargetOptions(name="hf", path=str(tmp_path)))
    tiny_model().config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no \*\.safetensors weights"):
        load_target(TargetOptions(name="hf", path=str(tmp_path)))


@pytest.mark.parametrize("given", [{}, "2", [1, None], 1.5, True], ids=str)
def test_stop_ids_of_value_that_is_no_token_id_are_refused(given: Any) -> None:
    model, tokenizer = tiny_model(), SimpleNamespace(eos_token_id=[3, 5])
    assert {3, 5} <= stop_ids_of(model, tokenizer)  # type: ignore[arg-type]
    model.generation_config.eos_token_id = given
    with pytest.raises(
        UserError, match=r"^eos_token_id in the target's GenerationConfig is .*; give a token id or a list of them$"
    ):
        stop_ids_of(model, tokenizer)  # type: ignore[arg-type]
