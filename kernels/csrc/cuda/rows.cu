// Launchers of rows.cuh.
#include "../../include/drafttrain/rows.cuh"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

// Rows of whole packs. A pack for each thread, until a block is full: a row's time is then one load's.
template <typename T>
void rms_norm_packs(const Launcher& run, int64_t rows, int64_t packs, const Tensor& x, const std::optional<Tensor>& delta,
                    const Tensor& weight, double eps, const Tensor& summed, const Tensor& out) {
    using P = Pack<T>;
    const int64_t held = packs <= kRowThreads ? 1 : packs <= 2 * kRowThreads ? 2 : kMostHeld;
    const auto kernel = held == 1 ? rms_norm_packed<T, 1> : held == 2 ? rms_norm_packed<T, 2> : rms_norm_packed<T, kMostHeld>;
    const int64_t threads = ceil_div(ceil_div(packs, held), kWarp) * kWarp;
    run(kernel, dim3(rows), dim3(threads), 0, data<P>(x), data<P>(delta), data<P>(weight), int(packs), float(eps),
        data<P>(summed), data<P>(out));
}

void rms_norm(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight, double eps, const Tensor& summed,
              const Tensor& out) {
    const int64_t width = weight.numel(), rows = x.numel() / width;
    if (rows == 0) return;
    const Launcher run(x);
    by_type(x, [&](auto kind) {
        using T = decltype(kind);
        const T *from = data<T>(x), *more = data<T>(delta), *by = data<T>(weight);
        T *sum = data<T>(summed), *to = data<T>(out);
        const int64_t packs = width / Pack<T>::kCount;
        if (aligned(width * sizeof(T), from, more, by, sum, to) && packs <= kMostHeld * kRowThreads)
            rms_norm_packs<T>(run, rows, packs, x, delta, weight, eps, summed, out);
        else
            run(rms_norm_any<T>, dim3(rows), dim3(kRowThreads), 0, from, more, by, int(width), float(eps), sum, to);
    });
}

void gated(const Tensor& gate_up, const Tensor& out) {
    const int64_t width = out.size(out.dim() - 1);
    if (out.numel() == 0) return;
    const Launcher run(gate_up);
    by_type(gate_up, [&](auto kind) {
        using T = decltype(kind);
        const bool packed = aligned(width * sizeof(T), data<T>(gate_up), data<T>(out));
        constexpr int kCount = Pack<T>::kCount;
        const int64_t blocks = ceil_div(width, (packed ? kCount : 1) * kGatedThreads * kGatedHeld);
        run(packed ? gated_rows<T, kCount> : gated_rows<T, 1>, dim3(out.numel() / width, blocks), dim3(kGatedThreads), 0,
            data<T>(gate_up), int(width), data<T>(out));
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("rms_norm", TORCH_BOX(&drafttrain::rms_norm));
    m.impl("gated", TORCH_BOX(&drafttrain::gated));
}
