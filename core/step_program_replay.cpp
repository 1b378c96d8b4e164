// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>

#include <fmt/format.h>

#include "core/error.h"
#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

using Seconds = std::function<double(const Operation&)>;

bool has_own_bytes(Collective collective) { return collective == Collective::all_to_all || collective == Collective::ring_shift; }

// Whether two ranks are at the same collective.
bool agree(const Operation& a, const Operation& b) {
  const bool same_place = a.phase == b.phase && a.part == b.part && a.layer == b.layer && a.micro_batch == b.micro_batch &&
                          a.piece == b.piece && a.bucket == b.bucket && a.purpose == b.purpose;
  const bool same_root = a.collective != Collective::broadcast || a.peer == b.peer;
  return a.collective == b.collective && same_place && same_root && (has_own_bytes(a.collective) || a.bytes == b.bytes);
}

bool agree_as_messages(const Operation& sent, const Operation& received) {
  return sent.stage == received.stage && sent.micro_batch == received.micro_batch && sent.phase == received.phase &&
         sent.bytes == received.bytes;
}

// Runs the programs of all ranks side by side, each in its own order, and keeps each rank's clock.
class Replay {
 public:
  Replay(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation, const Seconds* seconds)
      : programs_(programs),
        expectation_(expectation),
        seconds_(seconds),
        next_(programs.size(), 0),
        clock_(programs.size(), 0),
        busy_(programs.size(), 0),
        runnable_(programs.size(), true) {}

  Problems run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (int rank = 0; rank < ranks(); ++rank) {
        if (!runnable_[index(rank)]) continue;
        runnable_[index(rank)] = false;
        while (next_[index(rank)] < programs_[index(rank)].size() && step(rank)) moved = true;
      }
    }
    if (!stuck()) unread();
    return std::move(problems_);
  }

  [[nodiscard]] ProgramTiming timing() const {
    ProgramTiming timing;
    timing.busy_seconds = busy_;
    double busy = 0;
    for (int rank = 0; rank < ranks(); ++rank) {
      timing.makespan_seconds = std::max(timing.makespan_seconds, clock_[index(rank)]);
      busy += busy_[index(rank)];
    }
    if (timing.makespan_seconds > 0) timing.bubble_share = 1 - busy / (ranks() * timing.makespan_seconds);
    return timing;
  }

 private:
  struct Message {
    const Operation* operation;
    double sent_at;
  };

  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  [[nodiscard]] int ranks() const { return static_cast<int>(programs_.size()); }
  [[nodiscard]] double duration(const Operation& op) const { return seconds_ == nullptr ? 0 : (*seconds_)(op); }
  [[nodiscard]] const Operation* current(int rank) const {
    const StepProgram& program = programs_[index(rank)];
    return next_[index(rank)] < program.size() ? &program[next_[index(rank)]] : nullptr;
  }

  void advance(int rank) {
    ++next_[index(rank)];
    runnable_[index(rank)] = true;
  }

  const std::vector<int>& group(GroupAxis axis, int rank) {
    const auto [found, fresh] = groups_.try_emplace({axis, rank});
    if (fresh) {
      found->second = expectation_.group(axis, rank);
      bool member = false;
      for (const int other : found->second) {
        member |= other == rank;
        TANDEM_CHECK(other >= 0 && other < ranks(),
                     fmt::format("the {} group of rank {} names rank {}", name(axis), rank, other));
      }
      TANDEM_CHECK(member, fmt::format("rank {} is not in its own {} group", rank, name(axis)));
    }
    return found->second;
  }

  // Runs the next operation of a rank if it can; false where it must wait.
  bool step(int rank) {
    const Operation& op = *current(rank);
    if (op.kind != OpKind::communicate) {
      if (op.kind == OpKind::compute || op.kind == OpKind::optimizer) {
        const double seconds = duration(op);
        clock_[index(rank)] += seconds;
        busy_[index(rank)] += seconds;
      }
      advance(rank);
      return true;
    }
    if (op.collective == Collective::send) return send(rank, op);
    if (op.collective == Collective::recv) return receive(rank, op);
    return collective(rank, op);
  }

  bool send(int rank, const Operation& op) {
    if (op.peer >= 0 && op.peer < ranks()) {
      messages_[{rank, op.peer}].push_back({&op, clock_[index(rank)]});
      runnable_[index(op.peer)] = true;
    } else {
      problems_.push_back(fmt::format("rank {}: {}: there is no such rank", rank, to_string(op)));
    }
    advance(rank);
    return true;
  }

  bool receive(int rank, const Operation& op) {
    const auto found = messages_.find({op.peer, rank});
    if (found == messages_.end() || found->second.empty()) return false;
    const Message message = found->second.front();
    found->second.pop_front();
    if (!agree_as_messages(*message.operation, op)) {
      disagreement({op.peer, rank}, fmt::format("rank {}: {} of {} bytes meets {} of {} bytes of rank {}", rank, to_string(op),
                                                op.bytes, to_string(*message.operation), message.operation->bytes, op.peer));
    }
    clock_[index(rank)] = std::max(clock_[index(rank)], message.sent_at + duration(op));
    advance(rank);
    return true;
  }

  bool collective(int rank, const Operation& op) {
    const std::vector<int>& members = group(op.axis, rank);
    double start = 0;
    for (const int member : members) {
      const Operation* other = current(member);
      const bool here = other != nullptr && other->kind == OpKind::communicate && other->axis == op.axis &&
                        other->collective != Collective::send && other->collective != Collective::recv;
      if (!here) return false;
      start = std::max(start, clock_[index(member)]);
    }
    const int first = members.front();
    const Operation& leading = *current(first);
    for (const int member : members) {
      const Operation& other = *current(member);
      if (!agree(leading, other)) {
        disagreement({first, member},
                     fmt::format("{} group of rank {}: rank {} is at {} of {} bytes, rank {} at {} of {}", name(op.axis), first,
                                 first, to_string(leading), leading.bytes, member, to_string(other), other.bytes));
      }
    }
    for (const int member : members) {
      clock_[index(member)] = start + duration(*current(member));
      advance(member);
    }
    return true;
  }

  // Once two ranks are out of step, what follows says nothing new about them.
  void disagreement(const std::pair<int, int>& between, std::string text) {
    if (disagree_[between]++ == 0) problems_.push_back(std::move(text));
  }

  bool stuck() {
    std::string text;
    for (int rank = 0; rank < ranks(); ++rank) {
      const Operation* op = current(rank);
      if (op == nullptr) continue;
      text += fmt::format("{}rank {} is stuck at {} (operation {})", text.empty() ? "" : "; ", rank, to_string(*op),
                          next_[index(rank)]);
    }
    if (text.empty()) return false;
    for (int rank = 0; rank < ranks(); ++rank) {
      if (current(rank) == nullptr) text += fmt::format("; rank {} has ended", rank);
    }
    problems_.push_back("deadlock: " + text);
    return true;
  }

  void unread() {
    for (const auto& [between, queue] : messages_) {
      for (const Message& message : queue) {
        problems_.push_back(fmt::format("rank {}: {} is never received", between.first, to_string(*message.operation)));
      }
    }
  }

  const std::vector<StepProgram>& programs_;
  const ProgramExpectation& expectation_;
  const Seconds* seconds_;
  std::vector<std::size_t> next_;
  std::vector<double> clock_, busy_;
  std::vector<bool> runnable_;
  std::map<std::pair<GroupAxis, int>, std::vector<int>> groups_;
  std::map<std::pair<int, int>, std::deque<Message>> messages_;  // (sender, receiver)
  std::map<std::pair<int, int>, int> disagree_;
  Problems problems_;
};

}  // namespace

void check_communication(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation, Problems& problems) {
  for (std::string& problem : Replay(programs, expectation, nullptr).run()) problems.push_back(std::move(problem));
}

}  // namespace tandem::step_program_check

namespace tandem {

namespace {

// Parts of a reduce-scatter or an all-gather may be uneven: all ranks together send b (n - 1) bytes to the last one.
std::int64_t share_of_wire(const Operation& op, const std::vector<int>& group, int rank) {
  const auto n = static_cast<std::int64_t>(group.size());
  if (op.collective != Collective::reduce_scatter && op.collective != Collective::all_gather) {
    return bytes_on_wire(op, static_cast<int>(n));
  }
  const std::int64_t place = std::find(group.begin(), group.end(), rank) - group.begin();
  return balanced_part(op.bytes * (n - 1), n, place).size();
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

ProgramTiming time_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation,
                            const std::function<double(const Operation&)>& seconds) {
  step_program_check::Replay replay(programs, expectation, &seconds);
  for (const std::string& problem : replay.run()) {
    TANDEM_CHECK(!problem.starts_with("deadlock"), problem);
  }
  return replay.timing();
}

}  // namespace tandem
