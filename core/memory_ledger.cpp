// SPDX-License-Identifier: Apache-2.0
#include "core/memory_ledger.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

std::string_view name(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::parameters: return "parameters";
    case MemoryCategory::gradients: return "gradients";
    case MemoryCategory::optimizer: return "optimizer";
    case MemoryCategory::activations: return "activations";
    case MemoryCategory::communication: return "communication";
    case MemoryCategory::workspace: return "workspace";
  }
  return "?";
}

void MemoryLedger::allocated(MemoryCategory category, std::int64_t bytes) {
  const auto index = static_cast<std::size_t>(category);
  current_[index] += bytes;
  total_ += bytes;
  peak_[index] = std::max(peak_[index], current_[index]);
  peak_total_ = std::max(peak_total_, total_);
}

void MemoryLedger::freed(MemoryCategory category, std::int64_t bytes) {
  const auto index = static_cast<std::size_t>(category);
  TANDEM_CHECK(bytes <= current_[index], fmt::format("{}: {} bytes freed of {}", name(category), bytes, current_[index]));
  current_[index] -= bytes;
  total_ -= bytes;
}

void MemoryLedger::reset_peaks() {
  peak_ = current_;
  peak_total_ = total_;
}

}  // namespace tandem
