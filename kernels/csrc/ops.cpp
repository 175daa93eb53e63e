// The operators' CPU side and their registration, through torch's stable ABI: one binary for torch 2.11 to 2.13.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>

#include "../include/drafttrain/accept.h"
#include "../include/drafttrain/attend.h"
#include "../include/drafttrain/rows.h"

namespace {

using drafttrain::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kSerial = 1 << 15;  // multiply-adds below which a second thread costs more than it brings

template <typename T>
T* data(const Tensor& x) {
    return static_cast<T*>(x.data_ptr());
}

template <typename T>
T* data(const std::optional<Tensor>& x) {
    return x ? static_cast<T*>(x->data_ptr()) : nullptr;
}

template <typename F>
void parallel(int64_t tasks, bool serial, const F& f) {
    if (serial || tasks == 1)
        f(0, tasks);
    else
        torch::stable::parallel_for(0, tasks, 1, f);
}

template <typename F>
void by_type(const Tensor& x, F f) {
    if (x.scalar_type() == ScalarType::Float)
        f(float());
    else if (x.scalar_type() == ScalarType::BFloat16)
        f(BFloat16());
    else
        STD_TORCH_CHECK(false, "the CPU operators take float32 and bfloat16");
}

void rms_norm(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight, double eps, const Tensor& summed,
              const Tensor& out) {
    const int64_t width = weight.numel(), rows = x.numel() / width;
    by_type(x, [&](auto kind) {
        using T = decltype(kind);
        const T *from = data<T>(x), *more = data<T>(delta), *w = data<T>(weight);
        T *sum = data<T>(summed), *to = data<T>(out);
        parallel(rows, x.numel() < kSerial, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++)
                drafttrain::rms_norm_row(from + r * width, more ? more + r * width : nullptr, w, width, float(eps),
                                         sum + r * width, to + r * width);
        });
    });
}

void gated(const Tensor& gate_up, const Tensor& out) {
    const int64_t width = out.size(out.dim() - 1), rows = out.numel() / width;
    by_type(gate_up, [&](auto kind) {
        using T = decltype(kind);
        const T* from = data<T>(gate_up);
        T* to = data<T>(out);
        parallel(rows, out.numel() * 8 < kSerial, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) drafttrain::gated_row(from + 2 * r * width, width, to + r * width);
        });
    });
}

template <typename T>
void run(const drafttrain::Attend<T>& a, int64_t batch, int64_t work) {
    const int64_t heads = batch * a.kv_heads, threads = torch::stable::get_num_threads();
    const bool serial = work < kSerial;
    // with fewer KV heads than threads, each head's nodes are shared out
    const int64_t parts = serial || heads >= threads ? 1 : std::min(a.nodes, (threads + heads - 1) / heads);
    if (parts > 1)
        for (int64_t i = 0; i < heads; i++) drafttrain::append(a, i / a.kv_heads, i % a.kv_heads);
    parallel(heads * parts, serial, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / parts / a.kv_heads, head = task / parts % a.kv_heads, part = task % parts;
            if (parts == 1) drafttrain::append(a, b, head);
            const int64_t first = a.nodes * part / parts, last = a.nodes * (part + 1) / parts;
            if (a.width <= 16)
                drafttrain::attend_head<1>(a, b, head, first, last);
            else if (a.width <= 32)
                drafttrain::attend_head<2>(a, b, head, first, last);
            else if (a.width <= 64)
                drafttrain::attend_head<4>(a, b, head, first, last);
            else if (a.width <= 128)
                drafttrain::attend_head<8>(a, b, head, first, last);
            else
                drafttrain::attend_head<16>(a, b, head, first, last);
        }
    });
}

void attend(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
            const std::optional<Tensor>& k_weight, double eps, double scale, int64_t window, const Tensor& position,
            const Tensor& table, const Tensor& length, const std::optional<Tensor>& ancestor, const Tensor& keys,
            const Tensor& values, const Tensor& out) {
    const int64_t batch = qkv.size(0), nodes = qkv.size(1), kv_heads = keys.size(2), width = keys.size(3);
    const int64_t heads = qkv.size(2) / width - 2 * kv_heads;
    STD_TORCH_CHECK(width <= 256 && width % 2 == 0, "head widths are even and at most 256");
    STD_TORCH_CHECK(out.numel() == batch * nodes * heads * width && heads % kv_heads == 0, "shapes do not fit");
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t whole = data<int64_t>(length)[b] + nodes;
        STD_TORCH_CHECK(whole <= table.size(1) * keys.size(1), "more positions than pages");
        longest = std::max(longest, whole);
    }
    by_type(qkv, [&](auto kind) {
        using T = decltype(kind);
        drafttrain::Attend<T> a;
        a.nodes = nodes, a.heads = heads, a.kv_heads = kv_heads, a.width = width, a.page = keys.size(1),
        a.pages = table.size(1);
        a.window = window, a.scale = float(scale), a.eps = float(eps);
        a.qkv = data<T>(qkv), a.cos = data<T>(cos), a.sin = data<T>(sin);
        a.q_weight = data<T>(q_weight), a.k_weight = data<T>(k_weight);
        a.position = data<int64_t>(position), a.table = data<int64_t>(table), a.length = data<int64_t>(length);
        a.ancestor = data<bool>(ancestor), a.keys = data<T>(keys), a.values = data<T>(values), a.out = data<T>(out);
        run(a, batch, batch * nodes * heads * longest * width);
    });
}

// Move the accepted nodes of every layer behind the prefix: position length + path[a] to length + a. store: [..., page slots,
// row].
void kv_keep(const Tensor& store, const Tensor& table, const Tensor& length, const Tensor& path, const Tensor& count,
             int64_t page) {
    const int64_t dims = store.dim(), row = store.size(dims - 1) * store.size(dims - 2) * int64_t(store.element_size());
    const int64_t slots = store.size(dims - 4) * page,
                  layers = store.numel() / store.size(dims - 1) / store.size(dims - 2) / slots;
    const int64_t batch = path.size(0), most = path.size(1), pages = table.size(1);
    const int64_t *ids = data<int64_t>(table), *from = data<int64_t>(length), *nodes = data<int64_t>(path);
    char* base = data<char>(store);
    for (int64_t b = 0; b < batch; b++) {
        // a path ascends, so a node never moves onto one that is still to be read
        for (int64_t i = 0; i < data<int64_t>(count)[b]; i++) {
            const int64_t node = nodes[b * most + i];
            if (node == i) continue;
            const int64_t to_p = from[b] + i, from_p = from[b] + node;
            const int64_t to = ids[b * pages + to_p / page] * page + to_p % page;
            const int64_t at = ids[b * pages + from_p / page] * page + from_p % page;
            for (int64_t l = 0; l < layers; l++) std::memcpy(base + (l * slots + to) * row, base + (l * slots + at) * row, row);
        }
    }
}

void greedy_accept(const Tensor& logits, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& path,
                   const Tensor& accepted, const Tensor& bonus) {
    const int64_t batch = logits.size(0), nodes = logits.size(1), vocab = logits.size(2);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        const T* rows = data<T>(logits);
        for (int64_t b = 0; b < batch; b++) {
            const auto choice = [&](int64_t i) { return drafttrain::argmax(rows + (b * nodes + i) * vocab, vocab); };
            data<int64_t>(accepted)[b] = drafttrain::greedy_walk(
                data<int64_t>(token) + b * nodes, data<int64_t>(parent) + b * nodes, data<int64_t>(count)[b], nodes, choice,
                data<int64_t>(path) + b * nodes, data<int64_t>(bonus) + b);
        }
    });
}

}  // namespace

STABLE_TORCH_LIBRARY(drafttrain, m) {
    m.def("rms_norm(Tensor x, Tensor? delta, Tensor weight, float eps, Tensor(a!) summed, Tensor(b!) out) -> ()");
    m.def("gated(Tensor gate_up, Tensor(a!) out) -> ()");
    m.def(
        "attend(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, float scale, int window, "
        "Tensor position, Tensor table, Tensor length, Tensor? ancestor, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) out) "
        "-> ()");
    m.def("kv_keep(Tensor(a!) store, Tensor table, Tensor length, Tensor path, Tensor count, int page) -> ()");
    m.def(
        "greedy_accept(Tensor logits, Tensor token, Tensor parent, Tensor count, Tensor(a!) path, Tensor(b!) accepted, "
        "Tensor(c!) bonus) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(drafttrain, CPU, m) {
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("gated", TORCH_BOX(&gated));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("kv_keep", TORCH_BOX(&kv_keep));
    m.impl("greedy_accept", TORCH_BOX(&greedy_accept));
}
