"""The speculators library's models load our exports, and we import what they save: loss and gradients are the same.

The library is imported into this process from its own environment, and computes with the torch and transformers of ours.

Shapes: B one row, T positions, A anchors, C elements of P-EAGLE's chains, K drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from drafttrain.drafters import families
from drafttrain.engines.scripts.speculators import greedy, use_dense_attention
from drafttrain.export import convert
from drafttrain.export.convert import converted
from drafttrain.export.external import ExternalCheckpoint
from drafttrain.export.opened import Opened
from drafttrain.features.online import Online
from drafttrain.model.batch import TrainBatch
from drafttrain.model.target import Taps
from drafttrain.objective import LossOptions
from drafttrain.objective.losses import Objective
from drafttrain.targets.load import LoadedTarget
from tests.engines.conftest import python_for
from tests.exports import CASES, GOES_TO, loaded, opened, written
from tests.official import LAYOUTS, put

pytestmark = pytest.mark.engines

# there windows stay at the anchor, and MTP's later steps do not see the keys of earlier ones (docs/official.md)
EXPORTED = [x for x, to in GOES_TO.items() if "speculators" in to and "windows" not in x and CASES[x][0] != "mtp"]
SAVED = [x for x in LAYOUTS if x.endswith(", speculators")]
# by family: options with which both train on the same predictions
SAME: dict[str, dict[str, Any]] = {
    "peagle": {"draft_length": 3, "retention": 1.0, "least_retention": 1.0},
    "dspark": {"gaps": "skip"},
    "dflash2": {"candidates": 64},  # where the true token is no candidate, the library makes it one
}
FROM_TARGET = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
TOLERANCE = (
    1e-5  # of a gradient's norm. float32 sums in another order: 1e-6, where its epsilon is the target's norm's too: 6e-6
)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """`import speculators`, and the packages that it needs and this environment lacks."""
    (packages,) = (Path(python_for("speculators")).parents[1] / "lib").glob("python*/site-packages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(packages)])
        yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(packages)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    """In a directory, where the library finds the target's matrices."""
    folder, model = tmp_path_factory.mktemp("target"), loaded().target.model
    model.save_pretrained(folder)
    return replace(loaded(), path=str(folder))


def official(folder: Path) -> Any:
    """The library's model. It has every tensor of the files, and else only the target's."""
    from speculators import SpeculatorModel

    model = SpeculatorModel.from_pretrained(folder, dtype=torch.float32)
    use_dense_attention(model)
    if hasattr(model, "refiner_head"):  # a buffer that no file has, and that 0.9.0 leaves as the memory was
        model.refiner_head.causal_tril.fill_(1.0).tril_()
    state, files = model.state_dict(), load_file(folder / "model.safetensors")
    assert files.keys() <= state.keys() and state.keys() - files.keys() <= FROM_TARGET
    assert all(torch.equal(state[name], tensor) for name, tensor in files.items())
    if model.use_draft_vocab:  # training does not read d2t
        assert torch.equal(torch.arange(model.draft_vocab_size) + model.d2t, model.t2d.nonzero()[:, 0])
    return model


def check_same_training(found: Opened, model: Any, patch: pytest.MonkeyPatch) -> None:
    """Ours are sums, with weights that add up to 1, theirs means: one factor for the loss and for all gradients."""
    family = families()[found.meta.family]
    drafter: Any = family.build(family.options(**found.meta.options | SAME.get(family.name, {})), found.target)
    drafter.load_state_dict(found.drafter.state_dict())
    if model.use_draft_vocab and family.name == "dspark":  # the acceptance that it learns is there of these tokens alone
        drafter.confidence_head = model.confidence_head = None
    batch, kind = batch_for(found.loaded, model), "ce" if family.name == "dflash2" else "kl"
    ours, _ = Objective(drafter.train(), found.target, LossOptions(kind))(batch)
    theirs = their_loss(model, batch, {"kl": "kl_div", "ce": "ce"}[kind], patch)
    ours.backward()
    theirs.backward()
    factor, left = (ours / theirs).detach(), dict(drafter.named_parameters())
    for weight in (weight for weight in model.parameters() if weight.grad is not None):
        name = next(name for name, own in left.items() if own.shape == weight.shape and torch.equal(own, weight))
        gradient = left.pop(name).grad
        assert float((weight.grad * factor - gradient).norm() / gradient.norm()) < TOLERANCE, name
    assert left.keys() <= {"lm_head.weight", "embed_tokens.weight"}, "those the library does not train"


def batch_for(target: LoadedTarget, model: Any) -> TrainBatch:
    """Two documents in a row. The target wrote them, so that its choice is the true token."""
    texts = [prompt + greedy(target.target.model, prompt, count) for prompt, count in (([7, 3, 19], 21), ([50, 2], 15))]
    token_BT = torch.tensor([texts[0] + texts[1]])
    position_BT = torch.cat([torch.arange(len(text)) for text in texts])[None]
    document_BT = (torch.arange(token_BT.shape[1]) >= len(texts[0])).long()[None]
    mask_BT = position_BT >= 6  # far enough that no chain or block of the first document has a label in the second
    if model.use_draft_vocab:
        mask_BT &= model.t2d[token_BT]
    return Online(target.target, Taps((0, 1, 2, 3), True)).fill(TrainBatch(token_BT, position_BT, document_BT, mask_BT))


def their_loss(model: Any, batch: TrainBatch, kind: str, patch: pytest.MonkeyPatch) -> Tensor:
    """Of the library's forward pass for training, from our anchors in place of random ones."""
    from speculators.losses import resolve_loss_config
    from speculators.losses.eager import tv_loss

    columns = {
        "hidden_states": torch.cat([batch.hidden[k - 1] for k in model.target_layer_ids], -1),
        "verifier_last_hidden_states": batch.hidden[3],
        "input_ids": batch.token_BT,
        "position_ids": batch.position_BT,
        "document_ids": batch.document_BT,
        "loss_mask": batch.mask_BT.float(),
    }
    source_A, K = batch.anchors().source_BA[0], model.config.speculators_config.proposal_methods[0].speculative_tokens
    columns = (for_blocks if hasattr(model, "block_size") else for_chains)(model, columns, source_A, K, patch)
    steps = {"ttt_steps": 3, "ttt_step_loss_decay": 0.8, "num_depths": K, "max_anchors": len(source_A), "gamma": 4.0}
    losses = {"loss_config": resolve_loss_config(kind, "eager"), "tv_loss_fn": tv_loss}
    loss: Tensor = model.train()(**columns, **steps, **losses)[1]
    return loss


def for_blocks(
    model: Any, columns: dict[str, Tensor], source_A: Tensor, K: int, patch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """With padding for the last blocks, and the loss mask at the slots of the labels."""
    real_A, masks = torch.ones_like(source_A, dtype=torch.bool), model._build_attention_mask
    patch.setattr("speculators.models.dflash.core.select_anchors", lambda *_: (source_A + 1, real_A))
    columns["loss_mask"] = columns["loss_mask"].roll(-int(model.config.sample_from_anchor), 1)
    columns = {name: F.pad(x, (0, 0, 0, K + 1) if x.ndim == 3 else (0, K + 1)) for name, x in columns.items()}
    documents_BT = columns["document_ids"]
    patch.setattr(model, "_build_attention_mask", lambda mask, most, _, device: masks(mask, most, documents_BT, device))
    # XPress reads the token before an anchor of the same document in slot 0, where vLLM and we read the anchor's
    return columns | {"document_ids": torch.arange(documents_BT.shape[1])[None]}


def for_chains(
    model: Any, columns: dict[str, Tensor], source_A: Tensor, K: int, patch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """With each state beside the token after it. P-EAGLE's chains of K drafts begin at each anchor."""
    T = columns["input_ids"].shape[1]
    start_C = torch.cat([torch.arange(T), source_A.repeat_interleave(K - 1)])
    depth_C = torch.cat([torch.zeros(T, dtype=torch.long), torch.arange(1, K).repeat(len(source_A))])
    chains = [x[start_C + depth_C < T] for x in (start_C, depth_C)]
    patch.setattr("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: chains)
    later = {"verifier_last_hidden_states": 1, "input_ids": 1, "loss_mask": 2}
    return {name: x.roll(-later.get(name, 0), 1) for name, x in columns.items()}


@pytest.mark.parametrize("case", EXPORTED)
def test_official_model_of_export_has_our_loss_and_gradients(
    case: str, target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, golden = opened(tmp_path, case, target, **SAME.get(CASES[case][0], {}))
    written(found, golden, "speculators", tmp_path / "out")
    check_same_training(found, official(tmp_path / "out"), monkeypatch)


@pytest.mark.parametrize("layout", SAVED)
def test_import_of_official_model_has_its_loss_and_gradients(
    layout: str, target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "cache_home", lambda: tmp_path / "cache")
    config, tensors, file = LAYOUTS[layout]()
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    config["speculators_config"] |= {"proposal_methods": [proposal], "default_proposal_method": "greedy"}
    config["speculators_config"]["verifier"]["name_or_path"] = target.path
    config |= {"selector_top_k": 64} if "selector_top_k" in config else {}
    model = official(put(tmp_path / "hand", (config, tensors, file)))
    model.save_pretrained(tmp_path / "saved")
    found = Opened.of(converted(ExternalCheckpoint(tmp_path / "saved"), target, print), target)
    check_same_training(found, model, monkeypatch)
