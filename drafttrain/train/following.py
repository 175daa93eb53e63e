"""Optimiser steps of a drafter inside another training loop, without DeepSpeed, and on-policy distillation.

Shapes: B rows, T positions, K draft depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.data.chat import Encoded
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.features.padded import rows_of
from drafttrain.model.batch import TrainBatch
from drafttrain.model.drafter import Drafter
from drafttrain.objective.losses import Objective, StepCounts
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import World
from drafttrain.train.optimizer import make_optimizer

STREAM = 0x6F6E706F  # a separate noise stream from those of the data and of measurements


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """On-policy distillation: the drafter's own language model, at the current step, writes some replies of a batch.

    The target then gives its distribution at each position (GKD, arXiv 2306.13649; DistillSpec, arXiv 2310.08461). The chosen
    replies and the new text depend only on seed, step and weights.
    """

    drafter: Drafter
    stop_ids: frozenset[int]
    options: TrainOptions
    world: World

    def rows(self, rows: list[Encoded], step: int) -> list[Encoded]:
        """The batch with last replies rewritten, for a share `on_policy` of its conversations.

        Each process rewrites its own part of the batch only.
        """
        if not self.options.on_policy:
            return rows
        selected = np.random.default_rng([STREAM, self.options.seed % 2**64, step]).random(len(rows)) < self.options.on_policy
        local_indices = [i for i in range(self.world.rank, len(rows), self.world.size) if selected[i]]
        self.drafter.eval()
        rewritten = self._written([rows[i] for i in local_indices], [step * len(rows) + i for i in local_indices])
        self.drafter.train()
        replacements = dict(zip(local_indices, rewritten, strict=True))
        return [replacements.get(i, row) for i, row in enumerate(rows)]

    def _written(self, rows: list[Encoded], keys: list[int]) -> list[Encoded]:
        """Rewrite the last replies; none gets longer. keys: request numbers, which seed the noise of each reply."""
        lm = self.drafter.language_model()
        assert lm is not None, "checked before training"
        sampling = Sampling(self.options.on_policy_temperature, seed=self.options.seed + STREAM)
        policy = "greedy" if sampling.greedy else "lossless"
        decoder = Decoder(lm, None, policy, sampling, self.stop_ids, controls=Controls(capture=False))
        reply_starts = [row.last_reply for row in rows]
        longest = [min(len(row.token_ids), lm.shape.max_positions) for row in rows]
        requests = {
            i: Request(row.token_ids[: reply_starts[i]].tolist(), keys[i], longest[i] - reply_starts[i], stop_ids=self.stop_ids)
            for i, row in enumerate(rows)
            if longest[i] > reply_starts[i]  # otherwise the prompt fills the model's context
        }
        if not requests:
            return rows
        session = Session(decoder, len(requests), max(map(decoder.positions, requests.values())))
        results = {i: session.submit(request)[0] for i, request in requests.items()}
        for _ in session:
            pass
        return [with_reply(row, reply_starts[i], results[i].tokens) if i in results else row for i, row in enumerate(rows)]


def check_on_policy(drafter: Drafter, options: TrainOptions, deepspeed: DeepSpeedOptions) -> None:
    """Raise UserError for a drafter without a language model, and for sharded weights."""
    if options.on_policy and (not drafter.trained or drafter.language_model() is None):
        raise UserError(
            f"train.on_policy is {options.on_policy:g}, but this drafter has no language model to write replies with; "
            "set train.on_policy=0, or choose a family that has one"
        )
    if options.on_policy and deepspeed.zero_stage == 3:
        raise UserError("train.on_policy needs whole weights, but ZeRO stage 3 shards them; set a lower stage, or on_policy=0")


def with_reply(row: Encoded, start: int, reply: list[int]) -> Encoded:
    """The conversation up to `start`, then the reply, which is supervised."""
    token_ids = np.concatenate([row.token_ids[:start], np.array(reply, np.int32)])
    mask = np.concatenate([row.mask[:start], np.ones(len(reply), np.bool_)])
    return Encoded(token_ids, mask, adapter=row.adapter)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
NAN = float("nan")
WIDEST = 64  # draft depths that a sum over processes has room for: a process without a batch does not know how many there are


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The figures of one optimiser step, over all processes. NaN without a supervised token."""

    loss: float  # weighted losses of all draft depths per supervised token, as `drafttrain fit` logs it
    expected_tau: float  # tokens per decode step of a greedy chain, the bonus token included, under teacher forcing
    agreement: list[float]  # of each draft depth: share of the drafts that are the target's likeliest token
    grad_norm: float  # before clipping
    supervised: int  # tokens
    stepped: bool  # False: there was nothing to learn from, or the gradient was not finite; the weights stay
    left_out: int = 0  # rows with a state or a loss that was not finite


@contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """Gradients on and autocast off inside, whatever the caller has set, and the caller's random numbers afterwards."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
    ):
        yield


def group_size(group: Any) -> int:
    """Processes that average their gradients; 1 without torch.distributed."""
    return distributed.get_world_size(group) if distributed.is_available() and distributed.is_initialized() else 1


class FollowingSteps:
    """Takes optimiser steps with an objective, and averages gradients over the processes of torch.distributed.

    working: the same drafter in a lower precision, which computes; the objective's own drafter then holds the float32 weights.
    """

    def __init__(
        self,
        objective: Objective,
        working: Objective | None,
        options: TrainOptions,
        make: MakeOptimizer | None = None,
        group: Any = None,
    ) -> None:
        self.objective, self.working, self.options, self.group = objective, working or objective, options, group
        self.parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(objective, options) if make is None else make(self.parameters)
        self._computing = [p for p in self.working.drafter.parameters() if p.requires_grad]
        self._alike = False  # whether the processes have the same weights

    @property
    def drafter(self) -> Drafter:
        """The drafter in float32."""
        return self.objective.drafter

    def step(self, batches: Sequence[TrainBatch], token: Callable[[], int] = lambda: 0) -> StepMetrics:
        """One optimiser step on batches of this process, with the target's states; it may have none this time.

        Rows with a value that is not finite are left out: the step is begun again without them. Every process of the group
        calls this together. token: gives one with a finite embedding, which takes the place of a left-out row's.
        """
        self._share_weights()
        self.drafter.train(), self.working.drafter.train()
        pending, left_out = list(batches), 0
        while True:
            loss, counted_6K, nonfinite = self._backward(pending)
            tokens = loss.new_tensor([sum(batch.supervised() for batch in pending)])
            sums = torch.cat(
                [loss[None], tokens, torch.cat([tokens.new_zeros(1), *nonfinite]).sum()[None], counted_6K.flatten()]
            )
            self._sum(sums)
            supervised, nonfinite_count = int(sums[1]), int(sums[2])
            if not nonfinite_count:
                break
            left_out += nonfinite_count
            rows = [x.nonzero()[:, 0].tolist() for x in nonfinite]
            pending = [batch.without(bad, token()) if bad else batch for batch, bad in zip(pending, rows, strict=True)]
            self._forget()
        norm = NAN
        if supervised:
            gradients = self._gradients(supervised)
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)) if gradients else 0.0
        stepped = bool(supervised) and norm == norm and norm != float("inf")
        if stepped:
            self.optimizer.step()
            self.refresh()
        self._forget()
        return _metrics(float(sums[0]), supervised, sums[3:].view(6, WIDEST), norm, stepped, left_out)

    def _forget(self) -> None:
        """Drop the gradients."""
        for parameter in {*self.parameters, *self._computing}:
            parameter.grad = None

    def refresh(self) -> None:
        """Copy the float32 weights to the drafter that computes."""
        if self.working is not self.objective:
            self.working.drafter.load_state_dict(self.drafter.state_dict())

    def _backward(self, batches: Sequence[TrainBatch]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(sum of the losses, counts [6, WIDEST], each batch's rows [B] with a value that is not finite) of this process.

        Gradients are added to the drafter's.
        """
        device, micro_batch_size = self._computing[0].device, self.options.micro_batch
        total = torch.zeros((), dtype=torch.float64, device=device)
        counted_6K = torch.zeros(6, WIDEST, dtype=torch.float64, device=device)
        nonfinite = [torch.zeros(len(batch.token_BT), dtype=torch.float64, device=device) for batch in batches]
        for batch, nonfinite_B in zip(batches, nonfinite, strict=True):
            for start in range(0, len(batch.token_BT), micro_batch_size):
                micro_batch = rows_of(batch, start, start + micro_batch_size)
                if micro_batch.supervised():
                    loss, counts = self.working(micro_batch)
                    loss.backward()
                    total += loss.detach().double()
                    batch_counts_6K = counts.packed()
                    counted_6K[:, : batch_counts_6K.shape[1]] += batch_counts_6K
                    assert counts.nonfinite_2B is not None, "the objective finds them"
                    nonfinite_B[start : start + micro_batch_size] = counts.nonfinite_2B.any(0).double()
        return total, counted_6K, nonfinite

    def _gradients(self, supervised: int) -> bool:
        """Sum the gradients over all processes and divide them by the supervised tokens; False: there are none at all."""
        gradients = [p.grad for p in self._computing if p.grad is not None]
        if group_size(self.group) > 1:
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in self._computing])
            self._sum(flat)
            flat_gradients = flat.split([p.numel() for p in self._computing])
        else:
            flat_gradients = tuple(
                torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self._computing
            )
        for parameter, working_parameter, flat_gradient in zip(self.parameters, self._computing, flat_gradients, strict=True):
            working_parameter.grad = None
            parameter.grad = (flat_gradient.view(parameter.shape).to(parameter.dtype) / supervised).contiguous()
        return bool(gradients) or group_size(self.group) > 1

    def any(self, flag: bool) -> bool:
        """Whether it holds on any process of the group, which all call this together."""
        flags = torch.tensor([float(flag)], device=self._computing[0].device)
        self._sum(flags)
        return bool(flags)

    def _sum(self, x: Tensor) -> None:
        if group_size(self.group) > 1:
            distributed.all_reduce(x, group=self.group)

    def _share_weights(self) -> None:
        """Give every process the first one's weights, once."""
        if not self._alike and group_size(self.group) > 1:
            source_rank = distributed.get_global_rank(self.group, 0) if self.group is not None else 0
            for tensor in self.drafter.state_dict().values():
                distributed.broadcast(tensor, source_rank, group=self.group)
            self.refresh()
        self._alike = True


def _metrics(loss: float, supervised: int, counted_6K: Tensor, norm: float, stepped: bool, left_out: int) -> StepMetrics:
    if not supervised:
        return StepMetrics(NAN, NAN, [], NAN, 0, False, left_out)
    counts = StepCounts.unpacked(counted_6K[:, counted_6K[1] > 0])
    alpha_K = counts.alive_correct / counts.alive.clamp_min(1.0)
    agreement = (counts.correct / counts.total).tolist()
    tau = 1.0 + float(alpha_K.cumprod(0).sum())
    return StepMetrics(loss / supervised, tau, agreement, norm, supervised, stepped, left_out)
