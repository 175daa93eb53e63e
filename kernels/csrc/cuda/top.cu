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

template <typename T, bool log>
void launch_top(const Tensor& logits, const Choices& choices, const Tensor& index) {
    constexpr int kCount = Pack<T>::kCount;
    const int64_t rows = logits.size(0), width = logits.size(1), k = index.size(1);
    const Launcher run(logits);
    const dim3 threads(kSelectThreads);
    const int64_t lead = aligned(width * sizeof(T), data<T>(logits)) ? 0 : kCount - 1;
    const Slices s = slices(rows, ceil_div(lead + width, kCount), kCount, int(k));
    const size_t room = select_room(int(k), s.each) * sizeof(uint64_t);
    if (s.count == 1) {
        run(top_of_rows<T, log>, dim3(rows), threads, room, data<T>(logits), int(width), s.packs, int(k), choices);
        return;
    }
    const int64_t winners = s.count * k, left = ceil_div(winners, kSelectThreads);
    STD_TORCH_CHECK(left <= kMostEach, "top takes rows of at most ",
                    kMostEach * kSelectThreads / k * kSelectThreads * kMostEach);
    const Tensor part = torch::stable::new_empty(index, {rows, winners});
    const Tensor sums = torch::stable::new_empty(index, {log ? rows * s.count : 0});  // a sum has the bytes of an index
    LogSum* of_slices = reinterpret_cast<LogSum*>(data<int64_t>(sums));
    run(top_of_slices<T, log>, dim3(rows, s.count), threads, room, data<T>(logits), int(width), s.packs, int(k),
        data<uint64_t>(part), of_slices);
    run(top_of_parts<log>, dim3(rows), threads, select_room(int(k), int(left)) * sizeof(uint64_t), data<uint64_t>(part),
        int(winners), int(k), of_slices, s.count, choices);
}

template <bool log>
void top(const Tensor& logits, const std::optional<Tensor>& ids, const Tensor& value, const Tensor& index) {
    const int64_t k = value.size(1);
    STD_TORCH_CHECK(k >= 1 && k <= kMostTop && k <= logits.size(1), "top finds 1 to 64 of a row, and no more than there are");
    STD_TORCH_CHECK(value.scalar_type() == ScalarType::Float, "top's values are float32");
    if (logits.size(0) == 0) return;
    const Choices choices = {data<int64_t>(ids), data<float>(value), data<int64_t>(index)};
    by_type(logits, [&](auto kind) { launch_top<decltype(kind), log>(logits, choices, index); });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("top", TORCH_BOX(&drafttrain::top<false>));
    m.impl("top_log", TORCH_BOX(&drafttrain::top<true>));
}
