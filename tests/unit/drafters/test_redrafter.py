"""ReDrafter against a reference written with loops: its loss, its beam search, and the prefix tree of the beams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.redrafter import FAMILY, ReDrafter, ReDrafterOptions, Search, prefix_tree, survivors
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.contract import test_families as contract
from tests.helpers import tiny_target
from tests.recorder import cpu_graphs
from tests.unit.decoding import test_graph_runner as rounds

__all__ = ["cpu_graphs"]
as_on_a_gpu = rounds.as_on_a_gpu
Beams = list[tuple[tuple[int, ...], float]]


def shaken(target: HFTarget, **options: Any) -> ReDrafter:
    drafter = ReDrafter(ReDrafterOptions(**{"steps": 3, "width": 3, "length": 3} | options), target)
    torch.manual_seed(4)
    for parameter in drafter.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return drafter


def looped_logits(target: HFTarget, drafter: ReDrafter, hidden: torch.Tensor, known: list[int]) -> torch.Tensor:
    """The law after these tokens, the root first: the recurrence, then [h; s] through the blocks."""
    state = torch.zeros_like(hidden)
    for token in known:
        embedded = target.embed(torch.tensor(token))
        state = F.silu(drafter.rnn_w.weight @ embedded + drafter.rnn_u.weight @ state + drafter.rnn_u.bias)
    x = torch.cat([hidden, state])
    *blocks, output = drafter.lm_head
    for block in blocks:
        x = x + F.silu(block.linear.weight @ x + block.linear.bias)
    return output.weight @ x


def looped_beams(target: HFTarget, drafter: ReDrafter, hidden: torch.Tensor, root: int, length: int) -> list[Beams]:
    """Of each level, the likeliest first: every continuation of every beam, sorted."""
    levels: list[Beams] = [[((), 0.0)]]
    for _ in range(length):
        grown = []
        for path, score in levels[-1]:
            log = looped_logits(target, drafter, hidden, [root, *path]).log_softmax(-1).tolist()
            grown += [((*path, token), score + log[token]) for token in range(len(log))]
        levels.append(sorted(grown, key=lambda b: -b[1])[: drafter.proposal.width])
    return levels[1:]


def proposed(drafter: ReDrafter, hidden_BH: torch.Tensor, root_B: torch.Tensor, depth: int | None = None) -> DraftTree:
    slot_B = torch.arange(len(root_B))
    state = drafter.open(len(root_B), 64)
    last = Commit(root_B[:, None], root_B[:, None], {FINAL: hidden_BH[:, None]}, torch.ones_like(root_B))
    state.observe(last, slot_B)
    with torch.no_grad():
        return state.propose(slot_B, Sampling(), depth)


def real_paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The tokens below the root on the path to each real node, in the nodes' order."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.count_B[row])):
        parent = int(tree.parent_BN[row, node])
        assert 0 <= parent < node, "parents precede children"
        found.append((*found[parent], int(tree.token_BN[row, node])))
    assert tree.parent_BN[row, 0] == -1 and (tree.parent_BN[row, int(tree.count_B[row]) :] == 0).all()
    return found[1:]


@pytest.mark.parametrize(
    ("depth", "nodes", "dropped"), [(None, None, False), (None, 4, False), (1, None, True), (2, 7, False), (None, 7, True)]
)
def test_redrafter_tree_equals_shared_prefixes_of_beams(depth: int | None, nodes: int | None, dropped: bool) -> None:
    target = tiny_target()
    drafter = shaken(target, width=4, length=4, nodes=nodes, dropped=dropped).eval()
    generator = torch.Generator().manual_seed(7)
    hidden, root = torch.randn(6, target.shape.hidden_size, generator=generator), torch.arange(6) * 9
    tree = proposed(drafter, hidden, root, depth)
    ragged = set()
    for row in range(6):
        levels = looped_beams(target, drafter, hidden[row], int(root[row]), depth or 4)
        score = {path: value for level in levels for path, value in level}
        begun = {beam[:d] for beam, _ in levels[-1] for d in range(1, len(beam) + 1)}
        wanted = [path for level in levels for path, _ in level if dropped or path in begun]
        best = sorted(wanted, key=lambda path: -score[path])[:nodes]
        assert real_paths(tree, row) == [path for path in wanted if path in best]
        ragged.add(len(best))
    assert tree.token_BN.shape[1] == 1 + min(nodes or 16, 4 * (depth or 4)) and tree.q_BNV is None
    assert len(ragged) > 1 or dropped or nodes is not None or depth == 1
    assert tree.token_BN.shape[1] <= drafter.proposal.max_nodes


def test_redrafter_survivors_mark_prefixes_of_final_beams() -> None:
    assert [x.tolist() for x in survivors([torch.tensor([[0, 0]]), torch.tensor([[1, 1]])])] == [
        [[False, True]],
        [[True, True]],
    ]


def test_redrafter_prefix_tree_puts_padding_after_real_nodes() -> None:
    """Beams `a c` and `a d`; `b`, no beam's beginning, is a candidate before them."""
    found = Search(
        torch.tensor([[9, 1, 2, 3, 4]]),
        torch.tensor([[-1, 0, 0, 1, 1]]),
        torch.tensor([[0.0, -1.0, -1.5, -1.2, -1.3]]),
        torch.tensor([[True, True, False, True, True]]),
    )
    whole, small, everything = prefix_tree(found, 5), prefix_tree(found, 3), prefix_tree(replace(found, final_BM=None), 4)
    assert whole.token_BN[0, :4].tolist() == [9, 1, 3, 4] and whole.count_B.tolist() == [4]
    assert whole.parent_BN.tolist() == [[-1, 0, 1, 1, 0]]
    assert small.token_BN.tolist() == [[9, 1, 3]] and small.count_B.tolist() == [3]
    assert everything.token_BN.tolist() == [[9, 1, 3, 4]] and everything.parent_BN.tolist() == [[-1, 0, 1, 1]]


def packed_batch(target: HFTarget) -> TrainBatch:
    generator = torch.Generator().manual_seed(5)
    token = torch.randint(0, 64, (2, 13), generator=generator)
    document = torch.tensor([[0] * 6 + [1] * 7, [0] * 8 + [-1] * 5])
    position = torch.tensor([[*range(6), *range(7)], [*range(13)]])
    mask = (torch.rand(token.shape, generator=generator) < 0.8) & (document >= 0)
    hidden = torch.randn(2, 13, target.shape.hidden_size, generator=generator)
    return TrainBatch(token, position, document, mask, {FINAL: hidden})


def test_redrafter_loss_and_gradients_equal_loop() -> None:
    target = tiny_target()
    drafter, batch = shaken(target).train(), packed_batch(target)
    total, counts = Objective(drafter, target, LossOptions("kl"))(batch)
    total.backward()
    ours = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive, made = torch.zeros(()), [0, 0, 0]
    document, hidden = batch.document_BT, batch.hidden[FINAL]
    for row in range(2):
        for t in range(13):
            for step in range(3):
                label = t + step + 2
                if label >= 13 or document[row, t] < 0 or document[row, label] != document[row, t]:
                    continue
                if not batch.mask_BT[row, label]:
                    continue
                p = target.head(hidden[row, label - 1]).softmax(-1)
                logits = looped_logits(target, drafter, hidden[row, t], batch.token_BT[row, t + 1 : label].tolist())
                naive = naive + (p * (p.log() - logits.log_softmax(-1))).sum()
                made[step] += 1
    naive.backward()
    assert counts.total.tolist() == made and min(made) > 3
    torch.testing.assert_close(total, naive, rtol=1e-5, atol=1e-4)
    for a, p in zip(ours, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-5)


def test_redrafter_predicts_draft_length_in_evaluation_and_steps_in_training() -> None:
    target = tiny_target()
    drafter, batch = shaken(target, steps=2, length=4), packed_batch(target)
    assert [p.step for p in drafter.train().predict(batch)] == [0, 1]
    assert [p.step for p in drafter.eval().predict(batch)] == [0, 1, 2, 3]


def test_redrafter_tuning_sets_node_budget_and_paths() -> None:
    target = tiny_target()
    drafter = shaken(target, width=4, length=3)
    assert len(drafter.proposal.paths) == 12 and drafter.proposal.max_nodes == 13 and drafter.proposal.tunable
    rank = torch.randint(0, 4, (200, 3), generator=torch.Generator().manual_seed(1))
    drafter.proposal.tune([rank[:120], rank[120:]], 5)
    assert len(drafter.proposal.paths) == 5 and drafter.proposal.max_nodes == 6 and drafter.proposal.beams == 4
    again = shaken(target, width=4, length=3)
    again.use_decode_settings(drafter.decode_settings())
    assert again.proposal.paths == drafter.proposal.paths and again.proposal.max_nodes == 6
    fixed = shaken(target, width=4, length=3, nodes=3)
    fixed.proposal.tune([rank], 9)
    assert fixed.proposal.max_nodes == 4 and len(fixed.proposal.paths) == 3


def test_redrafter_tuned_for_target_without_trees_drafts_chain() -> None:
    """As the trainer tunes it: ranks above 0 reach nothing, so one beam is left."""
    target = tiny_target()
    drafter = shaken(target, width=4, length=3).eval()
    target.trees = False
    with pytest.raises(UserError, match="exact for chains only"):
        Decoder(target, drafter, "greedy", Sampling())
    drafter.proposal.tune([torch.zeros(50, 3, dtype=torch.long)], 12)
    assert drafter.proposal.paths == [(0,), (0, 0), (0, 0, 0)]
    Decoder(target, drafter, "greedy", Sampling())
    tree = proposed(drafter, torch.randn(2, target.shape.hidden_size), torch.tensor([3, 4]))
    assert tree.parent_BN.tolist() == [[-1, 0, 1, 2]] * 2 and tree.count_B.tolist() == [4, 4]


def test_redrafter_fresh_head_equals_target_head() -> None:
    target = tiny_target()
    drafter, batch = ReDrafter(ReDrafterOptions(), target).eval(), packed_batch(target)
    first = next(iter(drafter.predict(batch)))
    own = target.head(batch.hidden[FINAL].flatten(0, 1)[first.source_M])
    torch.testing.assert_close(first.head(first.hidden_MH), own)
    assert set(drafter.state_dict()) == {
        "rnn_w.weight",
        "rnn_u.weight",
        "rnn_u.bias",
        *(f"lm_head.{i}.linear.{kind}" for i in range(2) for kind in ("weight", "bias")),
        "lm_head.2.weight",
    }


def test_redrafter_invalid_options_are_refused() -> None:
    target = tiny_target()
    for options, message in (
        (ReDrafterOptions(width=0), "drafter.width is 0"),
        (ReDrafterOptions(width=65), "65 beams of 4 drafts"),
        (ReDrafterOptions(length=410), "10 beams of 410 drafts"),
        (ReDrafterOptions(nodes=256), "within 1 and 255"),
    ):
        with pytest.raises(UserError, match=message):
            FAMILY.build(options, target)


CONTRACT: list[Any] = [
    contract.test_drafter_long_prompts_in_batch_output_equals_plain_decoding,
    contract.test_drafter_stop_token_inside_accepted_draft_ends_text_there,
    contract.test_drafter_coupled_output_equals_plain_sampling,
    contract.test_drafter_restored_state_proposes_same_tokens,
    pytest.param(contract.test_drafter_sampling_follows_target_distribution, marks=pytest.mark.grid),  # no q
    contract.test_drafter_overfitted_on_one_text_is_accepted_in_full,
    rounds.test_hf_target_decode_steps_ahead_of_host_equal_synchronous_steps,
    rounds.test_decode_steps_ahead_of_host_with_penalty_and_stop_text_equal_synchronous,
    rounds.test_decode_steps_ahead_of_host_with_fallback_equal_plain_decoding,
]


@pytest.fixture
def pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's drafter of this name proposes what its final beams share, and nothing else: ragged trees."""
    monkeypatch.setitem(contract.SHAPES, "redrafter", {"width": 4, "length": 3, "nodes": 9, "dropped": False})
    assert rounds.build is contract.build


@pytest.mark.slow
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_redrafter_final_beams_only_passes_family_contract(check: Callable[..., None], pruned: None) -> None:
    check("redrafter")


@pytest.mark.sampled(batch=(4,))
@pytest.mark.parametrize("batch", [1, 4])
def test_redrafter_final_beams_only_greedy_output_equals_plain_decoding(batch: int, pruned: None) -> None:
    for noise in (0.0, 1.0):
        contract.test_drafter_greedy_output_equals_plain_decoding("redrafter", noise, batch)


@pytest.mark.sampled(policy=("lossless",))
@pytest.mark.parametrize("policy", ["greedy", "lossless"])
def test_redrafter_final_beams_only_decode_step_can_be_captured(
    policy: str,
    pruned: None,
    cpu_graphs: None,
    as_on_a_gpu: rounds.FastTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds.test_decode_step_never_synchronises_and_keeps_tensor_shapes("redrafter", policy, as_on_a_gpu)
    rounds.test_captured_steps_results_equal_eager_steps("redrafter", policy, cpu_graphs, as_on_a_gpu, monkeypatch)
