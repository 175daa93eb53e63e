"""After a capture that fails, the process goes on: the stream, the allocator, the random generator, other graphs, decoding.

On a CPU nothing is captured: a rehearsal runs the same work without graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import cuda

from benchmarks.gpu import sources
from benchmarks.gpu.ladder import DTYPES, Rung, target_of, texts, variants
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import LADDER
from benchmarks.gpu.processes import hold
from benchmarks.gpu.results import Job
from drafttrain.core.sampling import Sampling
from drafttrain.decoding.graph_runner import CaptureError, captured_graph, why_waiting
from drafttrain.decoding.scheduler import Decoder
from drafttrain.decoding.settings import Controls

FAMILY = "suffix"  # its trees are on the host
TIMES = 8
SLACK = 8 << 20  # bytes that the allocator may keep for itself


@torch.no_grad()
def alone(machine: Machine) -> dict[str, Any]:
    """Work that asks the device, captured all the same. Raises RedError."""
    x_N = torch.ones(1 << 16, device=machine.device)

    def work() -> None:
        if float((x_N * 2).sum()) < 0:
            raise AssertionError("no sum of ones")

    work()
    if machine.rehearsal:
        return {}
    reason = why_waiting(work)
    hold("work that asks the device was not found", reason is not None)
    stream, held = cuda.current_stream(machine.device), list[int]()
    for _ in range(TIMES):
        try:
            captured_graph(work, machine.device)
        except CaptureError:
            held.append(cuda.memory_reserved(machine.device))
    hold("work that asks the device was captured", len(held) == TIMES)
    hold("the current stream is another one", cuda.current_stream(machine.device) == stream)
    hold(f"failed captures keep {held[-1] - held[0]} bytes", held[-1] - held[0] <= SLACK)
    hold("the random generator gives no numbers", bool(torch.rand(8, device=machine.device).isfinite().all()))
    cuda.empty_cache()
    before = float(x_N.sum())
    graph = captured_graph(lambda: x_N.add_(1), machine.device)
    graph.replay()
    hold("a later graph computes something else", float(x_N.sum()) == before + len(x_N))
    return {"reason": reason, "bytes": held[-1] - held[0]}


@contextmanager
def claimed(kind: type) -> Iterator[None]:
    """Meanwhile drafters of this class say that graphs can hold their steps."""
    with mock.patch.object(kind, "captured", True):
        yield


def decoding(machine: Machine) -> dict[str, Any]:
    """A drafter that no graph can hold, and that says otherwise. Raises RedError."""
    rung = Rung(next(iter(LADDER)), next(iter(DTYPES)), FAMILY, "greedy")
    target = target_of(rung.model, rung.dtype, machine)
    drafter, asked = variants()[FAMILY](target), [[7, 9, 11, 7, 9], [8, 8, 8]]
    wanted = texts(Decoder(target, None, "greedy", Sampling(), max_new_tokens=20).run(asked, 2))
    with claimed(type(drafter)), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        decoder = Decoder(target, drafter, "greedy", Sampling(), max_new_tokens=20, controls=Controls(read_every=1))
        found = [texts(decoder.run(asked, 2)) for _ in range(2)]
    hold("texts after a failed capture are others", found == [wanted] * 2)
    told = [str(one.message) for one in said if "without CUDA graphs" in str(one.message)]
    hold("nothing says that the capture failed", bool(told) or machine.rehearsal)
    plain = Decoder(target, None, "greedy", Sampling(), max_new_tokens=20, controls=Controls(read_every=1))
    hold("later captured steps give other texts", texts(plain.run(asked, 2)) == wanted)
    return {"reason": told[0]} if told else {}


def jobs(machine: Machine) -> list[Job]:
    modules = (*sources.DECODER, *sources.of_family(FAMILY))
    return [
        Job(f"captures that fail: {name}", "captures that fail", modules, partial(work, machine))
        for name, work in {"alone": alone, "decoding": decoding}.items()
    ]
