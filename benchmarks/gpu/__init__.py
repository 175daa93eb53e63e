"""The suites for a GPU: `make gpu-check` (are the results right), `make gpu-bench` (speed), `make gpu-train` (training), `make
gpu-real` (acceptance and speed of drafters distilled from a trained target).

They need torch, transformers, Triton and this checkout; the last one also drafttrain's requirements. docs/performance.md has
the results.
"""

from __future__ import annotations

import sys

import kernels


def stand_in() -> None:
    """Import this checkout's `kernels` as `drafttrain.kernels`, the name that an installation gives it (pyproject's
    package-dir).

    So the suites run from the repository's root with only torch installed. Modules that an installation has already imported
    under that name stay.
    """
    sys.modules.setdefault("drafttrain.kernels", kernels)


stand_in()
