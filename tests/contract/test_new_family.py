"""A family written from CONTRIBUTING.md alone: one file that trains, decodes, is measured, and is refused by export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore
from rich.console import Console

import drafttrain.drafters as folder
from drafttrain.cli.config import compose_run
from drafttrain.commands.measure import measure_run
from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters import Family, families, schemas
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, checkpoint_name, load_drafter, save_drafter
from drafttrain.export.table import stacks_for
from drafttrain.features.online import Online
from drafttrain.measure.runner import CheckpointRef
from drafttrain.model.batch import TrainBatch
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.targets.load import LoadedTarget
from tests.helpers import prompts, tiny_model
from tests.unit.measure.test_runner import Letters, options

FILE = '''
"""One head: a linear map on the target's last state predicts the token after the root."""

from dataclasses import dataclass

import torch
from torch import nn

from drafttrain.core.tree import DraftTree
from drafttrain.drafters import Family
from drafttrain.drafters.common.pending import LastState
from drafttrain.model.batch import Prediction
from drafttrain.model.drafter import Drafter
from drafttrain.model.proposal import Proposal
from drafttrain.model.target import FINAL, Taps


@dataclass
class OneHeadOptions:
    family: str = "one_head"


class OneHead(Drafter):
    def __init__(self, options, target):
        super().__init__(Proposal(draft_length=1))
        self.taps, self.width = Taps(final=True), target.shape.hidden_size
        self.head = nn.Linear(self.width, target.shape.vocab_size)

    def predict(self, batch):
        pairs = batch.future(2)
        state_MH = batch.hidden[FINAL].flatten(0, 1)[pairs.source_M]
        yield Prediction(0, pairs.source_M, pairs.label_M, state_MH, self.head)

    def open(self, slots, max_len):
        return OneHeadState(self, slots)


class OneHeadState(LastState):
    def __init__(self, drafter, slots):
        super().__init__(slots, drafter.width, drafter.head.weight)
        self.drafter = drafter

    def propose(self, slot_B, sampling, depth=None):
        draft_B = self.drafter.head(self.hidden_SH[slot_B]).argmax(-1)
        return DraftTree.chain(torch.stack([self.root_S[slot_B], draft_B], 1))


FAMILY = Family("one_head", OneHeadOptions, OneHead)
'''


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """The file lies in a folder of its own, which Python takes for a part of the families' folder."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "one_head.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path / "families")])
    families.cache_clear()
    schemas.cache_clear()
    yield families()["one_head"]
    monkeypatch.undo()
    families.cache_clear()
    schemas.cache_clear()
    for file in ("one_head.yaml", "one_head_schema.yaml"):
        ConfigStore.instance().repo["drafter"].pop(file)


def test_new_family_of_one_file_trains_decodes_and_is_measured(family: Family, tmp_path: Path) -> None:
    from drafttrain.targets.hf import HFTarget

    assert type(compose_run(None, ["drafter=one_head"]).options.drafter) is family.options
    target = HFTarget(tiny_model(), frozenset())
    torch.manual_seed(1)
    drafter = family.build(family.options(), target)
    prompt = prompts(1, seed=9)[0]
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=24).run([prompt]).results[0]
    _fit(drafter, target, prompt + plain.tokens, 80)
    for policy, sampling in (("greedy", Sampling()), ("coupled", Sampling(0.8, seed=2))):
        wanted, found = (
            Decoder(target, d, policy, sampling, max_new_tokens=24).run([prompt, *prompts(3, seed=3)], 2).results
            for d in (None, drafter)
        )
        assert [r.tokens for r in found] == [r.tokens for r in wanted]
        if policy == "greedy":
            assert found[0].tokens == plain.tokens and found[0].verifications <= 14, "what it has learnt is accepted"

    shape = target.shape
    sizes = (shape.vocab_size, shape.hidden_size, shape.blocks)
    record = TargetRecord("hf", "nowhere", None, "float32", *sizes, target.fingerprint)
    path = tmp_path / checkpoint_name(80)
    path.mkdir()
    meta = CheckpointMeta("one_head", dataclasses.asdict(family.options()), drafter.decode_settings(), record, 80)
    save_drafter(path, drafter.state_dict(), meta)
    assert type(load_drafter(path, target)[0]) is type(drafter)
    loaded = LoadedTarget(target, Letters(), "nowhere", {"name": "hf", "path": "nowhere"})  # type: ignore[arg-type]
    ref = CheckpointRef(path.name, path, 80)
    report = measure_run(loaded, [ref], options(tmp_path), tmp_path / "out", Console(quiet=True))
    entry = report["checkpoints"][0]
    assert 1.0 <= entry["tau"] <= 2.0 and entry["exact_matches"] == 3
    with pytest.raises(UserError, match="one_head cannot be exported: no layout is written for it yet"):
        stacks_for("one_head", "vllm")


def _fit(drafter: torch.nn.Module, target: object, tokens: list[int], steps: int) -> None:
    token_BT = torch.tensor([tokens])
    position_BT = torch.arange(len(tokens))[None]
    batch = TrainBatch(token_BT, position_BT, torch.zeros_like(token_BT), torch.ones_like(token_BT, dtype=torch.bool))
    batch = Online(target, drafter.taps).fill(batch)  # type: ignore[arg-type]
    objective = Objective(drafter.train(), target, LossOptions())  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-2)
    for _ in range(steps):
        loss, _ = objective(batch)
        optimizer.zero_grad()
        (loss / len(tokens)).backward()
        optimizer.step()
    drafter.eval()
