"""Acceptance and sampling: compiled for the CPU, and the CUDA kernels by the emulator, against their twins in float64.

A compiled walk may differ from its twin only where rounding decides: cases count whose verdict stays the same when every
number drawn, and every bound, is shifted a little. Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import Lane, Sampling, uniform
from drafttrain.core.tree import DraftTree
from drafttrain.ops import accept, build_tree, commit, library
from drafttrain.ops import kv_cache as cache
from drafttrain.ops import sampling as sampling_op
from drafttrain.ops.accept import choice_accept, greedy_accept, likely_accept, lossless_accept
from tests.kernels import emulated

pytestmark = pytest.mark.timeout(3600)  # one test compiles the emulated kernels: minutes on a busy machine
Verdict = tuple[Tensor, Tensor, Tensor]
SHIFT = 2e-6
BATCH = 200
ROUNDS = 34  # each number of nodes twice


@pytest.fixture(params=["cpu", "emulated"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the operators run; fresh tensors hold NaN there, or what is no node and no token."""
    if not library.state().loaded:
        pytest.skip(library.state().text)
    if request.param != "cpu":
        monkeypatch.setattr(torch.ops, "drafttrain", emulated.ops())
    for owner, name in ((torch, "empty_like"), (torch, "empty"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    with torch.inference_mode():
        yield request.param


every_dtype = pytest.mark.parametrize(  # of the emulator: see `sizes`
    "machine", ["cpu", "emulated", pytest.param("emulated-all", marks=pytest.mark.slow)], indirect=True
)


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        x = make(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(-(2**40))

    return made


@dataclass
class Case:
    tree: DraftTree
    logits_BNV: Tensor
    position_BN: Tensor
    sampling: Sampling

    def wide(self) -> tuple[DraftTree, Tensor, Tensor, Sampling]:
        """For the twin: float64, with the temperature's own rounding."""
        q_BNV = self.tree.q_BNV
        tree = self.tree if q_BNV is None else replace(self.tree, q_BNV=q_BNV.double())
        return tree, self.logits_BNV.double(), self.position_BN, self.sampling


def case(seed: int, B: int, N: int, V: int, drawn: bool = False, ties: bool = True, dtype: torch.dtype = torch.float32) -> Case:
    """A batch of random trees with twins, ragged counts and NaN logits in the padding.

    drawn: some nodes' children come from q, at most three each and in one shape for the batch.
    """
    random = torch.Generator().manual_seed(seed)
    logits_BNV = torch.randn(B, N, V, generator=random) * float(torch.rand((), generator=random) * 4)
    if ties and seed % 3 == 0:
        logits_BNV = logits_BNV.round()
    masked_BNV = torch.rand(B, N, V, generator=random) < 0.2
    masked_BNV.scatter_(2, torch.randint(0, V, (B, N, 1), generator=random), False)
    logits_BNV = logits_BNV.masked_fill(masked_BNV, -torch.inf)
    token_BN = torch.randint(0, min(V, 9), (B, N), generator=random)
    parent_BN = (torch.rand(B, N, generator=random) * torch.arange(N)).long()
    q_BNV = sampled_BN = None
    if drawn:
        parents = [-1]
        for i in range(1, N):
            room = [j for j in range(i) if parents.count(j) < min(3, V // 2)]
            parents.append(room[int(torch.randint(0, len(room), (), generator=random))])
        parent_BN = torch.tensor(parents).repeat(B, 1)
        near_BNV = torch.randn(B, N, V, generator=random) + logits_BNV.clamp_min(-3.0) * (seed % 2)
        q_BNV = near_BNV.softmax(-1)
        sampled_BN = (torch.rand(N, generator=random) < 0.8).repeat(B, 1)
        for node in range(N):
            below = [i for i in range(1, N) if parents[i] == node]
            if below and bool(sampled_BN[0, node]):
                token_BN[:, below] = torch.multinomial(q_BNV[:, node], len(below), generator=random)
    parent_BN[:, 0] = -1
    count_B = torch.randint(1, N + 1, (B,), generator=random)
    logits_BNV[torch.arange(N) >= count_B[:, None]] = torch.nan
    position_BN = torch.randint(0, 2**20, (B, N), generator=random)
    temperature_B = torch.tensor([0.5, 0.7, 1.0, 1.5])[torch.randint(0, 4, (B,), generator=random)]
    key_B, seed_1 = torch.randint(0, 2**40, (B,), generator=random), torch.tensor([seed - 7])
    sampling = Sampling(1.0, key_B=key_B, temperature_B=temperature_B, seed_1=seed_1)
    return Case(DraftTree(token_BN, parent_BN, count_B, q_BNV, sampled_BN), logits_BNV.to(dtype), position_BN, sampling)


def check(found: Verdict, wanted: Verdict, stable_B: Tensor | None = None) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        ours, theirs = (ours, theirs) if stable_B is None else (ours[stable_B], theirs[stable_B])
        assert ours.dtype == torch.long and torch.equal(ours, theirs)


def steady(module: Any, twin: Callable[[float], Verdict], monkeypatch: pytest.MonkeyPatch) -> tuple[Verdict, Tensor]:
    """What the twin says, and which rows say the same with every number, and every bound, a little lower or higher."""
    wanted = twin(0.0)
    stable_B = torch.ones(len(wanted[1]), dtype=torch.bool)
    for shift in (-SHIFT, SHIFT):
        with monkeypatch.context() as patch:
            patch.setattr(module, "uniform", lambda *a, s=shift, **k: (uniform(*a, **k) + s).clamp(0.0, 1.0 - 2**-53))
            for other, plain in zip(twin(shift), wanted, strict=True):
                stable_B &= (other == plain).view(len(plain), -1).all(-1)
    return wanted, stable_B


def sizes(machine: str, rounds: int) -> Iterator[tuple[int, int, int, int, torch.dtype]]:
    """(seed, rows, nodes, V, dtype): many small trees on the CPU; few, over several splits of a row too, by the emulator.

    "emulated" takes one dtype for each size, "emulated-all" every one."""
    if machine == "cpu":
        for seed in range(rounds):
            yield seed, BATCH, 1 + seed % 17, (2, 5, 16, 23)[seed % 4], torch.float32
    rows = 4 if machine == "cpu" else 2
    for seed, (N, V) in enumerate(
        [(9, 5), (6, 17), (12, 4096), (5, 4099), (7, 8200), (4, 12296), (64, 33), (1, 4100), (90, 3), (256, 9)]
    ):
        for dtype in library.DTYPES if machine != "emulated" else (library.DTYPES[seed % len(library.DTYPES)],):
            yield 1000 + seed, rows, N, V, dtype


@every_dtype
def test_greedy_and_choice_accept_equal_reference(machine: str) -> None:
    for seed, B, N, V, dtype in sizes(machine, ROUNDS):
        c = case(seed, B, N, V, dtype=dtype)
        real_BNV = c.logits_BNV.nan_to_num(0.0, neginf=-torch.inf)
        check(greedy_accept(c.tree, c.logits_BNV), accept.greedy_reference(c.tree, real_BNV))
        choice_BN = torch.randint(0, min(V, 9), (B, N), generator=torch.Generator().manual_seed(seed))
        check(choice_accept(c.tree, choice_BN), accept.choice_reference(c.tree, choice_BN))


def test_greedy_accept_finds_argmax_at_every_position(machine: str) -> None:
    """Also in rows that start at no multiple of 16 bytes, with equals behind it, and where nothing but -inf is."""
    for V in (4095, 9001) if machine == "cpu" else (4099,):
        for place in (0, 1, V // 2, V - 1):
            logits = torch.full((1, 2, V), -1.0)
            logits[0, :, place:] = 2.0
            logits[0, 1, : place + 1] = -torch.inf
            tree = DraftTree(torch.tensor([[0, place]]), torch.tensor([[-1, 0]]), torch.tensor([2]))
            path, count, bonus = greedy_accept(tree, logits)
            assert path.tolist() == [[0, 1]] and count.tolist() == [2]
            assert bonus.tolist() == [(place + 1) % V]


@every_dtype
@pytest.mark.parametrize("drawn", [False, True], ids=["given", "drawn"])
def test_lossless_accept_equals_reference(machine: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = total = 0
    for seed, B, N, V, dtype in sizes(machine, ROUNDS):
        c = case(seed, B, N, V, drawn, dtype=dtype)
        found = lossless_accept(c.tree, c.logits_BNV, c.position_BN, c.sampling)
        wanted, stable_B = steady(accept, lambda _, c=c: accept.lossless_reference(*c.wide()), monkeypatch)
        check(found, wanted, stable_B)
        kept, total = kept + int(stable_B.sum()), total + B
    assert kept > (0.99 if machine == "cpu" else 0.9) * total


@pytest.mark.parametrize("machine", ["emulated"], indirect=True)
@pytest.mark.parametrize("drawn", [False, True], ids=["given", "drawn"])
def test_lossless_accept_lazy_walk_equals_eager_walk(machine: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is `lossless_reference` up to rounding. With one tree, and with a batch."""
    for seed, B, N, V, dtype in [*sizes(machine, 0), (5, 1, 9, 8200, torch.bfloat16), (6, 32, 9, 4104, torch.float16)]:
        c = case(seed, B, N, V, drawn, dtype=dtype)
        wanted = lossless_accept(c.tree, c.logits_BNV, c.position_BN, c.sampling)
        with monkeypatch.context() as patch:
            patch.setattr(accept, "EAGER", -1)
            check(lossless_accept(c.tree, c.logits_BNV, c.position_BN, c.sampling), wanted)


@pytest.mark.parametrize("machine", ["emulated"], indirect=True)
def test_share_of_a_split_by_a_warp_has_the_bits_of_one_by_a_block(machine: str) -> None:
    differing = ctypes.CDLL(str(emulated.binary())).differing_shares
    differing.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_float]
    for V in (8, 4096, 9000):
        row_V = torch.randn(V, generator=torch.Generator().manual_seed(V)).mul(5).to(torch.bfloat16)
        assert differing(row_V.data_ptr(), V, 0.7) == 0


@every_dtype
@pytest.mark.sampled
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, math.inf), (0.02, 0.05)])
def test_likely_accept_equals_reference(machine: str, epsilon: float, delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = total = 0
    for seed, B, N, V, dtype in sizes(machine, ROUNDS):
        c = case(seed, B, N, V, ties=False, dtype=dtype)
        c.tree.token_BN.masked_fill_(torch.arange(N) % 3 == 1, int(c.logits_BNV[0, 0].argmax()))

        def twin(shift: float, c: Case = c) -> Verdict:
            return accept.likely_reference(*c.wide(), epsilon * (1.0 + shift), delta * (1.0 + shift))

        found = likely_accept(c.tree, c.logits_BNV, c.position_BN, c.sampling, epsilon, delta)
        wanted, stable_B = steady(accept, twin, monkeypatch)
        check(found, wanted, stable_B)
        kept, total = kept + int(stable_B.sum()), total + B
    assert kept > (0.99 if machine == "cpu" else 0.9) * total


@every_dtype
def test_sample_operator_equals_reference(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = total = 0
    for i, V in enumerate((1, 2, 5, 17, 4095, 4096, 4097, 12301)):
        for dtype in library.DTYPES if machine != "emulated" else (library.DTYPES[i % len(library.DTYPES)],):
            c = case(V, 4 if machine != "cpu" else 200 if V < 100 else 30, 2, V, dtype=dtype)
            logits_MV = c.logits_BNV[:, 0].contiguous().repeat_interleave(2, 0)  # keys and temperatures serve two rows each
            at_M = c.position_BN.flatten()
            found_M = sampling_op.sample(logits_MV, c.sampling, at_M, Lane.DRAFT, 5)
            assert (logits_MV.gather(1, found_M[:, None]) > -torch.inf).all()

            def twin(_: float, logits_MV: Tensor = logits_MV, c: Case = c, at_M: Tensor = at_M) -> Verdict:
                return (sampling_op.sample_reference(logits_MV.double(), c.sampling, at_M, Lane.DRAFT, 5),) * 3

            wanted, stable_M = steady(sampling_op, twin, monkeypatch)
            check((found_M,) * 3, wanted, stable_M)
            kept, total = kept + int(stable_M.sum()), total + len(found_M)
    assert kept > (0.99 if machine == "cpu" else 0.9) * total


def test_sample_operator_degenerate_logits_give_valid_tokens(machine: str) -> None:
    """A draw of 0 takes the first token that may come, and a law of one token gives that, wherever the others are masked."""
    V = 139_300  # of more splits than a warp has lanes
    places = [0, 17, 4095, V - 1]
    logits = torch.full((4, V), -torch.inf)
    logits[torch.arange(4), places] = 1e4
    assert sampling_op.sample(logits, Sampling(0.01), torch.arange(4), Lane.TARGET).tolist() == places
    for bad in (torch.nan, -torch.inf, torch.inf):  # nothing hangs, and what comes is a token
        found = sampling_op.sample(torch.full((1, 4100), bad), Sampling(1.0), torch.zeros(1, dtype=torch.long), Lane.TARGET)
        assert 0 <= int(found) < 4100
    if machine != "cpu":
        with pytest.raises(RuntimeError, match="bytes of shared memory"):
            sampling_op.sample(torch.zeros(1, 1 << 24, dtype=torch.float16), Sampling(1.0), torch.zeros(1).long(), Lane.TARGET)


@pytest.mark.parametrize("drawn", [False, True], ids=["given", "drawn"])
def test_acceptance_and_sampling_of_infinite_logits_equal_reference(machine: str, drawn: bool) -> None:
    """float16 overflows to infinity. Such a row has no probabilities: its children are rejected and token 0 follows."""
    for V in (16, 4099):
        c = case(3, 8 if machine == "cpu" else 4, 7, V, drawn, dtype=torch.float16)
        logits_BNV, is_even_B1 = c.logits_BNV, torch.arange(len(c.logits_BNV))[:, None] % 2 == 0
        at_BN1 = torch.where(is_even_B1, V - 1, c.tree.token_BN.roll(-1, 1))[..., None]  # maybe a child's token
        infinite_BN1 = ~logits_BNV[..., :1].isnan() & (torch.arange(7) % 3 != 1)[:, None]
        logits_BNV.scatter_(2, at_BN1, logits_BNV.gather(2, at_BN1).masked_fill(infinite_BN1, torch.inf))
        check(lossless_accept(c.tree, logits_BNV, c.position_BN, c.sampling), accept.lossless_reference(*c.wide()))
        found = likely_accept(c.tree, logits_BNV, c.position_BN, c.sampling, 0.09, 0.3)
        check(found, accept.likely_reference(*c.wide(), 0.09, 0.3))
        rows = (c.sampling, c.position_BN[:, 0], Lane.DRAFT, 5)
        wanted_B = sampling_op.sample_reference(logits_BNV[:, 0].double(), *rows)
        assert torch.equal(sampling_op.sample(logits_BNV[:, 0].contiguous(), *rows), wanted_B)
        assert bool((wanted_B[(logits_BNV[:, 0] == torch.inf).any(-1)] == 0).all())


def test_lossless_accept_children_with_all_probability_are_accepted(machine: str) -> None:
    """Two tokens are left of the law and both are children: one is always taken, whatever rounding makes of the second."""
    B, V = (2000, 40) if machine == "cpu" else (20, 40)
    logits = torch.full((B, 3, V), -torch.inf)
    logits[..., 7], logits[..., 23] = 1.3, -0.4
    tree = DraftTree(torch.tensor([[0, 7, 23]]).repeat(B, 1), torch.tensor([[-1, 0, 0]]).repeat(B, 1), torch.full((B,), 3))
    position = torch.tensor([[4, 5, 5]]).repeat(B, 1)
    path, count, bonus = lossless_accept(tree, logits, position, Sampling(0.9).rows(torch.arange(B)))
    assert (count == 2).all() and set(path[:, 1].tolist()) == {1, 2} and set(bonus.tolist()) == {7, 23}


def test_lossless_accept_row_is_independent_of_batch(machine: str) -> None:
    c = case(5, 6 if machine == "cpu" else 3, 7, 4099, drawn=True)
    whole = lossless_accept(c.tree, c.logits_BNV, c.position_BN, c.sampling)
    for row in range(len(c.logits_BNV)):
        one = slice(row, row + 1)
        parts = {f.name: getattr(c.tree, f.name) for f in fields(c.tree)}
        tree = DraftTree(**{name: None if x is None else x[one] for name, x in parts.items()})
        sampling = replace(c.sampling, key_B=c.sampling.key_B[one], temperature_B=c.sampling.temperature_B[one])
        alone = lossless_accept(tree, c.logits_BNV[one], c.position_BN[one], sampling)
        assert all(torch.equal(a[one], b) for a, b in zip(whole, alone, strict=True))


ROWS, WORDS = 60_000, 6


def drawn_from(law_WW: Tensor, token_B: Tensor, random: torch.Generator, count: int = 1) -> Tensor:
    return torch.multinomial(law_WW[token_B], count, generator=random)


def drafts(kind: str, p_WW: Tensor, q_WW: Tensor, random: torch.Generator) -> DraftTree:
    """ROWS trees below token 0 whose drafts are drawn from q, a law of the token before, or given: likely ones."""
    root_B1 = torch.zeros(ROWS, 1, dtype=torch.long)
    if kind == "given":
        first_3 = p_WW[0].topk(4).indices[1:]
        token_7 = torch.cat([root_B1[0], first_3, p_WW[first_3[0]].topk(2).indices, p_WW[first_3[2]].topk(1).indices])
        parent, token_BN = [-1, 0, 0, 0, 1, 1, 3], token_7.repeat(ROWS, 1)
    elif kind == "chain":
        first_B1 = drawn_from(q_WW, root_B1[:, 0], random)
        parent, token_BN = [-1, 0, 1], torch.cat([root_B1, first_B1, drawn_from(q_WW, first_B1[:, 0], random)], 1)
    else:
        first_B3 = drawn_from(q_WW, root_B1[:, 0], random, 3)
        below = [drawn_from(q_WW, first_B3[:, i], random, 2) for i in (0, 2)]
        parent, token_BN = [-1, 0, 0, 0, 1, 1, 3, 3], torch.cat([root_B1, first_B3, *below], 1)
    q_BNV = None if kind == "given" else q_WW[token_BN]
    sampled_BN = None if kind == "given" else torch.ones_like(token_BN, dtype=torch.bool)
    return DraftTree(token_BN, torch.tensor(parent).repeat(ROWS, 1), torch.full((ROWS,), len(parent)), q_BNV, sampled_BN)


@pytest.mark.sampled(kind=["siblings"])  # which has what a chain has; decoding/test_large_trees.py has given ones
@pytest.mark.parametrize("kind", ["chain", "siblings", "given"])
def test_lossless_accept_emitted_tokens_follow_target_distribution(kind: str) -> None:
    """Chi-square of the first two tokens against p, another law of the token before."""
    if not library.state().loaded:
        pytest.skip(library.state().text)
    random = torch.Generator().manual_seed(len(kind))
    logits_WW = torch.randn(WORDS, WORDS, generator=random) * 1.5
    logits_WW[2, 4] = -torch.inf
    p_WW, q_WW = logits_WW.softmax(-1), torch.randn(WORDS, WORDS, generator=random).softmax(-1)
    tree, sampling = drafts(kind, p_WW, q_WW, random), Sampling(1.0, seed=11).rows(torch.arange(ROWS))
    token_BN, position_BN = tree.token_BN, tree.ancestor_BNN.sum(-1) + 3
    with torch.inference_mode():
        path_BN, count_B, bonus_B = lossless_accept(tree, logits_WW[token_BN], position_BN, sampling)
    assert 0.2 < float((count_B > 1).float().mean()) < 0.95
    text_BN = token_BN.gather(1, path_BN).roll(-1, 1).scatter(1, count_B[:, None] - 1, bonus_B[:, None])
    plain_B = drawn_from(p_WW, text_BN[:, 0], random)[:, 0]
    seen = torch.bincount(text_BN[:, 0] * WORDS + torch.where(count_B > 1, text_BN[:, 1], plain_B), minlength=WORDS**2)
    wanted = (p_WW[0, :, None] * p_WW).flatten() * ROWS
    cells = wanted > 0
    assert not seen[~cells].any()
    statistic = ((seen - wanted)[cells] ** 2 / wanted[cells]).sum()
    assert float(torch.special.gammaincc((cells.sum() - 1) / 2, statistic / 2)) > 1e-4


def test_keyed_uniform_numbers_in_cpp_equal_python_bitwise() -> None:
    number = ctypes.CDLL(str(emulated.binary())).keyed_number
    number.restype, number.argtypes = ctypes.c_double, [ctypes.c_int64] * 5
    random = torch.Generator().manual_seed(3)
    for _ in range(500):
        seed, key, position = (int(torch.randint(-(2**62), 2**62, (), generator=random)) for _ in range(3))
        lane, draw = Lane(int(torch.randint(1, 4, (), generator=random))), int(torch.randint(0, 300, (), generator=random))
        sampling = Sampling(1.0, seed=seed).rows(torch.tensor([key]))
        assert number(seed, key, position, lane, draw) == float(uniform(sampling, torch.tensor([position]), lane, draw))


@pytest.mark.sampled
@pytest.mark.parametrize("nodes", [1, 70, 9])
@pytest.mark.parametrize(("skips", "counts"), [(True, True), (False, False)])
def test_commit_operator_equals_reference(machine: str, nodes: int, skips: bool, counts: bool) -> None:
    """Texts that have ended, that reach their limit and that stop; paths that are a part of a wider tensor."""
    one = case(nodes, BATCH, nodes, 11)
    path_BN, count_B, bonus_B = accept.greedy_reference(one.tree, one.logits_BNV)
    path_BA = path_BN[:, : int(count_B.max())]
    random = torch.Generator().manual_seed(nodes)
    slot_B = torch.randperm(BATCH + 3, generator=random)[:BATCH]
    made_S, limit_S = (torch.randint(low, high, (BATCH + 3,), generator=random) for low, high in ((1, 9), (4, 12)))
    stop_SK = torch.randint(-1, 11, (BATCH + 3, 2), generator=random)
    sequences = commit.Sequences(torch.zeros_like(made_S), made_S, made_S % 4 == 0, limit_S, stop_SK)
    same = commit.Sequences(*(getattr(sequences, field.name).clone() for field in fields(sequences)))
    found = commit.commit(one.tree, path_BN, path_BA.shape[1], count_B, bonus_B, slot_B, sequences, skips, counts)
    wanted = commit.reference(one.tree, path_BA, count_B, bonus_B, slot_B, same, skips, counts)
    assert bool(same.done_S.any()) and not bool(same.done_S.all())
    for ours, theirs in ((found, wanted), (sequences, same)):
        for field in fields(theirs):
            assert torch.equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name


@pytest.mark.parametrize(("width", "dtype"), [(5, torch.bfloat16), (16, torch.float32)])
def test_along_and_keep_last_equal_reference(machine: str, width: int, dtype: torch.dtype) -> None:
    """Rows without a new position; states that are copied 16 bytes at a time, and others."""
    random = torch.Generator().manual_seed(width)
    slot_B, count_B = torch.randperm(9, generator=random)[:6], torch.tensor([0, 1, 4, 2, 0, 3])
    hidden_SH, hidden_BAH = (torch.randn(*rows, width, generator=random).to(dtype) for rows in ((9,), (6, 4)))
    root_S, next_BA = torch.arange(9), torch.randint(0, 99, (6, 4), generator=random)
    path_BN = torch.randint(0, 4, (6, 7), generator=random)  # of which rows are read in part
    values = [hidden_BAH, *(hidden_BAH + i for i in range(16))]  # more than one launch takes
    for found_BAH, value_BAH in zip(commit.along(values, path_BN, 5), values, strict=True):
        assert torch.equal(found_BAH, commit.along_reference(value_BAH, path_BN[:, :5]))
    same_SH, same_S = hidden_SH.clone(), root_S.clone()
    commit.keep_last(hidden_SH, root_S, hidden_BAH, next_BA, count_B, slot_B)
    commit.keep_last_reference(same_SH, same_S, hidden_BAH, next_BA, count_B, slot_B)
    assert torch.equal(hidden_SH, same_SH) and torch.equal(root_S, same_S)


@pytest.mark.parametrize(
    ("width", "ranks", "shared", "hidden", "dtype"),
    [
        (10, 10, False, 5, torch.bfloat16),
        (64, 64, True, 16, torch.float32),
        (1, 1, True, 0, torch.float16),
        (7, 3, False, 8, torch.float32),
    ],
)
def test_grow_tree_equals_reference(
    machine: str, width: int, ranks: int, shared: bool, hidden: int, dtype: torch.dtype
) -> None:
    """With ties, with choices that cannot be, and with what all nodes share; states of any length."""
    random = torch.Generator().manual_seed(width)
    rows = (3, 1 if shared else width)
    score_BW = -torch.randint(0, 4, (3, width), generator=random).float()
    gain_BXR = -torch.randint(0, 3, (*rows, ranks), generator=random).float()
    gain_BXR[torch.rand(gain_BXR.shape, generator=random) < 0.2] = -torch.inf
    token_BXR = torch.randint(0, 99, (*rows, ranks), generator=random)
    state_BXH = torch.randn(*rows, hidden, generator=random).to(dtype)
    bits_BWw, own_Ww = (torch.randint(0, 2**40, size, generator=random) for size in ((3, width, 2), (width, 2)))
    given = (score_BW, gain_BXR, token_BXR, state_BXH, bits_BWw, own_Ww)
    found, wanted = build_tree.grow_tree(*given), build_tree.grow_reference(*given)
    for field in fields(wanted):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name


def test_advance_equals_reference(machine: str) -> None:
    length_B, count_B, slot_B = torch.tensor([7, 1, 0]), torch.tensor([0, 3, 5]), torch.tensor([4, 0, 2])
    length_S, same_S = torch.arange(6), torch.arange(6)
    found = cache.advance(length_B, count_B, slot_B, length_S)
    wanted = cache.advance_reference(length_B, count_B, slot_B, same_S)
    assert torch.equal(found, wanted) and torch.equal(length_S, same_S)


@pytest.mark.parametrize(("width", "stores"), [(5, 1), (16, 17)])
def test_pending_positions_appended_and_taken_equal_reference(machine: str, width: int, stores: int) -> None:
    """Rows without a new position, slots that have some already, and more tensors than one launch takes."""
    random = torch.Generator().manual_seed(width)
    slot_B, count_B = torch.randperm(9, generator=random)[:6], torch.tensor([0, 1, 4, 2, 0, 3])
    pending_S = torch.tensor([0, 3, 0, 1, 0, 5, 0, 2, 4])
    values = [torch.randint(0, 99, (6, 4), generator=random)]
    values += [torch.randn(6, 4, width, generator=random).to(torch.bfloat16) for _ in range(stores)]
    kept = [value_BA.new_zeros(9, 12, *value_BA.shape[2:]) for value_BA in values]
    same, same_S = [store_SW.clone() for store_SW in kept], pending_S.clone()
    commit.append_pending(values, count_B, slot_B, kept, pending_S)
    commit.append_pending_reference(values, count_B, slot_B, same, same_S)
    found, found_B = commit.take_pending(kept, slot_B[:4], pending_S, 9)
    wanted, wanted_B = commit.take_pending_reference(same, slot_B[:4], same_S, 9)
    assert torch.equal(found_B, wanted_B) and torch.equal(pending_S, same_S) and bool((same_S > 0).any())
    for ours, theirs in ((kept, same), (found, wanted)):  # a store's last column takes padding
        assert all(torch.equal(a[:, :11], b[:, :11]) for a, b in zip(ours, theirs, strict=True))


def test_pending_positions_of_rows_that_share_a_slot_stay_within_it(machine: str) -> None:
    """As rows do that pad a batch."""
    slot_B, count_B, pending_S = torch.tensor([1, 1, 1, 1]), torch.full((4,), 4), torch.zeros(3, dtype=torch.long)
    kept = [torch.zeros(3, 6, dtype=torch.long)]
    for _ in range(2):
        commit.append_pending([torch.full((4, 4), 7)], count_B, slot_B, kept, pending_S)
        _, found_B = commit.take_pending(kept, slot_B, pending_S, 4)
        assert int(found_B.max()) <= 4 and pending_S.tolist() == [0, 0, 0]
    assert not kept[0][[0, 2]].any()


def test_append_text_equals_reference(machine: str) -> None:
    random = torch.Generator().manual_seed(5)
    slot_B, count_B, length_S = torch.randperm(9, generator=random)[:6], torch.tensor([0, 1, 40, 2, 0, 3]), torch.arange(9)
    text_SP, token_BA, next_BA = (torch.randint(1, 99, size, generator=random) for size in ((9, 60), (6, 40), (6, 40)))
    same_SP, same_S = text_SP.clone(), length_S.clone()
    commit.append_text(text_SP, length_S, token_BA, next_BA, count_B, slot_B)
    commit.append_text_reference(same_SP, same_S, token_BA, next_BA, count_B, slot_B)
    assert torch.equal(length_S, same_S) and torch.equal(text_SP[:, :-1], same_SP[:, :-1])  # the last place takes padding
