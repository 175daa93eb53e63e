"""Memory estimates, quantised targets, and what keeps a drafter's memory low, against what is really there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.drafters.common.drafter_lora import add_matrices, trained_and_frozen
from drafttrain.features.online import Online, Prefetch
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import trainable
from drafttrain.model.lora import LoraOptions
from drafttrain.model.target import Taps
from drafttrain.objective.losses import LossOptions, Objective
from drafttrain.ops.fp8 import Fp8Linear
from drafttrain.runs import placement as placing
from drafttrain.runs.placement import state_bytes
from drafttrain.targets import TargetOptions, estimate
from drafttrain.targets.estimate import Need, Outline, choose, kept_bytes, need_of, outline
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import load_target
from drafttrain.targets.quantised import KINDS, QuantisedLinear, quantise, rounded_to, whole_fingerprint
from drafttrain.targets.split import ShardedTarget
from drafttrain.train import DeepSpeedOptions, TrainOptions, sharding
from drafttrain.train.engine import World, settings
from drafttrain.train.optimizer import hidden_matrices, make_optimizer
from drafttrain.train.sharding import ZeroShards
from tests import composing
from tests.exports import embedded
from tests.helpers import ARCHITECTURES, FEW, prompts, quantised_target, tiny_model, tiny_target
from tests.tiny import NAMES, build

CPU = torch.device("cpu")
AGAIN = ("medusa", "eagle3", "dflash", "draft_model")  # heads, recurrent, block, a model: each recomputes in its own way


def bare(name: str = "llama") -> Outline:
    with torch.device("meta"):
        return Outline(AutoModelForCausalLM.from_config(ARCHITECTURES[name]))


def packed_batch() -> TrainBatch:
    """Two rows, one of two documents."""
    generator = torch.Generator().manual_seed(0)
    token_BT = torch.randint(0, 64, (2, 48), generator=generator)
    document_BT = torch.zeros(2, 48, dtype=torch.long)
    document_BT[1, 30:] = 1
    position_BT = torch.arange(48).repeat(2, 1)
    position_BT[1, 30:] -= 30
    return TrainBatch(token_BT, position_BT, document_BT, torch.ones(2, 48, dtype=torch.bool))


@pytest.mark.parametrize("names", [FEW, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["few", "every"])
def test_outline_drafter_on_meta_device_has_all_parameters(names: Sequence[str], subtests: pytest.Subtests) -> None:
    target = tiny_target()
    with torch.device("meta"):
        shapes = bare()
    for name in names:
        with subtests.test(name=name):
            with torch.device("meta"):
                drafter = build(name, shapes)
            assert trainable(drafter) == trainable(build(name, target))
            assert all(p.is_meta for p in drafter.parameters())


def test_target_estimate_equals_bytes_of_its_parameters(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttrain.targets.hf.probe", lambda target: None)  # it changes no weight, and takes long
    monkeypatch.setattr("drafttrain.targets.hf.wrong_tap", lambda target: None)
    for name, kind in product(("llama", "gpt2", "qwen2"), (None, *KINDS)):
        model = tiny_model(name)
        with subtests.test(name=name, kind=kind):
            if kind is not None and name == "gpt2":  # its maps are transposed, and no nn.Linear
                with pytest.raises(UserError, match="has none in its blocks"):
                    quantise(model, kind, CPU)
                continue
            if kind is not None:
                quantise(model, kind, CPU)
            real = sum(p.numel() * p.element_size() for p in model.parameters())
            assert need_of(bare(name), kind, drafter=0, activations=0).target == real


def test_need_placements_divide_block_bytes_and_choose_by_memory() -> None:
    need = Need(target=100, blocks=80, live=10, drafter=7, activations=3, experts=60)
    assert [need.of_target(p, 4) for p in estimate.PLACEMENTS] == [100, 20 + 20 + 10, 20 + 20, 40 + 15]
    assert need.total("zero3", 4) == 60
    assert choose(need, free=110, processes=4) == "replicated"
    assert choose(need, free=109, processes=4) == "zero3"
    with pytest.raises(UserError, match=r"^training needs about 0\.0 MB in each process .*lower train\.micro_batch"):
        choose(need, free=59, processes=4)
    with pytest.raises(UserError):
        choose(need, free=109, processes=1)


def test_state_bytes_lora_equals_optimizer_memory() -> None:
    target, options = tiny_target(), TrainOptions(lora=LoraOptions(rank=2))
    drafter, vocab = build("eagle3", target), target.shape.vocab_size
    trained, frozen = trained_and_frozen(drafter, options.lora, vocab)
    assert trained_and_frozen(drafter, LoraOptions(), vocab) == (trainable(drafter), 0)
    add_matrices(drafter, options.lora, vocab)
    assert trained == trainable(drafter) < frozen // 4
    optimizer = make_optimizer(Objective(drafter, target, LossOptions()), options)
    learnt = [p for p in drafter.parameters() if p.requires_grad]
    for parameter in learnt:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = list(drafter.parameters()) + [p.grad for p in learnt if p.grad is not None]
    kept += [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    assert state_bytes(trained, options, DeepSpeedOptions(), 1, frozen) == sum(t.numel() * t.element_size() for t in kept)


def test_state_bytes_equals_optimizer_memory_and_zero_stage_shares() -> None:
    drafter = build("eagle3", tiny_target())
    options = TrainOptions()
    optimizer = make_optimizer(Objective(drafter, tiny_target(), LossOptions()), options)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = list(drafter.parameters()) + [p.grad for p in drafter.parameters()]
    kept += [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    real = sum(t.numel() * t.element_size() for t in kept)
    assert state_bytes(trainable(drafter), options, DeepSpeedOptions(), 1) == real
    sharded = [state_bytes(1000, options, DeepSpeedOptions(zero_stage=stage), 4) for stage in range(4)]
    assert sharded == [16000, 8000 + 3000, 4000 + 1000 + 3000, 1000 + 1000 + 3000]
    narrow = replace(options, precision="bfloat16", global_batch=64)  # two micro-batches, which are added in float32
    sharded = [state_bytes(1000, narrow, DeepSpeedOptions(zero_stage=stage), 4) for stage in range(4)]
    assert sharded == [12000 + 4000 + 2000, 3000 + 6000 + 2000, 3000 + 1500 + 2000, 3000 + 1500 + 500]
    offloaded = DeepSpeedOptions(zero_stage=3, offload_optimizer=True, offload_parameters=True)
    assert state_bytes(1000, options, offloaded, 4) == 1000


@pytest.mark.parametrize(("kind", "step"), [("int8", 127), ("int4", 7)])
def test_quantised_linear_error_is_within_half_step(kind: str, step: int) -> None:
    linear = torch.nn.Linear(64, 24, bias=True)
    made = QuantisedLinear(linear, {"int8": 8, "int4": 4}[kind], CPU)
    widest = linear.weight.abs().amax(1, keepdim=True) if kind == "int8" else linear.weight.abs().max()
    error = (made._product.widened(torch.float32) - linear.weight).detach()
    assert bool((error.abs() <= widest / step * 0.501).all()) and float(error.abs().max()) > 0
    x = torch.randn(5, 64)
    torch.testing.assert_close(made(x), x @ made._product.widened(torch.float32).T + linear.bias)
    torch.testing.assert_close(made(x)[:1], made(x[:1]))


@pytest.mark.parametrize(("kind", "runner"), [("int8", HFTarget), ("int4", HFTarget), ("fp8", HFTarget), ("fp8", FastTarget)])
def test_quantised_target_speculative_tokens_equal_plain_decoding(kind: str, runner: type[HFTarget]) -> None:
    target = quantised_target(kind, runner)
    assert target.trees
    plain, ours = (
        [r.tokens for r in Decoder(target, drafter, "greedy", Sampling(), frozenset(), 12).run(prompts(3, seed=3), 2).results]
        for drafter in (None, build("medusa", target))
    )
    assert ours == plain
    whole = tiny_target()
    assert target.fingerprint == f"{whole.fingerprint}-{kind}" and whole_fingerprint(target.fingerprint) == whole.fingerprint
    with pytest.raises(UserError, match="copies whole blocks of the target"):
        build("draft_model", target)


def test_quantised_target_on_fast_runner_is_refused() -> None:
    with pytest.raises(UserError, match=r"reads whole weights, target\.weights is int8"):
        load_target(TargetOptions(weights="int8", runner="fast"))


def test_load_target_int8_weights_reports_runner_and_parameters() -> None:
    loaded = load_target(TargetOptions(weights="int8"))
    assert (
        loaded.description["weights"] == "int8"
        and loaded.description["runner_reason"] == "its weights are widened for each product"
    )
    assert loaded.description["parameters"] == embedded().description["parameters"]
    assert outline(TargetOptions()).shape == loaded.target.shape


def test_load_target_fp8_weights_run_fast_within_scheme_of_transformers_forward() -> None:
    loaded = load_target(TargetOptions(weights="fp8"))
    target = loaded.target
    assert loaded.description["runner"] == "fast" and loaded.description["runner_reason"] is None
    assert loaded.description["fingerprint"] == f"{embedded().target.fingerprint}-fp8"
    assert rounded_to(target) == torch.float8_e4m3fn and rounded_to(embedded().target) == torch.float32
    blocks = [joint for block in target._chain for joint in block.joints]
    assert all(isinstance(joint.quantised, Fp8Linear) for joint in blocks) and target._head.quantised is None
    assert blocks[0].quantised.code.data_ptr() == blocks[0].parts[0].code.data_ptr(), "the parts are views"
    token_1T = torch.arange(3, 19)[None]
    found = target(token_1T, None, None, torch.arange(16)[None], Taps()).logits_BRV
    whole = embedded().target(token_1T, None, None, torch.arange(16)[None], Taps()).logits_BRV
    torch.testing.assert_close(found, target.model(token_1T).logits, rtol=0.01, atol=0.01 * float(found.abs().max()))
    assert 0.0 < float((found - whole).norm() / whole.norm()) < 0.1


class Alive(TorchDispatchMode):
    """Notes every tensor that is made; `bytes` of those that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.made.append(weakref.ref(tensor.untyped_storage()))
        return out

    @property
    def bytes(self) -> int:
        alive = {id(storage): storage.nbytes() for ref in self.made if (storage := ref()) is not None}
        return sum(alive.values())


def gradients(name: str, target: Any, again: bool) -> tuple[int, list[torch.Tensor]]:
    """(bytes that the drafter's predictions keep alive, [loss, every gradient])."""
    drafter = build(name, target, noise=0.3).train()
    if again:
        drafter.recompute()
    batch = Online(target, drafter.taps).fill(packed_batch())
    torch.manual_seed(0)
    with Alive() as alive:
        predictions = list(drafter.predict(batch))
        kept = alive.bytes
    assert predictions
    torch.manual_seed(0)
    loss, _ = Objective(drafter, target, LossOptions())(batch)
    loss.backward()
    return kept, [loss.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, marks=[] if name in AGAIN else [pytest.mark.slow])
        for name, target in product(NAMES, ("llama", "gpt2"))
        if (name, target) != ("mtp_native", "gpt2")  # which it refuses: no rotary positions
    ],
)
def test_drafter_recompute_keeps_gradients_and_lowers_memory(name: str, target: str) -> None:
    frozen = tiny_target(target)
    drafter = build(name, frozen)
    if not drafter.trained:
        pytest.skip("trains nothing")
    (whole, kept), (least, again) = (gradients(name, frozen, again) for again in (False, True))
    for one, other in zip(kept, again, strict=True):  # the gradients of several uses may be added in another order
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert least < 0.8 * whole
    if (name, target) == ("pard", "gpt2"):  # a mask of all columns for each layer: its page says that no estimate has it
        return
    estimate = kept_bytes(drafter, 64, 2 * drafter.training_positions(48))
    assert 0.3 * whole < estimate < 3 * whole


def test_mtp_native_on_target_without_rotary_positions_is_refused() -> None:
    with pytest.raises(UserError, match="no block with plain attention and rotary positions"):
        build("mtp_native", tiny_target("gpt2"))


@pytest.mark.parametrize("asked", [[0, 1, 2], [0, 2, 1]])
def test_prefetch_started_batch_gives_same_hidden_states(asked: list[int]) -> None:
    """Whether or not the batch that is asked for is the one that was begun."""
    source = Online(tiny_target(), Taps((1, 2)))
    batches = [replace(packed_batch(), token_BT=packed_batch().token_BT.roll(shift)) for shift in range(3)]
    filled: list[TrainBatch] = []
    prefetch = Prefetch(lambda batch: filled.append(batch) or source.fill(batch), CPU)
    for number in asked:
        found = prefetch.fill(batches[number])
        prefetch.start(batches[(number + 1) % 3])
        for key, state in source.fill(batches[number]).hidden.items():
            assert torch.equal(found.hidden[key], state)
    assert len(filled) == (4 if asked == [0, 1, 2] else 6)


def test_make_optimizer_muon_updates_hidden_matrices_and_adamw_rest() -> None:
    target = tiny_target()
    objective = Objective(build("eagle3", target), target, LossOptions())
    named = dict(objective.named_parameters())
    chosen = {name for name, p in named.items() if p in hidden_matrices(objective)}
    assert chosen == {name for name, p in named.items() if p.ndim == 2} - {"drafter.lm_head.weight"}
    options = TrainOptions(optimizer="muon", lr=0.01, weight_decay=0.1)
    twin = {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}
    ours = make_optimizer(objective, options)
    theirs = [
        torch.optim.Muon([twin[n] for n in sorted(chosen)], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twin[n] for n in named if n not in chosen], lr=0.01, betas=options.betas, weight_decay=0.1),
    ]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in named.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            twin[name].grad = parameter.grad.clone()
        for optimizer in (ours, *theirs):
            optimizer.step()
    for name, parameter in named.items():
        assert torch.equal(parameter, twin[name]), name
    assert set(ours.state) == set(named.values())


def test_engine_settings_unsupported_options_are_refused() -> None:
    for train, deepspeed, line in (
        (TrainOptions(betas=(0.9,)), DeepSpeedOptions(), r"train\.betas is \[0\.9\]; give two numbers"),  # type: ignore[arg-type]
        (TrainOptions(), DeepSpeedOptions(offload_optimizer=True), r"offload_optimizer needs ZeRO stage 1, got 0"),
        (TrainOptions(), DeepSpeedOptions(2, offload_parameters=True), r"offload_parameters needs ZeRO stage 3, got 2"),
    ):
        with pytest.raises(UserError, match=line):
            settings(train, deepspeed, 1)


def test_engine_settings_zero_stages_1_and_2_overlap_gradient_reduction() -> None:
    stages = (settings(TrainOptions(), DeepSpeedOptions(zero_stage=stage), 1)["zero_optimization"] for stage in (0, 1, 2))
    assert [zero.get("overlap_comm", False) for zero in stages] == [False, True, True]


class Two(World):
    """The first of two processes that have the same free memory."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


@cache
def heads() -> Any:
    """The configuration of heads on the embedded target."""
    with pytest.MonkeyPatch.context() as patch:
        composing.compose_quickly(patch)
        return composing.compose(["recipe=medusa", "decode.tree_nodes=4"])


def placed(monkeypatch: pytest.MonkeyPatch, free: int, *more: str) -> tuple[placing.Placement, str]:
    """What is chosen for heads on the embedded target over two processes, and the line that says so."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(placing, "free_bytes", lambda device, neighbours: free)
    options: Any = OmegaConf.to_object(OmegaConf.merge(heads(), OmegaConf.from_dotlist(list(more))))
    placing.check_placement(options)
    lines: list[str] = []
    return placing.place(options, Two(0, 2), lines.append), lines[0]


def test_place_chooses_placement_by_free_memory_and_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy, line = placed(monkeypatch, 10**9)
    assert (roomy.placement, roomy.sharing, roomy.shared) == ("replicated", 1, False)
    assert line.startswith("placement: replicated, about ") and line.endswith("of 1.0 GB free in each process")
    blocks, whole = roomy.need.blocks, roomy.need.total("replicated", 2)
    assert blocks == 4 * sum(p.numel() for p in embedded().target.backbone.module.layers.parameters())
    assert placed(monkeypatch, whole - 1)[0].placement == "zero3", "two of its blocks are whole at a time"
    with pytest.raises(UserError, match=r"lower train\.micro_batch"):
        placed(monkeypatch, whole - blocks)
    assert placed(monkeypatch, 10**9, "target.placement=tensor_parallel")[0].sharing == 2


def test_shared_target_unsupported_settings_are_refused(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for more, line in (
        (("target.placement=zero3", "target.tensor_parallel=2"), "leave one out"),
        (("target.tensor_parallel=3",), "this machine runs 2 of the processes"),
        (("target.placement=zero3", "target.expert_parallel=2"), "leave one out"),
        (("target.tensor_parallel=2", "target.expert_parallel=2"), "a target is shared in one way; leave one out"),
        (("target.expert_parallel=3",), "the run has 2 processes; set launcher.nproc"),
        (("target.placement=expert_parallel",), "has no routed experts"),
        (("target.placement=zero3", "target.runner=fast"), "needs whole weights"),
        (("target.placement=zero3", "target.weights=int8"), "needs the whole target in every process"),
        (("target.tensor_parallel=2", "target.prefetch=true"), "NCCL may not do safely; set target.prefetch=false, or"),
        (("target.placement=zero3", "decode.tree_nodes=null"), "needs the whole target in one process"),
        (("target.placement=zero3", "drafter.adapter.rank=4"), "an adapter needs the whole target"),
    ):
        with subtests.test(more=more), pytest.raises(UserError, match=line):
            placed(monkeypatch, 10**9, *more)


def test_free_bytes_respects_cgroup_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(estimate, "CGROUP", tmp_path)
    unlimited = estimate.free_bytes(CPU, 1)
    assert unlimited > 10**7
    (tmp_path / "memory.max").write_text("10000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    assert estimate.free_bytes(CPU, 2) == 3000000
    (tmp_path / "memory.max").write_text("max\n")
    assert estimate.free_bytes(CPU, 1) > 10**7


@pytest.mark.parametrize("fits", [True, False])
def test_sharded_target_block_is_gathered_at_once_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, deepspeed_world: World, fits: bool
) -> None:
    shards, gathers = ZeroShards(torch.float32), list[int]()
    with shards.loading():
        model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama"])
    matrices = [p.ds_numel for p in model.model.layers[0].parameters() if len(p.ds_shape) > 1]
    monkeypatch.setattr(sharding, "AHEAD", sum(matrices) if fits else 1)
    target = ShardedTarget(model, shards)
    gather = PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params

    def noted(self: Any, parameters: Any, forward: bool) -> None:
        gathers.append(len(parameters))
        gather(self, parameters, forward)

    monkeypatch.setattr(PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__all_gather_params", noted)
    token_BT = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        target(token_BT, None, None, torch.arange(3)[None], Taps(final=True))
    assert gathers == ([len(matrices)] if fits else [1] * len(matrices)) * target.shape.blocks
    target.free()
