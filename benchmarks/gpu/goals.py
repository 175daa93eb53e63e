"""The figures with goals: Llama-3.1-8B's shapes in bfloat16, on an H200 or H100, decoding at batch 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

STEP = "step Llama-3.1-8B rows=1 context=4096 nodes=1,64"
SAMPLED = f"{STEP} sampled"
HEADS = "heads=32 kv_heads=8 width=128"


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal for one figure."""

    text: str  # the measured quantity
    case: str  # its case in that section of the results
    figure: tuple[str, ...]  # keys of the figure in the case's result
    limit: float
    unit: str  # "%", "x" or "us"
    section: str = "bench"
    cards: tuple[tuple[str, float], ...] = ()  # limits of cards with this in their name

    def on(self, card: str) -> Goal:
        """With this card's limit."""
        return replace(self, limit=next((limit for part, limit in self.cards if part in card), self.limit))

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def at_least(self) -> bool:
        """Whether large is good: shares of what the device can do, and speedups. Every other figure should be small."""
        return self.figure[-1] in ("floor_share", "roofline_share", "mfu", "times", "speedup")

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {shown(self.limit, self.unit)}"

    def value(self, known: dict[str, Any]) -> float | None:
        """The figure in a machine's results; None where it is missing."""
        found: Any = known.get(self.section, {}).get(self.case, {}).get("figures", {})
        for name in self.figure:
            found = found.get(name) if isinstance(found, dict) else None
        return found


def shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f} %"
    return f"{value:.2f}x" if unit == "x" else f"{value:.1f} µs"


KEEP = f"kv_keep rows=1 layers=32 context=4096 nodes=64 accepted=5 {HEADS.removeprefix('heads=32 ')}"


def attention(context: int, limit: float) -> Goal:
    text = f"tree attention, 64 nodes, {context // 1024}k context"
    return Goal(text, f"tree_attention rows=1 nodes=64 context={context} {HEADS}", ("us",), limit, "us")


def drafting(family: str, limit: float) -> Goal:
    return Goal(
        f"{family}: whole step / plain step", f"drafting {family} Llama-3.1-8B context=4096", ("over_plain",), limit, "x"
    )


def training(family: str, context: int) -> Goal:
    text = f"training {family}, {context // 1024}k context: share of the peak of target forward and drafter"
    return Goal(text, f"training {family} Llama-3.1-8B context={context}", ("mfu",), 0.45, "%", section="train")


def rival(name: str) -> Goal:
    text = f"training eagle3, 2k context: step of {name} / ours, from given states"
    return Goal(text, f"rival {name} eagle3 Llama-3.1-8B context=2048", ("times",), 1.5, "x", section="train")


def real_target(known: dict[str, Any]) -> Goal:
    """That of the best drafter which `make gpu-real` distils."""
    text, figure = "real target, temperature 0.8, lossless: speedup of the best drafter", ("sampled", "0.8", "speedup")
    each = [Goal(text, case, figure, 1.5, "x", section="real-2") for case in known.get("real-2") or ("",)]
    return max(each, key=lambda goal: goal.value(known) or 0.0)


GOALS = (
    Goal("plain step, 4k context: share of the floor", STEP, ("1", "floor_share"), 0.80, "%", cards=(("H100", 0.84),)),
    Goal("the same, later", STEP, ("1", "floor_share"), 0.88, "%"),
    Goal("verification of 64 nodes, 4k context / plain step", STEP, ("64", "over_plain"), 1.07, "x"),
    Goal("time outside the target, 64 nodes", STEP, ("64", "outside_target"), 0.008, "%"),
    Goal("lossless verification of 64 nodes with top-p 0.9 / without", SAMPLED, ("64 top_p=0.9", "over_unfiltered"), 1.03, "x"),
    drafting("eagle3", 1.38),
    *(drafting(family, 1.35) for family in ("jetspec", "dflash2", "domino", "xpress")),
    attention(4096, 17.0),
    attention(16384, 45.0),
    Goal("lossless acceptance, 64 nodes x 128,256", "lossless_accept rows=1 nodes=64 vocab=128256", ("us",), 15.0, "us"),
    Goal("best 64 of 512 candidates as a tree", "build_tree rows=1 candidates=512 nodes=64", ("us",), 4.5, "us"),
    Goal("accept walk along given choices, 64 nodes", "choice_accept rows=1 nodes=64 vocab=16", ("us",), 3.5, "us"),
    Goal("compaction of 5 accepted nodes, 32 blocks", KEEP, ("us",), 5.0, "us"),
    *(rival(name) for name in ("specforge", "speculators")),
    *(training(family, context) for family in ("eagle3", "medusa") for context in (2048, 8192)),
)
