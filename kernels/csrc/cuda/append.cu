// Launcher of append.cuh.
#include "../../include/drafttrain/append.cuh"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

template <typename T>
void launch(const Launcher& run, const Append<T>& a, int64_t vectors) {
    const bool packed =
        aligned(a.width / 2 * sizeof(T), a.qkv, a.cos, a.sin, a.q_weight, a.k_weight, a.keys, a.values, a.query);
    int lanes = packed ? 1 : kWarp;
    while (lanes * Pack<T>::kCount < a.width / 2 && lanes < kWarp) lanes *= 2;
    run(packed ? append_vectors<T, Pack<T>::kCount, 1> : append_vectors<T, 1, kWidestHead / 2 / kWarp>,
        dim3(ceil_div(vectors, kAppendThreads / lanes)), dim3(kAppendThreads), 0, a, lanes, int(vectors));
}

void append(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
            const std::optional<Tensor>& k_weight, double eps, const Tensor& position, const Tensor& table,
            const Tensor& length, int64_t earlier, const Tensor& keys, const Tensor& values, const Tensor& query) {
    const int64_t kv_heads = keys.size(2), width = keys.size(3), rows = qkv.numel() / width, nodes = position.size(1);
    if (rows == 0) return;
    const int64_t heads = rows / position.numel() - 2 * kv_heads;
    STD_TORCH_CHECK(width <= kWidestHead && width % 2 == 0, "head widths are even and at most 256");
    STD_TORCH_CHECK(query.numel() == position.numel() * heads * width && cos.size(1) == width, "shapes do not fit");
    const Launcher run(qkv);
    by_type(qkv, [&](auto kind) {
        using T = decltype(kind);
        Append<T> a;
        a.nodes = int(nodes), a.heads = int(heads), a.kv_heads = int(kv_heads), a.width = int(width);
        a.page = int(keys.size(1)), a.pages = int(table.size(1)), a.earlier = int(earlier);
        a.eps = float(eps);
        a.qkv = data<T>(qkv), a.cos = data<T>(cos), a.sin = data<T>(sin);
        a.q_weight = data<T>(q_weight), a.k_weight = data<T>(k_weight);
        a.position = data<int64_t>(position), a.table = data<int64_t>(table), a.length = data<int64_t>(length);
        a.keys = data<T>(keys), a.values = data<T>(values), a.query = data<T>(query);
        launch(run, a, rows);
    });
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("append", TORCH_BOX(&drafttrain::append)); }
