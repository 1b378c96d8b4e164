// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "optimized/scaling/replay.h"

namespace tandem {

/// The discrete-event engine behind replay(): time goes from one event to the next, an event being the end of a computation or of
/// a transfer. A collective is one transfer for each stage of its group (their costs may differ), a message is one between two
/// stages. Borrows its arguments.
class ReplayEngine {
 public:
  ReplayEngine(const std::vector<StepProgram>& programs, const TrainingPlan& plan, const OperationCost& cost,
               const SharesLinks& shares_links, const PitfallSet& pitfalls);

  [[nodiscard]] ReplayTiming run();

 private:
  static constexpr int kNone = -1;

  struct Transfer {
    int stage = 0;       // whose operation it is; of a message: the receiver
    int sender = kNone;  // of a message
    int group = kNone;   // of a collective
    GroupAxis axis = GroupAxis::world;
    bool done = false, on_links = false;
    int version = 0;  // of its end: earlier ends are out of date
    double remaining = 0, rate = 1, updated_at = 0;
  };
  struct Stage {
    std::size_t next = 0;
    double clock = 0;
    int waits_for = kNone;  // transfer
    bool computes = false, ended = false;
    std::vector<int> transfer_of;  // [operations]
    // Accounts, up to changed_at.
    double changed_at = 0, busy = 0, exposed = 0, transfers = 0, hidden = 0;
    int under_way = 0;
    // Who uses the links here; kept only where links are shared.
    std::vector<int> active;
    std::array<int, kGroupAxes> active_on{};
  };
  struct Group {
    std::vector<int> members;             // stages
    std::vector<std::deque<int>> issued;  // [members] transfers that have not begun
    int under_way = 0;
  };
  struct Event {
    double at;
    std::int64_t order;  // of equal times the older first
    int stage, transfer, version;
    bool operator>(const Event& other) const { return std::pair(at, order) > std::pair(other.at, other.order); }
  };

  void expect_messages();
  void run_stage(int stage);
  [[nodiscard]] bool waits(int stage, int transfer);
  [[nodiscard]] bool waits_for_background(int stage, const Operation& operation);
  [[nodiscard]] bool start_computing(int stage, const Operation& operation);
  void send(int stage, const Operation& operation);
  void issue(int stage, const Operation& operation);
  void carry_out(int group);
  [[nodiscard]] int group_of(int stage, GroupAxis axis);
  void begin(int transfer, double seconds);
  void finish(int transfer);
  void push_end(int transfer);
  void use_links(int transfer, bool begins);
  void set_rates(int stage);
  [[nodiscard]] int sharers(int stage, GroupAxis axis) const;
  void account(Stage& stage) const;
  void require_ended() const;
  [[nodiscard]] ReplayTiming timing() const;
  [[nodiscard]] Stage& at(int stage) { return stages_[static_cast<std::size_t>(stage)]; }
  [[nodiscard]] Transfer& transfer(int id) { return transfers_[static_cast<std::size_t>(id)]; }
  [[nodiscard]] const Operation& operation_of(int stage) const;

  const std::vector<StepProgram>& programs_;
  const OperationCost& cost_;
  ProcessGrid grid_;
  int last_stage_;  // pipeline rank of the model's last stage
  bool links_are_shared_ = false;
  bool counted_twice_;
  std::array<std::array<bool, kGroupAxes>, kGroupAxes> shares_{};
  std::vector<Stage> stages_;
  std::vector<Transfer> transfers_;
  std::vector<Group> groups_;
  std::vector<std::array<int, kGroupAxes>> group_ids_;                                    // [stages]
  std::map<std::pair<int, int>, std::deque<std::pair<int, const Operation*>>> expected_;  // (sender, receiver): receives to come
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<int> runnable_;  // stages
  double now_ = 0;
  std::int64_t pushed_ = 0;
};

}  // namespace tandem
