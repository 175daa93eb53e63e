"""`fit` of a draft model: measured before training and after, and on-policy replies that a resumed run writes again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.draft_model import DraftModelOptions, build
from drafttrain.targets import TargetOptions
from drafttrain.targets.load import load_target
from tests.helpers import tiny_model

DATA = Path(os.environ.get("DRAFTTRAIN_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
Command = Callable[..., int]
SMALL = (
    "logger=none",
    "measure.limit=3",
    "measure.minutes=0.05",
    "measure.tune=off",
    "measure.transformers=false",
    "decode.max_new_tokens=12",
)


@pytest.mark.slow
def test_fit_pretrained_draft_model_measures_before_and_after_and_resumes(
    command: Command, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(seed=1).save_pretrained(tmp_path / "small")
    asked = (
        *(
            "fit",
            "recipe=draft_model",
            "target=hf",
            f"target.path={material / 'target'}",
            f"data.path={material / 'data.jsonl'}",
        ),
        *(
            "drafter.source=hf",
            f"drafter.path={tmp_path / 'small'}",
            "drafter.lora_rank=2",
            "drafter.quantize=int8",
            "train.lr=1e-3",
        ),
        *("train.steps=6", "train.checkpoint_every=2", "train.keep_last=1", "train.on_policy=0.5", "data.held_out=4", *SMALL),
        *("train.global_batch=4", "train.micro_batch=4", f"prompts={prompt_file(tmp_path)}"),
    )
    assert command(*asked) == 0
    (run,) = Path("outputs/draft_model").iterdir()
    report = json.loads((run / "report.json").read_text())
    names = [e["name"] for e in report["checkpoints"]]
    assert names[:2] == ["step-00000", "step-00000 unquantised"] and names[-1] == "step-00006 unquantised" and len(names) <= 6
    assert any(note.startswith("distillation") for note in report["measure"]["notes"])
    assert "distillation" in capsys.readouterr().out
    assert all(e["exact_matches"] == 3 for e in report["checkpoints"])
    weights = (run / "checkpoints" / "step-00006" / "drafter.safetensors").read_bytes()
    for path in (run / "checkpoints").iterdir():
        if path.name != "step-00000":
            shutil.rmtree(path)
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"finished": False}))
    assert command(*asked, f"resume={run}", "measure.enabled=false") == 0
    assert (run / "checkpoints" / "step-00006" / "drafter.safetensors").read_bytes() == weights


def prompt_file(folder: Path) -> Path:
    lines = [json.dumps({"question_id": i, "category": "x", "turns": [text]}) for i, text in enumerate(("abc", "hello", "zz9"))]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "prompts.jsonl"


def test_on_policy_with_drafter_lacking_language_model_is_refused(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("fit", "recipe=medusa", "train.on_policy=0.5", "logger=none") == 2
    assert "no language model" in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.skipif(not (DATA / "models").is_dir(), reason=f"no public models at {DATA}")
@pytest.mark.parametrize(("small", "least"), [("babyllama-105in361", 3.5), ("stories260K", 1.8)])
def test_published_draft_model_text_equals_plain_and_tau_exceeds_minimum(small: str, least: float) -> None:
    """One of the same tokens, which agrees with its target in nine of ten; and one of other tokens."""
    loaded = load_target(TargetOptions(name="hf", path=str(DATA / "models" / "babyllama-361")))
    drafter = build(DraftModelOptions(source="hf", path=str(DATA / "models" / small)), loaded.target).eval()
    lines = (DATA / "prompts" / "tinystories_prompts.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    asked = [[1, *loaded.tokenizer(json.loads(line)["turns"][0], add_special_tokens=False)["input_ids"]][:60] for line in lines]
    plain, ours = (
        Decoder(loaded.target, d, "greedy", Sampling(), loaded.target.stop_ids, 60).run(asked, n).results
        for d, n in ((None, 6), (drafter, 3))
    )
    assert [r.tokens for r in ours] == [r.tokens for r in plain]
    assert sum(r.emitted for r in ours) / sum(r.verifications for r in ours) > least
