"""The emulator shows what it stands for: barriers that are kept, that are missing, and that threads never reach together."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.emulated import FLAGS

PROGRAM = """
#include "emulator.h"
constexpr int kSize = 256, kBlocks = 3;
static float found[kBlocks];

// Each thread adds up what all threads of its block wrote. kind: 1 without the barrier, 2 with a barrier for half of a warp.
static void sum(int kind) {
    float* shared = static_cast<float*>(emulator::dynamic_shared());
    shared[threadIdx.x] = threadIdx.x + blockIdx.x;
    if (kind == 0 || (kind == 2 && threadIdx.x % 32 < 16)) __syncthreads();
    if (kind == 2) __syncwarp();
    float total = 0;
    for (int i = 0; i < kSize; i++) total += shared[i];
    total = __shfl_sync(~0u, total, 5) + __shfl_xor_sync(~0u, total, 1);
    if (threadIdx.x == 40) found[blockIdx.x] = total / 2;
}

int main(int count, char** words) {
    const int kind = std::atoi(words[1]);
    for (int again = 0; again < 2; again++) emulator::run(kBlocks, kSize, kSize * sizeof(float), [&] { sum(kind); });
    emulator::run(1, 32, kSize * sizeof(float), [] {});  // a smaller block behind larger ones
    for (float x : found) std::printf("%g\\n", x);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: the CUDA kernels cannot be emulated")
    folder = tmp_path_factory.mktemp("emulator")
    (folder / "sum.cpp").write_text(PROGRAM)
    subprocess.run([compiler, *FLAGS, "-o", str(folder / "sum"), str(folder / "sum.cpp")], check=True)
    return folder / "sum"


def test_threads_that_meet_see_each_others_values(program: Path) -> None:
    done = subprocess.run([program, "0"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{255 * 128 + 256 * block}" for block in range(3)]


def test_a_missing_barrier_shows(program: Path) -> None:
    done = subprocess.run([program, "1"], capture_output=True, text=True, check=True)
    assert [math.isnan(float(number)) for number in done.stdout.split()] == [True] * 3


def test_threads_that_never_meet_end_the_process(program: Path) -> None:
    done = subprocess.run([program, "2"], capture_output=True, text=True)
    assert done.returncode < 0 and done.stderr == "emulator: the threads of a block wait for each other\n"
