"""An OpenAI-compatible server as an engine of a measurement, with and without counters."""

from __future__ import annotations

import copy
import json
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from drafttrain.commands import measure as measure_file
from drafttrain.core.errors import UserError
from drafttrain.data.prompts import encode_prompt, load_prompts
from drafttrain.drafters.tuned_settings import keep_tuned
from drafttrain.engines import http as http_file
from drafttrain.engines.answers import EngineInfo
from drafttrain.engines.http import EndpointOptions, counted, endpoint, of_answers, prometheus, prometheus_by_position, read
from drafttrain.measure import report as report_file
from drafttrain.measure.engine_report import section
from drafttrain.runs import checkpoint_source
from tests.exports import embedded, loaded_before
from tests.helpers import certificates
from tests.served import SMALL, Fake, untrained
from tests.unit.engines.test_measurement import report_in

Command = Callable[..., int]
KEY = "sk-very-secret"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("run") / "step-00001")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fake]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(ssl, "create_default_context", certificates)
    monkeypatch.setattr(http_file, "PAUSE", 0.0)
    fakes: list[Fake] = []

    def start(*arguments: Any) -> Fake:
        fakes.append(Fake(*arguments))
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.http.shutdown()
        fake.http.server_close()


@pytest.fixture(scope="module")
def figures() -> list[dict[str, Any]]:
    """The drafter's own, once they are measured."""
    return []


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch, figures: list[dict[str, Any]]) -> None:
    """All commands here measure one drafter of a target that is loaded already, and nobody looks at the pictures."""
    measure_checkpoints = measure_file.measure_checkpoints

    def known(*asked: Any) -> dict[str, Any]:
        figures[:] = figures or [measure_checkpoints(*asked)]
        return copy.deepcopy(figures[0])

    monkeypatch.setattr(measure_file, "measure_checkpoints", known)
    monkeypatch.setattr(checkpoint_source, "load_target", loaded_before)
    monkeypatch.setattr(report_file, "_figures", lambda *asked: [])


@pytest.mark.parametrize(
    ("counts", "others", "told", "note"),
    [
        (None, 0, (None, None, None, None), "no tau and no acceptance: the server has no /metrics"),
        ("vllm", 0, (4, 12, 2, (2, 0, 0)), None),
        ("older", 0, (4, 12, 2, None), "no acceptance by position: the server counts only sums"),
        ("sglang", 0, (4, None, None, None), "no acceptance by position: the server counts only sums"),
        ("answers", 0, (4, 12, 2, (2, 0, 0)), None),
        ("vllm", 5, (None, None, None, None), "the server generated 10 tokens for other clients meanwhile"),
    ],
)
def test_http_engine_reports_counts_of_server_metrics(
    counts: str | None, others: int, told: tuple[Any, ...], note: str | None, serve: Callable[..., Fake]
) -> None:
    fake = serve(counts, others)
    with endpoint(EndpointOptions(fake.url, "engine_url"), [[1, 2], [3]], 8, 2) as side:
        side.answer([0])
        answer = side.answer([1, 0])
    assert (answer.verifications, answer.drafted, answer.accepted, answer.accepted_by_position) == told
    assert len(answer.notes) == (note is not None) and (note or "") in "".join(answer.notes)
    assert [(text.count, text.output) for text in answer.texts] == [(4, "one two three")] * 2
    assert all(0 < text.first <= text.ended for text in answer.texts)
    assert side.about == EngineInfo({"sglang" if counts == "answers" else "fake": "7"}, ids=False)
    assert sorted(body["prompt"] for body in fake.bodies) == [[1, 2], [1, 2], [3]]
    wanted = {"model": "tiny", "max_tokens": 8, "temperature": 0, "stream": True, "path": "/v1/completions"}
    assert all(body.items() >= wanted.items() for body in fake.bodies)
    for key in ("return_spec_tokens_details", "repetition_penalty"):
        assert all((key in body) == (counts == "answers") for body in fake.bodies)


def test_http_engine_requests_have_penalties(serve: Callable[..., Fake]) -> None:
    fake, penalties = serve("answers"), {"repetition_penalty": 1.3, "logit_bias": {5: -2.0}}
    with endpoint(EndpointOptions(fake.url, "engine_url", penalties=penalties), [[1]], 8, 1) as side:
        side.answer([0])
    (body,) = fake.bodies
    assert (body["repetition_penalty"], body["logit_bias"], body["min_p"]) == (1.3, {"5": -2.0}, 0.0)


def test_http_engine_counters_of_restarted_server_are_not_used(serve: Callable[..., Fake]) -> None:
    fake = serve("vllm")
    with endpoint(EndpointOptions(fake.url, "engine_url"), [[1]], 8, 1) as side:
        side.answer([0])
        before = read(fake.metrics())
        fake.lost = 1
        found = counted(before, fake.metrics, 4)
        assert found.notes == ("no tau and no acceptance: the server was restarted meanwhile, so its counters began anew",)
        later = fake.metrics().replace("process_start_time_seconds 100", "process_start_time_seconds 107")
        assert counted(read(fake.metrics()), lambda: later, 0).notes == found.notes, "though no counter is smaller"
        assert side.answer([0]).accepted_by_position == (1, 0, 0), "the next wave counts from the new start"
    late = counted(read(fake.metrics()), fake.metrics, 4)
    assert late.verifications is None and "counts 0 of the 4 tokens" in late.notes[0]
    gone = counted(read(fake.metrics()), lambda: None, 4)
    assert gone.notes == ("no tau and no acceptance: the server has no /metrics (SGLang: --enable-metrics)",)


def test_http_engine_counts_in_sglang_answers_are_summed() -> None:
    steps = {"spec_verify_ct": 3, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 5}
    histogram = {"spec_correct_drafts_histogram": [1, 0, 1, 1]}
    found = of_answers([steps | histogram, None], [9, 1])  # an answer of one token has no decode step
    assert found is not None and (found.verifications, found.drafted, found.accepted) == (3, 12, 5)
    assert found.accepted_by_position == (2, 2, 1, 0) and not found.notes
    without = of_answers([steps], [9])
    assert without is not None and without.verifications == 3 and without.accepted_by_position is None
    assert without.notes == (http_file.DOES_NOT_ADD_UP,)
    assert of_answers([steps | histogram, None], [9, 2]) is None is of_answers([None], [1])


def test_http_engine_chat_api_sends_messages(serve: Callable[..., Fake]) -> None:
    fake, message = serve(), [{"role": "user", "content": "hello"}]
    with endpoint(EndpointOptions(fake.url, "engine_url", api="chat"), [message], 8, 1) as side:
        assert side.answer([0]).texts[0].output == "one two three"
    assert fake.bodies[0]["messages"] == message and fake.bodies[0]["path"] == "/v1/chat/completions"


def test_http_engine_refused_request_raises_error_without_key(serve: Callable[..., Fake]) -> None:
    fake = serve(None, 0, 401)
    where = EndpointOptions(fake.url, "engine_url", key=KEY)
    with (
        endpoint(where, [[1]], 8, 1) as side,
        pytest.raises(UserError, match=r"refuses completions with status 401.*so it is") as caught,
    ):
        side.answer([0])
    assert KEY not in str(caught.value) + repr(where)
    with (
        pytest.raises(UserError, match=r"no answer .ConnectError.; start the server, and check engine_url"),
        endpoint(EndpointOptions("http://127.0.0.1:9", "engine_url"), [[1]], 8, 1),
    ):
        pass


def test_prometheus_counters_are_summed_over_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'a_total{x="1",position="0"} 2\na_total{x="2",position="0"} 3.5\n# TYPE a counter\nb{le="+Inf"} NaN\nbroken'
    assert prometheus(text)["a"] == 5.5
    assert prometheus_by_position(text + '\na_total{x="1",position="2"} 4', "a") == {0: 5.5, 2: 4.0}
    assert "does not count verifications" in str(read(text))
    where = EndpointOptions("http://127.0.0.1:9/v1", "engine_url")
    client = httpx.Client(base_url=where.url)
    monkeypatch.setattr(client, "get", lambda url: (_ for _ in ()).throw(httpx.ConnectError("nobody")))
    assert http_file._looked_up(client, "metrics") is None


@pytest.mark.usefixtures("measured_once")
def test_measure_http_engine_with_two_servers_reports_and_hides_key(
    command: Command, checkpoint: Path, tmp_path: Path, serve: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key goes to the servers, and nowhere else."""
    monkeypatch.setenv("MY_KEY", KEY)
    fast, slow = serve("vllm"), serve()
    urls = (f"engine_url={fast.url}", f"engine_plain_url={slow.url}", "engine_key_env=MY_KEY")
    assert command("measure", f"checkpoint={checkpoint}", "engine=http", *urls, *SMALL) == 0
    (entry,) = report_in(tmp_path)["engines"]
    assert (entry["tau"], entry["exact_matches"], entry["same_as_here"], entry["stack"]) == (1.5, 2, 0, None)
    assert entry["accepted_by_position"] == [4, 0, 0] and [round(a[0], 2) for a in entry["alpha_by_position"]] == [0.5, 0.0]
    assert len(entry["alpha_by_position_here"]) <= 3 and entry["notes"] == []
    assert entry["url"] == f"{fast.url} {slow.url}" and entry["versions"] == {"fake": "7"}
    assert fast.keys == {f"Bearer {KEY}"} and len(fast.bodies) == len(slow.bodies) == 2 + 2 * 2
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.usefixtures("measured_once")
def test_measure_http_engine_compares_with_chain_of_tuned_length(
    command: Command, checkpoint: Path, tmp_path: Path, serve: Callable[..., Fake]
) -> None:
    """As exports serve it."""
    tuned = shutil.copytree(checkpoint, tmp_path / "tuned")
    keep_tuned(tuned, {1: {"draft_length": 2}}, {})
    assert command("measure", f"checkpoint={tuned}", "engine=http", f"engine_url={serve('vllm').url}", *SMALL) == 0
    (entry,) = report_in(tmp_path)["engines"]
    assert entry["draft_length"] == 2


def test_measure_http_engine_server_that_does_not_answer_is_refused_before_measuring(
    command: Command, checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    assert command("measure", f"checkpoint={checkpoint}", "engine=http", "engine_url=http://127.0.0.1:9/v1", *SMALL) == 2
    assert "no answer (ConnectError); start the server" in capsys.readouterr().err and not list(tmp_path.rglob("report.json"))
    with pytest.raises(UserError, match="mostly is at http://host:8000/v1"):
        http_file._check(httpx.Response(404), EndpointOptions("http://host:8000/", "engine_url"), "models")


@pytest.mark.usefixtures("measured_once")
def test_measure_twice_in_one_second_writes_two_reports_and_draws_each_once(
    command: Command, checkpoint: Path, tmp_path: Path, serve: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(measure_file, "dated_path", lambda output, kind: Path(output) / kind / "now")
    monkeypatch.setattr(report_file, "_figures", lambda *asked: drawn.append(asked) or [])
    engine = ("engine=http", f"engine_url={serve('vllm').url}")
    assert command("measure", f"checkpoint={checkpoint}", *engine, *SMALL) == 0
    assert command("measure", f"checkpoint={checkpoint}", *SMALL) == 0
    reports = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("outputs/measure/*/report.json")}
    assert len(reports) == len(drawn) == 2 and reports["now"]["engines"] and not reports["now-2"]["engines"]


@pytest.mark.usefixtures("measured_once")
def test_measure_http_engine_prompt_beyond_server_context_is_left_out_by_name(
    command: Command, checkpoint: Path, tmp_path: Path, serve: Callable[..., Fake]
) -> None:
    lengths = sorted(len(encode_prompt(embedded().tokenizer, prompt.turns)) for prompt in load_prompts("embedded", 2))
    fake = serve("vllm", 0, 0, lengths[0] + 10)
    asked = ("engine=http", f"engine_url={fake.url}", "decode.draft_length=1", *SMALL)
    assert command("measure", f"checkpoint={checkpoint}", *asked) == 0
    (entry,) = report_in(tmp_path)["engines"]
    assert "HTTP endpoint drafted 3.0 tokens per verification; our chains have 1" in entry["notes"]
    assert entry["prompts"] == 1 and {len(body["prompt"]) for body in fake.bodies} == {lengths[0]}
    said = f"1 of 2 timed prompts have more than the {lengths[0]} tokens that fit, and were left out: "
    assert any(note.startswith(said) for note in entry["notes"])
    fake.context = 10
    assert command("measure", f"checkpoint={checkpoint}", "engine=http", f"engine_url={fake.url}", *SMALL) == 2


@pytest.mark.usefixtures("measured_once")
def test_measure_http_engine_failure_keeps_report(
    command: Command, checkpoint: Path, tmp_path: Path, serve: Callable[..., Fake], capsys: Any
) -> None:
    fake = serve(None, 0, 500)
    assert command("measure", f"checkpoint={checkpoint}", "engine=sglang", f"engine_url={fake.url}", *SMALL) == 2
    report = report_in(tmp_path)
    (entry,) = report["engines"]
    assert "status 500" in entry["error"] and entry["tokens_per_s"] is None and section(report) == ""
    assert report["checkpoints"][0]["exact_matches"] == 2
    assert "the other figures are in" in capsys.readouterr().err
