"""The passes of a measurement over its cases: plain, speculative, transformers, and the timed races."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.decoder import Decoded, Decoder
from drafttrain.decoding.request import Result
from drafttrain.measure import DecodeOptions, MeasureOptions, distribution
from drafttrain.measure.cases import Case, interleaved_turns, waves
from drafttrain.measure.decoding import decoder_of, guard_of, sampling_of, stop_text_of
from drafttrain.measure.exactness import Match, compare, first_difference
from drafttrain.measure.plan import Budget, plan
from drafttrain.measure.speed import Contender, Race, Repeats, race
from drafttrain.measure.transformers_baseline import generate
from drafttrain.model.drafter import Drafter
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.parallel import Part

Watch = Callable[[str, int, int, int], None]  # stage, waves done, waves in all, tokens this time

BASELINE, REFERENCE = "baseline", "transformers"


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that every pass shares."""

    loaded: LoadedTarget
    decode: DecodeOptions
    options: MeasureOptions
    budget: Budget
    watch: Watch

    @property
    def part(self) -> Part:
        """Processes that share the target decode the same cases in lock step: what the clock decides, the first decides."""
        return self.loaded.target.part

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.decode)

    def decoder(self, drafter: Drafter | None, seed: int = 0, max_new_tokens: int | None = None) -> Decoder:
        """`seed` is added to the configured one."""
        sampling = replace(self.sampling, seed=self.sampling.seed + seed)
        return decoder_of(self.loaded, self.decode, drafter, sampling, max_new_tokens or self.decode.max_new_tokens)

    def decode_all(
        self, stage: str, drafter: Drafter | None, cases: Sequence[Case], passes: int = 1, first: int = 0
    ) -> list[Result]:
        """Results in case order. With `passes` above 1 (how often the cases will be run in all) the budget may end it early.
        first: the first case's number among all."""
        decoder, results, began = self.decoder(drafter), [], monotonic()
        parts = waves(len(cases), self.options.untimed_batch)
        for done, wave in enumerate(parts, start=1):
            results += _run(decoder, [cases[i] for i in wave], first + wave[0]).results
            self.watch(stage, done, len(parts), sum(len(r.tokens) for r in results[-len(wave) :]))
            if passes > 1 and self.part.share(self.budget.enough(len(results), monotonic() - began, passes)):
                break
        self.part.check([r.tokens for r in results])
        return results

    def reference(self, cases: Sequence[Case], plain: Sequence[Result]) -> list[list[int]]:
        """transformers' outputs in case order. A row that differs from plain decoding is generated again by itself:
        left padding, which a batch needs, is not exact in every architecture."""
        outputs, parts = [], waves(len(cases), self.options.untimed_batch)
        for done, wave in enumerate(parts, start=1):
            found = [r.tokens for r in self._generate([cases[i] for i in wave]).results]
            for row, i in enumerate(wave):
                if first_difference(plain[i].tokens, found[row]) is not None:
                    found[row] = self._generate([cases[i]]).results[0].tokens
            outputs += found
            self.watch("transformers", done, len(parts), sum(map(len, found)))
        return outputs

    def matches(self, cases: Sequence[Case], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[Match]:
        target = self.loaded.target
        return compare(target, target.dtype, [c.tokens for c in cases], ours, theirs, target.device)

    def distribution_p(self, drafter: Drafter, case: Case) -> float:
        """p-value of speculative against plain sampling: the same prompt under many independent keys."""
        prompts, length = [case.tokens] * distribution.SAMPLES, distribution.POSITIONS + 1
        rows, pair = self.options.untimed_batch, ((drafter, 1), (None, 2))
        ours, theirs = (self.decoder(d, seed, length).run(prompts, rows).results for d, seed in pair)
        return distribution.p_value([r.tokens for r in ours], [r.tokens for r in theirs])

    def races(self, drafters: dict[str, Drafter], cases: Sequence[Case], others: int = 0) -> dict[int, Race]:
        """Timings by batch size. others: races that follow, each with an equal share of the budget."""
        sizes, timed, order = self.options.batch_sizes, self.options.timed_prompts, interleaved_turns(cases)
        return {
            size: self.race(
                drafters,
                cases,
                size,
                self.budget.left / (len(sizes) + others - i),
                f"batch {size}",
                order[: max(timed, size)],
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
    ) -> Race:
        """Baseline and every checkpoint in turn, over as many prompts as the seconds allow. order: the numbers of those cases
        that may be taken; None: all."""
        decoders = {BASELINE: self.decoder(None)} | {name: self.decoder(d) for name, d in drafters.items()}
        contenders = {name: self._contender(d, cases) for name, d in decoders.items()}
        chosen_cases = range(len(cases)) if order is None else order
        wanted, repeats = [[chosen_cases[i] for i in wave] for wave in waves(len(chosen_cases), size)], self.options.repeats
        once = frozenset({REFERENCE}) if self.options.transformers and self.sampling.greedy and size == 1 else frozenset()
        began = monotonic()
        race(contenders, wanted[:1], 1)  # warms up, is thrown away, and tells what one round takes
        every_time = monotonic() - began
        if once:
            contenders[REFERENCE] = lambda wave: self._generate([cases[i] for i in wave])
            contenders[REFERENCE](wanted[0])
        spent = monotonic() - began
        seconds_per_wave = every_time + (spent - every_time) / repeats
        chosen = self.part.share(plan(seconds_per_wave, max(0.0, seconds - spent), len(wanted), repeats))
        self._say_if_cut(label, chosen.waves, len(wanted), chosen.repeats)
        total = chosen.waves * (chosen.repeats * len(decoders) + len(once))
        done = 0

        def tick(lap: Decoded) -> None:
            nonlocal done
            done += 1
            self.watch(f"timing, {label}", done, total, sum(len(r.tokens) for r in lap.results))

        laps: dict[str, Repeats] = race(contenders, wanted[: chosen.waves], chosen.repeats, once, tick)
        return Race(size, wanted[: chosen.waves], laps)

    def _contender(self, decoder: Decoder, cases: Sequence[Case]) -> Contender:
        return lambda wave: _run(decoder, [cases[i] for i in wave], wave[0])

    def _generate(self, cases: list[Case]) -> Decoded:
        target, guard = self.loaded.target, guard_of(self.loaded, self.decode).without("plain")
        stop_text, guards = stop_text_of(self.loaded, self.decode), [guard.of(case.as_json) for case in cases]
        return generate(target.model, [c.tokens for c in cases], target.stop_ids, self.decode, stop_text, guards)

    def _say_if_cut(self, label: str, count: int, wanted: int, repeats: int) -> None:
        if count < wanted or repeats < self.options.repeats:
            self.budget.notes.append(
                f"timing at {label} was cut to {count} of {wanted} waves and {repeats} of {self.options.repeats} "
                f"repeats by measure.minutes={self.options.minutes:g}"
            )


def _run(decoder: Decoder, cases: Sequence[Case], first: int) -> Decoded:
    """Together; first: the first one's key."""
    return decoder.run([c.tokens for c in cases], len(cases), first, [c.as_json for c in cases])
