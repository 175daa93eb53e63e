// Launcher of keep.cuh, and the rows' lengths.
#include "../../include/drafttrain/keep.cuh"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

template <typename Unit>
void launch(const Launcher& run, Keep k, int64_t bytes, int64_t batch, const Tensor& store) {
    k.columns = int(bytes / sizeof(Unit));
    run(keep_path<Unit>, dim3(ceil_div(int64_t(k.layers) * k.columns, kKeepThreads), batch), dim3(kKeepThreads), 0,
        data<Unit>(store), k);
}

// store: [..., Q, page, heads, D]
void kv_keep(const Tensor& store, const Tensor& table, const Tensor& length, const Tensor& path, const Tensor& count,
             int64_t page) {
    const int64_t dims = store.dim(), batch = path.size(0);
    const int64_t row = store.size(dims - 1) * store.size(dims - 2), bytes = row * int64_t(store.element_size());
    if (store.numel() == 0 || batch == 0) return;
    Keep k;
    k.slots = store.size(dims - 4) * page, k.layers = int(store.numel() / row / k.slots), k.page = int(page);
    k.most = int(path.size(1)), k.pages = int(table.size(1));
    k.table = data<int64_t>(table), k.length = data<int64_t>(length), k.path = data<int64_t>(path);
    k.count = data<int64_t>(count);
    const Launcher run(store);
    if (aligned(bytes, data<char>(store)))
        launch<uint4>(run, k, bytes, batch, store);
    else
        launch<uint16_t>(run, k, bytes, batch, store);
}

__global__ void __launch_bounds__(kKeepThreads)
    advance_rows(const int64_t* length, const int64_t* count, const int64_t* slot, int64_t* all, int64_t* out, int64_t rows) {
    enter_kernel();
    const int64_t row = int64_t(blockIdx.x) * kKeepThreads + threadIdx.x;
    if (row < rows) all[slot[row]] = out[row] = length[row] + count[row];
}

void advance(const Tensor& length, const Tensor& count, const Tensor& slot, const Tensor& all, const Tensor& out) {
    const int64_t rows = length.size(0);
    const Launcher run(length);
    if (rows == 0) return;
    run(advance_rows, dim3(unsigned(ceil_div(rows, kKeepThreads))), dim3(kKeepThreads), 0, data<int64_t>(length),
        data<int64_t>(count), data<int64_t>(slot), data<int64_t>(all), data<int64_t>(out), rows);
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("kv_keep", TORCH_BOX(&drafttrain::kv_keep));
    m.impl("advance", TORCH_BOX(&drafttrain::advance));
}
