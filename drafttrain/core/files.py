"""Files and directories that appear complete or not at all: written under another name, fsynced, renamed. Their checksums."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from drafttrain.core.errors import UserError

CHECKSUM = "checksum"  # key of the checksum of all other keys of a JSON object
HOST = socket.gethostname()  # machines may share folders
FULL = (errno.ENOSPC, errno.EDQUOT)
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of a rename to the name of a directory with files, or of a file
Move = Callable[[Path, Path], None]  # from, to


def cache_home(needed: str = "") -> Path:
    """The folder of files that can be made again: `drafttrain` under XDG_CACHE_HOME or ~/.cache. Where nothing can be written
    to ~/.cache, as in many containers, it is in the temporary folder, unless `needed`, a path in it, is there already.
    """
    if cache_root := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache_root) / "drafttrain"
    with suppress(RuntimeError):  # a user without a home
        folder = Path.home() / ".cache" / "drafttrain"
        if writable(folder) or (needed and (folder / needed).exists()):
            return folder
    return temporary_home()


def writable(path: Path) -> bool:
    """Whether files can be written in this folder, which need not exist yet."""
    existing_path = next((ancestor for ancestor in (path, *path.parents) if ancestor.exists()), path)
    return existing_path.is_dir() and os.access(existing_path, os.W_OK | os.X_OK)


@cache
def temporary_home() -> Path:
    """This user's folder in the temporary folder, the same in all processes. No other user can have made it."""
    user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"drafttrain-{user}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    return folder if stat.S_ISDIR(status.st_mode) and status.st_uid == user else Path(tempfile.mkdtemp(prefix="drafttrain-"))


@contextmanager
def atomic_directory(final: Path, full: str | None = None, move: Move | None = None) -> Iterator[Path]:
    """Yield an empty directory next to `final`; at the end fsync it and rename it to `final`, replacing what was there.

    After an exception inside, `final` is unchanged and the temporary directory is gone. Raises UserError on a full disk;
    full: as for `atomic_write_bytes`. move: renames it in another way.
    """
    temporary_path = temporary_name(final)
    with _full_disk(final, full):
        try:
            shutil.rmtree(temporary_path, ignore_errors=True)
            temporary_path.mkdir(parents=True)
            yield temporary_path
            for path in temporary_path.rglob("*"):
                _fsync(path)
            _fsync(temporary_path)
            (move or _replace_directory)(temporary_path, final)
            _fsync(final.parent)
        finally:
            shutil.rmtree(temporary_path, ignore_errors=True)


def new_directory(base: Path, fill: Callable[[Path], object]) -> Path:
    """Make a directory with what `fill` writes into it, whole, and return its path: `base`, or `base-2` and so on where that is
    taken. `fill` must write something.

    No two processes get the same directory, also on machines that share the file system: a directory with files in it cannot
    be replaced by a rename, which looks and moves in one step. Raises UserError on a full disk.
    """
    created: list[Path] = []

    def first_free(temporary_path: Path, base: Path) -> None:
        for path in _numbered(base, base.name, ""):
            try:
                temporary_path.rename(path)
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
            else:
                return created.append(path)

    with atomic_directory(base, move=first_free) as temporary_path:
        fill(temporary_path)
    return created[0]


def new_file(base: Path, content: bytes) -> Path:
    """Make a file with this content, whole, and return its path: `base`, or `NAME-2.SUFFIX` and so on where that is taken.

    No two processes get the same file, as for `new_directory`. Raises UserError on a full disk.
    """
    temporary_path = temporary_name(base)
    with _full_disk(base):
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            temporary_path.write_bytes(content)
            _fsync(temporary_path)
            for path in _numbered(base, base.stem, base.suffix):
                with suppress(FileExistsError):
                    _claim(temporary_path, path)
                    _fsync(path.parent)
                    return path
        finally:
            temporary_path.unlink(missing_ok=True)
    raise AssertionError("there is always a further number")


def _numbered(base: Path, stem: str, suffix: str) -> Iterator[Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{stem}-{number}{suffix}")


def _claim(temporary_path: Path, path: Path) -> None:
    """Give the file this name. Raises FileExistsError where it is taken."""
    try:
        os.link(temporary_path, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary_path.replace(path)


@contextmanager
def atomic_file(final: Path, full: str) -> Iterator[BinaryIO]:
    """Yield a temporary file to be written in pieces; at the end it replaces `final`, after an exception it is removed.

    Raises UserError on a full disk; full: the end of that message, which says what to do.
    """
    temporary_path = temporary_name(final)
    with _full_disk(final, full):
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with temporary_path.open("wb") as file:
                yield file
            _fsync(temporary_path)
            temporary_path.replace(final)
        finally:
            temporary_path.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file's contents with this text in UTF-8, lone surrogates as escapes. Raises UserError on a full disk."""
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))


def atomic_write_bytes(path: Path, content: bytes, full: str | None = None) -> None:
    """Replace a file's contents. Raises UserError on a full disk.

    full: the end of that message, which says what is kept and what to do; None: the message for a run's checkpoints.
    """
    temporary_path = temporary_name(path)
    with _full_disk(path, full):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary_path.write_bytes(content)
            _fsync(temporary_path)
            temporary_path.replace(path)
            _fsync(path.parent)
        finally:
            temporary_path.unlink(missing_ok=True)


def atomic_write_json(path: Path, value: Any) -> None:
    """Replace a file's contents with this value as indented JSON. Raises ValueError for NaN and infinity, which JSON lacks."""
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_sealed_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file's contents with this object and its checksum, which `read_sealed_json` checks."""
    atomic_write_json(path, sealed(content))


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The object with a checksum of its contents added under the key `checksum`."""
    return content | {CHECKSUM: _digest(content)}


def unsealed(content: dict[str, Any]) -> dict[str, Any] | None:
    """The object without its checksum; None where the checksum is wrong. An object without one is returned unchanged."""
    body = {key: value for key, value in content.items() if key != CHECKSUM}
    try:
        return body if CHECKSUM not in content or content[CHECKSUM] == _digest(body) else None
    except ValueError:  # infinity: a changed digit made a number too large
        return None


def read_sealed_json(path: Path, what: str, way_out: str) -> dict[str, Any]:
    """The object that `write_sealed_json` wrote, without its checksum.

    A file without a checksum is accepted: older versions wrote none, and users who edit a file remove it. Raises UserError
    for a damaged file; what and way_out: for its message, the kind of file and what to do.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected {what}, got something else ({error}); {way_out}") from error
    if (body := unsealed(content)) is None:
        raise UserError(
            f"{path}: damaged: its checksum is not that of its contents; {way_out}. If you changed it on purpose, remove its "
            f'line "{CHECKSUM}"'
        )
    return body


def _digest(content: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(content, allow_nan=False))  # keys are text there, which sorts otherwise than numbers do
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def disk_full(error: BaseException) -> bool:
    """Whether a writer failed because the disk is full. Native code (safetensors, torch) tells it only in the message."""
    causes = (error, error.__cause__)
    return any((isinstance(c, OSError) and c.errno in FULL) or "No space left on device" in str(c) for c in causes)


def remove_directory(path: Path) -> None:
    """Remove a directory; a crash meanwhile never leaves a part of it under its own name."""
    temporary_path = temporary_name(path)
    path.rename(temporary_path)
    shutil.rmtree(temporary_path)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in this folder. No other process may be writing to it."""
    for path in folder.glob("*.tmp-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_abandoned(folder: Path, pattern: str = "*.tmp-*") -> None:
    """Remove temporary files in this folder whose process ran on this machine and has ended. pattern: of their names."""
    for path in folder.glob(pattern):
        match = re.search(rf"\.tmp-(old-)?{re.escape(HOST)}-(\d+)$", path.name)
        if match is not None and not process_runs(int(match[2])):
            with suppress(FileNotFoundError):  # another process may remove it too
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def process_runs(process: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


def temporary_name(path: Path) -> Path:
    """A name next to `path` by which `remove_abandoned` knows this process."""
    return path.with_name(f"{path.name}.tmp-{HOST}-{os.getpid()}")


def _replace_directory(source: Path, final: Path) -> None:
    """Move a directory to `final`. A rename cannot replace a directory with files in it, so the old one is renamed first."""
    if not final.exists():
        source.rename(final)
        return
    previous = final.with_name(f"{final.name}.tmp-old-{HOST}-{os.getpid()}")
    final.rename(previous)
    source.rename(final)
    shutil.rmtree(previous)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _full_disk(path: Path, full: str | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each library raises its own kind
        if isinstance(error, UserError) or not disk_full(error):
            raise
        default_advice = (
            f"previous checkpoints are; free space under {path.parent}, or set output= to a directory on another disk"
        )
        raise UserError(f"disk full while writing {path}: nothing of it was kept, {full or default_advice}") from error


LISTED = "drafttrain-checksums.json"
SUM = re.compile("[0-9a-f]{64}")


def file_sum(file: Path, durable: bool = False) -> str:
    """The file's sha256. durable: fsync the file first."""
    with file.open("rb") as stream:
        if durable:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()


def first_fault(directory: Path, sums: Mapping[str, Any], where: str) -> str | None:
    """Describe the first missing or damaged file; None if all are intact. where: name of the list, for the message."""
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        return next(filter(None, pool.map(lambda name: _fault(directory, name, sums[name], where), sums)), None)


def _fault(directory: Path, name: str, expected: Any, list_name: str) -> str | None:
    try:
        digest = file_sum(directory / name)
    except (OSError, ValueError) as error:
        return f"{name}, which {list_name} lists, cannot be read ({getattr(error, 'strerror', error)})"
    return None if digest == expected else f"{name} is damaged or cut off: its sha256 is not that in {list_name}"


def list_files(directory: Path, without: Collection[str] = ()) -> None:
    """Write the list of all files in this directory and below; directories inside that have a list themselves are left out.

    Call it last, before the directory appears (`atomic_directory`). without: names of files that people edit.
    """
    listed_directories = [path.parent for path in directory.rglob(LISTED) if path.parent != directory]
    files = [path for path in directory.rglob("*") if path.is_file() and path.name not in (*without, LISTED)]
    sums = {
        path.relative_to(directory).as_posix(): file_sum(path)
        for path in files
        if not set(listed_directories) & {*path.parents}
    }
    text = json.dumps(sealed(dict(sorted(sums.items()))), indent=2)
    (directory / LISTED).write_text(f"{text}\n", encoding="utf-8")


def listed(directory: Path, way_out: str) -> dict[str, Any] | None:
    """The sha256 of each file name; None where the directory has no list. Raises UserError for a damaged list."""
    file = directory / LISTED
    if not file.is_file():
        return None
    sums = read_sealed_json(file, "checksums", way_out)
    invalid_names = [name for name, value in sums.items() if not (isinstance(value, str) and SUM.fullmatch(value))]
    if invalid_names:
        raise UserError(f"{file}: expected checksums, got something else ({invalid_names[0]!r:.60}); {way_out}")
    return sums


def check_listed(directory: Path, way_out: str, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raise UserError unless the listed files are unchanged. wanted: selects the names to check.

    Every reader calls it. A directory without a list is accepted unchecked: another program or an earlier version made it, or
    it was changed on purpose.
    """
    sums = listed(directory, way_out) or {}
    if (fault := first_fault(directory, {name: sums[name] for name in sums if wanted(name)}, LISTED)) is not None:
        raise UserError(changed(directory, fault, way_out))


def changed(directory: Path, fault: str, way_out: str) -> str:
    """The message for a directory whose files differ from its list."""
    return f"{directory}: {fault}; {way_out}. If you changed it on purpose, delete {LISTED} there"
