"""`drafttrain verify engine=NAME out=DIR checkpoint=DIR`: checks that an engine accepts as many drafts as our decoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.core.console import counting, print_line, print_note
from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_json, check_listed, new_directory
from drafttrain.drafters.checkpoint import read_meta
from drafttrain.engines.process import ENGINES, EngineJob, EngineResult, python_of, run
from drafttrain.export.compressed import ACTIVATIONS, TOLERANCE, check_library
from drafttrain.export.drafter_adapter import check_merged
from drafttrain.export.engine_check import DecodedSequence, Ending, EngineCheck, chain_drafter, decoded, engine_check, plain
from drafttrain.export.exporter import RECORD
from drafttrain.export.opened import Opened
from drafttrain.export.serve import draft_lengths
from drafttrain.measure.cases import Case, encode_cases, left_out_notes
from drafttrain.runs.checkpoint_source import CheckpointSource
from drafttrain.runs.data import measurement_prompts
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions, dated_path
from drafttrain.runs.serving_engines import chain_room, target_place
from drafttrain.targets.load import LoadedTarget

RECORDED = ("family", "stack", "layout", "dtype", "checkpoint")  # keys of the record that `export` writes
SHOWN = 12  # rows of the table at most; outputs that differ come first


@dataclass(frozen=True, slots=True)
class ExportUnderTest:
    """An exported directory and the engine that runs it."""

    out: Path
    checkpoint: Path
    engine: str
    python: Path  # the Python that has the engine
    record: dict[str, Any]  # that `export` wrote


def verify(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Run the engine, compare, print a table, and return the folder of the report, `<output>/verify/<time>/`.

    Raises UserError for files that are missing or do not belong together. Raises ParityError if the engine's outputs or its
    accepted drafts differ from ours.
    """
    export, console = checked_options(options), Console()
    meta = read_meta(export.checkpoint)
    with shared_target(options, "verify"):
        loaded = CheckpointSource(export.checkpoint, meta).load(options.target, dtype="float32")
        checkpoint = Opened.of(export.checkpoint, loaded)
        ending = Ending(checkpoint.loaded.target.stop_ids, options.decode.max_new_tokens)
        length = options.decode.draft_length or checkpoint.drafter.draft_length
        served = next(iter(draft_lengths(checkpoint).values()))
        quantize = export.record.get("quantize")
        drafter, tolerance = chain_drafter(checkpoint, length, export.record["dtype"], quantize), 0.0
        if quantize in ACTIVATIONS:
            tolerance = TOLERANCE
            print_note(
                console,
                f"engines round the activations of {quantize} weights too, our decoder does not: accepted drafts may differ by "
                f"{tolerance:.0%}",
            )
        cases, left_out = cases_of(options, checkpoint.loaded, length, console)
        ids, names = [case.tokens for case in cases], [case.question_id for case in cases]
        remark = f" (its serving command has {served})" if served != length else ""
        print_line(console, f"{ENGINES[export.engine].label}: {len(ids)} prompts, chains of {length}{remark}")
        with console.status("waiting for the engine"):
            outcome = run(export.engine, export.python, job_of(export, checkpoint, ids, ending, length))
        target_model = checkpoint.loaded.target
        sequences: list[DecodedSequence] = []
        with counting(console, "our own decoder", len(ids)) as advance:
            for prompt in ids:
                sequences.append(decoded(target_model, drafter, prompt, ending, length, outcome.begins))
                advance(1)
            check = engine_check(outcome, names, plain(target_model, ids, ending), sequences, ending, length, tolerance)
    report = {key: export.record[key] for key in RECORDED} | check.as_json() | {"left_out": left_out}
    base = dated_path(options.output, "verify")
    folder = new_directory(base, lambda aside: atomic_write_json(aside / "verification.json", report))
    print_verification(console, check, outcome, folder)
    check.check()
    return folder


def checked_options(options: RunOptions) -> ExportUnderTest:
    """The export that the options name. Raises UserError if it is missing, or not of this engine and checkpoint."""
    if not isinstance(options.engine, str) or options.engine not in ENGINES:
        raise UserError(f"engine is {options.engine!r}; choose one of {', '.join(ENGINES)}")
    assert options.out is not None and options.checkpoint is not None
    out = Path(options.out).expanduser().absolute()
    record = record_of(out)
    engine = ENGINES[options.engine]
    if record["stack"] not in engine.loads:
        raise UserError(
            f"{out} was written for {record['stack']}; {engine.label} loads exports with format={' or '.join(engine.loads)}"
        )
    if record.get("quantize"):
        check_library(f"{out} is quantised, which")
    checkpoint = CheckpointSource.of(options.checkpoint).directory.absolute()
    if record["checkpoint"] != read_meta(checkpoint).sha256:
        raise UserError(f"{out} was not exported from {checkpoint}; name its checkpoint with checkpoint=DIR")
    return ExportUnderTest(out, checkpoint, options.engine, python_of(options.engine, options.engine_python), record)


def record_of(out: Path) -> dict[str, Any]:
    """The record of an exported directory. Raises UserError for any other directory, and for files that were changed."""
    check_listed(out, "export again")
    try:
        record: dict[str, Any] = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"out is {str(out)!r}, which is not an export ({RECORD} cannot be read); name one that drafttrain export wrote"
        ) from error
    if isinstance(record, dict) and "written" in record:
        inside = ", ".join(map(str, record.get("written", [])))
        raise UserError(f"out is {str(out)!r}, which has exports for several stacks; name one of {inside} in it")
    if not isinstance(record, dict) or (lacking := [key for key in RECORDED if key not in record]):
        fault = "is not a mapping" if not isinstance(record, dict) else f"has no {', '.join(lacking)}"
        raise UserError(f"{out / RECORD} {fault}; export again")
    check_merged(str(out), record)
    return record


def cases_of(options: RunOptions, loaded: LoadedTarget, length: int, console: Console) -> tuple[list[Case], list[str]]:
    """Every prompt's first turn, and the names of those that leave no room for an answer and a chain of `length` after it.

    A note on these is printed. Raises UserError when none is left.
    """
    prompts, max_prompt = measurement_prompts(options), chain_room(loaded, options.decode.max_new_tokens, length)
    cases, left_out = encode_cases(prompts, loaded.tokenizer, max_prompt)
    for note in left_out_notes(left_out, len(prompts), max_prompt):
        print_note(console, note)
    return cases, left_out


def job_of(export: ExportUnderTest, opened: Opened, prompts: list[list[int]], ending: Ending, length: int) -> EngineJob:
    return EngineJob(
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


def print_verification(console: Console, found: EngineCheck, outcome: EngineResult, folder: Path) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("prompt", "tokens", "output", "accepted here", f"by {found.engine}"):
        table.add_column(heading, justify="left" if heading in ("prompt", "output") else "right")
    shown = sorted(found.lines, key=lambda line: line.holds)[:SHOWN]
    for line in shown:
        text = "as the target" if line.differs is None else f"differs from token {line.differs + 1} on"
        theirs_text = "–" if line.theirs is None else str(line.theirs)
        table.add_row(line.prompt, str(line.tokens), text, str(line.ours), theirs_text, style=None if line.holds else "red")
    if len(found.lines) > len(shown):
        table.add_row(f"... {len(found.lines) - len(shown)} more")
    tokens, outputs = sum(line.tokens for line in found.lines), f"{found.same_texts} of {len(found.lines)} as the target"
    table.add_row("all", str(tokens), outputs, str(found.ours), str(found.theirs), style="bold")
    for i, (ours, theirs) in enumerate(zip(found.ours_by_position, found.theirs_by_position, strict=True), start=1):
        table.add_row(f"position {i}", "", "", str(ours), str(theirs), style=None if ours == theirs else "red")
    console.print(table)
    for note in outcome.notes:
        print_note(console, note)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    tau = "nothing verified" if found.tau is None else f"tau {found.tau:.2f}"
    print_line(console, f"{tau} with chains of {found.draft_length}; {versions}")
    print_line(console, f"report: {folder / 'verification.json'}")
