"""report.html before a browser sees it: what it says, what it embeds, and what flags name as causes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from drafttrain.measure.entry import samples
from drafttrain.measure.flags import broken_guarantees, flags
from drafttrain.measure.report import page
from tests.reports import engine_of, evidence_of, report_of_figures

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def test_report_page_embeds_figures_and_needs_no_network(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0, "agreement": [0.5]}\n{"step": 2, "loss": 1.0, "agreement": [0.6]}\n')
    report = report_of_figures()
    text = page(report, metrics)
    data = json.loads(DATA.findall(text)[0])
    assert data["best"] == "step-00002" and [e["name"] for e in data["checkpoints"]] == ["step-00001", "step-00002"]
    assert data["checkpoints"][1]["slices"][0]["tau"] == report["checkpoints"][1]["slices"][0]["tau"]
    assert data["curves"]["loss"] == [{"name": "loss", "points": [[1.0, 2.0], [2.0, 1.0]]}]
    assert "<b>1.60x</b>" in text and "<td>step-00001</td>" in text
    outside = [address for address in re.findall(r"(?:https?:)?//[\w.]+[/\w.]*", text) if "." in address]
    assert set(outside) <= {"http://www.w3.org/2000/svg"}, "a name, not an address"


def test_report_page_escapes_prompt_text() -> None:
    report, mean = report_of_figures(), "</script><script>alert(1)</script><!--<b>&amp;"
    report["checkpoints"][0]["samples"][0]["prompt"] = mean
    report["measure"]["notes"] = [mean]
    report["checkpoints"][0]["slices"][0]["value"] = mean
    text = page(report, None)
    assert "alert(1)</script>" not in text
    assert json.loads(DATA.findall(text)[0])["checkpoints"][0]["samples"][0]["prompt"] == mean


def test_samples_runs_join_to_output_with_whole_characters() -> None:
    class Bytes:
        """A character of several tokens is whole with the last of them."""

        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode("utf-8", errors="replace")

    said = "é, naïve".encode()
    evidence = evidence_of(list(said), runs=[3, 0, 2, 9])
    (sample,) = samples(evidence, Bytes())  # type: ignore[arg-type]
    texts = [sample["first"], *(piece for _, *pieces in sample["runs"] for piece in pieces)]
    assert "".join(texts) == "é, naïve"
    assert texts == ["", "é, ", "n", "", "a", "ï", "v", "e", ""]
    assert [drafts for drafts, *_ in sample["runs"]] == [3, 0, 2, 9]


def test_flag_of_predicted_speedup_names_cause_of_gap(subtests: pytest.Subtests) -> None:
    causes: dict[str, dict[str, Any]] = {
        "the prediction leaves out commit and host time, which take 19% of a step": {"commit_ms": 0.5},
        "tau is 2.40 on the timed prompts and 3.00 on all prompts": {"tau": 3.0, "expected_tau": 3.0},
        "expected tau is 8% above the measured": {"expected_gap": 0.08},
        "raise measure.timed_prompts": {"commit_ms": 0.0, "host_ms": 0.0},
    }
    for cause, changes in causes.items():
        with subtests.test(cause=cause):
            entry = report_of_figures()["checkpoints"][1] | {"predicted_gap": 0.2, "predicted_gap_flagged": True} | changes
            (flag,) = flags(entry)
            assert flag.startswith("predicted speedup 1.92x is 20% above the measured 1.60x: ") and cause in flag


def test_flags_explain_gap_of_expected_tau() -> None:
    entry = report_of_figures()["checkpoints"][1] | {"expected_gap_flagged": True, "expected_gap": 0.2}
    assert "is 20% above the measured 2.40: check for target states" in flags(entry)[0]
    assert "may be much easier" in flags(entry | {"expected_gap": -0.2})[0]
    assert "50 verifications are too few" in flags(entry | {"verifications": 50})[0]


def test_flags_of_slowdown_say_what_a_step_costs_and_what_the_drafts_give_elsewhere() -> None:
    costs = {"draft_cost": 0.3, "verify_cost": 2.0, "commit_ms": 0.3, "host_ms": 0.1, "plain_step_ms": 2.0, "speedup": 0.96}
    (flag,) = flags(report_of_figures()["checkpoints"][1] | costs)
    assert "(0.96x): a step costs 2.50 plain steps here (draft 0.30, verification 2.00, rest 0.20)" in flag
    assert flag.endswith("the same drafts give 1.60x"), "2.4 / 1.5: tau 2.40 on the timed prompts"


def test_flags_report_speedup_above_tau_as_timing_fault() -> None:
    """A verification takes a plain step or more; drafts cost something too."""
    entry = report_of_figures()["checkpoints"][1] | {"tau": 2.2, "expected_gap_flagged": False}
    assert not [flag for flag in flags(entry | {"speedup": 2.3}) if "cannot be" in flag]
    (flag,) = flags(entry | {"speedup": 44.7})
    assert flag.startswith("speedup 44.70x cannot be") and "tau 2.40 is the most" in flag, "2.40 on the timed prompts"


def test_broken_guarantees_name_outputs_of_lossless_policy_that_differ() -> None:
    def broken(**figures: Any) -> list[str]:
        report = report_of_figures()
        report["checkpoints"] = [report["checkpoints"][1] | figures]
        return broken_guarantees(report)

    assert broken() == [] == broken(policy="typical", unexplained=8, distribution_p_value=0.0)
    (line,) = broken(unexplained=2)
    assert "policy greedy is lossless, but 2 of 8 outputs differ from plain decoding" in line
    (line,) = broken(policy="coupled", distribution_p_value=1e-9)
    assert "its samples differ from plain sampling (p = 1e-09)" in line


def test_report_page_lists_engines_with_flags_and_errors() -> None:
    report = report_of_figures()
    report["engines"][0]["flags"] = ["OpenVINO GenAI counts another tau"]
    report["engines"].append(engine_of("vllm", "vLLM", error="it did not start"))
    text = page(report, None)
    shown = json.loads(DATA.findall(text)[0])["engines"]
    assert [(one["label"], one["tokens_per_s"], one["tau"]) for one in shown] == [
        ("OpenVINO GenAI", 240.0, 2.0),
        ("HTTP endpoint", 240.0, None),
    ]
    assert "OpenVINO GenAI counts another tau" in text and "vLLM: it did not start" in text
    assert "OpenVINO GenAI 1.0" in text and "240 / 200" in text and "0.70 0.43" in text and "0.71" in text
    assert shown[0]["alpha_by_position"][1] == [0.43, 0.3, 0.5]
    older = page({key: value for key, value in report_of_figures().items() if key != "engines"}, None)
    assert json.loads(DATA.findall(older)[0])["engines"] == []
