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

// This block's tree, in shared memory.
struct BlockTree {
    const int64_t *token, *parent;
    int64_t row, count;  // row: of the batch; count: of nodes before the padding

    // Copies the tree and clears its path. Wait at a barrier before reading them. Padding is copied too, so that no load waits
    // for the count.
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
    enter_kernel();
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

// The logit rows of a tree's nodes, with the shares of their splits: of every row, or lazily of one row at a time.
template <typename T, bool lazy>
struct BlockRows {
    const T* logits;
    Share* shares;                      // of all rows; lazily of one row of each tree, that which was computed last
    int64_t vocab, splits, row, first;  // row: of the batch; first: row of the tree's root
    float inverse;
    Share* total;  // [N], shared

    __device__ BlockRows(const Trees& trees, const BlockTree& tree, const T* logits, Share* shares, Room& room)
        : logits(logits),
          shares(shares),
          vocab(trees.vocab),
          splits(splits_of(trees.vocab)),
          row(tree.row),
          first(tree.row * trees.nodes),
          inverse(inverse_of(trees.temperature[tree.row])),
          total(room.take<Share>(trees.nodes)) {}

    __device__ Share* shares_of(int64_t node) const { return shares + (lazy ? row : first + node) * splits; }

    // Computes one node's shares and its total, for all threads of the block.
    __device__ void compute(int64_t node) const {
        __syncthreads();  // the shares of the row before were read
        for (int64_t split = threadIdx.x / kWarp; split < splits; split += blockDim.x / kWarp) {
            const Share share = warp_share(logits + (first + node) * vocab, split, vocab, inverse);
            if (threadIdx.x % kWarp == 0) shares_of(node)[split] = share;
        }
        __syncthreads();
        if (threadIdx.x < kWarp) {
            Share sum[1];
            warp_join<1, false>([&](int) { return shares_of(node); }, int(splits), inverse, sum);
            if (threadIdx.x == 0) total[node] = sum[0];
        }
        __syncthreads();
    }

    // Computes the totals of `count` nodes. Wait at a barrier before reading them.
    template <bool dots>
    __device__ void join(int64_t count) const {
        constexpr int kRows = 4;  // of a warp at a time
        const int64_t warps = blockDim.x / kWarp;
        for (int64_t n = threadIdx.x / kWarp; n < count; n += kRows * warps) {
            const auto of = [&](int r) { return n + r * warps < count ? shares_of(n + r * warps) : nullptr; };
            Share all[kRows];
            warp_join<kRows, dots>(of, int(splits), inverse, all);
            if (threadIdx.x % kWarp != 0) continue;
#pragma unroll
            for (int r = 0; r < kRows; r++)
                if (n + r * warps < count) total[n + r * warps] = all[r];
        }
    }

    struct Logit {
        T x;
        float top;  // of its split
    };
    __device__ Logit read(int64_t node, int64_t token) const {
        return {logits[(first + node) * vocab + token], shares_of(node)[token / kSplit].top};
    }

    // A token's share of total[node].mass.
    __device__ double weight_of(int64_t node, Logit token) const {
        return double(weight(to_float(token.x), token.top, inverse)) * double(weight(token.top, total[node].top, inverse));
    }

    __device__ BlockDistribution<T> dist(int64_t node, double* sums, Finder& finder) const {
        return {logits + (first + node) * vocab, shares_of(node), vocab, inverse, total[node], sums, finder};
    }
};

// What the walk knows of each node, in shared memory: of the numbers drawn for it, and of its token after its parent.
struct Judged {
    double *draw, *bonus;   // the numbers that decide on it, and on the token after it
    double *weight, *left;  // its token's part of the parent's mass, 0 for a twin; what its own children leave
    float* q;               // the parent's q at its token
    bool* twin;
    NextNodes next;  // accepted by `judge`

    __device__ Judged(int64_t nodes, Room& room)
        : draw(room.take<double>(nodes)),
          bonus(room.take<double>(nodes)),
          weight(room.take<double>(nodes)),
          left(room.take<double>(nodes)),
          q(room.take<float>(nodes)),
          twin(room.take<bool>(nodes)),
          next(nodes, room) {}

    static size_t room(int64_t nodes) { return nodes * (4 * sizeof(double) + sizeof(float) + sizeof(bool) + sizeof(int)) + 24; }

    // Marks the twins; a warp for each node.
    __device__ void find_twins(const BlockTree& tree) const {
        const int lane = threadIdx.x % kWarp;
        for (int64_t i = 1 + threadIdx.x / kWarp; i < tree.count; i += blockDim.x / kWarp) {
            bool found = false;
            for (int64_t start = 0; start < i; start += kWarp) {
                const int64_t j = start + lane;
                found |= j > 0 && j < i && tree.parent[j] == tree.parent[i] && tree.token[j] == tree.token[i];
            }
            found = __any_sync(kAllLanes, found);
            if (lane == 0) twin[i] = found;
        }
    }

    // For the children of a node, or of all nodes (-1), as if none were drawn: which is accepted first, and what is left if
    // none is. A warp sums the siblings before each of its nodes, four nodes at a time. left: the nodes' masses before.
    __device__ void judge(const BlockTree& tree, const Share* total, int64_t above) const {
        constexpr int kNodes = 4;
        const int lane = threadIdx.x % kWarp;
        const int64_t warps = blockDim.x / kWarp;
        for (int64_t n = 1 + threadIdx.x / kWarp; n < tree.count; n += kNodes * warps) {
            double before[kNodes] = {};
            bool more[kNodes] = {};  // siblings after it
            for (int64_t start = 0; start < tree.count; start += kWarp) {
                const int64_t j = start + lane;
                if (j == 0 || j >= tree.count) continue;
#pragma unroll
                for (int r = 0; r < kNodes; r++) {
                    const int64_t i = n + r * warps;
                    if (i >= tree.count || tree.parent[j] != tree.parent[i]) continue;
                    if (j < i) before[r] += weight[j];
                    more[r] |= j > i;
                }
            }
#pragma unroll
            for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
                for (int r = 0; r < kNodes; r++) before[r] += __shfl_xor_sync(kAllLanes, before[r], offset);
#pragma unroll
            for (int r = 0; r < kNodes; r++) {
                const int64_t i = n + r * warps;
                const bool last = !__any_sync(kAllLanes, more[r]);
                if (lane != 0 || i >= tree.count || (above >= 0 && tree.parent[i] != above)) continue;
                const int64_t parent = tree.parent[i];
                const double here = fmax(total[parent].mass - before[r], 0.0);
                if (accepts_given(draw[i], here, weight[i])) next.accept(parent, i);
                if (last) left[parent] = fmax(here - weight[i], 0.0);
            }
        }
    }
};

// The `Row` of Lossless, computed by a block. All threads make the same calls.
template <typename T, bool packed, bool lazy>
struct BlockRow {
    const BlockTree& tree;
    const BlockRows<T, lazy>& rows;
    const Judged& judged;
    const float* q_rows;  // [N, V] of this tree, or null
    double* sums;
    Finder& finder;
    int64_t at;

    __device__ double enter(int64_t node) {
        at = node;
        if constexpr (lazy) look(node);
        return rows.total[at].mass;
    }

    // Computes what `judge` needs of a node's row, and of its children.
    __device__ void look(int64_t node) const {
        rows.compute(node);
        for (int64_t i = threadIdx.x; i < tree.count; i += blockDim.x) {
            if (i == node) judged.left[i] = rows.total[i].mass;
            if (i == 0 || tree.parent[i] != node) continue;
            judged.weight[i] = judged.twin[i] ? 0.0 : rows.weight_of(node, rows.read(node, tree.token[i]));
        }
        __syncthreads();
        judged.judge(tree, rows.total, node);
        __syncthreads();
    }

    __device__ Given judge() const { return {judged.next.after(at), judged.left[at]}; }
    __device__ double weight(int64_t i) const { return judged.weight[i]; }
    __device__ bool twin(int64_t i) const { return judged.twin[i]; }
    __device__ float q(int64_t i) const { return judged.q[i]; }
    __device__ double draw(int64_t i) const { return judged.draw[i]; }
    __device__ BlockDistribution<T> dist() const { return rows.dist(at, sums, finder); }

    __device__ int64_t next_child(int64_t node) const {
        for (int64_t start = (node + 1) / kWarp * kWarp; start < tree.count; start += kWarp) {
            const int64_t i = start + threadIdx.x % kWarp;
            const unsigned found = __ballot_sync(kAllLanes, i > node && i < tree.count && tree.parent[i] == at);
            if (found != 0) return start + __ffs(int(found)) - 1;
        }
        return -1;
    }

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
                ShortSum whole;
                for (int j = 0; j < kWide; j++) {
                    const float p = residual(p_of(to_float(logit.at[j]), unit), drawn.at[j]);
                    piece += fmaxf(p - drawn.at[j] * take, 0.0f);
                    if (more) whole.add(drawn.at[j]);
                }
                here += piece;
                if (more) all.q += whole.value();
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

    // A warp for each split.
    __device__ void fill(bool struck) {
        const BlockDistribution<T> mine = dist();
        const int lane = threadIdx.x % kWarp;
        __syncthreads();  // an earlier use of the sums is over
        for (int64_t split = threadIdx.x / kWarp; split < rows.splits; split += blockDim.x / kWarp) {
            const double whole = mine.shares[split].mass * mine.factor(split);
            double gone = 0.0;
            for (int64_t start = at / kWarp * kWarp; struck && start < tree.count; start += kWarp) {
                const int64_t i = start + lane;
                const bool here = i < tree.count && tree.parent[i] == at && tree.token[i] / kSplit == split;
                if (!__any_sync(kAllLanes, here)) continue;
                gone += warp_reduce(here ? judged.weight[i] : 0.0, [](double a, double b) { return a + b; });
            }
            if (lane == 0) sums[split] = struck ? fmax(whole - gone, 0.0) : whole;
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
            const auto load = [&](int64_t v) { return mine.x[v]; };
            const auto of = [&](T logit, float top) { return drafttrain::weight(to_float(logit), top, mine.inverse); };
            return mine.find(number, load, of, [&](int64_t s) { return 1.0 / mine.factor(s); }, strike);
        }
        struct Pair {
            T logit;
            float q;
        };
        const double given = residual.give[residual.steps - 1];
        const auto load = [&](int64_t v) { return Pair{mine.x[v], q[v]}; };
        const auto of = [&](Pair at, float) { return residual(p_of(to_float(at.logit), unit), at.q); };
        return mine.find(number, load, of, [&](int64_t) { return given; }, strike);
    }
};

inline size_t lossless_room(int64_t nodes, int64_t splits) {
    return nodes * (2 * sizeof(int64_t) + sizeof(Share) + 2 * sizeof(float)) + Judged::room(nodes) + splits * sizeof(double) +
           16;
}

// Speculative sampling; q [B, N, V] and sampled [B, N] may be null. lazy: `shares` has room for one row of each tree, and only
// the rows that the walk enters are computed, with the same bits.
template <typename T, bool packed, bool lazy>
__global__ void __launch_bounds__(kDrawThreads, 1)
    lossless_rows(Trees trees, const T* logits, Share* shares, const float* q, const bool* sampled) {
    enter_kernel();
    __shared__ Finder finder;
    Room room;
    const BlockTree tree(trees, room);
    const BlockRows<T, lazy> rows(trees, tree, logits, shares, room);
    const Judged judged(trees.nodes, room);
    float *take = room.take<float>(trees.nodes), *give = room.take<float>(trees.nodes);
    const int64_t first = rows.first, mine = threadIdx.x;
    const bool* drawn = sampled == nullptr ? nullptr : sampled + first;
    const auto number = [&](int64_t i, int64_t ahead, Lane lane, int64_t draw) {
        return uniform(*trees.seed, trees.key[tree.row], trees.position[first + i] + ahead, lane, draw);
    };
    __syncthreads();
    typename BlockRows<T, lazy>::Logit logit = {};  // of this thread's first node: on its way while the rows are joined
    if (!lazy && mine > 0 && mine < tree.count) logit = rows.read(tree.parent[mine], tree.token[mine]);
    for (int64_t i = mine; i < tree.count; i += blockDim.x) {
        const int64_t parent = tree.parent[i];
        judged.draw[i] = number(i, 0, kAcceptLane, i);
        judged.bonus[i] = number(i, 1, kTargetLane, 0);
        judged.q[i] = i > 0 && drawn != nullptr && drawn[parent] ? q[(first + parent) * trees.vocab + tree.token[i]] : 0.0f;
    }
    judged.find_twins(tree);
    if (!lazy) {
        rows.template join<false>(tree.count);
        __syncthreads();
        for (int64_t i = mine; i < tree.count; i += blockDim.x) {
            judged.left[i] = rows.total[i].mass;
            if (i == 0) continue;
            if (i != mine) logit = rows.read(tree.parent[i], tree.token[i]);
            judged.weight[i] = judged.twin[i] ? 0.0 : rows.weight_of(tree.parent[i], logit);
        }
        __syncthreads();
        judged.judge(tree, rows.total, -1);
        __syncthreads();
    }
    const float* q_rows = q == nullptr ? nullptr : q + first * trees.vocab;
    BlockRow<T, packed, lazy> row = {tree, rows, judged, q_rows, room.take<double>(rows.splits), finder, 0};
    Lossless<BlockRow<T, packed, lazy>> sampler(drawn, {take, give}, row);
    int64_t accepted = 1;
    sampler.enter(0);
    for (int64_t i; (i = sampler.accepted_child()) >= 0; sampler.enter(i), accepted++)
        if (threadIdx.x == 0) trees.path[first + accepted] = i;
    const int64_t bonus = sampler.bonus(judged.bonus[row.at]);
    if (threadIdx.x == 0) trees.accepted[tree.row] = accepted, trees.bonus[tree.row] = bonus;
}

inline size_t likely_room(int64_t nodes, int64_t splits) {
    return nodes * (2 * sizeof(int64_t) + sizeof(Share) + 2 * sizeof(double) + sizeof(Likely)) + splits * sizeof(double);
}

// The deepest path on which every node is likelier than min(epsilon, delta * exp(-entropy)) after its parent.
template <typename T>
__global__ void __launch_bounds__(kDrawThreads, 1)
    likely_rows(Trees trees, const T* logits, Share* shares, double epsilon, double delta) {
    enter_kernel();
    __shared__ Finder finder;
    __shared__ int64_t last;
    Room room;
    const BlockTree tree(trees, room);
    const BlockRows<T, false> rows(trees, tree, logits, shares, room);
    double *chance = room.take<double>(trees.nodes), *floor = room.take<double>(trees.nodes);
    Likely* found = room.take<Likely>(trees.nodes);
    __syncthreads();
    rows.template join<true>(tree.count);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < tree.count; i += blockDim.x) {
        const int64_t parent = tree.parent[i];
        if (i > 0) chance[i] = rows.weight_of(parent, rows.read(parent, tree.token[i])) / rows.total[parent].mass;
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
    enter_kernel();
    __shared__ Finder finder;
    const int64_t row = blockIdx.x, splits = splits_of(vocab);
    const float inverse = inverse_of(temperature[row]);
    Share total[1];
    warp_join<1, false>([&](int) { return shares + row * splits; }, int(splits), inverse, total);
    double* sums = dynamic_shared<double>();
    const BlockDistribution<T> dist = {logits + row * vocab, shares + row * splits, vocab, inverse, total[0], sums, finder};
    const int64_t found = dist.draw(uniform(*seed, key[row], position[row], lane, draw));
    if (threadIdx.x == 0) token[row] = found;
}

}  // namespace drafttrain
