"""Batches whose answers the target writes in an engine: the prompts of a step first, the batches once their answers are there.

A conversation is rendered up to its last reply, as for training on the given reply. The engine continues it. Worked example: a
is the prompt, `c d` the given reply, `x y z` the answer:

    the data's row       a a a c d
    requested            a a a
    answered             a a a x y z
    states                h h h h h 0        the engine never reads z, so its state is missing; no prediction needs it
    supervised           - - - x y z
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.features.answers import Answer, AnswerRequest
from drafttrain.features.engine import EngineStates
from drafttrain.features.servers import Servers
from drafttrain.model.batch import TrainBatch
from drafttrain.model.images import has_images
from drafttrain.train.onpolicy import last_reply

STREAM = 0x616E7377  # a separate noise stream from those of the data and of measurements


@dataclass(slots=True)
class Asked:
    """The prompts of a micro-batch, and their answers once they are requested."""

    requests: Sequence[AnswerRequest]
    parts: list[Future[Answer]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests answers and makes batches of them. seed: of the run.

    The noise of an answer depends only on the run's seed and on the conversation's place in the order of all epochs. So a
    request that is repeated, or made again by a resumed run, is the same request, and another epoch gets another answer.
    """

    states: EngineStates
    seed: int
    collate: Callable[[Sequence[Encoded]], TrainBatch]

    def requests(self, rows: Sequence[Encoded], first: int) -> list[AnswerRequest]:
        """A request for each row. first: the place of the first row in the order of all epochs."""
        return [self._request(row, first + i) for i, row in enumerate(rows)]

    def begin(self, asked: Asked) -> None:
        """Request the answers, unless they have been. Errors are raised by `batch`."""
        servers = self.states.servers
        assert isinstance(servers, Servers), "no groups of servers give answers"
        if not asked.parts:
            asked.parts = [self.states.submit(servers.answered, request) for request in asked.requests]

    def batch(self, asked: Asked) -> TrainBatch:
        """The batch of prompts and answers, once all are there. `EngineStates.fill` has its states.

        Raises UserError where no server gives an answer.
        """
        self.begin(asked)
        found = self.states.results(asked.parts)
        rows = [answered(request.prompt, answer.token_ids) for request, answer in zip(asked.requests, found, strict=True)]
        batch = self.collate(rows)
        self.states.hold(batch, [answer.hidden_TKH for answer in found])
        return batch

    def _request(self, row: Encoded, place: int) -> AnswerRequest:
        writing, prompt = self.states.writing, row.token_ids[: last_reply(row)].tolist()
        assert writing is not None, "otherwise the given answers are trained on"
        if len(prompt) < 2:  # plain text is supervised from its second token on
            raise UserError(
                "features.answers continues prompts, but the data has plain text without replies; give conversations, or leave "
                "features.answers out"
            )
        if has_images(prompt):  # of data that is still being prepared: what is prepared is checked before training
            raise UserError("features=engine takes text alone, but a conversation has images; set features=cached or online")
        room = min(writing.max_new_tokens, writing.longest - len(prompt))
        if room < 1:
            raise UserError(
                f"a prompt has {len(prompt)} tokens, which leave the target no room for an answer; lower data.max_length"
            )
        seed = int(np.random.SeedSequence([STREAM, self.seed % 2**64, place]).generate_state(1)[0]) >> 1
        return AnswerRequest(prompt, seed, room, writing)


def answered(prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
    """The row of a prompt and its answer, whose tokens alone are supervised."""
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Encoded(np.array([*prompt, *answer], np.int32), mask)
