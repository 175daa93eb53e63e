"""Targets that scale their embedding, or scale, cap or shift their logits: stacks share two matrices with a drafter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.core.errors import ParityError, UserError
from drafttrain.export.convert import taken
from drafttrain.export.exporter import ExportSettings, refusals
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.files import ExportSource
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of, loads, recognised
from drafttrain.targets.load import LoadedTarget
from tests.export_oracles.check import check_export
from tests.exports import checkpoint, loaded, opened, unprobed, written
from tests.helpers import GATED, tiny_model
from tests.unit.export.test_parity import changed, drop, put

PLAIN = {name: value for name, value in GATED.items() if name != "head_dim"}
KINDS: dict[str, dict[str, Any]] = {  # by model type
    "cohere": PLAIN | {"logit_scale": 0.1},
    "granite": PLAIN | {"logits_scaling": 8.0},
    "gemma2": GATED | {"query_pre_attn_scalar": 8, "sliding_window": 600, "final_logit_softcapping": 3.0},
    "gemma3_text": GATED | {"query_pre_attn_scalar": 8, "sliding_window": 600},
}
ADDING = ("dspark", "dflash2", "domino", "xpress", "lilicorr")  # families that add to the logits of the target's head
READING = (*ADDING, "dflash", "jetspec", "eagle", "hydra", "redrafter")  # those that read embeddings without a norm before
SELECTING = ("vllm", "sglang", "official")  # stacks that read the authors' layout of DFlash2
FIELDS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")  # of that layout

ENDS = {  # what they hold for each kind
    "cohere": {"output_multiplier": 0.1},
    "granite": {"output_multiplier": 0.125},
    "gemma2": {"input_embedding_scale": 32**0.5, "final_logit_softcapping": 3.0},
    "gemma3_text": {"input_embedding_scale": 32**0.5},
}
WRONG = {  # the name of the check that fails, and the change of the files
    "cohere": [
        ("factor of logits", drop("dflash_config", "output_multiplier")),
        ("factor of logits", put("dflash_config", "output_multiplier", value=10.0)),
    ],
    "gemma2": [("soft cap", drop("dflash_config", "final_logit_softcapping"))],
    "gemma3_text": [("logits", drop("dflash_config", "input_embedding_scale"))],
}


def target_of(kind: str) -> LoadedTarget:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]), attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.5)
    return LoadedTarget(unprobed(model), loaded().tokenizer, kind, loaded().description)


def reasons(folder: Path, case: str, target: LoadedTarget, apart: tuple[str, ...] = ()) -> list[str]:
    """Why the stacks that load the family do not load this drafter. apart: further stacks that are left out."""
    found = Opened.of(checkpoint(folder / case, case, target), target)
    stacks = [stack for stack in loads(found.meta.family) if stack not in ("llamacpp", "lmdeploy", "transformers", *apart)]
    given = [format_of(found.meta.family, stack).refuse(ExportSource(found, stack, "float32")) for stack in stacks]
    assert all(given), f"{case} is exported to {[s for s, why in zip(stacks, given, strict=True) if why is None]}"
    return [str(why) for why in given]


@pytest.mark.sampled(kind=["cohere"])  # granite differs in the number alone
@pytest.mark.parametrize(
    ("kind", "does"),
    [
        ("cohere", "multiplies its logits by 0.1"),
        ("granite", "multiplies its logits by 0.125"),
    ],
)
def test_export_logit_scale_refuses_families_that_add_to_logits(kind: str, does: str, tmp_path: Path) -> None:
    """Drafters of these families draft other tokens then, and a stack would accept few of them without a message."""
    target = target_of(kind)
    for case in ADDING:
        apart = SELECTING if case == "dflash2" else ()  # by fields of their own
        assert all(f"the target {does}, which " in why for why in reasons(tmp_path, case, target, apart))
    found, golden = opened(tmp_path, "dflash", target)  # of an order alone a factor changes nothing
    written(found, golden, "vllm", tmp_path / "out")


def test_export_embedding_scale_refuses_families_without_input_norm(tmp_path: Path) -> None:
    target = target_of("gemma3_text")
    for case in READING:
        apart = ("vllm", "official") if case == "dflash2" else ()
        assert all("the target multiplies its embedding by 5.6" in why for why in reasons(tmp_path, case, target, apart))
    for case, stack in (("eagle3", "vllm"), ("dflash", "transformers")):  # transformers embeds by the target's own module
        found, golden = opened(tmp_path / stack, case, target)
        written(found, golden, stack, tmp_path / stack / "out")


@pytest.mark.parametrize("stack", ["vllm", "speculators"])
def test_export_eagle3_small_scaled_embedding_is_written(stack: str, tmp_path: Path) -> None:
    """The eps of the drafter's norm is noticed then: the files have the embedding as the target embeds, and come back."""
    target = target_of("gemma3_text")
    target.target.model.get_input_embeddings().weight.data.mul_(0.1)
    found, golden = opened(tmp_path, "eagle3", target)
    written(found, golden, stack, tmp_path / "out")
    foreign = ExternalCheckpoint(tmp_path / "out")
    assert taken(recognised(foreign), foreign, target)[1].keys() == found.tensors.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_export_dflash2_writes_embedding_and_logit_scale_fields(kind: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """vLLM and the authors' model multiply embeddings by theirs, SGLang does not. The files come back for this target alone."""
    target, expected = target_of(kind), ENDS[kind]
    found, golden = opened(tmp_path, "dflash2", target)
    for stack in SELECTING:
        out = tmp_path / stack
        if stack == "sglang" and "input_embedding_scale" in expected:
            with pytest.raises(UserError, match=r"the target multiplies its embedding by 5\.657, which sglang leaves out"):
                refusals(found, ExportSettings([stack], out, "float32", False))
            continue
        with subtests.test(stack=stack):
            written(found, golden, stack, out)
            foreign = ExternalCheckpoint(out)
            own = {key: value for key, value in foreign.config["dflash_config"].items() if key in FIELDS}
            assert own == pytest.approx(expected)
            assert taken(recognised(foreign), foreign, target)[1].keys() == found.tensors.keys()
            given = "|".join(f"{key} is {value:g}" for key, value in own.items())
            with pytest.raises(UserError, match=f"({given}), this target's own is [01], which drafters here use"):
                recognised(foreign).options(foreign, loaded().target)
    source = ExportSource(found, "vllm", "float32")
    for number, (name, change) in enumerate(WRONG.get(kind, ())):
        with subtests.test(name=name, number=number):
            wrong = changed(tmp_path / "vllm", tmp_path / str(number), change)
            with pytest.raises(ParityError, match=f"^Parity: {name}: "):
                check_export(wrong, source, golden, golden)
    if kind == "cohere":  # loaders leave the logits as they are without the field, and the selector was trained on those
        bare = changed(tmp_path / "vllm", tmp_path / "bare", drop("dflash_config", "output_multiplier"))
        says = r"output_multiplier is 1, this target's own is 0\.1, which drafters here use; give"
        with subtests.test("another target"), pytest.raises(UserError, match=says):
            taken(recognised(ExternalCheckpoint(bare)), ExternalCheckpoint(bare), target)


def test_export_dflash2_logit_scale_with_softcap_is_refused(tmp_path: Path) -> None:
    """The authors' model multiplies before it caps; other stacks need not."""
    target = target_of("cohere")
    target.target.model.config.final_logit_softcapping = 3.0
    assert all("the target multiplies its logits by 0.1, which " in why for why in reasons(tmp_path, "dflash2", target))


def test_export_llamacpp_softcap_refuses_dspark_and_accepts_dflash2(tmp_path: Path) -> None:
    """llama.cpp caps them before DFlash2's selector, and not before DSpark's bias."""
    target = target_of("gemma2")
    target.target.model.config.model_type = "gemma4_text"  # whose states it gives
    says = {"dspark": "the target caps its logits at 3, which llamacpp leaves out", "dflash2-unlike": "None"}
    for case, expected in says.items():
        found = Opened.of(checkpoint(tmp_path / case, case, target), target)
        why = format_of(found.meta.family, "llamacpp").refuse(ExportSource(found, "llamacpp", "float32"))
        assert str(why).startswith(expected)


def test_export_target_head_bias_is_accepted_by_transformers_only(tmp_path: Path) -> None:
    model: Any = tiny_model("phi")
    torch.nn.init.normal_(model.lm_head.bias)
    target = LoadedTarget(unprobed(model), loaded().tokenizer, "phi", loaded().description)
    for case in ("dflash", "dspark", "jetspec", "eagle"):
        assert all("the target's output matrix has a bias, which " in why for why in reasons(tmp_path, case, target))
    found, golden = opened(tmp_path / "transformers", "dflash", target)
    written(found, golden, "transformers", tmp_path / "out")
    found, _ = opened(tmp_path, "eagle", target)
    with pytest.raises(UserError, match="cannot be exported to vllm: the target's output matrix has a bias"):
        refusals(found, ExportSettings(["vllm"], tmp_path / "out", "float32", False))
