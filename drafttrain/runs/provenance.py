"""Whose words `fit` trains on: what is known of it, and what the target makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafttrain.core.sampling import Sampling
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset
from drafttrain.data.provenance import foreign
from drafttrain.data.templates import read_template
from drafttrain.decoding.decoder import Decoder
from drafttrain.decoding.request import Request
from drafttrain.decoding.scheduler import Session
from drafttrain.decoding.settings import Controls
from drafttrain.measure.quality import mean_log_likelihood
from drafttrain.runs.options import RunOptions
from drafttrain.targets.load import LoadedTarget

REPLIES, LENGTH = 16, 64  # replies looked at, and tokens of each: seconds, at any size


@dataclass(frozen=True, slots=True)
class Origin:
    """foreign: why the replies are not known to be the target's own; None where they are. likely, own: log-likelihood under the
    target, in nats per token, of the data's replies and of those that it writes to the same prompts at temperature 1; None
    where that was not computed.
    """

    foreign: str | None
    replies: int = 0
    likely: float | None = None
    own: float | None = None

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
        """What the console says."""
        said = []
        if self.foreign is not None:
            target = (
                "" if options.target.name == "embedded" else f" target={options.target.name} target.path={options.target.path}"
            )
            said.append(
                f"warning: {self.foreign}; a drafter learns best from what its target says: drafttrain prepare{target} "
                f"{options.data.named} out=DIR, then data.path=DIR"
            )
        if self.likely is not None and self.own is not None:
            figures = f"{self.likely:.2f} nats/token, of its own at temperature 1 {self.own:.2f}"
            said.append(f"the target's log-likelihood of the data's replies: {figures} ({self.replies} replies)")
        return said


def origin_of(options: RunOptions, loaded: LoadedTarget, data: Dataset, shared: bool) -> Origin:
    """shared: the target lies in pieces on several processes, and decodes nothing by itself."""
    template = read_template(options.data.template) or loaded.tokenizer.chat_template
    reasons = {path: foreign(path, loaded.description, template) for path in options.data.paths}
    reason = next((f"{path}: {why}" for path, why in reasons.items() if why is not None), None)
    rows = [_first_reply(row) for row in (data.held_out or data.train)[:REPLIES]]
    if shared or not rows:
        return Origin(reason)
    prompts, replies = [prompt for prompt, _ in rows], [reply for _, reply in rows]
    target = loaded.target
    likely = mean_log_likelihood(target, prompts, replies, target.device)
    own = mean_log_likelihood(target, prompts, _written(loaded, prompts, options.data.seed), target.device)
    return Origin(reason, len(rows), likely, own)


def _first_reply(row: Encoded) -> tuple[list[int], list[int]]:
    """What precedes the first supervised tokens of the row's first document, and those, cut to what is looked at."""
    tokens = row.documents[0]
    mask = row.mask[: len(tokens)]
    start = int(mask.argmax())
    length = int(np.argmin(np.append(mask[start:], False)))
    return tokens[:start].tolist(), tokens[start : start + min(length, LENGTH)].tolist()


def _written(loaded: LoadedTarget, prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
    """The target's own replies. A prompt ends before the last position: the data has a reply behind it."""
    target, stop_ids = loaded.target, loaded.target.stop_ids
    decoder = Decoder(target, None, "coupled", Sampling(1.0, seed=seed), stop_ids, controls=Controls(capture=False))
    longest = target.shape.max_positions
    asked = [Request(p, i, min(LENGTH, longest - len(p)), stop_ids=stop_ids) for i, p in enumerate(prompts)]
    session = Session(decoder, len(asked), max(map(decoder.positions, asked)))
    results = [session.submit(request)[0] for request in asked]
    for _ in session:
        pass
    return [result.tokens for result in results]
