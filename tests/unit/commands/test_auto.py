"""`drafttrain auto`: what its plan says, and what it refuses before anything is spent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from drafttrain.commands import auto
from drafttrain.core.errors import UserError
from drafttrain.core.files import write_sealed_json
from drafttrain.drafters.checkpoint import checkpoint_name
from drafttrain.runs.race import CandidateRace
from drafttrain.targets.hf import HFTarget
from drafttrain.train.checkpoint_manager import PROGRESS, Progress
from tests.exports import loaded_before

Command = Callable[..., int]
TWO = ("auto.candidates=[medusa,medusa drafter.heads=2]", "auto.batch_sizes=[1]")


@pytest.fixture(autouse=True)
def quick_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is loaded once, in no time, and stays in memory. A draft takes 0.5, a pass 0.9 and 0.1 for each node."""
    monkeypatch.setattr(auto, "load_target", loaded_before)
    monkeypatch.setattr(auto, "monotonic", lambda: 0.0)
    monkeypatch.setattr(HFTarget, "free", lambda target: None)
    monkeypatch.setattr(auto, "proposal_seconds", lambda *arguments: 0.5)
    monkeypatch.setattr(auto, "verification_seconds", lambda target, drafter, sizes, *rest: {n: 0.9 + 0.1 * n for n in sizes})


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("1.5h", 5400), ("45s", 45), ("2d", 172800)])
def test_budget_with_unit_is_read_as_seconds(text: str, seconds: float) -> None:
    assert auto.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["8", "0h", "h", "-1h", "8 hours"])
def test_budget_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write it as 45m, 8h or 2d"):
        auto.seconds_of(text)


def test_plan_names_candidates_costs_and_reasons_and_writes_nothing(
    command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("auto", "--plan", "export.stacks=[tgi]", "budget=2h", "auto.batch_sizes=[1]") == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "medusa vllm, tgi" in said and "mlp_speculator tgi" in said
    assert "not dflash, " in said and "not cascade: no stack loads it" in said
    assert "budget: 2 hours: 48 minutes for a race, 46 minutes for the winner, 26 minutes to measure and export it" in said
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("budget", "raced"), [("2h", True), ("10m", False)])
def test_further_settings_of_recipes_race_where_the_budget_is_long(
    budget: str, raced: bool, command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("export.stacks=[tgi]", "auto.batch_sizes=[1]", "auto.also=[drafter.layers=3]")
    assert command("auto", "--plan", f"budget={budget}", *words) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert ("medusa-2 vllm, tgi" in said) == ("medusa-2: with drafter.layers=3" in said) == raced
    assert ("the budget is too short for further settings (auto.also); auto.candidates names others" in said) != raced


def test_candidate_whose_step_costs_more_than_its_tokens_is_left_out(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    heads = iter([0.5, 9.0])
    monkeypatch.setattr(auto, "proposal_seconds", lambda *arguments: next(heads))
    assert command("auto", "--plan", *TWO) == 0
    assert "not medusa-2: a step takes " in capfd.readouterr().out


def test_further_settings_take_no_place_of_a_costly_family(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    costs = iter([0.5, 9.0, 0.5])
    monkeypatch.setattr(auto, "proposal_seconds", lambda *arguments: next(costs))
    words = ("export.stacks=[tgi]", "auto.batch_sizes=[1]", "auto.also=[drafter.layers=3]", "budget=10m")
    assert command("auto", "--plan", *words) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "not mlp_speculator: a step takes " in said and "too short for further settings" in said and "medusa-2" not in said


def test_race_that_goes_on_keeps_its_candidates_on_a_slower_machine(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = list[list[str]]()
    monkeypatch.setattr(CandidateRace, "command", lambda race, label, line, place=-1: ended.append(list(line)) or "no disk")
    words = ("auto", "--yes", *TWO, "budget=1h")
    assert command(*words) == 2 and len(ended) == 2
    monkeypatch.setattr(auto, "START", 3600.0)
    assert command(*words) == 2
    said = capfd.readouterr()
    assert "too short" not in said.err and said.err.count("every candidate has failed: medusa: no disk; medusa-2: no disk") == 2
    assert command(*words, "data.seed=1") == 2
    assert "too short for a race of 2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TWO, "budget=1h"), "auto asks before it spends 1h, and there is no terminal to ask on; add --yes"),
        ((*TWO, "budget=126s"), "budget is 2.1 minutes, too short for a race of 2: the first round takes"),
        (("export.stacks=[nothing]",), "export.stacks names 'nothing'; choose of vllm"),
        (
            ("export.stacks=[transformers]", "auto.candidates=[medusa]"),
            "no candidate is left for transformers: medusa: transformers",
        ),
        (("auto.candidates=[nothing]",), "unknown recipe 'nothing'"),
        (("launcher=slurm",), "a job cannot ask before it starts; add --yes"),
        (("recipe=medusa",), "auto does not read recipe=medusa; auto.candidates=[NAME,NAME] names recipes"),
        (("measure=off",), "auto decides by what is tuned and measured; leave out measure=off"),
        (("measure.prompts=there.jsonl",), "there.jsonl"),
        (("auto.share=[3,2]",), "auto.share is [3, 2]; leave it out"),
        (("data.held_out=1",), "data.held_out is 1, too few to predict speedups on"),
        (("decode.draft_length=2",), "decode.draft_length is set, but tune chooses it"),
        (("auto.candidates=[medusa x='a]",), 'cannot read "auto.candidates'),
        (("auto.also=['']",), "auto.also has an empty entry; write settings"),
        ((*TWO, "budget=160s"), "which leaves the winner no time to train; set budget="),
    ],
    ids=[
        *("no terminal", "budget", "stack", "no family", "recipe", "slurm"),
        *("recipe typed", "not measured", "prompts", "share", "held out", "draft length", "quotation", "empty", "no rest"),
    ],
)
def test_auto_that_cannot_start_says_why_in_one_line(
    words: Sequence[str], message: str, command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("auto", *words) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert message in line and list(Path().iterdir()) == []


def test_yes_with_another_command_is_refused(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("fit", "recipe=medusa", "--yes") == 2
    assert "--yes is of auto" in capfd.readouterr().err


def test_replies_of_others_are_answered_anew_within_their_share(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = list[list[str]]()
    monkeypatch.setattr(CandidateRace, "command", lambda race, label, line, place=-1: lines.append(list(line)) or "no more")
    Path("talk.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    assert command("auto", "--yes", *TWO, "budget=1h", "data=file", "data.path=talk.jsonl", "prepare.samples=2") == 2
    said = capfd.readouterr()
    assert "prompts: the winner is measured on those of the package" not in said.out, "the target is the package's too"
    assert "data: nothing says who wrote its replies; the target answers at most 72 prompts first" in said.out
    assert "the target's answers could not be written: no more" in said.err
    ((command_name, *words),) = lines
    assert command_name == "prepare" and {"data.limit=72", "data.path=talk.jsonl", "prepare.samples=2"} <= set(words)


def leave(race: CandidateRace, label: str, line: Sequence[str], fails: bool, free: float) -> str | None:
    """What a command leaves: the second candidate is the faster one. fails: an engine finds a fault. free: the speedup of
    families that need no training.
    """
    given = dict(word.split("=", 1) for word in line if "=" in word)
    if line[0] == "export":
        Path(given["out"]).mkdir(parents=True)
        (Path(given["out"]) / "README.md").write_text("# A drafter\n\n```bash\nserve it\n```\n")
    if line[0] == "verify" and fails:
        return "the drafts differ"
    if line[0] != "fit":
        return None
    if "train.steps" not in given:
        (Path(given["output"]) / given["name"] / "now").mkdir(parents=True)
        entry = {"name": "step-00000", "tau": 1.5, "speedup": free, "temperature": 0.0}
        content = json.dumps({"best": entry["name"], "checkpoints": [entry]})
        (Path(given["output"]) / given["name"] / "now" / "report.json").write_text(content)
        return None
    steps, faster = int(given["train.steps"]), given["name"] == "medusa-2"
    run = race.folder / "runs" / given["name"] / "now"
    (run / "checkpoints" / checkpoint_name(steps)).mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text("{}")
    progress = asdict(Progress(steps, seconds=float(steps), expected_tau=1.5))
    write_sealed_json(run / "checkpoints" / checkpoint_name(steps) / PROGRESS, progress)
    row = {"name": "as trained", "expected_tau": 2.0, "interval": [1.8, 2.2], "cost": 2.0 / (1.5 if faster else 1.2)}
    size = {"finalists": [row], "chosen": {"name": "as trained", "better": False}}
    (run / "tune.json").write_text(json.dumps({"batch_sizes": [size]}))
    figures = {"tau": 2.1, "speedup": 1.4, "speedup_min": 1.3, "speedup_max": 1.5, "exact_matches": 8, "prompts": 8}
    entry = {"name": checkpoint_name(steps), "batch_size": 1, "slices": []} | figures
    (run / "report.json").write_text(
        json.dumps({"best": entry["name"], "checkpoints": [entry], "measure": {"prompts": "embedded"}})
    )
    return None


@pytest.mark.parametrize(
    ("fails", "free", "title"),
    [
        (False, 1.1, "Serve with `medusa drafter.heads=2`: 1.40x"),
        (False, 1.5, "Serve with the stack's own `prompt_lookup`, 1.50x without training. `medusa drafter.heads=2`: 1.40x"),
        (True, 1.5, "Do not serve `medusa drafter.heads=2` yet, verify vllm failed"),
    ],
    ids=["sound", "without training", "engine differs"],
)
def test_auto_decides_for_the_faster_candidate_and_hands_it_over(
    fails: bool, free: float, title: str, command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = list[list[str]]()

    def run(race: CandidateRace, label: str, line: Sequence[str], place: int = -1) -> str | None:
        lines.append(list(line))
        return leave(race, label, line, fails, free)

    monkeypatch.setattr(CandidateRace, "command", run)
    monkeypatch.setattr(auto, "_engines", lambda stack: iter(["vllm"] if stack == "vllm" else []))
    words = ("auto", "--yes", *TWO, "budget=1h", "measure.repeats=2", "data.seed=3", "logger=none")
    assert command(*words) == 0
    (folder,) = Path("outputs/auto").iterdir()
    page, decision = (folder / "auto.md").read_text(), json.loads((folder / "auto.json").read_text())
    assert page.startswith(f"# {title}") and "serve it" in page
    assert "Predicted over the batch sizes, on held-out conversations: 1.50x (1.35 to 1.65)." in page
    assert "8/8 outputs are those of plain decoding (prompts: embedded)." in page
    assert ("verify vllm failed: the drafts differ" in page) == fails
    assert decision["predicted"]["value"] == 1.5 and decision["serving"] == {"vllm": "serve it", "tgi": "serve it"}
    assert (folder / "auto.png").stat().st_size > 1000
    assert f"Without training: `prompt_lookup` {free:.2f}x, `suffix` {free:.2f}x." in page
    fits = [line for line in lines if line[0] == "fit" and not line[1].endswith(("=prompt_lookup", "=suffix"))]
    assert len(fits) == 5 and all({"data.seed=3", "logger=none"} <= set(line) for line in fits), "two tries, a round, the rest"
    assert ["measure.repeats=2" in line for line in fits] == [False] * 4 + [True]
    assert any(word.startswith("resume=") for word in fits[-1])
    (sampled,) = (line for line in lines if line[0] == "measure")
    assert {"decode=sampling", "measure.repeats=2"} <= set(sampled)
    capfd.readouterr()
    assert command(*words) == 0 and len(lines) == 11, "the same command says what was decided"
    assert "this has been decided" in capfd.readouterr().out
