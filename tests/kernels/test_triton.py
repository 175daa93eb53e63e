"""Triton kernels: against their twins in the interpreter or on a GPU, and compiled for the GPUs that are not here; the twins
against what they stand for. One-process rules are in `triton_cases.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.tree import ancestors
from drafttrain.model.causal_attention import capped_attention
from drafttrain.model.kv_cache import KVCache
from drafttrain.model.masks import additive, attention_mask
from drafttrain.ops import divergence as divergence_op
from drafttrain.ops import library
from drafttrain.ops import tree_attention as attention_op
from drafttrain.ops.fp8_rows import E4M3, LARGEST
from drafttrain.ops.tree_bits import ancestors_of, bits_of, causal_bits, single_bits, words_for, words_of

CASES = Path(__file__).with_name("triton_cases.py")
CAPABILITIES = (80, 90)
SHARED_MEMORY = 163 * 1024  # bytes of a program on sm_80
AMD = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}  # MI300X and MI355X: bytes of a program
SPILLED = 64  # bytes of a thread that a compiler may put aside for its own reasons

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: kernels are not compiled")


@needs_triton
@pytest.mark.timeout(3600)  # of the whole list; each of its cases has pytest's own limit
@pytest.mark.parametrize(
    ("where", "cases"),
    [
        ("interpreter", "not slow and not grid"),
        pytest.param("interpreter", "slow", marks=pytest.mark.slow),
        pytest.param("interpreter", "grid", marks=pytest.mark.grid),
        ("cuda", ""),
    ],
)
def test_triton_kernels_equal_references(where: str, cases: str) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if where == "interpreter" and Version(version("triton")) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("Triton's interpreter works with NumPy 2.4 from Triton 3.7 on")
    environment = {k: v for k, v in os.environ.items() if k not in (library.SWITCH, "TRITON_INTERPRET")}
    environment |= {"TRITON_INTERPRET": "1"} if where == "interpreter" else {}
    quiet = ["--noconftest", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *quiet, "-m", cases, str(CASES)]
    run = subprocess.run(command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


ATTENTION = {
    # nodes, heads, KV heads, width, dtype, window, earlier nodes, cap, sinks, numbers of a key that are not its value
    "decode": (1, 32, 8, 128, torch.bfloat16, None),
    "tree": (60, 32, 8, 128, torch.bfloat16, None),
    "tree-window": (60, 32, 8, 128, torch.bfloat16, 4096),
    "half": (16, 32, 8, 64, torch.float16, None),
    "half-tree": (60, 32, 8, 128, torch.float16, 4096),
    "width-80": (5, 32, 32, 80, torch.bfloat16, None),
    "wide": (60, 16, 2, 256, torch.bfloat16, 1024),
    "single": (7, 8, 1, 128, torch.float32, None),
    "odd": (3, 3, 3, 10, torch.bfloat16, None),
    "two words": (100, 32, 8, 128, torch.bfloat16, None),
    "four words": (256, 32, 8, 128, torch.bfloat16, 4096),
    "half-words": (256, 32, 8, 64, torch.float16, None),
    "few rows with words": (10, 8, 8, 64, torch.bfloat16, None, 200),
    "single-words": (70, 8, 1, 128, torch.float32, None),
    "cap": (64, 16, 8, 256, torch.bfloat16, 4096, 0, 50.0),
    "single-cap": (7, 8, 4, 256, torch.float32, None, 0, 50.0),
    "sinks": (16, 64, 8, 64, torch.bfloat16, None, 0, None, True),
    "values in keys": (1, 16, 1, 512, torch.bfloat16, None, 0, None, False, 64),
    "values in keys, 32 rows": (2, 16, 1, 512, torch.bfloat16, None, 0, None, False, 64),
    "values in keys, tree": (64, 16, 1, 512, torch.bfloat16, None, 0, None, False, 64),
    "values in keys, two words": (100, 16, 1, 512, torch.float16, None, 0, None, False, 64),
    "single values in keys": (7, 16, 1, 512, torch.float32, None, 0, None, False, 64),
    "narrow values in keys": (16, 16, 1, 256, torch.bfloat16, None, 0, None, False, 64),
}
UNCHANGED = (0, None, False, 0)  # what a case does not say after its window
WIDE = {  # the first to spill with a new Triton
    "half-wide": (60, 16, 2, 256, torch.float16, None),
    "wide-words": (128, 16, 2, 256, torch.bfloat16, None),
}


@needs_triton
@compiles
@pytest.mark.sampled(
    case=["tree-window", "single", "odd", "four words", "few rows with words", "sinks", "values in keys, tree"]
)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", ATTENTION)
def test_triton_tree_attention_compiles_without_spilling(case: str, capability: int, tmp_path: Path) -> None:
    check_attention(ATTENTION[case], capability, tmp_path)


@pytest.mark.slow
@needs_triton
@compiles
@pytest.mark.sampled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", WIDE)
def test_triton_attention_of_widest_heads_compiles_without_spilling(case: str, capability: int, tmp_path: Path) -> None:
    check_attention(WIDE[case], capability, tmp_path)


def attention_launches(case: tuple[Any, ...]) -> list[Any]:
    from drafttrain.kernels.triton import tree_attention as kernels

    nodes, heads, kv_heads, width, dtype, window, earlier, cap, sinks, rest = (*case, *UNCHANGED[len(case) - 6 :])
    found = []
    for rows in (1, 4):
        q, keys = meta(rows, nodes, heads, width + rest, dtype=dtype), meta(300, 32, kv_heads, width + rest, dtype=dtype)
        q = q.float() if rest else q
        given = (q, keys, keys[..., :width], meta(rows, 256), meta(rows), meta(rows, nodes, words_for(earlier + nodes)))
        out, arrived = meta(rows, nodes, heads * width, dtype=dtype), meta(1024, dtype=torch.int32)
        more = (0.1, window, 8192, earlier, arrived, cap, meta(heads, dtype=dtype) if sinks else None)
        launches = kernels.launches(*given, meta(rows, nodes), out, *more)
        split, joined = (launches[0].arguments[name] is not None for name in ("part", "arrived"))
        assert len(launches) == (2 if split and not joined else 1)
        found += launches
    return found


def check_attention(case: tuple[Any, ...], capability: int, tmp_path: Path) -> None:
    for launch in attention_launches(case):
        compiled, waiting = launch.compile(capability), capability >= 90
        check(compiled, capability, tmp_path)
        reads, waits = (compiled.asm["ptx"].find(word) for word in ("ld.global", "griddepcontrol.wait"))
        assert compiled.metadata.launch_pdl == waiting and (0 < waits < reads if waiting else waits == -1)


LOGITS = {torch.bfloat16: (128256, True), torch.float32: (50257, False), torch.float16: (128256, True)}  # vocabulary, gradient


@needs_triton
@compiles
@pytest.mark.sampled(name=["kl", "tvd", "jsd"])  # one of each kernel: the others share them
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", LOGITS, ids=str)
@pytest.mark.parametrize("name", divergence_op.FUSED)
def test_triton_divergence_compiles_without_spilling(name: str, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    from drafttrain.kernels.triton import divergence as kernels

    (vocabulary, sloped), number = LOGITS[dtype], meta(64, dtype=torch.float32)
    logits, hit = meta(64, vocabulary, dtype=dtype), meta(64, dtype=torch.bool)
    given = (logits, logits, meta(64), name, number, hit, number, logits if sloped else None)
    for more in ((None, None), (number, number)):
        check(kernels.launch(*given, *more).compile(capability), capability, tmp_path)


@needs_triton
@compiles
@pytest.mark.sampled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", LOGITS, ids=str)
def test_triton_divergence_summary_compiles(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    from drafttrain.kernels.triton import divergence as kernels

    logits, number = meta(64, LOGITS[dtype][0], dtype=dtype), meta(64, dtype=torch.float32)
    check(kernels.summarise(logits, number, meta(64)).compile(capability), capability, tmp_path)


@needs_triton
@compiles
@pytest.mark.sampled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton_layer_kernels_compile_without_spilling(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    from drafttrain.kernels.triton import layer as kernels

    x, weight, scale = meta(64, 4096, dtype=dtype), meta(4096, dtype=dtype), meta(64, 1, dtype=torch.float32)
    launches = [kernels.gate(x, x, x), kernels.gate_backward(x, x, x, x, x), kernels.norm(x, weight, 1e-5, x, scale)]
    for launch in [*launches, kernels.norm_backward(x, x, weight, scale, x, kernels.parts(x))]:
        check(launch.compile(capability), capability, tmp_path)


@needs_triton
@compiles
@pytest.mark.parametrize(("width", "groups"), [(4096, 32), (4096, 1), (28_672, 1)])
def test_triton_fp8_rows_compile_without_spilling(width: int, groups: int, tmp_path: Path) -> None:
    """For the GPUs that have FP8."""
    from drafttrain.kernels.triton import fp8 as kernels

    x, code, scale = (meta(64, n, dtype=d) for n, d in ((width, torch.bfloat16), (width, E4M3), (groups, torch.float32)))
    check(kernels.rows(x, code, scale, LARGEST).compile(90), 90, tmp_path)


ROTARY = {
    "target": (2, 100, 40, 128),
    "drafter": (1, 7, 8, 64),
    "width 80": (2, 9, 3, 80),
    "wide": (1, 50, 10, 256),
    "odd": (2, 3, 1, 10),
}


@needs_triton
@compiles
@pytest.mark.sampled(groups=[4, 2], width=[128, 80])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("groups", "width"), [(4, 128), (1, 64), (8, 256), (2, 80)])
def test_triton_later_steps_compile_without_spilling(
    groups: int, width: int, dtype: torch.dtype, capability: int, tmp_path: Path
) -> None:
    from drafttrain.kernels.triton import later_steps as kernels

    q, keys = meta(2, 2 * groups, 100, width, dtype=dtype), meta(6, 2, 2, 100, width, dtype=dtype)
    lse = meta(2, 2 * groups, 100, dtype=torch.float32)
    for launch in (
        kernels.merge(q, q, lse, keys, keys, q, lse),
        kernels.merge_backward(q, q, q, lse, keys, keys, q, keys, keys),
    ):
        check(launch.compile(capability), capability, tmp_path)


@needs_triton
@compiles
@pytest.mark.sampled(case=["target", "odd"])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ROTARY)
def test_triton_rotary_compiles_without_spilling(case: str, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    from drafttrain.kernels.triton import rotary as kernels

    B, N, h, D = ROTARY[case]
    joined, angle = meta(B, N, h + 4, D, dtype=dtype)[:, :, :h], meta(B, N, D, dtype=dtype)
    for x, signed, back in ((joined, True, False), (joined.transpose(1, 2).contiguous().transpose(1, 2), False, True)):
        launch = kernels.launch(x, angle, angle, meta(B, N, h, D, dtype=dtype), signed, back)
        check(launch.compile(capability), capability, tmp_path)


@pytest.mark.slow
@needs_triton
@compiles
@pytest.mark.timeout(1200)
@pytest.mark.sampled(case=["tree-window", "wide", "values in keys, tree", "four words"])
@pytest.mark.parametrize("architecture", AMD)
@pytest.mark.parametrize("case", ATTENTION)
def test_triton_tree_attention_compiles_for_amd(case: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ROCm, to the code object that it loads. Nothing here runs it."""
    from drafttrain.kernels.triton import tree_attention as kernels

    monkeypatch.setattr(kernels, "processors", lambda device: kernels.Processors(256, AMD[architecture]))
    for launch in attention_launches(ATTENTION[case]):
        check_amd(launch, architecture)


@pytest.mark.slow
@needs_triton
@compiles
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("architecture", AMD)
def test_triton_other_kernels_compile_for_amd(architecture: str) -> None:
    from drafttrain.kernels.triton import divergence, fp8, later_steps, layer, rotary

    x, weight, scale = meta(64, 4096, dtype=torch.bfloat16), meta(4096, dtype=torch.bfloat16), meta(64, 1, dtype=torch.float32)
    launches = [layer.gate(x, x, x), layer.gate_backward(x, x, x, x, x), layer.norm(x, weight, 1e-5, x, scale)]
    launches.append(layer.norm_backward(x, x, weight, scale, x, layer.parts(x)))
    launches.append(fp8.rows(x, meta(64, 4096, dtype=E4M3), meta(64, 32, dtype=torch.float32), LARGEST))
    logits, number, hit = meta(64, 128256, dtype=torch.bfloat16), meta(64, dtype=torch.float32), meta(64, dtype=torch.bool)
    launches.append(divergence.summarise(logits, number, meta(64)))
    for name in divergence_op.FUSED:
        launches.append(divergence.launch(logits, logits, meta(64), name, number, hit, number, logits, number, number))
    q, keys = meta(2, 8, 100, 128, dtype=torch.bfloat16), meta(6, 2, 2, 100, 128, dtype=torch.bfloat16)
    lse = meta(2, 8, 100, dtype=torch.float32)
    launches.append(later_steps.merge(q, q, lse, keys, keys, q, lse))
    launches.append(later_steps.merge_backward(q, q, q, lse, keys, keys, q, keys, keys))
    heads, angle = meta(2, 100, 40, 128, dtype=torch.bfloat16), meta(2, 100, 128, dtype=torch.bfloat16)
    launches.append(rotary.launch(heads, angle, angle, heads, True, False))
    for launch in launches:
        check_amd(launch, architecture)


def check_amd(launch: Any, architecture: str) -> None:
    """A code object for this GPU, within its shared memory (LDS)."""
    compiled = launch.compile(architecture)
    assert compiled.asm["hsaco"][:4] == b"\x7fELF" and f"amdgcn-amd-amdhsa--{architecture}" in compiled.asm["amdgcn"]
    assert compiled.metadata.shared <= AMD[architecture], launch.kernel.__name__


@needs_triton
def test_triton_kernels_on_amd_get_no_options_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports capability 9.4 for an MI300X, as if it were from NVIDIA's Hopper on."""
    from drafttrain.kernels.triton import launch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    attend = attention_launches(ATTENTION["tree"])[0]
    for hip, early in ((None, True), ("7.0", False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        options = attend._options(launch.major_of(torch.device("cuda")))
        assert options[launch.EARLY] is early and ("launch_pdl" in options) is early
    assert launch.major_of(torch.device("xpu")) == 0


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def check(compiled: Any, capability: int, folder: Path) -> None:
    """A cubin for this GPU, within its shared memory, and no values put aside in local memory."""
    cubin = compiled.asm["cubin"]
    assert cubin[:4] == b"\x7fELF" and f"sm_{capability}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY
    tool = cuobjdump()
    if tool is None:
        pytest.skip("compiled; no cuobjdump to see whether registers spill")
    (folder / "kernel.cubin").write_bytes(cubin)
    run = subprocess.run(
        [tool, "--dump-resource-usage", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True
    )
    usage = dict(pair.split(":") for pair in run.stdout.split() if pair.startswith(("STACK:", "LOCAL:")))
    assert int(usage["STACK"]) <= SPILLED and int(usage["LOCAL"]) <= SPILLED, run.stdout


def cuobjdump() -> str | None:
    """From PATH, the CUDA toolkit, or beside Triton's own assembler."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", str(bundled)]))


def test_tree_attention_reference_equals_torch_attention(subtests: pytest.Subtests) -> None:
    for (nodes, groups), window in product([(1, 1), (6, 4), (64, 2), (70, 1), (256, 2)], [None, 9]):
        with subtests.test(nodes=nodes, window=window):
            torch.manual_seed(nodes)
            rows, kv_heads, width, lengths = 3, 2, 16, torch.tensor([40, 0, 17])
            kv = KVCache(1, rows, 320, pages=30)
            kv.allocate(kv_heads, width, torch.float32)
            for row in (1, 2, 0):
                kv.reserve(row, 320)
            past, new = torch.randn(2, rows, kv_heads, 40, width), torch.randn(2, rows, kv_heads, nodes, width)
            kv.append(0, *past)
            kv.keep(torch.arange(40).expand(rows, 40), lengths)
            kv.append(0, *new)
            keys_BkPD, values_BkPD = kv.read(0, nodes)
            parents = [[-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)] for _ in range(rows)]
            ancestor = ancestors(torch.tensor(parents))
            position, q = lengths[:, None] + ancestor.sum(-1) - 1, torch.randn(rows, nodes, kv_heads * groups, width)
            mask = additive(attention_mask(kv, ancestor, position, window), q.dtype)
            q_BhND = q.transpose(1, 2)
            wanted = F.scaled_dot_product_attention(q_BhND, keys_BkPD, values_BkPD, mask, scale=0.3, enable_gqa=True)
            pages, bits = kv.page_view(), bits_of(ancestor)
            given = (q, *pages.layer(0), pages.table_BQ, kv.length_B, bits, position)
            found = attention_op.reference(*given, 0.3, window, 40 + nodes)
            torch.testing.assert_close(found, wanted.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)
            changed: dict[str, Any] = {"cap": 0.7, "sinks_h": torch.linspace(-2, 3, q_BhND.shape[1])}
            seen_BNP = attention_mask(kv, ancestor, position, window)
            wanted = capped_attention(q_BhND, keys_BkPD, values_BkPD, 0.3, mask_BNP=seen_BNP, **changed)
            found = attention_op.reference(*given, 0.3, window, 40 + nodes, **changed)
            torch.testing.assert_close(found, wanted.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)


def test_ancestor_bits_hold_any_tree_of_one_to_256_nodes(subtests: pytest.Subtests) -> None:
    for nodes in (1, 5, 63, 64, 65, 100, 128, 129, 192, 255, 256):
        with subtests.test(nodes=nodes):
            check_bits(nodes)


def check_bits(nodes: int) -> None:
    torch.manual_seed(nodes)
    ancestor, words = torch.rand(3, nodes, nodes) < 0.5, -(-nodes // 64)
    ancestor[0] = True
    bits = bits_of(ancestor)
    assert bits.dtype == torch.int64 and bits.shape == (3, nodes, words) and torch.equal(ancestors_of(bits), ancestor)
    rest = nodes - 64 * (words - 1)
    assert bits[0, 0].tolist() == [-1] * (words - 1) + [-1 if rest == 64 else 2**rest - 1]
    for row, node in ((1, 0), (2, nodes - 1)):
        whole = sum(int(seen) << j for j, seen in enumerate(ancestor[row, node].tolist()))
        assert words_of(whole, words) == bits[row, node].tolist()
    chain = torch.ones(nodes, nodes, dtype=torch.bool).tril()
    for earlier in {0, nodes // 2, nodes - 1}:
        assert torch.equal(causal_bits(nodes - earlier, bits.device, earlier), bits_of(chain)[earlier:])
        last = ancestors_of(bits[:, earlier:], nodes)
        assert torch.equal(last, ancestor[:, earlier:])
    assert torch.equal(ancestors_of(single_bits(0, nodes, words, bits.device)), torch.eye(nodes, dtype=torch.bool))


def test_tree_bits_too_many_nodes_are_refused() -> None:
    for call in (
        lambda: bits_of(torch.ones(1, 257, 257, dtype=torch.bool)),
        lambda: ancestors_of(torch.ones(1, 257, 5, dtype=torch.long)),
        lambda: causal_bits(200, torch.device("cpu"), 57),
    ):
        with pytest.raises(ValueError, match=r"a tree of 257 nodes, root included; at most 256 are possible: propose fewer"):
            call()
    with pytest.raises(ValueError, match="65 nodes exceed the bits of 1 words"):
        ancestors_of(torch.ones(1, 65, 1, dtype=torch.long))


def test_divergence_reference_slope_equals_autograd(subtests: pytest.Subtests) -> None:
    for name in divergence_op.FUSED:
        with subtests.test(name=name):
            torch.manual_seed(0)
            logits, law, label = torch.randn(5, 301) * 3, torch.randn(5, 301) * 3, torch.randint(0, 301, (5,))
            if name != "rkl":  # infinite where the drafter allows what the target does not
                law[:, :40] = -torch.inf
            found = divergence_op.reference(logits, law, label, name, want_grad=True)
            exact = logits.double().requires_grad_()
            loss = divergence_op.divergence(name, exact.log_softmax(-1), law.double().log_softmax(-1), label)
            torch.testing.assert_close(found.loss_C.double(), loss.detach(), rtol=1e-5, atol=1e-6)
            (gradient,) = torch.autograd.grad(loss.sum(), exact)
            torch.testing.assert_close(found.grad_logits_CV.double(), gradient, rtol=1e-4, atol=1e-6)
            overlap = torch.minimum(logits.softmax(-1), law.softmax(-1)).sum(-1)
            torch.testing.assert_close(found.acceptance_C, overlap)
            out = torch.full_like(logits, torch.nan)
            written = divergence_op.scores(logits, law, label, name, True, out)
            assert written.grad_logits_CV is out and torch.equal(out, found.grad_logits_CV)


def test_divergence_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=f"'kll'; choose {', '.join(divergence_op.LOSSES)}"):
        divergence_op.scores(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), "kll", False)
