"""Prepares training on the states of serving engines: compares every server's states with the target's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, collate
from drafttrain.data.server import base_of
from drafttrain.features import FeatureOptions
from drafttrain.features.answers import Answer, AnswerRequest, Writing, unlikely
from drafttrain.features.engine import EngineStates, StateLayers
from drafttrain.features.layout import Ids
from drafttrain.features.online import Online
from drafttrain.features.reference import TOLERANCE, Reference, difference
from drafttrain.features.servers import Counts, Servers, ServerSettings
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.engine import World
from drafttrain.train.progress import Console

R = TypeVar("R")
ANSWERS = 4  # that are compared
COMPARED = 64  # tokens of the sequence whose states are compared


@dataclass(frozen=True)
class EngineFeatures:
    """Makes the source of states. longest: tokens of the longest conversation that the data may have."""

    options: FeatureOptions
    loaded: LoadedTarget
    taps: Taps
    longest: int

    @property
    def layers(self) -> StateLayers:
        """The layer ids that training needs."""
        return StateLayers(self.taps, self.loaded.target.shape.blocks)

    @property
    def writing(self) -> Writing | None:
        """How the target answers the data's prompts; None where the drafter trains on the given answers."""
        options, stop_ids = self.options, tuple(sorted(self.loaded.target.stop_ids))
        return Writing(options.temperature, options.max_new_tokens, stop_ids, self.longest) if options.answers else None

    def features(
        self, data: Dataset, urls: Sequence[str], folder: Path | None, way_out: str, world: World, console: Console
    ) -> EngineStates:
        """The source, once the servers' states have been compared.

        folder: where this machine sees the servers' files. way_out: how to start a server that gives the states.
        Raises UserError on all processes where a server is wrong, or one of the processes does not get its states.
        """
        if data.has_images:
            raise UserError("features=engine takes text alone, but the data has images; set features=cached or online")
        options = self.options
        bases = tuple(str(base_of(url, "features.servers", "features.key_env")).rstrip("/") for url in urls)
        settings = ServerSettings(
            bases,
            os.environ.get(options.key_env) or None,
            folder,
            options.request_timeout,
            options.patience,
            options.concurrency,
        )
        beginning_T = data.train[0].documents[0][:COMPARED]
        servers = Servers(settings, self._compared(beginning_T)[0], console.say, way_out)
        try:
            _together(world, servers.check)
            if self.writing is not None:
                self._compare_answers(servers, self.writing, beginning_T, world)
        except UserError:
            servers.close()
            raise
        servers.counts = Counts()  # the comparisons are not of training
        versions = ", ".join(f"{name} {version}" for name, version in servers.versions.items())
        answering = sum(server.dtype is not None for server in servers.servers)
        dtypes = sorted({str(server.dtype).removeprefix("torch.") for server in servers.servers if server.dtype is not None})
        console.say(
            f"features: {answering} of {len(bases)} servers ({versions}) give the target's states of the layer ids "
            f"{', '.join(map(str, self.layers.ids))} in {' and '.join(dtypes)}; training does not run the target's blocks"
        )
        return EngineStates(servers, self.layers, self.loaded.target, options.ahead, self.writing)

    def _compare_answers(self, servers: Servers, writing: Writing, beginning_T: Ids, world: World) -> None:
        """Compare answers that a server writes at the same time with the trainer's own target: their states, and their tokens.

        Raises UserError on all processes where the target would not write them.
        """
        prompt, free = beginning_T[: max(1, len(beginning_T) // 2)].tolist(), replace(writing, stop_ids=())
        room = max(1, min(COMPARED, self.longest - len(prompt)))
        requests = [AnswerRequest(prompt, seed, room, free) for seed in range(ANSWERS if world.first else 0)]

        def ask() -> list[Answer]:
            with ThreadPoolExecutor(ANSWERS) as threads:
                return list(threads.map(servers.answered, requests))

        for answer in world.share(_together(world, ask)):
            reference, final_TH = self._compared(np.array([*prompt, *answer.token_ids[:-1]], np.int32))
            fault = reference.fault(answer.hidden_TLH)
            logits_AV = self.loaded.target.head(final_TH[len(prompt) - 1 :]).detach()
            fault = fault or unlikely(logits_AV.float().cpu(), torch.tensor(answer.token_ids), writing.temperature)
            if fault := world.share(fault):
                raise UserError(f"features.answers: an answer of the server is wrong: {fault}; leave features.answers out")

    def _compared(self, ids: Ids) -> tuple[Reference, Tensor]:
        """The target's states of a sequence, and the final ones [T, H]. All processes compute them together."""
        pad, target = self.loaded.tokenizer.pad_token_id, self.loaded.target
        batch = collate([Encoded(ids, np.ones(len(ids), np.bool_))], 0 if pad is None else pad)
        blocks, layers = target.shape.blocks, self.layers.ids
        last, compared = blocks - 1, {near for i in layers for near in (i - 1, i, i + 1) if 1 <= near <= blocks}
        hidden = Online(target, Taps(tuple(sorted(i - 1 for i in compared)))).fill(batch).hidden
        final_TH = target.norm(hidden[last])[0].float()
        if difference(final_TH, hidden[FINAL][0].float()) > TOLERANCE[torch.bfloat16]:
            raise UserError(
                "features=engine: this target's final state is not the norm of its last block's output; set features=online"
            )
        own = {i: hidden[i - 1][0].float().cpu() for i in compared}
        return Reference(ids.tolist(), layers, own, target.dtype, self.longest), hidden[FINAL][0]


def _together(world: World, ask: Callable[[], R]) -> R | None:
    """The result of `ask` in this process. Raises UserError on all processes where it does in one."""
    found, fault = None, None
    try:
        found = ask()
    except UserError as error:
        fault = str(error)
    for said in world.gather(fault):
        if said is not None:
            raise UserError(said)
    return found
