"""`drafttrain verify engine=NAME out=DIR checkpoint=DIR`: does an engine accept as many drafts as our decoder?"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.core.checksums import check_listed
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json
from drafttrain.data.prompts import encode_prompt, load_prompts
from drafttrain.drafters.checkpoint import read_meta
from drafttrain.engines.process import ENGINES, Job, Outcome, python_of, run
from drafttrain.export.chain import Ending, Rounds, chain_drafter, decoded, plain
from drafttrain.export.exporter import RECORD
from drafttrain.export.opened import Opened
from drafttrain.export.verification import Verification, verified
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.runs.serving_engines import target_place
from drafttrain.targets.load import LoadedTarget, load_target

NOTED = ("family", "stack", "layout", "dtype", "checkpoint")  # by `export`, of a directory
SHOWN = 12  # texts of a table at most, those that differ first


@dataclass(frozen=True, slots=True)
class ExportUnderTest:
    """What an exported directory says of itself, and who is to run it."""

    out: Path
    checkpoint: Path
    engine: str
    python: Path
    record: dict[str, Any]


def verify(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Run the engine, compare, print a table, and return the folder of the report, `<output>/verify/<time>/`.

    Raises UserError for what is missing or does not belong together, ParityError where the engine's texts or its accepted
    drafts are not ours.
    """
    export, console = checked_options(options), Console()
    meta = read_meta(export.checkpoint)
    with shared_target(options, "verify"):
        target = replace(CheckpointSource(export.checkpoint, meta).target(options.target), dtype="float32")
        opened = Opened.of(export.checkpoint, load_target(target))
        ids, names = prompts_of(options, opened.loaded)
        ending = Ending(opened.loaded.target.stop_ids, options.decode.max_new_tokens)
        length = options.decode.draft_length or opened.drafter.draft_length
        drafter = chain_drafter(opened, length, export.record["dtype"])
        with console.status(f"{ENGINES[export.engine].label}: {len(ids)} prompts, chains of {length}"):
            outcome = run(export.engine, export.python, job_of(export, opened, ids, ending, length))
        own = opened.loaded.target
        with console.status("our own decoder"):
            rounds: list[Rounds] = [decoded(own, drafter, prompt, ending, length, outcome.begins) for prompt in ids]
            found = verified(outcome, names, plain(own, ids, ending), rounds, ending, length)
    folder = Path(options.output) / "verify" / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    about = {key: export.record[key] for key in NOTED}
    atomic_write_json(folder / "verification.json", about | found.as_json())
    print_verification(console, found, outcome, folder)
    found.check()
    return folder


def checked_options(options: RunOptions) -> ExportUnderTest:
    """Raises UserError for what is not set, not there, or not of this engine and checkpoint."""
    if not isinstance(options.engine, str) or options.engine not in ENGINES:
        raise UserError(f"engine is {options.engine!r}; choose one of {', '.join(ENGINES)}")
    if options.out is None or options.checkpoint is None:
        raise UserError("verify needs out=DIR, what was exported, and checkpoint=DIR, what it was exported from")
    out, checkpoint = (Path(path).expanduser().absolute() for path in (options.out, options.checkpoint))
    record = record_of(out)
    engine = ENGINES[options.engine]
    if record["stack"] not in engine.loads:
        raise UserError(
            f"{out} was written for {record['stack']}; {engine.label} is given exports with format={' or '.join(engine.loads)}"
        )
    if record["checkpoint"] != read_meta(checkpoint).sha256:
        raise UserError(f"{out} was exported from another checkpoint than {checkpoint}; name that one with checkpoint=DIR")
    return ExportUnderTest(out, checkpoint, options.engine, python_of(options.engine, options.engine_python), record)


def record_of(out: Path) -> dict[str, Any]:
    """What `export` noted of one stack's directory. Raises UserError where it is none, and for files that it did not write."""
    check_listed(out, "export again")
    try:
        record: dict[str, Any] = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"out is {str(out)!r}, where no export is (no {RECORD} to read); name what drafttrain export wrote"
        ) from error
    if isinstance(record, dict) and "written" in record:
        inside = ", ".join(map(str, record.get("written", [])))
        raise UserError(f"out is {str(out)!r}, which holds exports to several stacks; name one of {inside} in it")
    if not isinstance(record, dict) or (lacking := [key for key in NOTED if key not in record]):
        said = "no mapping" if not isinstance(record, dict) else f"nothing on {', '.join(lacking)}"
        raise UserError(f"{out / RECORD} holds {said}; export again")
    return record


def prompts_of(options: RunOptions, loaded: LoadedTarget) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt's first turn, and the prompts' names."""
    prompts = load_prompts(options.prompts or options.measure.prompts, options.measure.limit)
    ids = [encode_prompt(loaded.tokenizer, prompt.turns[:1]) for prompt in prompts]
    return ids, [str(prompt.question_id) for prompt in prompts]


def job_of(export: ExportUnderTest, opened: Opened, prompts: list[list[int]], ending: Ending, length: int) -> Job:
    return Job(
        target=target_place(export.out, opened),
        drafter=str(export.out),
        family=export.record["family"],
        layout=export.record["stack"],
        draft_length=length,
        max_new_tokens=ending.max_new_tokens,
        stop_ids=sorted(ending.stop_ids),
        prompts=prompts,
        facts={"layer_inputs": [block + 1 for block in opened.drafter.taps.blocks]},
    )


def print_verification(console: Console, found: Verification, outcome: Outcome, folder: Path) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("prompt", "tokens", "text", "accepted here", f"by {found.engine}"):
        table.add_column(heading, justify="left" if heading in ("prompt", "text") else "right")
    shown = sorted(found.lines, key=lambda line: line.holds)[:SHOWN]
    for line in shown:
        text = "the target's" if line.differs is None else f"another from token {line.differs + 1} on"
        told = "–" if line.theirs is None else str(line.theirs)
        table.add_row(line.prompt, str(line.tokens), text, str(line.ours), told, style=None if line.holds else "red")
    if len(found.lines) > len(shown):
        table.add_row(f"... {len(found.lines) - len(shown)} more")
    tokens, texts = sum(line.tokens for line in found.lines), f"{found.same_texts} of {len(found.lines)} the target's"
    table.add_row("all", str(tokens), texts, str(found.ours), str(found.theirs), style="bold")
    for i, (ours, theirs) in enumerate(zip(found.ours_by_position, found.theirs_by_position, strict=True), start=1):
        table.add_row(f"position {i}", "", "", str(ours), str(theirs), style=None if ours == theirs else "red")
    console.print(table)
    for note in outcome.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    tau = "nothing verified" if found.tau is None else f"tau {found.tau:.2f}"
    console.print(f"{tau} with chains of {found.draft_length}; {versions}", soft_wrap=True, highlight=False)
    console.print(f"report: {folder / 'verification.json'}", soft_wrap=True, highlight=False)
