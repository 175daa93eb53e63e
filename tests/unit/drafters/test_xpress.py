"""XPress's refiner against loops, its walk against Jacobi passes, and what it trains on.

Shapes: S slots, K drafts, R rank, H hidden, V vocabulary, P blocks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling, distribution
from drafttrain.drafters.xpress import FAMILY, XPress, XPressOptions
from drafttrain.model.batch import Prediction, TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.helpers import tiny_target
from tests.unit.drafters.test_dflash import packed, slot_states
from tests.unit.drafters.test_dspark import proposed, read

SMALL: dict[str, Any] = {"block_size": 5, "layers": 2, "target_layer_ids": [0, 2], "mask_token": 9, "rank": 6, "mlp_hidden": 10}


def fresh(target: HFTarget, **options: Any) -> XPress:
    torch.manual_seed(1)
    return XPress(XPressOptions(**SMALL | options), target)


def built(target: HFTarget, **options: Any) -> XPress:
    drafter = fresh(target, **options)
    for parameter in drafter.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return drafter.eval().requires_grad_(False)


def by_loops(drafter: XPress, target: HFTarget, state_SH: Tensor, before: list[int]) -> Tensor:
    """[S, V] logits of each slot. before: the token before each slot; as many as there are slots, or fewer."""
    weights = {name: x.detach() for name, x in drafter.xpress_head.state_dict().items()}
    g_R = weights["down_g.weight"] @ (sum(state_SH) / len(state_SH))
    a = []
    for slot, token in enumerate(before):
        read_X = torch.cat([weights["down_h.weight"] @ state_SH[slot], g_R, weights["w1.weight"][token]])
        a.append(weights["in_proj.weight"] @ read_X)
    rows = []
    for slot in range(len(before)):
        x_R = a[slot].clone()
        for channel in range(len(x_R)):
            for j in range(slot + 1):
                x_R[channel] += weights["mix.L"][channel, slot, j] * a[j][channel]
        gate_I, up_I = (weights[f"mlp.{name}_proj.weight"] @ x_R for name in ("gate", "up"))
        x_R = x_R + weights["mlp.down_proj.weight"] @ (gate_I * gate_I.sigmoid() * up_I)
        rows.append(target.head(state_SH[slot]) + weights["w2.weight"] @ x_R)
    return torch.stack(rows)


def jacobi(drafter: XPress, target: HFTarget, state_SH: Tensor, root: int, passes: int) -> list[list[int]]:
    """The drafts before the first pass, which the states alone give, and after each."""
    found: list[list[int]] = [target.head(state_SH[1:]).argmax(-1).tolist()]
    for _ in range(passes):
        before = [root, root, *found[-1][:-1]]
        found.append(by_loops(drafter, target, state_SH, before)[1:].argmax(-1).tolist())
    return found


def last_block(drafter: XPress, target: HFTarget) -> tuple[TrainBatch, Tensor]:
    """(a text, [S, H] the states of the block at its last token)."""
    batch = read(target, drafter)  # type: ignore[arg-type]
    return batch, slot_states(drafter, target, batch, 0, batch.token_BT.shape[1] - 2)  # type: ignore[arg-type]


def test_xpress_refiner_equals_formula() -> None:
    target = tiny_target()
    drafter = built(target)
    refiner, state_PSH = drafter.xpress_head, torch.randn(3, 5, 32)
    before_PS = torch.randint(0, 64, (3, 5))
    x_PSR = refiner.refined(refiner.read(refiner.slots(state_PSH), before_PS))
    logits_PSV = drafter.head(torch.cat([state_PSH, x_PSR], -1))
    for state_SH, before_S, logits_SV in zip(state_PSH, before_PS, logits_PSV, strict=True):
        torch.testing.assert_close(logits_SV, by_loops(drafter, target, state_SH, before_S.tolist()), rtol=1e-4, atol=1e-4)
    some_PJR = refiner.read(refiner.slots(state_PSH), before_PS)[:, :4]
    torch.testing.assert_close(refiner.refined(some_PJR, 2), x_PSR[:, 2:4])


def test_xpress_fresh_refiner_has_small_weights_and_mixes_nothing() -> None:
    refiner = fresh(tiny_target(), rank=64).xpress_head
    weights = refiner.state_dict()
    assert not weights.pop("mix.L").any()
    assert all(0.018 < float(weight.std()) < 0.022 for weight in weights.values())
    assert fresh(tiny_target(), mlp_hidden=None).xpress_head.mlp.gate_proj.weight.shape == (12, 6)


@pytest.mark.parametrize("seed", range(3))
def test_xpress_drafts_equal_fixed_point_of_jacobi_passes(seed: int) -> None:
    target = tiny_target(seed=seed)
    drafter = built(target)
    batch, state_SH = last_block(drafter, target)
    root, *drafts = proposed(drafter, batch, Sampling()).token_BN[0].tolist()  # type: ignore[arg-type]
    passes = jacobi(drafter, target, state_SH, root, 6)
    assert passes[4] == passes[5] == passes[6] == drafts
    assert all(found[:number] == drafts[:number] for number, found in enumerate(passes))
    assert passes[0] != drafts


def test_xpress_sampled_chain_carries_its_draft_distribution() -> None:
    target = tiny_target()
    drafter, sampling = built(target), Sampling(0.8, top_k=9, seed=5)
    batch, state_SH = last_block(drafter, target)
    tree = proposed(drafter, batch, sampling)  # type: ignore[arg-type]
    tokens = tree.token_BN[0].tolist()
    logits_SV = by_loops(drafter, target, state_SH, [tokens[0], *tokens[:-1]])
    assert tree.q_BNV is not None
    for k in range(4):
        torch.testing.assert_close(tree.q_BNV[0, k], distribution(logits_SV[k + 1], sampling), rtol=1e-4, atol=1e-5)
        assert float(tree.q_BNV[0, k, tokens[k + 1]]) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"tree": "static", "paths": [[0], [2], [0, 0], [0, 1], [2, 1], [0, 1, 0], [2, 1, 2], [0, 1, 0, 1]]},
        {"tree": "dynamic", "width": 3, "nodes": 14},
    ],
)
def test_xpress_tree_node_follows_logits_after_all_its_ancestors(options: dict[str, Any]) -> None:
    target = tiny_target()
    drafter = built(target, **options)
    batch, state_SH = last_block(drafter, target)
    tree = proposed(drafter, batch, Sampling())  # type: ignore[arg-type]
    tokens, parents, children = tree.token_BN[0].tolist(), tree.parent_BN[0].tolist(), dict[int, list[int]]()
    for node, parent in enumerate(parents[1:], 1):
        children.setdefault(parent, []).append(node)
    for node, below in children.items():
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        logits_V = by_loops(drafter, target, state_SH, [tokens[0], *(tokens[n] for n in path)])[-1]
        best = logits_V.topk(3).indices.tolist()
        if options["tree"] == "static":
            ranks = [drafter.proposal.paths[child - 1][-1] for child in below]
            assert [tokens[child] for child in below] == [best[rank] for rank in ranks]
        else:
            assert {tokens[child] for child in below} <= set(best)
    assert max(len(below) for below in children.values()) > 1


def labelled(prediction: Prediction) -> dict[int, int]:
    """The row of each source."""
    return {source: row for row, source in enumerate(prediction.source_M.tolist())}


def test_xpress_training_reads_true_tokens_and_previous_drafts() -> None:
    target = tiny_target()
    drafter = built(target, free_passes=2, free_weight=0.5, base_weight=0.25).train()
    batch = packed(target, drafter)  # type: ignore[arg-type]
    token_P, T = batch.token_BT.flatten(), batch.token_BT.shape[1]
    of_step: dict[int, list[Prediction]] = {}
    for prediction in drafter.predict(batch):
        of_step.setdefault(prediction.step, []).append(prediction)
    assert list(of_step) == [0, 1, 2, 3]
    for step, found in of_step.items():
        counted, base, *free = found
        assert [p.counted for p in found] == [True, False, False, False]
        weights = [float(p.weight) / float(counted.weight) for p in found]
        assert weights == pytest.approx([1.0, 0.25, 0.25, 0.25])
        assert float(counted.weight) == pytest.approx(drafter.decay[step])
        own = [p.head(p.hidden_MH) for p in found]
        for source, row in labelled(counted).items():
            line, column = divmod(source, T)
            state_SH = slot_states(drafter, target, batch, line, column)  # type: ignore[arg-type]
            root, slot = int(token_P[source + 1]), step + 1
            true = [root, *token_P[source + 1 : source + 1 + slot].tolist()]
            passes = jacobi(drafter, target, state_SH, root, 2)
            logits = [
                by_loops(drafter, target, state_SH, true)[-1],
                target.head(state_SH[slot]),
                *(by_loops(drafter, target, state_SH, [root, root, *drafts])[slot] for drafts in (p[:-1] for p in passes[:2])),
            ]
            for prediction, own_MV, logits_V in zip(found, own, logits, strict=True):
                assert int(prediction.source_M[row]) == source
                torch.testing.assert_close(own_MV[row], logits_V, rtol=1e-4, atol=1e-4)


def test_xpress_evaluation_yields_only_counted_predictions() -> None:
    target = tiny_target()
    drafter = built(target)
    batch = packed(target, drafter)  # type: ignore[arg-type]
    found = list(drafter.predict(batch))
    assert [p.step for p in found] == [0, 1, 2, 3] and all(p.counted for p in found)
    trained = [p for p in drafter.train().predict(batch) if p.counted]
    for evaluated, counted in zip(found, trained, strict=True):
        torch.testing.assert_close(counted.head(counted.hidden_MH), evaluated.head(evaluated.hidden_MH))


def test_xpress_zero_loss_weights_yield_only_counted_predictions() -> None:
    target = tiny_target()
    for options in ({"free_passes": 0, "base_weight": 0.0}, {"free_weight": 0.0, "base_weight": 0.0}):
        drafter = built(target, **options).train()
        assert all(p.counted for p in drafter.predict(packed(target, drafter)))  # type: ignore[arg-type]


class Products(TorchDispatchMode):
    """The rows that matrices of this shape, or its transpose, are multiplied with."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.rows = shape, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and tuple(args[1].shape) in (self.shape, self.shape[::-1]):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"free_passes": 1}, {"free_passes": 0}, {"base_weight": 0.0}])
@pytest.mark.parametrize("chunk", [40, 4096])
def test_xpress_training_step_runs_target_head_once_per_slot(options: dict[str, Any], chunk: int) -> None:
    """Forward, and once for the gradient, whatever the number of losses; the target's states once for each position."""
    target = tiny_target()
    drafter = fresh(target, target_layer_ids=[0, 1, 2], **options).train()  # no matrix of its own has the head's shape
    batch = packed(target, drafter)  # type: ignore[arg-type]
    predictions = [p for p in drafter.predict(batch) if p.counted]
    blocks = len(torch.cat([p.source_M for p in predictions]).unique())
    positions = len(torch.cat([p.label_M for p in predictions]).unique())
    with Products((64, 32)) as products:
        Objective(drafter, target, LossOptions(chunk=chunk))(batch)[0].backward()
    again = 3 * (len(products.rows) // 3 - 1)  # positions that a chunk may share with the one before
    assert 0 <= sum(products.rows) - (positions + 2 * 4 * blocks) <= again
    assert max(products.rows) <= chunk


def test_xpress_free_passes_carry_no_gradient_through_drafts() -> None:
    drafter = fresh(tiny_target()).train()
    state_PSH, before_PS = torch.randn(7, 5, 32, requires_grad=True), torch.randint(0, 64, (7, 5))
    first, own, *free = drafter.kinds(state_PSH, before_PS)
    assert len(free) == 3 and own.shape == first.shape == (7, 4, 64)
    read_PS = torch.cat([before_PS[:, :2], own.detach().argmax(-1)[:, :-1]], 1)
    given, again = drafter.kinds(state_PSH, read_PS)[0], free[0]
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), state_PSH) for x in (given, again)), strict=True):
        torch.testing.assert_close(a, b)


def test_xpress_invalid_options_are_refused(subtests: pytest.Subtests) -> None:
    target = tiny_target()
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"slots": "shifted"}, r"drafter\.slots is 'shifted'"),
        ({"rank": 0}, r"drafter\.rank is 0"),
        ({"mlp_hidden": 0}, r"drafter\.mlp_hidden is 0"),
        ({"free_passes": -1}, r"drafter\.free_passes is -1"),
        ({"free_weight": -0.1}, r"drafter\.free_weight is -0\.1"),
        ({"base_weight": -1.0}, r"drafter\.base_weight is -1"),
    )
    for options, says in wrong:
        with subtests.test(options=options), pytest.raises(UserError, match=says):
            FAMILY.build(XPressOptions(**SMALL | options), target)
