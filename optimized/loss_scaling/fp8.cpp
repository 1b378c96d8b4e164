// SPDX-License-Identifier: Apache-2.0
#include "optimized/loss_scaling/fp8.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t kLinears = 4;
constexpr std::size_t kOperands = 3;
constexpr std::size_t kSlotsOfLayer = kLinears * kOperands;

}  // namespace

Fp8Format format_of(Fp8Operand operand) noexcept { return operand == Fp8Operand::dy ? Fp8Format::e5m2 : Fp8Format::e4m3; }

double fp8_scale(Fp8Format format, double amax, int margin) {
  TANDEM_CHECK(amax >= 0 && std::isfinite(amax), fmt::format("largest magnitude {}", amax));
  if (amax == 0) return 1.0;
  // The exponent of the quotient is its floor(log2()), exactly.
  return std::ldexp(1.0, std::ilogb(static_cast<double>(largest(format)) / amax) - margin);
}

Fp8Scaling::Fp8Scaling(const Fp8Config& config, int layers, const PitfallSet& pitfalls)
    : config_(config), layers_(layers), pitfalls_(pitfalls) {
  TANDEM_CHECK(config.history >= 1 && layers >= 0, fmt::format("history {}, layers {}", config.history, layers));
  current_.resize(static_cast<std::size_t>(layers) * kSlotsOfLayer);
  histories_.resize(current_.size() * static_cast<std::size_t>(config.history));
}

std::size_t Fp8Scaling::index(const Fp8Slot& slot) const {
  TANDEM_CHECK(slot.layer >= 0 && slot.layer < layers_, fmt::format("layer {} of {}", slot.layer, layers_));
  return (static_cast<std::size_t>(slot.layer) * kLinears + static_cast<std::size_t>(slot.linear)) * kOperands +
         static_cast<std::size_t>(slot.operand);
}

double Fp8Scaling::scale(const Fp8Slot& slot) const {
  const auto begin = histories_.begin() + static_cast<std::ptrdiff_t>(index(slot)) * config_.history;
  return fp8_scale(format_of(slot.operand), *std::max_element(begin, begin + config_.history), config_.margin);
}

void Fp8Scaling::observe(const Fp8Slot& slot, double amax) {
  double& seen = current_[index(slot)];
  if (std::isfinite(amax)) seen = std::max(seen, std::fabs(amax));
}

void Fp8Scaling::end_step(Communicator* world, int step) {
  const bool alone = world == nullptr || world->size() == 1 || current_.empty() || pitfalls_.on(Pitfall::fp8_amax_of_one_rank);
  if (!alone) current_ = agreed(*world, step);
  for (std::size_t slot = 0; slot < current_.size(); ++slot) {
    histories_[slot * static_cast<std::size_t>(config_.history) + static_cast<std::size_t>(position_)] = current_[slot];
  }
  std::ranges::fill(current_, 0.0);
  position_ = (position_ + 1) % config_.history;
}

std::vector<double> Fp8Scaling::agreed(Communicator& world, int step) const {
  const std::size_t slots = current_.size();
  const auto ranks = static_cast<std::size_t>(world.size());
  std::vector<double> mine = current_;
  std::vector<double> all(slots * ranks);
  const std::vector<std::int64_t> counts(ranks, static_cast<std::int64_t>(slots));
  world
      .all_gather(TensorView(mine.data(), DType::f64, {counts.front()}),
                  TensorView(all.data(), DType::f64, {static_cast<std::int64_t>(all.size())}), counts,
                  {.name = "largest magnitudes of fp8 operands", .progress = Progress::on_wait, .step = step})
      .wait_host();
  for (std::size_t i = 0; i < all.size(); ++i) mine[i % slots] = std::max(mine[i % slots], all[i]);
  return mine;
}

void Fp8Scaling::set_state(const Fp8ScalingState& state) {
  if (state.histories.size() != histories_.size() || state.position < 0 || state.position >= config_.history) {
    throw InputError(
        fmt::format("the saved fp8 state has {} largest magnitudes (next at {}), but {} layers with fp8_history {} "
                    "need {}; resume with the model and the fp8_history that it was saved with",
                    state.histories.size(), state.position, layers_, config_.history, histories_.size()));
  }
  const auto good = [](double amax) { return std::isfinite(amax) && amax >= 0; };
  if (!std::ranges::all_of(state.histories, good)) {
    throw InputError("the saved fp8 state has a largest magnitude that is negative or not finite; the checkpoint is damaged");
  }
  histories_ = state.histories;
  position_ = state.position;
  std::ranges::fill(current_, 0.0);
}

}  // namespace tandem
