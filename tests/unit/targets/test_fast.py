"""Our runner of the Llama family: transformers' logits, its trees, its gradients, and weights that are joined in place."""

from pathlib import Path

import pytest
import torch
from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.model.masks import Documents
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets import TargetOptions
from drafttrain.targets.fast import FastTarget, why_not, why_whole
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import load_target
from tests.cases import slow_but
from tests.exports import embedded, unprobed
from tests.helpers import ARCHITECTURES, GATED, prompts, tiny_model
from tests.tiny import build

WIDE = {k: v for k, v in GATED.items() if k != "head_dim"}
NO_STOP = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXED = ["sliding_attention", "full_attention"] * 2
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LATENT = WIDE | {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    **{name: ARCHITECTURES[name] for name in ("llama", "mistral-sliding", "qwen2", "qwen3")},
    "llama-biases": LlamaConfig(**GATED, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(**GATED, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64}),
    "qwen3-yarn": Qwen3Config(**GATED, rope_parameters=YARN),
    "qwen2-tied-sliding": Qwen2Config(
        **WIDE, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "phi3": Phi3Config(**WIDE, **NO_STOP, sliding_window=6),
    "phi3-partial": Phi3Config(
        **WIDE, **NO_STOP, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "gemma2": Gemma2Config(**GATED, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**GATED, sliding_window=6, query_pre_attn_scalar=8, layer_types=MIXED),
    "olmo2": Olmo2Config(**WIDE, **NO_STOP),
    "olmo3": Olmo3Config(**WIDE, **NO_STOP, sliding_window=6),
    "cohere2": Cohere2Config(**GATED, sliding_window=6, layer_types=MIXED, logit_scale=0.25),
    "mixtral": MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-sliding": MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "qwen3-moe": Qwen3MoeConfig(**GATED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]),
    "deepseek-v2": DeepseekV2Config(**LATENT, **ROUTED, n_group=1, q_lora_rank=None, attention_bias=True),
    "deepseek-v3": DeepseekV3Config(
        **LATENT, **ROUTED, n_group=2, q_lora_rank=16, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "deepseek-v3-halves": DeepseekV3Config(**LATENT, **ROUTED, n_group=2, q_lora_rank=None, rope_interleave=False),
    "gpt-oss": GptOssConfig(**GATED, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
}

# one of each kind of block: Llama's; joined projections that rotate in part; norms around attention; norms after it; attention
# beside the MLP; latent attention; attention sinks; experts
KINDS = ("llama", "phi3-partial", "gemma3", "olmo3", "cohere2", "deepseek-v3", "gpt-oss", "qwen3-moe")
# of which each has what no other has: biases, rope types, tied matrices, windows without layer types, other latent attention
OWN = (
    *("llama-biases", "llama3-rope", "qwen3-yarn", "qwen2-tied-sliding"),
    *("mixtral-sliding", "deepseek-v2", "deepseek-v3-halves"),
)


@pytest.fixture(params=slow_but((*KINDS, *OWN), CONFIGS), scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[HFTarget, FastTarget]:
    """The same random weights under both runners; the second's projections are joined in place. No test changes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, request.param, CONFIGS[request.param])
        models = [tiny_model(request.param) for _ in range(2)]
    for model in models:
        generator = torch.Generator().manual_seed(3)
        for name, parameter in model.named_parameters():  # many start at 0 or 1: a runner that dropped them would look right
            if name.endswith(("bias", "sinks")) or (parameter.ndim == 1 and request.param != "gpt-oss"):
                parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.5).add_("norm" in name)
            elif parameter.ndim == 3:
                parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return unprobed(models[0]), FastTarget(models[1])


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def test_fast_target_logits_hidden_states_and_fingerprint_equal_transformers(pair: tuple[HFTarget, FastTarget]) -> None:
    theirs, ours = pair
    assert ours.trees and ours.fingerprint == theirs.fingerprint
    token, position = tokens(3, 40), torch.arange(40).expand(3, 40)
    wanted, found = (t(token, None, None, position, Taps((0, 2), final=True)) for t in pair)
    largest = float(wanted.logits_BRV.abs().max())
    # the order of sums depends on the processor, its threads and MKL_CBWR; a fault is a thousand times larger
    torch.testing.assert_close(found.logits_BRV, wanted.logits_BRV, rtol=1e-5, atol=1e-4 * max(1.0, largest / 4.0))
    for key in (0, 2, FINAL):
        torch.testing.assert_close(found.hidden[key], wanted.hidden[key], rtol=1e-5, atol=1e-4)


@pytest.mark.sampled(pair=KINDS)
def test_fast_target_greedy_decoding_of_ragged_batch_equals_generate(pair: tuple[HFTarget, FastTarget]) -> None:
    _, ours = pair
    asked = prompts(3, seed=2)
    results = Decoder(ours, None, "greedy", Sampling(), frozenset(), 10, prefill_chunk=5).run(asked, batch_size=3).results
    for prompt, result in zip(asked, results, strict=True):
        wanted = ours.model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert result.tokens == wanted[0, len(prompt) :].tolist()


@pytest.mark.sampled(pair=KINDS)
def test_fast_target_chunked_prefill_and_packed_documents_equal_whole_pass(pair: tuple[HFTarget, FastTarget]) -> None:
    """Chunks of more positions than the operators for few take; a row that holds two documents."""
    _, ours = pair
    token, position = tokens(2, 150), torch.arange(150).expand(2, 150)
    whole = ours(token, None, None, position, Taps()).logits_BRV
    kv, found, scale = ours.new_cache(2, 160), [], float(whole.abs().max())
    for start, stop in ((0, 30), (30, 140), (140, 150)):
        rows = position[:, start:stop]
        found.append(ours(token[:, start:stop], kv, None, rows, Taps()).logits_BRV)
        kv.keep(torch.arange(stop - start).expand(2, -1), torch.tensor([stop - start] * 2))
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=2e-5 * scale)
    number, restarted = torch.tensor([[0] * 60 + [1] * 90]), torch.tensor([[*range(60), *range(90)]])
    packed = ours(token[:1], None, Documents(number), restarted, Taps()).logits_BRV
    parts = [
        ours(part, None, None, torch.arange(part.shape[1])[None], Taps()).logits_BRV for part in token[:1].split([60, 90], 1)
    ]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.sampled(pair=("llama", "gemma3", "deepseek-v3"))
def test_fast_target_shallow_hidden_states_equal_transformers(pair: tuple[HFTarget, FastTarget]) -> None:
    theirs, ours = (target.shallow(2) for target in pair)
    token, position = tokens(2, 12), torch.arange(12).expand(2, 12)
    wanted, found = (t(token, None, None, position, Taps((1,), final=True)) for t in (theirs, ours))
    for key in (1, FINAL):
        torch.testing.assert_close(found.hidden[key], wanted.hidden[key], rtol=1e-5, atol=2e-5)


@pytest.mark.sampled(pair=("llama", "gemma3", "cohere2", "deepseek-v3"))  # the probe asks for trees of every kind
def test_fast_target_speculative_tokens_equal_plain_decoding(pair: tuple[HFTarget, FastTarget]) -> None:
    """Trees of Medusa, chains of a pruned copy, whose own blocks decode on the same runner."""
    _, ours = pair
    asked = prompts(3, seed=5)
    plain = Decoder(ours, None, "greedy", Sampling(), frozenset(), 12).run(asked, 3).results
    for name in ("medusa", "draft_model"):
        drafter = build(name, ours, noise=1.0)
        found = Decoder(ours, drafter, "greedy", Sampling(), frozenset(), 12, prefill_chunk=6).run(asked, 3).results
        assert [r.tokens for r in found] == [r.tokens for r in plain]


@pytest.mark.sampled(pair=KINDS)
def test_fast_target_pruned_copy_gradients_equal_transformers(pair: tuple[HFTarget, FastTarget]) -> None:
    token, position = tokens(2, 12), torch.arange(12).expand(2, 12)
    gradients = []
    for target in pair:
        copy = target.pruned(2)
        copy.train()
        copy(token, None, None, position, Taps()).logits_BRV.logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in copy.named_parameters()})
        assert copy.state_dict().keys() == {f"model.{name}" for name in copy.model.state_dict()}
    theirs, ours = gradients
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4)


def test_fast_target_joined_weights_share_memory_and_follow_training() -> None:
    target = FastTarget(tiny_model())
    block, attention = target._chain[0], target.model.model.layers[0].self_attn
    assert attention.q_proj.weight.data_ptr() == block.qkv.weight.data_ptr()
    copy, token, position = target.pruned(2), torch.tensor([[3, 1, 4]]), torch.arange(3)[None]
    for _ in range(2):  # decodes, trains on, and decodes again with the new weights
        copy.eval()
        kv = copy.new_cache(1, 8)
        with torch.no_grad():
            cached = copy(token, kv, None, position, Taps()).logits_BRV
            torch.testing.assert_close(cached, copy.model(token).logits, rtol=1e-5, atol=1e-5)
            copy.train()
            for parameter in copy.parameters():
                parameter.mul_(0.9)


def test_fast_target_head_gradients_equal_output_embeddings() -> None:
    """A drafter may train through the target's own head, on as few rows as a verification has."""
    target, gradients = FastTarget(tiny_model()), []
    for head in (target.head, target.model.get_output_embeddings()):
        hidden = torch.linspace(-1, 1, 3 * 32).view(3, 32).requires_grad_()
        head(hidden).logsumexp(-1).sum().backward()
        gradients.append(hidden.grad)
    torch.testing.assert_close(*gradients)


def test_fast_target_without_logits_skips_blocks_after_last_target_layer() -> None:
    target, ran = FastTarget(tiny_model()), []
    for number, block in enumerate(target._chain):
        original = block.forward
        block.forward = lambda *a, number=number, original=original: (ran.append(number), original(*a))[1]
    token, position = torch.tensor([[3, 1, 4]]), torch.arange(3)[None]
    out = target(token, None, None, position, Taps((1,)), torch.empty(1, 0, dtype=torch.long))
    assert ran == [0, 1] and out.logits_BRV is None and set(out.hidden) == {1}


def test_fast_runner_unsupported_model_is_refused_and_option_selects_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttrain.targets.hf.probe", lambda target: None)  # which takes longest, and chooses no runner here
    assert "GPT2LMHeadModel is not one of" in why_not(tiny_model("gpt2"))
    assert why_whole(tiny_model()) is None
    model = tiny_model()
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "changes with the length" in why_not(model)
    assert type(load_target(TargetOptions(runner="hf")).target) is HFTarget
    assert type(embedded().target) is FastTarget
    assert load_target(TargetOptions(runner="fast")).description["runner"] == "fast"
    tiny_model("gpt2").save_pretrained(tmp_path)
    embedded().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"runner=fast cannot run this model: GPT2LMHeadModel"):
        load_target(TargetOptions(name="hf", path=str(tmp_path), runner="fast"))


def test_load_target_fast_runner_failing_probe_falls_back_to_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    make = FastTarget._make_table

    def wrong(*given):
        cos, sin = make(*given)
        return cos, sin.roll(1, 0)

    monkeypatch.setattr(FastTarget, "_make_table", wrong)
    loaded = load_target(TargetOptions())
    assert type(loaded.target) is HFTarget and loaded.target.trees
    reason = "its probe failed, LlamaForCausalLM cannot be decoded exactly: "
    assert loaded.description["runner"] == "hf" and loaded.description["runner_reason"].startswith(reason)
    with pytest.raises(UserError, match="cannot be decoded exactly"):
        load_target(TargetOptions(runner="fast"))


@pytest.mark.parametrize(
    ("name", "reason"), [("mixtral", "its experts are not split"), ("phi3", "Phi3ForCausalLM are not split")]
)
def test_why_whole_blocks_that_cannot_be_split_give_reason(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, name, CONFIGS[name])
    assert reason in why_whole(tiny_model(name))
