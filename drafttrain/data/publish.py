"""Writes the data set from the journal: texts in the order of their prompts, filtered by the rules, in files of equal size.

The directory is written atomically. The journal is kept, so that other rules or more samples do not need new texts for the old
ones.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_directory, atomic_write_json, list_files
from drafttrain.data.forms import ADAPTER, ARGUMENTS, DOCUMENTS, TOKENIZER, TOOLS
from drafttrain.data.generation_jobs import TOO_LONG, GenerationJob, documents_of
from drafttrain.data.journal import read, record_of
from drafttrain.data.provenance import FILE
from drafttrain.data.reply_text import RULES, Reply, judge
from drafttrain.data.sources import ASSISTANT

SUMMARY, REJECTS = "summary.json", "rejects.jsonl"
FORMATS = ("jsonl", "parquet")


@dataclass
class PublishedCounts:
    """Counts of the published data."""

    texts: int = 0
    kept: int = 0
    replies: int = 0
    tokens: int = 0
    shortened: int = 0  # conversations that are kept up to a faulty reply
    # conversations in which a rule found a fault, whether it is dropped or not
    found: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # conversations whose tool calls do not fit the record's results

    def summary(self) -> dict[str, Any]:
        """The counts under their names in summary.json."""
        rule_counts = {name: self.found[name] for name in RULES}
        totals = {name: getattr(self, name) for name in ("texts", "kept", "replies", "tokens", "shortened")}
        return totals | {
            "found": rule_counts,
            "dropped": dict(self.dropped),
            "ended": dict(self.ended),
            "failed": dict(self.failed),
        }


def publish(
    journal: Path, jobs: Iterable[GenerationJob], out: Path, provenance: dict[str, Any], drop: list[str], form: str, shard: int
) -> dict[str, Any]:
    """Write the directory `out`, replacing an earlier one. Returns its summary.

    Raises UserError when no text is kept or the disk is full. `out` then stays unchanged.
    """
    counts = PublishedCounts()
    for stale_dir in out.parent.glob(f"{out.name}.tmp-*"):  # left by a killed call
        shutil.rmtree(stale_dir)
    with atomic_directory(out) as staging_dir, (staging_dir / REJECTS).open("w", encoding="utf-8") as rejects:
        tokenizer = provenance.get(TOKENIZER)
        published = (_published(record, tokenizer) for record in _kept(journal, jobs, drop, counts, rejects))
        shard_index = 0
        while records := list(islice(published, shard)):
            _write(staging_dir / f"part-{shard_index:05}.{form}", records)
            shard_index += 1
        if not counts.kept:
            causes = ", ".join(f"{count} {name}" for name, count in (counts.dropped + counts.ended + counts.failed).items())
            raise UserError(
                f"none of {counts.texts} texts is kept ({causes}); raise prepare.max_new_tokens, or drop less with prepare.drop"
            )
        summary = counts.summary()
        atomic_write_json(staging_dir / FILE, provenance)
        atomic_write_json(staging_dir / SUMMARY, summary | {"skipped": provenance["prompts"]["skipped"]})
        rejects.close()
        list_files(staging_dir)
    return summary


def check_out(out: Path) -> None:
    """Raise UserError for a directory that `prepare` did not write, since publishing would replace it."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / FILE).is_file()):
        raise UserError(f"out={out} exists and was not written by prepare; name another directory")


def _kept(
    journal: Path, jobs: Iterable[GenerationJob], drop: list[str], counts: PublishedCounts, rejects: Any
) -> Iterator[dict[str, Any]]:
    # a failed text's place is replaced by that of a later success
    locations: dict[str, tuple[Path, int, bool]] = {}
    for path, offset, record in read(journal):
        if record["id"] not in locations or not locations[record["id"]][2]:
            locations[record["id"]] = (path, offset, "messages" in record)
    for job in jobs:
        record = _at(*locations[job.id][:2])
        counts.texts += 1
        verdict = _judged(record, drop, counts)
        if isinstance(verdict, str):
            reject = {"id": job.id, "origin": job.script.origin, "reason": verdict}
            rejects.write(json.dumps(reject, ensure_ascii=False) + "\n")
        else:
            yield verdict


def _published(record: dict[str, Any], tokenizer: str | None) -> dict[str, Any]:
    """The record with its texts as tokens, if they and their tokenizer are known."""
    turns = record.pop("turns")
    return record | ({DOCUMENTS: documents_of(turns), TOKENIZER: tokenizer} if turns and tokenizer else {})


def _at(path: Path, offset: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(offset)
        record = record_of(file.readline())
    if record is None:
        raise UserError(f"{path}: changed while it was read; repeat the command")
    return record


def _judged(record: dict[str, Any], drop: list[str], counts: PublishedCounts) -> dict[str, Any] | str:
    """The published record, or the reason why it is dropped."""
    if ended := record.get("ended"):
        counts.ended[ended] += 1
    if "messages" not in record and ended:
        return str(ended)
    if "messages" not in record:
        counts.failed["too_long" if record["failed"] == TOO_LONG else "refused"] += 1
        return str(record["failed"])
    reply_indices = [i for i, message in enumerate(record["messages"]) if message["role"] == ASSISTANT]
    texts = [_written_text(record["messages"][i]) for i in reply_indices]
    verdict = judge([Reply(*pair) for pair in zip(texts, record["finish"], strict=True)], drop)
    counts.found.update(verdict.found)
    counts.tokens += sum(record["tokens"])
    if not verdict.kept:
        counts.dropped[str(verdict.fault)] += 1
        return str(verdict.fault)
    counts.kept += 1
    counts.replies += verdict.kept
    counts.shortened += verdict.kept < len(reply_indices) or "failed" in record
    names = ("id", "prompt_id", "sample", "temperature", "seed", ADAPTER, ARGUMENTS, TOOLS)
    fields = {name: record[name] for name in names if name in record}
    messages = record["messages"][: reply_indices[verdict.kept - 1] + 1]
    turns = record.get("turns", [])[: verdict.kept]
    return {"messages": messages, **fields, "finish": record["finish"][: verdict.kept], "turns": turns}


def _written_text(message: dict[str, Any]) -> str:
    """What the rules judge: the text, and the calls."""
    return str(message["content"]) + "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
        return
    import pyarrow  # slow to import
    from pyarrow import parquet

    records = [_as_table_row(record) for record in records]
    columns = dict.fromkeys(name for record in records for name in record)  # some may lack tokens
    parquet.write_table(pyarrow.Table.from_pylist([{name: r.get(name) for name in columns} for r in records]), path)


def _as_table_row(record: dict[str, Any]) -> dict[str, Any]:
    """The record with calls and tools as JSON: a table's column has one type, and arguments have many."""
    messages = [m | {"tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m for m in record["messages"]]
    return record | {"messages": messages} | ({TOOLS: json.dumps(record[TOOLS])} if TOOLS in record else {})
