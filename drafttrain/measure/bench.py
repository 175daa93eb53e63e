"""The passes over a measurement's cases: plain, speculative, transformers, timed races. Shapes: B prompts, T positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from time import monotonic, perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from drafttrain.core.console import Watch
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.acceptance import POLICIES
from drafttrain.decoding.guards import Guard
from drafttrain.decoding.guards import Watch as GuardWatch
from drafttrain.decoding.request import Result, StopText
from drafttrain.decoding.scheduler import Costs, Decoded, Decoder
from drafttrain.measure import DecodeOptions, MeasureOptions, exactness
from drafttrain.measure.cases import Budget, Case, by_adapter, interleaved_turns, plan, waves, waves_of
from drafttrain.measure.decoding import decoder_of, guard_of, sampling_of, stop_text_of
from drafttrain.measure.exactness import Match, compare, first_difference
from drafttrain.measure.expected import forced_hits
from drafttrain.measure.quality import mean_log_likelihood
from drafttrain.measure.speed import Contender, Race, Repeats, race
from drafttrain.model.drafter import Drafter
from drafttrain.objective.losses import Hits
from drafttrain.targets.hf import HFTarget
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.parallel import Part
from drafttrain.targets.quantised import rounded_to


class _Stopwatch(StoppingCriteria):
    """Records the time of the first token. It never stops generation."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if self.first is None:
            self.first = perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    decode: DecodeOptions,
    stop_text: StopText | None = None,
    guards: Sequence[Guard | None] | None = None,
    inputs: Callable[[Tensor], dict[str, Tensor]] | None = None,
) -> Decoded:
    """transformers' `generate`, greedy: an independent check of the tokens, and a second baseline of speed.

    It has a cache, and all prompts are one left-padded batch. Each output is cut where it ends.

    guards: one per prompt; only guards that stop an output. Times are those of the whole batch, so timings are meaningful for
    a batch of one only. Costs stay empty. inputs: the model's inputs for the prompts; None: their tokens.
    """
    longest = max(len(p) for p in prompts)
    pad = min(stop_ids, default=0)
    token_BT = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    settings = _greedy(stop_ids or {model.config.get_text_config().vocab_size}, pad, decode)
    stopwatch, started = _Stopwatch(), perf_counter()
    with torch.inference_mode(), generation_config_of(model, settings):
        text_BT = model.generate(
            **({"input_ids": token_BT} if inputs is None else inputs(token_BT)),
            attention_mask=mask_BT,
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([stopwatch]),
        )
    rows = zip(prompts, text_BT[:, longest:].tolist(), guards or [None] * len(prompts), strict=True)
    outputs = [_cut(prompt, row, stop_ids, stop_text, guard) for prompt, row, guard in rows]
    ended = perf_counter()
    first = ended if stopwatch.first is None else stopwatch.first
    results = [
        Result(i, len(p), tokens=o, verifications=len(o) - 1, emitted=len(o) - 1, started=started, first=first, ended=ended)
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return Decoded(results, Costs())


@contextmanager
def generation_config_of(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Meanwhile the model has these settings alone. generate() takes what a call leaves open from those of the model's
    generation_config.json, which may suppress tokens, ask for another cache or return something else than tokens.
    """
    original_config, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = original_config


def _greedy(stop_ids: Collection[int], pad: int, decode: DecodeOptions) -> GenerationConfig:
    """Greedy decoding. stop_ids: at least one; a number past the vocabulary stops no text."""
    return GenerationConfig(
        max_new_tokens=decode.max_new_tokens,
        min_new_tokens=decode.min_new_tokens or None,
        do_sample=False,
        repetition_penalty=decode.repetition_penalty,
        sequence_bias=[[[token], float(bias)] for token, bias in (decode.logit_bias or {}).items()] or None,
        use_cache=True,
        eos_token_id=sorted(stop_ids),
        pad_token_id=pad,
    )


def _cut(
    prompt: Sequence[int], tokens: list[int], stop_ids: frozenset[int], stop_text: StopText | None, guard: Guard | None
) -> list[int]:
    end = next((i + 1 for i, t in enumerate(tokens) if t in stop_ids), len(tokens))
    text_end = stop_text.end(prompt, tokens, len(tokens)) if stop_text else None
    output = tokens[: min(end, text_end or end)]
    act = GuardWatch(guard).act(output, len(output)) if guard else None
    return output[: act.kept] if act else output


BASELINE, REFERENCE = "baseline", "transformers"
LEAST_TIMED = 4  # prompts, or batches of them, of a report's speedup: tau differs too much between them for fewer
Item = TypeVar("Item")
Decoders = Mapping[str | None, Decoder]  # by the cases' adapters


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings and target of a measurement; its methods are the passes over the cases."""

    loaded: LoadedTarget
    decode: DecodeOptions
    options: MeasureOptions
    budget: Budget
    watch: Watch

    @property
    def part(self) -> Part:
        """This process's part of a shared target. Its processes decode in lock step, so the first one's clock decides."""
        return self.loaded.target.part

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.decode)

    @property
    def with_transformers(self) -> bool:
        """Whether transformers decodes too: greedily, and it has no presence and no frequency penalty."""
        decode = self.decode
        return self.options.transformers and self.sampling.greedy and not (decode.presence_penalty or decode.frequency_penalty)

    def decoder(
        self, drafter: Drafter | None, seed: int = 0, max_new_tokens: int | None = None, adapter: str | None = None
    ) -> Decoder:
        """A decoder with these settings. seed: added to the configured seed. adapter: of the target."""
        sampling, loaded = replace(self.sampling, seed=self.sampling.seed + seed), self.loaded.of(adapter)
        return decoder_of(loaded, self.decode, drafter, sampling, max_new_tokens or self.decode.max_new_tokens)

    def decoders(self, drafter: Drafter | None, cases: Sequence[Case]) -> Decoders:
        """A decoder for each of the cases' adapters."""
        return {adapter: self.decoder(drafter, adapter=adapter) for adapter in by_adapter(cases)}

    def with_targets(self, cases: Sequence[Case], give: Callable[[HFTarget, list[int]], Sequence[Item]]) -> list[Item]:
        """An item for each case, in case order. give: the items of the cases with these numbers, which share this target."""
        items: dict[int, Item] = {}
        for adapter, numbers in by_adapter(cases).items():
            items |= zip(numbers, give(self.loaded.of(adapter).target, numbers), strict=True)
        return [items[number] for number in range(len(cases))]

    def decode_all(
        self, stage: str, drafter: Drafter | None, cases: Sequence[Case], passes: int = 1, first: int = 0
    ) -> list[Result]:
        """Decode the cases; results are in case order.

        passes: how many such passes the measurement needs; above 1, the budget may end this pass early.
        first: number of the first case, which seeds its noise.
        """
        decoders, results, start_time = self.decoders(drafter, cases), [], monotonic()
        batches = waves(len(cases), self.options.untimed_batch)
        for waves_done, wave in enumerate(batches, start=1):
            results += _run(decoders, [cases[i] for i in wave], first + wave[0]).results
            self.watch(stage, waves_done, len(batches), sum(len(r.tokens) for r in results[-len(wave) :]))
            if passes > 1 and self.part.share(self.budget.enough(len(results), monotonic() - start_time, passes)):
                break
        self.part.check([r.tokens for r in results])
        return results

    def reference(self, cases: Sequence[Case], plain: Sequence[Result]) -> list[list[int]]:
        """transformers' outputs, in case order.

        A row that differs from plain decoding is generated again alone: the left padding of a batch is not exact in every
        architecture.
        """
        outputs, batches = dict[int, list[int]](), waves_of(cases, range(len(cases)), self.options.untimed_batch)
        for waves_done, wave in enumerate(batches, start=1):
            generated = [r.tokens for r in self._generate([cases[i] for i in wave]).results]
            for row, i in enumerate(wave):
                if first_difference(plain[i].tokens, generated[row]) is not None:
                    generated[row] = self._generate([cases[i]]).results[0].tokens
            outputs |= zip(wave, generated, strict=True)
            self.watch("transformers", waves_done, len(batches), sum(map(len, generated)))
        return [outputs[number] for number in range(len(cases))]

    def matches(self, cases: Sequence[Case], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[Match]:
        def compared(target: HFTarget, numbers: list[int]) -> list[Match]:
            prompts = [cases[i].tokens for i in numbers]
            pairs = [ours[i] for i in numbers], [theirs[i] for i in numbers]
            return compare(target, rounded_to(target), prompts, *pairs, target.device, self.sampling)

        return self.with_targets(cases, compared)

    def agreement_predicts(self, drafter: Drafter) -> bool:
        """Whether teacher-forced agreement predicts acceptance under this policy, with every step drafting. That of samples is
        by the target's own distribution, that of choices by the tokens of the outputs.
        """
        sampled = not self.sampling.greedy and drafter.samples
        predicts = POLICIES[self.decode.policy].agreement_is_acceptance(sampled) and not self.decode.fallback
        steady = drafter.trained and not drafter.proposal.more_nodes
        return steady and predicts and not (sampled and self.sampling.penalised)

    def hits(self, drafter: Drafter, cases: Sequence[Case], plain: Sequence[Result]) -> list[Hits]:
        """Teacher-forced hits on the plain outputs, in case order."""

        def forced(target: HFTarget, numbers: list[int]) -> list[Hits]:
            prompts, outputs = [cases[i].tokens for i in numbers], [plain[i].tokens for i in numbers]
            return forced_hits(target, drafter, prompts, outputs, target.device)

        return self.with_targets(cases, forced)

    def log_likelihood(self, cases: Sequence[Case], results: Sequence[Result]) -> float | None:
        """Nats per output token under each case's target; None without tokens."""
        total, count = 0.0, 0
        for adapter, numbers in by_adapter(cases).items():
            target, outputs = self.loaded.of(adapter).target, [results[i].tokens for i in numbers]
            mean = mean_log_likelihood(target, [cases[i].tokens for i in numbers], outputs, target.device)
            total, count = total + (mean or 0.0) * sum(map(len, outputs)), count + sum(map(len, outputs))
        return total / count if count else None

    def distribution_p(self, drafter: Drafter, case: Case) -> float:
        """p-value of speculative against plain sampling, from one prompt under many independent seeds."""
        prompts, length = [case.tokens] * exactness.SAMPLES, exactness.POSITIONS + 1
        rows, pair = self.options.untimed_batch, ((drafter, 1), (None, 2))
        ours, theirs = (self.decoder(d, seed, length, case.adapter).run(prompts, rows).results for d, seed in pair)
        return exactness.p_value([r.tokens for r in ours], [r.tokens for r in theirs])

    def races(self, drafters: dict[str, Drafter], cases: Sequence[Case], others: int = 0) -> dict[int, Race]:
        """Timings by batch size. others: how many further races will share the remaining budget."""
        sizes, timed, order = self.options.batch_sizes, self.options.timed_prompts, interleaved_turns(cases)
        return {
            size: self.race(
                drafters,
                cases,
                size,
                self.budget.left / (len(sizes) + others - i),
                f"batch {size}",
                order[: max(timed, size)],
                LEAST_TIMED,
            )
            for i, size in enumerate(sizes)
        }

    def race(
        self,
        drafters: dict[str, Drafter],
        cases: Sequence[Case],
        size: int,
        seconds: float,
        label: str,
        order: Sequence[int] | None = None,
        least: int = 1,
    ) -> Race:
        """Time the baseline and every checkpoint, alternating, over as many prompts as fit into `seconds`.

        order: numbers of the cases that may be timed; None: all. least: as for `plan`.
        The drafters propose as tuning chose for this size.
        """
        for drafter in drafters.values():
            drafter.use_batch_size(size)
        contenders = {name: self.contender(d, cases) for name, d in {BASELINE: None, **drafters}.items()}
        numbers = range(len(cases)) if order is None else order
        cases_by_wave, repeats = waves_of(cases, numbers, size), self.options.repeats
        first_repeat_only: dict[str, Contender] = {}
        if self.with_transformers and size == 1:
            first_repeat_only[REFERENCE] = lambda wave: self._generate([cases[i] for i in wave])
        if len(numbers) < size:
            self.budget.notes.append(
                f"timing at {label}: {len(numbers)} of {size} requests at a time, because there are no more prompts"
            )
        laps = self.timed(f"timing, {label}", contenders, cases_by_wave, repeats, seconds, first_repeat_only, least)
        timed_waves, timed_repeats = len(laps[BASELINE][0]), len(laps[BASELINE])
        if timed_waves < len(cases_by_wave) or timed_repeats < repeats:
            self.budget.notes.append(
                f"timing at {label} was cut to {timed_waves} of {len(cases_by_wave)} waves and {timed_repeats} of {repeats} "
                f"repeats by measure.minutes={self.options.minutes:g}"
            )
        return Race(size, cases_by_wave[:timed_waves], laps)

    def timed(
        self,
        stage: str,
        contenders: dict[str, Contender],
        wanted: list[list[int]],
        repeats: int,
        seconds: float,
        once: dict[str, Contender],
        least: int = 1,
    ) -> dict[str, Repeats]:
        """Race the contenders over as many of the wanted waves and repeats as fit into `seconds`.

        once: contenders that run in the first repeat only. least: as for `plan`.
        """
        start_time = monotonic()
        race(contenders, wanted[:1], 1)  # warms up and shows what a wave takes; the timings are discarded
        regular_seconds = monotonic() - start_time
        for contender in once.values():
            contender(wanted[0])
        warmup_seconds = monotonic() - start_time
        seconds_per_wave = regular_seconds + (warmup_seconds - regular_seconds) / repeats
        left = max(0.0, seconds - warmup_seconds)
        timing_plan = self.part.share(plan(seconds_per_wave, left, len(wanted), repeats, least))
        laps_done, total = 0, timing_plan.waves * (timing_plan.repeats * len(contenders) + len(once))

        def tick(lap: Decoded) -> None:
            nonlocal laps_done
            laps_done += 1
            self.watch(stage, laps_done, total, sum(len(r.tokens) for r in lap.results))

        return race(contenders | once, wanted[: timing_plan.waves], timing_plan.repeats, frozenset(once), tick)

    def contender(self, drafter: Drafter | None, cases: Sequence[Case]) -> Contender:
        """Decodes waves of these cases, by decoders of its own."""
        decoders = self.decoders(drafter, cases)
        return lambda wave: _run(decoders, [cases[i] for i in wave], wave[0])

    def _generate(self, cases: list[Case]) -> Decoded:
        """The cases share an adapter."""
        target, guard = self.loaded.of(cases[0].adapter).target, guard_of(self.loaded, self.decode).without("plain")
        stop_text, guards = stop_text_of(self.loaded, self.decode), [guard.of(case.as_json) for case in cases]
        prompts = [c.tokens for c in cases]
        return generate(target.model, prompts, target.stop_ids, self.decode, stop_text, guards, target.generation_inputs)


def _run(decoders: Decoders, cases: Sequence[Case], first: int) -> Decoded:
    """Decode these cases as one batch, or as one for each of their adapters. first: request number of the first case."""
    results, costs = dict[int, Result](), list[Costs]()
    for adapter, numbers in by_adapter(cases).items():
        chosen = [cases[i] for i in numbers]
        decoded = decoders[adapter].run(
            [c.tokens for c in chosen], len(chosen), first + numbers[0], [c.as_json for c in chosen]
        )
        results |= zip(numbers, decoded.results, strict=True)
        costs.append(decoded.costs)
    total = costs[0] if len(costs) == 1 else Costs(*map(sum, zip(*map(astuple, costs), strict=True)))
    return Decoded([results[number] for number in range(len(cases))], total)
