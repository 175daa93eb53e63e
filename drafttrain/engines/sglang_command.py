"""The commands that start SGLang servers which give states."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from drafttrain.features.sglang_source import context_length

START = ("python", "-m", "sglang.launch_server", "--model-path")
CONVENTION = "EAGLE3"  # of numbering blocks: b is the output of block b


def _line(model: str, longest: int, arguments: Sequence[str]) -> str:
    length = str(context_length(longest))
    return shlex.join([*START, model, "--context-length", length, "--chunked-prefill-size", "-1", *arguments])


def final_line(model: str, longest: int) -> str:
    """Of a server that gives the state after the last norm. longest: tokens of the longest conversation."""
    return _line(model, longest, ["--return-hidden-states-mode", "full"])


def blocks_line(model: str, longest: int, blocks: Sequence[int]) -> str:
    """Of a server that gives the outputs of these blocks."""
    ids = ["--return-aux-hidden-state-layer-ids", *map(str, blocks)]
    return _line(model, longest, ["--enable-return-aux-hidden-states", "--speculative-algorithm", CONVENTION, *ids])


def capture_line(model: str, longest: int, blocks: Sequence[int], master: str) -> str:
    """Of a server with SpecForge's patch, which gives both, in the store of this master."""
    ids = ["--spec-capture-aux-layer-ids", *map(str, blocks)] if blocks else []
    store = (
        f"MOONCAKE_MASTER_SERVER_ADDR={shlex.quote(master)} MOONCAKE_METADATA_SERVER=P2PHANDSHAKE MOONCAKE_LOCAL_HOSTNAME=HOST"
    )
    return f"{store} {_line(model, longest, ['--enable-spec-capture', *ids])}"
