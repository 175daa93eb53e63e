"""Prefill of one long prompt against transformers': a ratio of times, and the peak memory of each.

    python benchmarks/prefill.py [--lengths 2048 16384 65536] [--chunk 2048] [--repeats 3] [--threads 1] [--json FILE]

A random Llama on the CPU: 2 blocks, hidden size 256, 4 heads of width 64 over 2 KV heads, vocabulary 2,048, float32. Ours is a
session that gives the prompt's first token, in chunks; transformers' is its forward with a cache, in one pass over the prompt.
Both first tokens must be equal. The two alternate in one process; peak memory is that of a process of its own, less what was in
use before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.core.sampling import Sampling
from drafttrain.decoding.scheduler import Decoder
from drafttrain.targets.fast import FastTarget
from drafttrain.train.telemetry import peak_memory

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
First = Callable[[list[int]], int]  # a prompt -> the token after it


def runners(length: int, chunk: int) -> dict[str, First]:
    """Both ways to compute a prompt's first token, over the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=length + 8, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=parameter.shape[1] ** -0.5)
    decoder = Decoder(FastTarget(model), None, "greedy", Sampling(), max_new_tokens=1, prefill_chunk=chunk)

    def ours(prompt: list[int]) -> int:
        return decoder.run([prompt]).results[0].tokens[0]

    @torch.inference_mode()
    def theirs(prompt: list[int]) -> int:
        out: Any = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    return {"ours": ours, "transformers": theirs}


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator).tolist()


def seconds(length: int, chunk: int, repeats: int, threads: int) -> dict[str, list[float]]:
    """Each way's seconds, one after the other in every repeat. Raises ValueError where the tokens differ."""
    torch.set_num_threads(threads)
    both, found, prompt = runners(length, chunk), dict[str, list[float]](), prompt_of(length)
    for first in both.values():  # allocates and loads what later calls reuse
        first(prompt[: 2 * chunk // 3])
    for _ in range(repeats):
        tokens = set()
        for name, first in both.items():
            began = perf_counter()
            tokens.add(first(prompt))
            found.setdefault(name, []).append(perf_counter() - began)
        if len(tokens) > 1:
            raise ValueError(f"first tokens differ after {length} tokens: {sorted(tokens)}")
    return found


def megabytes(name: str, length: int, chunk: int, threads: int) -> float:
    """Peak memory of one prefill above what was in use before, the KV cache included."""
    torch.set_num_threads(threads)
    first, prompt = runners(length, chunk)[name], prompt_of(length)
    first(prompt[:64])
    before = peak_memory(torch.device("cpu"))
    first(prompt)
    return (peak_memory(torch.device("cpu")) - before) / 1e6


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 16384, 65536])
    parser.add_argument("--chunk", type=int, default=2048, help="positions of one of our passes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table("prompt", "ours, s", "transformers, s", "transformers / ours", "ours, MB", "transformers, MB", box=None)
    found = {}
    for length in arguments.lengths:
        times = apart(seconds, length, arguments.chunk, arguments.repeats, arguments.threads)
        ratio = median(theirs / ours for ours, theirs in zip(times["ours"], times["transformers"], strict=True))
        memory = {name: apart(megabytes, name, length, arguments.chunk, arguments.threads) for name in times}
        found[length] = {"seconds": times, "ratio": ratio, "megabytes": memory}
        middle = {name: median(values) for name, values in times.items()}
        cells = (f"{middle['ours']:.2f}", f"{middle['transformers']:.2f}", f"{ratio:.2f}")
        table.add_row(f"{length:,} tokens", *cells, *(f"{memory[name]:,.0f}" for name in middle))
    Console(width=110).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"chunk": arguments.chunk, "lengths": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
