"""hs_connectors' connector of hidden states to Mooncake's store, on CPUs. It runs in vLLM's own Python.

The connector of hs_connectors 0.9 copies states on a stream of its own, and raises "No accelerator is available" where torch
has none. On a CPU the engine's step is over when the connector is called, so there is nothing to wait for.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from hs_connectors.mooncake_hidden_states_connector import MooncakeHiddenStatesConnector


class _Stream:
    """In place of an accelerator's stream."""

    def wait_event(self, event: Any) -> None:
        pass


class _Event:
    """In place of an accelerator's event."""

    def record(self) -> None:
        pass


class _Host:
    """In place of torch's module of an accelerator."""

    Stream, Event, stream = _Stream, _Event, nullcontext


class CpuMooncakeConnector(MooncakeHiddenStatesConnector):
    """Puts states into Mooncake's store without an accelerator."""

    def _device(self) -> Any:
        return _Host
