"""The probe names the property that a model lacks. Each model here is a Llama with one fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.model.target import Taps
from drafttrain.targets import probe as probing
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import RecomputedTarget
from drafttrain.targets.probe import long_prompt
from tests.architectures import ARCHITECTURES, model_of
from tests.helpers import tiny_model

WIDE = 16  # a window that the probe's short rows do not reach
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
HALF = pytest.mark.sampled(dtype=(torch.float32, torch.bfloat16))  # the probe asks only whether a dtype is exact
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def with_other_logits(model: Any) -> None:
    """The causal LM adds to what its output matrix gives."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits + torch.linspace(0, 3, out.logits.shape[-1])
        return out

    model.forward = forward


def with_never(model: Any, token: int) -> Any:
    """A model whose output matrix gives a token the logit of minus infinity."""
    never_V = torch.zeros(model.config.vocab_size).index_fill_(0, torch.tensor([token]), -torch.inf)
    head = torch.nn.Linear(*model.lm_head.weight.shape[::-1])
    head.weight.data, head.bias.data = model.lm_head.weight.data, never_V
    model.lm_head = head
    return model


def with_forgotten_cache(model: Any) -> None:
    """Attention sees new positions alone."""
    own = model.model.forward

    def forward(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, cache: Any = None, **more: Any) -> Any:
        return own(input_ids, position_ids=position_ids, use_cache=False)

    model.model.forward = forward


def without_positions(model: Any) -> None:
    """Positions follow the order of the tokens, whatever is asked for."""
    own = model.model.forward

    def forward(input_ids: Any, attention_mask: Any = None, cache: Any = None, **more: Any) -> Any:
        more.pop("position_ids", None)
        before = 0 if cache is None else cache.get_seq_length()
        position_ids = before + torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        return own(input_ids, attention_mask, position_ids, cache, **more)

    model.model.forward = forward


def without_rows(model: Any) -> None:
    """The first row's mask serves all."""
    own = model.model.forward

    def forward(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, cache: Any = None, **more: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask[:1].expand_as(attention_mask)
        return own(input_ids, attention_mask, position_ids, cache, **more)

    model.model.forward = forward


def without_branches(model: Any) -> None:
    """New positions see each other in the order of the tokens."""
    own = model.model.forward

    def forward(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, cache: Any = None, **more: Any) -> Any:
        N = input_ids.shape[1]
        if attention_mask is not None and position_ids is not None:
            columns = attention_mask.shape[-1] - N
            begin = position_ids[:, :1]
            attention_mask = torch.full_like(attention_mask, torch.finfo(attention_mask.dtype).min)
            for row in range(len(input_ids)):
                for n in range(N):
                    attention_mask[row, :, n, : int(begin[row])] = 0
                    attention_mask[row, :, n, int(begin[row]) : int(begin[row]) + n + 1] = 0
            assert columns >= 0
        return own(input_ids, attention_mask, position_ids, cache, **more)

    model.model.forward = forward


@pytest.mark.parametrize(
    ("fault", "name", "property"),
    [
        (with_other_logits, "Llama", r"\(head\)"),
        (with_forgotten_cache, "Llama", r"\(cache\)"),
        (without_rows, "Llama", r"\(mask\)"),
        (without_positions, "Llama", r"\(positions\)"),
    ],
)
@DTYPES
@pytest.mark.sampled
def test_probe_faulty_model_is_refused_naming_property(
    fault: Callable[[Any], None], name: str, property: str, dtype: torch.dtype
) -> None:
    model = model_of(name).to(dtype)
    fault(model)
    with pytest.raises(UserError, match=rf"^LlamaForCausalLM cannot be decoded exactly: [^\n]*{property}; choose another"):
        HFTarget(model)


@HALF
@DTYPES
def test_probe_flipped_expert_is_refused_in_float32_only(dtype: torch.dtype) -> None:
    """Two experts were level for the first tokens that are drawn: a pass over many rows takes the other one of them.

    Qwen3-Next in float16 met this on one kind of processor.
    """
    model = model_of("Mixtral").to(dtype)
    first = probing._probed(64)[1]
    level: list[bool] = []

    def seen(module: Any, args: tuple[Tensor, ...]) -> None:
        level[:] = [torch.equal(args[0], first)]

    def other_expert(module: Any, args: Any, state_BNH: Tensor) -> Tensor:
        return torch.cat([state_BNH[:, :1].flip(-1), state_BNH[:, 1:]], 1) if level[0] else state_BNH

    model.model.embed_tokens.register_forward_pre_hook(seen)
    model.model.norm.register_forward_hook(other_expert)
    if dtype is torch.float32:  # no rounding is so large
        with pytest.raises(UserError, match=r"\(mask\)"):
            HFTarget(model)
    else:
        assert HFTarget(model).trees


@HALF
@DTYPES
def test_probe_model_ignoring_tree_mask_gets_chains_only(dtype: torch.dtype) -> None:
    model = model_of("Llama").to(dtype)
    without_branches(model)
    target = HFTarget(model)
    assert not target.trees and target.chains_reason == "its attention does not follow a mask of branches"


@pytest.mark.parametrize(("name", "reason"), [("MPT", "takes no positions"), ("Qwen3-Next", "recurrent state")])
def test_probe_chains_only_model_states_reason(name: str, reason: str) -> None:
    target = HFTarget(model_of(name))
    assert not target.trees and reason in str(target.chains_reason)


@HALF
@DTYPES
@pytest.mark.parametrize("runner", [HFTarget, FastTarget])
def test_probe_long_prompt_detects_wrong_sliding_window(
    runner: type[HFTarget], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask without the window is right for short texts alone."""
    model = model_of("Mistral", sliding_window=WIDE).to(dtype)
    assert long_prompt(model, WIDE) == (WIDE + 5,) and long_prompt(model, 0) == () and long_prompt(model, 10**9) == ()
    own = runner(model)
    assert own.trees and own.longest_reach == WIDE
    monkeypatch.setattr(runner, "reference", lambda self, draw=0: probing.reference_of(model, WIDE, draw))
    monkeypatch.setattr(runner, "longest_reach", WIDE)
    with pytest.raises(UserError, match=r"behind 16 positions its logits with a cache are others \(windows\)"):
        runner(model_of("Mistral", sliding_window=4 * WIDE).to(dtype))


class Doubled(HFTarget):
    """Taps twice the output of block 1."""

    def _hook(self, number: int) -> Any:
        own = super()._hook(number)
        return own if number != 1 else lambda module, args, output: own(module, args, output * 2)


@pytest.mark.parametrize("where", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.sampled
def test_probe_logits_of_nan_are_refused(value: float, where: str) -> None:
    model = tiny_model()
    model.get_parameter(where).data[7, 0] = value
    for runner in (HFTarget, FastTarget):
        with pytest.raises(UserError, match=r"LlamaForCausalLM gives logits that are NaN or infinite, .* or set target.dtype"):
            runner(copy.deepcopy(model))


def test_probe_token_without_finite_states_is_not_the_forward_at_fault() -> None:
    """The first draws have it."""
    model = tiny_model()
    drawn = sorted(set(probing._probed(64)[0].flatten().tolist()))
    model.get_input_embeddings().weight.data[drawn[0]] = torch.nan
    for runner in (HFTarget, FastTarget):
        target = runner(copy.deepcopy(model))
        assert target.trees and target.wrong_tap is None


def test_probe_minus_infinity_is_a_logit_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens that never come, as where a vocabulary is padded."""
    assert HFTarget(with_never(tiny_model(), 5)).trees
    expected_V = torch.tensor([1.0, -torch.inf, 2.0])
    assert probing._apart(expected_V.clone(), expected_V) == 0.0
    assert probing._apart(torch.tensor([1.0, -torch.inf, 1.0]), expected_V) == 0.5
    for found_V in ([-torch.inf, 1.0, 2.0], [torch.nan, -torch.inf, 2.0], [torch.inf, -torch.inf, 2.0]):
        assert probing._apart(torch.tensor(found_V), expected_V) == torch.inf


def test_hf_target_wrong_hidden_state_is_refused_when_read() -> None:
    target, position_1T = Doubled(model_of("Llama")), torch.arange(5)[None]
    assert target.trees and target.wrong_tap == 1 and HFTarget(model_of("Llama")).wrong_tap is None
    with pytest.raises(UserError, match=r"block 1 of LlamaForCausalLM is no hidden state of it \(taps\)"):
        target(TOKENS, None, None, position_1T, Taps((1,)))
    target(TOKENS, None, None, position_1T, Taps(final=True))


def test_fast_target_wrong_hidden_state_is_refused_when_read() -> None:
    """Its probe compares it with the model's own hidden states: here those of other weights."""
    target, position_1T = FastTarget(model_of("Llama")), torch.arange(5)[None]
    assert target.wrong_tap is None
    target.model = model_of("Llama", seed=1)
    target.wrong_tap = probing.wrong_tap(target)
    assert target.wrong_tap == 0
    with pytest.raises(UserError, match=r"block 0 of LlamaForCausalLM is no hidden state of it \(taps\)"):
        target(TOKENS, None, None, position_1T, Taps((1,)))


def test_probe_several_states_of_a_position_are_no_taps() -> None:
    target = RecomputedTarget(model_of("DeepSeek-V4"), why="it is tested")
    assert target.wrong_tap == 0
    with pytest.raises(UserError, match=r"block 0 of DeepseekV4ForCausalLM is no hidden state of it \(taps\)"):
        target(TOKENS, None, None, torch.arange(5)[None], Taps((1,)))


def test_probe_prompts_fit_small_vocabulary() -> None:
    assert HFTarget(model_of("Llama", vocab_size=5)).trees


@pytest.mark.slow
@pytest.mark.sampled(name=("Llama", "Gemma-4 (text)", "DeepSeek-V3", "gpt-oss", "Llama-4 (text)", "Qwen3-Next", "Jamba", "MPT"))
@pytest.mark.parametrize("name", [name for name, row in ARCHITECTURES.items() if row.refused is None])
def test_probe_half_precision_keeps_verdict(name: str) -> None:
    """Where rounding moves logits by four hundredths, as in Gemma-4, and where branches without positions move them by five."""
    found = [HFTarget(model_of(name).to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert len({(target.trees, target.chains_reason) for target in found}) == 1
