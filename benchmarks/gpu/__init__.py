"""What has to run on a GPU: `make gpu-check` (is it right), `make gpu-bench` (is it fast), `make gpu-train` (does it learn),
`make gpu-real-1` and `gpu-real-2` (what are drafters worth that were distilled from a trained target).

Needs torch, transformers, Triton and this checkout; the last also what drafttrain depends on. docs/performance.md says what
comes out.
"""

from __future__ import annotations

import sys

import kernels


def stand_in() -> None:
    """Let this checkout's `kernels` be `drafttrain.kernels`, the name that an installation gives it (pyproject's package-dir).

    So the suites run from the repository's root where nothing is installed but torch. What an installation has imported under
    that name stays.
    """
    sys.modules.setdefault("drafttrain.kernels", kernels)


stand_in()
