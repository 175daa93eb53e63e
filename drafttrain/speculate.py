"""Floor 2: the one decode loop. It knows no drafter by name; without a drafter it is plain decoding, the baseline.

Shapes: S slots, B active rows, N tree nodes, A accepted nodes, T prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafter import Commit, Drafter
from drafttrain.errors import UserError
from drafttrain.fallback import Fallback
from drafttrain.kv import pages_for
from drafttrain.processors import Processors
from drafttrain.request import Chunk, Request, Result, StopText
from drafttrain.sampling import Sampling, choose
from drafttrain.target import Taps, Target, TargetOut
from drafttrain.tree import DraftTree, depth
from drafttrain.verify import LEAST, Verdict, policy_for

PREFILL_TOKENS = 8192  # of all prompts that enter in one round


@dataclass
class Costs:
    """Seconds summed over the decode steps, prefill excluded. host: bookkeeping between the other three."""

    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    host: float = 0.0
    steps: int = 0


@dataclass
class Decoded:
    results: list[Result]
    costs: Costs


@dataclass(frozen=True, slots=True)
class Controls:
    """draft_length: no deeper proposals than this; None: as trained. window: drafts of a path offered to one verification,
    whatever was drafted. threshold: of the policy of that name. fallback: draft only while it pays (`Fallback`).
    """

    draft_length: int | None = None
    window: int | None = None
    threshold: float = LEAST
    fallback: bool = False

    def __post_init__(self) -> None:
        for name in ("draft_length", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"decode.{name} is {value}; set it to 1 or more, or leave it out")


class Decoder:
    """What a session decodes with: target, drafter (None: plainly, with the same target, cache and sampler), policy, settings.

    `prefill_chunk` bounds the positions of one prefill pass. stop_ids and the parameters named like those of `Request` are
    for `run`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: str,
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        max_new_tokens: int = 128,
        prefill_chunk: int = 512,
        controls: Controls = Controls(),
        min_new_tokens: int = 0,
        stop_text: StopText | None = None,
    ) -> None:
        self.target, self.drafter, self.controls = target, drafter, controls
        self.policy = policy_for(policy, sampling, controls.threshold)
        self.sampling = replace(sampling, shared_noise=policy == "coupled")
        if drafter is not None and not target.trees and any(set(path) != {0} for path in drafter.paths()):
            raise UserError("the drafter proposes trees; this target's architecture is exact for chains only: draft a chain")
        self.prefill_chunk = prefill_chunk
        self._text: dict[str, Any] = {"stop_ids": stop_ids, "max_new_tokens": max_new_tokens}
        self._text |= {"min_new_tokens": min_new_tokens, "stop_text": stop_text}
        self.taps = drafter.taps if drafter else Taps()
        # a proposal may reach past the last token that counts: its scratch positions need room too
        self.scratch = drafter.max_nodes if drafter else 1
        self.fallback = None
        if drafter is not None and controls.fallback:
            self.fallback = Fallback(min(drafter.draft_length, controls.draft_length or drafter.draft_length))

    def positions(self, request: Request) -> int:
        """Cache positions that one text of this request may need. Raises ValueError for one that the target cannot hold."""
        text, limit = len(request.prompt) + request.max_new_tokens, self.target.shape.max_positions
        if text > limit:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens + max_new_tokens {request.max_new_tokens} exceed the target's "
                f"{limit}; shorten the prompt or lower decode.max_new_tokens"
            )
        return text + self.scratch

    def request(self, prompt: Sequence[int], key: int = 0) -> Request:
        """A request with the decoder's own limits."""
        return Request(prompt, key, **self._text)

    def run(self, prompts: Sequence[Sequence[int]], batch_size: int = 1, first_request: int = 0) -> Decoded:
        """Decode every prompt, `batch_size` at a time; a finished one makes room for the next. Results in prompt order.

        Raises ValueError for an empty prompt or one that leaves no room for new tokens.
        """
        requests = [self.request(prompt, first_request + i) for i, prompt in enumerate(prompts)]
        session = Session(self, min(batch_size, len(requests)), max(map(self.positions, requests), default=1))
        results = [result for request in requests for result in session.submit(request)]
        for _ in session:
            pass
        return Decoded(results, session.costs)


@dataclass(slots=True)
class _Waiting:
    request: Request
    results: list[Result]


class Session:
    """Requests queue, decode in slots and leave. `step` is one round for all that run; iterating runs until all are done.

    pages: of the KV cache, in all; None: every slot has room for max_len positions. A request waits in the queue until slots
    and pages are free for all its samples.
    """

    def __init__(self, decoder: Decoder, slots: int, max_len: int, pages: int | None = None) -> None:
        self.decoder, self.costs, self.max_len = decoder, Costs(), max_len
        target, device = decoder.target, decoder.target.device
        self.kv = target.new_cache(slots, max_len, pages)
        self.state: Any = decoder.drafter.open(slots, max_len) if decoder.drafter else None
        self.processors = Processors(slots, target.shape.vocab_size, decoder.sampling.repetition_penalty, device)
        self.queue: deque[_Waiting] = deque()
        self.free = list(range(slots))[::-1]
        self.active: dict[int, tuple[Request, Result]] = {}  # by slot, in the order of the rows
        self.slot_B = torch.empty(0, dtype=torch.long, device=device)
        self.root_S, self.key_S = (torch.zeros(slots, dtype=torch.long, device=device) for _ in range(2))
        self.pooled = pages is not None

    def submit(self, request: Request) -> list[Result]:
        """Queue a request; its results, one per sample, fill as it runs. Raises ValueError for one that can never run."""
        positions, slots = self.decoder.positions(request), self.kv.slots
        common = len(request.prompt) // self.kv.page * (request.samples - 1) if self.pooled else 0
        pages = request.samples * pages_for(positions) - common
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
        """Let waiting requests in, then one decode round: propose, verify, commit, observe. Returns what became text."""
        chunks = self._admit()
        if not self.active:
            return chunks
        decoder, drafter, slot_B = self.decoder, self.decoder.drafter, self.slot_B
        sampling, began = decoder.sampling.rows(self.key_S[slot_B]), perf_counter()
        limit = decoder.fallback.depth(len(slot_B)) if decoder.fallback else decoder.controls.draft_length
        if drafter is None or limit == 0:
            tree = DraftTree.chain(self.root_S[slot_B][:, None])
        else:
            tree = drafter.propose(self.state, slot_B, sampling, limit)
            tree = tree if decoder.controls.window is None else tree.cut(decoder.controls.window)
        drafted, ancestor_BNN = perf_counter(), tree.ancestor_BNN
        # Past the target's last position there are only drafts that the cut below drops.
        position_BN = (self.kv.length_B[:, None] + depth(ancestor_BNN)).clamp_max(decoder.target.shape.max_positions - 1)
        self.kv.room(tree.token_BN.shape[1])
        out = decoder.target(tree.token_BN, self.kv, ancestor_BNN, position_BN, decoder.taps)
        verified = perf_counter()
        logits_BNV = self._processed(out.logits_BRV, tree.token_BN, ancestor_BNN, slot_B)
        verdict = decoder.policy.verify(tree, ancestor_BNN, logits_BNV, position_BN, sampling)
        self.kv.keep(verdict.path_BA, verdict.count_B)
        commit = commit_of(tree, verdict, out)
        if drafter is not None:
            drafter.observe(self.state, commit, slot_B)
        self.root_S[slot_B] = verdict.bonus_B
        self.processors.add(slot_B, commit.next_BA, verdict.count_B)
        committed = perf_counter()
        chunks += self._record(tree, verdict, commit.next_BA)
        if decoder.fallback is not None and limit is not None:
            reached = [count - 1 for count in verdict.count_B.tolist()]
            decoder.fallback.record(len(slot_B), limit, committed - began, sum(reached) + len(reached), reached)
        self._retire()
        self.costs.draft += drafted - began
        self.costs.verify += verified - drafted
        self.costs.commit += committed - verified
        self.costs.host += perf_counter() - committed
        self.costs.steps += 1
        return chunks

    def _processed(self, logits_BNV: Tensor | None, token_BN: Tensor, ancestor_BNN: Tensor, slot_B: Tensor) -> Tensor:
        assert logits_BNV is not None
        if self.processors.idle:
            return logits_BNV
        made = [len(self.active[slot][1].tokens) for slot in slot_B.tolist()]
        return self.processors(logits_BNV, token_BN, ancestor_BNN, slot_B, made)

    def _admit(self) -> list[Chunk]:
        """Give waiting requests slots and pages, in order, and prefill them together."""
        entering: list[tuple[_Waiting, list[int]]] = []
        tokens = 0
        while self.queue and len(self.free) >= self.queue[0].request.samples and tokens < PREFILL_TOKENS:
            waiting = self.queue[0]
            request, positions = waiting.request, self.decoder.positions(waiting.request)
            if self.pooled:  # the samples' own pages are taken at once, so that they cannot lack them later
                common = len(request.prompt) // self.kv.page
                if request.samples * pages_for(positions) - (request.samples - 1) * common > self.kv.free_pages:
                    break
            self.queue.popleft()
            slots = [self.free.pop() for _ in range(request.samples)]
            if self.pooled:
                self.kv.reserve(slots[0], positions)
            for sample, slot in enumerate(slots):
                self.key_S[slot] = request.key + sample
                self.processors.enter(slot, request)
                waiting.results[sample].started = perf_counter()
            entering.append((waiting, slots))
            tokens += len(request.prompt)
        return self._prefill(entering) if entering else []

    def _prefill(self, entering: list[tuple[_Waiting, list[int]]]) -> list[Chunk]:
        """A prompt is a chain that is accepted whole: causal passes over chunks, one `observe` each for all its samples."""
        decoder, device = self.decoder, self.root_S.device
        prompts = [torch.tensor(w.request.prompt, device=device) for w, _ in entering]
        length_B = torch.tensor([len(p) for p in prompts], device=device)
        token_BT = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        self.kv.rows(torch.tensor([slots[0] for _, slots in entering], device=device))
        self.kv.reset(self.kv.slot_B)
        last_BV: Tensor | None = None
        commits = []
        for start in range(0, token_BT.shape[1], decoder.prefill_chunk):
            chunk_BT = token_BT[:, start : start + decoder.prefill_chunk]
            count_B = (length_B - start).clamp(0, chunk_BT.shape[1])
            column_T = torch.arange(chunk_BT.shape[1], device=device)
            position_BT = self.kv.length_B[:, None] + column_T
            out = decoder.target(chunk_BT, self.kv, None, position_BT, decoder.taps, (count_B - 1).clamp_min(0)[:, None])
            assert out.logits_BRV is not None
            ends_B1 = ((count_B > 0) & (start + count_B == length_B))[:, None]
            last_BV = out.logits_BRV[:, 0] if last_BV is None else torch.where(ends_B1, out.logits_BRV[:, 0], last_BV)
            self.kv.keep(column_T.expand_as(chunk_BT), count_B)
            commits.append((start, chunk_BT.shape[1], count_B, out.hidden))
        assert last_BV is not None
        self._share(entering)
        row_S = torch.tensor([row for row, (_, slots) in enumerate(entering) for _ in slots], device=device)
        slot_S = torch.tensor([slot for _, slots in entering for slot in slots], device=device)
        last_SV, length_S, token_ST = last_BV[row_S], length_B[row_S], token_BT[row_S]
        entered = {s: (w.request, r) for w, slots in entering for s, r in zip(slots, w.results, strict=True)}
        self.active = dict(sorted((self.active | entered).items()))  # rows in slot order: a full cache is read in place
        one_S11 = torch.ones(len(slot_S), 1, 1, dtype=torch.bool, device=device)
        last_token_S1 = token_ST.gather(1, length_S[:, None] - 1)
        last_SV = self._processed(last_SV[:, None], last_token_S1, one_S11, slot_S)[:, 0]
        root_S = self.root_S[slot_S] = choose(last_SV, decoder.sampling.rows(self.key_S[slot_S]), length_S)
        self.processors.add(slot_S, root_S[:, None], torch.ones_like(root_S))
        if decoder.drafter:
            decoder.drafter.reset(self.state, slot_S)
            known_ST = torch.cat([token_ST, token_ST[:, :1]], 1).scatter(1, length_S[:, None], root_S[:, None])
            for start, width, count_B, hidden in commits:
                after_ST = known_ST[:, start + 1 : start + width + 1]
                states = {key: state[row_S] for key, state in hidden.items()}
                commit = Commit(known_ST[:, start : start + width], after_ST, states, count_B[row_S])
                decoder.drafter.observe(self.state, commit, slot_S)
        now, chunks = perf_counter(), []
        for slot, token in zip(slot_S.tolist(), root_S.tolist(), strict=True):
            request, result = self.active[slot]
            result.tokens, result.first, result.ended = [token], now, now
            self._end(request, result, 1)
            chunks.append(Chunk(result, [token], 0))
        self._retire(entered=True)
        return chunks

    def _share(self, entering: list[tuple[_Waiting, list[int]]]) -> None:
        """The other samples of a prompt begin with the first one's committed positions."""
        for waiting, (first, *others) in entering:
            for slot in others:
                if self.pooled:
                    self.kv.reserve(slot, self.decoder.positions(waiting.request), shared=first)
                else:
                    self.kv.copy(first, slot)

    def _record(self, tree: DraftTree, verdict: Verdict, next_BA: Tensor) -> list[Chunk]:
        """Count the round per request, cut where the text ends."""
        now, chunks = perf_counter(), []
        has_child = (tree.parent_BN == verdict.last_B[:, None]).any(-1).tolist()
        rows = zip(
            self.active.values(), verdict.count_B.tolist(), next_BA.tolist(), tree.count_B.tolist(), has_child, strict=True
        )
        for (request, result), count, tokens, nodes, goes_on in rows:
            result.tokens += tokens[:count]
            kept = self._end(request, result, count)
            drafts = min(kept, count - 1)
            _add(result.offered, drafts + (1 if kept == count and goes_on else 0))
            _add(result.accepted, drafts)
            result.emitted += kept
            result.verifications += 1
            result.nodes += nodes - 1
            result.ended = now
            chunks.append(Chunk(result, tokens[:kept], drafts))
        return chunks

    def _end(self, request: Request, result: Result, new: int) -> int:
        """Cut the result where its text ends, if within its `new` last tokens; how many of them stay."""
        tokens, before = result.tokens, len(result.tokens) - new
        ends = [(i + 1, "stop") for i in range(before, len(tokens)) if tokens[i] in request.stop_ids][:1]
        if request.stop_text is not None and (end := request.stop_text.end(tokens, new)) is not None:
            ends.append((end, "text"))
        if len(tokens) >= request.max_new_tokens:
            ends.append((request.max_new_tokens, "length"))
        if ends:
            end, result.ended_by = min(ends, key=lambda e: e[0])
            del tokens[end:]
        return len(tokens) - before

    def _retire(self, entered: bool = False) -> None:
        """Free what finished requests held, and tell the cache which slots go on."""
        done = [slot for slot, (_, result) in self.active.items() if result.ended_by]
        for slot in done:
            del self.active[slot]
            self.free.append(slot)
            if self.pooled:
                self.kv.release(slot)
        if done or entered:
            self.slot_B = torch.tensor(list(self.active), dtype=torch.long, device=self.slot_B.device)
            self.kv.rows(self.slot_B)


def commit_of(tree: DraftTree, verdict: Verdict, out: TargetOut) -> Commit:
    """Lay the accepted path out in aligned columns: token, the token after it, the target's state at it."""
    token_BA = tree.token_BN.gather(1, verdict.path_BA)
    rows_B, last_B = torch.arange(len(token_BA), device=token_BA.device), verdict.count_B - 1
    next_BA = torch.cat([token_BA[:, 1:], token_BA[:, :1]], 1)
    next_BA[rows_B, last_B] = verdict.bonus_B
    hidden = {k: h_BNH.gather(1, verdict.path_BA[..., None].expand(-1, -1, h_BNH.shape[-1])) for k, h_BNH in out.hidden.items()}
    return Commit(token_BA, next_BA, hidden, verdict.count_B)


def _add(counts: list[int], depth_reached: int) -> None:
    counts.extend([0] * (depth_reached - len(counts)))
    for i in range(depth_reached):
        counts[i] += 1
