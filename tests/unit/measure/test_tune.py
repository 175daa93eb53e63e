"""`drafttrain tune`: which shapes are considered, who decides, and what is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import drafttrain as dt
from drafttrain.commands import tune as tune_file
from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Costs, Decoded
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, checkpoint_name, load_drafter, save_drafter
from drafttrain.drafters.tuned_settings import TUNED, draft_up_to, keep_tuned, tuned_proposal, tuned_settings, with_tuned
from drafttrain.measure import DecodeOptions, TuneOptions, bench, tuning
from drafttrain.measure.cases import Case, held_out_cases
from drafttrain.measure.decoding import decoder_of, depth_limit
from drafttrain.measure.plots import tuning_plot
from drafttrain.measure.tuning import DEFAULT, PLAIN, ProposalShape, Raced, Tuner, shapes_of, surface, winner
from drafttrain.model.drafter import Drafter
from drafttrain.model.proposal import Preferred
from drafttrain.objective.losses import Hits
from drafttrain.runs import checkpoint_source
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget
from tests.exports import embedded, loaded_before, record_of
from tests.helpers import fast_target

QUICK = ("measure.limit=4", "decode.max_new_tokens=8", "tune.minutes=0.02", "tune.repeats=1", "tune.finalists=2", "output=out")


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return embedded()


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_source, "load_target", loaded_before)


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttrain.measure.plots.tuning_plot", lambda *drawn: None)


def built(family: str, target: Any, **options: Any) -> Drafter:
    torch.manual_seed(0)
    return families()[family].build(families()[family].options(**options), target).eval()


def saved(folder: Path, loaded: LoadedTarget, family: str, **options: Any) -> Path:
    drafter, record = built(family, loaded.target, **options), record_of(loaded)
    own = dataclasses.asdict(families()[family].options(**options))
    path = folder / checkpoint_name(1)
    path.mkdir(parents=True)
    save_drafter(path, drafter.state_dict(), CheckpointMeta(family, own, drafter.decode_settings(), record, 1))
    return path


def decide(monkeypatch: pytest.MonkeyPatch, gained: float) -> list[dict[str, Any]]:
    """The first finalist wins the first race, and the last one by `gained`; the settings of each race."""
    seen: list[dict[str, Any]] = []

    def race(self: Any, name: str, settings: dict[str, Any], cases: Sequence[Case], seconds: float) -> Raced:
        seen.append({"settings": settings, "questions": [case.question_id for case in cases]})
        rates = {key: [1.0] for key in settings}
        return rates | {list(settings)[1]: [2.0 if len(seen) == 1 else gained]}, {}

    monkeypatch.setattr(tune_file.Tuner, "race", race)
    return seen


@pytest.mark.parametrize("beyond_noise", [True, False])
def test_tune_slower_batch_size_ends_drafting_only_beyond_noise(beyond_noise: bool) -> None:
    chosen = {"settings": {}, "better": False, "speedup": 1.2, "plain_is_faster": False}
    large = chosen | {"speedup": 0.98, "plain_is_faster": beyond_noise}
    tuned = tune_file._by_size({"batch_sizes": [{"batch_size": 1, "chosen": chosen}, {"batch_size": 8, "chosen": large}]})
    assert draft_up_to(tuned) == (1 if beyond_noise else None)


def ranks(seed: int) -> torch.Tensor:
    return torch.randint(0, 4, (60, 3), generator=torch.Generator().manual_seed(seed))


def test_shapes_of_searchable_tree_vary_depth_and_size() -> None:
    texts, target = [ranks(0), ranks(1)], fast_target()
    found = shapes_of(built("medusa", target, heads=3), texts, trees=True)
    assert {shape.depth for shape in found} == {1, 2, 3} and len({shape.nodes for shape in found}) > 5
    assert all(max(map(len, shape.paths)) == shape.depth and len(shape.paths) == shape.nodes for shape in found)
    assert not any("nodes" in shape.settings for shape in found)
    dynamic = shapes_of(built("medusa", target, heads=3, tree="dynamic", width=4), texts, trees=True)
    assert all(shape.settings["nodes"] == shape.nodes for shape in dynamic)


def test_shapes_of_merged_drafter_are_trees_of_its_lead(tmp_path: Path) -> None:
    target = fast_target()
    drafter = built("cascade", target, middle={"family": "medusa", "heads": 3}, inner={"family": "prompt_lookup"}, join="merge")
    found = shapes_of(drafter, [ranks(0), ranks(1)], trees=True)
    small = next(shape for shape in found if shape.nodes == 4)
    keep_tuned(tmp_path, {1: small.settings}, {})
    lookup = drafter.inner.proposal.max_nodes
    drafter.use_decode_settings(with_tuned(drafter.decode_settings(), tuned_settings(tmp_path)[1]))
    assert tuple(drafter.middle.proposal.paths) == small.paths and drafter.proposal.max_nodes == 4 + lookup
    assert drafter.proposal.preferred.draft_length is None, "lookup drafts as deep as before"
    (tmp_path / TUNED).unlink()
    keep_tuned(tmp_path, {1: {"middle": {"paths": [0]}}}, {})
    with pytest.raises(UserError, match=r"got 1: middle: paths \[0\]"):
        tuned_settings(tmp_path)


@pytest.mark.parametrize("options", [{"tree": "chain"}, {"paths": [[0], [1], [0, 0], [0, 0, 0]]}])
def test_shapes_of_fixed_proposal_vary_draft_length_only(options: dict[str, Any]) -> None:
    found = shapes_of(built("medusa", fast_target(), heads=3, **options), [ranks(0)], trees=True)
    assert [shape.settings for shape in found] == [{"draft_length": 1}, {"draft_length": 2}, {"draft_length": 3}]
    assert [shape.nodes for shape in found] == ([1, 2, 3] if "tree" in options else [2, 3, 4])


def test_tune_command_faster_settings_are_stored_and_decoded_with(
    command: Callable[..., int],
    loaded: LoadedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, races = saved(tmp_path, loaded, "medusa", heads=3), decide(monkeypatch, 1.25)
    assert command("tune", f"checkpoint={path}", *QUICK, "decode.max_new_tokens=16") == 0
    first, last = races
    assert not set(first["questions"]) & set(last["questions"]), "some prompts choose, others decide"
    settings = last["settings"]["chosen"]
    assert settings == list(first["settings"].values())[1] and tuned_settings(path) == {1: settings | {"speedup": 1.25}}
    drafter, _ = load_drafter(path, loaded.target)
    assert [list(p) for p in drafter.proposal.paths] == settings["paths"]
    assert drafter.proposal.preferred.draft_length == settings["draft_length"]
    assert decoder_of(loaded, DecodeOptions(), drafter).controls.draft_length == settings["draft_length"]
    (kept,) = (tmp_path / "out" / "tune").glob("*/tune.json")
    (found,) = json.loads(kept.read_text())["batch_sizes"]
    assert found["chosen"]["better"] and len(found["surface"]) > 2 and (kept.parent / "surface-1.png").stat().st_size > 1000
    assert ": 1.25x as fast as the trained proposal and " in capsys.readouterr().out


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(("policy", "chosen"), [("greedy", 2), ("typical", 1)])
def test_tune_command_prefers_tau_over_cost_to_speeds_where_agreement_predicts_tau(
    policy: str, chosen: int, command: Callable[..., int], loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, races = saved(tmp_path, loaded, "medusa", heads=3), list[dict[str, Any]]()

    def race(self: Any, name: str, settings: dict[str, Any], cases: Sequence[Case], seconds: float) -> Raced:
        races.append(settings)
        first, second = list(settings)[1:3]
        return {label: [2.0 if label == first else 1.0] for label in settings}, dict.fromkeys(settings, 10.0) | {second: 0.1}

    monkeypatch.setattr(tune_file.Tuner, "race", race)
    settings = (f"decode.policy={policy}", f"decode.temperature={0.0 if policy == 'greedy' else 0.7}")
    assert command("tune", f"checkpoint={path}", *QUICK, "decode.max_new_tokens=16", *settings) == 0
    assert races[1]["chosen"] == list(races[0].values())[chosen]
    (file,) = (tmp_path / "out" / "tune").glob("*/tune.json")
    (found,) = json.loads(file.read_text())["batch_sizes"]
    costs = {row["name"]: row["cost"] for row in found["finalists"]}
    assert costs[found["chosen"]["name"]] == 10.0, "of the second race, which has chosen nothing"


@pytest.mark.usefixtures("no_picture")
def test_tune_command_chooses_for_each_batch_size_from_one_pass_of_acceptance(
    command: Callable[..., int],
    loaded: LoadedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, races = saved(tmp_path, loaded, "medusa", heads=3), decide(monkeypatch, 1.25)
    passes, costs = list[int](), list[int]()
    hits, predict = bench.forced_hits, tuning.surface
    monkeypatch.setattr(bench, "forced_hits", lambda *given: passes.append(1) or hits(*given))
    monkeypatch.setattr(tuning, "surface", lambda *given: costs.append(given[4]) or predict(*given))
    keep_tuned(path, {16: {"draft_length": 1}}, {})
    assert command("tune", f"checkpoint={path}", *QUICK, "decode.max_new_tokens=16", "measure.batch_sizes=[1,2,4]") == 0
    assert len(passes) == 1 and costs == [1, 2] and len(races) == 4
    tuned = tuned_settings(path)
    assert [tuned[size]["paths"] for size in (1, 2)] == [races[i]["settings"]["chosen"]["paths"] for i in (1, 3)]
    assert tuned[16] == {"draft_length": 1}, "tuned before"
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "batch sizes that were not tuned: 4, more than the 2 prompts" in said
        and "1.25x as fast as the trained proposal and 1.25x as fast as plain decoding on the other prompts" in said
    )


@pytest.mark.usefixtures("no_picture")
def test_tune_command_races_stored_choice_and_says_what_is_within_noise(
    command: Callable[..., int],
    loaded: LoadedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, stored = saved(tmp_path, loaded, "draft_model", blocks=11, draft_length=4), {"draft_length": 3}
    keep_tuned(path, {1: stored | {"speedup": 1.3}}, {})

    def race(self: Any, name: str, settings: dict[str, Any], cases: Sequence[Case], seconds: float) -> Raced:
        speeds = {DEFAULT: [1.0, 1.0], "draft length 3": [1.4, 1.8], "chosen": [1.5, 1.5], PLAIN: [2.0, 2.2]}
        return {label: speeds.get(label, [1.3, 2.0]) for label in settings}, {}

    monkeypatch.setattr(tune_file.Tuner, "race", race)
    monkeypatch.setattr(tuning, "shapes_of", lambda *given: [ProposalShape(2, 2, settings={"draft_length": 2})])
    assert command("tune", f"checkpoint={path}", *QUICK, "measure.limit=2") == 0
    assert tuned_settings(path) == {1: stored | {"speedup": 0.715909}}
    said = " ".join(capsys.readouterr().out.split())
    assert "batch 1: draft length 3: 1.50x as fast as the trained proposal and 0.72x as fast as plain decoding" in said
    assert "(draft length 2 came out faster, 1.65x to 1.60x, but within noise)" in said
    assert tuned_proposal(path, 1) == "draft length 3"
    assert "batch 1: plain decoding is faster than every proposal here" in said


def test_tuning_plot_marks_no_point_for_a_choice_that_was_not_predicted(tmp_path: Path) -> None:
    """A stored tree that won the race, but that this search's paths do not give."""
    predicted = [{"depth": 1, "nodes": 1, "tau": 1.0, "speedup": 0.5}]
    stored = {"settings": {"draft_length": 1, "paths": [[0], [3]], "nodes": 2}}
    assert tuning_plot(predicted, stored, tmp_path / "stored.png") == tmp_path / "stored.png"
    tuning_plot(predicted, {"settings": {"draft_length": 1}}, tmp_path / "predicted.png")
    assert (tmp_path / "stored.png").read_bytes() != (tmp_path / "predicted.png").read_bytes()


def test_measure_draft_length_by_hand_cuts_trained_proposal_not_tuned_one(loaded: LoadedTarget, tmp_path: Path) -> None:
    path = saved(tmp_path, loaded, "prompt_lookup", draft_length=4)
    keep_tuned(path, {1: {"draft_length": 1}}, {})
    for settings, proposal in (({}, "draft length 1"), ({"decode.draft_length": 3}, "draft length 3")):
        found = dt.measure_drafter(
            loaded, dt.load_drafter(path, loaded), prompts=["a b a b a b"], max_new_tokens=4, minutes=0.01,
            out=tmp_path / proposal, settings=settings, quiet=True,
        )  # fmt: skip
        assert found.report["checkpoints"][0]["proposal"] == proposal
        assert any("decode.json has no effect" in note for note in found.report["measure"]["notes"]) is bool(settings)


@pytest.mark.usefixtures("no_picture")
def test_tune_command_slower_settings_are_not_stored(
    command: Callable[..., int],
    loaded: LoadedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved(tmp_path, loaded, "draft_model", blocks=1, draft_length=3)
    decide(monkeypatch, 0.97)
    assert command("tune", f"checkpoint={path}", *QUICK, "measure.limit=2") == 0
    assert tuned_settings(path) == {}
    said = capsys.readouterr().out
    assert (
        "is not faster on the other prompts: 0.97x as fast as the trained proposal, " in said and "nothing is written" in said
    )


@pytest.mark.usefixtures("no_picture")
def test_tune_command_times_untrained_drafter_at_every_draft_length(
    command: Callable[..., int], loaded: LoadedTarget, tmp_path: Path
) -> None:
    path = saved(tmp_path, loaded, "prompt_lookup", draft_length=2)
    assert command("tune", f"checkpoint={path}", *QUICK, "tune.batch_size=2", "tune.objective=throughput") == 0
    (kept,) = (tmp_path / "out" / "tune").glob("*/tune.json")
    (found,) = json.loads(kept.read_text())["batch_sizes"]
    assert [row["settings"] for row in found["finalists"]] == [{}, *({"draft_length": d} for d in (1, 2))]
    assert all(row["raced"] > 0 for row in found["finalists"]) and found["finalists"][0]["raced"] == 1.0
    assert bool(tuned_settings(path)) is found["chosen"]["better"]


@pytest.mark.usefixtures("no_picture")
def test_tuned_draft_temperature_applies_at_its_temperature_unless_set(
    command: Callable[..., int], loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, loaded, "draft_model", blocks=11, draft_length=2)
    decide(monkeypatch, 1.5)
    assert command("tune", f"checkpoint={path}", *QUICK, "measure.limit=2", "decode=sampling", "decode.temperature=0.8") == 0
    settings = tuned_settings(path)[1]
    drafter, _ = load_drafter(path, loaded.target)
    assert drafter.proposal.preferred == Preferred(
        settings["draft_length"], settings.get("draft_temperature"), settings.get("temperature")
    )
    drafter.use_decode_settings({"draft_temperature": 0.4, "temperature": 0.8})
    drawn = [
        decoder_of(
            loaded, DecodeOptions(policy="lossless", temperature=t, draft_temperature=own), drafter
        ).sampling.draft_temperature
        for t, own in ((0.8, None), (1.0, None), (0.8, 0.7))
    ]
    assert drawn == [0.4, None, 0.7], "found for its temperature; what the user sets comes first"
    assert depth_limit(DecodeOptions(draft_length=5), drafter) == 5


def test_tuned_settings_by_batch_size_hold_up_to_the_next_and_older_files_for_all(loaded: LoadedTarget, tmp_path: Path) -> None:
    sizes = {4: {"draft_length": 2}, 16: {"draft_length": 1, "speedup": 0.9}}
    path = saved(tmp_path, loaded, "prompt_lookup", draft_length=4)
    keep_tuned(path, sizes, {})
    drafter, _ = load_drafter(path, loaded.target)

    def lengths() -> list[int | None]:
        used = []
        for size in (1, 4, 15, 16, 64):
            drafter.use_batch_size(size)
            used.append(drafter.proposal.preferred.draft_length)
        return used

    assert drafter.proposal.preferred.draft_length == 2 and lengths() == [2, 2, 2, 1, 1]
    content = json.loads((path / TUNED).read_text())
    assert content["settings"] == {"draft_length": 2}, "all that older versions read"
    (path / TUNED).write_text(json.dumps({"settings": {"draft_length": 1}, "tuned": {}}))
    drafter, _ = load_drafter(path, loaded.target)
    assert lengths() == [1] * 5


def test_generate_drafts_as_tuned_for_its_batch_size(loaded: LoadedTarget, tmp_path: Path) -> None:
    path = saved(tmp_path, loaded, "prompt_lookup", draft_length=4)
    keep_tuned(path, {1: {"draft_length": 2}, 2: {"draft_length": 1}}, {})
    drafter, prompts = dt.load_drafter(path, loaded), [[5, 6, 7, 8] * 5] * 2
    for size, deepest in ((1, 2), (2, 1)):
        replies = dt.generate(loaded, drafter, prompts, batch_size=size, max_new_tokens=24)
        assert max(map(max, (reply.accepted for reply in replies))) == deepest, size


def test_generate_draft_length_by_hand_cuts_trained_tree(loaded: LoadedTarget, tmp_path: Path) -> None:
    path = saved(tmp_path, loaded, "medusa", heads=3)
    trained = dt.load_drafter(path, loaded).module.proposal.paths
    keep_tuned(path, {1: {"draft_length": 1, "paths": [[0]]}}, {})
    drafter = dt.load_drafter(path, loaded)
    for by_hand, paths in ((None, [(0,)]), (2, trained)):
        dt.generate(loaded, drafter, [[5, 6, 7, 8]], max_new_tokens=4, draft_length=by_hand)
        assert list(drafter.module.proposal.paths) == list(paths)


def test_load_drafter_foreign_decode_json_is_refused(loaded: LoadedTarget, tmp_path: Path) -> None:
    path = saved(tmp_path, loaded, "prompt_lookup", draft_length=4)
    (path / "decode.json").write_text("[]")
    with pytest.raises(UserError, match=r"decode\.json: expected what drafttrain tune writes.*delete it"):
        load_drafter(path, loaded.target)


def test_tune_mistakes_are_named_in_one_line(
    command: Callable[..., int],
    loaded: LoadedTarget,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = saved(tmp_path, loaded, "prompt_lookup", draft_length=4)
    assert command("tune", f"checkpoint={path}", "measure.limit=8", "tune.batch_size=5") == 2
    error = capsys.readouterr().err
    assert "half of the 8 prompts, 4, are fewer than a batch of 5" in error and len(error.strip().splitlines()) == 1
    with pytest.raises(UserError, match=r"decode.window is set, but tune chooses it or tests without it; leave it out"):
        tune_file.tune(RunOptions(checkpoint=str(path), decode=DecodeOptions(window=2)), {})


def lap(tokens: int, verifications: int, seconds: float) -> Decoded:
    """A decoded prompt, whose first token came before the first verification."""
    return Decoded([Result(0, 1, [0] * tokens, verifications, emitted=tokens - 1, ended=seconds)], Costs())


def test_race_gives_speeds_and_costs_of_steps_and_leaves_out_batches_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three batches plain decoding pauses in one."""
    empty, laps = lap(1, 0, 0.0), dict[str, list[list[Decoded]]]()
    laps |= {DEFAULT: [[empty, *[lap(13, 12, 6.0)] * 3]], "tree": [[empty, *[lap(13, 4, 4.0)] * 3]]}
    laps |= {PLAIN: [[empty, lap(13, 12, 3.0), lap(13, 12, 60.0), lap(13, 12, 3.0)]]}
    monkeypatch.setattr(Tuner, "_contender", lambda *_: None)
    part = SimpleNamespace(share=lambda value: value)
    bench: Any = SimpleNamespace(part=part, timed=lambda *_: laps)
    tuner = Tuner(bench, built("medusa", fast_target(), heads=3), TuneOptions(), {})
    speeds, costs = tuner.race("", {DEFAULT: {}, "tree": {}, PLAIN: None}, [], 1.0)
    assert speeds == {DEFAULT: [1.0] * 3, "tree": [1.5] * 3, PLAIN: [2.0, 0.1, 2.0]}
    assert costs == pytest.approx({DEFAULT: 2.0, "tree": 4.0, PLAIN: 1.0})
    laps.update({label: [[empty]] for label in laps})
    with pytest.raises(UserError, match="outputs are too short to compare speeds"):
        tuner.race("", {DEFAULT: {}, "tree": {}, PLAIN: None}, [], 1.0)


def test_surface_without_samples_is_empty() -> None:
    target = fast_target()
    none = Hits(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3), [])
    assert surface(target, built("medusa", target, heads=3), [none], False, 1) == []


def test_winner_within_noise_is_the_first_by_prediction() -> None:
    raced = {DEFAULT: [1.0, 1.0, 1.0], "first": [1.2, 1.3, 1.2], "second": [1.3, 1.2, 1.3], "third": [1.1, 1.1, 1.1]}
    assert winner(raced) == "first"
    assert winner(raced | {"second": [1.4, 1.4, 1.35]}) == "second"
    assert winner({DEFAULT: [1.0, 1.0, 1.0], "first": [1.5, 0.8, 1.3]}) == DEFAULT
    assert winner(raced | {"first": [0.8] * 3, "second": [0.9] * 3, "third": [0.7] * 3}) == DEFAULT


def test_held_out_cases_end_before_the_last_reply() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.bool_)
    chat, text = Encoded(np.arange(8, dtype=np.int32), mask), Encoded(np.arange(8, dtype=np.int32), np.arange(8) > 0)
    assert [case.tokens for case in held_out_cases([chat, text], 8)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert [case.tokens for case in held_out_cases([chat, text], 4)] == [[0, 1, 2, 3]]
