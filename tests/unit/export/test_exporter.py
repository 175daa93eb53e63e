"""Every supported pair is exported and drafts the same; what cannot be exported says so and leaves nothing."""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.core.errors import ParityError, UserError
from drafttrain.core.files import write_sealed_json
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import META
from drafttrain.drafters.tuned_settings import keep_tuned
from drafttrain.export import golden as material
from drafttrain.export.exporter import CardFigures, ExportSettings, check_wanted, refusals
from drafttrain.export.files import DTYPES
from drafttrain.export.format import StackRow
from drafttrain.export.golden import GOLDEN, TENSORS, Golden, store, stored
from drafttrain.export.opened import Opened
from drafttrain.export.parity import check_model
from drafttrain.export.serve import STACKS
from drafttrain.export.table import TABLE, loads, stacks_for
from drafttrain.model.lora import LoraSpec
from drafttrain.targets.load import LoadedTarget
from tests import support_matrix as matrix
from tests.damage import refused
from tests.exports import CASES, GOES_TO, TEXTS, checkpoint, deep, loaded, opened, unprobed, written
from tests.helpers import tiny_model, watch_proposals

ROOT = Path(__file__).parents[3]
COPIES = {  # files with copies of the target's matrices, which keep its dtype
    ("eagle3", "speculators"): ["embed_tokens.weight"],
    ("dspark", "official"): ["embed_tokens.weight", "lm_head.weight"],
}
WIDE = {("eagle", "lmdeploy")}  # whose files hold the target's embedding, which keeps its precision


# (case, stack) -> parts of the command on its card, which serves three drafts. The taps of these drafters are the outputs of
# blocks 0, 1 and 2, the inputs of 1, 2 and 3.
SAYS = {
    ("eagle3", "vllm"): ['"method": "eagle3"', '"num_speculative_tokens": 3'],
    ("eagle3", "sglang"): ["--speculative-algorithm EAGLE3", "-num-steps 3 ", "-eagle-topk 1 ", "-num-draft-tokens 4"],
    ("eagle3", "trtllm"): ["decoding_type: Eagle3", "max_draft_len: 3", "eagle3_layers_to_capture: [0, 1, 2]"],
    ("eagle3", "openvino"): ['set_rt_info("0 1 2", "hidden_layers_list")'],
    ("eagle3", "llamacpp"): ["--spec-type draft-eagle3", "--spec-draft-n-max 3", "--spec-draft-p-min 0", "add --parallel 1"],
    ("eagle", "vllm"): ['"method": "eagle"', '"num_speculative_tokens": 3'],
    ("eagle", "lmdeploy"): ["--speculative-algorithm eagle ", "--speculative-num-draft-tokens 3"],
    ("medusa", "vllm"): ['"method": "medusa"', '"num_speculative_tokens": 3'],
    ("medusa", "tgi"): ["--speculate 3"],
    ("dflash", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],  # of blocks of four
    ("dflash", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("dflash", "trtllm"): ["decoding_type: DFlash", "max_draft_len: 3"],
    ("dflash", "transformers"): ['speculation_type="dflash"'],
    ("dflash", "llamacpp"): ["--spec-type draft-dflash", "--spec-draft-n-max 3"],
    ("dspark", "vllm"): ['"method": "dspark"', '"num_speculative_tokens": 3'],  # of blocks of three, shifted
    ("dspark", "sglang"): ["--speculative-algorithm DSPARK", "--speculative-draft-model-path"],
    ("dspark-in-place", "sglang"): ["--speculative-algorithm DSPARK", "--speculative-dspark-block-size 3"],  # of blocks of four
    ("dspark", "trtllm"): ["decoding_type: DSpark", "max_draft_len: 3", "speculative_model: "],
    ("dspark", "llamacpp"): ["--spec-type draft-dspark", "--spec-draft-n-max 3"],
    ("dspark", "official"): ["Qwen3DSparkModel"],
    ("dflash2", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("dflash2", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("dflash2-unlike", "llamacpp"): ["--spec-type draft-dflash", "--spec-draft-n-max 2"],
    ("jetspec", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("jetspec", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("domino", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4", "CUDA and bfloat16"],
    ("domino-shifted", "sglang"): ["--speculative-num-draft-tokens 3", "leaves the last slot of a shifted block unused"],
    ("xpress", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("lilicorr", "vllm"): ['"method": "dflash"', '"num_speculative_tokens": 3'],
    ("lilicorr", "sglang"): ["--speculative-algorithm DFLASH", "--speculative-num-draft-tokens 4"],
    ("draft_model", "vllm"): ['"method": "draft_model"', '"num_speculative_tokens": 3'],
    ("uno", "sglang"): ["--speculative-algorithm UNO --uno-lora-path", "--speculative-num-draft-tokens 4", "parallelism at 1"],
    ("draft_model", "sglang"): ["--speculative-algorithm STANDALONE"],
    ("draft_model", "trtllm"): ["decoding_type: Draft_Target"],
    ("draft_model", "llamacpp"): ["--spec-type draft-simple"],
}
# cases that repeat the writers and readers of others, with other numbers
LATER = (
    *("eagle3-whole", "eagle3-two", "eagle3-windows", "peagle-windows", "pard-lora", "dflash-unlike", "dflash-windows"),
    *("dflash-causal-windows", "jetspec-windows", "domino-causal", "dspark-open-windows", "dspark-causal", "dflash2-windows"),
    *("dflash2-causal", "lilicorr-wide", "xpress-unlike", "xpress-windows", "uno-few"),
    # that test_parity.py, test_gguf.py or test_round_trips.py export too
    *(
        "dflash-part",
        "dspark-part",
        "eagle3-others",
        "eagle3-qwen3",
        "eagle3-latent-queries",
        "peagle-together",
        "eagle3-normed",
        "peagle-normed",
        "medusa-deep",
        "mtp-qwen3",
        "domino-shifted",
        "dflash2-unlike",
    ),
)
# weights are cast in one place for all: a case of each layout is enough in CI, and of each stack in the third dtype
ROUNDED = {
    "bfloat16": (
        *("eagle3", "eagle", "medusa", "hydra", "redrafter", "mlp_speculator", "mtp", "dflash", "jetspec", "domino"),
        *("dspark", "lilicorr", "xpress", "uno", "draft_model"),
    ),
    "float16": ("eagle", "medusa", "dflash"),
}


def exports() -> Iterator[Any]:
    """(case, dtype): fast, slow, or of the grid."""
    for case in GOES_TO:
        yield pytest.param(case, "float32", marks=[pytest.mark.slow] * (case in LATER))
        for dtype, cases in ROUNDED.items():
            yield pytest.param(case, dtype, marks=pytest.mark.slow if case in cases else pytest.mark.grid)


@pytest.mark.parametrize(("case", "dtype"), exports())
def test_export_each_supported_stack_passes_parity(case: str, dtype: str, tmp_path: Path) -> None:
    """Each directory as its stack reads it; and its card gives a command that says what the directory does not."""
    found, golden = opened(tmp_path, case)
    if dtype == "float32" and case != "draft_model-lora":
        check_decoder_drafts(found, golden)
    exported = written(found, golden, "all", tmp_path / "out", dtype)
    stacks = [stack for stack in GOES_TO[case] if dtype == "float32" or (case, stack) not in WIDE]
    assert list(exported.written) == stacks
    assert set(exported.written) | set(exported.refused) == set(STACKS)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*stacks, "drafttrain.json", "drafttrain-checksums.json"]
    )
    for stack, parity in exported.written.items():
        assert parity.drafts == golden.draft_PK.numel() and parity.gap < 0.5
        for file in (tmp_path / "out" / stack).glob("*.safetensors"):
            tensors = load_file(file)
            model: Any = found.loaded.target.model
            own = {"embed_tokens.weight": model.get_input_embeddings().weight, "lm_head.weight": model.lm_head.weight}
            copied = () if CASES[case][1].get("own_embedding") else COPIES.get((CASES[case][0], stack), ())
            for name in copied:
                assert torch.equal(tensors.pop(name), own[name])
            assert {x.dtype for x in tensors.values() if x.is_floating_point()} == {getattr(torch, dtype)}
        card = (tmp_path / "out" / stack / "README.md").read_text()
        assert "targets/tiny" in card and str(tmp_path / "out" / stack) in card
        assert [text for text in SAYS.get((case, stack), ()) if text not in card] == [], card


def check_decoder_drafts(found: Opened, golden: Golden) -> None:
    """Golden drafts are what the decoder verifies first."""
    drafter = found.drafter.eval()
    trees = watch_proposals(drafter)
    Decoder(found.loaded.target, drafter, "greedy", Sampling(), frozenset(), 2).run(TEXTS, len(TEXTS))
    assert trees[0].token_BN.tolist() == torch.cat([golden.root_P[:, None], golden.draft_PK], 1).tolist()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_export_draft_model_of_other_architecture_passes_parity(architecture: str, tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "draft_model", loaded(architecture))
    assert written(found, golden, "vllm", tmp_path / "out").written["vllm"].gap < 0.5


def test_export_draft_model_tied_head_is_not_written(tmp_path: Path) -> None:
    model: Any = tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    target = LoadedTarget(unprobed(model), loaded().tokenizer, "tied", loaded().description)
    found, golden = opened(tmp_path, "draft_model", target)
    written(found, golden, "vllm", tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_export_trained_target_is_written_merged(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    found, golden = opened(tmp_path, "medusa", spec=LoraSpec(rank=2))
    for stack, folder in (("vllm", ""), ("all", "vllm")):
        out = tmp_path / stack
        written(found, golden, stack, out)
        assert f"vllm serve {out / 'target'} " in (out / folder / "README.md").read_text()
        assert "Its output differs from the original target's" in (out / folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "vllm" / "target", dtype=torch.float32)
    row = int(golden.count_P[0])
    roots = [int(m(golden.text_PT[:1, :row]).logits[0, -1].argmax()) for m in (model, found.loaded.target.model)]
    assert roots == [int(golden.root_P[0])] * 2
    assert same_weights(model, found.loaded.target.model) and not same_weights(model, loaded().target.model)
    weights = next((tmp_path / "vllm" / "target").glob("*.safetensors"))
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights)
    with pytest.raises(ParityError, match=r"Parity: target: model.norm.weight was not saved as it is"):
        check_model(weights.parent, found.loaded.target.model)


def same_weights(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_export_medusa_sharing_target_head_keeps_its_dtype(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "medusa-shared")
    assert list(written(found, golden, "all", tmp_path / "out").written) == ["vllm", "tgi"]
    with pytest.raises(UserError, match="share the target's output matrix, which is float32; export with dtype=float32"):
        written(found, golden, "vllm", tmp_path / "narrow", "bfloat16")


def test_export_draft_model_writes_tokenizer_and_chat_template(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "draft_model")
    written(found, golden, "transformers", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]["w9"] == 9
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_export_dflash_loads_in_transformers_without_missing_keys(tmp_path: Path) -> None:
    from transformers import AutoModel

    found, golden = opened(tmp_path, "dflash")
    written(found, golden, "transformers", tmp_path / "out")
    model, about = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__ == "MuseGlimmerAssistantModel"
    assert not about["missing_keys"] and not about["unexpected_keys"]
    assert model.config.target_layer_ids == [0, 1, 2] and model.config.rope_parameters["rope_theta"] == 10000.0


def test_golden_material_stored_on_disk_is_restored(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "eagle3")
    again = stored(found.directory)
    assert again is not None and again.facts == golden.facts and again.sha256 == found.meta.sha256
    assert again.states.keys() == golden.states.keys() == {-1, 0, 1, 2, 3, 4}
    for name in ("text_PT", "count_P", "root_P", "draft_PK", "token_PKR", "logit_PKR", "lse_PK", "ids"):
        assert torch.equal(getattr(again, name), getattr(golden, name)), name


def described(directory: Path, **changes: Any) -> None:
    """As if the checkpoint had been saved so."""
    content = json.loads((directory / META).read_text())
    assert all(content[name] != value for name, value in changes.items())
    del content["checksum"]
    write_sealed_json(directory / META, content | changes)


def test_golden_material_stale_is_ignored_and_cut_off_is_refused(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "medusa")
    described(found.directory, sha256="0" * 64)
    assert stored(found.directory) is None
    (found.directory / GOLDEN).unlink()
    assert stored(found.directory) is None
    store(found.directory, golden)
    content = (found.directory / GOLDEN).read_bytes()
    (found.directory / GOLDEN).write_bytes(content[:-40])
    with pytest.raises(UserError, match=r"golden.safetensors: damaged or cut off .* export makes it again"):
        stored(found.directory)


@pytest.mark.parametrize("most", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_golden_material_damaged_byte_is_refused_or_harmless(most: int, tmp_path: Path) -> None:
    found, _ = opened(tmp_path, "medusa")

    def read() -> list[Any]:
        golden = stored(found.directory)
        assert golden is not None
        return [golden.facts, golden.sha256, *(getattr(golden, name).tolist() for name in TENSORS)]

    assert refused([found.directory / GOLDEN], read, most, removed=False)[GOLDEN] > 0.95
    tensors = load_file(found.directory / GOLDEN)  # as earlier versions wrote it
    about = {"facts": read()[0], "sha256": read()[1]}
    wanted = read()
    save_file(tensors, found.directory / GOLDEN, {"drafttrain": json.dumps(about)})
    assert read() == wanted


NARROW = {"eagle": 3, "eagle3": 6, "dflash": 8, "medusa-shared": 2}  # case -> its stacks


@pytest.mark.parametrize(
    ("case", "stack", "count"),
    [
        *[("eagle3", "vllm", 1), ("dflash", "vllm", 1)],
        *(pytest.param(case, "all", count, marks=pytest.mark.slow) for case, count in NARROW.items()),
    ],
)
def test_export_bfloat16_target_passes_parity_with_float32_logits(case: str, stack: str, count: int, tmp_path: Path) -> None:
    """Its head would round logits to three digits; golden ones are of its weights in float32."""
    model = tiny_model().bfloat16()
    target = LoadedTarget(unprobed(model), loaded().tokenizer, "narrow", loaded().description)  # type: ignore[arg-type]
    found, golden = opened(tmp_path / "run", case, target)
    assert golden.logit_PKR.dtype == torch.float32 and golden.states[-1].dtype == torch.bfloat16
    for dtype in ("float32", "bfloat16") if stack == "all" else ("float32",):
        assert len(written(found, golden, stack, tmp_path / dtype, dtype).written) == count


def test_export_max_shard_size_splits_weights_with_index(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "draft_model")
    written(found, golden, "vllm", tmp_path / "out", max_shard_size="20KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index["weight_map"].values())) == files
    with pytest.raises(UserError, match="max_shard_size is 'many'; write a size such as 5GB"):
        written(found, golden, "vllm", tmp_path / "other", max_shard_size="many")


REFUSED = {  # by case and stack: what the message says
    "eagle3-normed": {
        "openvino": "it has fc_norm, which openvino does not read; .*vllm, sglang, trtllm, .*load it",
    },
    "eagle3-last": {"sglang": "last block, and sglang .* train with drafter.target_layer_ids below 3; vllm loads it unchanged"},
    "eagle3-stretched": {"trtllm": "scaling of the type yarn with truncate, which trtllm is not .*; speculators, openvino"},
    "eagle3-two": {"openvino": "taps 2 blocks, but openvino takes exactly three"},
    "dflash-part": {
        "official": "it drafts a part of the vocabulary, which official does not read; .*vllm, sglang, speculators"
    },
    "eagle3-others": {
        "trtllm": "norm_before_fc, which trtllm does not read; train with .*; vllm, sglang, .*load it",
    },
    "eagle3-qwen3": {"vllm": "it has qk_norm, which vllm does not read; .*; speculators loads it"},
    "eagle3-latent": dict.fromkeys(("trtllm", "speculators"), "latent attention .*, which .* is not known to load; .*vllm, sg"),
    "eagle3-latent-queries": {"sglang": "norm_before_residual, which sglang does not read"},
    "peagle-together": {"speculators": "it has norm_before_fc, which vLLM is not known to read from these"},
    "eagle3": {"lmdeploy": "blocks 2, n / 2 and n - 3, which are not three in a target of 4 blocks"},
    "eagle-bias": {"vllm": "fc has a trained bias, which vllm cannot load; train with drafter.bias=false; sglang load"},
    "hydra-deep": {
        "official": "its heads have 3 blocks, .*; train with drafter.layers=2; no other stack loads it",
        "all": "no stack loads this hydra drafter: official: its heads have 3 blocks",
    },
    "dflash-shifted": {"vllm": "its slots are shifted"},
    "eagle3-windows": {"sglang": "sliding windows, which sglang is not known to read for this family; .*vllm, speculators"},
    "dflash-windows": {
        "speculators": "vLLM would read all layers of this layout as causal",
        "transformers": "train with drafter.causal_windows=false",
    },
    "dflash-causal": {
        "transformers": "slots of all layers see no later slot; .* train with drafter.causal=false; vllm, sg",
        "speculators": "speculators has a flag only for layers with windows",
        "trtllm": "which trtllm is not known to read; train with drafter.causal=false",
    },
    "dspark-causal": {
        "official": "which official is not known to read",
        "speculators": "speculators has a flag only for layers with windows",
        "trtllm": "which trtllm is not known to read; train with drafter.causal=false",
    },
    "dspark-open-windows": {"speculators": "vLLM makes slots of its layers with windows causal"},
    "dspark-in-place": {
        "trtllm": "its slots are in place, but TensorRT-LLM drafts with every slot of a block",
        "official": "its slots are in place, but the authors' code has shifted ones",
    },
    "dflash-sinks": {
        "sglang": "attention sinks, which sglang is not known to read for this family; train with .*=false; vllm loads it",
        "llamacpp": "attention sinks, which llamacpp is not known",
        "official": "attention sinks, which official is not known",
    },
    "jetspec-open": {"vllm": "its slots see later ones, but in files of this family they do not"},
}


def test_export_drafter_unsupported_by_stack_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Before anything is written."""
    for case, expected in REFUSED.items():
        found = Opened.of(checkpoint(tmp_path / case, case), loaded())
        for stack, says in expected.items():
            wanted = ExportSettings(stacks_for(found.meta.family, stack), tmp_path / "out", "float32", stack == "all")
            with subtests.test(case=case, stack=stack), pytest.raises(UserError, match=says):
                refusals(found, wanted)
    found, golden = opened(tmp_path / "run", "eagle3-two")
    with pytest.raises(UserError, match=REFUSED["eagle3-two"]["openvino"]):
        written(found, golden, "openvino", tmp_path / "out")
    assert not list(tmp_path.glob("out*")) and [p.name for p in (tmp_path / "run").iterdir()] == ["step-00004"]


def test_stacks_for_unsupported_pair_names_supported_stacks() -> None:
    with pytest.raises(
        UserError, match="medusa cannot be exported to sglang: it has no loader for this family; vllm, tgi load"
    ):
        stacks_for("medusa", "sglang")
    with pytest.raises(
        UserError, match="prompt_lookup cannot be exported: it has no trained weights; turn on the stack's own n-gram"
    ):
        stacks_for("prompt_lookup", "vllm")
    with pytest.raises(UserError, match="cascade cannot be exported: no stack combines drafters"):
        stacks_for("cascade", "all")
    with pytest.raises(UserError, match="dflare cannot be exported: no released engine loads it; engines load dflash"):
        stacks_for("dflare", "official")
    with pytest.raises(UserError, match=r"dfly cannot be exported: no released engine .* request 50246 is open"):
        stacks_for("dfly", "vllm")
    with pytest.raises(UserError, match="format is 'vlm'; choose one of vllm, sglang"):
        stacks_for("medusa", "vlm")


def test_export_table_has_row_for_each_family_and_stack() -> None:
    assert TABLE.keys() == families().keys()
    assert all(rows.keys() == STACKS.keys() for rows in TABLE.values())
    covered = {(CASES[case][0], stack) for case, stacks in GOES_TO.items() for stack in stacks}
    assert {(family, stack) for family in TABLE for stack in loads(family)} - covered == {
        ("eagle3", "lmdeploy"),
        ("dflash", "lmdeploy"),
        ("mtp_native", "stitched"),  # test_stitched.py
    }


@pytest.mark.parametrize("stack", ["openvino", "lmdeploy"])
def test_export_eagle3_whole_vocabulary_writes_d2t_for_mapping_stacks(stack: str, tmp_path: Path) -> None:
    """Without it optimum-intel leaves the buffer uninitialised: OpenVINO accepted 0.5 % of such drafts."""
    whole, golden = opened(tmp_path, "eagle3-whole", deep(), target_layer_ids=None)
    written(whole, golden, stack, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not tensors["d2t"].any() and tensors["t2d"].all()
    assert len(tensors["d2t"]) == len(tensors["t2d"]) == whole.loaded.target.shape.vocab_size


def test_export_lmdeploy_eagle3_accepts_default_layers_of_llama_only(tmp_path: Path) -> None:
    """Which it finds by itself; a target of six blocks or more has three of them."""
    target = deep()
    found, golden = opened(tmp_path, "eagle3", target, target_layer_ids=None)
    assert found.drafter.taps.blocks == (1, 3, 4)
    for dtype in DTYPES:
        assert written(found, golden, "lmdeploy", tmp_path / dtype, dtype).written["lmdeploy"].gap < 0.5
    other = LoadedTarget(target.target, target.tokenizer, "deep", target.description | {"architecture": "Qwen3ForCausalLM"})
    found, golden = opened(tmp_path / "other", "eagle3", other, target_layer_ids=None)
    with pytest.raises(UserError, match="lmdeploy captures no states of Qwen3ForCausalLM targets for this family"):
        written(found, golden, "lmdeploy", tmp_path / "none")


def test_export_lmdeploy_dflash_accepts_ascending_layers_of_qwen3_only(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "one", "dflash", loaded("qwen3"))
    assert written(found, golden, "lmdeploy", tmp_path / "out").written["lmdeploy"].gap < 0.5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]["block_size"] == 4
    for target, taps, says in (
        ("llama", [0, 1, 2], "LMDeploy captures no states of llama targets"),
        ("qwen3", [1, 0, 2], "its taps do not ascend"),
    ):
        found, golden = opened(tmp_path / target / str(taps[0]), "dflash", loaded(target), target_layer_ids=taps)
        with pytest.raises(UserError, match=says):
            written(found, golden, "lmdeploy", tmp_path / "none")


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_export_trtllm_unordered_target_layers_are_refused(family: str, tmp_path: Path) -> None:
    """It sorts the layer ids, and the states would be joined in another order than in training."""
    found, golden = opened(tmp_path, family, target_layer_ids=[1, 0, 2])
    with pytest.raises(UserError, match="its taps do not ascend, but TensorRT-LLM sorts them"):
        written(found, golden, "trtllm", tmp_path / "none")
    assert list(written(found, golden, "sglang", tmp_path / "out").written) == ["sglang"]


def test_export_docs_show_current_support_matrix() -> None:
    file = ROOT / "docs" / "export.md"
    page = file.read_text(encoding="utf-8")
    assert matrix.renewed(page, matrix.facts_next_to(file)) == page, "run make export-matrix"


def test_export_docs_engine_runs_match_and_broken_ones_differ() -> None:
    """And of broken exports none that got past: the texts were the target's own, what was accepted was not ours."""
    facts = matrix.facts_next_to(ROOT / "docs" / "export.md")
    assert all(run["ours"] == run["theirs"] and run["same_texts"] == run["prompts"] for run in facts["runs"].values())
    assert all(run["ours"] != run["theirs"] and run["same_texts"] == run["prompts"] for run in facts["broken"].values())
    assert all(isinstance(TABLE[run["family"]][run["stack"]], StackRow) for run in facts["runs"].values())


def test_export_oracles_import_nothing_of_exporter() -> None:
    """But for the check, which runs them, and for the trial of a GGUF file's tokenizer, which has expressions of its own."""
    allowed = {"torch", "safetensors", "gguf", "numpy", "regex", *sys.stdlib_module_names}
    trial = {"drafttrain.export.gguf_file", "drafttrain.export.gguf_tokenizer"}
    for file in (ROOT / "tests" / "export_oracles").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names if file.name != "check.py" else []:
                own = name.startswith("tests.export_oracles") or (file.name == "gguf.py" and name in trial)
                assert own or name.split(".")[0] in allowed, f"{file.name} imports {name}"


def wanted(out: Path, **changes: Any) -> ExportSettings:
    return ExportSettings(["vllm"], out, **{"dtype": "float32", "several": False, **changes})


def test_check_wanted_existing_directory_is_kept_without_overwrite(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa")
    out = tmp_path / "out"
    out.mkdir()
    check_wanted(wanted(out))  # empty
    (out / "thesis.txt").touch()
    with pytest.raises(UserError, match="which exists; name another directory, or add overwrite=true"):
        check_wanted(wanted(out))
    with pytest.raises(UserError, match=r"which is no export \(it has no drafttrain.json\), so it is kept"):
        check_wanted(wanted(out, overwrite=True))
    (out / "thesis.txt").unlink()
    for dtype in ("float32", "bfloat16"):
        check_wanted(wanted(out, overwrite=True))
        written(found, golden, "vllm", out, dtype, overwrite=True)
        assert json.loads((out / "drafttrain.json").read_text())["dtype"] == dtype


def test_export_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, golden = opened(tmp_path / "run", "medusa")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place in ("drafttrain.export.files.save_file", "os.fsync"):
        monkeypatch.setattr(place, full)
        with pytest.raises(UserError, match=r"disk full while writing .*out: nothing of it was kept, free space under"):
            written(found, golden, "vllm", tmp_path / "out")
        monkeypatch.undo()
        assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_export_overflowing_or_nan_weights_are_refused(tmp_path: Path) -> None:
    found, golden = opened(tmp_path / "run", "medusa")
    found.tensors["heads.0.output.weight"][0, 0] = 1e6
    with pytest.raises(UserError, match=r"lm_heads.0.weight reaches 1e\+06, more than float16 holds; export with"):
        written(found, golden, "vllm", tmp_path / "out", "float16")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    path = checkpoint(tmp_path / "nan", "medusa")
    state = load_file(path / "drafter.safetensors")
    state["heads.0.output.weight"][0, 0] = torch.nan
    save_file(state, path / "drafter.safetensors")
    described(path, sha256=hashlib.sha256((path / "drafter.safetensors").read_bytes()).hexdigest())
    with pytest.raises(UserError, match=r"heads.0.output.weight holds NaN or infinity: training diverged"):
        Opened.of(path, loaded())


def test_opened_checkpoint_of_other_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint of another target: its weight fingerprint"):
        Opened.of(checkpoint(tmp_path, "medusa"), loaded(seed=1))


def test_model_card_shows_measured_acceptance_and_speedup(tmp_path: Path) -> None:
    entry = {"name": "step-00004", "tau": 2.345, "speedup": 1.678, "policy": "greedy", "proposal": "tree, depth 2, 8 nodes"}
    entry["expected_tau_by_length"] = [1.5, 1.75, 1.9]
    training = {"steps": 4, "data": {"path": "talks.jsonl"}}
    report = {"checkpoints": [entry], "environment": {"device": "cpu"}, "training": training}
    found, golden = opened(tmp_path / "checkpoints", "medusa")
    assert CardFigures.of(found.directory) == CardFigures()
    written(found, golden, "vllm", tmp_path / "before")
    assert "no: the training run has no report" in (tmp_path / "before" / "README.md").read_text()
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    written(found, golden, "vllm", tmp_path / "out", "bfloat16")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "tau 2.35 tokens per decode step (tree, depth 2, 8 nodes, policy greedy)",
        "1.68x",
        "4 steps on `talks.jsonl`",
        "vllm serve targets/tiny",
        '"method": "medusa"',
        f" --chat-template {tmp_path / 'out' / 'chat_template.jinja'}\n```",
        "a chain of 3 drafts, expected tau 1.90 on the same prompts",
        "0.33",
    ):
        assert text in card, text
    for name, said in (
        ("tree, depth 2, 8 nodes", ""),
        ("draft length 2", "; not measured since `drafttrain tune` chose: draft length 2"),
    ):
        keep_tuned(found.directory, {1: {"draft_length": 2}}, {"proposals": {"1": name}})
        written(found, golden, "vllm", tmp_path / name, "bfloat16")
        assert ("; not measured" in (card := (tmp_path / name / "README.md").read_text())) is bool(said) and said in card


def test_golden_sequences_have_two_lengths_within_vocabulary() -> None:
    texts = material.sequences_for(loaded())
    assert [len(text) for text in texts] == [24, 12] * 3
    assert all(0 <= token < 64 for text in texts for token in text)
