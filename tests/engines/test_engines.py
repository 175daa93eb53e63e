"""Real engines serve what we export, and accept as many drafts as our own decoder; broken exports do not get past them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.files import LISTED
from drafttrain.drafters.checkpoint import read_meta
from tests.engines.conftest import note, python_for, trained

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

# (drafter, format, engine)
PAIRS = [
    ("eagle3.1", "vllm", "vllm"),
    ("eagle3", "speculators", "vllm"),
    ("eagle", "vllm", "vllm"),
    ("medusa", "vllm", "vllm"),
    ("dflash", "vllm", "vllm"),
    ("jetspec", "vllm", "vllm"),
    ("draft_model", "vllm", "vllm"),
    ("peagle", "vllm", "vllm"),
    ("peagle, plain", "speculators", "vllm"),
    ("pard", "vllm", "vllm"),
    ("eagle3", "openvino", "openvino"),
    ("eagle3, whole vocabulary", "openvino", "openvino"),
    ("dflash", "openvino", "openvino"),
    ("draft_model", "openvino", "openvino"),
    ("dflash", "transformers", "transformers"),
    ("draft_model", "transformers", "transformers"),
    ("eagle3", "speculators", "speculators"),
    ("eagle3.1, other taps", "speculators", "speculators"),
    ("eagle3", "llamacpp", "llamacpp"),
    ("dflash", "llamacpp", "llamacpp"),
    ("jetspec", "llamacpp", "llamacpp"),
    ("dspark", "llamacpp", "llamacpp"),
    ("dflash2", "llamacpp", "llamacpp"),
    ("draft_model", "llamacpp", "llamacpp"),
]
TAU = 1.3  # a drafter of which little is accepted shows little
ROW = ("engine", "family", "stack", "layout", "versions", "draft_length", "ours", "theirs", "same_texts", "tau")
Verify = Callable[..., tuple[int, dict[str, Any]]]


def exported(command: Callable[..., int], drafter: str, stack: str, out: Path) -> Path:
    more = ["with_target=true"] if stack == "llamacpp" else []
    assert command("export", f"checkpoint={trained(drafter)}", f"format={stack}", f"out={out}", *more) == 0
    return out


def facts(report: dict[str, Any], drafter: str) -> dict[str, Any]:
    """options: those that change what a loader must know."""
    trained_with = read_meta(trained(drafter)).options
    options = ", ".join(flag for flag in ("fc_norm", "norm_output") if trained_with.get(flag))
    row = {key: report[key] for key in ROW}
    return row | {"options": options, "prompts": len(report["lines"]), "tau": round(report["tau"], 2)}


@pytest.mark.parametrize(("drafter", "stack", "engine"), PAIRS)
def test_engine_accepts_same_draft_tokens_as_decoder(
    drafter: str, stack: str, engine: str, verified: Verify, command: Callable[..., int], tmp_path: Path
) -> None:
    python_for(engine)
    code, report = verified(engine, drafter, exported(command, drafter, stack, tmp_path / "out"))
    assert code == 0
    assert report["holds"] and report["same_texts"] == len(report["lines"]) == 6
    assert report["ours"] == report["theirs"] > 0
    assert report["tau"] > TAU
    note("runs", f"{engine}: {drafter}, {stack}", facts(report, drafter))


def layers_off_by_one(out: Path) -> None:
    def shift(config: dict[str, Any]) -> None:
        for where in (config, config["eagle_config"]):
            key = "eagle_aux_hidden_state_layer_ids"
            where[key] = [k - 1 for k in where[key]]

    change(out, shift)


def absolute_d2t(out: Path) -> None:
    tensors = load_file(out / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def no_norm_output(out: Path) -> None:
    def drop(config: dict[str, Any]) -> None:
        del config["norm_output"], config["eagle_config"]["return_hidden_post_norm"]

    change(out, drop)


def bias_true(out: Path) -> None:
    change(out, lambda config: config.update(bias=True))


def change(out: Path, by: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    by(config)
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "drafter", "broken"),
    [
        ("layer ids one too small", "eagle3.1", layers_off_by_one),
        ("norm_output not said", "eagle3.1", no_norm_output),
        ("bias said to be true", "eagle", bias_true),
    ],
)
def test_verify_broken_export_fails_by_accepted_draft_tokens(
    name: str, drafter: str, broken: Callable[[Path], None], verified: Verify, command: Callable[..., int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The texts stay the target's own: verification mends whatever is drafted."""
    python_for("vllm")
    out = exported(command, drafter, "vllm", tmp_path / "out")
    broken(out)
    (out / LISTED).unlink()  # as if it had been exported so
    code, report = verified("vllm", drafter, out)
    assert code == 3
    assert "Parity: accepted drafts: vllm accepts" in capsys.readouterr().err
    assert report["same_texts"] == len(report["lines"]), "output equality shows nothing"
    assert report["theirs"] != report["ours"]
    note("broken", name, facts(report, drafter))


def test_vllm_export_with_absolute_d2t_ids_fails_with_index_error(
    verified: Verify, command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Taken as offsets they become tokens that there are not, with which vLLM stops."""
    python_for("vllm")
    out = exported(command, "eagle3.1", "vllm", tmp_path / "out")
    absolute_d2t(out)
    (out / LISTED).unlink()  # as if it had been exported so
    assert verified("vllm", "eagle3.1", out)[0] == 2
    assert "vLLM: IndexError: index" in capsys.readouterr().err
