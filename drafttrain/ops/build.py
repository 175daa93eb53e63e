"""Compile the operators' sources into one shared library of torch's stable ABI, cached by a hash of its inputs.

The stable ABI lets one binary work with torch 2.11 to 2.13, CPU and CUDA builds alike, so torch's version is not in the hash.
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

from drafttrain.core.files import cache_home

COMPILERS = ("g++", "c++", "clang++")
ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CPU_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++20", "-fPIC", "-Wno-psabi"]
CUDA_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-Xptxas", "-v"]
ARCHITECTURES = ("80", "90a")  # targets of `make kernels` on a machine without a GPU


def sources() -> Path:
    """The folder of the kernels' sources, in a checkout or in an installed package."""
    return Path(str(files("drafttrain.kernels")))


def compiler() -> str | None:
    """Path of the first C++ compiler on PATH; None without one."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def nvcc() -> str | None:
    """Path of CUDA's compiler: on PATH, under CUDA_HOME, in /usr/local/cuda or from NVIDIA's wheel; None without one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    wheels = sorted((Path(torch.__file__).parents[1] / "nvidia").glob("*/bin/nvcc"))
    candidates = [shutil.which("nvcc"), *(str(Path(home) / "bin" / "nvcc") for home in homes if home), *map(str, wheels)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def architectures() -> list[str]:
    """The architectures of this machine's GPUs, each once; `ARCHITECTURES` without GPUs. Opens no CUDA context."""
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return sorted({f"{major}{minor}{'a' if major == 9 else ''}" for major, minor in capabilities}) or list(ARCHITECTURES)


def cpu_library(compiler: str) -> Path:
    """Path of the CPU operators for this processor, compiled if needed. Raises CalledProcessError if compiling fails."""
    folder = sources()
    source_files = [path for path in folder.glob("**/*") if path.suffix in (".h", ".cpp")]
    return compiled(
        compiler, CPU_FLAGS, sorted(folder.glob("csrc/*.cpp")), source_files, "drafttrain_ops.so", note="CPU operators"
    )


def cuda_library(nvcc: str, architectures: Iterable[str]) -> Path:
    """Path of the CUDA kernels for these architectures ("80", "90a"). Raises CalledProcessError if compiling fails."""
    folder = sources()
    source_files = [path for path in folder.glob("**/*") if path.suffix in (".h", ".cuh", ".cu")]
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    flags = [*CUDA_FLAGS, *targets]
    return compiled(nvcc, flags, sorted(folder.glob("csrc/cuda/*.cu")), source_files, "drafttrain_cuda.so", note="CUDA kernels")


def compiled(
    compiler: str, flags: Sequence[str], units: Sequence[Path], read: Iterable[Path], name: str, note: str | None = None
) -> Path:
    """Path of the library made from these translation units. If the cache lacks it, it is built and then renamed into place.

    read: all files that the result depends on. note: the name printed while building. The compiler's messages go to
    `build.log` in the same folder.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key_parts = [version, _processor(), *flags, name]
    key_parts += [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sorted({*read, *units})]
    cache_path = f"kernels/{hashlib.sha256(chr(0).join(key_parts).encode()).hexdigest()[:16]}"
    folder = cache_home(f"{cache_path}/{name}") / cache_path
    library = folder / name
    if library.exists():
        return library
    if note and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"building the {note}: once, up to a minute", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary_folder:
        output = Path(temporary_folder) / name
        (folder / "build.log").write_text(_build(compiler, flags, units, output), encoding="utf-8")
        os.replace(output, library)
    return library


def _build(compiler: str, flags: Sequence[str], units: Sequence[Path], library_path: Path) -> str:
    """Compile the units in parallel and link them. Returns the compiler's messages."""
    torch_folder = Path(torch.__file__).parent

    def unit(number: int) -> tuple[Path, str]:
        out = library_path.parent / f"{number}.o"
        command = [compiler, *flags, ABI, f"-I{torch_folder / 'include'}", "-c", str(units[number]), "-o", str(out)]
        return out, _run(command)

    with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:
        objects = list(pool.map(unit, range(len(units))))
    link = [compiler, "-shared", *(str(out) for out, _ in objects), "-o", str(library_path), f"-L{torch_folder / 'lib'}"]
    # nvcc of NVIDIA's wheels has its libraries in lib and looks into lib64
    link += [f"-L{Path(compiler).resolve().parents[1] / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch_cpu"]
    return "".join([*(messages for _, messages in objects), _run(link)])


def _run(command: Sequence[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return process.stdout + process.stderr


def _processor() -> str:
    """The processor that -march=native compiles for. Machines of another kind may share the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def main() -> int:
    """Build for this CPU and, with nvcc, for this machine's GPUs or else `ARCHITECTURES`; print the paths."""
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
