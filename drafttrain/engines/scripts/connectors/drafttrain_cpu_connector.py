"""vLLM's connector of hidden states on CPUs. It runs in vLLM's own Python.

The connector of vLLM 0.32 copies states through pinned memory on a CUDA stream, so a build for CPUs fails at its first file.
Here the states are in host memory already and are written in the engine's own step, in the same form and under the same lock.

Shapes: T tokens, S slots of the request's blocks, L layer ids, H hidden.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """In place of the event of a copy."""

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes files of states without CUDA."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        try:
            os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
            block_S1 = torch.tensor(pending.block_ids, dtype=torch.long)[:, None]
            slot_S = (block_S1 * self._block_size + torch.arange(self._block_size)).flatten()
            hidden_TLH = extract_from_kv_cache(self._kv_cache, slot_S, len(pending.token_ids)).contiguous()
            save_file({"hidden_states": hidden_TLH, "token_ids": pending.token_ids.clone()}, pending.filename)
        finally:
            lock = self._lock_fds.pop(pending.req_id, None)
            if lock is not None:
                os.close(lock)
            self._req_copy_events[pending.req_id] = _Done()
