// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/lockstep.h"

namespace tandem::reference {

/// Forward and backward pass of a dense GPT on ranks in lockstep. The order of a pass is written here once; what distinguishes
/// the techniques is what a derived class says of embedding, exchanges, attention and head:
///
///   h = dropout(embedding())                                                  own tokens of each rank
///   layer:  a = attention(column(c_attn, enter(ln_1(h))))
///           h = h + dropout(leave(row(attn.c_proj, a)) + bias)
///           u = gelu(column(c_fc, enter(ln_2(h))))
///           h = h + dropout(leave(row(mlp.c_proj, u)) + bias)
///   loss = head(ln_f(h))
///
/// enter() makes own tokens into the tokens that the matrices see, leave() makes what the matrices gave into own tokens. The
/// backward pass of either is the other one.
template <class Real>
class LockstepGpt {
 public:
  virtual ~LockstepGpt() = default;
  LockstepGpt(const LockstepGpt&) = delete;
  LockstepGpt& operator=(const LockstepGpt&) = delete;

  /// One micro-batch; adds to the gradients of ranks(). Returns what each rank knows of the loss.
  [[nodiscard]] std::vector<double> forward_and_backward();
  [[nodiscard]] std::vector<LockstepRank<Real>>& ranks() { return ranks_; }

 protected:
  enum class Part { layers, head };

  /// Borrows `model` and `pass` for its life. own_places[r]: token_places() of the tokens on which rank r runs norms, dropout and
  /// residuals.
  LockstepGpt(const GptConfig& model, const Pass<Real>& pass, std::vector<LockstepRank<Real>> ranks,
              std::vector<std::vector<std::int64_t>> own_places);

  [[nodiscard]] virtual PerRank<Real> embedding_forward() = 0;  ///< [own tokens, hidden], before dropout
  virtual void embedding_backward(const PerRank<Real>& dh) = 0;
  [[nodiscard]] virtual PerRank<Real> enter(const PerRank<Real>& own, Part part) = 0;
  [[nodiscard]] virtual PerRank<Real> leave(const PerRank<Real>& partial, Part part) = 0;
  /// qkv [tokens, 3 x columns of r] to [tokens, columns of r]; a rank keeps what its backward pass needs.
  [[nodiscard]] virtual PerRank<Real> attention_forward(int layer, const PerRank<Real>& qkv) = 0;
  [[nodiscard]] virtual PerRank<Real> attention_backward(int layer, const PerRank<Real>& qkv, const PerRank<Real>& dout) = 0;
  /// `x` is ln_f(h) of own tokens. Returns what each rank knows of the loss, and dx.
  [[nodiscard]] virtual std::vector<double> head_forward_and_backward(const PerRank<Real>& x, PerRank<Real>& dx) = 0;

  [[nodiscard]] Dropout dropout(double probability, DropoutSite site, int layer) const;

  const GptConfig& model_;
  const Pass<Real>& pass_;
  std::vector<LockstepRank<Real>> ranks_;

 private:
  struct Block {
    PerRank<Real> input, middle;  // [own tokens, hidden]
    NormOfRanks<Real> norm_1, norm_2;
    PerRank<Real> entered_1, entered_2;  // [tokens, hidden]; kept, so that the backward pass does not gather again
    PerRank<Real> qkv, attention;        // [tokens, (3 x) columns of r]
    PerRank<Real> mlp_in, mlp_out;       // [tokens, columns of r]
  };

  void block_forward(int layer, PerRank<Real>& h);
  void block_backward(int layer, PerRank<Real>& dh);
  [[nodiscard]] PerRank<Real> masked(const Dropout& dropout, const PerRank<Real>& x) const;

  std::vector<std::vector<std::int64_t>> own_places_;
  std::vector<Block> blocks_;
};

extern template class LockstepGpt<float>;
extern template class LockstepGpt<double>;

}  // namespace tandem::reference
