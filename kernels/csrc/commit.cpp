// The commit of a decode step on a CPU.
#include <torch/csrc/stable/library.h>

#include "commits.h"

namespace {

using namespace drafttrain;
using torch::stable::Tensor;

void commit(const Tensor& token, const Tensor& parent, const Tensor& real, const Tensor& path, const Tensor& count,
            const Tensor& bonus, const Tensor& slot, const Tensor& stop, const Tensor& limit, bool skips, bool counts,
            const Tensor& root, const Tensor& made, const Tensor& done, const Tensor& taken, const Tensor& next,
            const Tensor& kept, const Tensor& record) {
    const Commits c = commits_of(token, parent, real, path, count, bonus, slot, stop, limit, skips, counts, root, made, done,
                                 taken, next, kept, record);
    for (int64_t row = 0; row < token.size(0); row++) {
        const int64_t keeps = c.kept_of(row), last = c.last(row);
        bool stopped = false, open = false;
        for (int64_t a = 0; a < c.width; a++) stopped |= c.column(row, a, keeps);
        for (int64_t i = 1; i < c.real[row]; i++) open |= c.is_child(row, i, last);
        c.finish(row, keeps, stopped, open);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(drafttrain, CPU, m) { m.impl("commit", TORCH_BOX(&commit)); }
