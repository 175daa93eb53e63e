"""A cascade drafts what its middle would draft alone, with fewer of the middle's passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from drafttrain.cli.config import register
from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling, distribution
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters.cascade import FAMILY, Cascade, CascadeOptions
from drafttrain.drafters.draft_model import DraftModel, DraftModelOptions
from drafttrain.drafters.prompt_lookup import PromptLookup
from drafttrain.features.online import Online
from drafttrain.model.drafter import Drafter, DraftState, FrozenRef
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.ops import library
from drafttrain.targets.fast import FastTarget
from tests.cases import with_grid
from tests.contract import test_families as contract
from tests.helpers import prompts, tiny_model
from tests.recorder import Graph, cpu_graphs
from tests.tiny import shake
from tests.unit.objective.test_losses import one_document

__all__ = ["cpu_graphs"]
MIDDLE = {"family": "draft_model", "blocks": 3, "draft_length": 6}
LOOKUP = {"family": "prompt_lookup", "draft_length": 4}
INNERS: list[dict[str, Any]] = [
    LOOKUP,
    {"family": "prompt_lookup", "max_ngram": None, "draft_length": 12},
    {"family": "medusa", "heads": 3, "paths": [[0], [1], [0, 0], [0, 1]]},
    {"family": "eagle3", "target_layer_ids": [0, 1, 2], "draft_length": 2},
    {"family": "draft_model", "blocks": 1, "draft_length": 1},
    {"family": "cascade", "middle": {"family": "draft_model", "blocks": 2, "draft_length": 3}, "inner": LOOKUP},
    {"family": "cascade", "middle": {"family": "medusa", "heads": 2}, "inner": LOOKUP, "join": "merge"},
]
OFTEN = [INNERS[i] for i in (0, 3, 6)]  # in make test: without weights of its own, with them, and one that merges
names = [i["family"] + ("-null" if "max_ngram" in i else "") + ("-merge" if "join" in i else "") for i in INNERS]


@cache
def target() -> FastTarget:
    """The runner that is twice as fast; the contract's tests have cascades of the other one too."""
    return FastTarget(tiny_model())


def shaken(drafter: Drafter) -> Any:
    torch.manual_seed(1)
    shake(drafter.parameters(), 0.2)
    return drafter.eval()


def pair(inner: dict[str, Any]) -> tuple[Cascade, DraftModel]:
    """A cascade, and its middle as a drafter of its own."""
    cascade = shaken(FAMILY.build(CascadeOptions(middle=MIDDLE, inner=inner), target()))
    return cascade, cascade.middle


def counts(drafter: Drafter, every: int | None = None, batch: int = 3, **settings: Any) -> list[tuple[Any, ...]]:
    sampling = settings.pop("sampling", Sampling())
    policy = settings.pop("policy", "greedy")
    decoder = Decoder(target(), drafter, policy, sampling, frozenset({7}), 24, 16, Controls(read_every=every))
    return [(r.tokens, r.verifications, r.offered, r.accepted) for r in decoder.run(prompts(6, seed=3)[:4], batch).results]


@pytest.mark.sampled(inner=OFTEN)
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("inner", INNERS, ids=names)
def test_cascade_greedy_draft_tokens_equal_middle_drafter(inner: dict[str, Any], every: int | None) -> None:
    cascade, middle = pair(inner)
    assert counts(cascade, every) == counts(middle)


TEMPERATURES = {"lossless": 0.8, "greedy": 0.0, "coupled": 0.9}


@pytest.mark.parametrize(
    ("inner", "policy"),
    with_grid(
        [(LOOKUP, "lossless")],
        INNERS,
        TEMPERATURES,
        slow=[(INNERS[3], "greedy"), (INNERS[4], "lossless"), (INNERS[6], "coupled")],  # drafts of unlike lengths: lossless
    ),
    ids=lambda given: given if isinstance(given, str) else names[INNERS.index(given)],
)
def test_cascade_captured_steps_equal_eager_steps(
    inner: dict[str, Any], policy: str, cpu_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step runs as many inner steps as a draft can take."""
    monkeypatch.setattr(library, "has_product", lambda: False)
    fast = FastTarget(tiny_model())
    cascade = shaken(FAMILY.build(CascadeOptions(middle=MIDDLE, inner=inner), fast))
    assert cascade.captured
    found = []
    for captures in (False, True):
        controls = Controls(read_every=2 if captures else None)
        decoder = Decoder(fast, cascade, policy, Sampling(TEMPERATURES[policy], seed=3), frozenset({7}), 12, 16, controls)
        decoder.captures = captures
        found.append([(r.tokens, r.verifications, r.offered, r.accepted) for r in decoder.run(prompts(3, seed=3), 2).results])
    assert found[0] == found[1] and Graph.made >= 1


@pytest.mark.slow
@pytest.mark.sampled(inner=OFTEN)
@pytest.mark.parametrize("inner", INNERS[:2] + INNERS[3:5], ids=names[:2] + names[3:5])
def test_cascade_sampled_output_is_independent_of_batch_size(inner: dict[str, Any]) -> None:
    cascade, sampling = pair(inner)[0], Sampling(0.8, seed=3)
    alone = counts(cascade, batch=1, policy="lossless", sampling=sampling)
    assert counts(cascade, batch=4, policy="lossless", sampling=sampling) == alone


def test_cascade_with_suffix_inner_is_not_captured() -> None:
    assert not FAMILY.build(CascadeOptions(middle=MIDDLE, inner={"family": "suffix"}), target()).captured


@pytest.mark.slow
@pytest.mark.sampled(inner=OFTEN)
@pytest.mark.parametrize("inner", INNERS, ids=names)
def test_cascade_coupled_draft_tokens_equal_middle_drafter(inner: dict[str, Any]) -> None:
    """Both draw with the verifier's numbers."""
    cascade, middle = pair(inner)
    sampling = Sampling(0.9, top_k=20, seed=3)
    assert counts(cascade, policy="coupled", sampling=sampling) == counts(middle, policy="coupled", sampling=sampling)


class Counted:
    """A model that notes how many positions each pass has."""

    def __init__(self, model: Any) -> None:
        self.model, self.widths = model, []

    def __call__(self, token_BN: torch.Tensor, *rest: Any) -> Any:
        self.widths.append(token_BN.shape[1])
        return self.model(token_BN, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def passes(cascade: Cascade, prompt: list[int], tokens: int) -> tuple[list[list[int]], int]:
    """(the widths of the middle's passes in each proposal, verifications)."""
    counted = Counted(cascade.model)
    cascade._model = FrozenRef(counted)  # type: ignore[arg-type]
    own_open, each = cascade.open, []

    def opened(slots: int, max_len: int) -> DraftState:
        state = own_open(slots, max_len)
        propose = state.propose

        def noted(*a: Any) -> Any:
            counted.widths.clear()
            tree = propose(*a)
            each.append(list(counted.widths))
            return tree

        state.propose = noted  # type: ignore[method-assign]
        return state

    cascade.open = opened  # type: ignore[assignment, method-assign]
    result = Decoder(target(), cascade, "greedy", Sampling(), max_new_tokens=tokens).run([prompt]).results[0]
    return each, result.verifications


def test_cascade_exact_inner_drafter_needs_two_middle_passes_per_proposal() -> None:
    inner = {"family": "draft_model", "blocks": 3, "draft_length": 4}
    cascade = FAMILY.build(CascadeOptions(middle=MIDDLE, inner=inner), target()).eval()  # both are the target's first blocks
    each, _ = passes(cascade, prompts(1, seed=2)[0], 30)
    assert {len(widths) for widths in each} == {2}, "the root, then 4 drafts and a token of its own: 6"


def test_cascade_next_proposal_feeds_middle_only_new_tokens() -> None:
    cascade, _ = pair(LOOKUP)
    each, rounds = passes(cascade, list(range(3, 60)) * 4, 24)
    assert len(each) == rounds > 3
    assert all(widths[0] <= 2 + 6 and max(widths[1:]) <= 1 + 4 for widths in each)
    assert all(len(widths) <= 6 for widths in each)


@pytest.mark.sampled(inner=OFTEN)
@pytest.mark.parametrize("inner", INNERS, ids=names)
def test_cascade_draft_distribution_equals_middle_model(inner: dict[str, Any]) -> None:
    """q at a node is what the middle's model gives after the text and the path, with the request's settings."""
    cascade, middle = pair(inner)
    sampling, asked = Sampling(0.8, top_k=12, seed=2), prompts(3, seed=7)
    session = Session(Decoder(target(), cascade, "lossless", sampling), 3, 200)
    for i, prompt in enumerate(asked):
        session.submit(Request(prompt, i, 20))
    session._admit()
    with torch.inference_mode():
        assert session.state is not None
        tree = session.state.propose(session.slot_B, session.slots.sampling(sampling, session.slot_B))
    assert tree.q_BNV is not None and tree.token_BN.shape[1] == 7
    for row, prompt in enumerate(asked):
        text = torch.tensor([prompt + tree.token_BN[row].tolist()])
        with torch.no_grad():
            wanted = distribution(middle.lm.model(text).logits[0, len(prompt) :], sampling)
        torch.testing.assert_close(tree.q_BNV[row, :-1], wanted[:-1], atol=1e-5, rtol=1e-3)
        assert bool((tree.q_BNV[row, :-1].gather(1, tree.token_BN[row, 1:, None]) > 0).all())


@pytest.mark.slow
@pytest.mark.sampled(inner=OFTEN)
@pytest.mark.parametrize("inner", INNERS, ids=names)
def test_cascade_sampling_follows_target_distribution(inner: dict[str, Any]) -> None:
    def build(*_: Any) -> Drafter:
        return pair(inner)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "build", build)
        contract.test_drafter_sampling_follows_target_distribution("cascade")


def test_cascade_training_inner_drafter_keeps_middle_gradients_and_counts() -> None:
    text = one_document(torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(0)))
    cascade, middle = pair(INNERS[2])
    filled = Online(target(), cascade.taps).fill(text)
    loss, seen = Objective(middle.train(), target(), LossOptions())(filled)
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in middle.named_parameters()}
    cascade.zero_grad()
    both, figures = Objective(cascade.train(), target(), LossOptions())(filled)
    both.backward()
    assert both.item() > loss.item() and torch.equal(figures.packed(), seen.packed())
    for name, p in middle.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in cascade.inner.parameters())
    assert len(list(cascade.eval().predict(filled))) == 1


def test_cascade_invalid_middle_or_inner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**options: Any) -> Callable[[], Drafter]:
        return lambda: FAMILY.build(CascadeOptions(**options), target())

    for make, says in [
        (build(middle={"family": "medusa"}, join="verify"), "medusa, which has no language model .* set drafter.join=merge"),
        (build(join="both"), "drafter.join is 'both'; choose one of auto, verify, merge"),
        (build(middle={"family": "meduza"}), "drafter.middle.family is 'meduza'; use one of"),
        (build(inner={"family": "medusa", "headz": 3}), "drafter.inner: medusa has no option headz; it has tree, paths"),
        (build(middle=DraftModelOptions(blocks=9)), "drafter.blocks is 9; the target has 4"),
    ]:
        with pytest.raises(UserError, match=says):
            make()
    monkeypatch.setattr(target(), "trees", False)
    with pytest.raises(UserError, match="inner proposes trees; this target's architecture is exact for chains only"):
        build(inner=INNERS[2])()
    monkeypatch.setattr(PromptLookup, "revertible", False)
    with pytest.raises(UserError, match="inner is prompt_lookup, which cannot take back what it has seen"):
        build()()


def test_cascade_overrides_set_middle_and_inner_and_refuse_unknown_option() -> None:
    register()
    with initialize_config_module("drafttrain.conf", version_base="1.3"):
        more = ["drafter=cascade", "drafter.middle.blocks=2", "drafter@drafter.inner=medusa", "drafter.inner.heads=2"]
        options = OmegaConf.to_object(compose("config", more)).drafter
        assert options.middle == DraftModelOptions(blocks=2) and options.inner.heads == 2
        with pytest.raises(ConfigCompositionException, match="blockz"):
            compose("config", ["drafter=cascade", "drafter.middle.blockz=2"])
