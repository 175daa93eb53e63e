"""A stand-in for `vllm serve` with hs_connectors' connector: as `states_server.py`, but states go to a real Mooncake store.

`python -m tests.standin.mooncake_server TARGET MASTER LAYERS PORT [FAULTS]`. As the connector does, it answers with a manifest,
then puts the object. Further faults, beside `status`, `drop` and `die`:

    missing     answers and puts no object
    error       puts `<handle>:error` in place of the object
    nan         puts `<handle>:error` that speaks of values that are not finite
    ids         the states of other token ids
    another     names the object of another request
    half        the object has fewer bytes than the manifest says
    damaged     the manifest has an offset behind the object's end

Shapes: T tokens, L layer ids, H hidden.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from tests.standin.mooncake import connected
from tests.standin.states_server import Asked, Handler, StandIn, serve

SEGMENT = 256 << 20
ALIGNED = 64


class MooncakeStandIn(StandIn):
    """A server. folder: unused."""

    def __init__(
        self, compute: Any, master: str, *given: Any, segment: int = SEGMENT, host: str | None = None, **named: Any
    ) -> None:
        """segment: bytes in which objects wait. host: of this machine for the others."""
        super().__init__(compute, None, *given, **named)  # type: ignore[arg-type]
        self.client = connected(master, segment, host)

    def give(self, handler: Handler, asked: Asked, name: str, fault: str) -> None:
        """Answer, and put the object."""
        with torch.no_grad():
            hidden_TLH = self.compute(asked.read)[: len(asked.ids)].contiguous()
        ids = asked.ids
        token_T = torch.tensor([i + 1 for i in ids] if fault == "ids" else ids)
        handle = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
        content, manifest = packed(handle, {"hidden_states": hidden_TLH, "token_ids": token_T})
        if fault == "damaged":
            manifest["tensors"]["hidden_states"]["offset"] = 2**30
        given = manifest | {"handle": f"cmpl-other-{handle[-12:]}"} if fault == "another" else manifest
        handler.completion(name, asked, given)
        if fault in ("error", "nan"):
            why = "Non-finite producer tensor 'hidden_states'" if fault == "nan" else "Mooncake put_from failed"
            self.client.put(f"{handle}:error", json.dumps({"error": why}).encode())
        elif fault != "missing":
            self.client.put(handle, content[: len(content) // 2] if fault == "half" else content)


def packed(handle: str, tensors: dict[str, torch.Tensor]) -> tuple[bytes, dict[str, Any]]:
    """An object's bytes, and its manifest."""
    content, parts = b"", {}
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        parts[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "nbytes": len(raw), "offset": len(content)}
        content += raw + bytes(-len(raw) % ALIGNED)
    about = {"num_tokens": len(tensors["token_ids"]), "total_aligned_bytes": len(content), "extract_mode": "prompt_only"}
    return content, {"handle": handle, "version": 1, "tensors": parts, "metadata": about}


if __name__ == "__main__":
    serve(MooncakeStandIn, sys.argv[2])
