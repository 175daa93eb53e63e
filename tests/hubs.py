"""Commands in processes of their own that use the hub of `standin/hub.py`, and repositories for it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tests.helpers import share_compiled
from tests.standin.hub import Hub

ROOT = Path(__file__).parents[1]
# huggingface_hub and datasets wait for seconds before they try again; how often they try stays their own
IMPATIENT = """
import time
rest = time.sleep
time.sleep = lambda seconds: rest(min(seconds, 0.005))
"""
COMMANDS = """
import json, os, sys
from drafttrain.cli import main
from tests import composing
for owner, name, quicker in composing.PATCHES:
    setattr(owner, name, quicker)
for token, words in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    code = main.run(words)
    sys.stdout.flush()
    print(f"exit {code}", file=sys.stderr, flush=True)
"""
READ = """
import json, sys
from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions, SourceOptions
from drafttrain.data.sources import open_sources, read_usable
for asked in json.loads(sys.argv[1]):
    replies, asked["mix"] = asked.pop("replies", True), [SourceOptions(**one) for one in asked.pop("mix", ())]
    try:
        found, faults = read_usable(DataOptions(**asked), replies)
        print(json.dumps({"found": [[c.origin, list(c.messages)] for c in found], "faults": faults.found}))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
"""


@dataclass(frozen=True)
class Ended:
    """A process that has ended. codes: the exit code of each command."""

    codes: list[int]
    out: str
    errors: list[str]  # what each command wrote to stderr

    @property
    def lines(self) -> list[str]:
        """The last line of each command's stderr."""
        return [error.strip().splitlines()[-1] if error.strip() else "" for error in self.errors]


def run(hub: Hub, home: Path, *commands: Sequence[str], token: str | None = None, **more: str) -> Ended:
    """`drafttrain WORDS` for each command, one after another in one process, from the folder `home`."""
    return run_as(hub, home, *((token, words) for words in commands), **more)


def run_as(hub: Hub, home: Path, *commands: tuple[str | None, Sequence[str]], **more: str) -> Ended:
    """The same with a login, or none, for each command."""
    done = _process(hub, home, COMMANDS, [[token, list(words)] for token, words in commands], None, more)
    parts = done.stderr.split("exit ")
    codes = [int(part.split("\n")[0]) for part in parts[1:]]
    errors = [parts[0], *(part.partition("\n")[2] for part in parts[1:-1])]
    assert len(codes) == len(commands), done.stderr
    return Ended(codes, done.stdout, errors)


def read(hub: Hub, home: Path, *asked: dict[str, Any], token: str | None = None, **more: str) -> list[dict[str, Any]]:
    """The conversations of each of these `DataOptions`, all in one process: `found`, `faults`, or `error`."""
    done = _process(hub, home, READ, [dict(one) for one in asked], token, more)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _process(
    hub: Hub, home: Path, program: str, words: list[Any], token: str | None, more: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    share_compiled(home / "cache")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    fixed = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    environment = own | fixed | hub.environment(home, token, **more)
    call = [sys.executable, "-c", IMPATIENT + program, json.dumps(words)]
    return subprocess.run(call, env=environment, cwd=home, capture_output=True, text=True)


def table(rows: Sequence[dict[str, Any]], group: int = 1000) -> bytes:
    """A Parquet file. group: rows of a row group."""
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows)), file, row_group_size=group)
    return file.getvalue()


def card(**files: str) -> str:
    """A data set's card. files: a pattern of files by split."""
    lines = [line for split, pattern in files.items() for line in (f"  - split: {split}", f"    path: {pattern}")]
    return "\n".join(["---", "configs:", "- config_name: default", "  data_files:", *lines, "---", "# A data set", ""])


def chat(asked: str, reply: str) -> dict[str, Any]:
    """A record of messages."""
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]}


def written(folder: Path) -> dict[Path, bytes]:
    """All files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
