"""How deep to draft, or not at all, and how much of a draft to verify, from measured costs and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

RECENT = 0.05  # least weight of the newest observation in a running mean
SHARE = 0.015  # of all decoding time that trials may lose against plain decoding
GRACE = 2.0  # plain steps that trials may lose before any time has passed
PLAIN_EVERY = 256  # drafted steps after which one plain step refreshes its cost
DEEP_EVERY = 32  # drafted steps after which one goes to the full depth, where that is affordable
WHOLE_EVERY = 32  # cut drafts after which one is verified whole, so that its cost stays known


@dataclass
class _Mean:
    """A running mean: of everything at first, then of the recent past."""

    value: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += max(RECENT, 1.0 / self.seen) * (value - self.value)


@dataclass
class _Bucket:
    """The measurements of one batch size."""

    cost: dict[int, _Mean] = field(default_factory=dict)  # seconds per step, by depth; 0 is plain decoding
    alpha: dict[int, _Mean] = field(default_factory=dict)  # acceptance by position from 1
    drafted: int = 0  # steps since the last plain one
    shallow: int = 0  # drafted steps since the last full-depth one
    rested: bool = True  # the next drafted step also processes the positions that are pending since
    total: float = 0.0  # seconds of all steps
    lost: float = 0.0  # seconds that trials have lost against plain decoding


class Fallback:
    """Chooses the depth of each step among `depths` and 0, plain decoding, for each batch size separately.

    It takes the depth with the most tokens per second. While that is plain decoding, it tries a shallow draft now and then, as
    long as the time lost by trials stays within `SHARE` of all time: a drafter that is never right costs no more than that.
    Gains over plain decoding pay earlier losses back, but are not saved for later ones.
    """

    def __init__(self, deepest: int) -> None:
        self.depths = sorted({d for d in (1, 2, 3, 4, 6, 8, 12, 16) if d < deepest} | {deepest})
        self._buckets: dict[int, _Bucket] = {}

    def depth(self, rows: int) -> int:
        """The depth of the next step with so many rows; 0: do not draft."""
        bucket, deepest = self._of(rows), self.depths[-1]
        plain_cost = bucket.cost.get(0)
        if plain_cost is None or plain_cost.seen < 2 or bucket.drafted >= PLAIN_EVERY:
            return 0
        if deepest not in bucket.cost:
            return deepest if self._affords(bucket, deepest) else 0
        best = max([0, *self.depths], key=lambda d: self._rate(bucket, d))
        if best == 0:
            return self.depths[0] if self._affords(bucket, self.depths[0]) else 0
        if best < deepest and bucket.shallow >= DEEP_EVERY and self._affords(bucket, deepest):
            return deepest
        return best

    def record(self, rows: int, depth: int, seconds: float, emitted: int, reached: list[int]) -> None:
        """Note a step's seconds and emitted tokens. reached: accepted drafts of each row."""
        bucket = self._of(rows)
        bucket.total += seconds
        if depth == 0:
            bucket.drafted, bucket.rested = 0, True
            self._learn(bucket, 0, seconds)
            return
        bucket.drafted += 1
        bucket.shallow = 0 if depth == self.depths[-1] else bucket.shallow + 1
        bucket.lost = max(0.0, bucket.lost + seconds - emitted / rows * bucket.cost[0].value)
        for position in range(1, depth + 1):
            offered = sum(r >= position - 1 for r in reached)
            if offered:
                bucket.alpha.setdefault(position, _Mean()).add(sum(r >= position for r in reached) / offered)
        if not bucket.rested or depth not in bucket.cost:
            self._learn(bucket, depth, seconds)
        bucket.rested = False

    def _of(self, rows: int) -> _Bucket:
        return self._buckets.setdefault(_size(rows), _Bucket())

    def _learn(self, bucket: _Bucket, depth: int, seconds: float) -> None:
        """The first step of a kind may allocate, so the second can only lower its cost. Outliers count as twice the mean."""
        cost = bucket.cost.setdefault(depth, _Mean())
        if cost.seen == 1:
            cost.value, cost.seen = min(cost.value, seconds), 2
        else:
            cost.add(min(seconds, 2 * cost.value) if cost.seen else seconds)

    def _cost(self, bucket: _Bucket, depth: int) -> float:
        """Seconds of a step. The cost of a depth that never ran is interpolated between those that did."""
        if depth in bucket.cost:
            return bucket.cost[depth].value
        plain_seconds = bucket.cost[0].value
        deeper = next((d for d in self.depths if d > depth and d in bucket.cost), None)
        if deeper is None:
            return plain_seconds * (1.5 + 0.1 * depth)
        lower = max(d for d in bucket.cost if d < depth)
        low, high = bucket.cost[lower].value, bucket.cost[deeper].value
        return low + (high - low) * (depth - lower) / (deeper - lower)

    def _rate(self, bucket: _Bucket, depth: int) -> float:
        """Tokens of a row per second. A position that was never offered has the acceptance of the one before it."""
        tokens, path, alpha = 1.0, 1.0, 0.0
        for position in range(1, depth + 1):
            alpha = bucket.alpha[position].value if position in bucket.alpha else alpha
            path *= alpha
            tokens += path
        return tokens / self._cost(bucket, depth)

    def _affords(self, bucket: _Bucket, depth: int) -> bool:
        risk = max(0.0, self._cost(bucket, depth) - bucket.cost[0].value)
        return bucket.lost + risk <= SHARE * bucket.total + GRACE * bucket.cost[0].value


@dataclass
class _Curve:
    """The measurements of one batch size."""

    draft: _Mean = field(default_factory=_Mean)  # seconds to draft
    verify: dict[int, _Mean] = field(default_factory=dict)  # seconds to verify a draft, by depth
    confidence: dict[int, _Mean] = field(default_factory=dict)  # mean confidence, by position
    cut: int = 0  # drafts since the last one that was verified whole

    def seconds(self, depth: int) -> float:
        """Seconds of a step that drafts and verifies so deep, interpolated for depths that were never verified."""
        lower = max(d for d in self.verify if d <= depth)
        upper = min(d for d in self.verify if d >= depth)
        low, high = self.verify[lower].value, self.verify[upper].value
        return self.draft.value + (low if upper == lower else low + (high - low) * (depth - lower) / (upper - lower))


class Cut:
    """Chooses how much of a drafted chain to verify, for drafters that give a confidence for each draft.

    It decides after drafting and before verification, for all rows of the step. Drafts that it leaves out count as not
    accepted, so that `Fallback` learns the acceptance of drafts as they are used. Batch sizes are separate.
    """

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    def depth(self, rows: int, total: Sequence[float], sampled: bool) -> int:
        """The depth to verify.

        total: by depth from 1, the sum over the rows of the product of the confidences down to it. sampled: not argmax.
        """
        curve, deepest = self._of(rows), len(total)
        typical = [curve.confidence[position].value if position in curve.confidence else 0.0 for position in range(deepest)]
        previous_reach = float(rows)
        for position, reach in enumerate(total):  # this step's means are for later steps only
            if previous_reach > 0.0:
                curve.confidence.setdefault(position, _Mean()).add(reach / previous_reach)
            previous_reach = reach
        if 0 not in curve.verify or max(curve.verify) < deepest or curve.cut >= WHOLE_EVERY:
            return deepest
        return best_depth(rows, total, curve.seconds, typical if sampled else None)

    def record(self, rows: int, drafted: int, verified: int, draft: float, verify: float) -> None:
        """Note the depths that a step drafted and verified, and the seconds of each; a plain step drafted 0."""
        curve = self._of(rows)
        if drafted:
            curve.draft.add(draft)
            curve.cut = 0 if verified == drafted else curve.cut + 1
        curve.verify.setdefault(verified, _Mean()).add(verify)

    def _of(self, rows: int) -> _Curve:
        return self._curves.setdefault(_size(rows), _Curve())


def best_depth(
    rows: int, total: Sequence[float], seconds: Callable[[int], float], typical: Sequence[float] | None = None
) -> int:
    """The depth with most tokens per second, the deepest of equals.

    total: as for `Cut.depth`. seconds: of a whole step, by depth.
    typical: mean confidences, for drafts that were sampled. Whether a sampled draft is verified must not depend on its token:
    otherwise the verified drafts do not follow the draft distribution, and `min(1, p / q)` is wrong. The confidence in draft
    k + 1 depends on draft k. So draft k is judged by the confidences down to its own, and by these means below it.
    """
    tokens, depth = float(rows), 0
    while depth < len(total):
        reach, cumulative_tokens = total[depth], [tokens + total[depth]]
        for deeper in range(depth + 1, len(total)):
            reach = total[deeper] if typical is None else reach * typical[deeper]
            cumulative_tokens.append(cumulative_tokens[-1] + reach)
        if max(t / seconds(depth + 1 + i) for i, t in enumerate(cumulative_tokens)) < tokens / seconds(depth):
            break
        tokens, depth = cumulative_tokens[0], depth + 1
    return depth


def _size(rows: int) -> int:
    """The power of two that batch sizes are grouped by."""
    return 1 << (rows - 1).bit_length()
