"""Two drafters of one target propose one tree, which changes no output and holds all that either would propose alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters.cascade import FAMILY, CascadeOptions
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, load_drafter, save_drafter
from drafttrain.drafters.common.merged import Merged, RevertibleMergedState, pieces
from drafttrain.features.online import Online
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.objective.losses import LossOptions, Objective, teacher_forced
from drafttrain.ops import join_trees as join_op
from drafttrain.ops.join_trees import join_trees
from drafttrain.targets.fast import FastTarget
from tests.contract import test_families as contract
from tests.helpers import prompts, tiny_model, watch_proposals
from tests.tiny import shake
from tests.unit.objective.test_losses import one_document

LOOKUP = {"family": "prompt_lookup", "draft_length": 9}
MEDUSA = {"family": "medusa", "heads": 3, "paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}
EAGLE3 = {"family": "eagle3", "target_layer_ids": [0, 1, 2], "draft_length": 3, "tree": "dynamic", "width": 3, "nodes": 8}
DRAFT_MODEL = {"family": "draft_model", "blocks": 3, "draft_length": 3}
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (MEDUSA, LOOKUP),
    ({"family": "eagle", "steps": 3}, MEDUSA),
    (
        {"family": "dflash", "block_size": 5, "layers": 1, "target_layer_ids": [0, 3]},
        {"family": "redrafter", "width": 3, "length": 3},
    ),
    (EAGLE3, LOOKUP),
    (DRAFT_MODEL, {"family": "hydra", "heads": 2, "layers": 1, "paths": [[0], [1], [0, 0], [1, 0]]}),
    (DRAFT_MODEL, {"family": "prompt_lookup", "draft_length": 12}),  # commits that the middle has no room for
    (MEDUSA, {"family": "cascade", "middle": DRAFT_MODEL, "inner": LOOKUP}),
    (EAGLE3, {"family": "cascade", "middle": MEDUSA, "inner": LOOKUP}),
]
names = [f"{a['family']}-{b['family']}-{b.get('draft_length', '')}" for a, b in PAIRS]
EACH = pytest.mark.parametrize(("middle", "inner"), PAIRS, ids=names)


@cache
def target() -> FastTarget:
    """The runner that is twice as fast; the contract's tests have cascades of the other one too."""
    return FastTarget(tiny_model())


def merged(middle: dict[str, Any], inner: dict[str, Any], noise: float = 0.2) -> Merged:
    torch.manual_seed(1)
    drafter = FAMILY.build(CascadeOptions(middle=middle, inner=inner, join="merge"), target())
    assert isinstance(drafter, Merged)
    shake(drafter.parameters(), noise)
    return drafter.eval()


def outputs(drafter: Drafter | None, policy: str, sampling: Sampling, every: int | None = None) -> list[list[int]]:
    asked = [p * 3 for p in prompts(5, seed=3)]  # with something to look up
    decoder = Decoder(target(), drafter, policy, sampling, frozenset({7}), 28, 16, Controls(read_every=every))
    return [r.tokens for r in decoder.run(asked, 3).results]


@cache
def plain_outputs(policy: str, sampling: Sampling) -> list[list[int]]:
    return outputs(None, policy, sampling)


@pytest.mark.sampled(middle=(EAGLE3, DRAFT_MODEL))
@pytest.mark.parametrize("every", [None, 2])
@EACH
def test_merged_tree_greedy_output_equals_plain_decoding(
    middle: dict[str, Any], inner: dict[str, Any], every: int | None
) -> None:
    assert outputs(merged(middle, inner), "greedy", Sampling(), every) == plain_outputs("greedy", Sampling())


@pytest.mark.sampled(middle=(MEDUSA,))
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@EACH
def test_merged_tree_coupled_output_equals_plain_sampling(
    middle: dict[str, Any], inner: dict[str, Any], temperature: float
) -> None:
    sampling = Sampling(temperature, seed=3)
    assert outputs(merged(middle, inner), "coupled", sampling) == plain_outputs("lossless", sampling)


CHECKS = [  # of a state that is two: what it proposes, and what it takes back
    contract.test_drafter_proposal_has_distribution_only_if_sampled,
    contract.test_drafter_depth_limit_cuts_same_draft_tree,
    contract.test_drafter_restored_state_proposes_same_tokens,
]
MORE = [
    contract.test_drafter_long_prompts_in_batch_output_equals_plain_decoding,
    contract.test_drafter_stop_token_inside_accepted_draft_ends_text_there,
    contract.test_drafter_training_predictions_equal_draft_tokens,
    contract.test_drafter_predictions_ignore_states_of_other_target_layers,
    contract.test_drafter_overfitted_on_one_text_is_accepted_in_full,
]


@pytest.mark.parametrize(
    "check", [*CHECKS, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=lambda check: check.__name__
)
def test_merged_drafter_passes_family_contract(check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.SHAPES, "cascade", {"middle": MEDUSA, "inner": LOOKUP | {"draft_length": 3}})
    check("cascade")


@pytest.mark.slow
@pytest.mark.sampled(middle=(MEDUSA,))  # no tree of two carries a distribution: the verifier alone decides
@EACH
def test_merged_tree_sampling_follows_target_distribution(middle: dict[str, Any], inner: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "build", lambda *_: merged(middle, inner))
        contract.test_drafter_sampling_follows_target_distribution("cascade")


@pytest.mark.sampled
@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=4)], ids=["greedy", "sampled"])
@EACH
def test_merged_tree_holds_all_paths_of_both_drafters(
    middle: dict[str, Any], inner: dict[str, Any], sampling: Sampling, every: int | None
) -> None:
    drafter = merged(middle, inner)
    policy = "greedy" if sampling.greedy else "lossless"
    session = Session(Decoder(target(), drafter, policy, sampling, controls=Controls(read_every=every)), 3, 300)
    for i, prompt in enumerate(prompts(3, seed=7)):
        session.submit(Request(prompt * 3, i, 40))
    for _ in range(4):
        session.step()
    slot_B = session.slot_B
    with torch.inference_mode():
        state, alone = session.state, replace(sampling, draft_temperature=0.0)
        assert isinstance(state, RevertibleMergedState)
        before = state.snapshot(slot_B)
        tree = state.propose(slot_B, sampling)
        assert tree.q_BNV is None
        state.restore(slot_B, before)
        parts = [own.propose(slot_B, alone) for _, own in state.parts]
    for row, found in enumerate(token_paths(tree)):
        assert set(found) == set(token_paths(parts[0])[row]) | set(token_paths(parts[1])[row])
        assert len(found) == len(set(found)) <= drafter.proposal.max_nodes


@pytest.mark.parametrize("every", [None, 1])
def test_merged_drafter_commit_longer_than_draft_length_reaches_middle(every: int | None) -> None:
    """Beside an inner that is the target itself, all of whose drafts are accepted, the middle goes on drafting what its
    model gives after the whole text."""
    exact = {"family": "draft_model", "blocks": target().shape.blocks, "draft_length": 12}
    drafter = merged(DRAFT_MODEL, exact, noise=0.0)
    middle = drafter.middle
    seen = watch_proposals(middle)
    prompt = prompts(1, seed=7)[0]
    decoder = Decoder(target(), drafter, "greedy", Sampling(), frozenset(), 60, controls=Controls(read_every=every))
    result = decoder.run([prompt], 1).results[0]
    assert result.verifications == 5 <= len(seen)
    for round in range(5):
        text = [*prompt, *result.tokens[: 1 + 13 * round]]
        for token in seen[round].token_BN[0, 1:].tolist():
            with torch.no_grad():
                assert token == int(middle.lm.model(torch.tensor([text])).logits[0, -1].argmax())  # type: ignore[union-attr,operator]
            text.append(token)


def token_paths(tree: DraftTree) -> list[list[tuple[int, ...]]]:
    """Each row's nodes as the tokens from the root, padding left out."""
    rows = []
    for tokens, parents, count in zip(tree.token_BN.tolist(), tree.parent_BN.tolist(), tree.count_B.tolist(), strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in list(zip(tokens, parents, strict=True))[:count]:
            assert parent < len(paths), "parents precede their children"
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows


def random_tree(rows: int, nodes: int, roots: list[int], tokens: int, seed: int) -> DraftTree:
    """Ragged, no siblings of one token, rubbish in the padding; few tokens, so that two of them have much in common."""
    rng = torch.Generator().manual_seed(seed)

    def below(most: int) -> int:
        return int(torch.randint(most, (1,), generator=rng))

    token_BN = torch.randint(tokens, (rows, nodes), generator=rng)
    parent_BN, count_B = torch.zeros_like(token_BN), torch.zeros(rows, dtype=torch.long)
    for row in range(rows):
        held = {(roots[row],): 0}
        for _ in range(below(nodes)):
            above = list(held)[below(len(held)) if below(3) else -1]
            path = (*above, below(tokens))
            if path not in held:
                token_BN[row, len(held)], parent_BN[row, len(held)] = path[-1], held[above]
                held[path] = len(held)
        token_BN[row, 0], parent_BN[row, 0], count_B[row] = roots[row], -1, len(held)
    return DraftTree(token_BN, parent_BN, count_B)


def test_join_trees_equals_union_of_token_paths() -> None:
    shared = 0
    for seed in range(117):  # each pair of the sizes
        N, M = 1 + seed % 13, 1 + seed % 9
        roots = [seed % 3, 1, 2]
        first, second = (random_tree(3, n, roots, 3, 2 * seed + i) for i, n in enumerate((N, M)))
        with torch.inference_mode():
            tree, twin = join_trees(first, second), join_op.reference(first, second)
        assert tree.token_BN.shape == tree.parent_BN.shape == (3, N + M - 1)
        assert token_paths(tree) == token_paths(twin)
        assert torch.equal(tree.parent_BN, twin.parent_BN) and torch.equal(tree.ancestor_BNN, twin.ancestor_BNN)
        for found, ours, theirs in zip(*map(token_paths, (tree, first, second)), strict=True):
            assert found == [*ours, *(path for path in theirs if path not in ours)]
            shared += len(ours) + len(theirs) - 1 - len(found)
        padding_BX = torch.arange(N + M - 1) >= tree.count_B[:, None]
        assert bool((tree.parent_BN[padding_BX] == 0).all())
    assert shared > 117, "the trees must have much in common"


def test_join_trees_small_example_gives_expected_nodes() -> None:
    one = DraftTree(torch.tensor([[9, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([4]))
    tree = join_trees(one, DraftTree.chain(torch.tensor([[9, 2, 4]])))
    assert tree.token_BN.tolist() == [[9, 1, 2, 3, 4, 0]]
    assert tree.parent_BN.tolist() == [[-1, 0, 0, 1, 2, 0]] and tree.count_B.tolist() == [5]


def test_pieces_split_long_commit_in_order() -> None:
    token_BA = torch.arange(18).view(2, 9)
    whole = Commit(token_BA, token_BA + 1, {0: torch.randn(2, 9, 4)}, torch.tensor([5, 9]))
    parts = pieces(whole, 3)
    assert [p.token_BA.shape[1] for p in parts] == [4, 3, 2]
    assert [p.count_B.tolist() for p in parts] == [[4, 4], [1, 3], [0, 2]]
    assert torch.equal(torch.cat([p.next_BA for p in parts], 1), whole.next_BA)
    assert torch.equal(torch.cat([p.hidden[0] for p in parts], 1), whole.hidden[0])


def test_merged_drafter_trains_both_and_counts_middle() -> None:
    text = one_document(torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0)))
    drafter = merged(*PAIRS[1])
    filled = Online(target(), drafter.taps).fill(text)
    losses = [Objective(part.train(), target(), LossOptions())(filled) for part in drafter.parts.values()]
    loss, figures = Objective(drafter.train(), target(), LossOptions())(filled)
    torch.testing.assert_close(loss, losses[0][0] + losses[1][0])
    assert torch.equal(figures.packed(), losses[0][1].packed())
    loss.backward()
    assert all(p.grad is not None for part in drafter.parts.values() for p in part.parameters() if p.requires_grad)


@pytest.mark.parametrize(("middle", "inner"), [(MEDUSA, LOOKUP), (LOOKUP, MEDUSA)], ids=["learner-middle", "learner-inner"])
def test_merged_drafter_with_longer_lookup_keeps_ranks_and_loss(middle: dict[str, Any], inner: dict[str, Any]) -> None:
    """Held-out ranks, the searched tree and the training's figures speak of as many depths as the learner predicts."""
    drafter = merged(middle, inner)
    learner = drafter.lead
    text = one_document(torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0)))
    filled = Online(target(), drafter.taps).fill(text)
    assert (
        drafter.draft_length == 9
        and drafter.proposal.predicted_depths == 3
        and drafter.proposal.paths == learner.proposal.paths
    )
    ours, alone = (teacher_forced(d, target(), filled) for d in (drafter, learner))
    assert len(alone.rank_MK) > 20 and torch.equal(ours.rank_MK, alone.rank_MK)
    for name in ("ce", "e2e_tv"):
        torch.testing.assert_close(*(Objective(d, target(), LossOptions(name=name))(filled)[0] for d in (drafter, learner)))


def test_merged_drafter_fits_confidence_of_its_lead_alone() -> None:
    grown = {"family": "medusa", "heads": 3, "tree": "dynamic", "width": 4}
    drafter = merged(grown, {"family": "prompt_lookup"})
    assert drafter.proposal.grows and not merged(MEDUSA, LOOKUP).proposal.grows
    drafter.proposal.fit_confidence(torch.tensor([4.0, 3.0, 2.0, 5.0]))
    assert drafter.decode_settings()["middle"]["confidence_temperature"] == 0.25


def test_merged_drafter_tuned_tree_fits_with_other_drafter() -> None:
    drafter = merged({"family": "medusa", "heads": 3}, {"family": "prompt_lookup", "draft_length": 242})
    texts = [torch.randint(0, 4, (200, 3), generator=torch.Generator().manual_seed(0))]
    drafter.proposal.tune(texts, 40)
    assert len(drafter.proposal.paths) == 13 and drafter.proposal.max_nodes == 256
    assert drafter.decode_settings() == {"middle": drafter.middle.decode_settings(), "inner": {}}


def test_merged_drafter_too_many_nodes_or_target_without_trees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"middle proposes up to 200 nodes, .* 60; a tree of both holds 255"):
        merged({"family": "prompt_lookup", "draft_length": 200}, {"family": "prompt_lookup", "draft_length": 60})
    monkeypatch.setattr(target(), "trees", False)
    with pytest.raises(UserError, match="join=merge proposes trees; this target's architecture is exact for chains only"):
        merged(MEDUSA, LOOKUP)


def test_merged_drafter_reloaded_drafts_same_tokens(tmp_path: Any) -> None:
    middle, inner = {"family": "medusa", "heads": 3}, LOOKUP
    drafter, shape = merged(middle, inner), target().shape
    drafter.proposal.tune([torch.randint(0, 4, (200, 3), generator=torch.Generator().manual_seed(0))], 8)
    record = TargetRecord("hf", "x", None, "float32", shape.vocab_size, shape.hidden_size, shape.blocks, target().fingerprint)
    options = {"family": "cascade", "middle": middle, "inner": inner, "join": "auto"}
    save_drafter(tmp_path, drafter.state_dict(), CheckpointMeta("cascade", options, drafter.decode_settings(), record, 3))
    again = load_drafter(tmp_path, target())[0]
    assert isinstance(again, Merged) and again.proposal.paths == drafter.proposal.paths
    assert outputs(again, "greedy", Sampling()) == outputs(drafter, "greedy", Sampling())
