"""How much of the supervised tokens the commonest cover, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from drafttrain.data import DataOptions, SourceOptions
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import load_dataset, token_counts
from drafttrain.data.statistics import coverage
from drafttrain.measure.markdown import data_section
from drafttrain.measure.plots import data_plot
from drafttrain.runs.data import data_report, forms, print_counts, print_vocabulary, write_rejected
from tests.unit.data.test_dataset import WORDS, word_tokenizer, write


def test_token_counts_include_supervised_tokens_only() -> None:
    rows = [Encoded(np.array([5, 5, 2, 3], np.int32), np.array([False, True, True, False]))] * 1500
    assert token_counts(rows, 8).tolist() == [0, 0, 1500, 0, 0, 1500, 0, 0]
    assert token_counts([], 3).tolist() == [0, 0, 0]


def test_coverage_recommends_smallest_sufficient_draft_vocabulary() -> None:
    counts = torch.zeros(1000, dtype=torch.long)
    counts[torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:300]] = torch.tensor([98] * 100 + [1] * 200)
    found = coverage(counts)  # 9,800 of 10,000 by 100 tokens, each other one 0.01 %: 99 % take 200
    assert found is not None
    assert (found.vocabulary, found.seen, found.recommended) == (1000, 300, 256)
    assert found.recommended_share == pytest.approx((9800 + 156) / 10_000)
    assert [size for size, _ in found.curve] == [64, 128, 256, 512, 1000]
    assert dict(found.curve)[64] == pytest.approx(64 * 98 / 10_000) and found.curve[-1][1] == 1.0
    assert found.share(100) == pytest.approx(0.98) and found.share(5000) == 1.0


def test_coverage_small_vocabulary_is_recommended_whole() -> None:
    found = coverage(torch.ones(50, dtype=torch.long))
    assert found is not None and (found.recommended, found.recommended_share) == (50, 1.0)
    assert coverage(torch.zeros(50, dtype=torch.long)) is None


def test_run_data_report_states_sources_and_vocabulary_coverage(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", 10), write(tmp_path / "b.jsonl", 5)
    bad = json.dumps({"text": 3})
    Path(second).write_text(Path(second).read_text() + bad + "\n")
    options = DataOptions(mix=[SourceOptions(first, weight=1), SourceOptions(second, weight=3)], held_out=0, bad_records=1)
    data, said = load_dataset(options, word_tokenizer()), []
    print_counts(data.summary, options, said.append)
    assert said == [
        "data: 15 conversations, 15 trained on, 0 held out; 45 supervised tokens (2 sources)",
        f"  {first}: 10 records, prompt, 25.0% of an epoch, each 0.40 times",
        f"  {second}: 6 records, prompt, 75.0% of an epoch, each 2.00 times",
        "  42.9% of tokens supervised; 1 rejected",
    ]
    said.clear()
    print_vocabulary(data, len(WORDS), 2, said.append)
    assert said == [
        "draft vocabulary: the 2 most frequent of 44 tokens cover 42.2% of the supervised tokens; "
        "the recommended 44 cover 100.0%"
    ]
    print_vocabulary(data, len(WORDS), None, said.append)
    assert len(said) == 1
    report = data_report(data, len(WORDS))
    text = data_section(report)
    for line in (
        f"From `{first}, {second}`.",
        "| rejected: listed in rejected.txt | 1 |",
        f"| {second} | prompt 5 | 3 | 6 | 5 | 15 |",
    ):
        assert line in text
    assert data_plot(report, tmp_path / "data.png") == tmp_path / "data.png"
    assert data_plot(report | {"vocabulary": None}, tmp_path / "plain.png") is not None
    assert data_plot(None, tmp_path / "none.png") is None and data_section(None) == ""
    write_rejected(data, tmp_path)
    assert (
        tmp_path / "rejected.txt"
    ).read_text() == f"{second}:6: expected a string in text, got int; write its text, or remove the record\n"


def test_data_report_forms_counts_each_record_form() -> None:
    assert forms({"forms": {"messages": 90, "text": 1010}}) == "messages (90), text (1,010)"
    assert forms({"forms": {}}) == "no record read yet"
