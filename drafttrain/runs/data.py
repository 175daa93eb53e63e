"""The data of a run: loads training data and evaluation prompts, and prints what was recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.core.errors import UserError
from drafttrain.core.files import atomic_write_text
from drafttrain.data import DataOptions
from drafttrain.data.dataset import Dataset, encoder_of, load_dataset, token_counts
from drafttrain.data.pictures import sources_of
from drafttrain.data.prompts import Prompt, load_prompts
from drafttrain.data.records import Records
from drafttrain.data.sources import read_usable
from drafttrain.data.statistics import Coverage, coverage
from drafttrain.runs.options import RunOptions
from drafttrain.targets.devices import first_of_machine
from drafttrain.targets.load import LoadedTarget, load_tokenizer
from drafttrain.train.engine import World

Say = Callable[[str], None]


def check_data(options: RunOptions) -> None:
    """Raise UserError for a target without a tokenizer, and for a chat template that does not fit the first record of the
    data's files. It needs no weights.
    """
    data, tokenizer = options.data, load_tokenizer(options.target)
    _check_named(data, tokenizer)
    if data.bad_records or not all(Path(path).expanduser().is_file() for path in data.paths):
        return
    mix = [replace(source, limit=1) for source in data.mix]
    encode = encoder_of(data, tokenizer)
    for conversation in read_usable(replace(data, mix=mix, limit=None if mix else 1))[0]:
        if not sources_of(conversation.messages):  # images need more than the tokenizer
            encode(conversation)


def _check_named(options: DataOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    if options.path == "embedded" and not options.mix and options.template is None and not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, and no data is named; set data.path=FILE, and "
            "data.template=FILE where its records are conversations"
        )


def training_data(
    options: DataOptions, loaded: LoadedTarget, world: World, say: Say, records: Records | None = None
) -> Dataset:
    """Load the training data; conversations are cut to the target's context.

    say: prints a line. records: conversations in memory, used instead of those that the options name.
    """
    if records is None:
        _check_named(options, loaded.tokenizer)
    limited = replace(options, max_length=min(options.max_length, loaded.target.shape.max_positions))
    data = load_dataset(
        limited,
        loaded.tokenizer,
        progress=world.first,
        leads=world.first or first_of_machine(),
        records=records,
        images=loaded.images,
        vocab_size=loaded.target.shape.vocab_size,
        adapters=sorted(loaded.adapters),
    )
    print_counts(data.summary, options, say)
    if packing := data.summary.get("packing"):
        say(f"packing: {packing['rows']:,} rows of {limited.max_length:,} tokens, {packing['efficiency']:.1%} used")
    return data


def measurement_prompts(options: RunOptions) -> list[Prompt]:
    """The evaluation prompts: those of `prompts`, else of `measure.prompts`."""
    return load_prompts(options.prompts or options.measure.prompts, options.measure.limit)


def print_counts(summary: dict[str, Any], options: DataOptions, say: Say) -> None:
    """Print the size of the data, and for the user's data what was recognised in each source."""
    sources = summary["sources"]
    names = sources[0]["path"] if len(sources) == 1 else f"{len(sources)} sources"
    held_out = f"{summary['held_out']:,} held out"
    if summary["prepared"] < summary["records"]:
        prepared_text = f"{summary['prepared']:,} prepared, the others during training; {held_out}"
        say(f"data: {summary['records']:,} records ({names}), {prepared_text}")
    else:
        trained_text = f"{summary['conversations'] - summary['held_out']:,} trained on, {held_out}"
        tokens = f"{summary['supervised_tokens']:,} supervised tokens"
        say(f"data: {summary['conversations']:,} conversations, {trained_text}; {tokens} ({names})")
    if names == "embedded":
        return
    for source in sources:
        say(f"  {source['path']}: {source['records']:,} records, {forms(source)}{_share(source, sources)}")
    left_out = [f"{summary[key]:,} {key}" for key in ("dropped", "truncated", "rejected") if summary[key]]
    supervised = f"  {summary['supervised_fraction']:.1%} of tokens supervised"
    if summary["documents"] > summary["conversations"]:
        supervised += f"; {summary['documents']:,} texts, because the template changes a turn when another one follows"
    say("; ".join([supervised, *left_out]))


def data_report(data: Dataset, vocab_size: int) -> dict[str, Any]:
    """The report's section on training data."""
    vocab_coverage = None if data.preparing else draft_vocabulary(data, vocab_size)
    report = data.report()
    data_path = {"path": ", ".join(source["path"] for source in report["sources"])}
    return report | data_path | {"vocabulary": vocab_coverage and vocab_coverage.as_dict()}


def draft_vocabulary(data: Dataset, vocab_size: int) -> Coverage | None:
    """How many of the supervised tokens a draft vocabulary of the most frequent tokens covers."""
    return coverage(token_counts(data.train, vocab_size))


def print_vocabulary(data: Dataset, vocab_size: int, chosen: int | None, say: Say) -> None:
    """Print the coverage of a draft vocabulary of `chosen` tokens, if the drafter has one. Waits for all of the data."""
    vocab_coverage = draft_vocabulary(data, vocab_size) if chosen is not None else None
    if chosen is None or vocab_coverage is None:
        return
    advice = f"the recommended {vocab_coverage.recommended:,} cover {vocab_coverage.recommended_share:.1%}"
    say(
        f"draft vocabulary: the {chosen:,} most frequent of {vocab_size:,} tokens cover {vocab_coverage.share(chosen):.1%} of "
        f"the supervised tokens; {advice}"
    )


def write_rejected(data: Dataset, folder: Path) -> None:
    """Write the rejected records to rejected.txt, one per line with the reason."""
    if data.conversations is not None and data.conversations.faults:
        atomic_write_text(folder / "rejected.txt", "\n".join(data.conversations.faults) + "\n")


def forms(source: dict[str, Any]) -> str:
    """The recognised record formats: `messages`, or `messages (90), text (10)`."""
    counts_by_form = source["forms"]
    if len(counts_by_form) == 1:
        return str(next(iter(counts_by_form)))
    return ", ".join(f"{form} ({count:,})" for form, count in counts_by_form.items()) or "no record read yet"


def _share(source: dict[str, Any], sources: Sequence[dict[str, Any]]) -> str:
    if source["weight"] is None:
        return ""
    share, total = source["weight"] / sum(entry["weight"] for entry in sources), sum(entry["records"] for entry in sources)
    return f", {share:.1%} of an epoch, each {share * total / source['records']:.2f} times"
