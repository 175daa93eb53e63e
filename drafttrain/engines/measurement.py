"""Serving engines beside our decoder: the same prompts, with and without speculation in turn, and what they accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from drafttrain.decoding.decoder import Decoded
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Costs
from drafttrain.engines.answers import Answer, Side
from drafttrain.measure.bench import BASELINE, Watch
from drafttrain.measure.cases import waves
from drafttrain.measure.entry import speed_keys
from drafttrain.measure.expected import FLAGGED_GAP, gap
from drafttrain.measure.flags import FEW
from drafttrain.measure.plan import plan
from drafttrain.measure.speed import Race, race

Keys = dict[str, Any]

SPECULATIVE = "speculative"
TIMES = ("tokens_per_s", "ttft_ms", "tpot_ms")
SPEEDS = ("speedup", "speedup_min", "speedup_max", *TIMES, *(f"baseline_{name}" for name in TIMES))
COUNTS = ("verifications", "drafted", "accepted")
ACCEPTED = (*COUNTS, "tau", "tau_here", "tau_gap", "tau_gap_flagged", "exact_matches")
FIGURES = (*SPEEDS, *ACCEPTED, "same_as_here", "prompts", "repeats", "batch_size", "draft_length")


@dataclass(frozen=True, slots=True)
class Here:
    """Our own decoder's greedy chains of the same prompts. texts: token ids; letters: the same, written out. emitted: tokens
    from verifications, by prompt.
    """

    texts: list[list[int]]
    letters: list[str]
    emitted: list[int]
    verifications: list[int]

    def tau(self, chosen: Sequence[int]) -> float | None:
        rounds = sum(self.verifications[i] for i in chosen)
        return sum(self.emitted[i] for i in chosen) / rounds if rounds else None


@dataclass(frozen=True, slots=True)
class Terms:
    """How an engine is timed. prompts: how many; seconds: for all batch sizes together."""

    label: str
    prompts: int
    sizes: Sequence[int]
    repeats: int
    seconds: float
    draft_length: int
    stop_ids: frozenset[int]
    watch: Watch


@dataclass
class Heard:
    """One batch size. answers: by side, in the order of [repeat][wave]."""

    race: Race
    repeats: int
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    @property
    def chosen(self) -> list[int]:
        """The prompts that were timed."""
        return [i for wave in self.race.waves for i in wave]

    def once(self, side: str) -> list[Any]:
        """What was said in the first repeat, in the order of `chosen`."""
        return [text.said for answer in self.answers[side][: len(self.race.waves)] for text in answer.texts]


def measured(sides: Mapping[str, Side], here: Callable[[str], Here], terms: Terms) -> Keys:
    """The figures of one engine (docs/report-schema.md). sides: `speculative`, `baseline`, or one of them.

    here: by how the engine begins (`drafttrain.engines.answers.About`). Raises UserError where the engine fails.
    """
    notes = list(dict.fromkeys(note for side in sides.values() for note in side.about.notes))
    share = terms.seconds / len(terms.sizes)
    heard = {size: _contest(sides, size, share, terms, notes) for size in terms.sizes}
    slices = [{"by": "batch_size", "value": size} | _figures(sides, one, here, terms) for size, one in heard.items()]
    first = next(iter(heard.values()))
    keys = slices[0] | {"batch_size": terms.sizes[0], "draft_length": terms.draft_length}
    keys |= {"versions": next(iter(sides.values())).about.versions, "slices": slices, "notes": notes}
    keys["same_as_here"] = _same_as_here(sides, first, here, terms)
    keys["flags"] = flags(keys, terms)
    return {name: value for name, value in keys.items() if name not in ("by", "value")}


def flags(keys: Keys, terms: Terms) -> list[str]:
    """What must not be missed, in a sentence each."""
    found, prompts = [], keys["prompts"]
    if keys["tau_gap_flagged"]:
        side = "above" if keys["tau_gap"] > 0 else "below"
        said = f"{terms.label} counts tau {keys['tau']:.2f}, {abs(keys['tau_gap']):.0%} {side} our {keys['tau_here']:.2f}"
        found.append(f"{said} of the same chains: {'; '.join(_causes(keys, terms))}")
    if keys["exact_matches"] is not None and keys["exact_matches"] < prompts:
        count = prompts - keys["exact_matches"]
        found.append(f"{count} of {prompts} texts of {terms.label} with speculation are not those of its plain decoding")
    return found


def _causes(keys: Keys, terms: Terms) -> list[str]:
    """Of another tau, as the figures stand."""
    causes, same, prompts = [], keys["same_as_here"], keys["prompts"]
    if keys["verifications"] < FEW:
        causes.append(f"{keys['verifications']} verifications say little")
    if same is not None and same < prompts:
        causes.append(
            f"{prompts - same} of its {prompts} plain texts are not ours, so dtype, weights, template or stop tokens may differ"
        )
    if keys["drafted"] is not None and abs(drafts := keys["drafted"] / keys["verifications"] - terms.draft_length) > 0.25:
        causes.append(
            f"it drafted {drafts + terms.draft_length:.1f} tokens a verification, not {terms.draft_length}: they adapt or "
            "end early, and a server's draft length may be another"
        )
    return causes or [
        "it may read the drafter otherwise; drafttrain verify holds the accepted drafts of every text against ours"
    ]


def _contest(sides: Mapping[str, Side], size: int, seconds: float, terms: Terms, notes: list[str]) -> Heard:
    """Plain and speculative in turn over as many prompts as the seconds allow; each runs the first wave twice before."""
    answers: dict[str, list[Answer]] = {name: [] for name in sides}

    def contender(name: str) -> Callable[[list[int]], Decoded]:
        def lap(wave: list[int]) -> Decoded:
            answers[name].append(sides[name].answer(wave))
            return _decoded(answers[name][-1])

        return lap

    contenders, wanted = {name: contender(name) for name in sides}, waves(terms.prompts, size)
    race(contenders, wanted[:1], 1)
    began = monotonic()
    race(contenders, wanted[:1], 1)
    chosen = plan(monotonic() - began, seconds, len(wanted), terms.repeats)
    if chosen.waves < len(wanted) or chosen.repeats < terms.repeats:
        notes.append(
            f"{terms.label}, batch {size}: {chosen.waves} of {len(wanted)} waves and {chosen.repeats} of {terms.repeats} "
            "repeats fitted into measure.minutes"
        )
    for kept in answers.values():
        kept.clear()
    done, total = 0, chosen.waves * chosen.repeats * len(sides)

    def tick(lap: Decoded) -> None:
        nonlocal done
        done += 1
        terms.watch(f"{terms.label}, batch {size}", done, total, sum(len(r.tokens) for r in lap.results))

    laps = race(contenders, wanted[: chosen.waves], chosen.repeats, tick=tick)
    return Heard(Race(size, wanted[: chosen.waves], laps), chosen.repeats, answers)


def _decoded(answer: Answer) -> Decoded:
    """For the clock alone: of tokens that came together with the first one, that one counts."""
    results = [
        Result(i, 0, [0] * (text.count - text.ahead + 1), started=0.0, first=text.first, ended=text.ended)
        for i, text in enumerate(answer.texts)
    ]
    return Decoded(results, Costs())


def _figures(sides: Mapping[str, Side], heard: Heard, here: Callable[[str], Here], terms: Terms) -> Keys:
    keys = {name: value for name, value in speed_keys(heard.race, SPECULATIVE).items() if name in SPEEDS}
    keys |= {"prompts": len(heard.chosen), "repeats": heard.repeats, "exact_matches": None}
    if len(sides) == 2:
        pairs = zip(heard.once(SPECULATIVE), heard.once(BASELINE), strict=True)
        keys["exact_matches"] = sum(ours == plain for ours, plain in pairs)
    keys |= dict.fromkeys((*COUNTS, "tau", "tau_here", "tau_gap"))
    if SPECULATIVE in sides:
        keys |= _acceptance(sides[SPECULATIVE].about.begins, heard, here)
    drift = keys["tau_gap"]
    return keys | {"tau_gap_flagged": drift is not None and abs(drift) > FLAGGED_GAP}


def _acceptance(begins: str, heard: Heard, here: Callable[[str], Here]) -> Keys:
    """tau by the engine's own count of verifications, over all repeats; null where it does not tell."""
    answers, keys = heard.answers[SPECULATIVE], Keys()
    for name in COUNTS:
        told = [getattr(answer, name) for answer in answers]
        keys[name] = None if any(one is None for one in told) else sum(told)
    behind = 0 if begins == "drafted" else 1
    emitted = sum(max(0, text.count - behind) for answer in answers for text in answer.texts)
    keys["tau"] = emitted / keys["verifications"] if keys["verifications"] else None
    keys["tau_here"] = here(begins).tau(heard.chosen)
    return keys | {"tau_gap": gap(keys["tau"], keys["tau_here"])}


def _same_as_here(sides: Mapping[str, Side], heard: Heard, here: Callable[[str], Here], terms: Terms) -> int:
    """Plain texts (or else speculative ones) that are ours; a stop token that ends them may be left out."""
    name = BASELINE if BASELINE in sides else SPECULATIVE
    own, said = here(sides[name].about.begins), heard.once(name)
    if not sides[name].about.ids:
        return sum(text.strip() == own.letters[i].strip() for i, text in zip(heard.chosen, said, strict=True))
    return sum(
        _bare(text, terms.stop_ids) == _bare(own.texts[i], terms.stop_ids) for i, text in zip(heard.chosen, said, strict=True)
    )


def _bare(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    return [*tokens[:-1], *(token for token in tokens[-1:] if token not in stop_ids)]
