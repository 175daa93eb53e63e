"""Domino's recurrent state, corrections and schedule against their definitions, slot by slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling, distribution
from drafttrain.drafters.domino import FAMILY, Domino, DominoOptions, PrefixGRU
from drafttrain.model.target import Target
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dflash import slot_states
from tests.unit.drafters.test_dspark import proposed, read

STATE = 12


def built(target: HFTarget, **options: Any) -> Domino:
    torch.manual_seed(1)
    own = {"block_size": 4, "layers": 2, "target_layer_ids": [0, 2], "rank": 8, "state": STATE}
    drafter = Domino(DominoOptions(**own | options), target)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval().requires_grad_(False)


def test_prefix_gru_equals_torch_gru() -> None:
    torch.manual_seed(0)
    own, theirs = PrefixGRU(6, 5), torch.nn.GRU(6, 5, bias=False, batch_first=True)
    theirs.load_state_dict(own.state_dict())
    read_BLH, state_BG = torch.randn(3, 4, 6), torch.randn(3, 5)
    torch.testing.assert_close(own(read_BLH, state_BG), theirs(read_BLH, state_BG[None])[0])


def draft_logits(drafter: Domino, target: Target, state_H: torch.Tensor, above: list[int]) -> torch.Tensor:
    """Of the draft below the tokens `above`, the root first."""
    gru = torch.nn.GRU(32, STATE, bias=False)
    gru.load_state_dict(drafter.prefix_gru.state_dict())
    recurrent_G = gru(target.embed(torch.tensor(above)))[1][0]
    logits_V = target.head(state_H)
    return logits_V if len(above) == 1 else logits_V + drafter.embed_proj(torch.cat([state_H, recurrent_G]))


@pytest.mark.sampled
@pytest.mark.parametrize("slots", ["shifted", "in_place"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_domino_drafts_follow_logits_corrected_by_all_previous_tokens(slots: str, temperature: float) -> None:
    target = tiny_target()
    drafter = built(target, slots=slots)
    batch, sampling = read(target, drafter), Sampling(temperature, top_k=9, seed=5)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, sampling)  # type: ignore[arg-type]
    states = slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2)  # type: ignore[arg-type]
    tokens = tree.token_BN[0].tolist()
    assert len(tokens) == drafter.draft_length + 1
    for k in range(drafter.draft_length):
        logits_V = draft_logits(drafter, target, states[drafter.shape.first + k], tokens[: k + 1])
        if tree.q_BNV is None:
            assert tokens[k + 1] == int(logits_V.argmax())
        else:
            torch.testing.assert_close(tree.q_BNV[0, k], distribution(logits_V, sampling), rtol=1e-4, atol=1e-5)


def test_domino_static_tree_node_uses_gru_state_of_its_path() -> None:
    """Of a static tree with two branches: each node is the argmax, or the second choice, below its own ancestors."""
    target = tiny_target()
    paths = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0]]
    drafter = built(target, tree="static", paths=paths)
    batch = read(target, drafter)  # type: ignore[arg-type]
    tree = proposed(drafter, batch, Sampling())  # type: ignore[arg-type]
    states = slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2)  # type: ignore[arg-type]
    tokens, parents = tree.token_BN[0].tolist(), tree.parent_BN[0].tolist()
    seen = set()
    for node in range(1, len(tokens)):
        above, at = [], parents[node]
        while at >= 0:
            above, at = [tokens[at], *above], parents[at]
        choices = draft_logits(drafter, target, states[len(above)], above).topk(2).indices.tolist()
        assert tokens[node] in choices
        seen.add((tuple(above), tokens[node]))
    assert len(seen) == len(paths)


def test_domino_loss_weights_move_from_base_to_corrected_logits() -> None:
    target = tiny_target()
    drafter = built(target, base_share=0.8, base_until=0.5).train()
    batch = read(target, drafter)  # type: ignore[arg-type]
    for progress, share in ((0.0, 0.8), (0.25, 0.4), (0.5, 0.0), (1.0, 0.0)):
        predictions = list(drafter.predict(replace(batch, progress=progress)))
        whole = {p.step: p.weight for p in drafter.predict(replace(batch, progress=1.0))}
        for prediction in predictions:
            wanted = 1.0 if prediction.step == 0 else 1.0 - share if prediction.counted else share
            assert prediction.weight == pytest.approx(wanted * whole[prediction.step])
        assert sum(not p.counted for p in predictions) == (2 if share else 0), "the first draft has nothing to be corrected"
    assert all(p.counted for p in drafter.eval().predict(replace(batch, progress=0.0)))


def test_domino_training_gives_gradients_to_every_parameter() -> None:
    from drafttrain.objective.losses import LossOptions, Objective

    target = tiny_target()
    drafter = built(target).train().requires_grad_(True)
    objective = Objective(drafter, target, LossOptions("ce"))
    objective(read(target, drafter), progress=0.5)[0].backward()  # type: ignore[arg-type]
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in drafter.parameters())


def test_domino_invalid_options_are_refused() -> None:
    target = tiny_target()
    for name, value in {"rank": 0, "state": 0, "base_share": 1.5, "base_until": 0.0}.items():
        with pytest.raises(UserError, match=rf"drafter\.{name}"):
            FAMILY.build(DominoOptions(**{name: value}), target)
