"""Prepares training on the states of serving engines: compares every server's states with the target's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.data.chat import Encoded
from drafttrain.data.dataset import Dataset, collate
from drafttrain.data.server import base_of
from drafttrain.features import FeatureOptions
from drafttrain.features.engine import EngineStates, StateLayers
from drafttrain.features.joined_servers import JoinedServers
from drafttrain.features.online import Online
from drafttrain.features.reference import TOLERANCE, Reference, difference
from drafttrain.features.servers import Servers, ServerSettings
from drafttrain.features.sglang_source import SglangSource
from drafttrain.features.source import Source
from drafttrain.features.state_files import StateFiles
from drafttrain.features.vllm_source import VllmSource
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
        """The states that training needs."""
        return StateLayers(self.taps, self.loaded.target.shape.blocks, final=self.options.engine == "sglang")

    def features(
        self, data: Dataset, urls: Sequence[str], folder: Path | None, way_out: str, world: World, console: Console
    ) -> EngineStates:
        """The source, once the servers' states have been compared.

        folder: where this machine sees the servers' files. way_out: how to start a server that gives the states.
        Raises UserError on all processes where a server is wrong, or one of the processes does not get its states.
        """
        if data.has_images:
            raise UserError("features=engine takes text alone, but the data has images; set features=cached or online")
        servers = self._servers(data, urls, folder, way_out, console)
        fault: str | None = None
        try:
            servers.check()
        except UserError as error:
            fault = str(error)
        for said in world.gather(fault):
            if said is not None:
                servers.close()
                raise UserError(said)
        answering, dtypes = len(servers.dtypes), " and ".join(sorted(set(servers.dtypes)))
        console.say(
            f"features: {answering} of {servers.number} servers ({', '.join(servers.names)}) give the target's states of "
            f"{self._described} in {dtypes}; training does not run the target's blocks"
        )
        return EngineStates(servers, self.layers, self.loaded.target, self.options.ahead)

    @property
    def _described(self) -> str:
        """The states, in the engine's numbering of layers."""
        if self.options.engine == "vllm":
            return f"the layer ids {', '.join(map(str, self.layers.ids))}"
        blocks = ", ".join(str(key) for key in self.layers.keys if key != FINAL)
        return f"the blocks {blocks} and the final one" if blocks else "the last norm"

    def _servers(
        self, data: Dataset, urls: Sequence[str], folder: Path | None, way_out: str, console: Console
    ) -> Servers | JoinedServers:
        """The servers; two groups where one gives the tapped blocks and another one the final state."""
        keys, others = self.layers.keys, self.options.final_servers
        first = keys[:-1] if others else keys
        if not first:
            raise UserError(
                "features.final_servers is set, but this drafter taps no block; name these servers in features.servers"
            )
        own = self._reference(data)

        def group(urls: Sequence[str], name: str, keys: tuple[int, ...]) -> Servers:
            source = self._source(keys, folder, way_out)
            return Servers(self._settings(urls, name), source, replace(own, keys=keys), console.say)

        tapped = group(urls, "features.servers", first)
        return JoinedServers(tapped, group(others, "features.final_servers", (FINAL,))) if others else tapped

    def _settings(self, urls: Sequence[str], name: str) -> ServerSettings:
        options = self.options
        bases = [str(base_of(url, name, "features.key_env")).rstrip("/") for url in urls]
        if options.engine == "sglang":
            bases = [base.removesuffix("/v1") for base in bases]
        key = os.environ.get(options.key_env) or None
        return ServerSettings(tuple(bases), key, options.timeout, options.patience, options.concurrency)

    def _source(self, keys: tuple[int, ...], folder: Path | None, way_out: str) -> Source:
        if self.options.engine == "vllm":
            return VllmSource(keys, self.longest, StateFiles(folder), way_out)
        target = self.loaded.target

        @torch.no_grad()
        def norm(state_TH: Tensor) -> Tensor:
            return target.norm(state_TH.to(target.device, target.dtype)).to(state_TH.device)

        return SglangSource(keys, target.shape.blocks, self.longest, norm, way_out)

    def _reference(self, data: Dataset) -> Reference:
        """The target's states of the beginning of the first conversation. All processes compute it together."""
        ids = data.train[0].documents[0][:COMPARED]
        pad, target = self.loaded.tokenizer.pad_token_id, self.loaded.target
        batch = collate([Encoded(ids, np.ones(len(ids), np.bool_))], 0 if pad is None else pad)
        blocks, keys = target.shape.blocks, self.layers.keys
        tapped = [key for key in keys if key != FINAL]
        compared = {near for key in (*tapped, blocks - 1) for near in (key - 1, key, key + 1) if 0 <= near < blocks}
        hidden = Online(target, Taps(tuple(sorted(compared)))).fill(batch).hidden
        final_TH = target.norm(hidden[blocks - 1])[0].float()
        if FINAL not in keys and difference(final_TH, hidden[FINAL][0].float()) > TOLERANCE[torch.bfloat16]:
            raise UserError(
                "features=engine: this target's final state is not the norm of its last block's output; set features=online"
            )
        return Reference(
            ids.tolist(), keys, {key: state_BTH[0].float().cpu() for key, state_BTH in hidden.items()}, target.dtype
        )
