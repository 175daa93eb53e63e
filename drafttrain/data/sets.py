"""Public prompt sets: where each is published, and how its records become prompts. A new set is one entry of `SETS`.

The wording follows Spec-Bench (arXiv 2401.07851): GSM8K's questions unchanged, articles after "Summarize: ". Of large sets the
first 80 prompts are used, as many as Spec-Bench has of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.core.hub_errors import data_set_reason, without_token

Record = dict[str, Any]
FEW = 80  # prompts used of a large set, if no limit is given


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A public prompt set."""

    turns: Callable[[Record], Any]  # a record's user turns; None if the record is not of this set
    hub: str | None  # data set id on the hub; None: not on the hub
    split: str = "test"  # as `datasets.load_dataset` takes it
    config: str | None = None  # as `datasets.load_dataset` takes it
    address: str | None = None  # URL of the file, for a set that is not on the hub
    name: str | None = None  # field with the record's id
    category: str | None = None  # field with the record's category; None: the set's own name
    reference: str | None = None  # field with the record's answer
    most: int | None = None  # prompts used if no limit is given


def field_of(key: str) -> Callable[[Record], Any]:
    """A function that returns a field as the only user turn."""
    return lambda record: None if record.get(key) is None else [record[key]]


def _turns(record: Record) -> Any:
    """Both turns of MT-bench: `turns` in FastChat's file, `prompt` on the hub."""
    return record.get("turns", record.get("prompt"))


def _instruction(record: Record) -> Any:
    """An instruction, and its input below it."""
    text, context = record.get("instruction"), record.get("input")
    return None if text is None else [f"{text}\n\n{context}" if context else text]


def _summary(record: Record) -> Any:
    return None if record.get("article") is None else [f"Summarize: {record['article']}"]


SETS: dict[str, PromptSet] = {
    "spec_bench": PromptSet(
        _turns,
        None,
        address="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        name="question_id",
        category="category",
        reference="reference",
    ),
    "mt_bench": PromptSet(
        _turns, "HuggingFaceH4/mt_bench_prompts", "train", name="question_id", category="category", reference="reference"
    ),
    "humaneval": PromptSet(field_of("prompt"), "openai/openai_humaneval", name="task_id", reference="canonical_solution"),
    "gsm8k": PromptSet(field_of("question"), "openai/gsm8k", config="main", reference="answer"),
    "math500": PromptSet(
        field_of("problem"), "HuggingFaceH4/MATH-500", name="unique_id", category="subject", reference="solution"
    ),
    "alpaca": PromptSet(_instruction, "tatsu-lab/alpaca", "train", reference="output", most=FEW),
    "cnn_dm": PromptSet(_summary, "abisee/cnn_dailymail", config="3.0.0", name="id", reference="highlights", most=FEW),
}


def hub_records(name: str, limit: int | None) -> Iterator[tuple[str, Record]]:
    """(origin, record) pairs of a set, from the hub or its cache. Raises UserError if the set is not available."""
    from datasets import load_dataset  # slow to import
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError

    source = SETS[name]
    if source.hub is None:
        raise UserError(
            f"prompt set {name} is not on the hub: download {source.address}, and give the file as measure.prompts={name}:FILE"
        )
    limit = limit or source.most
    try:
        # a limited read streams, so that a few records of a large set do not download it
        rows = load_dataset(source.hub, name=source.config, split=source.split, streaming=limit is not None)
        records = list(islice(rows, limit))
    except (HTTPError, OSError, ValueError, DatasetsError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        reason = data_set_reason(error, source.hub) or without_token(first_line)
        raise UserError(
            f"prompt set {name}: {source.hub} cannot be loaded ({reason}); download it, and give the file as "
            f"measure.prompts={name}:FILE"
        ) from error
    return ((f"{source.hub}:record {record_number}", dict(record)) for record_number, record in enumerate(records, start=1))
