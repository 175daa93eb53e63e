"""Opens the data that `data.path` and `data.mix` name: embedded data, files, glob patterns, folders, hub ids, public sets."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from drafttrain.core.errors import UserError
from drafttrain.core.files import cache_home
from drafttrain.data import REPLY_PARTS, DataOptions, SourceOptions
from drafttrain.data.files import ASSETS, LINES, TABLES, check_file, is_local, path_of, reason_of
from drafttrain.data.forms import ASSISTANT, Conversation, adapter_of, conversation
from drafttrain.data.hub_data import open_hub
from drafttrain.data.provenance import shards_of
from drafttrain.data.records import JoinedRecords, Records, open_records

__all__ = ["ASSISTANT", "Conversation", "Faults", "Source", "cache_folder", "open_sources", "read_usable"]


@dataclass(frozen=True, slots=True)
class Source:
    """One source of the data."""

    name: str
    records: Records
    form: str  # a name of `forms.FORMS`, or auto
    weight: float | None  # share of an epoch relative to other sources; None: every record counts once
    tolerated: int = 0  # number of its records that may be unusable without an error
    commit: str | None = None  # of a data set of the hub
    adapter: str | None = None  # of the target, for records that name none

    def conversation(self, number: int, replies: bool = True) -> Conversation:
        """The record with this number, from 0. Raises UserError that names the record's place."""
        origin, record = self.records[number]
        parsed = conversation(origin, record, self.form, replies, self.records.folder(number))
        adapter = adapter_of(origin, record) or self.adapter
        return parsed if adapter is None else replace(parsed, adapter=adapter)


def open_sources(options: DataOptions) -> list[Source]:
    """All sources that the options name, in order. Raises UserError for a source that is missing or has no readable records."""
    source_options = _chosen(options)
    weights = [source.weight for source in source_options]
    if any(w is None for w in weights) != all(w is None for w in weights):
        raise UserError("data.mix: some sources have a weight and others have none; give one to all, or to none")
    cache, sources = cache_folder(options), []
    for source in source_options:
        records, commit = _open(on_the_hub(source), cache)
        # published sets have unusable records, and nobody can correct them there
        max_bad = len(records) // 2 if named_set(source.path) else 0
        sources.append(Source(source.path, records, source.form, source.weight, max_bad, commit, source.adapter))
    return sources


def check_sources(options: DataOptions) -> None:
    """Raise UserError for a file that the options name and that is not there, or of no known kind. Reads nothing."""
    if not options.supervise:
        raise UserError(f"data.supervise is empty; name what is learnt: {', '.join(REPLY_PARTS)}")
    for source in _chosen(options):
        path = path_of(source.path, "data.path")
        if source.path != "embedded" and is_local(path) and not path.is_dir():
            for file in _files(source, path):
                check_file(file)


def read_usable(options: DataOptions, replies: bool = True) -> tuple[list[Conversation], Faults]:
    """All usable conversations, in order, and the faults of the other records.

    replies: refuse conversations without an assistant turn. Those are only usable as prompts. Raises UserError that names the
    place of an unusable record where there are more than are tolerated.
    """
    sources = open_sources(options)
    conversations, faults = [], Faults.of(options, sources)
    for source in sources:
        for index in range(len(source.records)):
            try:
                conversations.append(source.conversation(index, replies))
            except UserError as error:
                faults.add(str(error))
    return conversations, faults


class Faults:
    """Unusable records that are left out. bad: how many are tolerated."""

    def __init__(self, bad: int) -> None:
        self.bad, self.found = bad, list[str]()

    @staticmethod
    def of(options: DataOptions, sources: Sequence[Source]) -> Faults:
        """So many as `data.bad_records` says, and up to half of a named set."""
        return Faults(options.bad_records + sum(source.tolerated for source in sources))

    def add(self, fault: str) -> None:
        """Count a fault. Raises UserError if there are more than are tolerated."""
        self.found.append(fault)
        if len(self.found) > self.bad:
            limit_note = f" (bad record {len(self.found)}, {self.bad} may be left out: data.bad_records)" if self.bad else ""
            raise UserError(f"{fault}{limit_note}")


def cache_folder(options: DataOptions) -> Path:
    """The folder of prepared data."""
    if options.cache is not None:
        return Path(options.cache).expanduser()
    return cache_home() / "data"


def _chosen(options: DataOptions) -> list[SourceOptions]:
    if options.mix and options.path != "embedded":
        raise UserError(f"data.path={options.path} and data.mix both name the data; move the path into data.mix")
    single = SourceOptions(**{f.name: getattr(options, f.name) for f in fields(SourceOptions) if f.name != "weight"})
    if options.mix and (stray_keys := [f.name for f in fields(single) if getattr(single, f.name) != f.default]):
        raise UserError(f"data.{stray_keys[0]} is for data.path alone; give each source of data.mix its own {stray_keys[0]}")
    return list(options.mix) or [single]


def _open(source: SourceOptions, cache: Path) -> tuple[Records, str | None]:
    """(its records, the commit of a data set of the hub)."""
    spool, path = cache / "spool", path_of(source.path, "data.path")
    if source.path != "embedded" and not is_local(path):
        return open_hub(source, cache)
    if option := next((name for name in ("revision", "files") if getattr(source, name) is not None), None):
        raise UserError(f"data.{option} is for a data set of the hub, data.path={source.path} is none; leave data.{option} out")
    if source.path == "embedded":
        return open_records(ASSETS / "train.jsonl.gz", source.limit, spool), None
    return _joined(_files(source, path), source.limit, spool), None


def _joined(files: Sequence[Path], limit: int | None, spool: Path) -> Records:
    file_records: list[Records] = []
    for file in files:
        check_file(file)
        file_records.append(open_records(file, limit, spool))
        if limit is not None and (limit := limit - len(file_records[-1])) == 0:
            break
    return file_records[0] if len(file_records) == 1 else JoinedRecords(file_records)


def _files(source: SourceOptions, path: Path) -> list[Path]:
    if path.is_dir():
        return list(_folder_files(source, path))
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    paths = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if name.endswith(LINES + TABLES)]
    if not paths:
        raise UserError(f"data.path={source.path}: expected {', '.join(LINES + TABLES)} files, got none; correct the pattern")
    return paths


def _folder_files(source: SourceOptions, folder: Path) -> Iterator[Path]:
    """The files that `prepare` wrote; else those of a split by the hub's rules: from the data set's card or from file names."""
    from datasets import load_dataset_builder  # slow to import

    if shards := shards_of(folder):
        yield from shards
        return
    if (script := folder / f"{folder.resolve().name}.py").is_file():
        raise UserError(
            f"data.path={source.path}: it holds the loading script {script.name}, which is not run; name the data files "
            f"instead, such as data.path={source.path}/*.jsonl, or save what the script gives as JSON lines or Parquet"
        )
    try:
        by_split = load_dataset_builder(str(folder), name=source.config).config.data_files or {}
    except Exception as error:  # the library and its parsers raise errors of every kind
        raise UserError(f"data.path={source.path}: {reason_of(error)}; correct data.path, data.config or its files") from error
    if source.split not in by_split:
        splits = ", ".join(map(str, by_split)) or "none"
        raise UserError(
            f"data.path={source.path}: it has no split '{source.split}' but {splits}; set data.split to one of them"
        )
    files = [Path(name) for name in by_split[source.split]]
    # a .json file next to other data files describes them
    data_files = [file for file in files if not file.name.endswith((".json", ".json.gz"))]
    yield from data_files or files


DEFAULT_SPLIT = SourceOptions().split


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A public data set on the hub, which `data=NAME` reads by its name. A new set is one entry of `TRAINING_SETS`.

    A fact that is missing is one that no source at hand says. `tests/unit/data/test_training_sets.py` compares the entries
    with `conf/data` and `docs/data.md`, which says where each fact comes from.
    """

    hub: str  # its id
    licence: str
    split: str = "train"
    files: str | None = None  # pattern of its files, where they make no split
    splits: tuple[str, ...] = ()  # other splits with training data, for data.split
    rows: int | None = None  # of the split
    size: str | None = None  # of its files or of its text
    gated: bool = False  # its terms must be accepted on its page
    columns: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Its id, split, licence and size in one line."""
        count = f"{self.rows:,} rows" if self.rows is not None else "rows unknown"
        details = [f"{self.hub} ({self.files or self.split})", f"licence {self.licence}", count, self.size or "size unknown"]
        return ", ".join(details + ["gated"] * self.gated)


TRAINING_SETS: dict[str, TrainingSet] = {
    "perfectblend": TrainingSet(
        "mlabonne/open-perfectblend",
        "apache-2.0",
        rows=1_420_909,
        size="1.48 GB",
        columns=("conversations", "source"),
    ),
    "ultrachat": TrainingSet(
        "HuggingFaceH4/ultrachat_200k",
        "mit",
        "train_sft",
        rows=207_865,
        size="1.40 GB of text",
        columns=("prompt", "prompt_id", "messages"),
    ),
    "sharegpt": TrainingSet(
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "apache-2.0",
        files="ShareGPT_V3_unfiltered_cleaned_split.json",
        size="0.67 GB",
        columns=("id", "conversations"),
    ),
    "nemotron": TrainingSet(
        "nvidia/Nemotron-Post-Training-Dataset-v2",
        "cc-by-4.0",
        "chat",
        splits=("code", "math", "stem"),
        rows=627_720,
        size="5.97 GB of text",
        gated=True,
        columns=("uuid", "license", "generator", "version", "category", "reasoning", "messages"),
    ),
    "magpie": TrainingSet(
        "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        "llama3.1",
        size="1.01 GB",
        columns=("conversations", "instruction", "response"),
    ),
    "opencode": TrainingSet(
        "nvidia/OpenCodeInstruct",
        "cc-by-4.0",
        rows=5_000_000,
        size="6.86 GB",
        columns=(
            "id",
            "input",
            "output",
            "domain",
            "generation_algorithm",
            "llm_judgement",
            "unit_tests",
            "tests_execution_status",
            "average_test_score",
        ),
    ),
}


def named_set(path: str) -> TrainingSet | None:
    """The set that a path names; None for other paths. A file or folder of that name goes first."""
    training_set = TRAINING_SETS.get(path)
    return None if training_set is not None and Path(path).exists() else training_set


def on_the_hub(source: SourceOptions) -> SourceOptions:
    """The source with a set's name replaced by its id, split and files; other sources unchanged.

    Raises UserError for a split that the set does not have.
    """
    training_set = named_set(source.path)
    if training_set is None:
        return source
    split = training_set.split if source.split == DEFAULT_SPLIT else source.split
    splits = (training_set.split, *training_set.splits)
    if split not in splits:
        raise UserError(
            f"data.split={split}: {source.path} has {', '.join(splits)}; name one of them, or use data.path={training_set.hub}"
        )
    return replace(source, path=training_set.hub, split=split, files=source.files or training_set.files)
