// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/background.h"

#include <filesystem>

#include "optimized/comm/exchange.h"

namespace tandem {

void BackgroundPhase::start(std::function<PhaseOutcome()> job) {
  TANDEM_CHECK(!job_.valid(), "the phase before is not over");
  job_ = std::async(std::launch::async, [job = std::move(job)] {
    const auto begin = std::chrono::steady_clock::now();
    PhaseOutcome outcome;
    try {
      outcome = job();
    } catch (const IoError& error) {
      outcome.error = error.what();
    } catch (const std::filesystem::filesystem_error& error) {
      outcome.error = error.what();
    }
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return outcome;
  });
}

std::optional<std::vector<PhaseOutcome>> BackgroundPhase::finished(Communicator& world) {
  const bool ready = job_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (all_reduce_sum(world, ready ? 0.0 : 1.0) > 0) return std::nullopt;
  std::vector<PhaseOutcome> outcomes;
  for (const std::string& bytes : all_gather_bytes(world, to_bytes(job_.get()))) {
    outcomes.push_back(from_bytes<PhaseOutcome>(bytes));
  }
  return outcomes;
}

void BackgroundPhase::wait(std::chrono::milliseconds limit) const { job_.wait_for(limit); }

std::string first_error(const std::vector<PhaseOutcome>& outcomes) {
  for (const PhaseOutcome& outcome : outcomes) {
    if (!outcome.error.empty()) return outcome.error;
  }
  return {};
}

}  // namespace tandem
