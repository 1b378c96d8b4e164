// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "core/step_program_check.h"

namespace tandem {

namespace {

// Parts of a tensor may be uneven: all ranks together send b (n - 1) bytes to the last one, of an all-reduce twice that.
std::int64_t share_of_wire(const Operation& op, const std::vector<int>& group, int rank) {
  const auto n = static_cast<std::int64_t>(group.size());
  const bool both_ways = op.collective == Collective::all_reduce;
  if (!both_ways && op.collective != Collective::reduce_scatter && op.collective != Collective::all_gather) {
    return bytes_on_wire(op, static_cast<int>(n));
  }
  const std::int64_t place = std::find(group.begin(), group.end(), rank) - group.begin();
  return balanced_part((both_ways ? 2 : 1) * op.bytes * (n - 1), n, place).size();
}

}  // namespace

ProgramFacts check_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation) {
  using namespace step_program_check;
  TANDEM_CHECK(programs.size() == expectation.ranks.size(),
               fmt::format("{} programs, but {} ranks are expected", programs.size(), expectation.ranks.size()));
  ProgramFacts facts;
  for (int rank = 0; rank < std::ssize(programs); ++rank) {
    const StepProgram& program = programs[static_cast<std::size_t>(rank)];
    check_work(program, rank, expectation, facts.problems);
    check_background(program, rank, facts.problems);
    check_gradients(program, rank, expectation, facts.problems);
    check_zero(program, rank, expectation, facts.problems);
    const MemoryFacts memory = check_memory(program, rank, facts.problems);
    facts.peak_bytes = std::max(facts.peak_bytes, memory.peak_bytes);
    for (std::size_t i = 0; i < kMemoryCategories; ++i) {
      facts.peak_bytes_by_category[i] = std::max(facts.peak_bytes_by_category[i], memory.peak_bytes_by_category[i]);
    }
    facts.peak_in_flight.push_back(memory.peak_in_flight);
    std::map<GroupAxis, std::vector<int>> groups;
    for (const Operation& op : program) {
      facts.flops += op.flops;
      if (op.kind != OpKind::communicate) continue;
      if (op.purpose == Purpose::gradient) facts.gradient_bytes += op.bytes;
      const auto [group, fresh] = groups.try_emplace(op.axis);
      if (fresh) group->second = expectation.group(op.axis, rank);
      facts.wire_bytes[static_cast<std::size_t>(op.purpose)] += share_of_wire(op, group->second, rank);
    }
  }
  check_communication(programs, expectation, facts.problems);
  return facts;
}

}  // namespace tandem
