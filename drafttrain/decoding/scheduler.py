"""The one decode loop: requests queue, decode in slots and leave.

Shapes: S slots, B active rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from drafttrain.decoding.graph_runner import Captures, GraphRunner, Launched, Shares
from drafttrain.decoding.logits_processors import LogitsProcessors
from drafttrain.decoding.prefill import Prefill
from drafttrain.decoding.request import Chunk, Request, Result
from drafttrain.decoding.settings import DecoderSettings
from drafttrain.decoding.step import DecodeStep, SlotState, StepRow

PREFILL_TOKENS = 8192  # of all prompts that enter in one step


@dataclass
class Costs:
    """Seconds summed over the decode steps, prefill excluded."""

    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    host: float = 0.0  # bookkeeping between the other three that does not overlap with them
    steps: int = 0
    captures: int = 0  # CUDA graphs made; their time is not part of the steps
    capture_seconds: float = 0.0
    capture_bytes: int = 0  # device memory
    weight_bytes: int = 0  # read by the captured steps, all together


@dataclass(slots=True)
class _Waiting:
    request: Request
    results: list[Result]


@dataclass(slots=True)
class _InFlight:
    """Decode steps that were launched and not read yet."""

    rows: list[tuple[Request, Result] | None]  # None: a sequence that has been cut since
    limit: int | None
    launched: Launched
    steps: int


class Session:
    """Requests queue, decode in slots and leave. `step` is one decode step for all that run; iterating runs until all are done.

    A request waits in the queue until slots and pages are free for all its samples.
    """

    def __init__(self, decoder: DecoderSettings, slots: int, max_len: int, pages: int | None = None) -> None:
        """pages: of the KV cache, in all; None: every slot has room for max_len positions."""
        self.decoder, self.costs, self.max_len = decoder, Costs(), max_len
        target, device, slot_count = decoder.target, decoder.target.device, slots + 1  # the last one is the padding slot
        self.kv = target.new_cache(slots, max_len, pages)
        self.state = decoder.drafter.open(slot_count, max_len) if decoder.drafter else None
        self.logits_processors = LogitsProcessors(
            slot_count, target.shape.vocab_size, decoder.sampling.repetition_penalty, device, target.placeholder
        )
        self.slots = SlotState(slot_count, decoder.sampling, device)
        self.decode_step = DecodeStep(
            target, decoder.drafter, decoder.policy, decoder.sampling, decoder.controls.window,
            self.kv, self.state, self.slots, self.logits_processors, decoder.may_fall_back, decoder.cut,
        )  # fmt: skip
        self.runner = GraphRunner(self.decode_step, decoder.captures) if decoder.read_every else None
        self.prefill = Prefill(self.decode_step, decoder.prefill_chunk, self.runner is not None)
        self._in_flight: _InFlight | None = None
        self._read_at = 0.0  # when the host last read results
        self.queue: deque[_Waiting] = deque()
        self.free = list(range(slots))[::-1]
        self.active: dict[int, tuple[Request, Result]] = {}  # by slot, in the order of the rows
        self.slot_B = torch.empty(0, dtype=torch.long, device=device)
        self.pooled = pages is not None

    def submit(self, request: Request) -> list[Result]:
        """Queue a request; its results, one per sample, fill as it runs. Raises ValueError for one that can never run."""
        positions, slots = self.decoder.positions(request), self.kv.slots
        pages = self.kv.pages_needed(positions, request.samples, len(request.prompt) if self.pooled else 0)
        if request.samples > slots or positions > self.max_len or pages > self.kv.pages:
            raise ValueError(
                f"{request.samples} x {positions} positions need {request.samples} slots and {pages} pages; "
                f"the session has {slots} slots of {self.max_len} positions and {self.kv.pages} pages"
            )
        now, key = perf_counter(), request.key
        results = [Result(key + i, len(request.prompt), queued=now) for i in range(request.samples)]
        self.queue.append(_Waiting(request, results))
        return results

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.active)

    def __iter__(self) -> Iterator[Chunk]:
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Admit waiting requests, then run one decode step; with a runner, launch several. Gives the text read meanwhile."""
        chunks = self._admit()
        if not self.active:
            self._in_flight = None
            return chunks
        fallback, rows = self.decoder.fallback, len(self.active)
        limit = fallback.depth(rows) if fallback else self.decoder.controls.draft_length
        if self.decoder.may_fall_back and all(result.plain for _, result in self.active.values()):
            limit = 0
        return chunks + (self._run(limit) if self.runner is None else self._launch(self.runner, limit))

    def _run(self, limit: int | None) -> list[Chunk]:
        """One decode step, whose results are read at once."""
        rows = StepRow.of(self.decode_step.run(self.slot_B, limit).tolist())
        start, drafted, verified, committed = self.decode_step.marks
        chunks = self._record([*self.active.values()], rows)
        self._learn(limit, committed - start, rows)
        if self.decoder.cut is not None:
            deepest = max(row.nodes for row in rows) - 1
            self.decoder.cut.record(len(rows), self.decode_step.drafted, deepest, drafted - start, committed - drafted)
        self._retire()
        self.costs.draft += drafted - start
        self.costs.verify += verified - drafted
        self.costs.commit += committed - verified
        self.costs.host += perf_counter() - committed
        self.costs.steps += 1
        return chunks

    def _launch(self, runner: GraphRunner, limit: int | None) -> list[Chunk]:
        """Launch decode steps, then read those launched before.

        So the device has work while the host reads. The price is that the host does not know yet how long the texts are that it
        launches for, nor which of them have ended: it launches for the longest that they can be, and drops what comes too late.
        """
        previous, steps = self._in_flight, self.decoder.read_every or 1
        known_length = max(result.prompt_tokens + len(result.tokens) for _, result in self.active.values())
        unknown = steps + (previous.steps if previous else 0)
        if previous is None:
            self._read_at = perf_counter()
        captures_before = runner.made
        launched = runner.launch(list(self.active), known_length + (unknown + 2) * self.decoder.reach, limit, steps)
        self._in_flight = _InFlight([*self.active.values()], limit, launched, steps)
        if runner.made.count > captures_before.count:
            self._exclude_capture_time(runner.made - captures_before)
        return self._read(previous) if previous else []

    def _exclude_capture_time(self, captures: Captures) -> None:
        """Count captures separately: they happen once, and are not part of any step's or sequence's time."""
        self.costs.captures += captures.count
        self.costs.capture_seconds += captures.seconds
        self.costs.capture_bytes += captures.bytes
        self._read_at += captures.seconds
        for _, result in self.active.values():
            result.started += captures.seconds
            result.first += captures.seconds
        for result in [r for _, r in self.active.values()] + [r for waiting in self.queue for r in waiting.results]:
            result.queued += captures.seconds

    def _read(self, in_flight: _InFlight) -> list[Chunk]:
        # The host knows only when results came. The time between two of its readings is that of the steps in between; their
        # parts are measured on the device, scaled down where they are more than that, and what is left is the host's.
        chunks, last_read = [], self._read_at
        step_rows = in_flight.launched.rows()
        self._read_at = perf_counter()
        step_seconds = (self._read_at - last_read) / in_flight.steps
        for rows in step_rows:
            chunks += self._record(in_flight.rows, rows)
            self._learn(in_flight.limit, step_seconds, rows)
        shares = in_flight.launched.parts() or Shares(0.0, step_seconds, 0.0)
        scale = min(1.0, step_seconds / shares.total) * in_flight.steps if shares.total else 0.0
        self.costs.draft += shares.draft * scale
        self.costs.verify += shares.verify * scale
        self.costs.commit += shares.commit * scale
        self.costs.host += max(0.0, step_seconds - shares.total) * in_flight.steps
        self.costs.steps += in_flight.steps
        self.costs.weight_bytes += in_flight.launched.weight_bytes * in_flight.steps
        self._retire()
        if not self.active:
            self._in_flight = None  # nobody reads what was launched ahead; the time until the next request is no step's
        return chunks

    def _learn(self, limit: int | None, seconds: float, rows: list[StepRow]) -> None:
        fallback = self.decoder.fallback
        if fallback is None or limit is None:
            return
        drafted_rows = [row for row in rows if row.count and (row.nodes > 1 or not (limit and self.decoder.may_fall_back))]
        if drafted_rows:
            fallback.record(len(rows), limit, seconds, sum(row.count for row in rows), [row.count - 1 for row in drafted_rows])

    def _admit(self) -> list[Chunk]:
        """Give waiting requests slots and pages, in order, and prefill them together."""
        admitted: list[tuple[_Waiting, list[int]]] = []
        tokens, reserved_pages = 0, 0  # pages: the other samples take theirs when the first one's prompt has been read
        while self.queue and len(self.free) >= self.queue[0].request.samples and tokens < PREFILL_TOKENS:
            waiting = self.queue[0]
            request, positions = waiting.request, self.decoder.positions(waiting.request)
            if self.pooled:
                pages = self.kv.pages_needed(positions, request.samples, len(request.prompt))
                if pages > self.kv.free_pages - reserved_pages:
                    break
                reserved_pages += pages - self.kv.pages_needed(positions)
            self.queue.popleft()
            slots = [self.free.pop() for _ in range(request.samples)]
            if self.pooled:
                self.kv.reserve(slots[0], positions)
            for sample, slot in enumerate(slots):
                self.slots.enter(slot, request, request.key + sample)
                self.logits_processors.enter(slot, request)
                waiting.results[sample].started = perf_counter()
            admitted.append((waiting, slots))
            tokens += len(request.prompt)
        return self._prefill(admitted) if admitted else []

    def _prefill(self, admitted: list[tuple[_Waiting, list[int]]]) -> list[Chunk]:
        sequences = {s: (w.request, r) for w, slots in admitted for s, r in zip(slots, w.results, strict=True)}
        self.active = dict(sorted((self.active | sequences).items()))  # rows in slot order: a full cache is read in place
        slot_S, root_S = self.prefill([w.request.prompt for w, _ in admitted], [slots for _, slots in admitted])
        self._share(admitted)
        self.slots.begin(slot_S, root_S)
        if not self.logits_processors.idle:
            self.logits_processors.add(slot_S, root_S, root_S[:, None], torch.ones_like(root_S))
        return self._entered(slot_S.tolist(), root_S.tolist())

    def _entered(self, slots: list[int], roots: list[int]) -> list[Chunk]:
        now, chunks = perf_counter(), []
        for slot, token in zip(slots, roots, strict=True):
            request, result = self.active[slot]
            result.begin(request, token, now)
            chunks.append(Chunk(result, [token], 0))
        self._retire(entered=True)
        return chunks

    def _share(self, admitted: list[tuple[_Waiting, list[int]]]) -> None:
        """The other samples of a prompt begin with the first one's committed positions."""
        for waiting, (first_slot, *other_slots) in admitted:
            for slot in other_slots:
                self.kv.fork(first_slot, slot, self.decoder.positions(waiting.request))

    def _record(self, sequences: Sequence[tuple[Request, Result] | None], rows: list[StepRow]) -> list[Chunk]:
        """Add a decode step to the results. Steps of a sequence that has ended or was cut are dropped."""
        now, chunks = perf_counter(), []
        for sequence, row in zip(sequences, rows, strict=True):
            if sequence is None or not row.count:
                continue
            request, result = sequence
            if not (result.ended_by or result.fell_back):
                chunks.append(result.take(request, row.tokens[: row.count], row.nodes - 1, row.open, now))
        return chunks

    def _fall_back(self) -> None:
        """Switch sequences that a guard has cut to plain decoding. Their steps in flight are dropped."""
        for slot, (request, result) in self.active.items():
            if result.fell_back:
                if not self.kv.croppable:
                    self.prefill.again(slot, [*request.prompt, *result.tokens[:-1]])
                self.decode_step.fall_back(slot, request.prompt, result.tokens)
                result.fell_back = False
                if self._in_flight is not None:
                    self._in_flight.rows = [t if t is None or t[1] is not result else None for t in self._in_flight.rows]

    def _retire(self, entered: bool = False) -> None:
        """Free the slots and pages of finished requests, and update the rows of the cache."""
        finished = [slot for slot, (_, result) in self.active.items() if result.ended_by]
        for slot in finished:
            del self.active[slot]
            self.free.append(slot)
            if self.pooled:
                self.kv.release(slot)
        if finished or entered:
            self.slot_B = torch.tensor(list(self.active), dtype=torch.long, device=self.slot_B.device)
            if self.runner is None:
                self.kv.rows(self.slot_B)
        if self.decoder.may_fall_back:
            self._fall_back()
