// Speculative sampling over a tree: the accepted children, and the residual that the rejected ones leave for the next token.
//
// Where a node's children were sampled from q, child x is accepted with min(1, p(x) / q(x)), and a rejection leaves
// max(p - q, 0) (Leviathan et al., arXiv 2211.17192, section 2.3). For several, sampled without replacement, x is removed from
// q, and both are renormalised. Where the children are deterministic, x is accepted with p(x), and a rejection removes x from
// p. CPU and CUDA share this source. On CUDA all threads of a block run it alike; only `Row` coordinates them.
#pragma once

#include <cstdint>

#include "distribution.h"

namespace drafttrain {

// Row reads the logits for the walk. Its methods are about the node that was entered last:
//   double enter(node)          the mass of its distribution
//   int64_t next_child(i)       its first child after node i, -1 if there is none
//   Given judge()               for children that were not drawn: the first that is accepted, by `accepts_given`
//   double weight(i)            the part of the mass that child i's token has
//   bool twin(i)                whether an earlier, rejected child has the same token
//   float q(i), double draw(i)  the distribution that i was drawn from, at its token; the number that decides on it
//   Excess excess(residual, take, more)  sums over the vocabulary: of max(residual - take q, 0), and where `more` of q;
//                               appends the step to those of residual
//   void fill(struck)           (re)makes the splits' sums from p; struck: without the tokens of all children
//   int64_t pick(at, residual, struck)  the token at which the cumulative sum passes `at`, -1 where nothing is left: over the
//                               sums of the last `excess` where residual has steps, else over those of `fill`
struct Excess {
    double p, q;
};

struct Given {
    int64_t accepted;  // -1: all children are rejected
    double left;       // the mass that they leave, if so
};

// Whether a child with this part of what its rejected siblings left is accepted by its number.
DRAFTTRAIN_BOTH bool accepts_given(double draw, double left, double weight) { return draw * left < weight; }

template <typename Row>
class Lossless {
  public:
    DRAFTTRAIN_BOTH Lossless(const bool* sampled, Residual residual, Row& row)
        : sampled_(sampled), residual_(residual), row_(row) {}

    DRAFTTRAIN_BOTH void enter(int64_t node) {
        at_ = node, residual_.steps = 0, take_ = 1.0f, q_left_ = -1.0;
        mass_ = left_ = row_.enter(node);
    }

    // The accepted child of the node entered last, or -1. Children are tried in index order. Call it once for each node.
    DRAFTTRAIN_BOTH int64_t accepted_child() {
        if (sampled_ == nullptr || !sampled_[at_]) {
            const Given given = row_.judge();
            left_ = given.left;
            return given.accepted;
        }
        for (int64_t i = row_.next_child(at_); i >= 0; i = row_.next_child(i))
            if (takes(i)) return i;
        return -1;
    }

    // The token after the last accepted node, whose children are all rejected: a sample of the residual that they left. Where
    // rounding left nothing, it is sampled from an earlier residual, which still holds every possible token.
    DRAFTTRAIN_BOTH int64_t bonus(double number) {
        const bool drawn = residual_.steps > 0;
        const Residual none = {nullptr, nullptr};
        int64_t token = drawn ? row_.pick(number * left_, residual_, true) : -1;
        if (token < 0) {
            row_.fill(true);
            token = row_.pick(number * (drawn ? mass_ : left_), none, true);
        }
        if (token < 0) {
            row_.fill(false);
            token = row_.pick(number * mass_, none, false);
        }
        return token < 0 ? 0 : token;
    }

  private:
    DRAFTTRAIN_BOTH bool takes(int64_t i) {
        const bool gone = row_.twin(i);
        const float p = gone ? 0.0f : float(row_.weight(i) / mass_), q = gone ? 0.0f : row_.q(i);
        const float least = 1.17549435e-38f;  // of normal floats: nothing is divided by zero
        if (row_.draw(i) * fmaxf(q * take_, least) < residual_(p, q)) return true;
        const Excess excess = row_.excess(residual_, take_, q_left_ < 0.0 && row_.next_child(i) >= 0);
        if (excess.p > 0.0) residual_.steps++, left_ = excess.p;
        q_left_ = fmax((q_left_ < 0.0 ? excess.q : q_left_) - q, 0.0);
        take_ = q_left_ > 0.0 ? float(1.0 / q_left_) : 0.0f;
        return false;
    }

    const bool* sampled_;
    Residual residual_;
    Row& row_;
    int64_t at_ = 0;
    float take_ = 1.0f;     // one over the mass of q without rejected tokens; at first 1: q is used as given
    double q_left_ = -1.0;  // mass of q without rejected tokens; negative before the first rejection
    double mass_ = 0.0, left_ = 0.0;
};

}  // namespace drafttrain
