// Launcher of product.cuh.
#include "../../include/drafttrain/product.cuh"
#include "aligned.cuh"
#include "launch.cuh"

#include <cstdlib>

namespace drafttrain {
namespace {

template <typename T, int kRows, int kAhead>
void go(const Launcher& run, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& out) {
    using P = Pack<T>;
    const int64_t outputs = weight.size(0), packs = weight.size(1) / P::kCount;
    run(product_of_row<T, kRows, kAhead>, dim3(ceil_div(outputs, kProductThreads / kWarp * kRows)), dim3(kProductThreads), 0,
        data<uint4>(x), data<uint4>(weight), data<T>(bias), int(outputs), int(packs), data<T>(out));
}

void product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& out) {
    const Launcher run(x);
    by_type(x, [&](auto kind) {
        using T = decltype(kind);
        STD_TORCH_CHECK(aligned(weight.size(1) * sizeof(T), data<T>(x), data<T>(weight)), "rows of whole packs of 16 bytes");
        const char* v = getenv("DT_VARIANT");
        const int variant = v ? atoi(v) : 0;
        if (variant == 0) go<T, 1, 8>(run, x, weight, bias, out);
        if (variant == 1) go<T, 1, 16>(run, x, weight, bias, out);
        if (variant == 2) go<T, 2, 8>(run, x, weight, bias, out);
        if (variant == 3) go<T, 2, 4>(run, x, weight, bias, out);
        if (variant == 4) go<T, 4, 4>(run, x, weight, bias, out);
        if (variant == 5) go<T, 1, 4>(run, x, weight, bias, out);
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("product", TORCH_BOX(&drafttrain::product)); }
