"""Rounds ahead of the host: the same texts and counts as one at a time, nothing asked of the device, one shape for ever."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding import acceptance, scheduler
from drafttrain.decoding.graph_runner import WeightReads
from drafttrain.decoding.request import Request, Result, StopText
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.model.attention import AttentionMetadata
from drafttrain.model.drafter import Commit, Drafter, DraftState
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import Taps
from drafttrain.ops import library
from drafttrain.ops.build_tree import build_tree
from drafttrain.ops.residual_heads import ResidualHeads
from drafttrain.ops.tree_bits import ancestors_of
from drafttrain.targets.fast import FastTarget
from tests.contract.test_families import NAMES, build
from tests.helpers import FEW, prompts, tiny_model, tiny_target
from tests.recorder import Graph, cpu_graphs, recorded

__all__ = ["cpu_graphs"]
TARGET = FastTarget(tiny_model())
AHEAD = (None, "medusa", "eagle3", "draft_model", "suffix")  # the last has no captured steps
ASKED = (None, "medusa", "eagle3", "dspark", "cascade")
POLICIES = {name: 0.8 if policy.above_zero else 0.0 for name, policy in acceptance.POLICIES.items()}  # with its temperature


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> FastTarget:
    """A target that runs block by block: all blocks, or all heads, in one call are the CPU's alone."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    return block_by_block()


@cache
def block_by_block() -> FastTarget:
    return FastTarget(tiny_model())


def texts(decoder: Decoder, asked: list[list[int]], batch: int) -> list[tuple[Any, ...]]:
    counted = decoder.run(asked, batch).results
    return [(r.tokens, r.verifications, r.offered, r.accepted, r.nodes, r.emitted, r.ended_by) for r in counted]


@pytest.mark.sampled(name=AHEAD)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [None, *NAMES])
def test_decode_steps_ahead_of_host_equal_synchronous_steps(name: str | None, policy: str, every: int) -> None:
    """Ragged prompts in chunks, stop tokens, a queue behind three slots, rows that fill up a batch."""
    asked, sampling = prompts(7, seed=3), Sampling(POLICIES[policy], seed=4)
    drafter = None if name is None else build(name, TARGET, 0.3)
    stop = frozenset({7, 11})
    decoder = Decoder(TARGET, drafter, policy, sampling, stop, 16, prefill_chunk=6)
    ahead = Decoder(TARGET, drafter, policy, sampling, stop, 16, 6, Controls(read_every=every))
    assert texts(ahead, asked, 3) == texts(decoder, asked, 3)


@pytest.mark.sampled(name=("medusa",))
@pytest.mark.parametrize("name", NAMES)
def test_hf_target_decode_steps_ahead_of_host_equal_synchronous_steps(name: str) -> None:
    target, asked = tiny_target(), prompts(4, seed=5)
    drafter = build(name, target, 0.3)
    ways = (Controls(), Controls(read_every=2))
    one, ahead = (Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=30, controls=way) for way in ways)
    assert texts(ahead, asked, 2) == texts(one, asked, 2)


@pytest.mark.sampled(name=("medusa",))
@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_ahead_of_host_with_penalty_and_stop_text_equal_synchronous(name: str) -> None:
    asked, drafter = prompts(5, seed=6), build(name, TARGET, 0.3)
    free = Decoder(TARGET, None, "greedy", Sampling(repetition_penalty=1.3), max_new_tokens=30).run(asked, 1).results
    stop_text = StopText((f" {free[0].tokens[12]} {free[0].tokens[13]} ",), lambda ids: "".join(f" {i} " for i in ids))
    for controls in (Controls(), Controls(window=1), Controls(draft_length=1)):
        found = [
            texts(
                Decoder(
                    TARGET, drafter, "greedy", Sampling(repetition_penalty=1.3), frozenset({free[1].tokens[3]}), 30,
                    controls=replace(controls, read_every=every), min_new_tokens=9, stop_text=stop_text,
                ),
                asked,
                2,
            )
            for every in (None, 1, 4)
        ]  # fmt: skip
        assert found[0] == found[1] == found[2]


@pytest.mark.sampled(name=("medusa", "eagle3", "dspark", "draft_model"))
@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_ahead_of_host_with_fallback_equal_plain_decoding(name: str) -> None:
    drafter, controls = build(name, TARGET, 1.0), Controls(fallback=True, read_every=2)
    ahead = Decoder(TARGET, drafter, "greedy", Sampling(), max_new_tokens=90, controls=controls)
    assert [r.tokens for r in ahead.run(prompts(3, seed=7), 2).results] == plain_texts()


@cache
def plain_texts() -> list[list[int]]:
    results = Decoder(TARGET, None, "greedy", Sampling(), max_new_tokens=90).run(prompts(3, seed=7), 1).results
    return [r.tokens for r in results]


def test_decode_steps_ahead_of_host_with_pooled_pages_and_samples_equal_synchronous() -> None:
    sampling = Sampling(0.9, seed=5)
    found: list[list[list[int]]] = []
    for every in (None, 2):
        decoder = Decoder(TARGET, build("draft_model", TARGET, 0.3), "lossless", sampling, controls=Controls(read_every=every))
        session = Session(decoder, 4, 128, pages=9)
        requests = [Request(prompt, 10 * i, 20, samples=1 + i % 3) for i, prompt in enumerate(prompts(6, seed=8))]
        results: list[Result] = [r for request in requests for r in session.submit(request)]
        for _ in session:
            pass
        found.append([r.tokens for r in results])
    assert found[0] == found[1]


@pytest.mark.sampled(name=ASKED)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [None, *NAMES])
def test_decode_step_never_synchronises_and_keeps_tensor_shapes(name: str | None, policy: str, as_on_a_gpu: FastTarget) -> None:
    """So that a CUDA graph captured from one round is right for all that follow."""
    drafter: Drafter | None = None if name is None else build(name, as_on_a_gpu, 0.3)
    if drafter and not drafter.captured:
        pytest.skip("says itself that no graph can hold its rounds")
    temperature = POLICIES[policy]
    sampling = Sampling(
        temperature, top_k=20 if temperature else 0, top_p=0.9, seed=1, repetition_penalty=1.2, frequency_penalty=0.1
    )
    decoder = Decoder(
        as_on_a_gpu, drafter, policy, sampling, frozenset({3}), 60, controls=Controls(read_every=1), min_new_tokens=4
    )
    session = Session(decoder, 2, 200)
    for i, prompt in enumerate(prompts(2, seed=9)):
        session.submit(Request(prompt, i, 60, 4, frozenset({3})))
    session.step()
    session.step()
    seen = []
    with torch.inference_mode():
        for limit in (None, None, 1, 1, 0, 0, None) if drafter else (None, None):
            with recorded() as calls:
                session.decode_step.run(session.slot_B, limit)
            seen.append(calls.shapes)
    assert len(seen[0]) > 20 and seen[0] == seen[1]
    if drafter:
        assert seen[2] == seen[3] and seen[4] == seen[5] and seen[6] == seen[0]


@pytest.mark.sampled(name=(None, *FEW))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [None, *NAMES])
def test_captured_steps_results_equal_eager_steps(
    name: str | None, policy: str, cpu_graphs: None, as_on_a_gpu: FastTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sampling = prompts(7, seed=3), Sampling(POLICIES[policy], seed=4)
    drafter = None if name is None else build(name, as_on_a_gpu, 0.3)
    if drafter and not drafter.captured:
        pytest.skip("says itself that no graph can hold its rounds")
    decoder = Decoder(as_on_a_gpu, drafter, policy, sampling, frozenset({7, 11}), 16)
    ahead = Decoder(as_on_a_gpu, drafter, policy, sampling, frozenset({7, 11}), 16, controls=Controls(read_every=2))
    monkeypatch.setattr(ahead, "captures", True)
    assert texts(ahead, asked, 5) == texts(decoder, asked, 5)
    assert 1 <= Graph.made <= 4  # of 5 rows, then of 4, 2 and 1: three rows are filled up


@pytest.mark.sampled(name=("medusa",))
@pytest.mark.parametrize("name", [None, *NAMES])
def test_captured_steps_with_separate_append_and_attention_equal_eager_steps(
    name: str | None, cpu_graphs: None, as_on_a_gpu: FastTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where they are two kernels."""
    asked, made = prompts(5, seed=3), AttentionMetadata.__init__
    drafter = None if name is None else build(name, as_on_a_gpu, 0.3)
    if drafter and not drafter.captured:
        pytest.skip("says itself that no graph can hold its rounds")
    wanted = texts(Decoder(as_on_a_gpu, drafter, "greedy", Sampling(), max_new_tokens=16), asked, 3)

    def apart(step: AttentionMetadata, kv: Any, *rest: Any) -> None:
        made(step, kv, *rest)
        step.two_kernels, step.compiled = kv is not None and kv.static and step.compiled, False

    monkeypatch.setattr(AttentionMetadata, "__init__", apart)
    ahead = Decoder(as_on_a_gpu, drafter, "greedy", Sampling(), max_new_tokens=16, controls=Controls(read_every=1))
    monkeypatch.setattr(ahead, "captures", True)
    assert texts(ahead, asked, 3) == wanted


class Dynamic(Drafter):
    """Candidates two levels deep below the root, from a table of guesses; the best of them by score make each tree."""

    def __init__(self, width: int = 5, nodes: int = 8) -> None:
        super().__init__(Proposal(2, [(rank,) for rank in range(nodes - 1)]))
        self.taps, self.width, self.nodes = Taps(), width, nodes
        generator = torch.Generator().manual_seed(3)
        self.score_VW, self.token_VW = torch.randn(64, 64, generator=generator).log_softmax(-1).topk(width)
        self.token_VW[:, 1] = torch.tensor(next_tokens(TARGET))  # something is accepted now and then

    def predict(self, batch: Any) -> Any:
        raise AssertionError("not trained")

    def open(self, slots: int, max_len: int) -> DynamicState:
        return DynamicState(self, slots)


class DynamicState(DraftState):
    def __init__(self, drafter: Dynamic, slots: int) -> None:
        self.drafter, self.root_S = drafter, torch.zeros(slots, dtype=torch.long)

    def reset(self, slot_R: torch.Tensor) -> None:
        self.root_S[slot_R] = 0

    def observe(self, commit: Commit, slot_B: torch.Tensor) -> None:
        self.root_S[slot_B] = torch.where(commit.count_B > 0, commit.root_B, self.root_S[slot_B])

    def propose(self, slot_B: torch.Tensor, sampling: Sampling, depth: int | None = None) -> DraftTree:
        drafter, root_B, W = self.drafter, self.root_S[slot_B], self.drafter.width
        first_BW, second_BM = drafter.token_VW[root_B], drafter.token_VW[drafter.token_VW[root_B]].flatten(1)
        score_BW = drafter.score_VW[root_B]
        score_BM = (score_BW[..., None] + drafter.score_VW[first_BW]).flatten(1)
        parent_M = torch.cat([torch.zeros(1 + W, dtype=torch.long), 1 + torch.arange(W).repeat_interleave(W)])
        parent_M[:1].fill_(-1)
        token_BM = torch.cat([root_B[:, None], first_BW, second_BM], 1)
        built = build_tree(parent_M.expand(len(root_B), -1), torch.cat([score_BW[:, :1], score_BW, score_BM], 1), drafter.nodes)
        count_B = torch.full_like(root_B, drafter.nodes)
        return DraftTree(token_BM.gather(1, built.kept_BN), built.parent_BN, count_B, known_BNN=ancestors_of(built.bits_BNw))


def next_tokens(target: FastTarget) -> list[int]:
    """What the target says after each token alone."""
    token_B1 = torch.arange(64)[:, None]
    with torch.no_grad():
        logits = target(token_B1, None, None, torch.zeros_like(token_B1), Taps()).logits_BRV
    assert logits is not None
    return logits[:, 0].argmax(-1).tolist()


@pytest.mark.sampled(policy=["greedy", "lossless"])  # captured steps of every policy: see above
@pytest.mark.parametrize(("policy", "temperature"), POLICIES.items())
def test_captured_dynamic_tree_uses_one_graph_for_all_shapes(
    policy: str, temperature: float, cpu_graphs: None, as_on_a_gpu: FastTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sampling, drafter = prompts(3, seed=3), Sampling(temperature, seed=4), Dynamic()
    decoder = Decoder(as_on_a_gpu, drafter, policy, sampling, max_new_tokens=25)
    ahead = Decoder(as_on_a_gpu, drafter, policy, sampling, max_new_tokens=25, controls=Controls(read_every=2))
    monkeypatch.setattr(ahead, "captures", True)
    found = texts(ahead, asked, 1)
    assert found == texts(decoder, asked, 1) and Graph.made == 1
    assert (
        policy != "greedy"
        or found[0][0] == Decoder(TARGET, None, policy, sampling, max_new_tokens=25).run(asked[:1]).results[0].tokens
    )


def test_decode_costs_of_second_run_exclude_idle_time(
    as_on_a_gpu: FastTarget, cpu_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is the first run's, in which a step was launched that nobody read."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(scheduler, "perf_counter", clock)
    decoder = Decoder(as_on_a_gpu, None, "greedy", Sampling(), max_new_tokens=6, controls=Controls(read_every=1))
    decoder.captures = True
    decoder.run(prompts(1), 1)
    now[0] += 1000.0
    costs = decoder.run(prompts(1), 1).costs
    assert not costs.captures and costs.draft + costs.verify + costs.commit + costs.host < 1.0


__all__ = ["cpu_graphs"]


def size(*modules: nn.Module) -> int:
    """Bytes of all linear maps."""
    linear = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
    return sum(p.nbytes for m in linear for p in m.parameters())


@torch.inference_mode()
def test_weight_reads_counts_each_product_but_no_embedding_lookup() -> None:
    first_HH, second_VH, table_VH = torch.randn(8, 8), torch.randn(32, 8), torch.randn(32, 8)
    with WeightReads() as reads:
        x_H = F.embedding(torch.tensor([3]), table_VH)
        x_H = F.linear(x_H, first_HH)
        for _ in range(3):
            x_H = F.linear(F.linear(x_H, second_VH), second_VH[:, :8].t())
        x_H @ x_H.t()
    repeated = second_VH.nbytes
    assert reads.bytes() == first_HH.nbytes + 3 * 2 * repeated
    assert reads.bytes(cached=repeated - 1) == reads.bytes()
    assert reads.bytes(cached=repeated) == first_HH.nbytes + repeated


@pytest.mark.parametrize(("name", "passes"), [(None, 0), ("medusa", 0), ("eagle", 4)])
def test_captured_step_reads_target_weights_once_and_head_in_each_drafter_pass(
    name: str | None, passes: int, monkeypatch: pytest.MonkeyPatch, cpu_graphs: None
) -> None:
    monkeypatch.setattr(library, "has_product", lambda: False)  # blocks run one by one, as on a GPU
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # so that no weight is packed
    monkeypatch.setattr(ResidualHeads, "top", ResidualHeads.reference)
    target = FastTarget(tiny_model())
    drafter = None if name is None else build(name, target, 0.3)
    decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=6, controls=Controls(read_every=1))
    decoder.captures = True
    costs = decoder.run(prompts(1), 1).costs
    head = size(target.model.get_output_embeddings())
    own = 0 if drafter is None else size(drafter)
    expected = size(target.model) + (own if not passes else passes * (own + head))
    assert costs.steps and costs.weight_bytes == expected * costs.steps
