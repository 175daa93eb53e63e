"""Exactness step by step: plain decoding equals transformers', captured steps equal eager ones, drafts change no text.

The models are random ones, the embedded one, and a tiny one of every architecture. In float32 texts are equal. In bfloat16
greedy texts may differ where the target's two best choices are within rounding (`measure.exactness`).
Sampled texts may differ in float32 where the deciding number is next to its boundary. `draws.py` judges both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from benchmarks.gpu import sources
from benchmarks.gpu.draws import NEAR, Parting, Watch, explains, redrawn
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import LADDER, random_model
from benchmarks.gpu.results import Job, RedError, SkipError
from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.decoding.scheduler import Decoded, Decoder
from drafttrain.decoding.settings import Controls
from drafttrain.drafters import families
from drafttrain.drafters.options import TREES, TreeOptions
from drafttrain.measure import DecodeOptions
from drafttrain.measure.bench import generate
from drafttrain.measure.exactness import Match, compare
from drafttrain.model.drafter import Drafter
from drafttrain.targets import TargetOptions
from drafttrain.targets.experts import find_experts
from drafttrain.targets.fast import FastTarget, why_not
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import load_target
from tests.architectures import ARCHITECTURES, model_of
from tests.tiny import built

EMBEDDED = "embedded"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLED = {name: 0.8 for name, policy in POLICIES.items() if policy.above_zero}  # policies and the temperatures they run at
WATCHED = ("lossless", "typical", "threshold")  # policies that judge drafts by chance or by a threshold
REHEARSED = 3  # drafters, plain decoding included, with more than greedy texts in a rehearsal
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
BATCH = 4
SHAKEN = 0.3  # perturbation relative to a weight's spread, so that no weight has a special value
PLAIN = "plain"
EXACT = tuple(name for name, row in ARCHITECTURES.items() if row.refused is None)
REHEARSED_ARCHITECTURES = ("GPT-NeoX", "Bamba")
WITH = (
    PLAIN,
    "medusa",
    "draft_model",
    "mtp_native",
)  # drafters on each architecture; the other families are on Llama and Qwen3
SCORES = ("Gemma-2", "gpt-oss", "DeepSeek-V3")  # other scores than Llama's: a soft cap, sinks, latents
WORDS = 60  # of the architectures' vocabularies: the tokens after these stand for images


@dataclass(frozen=True, slots=True)
class Rung:
    """One drafter, or none, with one policy, on one target."""

    model: str
    dtype: str
    drafter: str
    policy: str

    @property
    def name(self) -> str:
        return f"texts {self.model} {self.dtype} {self.drafter} {self.policy}"

    @property
    def sampling(self) -> Sampling:
        return Sampling(SAMPLED.get(self.policy, 0.0), seed=4)


@lru_cache(maxsize=1)
def target_of(model: str, dtype: str, machine: Machine) -> HFTarget:
    """The target. The last one is kept, since checks come target by target."""
    if model == EMBEDDED:
        return load_target(TargetOptions(dtype=dtype, device=str(machine.device))).target
    if model in ARCHITECTURES:
        loaded = model_of(model).to(machine.device, DTYPES[dtype])
        return (HFTarget if why_not(loaded) else FastTarget)(loaded)
    target = FastTarget(random_model(LADDER[model], DTYPES[dtype], machine.device, spread=1.2))
    if not target.trees:
        raise RedError("a node of a tree has other logits than its path alone")
    return target


def variants() -> dict[str, Callable[[HFTarget], Drafter]]:
    """Every family, and again with each kind of tree that it supports."""
    return {
        f"{name}{'-' if shape else ''}{shape}": partial(_built, name, settings)
        for name, family in families().items()
        for shape, settings in {"": own(family.options), **shapes(family.options)}.items()
    }


def own(options: type) -> dict[str, Any]:
    """A family's own kind of tree, by name: the small shape of a family may have another one."""
    return {"tree": options().tree} if issubclass(options, TreeOptions) else {}


def shapes(options: type) -> dict[str, dict[str, Any]]:
    """Options of a family's trees other than its default, by kind. A static tree has several paths at once."""
    if not issubclass(options, TreeOptions):
        return {}
    found: dict[str, dict[str, Any]] = {kind: {"tree": kind} for kind in TREES if kind != options().tree}
    return found | {"static": {"tree": "static", "paths": TREE}}


def _built(name: str, settings: dict[str, Any], target: HFTarget) -> Drafter:
    try:
        drafter = built(name, target, **settings)
    except UserError as error:
        raise SkipError(f"not for this target: {error}") from error
    drafter = drafter.to(target.device).eval().requires_grad_(False)
    draw = torch.Generator(target.device).manual_seed(1)
    for weight in drafter.parameters():
        noise = torch.randn(weight.shape, device=target.device, generator=draw).to(weight.dtype)
        weight.data.add_(SHAKEN * noise * weight.data.std().nan_to_num(0.0).clamp_min(0.02))
    return drafter


def asked(target: HFTarget, machine: Machine) -> tuple[list[list[int]], int]:
    """(prompts of uneven lengths, new tokens)."""
    count, longest, new = (3, 12, 10) if machine.rehearsal else (6, 60, 48)
    draw, vocab = torch.Generator().manual_seed(3), target.shape.vocab_size
    vocab = WORDS if vocab == WORDS + 4 else vocab
    lengths = torch.randint(1, longest, (count,), generator=draw).tolist()
    return [torch.randint(6, vocab, (n,), generator=draw).tolist() for n in lengths], new


def decoded(rung: Rung, drafter: Drafter | None, captured: bool, machine: Machine, watch: Watch | None = None) -> Decoded:
    """captured: as graphs, where the drafter supports it; in a rehearsal ahead of the host, without graphs. watch: of the
    policy.
    """
    target = target_of(rung.model, rung.dtype, machine)
    prompts, new = asked(target, machine)
    captured = captured and target.captured and (drafter is None or drafter.captured)
    controls = Controls(read_every=2 if captured else None)
    decoder = Decoder(target, drafter, rung.policy, rung.sampling, target.stop_ids, new, controls=controls)
    if not captured:
        decoder.captures, decoder.read_every = False, None
    if watch is not None:
        decoder.policy = watch.over(decoder.policy)
    found = decoder.run(prompts, BATCH)
    if captured and not machine.rehearsal and not found.costs.captures:
        raise RedError("no graph was captured")
    return found


def check(rung: Rung, machine: Machine) -> dict[str, Any]:
    """Run one check. Raises RedError."""
    target = target_of(rung.model, rung.dtype, machine)
    expected = rung.model not in ARCHITECTURES or ARCHITECTURES[rung.model].captured
    # whether experts wait depends on the GPU and the dtype
    if not target.captured and expected and not find_experts(target.model):
        raise RedError(f"no graph holds the target's steps: {target.capture_reason}")
    drafter = None if rung.drafter == PLAIN else variants()[rung.drafter](target)
    # where drafts are accepted by chance, the policy's own decisions show whether rounding explains a difference
    watch = Watch() if drafter is not None and rung.policy in WATCHED else None
    captured, eager = texts(decoded(rung, drafter, True, machine)), texts(decoded(rung, drafter, False, machine, watch))
    near = same("captured steps and eager ones", rung, captured, eager, machine, watch)
    if drafter is not None and rung.policy in ("greedy", "coupled"):
        near += same("drafts and plain decoding", rung, captured, plain_texts(replace(rung, drafter=PLAIN), machine), machine)
    if drafter is None and rung.policy == "greedy":
        near += same("plain decoding and transformers", rung, captured, transformers(target, machine), machine)
    found: dict[str, Any] = {"near_ties": near.ties, "near_draws": near.draws}
    return found if target.captured else found | {"not_captured": target.capture_reason}


@lru_cache(maxsize=8)
def plain_texts(rung: Rung, machine: Machine) -> list[list[int]]:
    """Texts of eager steps, the same for all drafters."""
    return texts(decoded(rung, None, False, machine))


def texts(found: Decoded) -> list[list[int]]:
    return [result.tokens for result in found.results]


def transformers(target: HFTarget, machine: Machine) -> list[list[int]]:
    prompts, new = asked(target, machine)
    options = DecodeOptions(max_new_tokens=new)
    return [generate(target.model, [prompt], target.stop_ids, options).results[0].tokens for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Near:
    """Sequences whose difference rounding explains."""

    ties: int = 0  # at a greedy choice
    draws: int = 0  # at a number next to its boundary

    def __add__(self, other: Near) -> Near:
        return Near(self.ties + other.ties, self.draws + other.draws)


def same(
    what: str, rung: Rung, ours: list[list[int]], theirs: list[list[int]], machine: Machine, watch: Watch | None = None
) -> Near:
    """The number of sequences that differ for a known reason. Raises RedError where one differs without."""
    target, dtype = target_of(rung.model, rung.dtype, machine), DTYPES[rung.dtype]
    prompts, _ = asked(target, machine)
    found = compare(target, dtype, prompts, ours, theirs, machine.device)
    parted = [Parting(i, *texts) for i, texts in enumerate(zip(prompts, ours, theirs, strict=True))]
    left = [text for text, match in zip(parted, found, strict=True) if match is Match.UNEXPLAINED]
    draws = [text for text in left if rung.policy in SAMPLED and drawn(rung, text, target, watch)]
    wrong = [text for text in left if text not in draws]
    if dtype != torch.float32:
        wrong = [text for text in wrong if not explains(target, text.prompt, text.ours, text.theirs)]
    if wrong:
        raise RedError(f"{what}: {len(wrong)} of {len(found)} texts differ")
    return Near(len(found) - found.count(Match.SAME) - len(draws), len(draws))


def drawn(rung: Rung, text: Parting, target: HFTarget, watch: Watch | None) -> bool:
    """Whether the deciding number was next to its boundary."""
    return (redrawn(target, rung.sampling, text) if watch is None else watch.of(text)) <= NEAR


def rungs(machine: Machine) -> list[Rung]:
    models = [next(iter(LADDER))] if machine.rehearsal else [*LADDER, EMBEDDED]
    drafters, found = [PLAIN, *variants()], []
    for model in models:
        for dtype in DTYPES:
            # with rounding in the distributions only greedy choices can be judged; one random model is enough for the policies
            sampled = list(SAMPLED) if dtype == "float32" and model == models[0] else []
            for policy in ("greedy", *sampled):
                few = machine.rehearsal and (policy, dtype) != ("greedy", "float32")
                found += [Rung(model, dtype, drafter, policy) for drafter in drafters[: REHEARSED if few else None]]
    every = REHEARSED_ARCHITECTURES if machine.rehearsal else EXACT
    return found + [Rung(model, dtype, drafter, "greedy") for model in every for dtype in DTYPES for drafter in WITH]


def early(machine: Machine) -> list[Rung]:
    """About forty checks that come first: plain decoding with every policy and in every model, each family once, with the
    policies in turn, and each kind of tree once: a family's own kind with the family.
    """
    there, model = set(rungs(machine)), next(iter(LADDER))
    policies = ["greedy", *SAMPLED]
    found = [Rung(model, "float32", PLAIN, policy) for policy in policies]
    found += [Rung(other, "float32", PLAIN, "greedy") for other in SCORES]
    found += [Rung(other, "bfloat16", PLAIN, "greedy") for other in [*LADDER, EMBEDDED]]
    found += [Rung(model, "float32", name, policies[i % len(policies)]) for i, name in enumerate(families())]
    own = {getattr(family.options(), "tree", "") for family in families().values()}
    trees = {name.partition("-")[2]: name for name in variants()}  # of each kind, one drafter
    found += [Rung(model, "float32", name, "greedy") for kind, name in trees.items() if kind and kind not in own]
    greedy = [replace(rung, policy="greedy") for rung in found]  # in a rehearsal not every policy is there
    return list(
        dict.fromkeys(rung for rung in (r if r in there else g for r, g in zip(found, greedy, strict=True)) if rung in there)
    )


def simplest(drafter: str) -> str:
    """The name of a drafter's first check."""
    return Rung(next(iter(LADDER)), "float32", drafter, "greedy").name


def job(rung: Rung, machine: Machine) -> Job:
    family = rung.drafter.partition("-")[0]
    modules = sources.DECODER if rung.drafter == PLAIN else (*sources.DECODER, *sources.of_family(family))
    return Job(rung.name, f"texts {rung.dtype}", modules, partial(check, rung, machine))


def jobs(machine: Machine) -> list[Job]:
    return [job(rung, machine) for rung in rungs(machine)]
