"""A drafter follows a target that another loop trains."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint

import drafttrain as dt
from drafttrain.api import following_options
from drafttrain.api import online as api
from drafttrain.cli.config import Run, compose_run
from drafttrain.features.online import Online
from drafttrain.features.padded import batch_of
from drafttrain.model.target import FINAL
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.runs.placement import built
from drafttrain.targets.load import EMBEDDED
from drafttrain.targets.shallow import weight_sharing_copy
from tests.exports import unprobed
from tests.helpers import tiny_model

FOLLOWERS: dict[str, list[str]] = {
    "medusa": ["drafter.heads=2", "drafter.init=share"],
    "eagle3": ["drafter.draft_length=2", "drafter.steps=2", "drafter.target_layer_rule=official"],
    "dflash": ["drafter.block_size=4", "drafter.layers=1"],
    "draft_model": ["drafter.draft_length=2", "drafter.blocks=1"],
    "mtp": ["drafter.draft_length=2", "drafter.steps=2"],
}
PLAIN = ["train.optimizer=adamw", "train.lr=1e-3", "train.clip=1e9"]


@cache
def composed(recipe: str | None, words: tuple[str, ...]) -> Run:
    return compose_run(recipe, words)


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most drafters here have one of a few configurations, and to compose it takes longer than a step of training."""
    monkeypatch.setattr(following_options, "compose_run", lambda recipe, words: copy.deepcopy(composed(recipe, tuple(words))))


def tokens(rows: int = 3, columns: int = 14, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (rows, columns), generator=torch.Generator().manual_seed(seed))


def follower(model: Any, recipe: str = "medusa", *more: str, **settings: Any) -> dt.OnlineDrafter:
    return dt.OnlineDrafter(model, recipe, [*FOLLOWERS[recipe], *PLAIN, *more], **settings)


def moved(model: torch.nn.Module, seed: int = 1) -> None:
    """What a step of the loop does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("recipe", FOLLOWERS)
def test_online_drafter_loss_equals_objective_on_current_target_weights(recipe: str) -> None:
    """Before and after the target has changed: nothing is stale, and no gradient differs."""
    model, token_BT = tiny_model(), tokens()
    online = follower(model, recipe)
    for step in range(2):
        moved(model, step)
        frozen = unprobed(weight_sharing_copy(model))
        module = built(online.options, frozen)
        module.load_state_dict(online.module.state_dict())
        batch = Online(frozen, module.taps).fill(batch_of(token_BT, None, None))
        total, _ = Objective(module.train(), frozen, LossOptions())(batch)
        total.backward()
        norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
        found = online.step(token_BT)
        assert found.loss == pytest.approx(float(total.detach()) / batch.supervised(), rel=1e-5) and found.stepped
        assert found.grad_norm == pytest.approx(float(norm) / batch.supervised(), rel=1e-4)
        assert 1.0 <= found.expected_tau <= 1.0 + len(found.agreement)


@pytest.mark.sampled(recipe=["medusa", "draft_model"])  # they start with copies of the target's weights
@pytest.mark.parametrize("recipe", FOLLOWERS)
def test_online_drafter_on_changed_target_equals_fresh_drafter(recipe: str) -> None:
    """The weights after a step equal those of a drafter that was built on the changed target, and started from the same."""
    model = tiny_model()
    online = follower(model, recipe)
    start = {name: tensor.clone() for name, tensor in online.module.state_dict().items()}
    moved(model)
    fresh = follower(model, recipe)
    fresh.module.load_state_dict(start)
    for step in range(2):
        assert online.step(tokens(seed=step)) == fresh.step(tokens(seed=step))
    for name, tensor in fresh.module.state_dict().items():
        assert torch.equal(tensor, online.module.state_dict()[name]), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_online_drafter_leaves_training_loop_state_unchanged(mode: Callable[[], Any]) -> None:
    model = tiny_model().train()
    model.get_submodule("model.layers.1").eval()  # a loop may freeze a part
    online = follower(model, "eagle3")
    loss = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True).loss  # transformers keeps hooks from now on
    loss.backward()
    before = [(p.detach().clone(), p.grad.clone(), p.requires_grad) for p in model.parameters() if p.grad is not None]
    modes, hooks = [m.training for m in model.modules()], sum(len(m._forward_hooks) for m in model.modules())
    generator, plain, grad = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled()
    with mode():
        states = model(input_ids=tokens(), output_hidden_states=True).hidden_states
        inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert online.step(tokens()).stepped and online.step(tokens(), states).stepped
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == inside
        online.tau([[1, 2, 3]], max_new_tokens=4)
        list(online.draft_weights())
    after = [p for p in model.parameters() if p.grad is not None]
    for (weight, gradient, wanted), now in zip(before, after, strict=True):
        assert torch.equal(weight, now) and torch.equal(gradient, now.grad) and now.requires_grad == wanted
    assert modes == [m.training for m in model.modules()]
    assert hooks == sum(len(m._forward_hooks) for m in model.modules())
    assert torch.equal(generator, torch.get_rng_state()) and plain == random.getstate() and grad == torch.is_grad_enabled()


def test_online_drafter_given_states_and_left_padding_give_same_loss() -> None:
    """Left padding, as generation has it, and states of the loop's own pass."""
    model, token_BT = tiny_model().eval(), tokens()
    (first, second), mask_BT = (follower(model, "eagle3") for _ in range(2)), torch.ones(3, 14)
    mask_BT[:, :6] = 0
    expected = first.step(token_BT, mask=mask_BT)
    padded_BT, real_BT = torch.full((3, 17), 5), torch.zeros(3, 17)
    wide_BT = torch.ones(3, 17)
    for row, left in enumerate((3, 0, 1)):
        padded_BT[row, left : left + 14], real_BT[row, left : left + 14] = token_BT[row], 1
        wide_BT[row, : left + 6] = 0
    positions = (real_BT.cumsum(1) - 1).clamp_min(0).long()
    states = model(input_ids=padded_BT, attention_mask=real_BT, position_ids=positions, output_hidden_states=True)
    found = second.step(padded_BT, states.hidden_states, wide_BT, attention=real_BT)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5) and found.supervised == expected.supervised == 24


def test_online_drafter_from_config_trains_with_given_states_and_ends(tmp_path: Path) -> None:
    model, token_BT = tiny_model().eval(), tokens()
    online, ends = follower(model, "mtp"), follower(model.config, "mtp")
    with pytest.raises(dt.UserError, match="by set_ends"):
        ends.step(token_BT)
    with pytest.raises(dt.UserError, match=r"needs the weights lm_head\.weight, model\.norm\.weight"):
        ends.set_ends({"model.embed_tokens.weight": model.get_input_embeddings().weight})
    for step in range(2):
        ends.set_ends(model.state_dict(), version=step)
        assert ends.version == step
        states = model(input_ids=token_BT, output_hidden_states=True).hidden_states
        assert ends.step(token_BT, states).loss == pytest.approx(online.step(token_BT).loss, rel=1e-5)
        moved(model, step)
    with pytest.raises(dt.UserError, match="its blocks cannot be run"):
        ends.step(token_BT)
    with pytest.raises(dt.UserError, match="read at every step"):
        online.set_ends(model.state_dict())
    model.save_pretrained(tmp_path / "target")
    assert follower(tmp_path / "target", "mtp").target.head_weight.equal(model.lm_head.weight)


@pytest.mark.parametrize("name", ["gpt2", "gemma3-sliding", "qwen2"])
def test_online_drafter_other_architecture_equals_frozen_target(name: str) -> None:
    """Tied heads, scaled embeddings, norms of other kinds; as a model, and by states and ends."""
    model = tiny_model(name).eval()
    online, ends = follower(model, "mtp"), follower(model.config, "mtp")
    moved(model)
    frozen = unprobed(weight_sharing_copy(model))
    state_BTH, token_BT = torch.randn(2, 5, 32), tokens(2, 5)
    ends.set_ends(model.state_dict())
    for target in (online.target, ends.target):
        for ours, theirs in zip(
            (target.embed(token_BT), target.norm(state_BTH), target.head(state_BTH)),
            (frozen.embed(token_BT), frozen.norm(state_BTH), frozen.head(state_BTH)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
    states = model(input_ids=tokens(), output_hidden_states=True).hidden_states
    ends.module.load_state_dict(online.module.state_dict())
    assert ends.step(tokens(), states).loss == pytest.approx(online.step(tokens()).loss, rel=1e-5)


def test_online_drafter_lora_target_equals_merged_target() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))  # type: ignore[arg-type]
    online, before = follower(model), follower(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    merged = follower(copy.deepcopy(model).merge_and_unload())
    expected = before.step(tokens(), model(input_ids=tokens(), output_hidden_states=True).hidden_states)
    assert online.step(tokens()).loss == pytest.approx(expected.loss, rel=1e-5)
    assert merged.step(tokens()).loss == pytest.approx(expected.loss, rel=1e-4)
    assert online.tau([[1, 2, 3]], max_new_tokens=8) >= 1.0


def test_online_drafter_replay_drops_stale_samples() -> None:
    model = tiny_model()
    online = follower(model, lag=1, capacity=4)
    assert not online.replay(1)[0].stepped
    online.feed(tokens(), version=0)
    online.feed(tokens(seed=1), attention=torch.ones(3, 14), version=1)
    assert online.fed == 4 and all(metrics.stepped for metrics in online.replay(2)) and online.steps == 2
    online.feed(tokens(1, 9), {FINAL: torch.zeros(1, 9, 32)}, version=2)
    online.replay(1)
    assert online.fed == 4 and online.version == 2
    online.version = 3
    online.replay(1)
    assert online.fed == 1, "versions 2 and above are left"


def test_online_drafter_bfloat16_with_given_optimizer_lowers_loss() -> None:
    model = tiny_model().to(torch.bfloat16)
    words = [*FOLLOWERS["eagle3"], "train.clip=1e9", "train.precision=bfloat16"]
    online = dt.OnlineDrafter(model, "eagle3", words, optimizer=lambda p: torch.optim.SGD(p, lr=1e-2))
    assert isinstance(online.optimizer, torch.optim.SGD)
    losses = [online.step(tokens()).loss for _ in range(8)]
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in online.module.parameters())
    assert {tensor.dtype for _, tensor in online.draft_weights()} == {torch.bfloat16}


def test_online_drafter_saved_and_loaded_continues_with_optimizer(tmp_path: Path) -> None:
    model = tiny_model()
    online = follower(model)
    online.step(tokens())
    path = online.save(tmp_path / "step")
    again = follower(model)
    again.load(path)
    assert again.steps == 1
    found = online.step(tokens())
    assert again.step(tokens()) == found
    for name, tensor in online.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name])
    third = dt.OnlineDrafter(model, path, ["train.lr=1e-4"])
    # weights that lie elsewhere in memory may add up in another order
    assert third.step(tokens()).loss == pytest.approx(found.loss, rel=1e-6) and third.optimizer.param_groups[0]["lr"] == 1e-4
    with pytest.raises(dt.UserError, match=r"drafter\.heads=3: the checkpoint"):
        dt.OnlineDrafter(model, path, ["drafter.heads=3"])
    with pytest.raises(dt.UserError, match="exists"):
        online.save(path)
    with pytest.raises(dt.UserError, match="of the family medusa, this one mtp"):
        follower(model, "mtp").load(path)


def through_torch(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    torch.save({"policy": 1, "drafter": state}, folder / "all.pt")
    return dict(torch.load(folder / "all.pt", weights_only=True)["drafter"])


def through_safetensors(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    save_file(state, folder / "drafter.safetensors")
    return load_file(folder / "drafter.safetensors")


def through_distributed_checkpoint(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """As docs/online.md shows it."""
    checkpoint.save({"step": torch.ones(()), "drafter": state}, checkpoint_id=folder)
    saved = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in saved.items() if name.startswith("drafter.")}
    checkpoint.load(found, checkpoint_id=folder)
    return {name.removeprefix("drafter."): tensor for name, tensor in found.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("through", [through_torch, through_safetensors, through_distributed_checkpoint])
def test_online_drafter_state_in_trainer_checkpoint_continues_bit_equal(through: Any, tmp_path: Path) -> None:
    """With the buffer, its random state, the optimiser's moments and the counts."""
    model = tiny_model()
    online = follower(model, "eagle3", "train.micro_batch=2")
    online.feed(tokens(), version=2)
    online.feed(tokens(2, 9), {block: torch.randn(2, 9, 32) for block in (*online.taps.blocks, FINAL)}, version=3)
    online.replay(2)
    state = through(online.state_dict(), tmp_path)
    again = follower(model, "eagle3", "train.micro_batch=2", "train.seed=5")
    again.load_state_dict(state)
    assert (again.steps, again.version, again.fed) == (2, 3, 5)
    assert again.replay(3) == online.replay(3) and again.step(tokens(seed=4)) == online.step(tokens(seed=4))
    for name, tensor in online.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name
    without = follower(model, "eagle3")
    without.feed(tokens())
    without.load_state_dict(online.state_dict(buffer=False))
    assert without.fed == 3 and without.steps == 6, "a state without the buffer leaves it"


def test_online_drafter_state_of_another_drafter_is_refused_and_changes_nothing() -> None:
    model = tiny_model()
    online = follower(model)
    before = online.state_dict()
    moved = follower(model)
    moved.step(tokens())
    state = moved.state_dict()
    for bad, message in (
        ({name: x for name, x in state.items() if "weight" not in name}, "incomplete .*give all tensors of state_dict"),
        ({"model": state}, "incomplete .'structure'"),
        (follower(model, "mtp").state_dict(), "of another drafter: .* here; make the drafter with the recipe"),
        (
            dt.OnlineDrafter(model, "medusa", FOLLOWERS["medusa"], optimizer=two_groups).state_dict(),
            "of another optimiser .*make the drafter with the one",
        ),
    ):
        with pytest.raises(dt.UserError, match=message):
            online.load_state_dict(bad)
    after = online.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(x, after[name]) for name, x in before.items())


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=1e-3)


class Clock:
    """Steps of this drafter take these seconds, and nothing else takes time."""

    def __init__(self, online: dt.OnlineDrafter, seconds: list[float]) -> None:
        self.now, self.seconds, self.step = 0.0, seconds, online._stepped
        online._stepped = self.timed  # type: ignore[method-assign]

    def timed(self, *arguments: Any) -> dt.StepMetrics:
        self.now += self.seconds.pop(0)
        return self.step(*arguments)

    def __call__(self) -> float:
        return self.now


def test_online_drafter_replay_in_pauses_equals_replay_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step begins that would end after the pause, and the pauses' lengths do not change the steps."""
    model = tiny_model()
    whole, paused = (follower(model, "medusa", "train.micro_batch=2") for _ in range(2))
    for online in (whole, paused):
        online.feed(tokens(6))
    clock = Clock(paused, [0.4, 0.1, 0.1, 0.3, 0.1, 0.1])
    monkeypatch.setattr(api, "perf_counter", clock)
    taken = [paused.replay(milliseconds=x) for x in (0, 1, 399, 250, 150, 150, 190)]
    assert [len(metrics) for metrics in taken] == [0, 1, 0, 2, 1, 0, 1], "the last step took 400 ms, then 200, 100, 300, 150"
    assert [metrics for pause in taken for metrics in pause] == whole.replay(5)
    assert paused.replay(1, milliseconds=1e6)[0] == whole.replay()[0], "no more steps than were asked for"
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, paused.module.state_dict()[name]), name
    empty = follower(model)
    monkeypatch.setattr(api, "perf_counter", Clock(empty, [0.0]))
    assert [m.stepped for m in empty.replay(milliseconds=1e6)] == [False], "a pause with nothing to learn from ends at once"


@pytest.mark.slow
@pytest.mark.sampled(recipe=["eagle3"])
@pytest.mark.parametrize("recipe", ["medusa", "eagle3"])
def test_online_drafter_checkpoint_is_exported_and_measured(recipe: str, tmp_path: Path, command: Callable[..., int]) -> None:
    """The checkpoint and the changed target, as another process finds them; the export has the tensors of `draft_weights`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    online = dt.OnlineDrafter(model, recipe, [], tokenizer=tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    ids = tokenizer(["def area(side):\n    return side * side\n"] * 2, return_tensors="pt").input_ids
    online.step(ids)
    assert 1.0 <= online.tau(["def area(side):"], max_new_tokens=8) <= 6.0
    where = tmp_path / "target"
    model.save_pretrained(where), tokenizer.save_pretrained(where)
    checkpoint = online.save(tmp_path / "checkpoint", target=str(where))
    assert command("export", f"checkpoint={checkpoint}", "format=vllm", f"out={tmp_path / 'out'}") == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    ours = dict(online.draft_weights("vllm"))
    assert ours.keys() == written.keys() and all(torch.equal(ours[name], written[name]) for name in ours)
    quick = ("measure.limit=2", "decode.max_new_tokens=8", "measure.minutes=0.05", "measure.transformers=false")
    assert command("measure", f"checkpoint={checkpoint}", *quick, f"output={tmp_path}", "logger=none") == 0


@pytest.mark.parametrize("recipe", ["medusa", "eagle3", "draft_model"])
def test_online_drafter_draft_weights_are_tensors_of_module(recipe: str) -> None:
    online = follower(tiny_model(), recipe)
    online.step(tokens())
    found = dict(online.draft_weights("vllm", "float32"))
    state = list(online.module.state_dict().values())
    assert found and all(tensor.dtype in (torch.float32, torch.bool, torch.int64) for tensor in found.values())
    assert sum(any(a.shape == b.shape and torch.equal(a, b) for b in state) for a in found.values()) >= len(found) - 2
    with pytest.raises(dt.UserError, match="cannot be exported to"):
        next(online.draft_weights("tgi" if recipe != "medusa" else "sglang"))


class Engine:
    """Records as vLLM's LLM would."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Tensor]]] = []

    def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[list[str]]:
        self.calls.append((method, load_file(args[0])))
        return [[], ["lm_head.weight"] if len(self.calls) > 2 else []]


def test_online_drafter_push_sends_current_weights_to_engine(tmp_path: Path) -> None:
    online, engine = follower(tiny_model()), Engine()
    online.push(engine)
    online.step(tokens())
    online.push(engine)
    (method, first), (_, second) = engine.calls
    with pytest.raises(dt.UserError, match="the target's own lm_head"):
        online.push(engine)
    assert (
        method == "load_draft"
        and first.keys() == second.keys()
        and not torch.equal(*(x["blocks.0.layers.0.weight"] for x in (first, second)))
    )
    seen: list[Path] = []
    directory = dt.ReloadedDirectory(tmp_path, seen.append, keep=1)
    for _ in range(2):
        online.push(directory)
        online.step(tokens())
    assert [path.name for path in seen] == ["draft-0000001", "draft-0000002"] and list(tmp_path.iterdir()) == seen[1:]
    assert {"config.json", "model.safetensors"} <= {path.name for path in seen[1].iterdir()}
    with pytest.raises(dt.UserError, match=r"push got a dict; give a vllm\.LLM"):
        online.push({})


def test_online_drafter_unsupported_recipe_option_or_batch_is_refused() -> None:
    model = tiny_model()
    for recipe, message in (
        ("suffix", "trains nothing"),
        ("medusa2", "also trains the target"),
        ("uno", "changes is not run so"),
    ):
        with pytest.raises(dt.UserError, match=message):
            dt.OnlineDrafter(model, recipe, [])
    for override, message in (("train.lora.rank=2", "only drafttrain fit"), ("drafter.head=2", "head"), ("loss.name=x", "kl")):
        with pytest.raises(dt.UserError, match=message):
            dt.OnlineDrafter(model, "medusa", [override])
    with pytest.raises(dt.UserError, match="give a transformers causal LM"):
        dt.OnlineDrafter(torch.nn.Linear(2, 2), "medusa")
    online = follower(model)
    for bad, message in (
        ((torch.zeros(2, 3),), "integers"),
        ((tokens(), None, torch.ones(2, 2)), "mask is of"),
        ((tokens(1, 513),), "513"),
    ):
        with pytest.raises(dt.UserError, match=message):
            online.step(*bad)
    with pytest.raises(dt.UserError, match=r"the states lack \[-1\]"):
        online.step(tokens(), {0: torch.zeros(3, 14, 32)})
    assert not online.step(tokens(), mask=torch.zeros(3, 14)).stepped
    assert not online.step(tokens(), {FINAL: torch.full((3, 14, 32), torch.nan)}).stepped and online.steps == 0
    assert all(bool(parameter.isfinite().all()) for parameter in online.module.parameters())


def test_online_drafter_row_without_finite_states_is_left_out() -> None:
    """With the states of one row NaN, a step is that of the other rows."""
    model = tiny_model()
    states = model(input_ids=tokens(), output_hidden_states=True).hidden_states
    damaged = [x.detach().index_fill(0, torch.tensor([1]), torch.nan) for x in states]
    for recipe in ("medusa", "eagle3"):
        whole, part = follower(model, recipe), follower(model, recipe)
        found = whole.step(tokens(), damaged)
        expected = part.step(tokens()[[0, 2]], [x.detach()[[0, 2]] for x in states])
        assert found.stepped and found.left_out == 1 and found.supervised == expected.supervised
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        for one, other in zip(whole.module.parameters(), part.module.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_online_drafter_override_without_effect_is_refused(subtests: pytest.Subtests) -> None:
    model = tiny_model()
    for word, why in (
        ("features=engine", "OnlineDrafter does not use this option"),
        ("train.steps=5", "OnlineDrafter does not use this option"),
        ("++data.max_length=64", "OnlineDrafter does not use this option"),
        ("resume=auto", "OnlineDrafter does not use this option"),
        ("recipe=eagle3", "the second argument names the recipe"),
        ("decode.max_new_tokens=8", "tau has its own max_new_tokens"),
        ("target.dtype=bfloat16", "the target is a model, which stays as it is"),
    ):
        with (
            subtests.test(word),
            pytest.raises(dt.UserError, match=rf"^{re.escape(word)} has no effect: {why}; leave it out$"),
        ):
            follower(model, "medusa", word)


def test_online_drafter_config_or_given_optimizer_unused_override_is_refused() -> None:
    model = tiny_model()
    used = ["target.device=cpu", "target.dtype=bfloat16", "loss=lk", "drafter.heads=2"]
    assert dt.OnlineDrafter(model.config, "medusa", used).target.dtype == torch.bfloat16
    for word, why in (("target.runner=hf", "OnlineDrafter does not use"), ("decode.policy=greedy", "decodes nothing")):
        with pytest.raises(dt.UserError, match=f"{word} has no effect: .*{why}"):
            dt.OnlineDrafter(model.config, "medusa", [word])
    with pytest.raises(dt.UserError, match=r"train\.lr=1e-4 has no effect: optimizer= makes the optimiser; leave one out"):
        dt.OnlineDrafter(model, "medusa", ["train.lr=1e-4"], optimizer=torch.optim.SGD)


def test_online_drafter_path_without_config_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(dt.UserError, match="has no configuration that transformers can load") as error:
        dt.OnlineDrafter(tmp_path, "medusa")
    assert "\n" not in str(error.value)
