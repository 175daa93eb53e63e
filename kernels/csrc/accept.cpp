// The acceptance operators and sampling on a CPU. Only rows that a walk reaches are read.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../include/drafttrain/distribution_simd.h"
#include "../include/drafttrain/lossless.h"
#include "../include/drafttrain/noise.h"
#include "../include/drafttrain/rows.h"
#include "types.h"
#include "verdicts.h"

namespace {

using namespace drafttrain;
using torch::stable::Tensor;

// Calls f(b) for every row, in threads if the rows are large enough.
template <typename F>
void rows(int64_t count, int64_t vocab, const F& f) {
    const auto some = [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; b++) f(b);
    };
    if (count == 1 || count * vocab < 1 << 15)
        some(0, count);
    else
        torch::stable::parallel_for(0, count, 1, some);
}

template <typename Choice>
void follow(const Trees& t, int64_t b, Choice choice) {
    const int64_t first = b * t.nodes;
    t.accepted[b] = greedy_walk(t.token + first, t.parent + first, t.count[b], t.nodes, choice, t.path + first, t.bonus + b);
}

void greedy_accept(const Tensor& logits, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& path,
                   const Tensor& accepted, const Tensor& bonus) {
    const Trees t = trees_of(token, parent, count, path, accepted, bonus);
    const int64_t vocab = logits.size(2);
    by_type(logits, [&](auto kind) {
        const auto* x = data<decltype(kind)>(logits);
        for (int64_t b = 0; b < token.size(0); b++)
            follow(t, b, [&](int64_t i) { return argmax(x + (b * t.nodes + i) * vocab, vocab); });
    });
}

void choice_accept(const Tensor& choice, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& path,
                   const Tensor& accepted, const Tensor& bonus) {
    const Trees t = trees_of(token, parent, count, path, accepted, bonus);
    for (int64_t b = 0; b < token.size(0); b++) follow(t, b, [&](int64_t i) { return data<int64_t>(choice)[b * t.nodes + i]; });
}

double number(const Trees& t, int64_t b, int64_t node, int64_t ahead, Lane lane, int64_t draw) {
    return uniform(*t.seed, t.key[b], t.position[b * t.nodes + node] + ahead, lane, draw);
}

// The `Row` of Lossless.
template <typename T>
struct Row {
    const Trees& t;
    int64_t b;
    const T* logits;  // [N, V] of this tree
    const float* q_rows;
    RowDistribution<T> dist = {};
    int64_t at = 0;

    double enter(int64_t node) {
        dist.read(logits + node * t.vocab, t.vocab, inverse_of(t.temperature[b]), false);
        at = node;
        return dist.row.mass;
    }
    int64_t token(int64_t i) const { return t.token[b * t.nodes + i]; }
    bool child(int64_t i) const { return t.parent[b * t.nodes + i] == at; }
    int64_t next_child(int64_t i) const {
        while (++i < t.count[b])
            if (child(i)) return i;
        return -1;
    }
    Given judge() const {
        double left = dist.row.mass;
        for (int64_t i = next_child(at); i >= 0; i = next_child(i)) {
            const double part = twin(i) ? 0.0 : weight(i);
            if (accepts_given(draw(i), left, part)) return {i, left};
            left = std::max(left - part, 0.0);
        }
        return {-1, left};
    }
    bool twin(int64_t i) const { return is_twin(t.token + b * t.nodes, t.parent + b * t.nodes, i); }
    double weight(int64_t i) const { return dist.weight_of(token(i)); }
    float q(int64_t i) const { return q_rows[at * t.vocab + token(i)]; }
    double draw(int64_t i) const { return number(t, b, i, 0, kAcceptLane, i); }

    // Writes the residual's values of a split.
    void lay(int64_t split, const Residual& residual, float* out) const {
        const float *q = q_rows + at * t.vocab + split * kSplit, unit = float(1.0 / dist.row.mass);
        for (int64_t i = 0; i < dist.size_of(split); i += kLanes) {
            const int64_t left = dist.size_of(split) - i;
            const Floats p = weights(load_masked(dist.x + split * kSplit + i, left), dist.row.top, dist.inverse) * unit;
            store(out + i, p);
        }
        for (int64_t i = 0; i < dist.size_of(split); i++) out[i] = residual(out[i], q[i]);
    }

    Excess excess(const Residual& residual, float take, bool more) {
        Excess all = {0.0, 0.0};
        float out[kSplit];
        for (int64_t s = 0; s < splits_of(t.vocab); s++) {
            const float* q = q_rows + at * t.vocab + s * kSplit;
            double here = 0.0;
            lay(s, residual, out);
            for (int64_t i = 0; i < dist.size_of(s); i++) here += std::max(out[i] - q[i] * take, 0.0f);
            for (int64_t i = 0; more && i < dist.size_of(s); i++) all.q += q[i];
            dist.sums[size_t(s)] = here, all.p += here;
        }
        residual.take[residual.steps] = take, residual.give[residual.steps] = float(1.0 / all.p);
        return all;
    }

    void fill(bool struck) {
        dist.fill();
        for (int64_t i = at + 1; struck && i < t.count[b]; i++) {
            if (!child(i) || twin(i)) continue;
            double& sum = dist.sums[size_t(token(i) / kSplit)];
            sum = std::max(sum - weight(i), 0.0);
        }
    }

    int64_t pick(double number, const Residual& residual, bool struck) const {
        const bool drawn = residual.steps > 0;
        const double given = drawn ? residual.give[residual.steps - 1] : 0.0;
        const auto of = [&](int64_t split, float* out) {
            drawn ? lay(split, residual, out) : dist.lay(split, out);
            for (int64_t i = at + 1; struck && i < t.count[b]; i++)
                if (child(i) && token(i) / kSplit == split) out[token(i) % kSplit] = 0.0f;
        };
        return dist.find(number, of, [&](int64_t s) { return drawn ? given : 1.0 / dist.factor(s); });
    }
};

template <typename T>
void lossless_row(const Trees& t, int64_t b, const T* logits, const float* q, const bool* sampled) {
    const int64_t first = b * t.nodes;
    std::vector<float> take(size_t(t.nodes)), give(size_t(t.nodes));
    Row<T> row = {t, b, logits + first * t.vocab, q == nullptr ? nullptr : q + first * t.vocab};
    Lossless<Row<T>> sampler(sampled == nullptr ? nullptr : sampled + first, {take.data(), give.data()}, row);
    std::fill(t.path + first, t.path + first + t.nodes, 0);
    int64_t accepted = 1;
    sampler.enter(0);
    for (int64_t i; (i = sampler.accepted_child()) >= 0; sampler.enter(i)) t.path[first + accepted++] = i;
    t.accepted[b] = accepted;
    t.bonus[b] = sampler.bonus(number(t, b, row.at, 1, kTargetLane, 0));
}

void lossless_accept(const Tensor& logits, const std::optional<Tensor>& q, const std::optional<Tensor>& sampled,
                     const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& position,
                     const Tensor& temperature, const Tensor& key, const Tensor& seed, bool, const Tensor& path,
                     const Tensor& accepted, const Tensor& bonus) {
    const Trees t =
        sampled_trees(trees_of(token, parent, count, path, accepted, bonus), logits.size(2), position, temperature, key, seed);
    STD_TORCH_CHECK(!q || q->numel() == logits.numel(), "q has a distribution for every node, over the target's vocabulary");
    by_type(logits, [&](auto kind) {
        const auto* x = data<decltype(kind)>(logits);
        rows(token.size(0), t.vocab, [&](int64_t b) { lossless_row(t, b, x, data<float>(q), data<bool>(sampled)); });
    });
}

template <typename T>
void likely_row(const Trees& t, int64_t b, const T* logits, double epsilon, double delta) {
    const int64_t first = b * t.nodes, *parent = t.parent + first;
    std::vector<Likely> found(size_t(t.nodes));
    std::vector<RowDistribution<T>> distributions(size_t(t.nodes));  // computed at first use
    const auto dist = [&](int64_t node) -> RowDistribution<T>& {
        RowDistribution<T>& one = distributions[size_t(node)];
        if (one.x == nullptr) one.read(logits + (first + node) * t.vocab, t.vocab, inverse_of(t.temperature[b]), true);
        return one;
    };
    const auto p = [&](int64_t i) { return dist(parent[i]).weight_of(t.token[first + i]) / dist(parent[i]).row.mass; };
    const auto floor = [&](int64_t i) { return std::min(epsilon, delta * std::exp(-entropy(dist(i).row))); };
    t.accepted[b] = likely_walk(parent, t.count[b], t.nodes, p, floor, found.data(), t.path + first);
    const int64_t last = t.path[first + t.accepted[b] - 1];
    t.bonus[b] = dist(last).draw(number(t, b, last, 1, kTargetLane, 0));
}

void likely_accept(const Tensor& logits, const Tensor& token, const Tensor& parent, const Tensor& count, const Tensor& position,
                   const Tensor& temperature, const Tensor& key, const Tensor& seed, double epsilon, double delta,
                   const Tensor& path, const Tensor& accepted, const Tensor& bonus) {
    const Trees t =
        sampled_trees(trees_of(token, parent, count, path, accepted, bonus), logits.size(2), position, temperature, key, seed);
    by_type(logits, [&](auto kind) {
        const auto* x = data<decltype(kind)>(logits);
        rows(token.size(0), t.vocab, [&](int64_t b) { likely_row(t, b, x, epsilon, delta); });
    });
}

void sample(const Tensor& logits, const Tensor& temperature, const Tensor& key, const Tensor& position, const Tensor& seed,
            int64_t lane, int64_t draw, const Tensor& token) {
    const int64_t vocab = logits.size(1);
    by_type(logits, [&](auto kind) {
        using T = decltype(kind);
        rows(logits.size(0), vocab, [&](int64_t m) {
            RowDistribution<T> dist;
            dist.read(data<T>(logits) + m * vocab, vocab, inverse_of(data<float>(temperature)[m]), false);
            const double drawn = uniform(*data<int64_t>(seed), data<int64_t>(key)[m], data<int64_t>(position)[m], lane, draw);
            data<int64_t>(token)[m] = dist.draw(drawn);
        });
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(drafttrain, CPU, m) {
    m.impl("greedy_accept", TORCH_BOX(&greedy_accept));
    m.impl("choice_accept", TORCH_BOX(&choice_accept));
    m.impl("lossless_accept", TORCH_BOX(&lossless_accept));
    m.impl("likely_accept", TORCH_BOX(&likely_accept));
    m.impl("sample", TORCH_BOX(&sample));
}
