"""Floor 1: how deep to draft, or not at all, from measured step costs and a running estimate of acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

RECENT = 0.1  # weight of the newest step in a running mean
SHARE = 0.02  # of all decoding time that trials may lose against plain decoding
GRACE = 2.0  # plain steps that trials may lose before any time has passed
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024  # plain steps between two trials
PLAIN_EVERY = 256  # drafted steps after which one plain step refreshes its cost


@dataclass
class _Bucket:
    """What is known at one batch size. cost, gain: by depth (0 is plain), seconds a step and tokens a row and step."""

    cost: dict[int, float] = field(default_factory=dict)
    gain: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    pause: int = FIRST_PAUSE
    idle: int = 0  # plain steps since the last drafted one
    drafted: int = 0  # drafted steps since the last plain one
    rested: bool = True  # the next drafted step pays for what was staged meanwhile
    total: float = 0.0
    lost: float = 0.0


class Fallback:
    """Chooses the depth of each step among `depths` and 0, plain decoding; batch sizes are kept apart.

    The depth with the most tokens per second is taken. While that is plain decoding, drafting is tried again after
    pauses that double; a trial is left out when it could take the time lost to trials beyond `SHARE` of all time, so that a
    drafter that is never right costs no more than that.
    """

    def __init__(self, deepest: int) -> None:
        self.depths = sorted({d for d in (1, 2, 4, 8, 16) if d < deepest} | {deepest})
        self._buckets: dict[int, _Bucket] = {}

    def depth(self, rows: int) -> int:
        """The depth of the next step of so many rows; 0: do not draft."""
        bucket = self._of(rows)
        if bucket.seen.get(0, 0) < 2 or bucket.drafted >= PLAIN_EVERY:
            return 0
        deepest = self.depths[-1]
        best = max([0, *self.depths], key=lambda d: self._rate(bucket, d))
        if best > 0 and (bucket.seen.get(best, 0) > 1 or self._affords(bucket, best)):
            return best
        due = bucket.idle >= bucket.pause or not bucket.seen.get(deepest)
        return self.depths[0 if bucket.seen.get(deepest, 0) > 2 else -1] if due and self._affords(bucket, deepest) else 0

    def record(self, rows: int, depth: int, seconds: float, emitted: int, reached: list[int]) -> None:
        """A step took so long and emitted so many tokens; reached: accepted drafts of each row."""
        bucket, per_row = self._of(rows), emitted / rows
        bucket.total += seconds
        if depth == 0:
            bucket.idle, bucket.drafted = bucket.idle + 1, 0
            bucket.rested = bucket.rested or bucket.idle > 1
            self._learn(bucket, 0, seconds)
            return
        bucket.idle, bucket.drafted = 0, bucket.drafted + 1
        if 0 in bucket.cost:
            bucket.lost = max(0.0, bucket.lost + seconds - per_row * bucket.cost[0])
        for d in self.depths:
            if d <= depth:  # what a shallower draft would have given
                tokens = sum(min(r, d) + 1 for r in reached) / rows
                bucket.gain[d] = tokens if d not in bucket.gain else bucket.gain[d] + RECENT * (tokens - bucket.gain[d])
        if not (bucket.rested and bucket.seen.get(depth)):
            self._learn(bucket, depth, seconds)
        bucket.rested = False
        pays = self._rate(bucket, depth) > self._rate(bucket, 0)
        bucket.pause = FIRST_PAUSE if pays else min(2 * bucket.pause, LONGEST_PAUSE)

    def _of(self, rows: int) -> _Bucket:
        return self._buckets.setdefault(1 << (rows - 1).bit_length(), _Bucket())

    def _learn(self, bucket: _Bucket, depth: int, seconds: float) -> None:
        """Running mean of a cost; an outlier (a page fault, another process) counts for no more than twice the mean."""
        seen = bucket.seen[depth] = bucket.seen.get(depth, 0) + 1
        known = bucket.cost.get(depth)
        if known is None or seen == 2:  # the first step of its kind also allocates
            bucket.cost[depth] = seconds if known is None else min(known, seconds)
        else:
            bucket.cost[depth] = known + RECENT * (min(seconds, 2 * known) - known)

    def _cost(self, bucket: _Bucket, depth: int) -> float:
        """Seconds of a step; of a depth never run, between plain and the nearest deeper one that was."""
        if depth in bucket.cost:
            return bucket.cost[depth]
        deeper = next((d for d in self.depths if d > depth and d in bucket.cost), None)
        if deeper is None:
            return bucket.cost[0] * (1.5 + 0.1 * depth)
        return bucket.cost[0] + (bucket.cost[deeper] - bucket.cost[0]) * depth / deeper

    def _rate(self, bucket: _Bucket, depth: int) -> float:
        if depth == 0:
            return 1.0 / bucket.cost[0]
        return bucket.gain[depth] / self._cost(bucket, depth) if depth in bucket.gain else 0.0

    def _affords(self, bucket: _Bucket, depth: int) -> bool:
        risk = max(0.0, self._cost(bucket, depth) - bucket.cost[0])
        return bucket.lost + risk <= SHARE * bucket.total + GRACE * bucket.cost[0]
