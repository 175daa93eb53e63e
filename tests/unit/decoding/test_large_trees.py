"""Trees of more than 64 nodes, whose ancestors take several words of bits: the same text, logits and distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.core.sampling import Sampling, distribution
from drafttrain.core.tree import DraftTree, Path, TreeShape
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.model.attention import AttentionMetadata
from drafttrain.ops import library
from drafttrain.ops.accept import lossless_accept
from drafttrain.targets.fast import FastTarget
from tests.helpers import Scripted, oracle, prompts, random_guess, tiny_model, tiny_target
from tests.unit.decoding.path_logits import check_logits_by_path

NODES = [65, 128, 256]  # root included
LARGE = [65, 256]  # one bit of a second word, and four whole words
NEW = 12
HF, FAST = tiny_target(), FastTarget(tiny_model())
TARGETS = {"hf": HF, "fast": FAST}


def paths(nodes: int, children: int = 3) -> list[Path]:
    """The first nodes of a complete tree, below which a chain goes five levels deeper."""
    found: list[Path] = [()]
    for i in range(nodes - 6):
        found.append((*found[i // children], i % children))
    for _ in range(5):
        found.append((*found[-1], 0))
    return found[1:]


def plain(asked: list[list[int]], policy: str = "greedy", sampling: Sampling | None = None) -> list[list[int]]:
    found = Decoder(HF, None, policy, sampling or Sampling(), max_new_tokens=NEW).run(asked, 2).results
    return [r.tokens for r in found]


def right_at_rank_one(texts: list[list[int]]) -> Callable[[list[int]], list[int]]:
    """A guess whose second choice is the true token, so that paths deep in the tree are accepted."""
    true, other = oracle(texts), random_guess(3)

    def guess(text: list[int]) -> list[int]:
        best = true(text)[0]
        rest = [t for t in other(text) if t != best]
        return [rest[0], best, rest[1]]

    return guess


@pytest.mark.sampled(nodes=LARGE)
@pytest.mark.parametrize("runner", TARGETS)
@pytest.mark.parametrize("nodes", NODES)
def test_large_static_tree_greedy_tokens_equal_plain_decoding(nodes: int, runner: str) -> None:
    asked = prompts(3, seed=nodes)
    wanted = plain(asked)
    drafter = Scripted(right_at_rank_one([p + t for p, t in zip(asked, wanted, strict=True)]), paths(nodes))
    for controls in (Controls(), Controls(read_every=2)):
        results = Decoder(TARGETS[runner], drafter, "greedy", Sampling(), max_new_tokens=NEW, controls=controls).run(asked, 2)
        assert [r.tokens for r in results.results] == wanted
        assert all(r.nodes == (nodes - 1) * r.verifications for r in results.results)
        assert sum(r.verifications for r in results.results) < 0.5 * sum(r.emitted for r in results.results)


DYNAMIC = [
    # family, options; the first feeds 80 nodes in all, so that the drafter's own attention has two words too
    ("eagle", {"tree": "dynamic", "draft_length": 6, "width": 16}),
    ("draft_model", {"tree": "dynamic", "draft_length": 6, "width": 16, "blocks": 2}),
    ("medusa", {"tree": "best_first", "heads": 4}),
]


def drafter_of(name: str, target: Any, **options: Any) -> Any:
    torch.manual_seed(2)
    drafter = families()[name].build(families()[name].options(**options), target)
    return drafter.eval().requires_grad_(False)


@pytest.mark.sampled(nodes=LARGE)
@pytest.mark.parametrize("runner", TARGETS)
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(("name", "options"), DYNAMIC)
def test_large_dynamic_tree_greedy_tokens_equal_plain_decoding(
    name: str, options: dict[str, Any], nodes: int, runner: str
) -> None:
    asked = prompts(3, seed=nodes)
    target = TARGETS[runner]
    drafter = drafter_of(name, target, nodes=nodes - 1, **options)
    assert drafter.proposal.max_nodes == nodes
    results = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=NEW).run(asked, 2).results
    assert [r.tokens for r in results] == plain(asked)
    assert all(r.nodes == (nodes - 1) * r.verifications for r in results)


@pytest.mark.skipif(not library.state().loaded, reason=library.state().text)
@pytest.mark.sampled(nodes=[256])
@pytest.mark.parametrize("nodes", NODES)
def test_large_tree_with_separate_append_and_attention_keeps_tokens(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append and attention apart, with ancestors as bits; the twin of the attention kernel runs here."""
    made, words = AttentionMetadata.__init__, Counter[int]()

    def apart(meta: AttentionMetadata, kv: Any, *rest: Any) -> None:
        made(meta, kv, *rest)
        meta.two_kernels, meta.compiled = kv is not None and kv.static and meta.pages is not None, False
        if meta.two_kernels:
            words[meta.bits_BNw.shape[2]] += 1

    asked = prompts(2, seed=nodes)
    wanted = plain(asked)
    monkeypatch.setattr(AttentionMetadata, "__init__", apart)
    monkeypatch.setattr(library, "has_product", lambda: False)
    target = FastTarget(tiny_model())
    drafter = drafter_of("eagle", target, tree="dynamic", draft_length=6, width=16, nodes=nodes - 1)
    decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=NEW, controls=Controls(read_every=2))
    assert [r.tokens for r in decoder.run(asked, 2).results] == wanted
    assert {2, -(-nodes // 64)} <= set(words)


@pytest.mark.sampled(nodes=LARGE)
@pytest.mark.parametrize("gradients", [False, True], ids=["compiled", "reference"])
@pytest.mark.parametrize("runner", ["hf", "fast", "mistral-sliding"])
@pytest.mark.parametrize("nodes", NODES)
def test_large_tree_node_logits_equal_path_alone(nodes: int, runner: str, gradients: bool) -> None:
    target = TARGETS[runner] if runner in TARGETS else FastTarget(tiny_model(runner))
    check_logits_by_path(target, nodes, {1, 62, 63, 64, nodes // 2, nodes - 2, nodes - 1}, gradients, seed=nodes)


@pytest.mark.sampled(nodes=[256])
@pytest.mark.parametrize("nodes", NODES)
def test_large_tree_coupled_tokens_equal_plain_sampling(nodes: int) -> None:
    asked, sampling = prompts(3, seed=2), Sampling(0.7, top_k=9, top_p=0.8, seed=4)
    wanted = plain(asked, "lossless", sampling)
    guess = right_at_rank_one([p + t for p, t in zip(asked, wanted, strict=True)])
    results = Decoder(FAST, Scripted(guess, paths(nodes)), "coupled", sampling, max_new_tokens=NEW).run(asked, 3).results
    assert [r.tokens for r in results] == wanted
    assert sum(r.verifications for r in results) < 0.5 * sum(r.emitted for r in results)


V, ROWS = 6, 20_000


@pytest.mark.parametrize("drawn", [False, True], ids=["given", "drawn"])
def test_lossless_accept_large_tree_preserves_target_distribution(drawn: bool) -> None:
    """Chi-square of the first two tokens jointly, over a complete tree of 4 children and 85 nodes."""
    shape = TreeShape.of([(*above, r) for depth in range(3) for above in _levels(4, depth) for r in range(4)])
    N, generator = len(shape.parent_N), torch.Generator().manual_seed(7)
    after = torch.randn(1 + V + V**2 + V**3, V, generator=generator) * 1.5  # the target's logits after each text
    own = (after + torch.randn(after.shape, generator=generator)).softmax(-1)  # the drafter's distribution
    with torch.inference_mode():
        token_BN, text_BN = torch.zeros(ROWS, N, dtype=torch.long), torch.zeros(ROWS, N, dtype=torch.long)
        for node in range(N):
            below = (shape.parent_N == node).nonzero()[:, 0]
            if not len(below):
                continue
            children = torch.multinomial(own[text_BN[:, node]], len(below), generator=generator)
            if not drawn:
                children = own[text_BN[:, node]].topk(len(below)).indices
            token_BN[:, below] = children
            text_BN[:, below] = text_BN[:, node, None] * V + 1 + children
        tree = DraftTree.static(token_BN, shape)
        if drawn:
            inner_BN = torch.isin(torch.arange(N), shape.parent_N).expand(ROWS, N)
            tree = DraftTree(token_BN, tree.parent_BN, tree.count_B, own[text_BN], inner_BN, tree.known_BNN)
        sampling = Sampling(1.0, seed=3, key_B=torch.arange(ROWS))
        position_BN = shape.depth_N.expand(ROWS, N)
        path_BN, count_B, bonus_B = lossless_accept(tree, after[text_BN], position_BN, sampling)
        assert count_B.max() == 4 and count_B.min() == 1
        found = _two_tokens(token_BN, path_BN, count_B, bonus_B, after)
    p_V = distribution(after.double(), sampling)
    joint = {(a, b): float(p_V[0, a] * p_V[1 + a, b]) for a in range(V) for b in range(V)}
    statistic = sum((found[k] - ROWS * p) ** 2 / (ROWS * p) for k, p in joint.items())
    tail = float(torch.special.gammaincc(torch.tensor((len(joint) - 1) / 2), torch.tensor(statistic / 2)))
    assert tail > 1e-4, f"chi-square {statistic:.1f} over {len(joint)} cells"


def _levels(children: int, depth: int) -> list[Path]:
    found: list[Path] = [()]
    for _ in range(depth):
        found = [(*path, rank) for path in found for rank in range(children)]
    return found


def _two_tokens(token_BN: Tensor, path_BN: Tensor, count_B: Tensor, bonus_B: Tensor, after: Tensor) -> Counter[Any]:
    """How often each pair of first tokens was emitted; a text of one token goes on as the target would."""
    first_B = torch.where(count_B > 1, token_BN.gather(1, path_BN[:, 1:2])[:, 0], bonus_B)
    own_B = torch.multinomial(after[1 + first_B].softmax(-1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    second_B = torch.where(count_B > 2, token_BN.gather(1, path_BN[:, 2:3])[:, 0], torch.where(count_B > 1, bonus_B, own_B))
    return Counter(zip(first_B.tolist(), second_B.tolist(), strict=True))
