// Launcher of shaped.cuh.
#include "../../include/drafttrain/shaped.cuh"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

void shaped(const Tensor& logits, const Tensor& temperature, int64_t k, double p, double reach, const Tensor& out) {
    const int64_t rows = logits.size(0), width = logits.size(1), given = temperature.numel();
    STD_TORCH_CHECK(width >= 1 && width < (int64_t(1) << 24), "a vocabulary has 1 to 2^24 tokens");
    if (rows == 0) return;
    STD_TORCH_CHECK(given > 0 && rows % given == 0, "there is a temperature for each row, or one for each so many rows");
    const Launcher run(logits);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        const bool packed = aligned(width * sizeof(T), data<T>(logits), data<T>(out));
        run(packed ? shape_rows<T, true> : shape_rows<T, false>, dim3(rows), dim3(kShapedThreads), kBinsRoom, data<T>(logits),
            data<float>(temperature), rows / given, int(width), int(k < width ? k : 0), float(p), float(reach), data<T>(out));
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("shaped", TORCH_BOX(&drafttrain::shaped)); }
