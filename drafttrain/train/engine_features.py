"""Prepares training on the states of serving engines: compares every server's states with the target's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
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
from drafttrain.features.engine import EngineStates, JoinedServers, StateLayers
from drafttrain.features.mooncake_states import MooncakeStates, object_bytes
from drafttrain.features.mooncake_store import MooncakeStore, StoreSettings
from drafttrain.features.online import Online
from drafttrain.features.servers import TOLERANCE, ReferenceStates, Servers, ServerSettings, difference
from drafttrain.features.sglang_source import CaptureSource, SglangSource
from drafttrain.features.source import StatesSource
from drafttrain.features.store import Ids
from drafttrain.features.vllm_source import StateFiles, VllmSource
from drafttrain.model.images import has_images, spans
from drafttrain.model.target import FINAL, Taps
from drafttrain.targets.frozen_ends import FrozenEnds
from drafttrain.targets.images import ImageReader
from drafttrain.targets.load import LoadedTarget
from drafttrain.targets.quantised import rounded_to
from drafttrain.train.engine import World
from drafttrain.train.progress import Console

R = TypeVar("R")
ANSWERS = 4  # that are compared
COMPARED = 64  # tokens of the sequence whose states are compared
TRIED = 16  # conversations, until one has states that are finite


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

    @property
    def images(self) -> ImageReader | None:
        """The target's images, if it reads them."""
        return self.loaded.images if isinstance(self.loaded.images, ImageReader) else None

    @property
    def writing(self) -> Writing | None:
        """How the target answers the data's prompts; None where the drafter trains on the given answers."""
        options, stop_ids = self.options, tuple(sorted(self.loaded.target.stop_ids))
        return Writing(options.temperature, options.max_new_tokens, stop_ids, self.longest) if options.answers else None

    def features(
        self,
        data: Dataset,
        urls: Sequence[str],
        folder: Path | None,
        way_out: str,
        world: World,
        console: Console,
        store: StoreSettings | None = None,
    ) -> EngineStates:
        """The source, once the servers' states have been compared.

        folder: where this machine sees the servers' files. way_out: how to start a server that gives the states.
        store: Mooncake's, through which the states come; None: they come in files.
        Raises UserError on all processes where a server is wrong, or one of the processes does not get its states.
        """
        self._check_groups()
        prefix_T, reference = self._beginning(data)
        servers = None
        try:
            servers = _together(world, lambda: self._servers(reference, urls, folder, way_out, store, console))
            assert servers is not None
            _together(world, servers.check)
            _together(world, lambda: self._check_room(store, servers.dtypes))
            if self.writing is not None:
                assert isinstance(servers, Servers), "no groups of servers give answers"
                self._compare_answers(servers, self.writing, prefix_T, world)
        except UserError:
            if servers is not None:
                servers.close()
            raise
        servers.reset_counts()  # the comparisons are not of training
        responding, dtypes = len(servers.dtypes), " and ".join(sorted(set(servers.dtypes)))
        console.say(
            f"features: {responding} of {servers.number} servers ({', '.join(servers.names)}) give the target's states of "
            f"{self._described} in {dtypes}; training does not run the target's blocks"
        )
        return EngineStates(servers, self.layers, self.loaded.target, self.options.ahead, self.writing)

    def _beginning(self, data: Dataset) -> tuple[Ids, ReferenceStates]:
        """(the first tokens of a conversation, the states to compare): of the first conversation whose states are finite.

        Those of conversations with images are preferred. No image is cut.
        """
        prefixes = [_prefix(row.documents[0]) for row in islice(data.train, TRIED)]
        for prefix_T in sorted(prefixes, key=lambda prefix_T: not has_images(prefix_T)):
            reference = self._compared(np.array(self._known, np.int32) if self._known else prefix_T)[0]
            if self._known or all(bool(state_TH.isfinite().all()) for state_TH in reference.own.values()):
                break
        return prefix_T, reference

    @property
    def _described(self) -> str:
        """The states, in the engine's numbering of layers."""
        if self.options.engine == "vllm":
            return f"the layer ids {', '.join(map(str, self.layers.ids))}"
        blocks = ", ".join(str(key) for key in self.layers.keys if key != FINAL)
        return f"the blocks {blocks} and the final one" if blocks else "the last norm"

    def _check_groups(self) -> None:
        if self.options.final_servers and self.layers.keys == (FINAL,):
            raise UserError(
                "features.final_servers is set, but this drafter taps no block; name these servers in features.servers"
            )

    def _servers(
        self,
        reference: ReferenceStates,
        urls: Sequence[str],
        folder: Path | None,
        way_out: str,
        store: StoreSettings | None,
        console: Console,
    ) -> Servers | JoinedServers:
        """The servers; two groups where one gives the tapped blocks and another one the final state."""

        def group(urls: Sequence[str], name: str, keys: tuple[int, ...]) -> Servers:
            settings, source = self._settings(urls, name), self._source(keys, folder, store, way_out)
            return Servers(settings, source, replace(reference, keys=keys), console.say)

        keys, final_urls = self.layers.keys, self.options.final_servers
        if not final_urls:
            return group(urls, "features.servers", keys)
        return JoinedServers(group(urls, "features.servers", keys[:-1]), group(final_urls, "features.final_servers", (FINAL,)))

    def _settings(self, urls: Sequence[str], name: str) -> ServerSettings:
        options = self.options
        bases = [str(base_of(url, name, "features.key_env")).rstrip("/") for url in urls]
        if options.engine == "sglang":
            bases = [base.removesuffix("/v1") for base in bases]
        key = os.environ.get(options.key_env) or None
        started = not options.servers
        return ServerSettings(tuple(bases), key, options.request_timeout, options.patience, options.concurrency, started)

    def _source(self, keys: tuple[int, ...], folder: Path | None, store: StoreSettings | None, way_out: str) -> StatesSource:
        objects = None if store is None else MooncakeStates(MooncakeStore(store))
        if self.options.engine == "vllm":
            return VllmSource(keys, self.longest, objects or StateFiles(folder), way_out, self.images)
        if objects is not None:
            return CaptureSource(keys, self.longest, objects, way_out)
        target = self.loaded.target

        @torch.no_grad()
        def norm(state_TH: Tensor) -> Tensor:
            return target.norm(state_TH.to(target.device, target.dtype)).to(state_TH.device)

        return SglangSource(keys, target.shape.blocks, self.longest, norm, way_out)

    def _check_room(self, store: StoreSettings | None, dtypes: Sequence[str]) -> None:
        """Raise UserError where the longest conversation's states are larger than the buffer in which they arrive."""
        if store is None:
            return
        width, item_bytes = self.loaded.target.shape.hidden_size, max(getattr(torch, dtype).itemsize for dtype in dtypes)
        nbytes = object_bytes(self.longest, len(self.layers.ids) or 1, width, item_bytes)
        if nbytes > store.buffer:
            raise UserError(
                f"{store.group}.buffer is {store.buffer} bytes, but the states of {self.longest} tokens have {nbytes}; set it "
                f"to {nbytes} or more, or lower data.max_length"
            )

    def _compare_answers(self, servers: Servers, writing: Writing, prefix_T: Ids, world: World) -> None:
        """Compare answers that a server writes at the same time with the trainer's own target: their states, and their tokens.

        Raises UserError on all processes where the target would not write them.
        """
        prompt, free_writing = prefix_T[: max(1, len(prefix_T) // 2)].tolist(), replace(writing, stop_ids=())
        max_new_tokens = max(1, min(COMPARED, self.longest - len(prompt)))
        requests = [AnswerRequest(prompt, seed, max_new_tokens, free_writing) for seed in range(ANSWERS if world.first else 0)]

        def ask() -> list[Answer]:
            with ThreadPoolExecutor(ANSWERS) as threads:
                return list(threads.map(servers.answered, requests))

        for answer in world.share(_together(world, ask)):
            if self._known is None:
                reference, final_TH = self._compared(np.array([*prompt, *answer.token_ids[:-1]], np.int32))
                fault = reference.fault(answer.hidden_TKH, servers.source.label)
            else:  # no block computes them here
                fault, final_TH = None, self._final(answer.hidden_TKH)
            logits_AV = self.loaded.target.head(final_TH[len(prompt) - 1 :]).detach()
            fault = fault or unlikely(logits_AV.float().cpu(), torch.tensor(answer.token_ids), writing.temperature)
            if fault := world.share(fault):
                raise UserError(f"features.answers: an answer of the server is wrong: {fault}; leave features.answers out")

    def _final(self, hidden_TKH: Tensor) -> Tensor:
        """[T, H] the final state, of a server's states."""
        target = self.loaded.target
        return self.layers.states(hidden_TKH[None].to(target.device), target)[FINAL][0]

    @property
    def _known(self) -> list[int] | None:
        """The one text whose states a target without blocks knows; None for a whole target."""
        target = self.loaded.target
        return target.known.ids if isinstance(target, FrozenEnds) and target.known else None

    def _compared(self, ids: Ids) -> tuple[ReferenceStates, Tensor]:
        """The target's states of a sequence, and the final ones [T, H]. All processes compute them together."""
        pad, target = self.loaded.tokenizer.pad_token_id, self.loaded.target
        batch = collate([Encoded(ids, np.ones(len(ids), np.bool_))], 0 if pad is None else pad)
        blocks, keys = target.shape.blocks, self.layers.keys
        tapped = [key for key in keys if key != FINAL]
        candidates = {block for key in (*tapped, blocks - 1) for block in (key - 1, key, key + 1) if 0 <= block < blocks}
        if target.wrong_tap is not None and keys == (FINAL,):
            candidates = set()  # none is read
        hidden = Online(target, Taps(tuple(sorted(candidates)))).fill(batch).hidden
        if FINAL not in keys:
            final_TH = target.norm(hidden[blocks - 1])[0].float()
            if difference(final_TH, hidden[FINAL][0].float()) > TOLERANCE[torch.bfloat16]:
                raise UserError(
                    "features=engine: this target's final state is not the norm of its last block's output; set features=online"
                )
        states = {key: state_BTH[0].float().cpu() for key, state_BTH in hidden.items()}
        return ReferenceStates(ids.tolist(), keys, states, rounded_to(target)), hidden[FINAL][0]


def _prefix(ids: Ids) -> Ids:
    """The first `COMPARED` tokens, and the rest of an image among them."""
    return ids[: next((stop for start, stop in spans(ids.tolist()) if start < COMPARED < stop), COMPARED)]


def _together(world: World, ask: Callable[[], R]) -> R | None:
    """The result of `ask` in this process. Raises UserError on all processes where it does in one."""
    result, fault = None, None
    try:
        result = ask()
    except UserError as error:
        fault = str(error)
    for process_fault in world.gather(fault):
        if process_fault is not None:
            raise UserError(process_fault)
    return result
