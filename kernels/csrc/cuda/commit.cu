// The commit of a decode step, and what drafters store of it: a warp or a block for each row.

#include "../commits.h"
#include "aligned.cuh"
#include "launch.cuh"

namespace drafttrain {
namespace {

__global__ void __launch_bounds__(kWarp) commit_rows(Commits c) {
    enter_kernel();
    const int64_t row = blockIdx.x, keeps = c.kept_of(row), last = c.last(row);
    bool stopped = false, open = false;
    for (int64_t a = threadIdx.x; a < c.width; a += kWarp) stopped |= c.column(row, a, keeps);
    for (int64_t i = 1 + threadIdx.x; i < c.real[row]; i += kWarp) open |= c.is_child(row, i, last);
    // the ballots also order each lane's reads of the text's state before the first lane's writes
    stopped = __ballot_sync(kAllLanes, stopped) != 0;
    open = __ballot_sync(kAllLanes, open) != 0;
    if (threadIdx.x == 0) c.finish(row, keeps, stopped, open);
}

void commit(const Tensor& token, const Tensor& parent, const Tensor& real, const Tensor& path, const Tensor& count,
            const Tensor& bonus, const Tensor& slot, const Tensor& stop, const Tensor& limit, bool skips, bool counts,
            const Tensor& root, const Tensor& made, const Tensor& done, const Tensor& taken, const Tensor& next,
            const Tensor& kept, const Tensor& record) {
    const Commits c = commits_of(token, parent, real, path, count, bonus, slot, stop, limit, skips, counts, root, made, done,
                                 taken, next, kept, record);
    const Launcher run(token);
    if (token.size(0) > 0) run(commit_rows, dim3(unsigned(token.size(0))), dim3(kWarp), 0, c);
}

constexpr int kEntryThreads = 128;  // copy one entry

// Block (a, b) copies the entry of node path[b, a].
template <typename Unit>
__global__ void __launch_bounds__(kEntryThreads)
    entries_along(const Unit* values, const int64_t* path, Unit* out, int64_t nodes, int64_t stride, int64_t units) {
    enter_kernel();
    const int64_t row = blockIdx.y, node = path[row * stride + blockIdx.x];
    const Unit* from = values + (row * nodes + node) * units;
    Unit* to = out + (row * gridDim.x + blockIdx.x) * units;
    for (int64_t i = threadIdx.x; i < units; i += kEntryThreads) to[i] = from[i];
}

void along(const Tensor& values, const Tensor& path, const Tensor& out) {
    const int64_t rows = out.size(0), columns = out.size(1), bytes = entry_bytes(values, out, rows * columns);
    const Launcher run(values);
    if (rows == 0) return;
    by_unit(bytes, values, out, [&](auto unit) {
        using Unit = decltype(unit);
        run(entries_along<Unit>, dim3(unsigned(columns), unsigned(rows)), dim3(kEntryThreads), 0, data<Unit>(values),
            data<int64_t>(path), data<Unit>(out), values.size(1), path.stride(0), bytes / int64_t(sizeof(Unit)));
    });
}

// A block stores one row's last state, `units` long, and the token after it.
template <typename Unit>
__global__ void __launch_bounds__(kEntryThreads)
    last_rows(const Unit* state, const int64_t* next, const int64_t* count, const int64_t* slot, Unit* kept, int64_t* root,
              int64_t columns, int64_t units) {
    enter_kernel();
    const int64_t row = blockIdx.x, last = row * columns + count[row] - 1, s = slot[row];
    if (last < row * columns) return;
    if (threadIdx.x == 0) root[s] = next[last];
    const Unit* from = state + last * units;
    Unit* to = kept + s * units;
    for (int i = threadIdx.x; i < int(units); i += kEntryThreads) to[i] = from[i];
}

void keep_last(const Tensor& state, const Tensor& next, const Tensor& count, const Tensor& slot, const Tensor& kept,
               const Tensor& root) {
    const int64_t rows = next.size(0), bytes = entry_bytes(state, kept, kept.size(0));
    const Launcher run(next);
    if (rows == 0) return;
    by_unit(bytes, state, kept, [&](auto unit) {
        using Unit = decltype(unit);
        run(last_rows<Unit>, dim3(unsigned(rows)), dim3(kEntryThreads), 0, data<Unit>(state), data<int64_t>(next),
            data<int64_t>(count), data<int64_t>(slot), data<Unit>(kept), data<int64_t>(root), next.size(1),
            bytes / int64_t(sizeof(Unit)));
    });
}

// A text has room for its slot's positions, as the cache has; the CPU's operator checks that.
__global__ void __launch_bounds__(kWarp)
    text_rows(const int64_t* token, const int64_t* next, const int64_t* count, const int64_t* slot, int64_t* text,
              int64_t* length, int64_t columns, int64_t most) {
    enter_kernel();
    const int64_t row = blockIdx.x, added = count[row], at = length[slot[row]];
    if (added == 0) return;
    int64_t* to = text + slot[row] * most + at;
    for (int64_t a = threadIdx.x; a < added; a += kWarp) to[a + 1] = next[row * columns + a];
    __syncwarp();  // every lane has read the length
    if (threadIdx.x == 0) to[0] = token[row * columns], length[slot[row]] = at + added;
}

void append_text(const Tensor& token, const Tensor& next, const Tensor& count, const Tensor& slot, const Tensor& text,
                 const Tensor& length) {
    const Launcher run(next);
    if (next.size(0) == 0) return;
    run(text_rows, dim3(unsigned(next.size(0))), dim3(kWarp), 0, data<int64_t>(token), data<int64_t>(next),
        data<int64_t>(count), data<int64_t>(slot), data<int64_t>(text), data<int64_t>(length), next.size(1), text.size(1));
}

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) {
    m.impl("commit", TORCH_BOX(&drafttrain::commit));
    m.impl("along", TORCH_BOX(&drafttrain::along));
    m.impl("keep_last", TORCH_BOX(&drafttrain::keep_last));
    m.impl("append_text", TORCH_BOX(&drafttrain::append_text));
}
