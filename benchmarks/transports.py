"""Bytes per second of states by files and by Mooncake: `python -m benchmarks.transports --megabytes 64 --rounds 20`.

A process of its own writes each object: a safetensors file in /dev/shm under a lock, or an object in Mooncake's store on this
machine, by TCP on loopback. The transports of training read and remove them. The two are measured in turn, in one run. The time
is that of reading, from the moment at which the states are there; `threads` read at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import torch
from safetensors.torch import save_file

from drafttrain.features.mooncake_states import MooncakeStates
from drafttrain.features.mooncake_store import MooncakeStore, StoreSettings
from drafttrain.features.state_files import StateFiles
from drafttrain.features.transport import Transport
from tests.standin.mooncake import ROOT, Master, connected, free_port
from tests.standin.mooncake_server import packed

LAYERS, HIDDEN = 4, 4096


def states(tokens: int) -> dict[str, torch.Tensor]:
    hidden_TLH = torch.full((tokens, LAYERS, HIDDEN), 0.5, dtype=torch.bfloat16)
    return {"hidden_states": hidden_TLH, "token_ids": torch.arange(tokens)}


def produce(folder: Path, master: str, tokens: int, threads: int) -> None:
    """Write what each line `KIND NAME` of stdin says, and print its `kv_transfer_params`."""
    tensors = states(tokens)
    content, manifest = packed("x", tensors)
    buffer_N = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    client = connected(master, 2 * (threads + 2) * len(content) + (64 << 20))
    assert client.register_buffer(buffer_N.data_ptr(), len(content)) == 0
    for line in sys.stdin:
        kind, name = line.split()
        if kind == "mooncake":
            status = client.put_from(name, buffer_N.data_ptr(), len(content))
            params: dict[str, Any] = manifest | {"handle": name}
            assert status == 0, status
        else:
            file = folder / f"{name}.safetensors"
            save_file(tensors, file)
            file.with_name(file.name + ".lock").touch()
            params = {"hidden_states_path": str(file)}
        print(json.dumps(params), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64.0, help="of a request's states")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--produce", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    tokens = max(1, round(asked.megabytes * 2**20 / (LAYERS * HIDDEN * 2)))
    if asked.produce:
        produce(Path(asked.produce[0]), asked.produce[1], tokens, asked.threads)
        return 0
    folder = Path(f"/dev/shm/drafttrain-transports-{os.getpid()}")
    folder.mkdir()
    master = Master(f"127.0.0.1:{free_port()}").start()
    nbytes = sum(tensor.nbytes for tensor in states(tokens).values())
    store = MooncakeStore(StoreSettings(master.address, buffer=max(2**20, 2 * (asked.threads + 1) * nbytes)))
    transports: dict[str, Transport] = {"files": StateFiles(), "mooncake": MooncakeStates(store)}
    command = [sys.executable, "-m", "benchmarks.transports", "--produce", str(folder), master.address]
    command += ["--megabytes", str(asked.megabytes), "--threads", str(asked.threads)]
    producer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert producer.stdin is not None and producer.stdout is not None
    rates: dict[str, list[float]] = {kind: [] for kind in transports}
    try:
        with ThreadPoolExecutor(asked.threads) as threads:
            for number in range(asked.rounds + 1):
                for kind, transport in transports.items():
                    waiting = []
                    for _ in range(asked.threads):
                        name = transport.names.next()
                        print(kind, f"cmpl-{name.replace('.', '_')}-0", file=producer.stdin, flush=True)
                        waiting.append((name, json.loads(producer.stdout.readline())))

                    def read(one: tuple[str, Any], transport: Transport = transport) -> int:
                        found = transport.receive(one[0], one[1], tokens, time.monotonic() + 60, Event())
                        return found.hidden_TLH.nbytes + found.token_T.nbytes

                    began = time.perf_counter()
                    got = sum(threads.map(read, waiting))
                    if number:  # the first round maps memory
                        rates[kind].append(got / (time.perf_counter() - began))
    finally:
        producer.kill()
        producer.wait()
        for transport in transports.values():
            transport.close()
        master.kill()
        shutil.rmtree(folder)
    for kind, found in rates.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"{kind:9} {middle / 1e9:6.2f} GB/s, median of {len(found)} rounds ({low / 1e9:.2f} to {high / 1e9:.2f})")
    ratios = [a / b for a, b in zip(rates["mooncake"], rates["files"], strict=True)]
    print(f"mooncake / files: {statistics.median(ratios):.2f}, median of the rounds; {asked.threads} threads, {nbytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
