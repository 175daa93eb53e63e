"""Measure serving engines against our decoder: the same prompts with and without speculation in turn, and the acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from drafttrain.core.console import Watch
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Costs, Decoded
from drafttrain.engines.answers import TimedEngine, WaveOutputs
from drafttrain.measure.acceptance import Interval, chain_alphas
from drafttrain.measure.bench import BASELINE
from drafttrain.measure.cases import plan, waves
from drafttrain.measure.entry import speed_keys
from drafttrain.measure.expected import FLAGGED_GAP, gap
from drafttrain.measure.flags import FEW
from drafttrain.measure.speed import Race, race

Keys = dict[str, Any]

SPECULATIVE = "speculative"
MIXED = 0.25  # drafts per verification that the ends of texts may leave out
TIMES = ("tokens_per_s", "ttft_ms", "tpot_ms")
SPEEDS = ("speedup", "speedup_min", "speedup_max", *TIMES, *(f"baseline_{name}" for name in TIMES))
COUNTS = ("verifications", "drafted", "accepted")
POSITIONS = ("accepted_by_position", "alpha_by_position", "alpha_by_position_here")
ACCEPTED = (*COUNTS, *POSITIONS, "tau", "tau_here", "tau_gap", "tau_gap_flagged", "exact_matches")
FIGURES = (*SPEEDS, *ACCEPTED, "same_as_here", "prompts", "repeats", "batch_size", "draft_length")


@dataclass(frozen=True, slots=True)
class OwnDecoding:
    """Our own decoder's greedy chains for the same prompts."""

    texts: list[list[int]]  # token ids
    letters: list[str]  # the same texts, decoded
    emitted: list[int]  # tokens from decode steps, by prompt
    accepted: list[list[int]]  # accepted drafts of each decode step, by prompt

    def tau(self, chosen: Sequence[int]) -> float | None:
        """Tokens per decode step of these prompts; None without steps."""
        steps = sum(len(self.accepted[i]) for i in chosen)
        return sum(self.emitted[i] for i in chosen) / steps if steps else None

    def by_position(self, chosen: Sequence[int], length: int) -> list[Interval]:
        """Acceptance by position of these prompts, in chains of this length."""
        steps = [accepted for i in chosen for accepted in self.accepted[i]]
        return chain_alphas(len(steps), [sum(accepted > position for accepted in steps) for position in range(length)])


Decode = Callable[..., OwnDecoding]  # by how the engine begins, and by the chain's length where it is not that of the terms


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """The settings of a timing."""

    label: str
    prompts: int  # number of prompts
    sizes: Sequence[int]  # batch sizes
    repeats: int
    seconds: float  # for all batch sizes together
    draft_length: int
    stop_ids: frozenset[int]
    watch: Watch


@dataclass
class TimedBatchSize:
    """The runs of one batch size."""

    race: Race
    repeats: int
    answers: dict[str, list[WaveOutputs]] = field(default_factory=dict)  # by side, in the order [repeat][wave]

    @property
    def chosen(self) -> list[int]:
        """The numbers of the prompts that were timed."""
        return [i for wave in self.race.waves for i in wave]

    def once(self, side: str) -> list[Any]:
        """The outputs of the first repeat, in the order of `chosen`."""
        return [text.output for answer in self.answers[side][: len(self.race.waves)] for text in answer.texts]


def measured(sides: Mapping[str, TimedEngine], here: Decode, terms: TimingOptions) -> Keys:
    """The figures of one engine (docs/report-schema.md). sides: `speculative`, `baseline`, or one of them. here: our own
    decoding, by how the engine begins (`drafttrain.engines.answers.EngineInfo`). Raises UserError where the engine fails.
    """
    notes = list(dict.fromkeys(note for side in sides.values() for note in side.about.notes))
    seconds_per_size = terms.seconds / len(terms.sizes)
    timed = {size: _contest(sides, size, seconds_per_size, terms, notes) for size in terms.sizes}
    slices = [{"by": "batch_size", "value": size} | _figures(sides, batch, here, terms) for size, batch in timed.items()]
    for size, batch in timed.items():
        notes += [f"{terms.label}, batch {size}: {line}" for line in _missing(batch)]
    first_timed = next(iter(timed.values()))
    keys = slices[0] | {"batch_size": terms.sizes[0], "draft_length": terms.draft_length}
    keys |= {"versions": next(iter(sides.values())).about.versions, "slices": slices, "notes": notes}
    keys["same_as_here"] = _same_as_here(sides, first_timed, here, terms)
    keys["flags"] = flags(keys, terms)
    return {name: value for name, value in keys.items() if name not in ("by", "value")}


def flags(keys: Keys, terms: TimingOptions) -> list[str]:
    """Warnings, one sentence each."""
    messages, prompts = [], keys["prompts"]
    if keys["tau_gap_flagged"]:
        side = "above" if keys["tau_gap"] > 0 else "below"
        tau = f"{terms.label} counts tau {keys['tau']:.2f}, {abs(keys['tau_gap']):.0%} {side} our {keys['tau_here']:.2f}"
        messages.append(f"{tau} of the same chains: {'; '.join(_causes(keys, terms))}")
    if keys["exact_matches"] is not None and keys["exact_matches"] < prompts:
        count = prompts - keys["exact_matches"]
        messages.append(f"{count} of {prompts} texts of {terms.label} with speculation are not those of its plain decoding")
    return messages


def _causes(keys: Keys, terms: TimingOptions) -> list[str]:
    """Possible causes of a different tau, according to the figures."""
    causes, same, prompts = [], keys["same_as_here"], keys["prompts"]
    if keys["verifications"] < FEW:
        causes.append(f"{keys['verifications']} verifications are few")
    if same is not None and same < prompts:
        causes.append(
            f"{prompts - same} of its {prompts} plain texts are not ours, so dtype, weights, template or stop tokens may differ"
        )
    if keys["drafted"] is not None and abs(drafts := keys["drafted"] / keys["verifications"] - terms.draft_length) > 0.25:
        causes.append(
            f"it drafted {drafts + terms.draft_length:.1f} tokens per verification, not {terms.draft_length}: drafts may adapt "
            "or end early, or the server has another draft length"
        )
    return causes or [
        "it may read the drafter differently; drafttrain verify compares the accepted drafts of every text with ours"
    ]


def _contest(
    sides: Mapping[str, TimedEngine], size: int, seconds: float, terms: TimingOptions, notes: list[str]
) -> TimedBatchSize:
    """Time plain and speculative decoding in turn, over as many prompts as fit. Each side first runs the first wave twice."""
    answers: dict[str, list[WaveOutputs]] = {name: [] for name in sides}

    def contender(name: str) -> Callable[[list[int]], Decoded]:
        def lap(wave: list[int]) -> Decoded:
            answers[name].append(sides[name].answer(wave))
            return _decoded(answers[name][-1])

        return lap

    contenders, all_waves = {name: contender(name) for name in sides}, waves(terms.prompts, size)
    race(contenders, all_waves[:1], 1)
    start_time = monotonic()
    race(contenders, all_waves[:1], 1)
    budget = plan(monotonic() - start_time, seconds, len(all_waves), terms.repeats)
    if budget.waves < len(all_waves) or budget.repeats < terms.repeats:
        notes.append(
            f"{terms.label}, batch {size}: {budget.waves} of {len(all_waves)} waves and {budget.repeats} of {terms.repeats} "
            "repeats fitted into measure.minutes"
        )
    for outputs in answers.values():
        outputs.clear()
    completed, total = 0, budget.waves * budget.repeats * len(sides)

    def tick(lap: Decoded) -> None:
        nonlocal completed
        completed += 1
        terms.watch(f"{terms.label}, batch {size}", completed, total, sum(len(r.tokens) for r in lap.results))

    laps = race(contenders, all_waves[: budget.waves], budget.repeats, tick=tick)
    return TimedBatchSize(Race(size, all_waves[: budget.waves], laps), budget.repeats, answers)


def _decoded(answer: WaveOutputs) -> Decoded:
    """For timing only. Of tokens that arrived together with the first one, only one counts."""
    results = [
        Result(i, 0, [0] * (text.count - text.ahead + 1), started=0.0, first=text.first, ended=text.ended)
        for i, text in enumerate(answer.texts)
    ]
    return Decoded(results, Costs())


def _figures(sides: Mapping[str, TimedEngine], timed: TimedBatchSize, decode: Decode, terms: TimingOptions) -> Keys:
    keys = {name: value for name, value in speed_keys(timed.race, SPECULATIVE).items() if name in SPEEDS}
    keys |= {"prompts": len(timed.chosen), "repeats": timed.repeats, "exact_matches": None}
    if len(sides) == 2:
        pairs = zip(timed.once(SPECULATIVE), timed.once(BASELINE), strict=True)
        keys["exact_matches"] = sum(ours == plain for ours, plain in pairs)
    keys |= dict.fromkeys((*COUNTS, *POSITIONS, "tau", "tau_here", "tau_gap"))
    if SPECULATIVE in sides:
        keys |= _acceptance(sides[SPECULATIVE].about.begins, timed, decode, terms)
    tau_gap = keys["tau_gap"]
    return keys | {"tau_gap_flagged": tau_gap is not None and abs(tau_gap) > FLAGGED_GAP}


def _acceptance(begins: str, timed: TimedBatchSize, decode: Decode, terms: TimingOptions) -> Keys:
    """tau and acceptance by the engine's own counts, over all repeats; null where it does not count them."""
    answers, keys = timed.answers[SPECULATIVE], Keys()
    for name in COUNTS:
        counts = [getattr(answer, name) for answer in answers]
        keys[name] = None if any(count is None for count in counts) else sum(counts)
    keys |= _by_position(answers, keys["verifications"])
    prefilled = 0 if begins == "drafted" else 1
    emitted = sum(max(0, text.count - prefilled) for answer in answers for text in answer.texts)
    keys["tau"] = emitted / keys["verifications"] if keys["verifications"] else None
    if (length := _drafted_length(keys, timed.race.batch_size, terms)) is not None:
        ours = decode(begins) if length == terms.draft_length else decode(begins, length)
        keys["tau_here"] = ours.tau(timed.chosen)
        keys["alpha_by_position_here"] = [list(alpha) for alpha in ours.by_position(timed.chosen, length)]
    return keys | {"tau_gap": gap(keys["tau"], keys.get("tau_here"))}


def _drafted_length(keys: Keys, size: int, terms: TimingOptions) -> int | None:
    """The length of our chains to compare with. In larger batches an engine may draft less; None where it mixed lengths, as it
    does when a batch shrinks because requests have ended.
    """
    if size == terms.sizes[0] or not keys["drafted"] or not keys["verifications"]:
        return terms.draft_length
    mean = keys["drafted"] / keys["verifications"]
    if abs(mean - terms.draft_length) <= MIXED:
        return terms.draft_length
    return max(1, round(mean)) if abs(mean - round(mean)) <= MIXED else None


def _by_position(answers: Sequence[WaveOutputs], steps: int | None) -> Keys:
    """Accepted drafts by position, and acceptance given the earlier positions; null where the engine does not count them."""
    counts = [answer.accepted_by_position for answer in answers if answer.accepted_by_position is not None]
    if steps is None or len(counts) < len(answers):
        return {"accepted_by_position": None, "alpha_by_position": None}
    longest = max(map(len, counts), default=0)
    accepted = [sum(position_counts[i] for position_counts in counts if i < len(position_counts)) for i in range(longest)]
    return {"accepted_by_position": accepted, "alpha_by_position": [list(alpha) for alpha in chain_alphas(steps, accepted)]}


def _missing(timed: TimedBatchSize) -> list[str]:
    """The counts that the engine did not give, and why, with the number of answers that lack them."""
    answers = timed.answers.get(SPECULATIVE, [])
    lines = Counter(note for answer in answers for note in answer.notes)
    return [line if n == len(answers) else f"{line} ({n} of {len(answers)} waves)" for line, n in lines.items()]


def _same_as_here(sides: Mapping[str, TimedEngine], timed: TimedBatchSize, decode: Decode, terms: TimingOptions) -> int:
    """The number of plain outputs (or else speculative ones) that equal ours. A stop token at their end may be left out."""
    name = BASELINE if BASELINE in sides else SPECULATIVE
    decoding, outputs = decode(sides[name].about.begins), timed.once(name)
    if not sides[name].about.ids:
        return sum(text.strip() == decoding.letters[i].strip() for i, text in zip(timed.chosen, outputs, strict=True))
    return sum(
        _bare(text, terms.stop_ids) == _bare(decoding.texts[i], terms.stop_ids)
        for i, text in zip(timed.chosen, outputs, strict=True)
    )


def _bare(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    return [*tokens[:-1], *(token for token in tokens[-1:] if token not in stop_ids)]
