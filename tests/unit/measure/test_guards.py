"""A measurement with JSON prompts, guards, dialogues and public sets: what the report then says."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drafttrain.data.prompts import encode_prompt
from drafttrain.decoding.guards import valid_json
from drafttrain.drafters import families
from drafttrain.measure import DecodeOptions, GuardOptions, MeasureOptions, markdown
from drafttrain.measure.cases import Case, follow_ups, interleaved_turns
from drafttrain.measure.decoding import decoder_of, idle_guards
from drafttrain.measure.flags import flags
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget
from tests.reports import entry_of
from tests.unit.measure.test_runner import Letters, loaded, measured

__all__ = ["loaded"]


class Blanks(Letters):
    """Every third token is a letter, which breaks JSON; all others are blank."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join("x" if token % 3 == 0 else " " for token in tokens)


def run(
    loaded: LoadedTarget,
    folder: Path,
    records: list[dict[str, Any]],
    prompts: Any = None,
    transformers: bool = False,
    **decode: Any,
) -> tuple[dict[str, Any], str]:
    file = folder / "asked.jsonl"
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    small = MeasureOptions(
        prompts=prompts or str(file), minutes=0.0, repeats=1, timed_prompts=2, batch_sizes=[1], transformers=transformers
    )
    options = RunOptions(measure=small, decode=DecodeOptions(max_new_tokens=24, **decode), output=str(folder))
    said = StringIO()
    return measured(loaded, folder, options, console=Console(file=said, width=200)), said.getvalue()


RECORDS = [{"category": "ab"[i % 2], "turns": ["x" * (9 - i)], "format": "json"} for i in range(4)]
RECORDS += [{"category": "c", "turns": ["zz"]}]


def test_measure_run_guard_fallbacks_are_counted_by_category(loaded: LoadedTarget, tmp_path: Path) -> None:
    blank = LoadedTarget(loaded.target, Blanks(), "nowhere", loaded.description)  # type: ignore[arg-type]
    guard = GuardOptions(json="plain")
    report, _ = run(blank, tmp_path, RECORDS, policy="threshold", threshold=1e-3, temperature=1.0, guard=guard)
    (entry,) = report["checkpoints"]
    found = entry["guards"]
    assert found["json"]["action"] == "plain" and found["json"]["acted"] == 4 and found["json"]["baseline_acted"] == 0
    assert [(c["category"], c["prompts"], c["json"], c["loop"]) for c in found["categories"]] == [
        ("a", 2, 2, 0), ("b", 2, 2, 0), ("c", 1, 0, 0)]  # fmt: skip
    assert 0 < found["with"]["tokens"] <= 5 * 24 and 0 < found["without"]["tokens"] <= 5 * 24
    assert found["with"]["log_likelihood"] != found["without"]["log_likelihood"]
    assert [p["json_valid"] for p in entry["per_prompt"]].count(None) == 1
    monitored = {c["category"]: c for c in entry["monitors"]["categories"]}
    assert monitored["a"]["json_prompts"] == 2 and monitored["a"]["json_valid"] == 0 and monitored["c"]["json_valid"] is None
    for name in ("report.md", "report.html"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert "Monitors by category" in text and "On broken JSON: plain" in text


@pytest.mark.parametrize("action", ["stop", "plain"])
def test_measure_run_guard_with_lossless_policy_keeps_exact_outputs(loaded: LoadedTarget, tmp_path: Path, action: str) -> None:
    blank = LoadedTarget(loaded.target, Blanks(), "nowhere", loaded.description)  # type: ignore[arg-type]
    report, said = run(blank, tmp_path, RECORDS, transformers=True, guard=GuardOptions(json=action, loop="off"))
    (entry,) = report["checkpoints"]
    assert entry["exact_matches"] == entry["transformers_exact_matches"] == 5 and entry["unexplained"] == 0
    acted = entry["guards"]["json"]
    assert acted["acted"] == acted["baseline_acted"] == (4 if action == "stop" else 0)
    assert (entry["guards"]["with"]["tokens"] < entry["guards"]["without"]["tokens"]) == (action == "stop")
    assert ("decode.guard.json=plain has no effect: policy greedy is lossless" in said) == (action == "plain")


def test_measure_run_dialogue_turns_follow_target_replies(loaded: LoadedTarget, tmp_path: Path) -> None:
    records = [{"question_id": i, "category": "ab"[i % 2], "turns": ["x" * (5 - i), "more"]} for i in range(2)]
    report, _ = run(loaded, tmp_path, records)
    (entry,) = report["checkpoints"]
    assert [(p["question_id"], p["turn"]) for p in entry["per_prompt"]] == [("0", 1), ("1", 1), ("0", 2), ("1", 2)]
    assert entry["exact_matches"] == 4 == entry["prompts"]
    assert [(s["value"], s["prompts"]) for s in entry["slices"] if s["by"] == "turn"] == [(1, 2), (2, 2)]
    tokenizer, plain = loaded.tokenizer, decoder_of(loaded, DecodeOptions(max_new_tokens=24), None)
    (first,) = plain.run([encode_prompt(tokenizer, ["xxxxx"])]).results
    wanted = encode_prompt(tokenizer, ["xxxxx", "more"], [tokenizer.decode(first.tokens)])
    (second,) = plain.run([wanted]).results
    assert entry["per_prompt"][2]["tokens"] == len(second.tokens)
    (case,), left_out = follow_ups([Case("0", "a", [1], ("xxxxx", "more"))], [first.tokens], tokenizer, 999, None)
    assert (case.tokens, case.turn, left_out) == (wanted, 2, [])
    assert entry["samples"][2]["prompt"] == tokenizer.decode(wanted)
    assert follow_ups([case], [[1]], tokenizer, 999, None) == ([], [])
    assert follow_ups([Case("0", "a", [1], ("a", "b"))], [[1]], tokenizer, 2, None) == ([], ["0"])
    assert follow_ups([Case("0", "a", [1], ("a", "b"))], [[1]], tokenizer, 99, 1) == ([], [])


def test_interleaved_turns_alternates_dialogue_turns() -> None:
    cases = [Case(str(i), "a", [1], replies=replies) for i, replies in enumerate([(), (), (), ("a",), ("b",)])]
    assert interleaved_turns(cases) == [0, 3, 1, 4, 2] and interleaved_turns(cases[:3]) == [0, 1, 2]


def test_measure_run_published_tau_is_shown_for_same_set_and_family(loaded: LoadedTarget, tmp_path: Path) -> None:
    records = [{"question_id": i, "category": "qa", "turns": ["xyz"[i]], "reference": ["r"]} for i in range(3)]
    file = tmp_path / "asked.jsonl"
    report, said = run(loaded, tmp_path, records, prompts=[f"spec_bench:{file}"])
    assert report["measure"]["prompts"] == f"spec_bench:{file}"
    assert {(p["set"], p["method"], p["measured_tau"]) for p in report["published"]} == {
        ("spec_bench", "Medusa", report["checkpoints"][0]["tau"])}  # fmt: skip
    assert markdown.CAUTION in said and "published for Medusa: 2.32" in said
    assert markdown.CAUTION in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert markdown.published_for(report, {"gsm8k"}) == [] == markdown.published_for(report, {None})
    report["drafter"]["family"] = "dflash"
    assert markdown.published_for(report, {"spec_bench"}) == []
    known = json.loads(markdown.PUBLISHED.read_text(encoding="utf-8"))
    assert {k["family"] for k in known} <= set(families()) and all(k["source"] and k["tau"] > 1 for k in known)


def test_measure_run_several_prompt_sets_have_separate_slices(loaded: LoadedTarget, tmp_path: Path) -> None:
    (tmp_path / "g.jsonl").write_text('{"question": "ab", "answer": "1"}\n', encoding="utf-8")
    files = [f"gsm8k:{tmp_path / 'g.jsonl'}", f"spec_bench:{tmp_path / 'asked.jsonl'}"]
    report, _ = run(loaded, tmp_path, [{"question_id": 1, "category": "qa", "turns": ["abc"]}], prompts=files)
    (entry,) = report["checkpoints"]
    parts = {s["value"]: s for s in entry["slices"] if s["by"] == "set"}
    assert set(parts) == {"gsm8k", "spec_bench"}
    assert {p["measured_tau"] for p in report["published"]} == {parts["spec_bench"]["tau"]}


def test_json_of_output_is_valid_whole_and_with_its_keys(subtests: pytest.Subtests) -> None:
    texts: list[tuple[str, tuple[str, ...], bool]] = [
        ('{"a": 1}', (), True),
        ('```json\n{"a": 1}\n```', ("a",), True),
        ('{"a": 1}', ("a", "b"), False),
        ("[1]", ("a",), False),
        ("[1]", (), True),
        ('{"a": 1', (), False),
        ("Here: [1]", (), False),
        ("", (), False),
    ]
    for text, required, valid in texts:
        with subtests.test(text=text, required=required):
            assert valid_json(text, required) is valid


def test_flags_report_fewer_valid_json_outputs_of_lossy_policy() -> None:
    entry = entry_of(1, 2.0, 1.3)
    part = {"category": "code", "json_prompts": 8, "json_valid": 3, "baseline_json_valid": 6}
    entry["monitors"]["categories"] = [part, part | {"category": "same", "json_valid": 6}]
    entry |= {"policy": "typical", "exact_matches": None}
    assert [f for f in flags(entry) if "JSON" in f] == [
        "code: 3 of 8 outputs are the JSON asked for; with plain decoding 6 are"
    ]
    assert not [f for f in flags(entry | {"policy": "lossless"}) if "JSON" in f]


def test_idle_guards_names_fallbacks_without_effect() -> None:
    assert idle_guards(DecodeOptions()) is None
    assert idle_guards(DecodeOptions(policy="typical", guard=GuardOptions(loop="plain"))) is None
    assert idle_guards(DecodeOptions(guard=GuardOptions(loop="stop"))) is None
    said = idle_guards(DecodeOptions(guard=GuardOptions(loop="plain", json="plain")))
    assert said is not None and said.startswith("decode.guard.loop=plain and decode.guard.json=plain has no effect")
