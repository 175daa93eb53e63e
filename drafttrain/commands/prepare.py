"""`drafttrain prepare target=... data.path=... out=DIR`: has the target answer the prompts of a data set again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import distributed

import drafttrain
from drafttrain.core.console import print_line, print_note, stages
from drafttrain.core.errors import Interrupted, UserError
from drafttrain.data import PrepareOptions
from drafttrain.data.generation_jobs import TOO_LONG, Dialogue, PromptScripts, has_calls, jobs_of, read_scripts
from drafttrain.data.journal import Journal, check_settings, scan
from drafttrain.data.pictures import sources_of
from drafttrain.data.provenance import FORMAT
from drafttrain.data.publish import check_out, publish
from drafttrain.data.sources import read_usable
from drafttrain.runs.answerers import decoder_answerer, reads_calls, server_answerer
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions, target_arguments
from drafttrain.targets.parallel import Part, end_at_exit, meeting
from drafttrain.train.interrupt import Interrupt

NOTICED = 0.05  # share of texts that are cut off, from which it is advised against
FOREVER = timedelta(days=365)  # timeout of processes that wait for the slowest one, which may take days longer


@dataclass(frozen=True, slots=True)
class Share:
    """The texts that this process writes: every size-th, from the rank-th on."""

    rank: int
    size: int


def prepare(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Write the directory `out`: conversations, summary.json, provenance.json.

    Answers are also kept in `out.journal`, from which an interrupted run continues.
    Raises UserError for bad input, before anything is written, and for a server that does not respond.
    """
    out = _checked(options)
    conversations, faults = read_usable(options.data, replies=False)
    readable = options.prepare.server is not None or not any(map(has_calls, conversations)) or reads_calls(options)
    scripts = read_scripts(conversations, len(faults.found), readable)
    if options.prepare.format != "jsonl" and any(sources_of(script.messages) for script in scripts.scripts):
        raise UserError(f"prepare.format={options.prepare.format} holds text alone, and the data has images; set it to jsonl")
    try:
        with Interrupt():
            if options.target.shared_by[1] > 1:
                with shared_target(options, "prepare") as part:
                    _prepare(options, scripts, out, Share(0, 1), part)
            else:
                with _own_share() as share:
                    _prepare(options, scripts, out, share, None)
    except Interrupted as stopped:
        raise Interrupted(f"{stopped}; the same command continues", stopped.together) from stopped
    return out


def _prepare(options: RunOptions, scripts: PromptScripts, out: Path, share: Share, part: Part | None) -> None:
    """part: of a shared target; its processes decode everything in lock step, and the first of them writes."""
    first = share.rank == 0 and (part is None or part.first)
    console, folder = Console(quiet=not first), out.with_name(f"{out.name}.journal")
    answerer, answerer_facts = (
        server_answerer(options, scripts) if options.prepare.server else decoder_answerer(options, scripts, part)
    )
    check_settings(folder, answerer_facts, write=first)
    jobs, paths = list(jobs_of(scripts.scripts, options.prepare)), ", ".join(options.data.paths)
    journal = scan(folder)
    share_jobs = jobs[share.rank :: share.size]
    open_jobs = [job for job in share_jobs if job.id not in journal.answered]
    answered_note = f", {sum(job.id in journal.answered for job in jobs):,} of them answered before" if journal.answered else ""
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in scripts.skipped.items())
    prompts = f"{len(scripts.scripts):,}" + (f" (skipped: {skipped})" if skipped else "")
    if "with tools" in scripts.skipped:
        print_note(console, "the chat template does not show how tool calls are written: conversations with them are skipped")
    print_line(console, f"prompts: {prompts}, texts: {len(jobs):,}{answered_note} ({paths})")
    if journal.damaged:
        damaged = f"{len(journal.damaged):,} damaged lines are ignored and their texts written again"
        print_line(console, f"{damaged}: {journal.damaged[0]}")
    with stages(console) as watch, _writing(folder, share.rank, first or part is None) as write:
        progress = _Progress(write, options.prepare.failures, len(share_jobs), len(share_jobs) - len(open_jobs), watch)
        try:
            answerer.answer(open_jobs, progress.finished, progress.tick)
        except torch.OutOfMemoryError as error:
            size, length = options.prepare.batch_size, options.prepare.max_length
            raise UserError(
                f"out of memory with prepare.batch_size={size} and prepare.max_length={length}; lower one of them"
            ) from error
    if share.size > 1:
        distributed.barrier()
    if first:
        settings = options.prepare
        prompt_record = {
            "path": paths,
            "count": len(scripts.scripts),
            "sha256": scripts.digest,
            "skipped": dict(scripts.skipped),
        }
        record = {"format": FORMAT, "drafttrain": drafttrain.__version__, **answerer_facts, "prompts": prompt_record}
        record["drop"] = sorted(settings.drop)
        summary = publish(folder, jobs, out, record, settings.drop, settings.format, settings.shard)
        _report(console, summary, out, options)


def _checked(options: RunOptions) -> Path:
    """The directory to write. Raises UserError for options that do not fit each other."""
    assert options.out is not None
    settings, out = options.prepare, Path(os.path.normpath(Path(options.out).expanduser()))
    if out.name in ("", ".."):
        raise UserError(f"out is {options.out!r}; name a new directory")
    check_out(out)
    _check_mixture(settings)
    return out


def _check_mixture(settings: PrepareOptions) -> None:
    """Raise UserError for temperatures and weights that do not fit each other."""
    temperatures, weights = settings.temperatures, settings.weights
    if not temperatures:
        raise UserError("prepare.temperatures is empty; name at least one, 0 is greedy")
    if weights and (len(weights) != len(temperatures) or not sum(weights)):
        raise UserError(f"prepare.weights is {weights}; give one for each of prepare.temperatures {temperatures}, not all 0")


@contextmanager
def _own_share() -> Iterator[Share]:
    """This process's share of the texts, where every process of the launch has a whole target."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Share(0, 1)
        return
    with meeting():
        distributed.init_process_group("gloo", timeout=FOREVER)
    end_at_exit()
    yield Share(int(os.environ["RANK"]), size)
    distributed.barrier()
    distributed.destroy_process_group()


@contextmanager
def _writing(folder: Path, rank: int, writes: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    if not writes:
        yield lambda record: None
        return
    with Journal(folder, rank) as journal:
        yield journal.append


class _Progress:
    """Writes finished texts to the journal, and advances the progress bar."""

    def __init__(
        self,
        write: Callable[[dict[str, Any]], None],
        failures: int,
        total: int,
        done: int,
        watch: Callable[[str, int, int, int], None],
    ) -> None:
        self.write, self.failures, self.total, self.done, self.watch = write, failures, total, done, watch
        self.failed = 0
        self.tick(0)

    def tick(self, tokens: int) -> None:
        self.watch("texts", self.done, self.total, tokens)

    def finished(self, dialogue: Dialogue) -> None:
        """Record a finished text. Raises UserError when more texts have failed than `failures` allows."""
        record = dialogue.record()
        self.write(record)
        self.done += 1
        self.tick(0)
        if dialogue.failed not in (None, TOO_LONG):
            self.failed += 1
            if self.failed > self.failures:
                raise UserError(
                    f"{self.failed} prompts have failed, the last one, {dialogue.job.script.origin}: {dialogue.failed}; fix "
                    "that, or raise prepare.failures; the answers so far are kept"
                )


def _report(console: Console, summary: dict[str, Any], out: Path, options: RunOptions) -> None:
    print_line(console, f"kept: {summary['kept']:,} of {summary['texts']:,} texts, {summary['replies']:,} replies")
    for title in ("found", "dropped", "ended", "failed"):
        if shown := ", ".join(f"{count:,} {name}" for name, count in summary[title].items() if count):
            print_line(console, f"{title}: {shown}")
    if summary["dropped"].get("truncated", 0) > NOTICED * summary["texts"]:
        print_note(console, "replies that do not end within prepare.max_new_tokens are dropped; raise it to keep more")
    if summary["shortened"]:
        print_line(console, f"shortened to the turns before a fault: {summary['shortened']:,}")
    command = f"drafttrain fit recipe=NAME{target_arguments(options)} data.path={out}"
    print_line(console, f"data: {out}\n\nnext:\n  {command}")
