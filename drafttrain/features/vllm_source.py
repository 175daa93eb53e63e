"""vLLM's `extract_hidden_states`: the answer names a file under a lock, which holds the states and the token ids.

vLLM numbers layers by what is before them: id i is the residual stream before block i, so 0 is the embedding and b + 1 the
output of block b. It gives the last block's output, and no state after the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Event, Lock
from typing import Any

from drafttrain.core.errors import UserError
from drafttrain.features.source import AbsentError, Ask, Description, Received, WrongError
from drafttrain.features.state_files import RequestNames, StateFileError, read, remove_abandoned, remove_named
from drafttrain.model.target import FINAL


class VllmSource:
    """States in files. folder: where this machine sees them; None: where the servers say."""

    def __init__(self, keys: Sequence[int], longest: int, folder: Path | None, way_out: str) -> None:
        """longest: tokens of the longest conversation. way_out: how to start a server that gives the states, for messages."""
        self.keys, self.longest, self.folder, self.way_out = tuple(keys), longest, folder, way_out
        self.names = RequestNames()
        self._folders: set[Path] = set()
        self._lock = Lock()

    def label(self, key: int) -> str:
        """A state's name in vLLM's numbering."""
        return "the state after the last norm" if key == FINAL else f"the state of layer id {key + 1}"

    def describe(self, url: str, ask: Ask) -> Description:
        """Ask for the model's name, its room and the version."""
        try:
            about = ask("GET", "models")["data"][0]
            model = str(about["id"])
            room, maker = int(about.get("max_model_len") or 2**31), str(about.get("owned_by") or "server")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{url} does not list its models; is it an OpenAI-compatible server?") from error
        if room <= self.longest:
            raise UserError(
                f"{url} takes {room} tokens, one of them its answer, but conversations have up to {self.longest}; start it "
                f"with --max-model-len {self.longest + 1}, or lower data.max_length"
            )
        try:
            version = str(ask("GET", f"{url.removesuffix('/v1')}/version")["version"])
        except (UserError, KeyError, TypeError):
            version = "of unknown version"
        return Description(maker, version, model)

    def states(
        self, url: str, description: Description, ask: Ask, name: str, ids: Sequence[int], deadline: float, closed: Event
    ) -> Received:
        """Ask for one token after the sequence, and read the file that the answer names."""
        body = {"model": description.details, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "request_id": name}
        path = self._path(url, name, ask("POST", "completions", body))
        try:
            found = read(path, deadline, closed)
        except StateFileError as error:
            raise AbsentError(str(error)) from error
        return Received(found.hidden_TLH, found.token_T.tolist())

    def remove(self, names: Iterable[str]) -> None:
        """Remove the files of these requests."""
        wanted = list(names)
        for folder in self._seen():
            remove_named(folder, wanted)

    def sweep(self) -> None:
        """Remove this process's files, and those of processes that have ended."""
        for folder in self._seen():
            remove_named(folder, [self.names.own])
            remove_abandoned(folder, self.names)

    def _seen(self) -> list[Path]:
        with self._lock:
            return list(self._folders)

    def _path(self, url: str, name: str, answer: Any) -> Path:
        """Where this machine sees the file of an answer."""
        try:
            given = Path(answer["kv_transfer_params"]["hidden_states_path"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{url} answers without states; {self.way_out}") from error
        if name not in given.name or given.suffix != ".safetensors":
            raise WrongError(f"the file {given.name} of another request")
        path = given if self.folder is None else self.folder / given.name
        with self._lock:
            new = path.parent not in self._folders
            self._folders.add(path.parent)
        if new:
            remove_abandoned(path.parent, self.names)
        return path
