"""`drafttrain prepare target=... data.path=... out=DIR`: the target answers a data set's prompts again."""

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
from drafttrain.core.errors import Interrupted, UserError
from drafttrain.data import PrepareOptions
from drafttrain.data.asks import TOO_LONG, Asks, Dialogue, jobs_of, read_asks
from drafttrain.data.journal import Journal, check_settings, look
from drafttrain.data.provenance import FORMAT
from drafttrain.data.publish import FORMATS, check_out, publish
from drafttrain.data.rules import check_rules
from drafttrain.data.sources import read_conversations
from drafttrain.runs.answerers import decoder_answerer, sampling_at, server_answerer
from drafttrain.runs.lock_step import shared_target
from drafttrain.runs.options import RunOptions
from drafttrain.runs.progress import progress_bars
from drafttrain.targets.parallel import Part, end_at_exit
from drafttrain.train.interrupt import Interrupt

FOREVER = timedelta(days=365)  # processes wait for the slowest of them, whose share may take days longer


@dataclass(frozen=True, slots=True)
class Share:
    """Which of the texts this process writes: every size-th from the rank-th on."""

    rank: int
    size: int


def prepare(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Write the directory `out`: conversations, summary.json, provenance.json. What has been answered is kept beside it, in
    `out.journal`, and an interrupted run goes on there.

    Raises UserError for bad input, before anything is written, and for a server that stays away.
    """
    out = _checked(options)
    asks = read_asks(read_conversations(options.data, replies=False))
    try:
        with Interrupt():
            if options.target.tensor_parallel > 1:
                with shared_target(options, "prepare") as part:
                    _prepare(options, asks, out, Share(0, 1), part)
            else:
                with _own_share() as share:
                    _prepare(options, asks, out, share, None)
    except Interrupted as stopped:
        raise Interrupted(f"{stopped}; the same command goes on", stopped.together) from stopped
    return out


def _prepare(options: RunOptions, asks: Asks, out: Path, share: Share, part: Part | None) -> None:
    """part: of a target that is shared; its processes decode everything in lock step, and the first of them writes."""
    first = share.rank == 0 and (part is None or part.first)
    console, folder = Console(quiet=not first), out.with_name(f"{out.name}.journal")
    answerer, about = server_answerer(options) if options.prepare.server else decoder_answerer(options, part)
    check_settings(folder, about, write=first)
    jobs, paths = list(jobs_of(asks.asks, options.prepare)), ", ".join(options.data.paths)
    found = look(folder)
    there = found.answered
    own = jobs[share.rank :: share.size]
    left = [job for job in own if job.id not in there]
    known = f", {sum(job.id in there for job in jobs):,} of them answered before" if there else ""
    _say(console, f"prompts: {len(asks.asks):,}, texts: {len(jobs):,}{known} ({paths})")
    if found.damaged:
        _say(console, f"{len(found.damaged):,} damaged lines are left out, their texts are asked again: {found.damaged[0]}")
    with progress_bars(console) as watch, _writing(folder, share.rank, first or part is None) as write:
        progress = _Progress(write, options.prepare.failures, len(own), len(own) - len(left), watch)
        try:
            answerer.answer(left, progress.finished, progress.tick)
        except torch.OutOfMemoryError as error:
            asked = options.prepare
            raise UserError(
                f"no memory for prepare.batch_size={asked.batch_size} texts of prepare.max_length={asked.max_length} tokens; "
                "lower one of them"
            ) from error
    if share.size > 1:
        distributed.barrier()
    if first:
        prompts = {
            "path": paths,
            "count": len(asks.asks),
            "sha256": asks.digest,
            "skipped": dict(asks.skipped),
        }
        record = {"format": FORMAT, "drafttrain": drafttrain.__version__, **about, "prompts": prompts}
        record["drop"] = sorted(options.prepare.drop)
        asked = options.prepare
        summary = publish(folder, jobs, out, record, asked.drop, asked.format, asked.shard)
        _report(console, summary, out, options)


def _checked(options: RunOptions) -> Path:
    """The directory to write. Raises UserError for options out of their range."""
    if options.out is None:
        raise UserError("out is not set; name the new data set's directory with out=DIR")
    asked, out = options.prepare, Path(os.path.normpath(Path(options.out).expanduser()))
    if out.name in ("", ".."):
        raise UserError(f"out is {options.out!r}; name a directory of its own")
    check_out(out)
    check_rules(asked.drop)
    for name in ("samples", "max_new_tokens", "max_length", "batch_size", "shard", "concurrency"):
        if getattr(asked, name) < 1:
            raise UserError(f"prepare.{name} is {getattr(asked, name)}; set it to 1 or more")
    if asked.timeout <= 0 or asked.patience < 0 or asked.failures < 0:
        raise UserError(
            f"prepare.timeout is {asked.timeout:g}, patience {asked.patience:g}, failures {asked.failures}; "
            "set timeout above 0, the others to 0 or more"
        )
    if asked.format not in FORMATS:
        raise UserError(f"prepare.format is {asked.format!r}; choose {' or '.join(FORMATS)}")
    _check_mixture(asked)
    return out


def _check_mixture(asked: PrepareOptions) -> None:
    if not asked.temperatures:
        raise UserError("prepare.temperatures is empty; name at least one, 0 is greedy")
    if asked.weights and (len(asked.weights) != len(asked.temperatures) or min(asked.weights) < 0 or not sum(asked.weights)):
        raise UserError(
            f"prepare.weights is {asked.weights}; give one for each of prepare.temperatures {asked.temperatures}, none below 0"
        )
    try:
        for temperature in asked.temperatures:
            sampling_at(asked, temperature)
    except ValueError as error:
        raise UserError(f"prepare: {error}") from error


@contextmanager
def _own_share() -> Iterator[Share]:
    """This process's share among those of a launch or of torchrun, each with a whole target."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Share(0, 1)
        return
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
    """Keeps what is finished, and moves the bar."""

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
        """Raises UserError when more texts have failed than may."""
        record = dialogue.record()
        self.write(record)
        self.done += 1
        self.tick(0)
        if dialogue.failed not in (None, TOO_LONG):
            self.failed += 1
            if self.failed > self.failures:
                raise UserError(
                    f"{self.failed} prompts have failed, the last one, {dialogue.job.ask.origin}: {dialogue.failed}; mend "
                    "that, or raise prepare.failures; what is answered is kept"
                )


def _report(console: Console, summary: dict[str, Any], out: Path, options: RunOptions) -> None:
    _say(console, f"kept: {summary['kept']:,} of {summary['texts']:,} texts, {summary['replies']:,} replies")
    for title, key in (("found", "found"), ("dropped", "dropped"), ("failed", "failed")):
        if shown := ", ".join(f"{count:,} {name}" for name, count in summary[key].items() if count):
            _say(console, f"{title}: {shown}")
    if summary["shortened"]:
        _say(console, f"shortened to the turns before a fault: {summary['shortened']:,}")
    target = "" if options.target.name == "embedded" else f" target={options.target.name} target.path={options.target.path}"
    _say(console, f"data: {out}\n\nnext:\n  drafttrain fit recipe=NAME{target} data.path={out}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
