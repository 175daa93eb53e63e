"""Preparation of training data compared with `datasets.map(batched=True)` in one process: interleaved, medians of repeats.

    python benchmarks/data.py [FILE] [--copies 8] [--workers 1] [--repeats 3] [--json FILE]

FILE: conversations; by default the embedded data, `copies` times. All sides write Arrow, with nothing cached before, and must
give the same ids and masks; otherwise the exit code is 1. Starting processes counts. The waiting process prepares data too, so
one worker makes two.

plain `datasets.map` with template and mask written the simple way: every reply's prefixes tokenised from the start encoder
`datasets.map` with the encoder of this project
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

if __name__ != "__mp_main__":  # worker processes import this file, and need nothing from it
    import numpy as np
    import psutil
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    from drafttrain.cli.quiet import quiet
    from drafttrain.data import DataOptions
    from drafttrain.data.chat import Encoder
    from drafttrain.data.dataset import Dataset, load_dataset
    from drafttrain.data.files import ASSETS
    from drafttrain.data.forms import conversation
    from drafttrain.data.order import pack
    from drafttrain.data.sources import read_usable

LENGTH = 100_000  # no conversation is cut, so that tokens do not depend on which turns are kept


def plain(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and mask of one conversation, from texts only."""

    def ids(some: list[dict[str, Any]], **how: Any) -> list[int]:
        return list(
            tokenizer(tokenizer.apply_chat_template(some, tokenize=False, **how), add_special_tokens=False)["input_ids"]
        )

    whole = ids(messages)
    mask = [0] * len(whole)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            first, last = len(ids(messages[:turn], add_generation_prompt=True)), len(ids(messages[: turn + 1]))
            mask[first:last] = [1] * (last - first)
    return whole, mask


@dataclass
class Cost:
    """The cost of a preparation."""

    seconds: float  # on the clock
    cpu: float  # processor seconds of all processes, which other load on the machine changes little


def mapped(file: Path, work: Callable[[dict[str, Any]], tuple[Any, Any]]) -> tuple[Cost, Any]:
    """The cost of `datasets.map` over a file, and its result."""
    from datasets import Dataset as Rows

    with tempfile.TemporaryDirectory() as cache:
        rows = Rows.from_json(str(file), cache_dir=cache)

        def batch(records: dict[str, list[Any]]) -> dict[str, Any]:
            pairs = [work({"messages": messages}) for messages in records["messages"]]
            return {"token_ids": [ids for ids, _ in pairs], "mask": [mask for _, mask in pairs]}

        began, cpu = perf_counter(), process_time()
        done = rows.map(batch, batched=True, remove_columns=rows.column_names, cache_file_name=f"{cache}/done.arrow")
        cost = Cost(perf_counter() - began, process_time() - cpu)
        return cost, done.with_format("numpy")[:]


def prepared(file: Path, tokenizer: PreTrainedTokenizerBase, workers: int) -> tuple[Cost, float, Dataset]:
    """(total cost, seconds to the first batch, the data) of this project's preparation."""
    with tempfile.TemporaryDirectory() as cache:
        began, cpu = perf_counter(), process_time()
        options = DataOptions(path=str(file), max_length=LENGTH, workers=workers, cache=cache)
        data = load_dataset(options, tokenizer, progress=False)
        data.global_batch(0, 8)
        first = perf_counter() - began
        len(data.train)
        others = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        cost = Cost(perf_counter() - began, process_time() - cpu + sum(t.user + t.system for t in others))
        data.close()
        return cost, first, data


def same(data: Dataset, found: Any) -> bool:
    """Whether both have the same ids and masks for every conversation."""
    assert data.conversations is not None
    rows = (data.conversations.encoded(number) for number in range(data.conversations.count))
    pairs = zip(rows, found["token_ids"], found["mask"], strict=True)
    return all(
        np.array_equal(row.token_ids, ids) and np.array_equal(row.mask, np.asarray(mask, bool)) for row, ids, mask in pairs
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="embedded")
    for name, default in (("copies", 8), ("workers", 1), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    quiet()
    from datasets import disable_progress_bars

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    encoder = Encoder(tokenizer, LENGTH)

    def own(record: dict[str, Any]) -> tuple[Any, Any]:
        row = encoder(conversation("x", record))
        return row.token_ids, row.mask

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.jsonl"
        lines = [json.dumps({"messages": c.messages}) + "\n" for c in read_usable(DataOptions(path=arguments.file))[0]]
        file.write_text("".join(lines) * arguments.copies)
        times: dict[str, list[Cost]] = {"plain": [], "encoder": [], "prepared": []}
        firsts = []
        for _ in range(arguments.repeats):
            cost, reference = mapped(file, lambda record: plain(tokenizer, record["messages"]))
            times["plain"].append(cost)
            cost, again = mapped(file, own)
            times["encoder"].append(cost)
            whole, first, data = prepared(file, tokenizer, arguments.workers)
            times["prepared"].append(whole)
            firsts.append(first)
            if not (same(data, reference) and same(data, again)):
                print("they do not give the same ids and masks", file=sys.stderr)
                return 1
        began = perf_counter()
        packed = pack(data.train, 4096)
        packing = perf_counter() - began
    full = packed.tokens / (4096 * len(packed))
    show(times, data.report(), arguments)
    print(f"first batch after {median(firsts):.1f} s; packing {packing:.1f} s, rows of 4,096 tokens {full:.1%} full")
    return 0


def show(times: dict[str, list[Cost]], summary: dict[str, Any], asked: argparse.Namespace) -> None:
    tokens = summary["tokens"]
    table = Table(title=f"{summary['conversations']:,} conversations, {tokens:,} tokens, {asked.workers} + 1 processes")
    for column in ("", "seconds", "tokens/s", "CPU s", "prepared is faster by"):
        table.add_column(column, justify="right" if column else "left")
    for name, costs in times.items():
        seconds, cpu = (median(getattr(cost, what) for cost in costs) for what in ("seconds", "cpu"))
        ratio = median(cost.seconds / ours.seconds for cost, ours in zip(costs, times["prepared"], strict=True))
        table.add_row(name, f"{seconds:.1f}", f"{tokens / seconds:,.0f}", f"{cpu:.1f}", f"{ratio:.2f}x")
    Console().print(table)
    if asked.json:
        record = {name: [asdict(cost) for cost in costs] for name, costs in times.items()}
        asked.json.write_text(json.dumps({"tokens": tokens, "workers": asked.workers, "costs": record}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
