"""What a command line does, and the one line that a wrong one gets."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from drafttrain.cli import main as cli
from drafttrain.commands import fit
from drafttrain.core.errors import UserError
from drafttrain.runs import environment
from drafttrain.runs.options import RunOptions
from tests.runs import trained

Command = Callable[..., int]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunOptions, dict[str, Any]]]:
    """Every call of `fit`, which does nothing else. Nothing needs to be where it is said to be."""
    monkeypatch.setattr("drafttrain.runs.options.check_paths", lambda options: None)
    calls: list[tuple[RunOptions, dict[str, Any]]] = []
    monkeypatch.setattr(fit, "fit", lambda options, resolved: calls.append((options, resolved)))
    return calls


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def raises(options: RunOptions, resolved: dict[str, Any]) -> None:
        raise error

    monkeypatch.setattr(fit, "fit", raises)


MISTAKES: list[tuple[list[str], str]] = [
    (["measure", "out=x"], "measure does not read out: the report goes into output=DIR"),
    (
        ["fit", "recipe=medusa", "checkpoint=x"],
        "fit does not read checkpoint: train.init=DIR starts from a",
    ),
    (["tune", "format=vllm"], "tune does not read format: it is of export; leave it out"),
    (["fit", "engine=vllm"], "fit does not read engine: measure.every=STEPS measure.engine=NAME measures with an engine"),
    (["fot"], "unknown command 'fot'; did you mean fit?"),
    (["xyz"], "unknown command 'xyz'; use one of fit, auto, measure, tune, generate, "),
    ([], "there is no command; use one of fit, auto, measure, tune, generate, "),
    (["fit"], "fit needs to know what to train: drafttrain fit recipe=NAME for"),
    (["measure", "measure.max_new_tokens=4"], "unknown key 'measure.max_new_tokens'; did you mean decode.max_new_tokens?"),
    (["fit", "recipe=medsa"], "unknown recipe 'medsa'; did you mean medusa or medusa2?"),
    (["fit", "drafter=medsa"], "unknown drafter 'medsa'; did you mean medusa?"),
    (["fit", "train.stepz=3"], "unknown key 'train.stepz'; did you mean train.steps?"),
    (["fit", "trian.steps=3"], "unknown key 'trian.steps'; did you mean train.steps"),
    (["fit", "drafter.headz=3"], "unknown key 'drafter.headz'; did you mean drafter.heads?"),
    (["fit", "drafter=eagle", "drafter.heads=3"], "'drafter.heads' is a key of another choice of drafter"),
    (["fit", "recipes=medusa"], "unknown key 'recipes'; did you mean recipe?"),
    (["fit", "+train.foo=1"], "unknown key 'train.foo'"),
    (["fit", "deepspeed.extra.foo=1"], "unknown key 'deepspeed.extra.foo'; +deepspeed.extra.foo=... adds it"),
    (["fit", "train.steps=abc"], "train.steps: Value 'abc' of type 'str' could not be converted to Integer"),
    (["fit", "train=3"], "Config group override must be a string or a list"),
    (["fit", "data=file"], "data.path is not set; add data.path="),
    (["fit", "medusa"], "'medusa' has no key; write key=value, as in drafttrain fit recipe=NAME"),
    (["measure"], "checkpoint is not set; name a run"),
    (["compare"], "runs is not set; name run directories"),
    (["fit", "recipe=medusa", "target=gpt2"], "unknown target 'gpt2'; use one of embedded, hf, or name your model"),
    (["fit", "recipe=medusa,eagle3"], "Ambiguous value for argument 'recipe=medusa,eagle3'; add -m"),
    (["fit", "--nonsense"], "unrecognized arguments: --nonsense"),
    (["fit", "--config-dir", "nowhere"], "--config-dir nowhere is not a directory"),
    (["fit", "-m", "recipe=medusa,medsa"], "unknown recipe 'medsa'; did you mean medusa or medusa2?"),
    (["fit", "-m", "train.lrr=1,2"], "unknown key 'train.lrr'; did you mean train.lr?"),
    (["fit", "-m", "train.steps=1,x"], "train.steps: Value 'x'"),
    (["fit", "launcher.nproc=0"], "launcher.nproc is 0; set it to 1 or more"),
]


def test_cli_mistake_is_refused_in_one_line_with_exit_code_2(
    command: Command, runs: list[Any], capfd: pytest.CaptureFixture[str], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for arguments, message in MISTAKES:
        with subtests.test(arguments=arguments):
            code = command(*arguments)
            out, err = capfd.readouterr()
            assert (code, out) == (2, "")
            assert err.startswith(f"drafttrain: {message}")
            assert err.count("\n") == 1
            assert not runs
            assert not list(tmp_path.iterdir())


@pytest.mark.sampled
@pytest.mark.parametrize("sweep", [[], ["-m"]])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("no weights in /x;\nadd them"), "no weights in /x; add them"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "no space left on the disk at /x/y; free some"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left on the disk; free some"),
        (OSError(errno.EROFS, "Read-only file system", "/x/y"), "/x/y: Read-only file system; allow it, or name another place"),
        (
            PermissionError(errno.EACCES, "Permission denied", "outputs"),
            "outputs: Permission denied; allow it, or name another",
        ),
    ],
)
def test_cli_command_error_ends_single_run_and_sweep_with_code_2(
    error: Exception,
    message: str,
    sweep: list[str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, error)
    assert command("fit", *sweep, "train.lr=1e-3" + (",1e-4" if sweep else "")) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"drafttrain: {message}")
    assert err.count("\n") == 1


def test_cli_sweep_of_unmeasured_runs_ends_with_their_expected_tau(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(options: RunOptions, resolved: dict[str, Any]) -> Path:
        trained(tmp_path / f"rate-{options.train.lr}", 1000 * options.train.lr, options.train.lr)
        return tmp_path / f"rate-{options.train.lr}"

    monkeypatch.setattr(fit, "fit", train)
    assert command("fit", "recipe=medusa", "-m", "train.lr=1.5e-3,2e-3") == 0
    said = capsys.readouterr().out
    assert "sweep, run 2: train.lr=0.002\n" in said and "next:" not in said
    assert "2 runs by expected tau" in said and said.index("rate-0.002") < said.index("rate-0.0015")
    assert command("fit", "recipe=medusa", "train.lr=1.5e-3") == 0
    said = capsys.readouterr().out
    assert "expected tau" not in said and "next:\n  drafttrain measure checkpoint=" in said


def test_cli_unexpected_exception_keeps_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        command("fit", "recipe=medusa")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK"])
def test_cli_launchers_variable_that_is_no_number_is_refused(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "y")
    assert command("measure", "checkpoint=.") == 2
    assert capfd.readouterr().err.startswith(f"drafttrain: {name} is 'y' in the environment, expected a number")


def test_cli_target_given_as_path_is_target_path(command: Command, runs: list[Any], tmp_path: Path) -> None:
    assert command("fit", "recipe=medusa", f"target={tmp_path}") == command("fit", "recipe=medusa", "target=org/model") == 0
    assert [(options.target.name, options.target.path) for options, _ in runs] == [("hf", str(tmp_path)), ("hf", "org/model")]


def test_fit_receives_typed_options_and_resolved_dict(command: Command, runs: list[Any], tmp_path: Path) -> None:
    line = "recipe=medusa target=hf target.path=/models/x data.path=x.jsonl logger=none launcher.nproc=1 deepspeed=zero2"
    assert command("fit", *line.split(), "drafter.heads=2") == 0
    ((options, resolved),) = runs
    assert isinstance(options, RunOptions)
    assert (options.name, options.recipe, options.target.name, options.target.path) == ("medusa", "medusa", "hf", "/models/x")
    assert (options.data.path, options.logger.name, options.deepspeed.zero_stage) == ("x.jsonl", "none", 2)
    assert (options.drafter.family, options.drafter.heads) == ("medusa", 2)
    assert resolved["drafter"]["heads"] == 2
    assert type(resolved["train"]) is dict
    assert not list(tmp_path.iterdir())


def test_cli_sweep_flag_between_overrides_is_accepted(command: Command, runs: list[Any], tmp_path: Path) -> None:
    assert command("fit", "recipe=eagle3", "-m", "train.lr=1e-3,1e-4", "train.steps=7") == 0
    assert [options.train.lr for options, _ in runs] == [1e-3, 1e-4]
    assert {(options.name, options.train.steps) for options, _ in runs} == {("eagle3", 7)}
    assert not list(tmp_path.iterdir())


def test_cli_recipe_has_published_settings_unless_target_is_embedded(command: Command, runs: list[Any]) -> None:
    """A setting that is typed holds: nothing of the target or the data changes it."""
    for words in (["target=org/model"], ["target.path=model"], ["target.path=model", "train.steps=7", "train.lr=1e-3"], []):
        assert command("fit", "recipe=eagle3", *words) == 0
    published, alone, typed, embedded = (options for options, _ in runs)
    assert alone == replace(published, target=alone.target) and alone.target.name == "hf"
    assert (published.train.lr, published.train.lr_width, published.drafter.fc_norm) == (5e-5, 2048, False)
    assert (embedded.train.lr, embedded.train.lr_width, embedded.drafter.fc_norm) == (7e-3, None, True)
    train = typed.train
    assert (train.steps, train.exact_steps, train.lr, train.lr_width) == (7, True, 1e-3, None)
    assert command("fit", "recipe=eagle3", "target=org/model", "train.steps=7", "train.epochs=1") == 0
    assert not runs[-1][0].train.exact_steps, "passes that are typed hold too"


def test_cli_mapping_of_free_keys_is_taken_as_typed(command: Command, runs: list[Any]) -> None:
    assert command("fit", "loss=mix", "loss.mix={ce: 0.1, tvd: 1.8}", "deepspeed.extra={steps_per_print: 5}") == 0
    options, _ = runs[0]
    assert (options.loss.mix, options.deepspeed.extra) == ({"ce": 0.1, "tvd": 1.8}, {"steps_per_print": 5})


def test_cli_loss_that_is_chosen_holds_against_the_recipe(command: Command, runs: list[Any]) -> None:
    """Against a section's loss, and against weights of a mix, which are not added to those that are typed."""
    asked = (["recipe=domino", "target.path=model"], ["recipe=domino", "target.path=model", "loss=tvd"])
    for words in (*asked, ["recipe=dspark", "loss=kl"], ["recipe=dspark", "loss.mix={kl: 1.0}"], ["recipe=dspark"]):
        assert command("fit", *words) == 0
    assert command("fit", "-m", "recipe=domino", "target.path=model", "loss=kl,tvd") == 0
    losses = [(options.loss.name, options.loss.mix) for options, _ in runs]
    assert losses[5:] == [("kl", {}), ("tvd", {})]
    assert losses[:5] == [("ce", {}), ("tvd", {}), ("kl", {}), ("mix", {"kl": 1.0}), ("mix", {"ce": 0.1, "tvd": 1.8})]
    assert all(resolved["loss"]["mix"] == options.loss.mix for options, resolved in runs)


PROMPTS = "measure.prompts=[mt_bench,gsm8k,humaneval:~/x]"
QUOTED = [
    ("data.path=a/b.jsonl", False, "data.path=a/b.jsonl"),
    ("data.path=a=b, c.jsonl", False, "data.path='a=b, c.jsonl'"),
    ("target.path=it's", False, "target.path='it\\'s'"),
    ("data.path=a=1,b=2", True, "data.path='a=1','b=2'"),
    ("data.path='a=1'", False, "data.path='a=1'"),
    ("output=${name}/x", False, "output=${name}/x"),
    ("measure.prompts=[mt_bench, humaneval:a b.jsonl]", False, "measure.prompts=[mt_bench,'humaneval:a b.jsonl']"),
    ("measure.prompts=['a,b.jsonl',gsm8k]", False, "measure.prompts=['a,b.jsonl',gsm8k]"),
    ("train.betas=[0.9, 0.95]", False, "train.betas=[0.9, 0.95]"),
]


def test_cli_quote_escapes_override_values(subtests: pytest.Subtests) -> None:
    for override, sweep, quoted in QUOTED:
        with subtests.test(override=override):
            assert cli.quote(override, sweep) == quoted


def test_cli_paths_with_special_characters_reach_command(command: Command, runs: list[Any]) -> None:
    assert command("fit", "data.path=a b/x=1,2 (it's).jsonl", "train.init=a\\b=c", "resume=~/x", PROMPTS) == 0
    options = runs[0][0]
    assert options.data.path == "a b/x=1,2 (it's).jsonl"
    assert options.measure.prompts == ["mt_bench", "gsm8k", "humaneval:~/x"]
    assert options.train.init == "a\\b=c"
    assert options.resume == str(Path.home() / "x")


def test_cli_help_lists_commands_recipes_and_groups(command: Command, root: Path, capsys: Any) -> None:
    assert command("--help") == 0
    shown = capsys.readouterr().out
    names = [*cli.COMMANDS, *(path.stem for path in (root / "recipes").glob("*.yaml"))]
    names += [part for path in (root / "conf").glob("*/*.yaml") for part in (path.stem, path.parent.name)]
    assert not [name for name in names if f"  {name}" not in shown]
    assert all(len(line.split()) > 1 for line in shown.splitlines() if re.match(r" {4}\S", line))


def test_cli_each_command_has_help(command: Command, capsys: Any, subtests: pytest.Subtests) -> None:
    for name in cli.COMMANDS:
        with subtests.test(name=name):
            code = command(name, "--help")
            assert f"drafttrain {name}" in capsys.readouterr().out and code == 0


def test_cli_help_of_command_shows_its_own_keys_and_groups(command: Command, capsys: Any) -> None:
    assert command("verify", "--help") == 0
    shown = capsys.readouterr().out
    assert "out            an exported directory" in shown and "recipe=NAME" not in shown and "deepspeed" not in shown
    assert command("tune", "--help") == 0
    assert "tune.objective   tpot: time per token of a request" in capsys.readouterr().out
    keys = {field.name for field in fields(RunOptions)}
    assert all({*each.keys, *each.groups} <= keys for each in cli.COMMANDS.values())


def test_cli_cfg_flag_prints_configuration_without_running(command: Command, runs: list[Any], capsys: Any) -> None:
    assert command("fit", "recipe=medusa", "train.steps=9", "--cfg", "job") == 0
    shown = capsys.readouterr().out
    assert "steps: 9" in shown
    assert "family: medusa" in shown
    assert not runs


COMPLETED = [
    ("drafttrain fi", {"fit"}),
    ("drafttrain fit recipe=hyd", {"recipe=hydra"}),
    ("drafttrain fit data=ultra", {"data=ultrachat"}),
    ("drafttrain measure train.ste", {"train.steps="}),
]


def test_shell_completion_proposes_matching_words(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any, subtests: pytest.Subtests
) -> None:
    for line, words in COMPLETED:
        with subtests.test(line=line):
            monkeypatch.setenv("COMP_LINE", line)
            code = command("--shell-completion", "query=bash")
            assert set(capsys.readouterr().out.split()) == words and code == 0


def test_shell_completion_install_prints_registration(command: Command, capsys: Any) -> None:
    assert command("--shell-completion", "install=bash") == 0
    assert capsys.readouterr().out.rstrip().endswith("drafttrain")


def test_cli_version_flag_prints_version(command: Command, capsys: Any) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"drafttrain {cli.__version__}\n"


def test_doctor_prints_environment_for_bug_reports(command: Command, tmp_path: Path, capsys: Any) -> None:
    assert command("doctor") == 0
    shown = capsys.readouterr().out
    for word in ("python", *environment.PACKAGES, "cpu", "c++", "nvcc", "kernels", "gpu", "output", "cache", "W&B"):
        assert word in shown
    assert not list(tmp_path.iterdir())


def test_doctor_unwritable_output_folder_is_refused(command: Command, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    assert command("doctor", "output=file") == 2
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("cli.run = lambda arguments: atexit.register(ctrl_c) and 75", -signal.SIGINT),
        pytest.param("cli.run = lambda arguments: ctrl_c()", 130, marks=pytest.mark.slow),
        pytest.param(
            "signal.signal(signal.SIGINT, signal.SIG_IGN); cli.run = lambda arguments: atexit.register(ctrl_c) and 75",
            75,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["at exit", "at its message", "ignored"],
)
def test_cli_sigint_during_exit_leaves_no_traceback(ending: str, code: int) -> None:
    script = (
        "import atexit, os, signal\n"
        "from drafttrain.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "ctrl_c = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        f"{ending}\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, "")


HEAVY = ("transformers", "deepspeed", "peft", "wandb")


@pytest.mark.parametrize(
    ("command", "unneeded"),
    [
        (["fit", "recipe=medusa", "--cfg", "job"], ("torch", "matplotlib")),
        (["fit", "recipe=medusa", "train.schedule=linear"], ("torch", "matplotlib")),
        pytest.param(["fit", "--help"], ("torch", "matplotlib"), marks=pytest.mark.slow),
        pytest.param(["doctor"], HEAVY, marks=pytest.mark.slow),
        pytest.param(["simulate", "simulate.trials=100", "out={folder}/picture.png"], HEAVY, marks=pytest.mark.slow),
    ],
)
def test_cli_command_imports_only_needed_packages(command: list[str], unneeded: tuple[str, ...], tmp_path: Path) -> None:
    """Each of these takes a second or more to import."""
    words = [word.format(folder=tmp_path) for word in command]
    check = (
        f"import sys; from drafttrain.cli.main import run; run({words!r}); print([m for m in {unneeded!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout[-500:]


def test_cli_output_whose_reader_has_gone_ends_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "drafttrain", "--help"], stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_cli_missing_path_is_said_before_torch_is_imported(command: Command, subtests: pytest.Subtests, capfd: Any) -> None:
    for word, message in (
        ("data.path=/no/data.jsonl", "/no/data.jsonl: expected a data file, got nothing there"),
        ("target=./no", "target.path './no' does not exist; set it to a model directory or a hub id"),
        ("prompts=~no.jsonl", "~no.jsonl: expected a data file, got nothing there"),
        ("measure.prompts=[mt_bench,./no.jsonl]", "no.jsonl: expected a data file, got nothing there"),
        ("data.path=no.jsonl", "no.jsonl: expected a data file, got nothing there"),
        ("data.template=no.jinja", "data.template=no.jinja: expected a Jinja file in UTF-8, got none"),
        ("resume=no", "resume is 'no', which is not a run directory"),
        ("train.init=no", "train.init 'no' does not exist; name a run, one of its step-NNNNN directories, or"),
        ("train.init=outputs/no", "train.init 'outputs/no' does not exist"),
    ):
        with subtests.test(word=word), pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "drafttrain.commands.fit", None)  # an import would fail
            assert command("fit", "recipe=medusa", word) == 2
            assert capfd.readouterr().err.startswith(f"drafttrain: {message}")


def test_cli_value_out_of_its_limit_is_refused_before_torch_is_imported(
    command: Command, subtests: pytest.Subtests, capfd: Any
) -> None:
    for name, word, message in (
        ("fit", "train.schedule=linear", "train.schedule is 'linear'; choose one of cosine, wsd, constant\n"),
        ("measure", "measure.batch_sizes=[1,0]", "measure.batch_sizes has 0; set it to 1 or more\n"),
        ("tune", "tune.minutes=0", "tune.minutes is 0; set it above 0\n"),
    ):
        with subtests.test(word=word), pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, f"drafttrain.commands.{name}", None)  # an import would fail
            assert command(name, word) == 2
            assert capfd.readouterr().err.startswith(f"drafttrain: {message}")


def test_family_options_are_defined_in_the_module_without_torch() -> None:
    from drafttrain.drafters import families, schemas

    assert schemas() == {name: family.options for name, family in families().items()}
    assert {schema.__module__ for schema in schemas().values()} == {"drafttrain.drafters.options"}


def test_cli_renamed_keys_are_read_with_a_note(command: Command, runs: list[Any], tmp_path: Path, capsys: Any) -> None:
    assert command("fit", "recipe=eagle", "features.law=top_k", "drafter.law_weight=0.2") == 0
    options = runs[0][0]
    assert (options.features.distribution, options.drafter.distribution_weight) == ("top_k", 0.2)
    note = "note: features.law is called features.distribution now\n"
    assert capsys.readouterr().err == note + "note: drafter.law_weight is called drafter.distribution_weight now\n"


# last: after the recipes of a folder all is registered again
def test_cli_config_dir_recipes_and_groups_are_used(command: Command, runs: list[Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "own" / "recipes").mkdir(parents=True)
    (tmp_path / "own" / "loss").mkdir()
    (tmp_path / "own" / "recipes" / "mine.yaml").write_text(
        "# my own run\n# @package _global_\ndefaults:\n  - override /drafter: eagle3\n  - override /loss: mine\nname: mine\n"
        "features:\n  law: top_k\n"
    )
    (tmp_path / "own" / "loss" / "mine.yaml").write_text("# my loss\nname: ce\nchunk: 77\n")
    assert command("fit", "--config-dir", "own", "recipe=mine") == 0
    options = runs[0][0]
    assert (options.name, options.drafter.family, options.loss.chunk) == ("mine", "eagle3", 77)
    assert options.features.distribution == "top_k", "it was renamed"
    assert command("--help", "--config-dir", "own") == 0
    shown = capsys.readouterr().out
    assert "my own run" in shown
    assert "my loss" in shown


def test_cli_broken_recipe_names_its_line(command: Command, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "broken.yaml").write_text("name: x\nfoo: [1\n")
    assert command("fit", "--config-dir", ".", "recipe=broken") == 2
    assert "recipe broken, line" in capsys.readouterr().err
