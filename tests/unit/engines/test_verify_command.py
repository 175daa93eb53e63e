"""`drafttrain verify` as it is typed, with transformers as the engine: it is in this very Python."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from drafttrain.commands.verify import cases_of
from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.files import LISTED
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, save_drafter
from drafttrain.engines import process as engine
from drafttrain.engines.process import ENGINES, Engine, EngineJob, EngineResult, python_of, run
from drafttrain.export.engine_check import DecodedSequence, Ending, EngineCheck, engine_check, first_difference
from drafttrain.runs.options import RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from tests.exports import embedded, record_of

Command = Callable[..., int]
ENDING = Ending(frozenset({1}), 5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of the embedded target: all its blocks but the last two, untrained."""
    family, target = families()["draft_model"], load_target(TargetOptions())
    options = family.options(blocks=10, draft_length=3)
    record = record_of(target)
    directory = tmp_path_factory.mktemp("run") / "step-00001"
    directory.mkdir()
    meta = CheckpointMeta("draft_model", dataclasses.asdict(options), {}, record, step=1)
    save_drafter(directory, family.build(options, target.target).state_dict(), meta)
    return directory


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from drafttrain.cli import main as cli

    out = tmp_path_factory.mktemp("exported") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["drafttrain"])
        assert cli.run(["export", f"checkpoint={checkpoint}", "format=transformers", f"out={out}"]) == 0
    return out


def asked(exported: Path, checkpoint: Path, *more: str) -> list[str]:
    return [
        "verify", "engine=transformers", f"out={exported}", f"checkpoint={checkpoint}", "measure.limit=2",
        "decode.max_new_tokens=12", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_verify_command_passes_good_export_and_fails_damaged_one(
    command: Command, exported: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*asked(exported, checkpoint)) == 0
    said = capsys.readouterr().out
    assert "by transformers" in said and "2 of 2 as the target" in said and "tau" in said
    (file,) = tmp_path.glob("outputs/verify/*/verification.json")
    report = json.loads(file.read_text())
    assert report["holds"] and report["ours"] == report["theirs"] > 0
    assert report["ours_by_position"] == report["theirs_by_position"] and len(report["ours_by_position"]) == 3
    assert (report["family"], report["stack"], report["draft_length"]) == ("draft_model", "transformers", 3)
    weights = exported / "model.safetensors"
    whole = weights.read_bytes()
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].roll(1)
    save_file(tensors, weights, {"format": "pt"})
    sums = (exported / LISTED).read_bytes()
    try:
        assert command(*asked(exported, checkpoint)) == 2
        said = capsys.readouterr().err
        assert "model.safetensors is damaged or cut off: its sha256 is not that in drafttrain-checksums.json" in said
        (exported / LISTED).unlink()  # as if it had been exported so
        assert command(*asked(exported, checkpoint)) == 3
    finally:
        weights.write_bytes(whole)
        (exported / LISTED).write_bytes(sums)
    caught = capsys.readouterr()
    assert "2 of 2 as the target" in caught.out
    assert "drafttrain: Parity: accepted drafts: transformers accepts" in caught.err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["engine=sglang", "out=x", "checkpoint=."],
            "engine is 'sglang'; choose one of vllm, openvino, transformers, speculators",
        ),
        ([], "engine is not set; name an engine, as engine=vllm; drafttrain verify --help lists them"),
        (["engine=vllm", "out=x"], "checkpoint is not set; name a run"),
        (["engine=vllm", "out=x", "checkpoint=."], "which is not an export (drafttrain.json cannot be read)"),
    ],
)
def test_verify_command_missing_arguments_are_refused(
    command: Command, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", *arguments) == 2
    assert line in capsys.readouterr().err


def test_verify_command_export_of_other_checkpoint_or_stack_is_refused(
    command: Command, exported: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    record: dict[str, Any] = json.loads((exported / "drafttrain.json").read_text())
    for change, line in (
        ({"checkpoint": "0" * 64}, "was not exported from"),
        ({"stack": "vllm"}, "was written for vllm; transformers loads exports with format=transformers"),
    ):
        (other / "drafttrain.json").write_text(json.dumps(record | change))
        assert command(*asked(other, checkpoint)) == 2
        assert line in capsys.readouterr().err
    (other / "drafttrain.json").write_text(json.dumps({"version": "0", "written": ["vllm", "tgi"], "refused": {}}))
    assert command(*asked(other, checkpoint)) == 2
    assert "which has exports for several stacks; name one of vllm, tgi in it" in capsys.readouterr().err
    (other / "drafttrain.json").write_text(json.dumps({"stack": "transformers", "family": "draft_model"}))
    assert command(*asked(other, checkpoint)) == 2
    assert "has no layout, dtype, checkpoint; export again" in capsys.readouterr().err
    assert command(*asked(exported, checkpoint, "engine_python=/nowhere/python")) == 2
    assert "engine_python is '/nowhere/python', which is no file" in capsys.readouterr().err


def test_verify_prompts_that_leave_no_room_are_left_out_by_name() -> None:
    """An engine refuses them: its error ended the command."""
    options, loaded, said = RunOptions(), embedded(), io.StringIO()
    positions = loaded.target.shape.max_positions
    every, nothing = cases_of(options, loaded, 5, Console(file=said))
    assert not nothing and not said.getvalue()
    longest = max(len(case.tokens) for case in every)
    options.decode.max_new_tokens = positions - longest - 5 - 2 + 1
    kept, left_out = cases_of(options, loaded, 5, Console(file=said, width=200))
    assert left_out == [case.question_id for case in every if len(case.tokens) == longest]
    assert len(kept) == len(every) - len(left_out) and f"were left out: {left_out[0]}" in said.getvalue()


def test_engine_not_installed_error_names_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    absent = Engine("Nothing", "no_such_engine", ("nothing==1",), ("vllm",), ("torchaudio",))
    monkeypatch.setitem(ENGINES, "nothing", absent)
    with pytest.raises(UserError) as caught:
        python_of("nothing", None)
    pip = ".venv-engines/nothing/bin/python -m pip"
    way = f"python3 -m venv .venv-engines/nothing && {pip} install nothing==1 && {pip} uninstall -y torchaudio"
    assert f"install it ({way}), or name the Python" in str(caught.value)


SCRIPT = """
import os, sys
def decoded(job):
    assert not os.listdir(job["scratch"]) and os.environ["ONLY_HERE"] == "1" and "PYTHONPATH" not in os.environ
    {body}
    return result
"""
ANSWER = """result = {"engine": "spoken", "versions": {"spoken": "1"}, "outputs": job["prompts"], "accepted": 1, "drafted": 2,
"begins": "plain", "ends": "whole", "prompts": [{"accepted": 1, "drafted": 2}]}"""


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (ANSWER, None),
        ("raise ValueError('no room')", "Spoken: ValueError: no room"),
        ("print('first'); sys.exit('a bad day')", "Spoken ended with 1 and no result: first | a bad day"),
        (ANSWER + "; result['ends'] = 'soon'", "Spoken: its result does not have the required form"),
        ("result = {'engine': 'spoken'}", "Spoken: its result does not have the required form"),
    ],
)
def test_engine_script_result_or_error_is_reported(
    body: str, line: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "SCRIPTS", tmp_path)
    monkeypatch.setitem(ENGINES, "spoken", Engine("Spoken", "json", (), (), environment={"ONLY_HERE": "1"}))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    (tmp_path / "spoken.py").write_text(SCRIPT.replace("{body}", body))
    job = EngineJob("target", "drafter", "eagle", "vllm", 3, 8, [0], [[5, 6]])
    if line is None:
        outcome = run("spoken", python_of("spoken", None), job)
        assert outcome.outputs == [[5, 6]] and outcome.prompts is not None and outcome.prompts[0].drafted == 2
        return
    with pytest.raises(UserError) as caught:
        run("spoken", python_of("spoken", None), job)
    assert line in str(caught.value)


def found(tolerance: float = 0.0, **more: Any) -> EngineCheck:
    """Two texts of five tokens; two drafts accepted of the first, none of the second."""
    told = {"outputs": [[9, 8, 7, 6, 5], [4, 4, 4, 4]], "accepted": 2, "drafted": 9, "accepted_by_position": [1, 1, 0]}
    told |= {"prompts": [{"accepted": 2, "drafted": 6}, {"accepted": 0, "drafted": 12}], "begins": "plain", "ends": "cut"}
    sequences = [DecodedSequence([9, 8, 7, 6, 5, 3], [2, 0, 0], 1), DecodedSequence([4, 4, 4, 4, 1, 4, 4], [0, 0, 0, 0, 0], 1)]
    outcome = EngineResult.of({"engine": "spoken", "versions": {}} | told | more)
    return engine_check(outcome, ["a", "b"], [[9, 8, 7, 6, 5], [4, 4, 4, 4, 1]], sequences, ENDING, 3, tolerance)


def test_engine_check_holds_for_equal_counts_and_fails_otherwise() -> None:
    """The stop token that ended a text may be left out."""
    good = found()
    good.check()
    assert good.holds and good.tau == 1 + 2 / 6 and good.ours_by_position == [1, 1, 0]
    assert found(prompts=None, accepted_by_position=None).holds
    for wrong, line in (
        ({"accepted": 3}, "Parity: accepted drafts: spoken accepts 3, our decoder 2"),
        ({"accepted_by_position": [2, 0, 0]}, "not at the same positions: \\[2, 0, 0\\] there, \\[1, 1, 0\\] here"),
        (
            {"prompts": [{"accepted": 1, "drafted": 6}, {"accepted": 1, "drafted": 12}]},
            "our decoder 2 of the same chains, but not of the same texts: of prompt a it accepts 1, we 2",
        ),
        ({"outputs": [[9, 8, 7, 7, 5], [4, 4, 4, 4]]}, "Parity: output: 1 of 2 texts are not the target's own"),
    ):
        with pytest.raises(ParityError, match=line):
            found(**wrong).check()
    assert found(outputs=[[9, 8, 7, 7, 5], [4, 4, 4]]).lines[1].differs == 3


def test_engine_check_with_tolerance_allows_other_counts_but_no_other_text() -> None:
    found(0.5, accepted=3, accepted_by_position=[2, 1, 0]).check()
    for wrong, line in (({"accepted": 4}, "spoken accepts 4, our decoder 2"), ({"outputs": [[9, 8], [4, 4]]}, "2 of 2 texts")):
        with pytest.raises(ParityError, match=line):
            found(0.5, **wrong).check()


def test_engine_check_with_tolerance_allows_one_draft_where_there_are_few() -> None:
    found(0.1, accepted=3, accepted_by_position=[2, 1, 0]).check()
    with pytest.raises(ParityError, match="spoken accepts 4, our decoder 2"):
        found(0.1, accepted=4).check()


def test_first_difference_ignores_missing_stop_token() -> None:
    stops = frozenset({1})
    assert first_difference([3, 4, 1], [3, 4], stops) is None
    assert first_difference([3, 4], [3, 4, 1], stops) is None
    assert first_difference([3, 4, 5], [3, 4], stops) == 2
    assert first_difference([], [], stops) is None
