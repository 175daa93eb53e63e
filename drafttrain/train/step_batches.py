"""The batches of a run's steps, with the target's states: computed, read from disk, or received from servers.

Batches follow from seed and step, so the states of later ones can be begun early. With `features.answers` it is their prompts
that follow: a step's batches are made when all their answers are there, because the loss divides by the number of their tokens.
A conversation is rendered up to its last reply, as for training on the given reply. The engine continues it. Worked example: a
is the prompt, `c d` the given reply, `x y z` the answer:

    the data's row       a a a c d
    requested            a a a
    answered             a a a x y z
    states                h h h h h 0        the engine never reads z, so its state is missing; no prediction needs it
    supervised           - - - x y z
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import collate, shard
from drafttrain.features.answers import Answer, AnswerRequest
from drafttrain.features.cached import Cached
from drafttrain.features.engine import EngineStates
from drafttrain.features.online import Online, Prefetch
from drafttrain.features.padded import finite_token
from drafttrain.features.servers import Servers
from drafttrain.model.batch import TrainBatch
from drafttrain.model.images import has_images
from drafttrain.train.engine import World
from drafttrain.train.following import OnPolicy
from drafttrain.train.job import TrainingJob
from drafttrain.train.sharding import sequence_group
from drafttrain.train.telemetry import Meter

STREAM = 0x616E7377  # a separate noise stream from those of the data and of measurements
LENGTHS = 64  # a batch's length on a GPU is a multiple: each other length is a new plan of cuDNN and a new shape to allocate


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
        answers = self.states.results(asked.parts)
        rows = [answered(request.prompt, answer.token_ids) for request, answer in zip(asked.requests, answers, strict=True)]
        batch = self.collate(rows)
        self.states.hold(batch, [answer.hidden_TKH for answer in answers])
        return batch

    def _request(self, row: Encoded, position: int) -> AnswerRequest:
        writing, prompt = self.states.writing, row.token_ids[: row.last_reply].tolist()
        assert writing is not None, "otherwise the given answers are trained on"
        if len(prompt) < 2:  # plain text is supervised from its second token on
            raise UserError(
                "features.answers continues prompts, but the data has plain text without replies; give conversations, or leave "
                "features.answers out"
            )
        if has_images(prompt):  # of data that is still being prepared: what is prepared is checked before training
            raise UserError("features.answers continues text alone, but a conversation has images; leave it out")
        max_new_tokens = min(writing.max_new_tokens, writing.longest - len(prompt))
        if max_new_tokens < 1:
            raise UserError(
                f"a prompt has {len(prompt)} tokens, which leave the target no room for an answer; lower data.max_length"
            )
        seed = int(np.random.SeedSequence([STREAM, self.seed % 2**64, position]).generate_state(1)[0]) >> 1
        return AnswerRequest(prompt, seed, max_new_tokens, writing)


def answered(prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
    """The row of a prompt and its answer, whose tokens alone are supervised."""
    mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Encoded(np.array([*prompt, *answer], np.int32), mask)


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of one step."""

    micro: list[TrainBatch]  # of this process; with sequence parallelism, its parts of them
    tokens: int  # that all processes read
    left_out: frozenset[int] = frozenset()  # places of the global batch whose rows nothing is learnt from

    def supervised(self) -> int:
        """Supervised tokens of this process's batches, which are on the host."""
        return sum(batch.supervised() for batch in self.micro)


class Batches:
    """Makes batches, and gets their states from `source`. meter: gets the time that this takes."""

    def __init__(self, job: TrainingJob, world: World, source: Online | Cached | EngineStates, meter: Meter) -> None:
        self.job, self.world, self.source, self.meter = job, world, source, meter
        self.group = sequence_group(job.train, world)
        self.on_policy = OnPolicy(job.drafter, job.loaded.target.stop_ids, job.train, world)
        self.prefetch = Prefetch(self._states, job.loaded.target.device)
        self._built: dict[int, StepBatches] = {}  # of later steps
        self._nonfinite = set[int]()  # training rows whose states are not finite
        self._asked: dict[int, list[Asked]] = {}  # of later steps whose answers have been requested
        self.answers: Answers | None = None  # None: the given replies are trained on
        if isinstance(source, EngineStates) and source.writing is not None:
            self.answers = Answers(source, job.train.seed, self._batch)

    def of(self, step: int) -> StepBatches:
        """The batches of a step, without states; each step's are built once."""
        if self.answers is not None:
            return self._answered(self.answers, step)
        if step in self._built:
            return self._without_known(self._built.pop(step), step)
        return self._without_known(self._made(step), step)

    def _made(self, step: int) -> StepBatches:
        options = self.job.train
        with self.meter.data():
            rows = self.job.data.global_batch(step, options.global_batch)
        rows = self.on_policy.rows(rows, step)
        with self.meter.data():
            group_size = options.sequence_parallel
            local_rows = shard(rows, self.world.rank // group_size, self.world.size // group_size, options.micro_batch)
            micro = [self._batch(micro_rows) for micro_rows in local_rows]
            if self.group is not None:
                micro = [batch.part(self.group, self.job.drafter.label_offset) for batch in micro]
            return StepBatches(micro, sum(len(row.token_ids) for row in rows))

    def ahead(self, step: int) -> StepBatches | None:
        """The batches of a later step, which `of` will return.

        None: there is no such step, or its replies are not written yet.
        """
        if step >= self.job.train.steps or self.answers is not None or self.job.train.on_policy:
            return None
        self._built[step] = self.of(step)
        return self._built[step]

    def places(self) -> slice:
        """The places of this process's rows in the global batch."""
        group_size = self.job.train.sequence_parallel
        return slice(self.world.rank // group_size, None, self.world.size // group_size)

    def without(self, batches: StepBatches, places: Collection[int]) -> StepBatches:
        """The batches with these places of the global batch as padding. All processes call it together."""
        token, size = self._finite_token, self.job.train.micro_batch
        is_left_out = [position in places for position in range(self.job.train.global_batch)][self.places()]
        micro = list[TrainBatch]()
        for micro_index, batch in enumerate(batches.micro):
            rows = [row for row in range(size) if is_left_out[micro_index * size + row]]
            micro.append(self._without(batch, rows, token) if rows else batch)
        return StepBatches(micro, batches.tokens, batches.left_out | frozenset(places))

    def by_place(self, fault_2B: Tensor) -> Tensor:
        """[2, R] counts by place of the global batch, from this process's rows."""
        counts_2R = torch.zeros(2, self.job.train.global_batch, dtype=torch.long, device=fault_2B.device)
        counts_2R[:, self.places()] = fault_2B.long()
        return counts_2R

    def origins(self, step: int, places: Collection[int]) -> list[str]:
        """The records of these places of a step, as messages name them."""
        size = self.job.train.global_batch
        return [self.job.data.origin(step * size + position, size) for position in sorted(places)]

    def remember(self, step: int, places: Collection[int]) -> None:
        """Leave these rows, whose states are not finite, out of later steps at once, if the states stay.

        They do with a frozen target and given texts.
        """
        size = self.job.train.global_batch
        if self.job.adapter is None and self.answers is None and not self.job.train.on_policy:
            self._nonfinite.update(self.job.data.rows.row(step * size + position, size) for position in places)

    def _without_known(self, batches: StepBatches, step: int) -> StepBatches:
        """The batches without the rows that are known to have states that are not finite."""
        if not self._nonfinite:
            return batches
        rows, size = self.job.data.rows, self.job.train.global_batch
        places = [position for position in range(size) if rows.row(step * size + position, size) in self._nonfinite]
        return self.without(batches, places) if not batches.left_out.issuperset(places) else batches

    def _without(self, batch: TrainBatch, rows: Sequence[int], token: int) -> TrainBatch:
        if isinstance(self.source, EngineStates):
            self.source.forget(batch)
        if batch.whole is None or self.group is None:
            return batch.without(rows, token)
        return batch.whole.without(rows, token).part(self.group, self.job.drafter.label_offset)

    @cached_property
    def _finite_token(self) -> int:
        return finite_token(self.job.loaded.target)

    def filled(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the frozen target's states, on the target's device."""
        return self.prefetch.fill(batch)

    def begin_next(self, left: list[TrainBatch], step: int) -> None:
        """Start loading, requesting or computing the next batches' states, unless the target computes them when they are due.

        left: batches of this step. On-policy replies cannot be prefetched: they need the weights after this step.
        """
        job, source = self.job, None if isinstance(self.source, Online) else self.source
        if not (job.prefetch or source) or job.adapter is not None or job.train.on_policy:
            return
        if self.answers is not None:
            self._ask(self.answers, step + 1)
            return
        for batch in islice(self._coming(left, step), source.ahead if source else 1):
            (source.begin if source else self.prefetch.start)(batch)

    def held_out(self) -> Iterator[TrainBatch]:
        """Batches of the held-out conversations, with the target's states."""
        rows, size = self.job.data.held_out, self.job.train.micro_batch
        batches = [self._batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        for i, batch in enumerate(batches):
            if isinstance(self.source, EngineStates):
                for upcoming in batches[i : i + 1 + self.source.ahead]:
                    self.source.begin(upcoming)
            filled = self.source.fill(batch)
            nonfinite = filled.nonfinite().nonzero()[:, 0].tolist()
            yield filled.without(nonfinite, self._finite_token) if nonfinite else filled
        if isinstance(self.source, EngineStates):
            self.source.pause()

    def _states(self, batch: TrainBatch) -> TrainBatch:
        with self.meter.target() if isinstance(self.source, Online) else self.meter.data():
            return self.source.fill(batch)

    def _coming(self, remaining: list[TrainBatch], step: int) -> Iterator[TrainBatch]:
        """The micro-batches after the current one, in order, whatever step they belong to."""
        yield from remaining
        next_step = step + 1
        while (batches := self.ahead(next_step)) is not None:
            yield from batches.micro
            next_step += 1

    def _answered(self, answers: Answers, step: int) -> StepBatches:
        """The batches of a step, once the target has answered its prompts."""
        with self.meter.data():
            prompt_batches = self._prompts(answers, step)
            del self._asked[step]
            for prompt_batch in prompt_batches:
                answers.begin(prompt_batch)
            self._ask(answers, step + 1)  # now, so that the servers have work while the longest answer is written
            micro = [answers.batch(prompt_batch) for prompt_batch in prompt_batches]
            tokens = sum(int((batch.document_BT >= 0).sum()) for batch in micro)
            return StepBatches(micro, int(self.world.sum(torch.tensor([tokens], device=self.job.loaded.target.device))))

    def _prompts(self, answers: Answers, step: int) -> list[Asked]:
        """The prompts of this process's micro-batches."""
        if step not in self._asked:
            size = self.job.train.global_batch
            requests = answers.requests(self.job.data.global_batch(step, size), step * size)
            micro_batches = shard(requests, self.world.rank, self.world.size, self.job.train.micro_batch)
            self._asked[step] = [Asked(micro_requests) for micro_requests in micro_batches]
        return self._asked[step]

    def _ask(self, answers: Answers, step: int) -> None:
        """Request the answers of the first `ahead` micro-batches from this step on."""
        assert isinstance(self.source, EngineStates)
        upcoming = (prompts for later in range(step, self.job.train.steps) for prompts in self._prompts(answers, later))
        for prompts in islice(upcoming, self.source.ahead):
            answers.begin(prompts)

    def _batch(self, rows: Sequence[Encoded]) -> TrainBatch:
        pad, target = self.job.loaded.tokenizer.pad_token_id, self.job.loaded.target
        multiple = LENGTHS if target.device.type == "cuda" else 1
        return collate(rows, 0 if pad is None else pad, multiple, target.shape.max_positions)
