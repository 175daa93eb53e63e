// The commit of a decode step: a warp for each row.
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

}  // namespace
}  // namespace drafttrain

DRAFTTRAIN_CUDA_OPS(m) { m.impl("commit", TORCH_BOX(&drafttrain::commit)); }
