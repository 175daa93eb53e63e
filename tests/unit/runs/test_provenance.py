"""Whose words the data is: what the record says, and what the target makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafttrain.core.errors import UserError
from drafttrain.data import DataOptions
from drafttrain.data.dataset import Dataset, load_dataset
from drafttrain.data.provenance import foreign, template_hash
from drafttrain.runs import provenance
from drafttrain.runs.options import RunOptions
from drafttrain.runs.provenance import origin_of
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import LoadedTarget, load_target

WORDS = ["def", "return", "if", "self", "x", "=", "(", ")", ":", "not", "import", "class", "None", "for", "in", "range"]
TARGET = {"name": "hf", "path": "/models/Some-8B", "fingerprint": "f0"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "LENGTH", 24)


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(TargetOptions())


def record(folder: Path, **changes: Any) -> str:
    writer = {"name": "hf", "path": "org/Some-8B", "fingerprint": "f0"} | changes.pop("target", {})
    (folder / "provenance.json").write_text(json.dumps({"target": writer, "template": template_hash("t")} | changes))
    (folder / "part-00000.jsonl").write_text("{}\n")
    return str(folder)


def test_foreign_distinguishes_replies_of_target_from_others(tmp_path: Path) -> None:
    assert foreign(record(tmp_path), TARGET, "t") is None
    assert foreign(str(tmp_path / "part-00000.jsonl"), TARGET, "t") is None
    assert foreign("embedded", TARGET, "t") == "the embedded replies are the embedded target's"
    assert foreign("embedded", TARGET | {"name": "embedded"}, "t") is None
    assert foreign("org/hub-set", TARGET, "t") == "nothing says who wrote its replies"
    assert "another chat template" in str(foreign(str(tmp_path), TARGET, "other"))
    assert "whose weights are others" in str(foreign(record(tmp_path, target={"fingerprint": "f1"}), TARGET, "t"))
    # a server names no weights
    assert foreign(record(tmp_path, target={"fingerprint": None}), TARGET, "t") is None
    server_answerer = record(tmp_path, target={"fingerprint": None, "path": "org/Other"}, template=None)
    assert foreign(server_answerer, TARGET, "t") == "its replies are those of org/Other"
    (tmp_path / "provenance.json").write_text("[]")
    with pytest.raises(UserError, match="expected a record of drafttrain prepare"):
        foreign(str(tmp_path), TARGET, "t")


def test_origin_of_target_replies_are_likelier_than_scrambled(loaded: LoadedTarget, tmp_path: Path) -> None:
    own = load_dataset(DataOptions(limit=60, held_out=6), loaded.tokenizer)
    found = origin_of(RunOptions(), loaded, own, shared=False)
    assert found.foreign is None and found.replies == 6 and found.likely is not None and found.own is not None
    assert found.likely > found.own  # most of them are greedy; by 1.8 nats, so that other kernels' samples change nothing
    assert len(found.lines(RunOptions())) == 1
    again = origin_of(RunOptions(), loaded, own, shared=False)
    assert again == found

    lines, draw = [], random.Random(0)
    for i in range(40):
        words = draw.sample(WORDS, len(WORDS))
        messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": " ".join(words)}]
        lines.append(json.dumps({"messages": messages}))
    path = tmp_path / "scrambled.jsonl"
    path.write_text("\n".join(lines))
    options = RunOptions(data=DataOptions(path=str(path), held_out=8))
    scrambled = origin_of(options, loaded, load_dataset(options.data, loaded.tokenizer), shared=False)
    assert scrambled.foreign == f"{path}: nothing says who wrote its replies"
    assert scrambled.likely is not None and scrambled.own is not None and scrambled.likely < scrambled.own - 1
    warning, figures = scrambled.lines(options)
    assert warning.startswith("warning: ") and f"drafttrain prepare data.path={path} out=DIR" in warning
    assert f"{scrambled.likely:.2f} nats/token" in figures
    assert origin_of(options, loaded, load_dataset(options.data, loaded.tokenizer), shared=True).likely is None


def test_origin_of_likelihood_that_is_not_finite_is_no_figure(loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a target without finite states of some token: NaN is no JSON, and a report has this."""
    data = load_dataset(DataOptions(limit=12, held_out=2), loaded.tokenizer)
    monkeypatch.setattr(provenance, "_written", lambda *_: [])
    for likely, own in ((float("nan"), -1.0), (None, float("-inf"))):
        answers = iter((likely, own))
        monkeypatch.setattr(provenance, "mean_log_likelihood", lambda *_, answers=answers: next(answers))
        found = origin_of(RunOptions(), loaded, data, False)
        assert (found.replies, found.likely, found.own) == (0, None, None)


def test_origin_of_scores_packed_rows_and_replies_at_context_limit(loaded: LoadedTarget, tmp_path: Path) -> None:
    packed = load_dataset(DataOptions(limit=20, held_out=0, pack=True), loaded.tokenizer)
    alone = load_dataset(DataOptions(limit=20, held_out=0), loaded.tokenizer)
    first = {tuple(row.documents[0].tolist()) for row in packed.train}
    rows = [row for row in alone.train if tuple(row.token_ids.tolist()) in first]
    from_packed = origin_of(RunOptions(), loaded, packed, shared=False)
    from_rows = origin_of(RunOptions(), loaded, Dataset(rows, [], {}), shared=False)
    assert from_packed.replies == from_rows.replies == len(packed.train) > 2
    assert from_packed.likely == pytest.approx(from_rows.likely, rel=1e-5)

    limit = loaded.target.shape.max_positions
    text = "x = 1\n" * limit
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "y = 2"}]
    path = tmp_path / "long.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") + json.dumps({"text": text}) + "\n")
    options = RunOptions(data=DataOptions(path=str(path), held_out=0, max_length=limit))
    found = origin_of(options, loaded, load_dataset(options.data, loaded.tokenizer), shared=False)
    assert found.replies == 1 and found.likely is not None


def own(command: Callable[..., int], *settings: str) -> Path:
    """What the embedded target has answered."""
    assert command("prepare", "out=own", *settings) == 0
    return Path("own").absolute()


def test_prepare_output_is_recognized_as_replies_of_target(command: Callable[..., int], loaded: LoadedTarget) -> None:
    prepared = own(command, "data.limit=2", "prepare.max_new_tokens=1", "prepare.drop=[]")
    template = loaded.tokenizer.chat_template
    assert foreign(str(prepared), loaded.description, template) is None
    assert foreign(str(prepared), loaded.description | {"fingerprint": "f1"}, template) is not None


@pytest.mark.slow
def test_fit_report_has_origin_and_contamination_of_data(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = own(command, "prepare.max_new_tokens=24", "prepare.drop=[empty]", "data.limit=12")
    (tmp_path / "copy.jsonl").write_bytes((prepared / "part-00000.jsonl").read_bytes())
    quick = [
        "train.steps=1",
        "train.global_batch=2",
        "data.held_out=4",
        "logger=none",
        "measure.limit=2",
        "measure.minutes=0.01",
        "measure.tune=off",
    ]
    quick += ["measure.transformers=false", "decode.max_new_tokens=4", "recipe=draft_model", "drafter.blocks=1"]
    for path, known in (("own", True), ("copy.jsonl", False)):
        capsys.readouterr()
        assert command("fit", f"data.path={path}", *quick, f"output={path}-runs") == 0
        shown = capsys.readouterr().out
        assert ("warning: copy.jsonl: " in shown) is not known
        (report,) = (tmp_path / f"{path}-runs").rglob("report.json")
        data = json.loads(report.read_text())["training"]["data"]
        origin, contaminated = data["origin"], data["contamination"]
        assert origin["own"] is known and origin["replies"] == 4 and origin["log_likelihood"] < 0
        assert contaminated == {"copies": [], "prompts": 2, "searched": 12, "records": 12, "ngram": 8, "overlap": 0.5}
        section = report.with_suffix(".md").read_text().split("## Data")[1]
        assert "nats/token" in section and "0 of 2 evaluation prompts also occur in the training data" in section


def test_replies_of_adapter_with_other_weights_are_foreign(loaded: LoadedTarget, tmp_path: Path) -> None:
    target = loaded.description
    record = {"target": {**target, "adapters": {"sql": "a1"}}, "template": None}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    assert foreign(str(tmp_path), target | {"adapters": {"sql": "a1", "chat": "c1"}}, None) is None
    assert foreign(str(tmp_path), target | {"adapters": {"sql": "b2"}}, None) == (
        "its replies of the adapter sql are those of other weights"
    )
