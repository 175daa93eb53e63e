"""Captures work as a CUDA graph, or says in one line why no graph can hold it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import cuda

from drafttrain.core.errors import one_line

Made = TypeVar("Made")

WARM_RUNS = 2  # before a capture
_failed: list[Any] = []  # graphs of failed captures: torch's allocators may still refer to them


class CaptureError(Exception):
    """No CUDA graph can hold some work. The message is the reason, in one line."""


def warmed(work: Callable[[], Made], device: torch.device) -> Made:
    """Run work before its capture, on another stream, so that kernels are built and tuned. Gives the last result."""
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    with cuda.stream(stream):
        for _ in range(WARM_RUNS):
            output = work()
    cuda.current_stream(device).wait_stream(stream)
    cuda.synchronize(device)
    return output


def why_waiting(work: Callable[[], object]) -> str | None:
    """Where work on a GPU makes the host wait for it; None: nowhere. No graph can hold work that waits.

    Unlike a capture that fails, this leaves nothing to clean up. The work has run before: a first run may wait.
    """
    sync_mode = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return reason_of(error)
    finally:
        cuda.set_sync_debug_mode(sync_mode)
    return None


def capturing(device: torch.device) -> bool:
    """Whether work on the current stream is captured and not run."""
    return device.type == "cuda" and bool(cuda.is_current_stream_capturing())


def captured_graph(work: Callable[[], object], device: torch.device, pool: Any = None) -> Any:
    """Capture work that is `warmed` as a CUDA graph. pool: memory that graphs share. The inputs must outlive the graph.

    Raises CaptureError where the capture fails. The process can then go on without this graph, and capture others.
    """
    graph, pool = cuda.CUDAGraph(), pool or cuda.graph_pool_handle()
    stream = cuda.current_stream(device)
    try:
        # other threads (a logger, a watchdog) may use the device at the same time
        with cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        _clean_up(graph, device, pool, stream)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CaptureError(reason_of(_first(error))) from error
    return graph


def _clean_up(graph: Any, device: torch.device, pool: Any, stream: Any) -> None:
    """Undo what a failed capture leaves behind, of which torch undoes little if the capture cannot even be ended.

    The current stream is the capture's, the allocator still counts it as running, and in some versions so does the random
    generator, until a later capture ends well.
    """
    cuda.set_stream(stream)
    _failed.append(graph)
    graph.reset()
    with suppress(RuntimeError):  # the capture was ended, and this with it
        end_pool(device, pool)
    count_1 = torch.zeros(1, device=device)
    cuda.synchronize(device)
    with cuda.graph(cuda.CUDAGraph(), capture_error_mode="thread_local"):
        count_1.add_(1)


def end_pool(device: torch.device, pool: Any) -> None:
    """Allocate from this pool no more, and give it back. Raises RuntimeError where nothing is allocated from it."""
    device_index = cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(device_index, pool)
    torch._C._cuda_releasePool(device_index, pool)


def _first(error: BaseException) -> BaseException:
    """The error that came first: ending a capture that has failed is an error too."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def reason_of(error: BaseException) -> str:
    """An error and its place in our code or in transformers', in one line."""
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    package_frames = [(path.name, line) for path, line in frames if {"drafttrain", "transformers"} & set(path.parts)]
    location = f"{package_frames[-1][0]}, line {package_frames[-1][1]}: " if package_frames else ""
    return f"{location}{one_line(str(error))[:120]}"
