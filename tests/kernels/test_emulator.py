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

// What threads agree on: the votes of a block, and atomics on one word.
static void agree() {
    static int least, most;
    static uint32_t marks;
    if (threadIdx.x == 0) least = kSize, most = 0, marks = 0;
    const bool one = __syncthreads_or(threadIdx.x == 77), none = __syncthreads_or(false);
    atomicMin(&least, int(threadIdx.x) + 3);
    atomicMax(&most, int(threadIdx.x));
    atomicOr(&marks, 1u << threadIdx.x % 32);
    __syncthreads();
    found[blockIdx.x] += one && !none && least == 3 && most == 255 && marks == ~0u && __popc(marks) == 32 && __clz(9) == 28;
}

int main(int count, char** words) {
    const int kind = std::atoi(words[1]);
    if (kind == 3) {
        emulator::run(kBlocks, kSize, 0, agree);
        return std::printf("%g %g %g\\n", found[0], found[1], found[2]) < 0;
    }
    if (kind == 4) emulator::run(1, 32, 0, [] { static_cast<float*>(emulator::dynamic_shared())[threadIdx.x] = 1; });
    for (int again = 0; again < 2; again++) emulator::run(kBlocks, kSize, kSize * sizeof(float), [&] { sum(kind); });
    emulator::run(1, 32, kSize * sizeof(float), [] {});  // a smaller block behind larger ones
    for (float x : found) std::printf("%g\\n", x);
}
"""


def test_emulator_barriers_meet_agree_or_show_that_they_miss(tmp_path: Path, subtests: pytest.Subtests) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: the CUDA kernels cannot be emulated")
    program = tmp_path / "sum"
    program.with_suffix(".cpp").write_text(PROGRAM)
    subprocess.run([compiler, *FLAGS, "-o", str(program), str(program.with_suffix(".cpp"))], check=True)

    def run(kind: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, str(kind)], capture_output=True, text=True)

    with subtests.test("threads that meet see each other's values"):
        assert run(0).stdout.split() == [f"{255 * 128 + 256 * block}" for block in range(3)]
    with subtests.test("threads of a block agree"):
        assert run(3).stdout.split() == ["256"] * 3
    with subtests.test("a missing barrier shows"):
        done = run(1)
        assert done.returncode == 0 and [math.isnan(float(number)) for number in done.stdout.split()] == [True] * 3
    with subtests.test("a write past the shared memory ends the process"):
        done = run(4)
        assert done.returncode < 0 and done.stderr == "emulator: a block writes past its dynamic shared memory\n"
    with subtests.test("threads that never meet end the process"):
        done = run(2)
        assert done.returncode < 0 and done.stderr == "emulator: the threads of a block wait for each other\n"
