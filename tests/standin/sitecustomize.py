"""Python runs this at its start where the folder is on PYTHONPATH: GPUs and NCCL of host memory, as `fake_cuda` says."""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path


def open_devices(library: str) -> ctypes.CDLL:
    """Before torch is imported, which then asks this library what CUDA can do."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))
    return ctypes.CDLL(library)


if "STANDIN_LIBRARY" in os.environ and "resource_tracker" not in " ".join(sys.orig_argv):
    sys.path.insert(0, str(Path(__file__).parent))
    opened = open_devices(os.environ["STANDIN_LIBRARY"])
    import fake_cuda
    import fake_nccl

    fake_cuda.install(opened, int(os.environ["STANDIN_DEVICES"]))
    fake_nccl.install()
