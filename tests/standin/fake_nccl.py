"""NCCL over gloo: collectives of the devices of `device.cpp`.

What it refuses, as NCCL does: tensors that are on the host (torch itself finds no backend for them), on another device than the
process's own, not contiguous, or of a type that it lacks; a group that was bound to another device than the process's own.
Object collectives send their bytes through the current device, which torch does by itself once the group is NCCL's.

What it writes: every collective of every process, in the order of its calls, into `<log>/rank-<RANK>.jsonl`: ranks of the
group, operation, shapes, type; of an all-to-all also the rows that come from each rank and those that go to each. Processes of
one group must have written the same, or what fits (`tests/devices.py`); a collective inside a branch that not all of them take
is seen there even where no process waits for ever.

What it does not show: collectives that overlap on streams, and what several communicators may not do at once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fake_cuda
import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
TYPES = (*WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Options:
    is_high_priority_stream = False
    _timeout: Any = None
    global_ranks_in_group: Any = ()
    group_name: Any = ""
    split_from: Any = None
    split_color: int = 0


class ProcessGroupNCCL(distributed.ProcessGroup):
    """gloo's group over the host's side of each tensor."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self.ranks = list(options.global_ranks_in_group) or list(range(size))
        self._register_backend(torch.device("cuda"), distributed.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "nccl"

    def _set_sequence_number_for_group(self) -> None: ...

    def seen(self, operation: str, *tensors: Tensor, rows: tuple[list[int], ...] = ()) -> list[Tensor]:
        """The host's side of a collective's tensors. rows: of an all-to-all."""
        own = fake_cuda.Stream.devices.used()
        for x in tensors:
            if x.device != torch.device("cuda", own):
                raise ValueError(f"stand-in: {operation} of a tensor on {x.device}, the group is bound to cuda:{own}")
            if not x.is_contiguous() or x.dtype not in TYPES:
                raise ValueError(f"stand-in: {operation} of a tensor of {x.dtype}, contiguous: {x.is_contiguous()}")
        write(self.ranks, operation, *tensors, rows=rows)
        return [torch.ops.drafttrain_standin.host(x) for x in tensors]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.gloo.allreduce(self.seen("all_reduce", *tensors), opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.gloo.allreduce_coalesced(self.seen("all_reduce_coalesced", *tensors), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.gloo.broadcast(self.seen(f"broadcast from {opts.rootRank}", *tensors), opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.gloo.reduce(self.seen(f"reduce to {opts.rootRank}", *tensors), opts)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        own = self.seen("all_gather", *tensors)
        gathered = [[torch.ops.drafttrain_standin.host(x) for x in output] for output in outputs]
        return self.gloo.allgather(gathered, own, opts or c10d.AllgatherOptions())

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        into, own = self.seen("all_gather_into_tensor", output, tensor)
        return self.gloo.allgather([list(into.view(-1).chunk(self.size()))], [own.view(-1)], c10d.AllgatherOptions())

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor).wait()
        return done()

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        into, whole = self.seen("reduce_scatter_tensor", output, tensor)
        reduced, asked = whole.clone(), c10d.AllreduceOptions()
        asked.reduceOp = opts.reduceOp
        self.gloo.allreduce([reduced], asked).wait()
        into.view(-1).copy_(reduced.view(-1).chunk(self.size())[self.rank()])
        return done()

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return done()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        return self.reduce_scatter_single(outputs[0], torch.cat([x.view(-1) for x in inputs[0]]), opts)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, into: list[int], out_of: list[int], opts: Any = None) -> Any:
        rows = tuple(given or [len(x) // self.size()] * self.size() for given, x in ((into, output), (out_of, tensor)))
        own = self.seen("all_to_all_single", output, tensor, rows=rows)
        return self.gloo.alltoall_base(*own, into, out_of, c10d.AllToAllOptions())

    # their names before torch 2.13
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        device = getattr(opts, "device", None)
        fake_cuda.Stream.devices.used(device)
        self.seen("barrier", torch.zeros(1, device="cuda"))
        return self.gloo.barrier(c10d.BarrierOptions())


def done() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(None)
    return torch._C._distributed_c10d._create_work_from_future(future)


def write(ranks: list[int], operation: str, *tensors: Tensor, rows: tuple[list[int], ...] = ()) -> None:
    line = [ranks, operation, [list(x.shape) for x in tensors], str(tensors[0].dtype) if tensors else "", *rows]
    with (Path(os.environ["STANDIN_LOG"]) / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def install() -> None:
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d.is_nccl_available = distributed.is_nccl_available = lambda: True
    make = c10d._new_process_group_helper

    def made(size: int, rank: int, ranks: list[int], *given: Any, device_id: Any = None, **more: Any) -> Any:
        """Bound groups split a communicator, which all processes do together, in the group or not."""
        if device_id is not None:
            fake_cuda.Stream.devices.used(device_id)
        if ranks:
            write([], f"new_group {ranks}")
        return make(size, rank, ranks, *given, device_id=None, **more)

    c10d._new_process_group_helper = made
