"""SGLang with SpecForge's patch for captures (SpecForge 0.2.0): states in Mooncake's store.

The server puts the tapped blocks' outputs, concatenated in ascending order, and the state after the last norm as objects of
their own, `<store id>/<sample id>/g<generation>/<name>`: the bytes of a tensor [1, T, W]. It answers after that, with shapes
and dtypes. Objects are pinned: nothing but a removal frees them.

Shapes: T tokens, K keys, H hidden, W values of an object's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.features.mooncake_states import MooncakeStates, key_of
from drafttrain.features.mooncake_store import StoreError
from drafttrain.features.sglang_source import check_whole, label_of, meta_info, server_info
from drafttrain.features.source import AbsentError, Ask, Description, Received, StatesRequest, WrongError, text_of
from drafttrain.model.target import FINAL

STORE, GENERATION = "drafttrain", 1
AUX, LAST = "aux", "last_hidden"  # what the patch calls the tapped blocks and the final state
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class CaptureSource:
    """States that servers put into the store."""

    def __init__(self, keys: Sequence[int], longest: int, objects: MooncakeStates, way_out: str) -> None:
        """longest: tokens of the longest conversation. way_out: how to start a server that gives the states, for messages."""
        self.keys, self.longest, self.way_out = tuple(keys), longest, way_out
        self.names, self._objects = objects.names, objects
        self._blocks = tuple(key for key in self.keys if key != FINAL)

    def label(self, key: int) -> str:
        """As `label_of`."""
        return label_of(key)

    def describe(self, url: str, ask: Ask) -> Description:
        """Ask how the server was started."""
        version, info = server_info(url, ask, self.longest)
        if not info.get("enable_spec_capture"):
            raise UserError(f"{url} puts no states into a store; {self.way_out}")
        self._check_blocks(url, info.get("spec_capture_aux_layer_ids"))
        return Description("sglang", f"{version} with SpecForge's patch")

    def states(self, url: str, description: Description, ask: Ask, request: StatesRequest) -> Received:
        """Ask for the states of the sequence, and read their objects."""
        artifacts = [AUX, LAST] if self._blocks else [LAST]
        name, ids = request.name, text_of("sglang", request)
        sample_id = key_of(name)
        capture = {"store_id": STORE, "sample_id": sample_id, "gen": GENERATION, "replace": False}
        body = {
            "rid": name,
            "input_ids": ids,
            "extra_key": name,  # a prompt whose beginning is cached would be captured without it
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "spec_capture": capture | {"features": {artifact: artifact for artifact in artifacts}, "passthrough": []},
        }
        metadata = meta_info(url, ask("POST", "generate", body), name)
        features = self._features(url, metadata.get("spec_capture"), sample_id)
        keys = [f"{STORE}/{sample_id}/g{GENERATION}/{artifact}" for artifact in artifacts]
        try:
            self._objects.sweep_once()
            tensors = [
                self._read(url, key, features.get(artifact), len(ids), metadata)
                for key, artifact in zip(keys, artifacts, strict=True)
            ]
        except StoreError as error:
            raise AbsentError(str(error)) from error
        finally:
            with suppress(StoreError):  # a master that is away has forgotten all objects when it comes back
                self._objects.store.remove(*keys)
        last_TH = tensors[-1]
        if self._blocks and tensors[0].shape[1] != len(self._blocks) * last_TH.shape[1]:
            raise UserError(
                f"{url} gives {tensors[0].shape[1]} values of the blocks and {last_TH.shape[1]} of the final state, but the "
                f"drafter needs {len(self._blocks)} blocks; {self.way_out}"
            )
        return Received(torch.cat([state_TW.unflatten(1, (-1, last_TH.shape[1])) for state_TW in tensors], 1), None)

    def remove(self, names: Iterable[str]) -> None:
        """As `Transport.remove`."""
        self._objects.remove(names)

    def sweep(self, late: bool = False) -> None:
        """As `Transport.sweep`."""
        self._objects.sweep(late)

    def close(self) -> None:
        """As `Transport.close`."""
        self._objects.close()

    def _features(self, url: str, capture: Any, sample_id: str) -> Mapping[str, Any]:
        """What an answer says of its objects."""
        if not isinstance(capture, dict):
            raise UserError(f"{url} answers without states; {self.way_out}")
        if capture.get("error"):
            raise AbsentError(f"the server could not give the states: {capture['error']!s:.300}")
        if (capture.get("store_id"), capture.get("sample_id"), capture.get("gen")) != (STORE, sample_id, GENERATION):
            raise WrongError(f"the objects of another request, {capture.get('sample_id')}")
        self._check_blocks(url, capture.get("aux_layer_ids"))
        features = capture.get("features")
        return features if isinstance(features, dict) else {}

    def _check_blocks(self, url: str, ids: Any) -> None:
        if self._blocks and (not isinstance(ids, list) or tuple(sorted(ids)) != self._blocks):
            raise UserError(f"{url} gives the blocks {ids}, but the drafter needs {list(self._blocks)}; {self.way_out}")

    def _read(self, url: str, key: str, feature: Any, tokens: int, metadata: Mapping[str, Any]) -> Tensor:
        """[T, W] an object."""
        try:
            dtype, shape = DTYPES[feature["dtype"]], tuple(int(size) for size in feature["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise WrongError(f"no shape and dtype of the object {key}") from error
        if len(shape) != 3 or shape[0] != 1 or shape[2] < 1:
            raise WrongError(f"the object {key} of shape {list(shape)}")
        check_whole(url, shape[1], tokens, metadata)
        return self._objects.store.get(key, prod(shape) * dtype.itemsize).view(dtype).view(shape[1:])
