"""Two groups of servers, each of which gives a part of the states: the tapped blocks, and the final state.

Shapes: T tokens, K keys of both groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.features.servers import ReceivedCounts, Servers, ServerSettings


class JoinedServers:
    """Asks both groups for every sequence. The keys of the second follow those of the first."""

    def __init__(self, first: Servers, second: Servers) -> None:
        self.groups = (first, second)

    @property
    def settings(self) -> ServerSettings:
        return self.groups[0].settings

    @property
    def names(self) -> list[str]:
        """Engines and their versions."""
        return sorted({name for group in self.groups for name in group.names})

    @property
    def number(self) -> int:
        """Of servers."""
        return sum(group.number for group in self.groups)

    @property
    def dtypes(self) -> list[str]:
        """Of the states that servers have given; one for each server that has answered."""
        return [dtype for group in self.groups for dtype in group.dtypes]

    @property
    def counts(self) -> ReceivedCounts:
        """A sequence counts once; every repeated request counts."""
        return replace(self.groups[0].counts, repeated=sum(group.counts.repeated for group in self.groups))

    def reset_counts(self) -> None:
        """Count from 0 again."""
        for group in self.groups:
            group.reset_counts()

    def states(self, ids: Sequence[int]) -> Tensor:
        """[T, K, H] the states of a sequence. Raises as `Servers.states`."""
        return torch.cat([group.states(ids) for group in self.groups], 1)

    def check(self) -> None:
        """Compare every server's states with the trainer's own."""
        for group in self.groups:
            group.check()

    def stop(self) -> None:
        """End the waits."""
        for group in self.groups:
            group.stop()

    def close(self) -> None:
        """End the waits, and remove the states of requests that nothing waits for."""
        for group in self.groups:
            group.close()
