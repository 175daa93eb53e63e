"""A whole measurement of a small random target: the report has its schema's keys, and greedy output is exact."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.commands.measure import measure, measure_run
from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.data.prompts import long_prompts, read_documents
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, checkpoint_name, save_drafter
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.measure import report as report_module
from drafttrain.measure import runner as runner_module
from drafttrain.measure.flags import best, by_context
from drafttrain.measure.report import rounded
from drafttrain.measure.runner import CheckpointRef
from drafttrain.measure.slices import context_lengths
from drafttrain.runs.options import RunOptions
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget
from tests.helpers import quantised_target

VOCABULARY = 64
SCHEMA = json.loads((Path(runner_module.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))


class Letters:
    """A tokenizer without a chat template: one token per character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(c) % (VOCABULARY - 1) for c in text]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=512, **sizes)
    target = HFTarget(LlamaForCausalLM(config), frozenset({0}))
    about = {"name": "hf", "path": "nowhere", "architecture": type(target.model).__name__}
    return LoadedTarget(target, Letters(), "nowhere", about)  # type: ignore[arg-type]


def checkpoint(folder: Path, loaded: LoadedTarget, step: int) -> CheckpointRef:
    family, target = families()["medusa"], loaded.target
    options = family.options(heads=2, paths=[[0], [1], [0, 0]])
    torch.manual_seed(step)
    drafter = family.build(options, target)
    shape = target.shape
    sizes = (shape.vocab_size, shape.hidden_size, shape.blocks)
    record = TargetRecord("hf", "nowhere", None, "float32", *sizes, target.fingerprint)
    meta = CheckpointMeta("medusa", dataclasses.asdict(options), drafter.decode_settings(), record, step)
    path = folder / checkpoint_name(step)
    path.mkdir()
    save_drafter(path, drafter.state_dict(), meta)
    return CheckpointRef(path.name, path, step)


def prompts(folder: Path, longest: int = 12) -> Path:
    records = [{"question_id": i, "category": "ab"[i % 2], "turns": ["x" * (longest - i)]} for i in range(3)]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in records), encoding="utf-8")
    return path


def options(folder: Path, **decode: Any) -> RunOptions:
    small = MeasureOptions(minutes=0.0, repeats=2, timed_prompts=2, batch_sizes=[1, 2])
    settings = DecodeOptions(max_new_tokens=12, **decode)
    return RunOptions(measure=small, decode=settings, prompts=str(prompts(folder)), output=str(folder))


def measured(
    loaded: LoadedTarget, folder: Path, run: RunOptions, here: LoadedTarget | None = None, console: Console | None = None
) -> dict[str, Any]:
    """The written report of a checkpoint for this target. Without figures: drawing takes longer than measuring.

    here: the target that it is measured on, if it is another.
    """
    ref = checkpoint(folder, loaded, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_module, "_figures", lambda *_: [])
        measure_run(here or loaded, [ref], run, folder / "out", console or Console(quiet=True))
    report = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    check(report, SCHEMA)
    return dict(report)


def check(value: Any, schema: dict[str, Any], at: str = "report") -> None:
    """The part of JSON Schema that the report's schema uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "const" in schema or "enum" in schema:
        assert value in schema.get("enum", [schema.get("const")]), at
        return
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    wanted = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    assert any(isinstance(value, kinds[k]) and (k == "boolean" or not isinstance(value, bool)) for k in wanted), (
        f"{at}: {value!r}"
    )
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert schema.get("minimum", value) <= value <= schema.get("maximum", value), f"{at}: {value}"
    if isinstance(value, dict):
        assert not set(schema.get("required", ())) - set(value), f"{at} lacks {set(schema['required']) - set(value)}"
        for key, part in schema.get("properties", {}).items():
            if key in value:
                check(value[key], part, f"{at}.{key}")
    if isinstance(value, list):
        for i, part in enumerate(value):
            check(part, schema.get("items", {"type": list(kinds)}), f"{at}[{i}]")


def test_measure_run_writes_complete_report_with_exact_greedy_outputs(loaded: LoadedTarget, tmp_path: Path) -> None:
    refs = [checkpoint(tmp_path, loaded, step) for step in (1, 2)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0, "agreement": [0.5, 0.2], "expected_tau": 1.6}\n', encoding="utf-8")
    console = Console(file=(tmp_path / "console.txt").open("w", encoding="utf-8"), width=80)
    measure_run(loaded, refs, options(tmp_path), tmp_path / "out", console, {"final_loss": 2.0}, metrics)
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    check(report, SCHEMA)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "report.html",
        "report.json",
        "report.md",
        "acceptance.png",
        "speedup.png",
        "training.png",
    }
    assert report["best"] in {r.name for r in refs}
    for entry in report["checkpoints"]:
        assert (entry["exact_matches"], entry["transformers_exact_matches"], entry["unexplained"]) == (3, 3, 0)
        assert entry["emitted"] == sum(p["tokens"] - 1 for p in entry["per_prompt"])
        assert entry["tau"] == pytest.approx(entry["emitted"] / entry["verifications"], rel=1e-5)
        for sample, one in zip(entry["samples"], entry["per_prompt"], strict=True):
            assert sum(len(accepted) + len(own) for _, accepted, own in sample["runs"]) + len(sample["first"]) == one["tokens"]
            assert all(drafts == len(accepted) and len(own) <= 1 for drafts, accepted, own in sample["runs"])
        assert sum(drafts for s in entry["samples"] for drafts, *_ in s["runs"]) == entry["accepted"]
        assert [(s["by"], s["value"]) for s in entry["slices"]] == [
            ("category", "a"),
            ("category", "b"),
            ("batch_size", 1),
            ("batch_size", 2),
        ]
    assert any("measure.minutes=0" in note for note in report["measure"]["notes"])
    console.file.close()
    assert "step-00002" in (tmp_path / "console.txt").read_text(encoding="utf-8")


def test_measure_run_extra_temperatures_and_contexts_are_slices(loaded: LoadedTarget, tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    for i in range(5):
        (tmp_path / "long" / f"{i}.txt").write_text("word " * (40 if i else 10))
    asked = options(tmp_path)
    asked.measure.minutes, asked.measure.batch_sizes, asked.measure.transformers = 1.0, [1], False
    asked.measure.temperatures, asked.measure.contexts = [0.0, 0.8], ["150"]
    asked.measure.documents = str(tmp_path / "long")
    report = measured(loaded, tmp_path, asked)
    slices = {(s["by"], s["value"]): s for s in report["checkpoints"][0]["slices"] if s["by"] in ("temperature", "context")}
    assert list(slices) == [("temperature", 0.8), ("context", 150)], "0.0 is the headline's own"
    assert slices["temperature", 0.8]["exact_matches"] is None, "lossless sampling has other numbers than plain decoding"
    context = slices["context", 150]
    assert (context["prompts"], context["exact_matches"]) == (2, 2), "measure.timed_prompts of the four documents that are long"
    assert context["tau_interval"][0] <= context["tau"] <= context["tau_interval"][1]
    asked.measure.contexts, again = [150, "2k"], [checkpoint(tmp_path, loaded, 2)]
    with pytest.raises(UserError, match=r"measure\.contexts has 2,048, but with decode\.max_new_tokens .* room for 500; leave"):
        measure_run(loaded, again, asked, tmp_path / "out", Console(quiet=True))
    asked.measure.contexts, asked.measure.documents = [150], str(tmp_path / "none")
    with pytest.raises(UserError, match=r"measure\.documents .*none: expected a text file, or a folder"):
        measure_run(loaded, again, asked, tmp_path / "out", Console(quiet=True))


def test_context_lengths_in_words_are_ascending_and_auto_ends_at_the_room() -> None:
    assert context_lengths(["32k", 2048, "2k", "1m"], 1 << 20) == [2048, 32768, 1 << 20]
    assert context_lengths("auto", 5000) == [1024, 4096] and context_lengths([], 10) == []
    for wrong in ([0], ["2 k"], [True], "all"):
        with pytest.raises(UserError, match=r"measure\.contexts .*give numbers of 1 or more, such as"):
            check_limits("measure", MeasureOptions(contexts=wrong))


def test_by_context_fall_outside_intervals_is_named_with_last_good_length() -> None:
    def entry(*taus: tuple[int, float, float]) -> dict[str, Any]:
        slices = [{"by": "context", "value": n, "tau": t, "tau_interval": [t - half, t + half]} for n, t, half in taus]
        return {"name": "a", "slices": [{"by": "batch_size", "value": 1}, *slices]}

    found = by_context([entry((256, 3.0, 0.3), (1024, 2.7, 0.3), (4096, 2.5, 0.3))])
    assert found == ["a: tau falls beyond 1,024 tokens of context: 3.00 (2.70 to 3.30) at 256, 2.50 (2.20 to 2.80) at 4,096"]
    (noise,) = by_context([entry((256, 3.0, 0.3), (1024, 2.6, 0.3))])
    assert "tau does not clearly fall up to 1,024 tokens" in noise, "0.4 is within the interval of the difference, 0.42"
    assert by_context([entry((256, 3.0, 0.3))]) == []


def test_long_prompts_from_documents_have_requested_length(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(chr(97 + i % 26) for i in range(900)))
    documents, letters = read_documents(str(tmp_path / "one.txt")), Letters()
    found = long_prompts(letters, documents, 200, 4)  # type: ignore[arg-type]
    assert [len(tokens) for _, tokens in found] == [200] * 4 and len({tuple(tokens) for _, tokens in found}) == 4
    assert long_prompts(letters, documents, 300, 4) == []  # type: ignore[arg-type]
    assert all(name.endswith(".py") and len(text) > 50_000 for name, text in read_documents(None)), "the standard library"


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ("coupled", "distribution_p_value"),
        ("typical", "quality_delta"),
        pytest.param("lossless", "distribution_p_value", marks=pytest.mark.slow),
        pytest.param("threshold", "quality_delta", marks=pytest.mark.slow),
    ],
)
def test_measure_run_sampling_reports_metric_of_policy(
    loaded: LoadedTarget, tmp_path: Path, policy: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttrain.measure.exactness.SAMPLES", 64)
    entry = measured(loaded, tmp_path, options(tmp_path, policy=policy, temperature=1.0))["checkpoints"][0]
    assert entry[key] is not None
    assert entry["exact_matches"] == (3 if policy == "coupled" else None)
    assert (entry["expected_tau"] is None) == (key == "quality_delta")
    if key == "distribution_p_value":
        assert entry["distribution_p_value"] > 1e-4


@pytest.mark.parametrize(
    "decode",
    [
        {"draft_length": 1, "repetition_penalty": 1.5, "min_new_tokens": 9},
        {"window": 1, "fallback": True},
    ],
    ids=str,
)
def test_measure_run_decode_options_apply_to_baselines_too(
    loaded: LoadedTarget, tmp_path: Path, decode: dict[str, Any]
) -> None:
    entry = measured(loaded, tmp_path, options(tmp_path, **decode))["checkpoints"][0]
    assert (entry["exact_matches"], entry["transformers_exact_matches"]) == (3, 3)
    assert (entry["expected_tau"] is None) == ("fallback" in decode)
    assert len(entry["alpha_by_position"]) <= 1


def test_measure_run_quantised_target_notes_drafter_of_whole_weights(loaded: LoadedTarget, tmp_path: Path) -> None:
    """Against the quantised target's own text."""
    target = quantised_target("int8", model=copy.deepcopy(loaded.target.model), stop_ids=frozenset({0}))
    report = measured(loaded, tmp_path, options(tmp_path), dataclasses.replace(loaded, target=target))
    said = "step-00001 was trained for this target with whole weights; here the target has int8 weights"
    assert said in report["measure"]["notes"]
    entry = report["checkpoints"][0]
    assert (entry["exact_matches"], entry["transformers_exact_matches"]) == (3, 3)


def test_measure_run_settings_without_effect_are_noted(loaded: LoadedTarget, tmp_path: Path) -> None:
    run = options(tmp_path)
    run.measure.batch_sizes, run.measure.repeats, run.measure.transformers = [4], 1, False
    run.decode.draft_temperature = 0.5
    notes = measured(loaded, tmp_path, run)["measure"]["notes"]
    assert "timing at batch 4: 3 of 4 requests at a time, because there are no more prompts" in notes
    assert "decode.draft_temperature has no effect: the drafts are not sampled" in notes


def test_measure_run_too_long_prompts_are_left_out_with_note(loaded: LoadedTarget, tmp_path: Path) -> None:
    run = options(tmp_path)
    run.prompts = str(prompts(tmp_path, longest=501))  # 501, 500 and 499 tokens; 512 - 12 = 500 fit
    run.measure.transformers = False
    report = measured(loaded, tmp_path, run)
    assert report["checkpoints"][0]["prompts"] == 2
    notes = report["measure"]["notes"]
    assert "1 of 3 prompts have more than the 500 tokens that fit, and were left out: 0" in notes


def test_measurement_bad_settings_are_refused_and_nothing_is_written(
    loaded: LoadedTarget, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ref, long = checkpoint(tmp_path, loaded, 1), tmp_path / "long.jsonl"
    long.write_text("\n".join(json.dumps({"turns": ["x" * (600 - i)]}) for i in range(3)), encoding="utf-8")
    changes: list[tuple[str, Any, str]] = [
        ("batch_sizes", [], "measure.batch_sizes is empty; give one or more sizes"),
        ("policy", "gredy", "decode.policy is 'gredy'"),
        ("temperature", -1.0, "temperature is -1.0"),
        ("max_new_tokens", 1, "decode.max_new_tokens is 1"),
        ("draft_length", 3, "decode.draft_length is 3, but this drafter drafts 2 tokens ahead at most; set it to 2 or less"),
        ("window", 12, "decode.window is 12, but this drafter drafts 2 tokens ahead at most"),
        ("prompts", str(long), "none of the 3 prompts fits: the shortest has 598 tokens"),
    ]
    for name, value, message in changes:
        run = options(tmp_path)
        setattr(next(part for part in (run, run.measure, run.decode) if hasattr(part, name)), name, value)
        with subtests.test(message=message):
            with pytest.raises(UserError, match=message) as caught:
                measure_run(loaded, [ref], run, tmp_path / "out", Console(quiet=True))
            assert "\n" not in str(caught.value)
            assert not (tmp_path / "out").exists()


def test_measure_of_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"drafter\.json"):
        measure(RunOptions(output=str(tmp_path), checkpoint=str(tmp_path)), {})


def test_best_checkpoint_is_fastest_only_if_clearly_ahead() -> None:
    def entry(name: str, tau: float, speed: float | None, repeats: int = 3, spread: float = 0.1) -> dict[str, Any]:
        low, high = (None, None) if speed is None else (speed - spread, speed + spread)
        return {"name": name, "tau": tau, "speedup": speed, "speedup_min": low, "speedup_max": high, "repeats": repeats}

    assert best([entry("a", 2.0, 1.9), entry("b", 2.2, 1.5)]) == "a"
    assert best([entry("a", 2.0, 1.6), entry("b", 2.2, 1.5)]) == "b"
    assert best([entry("a", 2.0, None), entry("b", 2.2, None)]) == "b"
    assert best([entry("a", 2.0, 1.9, 1, 0.0), entry("b", 2.2, 1.5, 1, 0.0)]) == "b", "one repeat has no range"


def test_rounded_report_values_have_six_digits() -> None:
    assert rounded({"a": [1.23456789, 3], "b": None, "c": True}) == {"a": [1.23457, 3], "b": None, "c": True}
    assert rounded(SimpleNamespace) is SimpleNamespace
