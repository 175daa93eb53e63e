"""Timings. Contenders alternate over the same waves of prompts, so that a drifting clock rate affects all of them alike.

A step's roofline on a GPU is the bytes that it must read, divided by the measured bandwidth (`step_floor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from time import perf_counter

import torch

from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Costs, Decoded
from drafttrain.targets.hf import CacheBytes

Contender = Callable[[list[int]], Decoded]  # case numbers of one wave -> its decoding
Repeats = list[list[Decoded]]  # [repeat][wave]


@dataclass
class Race:
    """Timings of several contenders over the same waves."""

    batch_size: int
    waves: list[list[int]]  # case numbers
    laps: dict[str, Repeats] = field(default_factory=dict)  # by contender, [repeat][wave]

    def of(self, name: str, cases: set[int] | None = None) -> Repeats:
        """One contender's laps. cases: keep only the waves that hold no other cases."""
        keep = [i for i, wave in enumerate(self.waves) if cases is None or cases.issuperset(wave)]
        return [[lap[i] for i in keep] for lap in self.laps.get(name, [])] if keep else []


def race(
    contenders: dict[str, Contender],
    waves: list[list[int]],
    repeats: int,
    once: frozenset[str] = frozenset(),
    tick: Callable[[Decoded], None] = lambda lap: None,
) -> dict[str, Repeats]:
    """Run the contenders over every wave, alternating. once: contenders that run in the first repeat only."""
    laps: dict[str, Repeats] = {name: [] for name in contenders}
    for repeat in range(repeats):
        running = [name for name in contenders if repeat == 0 or name not in once]
        for name in running:
            laps[name].append([])
        for wave in waves:
            for name in running:
                lap = contenders[name](wave)
                laps[name][-1].append(lap)
                tick(lap)
    return laps


def tpot(waves: Sequence[Decoded]) -> float | None:
    """Time per output token after the first, in seconds, pooled over requests: sum(ended - first) / sum(tokens - 1)."""
    results = _results(waves)
    tokens = sum(len(r.tokens) - 1 for r in results)
    return sum(r.ended - r.first for r in results) / tokens if tokens else None


def ttft(waves: Sequence[Decoded]) -> float | None:
    """Mean time to first token, in seconds."""
    results = _results(waves)
    return sum(r.first - r.started for r in results) / len(results) if results else None


def throughput(waves: Sequence[Decoded], prefill: bool = False) -> float | None:
    """Tokens per second of wall time, over all waves.

    prefill: False: tokens after the first / (time of the wave's last token - of its first). At batch size 1 that is 1 / TPOT.
    True: all tokens / (time of the wave's last token - of its start).
    """
    tokens, seconds = 0, 0.0
    for wave in waves:
        tokens += sum(len(r.tokens) - (0 if prefill else 1) for r in wave.results)
        start_time = min(r.started if prefill else r.first for r in wave.results)
        seconds += max(r.ended for r in wave.results) - start_time
    return tokens / seconds if tokens and seconds > 0 else None


def over_repeats(figure: Callable[[Sequence[Decoded]], float | None], repeats: Repeats) -> float | None:
    """Median of a figure over the repeats; None when no repeat has it."""
    values = [v for v in map(figure, repeats) if v is not None]
    return median(values) if values else None


@dataclass(frozen=True, slots=True)
class Speedup:
    """TPOT(baseline) / TPOT(speculative) over the repeats."""

    value: float  # median
    low: float  # minimum
    high: float  # maximum


def speedup(baseline: Repeats, speculative: Repeats) -> Speedup | None:
    """The speedup over the baseline; each repeat is compared with the same repeat of the baseline. None without timings."""
    pairs = [(tpot(b), tpot(s)) for b, s in zip(baseline, speculative, strict=False)]
    ratios = [b / s for b, s in pairs if b is not None and s]
    return Speedup(median(ratios), min(ratios), max(ratios)) if ratios else None


def by_prompt(timed: Race, name: str) -> dict[int, float]:
    """Seconds from an output's first token to its last, by case number: the median over repeats."""
    seconds_by_case: dict[int, list[float]] = {}
    for laps in timed.of(name):
        for wave, lap in zip(timed.waves, laps, strict=True):
            for case, result in zip(wave, lap.results, strict=True):
                seconds_by_case.setdefault(case, []).append(result.ended - result.first)
    return {case: median(times) for case, times in seconds_by_case.items()}


def costs(repeats: Repeats) -> Costs:
    """Step costs summed over all repeats and waves."""
    total = Costs()
    for lap in (lap for waves in repeats for lap in waves):
        for cost_field in fields(Costs):
            setattr(total, cost_field.name, getattr(total, cost_field.name) + getattr(lap.costs, cost_field.name))
    return total


def seconds(cost: Costs) -> float:
    """Wall time of the decode steps, prefill excluded."""
    return cost.draft + cost.verify + cost.commit + cost.host


def _results(waves: Sequence[Decoded]) -> list[Result]:
    return [r for wave in waves for r in wave.results]


def step_floor(cache: CacheBytes, wave: Decoded, device: torch.device) -> float | None:
    """Least seconds of one decode step: its bytes at the bandwidth of the device's memory, texts at half of their final length.

    None for steps that no graph holds, and on a CPU.
    """
    if device.type != "cuda" or not wave.costs.weight_bytes:
        return None
    positions = sum(r.prompt_tokens + len(r.tokens) / 2 for r in wave.results)
    weights = wave.costs.weight_bytes / wave.costs.steps
    return step_bytes(cache, weights, len(wave.results), positions) / memory_bandwidth(device)


def step_bytes(cache: CacheBytes, weights: float, requests: int, positions: float) -> float:
    """Bytes that one decode step must read: the weights of all its products, counted when its graph was captured, and the
    target's cache of all requests' positions. Recurrent states are read and written.
    """
    return weights + cache.position * positions + 2 * cache.states * requests


def memory_bandwidth(device: torch.device, size: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes per second of the device's memory: the faster of a copy, read and written, and a sum, which only reads."""
    source = torch.zeros(size // 4, device=device)
    copy = torch.empty_like(source)
    works: list[tuple[int, Callable[[], object]]] = [(2 * size, lambda: copy.copy_(source)), (size, source.sum)]
    return max(moved * repeats / _repeated(work, repeats, device) for moved, work in works)


def _repeated(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of the work, several times in a row, after one that does not count."""
    work()
    torch.cuda.synchronize(device)
    start_time = perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize(device)
    return perf_counter() - start_time
