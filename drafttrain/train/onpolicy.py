"""On-policy distillation: the drafter's own language model, at the current step, writes some replies of a batch.

The target then gives its distribution at each position (GKD, arXiv 2306.13649; DistillSpec, arXiv 2310.08461).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafttrain.core.errors import UserError
from drafttrain.core.sampling import Sampling
from drafttrain.data.chat import Encoded
from drafttrain.decoding.decoder import Decoder
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Session
from drafttrain.decoding.settings import Controls
from drafttrain.model.drafter import Drafter
from drafttrain.train import DeepSpeedOptions, TrainOptions
from drafttrain.train.engine import World

STREAM = 0x6F6E706F  # a separate noise stream from those of the data and of measurements


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Replaces replies of a batch. The chosen replies and the new text depend only on seed, step and weights."""

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
    return Encoded(token_ids, mask)
