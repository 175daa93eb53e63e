"""The CUDA kernels without a GPU: run by the emulator against their twins, and compiled by nvcc where it is found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks.gpu.case import Kept
from drafttrain.core.sampling import Sampling
from drafttrain.model.kv_storage import PAGE
from drafttrain.ops import build, library, tree_attention
from drafttrain.ops import build_tree as tree_op
from drafttrain.ops import gated as gated_op
from drafttrain.ops import kv_cache as cache_op
from drafttrain.ops import rms_norm as norm_op
from drafttrain.ops import sampling as sampling_op
from drafttrain.ops import top as top_op
from drafttrain.ops.tree_bits import bits_of, words_for
from tests.kernels import emulated
from tests.kernels.test_trees import candidates, fields

pytestmark = pytest.mark.timeout(3600)  # one test compiles the emulated kernels: minutes on a busy machine
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def nan(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that starts `by` elements behind an aligned address."""
    return torch.cat([x.new_zeros(by), x.flatten()])[by:].view(x.shape)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype])


# the widths at which a dtype goes from one kernel to another: packs of 16 bytes by 1, 2 or 4, or single elements
NORMED = {torch.float32: [1, 17, 64, 2056, 8192, 8200], torch.bfloat16: [64, 4160, 8200, 16640], torch.float16: [64]}


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        pytest.param(width, dtype, marks=() if width in NORMED[dtype] else pytest.mark.grid)
        for width in (1, 17, 64, 2056, 4160, 8192, 8200, 16640)
        for dtype in DTYPES
    ],
)
def test_cuda_rms_norm_equals_reference(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    x, delta, weight = (torch.randn(*shape, width).to(dtype) for shape in ((3, 2), (3, 2), ()))
    for by in (0, 1):
        for added in (None, delta):
            wanted = norm_op.reference(x, added, weight, 1e-5)
            summed, out = nan(*x.shape, dtype=dtype), nan(*x.shape, dtype=dtype)
            emulated.ops().rms_norm(shifted(x, by), added, weight, 1e-5, summed, out)
            close(out, wanted[1], dtype)
            if added is not None:
                assert torch.equal(summed, wanted[0])


def test_cuda_gated_equals_reference_for_any_width_dtype_and_start(subtests: pytest.Subtests) -> None:
    for width, dtype, by in product((1, 33, 64, 2056, 4104), DTYPES, (0, 3)):
        with subtests.test(width=width, dtype=dtype, by=by):
            gate = torch.linspace(-100, 100, 6 * width).view(2, 3, width).roll(3, -1)
            gate_up, out = torch.cat([gate, gate.flip(0)], -1).to(dtype), nan(2, 3, width, dtype=dtype)
            emulated.ops().gated(shifted(gate_up, by), out)
            close(out, gated_op.reference(gate_up), dtype)


APPENDS = {
    # rows, nodes, heads, kv heads, width, q norm, k norm, elements that the start is shifted by
    "one": (1, 1, 1, 1, 8, False, False, 0),
    "grouped": (3, 5, 6, 2, 64, True, True, 0),
    "odd": (2, 7, 3, 3, 80, True, False, 0),
    "wide": (1, 21, 8, 2, 128, False, True, 0),
    "widest": (2, 3, 2, 1, 256, True, True, 0),
    "narrow": (2, 4, 4, 2, 10, True, True, 0),
    "shifted": (2, 3, 4, 1, 128, True, True, 1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", APPENDS)
def test_cuda_append_equals_reference(case: str, dtype: torch.dtype) -> None:
    rows, nodes, heads, kv_heads, width, q_norm, k_norm, by = APPENDS[case]
    torch.manual_seed(width)
    angle = torch.outer(torch.arange(200.0), 1e4 ** -(torch.arange(0, width, 2) / width))
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([-angle.sin(), angle.sin()], -1).to(dtype)
    q_weight, k_weight = (torch.randn(width).to(dtype) if normed else None for normed in (q_norm, k_norm))
    qkv = torch.randn(rows, nodes, (heads + 2 * kv_heads) * width).to(dtype)
    table, length = torch.randperm(rows * 4).view(rows, 4), torch.randint(0, 4 * PAGE - nodes, (rows,))
    length[0] = PAGE - 1  # the nodes go to two pages
    position = length[:, None] + torch.randint(0, 5, (rows, nodes))
    pools = [nan(rows * 4, PAGE, kv_heads, width, dtype=dtype) for _ in range(4)]
    query = nan(rows, nodes, heads, width, dtype=dtype)
    earlier = nodes % 3  # nodes of the tree that are in the cache already
    length -= earlier
    emulated.ops().append(
        shifted(qkv, by), cos, sin, q_weight, k_weight, 1e-6, position, table, length, earlier, pools[0], pools[1], query
    )  # fmt: skip
    wanted = cache_op.append_reference(
        qkv, cos, sin, q_weight, k_weight, 1e-6, position, table, length, pools[2], pools[3], heads, earlier
    )  # fmt: skip
    close(query, wanted, dtype)
    for found, theirs in ((pools[0], pools[2]), (pools[1], pools[3])):
        torch.testing.assert_close(found, theirs, rtol=DTYPES[dtype], atol=DTYPES[dtype], equal_nan=True)
    assert not pools[2].isnan().all() and torch.equal(pools[1].nan_to_num(), pools[3].nan_to_num())


@pytest.mark.skipif(not library.state().loaded, reason=library.state().text)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_and_tree_attention_references_equal_cpu_attend(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows, nodes, heads, kv_heads, width = 3, 6, 4, 2, 32
    angle = torch.outer(torch.arange(200.0), 1e4 ** -(torch.arange(0, width, 2) / width))
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat([-angle.sin(), angle.sin()], -1).to(dtype)
    weights = torch.randn(2, width).to(dtype)
    qkv = torch.randn(rows, nodes, (heads + 2 * kv_heads) * width).to(dtype)
    table, length = torch.randperm(rows * 4).view(rows, 4), torch.tensor([0, 30, 90])
    position = length[:, None] + torch.arange(nodes)
    pools = torch.randn(2, rows * 4, PAGE, kv_heads, width).to(dtype)
    keys, values = pools.clone()
    out = nan(rows, nodes, heads * width, dtype=dtype)
    torch.ops.drafttrain.attend(
        qkv, cos, sin, *weights, 1e-6, 0.2, 0, position, table, length, None, 0, keys, values, out
    )  # fmt: skip
    query = cache_op.append(qkv, cos, sin, *weights, 1e-6, position, table, length, *pools, heads)
    close(pools[0], keys, dtype)
    assert torch.equal(pools[1], values)
    causal = bits_of(torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, -1, -1))
    close(tree_attention.reference(query, *pools, table, length, causal, position, 0.2, None, 128), out, dtype)


def test_cuda_append_past_end_of_page_table_writes_nothing() -> None:
    keys, values = (nan(2, PAGE, 1, 8, dtype=torch.float32) for _ in range(2))
    query = nan(1, 3, 1, 8, dtype=torch.float32)
    ones = torch.ones(100, 8)
    position, table, length = torch.arange(3)[None], torch.tensor([[1]]), torch.tensor([PAGE - 2])
    emulated.ops().append(torch.ones(1, 3, 24), ones, ones, None, None, 0.0, position, table, length, 0, keys, values, query)
    assert not query.isnan().any()
    assert keys[1, -2:].isfinite().all() and keys.isfinite().sum() == 2 * 8 and values.isfinite().sum() == 2 * 8


@pytest.mark.sampled(dtype=[torch.float32, torch.bfloat16])  # units of so many bytes are copied, whatever they hold
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "nodes"), [(2, 8, 5), (1, 3, 9), (2, 80, 64), (5, 128, 33), (2, 8, 150)])
def test_cuda_kv_keep_equals_reference(dtype: torch.dtype, heads: int, width: int, nodes: int) -> None:
    torch.manual_seed(nodes)
    layers, rows, pages = 3, 4, 7
    store = torch.arange(layers * 2 * rows * pages * PAGE * heads * width).view(layers, 2, -1, PAGE, heads, width) % 251
    table = torch.randperm(rows * pages).view(rows, pages)
    length = torch.randint(0, pages * PAGE - nodes + 1, (rows,))
    path, count = torch.zeros(rows, nodes, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    # nothing, everything, any nodes, and a long prefix that stays where it is
    chosen = [[], range(nodes), sorted({0, *torch.randperm(nodes)[: nodes // 2].tolist()}), [*range(nodes - 3), nodes - 1]]
    for row, nodes_kept in enumerate(chosen):
        count[row] = len(nodes_kept)
        path[row, : len(nodes_kept)] = torch.tensor(list(nodes_kept), dtype=torch.long)
    for by in (0, 1):
        ours, theirs = shifted(store.to(dtype), by), store.to(dtype)
        emulated.ops().kv_keep(ours, table, length, path, count, PAGE)
        cache_op.keep_reference(theirs, table, length, path, count)
        assert torch.equal(ours, theirs) and not torch.equal(ours, store.to(dtype))


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab)
    if kind == "ties":
        logits = torch.randint(-2, 3, (rows, vocab)).float() * torch.tensor([0.0, -1.0])[torch.randint(0, 2, (rows, vocab))]
    elif kind == "masked":
        logits[torch.rand(rows, vocab) < 0.99] = -torch.inf
        logits[torch.rand(rows, vocab) < 0.3] = torch.nan
    elif kind == "sorted":
        logits = logits.sort(-1).values
    elif kind == "nan":
        logits.fill_(torch.nan)
    elif kind == "far":  # apart by more than exp can hold, in the last row endless
        logits = (logits * 40).round() * 3 + 1000.0
        logits[-1, : vocab // 2] = -torch.inf
        logits[-1, -1] = torch.inf
    return logits


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "ties", "masked", "sorted", "nan", "far"])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 1, 1), (3, 65, 64), (2, 20011, 1), (2, 8192, 10), (1, 20000, 33)])
def test_cuda_top_and_top_log_equal_reference(kind: str, rows: int, vocab: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab + k)
    logits, ids = logits_of(kind, rows, vocab).to(dtype), torch.randperm(10 * vocab)[:vocab]
    for names, by in ((None, 0), (ids, 1)):
        wanted = top_op.reference(logits, k, names)
        value, index = nan(rows, k, dtype=torch.float32), torch.full((rows, k), -1)
        emulated.ops().top(shifted(logits, by), names, value, index)
        assert torch.equal(index, wanted[1])
        torch.testing.assert_close(value, wanted[0], rtol=0, atol=0, equal_nan=True)
        log, at = nan(rows, k, dtype=torch.float32), torch.full((rows, k), -1)
        emulated.ops().top_log(shifted(logits, by), names, log, at)
        assert torch.equal(at, index) and not bool((log > 0).any())
        wanted_log = (wanted[0].double() - logits.double().logsumexp(-1, keepdim=True)).float()
        torch.testing.assert_close(log, wanted_log, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_cuda_top_of_many_rows_and_long_row_equals_reference() -> None:
    torch.manual_seed(0)
    for rows, vocab, k in ((300, 300, 3), (1, 600_000, 64)):
        logits = torch.randn(rows, vocab).to(torch.float16 if rows == 1 else torch.bfloat16)
        wanted = top_op.reference(logits, k)
        value, index = nan(rows, k, dtype=torch.float32), torch.full((rows, k), -1)
        emulated.ops().top(logits, None, value, index)
        assert torch.equal(index, wanted[1]) and torch.equal(value, wanted[0])


SHAPED = [
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 1e-3},
    {"top_k": 50},
    {"top_k": 3000, "top_p": 0.999},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05},
    {"min_p": 0.1},
]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "ties", "masked", "one", "flat", "steep", "far"])
@pytest.mark.parametrize("settings", SHAPED, ids=str)
def test_cuda_shaped_logits_equal_reference_and_ignore_batch(
    settings: dict[str, float], kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the twin in float64, up to rounding; a row alone, at any place in memory, exactly as among others."""
    monkeypatch.setattr(torch.ops, "drafttrain", emulated.ops())
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    torch.manual_seed(0)
    for rows, vocab in ((4, 1501), (2, 140_003)):  # of one part; of more than a block has warps
        logits = logits_of(kind, rows, vocab).nan_to_num(nan=-torch.inf) * 3
        scale = {"one": 0.0, "flat": 0.1, "steep": 1e-5, "far": 50.0}.get(kind)
        logits = (logits if scale is None else logits * scale + (20.0 if kind == "steep" else -7.0)).to(dtype)
        sampling = Sampling(1.0, temperature_B=torch.tensor([0.7, 1e-4 if kind == "steep" else 1.3]), **settings)
        out = sampling_op._compiled(logits, sampling)
        assert Kept.of(logits.double(), sampling).complaint(out) is None
        for row, by in ((0, 0), (rows - 1, 1)):
            alone = replace(sampling, temperature_B=sampling.temperature_B[2 * row // rows][None])
            assert torch.equal(sampling_op._compiled(shifted(logits[row : row + 1], by), alone)[0], out[row])


def test_cuda_tree_links_equal_reference_for_one_to_256_nodes(subtests: pytest.Subtests) -> None:
    for nodes in (1, 2, 33, 63, 64, 65, 130, 192, 256):
        with subtests.test(nodes=nodes):
            torch.manual_seed(nodes)
            parent, _ = candidates(20, nodes)
            parent[0] = torch.arange(-1, nodes - 1)
            depth, bits = torch.full_like(parent, -7), torch.full((20, nodes, words_for(nodes)), -7)
            emulated.ops().tree_links(parent, depth, bits)
            for found, wanted in zip((depth, bits), tree_op.links_reference(parent), strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.sampled(many=[1, 64, 65, 1024, 66, 1000, 4096], nodes=[1, 64, 17, 30, 65, 129, 256])
@pytest.mark.parametrize(
    ("many", "nodes"),
    [
        *((1, 1), (64, 64), (65, 17), (130, 64), (512, 64), (1024, 30), (700, 5)),
        *((66, 65), (300, 128), (1000, 129), (256, 256), (4096, 256), (4096, 60), (2000, 200)),
    ],
)
def test_cuda_build_tree_equals_reference(many: int, nodes: int) -> None:
    torch.manual_seed(many)
    parent, score = candidates(10, many)
    score[-2:] = torch.randn(2, many)  # parents need not be among the best
    shapes = [(10, nodes)] * 3 + [(10, nodes, words_for(nodes))] + [(10, nodes)] * 2
    built = tree_op.Built(*(torch.full(shape, -7) for shape in shapes))
    emulated.ops().build_tree(parent, score, *fields(built))
    for found, wanted in zip(fields(built), fields(tree_op.build_reference(parent, score, nodes)), strict=True):
        assert torch.equal(found, wanted)


def test_every_cuda_kernel_waits_for_those_before_it_in_its_first_statement() -> None:
    bodies = [
        body
        for path in build.sources().glob("**/*.cu*")
        for body in re.findall(r"__global__[^{;]*\{\n(.*)", path.read_text(encoding="utf-8"))
    ]
    assert len(bodies) > 15 and {body.strip() for body in bodies} == {"enter_kernel();"}


@pytest.mark.slow
def test_nvcc_compiles_every_kernel_without_spilling() -> None:
    nvcc = build.nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: on PATH, under CUDA_HOME, or by pip install nvidia-cuda-nvcc")
    said = (build.cuda_library(nvcc, build.ARCHITECTURES).parent / "build.log").read_text()
    kernels = re.findall(r"Compiling entry function '(.*)' for 'sm_(\w+)'", said)
    compiled_for = {a: {name for name, of in kernels if of == a} for a in build.ARCHITECTURES}
    assert len(set(map(frozenset, compiled_for.values()))) == 1 and len(kernels) > 20
    used = re.findall(r"Function properties for (.*)\n *(.*spill loads)", said)
    assert len(used) >= len(kernels)
    none = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert {name: memory for name, memory in used if memory != none} == {}
