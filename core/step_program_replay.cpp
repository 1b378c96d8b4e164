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
        exposed_(programs.size(), 0),
        runnable_(programs.size(), true),
        issued_(programs.size(), -1) {
    for (const StepProgram& program : programs) ends_.emplace_back(program.size(), kUnderWay);
  }

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
    if (stuck()) return std::move(problems_);
    unread();
    for (int rank = 0; rank < ranks(); ++rank) {
      for (int id = 0; id < std::ssize(programs_[index(rank)]); ++id) {
        if (is_in_background(rank, id)) wait_until(rank, ends_[index(rank)][index(id)]);
      }
    }
    return std::move(problems_);
  }

  [[nodiscard]] ProgramTiming timing() const {
    ProgramTiming timing;
    timing.busy_seconds = busy_;
    timing.exposed_seconds = exposed_;
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
  // A collective that a rank has come to.
  struct Issue {
    int id;
    double at;
  };
  // One group of an axis: what its ranks have issued and is not complete, in their order.
  struct Group {
    std::vector<int> members;
    std::map<int, std::deque<Issue>> issues;  // by rank
    double free_at = 0;                       // all before is complete
  };
  static constexpr double kUnderWay = -1;

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

  Group& group(GroupAxis axis, int rank) {
    const auto [known, fresh] = group_of_.try_emplace({axis, rank});
    if (fresh) {
      const std::vector<int> members = expectation_.group(axis, rank);
      for (const int other : members) {
        TANDEM_CHECK(other >= 0 && other < ranks(),
                     fmt::format("the {} group of rank {} names rank {}", name(axis), rank, other));
      }
      const bool member = std::find(members.begin(), members.end(), rank) != members.end();
      TANDEM_CHECK(member, fmt::format("rank {} is not in its own {} group", rank, name(axis)));
      known->second = &groups_[{axis, members}];
      known->second->members = members;
    }
    return *known->second;
  }

  // Runs the next operation of a rank if it can; false where it must wait.
  bool step(int rank) {
    const Operation& op = *current(rank);
    if (!wait_for_background(rank, op)) return false;
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

  [[nodiscard]] bool is_in_background(int rank, int id) const {
    const Operation& op = programs_[index(rank)][index(id)];
    return op.background && op.kind == OpKind::communicate && op.collective != Collective::send &&
           op.collective != Collective::recv;
  }

  void wait_until(int rank, double time) {
    const double waited = std::max(0.0, time - clock_[index(rank)]);
    clock_[index(rank)] += waited;
    exposed_[index(rank)] += waited;
  }

  // The first operation in the background that `op` names and that is not complete; -1: none.
  [[nodiscard]] int unfinished_before(int rank, const Operation& op) const {
    for (const OperationId before : op.after) {
      const bool legal = before >= 0 && index(before) < next_[index(rank)];
      if (legal && is_in_background(rank, before) && ends_[index(rank)][index(before)] == kUnderWay) return before;
    }
    return -1;
  }

  bool wait_for_background(int rank, const Operation& op) {
    if (unfinished_before(rank, op) >= 0) return false;
    for (const OperationId before : op.after) {
      const bool legal = before >= 0 && index(before) < next_[index(rank)];
      if (legal && is_in_background(rank, before)) wait_until(rank, ends_[index(rank)][index(before)]);
    }
    return true;
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
    wait_until(rank, message.sent_at + duration(op));
    advance(rank);
    return true;
  }

  bool collective(int rank, const Operation& op) {
    const int id = static_cast<int>(next_[index(rank)]);
    if (issued_[index(rank)] != id) {
      issued_[index(rank)] = id;
      Group& ranks_here = group(op.axis, rank);
      ranks_here.issues[rank].push_back({id, clock_[index(rank)]});
      carry_out(op.axis, ranks_here);
    }
    if (!op.background) {
      const double end = ends_[index(rank)][index(id)];
      if (end == kUnderWay) return false;
      wait_until(rank, end);
    }
    advance(rank);
    return true;
  }

  // All that every rank of a group has issued, one after the other.
  void carry_out(GroupAxis axis, Group& ranks_here) {
    const auto issue_of = [&](int member) { return ranks_here.issues[member].front(); };
    const auto operation = [&](int member) -> const Operation& { return programs_[index(member)][index(issue_of(member).id)]; };
    const auto ready = [&](int member) { return !ranks_here.issues[member].empty(); };
    while (std::all_of(ranks_here.members.begin(), ranks_here.members.end(), ready)) {
      const int first = ranks_here.members.front();
      const Operation& leading = operation(first);
      double start = ranks_here.free_at;
      for (const int member : ranks_here.members) {
        const Operation& other = operation(member);
        start = std::max(start, issue_of(member).at);
        if (agree(leading, other)) continue;
        disagreement({first, member},
                     fmt::format("{} group of rank {}: rank {} is at {} of {} bytes, rank {} at {} of {}", name(axis), first,
                                 first, to_string(leading), leading.bytes, member, to_string(other), other.bytes));
      }
      for (const int member : ranks_here.members) {
        const double end = start + duration(operation(member));
        ranks_here.free_at = std::max(ranks_here.free_at, end);
        ends_[index(member)][index(issue_of(member).id)] = end;
        ranks_here.issues[member].pop_front();
        runnable_[index(member)] = true;
      }
    }
  }

  // Once two ranks are out of step, what follows says nothing new about them.
  void disagreement(const std::pair<int, int>& between, std::string text) {
    if (disagree_[between]++ == 0) problems_.push_back(std::move(text));
  }

  bool stuck() {
    std::string text;
    const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
    for (int rank = 0; rank < ranks(); ++rank) {
      const Operation* op = current(rank);
      if (op == nullptr) continue;
      add(fmt::format("rank {} is stuck at {} (operation {})", rank, to_string(*op), next_[index(rank)]));
      const int before = unfinished_before(rank, *op);
      if (before >= 0) text += fmt::format(", which waits for {}", to_string(programs_[index(rank)][index(before)]));
    }
    for (const auto& [place, ranks_here] : groups_) {
      for (const auto& [rank, issues] : ranks_here.issues) {
        if (issues.empty() || current(rank) != nullptr) continue;
        const Operation& op = programs_[index(rank)][index(issues.front().id)];
        add(fmt::format("{} of rank {} is never complete", to_string(op), rank));
      }
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
  std::vector<double> clock_, busy_, exposed_;
  std::vector<bool> runnable_;
  std::vector<int> issued_;                // the last collective that a rank has come to
  std::vector<std::vector<double>> ends_;  // [ranks, operations] when a collective is complete
  std::map<std::pair<GroupAxis, std::vector<int>>, Group> groups_;
  std::map<std::pair<GroupAxis, int>, Group*> group_of_;         // by rank
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

ProgramTiming time_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation,
                            const std::function<double(const Operation&)>& seconds) {
  step_program_check::Replay replay(programs, expectation, &seconds);
  for (const std::string& problem : replay.run()) {
    TANDEM_CHECK(!problem.starts_with("deadlock"), problem);
  }
  return replay.timing();
}

}  // namespace tandem
