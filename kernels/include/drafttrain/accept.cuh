// The walks over verified trees on the device, one block for each tree; the shares of all nodes' rows come from
// distribution.cuh.
#pragma once

#include "accept.h"
#include "distribution.cuh"
#include "lossless.h"
#include "noise.h"

namespace drafttrain {

constexpr int kFollowThreads = 256;

// Dynamic shared memory as arrays, one after the other.
class Room {
  public:
    template <typename T>
    __device__ T* take(int64_t count) {
        T* const part = reinterpret_cast<T*>(next_);
        next_ += (count * sizeof(T) + 7) / 8 * 8;
        return part;
    }

  private:
    unsigned char* next_ = dynamic_shared<unsigned char>();
};

// This block's tree, in shared memory, without its padding nodes.
struct BlockTree {
    const int64_t *token, *parent;
    int64_t row, count;  // row: of the batch

    // Copies the tree and clears its path. Wait at a barrier before reading them. Padding is copied too: no load waits for the
    // count.
    __device__ BlockTree(const Trees& trees, Room& room) : row(blockIdx.x), count(trees.count[blockIdx.x]) {
        int64_t *tokens = room.take<int64_t>(trees.nodes), *parents = room.take<int64_t>(trees.nodes);
        for (int64_t i = threadIdx.x; i < trees.nodes; i += blockDim.x) {
            trees.path[row * trees.nodes + i] = 0;
            tokens[i] = trees.token[row * trees.nodes + i];
            parents[i] = trees.parent[row * trees.nodes + i];
        }
        token = tokens, parent = parents;
    }
};

// The first accepted child of each node, in shared memory.
struct NextNodes {
    static constexpr int kNone = INT_MAX;
    int* next;  // [N]

    // Clears them. Wait at a barrier before `accept`, and again before reading.
    __device__ NextNodes(int64_t nodes, Room& room) : next(room.take<int>(nodes)) {
        for (int64_t i = threadIdx.x; i < nodes; i += blockDim.x) next[i] = kNone;
    }
    // parent: before i, so that walks end.
    __device__ void accept(int64_t parent, int64_t i) const { atomicMin(next + parent, int(i)); }
    // -1 if every child is rejected.
    __device__ int64_t after(int64_t node) const { return next[node] == kNone ? -1 : next[node]; }
};

inline size_t follow_room(int64_t nodes) { return nodes * (3 * sizeof(int64_t) + sizeof(int)) + 8; }

// The walk along the argmax of each node's row, from its splits' shares, or along `choice` [B, N] if given.
__global__ void __launch_bounds__(kFollowThreads)
    follow_rows(Trees trees, const uint64_t* best, int splits, const int64_t* choice) {
    Room room;
    const BlockTree tree(trees, room);
    const NextNodes next(trees.nodes, room);
    int64_t* chosen = room.take<int64_t>(trees.nodes);
    const int64_t first = tree.row * trees.nodes;
    if (choice != nullptr) {
        for (int64_t n = threadIdx.x; n < trees.nodes; n += blockDim.x) chosen[n] = choice[first + n];
    } else {
        for (int64_t n = threadIdx.x / kWarp; n < tree.count; n += blockDim.x / kWarp)
            chosen[n] = warp_argmax(best + (first + n) * splits, splits);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x + 1; i < tree.count; i += blockDim.x) {
        const int64_t parent = tree.parent[i];
        if (parent >= 0 && parent < i && tree.token[i] == chosen[parent]) next.accept(parent, i);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    int64_t last = 0, accepted = 1;
    for (int64_t i; (i = next.after(last)) >= 0; last = i) trees.path[first + accepted++] = i;
    trees.accepted[tree.row] = accepted, trees.bonus[tree.row] = chosen[last];
}

// The logit rows of a tree's nodes, with their shares.
template <typename T>
struct BlockRows {
    const T* logits;
    const Share* shares;
    int64_t vocab, splits, first;  // first: row of the tree's root
    float inverse;
    Share* total;  // [N], shared

    __device__ BlockRows(const Trees& trees, const BlockTree& tree, const T* logits, const Share* shares, Room& room)
        : logits(logits),
          shares(shares),
          vocab(trees.vocab),
          splits(splits_of(trees.vocab)),
          first(tree.row * trees.nodes),
          inverse(inverse_of(trees.temperature[tree.row])),
          total(room.take<Share>(trees.nodes)) {
        for (int64_t n = threadIdx.x / kWarp; n < tree.count; n += blockDim.x / kWarp) {
            const Share all = warp_join(shares + (first + n) * splits, splits, inverse);
            if (threadIdx.x % kWarp == 0) total[n] = all;
        }
        __syncthreads();
    }

    // A token's share of total[node].mass.
    __device__ double weight_of(int64_t node, int64_t token) const {
        const float top = shares[(first + node) * splits + token / kSplit].top;
        const float e = weight(to_float(logits[(first + node) * vocab + token]), top, inverse);
        return double(e) * double(weight(top, total[node].top, inverse));
    }

    __device__ BlockDistribution<T> dist(int64_t node, double* sums, Finder& finder) const {
        const int64_t row = first + node;
        return {logits + row * vocab, shares + row * splits, vocab, inverse, total[node], sums, finder};
    }
};

// The `Row` of Lossless, computed by a block. All threads make the same calls.
template <typename T, bool packed>
struct BlockRow {
    const BlockTree& tree;
    const BlockRows<T>& rows;
    const float* q_rows;  // [N, V] of this tree, or null
    const double *weights, *draws;
    const float* q_at;  // q_rows at each node's token
    const bool* twins;
    double* sums;
    Finder& finder;
    int64_t at;

    __device__ double enter(int64_t node) { return rows.total[at = node].mass; }
    __device__ double weight(int64_t i) const { return weights[i]; }
    __device__ bool twin(int64_t i) const { return twins[i]; }
    __device__ float q(int64_t i) const { return q_at[i]; }
    __device__ double draw(int64_t i) const { return draws[i]; }
    __device__ BlockDistribution<T> dist() const { return rows.dist(at, sums, finder); }

    // The probability of a logit. unit: 1 / mass of the row.
    __device__ float p_of(float x, float unit) const { return drafttrain::weight(x, rows.total[at].top, rows.inverse) * unit; }

    // One warp sums one split.
    __device__ Excess excess(const Residual& residual, float take, bool more) {
        constexpr int kWide = kPiece<T, packed>;
        const auto add = [](double a, double b) { return a + b; };
        const T* x = rows.logits + (rows.first + at) * rows.vocab;
        const float *q = q_rows + at * rows.vocab, unit = float(1.0 / rows.total[at].mass);
        Excess all = {0.0, 0.0};
        __syncthreads();  // every thread has read the residual's last step and the earlier sums
        for (int64_t split = threadIdx.x / kWarp; split < rows.splits; split += blockDim.x / kWarp) {
            const int64_t end = (split + 1) * kSplit < rows.vocab ? (split + 1) * kSplit : rows.vocab;
            double here = 0.0;
#pragma unroll 4
            for (int64_t v = split * kSplit + threadIdx.x % kWarp * kWide; v < end; v += kWarp * kWide) {
                const auto logit = *reinterpret_cast<const Piece<T, kWide>*>(x + v);
                const auto drawn = *reinterpret_cast<const Piece<float, kWide>*>(q + v);
                float piece = 0.0f;
                for (int j = 0; j < kWide; j++) {
                    const float p = residual(p_of(to_float(logit.at[j]), unit), drawn.at[j]);
                    piece += fmaxf(p - drawn.at[j] * take, 0.0f);
                    if (more) all.q += drawn.at[j];
                }
                here += piece;
            }
            here = warp_reduce(here, add);
            if (threadIdx.x % kWarp == 0) sums[split] = here, all.p += here;
        }
        all.p = block_reduce(all.p, add, finder.sum);
        if (more) all.q = block_reduce(all.q, add, finder.sum);
        if (threadIdx.x == 0) residual.take[residual.steps] = take, residual.give[residual.steps] = float(1.0 / all.p);
        __syncthreads();
        return all;
    }

    __device__ void fill(bool struck) {
        dist().fill();
        if (!struck) return;
        for (int64_t i = at + 1; threadIdx.x == 0 && i < tree.count; i++) {
            if (tree.parent[i] != at || twins[i]) continue;
            double& sum = sums[tree.token[i] / kSplit];
            sum = fmax(sum - weights[i], 0.0);
        }
        __syncthreads();
    }

    __device__ int64_t pick(double number, const Residual& residual, bool struck) {
        const auto strike = [&](int64_t start, int64_t end) {
            if (!struck) return;
            for (int64_t i = threadIdx.x; i < tree.count; i += blockDim.x)
                if (tree.parent[i] == at && tree.token[i] >= start && tree.token[i] < end)
                    finder.weight[tree.token[i] - start] = 0.0f;
            __syncthreads();
        };
        const BlockDistribution<T> mine = dist();
        const float *q = q_rows + at * rows.vocab, unit = float(1.0 / mine.row.mass);
        if (residual.steps == 0) {
            const auto of = [&](int64_t v, float top) { return drafttrain::weight(to_float(mine.x[v]), top, mine.inverse); };
            return mine.find(number, of, [&](int64_t s) { return 1.0 / mine.factor(s); }, strike);
        }
        const double given = residual.give[residual.steps - 1];
        const auto of = [&](int64_t v, float) { return residual(p_of(to_float(mine.x[v]), unit), q[v]); };
        return mine.find(number, of, [&](int64_t) { return given; }, strike);
    }
};

inline size_t lossless_room(int64_t nodes, int64_t splits) {
    return nodes * (2 * sizeof(int64_t) + sizeof(Share) + 2 * sizeof(double)) + (3 * nodes * sizeof(float) + nodes + 32) +
           splits * sizeof(double);
}

// Speculative sampling; q [B, N, V] and sampled [B, N] may be null.
template <typename T, bool packed>
__global__ void __launch_bounds__(kDrawThreads, 1)
    lossless_rows(Trees trees, const T* logits, const Share* shares, const float* q, const bool* sampled) {
    __shared__ Finder finder;
    Room room;
    const BlockTree tree(trees, room);
    const BlockRows<T> rows(trees, tree, logits, shares, room);
    const int64_t first = rows.first;
    double *weights = room.take<double>(trees.nodes), *draws = room.take<double>(trees.nodes);
    float *q_at = room.take<float>(trees.nodes), *take = room.take<float>(trees.nodes), *give = room.take<float>(trees.nodes);
    bool* twins = room.take<bool>(trees.nodes);
    const auto number = [&](int64_t i, int64_t ahead, Lane lane, int64_t draw) {
        return uniform(*trees.seed, trees.key[tree.row], trees.position[first + i] + ahead, lane, draw);
    };
    for (int64_t i = threadIdx.x + 1; i < tree.count; i += blockDim.x) {
        const int64_t parent = tree.parent[i];
        weights[i] = rows.weight_of(parent, tree.token[i]);
        draws[i] = number(i, 0, kAcceptLane, i);
        twins[i] = is_twin(tree.token, tree.parent, i);
        q_at[i] = sampled != nullptr && sampled[first + parent] ? q[(first + parent) * trees.vocab + tree.token[i]] : 0.0f;
    }
    __syncthreads();
    const float* q_rows = q == nullptr ? nullptr : q + first * trees.vocab;
    BlockRow<T, packed> row = {tree, rows, q_rows, weights, draws, q_at, twins, room.take<double>(rows.splits), finder, 0};
    const bool* drawn = sampled == nullptr ? nullptr : sampled + first;
    Lossless<BlockRow<T, packed>> sampler(tree.parent, tree.count, drawn, {take, give}, row);
    int64_t accepted = 1;
    sampler.enter(0);
    walk(
        tree.parent, tree.count, [&](int64_t i) { return sampler.takes(i); },
        [&](int64_t i, int64_t depth) {
            if (threadIdx.x == 0) trees.path[first + depth] = i;
            accepted = depth + 1;
            sampler.enter(i);
        });
    const int64_t bonus = sampler.bonus(number(row.at, 1, kTargetLane, 0));
    if (threadIdx.x == 0) trees.accepted[tree.row] = accepted, trees.bonus[tree.row] = bonus;
}

inline size_t likely_room(int64_t nodes, int64_t splits) {
    return nodes * (2 * sizeof(int64_t) + sizeof(Share) + 2 * sizeof(double) + sizeof(Likely)) + splits * sizeof(double);
}

// The deepest path on which every node is likelier than min(epsilon, delta * exp(-entropy)) after its parent.
template <typename T>
__global__ void __launch_bounds__(kDrawThreads, 1)
    likely_rows(Trees trees, const T* logits, const Share* shares, double epsilon, double delta) {
    __shared__ Finder finder;
    __shared__ int64_t last;
    Room room;
    const BlockTree tree(trees, room);
    const BlockRows<T> rows(trees, tree, logits, shares, room);
    double *chance = room.take<double>(trees.nodes), *floor = room.take<double>(trees.nodes);
    Likely* found = room.take<Likely>(trees.nodes);
    for (int64_t i = threadIdx.x; i < tree.count; i += blockDim.x) {
        if (i > 0) chance[i] = rows.weight_of(tree.parent[i], tree.token[i]) / rows.total[tree.parent[i]].mass;
        floor[i] = fmin(epsilon, delta * exp(-entropy(rows.total[i])));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int64_t* path = trees.path + rows.first;
        const auto p = [&](int64_t i) { return chance[i]; };
        const auto least = [&](int64_t i) { return floor[i]; };
        const int64_t accepted = likely_walk(tree.parent, tree.count, trees.nodes, p, least, found, path);
        trees.accepted[tree.row] = accepted;
        last = path[accepted - 1];
    }
    __syncthreads();
    const int64_t position = trees.position[rows.first + last] + 1;
    const double number = uniform(*trees.seed, trees.key[tree.row], position, kTargetLane, 0);
    const int64_t bonus = rows.dist(last, room.take<double>(rows.splits), finder).draw(number);
    if (threadIdx.x == 0) trees.bonus[tree.row] = bonus;
}

// Samples a token of each row's distribution. One block per row.
template <typename T>
__global__ void __launch_bounds__(kDrawThreads, 1)
    sample_rows(const T* logits, const Share* shares, const float* temperature, const int64_t* key, const int64_t* position,
                const int64_t* seed, int64_t lane, int64_t draw, int64_t vocab, int64_t* token) {
    __shared__ Finder finder;
    const int64_t row = blockIdx.x, splits = splits_of(vocab);
    const float inverse = inverse_of(temperature[row]);
    const Share total = warp_join(shares + row * splits, int(splits), inverse);
    double* sums = dynamic_shared<double>();
    const BlockDistribution<T> dist = {logits + row * vocab, shares + row * splits, vocab, inverse, total, sums, finder};
    const int64_t found = dist.draw(uniform(*seed, key[row], position[row], lane, draw));
    if (threadIdx.x == 0) token[row] = found;
}

}  // namespace drafttrain
