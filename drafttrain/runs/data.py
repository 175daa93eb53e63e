"""The training data of a run: loaded, and said what was recognised in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.core.files import atomic_write_text
from drafttrain.data import DataOptions
from drafttrain.data.dataset import Dataset, load_dataset, token_counts
from drafttrain.data.vocabulary import Coverage, coverage
from drafttrain.targets.devices import first_of_machine
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.engine import World

Say = Callable[[str], None]


def training_data(options: DataOptions, loaded: LoadedTarget, world: World, say: Say) -> Dataset:
    """Conversations no longer than the target's context."""
    limited = replace(options, max_length=min(options.max_length, loaded.target.shape.max_positions))
    data = load_dataset(limited, loaded.tokenizer, progress=world.first, leads=world.first or first_of_machine())
    print_counts(data.summary, options, say)
    if packing := data.summary.get("packing"):
        full = f"{packing['efficiency']:.1%} of {limited.max_length:,} tokens each"
        say(f"packing: {packing['rows']:,} rows, on average {full}")
    return data


def print_counts(summary: dict[str, Any], options: DataOptions, say: Say) -> None:
    """One line, and for data of the user's own what was recognised in each source."""
    sources = summary["sources"]
    names = sources[0]["path"] if len(sources) == 1 else f"{len(sources)} sources"
    if summary["prepared"] < summary["records"]:
        some = f"{summary['prepared']:,} prepared, the others while training runs"
        say(f"data: {summary['records']:,} records ({names}), {some}")
    else:
        say(f"data: {summary['conversations']:,} conversations, {summary['supervised_tokens']:,} supervised tokens ({names})")
    if names == "embedded":
        return
    for source in sources:
        say(f"  {source['path']}: {source['records']:,} records, {forms(source)}{_share(source, sources)}")
    left_out = [f"{summary[key]:,} {key}" for key in ("dropped", "truncated", "rejected") if summary[key]]
    said = f"  {summary['supervised_fraction']:.1%} of tokens supervised"
    if summary["documents"] > summary["conversations"]:
        said += f"; {summary['documents']:,} texts, as the template changes a turn once another follows"
    say("; ".join([said, *left_out]))


def data_report(data: Dataset, vocab_size: int) -> dict[str, Any]:
    """The report's data section."""
    found = None if data.preparing else draft_vocabulary(data, vocab_size)
    report = data.report()
    named = {"path": ", ".join(source["path"] for source in report["sources"])}
    return report | named | {"vocabulary": found and found.as_dict()}


def draft_vocabulary(data: Dataset, vocab_size: int) -> Coverage | None:
    """How much of the training rows' supervised tokens the commonest cover."""
    return coverage(token_counts(data.train, vocab_size))


def print_vocabulary(data: Dataset, vocab_size: int, chosen: int | None, say: Say) -> None:
    """What a vocabulary of `chosen` tokens covers, for a drafter with one of its own. Waits for all of the data."""
    found = draft_vocabulary(data, vocab_size) if chosen is not None else None
    if chosen is None or found is None:
        return
    covered, advice = found.share(chosen), f"{found.recommended:,} cover {found.recommended_share:.1%}"
    say(f"draft vocabulary: the {chosen:,} commonest of {vocab_size:,} tokens are {covered:.1%} of those supervised; {advice}")


def write_rejected(data: Dataset, folder: Path) -> None:
    """The records that were left out, one a line with what is wrong."""
    if data.conversations is not None and data.conversations.faults:
        atomic_write_text(folder / "rejected.txt", "\n".join(data.conversations.faults) + "\n")


def forms(source: dict[str, Any]) -> str:
    """What was recognised: `messages`, or `messages (90), text (10)`."""
    found = source["forms"]
    if len(found) == 1:
        return str(next(iter(found)))
    return ", ".join(f"{form} ({count:,})" for form, count in found.items()) or "no record read yet"


def _share(source: dict[str, Any], sources: Sequence[dict[str, Any]]) -> str:
    if source["weight"] is None:
        return ""
    share, total = source["weight"] / sum(other["weight"] for other in sources), sum(other["records"] for other in sources)
    return f", {share:.1%} of an epoch, each {share * total / source['records']:.2f} times"
