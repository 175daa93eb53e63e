"""The one decoder. It knows no drafter by name; without a drafter it is plain decoding, the baseline."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.decoding.graph_runner import LEAST_BOUND
from drafttrain.decoding.request import Result
from drafttrain.decoding.scheduler import Costs, Session
from drafttrain.decoding.settings import DecoderSettings


@dataclass
class Decoded:
    results: list[Result]
    costs: Costs


class Decoder(DecoderSettings):
    """Decodes prompts with its settings. It keeps a session from one call to the next where that saves capturing graphs."""

    _session: Session | None = None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        batch_size: int = 1,
        first_request: int = 0,
        as_json: Sequence[bool] | None = None,
    ) -> Decoded:
        """Decode every prompt, `batch_size` at a time; a finished one makes room for the next. Results in prompt order.

        as_json: of each prompt; None: of none. Raises ValueError for an empty prompt or one that leaves no room for new tokens.
        """
        meant = [False] * len(prompts) if as_json is None else as_json
        requests = [self.request(p, first_request + i, m) for i, (p, m) in enumerate(zip(prompts, meant, strict=True))]
        session = self._session_for(min(batch_size, len(requests)), max(map(self.positions, requests), default=1))
        results = [result for request in requests for result in session.submit(request)]
        for _ in session:
            pass
        return Decoded(results, session.costs)

    def _session_for(self, slots: int, max_len: int) -> Session:
        """A new one; where it would capture graphs anew, the last one, if it is large enough."""
        if not self.captures:
            return Session(self, slots, max_len)
        if self._session is None or self._session.kv.slots != slots or self._session.max_len < max_len:
            self._session = None  # its cache goes before the new one comes
            # it does not keep its owner alive: as a cycle both would stay, with cache and graphs, until a collection
            self._session = Session(weakref.proxy(self), slots, -(-max_len // LEAST_BOUND) * LEAST_BOUND)
        self._session.costs = Costs()
        return self._session
