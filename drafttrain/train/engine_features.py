"""Prepares training on the states of serving engines: compares every server's states with the target's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, collate
from drafttrain.data.server import base_of
from drafttrain.features import FeatureOptions
from drafttrain.features.answers import Writing
from drafttrain.features.engine import EngineStates, StateLayers
from drafttrain.features.online import Online
from drafttrain.features.reference import TOLERANCE, Reference, difference
from drafttrain.features.servers import Servers, ServerSettings
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.load import LoadedTarget
from drafttrain.train.engine import World
from drafttrain.train.progress import Console

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
            bases, os.environ.get(options.key_env) or None, folder, options.timeout, options.patience, options.concurrency
        )
        servers = Servers(settings, self._reference(data), console.say, way_out)
        fault: str | None = None
        try:
            servers.check()
        except UserError as error:
            fault = str(error)
        for said in world.gather(fault):
            if said is not None:
                servers.close()
                raise UserError(said)
        versions = ", ".join(f"{name} {version}" for name, version in servers.versions.items())
        answering = sum(server.dtype is not None for server in servers.servers)
        dtypes = sorted({str(server.dtype).removeprefix("torch.") for server in servers.servers if server.dtype is not None})
        console.say(
            f"features: {answering} of {len(bases)} servers ({versions}) give the target's states of the layer ids "
            f"{', '.join(map(str, self.layers.ids))} in {' and '.join(dtypes)}; training does not run the target's blocks"
        )
        return EngineStates(servers, self.layers, self.loaded.target, options.ahead, self.writing)

    def _reference(self, data: Dataset) -> Reference:
        """The target's states of the beginning of the first conversation. All processes compute it together."""
        ids = data.train[0].documents[0][:COMPARED]
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
        return Reference(ids.tolist(), layers, own, target.dtype, self.longest)
