"""What every drafter family must do; a new family gets these by existing."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.core.sampling import Sampling
from drafttrain.core.tree import DraftTree
from drafttrain.decoding.guards import Guard
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, load_drafter, save_drafter
from drafttrain.drafters.common.proposal import TreeOptions
from drafttrain.features.online import Online
from drafttrain.measure.exactness import Match, compare
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Commit, Drafter, FrozenRef, RevertibleState
from drafttrain.model.kv_storage import PAGE
from drafttrain.model.target import Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from tests.cases import slow_but
from tests.helpers import EACH, FEW, drafted_and_predicted, fast_target, prompts, tiny_model, tiny_target, watch_proposals
from tests.tiny import NAMES, SHAPES, build

PLAIN: dict[str, list[Any]] = {}  # results without a drafter, which are the same for all families
# a family of each kind of state: FEW, and those whose states add something to the state of one of FEW
STATES = (*FEW, "redrafter", "mtp_native", "peagle", "dflash", "domino", "lilicorr", "xpress", "pard", "uno", "suffix")
GROWN = [name for name in NAMES if issubclass(families()[name].options, TreeOptions)]  # with a choice of trees
TREES = ("medusa", "eagle3", "draft_model", "dspark", "dflash", "mtp_native", "peagle", "pard")  # one of each kind of them


def decode(target: HFTarget, drafter: Drafter | None, asked: list[list[int]], batch: int, **settings: Any) -> list[Any]:
    if drafter is not None:
        return decoded(target, drafter, asked, batch, **settings)
    key = repr((type(target), target.fingerprint, target.head_weight.dtype, asked, batch, sorted(settings.items())))
    if key not in PLAIN:
        PLAIN[key] = decoded(target, None, asked, batch, **settings)
    return PLAIN[key]


def decoded(target: HFTarget, drafter: Drafter | None, asked: list[list[int]], batch: int, **settings: Any) -> list[Any]:
    sampling = settings.pop("sampling", Sampling())
    policy = settings.pop("policy", "greedy" if sampling.greedy else "lossless")
    stop = settings.pop("stop", frozenset())
    return Decoder(target, drafter, policy, sampling, stop, settings.pop("tokens", 30), **settings).run(asked, batch).results


@pytest.mark.parametrize("name", EACH)
def test_drafter_gradients_are_ready_in_one_order_for_any_mask(name: str) -> None:
    """ZeRO 1 and 2 reduce gradients as they are ready: processes with other orders would add different parameters."""
    target = fast_target()
    drafter = build(name, target, 0.3).train()
    objective, online = Objective(drafter, target, LossOptions()), Online(target, drafter.taps)
    trained = [(number, p) for number, p in enumerate(objective.parameters()) if p.requires_grad]
    orders: list[list[int]] = []
    for number, parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: orders[-1].append(number))
    token_BT = torch.randint(6, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    for first in (0, 11):  # all tokens, and the last one alone: most predictions have no label then
        orders.append([])
        mask_BT = torch.arange(12)[None] >= first
        batch = TrainBatch(token_BT, torch.arange(12)[None], torch.zeros_like(token_BT), mask_BT)
        if trained:
            objective(online.fill(batch))[0].backward()
    assert orders[0] == orders[1] and sorted(orders[0]) == [number for number, _ in trained]


META = torch.device("meta")  # it has no data: whatever asks it for some fails
# untrained ones; and one whose loss asks which candidates are right, so that other slots cost no logits of the target
ASKING = ("prompt_lookup", "suffix", "lilicorr")


@pytest.mark.parametrize("name", slow_but(FEW, [name for name in NAMES if name not in ASKING]))
def test_drafter_training_step_asks_device_for_nothing(name: str) -> None:
    """Tokens, documents, anchors and labels are known on the host, so that the host launches a step without waiting."""
    target = tiny_target()
    drafter = build(name, target, 0.3).train()
    own = [value for module in drafter.modules() for value in vars(module).values() if isinstance(value, FrozenRef)]
    for model in (drafter, target.model, *(ref.module.model for ref in own if isinstance(ref.module, HFTarget))):
        model.to(META)
    token_BT = torch.randint(6, 60, (2, 30), generator=torch.Generator().manual_seed(0))
    position_BT = torch.arange(30).expand(2, 30)
    document_BT = torch.where(position_BT < 17, 0, torch.tensor([[1], [-1]]))  # two texts, and one with padding
    batch = Online(target, drafter.taps).fill(TrainBatch(token_BT, position_BT, document_BT, position_BT % 13 > 3))
    loss, counts = Objective(drafter, target, LossOptions())(batch)
    loss.backward()
    assert loss.device == counts.packed().device == META


@pytest.mark.sampled
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", EACH)
def test_drafter_greedy_output_equals_plain_decoding(name: str, noise: float, batch: int) -> None:
    """Ragged prompts, rows that stop at different times, prompts longer than a prefill chunk."""
    target, asked = fast_target(), prompts(6, seed=3)
    stop = frozenset({7, 11})
    plain = decode(target, None, asked, 1, stop=stop, tokens=20)
    speculative = decode(target, build(name, target, noise), asked, batch, stop=stop, tokens=20, prefill_chunk=6)
    assert [r.tokens for r in speculative] == [r.tokens for r in plain]
    assert all(r.emitted == len(r.tokens) - 1 for r in speculative)
    assert all(p.emitted == p.verifications for p in plain)


@pytest.mark.sampled(name=TREES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), GROWN))
def test_drafter_dynamic_tree_output_equals_plain_decoding(name: str, temperature: float) -> None:
    """At a temperature `coupled` gives plain sampling's own tokens."""
    target, asked, family = fast_target(), prompts(5, seed=3), families()[name]
    torch.manual_seed(1)
    options = family.options(
        **{k: v for k, v in SHAPES.get(name, {}).items() if k != "paths"} | {"tree": "dynamic", "width": 3, "nodes": 9}
    )
    sampling = Sampling(temperature=temperature, seed=5)
    policy = "greedy" if sampling.greedy else "coupled"
    plain = decode(target, None, asked, 1, policy=policy, sampling=sampling, tokens=20)
    drafted = decode(target, family.build(options, target).eval(), asked, 4, policy=policy, sampling=sampling, tokens=20)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(r.emitted - r.verifications for r in drafted) > 0


@pytest.mark.sampled(name=TREES)
@pytest.mark.parametrize("tree", [{"tree": "static", "paths": [[0]]}, {"tree": "dynamic", "width": 1, "nodes": 2}])
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), GROWN))
def test_drafter_small_tree_at_page_end_output_equals_plain_decoding(name: str, tree: dict[str, Any]) -> None:
    """Whatever a family computes beside its nodes; the text and its tree end where a page of the cache does."""
    target, asked, family = fast_target(), prompts(1, seed=3), families()[name]
    torch.manual_seed(1)
    settings = {k: v for k, v in SHAPES.get(name, {}).items() if k not in ("paths", "tree")}
    drafter = family.build(family.options(**settings | tree), target).eval()
    tokens = 2 * PAGE - len(asked[0]) - drafter.proposal.max_nodes
    assert decode(target, drafter, asked, 1, tokens=tokens)[0].tokens == decode(target, None, asked, 1, tokens=tokens)[0].tokens


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), NAMES))
def test_drafter_long_prompts_in_batch_output_equals_plain_decoding(name: str) -> None:
    """The cache holds the longest request and no more, whoever shares a step with it."""
    target = fast_target()
    asked = [[3 + i, 5, 9] * length for i, length in enumerate((2, 60, 40, 55, 1))]
    plain = [r.tokens for r in decode(target, None, asked, 1, tokens=24)]
    drafter = build(name, target, 0.3)  # some of its drafts are accepted
    alone, *beside = (decode(target, drafter, asked, n, tokens=24, prefill_chunk=m) for n, m in ((1, 512), (2, 512), (2, 32)))
    assert all([r.tokens for r in results] == plain for results in (alone, *beside))
    assert len({sum(r.verifications for r in results) for results in (alone, *beside)}) == 1


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), NAMES))
def test_drafter_stop_token_inside_accepted_draft_ends_text_there(name: str) -> None:
    target, asked = fast_target(), prompts(4, seed=5)
    free = decode(target, None, asked, 1, tokens=40)
    stop = frozenset({free[0].tokens[9]})
    for result, whole in zip(decode(target, build(name, target), asked, 2, tokens=40, stop=stop), free, strict=True):
        end = next((i + 1 for i, t in enumerate(whole.tokens) if t in stop), 40)
        assert result.tokens == whole.tokens[:end]


@pytest.mark.parametrize("name", EACH)
def test_drafter_proposal_has_distribution_only_if_sampled(name: str) -> None:
    """The verifier's rule, and what is expected of acceptance, depend on it."""
    target = fast_target()
    for sampling in (Sampling(), Sampling(0.8, seed=3)):
        drafter = build(name, target, noise=0.5)
        seen = watch_proposals(drafter)
        decode(target, drafter, prompts(2, seed=4), 2, tokens=8, sampling=sampling)
        assert {tree.q_BNV is not None for tree in seen} == {drafter.samples and not sampling.greedy}
        if drafter.samples:
            assert all(set(path) == {0} for path in drafter.proposal.paths)


@pytest.mark.parametrize("name", EACH)
def test_drafter_training_predictions_equal_draft_tokens(name: str) -> None:
    """`predict` at the last committed position, given the drafts as text, names exactly the tokens `propose` drafted."""
    target = fast_target()
    drafter, prompt = build(name, target, noise=0.5), prompts(1, seed=8, longest=30)[0] + [5, 9, 2]
    if not drafter.trained:
        pytest.skip("trains nothing: there is no prediction to compare with")
    drafts, predicted = drafted_and_predicted(target, drafter, prompt)
    assert predicted == drafts


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), NAMES))
def test_drafter_coupled_output_equals_plain_sampling(name: str) -> None:
    """With the verifier's noise for its own samples too, so that it draws what the verifier will."""
    target, asked = fast_target(), prompts(5, seed=3)
    for sampling, batch in ((Sampling(0.7, top_p=0.95, seed=2), 1), (Sampling(1.5, seed=2), 3)):
        plain = decode(target, None, asked, 2, sampling=sampling)
        ours = decode(target, build(name, target, 0.1), asked, batch, policy="coupled", sampling=sampling)
        assert [r.tokens for r in ours] == [r.tokens for r in plain]


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), NAMES))
def test_drafter_fallback_to_plain_decoding_continues_as_target(name: str, every: int | None) -> None:
    """Under a lossy policy, cut back at different times in one batch; later requests take their slots."""
    target, asked, sampling = fast_target(), prompts(6, seed=8), Sampling(1.0, repetition_penalty=1.1, seed=3)
    guard = Guard(json="plain", decode=lambda ids: "".join("x" if i % 7 == 5 else " " for i in ids))
    controls = Controls(parameter=1e-4, read_every=every)
    decoder = Decoder(
        target, build(name, target, 0.5), "threshold", sampling, max_new_tokens=30, controls=controls, guard=guard
    )
    found = decoder.run(asked, 3, as_json=[i != 2 for i in range(6)]).results
    assert sum(r.plain for r in found) >= 2 and not found[2].plain
    for key, (prompt, result) in enumerate(zip(asked, found, strict=True)):
        for act in result.acts:
            text, left = prompt + result.tokens[: act.kept], 30 - act.kept
            (plain,) = Decoder(target, None, "lossless", sampling, max_new_tokens=left).run([text], 1, key).results
            assert result.tokens[act.kept :] == plain.tokens


@pytest.mark.sampled(name=STATES)
@pytest.mark.parametrize("name", EACH)
def test_drafter_depth_limit_cuts_same_draft_tree(name: str) -> None:
    target, asked = fast_target(), prompts(3, seed=7)
    drafter = build(name, target, 0.2)
    seen: dict[int | None, Any] = {}
    for limit in (None, 1, 2, 99):
        session = Session(Decoder(target, drafter, "greedy", Sampling()), 3, 200)
        for i, prompt in enumerate(asked):
            session.submit(Request(prompt, i, 20))
        session._admit()
        with torch.inference_mode():
            assert session.state is not None
            seen[limit] = session.state.propose(session.slot_B, Sampling(), limit)
    depths = {limit: int(tree.ancestor_BNN.sum(-1).max()) - 1 for limit, tree in seen.items()}
    assert depths == {None: drafter.draft_length, 1: 1, 2: 2, 99: drafter.draft_length}
    for limit in (1, 2):
        assert nodes(seen[limit]) == nodes(seen[None].cut(limit))
    assert drafter.proposal.max_nodes >= seen[None].token_BN.shape[1]


def nodes(tree: DraftTree) -> list[list[tuple[int, int]]]:
    """Each row's (token, parent) pairs, padding left out."""
    rows = zip(tree.token_BN.tolist(), tree.parent_BN.tolist(), tree.count_B.tolist(), strict=True)
    return [list(zip(tokens, parents, strict=True))[:count] for tokens, parents, count in rows]


@pytest.mark.sampled(name=STATES)
@pytest.mark.parametrize("name", EACH)
def test_drafter_restored_state_proposes_same_tokens(name: str) -> None:
    """After `restore` a proposal is that of a twin which observed nothing after the snapshot."""
    target = tiny_target()  # another's packed weights cannot be copied
    drafter = build(name, target, 0.3)
    session = Session(Decoder(target, drafter, "greedy", Sampling()), 3, 200)
    for i, prompt in enumerate(prompts(3, seed=7)):
        session.submit(Request(prompt, i, 60))
    session.step()
    session.step()
    state, slot_B, count_B = session.state, session.slot_B, torch.tensor([1, 2, 0])
    assert isinstance(state, RevertibleState) == drafter.revertible
    if not isinstance(state, RevertibleState):
        pytest.skip("says itself that it cannot forget")
    twin = deepcopy(state, {id(drafter): drafter})
    with torch.inference_mode():
        before = state.snapshot(slot_B)
        for _ in range(2):
            token_BA = state.propose(slot_B, Sampling(), 2).token_BN[:, :2]
            hidden = {key: torch.randn(3, 2, target.shape.hidden_size) for key in drafter.taps.keys}
            state.observe(Commit(token_BA, token_BA.flip(1), hidden, count_B), slot_B)
        state.restore(slot_B, before)
        wanted, found = (s.propose(slot_B, Sampling()) for s in (twin, state))
    assert nodes(found) == nodes(wanted)


@pytest.mark.sampled(name=("eagle3", "dflash", "lilicorr", "early_exit"))
@pytest.mark.parametrize("name", NAMES)
def test_drafter_predictions_ignore_states_of_other_target_layers(name: str) -> None:
    target = fast_target()
    drafter, every = build(name, target), Taps(tuple(range(target.shape.blocks)), final=True)
    text = torch.tensor([prompts(1, seed=1, longest=25)[0] + [1, 2, 3, 4, 5, 6]])
    batch = TrainBatch(text, torch.arange(text.shape[1])[None], torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    filled = Online(target, drafter.taps | every).fill(batch)
    clean = [p.hidden_MH for p in drafter.predict(filled)]
    for key in set(every.keys) - set(drafter.taps.keys):
        filled.hidden[key].fill_(torch.nan)
    for a, b in zip(clean, drafter.predict(filled), strict=True):
        assert torch.equal(a, b.hidden_MH)


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", slow_but(("eagle3", "dspark"), NAMES))  # of those that draw their drafts
def test_drafter_sampling_follows_target_distribution(name: str) -> None:
    """Chi-square of pairs of tokens against plain sampling's exact law, top-k and top-p applied."""
    target = fast_target()
    sampling = Sampling(1.0, top_k=6, top_p=0.9, seed=11)
    prompt, count = prompts(1, seed=4, longest=9)[0], 1500
    expected = pair_law(target, prompt, sampling)
    results = decode(target, build(name, target, 0.3), [prompt] * count, 250, sampling=sampling, tokens=4)
    seen = Counter(tuple(r.tokens[1:3]) for r in results)
    assert set(seen) <= set(expected)
    cells = [(seen[k], count * p) for k, p in expected.items() if count * p >= 5]
    rest = count - sum(e for _, e in cells)
    if rest > 5:
        cells.append((count - sum(s for s, _ in cells), rest))
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    tail = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2))
    assert float(tail) > 1e-4, f"chi-square {statistic:.1f} over {len(cells)} cells"


def pair_law(target: HFTarget, prompt: list[int], sampling: Sampling) -> dict[tuple[int, int], float]:
    """Exact law of the second and third new token."""
    from drafttrain.core.sampling import distribution

    def after(rows: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            return distribution(target.model(torch.tensor(rows)).logits[:, -1].double(), sampling)

    first = after([prompt])[0]
    pairs: dict[tuple[int, int], float] = Counter()
    support = first.nonzero()[:, 0].tolist()
    for a, second in zip(support, after([[*prompt, a] for a in support]), strict=True):
        inner = second.nonzero()[:, 0].tolist()
        for b, third in zip(inner, after([[*prompt, a, b] for b in inner]), strict=True):
            for c in third.nonzero()[:, 0].tolist():
                pairs[(b, c)] += float(first[a] * second[b] * third[c])
    return pairs


@pytest.mark.parametrize("name", EACH)
def test_drafter_reloaded_checkpoint_drafts_same_tokens(name: str, tmp_path: Path) -> None:
    target = fast_target()
    drafter = build(name, target, 0.5)
    again = reloaded(name, drafter, target, tmp_path)
    asked = prompts(2, seed=6)
    a, b = (decode(target, d, asked, 2, tokens=16) for d in (drafter, again))
    assert [(r.tokens, r.verifications, r.accepted) for r in a] == [(r.tokens, r.verifications, r.accepted) for r in b]


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3", "dspark"), NAMES))
def test_drafter_of_bfloat16_target_decodes_same_text_in_bfloat16(name: str, tmp_path: Path) -> None:
    """A bfloat16 target's drafter costs bfloat16's bytes; its texts are the target's, and it drafts about as well."""
    target, asked = FastTarget(tiny_model().to(torch.bfloat16)), prompts(4, seed=6)
    drafter = build(name, target, 0.3)
    again = reloaded(name, drafter, target, tmp_path)
    assert {p.dtype for p in again.parameters()} <= {torch.bfloat16}
    plain, whole, half = (decode(target, d, asked, 2) for d in (None, drafter.requires_grad_(False), again))
    texts = [[r.tokens for r in results] for results in (plain, whole, half)]
    for found in texts[1:]:  # passes of other shapes round otherwise, and near-ties may turn
        assert Match.UNEXPLAINED not in compare(target, torch.bfloat16, asked, found, texts[0])
    passes, wanted = (sum(r.verifications for r in results) for results in (half, whole))
    assert abs(passes - wanted) <= 0.1 * wanted  # rounding turns a draft here and there


def reloaded(name: str, drafter: Drafter, target: HFTarget, tmp_path: Path) -> Drafter:
    shape = target.shape
    record = TargetRecord("hf", "x", None, "float32", shape.vocab_size, shape.hidden_size, shape.blocks, target.fingerprint)
    options = {"family": name, **SHAPES.get(name, {})}
    save_drafter(tmp_path, drafter.state_dict(), CheckpointMeta(name, options, drafter.decode_settings(), record, 3))
    return load_drafter(tmp_path, target)[0]


@pytest.mark.sampled(name=FEW)
@pytest.mark.parametrize("name", slow_but(("medusa", "eagle3"), NAMES))
def test_drafter_overfitted_on_one_text_is_accepted_in_full(name: str) -> None:
    target, prompt = fast_target(), prompts(1, seed=9)[0]
    reply = decode(target, None, [prompt], 1, tokens=24)[0].tokens
    text = torch.tensor([prompt + reply])
    batch = TrainBatch(text, torch.arange(text.shape[1])[None], torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    drafter = build(name, target).train()
    if not drafter.trained:
        pytest.skip("trains nothing: it cannot be fitted to a text")
    objective = Objective(drafter, target, LossOptions())
    filled, optimizer = Online(target, drafter.taps).fill(batch), torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for step in range(150):
        loss, _ = objective(filled, (step + 1) / 150)
        optimizer.zero_grad()
        (loss / text.numel()).backward()
        optimizer.step()
    result = decode(target, drafter.eval(), [prompt], 1, tokens=24)[0]
    assert result.tokens == reply
    assert result.verifications <= -(-23 // (drafter.draft_length + 1)) + 1
