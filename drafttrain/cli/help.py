"""The help pages. Texts on recipes and groups come from the first comment of each YAML file. Imports stay light."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Command:
    """The help of a command, which is the function `drafttrain.commands.<name>.<name>`."""

    summary: str
    examples: tuple[str, ...]


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
    ),
    "tune": Command(
        "find the fastest draft length or tree on this machine, and store it with the checkpoint",
        (
            "drafttrain tune checkpoint=DIR",
            "drafttrain tune checkpoint=DIR tune.batch_size=8 tune.objective=throughput prompts=FILE",
            "drafttrain tune checkpoint=DIR decode=sampling",
        ),
    ),
    "generate": Command(
        "complete a prompt or chat with a checkpoint, streaming; accepted draft tokens are coloured",
        (
            "drafttrain generate checkpoint=DIR prompt='def main('",
            "drafttrain generate checkpoint=DIR decode=sampling",
            "drafttrain generate checkpoint=DIR chat=false < FILE",
        ),
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
    ),
    "inspect": Command(
        "show training data as the drafter sees it: supervised tokens, statistics, copies of evaluation prompts",
        (
            "drafttrain inspect",
            "drafttrain inspect target=DIR data.path=FILE",
            "drafttrain inspect data.path=FILE prompts=FILE out=PAGE.html",
        ),
    ),
    "export": Command(
        "write a checkpoint for a serving stack, and check that it drafts the same tokens there",
        (
            "drafttrain export checkpoint=DIR format=vllm out=DIR",
            "drafttrain export checkpoint=DIR format=all out=DIR dtype=bfloat16",
            "drafttrain export checkpoint=DIR format=llamacpp out=DIR with_target=true",
            "drafttrain export checkpoint=DIR format=sglang out=DIR overwrite=true push_to_hub=OWNER/NAME",
            "drafttrain export checkpoint=PUBLISHED target=DIR format=sglang out=DIR",
        ),
    ),
    "verify": Command(
        "run a serving engine on an export, and check that it accepts as many drafts as our decoder",
        (
            "drafttrain verify engine=vllm out=DIR checkpoint=DIR",
            "drafttrain verify engine=openvino out=DIR checkpoint=DIR prompts=FILE decode.draft_length=3",
            "drafttrain verify engine=vllm out=DIR checkpoint=DIR engine_python=VENV/bin/python",
        ),
    ),
    "compare": Command(
        "rank measured runs, and test which differences are significant",
        (
            "drafttrain compare RUN RUN",
            "drafttrain compare 'outputs/NAME/*' ENTITY/PROJECT/RUN out=DIR",
            "drafttrain compare 'multirun/**' compare.sort=tau compare.checkpoints=all",
        ),
    ),
    "simulate": Command(
        "compute speedup and break-even points from acceptance, draft cost, batch size and tree shape",
        (
            "drafttrain simulate simulate.alpha=0.8 simulate.draft_cost=0.05",
            "drafttrain simulate checkpoint=DIR simulate.alpha=+0.05",
            "drafttrain simulate report=FILE out=PICTURE.png",
        ),
    ),
    "doctor": Command(
        "print versions, devices, compilers, kernel backend, writable paths and W&B state",
        ("drafttrain doctor",),
    ),
}
FLAGS = {
    "-m": "sweep: key=a,b,c runs each value",
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
            *_choices(config_dir),
            *_section("flags", FLAGS),
            "",
            f"drafttrain {name} --cfg job prints every key with its value.",
        ]
    )


def recipe_files(config_dir: Path | None = None) -> dict[str, Traversable]:
    """Recipes by name: the package's, and the user's, which take precedence."""
    folders: list[Traversable] = [resources.files("drafttrain.recipes")]
    if config_dir is not None and (config_dir / "recipes").is_dir():
        folders.append(config_dir / "recipes")
    return {name: file for folder in folders for name, file in _yaml_files(folder).items()}


def _choices(config_dir: Path | None) -> list[str]:
    """The sections on recipes and groups."""
    lines = _section("recipes (recipe=NAME)", {name: _headline(file) for name, file in recipe_files(config_dir).items()})
    groups: dict[str, dict[str, Traversable]] = {}
    for root in [resources.files("drafttrain.conf"), *([config_dir] if config_dir else [])]:
        for folder in root.iterdir():
            if folder.is_dir() and folder.name not in ("recipes", "recipe") and (files := _yaml_files(folder)):
                groups[folder.name] = groups.get(folder.name, {}) | files
    lines += ["", "groups (group=CHOICE)"]
    for group, files in sorted(groups.items()):
        choices = {name: _headline(file) for name, file in files.items()}
        lines += [f"  {group}", *(f"    {name:<14}{text}" for name, text in choices.items())]
    return lines


def _section(title: str, rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]


def _yaml_files(folder: Traversable) -> dict[str, Traversable]:
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files}


def _headline(file: Traversable) -> str:
    """The first comment of a YAML file that is not a Hydra directive."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package") and line.strip("# "):
            return line.strip("# ")
    return ""
