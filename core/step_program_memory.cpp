// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

// Identity of what is allocated: the same in allocate and free.
using MemoryKey = std::tuple<MemoryCategory, Part, int, int, int, int, int, Phase>;
MemoryKey memory_key(const Operation& op) {
  return {op.category, op.part, op.layer, op.micro_batch, op.chunk, op.stage, op.bucket, op.phase};
}

// What compute reads: part, layer, micro-batch, chunk of activations.
using ActivationKey = std::tuple<Part, int, int, int>;

ActivationKey activations_of(const Operation& op) {
  Part part = op.part;
  if (op.layer >= 0) part = Part::block;
  if (part == Part::embedding_lookup) part = Part::embedding;
  if (part == Part::head_logits || part == Part::head_loss) part = Part::head_norm;
  return {part, op.layer, op.micro_batch, op.chunk};
}

class MemoryChecker {
 public:
  MemoryChecker(int rank, Problems& problems) : rank_(rank), problems_(problems) {}

  MemoryFacts run(const StepProgram& program) {
    for (const Operation& op : program) {
      if (op.kind == OpKind::allocate) allocate(op);
      if (op.kind == OpKind::free) release(op);
      if (op.kind == OpKind::compute && !activations_.contains(activations_of(op))) {
        problem(fmt::format("{} runs without its activations", to_string(op)));
      }
    }
    for (const auto& [key, op] : live_) problem(fmt::format("{} is never freed", to_string(*op)));
    return facts_;
  }

 private:
  void problem(const std::string& text) { problems_.push_back(fmt::format("rank {}: {}", rank_, text)); }

  void allocate(const Operation& op) {
    if (!live_.emplace(memory_key(op), &op).second) {
      problem(fmt::format("{} while it is already allocated", to_string(op)));
      return;
    }
    count(op.category, op.bytes);
    if (op.category != MemoryCategory::activations) return;
    ++activations_[{op.part, op.layer, op.micro_batch, op.chunk}];
    if (op.part == Part::block) ++in_flight_[{op.chunk, op.micro_batch}];
    facts_.peak_in_flight = std::max(facts_.peak_in_flight, static_cast<int>(in_flight_.size()));
  }

  void count(MemoryCategory category, std::int64_t bytes) {
    const auto of_category = static_cast<std::size_t>(category);
    total_ += bytes;
    by_category_[of_category] += bytes;
    facts_.peak_bytes = std::max(facts_.peak_bytes, total_);
    std::int64_t& peak = facts_.peak_bytes_by_category[of_category];
    peak = std::max(peak, by_category_[of_category]);
  }

  void release(const Operation& op) {
    const auto found = live_.find(memory_key(op));
    if (found == live_.end()) {
      problem(fmt::format("{} of what is not allocated", to_string(op)));
      return;
    }
    const std::int64_t bytes = found->second->bytes;
    if (bytes != op.bytes) problem(fmt::format("{} of {} bytes, but {} were allocated", to_string(op), op.bytes, bytes));
    count(op.category, -bytes);
    live_.erase(found);
    if (op.category != MemoryCategory::activations) return;
    const auto drop = [](auto& counts, const auto& key) {
      const auto count = counts.find(key);
      if (--count->second == 0) counts.erase(count);
    };
    drop(activations_, ActivationKey{op.part, op.layer, op.micro_batch, op.chunk});
    if (op.part == Part::block) drop(in_flight_, std::pair<int, int>{op.chunk, op.micro_batch});
  }

  int rank_;
  Problems& problems_;
  std::map<MemoryKey, const Operation*> live_;
  std::map<ActivationKey, int> activations_;      // live allocations
  std::map<std::pair<int, int>, int> in_flight_;  // (chunk, micro-batch) -> live blocks
  std::int64_t total_ = 0;
  BytesByCategory by_category_{};
  MemoryFacts facts_;
};

}  // namespace

MemoryFacts check_memory(const StepProgram& program, int rank, Problems& problems) {
  return MemoryChecker(rank, problems).run(program);
}

}  // namespace tandem::step_program_check
