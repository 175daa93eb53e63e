"""`drafttrain COMMAND [overrides]`.

Hydra composes the configuration; a user's mistake becomes one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import gc
import glob
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from drafttrain import __version__
from drafttrain.cli.error_messages import explain, nearest
from drafttrain.cli.help import COMMANDS, check_needs, check_read, command_help, general_help
from drafttrain.cli.quiet import quiet, settle_streams
from drafttrain.core.errors import Interrupted, OutputError, ParityError, UserError, WorkerError, one_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from drafttrain.cli.config import Run
    from drafttrain.cli.slurm import SlurmRequest

PATH_KEYS = (
    "target.path",
    "drafter.path",
    "data.path",
    "data.files",
    "data.template",
    "data.cache",
    "checkpoint",
    "train.init",
    "prompts",
    "measure.prompts",
    "output",
    "out",
    "engine_python",
    "engine_url",
    "engine_plain_url",
    "resume",
    "report",
    "simulate.alpha",  # its plus sign has a meaning
    "auto.candidates",  # their settings have an equals sign
    "auto.also",
)
TEXT_KEYS = ("prompt",)
BARE = (
    "fit needs to know what to train: drafttrain fit recipe=NAME for the small embedded target, drafttrain fit recipe=NAME "
    "target=DIR data.path=FILE for your model; drafttrain --help lists the recipes"
)
NO_RECIPE = "note: no recipe=NAME, so the default drafter trains with default settings; drafttrain fit --help lists the recipes"
PLAN, YES = "--plan", "--yes"
POSITIONAL = {"compare": "runs"}  # by command: the key for arguments without a key


class Stop(BaseException):
    """Ends the command with a message and an exit code, after a user's mistake or a failed check.

    It is not an Exception: Hydra would print that, and a sweep would run its remaining jobs first.
    """

    def __init__(self, line: str | None, code: int = 2) -> None:
        """line: None: everything has been said."""
        super().__init__(line)
        self.line, self.code = line, code


def main() -> NoReturn:
    """The `drafttrain` command.

    Exit codes: 0 done; 1 bug; 2 user's mistake; 3 an export drafts other tokens than its checkpoint, here or in an engine;
    4 the output of a lossless policy is not that of the target; 75 interrupted, to be resumed; 130 Ctrl-C.
    A Ctrl-C while Python shuts down ends the process by the signal, which shells also show as 130.
    """
    settle_streams()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the final message was printed
        code = 130
    except BrokenPipeError:  # as of `drafttrain --help | head`; Python would print a traceback when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it would print tracebacks in exit handlers
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # Python would otherwise look for garbage in all modules before it ends, which takes a second
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raises errors that are bugs."""
    try:
        return _dispatch(list(arguments))
    except Stop as stop:
        if stop.line is not None:
            print(f"drafttrain: {stop.line}", file=sys.stderr)
        return stop.code
    except Interrupted as interrupted:
        print(f"drafttrain: interrupted {interrupted}", file=sys.stderr)
        return Interrupted.CODE
    except KeyboardInterrupt:
        print("drafttrain: interrupted", file=sys.stderr)
        return 130
    except WorkerError:
        return 1
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        print(f"drafttrain: {line}", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if command is not None and command not in COMMANDS:
        raise UserError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    if "--version" in arguments:
        print(f"drafttrain {__version__}")
        return 0
    flags = _parser().parse_intermixed_args(arguments)
    config_dir = Path(flags.config_dir) if flags.config_dir else None
    if config_dir and not config_dir.is_dir():
        raise UserError(f"--config-dir {config_dir} is not a directory; name the folder that has recipes/ or groups")
    if flags.help:
        print(command_help(command, config_dir) if command else general_help(config_dir))
        return 0
    if flags.shell_completion:
        return _complete(arguments, config_dir)
    if command is None:
        raise UserError(f"there is no command; use one of {', '.join(COMMANDS)}, or drafttrain --help")
    keys = {word.partition("=")[0] for word in flags.overrides}
    if command == "fit" and not (flags.cfg or flags.info):
        if not keys:
            raise UserError(BARE)
        named = keys & {"recipe", "drafter", "resume"}
        if keys & {"target", "target.path"} and not named and os.environ.get("RANK", "0") == "0":
            print(NO_RECIPE, file=sys.stderr)
    planned = command == "auto" or (command == "export" and keys & {"recipe", "drafter"} and "checkpoint" not in keys)
    if flags.yes and command != "auto":
        raise UserError(f"{YES} is of auto, which asks before it starts; leave it out")
    if flags.plan and not planned:
        raise UserError(f"{PLAN} says what an export would give: drafttrain export {PLAN} recipe=NAME target=DIR")
    words = [word for word in flags.overrides if command in POSITIONAL and _is_positional(word)]
    if command not in POSITIONAL and (keyless := [word for word in flags.overrides if "=" not in word and word[:1] != "~"]):
        raise UserError(f"{keyless[0]!r} has no key; write key=value, as in {COMMANDS[command].examples[0]}")
    from drafttrain.runs.options import understood  # with what they import, which help does without

    typed = understood([word for word in flags.overrides if word not in words])
    check_read(command, typed)
    overrides = [quote(word, sweep=flags.multirun) for word in typed]
    if words:
        overrides.append(f"{POSITIONAL[command]}=[{','.join(map(_quoted, words))}]".replace("${", "\\${"))
    if flags.plan:
        has_data = command == "auto" and "target=hf" not in overrides
        data = [] if has_data or any(word.startswith("data.path=") for word in overrides) else ["data.path=unread"]
        overrides += ["export.plan=true", *data]
    overrides += ["auto.yes=true"] if flags.yes else []
    flagged = [word for word in arguments if word not in flags.overrides and word not in (PLAN, YES)]
    _hydra(command, flagged + overrides, config_dir)
    return 0


def _parser() -> argparse.ArgumentParser:
    """A parser of Hydra's flags. Hydra parses them again; this parser reports mistakes in our form first."""
    from hydra._internal.utils import get_args_parser

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message}; drafttrain --help lists the flags")

    parser = Parser(parents=[get_args_parser()], add_help=False)
    parser.add_argument(PLAN, action="store_true", help="of export and auto: only say what would be done")
    parser.add_argument(YES, action="store_true", help="of auto: start without asking")
    return parser


def _is_positional(word: str) -> bool:
    """Whether an argument names a run and is not key=value. A path that contains `=` counts if it exists."""
    return "=" not in word or os.path.lexists(os.path.expanduser(word)) or (glob.has_magic(word) and bool(glob.glob(word)))


def quote(override: str, sweep: bool = False) -> str:
    """Quote the value of a key that takes a path or text, so that Hydra does not interpret `=`, commas and spaces in it.

    sweep: commas separate the values of a sweep; each value is quoted separately.
    """
    key, equals, value = override.partition("=")
    if equals and key in TEXT_KEYS and not sweep:
        text = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # of a locale that is not UTF-8
        return f"{key}={_quoted(text)}".replace("${", "\\${")  # texts have no interpolation
    if not equals or key.lstrip("+") not in PATH_KEYS or value[:1] in ("'", '"') or "${" in value:
        return override
    if value[:1] + value[-1:] == "[]":  # several
        inner = value[1:-1]
        return override if sweep or "'" in inner or '"' in inner else f"{key}=[{','.join(map(_quote_path, inner.split(',')))}]"
    return f"{key}=" + ",".join(map(_quote_path, value.split(",") if sweep else [value]))


def _quote_path(value: str) -> str:
    path = os.path.expanduser(value.strip())
    return path if re.fullmatch(r"[\w./-]*", path) else _quoted(path)


def _quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def _complete(arguments: list[str], config_dir: Path | None) -> int:
    """Shell completion. Hydra completes everything after the command."""
    typed = os.environ.get("COMP_LINE", "").split(" ")
    if "query" in "".join(arguments) and len(typed) == 2:
        print(" ".join(name for name in COMMANDS if name.startswith(typed[1])))
        return 0
    if len(typed) > 2 and typed[1] in COMMANDS:
        os.environ["COMP_LINE"] = " ".join([typed[0], *typed[2:]])
    _hydra("fit", arguments, config_dir)
    return 0


def _hydra(command: str, arguments: list[str], config_dir: Path | None) -> None:
    """Let Hydra compose the configuration and run the command with it, once or for each value of a sweep."""
    quiet()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors; `run` turns them into one line
    with _without_collection():
        import hydra

        from drafttrain.cli.config import register, to_run

        register(config_dir)
    for_slurm: list[SlurmRequest] = []
    finished_runs: list[tuple[Path, Any]] = []  # what the command has made, and its options
    first = os.environ.get("RANK", "0") == "0"
    swept = {key for key, _, value in (word.partition("=") for word in arguments) if "," in value and value[0] not in "[{"}

    def task(composed: DictConfig) -> None:
        try:
            with user_errors():
                run = to_run(composed)
                if run.number is not None and first and run.options.launcher.name == "local":
                    values = " ".join(word for word in run.overrides if word.partition("=")[0] in swept)
                    print(f"sweep, run {run.number}: {values}", flush=True)
                finished_runs.extend((path, run.options) for path in _execute(command, run, config_dir, for_slurm))
        except UserError as error:
            raise Stop(str(error)) from error
        except (ParityError, OutputError) as error:
            raise Stop(one_line(str(error)), error.CODE) from error
        except WorkerError as error:
            raise Stop(None, 1) from error

    sys.argv[1:] = arguments
    hydra.main(version_base="1.3", config_path="pkg://drafttrain.conf", config_name="config")(task)()
    if for_slurm:
        import_module("drafttrain.cli.slurm").submit(command, for_slurm)
    if command == "fit" and finished_runs and first:
        if len(finished_runs) > 1:
            import_module("drafttrain.commands.compare").show_sweep([path for path, _ in finished_runs])
        else:
            import_module("drafttrain.commands.fit").next_steps(*finished_runs[0])


def _execute(command: str, run: Run, config_dir: Path | None, for_slurm: list[SlurmRequest]) -> list[Path]:
    """Run the command; returns the path that it has made, if any.

    for_slurm: gets what Slurm shall run, because the jobs of a sweep are submitted together.
    """
    launcher = run.options.launcher
    check_needs(command, run.options)
    if launcher.name == "local" and launcher.role == "trainer":
        import_module("drafttrain.runs.options").check_paths(run.options)
    with _without_collection():
        function = getattr(import_module(f"drafttrain.commands.{command}"), command)
    if command == "doctor":
        function(Path(run.options.output))
        return []
    config_dir_flags = [f"--config-dir={config_dir.absolute()}"] if config_dir else []
    if launcher.name == "slurm":
        for_slurm.append(import_module("drafttrain.cli.slurm").request_of([*config_dir_flags, *run.overrides], run.options))
        return []
    if command == "auto":
        compose_run = import_module("drafttrain.cli.config").compose_run
        path = function(run.options, run.overrides, partial(_composed, compose_run), config_dir_flags)
        return [] if path is None else [path]
    launch = import_module("drafttrain.cli.launch").launch
    path = launch(partial(_run_explained, function), run.options, run.resolved)
    return [] if path is None else [path]


def _composed(compose_run: Callable[..., Run], recipe: str, words: Sequence[str]) -> Any:
    """The options of a candidate of `auto`."""
    with user_errors(), _without_collection():
        return compose_run(recipe, words).options


@cache
def _freeze_objects() -> None:
    """From now on garbage collections leave out the objects that there are. Once in a process."""
    gc.freeze()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Without garbage collection. Objects made inside are left out of collections afterwards too.

    Imports make a million objects that stay. Searching them takes a fifth of the time of the imports, and half a second in
    each later collection.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        _freeze_objects()


def _run_explained(function: Callable[[Any, dict[str, Any]], object], options: Any, resolved: dict[str, Any]) -> object:
    """Run the command in a process of a launch, and turn users' mistakes into UserErrors there."""
    with user_errors():
        return function(options, resolved)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that the user can fix into UserErrors. Bugs keep their type."""
    try:
        yield
    except Exception as error:
        if (line := explain(error)) is not None:
            raise UserError(line) from error
        raise
