"""Every Triton kernel against its plain-torch twin. `test_triton.py` runs this file in a process of its own: in Triton's
interpreter, which must be chosen before Triton is imported, and on a GPU where there is one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import triton
from drafttrain.kernels.triton import fp8 as fp8_kernels
from drafttrain.kernels.triton import tree_attention as kernels
from torch import Tensor
from triton import language as tl

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import ancestors
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.model import attention
from drafttrain.model.kv_storage import PAGE
from drafttrain.ops import divergence as divergence_op
from drafttrain.ops import fp8_rows as fp8_op
from drafttrain.ops import gated as gated_op
from drafttrain.ops import jit, later_steps, library
from drafttrain.ops import rms_norm as norm_op
from drafttrain.ops import rotary as rotary_op
from drafttrain.ops import tree_attention as attention_op
from drafttrain.ops.tree_bits import bits_of
from drafttrain.targets.fast import FastTarget
from tests.architectures import model_of
from tests.helpers import prompts
from tests.tiny import build

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
# in the interpreter, which takes seconds for a case; on a GPU all cases run
SLOW, GRID = (pytest.mark.slow, pytest.mark.grid) if INTERPRETED else ((), ())
F32, F16 = torch.float32, torch.float16


def tiers(names: str, *values: Sequence[Any], fast: Sequence[Any], slow: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """The product of these values: the cases of `fast` in make test, those of `slow` in CI, all others in the grid.

    Most are in float16: the interpreter takes longest with float32, whose tiles are small and so many.
    """
    cases = list(product(*values)) if len(values) > 1 else list(values[0])
    assert {*fast, *slow} <= {*cases}
    marks = [() if case in fast else SLOW if case in slow else GRID for case in cases]
    of = [case if len(values) > 1 else (case,) for case in cases]
    return pytest.mark.parametrize(names, [pytest.param(*case, marks=mark) for case, mark in zip(of, marks, strict=True)])


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN, so that an element that a kernel forgets is seen."""
    for owner, name in ((torch, "empty_like"), (torch, "empty"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, original=original, **k: poisoned(original(*a, **k)))


def poisoned(x: Tensor) -> Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(1)


@dataclass(frozen=True)
class Case:
    nodes: int
    groups: int
    kv_heads: int
    width: int
    lengths: tuple[int, ...]
    window: int | None = None
    slack: int = 0  # of the bound above the longest row
    cap: float | None = None
    sinks: bool = False
    rest: int | None = None  # numbers of a key after those that are its value, where the values are a part of the keys


CASES = {
    "one node": Case(1, 4, 1, 64, (70,)),
    "no prefix": Case(5, 1, 2, 16, (0, 0)),
    "ragged": Case(5, 8, 1, 80, (0, 31, 32, 97)),
    "bit 63": Case(64, 2, 1, 64, (40,)),
    "several blocks of rows": Case(64, 8, 1, 16, (67,)),
    "33 nodes": Case(33, 1, 3, 128, (64, 5)),
    "two words": Case(65, 2, 1, 64, (40, 0)),
    "two words, one node of a step": Case(128, 1, 1, 64, (31, 97)),
    "three words": Case(150, 1, 2, 10, (7,)),
    "four words": Case(256, 1, 1, 16, (0, 9)),
    "words and window": Case(130, 1, 1, 16, (90, 3), window=5),
    "odd width": Case(3, 2, 2, 10, (33,)),
    "narrow window": Case(16, 2, 2, 16, (0, 90, 200), window=3),
    "window": Case(16, 4, 1, 64, (100, 33), window=50),
    "splits": Case(5, 4, 2, 64, (300, 0, 97)),
    "more splits than keys": Case(1, 2, 1, 80, (2, 130), slack=1500),
    "words and splits": Case(100, 1, 1, 16, (700, 300)),
    "splits and window": Case(16, 1, 1, 128, (500, 300), window=310, slack=100),
    "cap": Case(5, 8, 1, 80, (0, 31, 97), cap=0.7),
    "sinks and window": Case(16, 4, 2, 64, (100, 33), window=50, sinks=True),
    "cap, sinks and words": Case(65, 2, 1, 64, (40, 0), cap=0.7, sinks=True),
    "sinks and splits": Case(1, 4, 2, 80, (2, 130), slack=1500, sinks=True),
    "cap, sinks, splits and window": Case(16, 2, 1, 128, (500, 300), window=310, slack=100, cap=0.7, sinks=True),
    "values in keys": Case(5, 4, 1, 32, (0, 31, 97), rest=8),
    "wide values in keys": Case(3, 16, 1, 512, (70, 5), rest=64),
    "values in keys, words": Case(70, 1, 1, 80, (40, 0), rest=16),
    "values in keys, splits": Case(5, 4, 1, 512, (300, 0, 97), rest=64),
}


PARTED = ["ragged", "bit 63", "odd width", "splits", "two words", "four words", "words and splits"]
# as others: the same number of words, with a window or without, grouped or not, split or not
LIKE_OTHERS = ["no prefix", "several blocks of rows", "33 nodes", "two words, one node of a step", "three words"]
LIKE_OTHERS += ["narrow window", "window", "words and splits", "cap, sinks and words", "cap, sinks, splits and window"]
LIKE_OTHERS += ["values in keys, words"]
SINGLE = ["ragged", "splits", "cap", "values in keys"]  # of these in float32
SLOW_SINGLE = ["two words", "window", "sinks and window", "wide values in keys"]


@dataclass(frozen=True)
class Inputs:
    """Rows with pages of their own in any order; whatever no row owns is NaN, the rest of a row's last page too."""

    q_BNhD: Tensor
    keys: Tensor
    values: Tensor
    table_BQ: Tensor
    length_B: Tensor
    bits_BNw: Tensor
    position_BN: Tensor

    @staticmethod
    def of(case: Case, dtype: torch.dtype) -> Inputs:
        rows, nodes, heads = len(case.lengths), case.nodes, case.groups * case.kv_heads
        owned = [-(-(length + nodes) // PAGE) for length in case.lengths]
        page = torch.randperm(sum(owned) + 3).tolist()
        nobodys = page.pop()
        table_BQ = torch.full((rows, max(owned) + 1), nobodys)
        width = case.width + (case.rest or 0)
        store = torch.full((2, sum(owned) + 3, PAGE, case.kv_heads, width), torch.nan)
        for row, length in enumerate(case.lengths):
            for p in range(length + nodes):
                if p % PAGE == 0:
                    table_BQ[row, p // PAGE] = page.pop()
                store[:, table_BQ[row, p // PAGE], p % PAGE] = torch.randn(2, case.kv_heads, width)
        parents = [[-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)] for _ in range(rows)]
        ancestor_BNN, length_B = ancestors(torch.tensor(parents)), torch.tensor(case.lengths)
        q_BNhD = torch.randn(rows, nodes, heads + 2, width).to(DEVICE, dtype)[:, :, 1:-1]  # a part of what was projected
        keys, values = store.to(DEVICE, dtype)
        if case.rest is not None:
            q_BNhD, values = q_BNhD.float(), keys[..., : case.width]
        bits_BNw, position_BN = bits_of(ancestor_BNN), length_B[:, None] + ancestor_BNN.sum(-1) - 1
        return Inputs(q_BNhD, keys, values, *(x.to(DEVICE) for x in (table_BQ, length_B, bits_BNw, position_BN)))

    def through(self, function: Callable[..., Tensor], case: Case) -> Tensor:
        bound = max(case.lengths) + case.nodes + case.slack
        return function(*self.fields(), case.width**-0.5, case.window, bound, **scores_of(case))

    def fields(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


def scores_of(case: Case) -> dict[str, Any]:
    """What changes the scores; the sinks' share of a softmax is from almost nothing to almost all."""
    sinks_h = torch.linspace(-3, 9, case.groups * case.kv_heads, device=DEVICE) if case.sinks else None
    return {"cap": case.cap, "sinks_h": sinks_h}


@tiers(
    "case, dtype",
    [*CASES],
    DTYPES,
    fast=[*((case, F16) for case in CASES if case not in LIKE_OTHERS), *((case, F32) for case in SINGLE)],
    slow=[*((case, F16) for case in LIKE_OTHERS), *((case, F32) for case in SLOW_SINGLE)],
)
def test_triton_tree_attention_equals_reference(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(case))
    inputs = Inputs.of(CASES[case], dtype)
    assert attention_op._serves(inputs.q_BNhD, inputs.keys, inputs.values)
    found = inputs.through(attention_op.tree_attention, CASES[case])
    wanted = inputs.through(attention_op.reference, CASES[case])
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@tiers(
    "case, dtype",
    [*PARTED, "window", "splits and window"],
    DTYPES,
    fast=[(case, F16) for case in ("ragged", "two words", "splits", "splits and window")],
    slow=[*((case, F16) for case in ("bit 63", "odd width", "four words", "words and splits", "window")), ("ragged", F32)],
)
def test_triton_tree_attention_of_last_nodes_equals_whole_tree(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(case))
    inputs, of = Inputs.of(CASES[case], dtype), CASES[case]
    bound, whole = max(of.lengths) + of.nodes + of.slack, inputs.through(attention_op.reference, of)
    for earlier in {of.nodes // 2, of.nodes - 1}:
        last = (inputs.q_BNhD[:, earlier:], inputs.keys, inputs.values, inputs.table_BQ, inputs.length_B)
        last += (inputs.bits_BNw[:, earlier:], inputs.position_BN[:, earlier:])
        for function in (attention_op.tree_attention, attention_op.reference):
            found = function(*last, of.width**-0.5, of.window, bound, earlier)
            torch.testing.assert_close(found, whole[:, earlier:], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_triton_tree_attention_cases_cover_one_and_two_kernels() -> None:
    def kernels_of(case: Case) -> int:
        inputs = Inputs.of(case, torch.float16)
        out, bound = inputs.q_BNhD[..., : case.width], max(case.lengths) + case.nodes + case.slack
        return len(kernels.launches(*inputs.fields(), out, 1.0, case.window, bound, 0))

    assert [kernels_of(case) for case in CASES.values()] == [1] * 14 + [2] * 4 + [1] * 3 + [2] * 2 + [1] * 3 + [2]


@pytest.mark.parametrize("splits", [1, 5, 20])
def test_triton_tree_attention_is_independent_of_split_count(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    monkeypatch.setattr(kernels, "splits", lambda *_: splits)
    arrived = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for lengths, capped, counters in product(((0, 130), (130,)), (False, True), (arrived, None)):
        case = Case(5, 2, 1, 16, lengths, window=100, cap=0.7 if capped else None, sinks=capped)
        inputs = Inputs.of(case, torch.float32)
        wanted = inputs.through(attention_op.reference, case)
        found = inputs.through(partial(attention_op.tree_attention, arrived=counters), case)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not arrived.any()


def test_triton_tree_attention_query_in_float32_is_not_rounded_to_the_keys_format() -> None:
    """Scores of hundreds, of which rounding changes the whole softmax."""
    torch.manual_seed(0)
    case = Case(5, 4, 1, 32, (31, 97), rest=8)
    inputs = Inputs.of(case, torch.float16)
    inputs.q_BNhD.mul_(100.0)
    found, wanted = (inputs.through(f, case) for f in (attention_op.tree_attention, attention_op.reference))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    rounded = replace(inputs, q_BNhD=inputs.q_BNhD.half())
    assert (rounded.through(attention_op.reference, case) - wanted).abs().max() > 0.02


@triton.jit
def tanhs(power, out, SIZE: tl.constexpr, FLOAT32: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out + at, kernels._tanh(tl.load(power + at), FLOAT32))


@pytest.mark.parametrize("exact", [True, False])
def test_triton_tanh_is_within_rounding_and_never_nan(exact: bool) -> None:
    """Of small numbers too in float32: a soft cap of 50 would turn 1e-7 into an error of a score of 0.1."""
    size_P = torch.cat([torch.logspace(-30, 3, 1022), torch.tensor([0.0, 3e38])])
    x_P = torch.cat([size_P, -size_P]).to(DEVICE)
    power_P = (2 * x_P.double() / math.log(2)).clamp(-3e38, 3e38).float()
    out_P = torch.empty_like(power_P)
    tanhs[(1,)](power_P, out_P, len(power_P), exact)
    wanted_P = (power_P.double() * math.log(2) / 2).tanh()
    close = {"rtol": 1e-6, "atol": 1e-38} if exact else {"rtol": 0.0, "atol": 5e-7}
    torch.testing.assert_close(out_P.double(), wanted_P, **close)


@triton.jit
def shares(out, total, splits):  # type: ignore[no-untyped-def]
    split = tl.program_id(0)
    start, end = kernels._share(0, 0, total, split, splits, 0, 16, False)
    tl.store(out + 2 * split, start)
    tl.store(out + 2 * split + 1, end)


def test_triton_tree_attention_splits_share_keys_evenly() -> None:
    out_S2 = torch.empty(8, 2, dtype=torch.int32, device=DEVICE)
    for total, steps in ((16 * 65, [8] * 7 + [9]), (16 * 65 - 15, [8] * 7 + [9]), (3, [0] * 7 + [1])):
        shares[(8,)](out_S2, total, 8)
        edge = [0, *out_S2[:, 1].tolist()]
        assert out_S2[:, 0].tolist() == edge[:-1] and edge[-1] == total
        assert [-(-(e - s) // 16) for s, e in out_S2.tolist()] == steps


@triton.jit
def ends(out, length, slots, batches, added, reach):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, 32), kernels._ends(length, slots, batches, added, reach, 64, 32))


def test_triton_tree_attention_slots_follow_the_keys_that_rows_read() -> None:
    """One each, rows without a request too, and the others in proportion, to within one."""
    for lengths, reach in (([8000, 1000, 1000, 0], 9000), ([0, 700, 8000], 1000), ([0, 0, 0], 4000), ([63] * 32, 64)):
        rows, out_B = len(lengths), torch.empty(32, dtype=torch.int64, device=DEVICE)
        slots = 7 * rows
        ends[(1,)](out_B, torch.tensor(lengths, device=DEVICE), slots, rows, 5, reach)
        steps = [-(-min(length + 5, reach) // 64) for length in lengths]
        wanted_B = torch.tensor([1 + (slots - rows) * s / sum(steps) for s in steps])
        found_B = out_B.cpu().diff(prepend=torch.zeros(1, dtype=torch.int64))[:rows]
        assert out_B[rows - 1] == slots and found_B.min() >= 1 and (found_B - wanted_B).abs().max() < 1


def test_tree_attention_node_without_visible_keys_gives_zeros() -> None:
    case = Case(4, 2, 1, 16, (0, 200), slack=500)
    inputs = Inputs.of(case, torch.float32)
    inputs.bits_BNw[:, 2] = 0
    inputs.length_B[1] = 0  # its first positions count as the nodes
    every = product((attention_op.tree_attention, attention_op.reference), (case, replace(case, sinks=True)))
    for function, case in every:
        out = inputs.through(function, case)
        assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2])) and out[:, 3].abs().sum() > 0


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter alone says by how much a lane is shifted")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SLOW), torch.float16])
def test_triton_tree_attention_bit_shifts_stay_below_64(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A step of 128 keys holds up to 127 lanes past the prefix's end, for a tree of one node and of 64; more than 64 nodes have
    two words or more."""
    from triton.runtime.interpreter import InterpreterBuilder

    amounts: list[int] = []

    def watch(name: str) -> None:
        plain = getattr(InterpreterBuilder, name)

        def recorded(self: Any, left: Any, right: Any) -> Any:
            amounts.extend((int(right.data.min()), int(right.data.max())))
            return plain(self, left, right)

        monkeypatch.setattr(InterpreterBuilder, name, recorded)

    for name in ("create_ashr", "create_lshr", "create_shl"):
        watch(name)
    cases = (Case(1, 2, 1, 16, (200, 0)), Case(64, 2, 1, 64, (0, 70)), Case(5, 2, 1, 64, (0, 300), window=90, slack=400))
    for case in (*cases, Case(129, 1, 1, 64, (0, 70))):
        inputs = Inputs.of(case, dtype)
        found, wanted = (inputs.through(f, case) for f in (attention_op.tree_attention, attention_op.reference))
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert amounts and min(amounts) >= 0 and max(amounts) <= 63


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_triton_tree_attention_cuda_graph_follows_lengths() -> None:
    case = Case(8, 4, 2, 64, (700, 20))
    inputs = Inputs.of(case, torch.bfloat16)
    attention = partial(attention_op.tree_attention, arrived=torch.zeros(64, dtype=torch.int32, device=DEVICE))
    inputs.through(attention, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = inputs.through(attention, case)
    for lengths in ((700, 20), (3, 0), (257, 19)):
        inputs.length_B.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(found, inputs.through(attention_op.reference, case), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("name", "changes"), [("Gemma-2", {"attn_logit_softcapping": 0.05}), ("gpt-oss", {}), ("DeepSeek-V3", {})]
)
def test_target_with_caps_sinks_or_latents_takes_the_kernel_in_static_steps(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text with drafts is that of attention over keys that are read out."""
    target, asked = FastTarget(model_of(name, num_hidden_layers=2, **changes).to(DEVICE)), prompts(2, vocab=60, seed=3)
    drafter, taken, steps = build("medusa", target, 0.3), list[dict[str, Any]](), Controls(read_every=1)

    def counted(*given: Any) -> list[Any]:
        found = all_launches(*given)
        taken.extend(launch.arguments for launch in found if launch.kernel is kernels.attend)
        return found

    def texts(drafter: Any) -> list[list[int]]:
        decoder = Decoder(target, drafter, "greedy", Sampling(), frozenset(), 8, controls=steps)
        decoder.captures = False
        return [result.tokens for result in decoder.run(asked, 2).results]

    all_launches = kernels.launches
    monkeypatch.setattr(kernels, "launches", counted)

    def on_gpus(device: torch.device) -> bool:
        return device.type == "cuda" and library.cuda_state().loaded

    monkeypatch.setattr(library, "serves_on", on_gpus)  # no operators of a CPU
    found = texts(drafter)
    assert len(taken) > 6 and all(a["steep"] is not None or a["sinks"] is not None or a["REST"] > 0 for a in taken)
    monkeypatch.setattr(attention, "pages_in_place", lambda kv: None)
    before = len(taken)
    assert texts(None) == found and len(taken) == before


def laws(rows: int, vocabulary: int, dtype: torch.dtype, masked: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, law's logits, labels); some of the law's are -inf."""
    torch.manual_seed(rows * vocabulary)
    logits, law = (torch.randn(2, rows, vocabulary, device=DEVICE) * 4).to(dtype)
    if masked:
        law[0, vocabulary // 2 + 1 :] = -torch.inf
    return logits, law, torch.randint(0, vocabulary, (rows,), device=DEVICE)


def defined(name: str, logits: Tensor, law: Tensor, label: Tensor) -> Tensor:
    """The definitions as they stand on paper."""
    q, p = logits.softmax(-1), law.softmax(-1)
    if name == "ce":
        return -q.gather(1, label[:, None])[:, 0].log()
    if name == "kl":
        return (torch.special.xlogy(p, p) - p * logits.log_softmax(-1)).sum(-1)
    if name == "rkl":
        return (q * (logits.log_softmax(-1) - law.log_softmax(-1))).sum(-1)
    if name == "jsd":
        m = (p + q) / 2
        return 0.5 * (torch.special.xlogy(p, p) - p * m.log() + torch.special.xlogy(q, q) - q * m.log()).sum(-1)
    overlap = torch.minimum(q, p).sum(-1)
    return -overlap.log() if name == "lk" else 1 - overlap


VOCABULARIES = [1, 17, 2048, 5003]
OF_EACH_KERNEL = ["kl", "tvd", "jsd"]  # ce shares the first, lk the second, rkl the third


@tiers(
    "name, vocabulary, dtype",
    divergence_op.FUSED,
    VOCABULARIES,
    DTYPES,
    fast=[*((name, 5003, F16) for name in divergence_op.FUSED), *(("kl", vocabulary, F32) for vocabulary in (1, 17, 2048))],
)
def test_triton_divergence_equals_reference_and_definition(name: str, vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    logits, law, label = laws(3, vocabulary, dtype, masked=name != "rkl")
    assert jit.serves(logits)
    found = divergence_op.scores(logits, law, label, name, want_grad=True)
    wanted = divergence_op.reference(logits, law, label, name, want_grad=True)
    assert torch.equal(found.top1_C, wanted.top1_C)
    torch.testing.assert_close(found.loss_C, wanted.loss_C, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.acceptance_C, wanted.acceptance_C, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.grad_logits_CV, wanted.grad_logits_CV, rtol=max(TOLERANCE[dtype], 1e-4), atol=1e-6)
    exact = logits.double().requires_grad_()
    losses = defined(name, exact, law.double(), label)
    torch.testing.assert_close(found.loss_C.double(), losses, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    torch.testing.assert_close(found.grad_logits_CV.double(), gradient, rtol=max(TOLERANCE[dtype], 1e-4), atol=1e-6)


@tiers("vocabulary, dtype", VOCABULARIES, DTYPES, fast=[(1, F32), (2048, F16), (5003, F32)])
def test_triton_summary_equals_reference(vocabulary: int, dtype: torch.dtype) -> None:
    logits = laws(3, vocabulary, dtype, masked=True)[1]
    logits[0, :] = 1.0  # all alike: the first one counts
    found, wanted = divergence_op.summary(logits), divergence_op.reference_summary(logits)
    assert jit.serves(logits) and torch.equal(found.best_C, wanted.best_C) and found.best_C[0] == 0
    torch.testing.assert_close(found.log_sum_C, wanted.log_sum_C, rtol=1e-5, atol=1e-5)


@tiers("name", divergence_op.FUSED, fast=OF_EACH_KERNEL, slow=divergence_op.FUSED)
def test_triton_divergence_overlap_over_whole_vocabulary_equals_definition(name: str) -> None:
    logits, law, label = laws(3, 2500, torch.float32, masked=name != "rkl")
    part, target, label = logits[:, :2100], law[:, :2100], label % 2100
    assert jit.serves(part)
    found = divergence_op.scores(part, target, label, name, want_grad=True, whole_C=law.logsumexp(-1))
    own = divergence_op.scores(part, target, label, name, want_grad=True)
    whole = torch.minimum(torch.nn.functional.pad(part.softmax(-1), (0, 400)), law.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.acceptance_C, whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.loss_C, own.loss_C) and torch.equal(found.grad_logits_CV, own.grad_logits_CV)
    gain = torch.tensor([0.0, 0.3, 2.0], device=DEVICE)
    gained = divergence_op.scores(part, target, label, name, want_grad=True, grad_output_C=gain)
    torch.testing.assert_close(gained.grad_logits_CV, own.grad_logits_CV * gain[:, None], rtol=1e-5, atol=1e-7)
    assert torch.equal(gained.loss_C, own.loss_C)
    assert bool((found.acceptance_C < own.acceptance_C).any())


@tiers("name", divergence_op.FUSED, fast=OF_EACH_KERNEL, slow=divergence_op.FUSED)
def test_triton_divergence_writes_slope_in_place_or_skips_it(name: str) -> None:
    """The gradient over the logits themselves, rows of a wider tensor, nothing but the loss."""
    wide, law, label = laws(4, 2500, torch.float32, masked=name != "rkl")
    logits = wide[:, 100:2400]
    arguments = (law[:, :2300], label % 2300, name)
    wanted = divergence_op.reference(logits, *arguments, want_grad=True)
    plain = divergence_op.scores(logits, *arguments, want_grad=False)
    assert plain.grad_logits_CV is None
    torch.testing.assert_close(plain.loss_C, wanted.loss_C, rtol=1e-5, atol=1e-5)
    before = wide.clone()
    found = divergence_op.scores(logits, *arguments, want_grad=True, out=logits)
    assert found.grad_logits_CV is logits
    torch.testing.assert_close(
        logits, wanted.grad_logits_CV, rtol=1e-4, atol=2e-5
    )  # float32 exponentials, and sums in another order
    assert torch.equal(wide[:, :100], before[:, :100]) and torch.equal(wide[:, 2400:], before[:, 2400:])
    assert not len(divergence_op.scores(logits[:0], arguments[0][:0], label[:0], name, want_grad=True).loss_C)


@pytest.mark.parametrize("function", [divergence_op.scores, divergence_op.reference])
def test_divergence_underflow_equal_distributions_and_ties_are_handled(function: Any) -> None:
    """An overlap that underflows, laws that are one, ties of the likeliest token."""
    torch.manual_seed(0)
    far, law = torch.randn(2, 1, 3000, device=DEVICE)
    far[0, 2999], law[0, 7] = 300.0, 300.0
    label = torch.tensor([7], device=DEVICE)
    exact = far.double().requires_grad_()
    loss = defined("lk", exact, law.double(), label)
    (gradient,) = torch.autograd.grad(loss.sum(), exact)
    found = function(far, law, label, "lk", True)
    assert found.acceptance_C.item() == 0.0 and not found.top1_C.item()
    torch.testing.assert_close(found.loss_C.double(), loss.detach())
    torch.testing.assert_close(found.grad_logits_CV.double(), gradient, rtol=1e-3, atol=1e-6)
    far = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    law = torch.tensor([[0.0, 5.0, 5.0, 5.0], [1.0, 2.0, 2.0, 0.0], [0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for name in divergence_op.FUSED:
        found = function(far, law, torch.zeros(3, dtype=torch.long, device=DEVICE), name, True)
        assert found.top1_C.tolist() == [True, False, True]
        if name != "ce":
            torch.testing.assert_close(found.grad_logits_CV[2], torch.zeros(4, device=DEVICE), rtol=0, atol=1e-6)
    steps, law = torch.zeros(2, 1, 5000, device=DEVICE)
    steps[0, [100, 101, 100 + 2048, 4900]], law[0, 100] = 2.0, 2.0
    assert function(steps, law, label, "kl", False).top1_C.item()


@tiers("size, dtype", [(1, 1), (3, 5, 17), (600, 33), (2, 2048)], DTYPES, fast=[((3, 5, 17), F32), ((2, 2048), F16)])
def test_triton_gate_and_gradients_equal_definition(size: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(size, device=DEVICE, dtype=dtype) for _ in range(3))
    both = [x.requires_grad_() for x in (gate, up)]
    assert gated_op._kernels(gate, up, grad)
    found = gated_op.gate(*both)
    found = [found, *torch.autograd.grad(found, both, grad)]
    exact = [x.detach().double().requires_grad_() for x in both]
    wanted = torch.nn.functional.silu(exact[0]) * exact[1]
    for one, other in zip(found, [wanted, *torch.autograd.grad(wanted, exact, grad.double())], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


MANY_ROWS = (9, 33) if INTERPRETED else (600, 33)


@tiers(
    "size, dtype",
    [(1, 1), (3, 5, 17), MANY_ROWS, (2, 2048)],
    DTYPES,
    fast=[((3, 5, 17), F16), (MANY_ROWS, F32), ((2, 2048), F16)],
)
def test_triton_rms_norm_and_gradients_equal_definition(
    size: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows than programs of the backward pass, and more, where the last program has none."""
    from drafttrain.kernels.triton import layer

    if INTERPRETED:
        monkeypatch.setattr(layer, "PARTS", 4)
    torch.manual_seed(0)
    x, grad = (torch.randn(size, device=DEVICE, dtype=dtype) for _ in range(2))
    weight = torch.randn(size[-1], device=DEVICE, dtype=dtype)
    both = [given.requires_grad_() for given in (x, weight)]
    assert norm_op._kernels(x, weight, grad)
    found = norm_op.trained_norm(x, weight, 1e-2)
    found = [found, *torch.autograd.grad(found, both, grad)]
    exact = [given.detach().double().requires_grad_() for given in both]
    wanted = exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-2) * exact[1]
    limits = [1.0, 1.0, x.numel() ** 0.5]  # the weight's gradient is a sum over rows
    for one, other, limit in zip(found, [wanted, *torch.autograd.grad(wanted, exact, grad.double())], limits, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2 * TOLERANCE[dtype], atol=2 * limit * TOLERANCE[dtype])


STEPPED = [(1, 1, 1, 16, 1), (4, 2, 37, 10, 3), (3, 1, 16, 80, 4), (2, 2, 50, 64, 2)]  # heads, KV heads, length, width, steps


@tiers("sizes, dtype", STEPPED, DTYPES, fast=[(sizes, (F32, F16)[i % 2]) for i, sizes in enumerate(STEPPED)])
def test_triton_later_steps_and_gradients_equal_reference(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Queries, step 0's output and both gradients in layouts of their own."""
    torch.manual_seed(0)
    heads, kv_heads, length, width, steps = sizes

    def drawn(count: int, across: bool = False) -> Tensor:
        size = (2, length, count, width) if across else (2, count, length, width)
        x = torch.randn(size, device=DEVICE, dtype=dtype)
        return x.transpose(1, 2) if across else x

    q, first, grad, to_q = drawn(heads, True), drawn(heads), drawn(heads), drawn(heads, True)
    lse = torch.randn(2, heads, length, device=DEVICE)
    keys, values = ([drawn(kv_heads, bool(i % 2)) for i in range(steps)] for _ in range(2))
    assert later_steps._serves(q, first, grad, to_q, *keys, *values)
    out, joint = later_steps.merged(q, first, lse, keys, values)
    wide = [x.double() for x in (q, first, lse)], [k.double() for k in keys], [v.double() for v in values]
    wanted, wanted_joint = later_steps.reference(*wide[0], *wide[1:])
    close = {"rtol": 2 * TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), wanted, **close)
    torch.testing.assert_close(joint.double(), wanted_joint, rtol=1e-5, atol=1e-5)
    exact = (grad.double(), q.double(), out.double(), joint.double(), *wide[1:], to_q.double())
    wanted_all = later_steps.reference_backward(*exact)
    found_all = later_steps.merged_backward(grad, q, out, joint, keys, values, to_q)
    limit = {"rtol": 4 * TOLERANCE[dtype], "atol": 4 * heads / kv_heads * TOLERANCE[dtype]}
    torch.testing.assert_close(found_all[0].double(), wanted_all[0], **limit)
    for found, whole in zip(found_all[1:], wanted_all[1:], strict=True):
        for one, other in zip(found, whole, strict=True):
            torch.testing.assert_close(one.double(), other, **limit)


ROTATED = {  # rows, positions, heads, width, the angles' memory
    "one": (1, 1, 1, 2, "own"),
    "odd width": (2, 5, 3, 10, "own"),
    "width 80": (2, 5, 6, 80, "shared"),
    "target": (2, 5, 5, 128, "own"),  # a program has 4 positions of 4 heads
    "wide": (2, 3, 2, 256, "expanded"),
    "narrow": (2, 65, 5, 8, "columns"),  # and here 64 of 4
}
LAYOUTS = ("joined", "by head", "by position")
FEW = [(case, LAYOUTS[i % 3], DTYPES[i % 2]) for i, case in enumerate(ROTATED)]


@tiers("case, layout, dtype", [*ROTATED], LAYOUTS, DTYPES, fast=FEW)
def test_triton_rotary_and_gradients_equal_reference(case: str, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(case))
    B, N, h, D, angles = ROTATED[case]
    joined = torch.randn(B, N, h + 2, D, device=DEVICE, dtype=dtype)
    x_BhND = joined[:, :, 1:-1].transpose(1, 2)
    if layout != "joined":
        x_BhND = x_BhND.contiguous() if layout == "by head" else joined[:, :, :h].contiguous().transpose(1, 2)
    x_BhND = x_BhND.detach().requires_grad_()
    cos_BND, sin_BND = torch.randn(2, B if angles in ("own", "columns") else 1, N, D, device=DEVICE, dtype=dtype)
    both = torch.stack([cos_BND, sin_BND, torch.cat([-sin_BND[..., : D // 2], sin_BND[..., D // 2 :]], -1)])
    if angles == "columns":
        both = torch.cat([both, both], -1)[..., D:]
    cos_BND, sin_BND, signed_BND = both.expand(-1, B, -1, -1) if angles == "expanded" else both
    grads = [
        torch.randn(B, h, N, D, device=DEVICE, dtype=dtype),
        torch.randn(B, N, h, D, device=DEVICE, dtype=dtype).transpose(1, 2),
    ]
    grads += [torch.randn(D, B, h, N, device=DEVICE, dtype=dtype).permute(1, 2, 3, 0), grads[0][..., :1].expand(B, h, N, D)]
    assert rotary_op._kernels(x_BhND.transpose(1, 2), cos_BND, sin_BND)
    assert rotary_op._kernels(x_BhND.transpose(1, 2), cos_BND, signed_BND)
    exact = x_BhND.detach().double().requires_grad_()
    wanted = rotary_op.reference(exact, cos_BND.double(), sin_BND.double())
    plain = rotary_op.rotate(x_BhND, cos_BND, sin_BND)
    signed = rotary_op.rotate_signed(x_BhND.transpose(1, 2), cos_BND, signed_BND).transpose(1, 2)
    with torch.no_grad():
        assert torch.equal(rotary_op.rotate(x_BhND, cos_BND, sin_BND), plain)
    for found in (plain, signed):
        assert found.shape == x_BhND.shape and found.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for grad in grads:
            (to_x,) = torch.autograd.grad(found, x_BhND, grad, retain_graph=True)
            (to_exact,) = torch.autograd.grad(wanted, exact, grad.double(), retain_graph=True)
            torch.testing.assert_close(to_x.double(), to_exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_triton_rotary_unsupported_inputs_are_left_to_torch() -> None:
    x_BNhD, angle_BND = torch.randn(2, 3, 4, 8, device=DEVICE), torch.randn(2, 3, 8, device=DEVICE)
    assert rotary_op._kernels(x_BNhD, angle_BND, angle_BND)
    for x, angle in (
        (x_BNhD.double(), angle_BND.double()),
        (x_BNhD.half(), angle_BND),
        (x_BNhD[:0], angle_BND[:0]),
        (x_BNhD[..., ::2], angle_BND[..., :4]),
        (torch.randn(1, 1, 1, 258, device=DEVICE), torch.randn(1, 1, 258, device=DEVICE)),
    ):
        assert not rotary_op._kernels(x, angle, angle)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_triton_rotary_cuda_graph_follows_inputs() -> None:
    x_BNhD, (cos_BND, sin_BND) = torch.randn(2, 9, 4, 64, device=DEVICE), torch.randn(2, 2, 9, 64, device=DEVICE)
    rotary_op.rotate_signed(x_BNhD, cos_BND, sin_BND)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rotary_op.rotate_signed(x_BNhD, cos_BND, sin_BND)
    for x in (x_BNhD, cos_BND, sin_BND):
        x.normal_()
    graph.replay()
    torch.testing.assert_close(found, rotary_op.reference_signed(x_BNhD, cos_BND, sin_BND), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "width", "groups"), [(5, 300, 1), (3, 7, 1), (4, 384, 3)])
def test_triton_fp8_rows_equal_reference(rows: int, width: int, groups: int) -> None:
    """The interpreter rounds to e4m3 wrongly, so that the quotients are compared there, and rounded by torch."""
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE).to(DTYPES[-1])
    x[1] = 0.0
    code, scale = torch.empty_like(x, dtype=F32 if INTERPRETED else fp8_op.E4M3), x.new_empty(groups, rows, dtype=F32).T
    fp8_kernels.rows(x, code, scale, fp8_op.LARGEST).run()
    wanted_code, wanted_scale = fp8_op.reference(x, groups)
    assert torch.equal(scale, wanted_scale) and scale[1].tolist() == [1.0] * groups
    assert torch.equal(code.to(fp8_op.E4M3).float(), wanted_code.float())
