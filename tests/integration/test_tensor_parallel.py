"""A target that two processes share decodes what one process decodes, on the CPU over gloo."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from transformers import LlamaConfig

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.drafters.checkpoint import CheckpointMeta, TargetRecord, save_drafter
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import FINAL, Taps
from drafttrain.runs.options import LauncherOptions, RunOptions
from drafttrain.targets import TargetOptions
from drafttrain.targets.fast import FastTarget
from drafttrain.targets.load import load_target
from drafttrain.targets.parallel import Part, join, leave
from drafttrain.targets.split import SplitTarget, _keep_rows, split_target
from tests import forked
from tests.contract.test_families import NAMES, build
from tests.forked import launch
from tests.helpers import ARCHITECTURES, GATED, chosen, prompts, tiny_model
from tests.recorder import Graph, install
from tests.reports import counted

CPU = torch.device("cpu")
WHOLE = ("draft_model", "pard", "cascade", "uno")  # families built, here, of whole blocks of the target
ODD = LlamaConfig(**{**GATED, "vocab_size": 65}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
CONFIGS = {name: ARCHITECTURES[name] for name in ("llama", "qwen2", "qwen3", "mistral-sliding")} | {"odd": ODD}
CASES = [("llama", name) for name in (None, *NAMES)] + [(model, "eagle3") for model in ("qwen2", "qwen3", "odd")]
SAMPLINGS = {"greedy": Sampling(), "lossless": Sampling(0.8, top_p=0.95, seed=2)}
TOKEN_BN = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(5))
Found = dict[str, Any]


def model_of(name: str) -> Any:
    """Biases start at zero: a split that dropped or doubled them would look right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, name, CONFIGS[name])
        model = tiny_model(name)
    generator = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


@cache
def whole_target(name: str) -> FastTarget:
    return FastTarget(model_of(name))


def plain_pass(target: FastTarget) -> dict[str, Tensor]:
    out = target(TOKEN_BN, None, None, torch.arange(20).expand(3, 20), Taps((0, 2), final=True))
    assert out.logits_BRV is not None
    theirs = target.model(TOKEN_BN).logits  # transformers' own forward over the same slices
    return {"logits": out.logits_BRV, "theirs": theirs} | {str(key): out.hidden[key] for key in (0, 2, FINAL)}


def texts(target: FastTarget, drafter: Drafter | None, policy: str, every: int | None) -> list[Any]:
    """Ragged prompts in chunks, a queue behind two slots."""
    controls = Controls(read_every=every)
    decoder = Decoder(target, drafter, policy, SAMPLINGS[policy], frozenset({7}), 10, 6, controls)
    return [(r.tokens, r.verifications, r.offered, r.accepted) for r in decoder.run(prompts(3, seed=3), 2).results]


def drafter_of(name: str | None, target: FastTarget) -> Drafter | None:
    return None if name is None else build(name, target, 0.3)


def every_text(model: str, target: FastTarget, drafter: Drafter | None) -> list[Any]:
    """Greedy and sampled, a round at a time and ahead of the host; for the other models every second of these."""
    ways = [("greedy", None), ("greedy", 1), ("lossless", 1), ("lossless", None)]
    return [texts(target, drafter, *way) for way in (ways if model == "llama" else ways[::2])]


def replayed(target: FastTarget, drafter: Drafter) -> list[Any]:
    """Texts from graphs that a replay repeats operation by operation; the collectives, which gloo runs aside, are awaited."""
    summed, gathered = distributed.all_reduce, distributed.all_gather
    with pytest.MonkeyPatch.context() as patch:
        install(patch.setattr)
        patch.setattr(distributed, "all_reduce", operator("sum", "(Tensor(a!) x) -> ()", "x", summed))
        patch.setattr(distributed, "all_gather", operator("gather", "(Tensor(a!)[] all, Tensor x) -> ()", "all", gathered))
        decoder = Decoder(target, drafter, "greedy", Sampling(), frozenset({7}), 10, controls=Controls(read_every=1))
        patch.setattr(decoder, "captures", True)
        results = decoder.run(prompts(3, seed=3), 2).results
        assert Graph.made
    return [(r.tokens, r.verifications, r.offered, r.accepted) for r in results]


def operator(name: str, schema: str, written: str, run: Callable[..., Any]) -> Callable[..., None]:
    def awaited(*tensors: Any) -> None:
        run(*tensors)

    known = torch.library.custom_op(f"drafttrain_test::{name}", awaited, mutates_args=(written,), schema=schema)
    return lambda *tensors, group: known(*tensors)


def found_here(part: Part, cases: Sequence[tuple[str, str | None]]) -> Found:
    found: Found = {"size": part.size}
    for name in CONFIGS:
        target = split_target(model_of(name), part, CPU)
        with torch.inference_mode():
            found[name] = plain_pass(target)
        found[name] |= {"fingerprint": target.fingerprint, "head_weight": target.head_weight, "trees": target.trees}
        found[name]["parameters"] = sum(p.numel() for p in target.model.parameters())
        found[name]["kv_heads"] = target.new_cache(1, 8).page_view().store.shape[-2]
        for drafter in (d for model, d in cases if model == name):
            origin = FastTarget(model_of(name)) if drafter in WHOLE else target
            found[f"{name} {drafter}"] = every_text(name, target, drafter_of(drafter, origin))
        if name == "llama":
            found["replayed"] = replayed(target, build("eagle3", target, 0.3))
            found["generated"] = target.model.generate(TOKEN_BN, max_new_tokens=8, do_sample=False, pad_token_id=0)
            with pytest.raises(UserError, match="whole blocks of the target"):
                build("draft_model", target)
    return found


def save_what_is_found(options: RunOptions, resolved: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    part = join(2, CPU)
    assert part.share(part.rank) == 0
    torch.save(found_here(part, resolved["cases"]), Path(resolved["folder"]) / f"{part.rank}.pt")
    leave(part)


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    asked = chosen(request, test_tensor_parallel_tokens_and_acceptance_equal_one_process, "model", "name")
    resolved = {"folder": str(folder), "cases": [*{("llama", "eagle3"), *asked}]}
    launch(save_what_is_found, RunOptions(launcher=LauncherOptions(nproc=2)), resolved)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
def test_tensor_parallel_logits_and_states_equal_whole_target_on_all_ranks(
    both: list[Found], subtests: pytest.Subtests
) -> None:
    for name in CONFIGS:
        with subtests.test(name=name), torch.inference_mode():
            for key, tensor in plain_pass(whole_target(name)).items():
                torch.testing.assert_close(both[0][name][key], tensor, rtol=1e-5, atol=5e-5)
                assert torch.equal(both[0][name][key], both[1][name][key]), key


@pytest.mark.slow
def test_tensor_parallel_fingerprint_and_head_weight_equal_whole_target(both: list[Found], subtests: pytest.Subtests) -> None:
    for name in CONFIGS:
        whole = whole_target(name)
        with subtests.test(name=name):
            for found in (f[name] for f in both):
                assert found["fingerprint"] == whole.fingerprint and found["trees"] == whole.trees
                assert torch.equal(found["head_weight"], whole.head_weight)


@pytest.mark.slow
def test_tensor_parallel_rank_holds_half_of_weights_and_kv_heads(both: list[Found], subtests: pytest.Subtests) -> None:
    for name in CONFIGS:
        whole = whole_target(name).model
        shared = sum(p.numel() for n, p in whole.named_parameters() if "proj" in n and "o_proj.bias" not in n)
        shared -= sum(p.numel() for n, p in whole.named_parameters() if n.endswith("down_proj.bias"))
        head = 33 * 32 if name == "odd" else 32 * 32  # of the 65 rows one process has 33, the other 32 and one of zeros
        tied = whole.lm_head.weight is whole.model.embed_tokens.weight
        apart = sum(p.numel() for p in whole.parameters()) - shared - (0 if tied else 64 * 32)
        with subtests.test(name=name):
            for found in (f[name] for f in both):
                assert found["parameters"] == shared // 2 + apart + head
                assert found["kv_heads"] == 1


@pytest.mark.slow
@pytest.mark.sampled(model=("llama", "odd"), name=(None, "eagle3", "draft_model"))
@pytest.mark.parametrize(("model", "name"), CASES)
def test_tensor_parallel_tokens_and_acceptance_equal_one_process(model: str, name: str | None, both: list[Found]) -> None:
    target = FastTarget(model_of(model))
    wanted = every_text(model, target, drafter_of(name, target))
    assert both[0][f"{model} {name}"] == wanted and both[1][f"{model} {name}"] == wanted


@pytest.mark.slow
def test_tensor_parallel_captured_steps_replay_same_texts(both: list[Found]) -> None:
    """Nothing in a round with its collectives asks the device, and nothing of it depends on what the host knew at capture."""
    for found in both:
        assert found["replayed"] == found["llama eagle3"][0]


@pytest.mark.slow
def test_tensor_parallel_transformers_generate_equals_whole_model(both: list[Found]) -> None:
    wanted = model_of("llama").generate(TOKEN_BN, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert all(torch.equal(found["generated"], wanted) for found in both)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Untrained heads of the embedded target."""
    target, family, folder = load_target(TargetOptions()).target, families()["medusa"], tmp_path / "step-00001"
    folder.mkdir()
    torch.manual_seed(0)
    options = family.options(heads=2, paths=[[0], [1], [0, 0]])
    drafter, shape = family.build(options, target), target.shape
    sizes = (shape.vocab_size, shape.hidden_size, shape.blocks)
    record = TargetRecord("embedded", None, None, "float32", *sizes, target.fingerprint)
    save_drafter(folder, drafter.state_dict(), CheckpointMeta("medusa", asdict(options), {}, record, 1))
    return folder


TOGETHER = ("target.tensor_parallel=2", "launcher.nproc=2")


@pytest.mark.slow
def test_tensor_parallel_generate_writes_same_text_once(
    command: Callable[..., int], checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("generate", f"checkpoint={checkpoint}", "prompt=def main(", "decode.max_new_tokens=24")
    assert command(*words) == 0
    out, err = capfd.readouterr()
    assert err.count("24 tokens,") == 1 and out.strip(), err
    said = forked.run([sys.executable, "-m", "drafttrain", *words, *TOGETHER])
    assert said.count("24 tokens,") == 1 and said.count(out.strip()) == 1, said


@pytest.mark.slow
def test_tensor_parallel_measure_report_equals_one_process(checkpoint: Path, tmp_path: Path) -> None:
    settings = ("measure.limit=3", "measure.repeats=1", "measure.timed_prompts=1", "measure.batch_sizes=[1]")
    reports = []
    for name, more in (("one", ()), ("two", TOGETHER)):
        output = tmp_path / name
        run = (f"checkpoint={checkpoint}", f"output={output}", "decode.max_new_tokens=12", *settings, *more)
        forked.run([sys.executable, "-m", "drafttrain", "measure", *run])
        (file,) = output.glob("measure/*/report.json")
        reports.append(json.loads(file.read_text(encoding="utf-8")))
    one, two = (counted(r["checkpoints"][0]) for r in reports)
    assert one == two
    assert reports[1]["checkpoints"][0]["transformers_exact_matches"] == 3
    alone = reports[0]["target"]
    halved = alone["kv_bytes_per_position"] // 2  # each process holds half of the KV heads
    assert reports[1]["target"] == alone | {"tensor_parallel": 2, "kv_bytes_per_position": halved}


def test_tensor_parallel_invalid_options_are_refused_in_one_line(
    command: Callable[..., int], capfd: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments, line in (
        (
            ("generate", "prompt=x", "target.tensor_parallel=2"),
            "number of processes is 1; set launcher.nproc=2, or start them with torchrun",
        ),
        (("generate", "prompt=x", "target.tensor_parallel=0"), "target.tensor_parallel is 0; set it to 1 or more"),
        (("generate", "target.tensor_parallel=2"), "cannot share a terminal or standard input; give prompt=TEXT"),
        (
            ("fit", "target.tensor_parallel=2"),
            "target.tensor_parallel is 2, but this machine runs 1 of the processes; set launcher.nproc",
        ),
    ):
        with subtests.test(arguments=arguments):
            assert command(*arguments) == 2
            err = capfd.readouterr().err
            assert line in err and len(err.splitlines()) == 1


def test_tensor_parallel_fallback_or_named_gpu_is_refused(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: Any, subtests: pytest.Subtests
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for more, line in (
        ("decode.fallback=true", "decode.fallback depends on timings"),
        ("target.device=cuda:1", "set target.device=auto or cpu"),
    ):
        with subtests.test(more=more):
            assert command("generate", "prompt=x", "target.tensor_parallel=2", more) == 2
            assert line in capfd.readouterr().err


def test_load_target_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^target\.tensor_parallel is 4, which does not divide the target's 2 KV heads; set it to 2"
    ):
        load_target(TargetOptions(), Part(0, 4))
    with pytest.raises(UserError, match=r"needs the fast runner: target\.runner is hf"):
        load_target(TargetOptions(runner="hf"), Part(0, 2))


def test_split_linear_rows_concatenate_to_whole_weight(subtests: pytest.Subtests) -> None:
    """Of a number of rows that does not divide the last slices are filled up, the very last may be empty."""
    for rows, size in ((6, 2), (5, 2), (5, 3), (5, 4), (2, 4)):
        whole, each = torch.nn.Linear(3, rows), -(-rows // size)
        slices = [copy.deepcopy(whole).requires_grad_(False) for _ in range(size)]
        for rank, linear in enumerate(slices):
            _keep_rows(linear, Part(rank, size))
        with subtests.test(rows=rows, size=size):
            assert {(linear.out_features, *linear.weight.shape) for linear in slices} == {(each, each, 3)}
            assert torch.equal(torch.cat([linear.weight for linear in slices])[:rows], whole.weight)
            assert torch.equal(torch.cat([linear.bias for linear in slices])[:rows], whole.bias)


def test_tensor_parallel_single_process_is_unsplit() -> None:
    x = torch.ones(2, 3)
    part = join(1, CPU)
    assert part.first and part.sum(x) is x and part.joined(x, 3) is x and part.share("x") == "x"
    assert type(load_target(TargetOptions()).target) is FastTarget and issubclass(SplitTarget, FastTarget)
