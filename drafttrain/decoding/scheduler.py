"""The one decode loop: requests queue, prompts enter the caches, texts decode in slots and leave. `Decoder` runs it.

Shapes: B active rows or prompts, S sequences (a prompt may have several), T prompt positions, R logit rows, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.core.sampling import Lane
from drafttrain.decoding.graph_runner import LEAST_BOUND, Captures, GraphRunner, Launched, Shares
from drafttrain.decoding.logits_processors import LogitsProcessors
from drafttrain.decoding.request import Chunk, Request, Result
from drafttrain.decoding.settings import DecoderSettings
from drafttrain.decoding.step import DecodeStep, SlotState, StepRow
from drafttrain.model.drafter import Commit
from drafttrain.model.images import chunk_ends
from drafttrain.model.target import Taps
from drafttrain.ops.sampling import sample


class Prefill:
    """Prompts enter the caches, and every request gets its first token.

    A prompt is a chain that is accepted whole: causal passes over chunks, each observed by the drafter.
    """

    def __init__(self, step: DecodeStep, chunk: int, bounded: bool) -> None:
        """chunk: positions of one pass at most. bounded: the lengths of the drafter's caches are bounded by a graph runner."""
        self.decode_step, self.chunk, self.bounded = step, chunk, bounded

    def __call__(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(slot_S, root_S): the slots of each prompt's sequences, prompt by prompt, and their first tokens.

        Only the first slot of a prompt holds it in the target's cache.
        """
        decode, device = self.decode_step, self.decode_step.target.device
        rows = [torch.tensor(prompt, device=device) for prompt in prompts]
        token_BT, lengths = pad_sequence(rows, batch_first=True), [len(row) for row in rows]
        length_B = torch.tensor(lengths, device=device)
        row_S = torch.tensor([row for row, prompt_slots in enumerate(slots) for _ in prompt_slots], device=device)
        slot_S = torch.tensor([slot for prompt_slots in slots for slot in prompt_slots], device=device)
        decode.kv.use_static_length(None)
        decode.kv.rows(torch.tensor([prompt_slots[0] for prompt_slots in slots], device=device))
        decode.kv.reset(decode.kv.slot_B)
        if decode.state is not None:
            decode.state.reset(slot_S)
        last_BV: Tensor | None = None
        root_S = torch.zeros_like(slot_S)
        for start, stop in pairwise([0, *chunk_ends(prompts, self.chunk, decode.target.whole_images)]):
            chunk_BT = token_BT[:, start:stop]
            counts = [min(max(length - start, 0), chunk_BT.shape[1]) for length in lengths]
            count_B = (length_B - start).clamp(0, chunk_BT.shape[1])
            chunk_BV, hidden = self._pass(chunk_BT, count_B)
            decode.kv.extend(counts)
            ends_B1 = ((count_B > 0) & (start + count_B == length_B))[:, None]
            last_BV = chunk_BV if last_BV is None else torch.where(ends_B1, chunk_BV, last_BV)
            if any(start < length <= stop for length in lengths):
                root_S = self._first(last_BV[row_S], slot_S, token_BT.gather(1, length_B[:, None] - 1)[row_S], length_B[row_S])
            if decode.state is not None:
                token_ST = torch.cat([token_BT, token_BT[:, :1]], 1)[row_S].scatter(1, length_B[row_S, None], root_S[:, None])
                states = {key: state[row_S] for key, state in hidden.items()}
                commit = Commit(token_ST[:, start:stop], token_ST[:, start + 1 : stop + 1], states, count_B[row_S])
                for kv in decode.state.caches if self.bounded else ():
                    kv.use_static_length(start)
                decode.state.observe_prompt(commit, slot_S)
        return slot_S, root_S

    def _pass(self, chunk_BT: Tensor, count_B: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """One chunk through the target: the logits [B, V] at each row's last token of it, and the tapped states.

        Its keys and values are scratch positions of the target's cache, which the caller commits.
        """
        decode, column_T = self.decode_step, torch.arange(chunk_BT.shape[1], device=chunk_BT.device)
        position_BT = decode.kv.length_B[:, None] + column_T
        out = decode.target(chunk_BT, decode.kv, None, position_BT, decode.taps, (count_B - 1).clamp_min(0)[:, None])
        assert out.logits_BRV is not None
        return out.logits_BRV[:, 0], out.hidden

    def again(self, slot: int, text: Sequence[int]) -> None:
        """Fill the slot of the target's cache with this text, which is shorter than what it holds. Rows stay those in use."""
        kv, device = self.decode_step.kv, self.decode_step.target.device
        static, slot_B = kv.static_length, kv.slot_B
        kv.use_static_length(None)
        kv.rows(torch.tensor([slot], device=device))
        kv.reset(kv.slot_B)
        for start in range(0, len(text), self.chunk):
            chunk_1T = torch.tensor([text[start : start + self.chunk]], device=device)
            position_1T = start + torch.arange(chunk_1T.shape[1], device=device)[None]
            self.decode_step.target(chunk_1T, kv, None, position_1T, Taps(), chunk_1T[:, :0])
            kv.extend([chunk_1T.shape[1]])
        kv.use_static_length(static)
        kv.rows(slot_B)

    def _first(self, last_SV: Tensor, slot_S: Tensor, token_S1: Tensor, length_S: Tensor) -> Tensor:
        """The first token of every sequence, from the logits at its prompt's last token."""
        processors, slots = self.decode_step.logits_processors, self.decode_step.slots
        if not processors.idle:
            ancestor_S11 = torch.ones(len(slot_S), 1, 1, dtype=torch.bool, device=slot_S.device)
            last_SV = processors(last_SV[:, None], token_S1, ancestor_S11, slot_S, torch.zeros_like(slot_S))[:, 0]
        return sample(last_SV, slots.sampling(self.decode_step.sampling, slot_S), length_S, Lane.TARGET)


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
            slot_count, target.shape.vocab_size, decoder.sampling, device, target.placeholder
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
            for number, slot in enumerate(slots):
                self.slots.enter(slot, request, request.key + number)
                self.logits_processors.enter(slot, request)
                waiting.results[number].started = perf_counter()
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


@dataclass
class Decoded:
    results: list[Result]
    costs: Costs


class Decoder(DecoderSettings):
    """The one decoder: it decodes prompts with its settings. It knows no drafter by name.

    Without a drafter it is plain decoding, the baseline. A session is kept from one call to the next where that saves
    capturing graphs.
    """

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
        if self._session is not None and self._session.runner is not None and not self._session.runner.capture:
            self.captures = False  # a capture has failed: no other is tried
        if not self.captures:
            self._session = None
            return Session(self, slots, max_len)
        if self._session is None or self._session.kv.slots != slots or self._session.max_len < max_len:
            self._session = None  # its cache goes before the new one comes
            # it does not keep its owner alive: as a cycle both would stay, with cache and graphs, until a collection
            self._session = Session(weakref.proxy(self), slots, -(-max_len // LEAST_BOUND) * LEAST_BOUND)
        self._session.costs = Costs()
        return self._session
