"""What counts as read by a decode step."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from drafttrain.measure import floor
from drafttrain.measure.floor import kv_bytes, weight_bytes
from drafttrain.ops.quantised import stored_bytes
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.quantised import QuantisedTarget
from tests.helpers import ARCHITECTURES, tiny_model

TABLE = 64 * 32 * 4  # bytes of the tiny model's embedding


def total(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def tied() -> nn.Module:
    config = copy.deepcopy(ARCHITECTURES["llama"])
    config.tie_word_embeddings = True
    return AutoModelForCausalLM.from_config(config)


def test_an_embedding_table_counts_only_where_it_is_the_output_matrix() -> None:
    plain, shared = tiny_model(), tied()
    assert weight_bytes(plain) == total(plain) - TABLE
    assert weight_bytes(shared) == total(shared) == weight_bytes(plain)
    learned = tiny_model("gpt2")  # its positions are a table too, its head is tied
    assert weight_bytes(learned) == total(learned) - 512 * 32 * 4


def test_a_targets_joined_weights_and_what_a_drafter_shares_count_once() -> None:
    model = tiny_model()
    target = FastTarget(model)  # its projections become views of joined weights
    assert weight_bytes(target.model) == total(model) - TABLE
    own, head = nn.Linear(32, 32), model.get_output_embeddings()
    drafter = nn.ModuleDict({"own": own, "head": head, "embed": model.get_input_embeddings(), "table": nn.Embedding(64, 32)})
    assert weight_bytes(target.model, drafter) == weight_bytes(target.model) + total(own)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_count_as_they_are_stored(kind: str) -> None:
    bits, model = {"int8": 8, "int4": 4}[kind], tiny_model()
    maps = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    saved = sum(total(m) - stored_bytes(m.out_features, m.in_features, bits) for m in maps)
    whole = weight_bytes(model)
    assert weight_bytes(QuantisedTarget(copy.deepcopy(model), kind, torch.device("cpu")).model) == whole - saved
    drafter = nn.Module()  # a draft model keeps its whole weights, and decodes with others
    drafter.lm = nn.Module()
    drafter.lm.model, drafter.lm.bits = model, bits
    head = model.get_output_embeddings()
    assert weight_bytes(drafter) == whole - saved - total(head) + stored_bytes(64, 32, bits)


def test_adapters_are_read_as_part_of_what_they_adapt() -> None:
    adapted = nn.Module()
    adapted.base_layer, adapted.lora_A, adapted.lora_B = nn.Linear(32, 16), nn.Linear(32, 4), nn.Linear(4, 16)
    assert weight_bytes(nn.ModuleList([adapted])) == total(adapted.base_layer)


def test_the_floor_is_the_weights_and_half_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FastTarget(tiny_model())
    results = [SimpleNamespace(prompt_tokens=10, tokens=[1] * 4), SimpleNamespace(prompt_tokens=7, tokens=[1] * 6)]
    wave: Any = SimpleNamespace(results=results)
    monkeypatch.setattr(floor, "copy_bandwidth", lambda device: 1000.0)
    cache = target.cache_bytes()
    assert cache.states == 0 and cache.position * 22 == kv_bytes(target.shape, target.dtype, 22) == 2 * 4 * 2 * 8 * 4 * 22
    found = floor.step_floor([target.model], cache, wave, torch.device("cuda"))
    assert found == (total(target.model) - TABLE + 2 * 4 * 2 * 8 * 4 * 22) / 1000.0
    with_states = floor.step_floor([target.model], replace(cache, states=50), wave, torch.device("cuda"))
    assert with_states == found + 2 * 2 * 50 / 1000.0  # of two requests, read and written
    assert floor.step_floor([target.model], cache, wave, torch.device("cpu")) is None
