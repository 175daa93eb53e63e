"""Reads data files of all kinds. Errors name the place in the file."""

from __future__ import annotations

import codecs
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import drafttrain
from drafttrain.core.errors import UserError
from drafttrain.core.files import disk_full

ASSETS = Path(drafttrain.__file__).parent / "assets"
LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
TABLES = (".parquet", ".arrow", ".csv")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
TEXT_COLUMNS = ("prompt", "response", "completion", "instruction", "input", "output", "query", "system", "text")


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a UserError, such as missing permission, a failing device or a link to itself."""
    try:
        yield
    except OSError as error:
        if disk_full(error):
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions and its disk") from error


def as_object(origin: str, record: Any) -> dict[str, Any]:
    """Return the record. Raises UserError unless it is a JSON object."""
    if not isinstance(record, dict):
        raise UserError(f"{origin}: expected a JSON object, got {type(record).__name__}; write one {{...}} per record")
    return record


def keys_of(record: dict[str, Any]) -> str:
    """A record's keys for an error message: the first ten, each cut to 40 characters."""
    names = [" ".join(str(key)[:40].split()) for key in sorted(record, key=str)]
    return ", ".join(names[:10] + [f"and {len(names) - 10} more"] * (len(names) > 10)) or "no key at all"


def is_local(path: Path) -> bool:
    """Whether this is a path rather than a hub id: it exists, has a data file's suffix, or is not a possible hub id."""
    return path.exists() or path.name.endswith(LINES + TABLES) or not HUB_ID.fullmatch(str(path))


def check_file(path: Path) -> None:
    """Raise UserError unless this is a file of a known kind."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.is_file() and p.name.endswith(LINES + TABLES))
        hint = f"name one of its files: {', '.join(names[:5])}" if names else f"it holds no {', '.join(LINES + TABLES)} file"
        raise UserError(f"{path}: expected a data file, got a directory; {hint}")
    if not path.exists():
        raise UserError(f"{path}: expected a data file, got nothing there; {_nearest(path)}")
    if not path.name.endswith(LINES + TABLES):
        raise UserError(
            f"{path}: expected {', '.join(LINES + TABLES)}, got '{path.suffix}'; convert it, or rename it if it is one"
        )


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"its folder {path.parent} does not exist either: correct the path"
    names = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), n=3)
    return f"did you mean {' or '.join(names)}?" if names else f"correct the path (nothing of a similar name in {path.parent})"


def open_plain(path: Path) -> BinaryIO:
    """The file's decompressed bytes."""
    return cast(BinaryIO, gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


@contextmanager
def damaged_gzip(path: Path) -> Iterator[None]:
    """Turn gzip's errors inside into a UserError."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: expected gzip data, got a damaged file ({error}); download or compress it again") from error


def is_array(path: Path) -> bool:
    """Whether a .json file holds one array. Many hold one object per line."""
    if ".json" not in path.suffixes:
        return False
    with damaged_gzip(path), open_plain(path) as file:
        return file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def read_array(path: Path) -> list[Any]:
    """The elements of a JSON array."""
    with damaged_gzip(path), open_plain(path) as file:
        elements: list[Any] = read_json(file.read(), path, 1)
        return elements


def filled_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. Blank lines at the end are dropped; others raise UserError."""
    blank_line = None
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            blank_line = blank_line or line_number  # an error only when something follows
            continue
        if blank_line:
            raise UserError(f"{path}:{blank_line}: expected a JSON object, got an empty line; remove it")
        yield line_number, line


def read_json(content: bytes, path: Path, line: int) -> Any:
    """Parse bytes that start at this line of the file. Raises UserError that names the faulty line."""
    try:
        return json.loads(content.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{line}: expected UTF-8, got byte {content[error.start]:#04x}; convert the file to UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        line_number = line + error.lineno - 1
        excerpt = _excerpt(error.doc, error.pos)
        raise UserError(
            f"{path}:{line_number}: expected JSON, got {excerpt} ({error.msg}, column {error.colno}); correct the line"
        ) from error
    except RecursionError as error:
        raise UserError(f"{path}:{line}: expected a record, got JSON nested too deeply to read; flatten it") from error
    except ValueError as error:  # Python limits the digits of integers
        raise UserError(f"{path}:{line}: expected a record, got a number with thousands of digits; shorten it") from error


def _excerpt(text: str, position: int) -> str:
    return repr(text[position : position + 20].split("\n")[0]) if text[position:].strip() else "the end of the text"


def plain_rows(path: Path, batch: Any) -> list[dict[str, Any]]:
    """A record batch as Python values. Raises UserError for values that Python cannot hold, for example some timestamps."""
    with damaged_table(path):
        batch.validate(full=True)  # damaged offsets would read outside of the file
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows


def read_batches(path: Path) -> Iterator[Any]:
    """Record batches of a Parquet, Arrow (file or stream, memory-mapped) or CSV file. Raises UserError if damaged."""
    with damaged_table(path):
        yield from _batches(path)


@contextmanager
def damaged_table(path: Path) -> Iterator[None]:
    """Turn pyarrow's errors inside into a UserError, and Python's errors for impossible names and numbers."""
    import pyarrow  # slow to import, and most runs read JSON lines

    python = (OSError, ValueError, RuntimeError, ArithmeticError, LookupError, TypeError, MemoryError, SystemError)
    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, *python) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, pyarrow.ArrowException):
            raise  # an error of the operating system
        problem = f"a file that cannot be read as one ({reason_of(error)})"
        raise UserError(f"{path}: expected a {path.suffix} table, got {problem}; write it again") from error


def reason_of(error: BaseException) -> str:
    """The first line of an error's text, cut to 200 characters; its type where it has no text."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (text if len(text) <= 200 else f"{text[:200]}...") or type(error).__name__


def path_of(name: str, key: str) -> Path:
    """The path that a configuration key names. Raises UserError for text that cannot be a path on this machine."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        short_name = name if len(name) <= 80 else f"{name[:80]}..."
        raise UserError(f"{key}={short_name}: no path of this machine ({_system_reason(error)}); correct it") from error
    return path


def read_template(path: str | None) -> str | None:
    """The text of the Jinja file that data.template names."""
    if path is None:
        return None
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.template={path}: expected a Jinja file in UTF-8, got none ({error}); correct the path"
        ) from error


def _system_reason(error: Exception) -> str:
    return str(error.strerror).lower() if isinstance(error, OSError) else reason_of(error)


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import csv, ipc, parquet

    if path.suffix == ".parquet":
        yield from parquet.ParquetFile(path).iter_batches()
    elif path.suffix == ".csv":
        types = csv.ConvertOptions(column_types={name: pyarrow.string() for name in TEXT_COLUMNS})
        layout = csv.ParseOptions(newlines_in_values=True)
        yield from csv.read_csv(path, parse_options=layout, convert_options=types).to_batches()
    else:
        with pyarrow.memory_map(str(path)) as source:
            magic = source.read(6)
            source.seek(0)
            reader = ipc.open_file(source) if magic == b"ARROW1" else ipc.open_stream(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches)) if magic == b"ARROW1" else reader
