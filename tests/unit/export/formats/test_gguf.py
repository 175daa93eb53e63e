"""GGUF files for llama.cpp: what is in them, each known way to get one wrong, and the target written so."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from drafttrain.core.errors import ParityError, UserError
from drafttrain.export import parity
from drafttrain.export.exporter import ExportSettings, check_wanted, refusals
from drafttrain.export.files import ExportSource, Files
from drafttrain.export.formats import gguf as gguf_format
from drafttrain.export.gguf_file import write_gguf
from drafttrain.export.golden import Golden
from drafttrain.export.opened import Opened
from drafttrain.export.table import format_of
from drafttrain.targets.load import LoadedTarget
from tests.export_oracles import check as oracle
from tests.export_oracles import gguf as readers
from tests.export_oracles.check import check_export
from tests.export_oracles.parts import Point
from tests.exports import TEXTS, checkpoint, loaded, opened, unprobed, written
from tests.helpers import tiny_model

Fields = dict[str, Any]
Weights = dict[str, Tensor]
Made = tuple[Opened, Golden, Path]
Change = Callable[[Fields, Weights], Any]
TOKENS = "tokenizer.ggml"
NORMS = ("blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight")  # of the embedding, of the state


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A right directory of a case, its target in it too, made once."""
    made: dict[str, Made] = {}

    def of(case: str) -> Made:
        if case not in made:
            folder = tmp_path_factory.mktemp("right")
            found, golden = opened(folder, case)
            written(found, golden, "llamacpp", folder / "out", with_target=True)
            made[case] = found, golden, folder / "out"
        return made[case]

    return of


def content(file: Path) -> tuple[Fields, Weights]:
    """As the file has them: matrices of a file in float32."""
    reader = gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return fields, {x.name: torch.from_numpy(x.data.copy()) for x in reader.tensors}


def changed(
    right: Path, wrong: Path, change: Change, file: str = "draft.gguf", whole: tuple[Fields, Weights] | None = None
) -> Path:
    """whole: the content of the file, where it is known."""
    shutil.copytree(right, wrong)
    fields, tensors = copy.deepcopy(whole) if whole else content(wrong / file)
    change(fields, tensors)
    write_gguf(wrong / file, fields, tensors, torch.float32)
    return wrong


def gate(found: Opened, golden: Golden, directory: Path) -> None:
    """The check of an export on a user's machine."""
    to, source = format_of(found.meta.family, "llamacpp"), ExportSource(found, "llamacpp", "float32")
    parity.check(directory, to, Files({}, {}), source, golden, golden)


def compare(found: Opened, golden: Golden, directory: Path) -> None:
    """The check of the tests, by an independent reader."""
    check_export(directory, ExportSource(found, "llamacpp", "float32"), golden, golden)


def put(key: str, value: Any) -> Change:
    return lambda fields, tensors: fields.update({key: value})


def drop(key: str) -> Change:
    return lambda fields, tensors: fields.pop(key)


def lose(name: str) -> Change:
    return lambda fields, tensors: tensors.pop(name)


def unpermuted(name: str) -> Change:
    """Rows as the checkpoint has them, the two halves of each head behind one another; heads are 8 wide."""
    return lambda fields, tensors: tensors.update({name: tensors[name].unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)})


def offsets(fields: Fields, tensors: Weights) -> None:
    tensors["d2t"] -= torch.arange(len(tensors["d2t"]))


def swapped(fields: Fields, tensors: Weights) -> None:
    pieces = fields[f"{TOKENS}.tokens"]
    pieces[3], pieces[4] = pieces[4], pieces[3]


SHIFTED = [
    ("eagle3", put("eagle3.target_layers", [0, 1, 2])),
    ("dflash", put("dflash.target_layers", [0, 1, 2])),
]
TRAPS: list[tuple[str, str, Change]] = [
    *((case, "layer ids", change) for case, change in SHIFTED),
    ("eagle3", "layer ids", put("eagle3.target_layers", [2, 3, 4])),
    ("eagle3", "layer ids", put("eagle3.target_layers", [1, 2])),
    ("eagle3", "layer ids", drop("eagle3.target_layers")),
    ("dflash", "layer ids", put("dflash.target_layers", [2, 3, 4])),
    ("eagle3", "d2t", offsets),
    ("eagle3", "vocabulary", lose("d2t")),
    ("eagle3", "vocabulary", put("eagle3.vocab_size", 63)),
    ("eagle3", "norm flags", put("eagle3.norm_before_residual", True)),
    ("eagle3", "norm flags", drop("eagle3.norm_before_residual")),
    ("eagle3", "norm flags", put("eagle3.norm_before_fc", True)),
    # fields in whose place llama.cpp would take its own
    ("eagle3", "rope", drop("eagle3.rope.freq_base")),
    ("eagle3", "rope", put("eagle3.rope.freq_base", 500000.0)),
    ("eagle3", "norm", drop("eagle3.attention.layer_norm_rms_epsilon")),
    ("eagle3", "norm", put("eagle3.attention.layer_norm_rms_epsilon", 1e-5)),
    ("eagle3", "head_dim", drop("eagle3.attention.key_length")),
    ("eagle3", "head_dim", put("eagle3.rope.dimension_count", 4)),
    ("eagle3", "heads", drop("eagle3.attention.head_count_kv")),
    ("eagle3", "max positions", put("eagle3.context_length", 256)),
    (
        "eagle3",
        "rope scaling",
        lambda f, t: f.update({"eagle3.rope.scaling.type": "linear", "eagle3.rope.scaling.factor": 2.0}),
    ),
    ("eagle3", "config", put("eagle3.target_hidden_size", 64)),
    ("eagle3", "architecture", put("general.architecture", "llama")),
    ("eagle3", "tensors", lose("blk.0.attn_norm_2.weight")),
    ("eagle3", "logits", lambda f, t: t.update({"token_embd.weight": torch.zeros(64, 32)})),  # it may have its own
    ("eagle3", "vocabulary", lambda f, t: t.update({"token_embd.weight": torch.zeros(63, 32)})),
    ("dflash", "block size", put("dflash.block_size", 6)),
    ("dflash", "mask token", put(f"{TOKENS}.mask_token_id", 5)),
    ("dflash", "mask token", drop(f"{TOKENS}.mask_token_id")),
    ("dflash", "causal layers", put("dflash.attention.causal", True)),
    ("jetspec", "causal layers", put("dflash.attention.causal", False)),
    ("dspark", "slots", put("dflash.sample_from_anchor", False)),
    ("dspark", "config", drop("dflash.sample_from_anchor")),
    ("dspark", "config", put("dflash.has_confidence_head", False)),
    ("dspark", "tensors", lose("conf_proj.bias")),
    ("dspark", "config", lambda f, t: t.update({"markov_w2.weight": t["markov_w2.weight"][:, :4].contiguous()})),
    (
        "dspark",
        "logits",
        lambda f, t: t.update({"markov_w1.weight": t["markov_w2.weight"], "markov_w2.weight": t["markov_w1.weight"]}),
    ),
    ("dflash2-unlike", "config", put("dflash.conv_kernel_size", 3)),
    ("dflash2-unlike", "config", put("dflash.conv_group_size", 16)),
    ("dflash2-unlike", "config", put("dflash.selector_top_k", 6)),
    ("dflash2-unlike", "logits", put("dflash.selector_top_k", 4)),
    ("dflash2-unlike", "tensors", lambda f, t: t.update({"blk.0.attn_conv_base.weight": t.pop("blk.0.attn_conv_base")})),
    (
        "dflash2-unlike",
        "logits",
        lambda f, t: t.update({"blk.0.attn_conv_base": t["blk.0.attn_conv_base"].flip(1).contiguous()}),
    ),
    ("draft_model", "rope", drop("llama.rope.freq_base")),
    ("draft_model", "rope scaling", lambda f, t: t.update({"rope_freqs.weight": torch.ones(4)})),
    # the tokenizer goes with all of them
    ("eagle3", "tokenizer", swapped),
    ("eagle3", "tokenizer", drop(f"{TOKENS}.eos_token_id")),
    ("dflash", "tokenizer", put(f"{TOKENS}.model", "llama")),
    ("draft_model", "tokenizer", put(f"{TOKENS}.pre", "default")),
    ("draft_model", "tokenizer", drop(f"{TOKENS}.tokens")),
    ("draft_model", "tokenizer", drop(f"{TOKENS}.add_bos_token")),
    # what nothing but the drafts themselves shows
    ("eagle3", "logits", unpermuted("blk.0.attn_q.weight")),
    ("eagle3", "logits", unpermuted("blk.0.attn_k.weight")),
    ("eagle3", "logits", lambda f, t: t["fc.weight"].mul_(1.01)),
    ("eagle3", "logits", lambda f, t: t.update(dict(zip(NORMS, (t[name] for name in NORMS[::-1]), strict=True)))),
    ("draft_model", "logits", unpermuted("blk.1.attn_q.weight")),
    ("draft_model", "logits", lose("output.weight")),
    ("dflash", "logits", lambda f, t: t["blk.0.attn_q_norm.weight"].add_(0.1)),
]


@pytest.mark.parametrize("case", dict.fromkeys(case for case, _, _ in TRAPS))
def test_gguf_parity_check_names_wrong_field_or_tensor(
    case: str,
    exported: Callable[[str], Made],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    subtests: pytest.Subtests,
) -> None:
    """Wrong layers show in the drafts, too, whatever the file says of itself."""
    found, golden, right = exported(case)
    whole = content(right / "draft.gguf")
    traps = [(name, change) for of, name, change in TRAPS if of == case]
    for number, (name, change) in enumerate(traps):
        with subtests.test(name=name, number=number):
            wrong = changed(right, tmp_path / str(number), change, whole=whole)
            with pytest.raises(ParityError, match=f"^Parity: {name}: ") as caught:
                compare(found, golden, wrong)
            assert caught.value.name == name
            with pytest.raises(ParityError, match=r"^Parity: "):
                gate(found, golden, wrong)
            if (case, change) in SHIFTED:
                with monkeypatch.context() as patch, pytest.raises(ParityError, match=r"^Parity: logits: draft"):
                    patch.setattr(oracle, "check_facts", lambda *_: None)
                    compare(found, golden, wrong)


@pytest.mark.parametrize("kept", [20, 0.3, -30])
def test_gguf_cut_off_file_fails_parity(kept: float, exported: Callable[[str], Made], tmp_path: Path) -> None:
    found, golden, right = exported("eagle3")
    shutil.copytree(right, tmp_path / "wrong")
    file = tmp_path / "wrong" / "draft.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    for check in (gate, compare):
        with pytest.raises(ParityError, match=r"^Parity: (config|tensors): draft.gguf cannot be read"):
            check(found, golden, tmp_path / "wrong")


def test_gguf_drafter_file_has_expected_fields_and_dtypes(exported: Callable[[str], Made], tmp_path: Path) -> None:
    found, golden, right = exported("eagle3")
    fields, tensors = content(right / "draft.gguf")
    assert fields["general.architecture"] == "eagle3" and fields["eagle3.target_layers"] == [1, 2, 3]
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == found.drafter.ids.tolist()  # type: ignore[attr-defined]
    assert "t2d" not in tensors and "token_embd.weight" not in tensors
    written(found, golden, "llamacpp", tmp_path / "out", "bfloat16")
    kinds = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "out" / "draft.gguf").tensors}
    assert kinds["fc.weight"] == kinds["output.weight"] == "BF16" and kinds["d2t"] == "I64"
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    found, golden, _ = exported("dflash2-unlike")
    written(found, golden, "llamacpp", tmp_path / "blocks", "bfloat16")
    kinds = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "blocks" / "draft.gguf").tensors}
    assert kinds["blk.0.attn_conv_base"] == kinds["blk.0.ffn_conv_base"] == "F32"
    assert kinds["blk.0.attn_conv_proj.weight"] == kinds["selector_predecessor.weight"] == "BF16"
    assert not (tmp_path / "out" / "config.json").exists()


def test_gguf_target_file_equals_target_and_changes_are_detected(exported: Callable[[str], Made], tmp_path: Path) -> None:
    found, golden, right = exported("eagle3")
    source = ExportSource(found, "llamacpp", "float32")
    text, model = torch.tensor(TEXTS[0]), found.loaded.target.model
    point = Point(text[:-1], text[-1], torch.zeros(1, dtype=torch.long))
    reading = readers.language_model(right, "target.gguf", oracle.target_parts(found, tokenizer=True), [point])
    with torch.no_grad():
        torch.testing.assert_close(reading.logits[0][0], model(text[None]).logits[0, -1], atol=1e-4, rtol=1e-4)
    gguf_format.check_target(right, source)
    harms: list[tuple[str, Change]] = [
        ("target: model.layers.1.self_attn.q_proj.weight was not saved as it is", unpermuted("blk.1.attn_q.weight")),
        ("target: model.norm.weight was not saved", lose("output_norm.weight")),
        ("rope: ", drop("llama.rope.freq_base")),
        ("layers: ", put("llama.block_count", 3)),
    ]
    for number, (says, change) in enumerate(harms):
        wrong = changed(right, tmp_path / str(number), change, "target.gguf")
        for check in (gguf_format.check_target, oracle.check_gguf_target):
            with pytest.raises(ParityError, match=f"^Parity: {says}"):
                check(wrong, source)


def target_of(**changes: Any) -> LoadedTarget:
    """A tiny Llama, or another architecture, configured otherwise."""
    model: Any = tiny_model(changes.pop("name", "llama"))
    config = model.config
    for key, value in changes.items():
        setattr(config, key, value)
    made = type(model)(config)
    made.load_state_dict(model.state_dict())
    return LoadedTarget(unprobed(made), loaded().tokenizer, "changed", loaded().description)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("rope", [{"rope_type": "llama3", **LLAMA3}, {"rope_type": "linear", "factor": 4.0}])
def test_gguf_rope_scaling_is_kept(rope: dict[str, Any], tmp_path: Path) -> None:
    target = target_of(rope_parameters={"rope_theta": 10000.0, **rope})
    found, golden = opened(tmp_path, "draft_model", target)
    for dtype in ("bfloat16", "float32"):
        made = written(found, golden, "llamacpp", tmp_path / "out", dtype, with_target=True, overwrite=True)
        assert made.written["llamacpp"].gap < 0.5
    with pytest.raises(ParityError, match=r"^Parity: rope scaling: "):
        plain = lose("rope_freqs.weight") if rope["rope_type"] == "llama3" else drop("llama.rope.scaling.type")
        gate(found, golden, changed(tmp_path / "out", tmp_path / "wrong", plain))
    with pytest.raises(ParityError, match=r"^Parity: rope scaling: "):
        compare(found, golden, tmp_path / "wrong")


REFUSED: list[tuple[str, dict[str, Any], str]] = [  # case, how its target differs, what the message says
    ("eagle3-normed", {}, "it has fc_norm, which llamacpp does not read; .*; vllm, sglang, trtllm, .*load it"),
    ("eagle3-last", {}, "taps the target's last block, and llamacpp is known .*; vllm loads it unchanged"),
    ("eagle3-two", {}, "taps 2 blocks, but llamacpp takes exactly three; .*; vllm, sglang, trtllm, .*load it"),
    ("dflash-shifted", {}, "its slots are shifted"),
    ("dspark-windows", {}, "its layers have sliding windows, which are not written to GGUF"),
    ("jetspec-open", {}, "its slots see later ones"),
    (
        "dflash2",
        {},
        "it has 8 candidates, and llama.cpp takes k of them only where k .k . 1. is at most the hidden size, 32",
    ),
    ("eagle3", {"name": "qwen2"}, "llama.cpp captures no states of qwen2 targets, only of llama, mistral, qwen3"),
    ("draft_model", {"name": "gpt2"}, "its architecture is gpt2"),
    ("draft_model", {"name": "qwen3", "rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", **LLAMA3}}, "'llama3'"),
    ("draft_model", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "is 'dynamic'"),
    ("draft_model", {"name": "mistral-sliding", "sliding_window": 16}, "it has sliding-window attention"),
]


def test_gguf_unsupported_drafter_or_target_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for number, (case, changes, says) in enumerate(REFUSED):
        with subtests.test(case=case, **changes):
            target = target_of(**changes) if changes else loaded()
            found = Opened.of(checkpoint(tmp_path / str(number), case, target), target)
            with pytest.raises(UserError, match=f"cannot be exported to llamacpp: .*{says}"):
                refusals(found, ExportSettings(["llamacpp"], tmp_path / "out", "float32", False))


def test_gguf_unsupported_with_target_is_refused_before_export(tmp_path: Path) -> None:
    found, golden = opened(tmp_path, "eagle3", target_of(name="mistral-sliding", sliding_window=16))
    with pytest.raises(
        UserError, match=r"the target cannot be written as GGUF: it has sliding-window attention.*; leave out with_target"
    ):
        refusals(found, ExportSettings(["llamacpp"], tmp_path / "out", "float32", False, with_target=True))
    assert written(found, golden, "llamacpp", tmp_path / "out").written["llamacpp"].gap < 0.5
    with pytest.raises(UserError, match=r"with_target=true writes the target as GGUF, which only format=llamacpp reads"):
        check_wanted(ExportSettings(["vllm"], tmp_path / "other", "float32", False, with_target=True))
