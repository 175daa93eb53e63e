// The commit of a decode step on a CPU, and what drafters store of it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

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

void along(std::vector<Tensor> values, const Tensor& path, std::vector<Tensor> out) {
    for (size_t k = 0; k < out.size(); k++) {
        const int64_t columns = out[k].size(1), size = entry_bytes(values[k], out[k], out[k].size(0) * columns);
        for (int64_t i = 0; i < out[k].size(0) * columns; i++) {
            const int64_t row = i / columns, node = data<int64_t>(path)[row * path.stride(0) + i % columns];
            const char* from = data<char>(values[k]) + (row * values[k].size(1) + node) * size;
            std::memcpy(data<char>(out[k]) + i * size, from, size_t(size));
        }
    }
}

void append_pending(std::vector<Tensor> values, const Tensor& count, const Tensor& slot, std::vector<Tensor> kept,
                    const Tensor& pending) {
    std::vector<int64_t> before;  // of rows that pad a batch several have one slot
    for (int64_t b = 0; b < count.numel(); b++) before.push_back(data<int64_t>(pending)[data<int64_t>(slot)[b]]);
    for (int64_t b = 0; b < count.numel(); b++) {
        const int64_t s = data<int64_t>(slot)[b], added = data<int64_t>(count)[b], at = before[b];
        for (size_t k = 0; k < kept.size(); k++) {
            const int64_t columns = values[k].size(1), width = kept[k].size(1);
            const int64_t size = entry_bytes(values[k], kept[k], kept[k].size(0) * width);
            STD_TORCH_CHECK(added <= columns && at + added <= width, "a slot has no room for these positions");
            char* to = data<char>(kept[k]) + (s * width + at) * size;
            std::memcpy(to, data<char>(values[k]) + b * columns * size, size_t(added * size));
        }
        data<int64_t>(pending)[s] = at + added;
    }
}

void take_pending(std::vector<Tensor> kept, const Tensor& slot, const Tensor& pending, std::vector<Tensor> out,
                  const Tensor& count) {
    for (int64_t b = 0; b < count.numel(); b++) {
        const int64_t s = data<int64_t>(slot)[b];
        for (size_t k = 0; k < kept.size(); k++) {
            const int64_t columns = out[k].size(1), width = kept[k].size(1);
            const int64_t size = entry_bytes(kept[k], out[k], out[k].size(0) * columns);
            const char* from = data<char>(kept[k]) + s * width * size;
            std::memcpy(data<char>(out[k]) + b * columns * size, from, size_t(columns * size));
        }
        data<int64_t>(count)[b] = data<int64_t>(pending)[s];
    }
    for (int64_t b = 0; b < count.numel(); b++) data<int64_t>(pending)[data<int64_t>(slot)[b]] = 0;
}

void keep_last(const Tensor& state, const Tensor& next, const Tensor& count, const Tensor& slot, const Tensor& kept,
               const Tensor& root) {
    const int64_t columns = next.size(1), size = entry_bytes(state, kept, kept.size(0));
    for (int64_t b = 0; b < next.size(0); b++) {
        const int64_t last = b * columns + data<int64_t>(count)[b] - 1, s = data<int64_t>(slot)[b];
        if (last < b * columns) continue;
        std::memcpy(data<char>(kept) + s * size, data<char>(state) + last * size, size_t(size));
        data<int64_t>(root)[s] = data<int64_t>(next)[last];
    }
}

void append_text(const Tensor& token, const Tensor& next, const Tensor& count, const Tensor& slot, const Tensor& text,
                 const Tensor& length) {
    const int64_t columns = next.size(1), most = text.size(1);
    for (int64_t b = 0; b < next.size(0); b++) {
        const int64_t added = data<int64_t>(count)[b], s = data<int64_t>(slot)[b];
        if (added == 0) continue;
        int64_t &at = data<int64_t>(length)[s], *to = data<int64_t>(text) + s * most + at;
        STD_TORCH_CHECK(at + added < most, "a text is longer than its slot");
        to[0] = data<int64_t>(token)[b * columns];
        std::copy_n(data<int64_t>(next) + b * columns, added, to + 1);
        at += added;
    }
}

// How many tokens, `most` at most, that end a text at `end` also end it at the earlier place `at`.
int64_t same_end(const int64_t* text, int64_t end, int64_t at, int64_t most) {
    int64_t same = 0;
    while (same < most && same <= at && text[at - same] == text[end - same]) same++;
    return same;
}

void look_up(const Tensor& text, const Tensor& length, const Tensor& slot, int64_t most, int64_t least, const Tensor& token,
             const Tensor& count) {
    const int64_t places = text.size(1), columns = token.size(1), limit = most > 0 ? most : places;
    for (int64_t b = 0; b < token.size(0); b++) {
        const int64_t s = data<int64_t>(slot)[b], root = data<int64_t>(length)[s];
        const int64_t* of = data<int64_t>(text) + s * places;
        int64_t best = least - 1, source = -1;
        for (int64_t at = root - 1; at >= best && best < limit; at--) {  // a longer match has its first token in the text
            if (of[at - best] != of[root - best]) continue;
            const int64_t same = same_end(of, root, at, limit);
            if (same > best) best = same, source = at;
        }
        data<int64_t>(count)[b] = source < 0 ? 1 : std::min(1 + root - source, columns);
        int64_t* to = data<int64_t>(token) + b * columns;
        to[0] = of[root];
        for (int64_t k = 1; k < columns; k++) to[k] = of[std::min(std::max<int64_t>(source, 0) + k, places - 1)];
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(drafttrain, CPU, m) {
    m.impl("commit", TORCH_BOX(&commit));
    m.impl("along", TORCH_BOX(&along));
    m.impl("append_pending", TORCH_BOX(&append_pending));
    m.impl("take_pending", TORCH_BOX(&take_pending));
    m.impl("keep_last", TORCH_BOX(&keep_last));
    m.impl("append_text", TORCH_BOX(&append_text));
    m.impl("look_up", TORCH_BOX(&look_up));
}
