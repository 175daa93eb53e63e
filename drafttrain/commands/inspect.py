"""`drafttrain inspect [target=...] [data.path=...]`: shows the training data as the drafter sees it, and writes a page."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

import drafttrain
from drafttrain.core.console import print_line
from drafttrain.core.errors import UserError, printable
from drafttrain.core.files import atomic_write_text, new_file
from drafttrain.data import InspectOptions
from drafttrain.data.chat import Encoded
from drafttrain.data.contamination import Copy, copies
from drafttrain.data.dataset import encoder_of, tokenising
from drafttrain.data.files import read_template
from drafttrain.data.pictures import sources_of
from drafttrain.data.prompts import load_prompts, named_prompts
from drafttrain.data.provenance import find_provenance
from drafttrain.data.sources import Conversation, Faults, named_set, read_usable
from drafttrain.data.statistics import Bin, Sample, Statistics, chosen, sample_of, template_rows
from drafttrain.measure.markdown import render
from drafttrain.runs.options import RunOptions, dated_path
from drafttrain.targets.images import TEXT_ONLY, Images
from drafttrain.targets.load import load_config, load_images, load_tokenizer, path_of

SUPERVISED, REST, BAR = "black on green", "dim", "green"
SHOWN = 3000  # characters of a conversation on the terminal; the page has the whole
WIDE = 40  # length of the longest bar, in characters


@dataclass(frozen=True, slots=True)
class Inspection:
    """The content of the terminal output and of the page."""

    rows: list[tuple[str, str]]
    bins: list[Bin]
    copies: list[Copy]
    prompts: int
    prompt_file: str
    samples: list[Sample]


def inspect(options: RunOptions, resolved: dict[str, Any]) -> Path:
    """Print the data and write the page; returns its path, `out` or `<output>/inspect/<time>.html`.

    Of the target, only the tokenizer is loaded. Raises UserError for bad options, and for data, prompts or a tokenizer that
    cannot be read.
    """
    named, settings = _checked(options), options.inspect
    prompt_file = options.prompts or options.measure.prompts
    prompts = load_prompts(prompt_file)
    prompt_file = named_prompts(prompt_file)
    tokenizer = load_tokenizer(options.target)
    conversations, faults = read_usable(options.data)
    statistics, samples = _statistics(conversations, tokenizer, options, faults)
    if not any(statistics.supervised):
        raise UserError(
            f"{options.data.named}: none of {len(conversations)} conversations has a supervised token, and {len(faults.found)} "
            "records are unusable; check that there are replies"
        )
    source = "embedded" if options.target.name == "embedded" else path_of(options.target)
    rows = [
        ("data", ", ".join(options.data.paths)),
        *((path, chosen.summary) for path in options.data.paths if (chosen := named_set(path)) is not None),
        *statistics.rows(),
        *([("unusable records, left out", f"{len(faults.found):,}, such as {faults.found[0]}")] if faults.found else []),
        *template_rows(tokenizer, source, read_template(options.data.template)),
        ("replies by", ", ".join(dict.fromkeys(map(_writer, options.data.paths)))),
    ]
    copied = copies(prompts, conversations, settings.ngram, settings.overlap)
    inspection = Inspection(rows, statistics.histogram(), copied, len(prompts), prompt_file, samples)
    console = Console()
    _print(console, inspection, settings)
    text = _page(inspection, settings)
    if named is None:
        page = new_file(dated_path(options.output, "inspect", ".html"), text.encode("utf-8", "backslashreplace"))
    else:
        page = named
        atomic_write_text(page, text)
    print_line(console, f"page: {page}")
    return page


def _checked(options: RunOptions) -> Path | None:
    """The page that the user names, if any. Raises UserError for bad options."""
    if options.out is None:
        return None
    page = Path(options.out).expanduser()
    if page.suffix != ".html" or page.is_dir():
        raise UserError(f"out is {options.out!r}; name the page with out=FILE.html")
    return page


def _statistics(
    conversations: list[Conversation], tokenizer: PreTrainedTokenizerBase, options: RunOptions, faults: Faults
) -> tuple[Statistics, list[Sample]]:
    statistics, sample_count = Statistics(), max(options.inspect.page_samples, options.inspect.samples)
    shown: dict[int, Encoded | None] = dict.fromkeys(chosen(len(conversations), sample_count, options.data.seed))
    encode = encoder_of(options.data, tokenizer, _images(options, conversations, tokenizer))
    with tokenising(len(conversations)) as advance:
        for i, conversation in enumerate(conversations):
            advance(1)
            try:
                encoded = encode(conversation)
            except UserError as error:
                faults.add(str(error))
                continue
            statistics.add(conversation, encoded)
            if i in shown:
                shown[i] = encoded
    return statistics, [sample_of(conversations[i], encoded, tokenizer) for i, encoded in shown.items() if encoded is not None]


def _images(options: RunOptions, conversations: list[Conversation], tokenizer: PreTrainedTokenizerBase) -> Images:
    """The target's images, if there are any in the conversations."""
    if not any(sources_of(conversation.messages) for conversation in conversations):
        return TEXT_ONLY
    return load_images(options.target, load_config(options.target), tokenizer)


def _writer(data: str) -> str:
    if data == "embedded":
        return "the embedded target"
    provenance = find_provenance(data)
    return (
        "unknown (there is no provenance.json)"
        if provenance is None
        else str(provenance["target"]["path"] or provenance["target"]["name"])
    )


def _print(console: Console, found: Inspection, settings: InspectOptions) -> None:
    for sample in found.samples[: settings.samples]:
        counts = f"{sample.tokens:,} tokens, {sample.supervised:,} supervised" + (", truncated" if sample.truncated else "")
        console.rule(Text(printable(f"{sample.origin}: {counts}")), align="left")
        console.print(_coloured(sample), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in found.rows:
        table.add_row(Text(name, REST), Text(printable(value)))
    console.rule("figures", align="left")
    console.print(table)
    console.rule("lengths in tokens", align="left")
    largest, wide = max(b.count for b in found.bins), len(f"{found.bins[-1].last:,}")
    for b in found.bins:
        bar = "█" * round(WIDE * b.count / largest) or "▏" * bool(b.count)
        console.print(Text.assemble(f"{b.first:>{wide},}–{b.last:<{wide},} ", (bar, BAR), f" {b.count:,}"), soft_wrap=True)
    console.rule("evaluation prompts in the data", align="left")
    of = f"{len(found.copies)} of {found.prompts} prompts ({found.prompt_file})"
    console.print(
        f"{of} with {settings.overlap:.0%} or more of their {settings.ngram}-word sequences in one conversation",
        highlight=False,
    )
    for copy in found.copies[:10]:
        origin = printable(copy.origin)
        console.print(Text(f"  {copy.share:4.0%}  prompt {copy.question_id} ({copy.category})  {origin}"), soft_wrap=True)
    if len(found.copies) > 10:
        console.print(f"  and {len(found.copies) - 10} more, on the page", highlight=False)


def _coloured(sample: Sample) -> Text:
    text = Text()
    for piece in sample.pieces:
        text.append(printable(piece.text), SUPERVISED if piece.supervised else REST)
    if len(text) <= SHOWN:
        return text
    return Text.assemble(text[:SHOWN], f"\n... {len(text) - SHOWN:,} characters more")


def _page(found: Inspection, settings: InspectOptions) -> str:
    return render(
        "inspect.html",
        title=f"Training data: {found.rows[0][1]}",
        version=drafttrain.__version__,
        command=shlex.join(["drafttrain", "inspect", *sys.argv[1:]]),
        most=max(b.count for b in found.bins),
        n=settings.ngram,
        least=settings.overlap,
        rows=found.rows,
        bins=found.bins,
        copies=found.copies,
        prompts=found.prompts,
        prompt_file=found.prompt_file,
        samples=found.samples[: settings.page_samples],
    )
