"""Targets, drafters and data by hub id, and uploads, with the real libraries against the hub of `standin/hub.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafttrain.data.prompts import SPEED_MASK
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import EMBEDDED, load_target
from tests import hubs
from tests.exports import checkpoint
from tests.hubs import card, chat, read, run, table
from tests.standin.hub import OWNER, STRANGER, Fault, Hub

pytestmark = pytest.mark.slow
CHUNK = 10 * 2**20  # bytes that huggingface_hub writes at a time
TARGET = ("target=hf", "target.path=me/tiny")
SHORT = (
    *("train.steps=2", "train.global_batch=2", "train.micro_batch=2", "train.checkpoint_every=2", "train.warmup=0"),
    *("data.held_out=2", "data.max_length=128", "logger=none"),
)
QUICK = (
    *("measure.minutes=0.01", "measure.timed_prompts=1", "measure.batch_sizes=[1]", "measure.limit=2"),
    *("decode.max_new_tokens=8", "measure.transformers=false"),
)


def chats(number: int, count: int = 40) -> list[dict[str, object]]:
    return [chat(f"Question {number} {i}?", f"The answer is {i}.") for i in range(count)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Public repositories: a target, and a data set of two files and two splits."""
    with Hub() as made:
        made.put_folder("me/tiny", EMBEDDED)
        data = {"data/train-00000.parquet": table(chats(0)), "data/train-00001.parquet": table(chats(1))}
        test = {"data/test-00000.parquet": table(chats(2))}
        made.put("me/chats", {"README.md": card(train="data/train-*", test="data/test-*"), **data, **test}, "dataset")
        yield made


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a drafter for the embedded target."""
    return checkpoint(tmp_path_factory.mktemp("medusa") / "checkpoints", "medusa", load_target(TargetOptions()))


def close(hub: Hub) -> None:
    """Make all repositories private."""
    for repository in hub.repositories.values():
        repository.private = True


def test_hub_private_repositories_work_with_token_and_again_offline(hub: Hub, medusa: Path, tmp_path: Path) -> None:
    """A drafter is uploaded; target, drafter and data are private; the login is sent to the hub alone and written nowhere."""
    close(hub)
    upload = ("export", f"checkpoint={medusa}", "format=vllm", "out=out", "push_to_hub=me/drafter")
    done = run(hub, tmp_path, upload, token=OWNER)
    assert done.codes == [0], done.errors
    made = hub.repositories["model", "me/drafter"]
    sent = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert made.private and {name: content for name, content in made.files.items() if name != ".gitattributes"} == sent
    assert any(request.method == "PUT" and request.server == "cdn" for request in hub.requests) or all(
        not name.endswith(".safetensors") for name in sent
    )
    said = done.out
    mix = "data.mix=[{path:me/chats,weight:3},{path:me/chats,split:test,weight:1,limit:10}]"
    fit = ("fit", "recipe=medusa", *TARGET, mix, *SHORT, *QUICK, "train.init=me/drafter", "drafter.heads=3", "drafter.layers=1")
    measure = ("measure", "checkpoint=me/drafter", *TARGET, *QUICK)
    write = ("export", "checkpoint=me/drafter", *TARGET, "format=vllm", "out=again")
    done = run(hub, tmp_path, fit, measure, write, token=OWNER)
    assert done.codes == [0, 0, 0], done.errors
    assert (
        "me/chats: 80 records, messages, 75.0% of an epoch" in done.out
        and "10 records, messages, 25.0% of an epoch" in done.out
    )
    assert {request.login for request in hub.requests if request.server == "cdn"} == {None}
    assert {request.login for request in hub.requests if request.server == "hub"} == {OWNER}
    text = said + done.out + "".join(done.errors)
    assert OWNER not in text and not [path for path, content in hubs.written(tmp_path).items() if OWNER.encode() in content]
    (report,) = (tmp_path / "outputs").glob("measure/*/report.json")
    assert json.loads(report.read_text())["target"]["path"] == "me/tiny"
    (trained,) = (tmp_path / "outputs").glob("medusa/*/report.json")
    commits = [source["commit"] for source in json.loads(trained.read_text())["training"]["data"]["sources"]]
    assert commits == [hub.repositories["dataset", "me/chats"].names["main"]] * 2

    asked = len(hub.requests)
    offline = run(hub, tmp_path, (*fit, "output=second"), measure, HF_HUB_OFFLINE="1")
    assert offline.codes == [0, 0], offline.errors
    assert len(hub.requests) == asked
    first, second = ((tmp_path / name).glob("*/*/metrics.jsonl") for name in ("outputs", "second"))
    losses = [[json.loads(line)["loss"] for line in next(found).read_text().splitlines()] for found in (first, second)]
    assert losses[0] == losses[1]


ASKERS = [("closed", None), ("closed", STRANGER), ("closed", "hf_bad"), ("gated", None), ("gated", STRANGER), ("missing", None)]


def test_hub_unreadable_repository_error_says_reason_in_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.put("me/closed", dict(hub.repositories["model", "me/tiny"].files), private=True)
    hub.put("me/gated", dict(hub.repositories["model", "me/tiny"].files), gated=True)
    hub.put("me/gated-data", dict(hub.repositories["dataset", "me/chats"].files), "dataset", gated=True)
    hub.put("me/closed-data", dict(hub.repositories["dataset", "me/chats"].files), "dataset", private=True)
    commands = {
        "target": ("inspect", "target=hf", "target.path=me/{}"),
        "drafter": ("measure", "checkpoint=me/{}", *TARGET),
        "companion": ("fit", "recipe=draft_model", "drafter.source=hf", "drafter.path=me/{}", *SHORT),
        "data": ("inspect", "data.path=me/{}-data"),
        "limited data": ("inspect", "data.path=me/{}-data", "data.limit=3"),
    }

    of_data = ("data", "limited data")  # which `datasets` reads; all others ask the hub in the same way
    cases = {(name, token): tuple(commands) if token is None else ("target", *of_data) for name, token in ASKERS}
    places = [(case, kind) for case, kinds in cases.items() for kind in kinds]
    asked = [(token, [word.format(name) for word in commands[kind]]) for (name, token), kind in places]
    done = hubs.run_as(hub, tmp_path, *asked)
    assert set(done.codes) == {2}, done.errors
    assert not any(token in error or "Traceback" in error for token in (OWNER, STRANGER, "hf_bad") for error in done.errors)
    assert all(error.count("drafttrain: ") == 1 for error in done.errors), done.errors

    def lines(name: str, token: str | None) -> dict[str, str]:
        return {kind: line for (case, kind), line in zip(places, done.lines, strict=True) if case == (name, token)}

    for kind, line in lines("closed", None).items():
        assert "or it is private and no login is given; correct the name, or log in: hf auth login, or set HF_TOKEN" in line, (
            kind
        )
    for kind, line in lines("closed", STRANGER).items():
        assert "or it is private and the login that is used may not read it" in line, kind
    for kind, line in lines("gated", None).items():
        page = f"https://huggingface.co/{'datasets/' if 'data' in kind else ''}me/gated{'-data' if 'data' in kind else ''}"
        assert f"is gated; accept its terms or ask for access at {page}, and log in: hf auth login" in line, kind
    for kind, line in lines("gated", STRANGER).items():
        assert "is gated; accept its terms or ask for access at" in line and "with the login that is used here" in line, kind
    for kind, line in lines("closed", "hf_bad").items():
        assert "the hub refuses the login that is used; log in again: hf auth login, or set HF_TOKEN" in line, kind
    for kind, line in lines("missing", None).items():
        assert "the hub has no" in line and "me/missing" in line, kind


def test_hub_revision_pins_data_and_unknown_revision_is_refused(hub: Hub, tmp_path: Path) -> None:
    """One that does not exist is one line; a data set's commit pins it, and a new commit is noticed otherwise."""
    old = hub.repositories["dataset", "me/chats"].names["main"]
    unknown = [
        ("inspect", *TARGET, "target.revision=v9"),
        ("measure", "checkpoint=me/tiny@v9", *TARGET),
        ("inspect", "data.path=me/chats", "data.revision=v9"),
        ("inspect", "data.path=me/chats", "data.revision=v9", "data.limit=3"),
        ("inspect", "data.path=me/chats", "data.split=validation"),
    ]
    done = run(hub, tmp_path, *unknown)
    assert done.codes == [2] * 5, done.errors
    assert all("has no revision 'v9'; name a branch, a tag or a commit that its page lists" in line for line in done.lines[:4])
    assert "it has no split 'validation' but train, test; set data.split to one of them" in done.lines[4]
    limited = {"path": "me/chats", "limit": 3}
    pinned = limited | {"revision": old}
    parts = [{"path": "me/chats", "split": split} for split in ("train[:3]", "train+test")]
    before = read(hub, tmp_path, {"path": "me/chats"}, limited, pinned, *parts)
    assert [len(one["found"]) for one in before[3:]] == [3, 120]
    hub.change("dataset", "me/chats", {"data/train-00000.parquet": table(chats(7))})
    after = read(hub, tmp_path, {"path": "me/chats"}, limited, pinned)
    assert before[2] == after[2] and before[0] != after[0] and before[1] != after[1]
    assert [origin for origin, _ in after[1]["found"]] == [f"me/chats:row {i}" for i in (1, 2, 3)]
    assert after[0]["found"][0][0] == "me/chats/data/train-00000.parquet:row 1"
    assert after[0]["found"][0][1][0]["content"] == "Question 7 0?"
    (there,) = read(hub, tmp_path, {"path": "me/chats", "revision": old}, HF_HUB_OFFLINE="1")
    assert there == before[0]  # the first read fetched this commit's files


@pytest.mark.sampled(reset=[False])
@pytest.mark.parametrize("reset", [False, True])
def test_hub_interrupted_download_resumes_or_fails_in_one_line(reset: bool, hub: Hub, tmp_path: Path) -> None:
    """What is complete is kept, and the next run fetches the rest alone."""
    hub.faults = [Fault("model.safetensors", CHUNK + 1000, 1, reset)]
    inspect = ("inspect", *TARGET, "data.path=me/chats")
    fit = ("fit", "recipe=medusa", *TARGET, "data.path=me/chats", *SHORT, "measure.enabled=false")
    done = run(hub, tmp_path, fit)
    first = done.codes[0]
    assert first in (0, 2) and "Traceback" not in done.errors[0], done.errors
    size = len(hub.repositories["model", "me/tiny"].files["model.safetensors"])
    if first == 0:  # the library continues where it was cut
        assert [r.range for r in hub.downloads("model.safetensors")] == [None, f"bytes={CHUNK}-"]
        assert hub.sent("model.safetensors") == size + 1000
    else:
        assert (
            "failed (" in done.lines[0] and "run the same command again, it keeps the files that are complete" in done.lines[0]
        )
    hub.faults = [Fault("train-00001.parquet", 50, 99, reset), Fault("medusa_lm_head.safetensors", 50, 99, reset)]
    hub.put("me/drafter", {"config.json": "{}", "medusa_lm_head.safetensors": bytes(4000)})
    other = tmp_path / "other"
    done = run(hub, other, inspect, ("measure", "checkpoint=me/drafter", *TARGET))
    for line, error in zip(done.lines, done.errors, strict=True):
        assert "Traceback" not in error and "run the same command again, it keeps the files that are complete" in line
    assert done.codes == [2, 2], done.errors
    hub.faults, before = [], len(hub.requests)
    assert run(hub, other, inspect).codes == [0]
    again = [r.path for r in hub.requests[before:] if r.method == "GET" and r.status in (200, 206) and r.server == "cdn"]
    assert len(again) == 1 and "train-00001.parquet" in again[0]


def test_hub_limited_data_is_read_from_cache_when_hub_is_unreachable(hub: Hub, tmp_path: Path) -> None:
    limited = ("inspect", "data.path=me/chats", "data.limit=60")
    hub.faults = [Fault("train-*.parquet", 50, 1)]
    done = run(hub, tmp_path, limited)
    assert done.codes[0] in (0, 2) and "Traceback" not in done.errors[0], done.errors
    hub.faults = []
    assert run(hub, tmp_path, limited).codes == [0]
    gone = run(hub, tmp_path, limited, ("inspect", *TARGET), HF_ENDPOINT="http://127.0.0.1:9")
    assert gone.codes == [0, 2], gone.errors  # the limited data are found in the cache, the tokenizer was never fetched
    assert "the connection to http://127.0.0.1:9 failed" in gone.lines[1]


def test_hub_offline_without_cached_files_is_refused_in_one_line(hub: Hub, medusa: Path, tmp_path: Path) -> None:
    commands = [
        ("inspect", *TARGET),
        ("measure", "checkpoint=me/drafter", *TARGET),
        ("inspect", "data.path=me/chats"),
        ("inspect", "data.path=me/chats", "data.limit=3"),
        ("measure", f"checkpoint={medusa}", "prompts=gsm8k", *QUICK),
        ("export", f"checkpoint={medusa}", "format=vllm", "out=out", "push_to_hub=me/x"),
    ]
    done = run(hub, tmp_path, *commands, HF_HUB_OFFLINE="1")
    assert done.codes == [2] * len(commands), done.errors
    assert not hub.requests and not any("Traceback" in error for error in done.errors)
    for line in done.lines[:5]:
        assert "HF_HUB_OFFLINE is set and not all of" in line and "is in the cache; run once without it" in line
    assert "HF_HUB_OFFLINE forbids it" in done.lines[5]


def test_hub_prompt_set_is_measured_by_category_without_its_masked_prompts(hub: Hub, medusa: Path, tmp_path: Path) -> None:
    rows = [
        {"question_id": f"q{i}", "category": ("coding", "math")[i % 2], "turns": [SPEED_MASK if i < 2 else f"What is {i}?"]}
        for i in range(6)
    ]
    place = "qualitative/test-*"
    settings = f"configs:\n- config_name: qualitative\n  data_files:\n  - split: test\n    path: {place}\n"
    files = {"README.md": f"---\n{settings}---\n", "qualitative/test-00000-of-00001.parquet": table(rows)}
    hub.put("nvidia/SPEED-Bench", files, "dataset")
    done = run(hub, tmp_path, ("measure", f"checkpoint={medusa}", "prompts=speed_bench", *QUICK, "measure.limit=null"))
    assert done.codes == [0], done.errors
    assert "note: speed_bench: 2 masked prompts are left out" in done.errors[0] and "4 prompts of speed_bench" in done.out
    (file,) = tmp_path.glob("outputs/**/report.json")
    (row,) = json.loads(file.read_text())["checkpoints"]
    by_category = {part["value"]: part["prompts"] for part in row["slices"] if part["by"] == "category"}
    assert by_category == {"coding": 2, "math": 2}


def test_hub_refused_upload_keeps_export_and_hides_token(hub: Hub, medusa: Path, tmp_path: Path) -> None:
    """By another owner's name, and by a login that is refused: the directory stays, and the line has no login."""
    made = ("export", f"checkpoint={medusa}", "format=vllm")
    done = run(hub, tmp_path, (*made, "out=a", "push_to_hub=other/x"), token=OWNER)
    bad = run(hub, tmp_path, (*made, "out=b", "push_to_hub=me/x"), token="hf_bad")
    for ended, out in ((done, "a"), (bad, "b")):
        assert ended.codes == [2], ended.errors
        assert f"{out} is complete and stays, but its upload to" in ended.lines[0]
        assert OWNER not in ended.errors[0] and "hf_bad" not in ended.errors[0] and (tmp_path / out / "config.json").is_file()
