"""Every operator's cases: the checked ones and the timed ones, the most important first.

The shapes are Llama-3.1-8B's unless a case has others: 32 blocks, 32 query and 8 KV heads of 128, 128,256 tokens.
"""

from __future__ import annotations

from benchmarks.gpu.accept import ChoiceAccept, Commit, GreedyAccept, LikelyAccept, LosslessAccept
from benchmarks.gpu.cache import Append, KvKeep, TreeAttention
from benchmarks.gpu.case import Case
from benchmarks.gpu.rows import Divergence, Fp8, Fp8Blocks, Fp8Rows, Gated, RmsNorm, Rotary, Sample, Shaped, Top, TopLog
from benchmarks.gpu.trees import BuildTree, GrowTree, Heads, TreeLinks

V = 128_256
NODES = (1, 8, 16, 32, 64)
BEYOND = (65, 128)  # nodes whose ancestors take two words
LARGE_TREES = (128, 256)  # nodes whose ancestors take several words
CONTEXTS = (1024, 4096, 16384)
BATCHES = (4, 16, 32)
LOSSES = ("kl", "ce", "tvd", "lk")

SMALL: tuple[Case, ...] = (  # one of each, for rehearsals and for tools that slow a kernel down a hundredfold
    RmsNorm(3, 193),
    Gated(5, 33),
    Rotary(7, 3, 10),
    Fp8Rows(5, 33),
    Fp8(5, 32, 48),
    Fp8Blocks(5, 512, 384),
    Fp8Rows(3, 384, groups=3),
    Append(2, 5, 6, 2, 64, normed=True),
    TreeAttention(2, 5, 70, 8, 2, 64, uneven=True),
    KvKeep(3, 2, 60, 9, 5, 2, 16, uneven=True),
    GreedyAccept(2, 9, 203),
    ChoiceAccept(3, 17),
    Commit(3, 17),
    Sample(7, 203),
    Shaped(3, 203, 50, 0.9, 0.01),
    LosslessAccept(2, 9, 203),
    LosslessAccept(2, 6, 203, drawn=True),
    LikelyAccept(2, 9, 203),
    Top(3, 203, 10, named=True),
    TopLog(3, 203, 10, named=True),
    TreeLinks(3, 33),
    BuildTree(2, 65, 17),
    GrowTree(2, 5, 9),
    Heads(2, 3, 24, 203, 5),
    *(Divergence(name, 3, 203) for name in LOSSES),
)

LARGE: tuple[Case, ...] = (
    RmsNorm(64, 4096),
    RmsNorm(1, 4096, added=False),
    RmsNorm(5, 8200),
    RmsNorm(3, 1),
    Gated(64, 14336),
    Gated(1, 1),
    Rotary(4096, 40, 128),
    Rotary(130, 7, 80),
    Fp8Rows(64, 14336),
    Fp8Rows(1, 4096),
    Fp8Rows(3, 28672),
    *(Fp8(rows, 4096, 6144) for rows in (1, 64)),
    Fp8(1024, 14336, 4096),
    Fp8Rows(64, 4096, groups=32),
    *(Fp8Blocks(rows, 4096, 6144) for rows in (1, 5, 64)),
    Append(1, 64, 32, 8, 128, 4096),
    Append(4, 1, 32, 8, 128, 1000, normed=True),
    Append(3, 7, 3, 3, 80),
    Append(2, 33, 2, 1, 256, normed=True),
    Append(2, 10, 32, 8, 128, 1000, earlier=20),
    Append(1, 15, 0, 8, 128, 1000, normed=True),
    *(TreeAttention(1, nodes, 1000) for nodes in NODES),
    *(TreeAttention(3, nodes, 517, 16, 2, uneven=True) for nodes in NODES),
    TreeAttention(4, 64, 4096, uneven=True),
    TreeAttention(2, 40, 1000, uneven=True, earlier=30),
    TreeAttention(1, 5, 4096, earlier=4),
    TreeAttention(1, 33, 4096, 8, 8, 64),
    TreeAttention(2, 13, 129, 6, 3, 80, uneven=True),
    TreeAttention(2, 16, 2000, window=300, uneven=True),
    TreeAttention(3, 64, 500, 16, 2, window=3, uneven=True),
    TreeAttention(32, 8, 300, 8, 2, 64, uneven=True),
    TreeAttention(2, 5, 0),
    TreeAttention(2, 5, 70, 8, 2, 64, uneven=True, cap=2.0, sinks=True),
    TreeAttention(3, 17, 517, 16, 8, 256, window=300, uneven=True, cap=2.0),  # heads of Gemma-2
    TreeAttention(2, 16, 2000, 64, 8, 64, window=128, uneven=True, sinks=True),  # and of gpt-oss
    TreeAttention(2, 40, 4096, uneven=True, earlier=30, cap=2.0, sinks=True),
    TreeAttention(3, 16, 2000, 16, 1, 512, uneven=True, rest=64),  # of DeepSeek-V2-Lite
    TreeAttention(1, 70, 4096, 16, 1, 512, earlier=60, rest=64),
    *(TreeAttention(1, nodes, 1000) for nodes in LARGE_TREES),
    TreeAttention(2, 150, 300, 8, 2, 64, uneven=True),
    TreeAttention(2, 200, 1000, uneven=True, earlier=190),
    TreeAttention(2, 130, 500, 16, 2, window=70, uneven=True),
    KvKeep(1, 32, 500, 64, 7),
    KvKeep(4, 5, 300, 33, 33, 3, 80, uneven=True),
    GreedyAccept(2, 64, V),
    GreedyAccept(5, 33, 2051),
    GreedyAccept(1, 1, 17),
    ChoiceAccept(1, 64),
    ChoiceAccept(32, 33),
    Commit(32, 64),
    Sample(64, V),
    Sample(1, 17),
    Shaped(64, V, top_p=0.9),
    LosslessAccept(1, 64, V),
    LosslessAccept(3, 33, 2051),
    LosslessAccept(1, 1, 17),
    LosslessAccept(2, 6, V, drawn=True),
    LosslessAccept(2, 6, V, drawn=True, lazy=True),
    LosslessAccept(3, 33, 2056, lazy=True),
    LosslessAccept(8, 64, V, lazy=True),
    LosslessAccept(8, 5, 2051, drawn=True),
    LikelyAccept(1, 64, V),
    LikelyAccept(3, 33, 2051),
    GreedyAccept(1, 256, V),
    LosslessAccept(1, 256, V),
    LikelyAccept(1, 256, V),
    ChoiceAccept(1, 256),
    *(Top(4, vocab, k) for vocab in (32_000, V) for k in (1, 10)),
    Top(4, 32_000, 10, named=True),
    TopLog(4, V, 10),
    Top(300, 301, 64),
    TreeLinks(32, 64),
    TreeLinks(2, 1),
    *(TreeLinks(3, nodes) for nodes in (65, *LARGE_TREES)),
    BuildTree(4, 512, 64),
    BuildTree(3, 1024, 64),
    BuildTree(2, 7, 7),
    *(BuildTree(2, 4096, nodes) for nodes in LARGE_TREES),
    BuildTree(3, 300, 65),
    GrowTree(4, 10, 4096),
    GrowTree(2, 64, 33),
    Heads(1, 4, 1024, 32_000, 10),
    *(Divergence(name, 17, V) for name in LOSSES),
    *(Divergence(name, 130, 2049) for name in LOSSES),
)

GOALS: tuple[Case, ...] = (  # the operators with goals
    LosslessAccept(1, 64, V),
    BuildTree(1, 512, 64),
    ChoiceAccept(1, 64),
    KvKeep(1, 32, 4096, 64, 5),
    TreeAttention(1, 64, 4096),
    TreeAttention(1, 64, 16384),
)

OTHERS: tuple[Case, ...] = (
    LosslessAccept(1, 8, V, drawn=True),
    *(LosslessAccept(rows, 64, V, lazy=lazy) for rows, lazy in ((32, False), (32, True), (8, False), (8, True), (1, True))),
    Commit(1, 64),
    GreedyAccept(1, 64, V),
    LikelyAccept(1, 64, V),
    Sample(64, V),
    Shaped(64, V, top_p=0.9),
    Shaped(1, V, top_p=0.9),
    Shaped(64, V, top_k=50),
    *(Top(rows, vocab, k) for rows in (1, 64) for vocab in (32_000, V) for k in (1, 10)),
    Top(64, 32_000, 10, named=True),
    *(TopLog(rows, V, 10) for rows in (1, 10)),
    *(TreeLinks(1, nodes) for nodes in (64, *LARGE_TREES)),
    *(BuildTree(1, 1024, nodes) for nodes in LARGE_TREES),
    GrowTree(1, 10, 4096),
    *(LosslessAccept(1, nodes, V) for nodes in LARGE_TREES),
    Heads(1, 4, 4096, V, 10),
    Heads(16, 4, 4096, V, 10),
    *(Append(rows, nodes, 32, 8, 128, 4096, normed) for rows, nodes, normed in ((1, 1, False), (1, 64, False), (16, 64, True))),
    *(RmsNorm(rows, 4096) for rows in (1, 64, 1024)),
    *(Gated(rows, 14336) for rows in (1, 64, 1024)),
    Rotary(8192, 40, 128),
    *(Fp8Rows(rows, width) for rows in (1, 64) for width in (4096, 14336)),
    *(Fp8(rows, 4096, 28672) for rows in (1, 17, 64, 1024)),
    *(Fp8(rows, 14336, 4096) for rows in (1, 64)),
    *(Fp8Blocks(rows, 4096, 28672) for rows in (1, 64)),
    KvKeep(16, 32, 1024, 64, 5),
    *(TreeAttention(1, nodes, context) for context in CONTEXTS for nodes in NODES[:-1]),
    TreeAttention(1, 64, 1024),
    *(TreeAttention(1, nodes, 4096, cap=50.0) for nodes in (1, 64)),
    *(TreeAttention(1, nodes, 4096, sinks=True) for nodes in (1, 64)),
    *(TreeAttention(1, nodes, 4096, 16, 1, 512, rest=64) for nodes in (1, 64)),
    *(TreeAttention(1, nodes, 4096) for nodes in (65, *LARGE_TREES)),
    *(TreeAttention(rows, 64, 4096, uneven=True) for rows in BATCHES),
    *(TreeAttention(1, nodes, context, 32, 4) for context in CONTEXTS for nodes in (1, 64)),
    *(TreeAttention(rows, nodes, 4096) for rows in BATCHES for nodes in (1, 16, 64)),
    *(TreeAttention(rows, nodes, 16384) for rows in BATCHES for nodes in (1, 64)),
    *(TreeAttention(1, nodes, 16384, window=4096) for nodes in (1, 64)),
    *(Divergence(name, 1024, V) for name in LOSSES),
)  # fmt: skip


def checked(rehearsal: bool) -> tuple[Case, ...]:
    return SMALL if rehearsal else SMALL + LARGE


def first(rehearsal: bool) -> tuple[Case, ...]:
    """Every operator at two sizes: the small cases, and of the others the one that moves most bytes."""
    largest = {case.op: case for case in sorted(checked(rehearsal), key=lambda c: c.moved(c.dtypes[-1]))}
    return tuple(dict.fromkeys([*SMALL, *largest.values()]))


def timed(rehearsal: bool) -> tuple[Case, ...]:
    return SMALL if rehearsal else GOALS + OTHERS
