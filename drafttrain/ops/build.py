"""Compiling the operators' sources into one shared library of torch's stable ABI, kept by what went into it.

The stable ABI makes one binary serve torch 2.11 to 2.13, CPU and CUDA builds alike, so torch's version is no part of the key.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import torch

COMPILERS = ("g++", "c++", "clang++")
ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CPU_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fPIC", "-Wno-psabi"]
CUDA_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-Xptxas", "-v"]
ARCHITECTURES = ("80", "90a")  # what `make kernels` builds for where no GPU says otherwise


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafttrain"


def sources() -> Path:
    """The folder of the kernels, in a checkout or in an installed package."""
    return Path(str(files("drafttrain.kernels")))


def compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def nvcc() -> str | None:
    """CUDA's compiler: on PATH, under CUDA_HOME, in the usual place, or from a wheel of NVIDIA's."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    wheels = sorted((Path(torch.__file__).parents[1] / "nvidia").glob("*/bin/nvcc"))
    found = [shutil.which("nvcc"), *(str(Path(home) / "bin" / "nvcc") for home in homes if home), *map(str, wheels)]
    return next((path for path in found if path and os.access(path, os.X_OK)), None)


def architectures() -> list[str]:
    """Of the GPUs in this machine, each once; `ARCHITECTURES` where there are none. Asking for them opens no context there."""
    cards = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return sorted({f"{major}{minor}{'a' if major == 9 else ''}" for major, minor in cards}) or list(ARCHITECTURES)


def cpu_library(compiler: str) -> Path:
    """The CPU operators for this processor. Raises CalledProcessError when the compiler refuses."""
    folder = sources()
    read = [path for path in folder.glob("**/*") if path.suffix in (".h", ".cpp")]
    return compiled(compiler, CPU_FLAGS, sorted(folder.glob("csrc/*.cpp")), read, "drafttrain_ops.so", note="CPU operators")


def cuda_library(nvcc: str, architectures: Iterable[str]) -> Path:
    """The CUDA kernels for these architectures ("80", "90a"). Raises CalledProcessError when nvcc refuses."""
    folder = sources()
    read = [path for path in folder.glob("**/*") if path.suffix in (".h", ".cuh", ".cu")]
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    flags = [*CUDA_FLAGS, *targets]
    return compiled(nvcc, flags, sorted(folder.glob("csrc/cuda/*.cu")), read, "drafttrain_cuda.so", note="CUDA kernels")


def compiled(
    compiler: str, flags: Sequence[str], units: Sequence[Path], read: Iterable[Path], name: str, note: str | None = None
) -> Path:
    """The library of these translation units; built aside and renamed into place where no build of the same stands.

    read: all files that the result depends on. note: what to say that is being built. The compiler's messages lie beside
    the library, in `build.log`.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [version, _processor(), *flags, name]
    parts += [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sorted({*read, *units})]
    folder = cache_folder() / "kernels" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = folder / name
    if library.exists():
        return library
    if note and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"building the {note}: once, up to a minute", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / name
        (folder / "build.log").write_text(_build(compiler, flags, units, made), encoding="utf-8")
        os.replace(made, library)
    return library


def _build(compiler: str, flags: Sequence[str], units: Sequence[Path], made: Path) -> str:
    """Compile every unit, several at a time, and link; returns the compiler's messages."""
    torch_folder = Path(torch.__file__).parent

    def unit(number: int) -> tuple[Path, str]:
        out = made.parent / f"{number}.o"
        command = [compiler, *flags, ABI, f"-I{torch_folder / 'include'}", "-c", str(units[number]), "-o", str(out)]
        return out, _run(command)

    with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:
        objects = list(pool.map(unit, range(len(units))))
    link = [compiler, "-shared", *(str(out) for out, _ in objects), "-o", str(made), f"-L{torch_folder / 'lib'}"]
    link += ["-Xlinker", "--no-as-needed", "-ltorch_cpu"]
    return "".join([*(said for _, said in objects), _run(link)])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _processor() -> str:
    """What -march=native sees: a cache in a shared home must not serve another kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def main() -> int:
    """Build for this CPU and, where nvcc is found, for this machine's GPUs or else `ARCHITECTURES`; say where each lies."""
    host, device = compiler(), nvcc()
    if host is None:
        print(f"no C++ compiler: install one of {', '.join(COMPILERS)}", file=sys.stderr)
        return 2
    try:
        print(cpu_library(host))
        if device is None:
            print("no nvcc: the CUDA kernels are not built (pip install nvidia-cuda-nvcc, or set CUDA_HOME)", file=sys.stderr)
        else:
            print(f"{cuda_library(device, architectures())} (sm_{', sm_'.join(architectures())})")
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
