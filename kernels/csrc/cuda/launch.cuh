// Shared by the launchers: tensors as pointers, the current stream, registration. nvcc and the tests' emulator compile it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <type_traits>

#include "../../include/drafttrain/device.cuh"
#include "../types.h"

#ifdef DRAFTTRAIN_EMULATE
#define DRAFTTRAIN_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(drafttrain_emulated, CPU, m)
#else
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#define DRAFTTRAIN_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(drafttrain, CUDA, m)
#endif

namespace drafttrain {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(flag) with a compile-time constant.
template <typename F>
void by_flag(bool flag, F f) {
    if (flag)
        f(std::true_type());
    else
        f(std::false_type());
}

// Launches the kernels of one operator call, on the device and the current stream of its first tensor.
class Launcher {
  public:
#ifdef DRAFTTRAIN_EMULATE
    explicit Launcher(const Tensor&) {}
#else
    explicit Launcher(const Tensor& x) : guard_(x.get_device_index()) {
        using Current = AOTITorchError (*)(int32_t, void**);
        // the library is linked against no CUDA build of torch, so that one binary serves CPU and CUDA builds
        static const auto current = reinterpret_cast<Current>(
            dlsym(dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY), "aoti_torch_get_current_cuda_stream"));
        STD_TORCH_CHECK(current != nullptr && current(x.get_device_index(), &stream_) == 0, "no CUDA stream");
    }
#endif
    template <typename... P, typename... A>
    void operator()(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... arguments) const {
        launch(stream_, kernel, grid, block, shared, arguments...);
        const char* error = launch_error();
        STD_TORCH_CHECK(error == nullptr, "a kernel could not be launched: ", error);
    }

  private:
#ifndef DRAFTTRAIN_EMULATE
    torch::stable::accelerator::DeviceGuard guard_;
#endif
    void* stream_ = nullptr;
};

}  // namespace drafttrain
