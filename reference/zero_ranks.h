// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "reference/lockstep.h"
#include "reference/model_ends.h"
#include "reference/require.h"
#include "reference/zero.h"

/// What the ranks of reference/zero.h hold and exchange during a step. Included by zero_step.cpp alone.
namespace tandem::reference {

template <class Real>
[[nodiscard]] std::vector<Real> flat(const ZeroUnit& unit, const NamedTensors<Real>& tensors) {
  std::vector<Real> values;
  for (const ParameterSpec& parameter : unit.parameters) {
    const auto more = tensor(tensors, parameter.name);
    values.insert(values.end(), more.begin(), more.end());
  }
  return values;
}

template <class Real>
void unpack(const ZeroUnit& unit, const std::vector<Real>& values, NamedTensors<Real>& tensors) {
  auto next = values.begin();
  for (const ParameterSpec& parameter : unit.parameters) {
    tensors[parameter.name].assign(next, next + parameter.num_elements());
    next += parameter.num_elements();
  }
}

template <class Real>
[[nodiscard]] std::vector<Real> part_of(const std::vector<Real>& whole, Interval part) {
  return {whole.begin() + part.begin, whole.begin() + part.end};
}

/// The units of all owners' parts of `member`, put together.
template <class Real>
[[nodiscard]] NamedTensors<Real> joined(const ZeroState<Real>& state, std::vector<std::vector<Real>> ZeroRank<Real>::*member) {
  NamedTensors<Real> tensors;
  const auto ranks = static_cast<int>(state.ranks.size());
  for (std::size_t u = 0; u < state.units.size(); ++u) {
    const ZeroUnit& unit = state.units[u];
    std::vector<Real> whole;
    for (int r = 0; r < ranks; ++r) {
      const std::vector<Real>& held = (state.ranks[static_cast<std::size_t>(r)].*member)[u];
      const Interval part = balanced_part(unit.elements, ranks, r);
      const std::vector<Real> own = std::ssize(held) == unit.elements ? part_of(held, part) : held;
      require_size(std::span(own), part.size(), "a rank's part");
      whole.insert(whole.end(), own.begin(), own.end());
    }
    unpack(unit, whole, tensors);
  }
  return tensors;
}

/// The ranks during one step, their collectives as loops, and the account of bytes.
template <class Real>
class ZeroRanks {
 public:
  /// What a rank holds during a pass, beside its own parts.
  struct Now {
    Batch batch;                    ///< of this micro-batch
    NamedTensors<Real> parameters;  ///< whole units that are gathered
    NamedTensors<Real> gradients;   ///< whole units that something is being added to
    std::vector<Real> stream;
    std::vector<BlockActivations<Real>> blocks;
    HeadActivations<Real> head;
  };

  ZeroRanks(int stage, ZeroState<Real>& state)
      : stage_(stage), state_(state), now_(state.ranks.size()), peak_(state.ranks.size()) {
    for (int r = 0; r < ranks(); ++r) see_peak(r);
  }

  [[nodiscard]] int ranks() const { return static_cast<int>(state_.ranks.size()); }
  [[nodiscard]] ZeroRank<Real>& rank(int r) const { return state_.ranks[static_cast<std::size_t>(r)]; }
  [[nodiscard]] Now& now(int r) { return now_[static_cast<std::size_t>(r)]; }
  [[nodiscard]] const ZeroUnit& unit(std::size_t u) const { return state_.units[u]; }
  [[nodiscard]] Interval part(std::size_t u, int r) const { return balanced_part(unit(u).elements, ranks(), r); }

  [[nodiscard]] std::size_t units() const { return state_.units.size(); }
  [[nodiscard]] std::int64_t gradient_wire_bytes() const noexcept { return gradient_wire_bytes_; }
  [[nodiscard]] std::int64_t parameter_wire_bytes() const noexcept { return parameter_wire_bytes_; }
  [[nodiscard]] const std::vector<BytesByCategory>& peak_bytes() const noexcept { return peak_; }

  /// All-gather: every rank gets all parts. Up to stage 2 it has them.
  void gather(const std::vector<std::size_t>& units) {
    for (const std::size_t u : units) {
      std::vector<Real> whole;
      for (int r = 0; r < ranks() && stage_ == 3; ++r) {
        whole.insert(whole.end(), rank(r).parameters[u].begin(), rank(r).parameters[u].end());
      }
      if (stage_ == 3) parameter_wire_bytes_ += moved_bytes(u);
      for (int r = 0; r < ranks(); ++r) {
        unpack(unit(u), stage_ == 3 ? whole : rank(r).parameters[u], now(r).parameters);
        see_peak(r);
      }
    }
  }
  void release(const std::vector<std::size_t>& units) {
    for (int r = 0; r < ranks(); ++r) {
      for (const std::size_t u : units) {
        for (const ParameterSpec& parameter : unit(u).parameters) now(r).parameters.erase(parameter.name);
      }
    }
  }

  /// From here on something may be added to these gradients; those that exist stay.
  void open(const std::vector<std::size_t>& units) {
    for (int r = 0; r < ranks(); ++r) {
      for (const std::size_t u : units) {
        for (const ParameterSpec& parameter : unit(u).parameters) {
          now(r).gradients.try_emplace(parameter.name, static_cast<std::size_t>(parameter.num_elements()), Real{0});
        }
      }
      see_peak(r);
    }
  }
  /// Reduce-scatter: each owner adds what all ranks have for its part.
  void reduce(const std::vector<std::size_t>& units) {
    for (const std::size_t u : units) {
      const std::vector<Real> sum = sum_over_ranks(u, [&](int r) { return flat(unit(u), now(r).gradients); });
      for (int r = 0; r < ranks(); ++r) {
        const std::vector<Real> own = part_of(sum, part(u, r));
        for (std::size_t i = 0; i < own.size(); ++i) rank(r).gradients[u][i] += own[i];
        for (const ParameterSpec& parameter : unit(u).parameters) now(r).gradients.erase(parameter.name);
      }
      gradient_wire_bytes_ += moved_bytes(u);
    }
  }

  /// Stage 1's reduce-scatter, of gradients that the ranks keep whole: a rank's own part becomes the sum.
  void reduce_kept(std::size_t u) {
    const std::vector<Real> sum = sum_over_ranks(u, [&](int r) { return rank(r).gradients[u]; });
    for (int r = 0; r < ranks(); ++r) {
      for (std::int64_t i = part(u, r).begin; i < part(u, r).end; ++i) {
        rank(r).gradients[u][static_cast<std::size_t>(i)] = sum[static_cast<std::size_t>(i)];
      }
    }
    gradient_wire_bytes_ += moved_bytes(u);
  }

  /// The reduced gradient of the rank's own part of a unit.
  [[nodiscard]] std::vector<Real> own_gradient(std::size_t u, int r) const {
    const std::vector<Real>& held = rank(r).gradients[u];
    return stage_ == 1 ? part_of(held, part(u, r)) : held;
  }

  /// Owners have these parts of a unit's parameters now; up to stage 2 everybody gets them.
  void store(std::size_t u, const PerRank<Real>& parts) {
    for (int r = 0; r < ranks(); ++r) {
      rank(r).parameters[u] = stage_ == 3 ? parts[static_cast<std::size_t>(r)] : joined_over_ranks(parts);
    }
    if (stage_ != 3) parameter_wire_bytes_ += moved_bytes(u);
  }

  /// Between steps.
  [[nodiscard]] BytesByCategory bytes(int r) const {
    BytesByCategory held{};
    held[static_cast<std::size_t>(MemoryCategory::parameters)] = bytes_of(rank(r).parameters);
    held[static_cast<std::size_t>(MemoryCategory::gradients)] = bytes_of(rank(r).gradients);
    held[static_cast<std::size_t>(MemoryCategory::optimizer)] = bytes_of(rank(r).m) + bytes_of(rank(r).v);
    return held;
  }

 private:
  template <class OfRank>
  [[nodiscard]] std::vector<Real> sum_over_ranks(std::size_t u, const OfRank& of_rank) const {
    std::vector<Real> sum(static_cast<std::size_t>(unit(u).elements), Real{0});
    for (int r = 0; r < ranks(); ++r) {
      const std::vector<Real> values = of_rank(r);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    }
    return sum;
  }

  /// Of a reduce-scatter or an all-gather, all ranks together: everybody's part once to or from every other rank.
  [[nodiscard]] std::int64_t moved_bytes(std::size_t u) const {
    return unit(u).elements * (ranks() - 1) * static_cast<std::int64_t>(sizeof(Real));
  }

  static std::int64_t bytes_of(const std::vector<std::vector<Real>>& units) {
    std::int64_t elements = 0;
    for (const std::vector<Real>& values : units) elements += std::ssize(values);
    return elements * static_cast<std::int64_t>(sizeof(Real));
  }
  static std::int64_t bytes_of(const NamedTensors<Real>& tensors) {
    std::int64_t elements = 0;
    for (const auto& [name, values] : tensors) elements += std::ssize(values);
    return elements * static_cast<std::int64_t>(sizeof(Real));
  }
  /// In stages 1 and 2 what is read are the whole parameters themselves, in stage 3 copies put together for the pass.
  void see_peak(int r) {
    BytesByCategory held = bytes(r);
    if (stage_ == 3) held[static_cast<std::size_t>(MemoryCategory::parameters)] += bytes_of(now(r).parameters);
    held[static_cast<std::size_t>(MemoryCategory::gradients)] += bytes_of(now(r).gradients);
    BytesByCategory& peak = peak_[static_cast<std::size_t>(r)];
    for (std::size_t i = 0; i < peak.size(); ++i) peak[i] = std::max(peak[i], held[i]);
  }

  int stage_;
  ZeroState<Real>& state_;
  std::vector<Now> now_;               // [ranks]
  std::vector<BytesByCategory> peak_;  // [ranks]
  std::int64_t gradient_wire_bytes_ = 0, parameter_wire_bytes_ = 0;
};

}  // namespace tandem::reference
