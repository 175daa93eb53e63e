"""States that servers on other machines put into Mooncake's store, in the form of hs_connectors 0.9.

An answer's `kv_transfer_params` is a manifest: the object's name (`handle`), and for each tensor dtype, shape, and where its
bytes are in the object. The object appears whole, after the answer; a server that cannot put it puts `<handle>:error`, a JSON
object with the reason. Mooncake removes an object only when a machine's memory is 90 % full, the oldest first, so objects are
removed here: after they have been read, late ones of failed requests, and at the next start those of processes that were
killed or that ended soon after a failed request. A file in the temporary folder keeps each process's name for that.

Shapes: N bytes of an object, T tokens, L layer ids, H hidden.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from drafttrain.features.mooncake_store import ALIGNED, MooncakeStore, StoreError
from drafttrain.features.source import AbsentError, NonFiniteError, NoStatesError, RequestNames, States, WrongError

VERSION = 1  # of the manifest
HIDDEN, TOKENS = "hidden_states", "token_ids"
DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int64")}
LONGEST_HANDLE, LONGEST_ERROR = 512, 2**16  # characters; bytes
ERROR = ":error"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor in an object's bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, content_N: Tensor) -> Tensor:
        """The tensor."""
        return content_N[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an object holds."""

    handle: str
    nbytes: int
    hidden: TensorPart
    tokens: TensorPart

    @staticmethod
    def of(params: Any, name: str, tokens: int) -> Manifest:
        """The manifest of the request of this name and of so many tokens. Nothing of it is believed.

        Raises NoStatesError where there is none, and WrongError where it is damaged or another request's.
        """
        if not isinstance(params, Mapping) or "handle" not in params:
            files = isinstance(params, Mapping) and "hidden_states_path" in params
            raise NoStatesError(
                "gives its states in files, but features.transport is mooncake" if files else "answers without states"
            )
        try:
            if params["version"] != VERSION:
                raise ValueError(f"version {params['version']!r}, not {VERSION}")
            handle, tensors = params["handle"], params["tensors"]
            if not isinstance(handle, str) or len(handle) > LONGEST_HANDLE or not re.fullmatch(r"[\w-]+", handle, re.ASCII):
                raise ValueError(f"the name {handle!r:.100}")
            if sorted(tensors) != [HIDDEN, TOKENS]:
                raise ValueError(f"tensors {list(tensors)!r:.100}")
            hidden, ids = (_part(tensors[key]) for key in (HIDDEN, TOKENS))
            nbytes = _whole(params["metadata"]["total_aligned_bytes"])
            if params["metadata"]["num_tokens"] != tokens or ids.shape != (tokens,) or ids.dtype != torch.int64:
                raise ValueError(f"other token ids than the {tokens} of the request")
            if len(hidden.shape) != 3 or hidden.shape[0] != tokens or not hidden.dtype.is_floating_point:
                raise ValueError(f"states of shape {list(hidden.shape)} in {hidden.dtype} for {tokens} tokens")
            first, second = sorted((hidden, ids), key=lambda tensor: tensor.offset)
            if first.offset + first.nbytes > second.offset or second.offset + second.nbytes > nbytes:
                raise ValueError("tensors that overlap, or lie outside of the object")
            if nbytes > hidden.nbytes + ids.nbytes + 2 * ALIGNED:
                raise ValueError(f"an object of {nbytes} bytes for tensors of {hidden.nbytes + ids.nbytes}")
        except (KeyError, TypeError, ValueError) as error:
            raise WrongError(f"a damaged manifest ({type(error).__name__}: {error})") from error
        if key_of(name) not in handle:
            raise WrongError(f"the object {handle} of another request")
        return Manifest(handle, nbytes, hidden, ids)


class MooncakeStates:
    """Reads states from the store."""

    def __init__(self, store: MooncakeStore, folder: Path | None = None) -> None:
        """folder: in which the names of this machine's processes are kept; None: one of this user's in the temporary folder."""
        self.names, self.store = RequestNames(), store
        self.folder = folder or Path(tempfile.gettempdir()) / f"drafttrain-mooncake-{os.getuid()}"
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self._own_folder():
                (self.folder / self.names.own).write_text(store.settings.master, encoding="utf-8")
        self._swept = False

    def receive(self, name: str, params: Any, tokens: int, deadline: float, closed: Event) -> States:
        """As `Transport.receive`."""
        manifest = Manifest.of(params, name, tokens)
        handle, error = manifest.handle, manifest.handle + ERROR
        try:
            self.sweep_once()
            if self.store.wait([error, handle], deadline, closed) == error:
                raise self._told(error)
            content_N = self.store.get(handle, manifest.nbytes)
        except StoreError as fault:
            raise AbsentError(str(fault)) from fault
        finally:
            with suppress(StoreError):  # a master that is away has forgotten all objects when it comes back
                self.store.remove(handle, error)
        return States(manifest.hidden.of(content_N), manifest.tokens.of(content_N))

    def remove(self, names: Iterable[str]) -> None:
        """As `Transport.remove`."""
        keys = [re.escape(key_of(name)) for name in names]
        if not keys:  # an empty pattern matches all names
            return
        with suppress(StoreError):
            self.store.remove_matching("|".join(keys))

    def sweep(self, late: bool = False) -> None:
        """As `Transport.sweep`. The names of processes whose objects could not be removed are kept for the next start."""
        with suppress(StoreError):
            self.store.remove_matching(key_of(self.names.own))
            if not late:
                (self.folder / self.names.own).unlink(missing_ok=True)
            self._sweep_abandoned(for_good=True)

    def close(self) -> None:
        """As `Transport.close`."""
        self.store.close()

    def _told(self, error: str) -> Exception:
        """What a server says of an object that it could not put."""
        size = self.store.size(error)
        if size > LONGEST_ERROR:
            return AbsentError(f"{error} of {size} bytes")
        try:
            message = str(json.loads(bytes(self.store.get(error, size).tolist()))["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            message = "an error that cannot be read"
        return (NonFiniteError if "finite" in message else AbsentError)(f"the server could not give the states: {message:.300}")

    def sweep_once(self) -> None:
        """At the first use: remove the objects of this machine's processes that have ended. Raises StoreError."""
        if not self._swept:
            self._swept = True
            self._sweep_abandoned(for_good=False)

    def _sweep_abandoned(self, for_good: bool) -> None:
        """Remove the objects of this machine's processes that have ended. Raises StoreError where the master is away.

        for_good: forget their names too. At a start servers may still put objects for a process that was just killed.
        """
        if not self._own_folder():
            return
        for file in self.folder.iterdir():
            with suppress(OSError):
                if not self.names.abandoned(file.name) or file.read_text(encoding="utf-8") != self.store.settings.master:
                    continue
                self.store.remove_matching(key_of(file.name))
                if for_good:
                    file.unlink(missing_ok=True)

    def _own_folder(self) -> bool:
        """Whether no other user can have written to the folder."""
        with suppress(OSError):
            status = self.folder.lstat()
            return self.folder.is_dir() and status.st_uid == os.getuid() and not status.st_mode & 0o022
        return False


def object_bytes(tokens: int, layers: int, width: int, item: int) -> int:
    """Bytes of a request's object at most. item: bytes of a value."""
    return tokens * (layers * width * item + torch.int64.itemsize) + 2 * ALIGNED


def key_of(name: str) -> str:
    """A request's name as hs_connectors writes it in an object's."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def _part(spec: Any) -> TensorPart:
    """Raises KeyError, TypeError or ValueError for something else."""
    dtype = DTYPES[spec["dtype"]]
    tensor = TensorPart(tuple(map(_whole, spec["shape"])), dtype, _whole(spec["offset"]))
    if len(tensor.shape) > 3 or spec["nbytes"] != tensor.nbytes or tensor.nbytes == 0 or tensor.offset % ALIGNED:
        raise ValueError(f"a tensor of {spec['nbytes']!r:.40} bytes at {tensor.offset} with shape {list(tensor.shape)[:4]}")
    return tensor


def _whole(value: Any) -> int:
    """A number of bytes or rows."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise ValueError(f"{value!r:.40} is no size")
    return value
