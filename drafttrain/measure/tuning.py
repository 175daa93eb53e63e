"""Finds the fastest proposal that a drafter can make on this machine.

The speed of every proposal is predicted from acceptance and measured step costs; the best of these are timed.

Shapes: M samples, K draft depth, N nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log, sqrt
from operator import truediv
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.core.intervals import Interval, t_quantile
from drafttrain.core.tree import Path, tuned_paths
from drafttrain.decoding.scheduler import Decoded
from drafttrain.decoding.tree_size import CANDIDATES, LARGE, proposal_seconds, verification_seconds
from drafttrain.drafters.tuned_settings import SPEEDUP, draft_up_to, with_tuned
from drafttrain.measure import TuneOptions
from drafttrain.measure.acceptance import pooled
from drafttrain.measure.bench import Bench
from drafttrain.measure.cases import Case, waves_of
from drafttrain.measure.expected import expected_interval, expected_tau
from drafttrain.measure.speed import Contender, throughput, tpot
from drafttrain.model.drafter import Drafter
from drafttrain.model.target import Target
from drafttrain.objective.losses import Hits, fit_tree_confidence

DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
DEFAULT, PLAIN = "as trained", "plain decoding"
NOTICED = 1.02  # times the trained proposal's speed, from which another one takes its place
TINY = 1e-9  # least speed, of an output without time
SINGLE = 2.0  # factor by which the speed on a single batch of prompts may be off, either way
Settings = dict[str, Any]
Contenders = Mapping[str, Settings | None]  # by name; None: plain decoding
Raced = tuple[dict[str, list[float]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class ProposalShape:
    """A proposal."""

    depth: int  # greatest depth; the drafter's proposal is cut there
    nodes: int  # drafted nodes: the root does not count
    paths: tuple[Path, ...] = ()  # the paths of a static tree, by rank; empty for chains
    grown: str | None = None  # kind of a tree that grows by confidence
    settings: Settings = field(default_factory=dict)  # as `Drafter.use_decode_settings` takes them

    @staticmethod
    def of(drafter: Drafter, depth: int) -> ProposalShape:
        """What the drafter proposes down to this depth."""
        proposal, paths = drafter.proposal, tuple(path for path in drafter.proposal.paths if len(path) <= depth)
        if proposal.grown is None and not any(rank for path in paths for rank in path):
            return ProposalShape(min(depth, drafter.draft_length), len(paths))
        nodes = len(paths) if proposal.grown is None else proposal.max_nodes - 1
        return ProposalShape(max(map(len, paths)), nodes, paths, proposal.grown)

    def __str__(self) -> str:
        shape_name = f"{self.grown.replace('_', '-')} tree" if self.grown else "tree" if self.paths else "draft length"
        return f"{shape_name} {self.depth}" if not self.paths else f"{shape_name}, depth {self.depth}, {self.nodes} nodes"


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted speed of a proposal."""

    shape: ProposalShape
    tau: float  # expected tokens per verification
    seconds: float  # of a decode step
    speedup: float  # over plain decoding
    interval: Interval | None = None  # of tau, over the prompts


def surface(
    target: Target, drafter: Drafter, hits: Sequence[Hits], sampled: bool, batch: int, repeats: int = 15
) -> list[Predicted]:
    """Every proposal that the drafter can make, the fastest first; none without samples. hits, sampled: as for `expected_tau`.

    The function measures the costs on this machine at this batch size: of drafting by depth, of a verification by nodes.
    """
    if not (sequences := ranks_by_text(hits)):
        return []
    predicted = partial(_predicted, target, drafter, hits, sampled, batch, repeats)
    predictions = predicted(shapes_of(drafter, sequences, target.trees))
    if predictions and predictions[0].shape.nodes == CANDIDATES[-1] and _searches(drafter, target.trees):
        predictions += predicted(shapes_of(drafter, sequences, target.trees, LARGE))
    return sorted(predictions, key=lambda p: -p.speedup)


def _predicted(
    target: Target,
    drafter: Drafter,
    hits: Sequence[Hits],
    sampled: bool,
    batch: int,
    repeats: int,
    shapes: Sequence[ProposalShape],
) -> list[Predicted]:
    """The speed of each of these shapes, the fastest first."""
    drafting = {depth: proposal_seconds(target, drafter, repeats, batch, depth) for depth in sorted({s.depth for s in shapes})}
    extra_nodes = drafter.proposal.more_nodes
    verifying = verification_seconds(target, drafter, sorted({s.nodes + 1 + extra_nodes for s in shapes} | {1}), repeats, batch)
    predictions = []
    for shape in shapes:
        paths = shape.paths or [path for path in drafter.proposal.paths if len(path) <= shape.depth]
        tau, seconds = expected_tau(hits, paths, sampled), drafting[shape.depth] + verifying[shape.nodes + 1 + extra_nodes]
        if tau is not None:
            interval = expected_interval(hits, paths, sampled)
            predictions.append(Predicted(shape, tau, seconds, tau * verifying[1] / seconds, interval))
    return sorted(predictions, key=lambda p: -p.speedup)


def shapes_of(
    drafter: Drafter, sequences: Sequence[Tensor], trees: bool, sizes: Sequence[int] = CANDIDATES
) -> list[ProposalShape]:
    """The proposals to compare: depths; for drafters with a tunable tree, depths and node counts, each with its best paths."""
    depths = [d for d in DEPTHS if d < drafter.draft_length] + [drafter.draft_length]
    if not _searches(drafter, trees):
        trained_paths = drafter.proposal.paths
        return [ProposalShape(d, sum(len(path) <= d for path in trained_paths), settings={"draft_length": d}) for d in depths]
    shapes, proposal = {}, drafter.proposal
    for depth in depths:
        truncated_ranks = [rank_MK[:, :depth] for rank_MK in sequences]
        for nodes in sizes:
            paths = tuple(tuned_paths(truncated_ranks, nodes))
            if paths:
                deepest = max(map(len, paths))
                settings = proposal.tree_settings(deepest, paths)
                shapes[deepest, len(paths)] = ProposalShape(deepest, len(paths), paths, proposal.grown, settings)
    return list(shapes.values())


def _searches(drafter: Drafter, trees: bool) -> bool:
    """Whether the drafter's tree can have any paths, for a target that verifies trees."""
    return drafter.proposal.takes_paths and trees


def temperatures(temperature: float) -> list[float]:
    """Draft temperatures to try, below, at and above the target's temperature."""
    return [round(temperature * share, 3) for share in (0.5, 0.7, 0.85, 1.0, 1.2)]


def ranks_by_text(hits: Sequence[Hits]) -> list[Tensor]:
    """Ranks [M, K] of each text that has samples."""
    return [text.to(torch.long) for h in hits for text in h.rank_MK.split(h.length_D) if len(text)]


@dataclass(frozen=True, slots=True)
class Tuner:
    """Times decode settings of one drafter."""

    bench: Bench
    drafter: Drafter
    options: TuneOptions
    trained: Settings  # the checkpoint's decode settings
    batch_size: int = 1
    stored: Mapping[int, Settings] = field(default_factory=dict)  # what an earlier search chose, by batch size

    def use(self, settings: Settings) -> None:
        self.drafter.use_decode_settings(with_tuned(self.trained, settings))

    def named(self, settings: Settings) -> str:
        """The proposal that these settings give, as reports name it."""
        self.use(settings)
        return str(ProposalShape.of(self.drafter, self.drafter.proposal.preferred.draft_length or self.drafter.draft_length))

    def race(self, name: str, settings: Contenders, cases: Sequence[Case], seconds: float) -> Raced:
        """(the speed of each of the settings on each batch of prompts / that of the first, what a decode step costs), by name.

        The cost is in plain steps, of whole steps as they ran, the median over the batches: a pause of the machine is in few of
        them. Plain decoding is one of the settings. Batches whose outputs have one token each have no speed. Raises UserError
        where no others are left.
        """
        case_waves, name = waves_of(cases, range(len(cases)), self.batch_size), f"tuning, batch {self.batch_size}: {name}"
        contenders = {label: self._contender(contender_settings, cases) for label, contender_settings in settings.items()}
        laps = self.bench.timed(name, contenders, case_waves, self.options.repeats, seconds, {})
        first = next(iter(settings))
        every = {label: [lap for repeat in repeats for lap in repeat] for label, repeats in laps.items()}
        rates = {label: [self._rate([lap]) for lap in of] for label, of in every.items()}
        timed = [i for i, rate in enumerate(rates[first]) if rate > 0.0]
        if not timed:
            raise UserError("the outputs are too short to compare speeds; raise decode.max_new_tokens, or give more prompts")
        speedups = {label: [contender_rates[i] / rates[first][i] for i in timed] for label, contender_rates in rates.items()}
        taus = {label: [pooled(lap.results).tau or 0.0 for lap in of] for label, of in every.items()}
        steps = {label: [taus[label][i] / max(rates[label][i], TINY) for i in timed] for label in every}
        plain = [max(step, TINY) for step in steps[PLAIN]]
        costs = {label: median(map(truediv, taken, plain)) for label, taken in steps.items()}
        found: Raced = self.bench.part.share((speedups, costs))
        return found

    def _rate(self, laps: Sequence[Decoded]) -> float:
        rate = throughput(laps) if self.options.objective == "throughput" else 1.0 / (tpot(laps) or float("inf"))
        return rate or 0.0

    def _contender(self, settings: Settings | None, cases: Sequence[Case]) -> Contender:
        """A separate decoder for these settings, because a session keeps the proposal that it began with."""
        self.use(settings or {})
        contender = self.bench.contender(None if settings is None else self.drafter, cases)

        def run(wave: list[int]) -> Decoded:
            self.use(settings or {})
            return contender(wave)

        return run


def search(tuner: Tuner, sizes: Sequence[int], choosing: Sequence[Case], deciding: Sequence[Case] = ()) -> list[dict[str, Any]]:
    """For each batch size the finalists with their predicted and measured speed, all predictions, and the choice.

    choosing: prompts on which the finalists are timed. deciding: others, which say whether the choice is faster than the
    trained settings; without any, the first ones say it, timed once more, and the draft temperature stays as it is. Acceptance
    does not depend on the batch size: it is measured once.
    """
    tuner.use({})
    bench, drafter, hits = tuner.bench, tuner.drafter, None
    if drafter.trained:
        plain = bench.decode_all(PLAIN, None, choosing, passes=2)
        hits = bench.hits(drafter, choosing[: len(plain)], plain)
    temperature, results = _temperature(tuner, choosing) if deciding else {}, list[dict[str, Any]]()
    for number, size in enumerate(sizes):
        end = bench.budget.used + bench.budget.left / (len(sizes) - number)
        results.append(_search(replace(tuner, batch_size=size), hits, temperature, choosing, deciding, end))
    return results


def _search(
    tuner: Tuner,
    hits: Sequence[Hits] | None,
    temperature: Settings,
    choosing: Sequence[Case],
    deciding: Sequence[Case],
    end: float,
) -> dict[str, Any]:
    """`search` at one batch size. temperature: settings of the draft temperature. end: time of the budget that it may use."""
    tuner.use({})
    predicted, shapes = _predictions(tuner, hits)
    trained = tuple(tuner.drafter.proposal.paths)
    forecasts = _forecasts(tuner, hits, trained, predicted)
    own = tuner.trained.get("confidence_temperature", 1.0)  # the trained paths grow differently with another one
    alternatives = [s for s in shapes if s.paths != trained or s.settings.get("confidence_temperature", own) != own]
    finalists: dict[str, Settings] = {str(shape): shape.settings for shape in alternatives}
    stored = {key: setting for key, setting in tuner.stored.get(tuner.batch_size, {}).items() if key != SPEEDUP}
    if stored:
        label = next((label for label, settings in finalists.items() if settings == stored), tuner.named(stored))
        finalists = {label: stored} | finalists
    finalists = {DEFAULT: {}} | finalists
    budget = tuner.bench.budget
    raced, costs = tuner.race("race of the finalists", {**finalists, PLAIN: None}, choosing, 0.5 * (end - budget.used))
    rows = [
        {"name": label, "settings": proposal_settings, "raced": median(raced[label]), "cost": costs.get(label)}
        | forecasts.get(label, {"expected_tau": None, "interval": None, "predicted_speedup": None})
        for label, proposal_settings in finalists.items()
    ]
    if values := {} if tuner.drafter.proposal.grown else speeds_of(rows):
        fastest_name = max(values, key=lambda label: values[label])
        name = fastest_name if values[fastest_name] > NOTICED * values[DEFAULT] else DEFAULT
    else:
        fastest_name = max(finalists, key=lambda label: median(raced[label]))
        name = winner({label: raced[label] for label in finalists})
    settings, label = finalists[name] | temperature, name
    if settings or not deciding:
        again: Contenders = {DEFAULT: {}, **({"chosen": settings} if settings else {}), PLAIN: None}
        stage = "on the other prompts" if deciding else "the choice once more"
        raced, costs = tuner.race(stage, again, deciding or choosing, end - budget.used)
        label = "chosen" if settings else DEFAULT
        costs[name] = costs.get(label, 0.0)
        for row in rows:  # the lowest of several timed costs is likely too low; these laps have chosen nothing
            row["cost"] = costs.get(str(row["name"])) or row["cost"]
        values = speeds_of(rows) if values and not deciding else {}
    gain = values[name] / values[DEFAULT] if values else median(raced[label])
    fastest, plain = raced[label if gain > 1.0 else DEFAULT], raced[PLAIN]
    speedups = [a / max(b, TINY) for a, b in zip(fastest, plain, strict=True)]
    return {
        "batch_size": tuner.batch_size,
        "finalists": rows,
        "surface": [{"depth": p.shape.depth, "nodes": p.shape.nodes, "tau": p.tau, "speedup": p.speedup} for p in predicted],
        "chosen": {
            "name": name,
            "fastest": fastest_name,  # another one if it is within noise
            "proposal": tuner.named(settings),
            "settings": settings,
            "over_default": gain,
            "better": gain > 1.0,
            SPEEDUP: median(speedups),
            "speedups": speedups,  # of each batch of prompts
            "plain_is_faster": clearly_faster(plain, fastest),  # beyond noise
        },
    }


def speeds_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The speedup of each finalist over plain decoding: expected tau / the cost of its timed steps; empty unless all have both.

    A few prompts show what steps cost, and not whether one proposal is faster than another: their taus differ too much.
    """
    if any(not row["expected_tau"] or not row["cost"] for row in rows):
        return {}
    return {row["name"]: row["expected_tau"] / row["cost"] for row in rows}


def winner(raced: Mapping[str, Sequence[float]]) -> str:
    """The fastest, or the first that it does not clearly beat: within noise the trained settings decide, then the prediction.

    raced: the speed on each batch of prompts, first as trained and as stored, then of the others in the order of prediction.
    """
    fastest = max(raced, key=lambda label: median(raced[label]))
    return next(label for label in raced if label == fastest or not clearly_faster(raced[fastest], raced[label]))


def clearly_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether the mean of log(ours / theirs) over the batches is above two standard errors; of one batch, above 0."""
    gains = [log(max(a, TINY) / max(b, TINY)) for a, b in zip(ours, theirs, strict=True)]
    error = stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > 2.0 * error


def _predictions(tuner: Tuner, hits: Sequence[Hits] | None) -> tuple[list[Predicted], list[ProposalShape]]:
    """(all predictions, the best proposals). For untrained drafters, without hits: none, and all possible proposals."""
    bench, drafter, target = tuner.bench, tuner.drafter, tuner.bench.loaded.target
    if hits is None:
        return [], shapes_of(drafter, [], target.trees)
    sampled = not bench.sampling.greedy and drafter.samples
    stage, repeats = f"tuning, batch {tuner.batch_size}: costs of a step", max(3, 15 // tuner.batch_size)  # larger: slower
    bench.watch(stage, 0, 1, 0)
    fit_tree_confidence(drafter, hits)
    predictions = surface(target, drafter, hits, sampled, tuner.batch_size, repeats)
    bench.watch(stage, 1, 1, 0)
    if not predictions:
        raise UserError(
            "no draft was right on these prompts, or their outputs are too short; train longer, raise decode.max_new_tokens, "
            "or give more prompts"
        )
    order = bench.part.share([[p.shape.depth, p.shape.nodes] for p in predictions])  # by the first process's clock
    predictions.sort(key=lambda p: order.index([p.shape.depth, p.shape.nodes]))
    return predictions, [p.shape for p in predictions[: tuner.options.finalists]]


def _temperature(tuner: Tuner, cases: Sequence[Case]) -> Settings:
    """The draft temperature of the highest tau, for drafters that sample; empty if it is the target's temperature."""
    sampling = tuner.bench.sampling
    if sampling.greedy or not tuner.drafter.samples or sampling.draft_temperature is not None:
        return {}
    taus = {}
    for draft_temperature in temperatures(sampling.temperature):
        tuner.use({"draft_temperature": draft_temperature, "temperature": sampling.temperature})
        results = tuner.bench.decode_all(f"draft temperature {draft_temperature:g}", tuner.drafter, cases)
        taus[draft_temperature] = pooled(results).tau or 0.0
    best = max(taus, key=lambda draft_temperature: taus[draft_temperature])
    return {} if best == sampling.temperature else {"draft_temperature": best, "temperature": sampling.temperature}


def _forecasts(
    tuner: Tuner, hits: Sequence[Hits] | None, trained: Sequence[Path], predicted: Sequence[Predicted]
) -> dict[str, dict[str, Any]]:
    """Expected tau of the trained proposal and of the others, with its interval over the prompts, and the predicted speedup.
    Nothing where agreement with the outputs does not predict what is accepted.
    """
    if not predicted or hits is None or not tuner.bench.agreement_predicts(tuner.drafter):
        return {}
    forecasts = {
        str(p.shape): {"expected_tau": p.tau, "interval": p.interval, "predicted_speedup": p.speedup} for p in predicted
    }
    sampled = not tuner.bench.sampling.greedy and tuner.drafter.samples
    tau, interval = expected_tau(hits, trained, sampled), expected_interval(hits, trained, sampled)
    return forecasts | {DEFAULT: {"expected_tau": tau, "interval": interval, "predicted_speedup": None}}


def tuning_notes(drafter: Drafter, sizes: Sequence[int]) -> list[str]:
    """For a report on these batch sizes: which were not tuned, and from which on drafting does not gain."""
    notes = [
        f"batch size {size} was not tuned: drafts are those chosen for batch size {tuned}"
        for size in sizes
        if (tuned := drafter.tuned_size(size)) not in (None, 0, size)
    ]
    if (largest := draft_up_to(drafter.tuned)) is not None:
        notes.append(f"draft at up to batch size {largest}: in tuning, plain decoding was faster above than any proposal")
    return notes


def predicted_speedup(found: dict[str, Any]) -> tuple[float, float, float]:
    """(predicted speedup, and the bounds of its interval) of what tuning a run found: the geometric mean over the batch sizes.

    It is the expected tau of the proposal that tuning chose / the cost of its steps in tuning's race. At a batch size at which
    a drafter does not gain it is switched off, which counts 1, unless it gains at none. Of a drafter whose tau cannot be
    predicted, such as one that copies from the prompt, the speed in tuning's race counts.
    """
    logs = [_logs(size) for size in found["batch_sizes"]]
    gains = any(value > 0.0 for value, *_ in logs)
    means = [fmean(max(0.0, row[i]) if gains else row[i] for row in logs) for i in range(3)]
    return exp(means[0]), exp(means[1]), exp(means[2])


def _logs(found: dict[str, Any]) -> tuple[float, float, float]:
    """The logarithms of the speedup at one batch size and of its bounds."""
    trained, chosen = found["finalists"][0], found["chosen"]
    row = next(row for row in found["finalists"] if row["name"] == chosen["name"]) if chosen["better"] else trained
    if row["expected_tau"] and row["cost"]:
        low, high = row["interval"] or (row["expected_tau"], row["expected_tau"])
        return log(row["expected_tau"] / row["cost"]), log(low / row["cost"]), log(high / row["cost"])
    speeds = [log(max(speedup, 1e-6)) for speedup in chosen["speedups"]]
    error = t_quantile(len(speeds) - 1) * stdev(speeds) / sqrt(len(speeds)) if len(speeds) > 1 else log(SINGLE)
    return fmean(speeds), fmean(speeds) - error, fmean(speeds) + error
