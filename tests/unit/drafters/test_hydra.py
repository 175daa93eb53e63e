"""Hydra against a reference written with loops; Hydra++ through the checks that every family passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.drafters.hydra import FAMILY, HydraBase, HydraOptions, HydraPlus, build
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit, Drafter
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.hf import HFTarget
from tests.contract import test_families as contract
from tests.helpers import tiny_target
from tests.recorder import cpu_graphs
from tests.unit.decoding import test_graph_runner as rounds

__all__ = ["cpu_graphs"]
TREE = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 1]]
FORMS = pytest.mark.parametrize("prefix", [False, True])
as_on_a_gpu = rounds.as_on_a_gpu


def shaken(target: HFTarget, prefix: bool, **options: Any) -> HydraBase:
    drafter = build(HydraOptions(**{"heads": 3, "layers": 2, "paths": TREE, "prefix_layer": prefix} | options), target)
    torch.manual_seed(4)
    for parameter in drafter.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    assert isinstance(drafter, HydraBase)
    return drafter


def packed_batch(target: HFTarget, drafter: Drafter) -> TrainBatch:
    """A row of two documents and a padded one, some tokens unsupervised; each document's states are its own."""
    generator = torch.Generator().manual_seed(5)
    token = torch.randint(0, 64, (2, 13), generator=generator)
    document = torch.tensor([[0] * 6 + [1] * 7, [0] * 8 + [-1] * 5])
    position = torch.tensor([[*range(6), *range(7)], [*range(13)]])
    mask = (torch.rand(token.shape, generator=generator) < 0.8) & (document >= 0)
    hidden = torch.zeros(2, 13, target.shape.hidden_size)
    for row, start, stop in ((0, 0, 6), (0, 6, 13), (1, 0, 8)):
        part = token[row : row + 1, start:stop]
        ones = torch.ones_like(part, dtype=torch.bool)
        alone = TrainBatch(part, torch.arange(stop - start)[None], torch.zeros_like(part), ones)
        hidden[row, start:stop] = Online(target, drafter.taps).fill(alone).hidden[FINAL][0]
    return TrainBatch(token, position, document, mask, {FINAL: hidden})


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half))
        out[..., i] = x[..., i] * angle.cos() - x[..., half + i] * angle.sin()
        out[..., half + i] = x[..., half + i] * angle.cos() + x[..., i] * angle.sin()
    return out


def looped_prefix(drafter: HydraPlus, states: list[torch.Tensor]) -> torch.Tensor:
    """The last state of one document through the prefix layer, one head and one key at a time."""
    layer, attention = drafter.prefix, drafter.prefix.self_attn
    shape, D = attention.shape, attention.shape.head_dim
    normed = [layer.input_layernorm(h) for h in states]
    last, mixed = len(states) - 1, []
    for head in range(shape.heads):
        group = head // (shape.heads // shape.kv_heads)
        q = rotated((attention.q_proj.weight @ normed[last])[head * D : (head + 1) * D], last, shape.rope_theta)
        keys = [(attention.k_proj.weight @ x)[group * D : (group + 1) * D] for x in normed]
        score = torch.stack([q @ rotated(k, i, shape.rope_theta) / D**0.5 for i, k in enumerate(keys)])
        values = torch.stack([(attention.v_proj.weight @ x)[group * D : (group + 1) * D] for x in normed])
        mixed.append(score.softmax(0) @ values)
    x = states[last] + attention.o_proj.weight @ torch.cat(mixed)
    inner = layer.post_attention_layernorm(x)
    mlp = layer.mlp
    x = x + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ inner) * (mlp.up_proj.weight @ inner))
    return layer.norm(x)


def looped_logits(target: HFTarget, drafter: HydraBase, base: torch.Tensor, known: list[int]) -> torch.Tensor:
    """The law after these tokens below a base state: head len(known) - 1 on [base; embeddings]."""
    k = len(known) - 1
    x = torch.cat([base, *(target.embed(torch.tensor(token)) for token in known)])
    first, *rest = drafter.hydra_mlp[k]
    x = first.res_connection.weight @ x + first.res_connection.bias + F.silu(first.linear.weight @ x + first.linear.bias)
    for block in rest:
        x = x + F.silu(block.linear.weight @ x + block.linear.bias)
    return drafter.hydra_lm_head[k].weight @ x + drafter.hydra_lm_head[k].bias


@FORMS
def test_hydra_loss_and_gradients_equal_loop(prefix: bool) -> None:
    target = tiny_target()
    drafter = shaken(target, prefix, head_decay=0.7).train()
    batch = packed_batch(target, drafter)
    total, counts = Objective(drafter, target, LossOptions("kl"))(batch)
    total.backward()
    ours = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    naive, made = torch.zeros(()), [0, 0, 0]
    document, hidden = batch.document_BT, batch.hidden[FINAL]
    for row in range(2):
        for t in range(13):
            for k in range(3):
                label = t + k + 2
                if label >= 13 or document[row, t] < 0 or document[row, label] != document[row, t]:
                    continue
                if not batch.mask_BT[row, label]:
                    continue
                start = next(i for i in range(13) if document[row, i] == document[row, t])
                states = list(hidden[row, start : t + 1])
                base = looped_prefix(drafter, states) if isinstance(drafter, HydraPlus) else states[-1]
                known = batch.token_BT[row, t + 1 : label].tolist()
                p = target.head(hidden[row, label - 1]).softmax(-1)
                log_q = looped_logits(target, drafter, base, known).log_softmax(-1)
                naive = naive + 0.7 ** (k + 1) * (p * (p.log() - log_q)).sum()
                made[k] += 1
    naive.backward()
    assert counts.total.tolist() == made and min(made) > 3
    torch.testing.assert_close(total, naive, rtol=1e-5, atol=1e-4)
    for a, p in zip(ours, drafter.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-5)


@FORMS
def test_hydra_static_tree_node_has_head_rank_after_its_path(prefix: bool) -> None:
    """Each node's token is its head's choice of that rank after the tokens on its path; rows of different lengths."""
    target = tiny_target()
    drafter = shaken(target, prefix).eval()
    state, slot_B, H = drafter.open(2, 64), torch.arange(2), target.shape.hidden_size
    generator = torch.Generator().manual_seed(6)
    token, hidden = torch.randint(0, 64, (2, 6), generator=generator), torch.randn(2, 6, H, generator=generator)
    count = torch.tensor([5, 3])
    with torch.no_grad():
        state.reset(slot_B)
        state.observe_prompt(Commit(token[:, :3], token[:, 1:4], {FINAL: hidden[:, :3]}, torch.tensor([3, 1])), slot_B)
        shifted = torch.stack([hidden[0, 3:5], hidden[1, 1:3]])
        after = torch.stack([token[0, 4:6], token[1, 2:4]])
        state.observe(Commit(after, after, {FINAL: shifted}, torch.tensor([2, 2])), slot_B)
        tree = state.propose(slot_B, Sampling())
        paths = sorted(map(tuple, TREE), key=lambda p: (len(p), p))
        for row in range(2):
            states = list(hidden[row, : count[row]])
            base = looped_prefix(drafter, states) if isinstance(drafter, HydraPlus) else states[-1]
            tokens = {(): int(token[row, count[row]])}
            for node, path in enumerate(paths, start=1):
                known = [tokens[path[:i]] for i in range(len(path))]
                tokens[path] = int(looped_logits(target, drafter, base, known).topk(3).indices[path[-1]])
                assert int(tree.token_BN[row, node]) == tokens[path]
                assert int(tree.parent_BN[row, node]) == ((), *paths).index(path[:-1])


@FORMS
def test_hydra_fresh_head_equals_target_head(prefix: bool) -> None:
    target = tiny_target()
    drafter = build(HydraOptions(heads=2, prefix_layer=prefix), target).eval()
    assert isinstance(drafter, HydraBase)
    batch = packed_batch(target, drafter)
    base = drafter.base(batch).flatten(0, 1)
    for prediction in drafter.predict(batch):
        assert torch.equal(prediction.hidden_MH, base[prediction.source_M])
        torch.testing.assert_close(prediction.head(prediction.hidden_MH), target.head(prediction.hidden_MH))


def test_hydra_invalid_options_are_refused() -> None:
    target = tiny_target()
    for options, message in (
        (HydraOptions(heads=0), "drafter.heads is 0; set it to 1 or more"),
        (HydraOptions(heads=511), "a context of 512 allows 510"),
        (HydraOptions(heads=1, paths=[[0], [0, 0]]), "1 levels"),
    ):
        with pytest.raises(UserError, match=message):
            FAMILY.build(options, target)


CONTRACT: list[Any] = [
    contract.test_drafter_long_prompts_in_batch_output_equals_plain_decoding,
    contract.test_drafter_stop_token_inside_accepted_draft_ends_text_there,
    contract.test_drafter_training_predictions_equal_draft_tokens,
    contract.test_drafter_coupled_output_equals_plain_sampling,
    contract.test_drafter_restored_state_proposes_same_tokens,
    contract.test_drafter_depth_limit_cuts_same_draft_tree,
    contract.test_drafter_predictions_ignore_states_of_other_target_layers,
    pytest.param(contract.test_drafter_sampling_follows_target_distribution, marks=pytest.mark.grid),  # no q
    contract.test_drafter_overfitted_on_one_text_is_accepted_in_full,
    rounds.test_hf_target_decode_steps_ahead_of_host_equal_synchronous_steps,
    rounds.test_decode_steps_ahead_of_host_with_penalty_and_stop_text_equal_synchronous,
    rounds.test_decode_steps_ahead_of_host_with_fallback_equal_plain_decoding,
]


@pytest.fixture
def prefixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's drafter of this name is Hydra++."""
    monkeypatch.setitem(contract.SHAPES, "hydra", contract.SHAPES["hydra"] | {"prefix_layer": True})
    assert rounds.build is contract.build and isinstance(contract.build("hydra", tiny_target()), HydraPlus)


@pytest.mark.slow
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_hydra_prefix_layer_passes_family_contract(check: Callable[..., None], prefixed: None) -> None:
    check("hydra")


@pytest.mark.sampled(batch=(4,))
@pytest.mark.parametrize("batch", [1, 4])
def test_hydra_prefix_layer_greedy_output_equals_plain_decoding(batch: int, prefixed: None) -> None:
    for noise in (0.0, 1.0):
        contract.test_drafter_greedy_output_equals_plain_decoding("hydra", noise, batch)


def test_hydra_prefix_layer_reloaded_drafts_same_tokens(tmp_path: Any, prefixed: None) -> None:
    contract.test_drafter_reloaded_checkpoint_drafts_same_tokens("hydra", tmp_path)


@pytest.mark.sampled(policy=("lossless",))
@pytest.mark.parametrize("policy", ["greedy", "lossless"])
def test_hydra_prefix_layer_decode_step_can_be_captured(
    policy: str,
    prefixed: None,
    cpu_graphs: None,
    as_on_a_gpu: rounds.FastTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds.test_decode_step_never_synchronises_and_keeps_tensor_shapes("hydra", policy, as_on_a_gpu)
    rounds.test_captured_steps_results_equal_eager_steps("hydra", policy, cpu_graphs, as_on_a_gpu, monkeypatch)
