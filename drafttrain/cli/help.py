"""The help pages. Texts on recipes and groups come from the first comment of each YAML file. Imports stay light."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.core.errors import UserError
from drafttrain.drafters import schemas

if TYPE_CHECKING:
    from drafttrain.runs.options import RunOptions


@dataclass(frozen=True, slots=True)
class Command:
    """The help of a command, which is the function `drafttrain.commands.<name>.<name>`."""

    summary: str
    examples: tuple[str, ...]
    keys: tuple[str, ...] = ()  # of the top level, that not all commands read
    needs: tuple[str, ...] = ()  # those of them that must be set
    groups: tuple[str, ...] = ()  # of the configuration, that it reads


COMMANDS = {
    "fit": Command(
        "train a drafter for a frozen target, then measure every kept checkpoint",
        (
            "drafttrain fit recipe=NAME",
            "drafttrain fit recipe=NAME target=DIR data.path=FILE",
            "drafttrain fit recipe=NAME resume=auto",
            "drafttrain fit recipe=NAME launcher.nproc=2 deepspeed=zero2",
            "drafttrain fit recipe=NAME -m train.lr=1e-3,3e-4",
        ),
        keys=("prompts", "resume", "engine_python"),
        groups=(
            *("target", "drafter", "data", "features", "loss", "train", "deepspeed", "decode"),
            *("measure", "logger", "launcher"),
        ),
    ),
    "auto": Command(
        "pick the drafter: race the families that your stacks load, train the best, prove it and export it",
        (
            "drafttrain auto target=DIR data.path=FILE export.stacks=[vllm] budget=8h",
            "drafttrain auto --plan target=DIR export.stacks=[vllm,sglang]",
            "drafttrain auto --yes budget=15m auto.candidates=[NAME,NAME] auto.batch_sizes=[1]",
        ),
        keys=("budget",),
        groups=("target", "data", "train", "decode", "measure", "prepare", "logger", "launcher"),
    ),
    "measure": Command(
        "measure a checkpoint: acceptance, speed and exactness, also in serving engines",
        (
            "drafttrain measure checkpoint=DIR",
            "drafttrain measure checkpoint=DIR prompts=FILE decode=sampling",
            "drafttrain measure checkpoint=DIR engine=[transformers,openvino]",
            "drafttrain measure checkpoint=DIR engine=http engine_url=http://HOST:8000/v1 engine_plain_url=http://HOST:8001/v1",
            "drafttrain measure checkpoint=DIR target=DIR target.tensor_parallel=4 launcher.nproc=4",
        ),
        keys=(
            *("checkpoint", "prompts", "engine", "engine_python", "engine_url", "engine_plain_url", "engine_model"),
            *("engine_key_env", "engine_api"),
        ),
        needs=("checkpoint",),
        groups=("measure", "decode", "target", "launcher"),
    ),
    "tune": Command(
        "find the fastest draft length or tree on this machine, and store it with the checkpoint",
        (
            "drafttrain tune checkpoint=DIR",
            "drafttrain tune checkpoint=DIR tune.batch_size=8 tune.objective=throughput prompts=FILE",
            "drafttrain tune checkpoint=DIR decode=sampling",
        ),
        keys=("checkpoint", "prompts"),
        needs=("checkpoint",),
        groups=("tune", "decode", "target"),
    ),
    "generate": Command(
        "complete a prompt or chat with a checkpoint, streaming; accepted draft tokens are coloured",
        (
            "drafttrain generate checkpoint=DIR prompt='def main('",
            "drafttrain generate checkpoint=DIR decode=sampling",
            "drafttrain generate checkpoint=DIR chat=false < FILE",
        ),
        keys=("checkpoint", "prompt", "chat"),
        groups=("decode", "target"),
    ),
    "prepare": Command(
        "have the target answer the prompts of a data set again: drafters learn best from replies of their target",
        (
            "drafttrain prepare target=DIR data.path=FILE out=DIR",
            "drafttrain prepare target=DIR data.path=FILE out=DIR launcher.nproc=8",
            "drafttrain prepare prepare.server=http://HOST:8000/v1 data.path=FILE out=DIR",
            "drafttrain prepare data.path=FILE out=DIR prepare.temperatures=[0,0.8] prepare.weights=[4,1] prepare.samples=2",
            "drafttrain fit recipe=NAME target=DIR data.path=DIR",
        ),
        keys=("out",),
        needs=("out",),
        groups=("prepare", "data", "target", "launcher"),
    ),
    "inspect": Command(
        "show training data as the drafter sees it: supervised tokens, statistics, copies of evaluation prompts",
        (
            "drafttrain inspect",
            "drafttrain inspect target=DIR data.path=FILE",
            "drafttrain inspect data.path=FILE prompts=FILE out=PAGE.html",
        ),
        keys=("prompts", "out"),
        groups=("inspect", "data", "target"),
    ),
    "export": Command(
        "write a checkpoint for a serving stack, and check that it drafts the same tokens there",
        (
            "drafttrain export checkpoint=DIR format=vllm out=DIR",
            "drafttrain export checkpoint=DIR format=all out=DIR dtype=bfloat16",
            "drafttrain export checkpoint=DIR format=vllm out=DIR quantize=fp8",
            "drafttrain export checkpoint=DIR format=llamacpp out=DIR with_target=true",
            "drafttrain export checkpoint=DIR format=sglang out=DIR overwrite=true push_to_hub=OWNER/NAME",
            "drafttrain export checkpoint=PUBLISHED target=DIR format=sglang out=DIR",
        ),
        keys=(
            *("checkpoint", "format", "out", "dtype", "quantize", "adapter", "overwrite", "max_shard_size", "with_target"),
            *("push_to_hub", "push_private", "prompts"),
        ),
        needs=("checkpoint", "out", "format"),
        groups=("target",),
    ),
    "verify": Command(
        "run a serving engine on an export, and check that it accepts as many drafts as our decoder",
        (
            "drafttrain verify engine=vllm out=DIR checkpoint=DIR",
            "drafttrain verify engine=openvino out=DIR checkpoint=DIR prompts=FILE decode.draft_length=3",
            "drafttrain verify engine=vllm out=DIR checkpoint=DIR engine_python=VENV/bin/python",
        ),
        keys=("engine", "out", "checkpoint", "prompts", "engine_python"),
        needs=("engine", "out", "checkpoint"),
        groups=("decode", "target"),
    ),
    "compare": Command(
        "rank measured runs, and test which differences are significant",
        (
            "drafttrain compare RUN RUN",
            "drafttrain compare 'outputs/NAME/*' ENTITY/PROJECT/RUN out=DIR",
            "drafttrain compare 'multirun/**' compare.sort=tau compare.checkpoints=all",
        ),
        keys=("out",),
        needs=("runs",),
        groups=("compare",),
    ),
    "simulate": Command(
        "compute speedup and break-even points from acceptance, draft cost, batch size and tree shape",
        (
            "drafttrain simulate simulate.alpha=0.8 simulate.draft_cost=0.05",
            "drafttrain simulate checkpoint=DIR simulate.alpha=+0.05",
            "drafttrain simulate report=FILE out=PICTURE.png",
        ),
        keys=("checkpoint", "report", "out"),
        groups=("simulate",),
    ),
    "doctor": Command(
        "print versions, devices, compilers, kernel backend, writable paths and W&B state",
        ("drafttrain doctor",),
    ),
}
# the options that a command has to itself
OWN_OPTIONS = {
    "auto": ("runs/options.py", "AutoOptions"),
    "prepare": ("data/__init__.py", "PrepareOptions"),
    "inspect": ("data/__init__.py", "InspectOptions"),
    "measure": ("measure/__init__.py", "MeasureOptions"),
    "tune": ("measure/__init__.py", "TuneOptions"),
    "compare": ("measure/compare/__init__.py", "CompareOptions"),
    "simulate": ("measure/simulate/__init__.py", "SimulateOptions"),
}
# where a key that the command does not read may come from another idea of it
HINTS = {
    ("auto", "prompts"): "measure.prompts=FILE names those of the last measurement",
    ("fit", "checkpoint"): "train.init=DIR starts from a checkpoint's weights, resume=DIR continues a run",
    ("fit", "engine"): "measure.every=STEPS measure.engine=NAME measures with an engine while training goes on",
    ("measure", "out"): "the report goes into output=DIR",
}
# how a key that a command needs is given
GIVEN = {
    "checkpoint": "name a run, one of its step-NNNNN directories, or a published drafter, with checkpoint=DIR",
    "out": "name a directory with out=DIR",
    "format": "name a serving stack, as format=vllm, or format=all; drafttrain export --help lists them",
    "engine": "name an engine, as engine=vllm; drafttrain verify --help lists them",
    "runs": "name run directories, as in drafttrain compare RUN RUN",
}
COLUMNS = 120
FLAGS = {
    "-m": "sweep: key=a,b,c runs each value",
    "--plan": "export: only say which stacks load the drafter of recipe=NAME for target=DIR; auto: only print the plan",
    "--yes": "auto: start without asking",
    "--cfg job": "print the configuration and stop; -p GROUP prints one group",
    "--config-dir DIR": "your own groups in DIR, your own recipes in DIR/recipes/",
    "--shell-completion install=SHELL": 'bash, zsh or fish: eval "$(drafttrain --shell-completion install=bash)"',
    "--version": "print the version",
}


def general_help(config_dir: Path | None = None) -> str:
    """The text of `drafttrain --help`."""
    return "\n".join(
        [
            "usage: drafttrain COMMAND [recipe=NAME] [group=CHOICE] [key=value] [flags]",
            *_section("commands", {name: command.summary for name, command in COMMANDS.items()}),
            *_choices(config_dir),
            *_section("flags", FLAGS),
            "",
            "drafttrain COMMAND --help shows examples.",
        ]
    )


def command_help(name: str, config_dir: Path | None = None) -> str:
    """The text of `drafttrain <name> --help`."""
    return "\n".join(
        [
            f"drafttrain {name}: {COMMANDS[name].summary}",
            "",
            "examples",
            *(f"  {line}" for line in COMMANDS[name].examples),
            *_keys(name),
            *_choices(config_dir, name),
            *_section(
                "flags", {flag: description for flag, text in FLAGS.items() if (description := _for_command(name, text))}
            ),
            "",
            f"drafttrain {name} --cfg job prints every key with its value.",
        ]
    )


def check_read(command: str, words: Sequence[str]) -> None:
    """Raise UserError for an override that this command would ignore."""
    for key in (word.partition("=")[0].lstrip("+") for word in words):
        readers = [name for name, each in COMMANDS.items() if key in each.keys]
        if readers and command not in readers:
            way_out = HINTS.get((command, key), f"it is of {', '.join(readers)}; leave it out")
            raise UserError(f"{command} does not read {key}: {way_out}")


def check_needs(command: str, options: RunOptions) -> None:
    """Raise UserError for a key without which the command has nothing to do."""
    for key in () if options.export.plan else COMMANDS[command].needs:
        if not getattr(options, key):
            raise UserError(f"{key} is not set; {GIVEN[key]}")


def recipe_files(config_dir: Path | None = None) -> dict[str, Traversable]:
    """Recipes by name: the package's, and the user's, which take precedence."""
    folders: list[Traversable] = [resources.files("drafttrain.recipes")]
    if config_dir is not None and (config_dir / "recipes").is_dir():
        folders.append(config_dir / "recipes")
    return {name: file for folder in folders for name, file in _yaml_files(folder).items()}


def group_files(config_dir: Path | None = None) -> dict[str, dict[str, Traversable]]:
    """The files of each group of the configuration by name: the package's, and the user's, which take precedence."""
    groups: dict[str, dict[str, Traversable]] = {}
    for root in [resources.files("drafttrain.conf"), *([config_dir] if config_dir else [])]:
        for folder in root.iterdir():
            if folder.is_dir() and (files := _yaml_files(folder)):
                groups[folder.name] = groups.get(folder.name, {}) | files
    return groups


def _choices(config_dir: Path | None, command: str | None = None) -> list[str]:
    """The sections on groups, of those that the command reads, and on recipes if it reads a drafter's. None: all."""
    commands = COMMANDS if command is None else [command]
    groups_read, lines = {group for name in commands for group in COMMANDS[name].groups}, list[str]()
    if "drafter" in groups_read:
        recipes = {name: _headline(file) for name, file in recipe_files(config_dir).items()}
        lines += _section("recipes (recipe=NAME)", recipes)
    groups = {
        group: {name: _headline(file) for name, file in files.items()}
        for group, files in group_files(config_dir).items()
        if group in groups_read
    }
    if "drafter" in groups_read:
        about = {name: str(schema.__doc__).partition("\n")[0].rstrip(".") for name, schema in schemas().items()}
        groups["drafter"] = dict(sorted((groups["drafter"] | about).items()))
    lines += ["", "groups (group=CHOICE)"] if groups else []
    for group, choices in sorted(groups.items()):
        lines += [f"  {group}", *(f"    {name:<16}{text}" for name, text in choices.items())]
    return lines


def _keys(command: str) -> list[str]:
    """The section on a command's own keys, with the comments beside their fields."""
    comments = field_comments("runs/options.py", "RunOptions")
    rows = {key: _for_command(command, comments[key]) for key in COMMANDS[command].keys}
    if command in OWN_OPTIONS:
        own_keys = {key: _for_command(command, text) for key, text in field_comments(*OWN_OPTIONS[command]).items()}
        rows |= {f"{command}.{key}": text for key, text in own_keys.items() if text}
    return _section("keys (key=VALUE)", rows) if rows else []


def _for_command(command: str, text: str) -> str:
    """Of a comment such as `prepare, tune: A; export: B` what is about this command, or about all."""
    parts = re.split(rf"(?:^|; )((?:(?:{'|'.join(COMMANDS)})(?:, |: ))+)", text)
    clauses = [text for names, text in zip(parts[1::2], parts[2::2], strict=True) if command in re.findall(r"\w+", names)]
    return "; ".join(filter(None, [parts[0], *clauses]))


def field_comments(file: str, name: str) -> dict[str, str]:
    """The comments of a dataclass by field, each beside it or in the lines above it, without an import of the file."""
    source = (resources.files("drafttrain") / file).read_text(encoding="utf-8")
    body = source.partition(f"class {name}:")[2].partition("\n\n\n")[0]
    comments, above = dict[str, str](), list[str]()
    for line in body.splitlines():
        code, _, comment = line.partition("  # " if not line.startswith("    #") else "# ")
        if not code.strip():
            above.append(comment)
        elif field_match := re.match(r" {4}(\w+): ", code):
            comments[field_match[1]] = " ".join([*above, comment]).strip()
            above = []
    return comments


def _section(title: str, rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    lines = ["", title]
    for name, text in rows.items():
        lines += textwrap.wrap(text, COLUMNS, initial_indent=f"  {name:<{width}}  ", subsequent_indent=" " * (width + 4))
    return lines


def _yaml_files(folder: Traversable) -> dict[str, Traversable]:
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files}


def _headline(file: Traversable) -> str:
    """The first comment of a YAML file that is not a Hydra directive."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package") and line.strip("# "):
            return line.strip("# ")
    return ""
