"""Public data sets for training, by name: what `data=NAME` reads, its licence and its size. A new set is one entry here.

A fact that is missing is one that no source at hand says. `tests/unit/data/test_training_sets.py` compares the entries with
`conf/data` and `docs/data.md`, which says where each fact comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from drafttrain.core.errors import UserError
from drafttrain.data import SourceOptions

DEFAULT_SPLIT = SourceOptions().split


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A public data set on the hub."""

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
