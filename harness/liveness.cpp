// SPDX-License-Identifier: Apache-2.0
#include "harness/liveness.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include <fmt/format.h>

namespace tandem {
namespace {

Finding dead(std::string reason, int step = -1) { return {Status::invalid, "liveness", std::move(reason), step, {}}; }

bool same_bits(double a, double b) { return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b); }

std::optional<Finding> check_gradients(const Evidence& side) {
  for (const StageEvidence& stage : side.stages) {
    if (stage.stage != kGradients) continue;
    const bool alive = std::ranges::any_of(stage.tensors, [](const EvidenceTensor& tensor) {
      return std::ranges::any_of(tensor.values, [](double value) { return value != 0; });
    });
    if (!alive) return dead(fmt::format("{}: all gradients of step {} are zero", side.side, stage.step), stage.step);
  }
  return std::nullopt;
}

bool moved(const StageEvidence& stage, const StageEvidence& initial) {
  for (const EvidenceTensor& tensor : stage.tensors) {
    const EvidenceTensor* before = find_tensor(initial, tensor.name);
    if (before == nullptr || before->values.size() != tensor.values.size()) continue;
    if (!std::ranges::equal(before->values, tensor.values, same_bits)) return true;
  }
  return false;
}

std::optional<Finding> check_parameters(const Evidence& side) {
  const StageEvidence* initial = find_stage(side, kInitialParameters);
  for (const StageEvidence& stage : side.stages) {
    if (stage.stage == kInitialParameters || !std::string_view(stage.stage).ends_with("_parameters")) continue;
    if (initial == nullptr) {
      return dead(fmt::format("{} gives {} but no {}: whether anything moved cannot be told", side.side, stage.stage,
                              kInitialParameters));
    }
    if (!moved(stage, *initial)) {
      return dead(fmt::format("{}: no parameter moved in stage {}: nothing was trained", side.side, stage.stage), stage.step);
    }
  }
  return std::nullopt;
}

std::optional<Finding> check_losses(const Evidence& side) {
  const StageEvidence* stage = find_stage(side, kLosses);
  const bool from_stage = side.losses.empty() && stage != nullptr && !stage->tensors.empty();
  const std::vector<double>& losses = from_stage ? stage->tensors.front().values : side.losses;
  const bool frozen = losses.size() > 1 && std::ranges::all_of(losses, [&](double loss) { return loss == losses.front(); });
  if (!frozen) return std::nullopt;
  return dead(fmt::format("{}: the loss is {} in all {} steps", side.side, losses.front(), losses.size()));
}

// The world is data x context parts times the ranks of a tensor and pipeline group, which share their input.
std::optional<Finding> check_inputs(const Evidence& side) {
  if (side.ranks <= 1) return std::nullopt;
  const std::size_t parts = side.input_hashes.size();
  if (parts < 1 || static_cast<std::size_t>(side.ranks) % parts != 0) {
    return dead(fmt::format("{} gives input hashes of {} parts of the batch, which cannot be dealt to its {} ranks", side.side,
                            parts, side.ranks));
  }
  std::vector<std::uint64_t> with_rows;
  std::ranges::copy_if(side.input_hashes, std::back_inserter(with_rows), [](std::uint64_t hash) { return hash != 0; });
  const std::size_t needed = std::min<std::size_t>(parts, 2);
  if (with_rows.size() < needed) {
    return dead(
        fmt::format("{}: {} of {} parts of the batch had rows; at least {} must", side.side, with_rows.size(), parts, needed));
  }
  const bool all_equal = std::ranges::all_of(with_rows, [&](std::uint64_t hash) { return hash == with_rows.front(); });
  if (parts == 1 || !all_equal) return std::nullopt;
  return dead(fmt::format("{}: all {} parts of the batch had the same inputs, which hides a missing reduction", side.side,
                          with_rows.size()),
              0);
}

}  // namespace

std::optional<Finding> check_liveness(const Sides& sides) {
  for (const Evidence* side : sides.given()) {
    for (const auto check : {check_gradients, check_parameters, check_losses, check_inputs}) {
      if (auto finding = check(*side)) return finding;
    }
  }
  return std::nullopt;
}

}  // namespace tandem
