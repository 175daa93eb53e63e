// Launchers of rows.cuh.
#include "../../include/drafttrain/rows.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

// Whether all of these start at 16 bytes and rows of `width` elements keep to that.
template <typename T, typename... P>
bool packs(int64_t width, P... pointers) {
    return width % Pack<T>::kCount == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

void rms_norm(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight, double eps, const Tensor& summed,
              const Tensor& out) {
    const int64_t width = weight.numel(), rows = x.numel() / width;
    if (rows == 0) return;
    const Launcher run(x);
    by_type(x, [&](auto kind) {
        using T = decltype(kind);
        const bool packed = packs<T>(width, data<T>(x), data<T>(delta), data<T>(weight), data<T>(summed), data<T>(out));
        run(packed ? rms_norm_rows<T, true> : rms_norm_rows<T, false>, dim3(rows), dim3(kRowThreads), 0, data<T>(x),
            data<T>(delta), data<T>(weight), int(width), float(eps), data<T>(summed), data<T>(out));
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("rms_norm", TORCH_BOX(&drafttrain::rms_norm)); }
