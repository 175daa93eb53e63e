"""Every compiled operator against its plain-torch twin: odd sizes, every dtype, NaN in outputs and in foreign memory."""

from __future__ import annotations

import copy
import gc
import os
import stat
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from drafttrain.core.tree import DraftTree, ancestors
from drafttrain.model import attention as attend_op
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.layers import Linear
from drafttrain.model.target import Taps
from drafttrain.ops import accept as accept_op
from drafttrain.ops import divergence, library
from drafttrain.ops import gated as gated_op
from drafttrain.ops import kv_cache as cache_op
from drafttrain.ops import rms_norm as norm_op
from drafttrain.ops.linear import PACKS, linear, pack
from drafttrain.ops.residual_heads import ResidualHeads
from drafttrain.ops.tree_bits import bits_of
from drafttrain.targets.fast import FastTarget
from tests.helpers import tiny_model

compiled = pytest.mark.skipif(not library.state().loaded, reason=library.state().text)
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN, so that an element that an operator forgets is seen."""
    for name in ("empty_like", "empty"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, original=original, **k: poisoned(original(*a, **k)))
    original_new = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(original_new(*a, **k)))


def poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(-(2**40))


def random_parents(rows: int, nodes: int) -> torch.Tensor:
    return torch.stack([torch.tensor([-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)]) for _ in range(rows)])


@compiled
def test_rms_norm_equals_reference_for_any_width_and_dtype(poison: None, subtests: pytest.Subtests) -> None:
    sizes = [(3, 5, width) for width in (1, 15, 16, 17, 64, 193)] + [(1, 300, 192)]  # the last is enough for several threads
    for size, dtype in product(sizes, DTYPES):
        with subtests.test(size=size, dtype=dtype):
            torch.manual_seed(size[-1])
            x, delta, weight = (torch.randn(shape).to(dtype) for shape in (size, size, size[-1:]))
            for added in (None, delta):
                found, wanted = norm_op.rms_norm(x, added, weight, 1e-5), norm_op.reference(x, added, weight, 1e-5)
                for ours, theirs in zip(found, wanted, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_rms_norm_sum_of_every_bit_pattern_equals_torch(dtype: torch.dtype) -> None:
    """All 16-bit patterns, and sums over the whole range: subnormal, halfway between two numbers, too large."""
    torch.manual_seed(0)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(1, -1)
    x = every.view(dtype) if dtype.itemsize == 2 else every.view(torch.float16).float()
    for delta in (x.flip(-1), x.roll(1, -1), x[:, torch.randperm(2**16)], torch.zeros_like(x)):
        summed = norm_op.rms_norm(x, delta, torch.ones(2**16, dtype=dtype), 1e-5)[0]
        torch.testing.assert_close(summed, x + delta, rtol=0, atol=0, equal_nan=True)


@compiled
def test_library_serves_half_and_single_precision_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 4)
    assert (torch.float32, torch.bfloat16, torch.float16) == library.DTYPES
    assert all(library.serves(x.to(dtype)) for dtype in library.DTYPES)
    assert not library.serves(x.double()) and not library.serves(x.long()) and not library.serves(x.to("meta"))
    with torch.inference_mode(False), torch.enable_grad():
        assert not library.serves(x)


@compiled
def test_gated_equals_reference_for_any_width_and_dtype(poison: None, subtests: pytest.Subtests) -> None:
    for width, dtype in product((1, 16, 33, 512), DTYPES):
        with subtests.test(width=width, dtype=dtype):
            x = (torch.linspace(-100, 100, 26 * width).view(2, 13, width).roll(3, -1)).to(dtype)
            x = torch.cat([x, x.flip(0)], -1)
            torch.testing.assert_close(gated_op.gated(x), gated_op.reference(x), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@compiled
@pytest.mark.sampled
@pytest.mark.parametrize("vocab", [1, 7, 16, 361, 2048, 5000])
@pytest.mark.parametrize("name", ["kl", "ce", "tvd"])
def test_cpu_divergence_equals_reference(poison: None, name: str, vocab: int) -> None:
    """Against the twin: values, grads, ties, masked tokens of the law, equal laws, grads in place."""
    generator = torch.Generator().manual_seed(vocab)
    own, law = (3.0 * torch.randn(24, vocab, generator=generator) for _ in range(2))
    if vocab > 1:
        law[:, vocab // 2 :: 3] = -torch.inf
        law[:, 0] = 1.0
    own[1], law[2], own[3] = 0.0, 0.0, 500.0 * own[3]  # ties; a law that is one token
    own[4] = law[4].nan_to_num(neginf=-40.0)
    label = torch.randint(vocab, (24,), generator=generator)
    wide = divergence.reference(own, law, label, name, want_grad=True)
    assert divergence._compiled(own, law, label, torch.empty_like(own))
    for out in (None, own.clone()):
        given = own if out is None else out
        found = divergence.scores(given, law, label, name, want_grad=True, out=out)
        torch.testing.assert_close(found.loss_C, wide.loss_C, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.acceptance_C, wide.acceptance_C, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.top1_C, wide.top1_C)
        assert found.grad_logits_CV is not None
        assert wide.grad_logits_CV is not None
        torch.testing.assert_close(found.grad_logits_CV, wide.grad_logits_CV, rtol=1e-4, atol=1e-6)
    alone = divergence.scores(own, law, label, name, want_grad=False)
    assert alone.grad_logits_CV is None
    torch.testing.assert_close(alone.loss_C, wide.loss_C, rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["kl", "ce", "tvd"])
def test_cpu_divergence_half_precision_equals_float32(
    poison: None, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted some rows at a time: the values of float32 logits, the gradient rounded; also with only one side converted."""
    monkeypatch.setitem(divergence.AT_ONCE, "cpu", 5 * 361)
    own, law = (3.0 * torch.randn(24, 361, generator=torch.Generator().manual_seed(i)) for i in range(2))
    own, label = own.to(dtype), torch.arange(24)
    for theirs in (law, law.to(dtype)):
        wide = divergence.scores(own.float(), theirs.float(), label, name, want_grad=True)
        for out in (None, own.clone()):
            given = own if out is None else out
            found = divergence.scores(given, theirs, label, name, want_grad=True, out=out)
            assert found.grad_logits_CV is not None and wide.grad_logits_CV is not None
            for a, b in zip(found[:3], wide[:3], strict=True):
                assert torch.equal(a, b)
            assert torch.equal(found.grad_logits_CV, wide.grad_logits_CV.to(dtype))


@compiled
@pytest.mark.parametrize("name", ["kl", "ce", "tvd"])
def test_cpu_divergence_nan_logit_gives_nan_loss(name: str) -> None:
    own, law, label = torch.randn(3, 40), torch.randn(3, 40), torch.tensor([1, 2, 3])
    own[0, 33], law[1, 5] = torch.nan, torch.nan
    found = divergence.scores(own, law, label, name, want_grad=True)
    assert found.grad_logits_CV is not None
    assert found.loss_C.isnan().tolist() == found.grad_logits_CV.isnan().any(-1).tolist() == [True, True, False]


@compiled
def test_cpu_divergence_excluded_target_token_gives_infinite_kl() -> None:
    """KL(p || q) is infinite where the target says a token to which the drafter gives nothing."""
    own, law = torch.zeros(1, 20), torch.zeros(1, 20)
    own[0, 4] = -torch.inf
    found = divergence.scores(own, law, torch.tensor([0]), "kl", want_grad=True)
    assert found.loss_C.tolist() == [torch.inf]
    assert not bool(found.grad_logits_CV.isnan().any())  # type: ignore[union-attr]


@compiled
@settings(max_examples=400, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 24), st.sampled_from([3, 40]))
def test_cpu_greedy_accept_equals_python_walk(seed: int, rows: int, nodes: int, vocab: int) -> None:
    torch.manual_seed(seed)
    token, parent = torch.randint(0, 3, (rows, nodes)), random_parents(rows, nodes)
    logits = torch.randint(0, 3, (rows, nodes, vocab)).float()  # ties abound
    logits[..., 3:] = -1.0
    tree = DraftTree(token, parent, torch.randint(1, nodes + 1, (rows,)))
    for mine, theirs in zip(walked(tree, logits), accept_op.greedy_accept(tree, logits), strict=True):
        assert mine == theirs.tolist()


def walked(tree: DraftTree, logits: torch.Tensor) -> tuple[list[list[int]], list[int], list[int]]:
    """The accept walk written out; of several children with the chosen token the first counts."""
    paths, counts, bonuses = [], [], []
    for row, count in enumerate(tree.count_B.tolist()):
        path = [0]
        while True:
            bonus = int(logits[row, path[-1]].argmax())
            found = [i for i in range(1, count) if tree.parent_BN[row, i] == path[-1] and tree.token_BN[row, i] == bonus]
            if not found:
                break
            path.append(found[0])
        paths.append(path + [0] * (tree.token_BN.shape[1] - len(path)))
        counts.append(len(path))
        bonuses.append(bonus)
    return paths, counts, bonuses


def test_greedy_accept_reference_with_distinct_siblings_equals_python_walk() -> None:
    """The twin takes the deepest hit: the same node wherever siblings have different tokens, as proposals have."""
    torch.manual_seed(0)
    for _ in range(300):
        parent = random_parents(1, 12)
        rank = [sum(int(parent[0, j] == parent[0, i]) for j in range(i)) for i in range(12)]
        tree = DraftTree(torch.tensor([rank]), parent, torch.tensor([int(torch.randint(1, 13, ()))]))
        logits = torch.randn(1, 12, 4)
        assert [x.tolist() for x in accept_op.greedy_reference(tree, logits)] == list(walked(tree, logits))


@compiled
@settings(max_examples=200, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 40))
def test_cpu_kv_keep_equals_reference(seed: int, rows: int, nodes: int) -> None:
    torch.manual_seed(seed)
    pages = 4 * rows
    stores = [
        torch.arange(2 * 2 * pages * PAGE * 6, dtype=torch.float32).view(2, 2, pages, PAGE, 2, 3).clone() for _ in range(2)
    ]
    table = torch.randperm(pages).view(rows, 4)
    length = torch.randint(0, 4 * PAGE - nodes + 1, (rows,))
    count = torch.randint(1, nodes + 1, (rows,))
    path = torch.zeros(rows, nodes, dtype=torch.long)
    for row in range(rows):
        chosen = torch.randperm(nodes - 1)[: int(count[row]) - 1].sort().values + 1
        path[row, 1 : len(chosen) + 1] = chosen
    cache_op.kv_keep(stores[0], table, length, path, count)
    cache_op.keep_reference(stores[1], table, length, path, count)
    assert torch.equal(*stores)


CASES = {
    # rows, nodes, heads, kv heads, width, window, causal, normed, lengths up to
    "one": (1, 1, 6, 2, 32, None, False, False, 300),
    "tree": (1, 21, 6, 2, 32, None, False, False, 300),
    "ragged": (5, 7, 4, 1, 64, None, False, True, 200),
    "odd": (3, 13, 3, 3, 10, None, False, True, 130),
    "causal": (2, 64, 4, 2, 16, None, True, False, 70),
    "sliding": (3, 9, 4, 2, 32, 11, False, False, 150),
    "sliding-far": (2, 5, 2, 1, 128, 100, True, False, 400),
    "wide": (2, 6, 2, 2, 256, None, False, False, 40),
    "empty": (2, 17, 4, 4, 48, None, False, False, 1),
}


@compiled
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_cpu_attend_equals_reference(poison: None, case: str, dtype: torch.dtype) -> None:
    rows, nodes, heads, kv_heads, width, window, causal, normed, longest = CASES[case]
    torch.manual_seed(len(case))
    angle = torch.outer(torch.arange(1024.0), 1e4 ** -(torch.arange(0, width, 2) / width))
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([-angle.sin(), angle.sin()], -1).to(dtype)
    norms = [SimpleNamespace(weight=torch.randn(width).to(dtype), variance_epsilon=1e-6) for _ in range(2)]
    shape = attend_op.Heads(heads, kv_heads, width, width**-0.5, window, *(norms if normed else (None, None)))
    lengths = torch.randint(0, longest, (rows,))
    parent = random_parents(rows, nodes)
    ancestor = None if causal else ancestors(parent)
    depth = torch.arange(nodes).expand(rows, nodes) if ancestor is None else ancestor.sum(-1) - 1
    qkv = torch.randn(rows, nodes, (heads + 2 * kv_heads) * width).to(dtype)
    found = []
    for function in (attend_op.attend, attend_op.reference):
        kv = KVCache(2, rows + 1, 512, pages=rows * 16)
        kv.allocate(kv_heads, width, dtype)
        kv.storage.stores[0].fill_(torch.nan if function is attend_op.attend else 0.0)
        kv.storage.free = torch.randperm(kv.pages, generator=torch.Generator().manual_seed(1)).tolist()
        for row in range(rows):
            kv.reserve(rows - 1 - row, int(lengths[row]) + nodes)
        kv.rows(torch.arange(rows).flip(0))
        past = torch.randn(2, rows, kv_heads, longest, width, generator=torch.Generator().manual_seed(2)).to(dtype)
        kv.append(1, past[0], past[1])
        if function is attend_op.attend:  # scratch of the past and pages that nobody owns: nothing may read them
            for row, slot in enumerate(kv.slot_B.tolist()):
                first, at = divmod(int(lengths[row]), PAGE)
                page_Q = kv.page_view().table_BQ[row, first : len(kv.storage.owned[slot])]
                for pool in kv.page_view().layer(1):
                    pool[page_Q[:1], at:] = torch.nan
                    pool[page_Q[1:]] = torch.nan
        kv.keep(torch.arange(longest).expand(rows, longest), lengths)
        step = attend_op.AttentionMetadata(kv, kv.length_B[:, None] + depth, ancestor, cos, sin)
        assert step.compiled
        found.append((function(qkv, step, 1, shape), *kv.page_view().layer(1), kv))
    (out, keys, values, kv), (wanted, wanted_keys, wanted_values, _) = found
    torch.testing.assert_close(out, wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    for ours, theirs in ((keys, wanted_keys), (values, wanted_values)):
        place_BN = lengths[:, None] + torch.arange(nodes)
        at = (kv.page_view().table_BQ.gather(1, place_BN // PAGE), place_BN % PAGE)
        torch.testing.assert_close(ours[at], theirs[at], rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "parts", "more"),
    [
        (32, (1, 5, 13, 14), {}),
        (80, (1, 5, 13, 14), {"window": 20}),
        (16, (3, 64, 70, 130, 190), {}),
        (48, (1, 5, 14), {"cap": 0.7, "sinks": torch.linspace(-1, 2, 4)}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", [attend_op.attend, attend_op.reference])
def test_tree_attention_in_generations_equals_single_pass(
    poison: None, function: Any, causal: bool, width: int, parts: tuple[int, ...], more: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(width)
    rows, nodes, heads, kv_heads = 3, parts[-1], 4, 2
    angle = torch.outer(torch.arange(256.0), 1e4 ** -(torch.arange(0, width, 2) / width))
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([-angle.sin(), angle.sin()], -1).to(dtype)
    shape, lengths = attend_op.Heads(heads, kv_heads, width, width**-0.5, **more), torch.tensor([0, 37, 5])
    ancestor = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, -1, -1)
    ancestor = ancestor if causal else ancestors(random_parents(rows, nodes))
    position, bits = lengths[:, None] + ancestor.sum(-1) - 1, bits_of(ancestor)
    qkv, past = torch.randn(rows, nodes, (heads + 2 * kv_heads) * width).to(dtype), torch.randn(2, rows, 2, 40, width).to(dtype)
    found = []
    for ends in ((nodes,), parts):
        kv = KVCache(1, rows, 50 + nodes)
        kv.append(0, past[0], past[1])
        kv.keep(torch.arange(40).expand(rows, 40), lengths)
        outs = []
        for first, last in pairwise((0, *ends)):
            seen = None if causal else bits[:, first:last]
            step = attend_op.AttentionMetadata(kv, position[:, first:last], None, cos, sin, seen, first)
            outs.append(function(qkv[:, first:last].contiguous(), step, 0, shape))
        found.append((torch.cat(outs, 1), *kv.read(0, nodes)))
    step = attend_op.AttentionMetadata(kv, position, ancestor, cos, sin)
    close = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype]}
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    torch.testing.assert_close(found[0][0], attend_op.reference(qkv, step, 0, shape), **close)


@compiled
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "normed", "earlier"), [(0, True, 0), (3, False, 4), (4, True, 1)])
def test_cpu_append_equals_reference(poison: None, heads: int, normed: bool, earlier: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    rows, nodes, kv_heads, width = 3, 5, 2, 24
    angle = torch.outer(torch.arange(256.0), 1e4 ** -(torch.arange(0, width, 2) / width))
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([-angle.sin(), angle.sin()], -1).to(dtype)
    weights = [torch.randn(width).to(dtype) if normed else None for _ in range(2)]
    qkv = torch.randn(rows, nodes, (heads + 2 * kv_heads) * width).to(dtype)
    table, length = torch.randperm(rows * 4).view(rows, 4), torch.tensor([0, 30, 90])
    position = length[:, None] + torch.randint(0, 9, (rows, nodes))
    pools = [torch.full((rows * 4, PAGE, kv_heads, width), torch.nan, dtype=dtype) for _ in range(4)]
    at = (position, table, length)
    found = cache_op.append(qkv, cos, sin, *weights, 1e-6, *at, *pools[:2], heads, earlier)
    wanted = cache_op.append_reference(qkv, cos, sin, *weights, 1e-6, *at, *pools[2:], heads, earlier)
    close = {"rtol": DTYPES[dtype], "atol": DTYPES[dtype], "equal_nan": True}
    torch.testing.assert_close(found, wanted, **close)
    torch.testing.assert_close(pools[:2], pools[2:], **close)
    assert not pools[0].isnan().all()


@compiled
def test_linear_packed_frozen_weights_follow_updates() -> None:
    with torch.inference_mode(False):
        layer = Linear(256, 1024).requires_grad_(False)
        x = torch.randn(3, 256)
        with torch.no_grad():
            for change in range(3):
                assert PACKS.of(layer, layer.weight, x) is not None
                torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)
                layer.weight.add_(change + 1)  # a packed copy of the old weight would now be wrong
            assert PACKS.of(layer, layer.weight, torch.randn(999, 256)) is None
            assert PACKS.of(layer, layer.requires_grad_().weight, x) is None
        copied = copy.deepcopy(layer)
        assert torch.equal(copied.weight, layer.weight) and layer(x).requires_grad


@compiled
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 5), (96, 64), (209, 97)])
def test_packed_bfloat16_product_equals_rounded_product_in_float64(poison: None, outputs: int, inputs: int) -> None:
    """In all numbers of rows that a weight's load serves, and in a few loads; a row has the same bits in each."""
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((31, inputs), (outputs, inputs), outputs))
    packed, tolerance = pack(weight), 5.0 * DTYPES[torch.bfloat16]
    assert packed is not None and pack(weight.half()) is None
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        whole = linear(x, weight, added, packed)
        torch.testing.assert_close(whole.double(), exact, rtol=tolerance, atol=tolerance * inputs**0.5)
        for rows in range(1, 31):
            assert torch.equal(linear(x[-rows:], weight, added, packed), whole[-rows:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(linear(x.float(), weight, None, packed), F.linear(x.float(), weight))
    with pytest.raises(RuntimeError, match="packed weights are for bfloat16"):
        torch.ops.drafttrain.product(x.float(), packed, None, x.new_empty(31, outputs))


@compiled
@pytest.mark.parametrize(("heads", "layers", "vocab", "width"), [(4, 2, 603, 24), (1, 1, 16, 16), (3, 0, 50, 17)])
def test_residual_heads_top_tokens_equal_reference(poison: None, heads: int, layers: int, vocab: int, width: int) -> None:
    torch.manual_seed(heads)
    blocks = [(torch.randn(heads, width, width) / width**0.5, torch.randn(heads, width)) for _ in range(layers)]
    fused = ResidualHeads(blocks, torch.randn(heads, vocab, width))
    for used in range(1, heads + 1):
        for ranks in (1, 2, 7):
            state = torch.randn(1, width)
            assert torch.equal(fused.top(state, used, ranks), fused.reference(state, used, ranks))
    several = torch.randn(3, width)
    assert torch.equal(fused.top(several, heads, 2), fused.reference(several, heads, 2))
    ties = ResidualHeads([], torch.ones(1, vocab, width))
    assert ties.top(torch.ones(1, width), 1, 4)[0, 0].tolist() == [0, 1, 2, 3]


@compiled
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-sliding"])
@pytest.mark.parametrize("taps", [(), (1,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_blocks_equal_loop_over_blocks(poison: None, name: str, taps: tuple[int, ...], dtype: torch.dtype) -> None:
    target = FastTarget(tiny_model(name).to(dtype))
    if target._blocks is None:
        pytest.skip("this torch does not export oneDNN's product")
    token, mask = torch.randint(0, 64, (2, 6)), ancestors(random_parents(2, 6))
    outs = []
    for blocks in (target._blocks, None):
        target._blocks, kv = blocks, target.new_cache(2, 40)
        prompt, lengths = torch.arange(22).view(2, 11), torch.tensor([11, 7])
        target(prompt, kv, None, torch.arange(11).expand(2, 11), Taps(), lengths[:, None] - 1)
        kv.keep(torch.arange(11).expand(2, 11), lengths)
        outs.append(target(token, kv, mask, lengths[:, None] + mask.sum(-1) - 1, Taps(taps, final=True)))
    # a fused product adds up in an order of its own, which depends on the processor
    close = {"rtol": 5.0 * DTYPES[dtype], "atol": 5.0 * DTYPES[dtype]}
    torch.testing.assert_close(outs[0].logits_BRV, outs[1].logits_BRV, **close)
    assert outs[0].hidden.keys() == outs[1].hidden.keys()
    for key, state in outs[0].hidden.items():
        torch.testing.assert_close(state, outs[1].hidden[key], **close)


@compiled
def test_fused_blocks_refuse_cache_of_another_dtype() -> None:
    target = FastTarget(tiny_model("llama"))
    if target._blocks is None:
        pytest.skip("this torch does not export oneDNN's product")
    kv = KVCache(target.shape.blocks, 1, 40)
    kv.allocate(target.shape.kv_heads, target.shape.head_dim, torch.bfloat16)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="another element type"):
        target(torch.ones(1, 2, dtype=torch.long), kv, None, torch.arange(2)[None], Taps())


@compiled
def test_kept_weights_are_freed_with_owner() -> None:
    kept = library.KeptWeights([torch.ones(3), None])
    number = kept.number
    del kept
    gc.collect()
    with pytest.raises((RuntimeError, IndexError)):
        x = torch.ones(1, 1, 3)
        torch.ops.drafttrain.run_blocks(number, x, None, x, x, 0.0, 0.0, 0.0, x, x, x, x, None, 0, x, x, x)


@compiled
def test_cpu_attend_row_is_independent_of_batch() -> None:
    """The same bits for a path alone, in a tree, and beside other rows: plain and speculative decoding see one attention."""
    torch.manual_seed(0)
    cos, sin = torch.randn(200, 32), torch.randn(200, 32)
    qkv, shape = torch.randn(2, 9, 10 * 32), attend_op.Heads(6, 2, 32, 0.2)
    results = []
    for rows, nodes in ((2, 9), (1, 9), (1, 1)):
        kv = KVCache(1, rows, 256)
        kv.allocate(2, 32, torch.float32)
        past = torch.randn(2, 1, 2, 100, 32, generator=torch.Generator().manual_seed(2)).expand(2, rows, 2, 100, 32)
        kv.append(0, past[0], past[1])
        kv.keep(torch.arange(100).expand(rows, 100), torch.full((rows,), 100))
        step = attend_op.AttentionMetadata(kv, 100 + torch.arange(nodes).expand(rows, nodes), None, cos, sin)
        results.append(attend_op.attend(qkv[:rows, :nodes].contiguous(), step, 0, shape)[0, 0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def state_in(environment: dict[str, str]) -> str:
    code = "from drafttrain.ops import library; print(library.state().text)"
    inherited = {name: value for name, value in os.environ.items() if name != library.SWITCH}
    run = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=True, timeout=300
    )
    return run.stdout.strip() + "|" + run.stderr.strip()


def test_library_state_text_names_switch_missing_and_failing_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same function in a process of its own: test_library_is_built_once_and_cached."""
    state = library.state.__wrapped__  # that of this process stays
    monkeypatch.setenv(library.SWITCH, "off")
    assert state().text == "torch references (DRAFTTRAIN_KERNELS=off)" and capsys.readouterr().err == ""
    monkeypatch.delenv(library.SWITCH)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in state().text
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'ops.cpp:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert state().text.endswith("could not build the operators: ops.cpp:1: error: no such thing)")


@pytest.mark.slow
@compiled
def test_library_is_built_once_and_cached(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    first, second = state_in(environment), state_in(environment)
    assert "compiled for this CPU" in first and first.endswith("|building the CPU operators: once, up to a minute")
    assert second.endswith("|")
    assert [p.name for p in tmp_path.glob("drafttrain/kernels/*/*.so")] == ["drafttrain_ops.so"]
