"""The origin of the replies that `fit` trains on: whether the target wrote them, and their likelihood under the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafttrain.core.sampling import Sampling
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset
from drafttrain.data.files import read_template
from drafttrain.data.provenance import foreign
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Decoder, Session
from drafttrain.decoding.settings import Controls
from drafttrain.measure.quality import mean_log_likelihood
from drafttrain.runs.options import RunOptions, target_arguments
from drafttrain.targets.load import LoadedTarget

REPLIES, LENGTH = 16, 64  # number of replies to score, and tokens of each: a matter of seconds


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of the replies that `fit` trains on."""

    foreign: str | None  # why the target may not have written the replies; None if it wrote them
    replies: int = 0  # number of replies scored
    likely: float | None = None  # log-likelihood of the data's replies under the target, in nats per token
    own: float | None = None  # the same for the target's own replies to the same prompts at temperature 1

    @property
    def summary(self) -> dict[str, Any]:
        """The report's `training.data.origin`."""
        return {
            "own": self.foreign is None,
            "reason": self.foreign,
            "replies": self.replies,
            "log_likelihood": self.likely,
            "own_log_likelihood": self.own,
        }

    def lines(self, options: RunOptions) -> list[str]:
        """Lines for the console."""
        lines = []
        if options.features.answers:
            lines.append(
                f"features.answers: training uses the data's prompts, and answers that the target writes at temperature "
                f"{options.features.temperature:g}; held-out conversations keep their replies"
            )
        elif self.foreign is not None:
            lines.append(
                f"warning: {self.foreign}; a drafter learns best from replies that its target wrote: drafttrain "
                f"prepare{target_arguments(options)} {options.data.named} out=DIR, then data.path=DIR"
            )
        if self.likely is not None and self.own is not None:
            lines.append(
                f"log-likelihood under the target: {self.likely:.2f} nats/token for the data's replies, {self.own:.2f} for "
                f"its own replies at temperature 1 ({self.replies} replies)"
            )
        return lines


def origin_of(options: RunOptions, loaded: LoadedTarget, data: Dataset, shared: bool) -> Origin:
    """Find the origin of the data's replies. shared: processes share the target; then no replies are scored."""
    template = read_template(options.data.template) or loaded.tokenizer.chat_template
    reasons = {path: foreign(path, loaded.description, template) for path in options.data.paths}
    reason = next((f"{path}: {cause}" for path, cause in reasons.items() if cause is not None), None)
    scored = (data.held_out or data.train)[:REPLIES]
    if shared or not scored:
        return Origin(reason)
    loaded = loaded.of(scored[0].adapter)  # of several adapters the first that occurs is scored
    rows = [_first_reply(row) for row in scored if row.adapter == scored[0].adapter]
    prompts, replies = [prompt for prompt, _ in rows], [reply for _, reply in rows]
    target = loaded.target
    data_ll = mean_log_likelihood(target, prompts, replies, target.device)
    own_ll = mean_log_likelihood(target, prompts, _written(loaded, prompts, options.data.seed), target.device)
    if not all(math.isfinite(x) for x in (data_ll, own_ll) if x is not None):  # of a target without finite states of some token
        return Origin(reason)
    return Origin(reason, len(rows), data_ll, own_ll)


def _first_reply(row: Encoded) -> tuple[list[int], list[int]]:
    """(prompt, reply) of the row's first document: the tokens before its first supervised run, and that run, up to `LENGTH`."""
    tokens = row.documents[0]
    mask = row.mask[: len(tokens)]
    start = int(mask.argmax())
    length = int(np.argmin(np.append(mask[start:], False)))
    return tokens[:start].tolist(), tokens[start : start + min(length, LENGTH)].tolist()


def _written(loaded: LoadedTarget, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """The target's own replies. Each prompt leaves room for a reply, because one follows it in the data."""
    target, stop_ids = loaded.target, loaded.target.stop_ids
    decoder = Decoder(target, None, "coupled", Sampling(1.0, seed=seed), stop_ids, controls=Controls(capture=False))
    longest = target.shape.max_positions
    requests = [Request(p, i, min(LENGTH, longest - len(p)), stop_ids=stop_ids) for i, p in enumerate(prompts)]
    session = Session(decoder, len(requests), max(map(decoder.positions, requests)))
    results = [session.submit(request)[0] for request in requests]
    for _ in session:
        pass
    return [result.tokens for result in results]
