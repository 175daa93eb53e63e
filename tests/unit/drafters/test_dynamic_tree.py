"""Trees of every family that scores nodes: each node as if its path alone had been fed, the best of all candidates."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.drafters import families
from drafttrain.drafters.common.dynamic_tree import DynamicTree, confidence
from drafttrain.drafters.common.proposal import TreeOptions, TreeProposal
from drafttrain.drafters.common.recurrent import Recurrent
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.draft_model import DraftModel
from drafttrain.drafters.hydra import HydraBase
from drafttrain.drafters.medusa import Medusa
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.target import FINAL, Taps
from drafttrain.objective.losses import fit_tree_confidence, teacher_forced
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target

LENGTHS = (7, 3, 5)
STATIC = [[0], [1], [3], [0, 0], [0, 2], [3, 1], [0, 2, 0], [3, 1, 1], [0, 2, 0, 0]]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


DEPTH = {"medusa": "heads", "hydra": "heads"}  # what families call their draft length


def built(name: str, target: HFTarget, draft_length: int = 4, **options: Any) -> Drafter:
    torch.manual_seed(1)
    length = {"block_size": draft_length + 1} if name == "dflash" else {DEPTH.get(name, "draft_length"): draft_length}
    drafter = families()[name].build(families()[name].options(family=name, **length, **options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval().requires_grad_(False)


def committed(drafter: Drafter) -> Commit:
    generator = torch.Generator().manual_seed(2)
    token, after = torch.randint(0, 64, (2, len(LENGTHS), max(LENGTHS)), generator=generator)
    hidden = {k: torch.randn(len(LENGTHS), max(LENGTHS), 32, generator=generator) for k in drafter.taps.keys}
    return Commit(token, after, hidden, torch.tensor(LENGTHS))


@torch.inference_mode()
def proposed(drafter: Drafter, bound: int | None, depth: int | None = None) -> DraftTree:
    """One proposal after what `committed` gives; its second of two, so that the first one's scratch lies about."""
    state, slot_B = drafter.open(len(LENGTHS), 40), torch.arange(len(LENGTHS))
    state.reset(slot_B)
    commit = committed(drafter)
    first = Commit(commit.token_BA, commit.next_BA, commit.hidden, commit.count_B - 1)
    for kv in state.caches:
        kv.use_static_length(bound)
    state.observe_prompt(first, slot_B)
    state.propose(slot_B, Sampling(), depth)
    last_B1 = commit.count_B[:, None] - 1
    hidden = {k: h.gather(1, last_B1[..., None].expand(-1, -1, 32)) for k, h in commit.hidden.items()}
    state.observe(
        Commit(commit.token_BA.gather(1, last_B1), commit.next_BA.gather(1, last_B1), hidden, torch.ones(3).long()),
        slot_B,
    )
    return state.propose(slot_B, Sampling(), depth)


@torch.inference_mode()
def naive_logits(drafter: Drafter, row: int, path: list[int]) -> Tensor:
    """[V] what follows this path below a row's root: from the row and the path alone."""
    commit, last = committed(drafter), LENGTHS[row] - 1
    known = [int(commit.next_BA[row, last]), *path]
    if isinstance(drafter, Recurrent):
        return naive_recurrent(drafter, row, path)
    if isinstance(drafter, DraftModel):
        token = torch.tensor([commit.token_BA[row, : last + 1].tolist() + known])
        logits: Tensor = drafter.lm(token, None, None, torch.arange(token.shape[1])[None], Taps()).logits_BRV
        return logits[0, -1].float()
    if isinstance(drafter, DFlash):
        state, slot = drafter.open(1, 40), torch.zeros(1, dtype=torch.long)
        hidden = {k: h[row : row + 1, : last + 1] for k, h in commit.hidden.items()}
        own = (x[row : row + 1, : last + 1] for x in (commit.token_BA, commit.next_BA))
        state.observe_prompt(Commit(*own, hidden, torch.tensor([last + 1])), slot)
        return drafter.head(state.block(slot)[1][0, drafter.shape.first + len(path)]).float()
    base = commit.hidden[FINAL][row, last]
    if isinstance(drafter, Medusa):
        logits = drafter.heads[len(path)].output(drafter.heads[len(path)](base))
        return logits.float()
    assert isinstance(drafter, HydraBase)
    joined = torch.cat([base, *(drafter._target.module.embed(torch.tensor(token)) for token in known)])
    logits = drafter.hydra_lm_head[len(path)](drafter.hydra_mlp[len(path)](joined))
    return logits.float()


def naive_recurrent(drafter: Recurrent, row: int, path: list[int]) -> Tensor:
    """Fed one by one, in plain torch."""
    commit, attention, past = committed(drafter), drafter.layer.self_attn, list[tuple[Tensor, Tensor]]()
    fused = drafter.fuse({k: h[row : row + 1, : LENGTHS[row]] for k, h in commit.hidden.items()})
    state = torch.zeros(1, 1, 32)
    for t, token in enumerate(commit.next_BA[row, : LENGTHS[row]].tolist() + path):
        state = fused[:, t : t + 1] if t < LENGTHS[row] else state
        residual, read = drafter.enter(torch.tensor([[token]]), state)
        q, *own = attention.qkv(read, torch.tensor([[t]]))
        past.append((own[0], own[1]))
        keys, values = (attention.grouped(torch.cat(x, 2)) for x in zip(*past, strict=True))
        state = drafter.leave(residual, attention.out(F.scaled_dot_product_attention(q, keys, values)))
    logits = drafter.logits(state)[0, 0].float()
    if drafter.ids is None:
        return logits
    return torch.full((64,), -torch.inf).index_copy(0, drafter.ids, logits)


def likeliest(score: dict[tuple[int, ...], float], count: int) -> list[tuple[int, ...]]:
    """The first `count` paths. No other is so close that a rounding of float32 could exchange them.

    But the last one's own children may be: of equally likely ones the parent is taken.
    """
    ranked = sorted(score, key=lambda path: -score[path])
    for last, path in product(ranked[count - 1 : count], ranked[count:]):
        assert score[last] - score[path] > 1e-5 or path[: len(last)] == last, "too close: take another seed"
    return ranked[:count]


def naive_dynamic(
    drafter: Drafter, row: int, depth: int, width: int, nodes: int, temperature: float = 1.0
) -> set[tuple[int, ...]]:
    """The token paths that are kept. temperature: of the confidence."""
    beam, candidates = {(): 0.0}, {}
    for _ in range(depth):
        grown = {}
        for path, score in beam.items():
            gain_V = (naive_logits(drafter, row, list(path)) / temperature).log_softmax(-1)
            best = likeliest({(t,): gain for t, gain in enumerate(gain_V.tolist())}, width)
            grown |= {(*path, t): score + float(gain_V[t]) for (t,) in best}
        candidates |= grown
        beam = {path: grown[path] for path in likeliest(grown, width)}
    return set(likeliest(candidates, nodes))


def token_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.count_B[row])):
        paths.append((*paths[int(tree.parent_BN[row, node])], int(tree.token_BN[row, node])))
    return paths[1:]


FAMILIES = [
    ("eagle", {}),
    ("eagle3", {"target_layer_ids": [0, 1, 3]}),
    ("eagle3", {"draft_vocab": 40, "norm_output": True}),
    ("draft_model", {"blocks": 2}),
    ("medusa", {}),
    ("hydra", {"layers": 2}),
    ("dflash", {"layers": 2, "target_layer_ids": [0, 1, 3]}),
    ("dflash", {"layers": 2, "target_layer_ids": [0, 1, 3], "slots": "shifted"}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bound", [None, 40])
@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_dynamic_tree_equals_naive_beam_search(name: str, options: dict[str, Any], bound: int | None, target: HFTarget) -> None:
    drafter = built(name, target, tree="dynamic", draft_length=4, width=4, nodes=13, **options)
    tree = proposed(drafter, bound)
    assert tree.token_BN.shape == (3, 14) and drafter.proposal.max_nodes == 14 and tree.q_BNV is None
    for row in range(3):
        found = token_paths(tree, row)
        assert set(found) == naive_dynamic(drafter, row, 4, 4, 13)
        assert len({len(p) for p in found}) > 1


@pytest.mark.sampled
@pytest.mark.parametrize("bound", [None, 40])
@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_static_tree_tokens_have_ranks_of_their_paths(
    name: str, options: dict[str, Any], bound: int | None, target: HFTarget
) -> None:
    drafter = built(name, target, tree="static", draft_length=4, paths=STATIC, **options)
    tree = proposed(drafter, bound)
    for row in range(3):
        for path, tokens in zip(drafter.proposal.paths, token_paths(tree, row), strict=True):
            best = naive_logits(drafter, row, list(tokens[:-1])).topk(4).indices.tolist()
            assert len(tokens) == len(path) and tokens[-1] == best[path[-1]]


@pytest.mark.sampled
@pytest.mark.parametrize("bound", [None, 40])
@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_chain_drafts_are_argmax_after_previous_drafts(
    name: str, options: dict[str, Any], bound: int | None, target: HFTarget
) -> None:
    drafter = built(name, target, draft_length=5, tree="chain", **options)
    tree = proposed(drafter, bound)
    for row in range(3):
        tokens = list(token_paths(tree, row)[-1])
        assert [int(naive_logits(drafter, row, tokens[:i]).argmax()) for i in range(len(tokens))] == tokens


def test_dynamic_tree_with_depth_limit_equals_naive_beam_search(target: HFTarget) -> None:
    drafter = built("eagle", target, tree="dynamic", draft_length=4, width=4, nodes=13)
    for depth, count in ((1, 4), (2, 13), (99, 13)):
        tree = proposed(drafter, None, depth)
        paths = token_paths(tree, 0)
        assert len(paths) == count and max(map(len, paths)) <= depth
        assert set(paths) == naive_dynamic(drafter, 0, min(depth, 4), 4, 13)


@pytest.mark.parametrize("name", ["eagle", "hydra", "medusa", "draft_model"])
def test_dynamic_tree_confidence_temperature_equals_naive_search_of_divided_logits(name: str, target: HFTarget) -> None:
    drafter = built(name, target, tree="dynamic", draft_length=4, width=4, nodes=13)
    plain = proposed(drafter, None)
    drafter.use_decode_settings(drafter.decode_settings() | {"confidence_temperature": 0.25})
    tree = proposed(drafter, None)
    for row in range(3):
        assert set(token_paths(tree, row)) == naive_dynamic(drafter, row, 4, 4, 13, 0.25)
    drafter.use_decode_settings({"nodes": 13})  # of a checkpoint that knows of none
    assert torch.equal(proposed(drafter, None).token_BN, plain.token_BN)


def test_confidence_of_rows_with_own_temperatures_divides_by_the_greater() -> None:
    logits_BWV, rows = torch.randn(3, 2, 8), Sampling(1.0, temperature_B=torch.tensor([0.1, 0.5, 2.0]))
    divided_BWV = confidence(logits_BWV, 0.25, rows)
    assert torch.equal(divided_BWV, logits_BWV / torch.tensor([0.25, 0.5, 2.0])[:, None, None])
    assert confidence(logits_BWV, 1.0, rows) is logits_BWV
    half_BWV = logits_BWV.bfloat16()
    assert torch.equal(confidence(half_BWV, 0.125, Sampling()), half_BWV * 8)


def test_fitted_confidence_of_target_as_its_own_drafter_is_sharp_and_of_another_is_not(target: HFTarget) -> None:
    """The target as drafter always finds the likeliest token, however flat the distribution; a random drafter knows nothing."""
    token_BT = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(3))
    found = {}
    for name, options in (("draft_model", {"blocks": 4}), ("eagle", {})):
        drafter = built(name, target, tree="dynamic", draft_length=3, **options)
        if name == "draft_model":
            drafter.load_state_dict(
                families()[name].build(families()[name].options(family=name, **options), target).state_dict()
            )
        text = TrainBatch(token_BT, torch.arange(24).expand(2, -1), torch.zeros_like(token_BT), token_BT >= 0)
        fit_tree_confidence(drafter, [teacher_forced(drafter, target, Online(target, drafter.taps).fill(text))])
        found[name] = drafter.proposal.settings()["confidence_temperature"]
    assert found == {"draft_model": 0.125, "eagle": 1.0}
    chain = built("eagle", target)
    assert teacher_forced(chain, target, Online(target, chain.taps).fill(text)).loss_T is None


def test_dynamic_tree_tied_scores_keep_parent_of_every_node() -> None:
    """Drafters so sure that a child's path is as likely as its parent's, to the last bit."""
    from drafttrain.drafters.common.dynamic_tree import Scored, TreeLevel

    sure = torch.zeros(2, 1, 8)
    sure[..., 3] = 200.0

    def score(nodes: TreeLevel) -> Scored:
        return Scored(sure.expand(2, 3, 8), torch.zeros(2, 3, 4))

    tree = (
        DynamicTree(5, 3, 4)
        .grower(torch.device("cpu"))
        .grow(torch.zeros(2).long(), Scored(sure, torch.zeros(2, 1, 4)), score, None, Sampling(), None)
    )
    assert tree.parent_BN.tolist() == [[-1, 0, 1, 2, 3]] * 2 and tree.token_BN.tolist() == [[0, 3, 3, 3, 3]] * 2


def test_tree_proposal_tuning_sets_nodes_and_paths_by_tree_type(target: HFTarget) -> None:
    ranks = [torch.tensor([[0, 0, 0, 0]] * 5 + [[1, 0, 9, 9]] * 3)]
    chain = built("eagle", target)
    assert not chain.proposal.tunable and chain.decode_settings() == {} and chain.proposal.max_nodes == 5
    static = built("eagle", target, tree="static")
    assert static.proposal.tunable and static.proposal.max_nodes == 5
    static.proposal.tune(ranks, 6)
    assert static.proposal.paths == [(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert not built("eagle", target, tree="static", paths=STATIC).proposal.tunable
    dynamic = built("eagle", target, tree="dynamic", width=3)
    dynamic.proposal.tune(ranks, 6)
    assert dynamic.proposal.max_nodes == 7 and dynamic.proposal.paths == static.proposal.paths
    again = built("eagle", target, tree="dynamic", width=3)
    again.use_decode_settings(dynamic.decode_settings())
    assert again.proposal.max_nodes == 7 and again.proposal.paths == dynamic.proposal.paths
    sized = built("eagle", target, tree="dynamic", width=3, nodes=9)
    sized.proposal.tune(ranks, 6)
    assert sized.proposal.max_nodes == 10


def test_tree_proposal_invalid_tree_options_are_refused(target: HFTarget, subtests: pytest.Subtests) -> None:
    for kind, length, paths, width, nodes, message in (
        ("best_first", 4, None, 10, None, "depend on those above them"),
        ("chain", 0, None, 10, None, "set it within 1 and 255"),
        ("chain", 4, [[0]], 10, None, "set drafter.tree=static"),
        ("static", 1, [[0], [0, 0]], 10, None, "1 levels, the draft length"),
        ("static", 2, [[0, 0]], 10, None, "has no parent"),
        ("dynamic", 27, None, 10, None, "feeds 260 nodes"),
        ("dynamic", 4, None, 10, 256, "at most 255 nodes"),
        ("dynamic", 4, None, 0, None, "must be 1 or more"),
    ):
        with subtests.test(message=message), pytest.raises(UserError, match=message):
            TreeProposal(TreeOptions(kind, paths, width, nodes), length, target)


@pytest.mark.parametrize("kind", ["dynamic", "best_first"])
def test_tree_proposal_for_target_without_trees_becomes_chain(kind: str) -> None:
    target = tiny_target()
    target.trees = False
    proposal = TreeProposal(TreeOptions(kind, width=4), 4, target, independent=True)
    assert proposal.kind == "chain"
    assert proposal.grown is None
    assert not proposal.tunable
    assert proposal.paths == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
