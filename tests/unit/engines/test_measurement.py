"""`drafttrain measure engine=...`: transformers for real, a script of our own for the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttrain.core.errors import UserError
from drafttrain.engines import process as engine
from drafttrain.engines.answers import EngineInfo, TimedText, WaveOutputs
from drafttrain.engines.measurement import SPECULATIVE, OwnDecoding, TimingOptions, measured
from drafttrain.engines.process import ENGINES, Engine, EngineJob
from drafttrain.engines.timed_process import serving
from drafttrain.measure.bench import BASELINE
from drafttrain.measure.engine_report import version
from drafttrain.runs import serving_engines as command_file
from drafttrain.runs.options import RunOptions
from tests.served import SMALL, untrained
from tests.unit.measure.test_runner import SCHEMA, check

Command = Callable[..., int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("run") / "step-00001")


def report_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("outputs/measure/*/report.json")
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    check(report, SCHEMA)
    return report


@pytest.mark.slow
def test_measure_transformers_engine_counts_equal_decoder(
    command: Command, checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    assert command("measure", f"checkpoint={checkpoint}", "engine=transformers", *SMALL) == 0
    (entry,) = report_in(tmp_path)["engines"]
    assert (entry["engine"], entry["stack"], entry["dtype"], entry["draft_length"]) == (
        "transformers",
        "transformers",
        "float32",
        3,
    )
    assert next(iter(entry["versions"])) == "transformers" and entry["error"] is None
    assert entry["prompts"] == entry["exact_matches"] == entry["same_as_here"] == 2 and entry["repeats"] == 2
    assert entry["tau"] == entry["tau_here"] > 1 and not entry["tau_gap_flagged"] and entry["flags"] == []
    assert entry["verifications"] % 2 == 0 and 0 < entry["accepted"] <= entry["drafted"] <= 3 * entry["verifications"]
    assert entry["speedup_min"] <= entry["speedup"] <= entry["speedup_max"]
    assert min(entry["ttft_ms"], entry["baseline_tpot_ms"], entry["tokens_per_s"]) > 0
    said = capsys.readouterr().out
    assert "serving engines, on the same prompts" in said and "transformers" in said
    (page,) = tmp_path.glob("outputs/measure/*/report.md")
    assert "## Engines" in page.read_text(encoding="utf-8") and "format=transformers, float32" in page.read_text(
        encoding="utf-8"
    )


class Spoken:
    """A side whose first token takes a second, and every other `pace`; texts are counted in `calls`."""

    def __init__(
        self, name: str, pace: float, calls: list[tuple[str, list[int]]], said: Sequence[Any] = (), **counts: int
    ) -> None:
        self.name, self.pace, self.calls, self.said, self.counts = name, pace, calls, said, counts
        self.about = EngineInfo({"spoken": "1"})

    def answer(self, wave: Sequence[int]) -> WaveOutputs:
        self.calls.append((self.name, list(wave)))
        texts = [TimedText(5, self.said[i] if self.said else (i, 1, 2, 3, 4), 1.0, 1.0 + 4 * self.pace) for i in wave]
        return WaveOutputs(texts, **{key: value * len(wave) for key, value in self.counts.items()}, **self.more(wave))

    def more(self, wave: Sequence[int]) -> dict[str, Any]:
        return {}


class Positions(Spoken):
    """A side that counts positions, except for prompt 2."""

    def more(self, wave: Sequence[int]) -> dict[str, Any]:
        return {"notes": ("no tau: so it is",)} if wave == [2] else {"accepted_by_position": (2, 1, 0)}


def terms(**more: Any) -> TimingOptions:
    asked = {"label": "Spoken", "prompts": 3, "sizes": [1], "repeats": 2, "seconds": 1e9, "draft_length": 3}
    return TimingOptions(**asked | {"stop_ids": frozenset({4}), "watch": lambda *_: None} | more)


def here(begins: str) -> OwnDecoding:
    return OwnDecoding([[i, 1, 2, 3, 4] for i in range(3)], ["text"] * 3, [4, 4, 4], [[1, 1], [2, 0], [1, 1]])


def test_engine_measurement_alternates_sides_after_warm_up() -> None:
    calls: list[tuple[str, list[int]]] = []
    sides = {
        SPECULATIVE: Spoken("fast", 0.5, calls, verifications=2, drafted=6, accepted=2),
        BASELINE: Spoken("slow", 1.0, calls),
    }
    keys = measured(sides, here, terms(sizes=[1, 2]))
    assert [name for name, _ in calls] == ["fast", "slow"] * (len(calls) // 2)
    assert [wave for _, wave in calls[:4]] == [[0]] * 4, "both run the first wave twice before"
    assert [wave for _, wave in calls[4:16]] == [[i] for i in (0, 0, 1, 1, 2, 2)] * 2
    assert (keys["speedup"], keys["tokens_per_s"], keys["baseline_tpot_ms"], keys["ttft_ms"]) == (2.0, 2.0, 1000.0, 1000.0)
    assert (keys["tau"], keys["tau_here"], keys["verifications"], keys["accepted"]) == (2.0, 2.0, 12, 12)
    assert (keys["exact_matches"], keys["same_as_here"], keys["prompts"], keys["repeats"]) == (3, 3, 3, 2)
    assert [(part["by"], part["value"], part["speedup"]) for part in keys["slices"]] == [
        ("batch_size", 1, 2.0),
        ("batch_size", 2, 2.0),
    ]
    assert keys["flags"] == []


def test_engine_measurement_shorter_drafts_of_larger_batch_are_compared_with_such_chains() -> None:
    def ours(begins: str, length: int = 3) -> OwnDecoding:
        return OwnDecoding([[1]] * 3, ["1"] * 3, [6] * 3, [[min(length, 2)] * (6 // (1 + min(length, 2)))] * 3)

    class Shorter(Spoken):
        def more(self, wave: Sequence[int]) -> dict[str, Any]:
            return {
                "verifications": 2 * len(wave),
                "drafted": 6 if len(wave) == 1 else 2 * len(wave),
            }  # size 2 ends with one alone

    keys = measured({SPECULATIVE: Shorter("spoken", 0.5, [])}, ours, terms(sizes=[1, 3, 2]))
    assert [s["tau_here"] for s in keys["slices"]] == [3.0, 2.0, None], "no chain is like a mixture of lengths"
    assert [len(s["alpha_by_position_here"] or ()) for s in keys["slices"]] == [3, 1, 0]
    assert version(keys | {"url": "x", "label": "HTTP endpoint"}) == "HTTP endpoint (spoken 1)"


def test_engine_measurement_position_counts_need_every_wave() -> None:
    counts = {"verifications": 4, "drafted": 12, "accepted": 3}
    keys = measured({SPECULATIVE: Positions("fast", 0.5, [], **counts)}, here, terms(prompts=2))
    assert keys["accepted_by_position"] == [8, 4, 0] and keys["notes"] == []
    assert [alpha[0] for alpha in keys["alpha_by_position"]] == [0.5, 0.5, 0.0]
    assert [round(alpha[0], 2) for alpha in keys["alpha_by_position_here"]] == [0.75, 0.33, 0.0]
    keys = measured({SPECULATIVE: Positions("fast", 0.5, [], **counts)}, here, terms(prompts=3))
    assert keys["accepted_by_position"] is keys["alpha_by_position"] is None
    assert keys["notes"] == ["Spoken, batch 1: no tau: so it is (2 of 6 waves)"]


@pytest.mark.parametrize(
    ("counts", "said", "flag"),
    [
        (
            {"verifications": 4, "drafted": 12, "accepted": 1},
            [],
            "counts tau 1.00, 50% below our 2.00 of the same chains: 24 ver",
        ),
        ({"verifications": 400, "drafted": 400, "accepted": 1}, [], "it drafted 1.0 tokens per verification, not 3"),
        ({"verifications": 400, "drafted": 1200, "accepted": 1}, [], "drafttrain verify compares the accepted drafts"),
        (
            {"verifications": 2, "drafted": 6, "accepted": 2},
            [(9,)] * 3,
            "3 of 3 texts of Spoken with speculation are not those",
        ),
    ],
)
def test_engine_measurement_differences_are_flagged_with_cause(counts: dict[str, int], said: list[Any], flag: str) -> None:
    keys = measured({SPECULATIVE: Spoken("a", 0.5, [], said, **counts), BASELINE: Spoken("b", 1.0, [])}, here, terms())
    assert len(keys["flags"]) == 1 and flag in keys["flags"][0]


def test_engine_measurement_of_one_side_has_no_speedup() -> None:
    keys = measured({BASELINE: Spoken("slow", 1.0, [], [(i, 1, 2, 3) for i in range(3)])}, here, terms(seconds=0.0))
    assert keys["speedup"] is keys["tau"] is keys["exact_matches"] is keys["tokens_per_s"] is None
    assert keys["baseline_tokens_per_s"] == 1.0 and keys["same_as_here"] == 1, (
        "the stop token may be left out; one prompt fitted"
    )
    assert keys["notes"] == ["Spoken, batch 1: 1 of 3 waves and 1 of 2 repeats fitted into measure.minutes"]


SCRIPT = """
import os, sys
from contextlib import contextmanager
@contextmanager
def opened(job):
    print("noise"); os.write(1, b"more noise")
    {before}
    def answer(wave):
        print("still noise")
        {during}
        texts = [{"tokens": job["prompts"][i], "first": 0.5, "ended": 1.0, "ahead": 1} for i in wave]
        return {"texts": texts, "verifications": 3, "drafted": 2, "accepted": 1}
    yield {"versions": {"spoken": "1"}, "begins": "plain"}, answer
"""


@pytest.mark.parametrize(
    ("before", "during", "line"),
    [
        ("pass", "pass", None),
        ("raise ValueError('no room')", "pass", "Spoken: ValueError: no room"),
        ("pass", "raise ValueError('too long')", "Spoken: ValueError: too long"),
        ("pass", "print('a bad day', file=sys.stderr); os._exit(3)", "Spoken ended with 3 and no result"),
        ("pass", "return {}", "Spoken: its answer does not have the required form"),
    ],
)
def test_timed_engine_process_answers_or_reports_script_error(
    before: str, during: str, line: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "SCRIPTS", tmp_path)
    monkeypatch.setitem(ENGINES, "spoken", Engine("Spoken", "json", (), ()))
    (tmp_path / "spoken.py").write_text(SCRIPT.replace("{before}", before).replace("{during}", during))
    job = EngineJob("target", "drafter", "eagle", "vllm", 3, 8, [0], [[5, 6], [7]], timed={"speculative": True})

    def asked() -> WaveOutputs:
        with serving("spoken", Path(sys.executable), job, tmp_path / "side") as ready:
            assert ready.about == EngineInfo({"spoken": "1"})
            assert [text.output for text in ready.answer([1]).texts] == [(7,)]
            return ready.answer([0, 1])

    if line is None:
        assert asked() == WaveOutputs([TimedText(2, (5, 6), 0.5, 1.0), TimedText(1, (7,), 0.5, 1.0)], 3, 2, 1)
        return
    with pytest.raises(UserError) as caught:
        asked()
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["engine=speculators"], "engine is 'speculators'; measure takes vllm, openvino, transformers, llamacpp, http, sglang"),
        (["engine=[transformers,nothing]"], "engine is 'nothing'; measure takes"),
        (["engine=vllm"], "vLLM is not in "),
        (["engine=http"], "needs a server; name one or both with engine_url=URL (with speculation) and engine_plain_url=URL"),
        (["engine=http", "engine_url=ftp://x"], "engine_url must be http://HOST:PORT/v1"),
        (["engine=http", "engine_url=http://u:p@x/v1"], "a key goes into engine_key_env"),
        (["engine=transformers", "decode=sampling"], "engines are measured with greedy decoding"),
        (
            ["engine=vllm", "decode.presence_penalty=0.5"],
            "leave one of both out, or measure a server (engine=http), which takes it",
        ),
        (["engine=[openvino,vllm]", "engine_python=/x"], "engine_python names the Python of one engine"),
        (["engine=http", "engine_url=http://x", "engine_api=text"], "engine_api is 'text'; choose one of tokens, chat"),
        (["engine=http", "engine_url=http://x", "engine_api=chat", "prompts=tools.jsonl"], "engine_api=chat sends no tools"),
    ],
)
def test_measure_engine_invalid_options_are_refused_before_measuring(
    command: Command,
    checkpoint: Path,
    arguments: list[str],
    line: str,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command_file, "python_of", absent)
    (tmp_path / "tools.jsonl").write_text('{"turns": ["a"], "tools": [{"name": "f"}]}\n')
    assert command("measure", f"checkpoint={checkpoint}", *arguments, *SMALL) == 2
    said = capsys.readouterr().err
    assert line in said and len(said.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("report.json"))


def test_measure_engine_all_omits_engines_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command_file, "python_of", lambda name, given: absent(name, given) if name != "vllm" else Path("python")
    )
    asked = command_file.EngineChoice.of(RunOptions(engine="all"), "medusa")
    assert list(asked.pythons) == ["vllm"] and not asked.endpoints
    assert [note.partition(":")[0] for note in asked.notes] == [
        "OpenVINO GenAI was left out",
        "transformers was left out",
        "llama.cpp was left out",
    ]
    assert "cannot be exported to transformers" in asked.notes[1]


def absent(name: str, given: str | None) -> Path:
    raise UserError(f"{ENGINES[name].label} is not in /python; install it ({ENGINES[name].install(name)})")
