// Every operator's arguments, once for all devices. Shapes: B rows, N tree nodes, V vocabulary, M rows of logits, k choices.
#pragma once

#include <torch/csrc/stable/library.h>

namespace drafttrain {

inline void define(torch::stable::detail::StableLibrary& m) {
    m.def("rms_norm(Tensor x, Tensor? delta, Tensor weight, float eps, Tensor(a!) summed, Tensor(b!) out) -> ()");
    m.def("gated(Tensor gate_up, Tensor(a!) out) -> ()");
    // for each row: loss [M], hit [M], mass [M] and the slope [M, V]; float32 on a CPU. name: 0 kl, 1 ce, 2 tvd
    m.def(
        "divergence(Tensor logits, Tensor target, Tensor label, int name, Tensor(a!) loss, Tensor(b!) hit, Tensor(c!) mass, "
        "Tensor(d!)? slope) -> ()");
    // q/k norm, rotary embedding, keys and values into the cache, queries to `query`. earlier: nodes of the tree that are in
    // the cache already. ancestor: bool [B, N, earlier + N], or int64 bits [B, N, words]
    m.def(
        "append(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, Tensor position, "
        "Tensor table, Tensor length, int earlier, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) query) -> ()");
    m.def(
        "attend(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, float scale, int window, "
        "Tensor position, Tensor table, Tensor length, Tensor? ancestor, int earlier, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor(c!) out) -> ()");
    // on CPUs: x W^T + b in bfloat16, W packed by `ops.linear.pack`
    m.def("product(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()");
    m.def("has_product() -> bool");
    m.def("keep_weights(Tensor[] weights) -> int");
    m.def("drop_weights(int model) -> ()");
    m.def("top_of_heads(Tensor state, Tensor[] weights, Tensor like, int heads, int ranks) -> Tensor");
    // read: input of the first block's projections; without it, the norm of x
    m.def(
        "run_blocks(int model, Tensor(a!) x, Tensor? read, Tensor cos, Tensor sin, float eps, float head_eps, float scale, "
        "Tensor windows, Tensor position, Tensor table, Tensor length, Tensor? ancestor, int earlier, Tensor(b!) store, "
        "Tensor taps, Tensor(c!) tapped) -> Tensor");
    m.def("kv_keep(Tensor(a!) store, Tensor table, Tensor length, Tensor path, Tensor count, int page) -> ()");
    // length + count, also into each slot's entry of `all`
    m.def("advance(Tensor length, Tensor count, Tensor slot, Tensor(a!) all, Tensor(b!) out) -> ()");
    // an accepted path's tokens and those after them [B, A], entries kept [B], the record for the host [B, A + 3], the states
    // of the path's nodes [B, A, H], and the state of each slot's text
    m.def(
        "commit(Tensor token, Tensor parent, Tensor real, Tensor path, Tensor count, Tensor bonus, Tensor slot, Tensor stop, "
        "Tensor limit, bool skips, bool counts, Tensor(a!) root, Tensor(b!) made, Tensor(c!) done, Tensor(d!) "
        "taken, "
        "Tensor(e!) next, Tensor(f!) kept, Tensor(g!) record) -> ()");
    // for each of several values [B, N, H]: those at the first nodes of each path, [B, A, H]
    m.def("along(Tensor[] values, Tensor path, Tensor(a!)[] out) -> ()");
    // the state and the token of column count - 1 of each row, into its slot's entries; nothing where count is 0
    m.def("keep_last(Tensor state, Tensor next, Tensor count, Tensor slot, Tensor(a!) kept, Tensor(b!) root) -> ()");
    // the first `count` columns of each row's values [B, A, ...], into its slot's entries of `kept` [S, W, ...] from `pending`
    // on, which grows
    m.def("append_pending(Tensor[] values, Tensor count, Tensor slot, Tensor(a!)[] kept, Tensor(b!) pending) -> ()");
    // the first columns of each slot's entries, and how many of them count, which becomes 0
    m.def("take_pending(Tensor[] kept, Tensor slot, Tensor(a!) pending, Tensor(b!)[] out, Tensor(c!) count) -> ()");
    // the first token, then those after the first `count` tokens, from place `length` of a slot's text on; length grows
    m.def("append_text(Tensor token, Tensor next, Tensor count, Tensor slot, Tensor(a!) text, Tensor(b!) length) -> ()");
    // on CPUs: a slot's last token, and the tokens after the latest of the longest earlier occurrences of its text's end, of
    // `least` tokens at least and `most` (0: any number) at most: token [B, K + 1] and how many there are
    m.def("look_up(Tensor text, Tensor length, Tensor slot, int most, int least, Tensor(a!) token, Tensor(b!) count) -> ()");
    // on CPUs: one tree with the token paths of both; ancestor: bool [B, X, X], itself included
    m.def(
        "join_trees(Tensor token, Tensor parent, Tensor count, Tensor other_token, Tensor other_parent, Tensor other_count, "
        "Tensor(a!) joined_token, Tensor(b!) joined_parent, Tensor(c!) joined_count, Tensor(d!) ancestor) -> ()");
    // the candidates below a tree's nodes, and the next generation of nodes: `ops.build_tree.grow_tree`
    m.def(
        "grow_tree(Tensor score, Tensor gain, Tensor token, Tensor state, Tensor bits, Tensor own, Tensor(a!) total, "
        "Tensor(b!) choice, Tensor(c!) best, Tensor(d!) best_score, Tensor(e!) best_token, Tensor(f!) best_state, "
        "Tensor(g!) best_bits) -> ()");
    // acceptance: path [B, N] (zeros after the accepted nodes), accepted [B], bonus [B]
    m.def(
        "greedy_accept(Tensor logits, Tensor token, Tensor parent, Tensor count, Tensor(a!) path, Tensor(b!) accepted, "
        "Tensor(c!) bonus) -> ()");
    m.def(
        "choice_accept(Tensor choice, Tensor token, Tensor parent, Tensor count, Tensor(a!) path, Tensor(b!) accepted, "
        "Tensor(c!) bonus) -> ()");
    // lazy: only the rows that the walk enters are read, on a GPU by one block for each tree; a CPU always does that
    m.def(
        "lossless_accept(Tensor logits, Tensor? q, Tensor? sampled, Tensor token, Tensor parent, Tensor count, "
        "Tensor position, Tensor temperature, Tensor key, Tensor seed, bool lazy, Tensor(a!) path, Tensor(b!) accepted, "
        "Tensor(c!) bonus) -> ()");
    m.def(
        "likely_accept(Tensor logits, Tensor token, Tensor parent, Tensor count, Tensor position, Tensor temperature, "
        "Tensor key, Tensor seed, float epsilon, float delta, Tensor(a!) path, Tensor(b!) accepted, Tensor(c!) bonus) -> ()");
    // samples one token from each row's distribution, with the noise of (seed, key, position, lane, draw)
    m.def(
        "sample(Tensor logits, Tensor temperature, Tensor key, Tensor position, Tensor seed, int lane, int draw, "
        "Tensor(a!) token) -> ()");
    // on GPUs: the logits, with minus infinity for tokens that top-k (0: off), top-p (1: off) or min-p drop. reach: how many
    // temperatures below the greatest logit min-p keeps
    m.def("shaped(Tensor logits, Tensor temperature, int k, float p, float reach, Tensor(a!) out) -> ()");
    // the k greatest of each row, greatest first, the lower index first among equals; ids renames them
    m.def("top(Tensor logits, Tensor? ids, Tensor(a!) value, Tensor(b!) index) -> ()");
    // as top, of log-probabilities: the values less the logarithm of the row's sum of exponentials, at most 0
    m.def("top_log(Tensor logits, Tensor? ids, Tensor(a!) value, Tensor(b!) index) -> ()");
    // for a tree of at most 256 nodes: depth, and ancestors (itself included) as bits [B, N, words]
    m.def("tree_links(Tensor parent, Tensor(a!) depth, Tensor(b!) bits) -> ()");
    // the candidates with the highest scores, in their order: indices, new parents, depth, ancestor bits, links
    m.def(
        "build_tree(Tensor parent, Tensor score, Tensor(a!) kept, Tensor(b!) new_parent, Tensor(c!) depth, "
        "Tensor(d!) bits, Tensor(e!) child, Tensor(f!) sibling) -> ()");
}

}  // namespace drafttrain
