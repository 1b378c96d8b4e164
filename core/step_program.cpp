// SPDX-License-Identifier: Apache-2.0
#include "core/step_program.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

std::string_view name(Phase phase) {
  constexpr std::array<std::string_view, 4> kNames = {"forward", "backward_input", "backward_weight", "recompute"};
  return kNames[static_cast<std::size_t>(phase)];
}

std::string_view name(Collective collective) {
  constexpr std::array<std::string_view, 7> kNames = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                                      "broadcast",  "send",           "recv"};
  return kNames[static_cast<std::size_t>(collective)];
}

std::string part_name(const Operation& operation) {
  switch (operation.part) {
    case Part::embedding: return "embedding";
    case Part::head: return "head";
    case Part::block: return fmt::format("h.{}", operation.layer);
  }
  return "?";
}

// Identity of what is allocated: the same tuple in allocate and free.
using MemoryKey = std::tuple<MemoryCategory, Part, int, int, int>;
MemoryKey memory_key(const Operation& op) { return {op.category, op.part, op.layer, op.micro_batch, op.chunk}; }

// Checks of one rank's program; collects problems with the rank in front.
class RankChecker {
 public:
  RankChecker(const StepProgram& program, int rank, const ProgramExpectation& expectation, ProgramFacts& facts)
      : program_(program), rank_(rank), expectation_(expectation), facts_(facts) {}

  void run() {
    dependencies();
    compute();
    gradients();
    memory();
  }

 private:
  void problem(const std::string& text) { facts_.problems.push_back(fmt::format("rank {}: {}", rank_, text)); }

  void dependencies() {
    for (std::size_t i = 0; i < program_.size(); ++i) {
      for (const OperationId before : program_[i].after) {
        if (before < 0 || before >= static_cast<OperationId>(i)) {
          problem(fmt::format("operation {} ({}) waits for {}, which is not before it", i, to_string(program_[i]), before));
        }
      }
    }
  }

  // Index of the only compute operation of this kind; reports none or several and gives -1.
  int only(Phase phase, Part part, int layer, int micro_batch) {
    int found = -1;
    int count = 0;
    for (std::size_t i = 0; i < program_.size(); ++i) {
      const Operation& op = program_[i];
      if (op.kind != OpKind::compute || op.phase != phase || op.part != part || op.layer != layer) continue;
      if (op.micro_batch != micro_batch) continue;
      found = static_cast<int>(i);
      ++count;
    }
    if (count == 1) return found;
    Operation wanted;
    wanted.phase = phase;
    wanted.part = part;
    wanted.layer = layer;
    wanted.micro_batch = micro_batch;
    problem(fmt::format("{} appears {} times, not once", to_string(wanted), count));
    return -1;
  }

  void in_order(int before, int after) {
    if (before < 0 || after < 0 || before < after) return;
    problem(fmt::format("{} runs before {}", to_string(program_[static_cast<std::size_t>(after)]),
                        to_string(program_[static_cast<std::size_t>(before)])));
  }

  void compute() {
    for (int micro_batch = 0; micro_batch < expectation_.micro_batches; ++micro_batch) {
      std::vector<int> forward = {only(Phase::forward, Part::embedding, -1, micro_batch)};
      for (int layer = 0; layer < expectation_.layers; ++layer)
        forward.push_back(only(Phase::forward, Part::block, layer, micro_batch));
      forward.push_back(only(Phase::forward, Part::head, -1, micro_batch));
      int previous = only(Phase::backward_input, Part::head, -1, micro_batch);
      in_order(forward.back(), previous);
      for (std::size_t i = 1; i < forward.size(); ++i) in_order(forward[i - 1], forward[i]);
      in_order(previous, only(Phase::backward_weight, Part::head, -1, micro_batch));
      for (int layer = expectation_.layers - 1; layer >= 0; --layer) {
        const int input = only(Phase::backward_input, Part::block, layer, micro_batch);
        in_order(previous, input);
        in_order(input, only(Phase::backward_weight, Part::block, layer, micro_batch));
        previous = input;
      }
      in_order(previous, only(Phase::backward_weight, Part::embedding, -1, micro_batch));
    }
    for (const Operation& op : program_) facts_.flops += op.flops;
  }

  void gradients() {
    int last_weight = -1;
    int norm = -1;
    int optimizer = -1;
    int optimizers = 0;
    std::map<int, int> reduced;  // bucket -> times
    for (int i = 0; i < static_cast<int>(program_.size()); ++i) {
      const Operation& op = program_[static_cast<std::size_t>(i)];
      if (op.kind == OpKind::compute && op.phase == Phase::backward_weight) last_weight = i;
      if (op.kind == OpKind::gradient_norm) norm = i;
      if (op.kind == OpKind::optimizer) {
        optimizer = i;
        ++optimizers;
      }
      if (op.kind == OpKind::communicate && op.purpose == Purpose::gradient) {
        ++reduced[op.bucket];
        facts_.gradient_bytes += op.bytes;
        check_reduction_waits_for_weights(i);
      }
    }
    if (norm < last_weight || optimizer < norm || optimizers != 1) {
      problem("gradient norm and optimizer must run once, in this order, after the last backward_weight");
    }
    const int expected = expectation_.reduces_gradients ? 1 : 0;
    for (int bucket = 0; bucket < expectation_.buckets; ++bucket) {
      if (reduced[bucket] != expected) {
        problem(fmt::format("gradient bucket {} is reduced {} times, not {}", bucket, reduced[bucket], expected));
      }
    }
    for (const auto& [bucket, times] : reduced) {
      if (bucket < 0 || bucket >= expectation_.buckets) problem(fmt::format("gradient bucket {} does not exist", bucket));
    }
  }

  // A bucket must wait, by its declared dependencies, for a backward_weight of the last micro-batch, and the norm for the bucket.
  void check_reduction_waits_for_weights(int index) {
    const auto waits_for = [&](const Operation& op, auto&& wanted) {
      return std::any_of(op.after.begin(), op.after.end(),
                         [&](OperationId id) { return id >= 0 && id < static_cast<OperationId>(program_.size()) && wanted(id); });
    };
    const Operation& reduction = program_[static_cast<std::size_t>(index)];
    const bool after_weight = waits_for(reduction, [&](OperationId id) {
      const Operation& op = program_[static_cast<std::size_t>(id)];
      return op.kind == OpKind::compute && op.phase == Phase::backward_weight && op.micro_batch == expectation_.micro_batches - 1;
    });
    if (!after_weight)
      problem(fmt::format("{} does not wait for a backward_weight of the last micro-batch", to_string(reduction)));
    const bool before_norm = std::any_of(program_.begin(), program_.end(), [&](const Operation& op) {
      return op.kind == OpKind::gradient_norm && waits_for(op, [&](OperationId id) { return id == index; });
    });
    if (!before_norm) problem(fmt::format("the gradient norm does not wait for {}", to_string(reduction)));
  }

  void memory() {
    std::map<MemoryKey, std::int64_t> live;
    std::int64_t total = 0;
    std::int64_t peak = 0;
    for (const Operation& op : program_) {
      if (op.kind == OpKind::allocate) {
        if (!live.emplace(memory_key(op), op.bytes).second)
          problem(fmt::format("{} while it is already allocated", to_string(op)));
        total += op.bytes;
        peak = std::max(peak, total);
      } else if (op.kind == OpKind::free) {
        const auto found = live.find(memory_key(op));
        if (found == live.end() || found->second != op.bytes) {
          problem(fmt::format("{} of what is not allocated, or not so large", to_string(op)));
          continue;
        }
        total -= op.bytes;
        live.erase(found);
      } else if (op.kind == OpKind::compute && op.phase != Phase::recompute) {
        const MemoryKey activations = {MemoryCategory::activations, op.part, op.layer, op.micro_batch, op.chunk};
        if (!live.contains(activations)) problem(fmt::format("{} runs without its activations", to_string(op)));
      }
    }
    if (!live.empty()) problem(fmt::format("{} allocations are never freed", live.size()));
    facts_.peak_bytes = std::max(facts_.peak_bytes, peak);
  }

  const StepProgram& program_;
  int rank_;
  const ProgramExpectation& expectation_;
  ProgramFacts& facts_;
};

// Every rank executes its communications in order and blocks in each until all ranks (data-parallel group: all programs) are at a
// communication; they must then agree. A rank that ends while others wait is a deadlock.
void check_collectives(const std::vector<StepProgram>& programs, ProgramFacts& facts) {
  std::vector<std::vector<const Operation*>> queues(programs.size());
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    for (const Operation& op : programs[rank]) {
      if (op.kind == OpKind::communicate) queues[rank].push_back(&op);
    }
  }
  std::size_t longest = 0;
  for (const auto& queue : queues) longest = std::max(longest, queue.size());
  for (std::size_t i = 0; i < longest; ++i) {
    for (std::size_t rank = 0; rank < queues.size(); ++rank) {
      if (i >= queues[rank].size()) {
        facts.problems.push_back(fmt::format("deadlock: rank {} ends after {} communications while others wait", rank, i));
        return;
      }
      const Operation& mine = *queues[rank][i];
      const Operation& first = *queues[0][i];
      if (mine.collective != first.collective || mine.bytes != first.bytes || mine.axis != first.axis ||
          mine.bucket != first.bucket) {
        facts.problems.push_back(fmt::format("communication {}: rank 0 does {} of {} bytes, rank {} does {} of {}", i,
                                             to_string(first), first.bytes, rank, to_string(mine), mine.bytes));
        return;
      }
    }
  }
}

}  // namespace

std::string to_string(const Operation& op) {
  switch (op.kind) {
    case OpKind::compute: return fmt::format("{} {} mb {}", name(op.phase), part_name(op), op.micro_batch);
    case OpKind::communicate:
      return op.bucket >= 0 ? fmt::format("{} bucket {}", name(op.collective), op.bucket)
                            : fmt::format("{} {}", name(op.collective), name(op.purpose));
    case OpKind::allocate: return fmt::format("allocate {} {} mb {}", name(op.category), part_name(op), op.micro_batch);
    case OpKind::free: return fmt::format("free {} {} mb {}", name(op.category), part_name(op), op.micro_batch);
    case OpKind::gradient_norm: return "gradient_norm";
    case OpKind::optimizer: return "optimizer";
  }
  return "?";
}

ProgramFacts check_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation) {
  ProgramFacts facts;
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    RankChecker(programs[rank], static_cast<int>(rank), expectation, facts).run();
  }
  check_collectives(programs, facts);
  return facts;
}

}  // namespace tandem
