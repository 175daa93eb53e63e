// The operators' CPU side and their registration, through torch's stable ABI: one binary for torch 2.11 to 2.13.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../include/drafttrain/attend.h"
#include "../include/drafttrain/divergence.h"
#include "../include/drafttrain/panels.h"
#include "../include/drafttrain/rows.h"
#include "schema.h"
#include "types.h"

namespace {

using drafttrain::by_type;
using drafttrain::data;
using torch::stable::Tensor;

constexpr int64_t kSerial = 1 << 15;  // multiply-adds below which a second thread costs more than it brings
constexpr int64_t kRowsOfTask = 256;  // rows of a matrix that one task multiplies with a state

template <typename F>
void parallel(int64_t tasks, bool serial, const F& f) {
    if (serial || tasks == 1)
        f(0, tasks);
    else
        torch::stable::parallel_for(0, tasks, 1, f);
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

void divergence(const Tensor& logits, const Tensor& target, const Tensor& label, int64_t name, const Tensor& loss,
                const Tensor& hit, const Tensor& mass, const std::optional<Tensor>& slope) {
    const int64_t width = logits.size(1), rows = logits.size(0);
    const float *own = data<float>(logits), *theirs = data<float>(target);
    parallel(rows, false, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            float* to = slope ? data<float>(slope) + r * width : nullptr;
            const auto found = drafttrain::diverge_row(own + r * width, theirs + r * width, width, data<int64_t>(label)[r],
                                                       drafttrain::Divergence(name), to);
            data<float>(loss)[r] = found.loss, data<bool>(hit)[r] = found.hit, data<float>(mass)[r] = found.mass;
        }
    });
}

template <typename T>
void run(const drafttrain::Attend<T>& a, int64_t batch, int64_t work) {
    const int64_t heads = batch * a.kv_heads, threads = torch::stable::get_num_threads();
    const bool serial = work < kSerial;
    // with fewer KV heads than threads, each head's nodes are split over threads
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

template <typename T>
void attend_at(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
               const std::optional<Tensor>& k_weight, double eps, double scale, int64_t window, const Tensor& position,
               const Tensor& table, const Tensor& length, const std::optional<Tensor>& ancestor, int64_t earlier, int64_t page,
               int64_t kv_heads, int64_t width, T* keys, T* values, const Tensor& out) {
    const int64_t batch = qkv.size(0), nodes = qkv.size(1), heads = qkv.size(2) / width - 2 * kv_heads;
    STD_TORCH_CHECK(width <= 256 && width % 2 == 0, "head widths are even and at most 256");
    STD_TORCH_CHECK(out.numel() == batch * nodes * heads * width && heads % kv_heads == 0, "shapes do not fit");
    const bool as_bits = ancestor && ancestor->scalar_type() == torch::headeronly::ScalarType::Long;
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t whole = data<int64_t>(length)[b] + earlier + nodes;
        STD_TORCH_CHECK(whole <= table.size(1) * page, "more positions than pages");
        longest = std::max(longest, whole);
    }
    drafttrain::Attend<T> a;
    a.nodes = nodes, a.heads = heads, a.kv_heads = kv_heads, a.width = width, a.page = page, a.pages = table.size(1);
    a.window = window, a.scale = float(scale), a.eps = float(eps);
    a.qkv = data<T>(qkv), a.cos = data<T>(cos), a.sin = data<T>(sin);
    a.q_weight = data<T>(q_weight), a.k_weight = data<T>(k_weight);
    a.position = data<int64_t>(position), a.table = data<int64_t>(table), a.length = data<int64_t>(length);
    a.earlier = earlier, a.words = as_bits ? ancestor->numel() / (batch * nodes) : 0;
    a.ancestor = as_bits ? nullptr : data<bool>(ancestor), a.bits = as_bits ? data<int64_t>(ancestor) : nullptr;
    STD_TORCH_CHECK(!ancestor || ancestor->numel() == batch * nodes * (as_bits ? a.words : earlier + nodes),
                    "ancestors do not fit");
    STD_TORCH_CHECK(!as_bits || a.words * 64 >= earlier + nodes, "more nodes than bits");
    a.keys = keys, a.values = values, a.out = data<T>(out);
    run(a, batch, batch * nodes * heads * longest * width);
}

void attend(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
            const std::optional<Tensor>& k_weight, double eps, double scale, int64_t window, const Tensor& position,
            const Tensor& table, const Tensor& length, const std::optional<Tensor>& ancestor, int64_t earlier,
            const Tensor& keys, const Tensor& values, const Tensor& out) {
    by_type(qkv, [&](auto kind) {
        using T = decltype(kind);
        attend_at(qkv, cos, sin, q_weight, k_weight, eps, scale, window, position, table, length, ancestor, earlier,
                  keys.size(1), keys.size(2), keys.size(3), data<T>(keys), data<T>(values), out);
    });
}

void append(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_weight,
            const std::optional<Tensor>& k_weight, double eps, const Tensor& position, const Tensor& table,
            const Tensor& length, int64_t earlier, const Tensor& keys, const Tensor& values, const Tensor& query) {
    by_type(qkv, [&](auto kind) {
        using T = decltype(kind);
        drafttrain::Attend<T> a{};
        const int64_t batch = qkv.size(0);
        a.nodes = qkv.size(1), a.kv_heads = keys.size(2), a.width = keys.size(3);
        a.heads = qkv.size(2) / a.width - 2 * a.kv_heads, a.page = keys.size(1), a.pages = table.size(1);
        STD_TORCH_CHECK(a.width <= 256 && a.width % 2 == 0, "head widths are even and at most 256");
        STD_TORCH_CHECK(query.numel() == batch * a.nodes * a.heads * a.width, "shapes do not fit");
        for (int64_t b = 0; b < batch; b++)
            STD_TORCH_CHECK(data<int64_t>(length)[b] + earlier + a.nodes <= a.pages * a.page, "more positions than pages");
        a.earlier = earlier, a.eps = float(eps), a.qkv = data<T>(qkv), a.cos = data<T>(cos), a.sin = data<T>(sin);
        a.q_weight = data<T>(q_weight), a.k_weight = data<T>(k_weight), a.position = data<int64_t>(position);
        a.table = data<int64_t>(table), a.length = data<int64_t>(length), a.keys = data<T>(keys), a.values = data<T>(values);
        T* to = data<T>(query);
        parallel(batch * a.nodes, qkv.numel() < kSerial, [&](int64_t begin, int64_t end) {
            float turned[256];
            for (int64_t i = begin; i < end; i++)
                for (int64_t h = 0; h < a.heads; h++) {
                    const T* x = a.qkv + (i * (a.heads + 2 * a.kv_heads) + h) * a.width;
                    drafttrain::turn(a, x, a.q_weight, a.position[i], turned);
                    for (int64_t d = 0; d < a.width; d++)
                        drafttrain::from_float(turned[d], to + (i * a.heads + h) * a.width + d);
                }
        });
        for (int64_t i = 0; i < batch * a.kv_heads; i++) drafttrain::append(a, i / a.kv_heads, i % a.kv_heads);
    });
}

// Moves the accepted nodes of every layer to the end of the prefix: position length + path[a] to length + a. store:
// [..., page slots, row].
void kv_keep(const Tensor& store, const Tensor& table, const Tensor& length, const Tensor& path, const Tensor& count,
             int64_t page) {
    const int64_t dims = store.dim(), row = store.size(dims - 1) * store.size(dims - 2) * int64_t(store.element_size());
    const int64_t slots = store.size(dims - 4) * page,
                  layers = store.numel() / store.size(dims - 1) / store.size(dims - 2) / slots;
    const int64_t batch = path.size(0), most = path.size(1), pages = table.size(1);
    const int64_t *ids = data<int64_t>(table), *from = data<int64_t>(length), *nodes = data<int64_t>(path);
    char* base = data<char>(store);
    for (int64_t b = 0; b < batch; b++) {
        // a path ascends, so a node never overwrites one that is read later
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

void advance(const Tensor& length, const Tensor& count, const Tensor& slot, const Tensor& all, const Tensor& out) {
    for (int64_t b = 0; b < length.size(0); b++) {
        const int64_t longer = data<int64_t>(length)[b] + data<int64_t>(count)[b];
        data<int64_t>(all)[data<int64_t>(slot)[b]] = data<int64_t>(out)[b] = longer;
    }
}

// x W^T + b in bfloat16, by a weight in panels.
void product(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, const Tensor& out) {
    using drafttrain::BFloat16;
    const int64_t inputs = x.size(x.dim() - 1), outputs = out.size(out.dim() - 1), rows = x.numel() / inputs;
    const int64_t panels = packed.size(0), steps = packed.size(1);
    for (const Tensor& given : {x, packed, out})
        STD_TORCH_CHECK(given.scalar_type() == torch::headeronly::ScalarType::BFloat16, "packed weights are for bfloat16");
    STD_TORCH_CHECK(steps == (inputs + 1) / 2 && panels == (outputs + drafttrain::kPanel - 1) / drafttrain::kPanel &&
                        out.numel() == rows * outputs,
                    "shapes do not fit");
    const auto* weight = reinterpret_cast<const float*>(data<BFloat16>(packed));
    drafttrain::PanelProduct p{weight, nullptr, data<BFloat16>(bias), data<BFloat16>(out), rows, steps, outputs};
    const auto pairs = drafttrain::paired(p, data<BFloat16>(x), inputs);
    p.x = pairs.data();
    parallel(panels, rows * inputs * outputs < kSerial,
             [&](int64_t begin, int64_t end) { drafttrain::multiply_panels(p, begin, end); });
}

// oneDNN's product with a packed weight, exported to C by torch; null where torch does not export it.
using PackedProduct = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, const char*, const double**,
                                         int64_t, const char**, AtenTensorHandle*);

PackedProduct packed_product() {
    static const PackedProduct found = reinterpret_cast<PackedProduct>(dlsym(RTLD_DEFAULT, "aoti_torch_cpu__linear_pointwise"));
    return found;
}

bool has_product() { return packed_product() != nullptr; }

// Writes a map's outputs to `out`, which becomes a tensor of their size. bias: without elements: none. In bfloat16 the weight
// has whole panels.
void linear(const Tensor& x, const Tensor& packed, const Tensor& bias, std::optional<Tensor>& out) {
    const bool biased = bias.numel() > 0;
    if (x.scalar_type() == torch::headeronly::ScalarType::BFloat16) {
        if (!out) out = torch::stable::new_empty(x, {x.size(0), x.size(1), packed.size(0) * drafttrain::kPanel});
        product(x, packed, biased ? std::optional<Tensor>(bias) : std::nullopt, *out);
        return;
    }
    AtenTensorHandle b = bias.get(), made = nullptr;
    const AOTITorchError error =
        packed_product()(x.get(), packed.get(), biased ? &b : nullptr, "none", nullptr, 0, nullptr, &made);
    STD_TORCH_CHECK(error == 0, "oneDNN refused a product");
    out = Tensor(made);
}

// Weights kept between calls, so that a model's 144 tensors are not passed for every token.
enum Part {
    kNorm,
    kQkv,
    kQkvBias,
    kQNorm,
    kKNorm,
    kOut,
    kOutBias,
    kNorm2,
    kGateUp,
    kGateUpBias,
    kDown,
    kDownBias,
    kPartsOfBlock
};

struct Shelf {
    std::mutex mutex;
    std::unordered_map<int64_t, std::vector<Tensor>> models;
    int64_t next = 1;
};

Shelf& shelf() {
    static Shelf one;
    return one;
}

int64_t keep_weights(std::vector<Tensor> weights) {
    const std::lock_guard<std::mutex> lock(shelf().mutex);
    shelf().models[shelf().next] = std::move(weights);
    return shelf().next++;
}

void drop_weights(int64_t model) {
    const std::lock_guard<std::mutex> lock(shelf().mutex);
    shelf().models.erase(model);
}

std::vector<Tensor>& kept(int64_t model) {
    const std::lock_guard<std::mutex> lock(shelf().mutex);
    return shelf().models.at(model);
}

// The `ranks` greatest of a row, greatest first, the lower index first among equals. ids: [ranks].
void top(const float* x, int64_t width, int64_t ranks, int64_t* ids) {
    std::vector<float> value(size_t(ranks), -INFINITY);
    std::fill(ids, ids + ranks, 0);
    for (int64_t start = 0; start < width; start += drafttrain::kLanes) {
        const int64_t stop = std::min<int64_t>(width, start + drafttrain::kLanes);
        if (stop - start == drafttrain::kLanes && drafttrain::greatest(drafttrain::load(x + start)) <= value.back()) continue;
        for (int64_t i = start; i < stop; i++) {
            if (!(x[i] > value.back())) continue;
            int64_t at = ranks - 1;
            for (; at > 0 && x[i] > value[size_t(at - 1)]; at--) {
                value[size_t(at)] = value[size_t(at - 1)];
                ids[at] = ids[at - 1];
            }
            value[size_t(at)] = x[i], ids[at] = i;
        }
    }
}

// The most likely tokens of parallel residual heads on one state [1, H]: [heads, ranks]. weights: for each layer of residual
// blocks the heads' matrices [all heads, H, H] and biases [all heads, H], then the output matrices [all heads, V, H]. With one
// state a product only reads its matrix once, which needs no packing.
Tensor top_of_heads(const Tensor& state, std::vector<Tensor> weights, const Tensor& like, int64_t heads, int64_t ranks) {
    const int64_t width = state.numel(), vocab = weights.back().size(1);
    std::vector<float> x(size_t(heads * width)), mapped(size_t(heads * std::max(width, vocab)));
    for (int64_t k = 0; k < heads; k++) std::copy_n(data<float>(state), width, x.data() + k * width);
    const auto product = [&](const Tensor& matrices, int64_t rows) {
        const int64_t parts = (rows + kRowsOfTask - 1) / kRowsOfTask;
        parallel(heads * parts, heads * rows * width < kSerial, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; task++) {
                const int64_t k = task / parts, first = task % parts * kRowsOfTask, last = std::min(rows, first + kRowsOfTask);
                drafttrain::products(data<float>(matrices) + (k * rows + first) * width, x.data() + k * width, width,
                                     last - first, mapped.data() + k * rows + first);
            }
        });
    };
    for (size_t l = 0; l + 1 < weights.size(); l += 2) {
        product(weights[l], width);
        const float* bias = data<float>(weights[l + 1]);
        for (int64_t i = 0; i < heads * width; i++) {
            const float v = mapped[size_t(i)] + bias[i];
            x[size_t(i)] += v / (1.0f + std::exp(-v));
        }
    }
    product(weights.back(), vocab);
    Tensor ids = torch::stable::new_empty(like, {heads, ranks});
    for (int64_t k = 0; k < heads; k++) top(mapped.data() + k * vocab, vocab, ranks, data<int64_t>(ids) + k * ranks);
    return ids;
}

// All blocks of a Llama-like model over few new positions. x, the residual stream, is changed in place. read: the input of the
// first block's projections, where it is not the norm of x. Returns the part that is still to be added to x, without elements
// if the last block is tapped. taps: block numbers; tapped: their outputs.
Tensor run_blocks(int64_t model, const Tensor& x, const std::optional<Tensor>& read, const Tensor& cos, const Tensor& sin,
                  double eps, double head_eps, double scale, const Tensor& windows, const Tensor& position, const Tensor& table,
                  const Tensor& length, const std::optional<Tensor>& ancestor, int64_t earlier, const Tensor& store,
                  const Tensor& taps, const Tensor& tapped) {
    std::vector<Tensor>* weights = &kept(model);
    STD_TORCH_CHECK(weights->size() % kPartsOfBlock == 0, "a block has another number of weights");
    STD_TORCH_CHECK(store.scalar_type() == x.scalar_type(), "the cache has another element type than the residual stream");
    const int64_t blocks = int64_t(weights->size()) / kPartsOfBlock, batch = x.size(0), nodes = x.size(1);
    const int64_t positions = store.size(2), page = store.size(3), kv_heads = store.size(4), width = store.size(5);
    const int64_t half = positions * page * kv_heads * width;
    const auto some = [](const Tensor& t) { return t.numel() > 0 ? std::optional<Tensor>(t) : std::nullopt; };
    Tensor normed = torch::stable::empty_like(x), attended = normed, act = normed;
    std::optional<Tensor> qkv, out, gate_up, down;  // each block's in the same memory
    bool pending = false;                           // `down` is still to be added to x
    int64_t next_tap = 0;
    for (int64_t l = 0; l < blocks; l++) {
        const Tensor* w = weights->data() + l * kPartsOfBlock;
        if (l > 0 || !read) rms_norm(x, pending ? down : std::nullopt, w[kNorm], eps, x, normed);
        linear(l == 0 && read ? *read : normed, w[kQkv], w[kQkvBias], qkv);
        const int64_t heads = qkv->size(2) / width - 2 * kv_heads;
        if (l == 0) attended = torch::stable::new_empty(x, {batch, nodes, heads * width});
        by_type(x, [&](auto kind) {
            auto* keys = data<decltype(kind)>(store) + 2 * l * half;
            attend_at(*qkv, cos, sin, some(w[kQNorm]), some(w[kKNorm]), head_eps, scale, data<int64_t>(windows)[l], position,
                      table, length, ancestor, earlier, page, kv_heads, width, keys, keys + half, attended);
        });
        linear(attended, w[kOut], w[kOutBias], out);
        rms_norm(x, out, w[kNorm2], eps, x, normed);
        linear(normed, w[kGateUp], w[kGateUpBias], gate_up);
        if (l == 0) act = torch::stable::new_empty(x, {batch, nodes, gate_up->size(2) / 2});
        gated(*gate_up, act);
        linear(act, w[kDown], w[kDownBias], down);
        pending = true;
        if (next_tap < taps.numel() && data<int64_t>(taps)[next_tap] == l) {
            by_type(x, [&](auto kind) {
                using T = decltype(kind);
                T *stream = data<T>(x), *to = data<T>(tapped) + next_tap * x.numel();
                const T* more = data<T>(*down);
                for (int64_t i = 0; i < x.numel(); i++) {
                    drafttrain::from_float(drafttrain::to_float(stream[i]) + drafttrain::to_float(more[i]), &stream[i]);
                    to[i] = stream[i];
                }
            });
            next_tap++;
            pending = false;
        }
    }
    return pending ? *down : torch::stable::new_empty(x, {0});
}

}  // namespace

STABLE_TORCH_LIBRARY(drafttrain, m) { drafttrain::define(m); }

STABLE_TORCH_LIBRARY_IMPL(drafttrain, CPU, m) {
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("gated", TORCH_BOX(&gated));
    m.impl("divergence", TORCH_BOX(&divergence));
    m.impl("product", TORCH_BOX(&product));
    m.impl("append", TORCH_BOX(&append));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("kv_keep", TORCH_BOX(&kv_keep));
    m.impl("advance", TORCH_BOX(&advance));
    m.impl("run_blocks", TORCH_BOX(&run_blocks));
    m.impl("top_of_heads", TORCH_BOX(&top_of_heads));
}

// for operators whose arguments do not name a CPU: packed weights, or no tensor
STABLE_TORCH_LIBRARY_IMPL(drafttrain, CompositeExplicitAutograd, m) {
    m.impl("has_product", TORCH_BOX(&has_product));
    m.impl("keep_weights", TORCH_BOX(&keep_weights));
    m.impl("drop_weights", TORCH_BOX(&drop_weights));
}
