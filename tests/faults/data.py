"""Malformed training data: 500 mutated lines per try, and damaged tables, arrays and compressed files."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults import material
from tests.faults.campaign import FAILURE, REFUSED, UNCHANGED, TryResult, broken, failed
from tests.faults.child import forked
from tests.faults.damage import damaged

LINES, FILES = 500, 24  # of a try
SLOW = 20.0  # seconds of processor time that one record may take: machines may be busy
LONGEST = 2000  # characters of a line that refuses a record
ALLOWED = "a conversation, or a UserError of one line that names the file"

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "be brief"}, USER, REPLY]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, REPLY | {"reasoning_content": "c"}]},
    {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            REPLY,
        ],
        "tools": [{"name": "add", "parameters": {"type": "object"}}],
    },
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "system": "be brief"},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "f"}'}]},
    {"prompt": "hi", "response": "yes"},
    {"prompt": "hi", "completion": "yes"},
    {"instruction": "add", "input": "1 2", "output": "3"},
    {"question_id": 3, "category": "writing", "turns": ["hi", "and then"]},
    {"text": "all of this is text"},
    {"question": "why?", "answer": "so"},
    {"messages": [USER, REPLY | {"weight": 0}, USER, REPLY | {"loss": True, "train_detail": []}], "roles_to_train": ["gpt"]},
    {"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "null"}}]},
    {"messages": [USER, REPLY], "documents": [{"input_ids": [1, 2], "loss_mask": [0, 1]}], "tokenizer": "0"},
    {"conversation": [{"human": "hi", "assistant": "yes"}, USER | {"masked": True}, REPLY | {"masked": True}]},
    {"prompt": [USER], "completion": [REPLY], "label": True},
    {"query": "hi", "response": "yes", "history": [["a", "b"]]},
    {"messages": [{"role": "user", "content": "<image>"}, REPLY], "images": ["a.png"]},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "attention_mask": [1, 1, 0]},
    {"input_ids": [[1, 2, 3]], "labels": [[-100, 2, 3]]},
    {"segments": [{"text": "a", "label": False}, {"text": "b", "label": True}]},
]

ODD_TEXTS = (
    "", " ", "\0", "\x1b[31mred\x1b]0;title\x07", "\ud800", "a\udfffb", "\u202eevil\u2066", "\ufeff", "\ufffe", "<eos>", "</s>",
    "<|im_end|>", "{{ 7 * 7 }}", "{% for %}", "\r\n\r\n", "x" * 200_000, "\u0301" * 5000,
    "🤷🏽‍♀️" * 300, "<script>alert(1)</script>",
    "../../etc/passwd", "\\u0000", "nan", "${oc.env:HOME}", "\x9b31m", "\x85", "\u2028",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1e308, -0.0, float("nan"), float("inf"), 2**63, 2**64, 10**400, 1.5, [], {}, [[]], [None], [{}],
    {"role": "assistant"}, ["a", 1], {"": ""}, {"type": "text"}, [{"type": "image_url", "image_url": {}}],
)  # fmt: skip
ODD_BYTES = (
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xfe\xff",
    b"\n",
    b"\r",
    b"\x1b[2J",
    b"\xf4\x90\x80\x80",
)


def nested(depth: int, kind: int) -> str:
    return ("[" * depth + "]" * depth) if kind else '{"a":' * depth + "1" + "}" * depth


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a record, except itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, one in inner for path in [(*above, key), *places(one, (*above, key))]]


def mutated_record(draw: random.Random) -> Any:
    """A record with a field that is missing, of another type, renamed, or repeated very often."""
    record = copy.deepcopy(draw.choice(RECORDS))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        there = places(record)
        if not there:
            break
        *above, last = draw.choice(there)
        node = record
        for key in above:
            node = node[key]
        match draw.randrange(6):
            case 0:
                node[last] = copy.deepcopy(draw.choice(ODD_VALUES))
            case 1 | 2:
                node[last] = draw.choice(ODD_TEXTS)
            case 3:
                del node[last]
            case 4 if isinstance(node, dict):
                node[draw.choice([*ODD_TEXTS, "role", "content", "tools", "from", "turns", "text"])] = node.pop(last)
            case 4 | 5:
                node[last] = [copy.deepcopy(node[last])] * draw.choice([1, 2, 50])
    return record


def mutated_line(draw: random.Random) -> bytes:
    """A record as a line, whose JSON may be wrong too."""
    line = json.dumps(mutated_record(draw), ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    at = draw.randrange(len(line) + 1)
    match draw.randrange(14):
        case 0:
            return line[:at]
        case 1:
            return line[:at] + draw.choice(ODD_BYTES) + line[at:]
        case 2 if line:
            i = draw.randrange(len(line))
            return line[:i] + bytes([line[i] ^ 1 << draw.randrange(8)]) + line[i + 1 :]
        case 3:
            return line.replace(b'"', b'"' + draw.choice([b"", b"\\", b"\\ud83d", b"\\x"]), draw.randint(1, 4))
        case 4:
            return line[:-1] + b', "deep": ' + nested(draw.choice([10, 900, 20_000]), draw.randrange(2)).encode() + b"}"
        case 5:
            number = draw.choice(["NaN", "Infinity", "-Infinity", "1" * 5000, "1e999", "-", "0x1", "1.", "1" * 300 + ".5"])
            return line[:-1] + f', "number": {number}}}'.encode()
        case 6:
            return line[:-1] + b"," + line[1:]  # every key twice
        case 7:
            return draw.choice(
                [b"null", b"[]", b"[1]", b'"text"', b"3", b"{}", b"[{}]", b"{", b"", b" ", b"true", nested(50_000, 1).encode()]
            )
        case 8:
            return line + draw.choice([b",", b"}", b" {}", b"\x00", line])
        case 9:
            inner = nested(draw.choice([5, 900, 5000]), draw.randrange(2))
            return json.dumps(
                {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": inner}]}
            ).encode()
        case _:
            return line
    return line


class Data:
    """A try is 500 lines, each read, rendered and tokenised by itself, or some damaged files, each read in full."""

    name = "data"

    def __init__(self) -> None:
        self.folder = Path()

    def prepare(self, folder: Path) -> None:
        self.folder = folder / "material"
        material.base(self.folder)

    def attempt(self, draw: random.Random, folder: Path) -> list[TryResult]:
        if draw.random() < 0.6:
            lines = [mutated_line(draw) for _ in range(LINES)]
            return self._all("lines", [("line.jsonl", line + b"\n") for line in lines], folder)
        if draw.random() < 0.4:
            lines = [mutated_line(draw).replace(b"\n", b" ") for _ in range(LINES)]
            return self._counted(b"\n".join(line for line in lines if line.strip()), folder)
        return self._all("files", [damaged_table(draw) for _ in range(FILES)], folder)

    def _all(self, what: str, contents: Sequence[tuple[str, bytes]], folder: Path) -> list[TryResult]:
        """Try each content as a file."""

        def work() -> int:
            read = reader(self.folder / "target")
            with (folder / "found.jsonl").open("w") as found:
                for number, (name, content) in enumerate(contents):
                    print(json.dumps([number, *one(read, Path(name), content)]), file=found, flush=True)
            return 0

        (folder / "work").mkdir()
        ended = forked(work, folder / "work", folder / "said").wait(300)
        found = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
        outcomes = [
            TryResult(
                f"{what}, {Path(contents[number][0]).suffix}",
                result,
                ALLOWED,
                got,
                f"record {number}: {excerpt(contents[number][1])}",
            )
            for number, result, got in found
        ]
        if fault := broken(ended) or (f"exit code {ended.code}" if ended.code else None):
            name, content = contents[min(len(found), len(contents) - 1)]
            outcomes.append(
                failed(f"{what}, {Path(name).suffix}", ALLOWED, fault, f"record {len(found)}: {excerpt(content)}", ended)
            )
        return outcomes

    def _counted(self, content: bytes, folder: Path) -> list[TryResult]:
        """Try one file with `data.bad_records`: every line is used, dropped or rejected, and listed."""
        file = folder / "data.jsonl"
        file.write_bytes(content)
        lines = content.count(b"\n") + 1

        def work() -> int:
            from drafttrain.data import DataOptions
            from drafttrain.data.dataset import load_dataset
            from drafttrain.targets import TargetOptions
            from drafttrain.targets.load import load_tokenizer

            tokenizer = load_tokenizer(TargetOptions(name="hf", path=str(self.folder / "target")))
            options = DataOptions(path=str(file), bad_records=lines, held_out=2, max_length=96)
            data = load_dataset(options, tokenizer)
            summary = data.summary
            print(summary["records"], summary["rejected"], summary["conversations"], summary["dropped"])
            listed = [] if data.conversations is None else data.conversations.faults
            assert summary["records"] == lines and len(listed) == summary["rejected"], summary
            assert summary["rejected"] + summary["conversations"] + summary["dropped"] == lines, summary
            assert all("\n" not in line and str(file) in line for line in listed), listed
            return 0

        ended = forked(work, folder, folder / "said").wait(300)
        what = "one file, data.bad_records"
        if fault := broken(ended) or (f"exit code {ended.code}" if ended.code else None):
            return [failed(what, "every line is used, dropped or listed", fault, f"{lines} lines", ended)]
        return [TryResult(what, UNCHANGED, count=lines)]


def reader(target: Path) -> Callable[[Path], int]:
    """Reads a file's conversations, renders and tokenises them; returns their number."""
    from drafttrain.data import DataOptions
    from drafttrain.data.chat import Encoder
    from drafttrain.data.sources import read_usable
    from drafttrain.targets import TargetOptions
    from drafttrain.targets.load import load_tokenizer

    encoder = Encoder(load_tokenizer(TargetOptions(name="hf", path=str(target))), 96)
    return lambda path: len([encoder(c) for c in read_usable(DataOptions(path=str(path), cache="cache"))[0]])


def one(read: Callable[[Path], int], path: Path, content: bytes) -> tuple[str, str]:
    """How reading this file ends: (result, details)."""
    from drafttrain.cli.error_messages import explain
    from drafttrain.core.errors import UserError

    path.write_bytes(content)
    began = time.process_time()
    try:
        count = read(path)
        found = (UNCHANGED, f"{count} conversations")
    except UserError as error:
        line = explain(error) or ""
        found = (REFUSED, "")
        if path.name not in line:
            found = (FAILURE, f"the line does not name the file: {line[:300]}")
        elif len(line) > LONGEST:
            found = (FAILURE, f"a line of {len(line)} characters: {line[:300]}")
        elif bad := unprintable(line):
            found = (FAILURE, f"the line has {bad} in it: {line[:300]!r}")
    except BaseException as error:
        found = (FAILURE, f"{type(error).__name__}: {error}"[:300])
    took = time.process_time() - began
    os.unlink(path)
    return found if took < SLOW else (FAILURE, f"{took:.0f} s")


def unprintable(text: str) -> str | None:
    """The name of a control character on which a terminal would act."""
    return next((f"U+{ord(c):04X}" for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160), None)


def damaged_table(draw: random.Random) -> tuple[str, bytes]:
    """A small damaged file of another kind than plain lines."""
    import io

    records = [draw.choice(RECORDS[5:8]) for _ in range(draw.randint(1, 30))]
    columns = {key: [str(record.get(key, "")) for record in records] for key in ("prompt", "response")}
    kind, buffer = draw.choice(["json", "jsonl.gz", "json.gz", "csv", "parquet", "arrow"]), io.BytesIO()
    if kind in ("csv", "parquet", "arrow"):
        import pyarrow
        from pyarrow import csv, ipc, parquet

        made = pyarrow.table(columns)
        if kind == "csv":
            csv.write_csv(made, buffer)
        elif kind == "parquet":
            parquet.write_table(made, buffer, compression=draw.choice(["NONE", "snappy", "gzip"]))
        else:
            with (ipc.new_stream if draw.random() < 0.5 else ipc.new_file)(buffer, made.schema) as writer:
                writer.write_table(made)
        content = buffer.getvalue()
    else:
        listed = kind.startswith("json.") or kind == "json"
        content = json.dumps(records).encode() if listed else b"".join(json.dumps(r).encode() + b"\n" for r in records)
        if draw.random() < 0.5:
            content = damaged(content, draw)[0]
        if kind.endswith(".gz"):
            content = gzip.compress(content)
    return f"table.{kind}", damaged(content, draw)[0] if draw.random() < 0.8 else content


def excerpt(content: bytes) -> str:
    return repr(content[:300])[2:-1] + ("" if len(content) <= 300 else f" ... {len(content):,} bytes")
