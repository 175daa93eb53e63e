"""States from SGLang's `/generate`: lists of numbers in its answers, or objects in Mooncake's store.

`SglangSource` reads lists, as of `return_hidden_states` in SGLang 0.5.23. A server gives either the state after the last norm
(`--return-hidden-states-mode full`), or the outputs of some blocks (`--enable-return-aux-hidden-states`), concatenated in
ascending order. Few architectures can give the last block's output among them; for these one server suffices, and the norm is
computed here.

SGLang returns the states of those tokens alone that it has computed for the request: not those that it has found in its prefix
cache, and of a prompt that it computes in chunks only those of the last chunk. So every request has an `extra_key` of its own,
which keeps it from what others have left in the cache, and chunks are refused.

`CaptureSource` reads objects, which SGLang puts with the patch of SpecForge 0.2.0: the tapped blocks' outputs, concatenated
likewise, and the state after the last norm, as `<store id>/<sample id>/g<generation>/<name>`, each the bytes of a tensor
[1, T, W]. It answers after that, with shapes and dtypes. Objects are pinned: nothing but a removal frees them.

Shapes: T tokens, K keys, H hidden, W values of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.core.errors import UserError
from drafttrain.features.mooncake_states import MooncakeStates, key_of
from drafttrain.features.mooncake_store import StoreError
from drafttrain.features.source import AbsentError, Ask, Description, Received, RequestNames, StatesRequest, WrongError, text_of
from drafttrain.model.target import FINAL

RESERVED = 6  # positions that SGLang keeps free of its context length, beyond a prompt
NARROW = (torch.bfloat16, torch.float16)  # dtypes that a list of numbers may come from, besides float32
STORE, GENERATION = "drafttrain", 1
AUX, LAST = "aux", "last_hidden"  # what the patch calls the tapped blocks and the final state
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class SglangLayers:
    """What a server gives. blocks: None where its user has not chosen them."""

    blocks: tuple[int, ...] | None
    final: bool

    @classmethod
    def of(cls, url: str, about: Mapping[str, Any], way_out: str) -> SglangLayers:
        """From the answer to `server_info`. Raises UserError where a server gives no states of whole prompts."""
        if about.get("enable_return_aux_hidden_states"):
            ids = about.get("return_aux_hidden_state_layer_ids")
            layers = cls(None if ids is None else tuple(sorted(map(int, ids))), False)
        elif about.get("return_hidden_states_mode") == "full" or (
            about.get("enable_return_hidden_states") and about.get("return_hidden_states_mode") is None
        ):
            layers = cls((), True)
        else:
            raise UserError(f"{url} gives no hidden states; {way_out}")
        if int(about.get("chunked_prefill_size") or -1) > 0:  # of a batch, even a short prompt may be cut
            raise UserError(
                f"{url} computes long prompts in chunks and returns the states of the last one alone; start it with "
                "--chunked-prefill-size -1"
            )
        return layers

    def __str__(self) -> str:
        if self.blocks is None:
            return "the blocks of SGLang's own choice"
        blocks = f"the blocks {', '.join(map(str, self.blocks))}" if self.blocks else ""
        return " and ".join(text for text in (blocks, "the final state" if self.final else "") if text)


class SglangSource:
    """States as lists of numbers in answers."""

    def __init__(self, keys: Sequence[int], blocks: int, longest: int, norm: Callable[[Tensor], Tensor], way_out: str) -> None:
        """blocks, norm: of the target. longest: tokens of the longest conversation.

        way_out: how to start a server that gives the states, for messages.
        """
        self.keys, self.longest, self.way_out, self.names = tuple(keys), longest, way_out, RequestNames()
        self._last, self._norm = blocks - 1, norm

    def label(self, key: int) -> str:
        """As `label_of`."""
        return label_of(key)

    def describe(self, url: str, ask: Ask) -> Description:
        """Ask how the server was started, and compare that with what the drafter needs."""
        version, info = server_info(url, ask, self.longest)
        layers = SglangLayers.of(url, info, self.way_out)
        if self._conversion(layers) is None:
            raise UserError(f"{url} gives {layers}, but the drafter needs {self._wanted}; {self.way_out}")
        return Description("sglang", version, layers)

    def states(self, url: str, description: Description, ask: Ask, request: StatesRequest) -> Received:
        """Ask for one token after the sequence: SGLang returns no more lists of states than it returns tokens."""
        body = {
            "rid": request.name,
            "input_ids": text_of("sglang", request),
            "extra_key": request.name,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_hidden_states": True,
            "return_prompt_token_ids": True,
        }
        answer = ask("POST", "generate", body)
        metadata = meta_info(url, answer, request.name)
        rows = metadata.get("hidden_states")
        if not isinstance(rows, list) or not rows:
            raise UserError(f"{url} answers without states; {self.way_out}")
        state_TW = narrowed(numbers(rows[0]))
        check_whole(url, state_TW.shape[0], len(request.ids), metadata)
        states = len(description.details.blocks or ()) + description.details.final
        if state_TW.shape[1] % states:
            raise UserError(f"{url} gives {state_TW.shape[1]} values a token, which are not {states} states; {self.way_out}")
        convert = self._conversion(description.details)
        assert convert is not None, "the server was compared"
        prompt_ids = answer.get("prompt_token_ids")
        return Received(convert(state_TW), list(prompt_ids) if isinstance(prompt_ids, list) else None)

    def remove(self, names: Iterable[str]) -> None:
        """Nothing is left: states are in the answer."""

    def sweep(self, late: bool = False) -> None:
        """Nothing is left."""

    def close(self) -> None:
        """No connection is open."""

    @property
    def _wanted(self) -> SglangLayers:
        return SglangLayers(tuple(key for key in self.keys if key != FINAL), FINAL in self.keys)

    def _conversion(self, layers: SglangLayers) -> Callable[[Tensor], Tensor] | None:
        """Makes [T, K, H] of what such a server gives, [T, H of each]; None where it does not give what is needed."""
        required = self._wanted
        if layers == required:
            return lambda state_TW: state_TW.unflatten(1, (len(self.keys), -1))
        if layers.blocks and required.final and set(layers.blocks) == {*(required.blocks or ()), self._last}:
            return lambda state_TW: self._with_norm(state_TW.unflatten(1, (len(layers.blocks or ()), -1)))
        return None

    def _with_norm(self, hidden_TKH: Tensor) -> Tensor:
        """The norm of the last block's output as the final state, after the tapped blocks."""
        final_TH = self._norm(hidden_TKH[:, -1].contiguous()).to(hidden_TKH.dtype)
        return torch.cat([hidden_TKH[:, : len(self.keys) - 1], final_TH[:, None]], 1)


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


def label_of(key: int) -> str:
    """A state's name. SGLang's numbers of layers are those of the blocks."""
    return "the final state" if key == FINAL else f"the output of block {key}"


def server_info(url: str, ask: Ask, longest: int) -> tuple[str, Mapping[str, Any]]:
    """A server's version, and how it was started. Raises UserError where it has no room for so many tokens."""
    info = ask("GET", "server_info")
    try:
        version, max_tokens = str(info["version"]), int(info.get("max_req_input_len") or 2**31)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{url} does not say how it was started; is it an SGLang server?") from error
    if max_tokens <= longest:
        raise UserError(
            f"{url} takes prompts of fewer than {max_tokens} tokens, but conversations have up to {longest}; start it with "
            f"--context-length {context_length(longest)} and memory for as many tokens, or lower data.max_length"
        )
    return version, info


def context_length(longest: int) -> int:
    """`--context-length` of a server that takes conversations of so many tokens."""
    return longest + RESERVED + 1


def meta_info(url: str, answer: Any, name: str) -> Mapping[str, Any]:
    """What an answer of `/generate` says of its request."""
    metadata = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(metadata, dict):
        raise UserError(f"{url} answers without meta_info; is it an SGLang server?")
    reason = metadata.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise AbsentError(f"it has ended the request ({reason.get('message') or 'without a reason'})")
    if metadata.get("id") != name:
        raise WrongError(f"the answer to another request, {metadata.get('id')}")
    return metadata


def check_whole(url: str, rows: int, tokens: int, about: Mapping[str, Any]) -> None:
    """Raise where an answer has the states of a part of the sequence."""
    if about.get("prompt_tokens") != tokens:
        raise WrongError(f"states of {about.get('prompt_tokens')} tokens, not the {tokens} of the request")
    if rows == tokens:
        return
    cause = (
        f"{about['cached_tokens']} are in its prefix cache; start it with --disable-radix-cache"
        if about.get("cached_tokens")
        else "it computes prompts in chunks; start it with --chunked-prefill-size -1"
    )
    raise UserError(f"{url} returns the states of {rows} of {tokens} tokens, since {cause}")


def numbers(rows: Any) -> Tensor:
    """[T, W] lists of numbers, in float32."""
    try:
        values = np.array(rows, np.float32)
    except (TypeError, ValueError) as error:  # JSON has no value that is not finite: SGLang writes null
        raise WrongError("states that are not finite, or rows of several lengths") from error
    if values.ndim != 2:
        raise WrongError(f"states of {values.ndim} dimensions")
    return torch.from_numpy(values)


def narrowed(state_TW: Tensor) -> Tensor:
    """In the dtype that the server computed in, by the values: those of bfloat16 and float16 are few in float32."""
    for dtype in NARROW:
        narrow_TW = state_TW.to(dtype)
        if torch.equal(narrow_TW.float(), state_TW):
            return narrow_TW
    return state_TW
