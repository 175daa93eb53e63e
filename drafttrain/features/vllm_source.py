"""vLLM's `extract_hidden_states`: the answer says where the states and the token ids are, and a transport reads them.

vLLM numbers layers by what is before them: id i is the residual stream before block i, so 0 is the embedding and b + 1 the
output of block b. It gives the last block's output, and no state after the last norm.

Files are one transport (`StateFiles`). vLLM's connector writes `<folder>/<request id>.safetensors` after it has answered the
request. From the request's first step until the file is whole it holds an exclusive lock (`flock`) on `<file>.lock`. It never
deletes a file.
"""

from __future__ import annotations

import base64
import fcntl
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch.nn.functional import pad

from drafttrain.core.errors import UserError
from drafttrain.features.answers import AnswerError, AnswerRequest
from drafttrain.features.source import (
    NAMED,
    AbsentError,
    Ask,
    Description,
    ImageFiles,
    NoStatesError,
    Received,
    RequestNames,
    States,
    StatesRequest,
    Transport,
    WrongError,
)
from drafttrain.model.images import bases, has_images, rows, spans, with_placeholders
from drafttrain.model.target import FINAL

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks at a lock
PLAIN = {"max_tokens": 1, "temperature": 0}  # of a request for states alone
ENDING = 5.0  # seconds that the end of a run waits for a file that is being written
LOCK = ".lock"
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of Linux


class VllmSource:
    """States that vLLM's connectors leave for a transport."""

    def __init__(
        self, keys: Sequence[int], longest: int, transport: Transport, way_out: str, images: ImageFiles | None = None
    ) -> None:
        """longest: tokens of the longest conversation. way_out: how to start a server that gives the states, for messages."""
        self.keys, self.longest, self.transport, self.way_out = tuple(keys), longest, transport, way_out
        self.names, self.images = transport.names, images

    def label(self, key: int) -> str:
        """A state's name in vLLM's numbering."""
        return "the state after the last norm" if key == FINAL else f"the state of layer id {key + 1}"

    def describe(self, url: str, ask: Ask) -> Description:
        """Ask for the model's name, its room and the version."""
        try:
            model_info = ask("GET", "models")["data"][0]
            model = str(model_info["id"])
            context, owner = int(model_info.get("max_model_len") or 2**31), str(model_info.get("owned_by") or "server")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{url} does not list its models; is it an OpenAI-compatible server?") from error
        if context <= self.longest:
            raise UserError(
                f"{url} takes {context} tokens, one of them its answer, but conversations have up to {self.longest}; start it "
                f"with --max-model-len {self.longest + 1}, or lower data.max_length"
            )
        try:
            version = str(ask("GET", f"{url.removesuffix('/v1')}/version")["version"])
        except (UserError, KeyError, TypeError):
            version = "of unknown version"
        return Description(owner, version, model)

    def states(self, url: str, description: Description, ask: Ask, request: StatesRequest) -> Received:
        """Ask for one token after the sequence, or for an answer, and read what vLLM's answer names."""
        if has_images(request.ids):
            return self._pictured(url, description, ask, request)
        answer = request.answer
        sampling = PLAIN if answer is None else answer.fields()
        body = {"model": description.details, "prompt": list(request.ids), "request_id": request.name}
        response = ask("POST", "completions", body | sampling)
        answer_ids = [] if answer is None else _written(url, answer, response)
        states = self._received(url, response, len([*request.ids, *answer_ids[:-1]]), request)
        return Received(states.hidden_TLH, states.token_T.tolist(), answer_ids)

    def _pictured(self, url: str, description: Description, ask: Ask, request: StatesRequest) -> Received:
        """Of a sequence with images, which vLLM prepares itself: one placeholder stands for all rows of an image.

        A sequence that ends within an image is asked for without it: nothing is learnt behind its text, and the states of these
        rows are zeros.
        """
        assert self.images is not None, "only the images of a target that reads them have ids"
        check_placeholders(self.images)
        ids, placeholder, token_ids, end = list(request.ids), self.images.token_id, list[int](), 0
        start, stop = spans(ids)[-1]
        cut = stop == len(ids) and rows(ids[-1]) + 1 < self.images.known[bases(ids[-1])].rows
        read = ids[:start] if cut else ids
        parts = []
        for start, stop in spans(read):
            content = base64.b64encode(self.images.content(bases(ids[start]))).decode()
            parts.append({"type": "image_url", "url": f"data:image/png;base64,{content}"})
            token_ids, end = [*token_ids, *read[end:start], placeholder], stop
        body = {"model": description.details, "request_id": request.name, "sampling_params": PLAIN}
        body |= {"token_ids": [*token_ids, *read[end:]], "content_parts": parts}
        response = ask("POST", f"{url.removesuffix('/v1')}/inference/v1/generate", body)
        states, expected = self._received(url, response, len(read), request), with_placeholders(read, placeholder)
        given = states.token_T.tolist()
        if given.count(placeholder) != expected.count(placeholder):
            raise UserError(
                f"{url} makes {given.count(placeholder)} rows of a conversation's images, the target here "
                f"{expected.count(placeholder)}: its image processor has other settings; {self.way_out}"
            )
        return Received(pad(states.hidden_TLH, (0, 0, 0, 0, 0, len(ids) - len(read))), ids if given == expected else given)

    def _received(self, url: str, response: Any, tokens: int, request: StatesRequest) -> States:
        """What the transport brings of an answer. tokens: that have states."""
        params = response.get("kv_transfer_params") if isinstance(response, dict) else None
        try:
            return self.transport.receive(request.name, params, tokens, request.deadline, request.closed)
        except NoStatesError as error:
            raise UserError(f"{url} {error}; {self.way_out}") from error

    def remove(self, names: Iterable[str]) -> None:
        """As `Transport.remove`."""
        self.transport.remove(names)

    def sweep(self, late: bool = False) -> None:
        """As `Transport.sweep`."""
        self.transport.sweep(late)

    def close(self) -> None:
        """As `Transport.close`."""
        self.transport.close()


def _written(url: str, request: AnswerRequest, response: Any) -> list[int]:
    """The token ids of the target's answer."""
    try:
        return request.read(response)
    except AnswerError as error:
        raise WrongError(str(error)) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{url} answers without token ids; features.answers needs vLLM 0.32 or later") from error


def check_placeholders(images: ImageFiles) -> None:
    """Raise UserError for a target whose image is more in a text than its rows: one placeholder would not stand for it."""
    if images.before:
        raise UserError(
            "features=engine takes images of targets such as Qwen's, which have nothing but its rows in place of an image; set "
            "features=cached or online"
        )


class StateFiles:
    """States that servers on this machine, or with a mount in common, leave in files."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where this machine sees the servers' files; None: where the servers say."""
        self.names, self.folder = RequestNames(), folder
        self._seen: set[Path] = set()  # folders with files of servers
        self._lock = Lock()

    def receive(self, name: str, params: Any, tokens: int, deadline: float, closed: Event) -> States:
        """As `Transport.receive`."""
        try:
            server_path = Path(params["hidden_states_path"])
        except (KeyError, TypeError) as error:
            raise NoStatesError("answers without states") from error
        if not _possible(server_path):
            raise WrongError(f"a file name that cannot be, {str(server_path)!r:.100}")
        if name not in server_path.name or server_path.suffix != ".safetensors":
            raise WrongError(f"the file {server_path.name} of another request")
        path = server_path if self.folder is None else self.folder / server_path.name
        with self._lock:
            if is_new := path.parent not in self._seen:
                self._seen.add(path.parent)
        if is_new:
            remove_abandoned(path.parent, self.names)
        return read(path, deadline, closed)

    def remove(self, names: Iterable[str]) -> None:
        """As `Transport.remove`."""
        request_names = list(names)
        for folder in self._folders():
            remove_named(folder, request_names)

    def sweep(self, late: bool = False) -> None:
        """As `Transport.sweep`. Late files tell by their names whose they are."""
        for folder in self._folders():
            remove_named(folder, [self.names.own])
            remove_abandoned(folder, self.names)

    def close(self) -> None:
        """As `Transport.close`."""

    def _folders(self) -> set[Path]:
        with self._lock:
            return set(self._seen)


def read(path: Path, deadline: float, closed: Event) -> States:
    """Wait until the file is whole, read it and remove it. deadline: of `monotonic`. closed: ends the wait.

    Raises AbsentError for a file that is missing, damaged or late.
    """
    _wait(path, deadline, closed)
    try:
        content = load(path.read_bytes())  # not mapped: a server may truncate the file
        return States(content["hidden_states"], content["token_ids"])
    except OSError as error:
        raise AbsentError(f"no readable {path} ({error.strerror})") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise AbsentError(f"{path} is damaged ({error})") from error
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file of states and its lock, where they are. Raises UserError where that is not allowed."""
    for file in (path, path.with_name(path.name + LOCK)):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"{file} cannot be removed ({error.strerror}), but every file of states is removed once it is read; run "
                "server and trainer as one user, or let both write to the folder"
            ) from error


def remove_named(folder: Path, names: Iterable[str]) -> None:
    """Remove the files of the requests of these names; a name may be the beginning of one."""
    prefixes = tuple(names)
    for file in _files(folder):
        if any(name in file.name for name in prefixes):
            with suppress(PermissionError):  # `remove` says so
                file.unlink(missing_ok=True)


def remove_abandoned(folder: Path, names: RequestNames) -> None:
    """Remove the files that killed processes of this machine have left in a folder."""
    for file in _files(folder):
        if names.abandoned(file.name):
            with suppress(PermissionError):  # another user's
                file.unlink(missing_ok=True)


def _possible(path: Path) -> bool:
    """Whether a file can have this path. The file is not looked for: NFS would remember that it is not there yet."""
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return b"\0" not in name and len(name) <= LONGEST_PATH and max(map(len, name.split(b"/"))) <= LONGEST_NAME


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.glob(f"*{NAMED}*") if not file.is_dir()]


def _wait(path: Path, deadline: float, closed: Event) -> None:
    """Wait until the server holds no lock on the file. A killed server holds none: the system takes it back."""
    try:
        lock = os.open(path.with_name(path.name + LOCK), os.O_RDONLY)
    except OSError as error:
        raise AbsentError(
            f"{path}{LOCK} cannot be read ({error.strerror}); features.dir names the folder in which this machine sees the "
            "server's files"
        ) from error
    try:
        delay, ending = SHORTEST_PAUSE, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if closed.is_set() and not ending:  # the server writes the file: nothing else would remove it
                    ending, deadline = True, min(deadline, monotonic() + ENDING)
                if monotonic() >= deadline:
                    remove(path)
                    raise AbsentError(f"{path} was not written in time") from None
            except OSError as error:  # a mount without locks; no other try would succeed
                raise UserError(
                    f"{path.parent} takes no locks ({error.strerror}), which tell when a file of states is whole; mount it "
                    "with flock (NFS 4, Lustre with its option flock), or set features.transport=mooncake"
                ) from error
            if ending:
                sleep(delay)
            else:
                closed.wait(delay)
            delay = min(2 * delay, LONGEST_PAUSE)
    finally:
        os.close(lock)
