// Launcher of shaped.cuh.
#include "../../include/drafttrain/shaped.cuh"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

void shaped(const Tensor& logits, const Tensor& temperature, int64_t k, double p, double reach, const Tensor& out) {
    const int64_t rows = logits.size(0), vocab = logits.size(1), given = temperature.numel();
    STD_TORCH_CHECK(vocab >= 1 && vocab < (int64_t(1) << 24), "a vocabulary has 1 to 2^24 tokens");
    if (rows == 0) return;
    STD_TORCH_CHECK(given > 0 && rows % given == 0, "there is a temperature for each row, or one for each so many rows");
    const Launcher run(logits);
    const int width = int(vocab);
    const int64_t parts = ceil_div(width, kPart), nodes = rows / given;
    const Tensor room = torch::stable::new_empty(logits, {Found::room(rows, parts)}, ScalarType::Byte);
    const Found found = Found::in(data<void>(room), rows, parts);
    const Filter filter = {int(k < vocab ? k : 0), float(p), float(reach)};
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        const T* x = data<T>(logits);
        const float* t = data<float>(temperature);
        const dim3 grid(rows, parts), threads(kPartThreads);
        by_flag(aligned(width * sizeof(T), x, data<T>(out)), [&](auto packed) {
            by_flag(filter.k > 0, [&](auto counted) {
                run(top_parts<T, packed()>, grid, threads, 0, x, width, found);
                if (filter.by_sum()) {
                    run(weigh_parts<T, packed(), counted()>, grid, threads, Bins<kPartThreads>::kRoom, x, t, nodes, int(width),
                        found);
                    run(gather_parts<T, packed(), counted()>, grid, threads, 0, x, t, nodes, width, filter, found,
                        data<T>(out));
                }
                run(end_search<T, counted()>, dim3(rows), dim3(kEndThreads), Bins<kEndThreads>::kRoom, data<T>(out), t, nodes,
                    width, filter, found);
                run(keep_parts<T, packed()>, grid, threads, 0, x, width, found, data<T>(out));
            });
        });
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("shaped", TORCH_BOX(&drafttrain::shaped)); }
