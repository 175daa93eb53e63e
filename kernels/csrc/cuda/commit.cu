// The commit of a decode step, and what drafters store of it: a warp or a block for each row.
#include <algorithm>
#include <vector>

#include "../commits.h"
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

constexpr int kEntryThreads = 128;    // copy one entry
constexpr int kPendingThreads = 512;  // copy what a row adds
constexpr int kCopies = 16;           // tensors that one launch copies from and to

// Copies bytes by a block, sixteen at a time where addresses allow. All loads of an iteration are issued before the first is
// used.
template <typename Unit>
__device__ void copy_units(const char* from, char* to, int64_t bytes) {
    constexpr int kEach = 8;
    const Unit* source = reinterpret_cast<const Unit*>(from);
    const int64_t units = bytes / int64_t(sizeof(Unit));
    for (int64_t start = threadIdx.x; start < units; start += kEach * blockDim.x) {
        Unit unit[kEach];
#pragma unroll
        for (int j = 0; j < kEach; j++) unit[j] = source[start + j * blockDim.x < units ? start + j * blockDim.x : start];
#pragma unroll
        for (int j = 0; j < kEach; j++)
            if (start + j * blockDim.x < units) reinterpret_cast<Unit*>(to)[start + j * blockDim.x] = unit[j];
    }
}

__device__ void copy_bytes(const char* from, char* to, int64_t bytes) {
    if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | uintptr_t(bytes)) % 16 == 0)
        copy_units<uint4>(from, to, bytes);
    else
        copy_units<uint16_t>(from, to, bytes);
}

// Some tensors, and those that their entries are copied to.
struct Copies {
    const char* from[kCopies];
    char* to[kCopies];
    int64_t bytes[kCopies];  // of an entry
    int count;
};

// Calls f(copies, last) for kCopies of the tensors at a time. Entries lie in the first two dimensions.
template <typename F>
void by_copies(const std::vector<Tensor>& from, const std::vector<Tensor>& to, F f) {
    for (size_t start = 0; start < from.size(); start += kCopies) {
        Copies copies = {};
        copies.count = int(std::min<size_t>(kCopies, from.size() - start));
        for (int k = 0; k < copies.count; k++) {
            const Tensor &source = from[start + k], &target = to[start + k];
            copies.from[k] = data<char>(source), copies.to[k] = data<char>(target);
            copies.bytes[k] = entry_bytes(source, target, target.size(0) * target.size(1));
        }
        f(copies, start + kCopies >= from.size());
    }
}

// Block (a, b, k) copies the entry of node path[b, a] of tensor k.
__global__ void __launch_bounds__(kEntryThreads)
    entries_along(Copies copies, const int64_t* path, int64_t nodes, int64_t stride) {
    enter_kernel();
    const int64_t row = blockIdx.y, node = path[row * stride + blockIdx.x], bytes = copies.bytes[blockIdx.z];
    copy_bytes(copies.from[blockIdx.z] + (row * nodes + node) * bytes,
               copies.to[blockIdx.z] + (row * gridDim.x + blockIdx.x) * bytes, bytes);
}

void along(std::vector<Tensor> values, const Tensor& path, std::vector<Tensor> out) {
    const Launcher run(path);
    by_copies(values, out, [&](const Copies& copies, bool) {
        const dim3 grid(unsigned(out[0].size(1)), unsigned(out[0].size(0)), unsigned(copies.count));
        if (out[0].size(0) == 0) return;
        run(entries_along, grid, dim3(kEntryThreads), 0, copies, data<int64_t>(path), values[0].size(1), path.stride(0));
    });
}

// A block copies what one row adds, of every tensor, so that it alone knows when the slot's count may change.
__global__ void __launch_bounds__(kPendingThreads) append_rows(Copies copies, const int64_t* count, const int64_t* slot,
                                                               int64_t* pending, int64_t columns, int64_t width, bool last) {
    enter_kernel();
    const int64_t row = blockIdx.x, s = slot[row], added = count[row], found = pending[s];
    // Rows that pad a batch share a slot, whose count they may raise one after the other: it stays within its slot.
    const int64_t at = found < width - added ? found : width - added;
    for (int k = 0; k < copies.count; k++) {
        const int64_t bytes = copies.bytes[k];
        copy_bytes(copies.from[k] + row * columns * bytes, copies.to[k] + (s * width + at) * bytes, added * bytes);
    }
    __syncthreads();  // every thread has read the slot's count
    if (threadIdx.x == 0 && last && added > 0) pending[s] = at + added;
}

void append_pending(std::vector<Tensor> values, const Tensor& count, const Tensor& slot, std::vector<Tensor> kept,
                    const Tensor& pending) {
    const Launcher run(count);
    if (count.numel() == 0) return;
    by_copies(values, kept, [&](const Copies& copies, bool last) {
        run(append_rows, dim3(unsigned(count.numel())), dim3(kPendingThreads), 0, copies, data<int64_t>(count),
            data<int64_t>(slot), data<int64_t>(pending), values[0].size(1), kept[0].size(1), last);
    });
}

// Block (b, k) copies the columns of one slot and tensor. pending is null but for the last tensors.
__global__ void __launch_bounds__(kPendingThreads)
    taken_rows(Copies copies, const int64_t* slot, int64_t* pending, int64_t* count, int64_t columns, int64_t width) {
    enter_kernel();
    const int64_t row = blockIdx.x, s = slot[row], bytes = copies.bytes[blockIdx.y];
    copy_bytes(copies.from[blockIdx.y] + s * width * bytes, copies.to[blockIdx.y] + row * columns * bytes, columns * bytes);
    if (pending == nullptr || blockIdx.y > 0 || threadIdx.x > 0) return;
    const int64_t found = pending[s];
    count[row] = found < columns ? found : columns;  // more only of a slot that rows share
    pending[s] = 0;
}

void take_pending(std::vector<Tensor> kept, const Tensor& slot, const Tensor& pending, std::vector<Tensor> out,
                  const Tensor& count) {
    const Launcher run(count);
    if (count.numel() == 0) return;
    by_copies(kept, out, [&](const Copies& copies, bool last) {
        run(taken_rows, dim3(unsigned(count.numel()), unsigned(copies.count)), dim3(kPendingThreads), 0, copies,
            data<int64_t>(slot), last ? data<int64_t>(pending) : nullptr, data<int64_t>(count), out[0].size(1),
            kept[0].size(1));
    });
}

// A block stores one row's last state and the token after it.
__global__ void __launch_bounds__(kEntryThreads)
    last_rows(const char* state, const int64_t* next, const int64_t* count, const int64_t* slot, char* kept, int64_t* root,
              int64_t columns, int64_t bytes) {
    enter_kernel();
    const int64_t row = blockIdx.x, last = row * columns + count[row] - 1, s = slot[row];
    if (last < row * columns) return;
    if (threadIdx.x == 0) root[s] = next[last];
    copy_bytes(state + last * bytes, kept + s * bytes, bytes);
}

void keep_last(const Tensor& state, const Tensor& next, const Tensor& count, const Tensor& slot, const Tensor& kept,
               const Tensor& root) {
    const int64_t rows = next.size(0), bytes = entry_bytes(state, kept, kept.size(0));
    const Launcher run(next);
    if (rows == 0) return;
    run(last_rows, dim3(unsigned(rows)), dim3(kEntryThreads), 0, data<char>(state), data<int64_t>(next), data<int64_t>(count),
        data<int64_t>(slot), data<char>(kept), data<int64_t>(root), next.size(1), bytes);
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
    m.impl("append_pending", TORCH_BOX(&drafttrain::append_pending));
    m.impl("take_pending", TORCH_BOX(&drafttrain::take_pending));
    m.impl("keep_last", TORCH_BOX(&drafttrain::keep_last));
    m.impl("append_text", TORCH_BOX(&drafttrain::append_text));
}
