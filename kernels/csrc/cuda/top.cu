// Launchers of top.cuh.
#include "../../include/drafttrain/top.cuh"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

constexpr int kEnoughBlocks = 1056;  // eight for each of 132 processors: beyond that, longer slices cost less

// How many packs make a slice, and how many slices a row.
struct Slices {
    int packs, count, each;
};

Slices slices(int64_t rows, int64_t packs_of_row, int per_pack, int k) {
    int each = 16;  // elements that a thread loads at once: four packs of float32
    const auto count = [&] { return ceil_div(packs_of_row * per_pack, kSelectThreads * each); };
    while (each < kMostEach && (rows * count() > kEnoughBlocks || count() * k > kSelectThreads * each)) each *= 2;
    return {kSelectThreads * each / per_pack, int(count()), each};
}

void top(const Tensor& logits, const std::optional<Tensor>& ids, const Tensor& value, const Tensor& index) {
    const int64_t rows = logits.size(0), width = logits.size(1), k = value.size(1);
    STD_TORCH_CHECK(k >= 1 && k <= kMostTop && k <= width, "top finds 1 to 64 of a row, and no more than there are");
    STD_TORCH_CHECK(value.scalar_type() == ScalarType::Float, "top's values are float32");
    if (rows == 0) return;
    const Launcher run(logits);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        constexpr int kCount = Pack<T>::kCount;
        const int64_t lead = aligned(width * sizeof(T), data<T>(logits)) ? 0 : kCount - 1;
        const Slices s = slices(rows, ceil_div(lead + width, kCount), kCount, int(k));
        const int64_t winners = s.count * k, left = ceil_div(winners, kSelectThreads);
        STD_TORCH_CHECK(left <= kMostEach, "top takes rows of at most ",
                        kMostEach * kSelectThreads / k * kSelectThreads * kMostEach);
        const Tensor part = torch::stable::new_empty(index, {rows, winners});
        run(top_of_slices<T>, dim3(rows, s.count), dim3(kSelectThreads), select_room(int(k), s.each) * sizeof(uint64_t),
            data<T>(logits), int(width), s.packs, int(k), data<uint64_t>(part));
        run(top_of_parts, dim3(rows), dim3(kSelectThreads), select_room(int(k), int(left)) * sizeof(uint64_t),
            data<uint64_t>(part), int(winners), int(k), data<int64_t>(ids), data<float>(value), data<int64_t>(index));
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("top", TORCH_BOX(&drafttrain::top)); }
