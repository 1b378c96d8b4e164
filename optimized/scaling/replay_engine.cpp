// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/replay_engine.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

bool is_message(const Operation& op) {
  return op.kind == OpKind::communicate && (op.collective == Collective::send || op.collective == Collective::recv);
}

bool is_in_background(const Operation& op) { return op.kind == OpKind::communicate && op.background && !is_message(op); }

bool agree(const Operation& sent, const Operation& received) {
  return sent.stage == received.stage && sent.micro_batch == received.micro_batch && sent.phase == received.phase &&
         sent.bytes == received.bytes;
}

}  // namespace

ReplayEngine::ReplayEngine(const std::vector<StepProgram>& programs, const TrainingPlan& plan, const OperationCost& cost,
                           const SharesLinks& shares_links, const PitfallSet& pitfalls)
    : programs_(programs),
      cost_(cost),
      grid_(plan),
      last_stage_(plan.pipeline.schedule == "zb-v" ? 0 : plan.parallel.pipeline - 1),
      counted_twice_(pitfalls.on(Pitfall::communication_counted_twice)),
      stages_(programs.size()),
      group_ids_(programs.size()) {
  TANDEM_CHECK(std::ssize(programs) == plan.parallel.pipeline,
               fmt::format("{} programs for {} pipeline ranks", programs.size(), plan.parallel.pipeline));
  for (std::size_t stage = 0; stage < programs.size(); ++stage) {
    stages_[stage].transfer_of.assign(programs[stage].size(), kNone);
    group_ids_[stage].fill(kNone);
  }
  if (!shares_links || pitfalls.on(Pitfall::contention_ignored)) return;
  for (std::size_t a = 0; a < kGroupAxes; ++a) {
    for (std::size_t b = 0; b < kGroupAxes; ++b) {
      shares_[a][b] = a != b && shares_links(static_cast<GroupAxis>(a), static_cast<GroupAxis>(b));
      links_are_shared_ = links_are_shared_ || shares_[a][b];
    }
  }
}

ReplayTiming ReplayEngine::run() {
  expect_messages();
  for (int stage = static_cast<int>(stages_.size()) - 1; stage >= 0; --stage) runnable_.push_back(stage);
  while (true) {
    while (!runnable_.empty()) {
      const int stage = runnable_.back();
      runnable_.pop_back();
      run_stage(stage);
    }
    if (events_.empty()) break;
    const Event event = events_.top();
    events_.pop();
    if (event.transfer != kNone) {
      if (transfer(event.transfer).version != event.version) continue;
      now_ = event.at;
      finish(event.transfer);
    } else {
      now_ = event.at;
      Stage& here = at(event.stage);
      account(here);
      here.computes = false;
      runnable_.push_back(event.stage);
    }
  }
  require_ended();
  return timing();
}

// Every receive has its transfer from the start, so that the send finds it.
void ReplayEngine::expect_messages() {
  for (int stage = 0; stage < std::ssize(programs_); ++stage) {
    const StepProgram& program = programs_[static_cast<std::size_t>(stage)];
    for (std::size_t id = 0; id < program.size(); ++id) {
      const Operation& op = program[id];
      if (op.kind != OpKind::communicate || op.collective != Collective::recv) continue;
      const int from = grid_.coordinates(op.peer).pipeline;
      at(stage).transfer_of[id] = static_cast<int>(transfers_.size());
      expected_[{from, stage}].emplace_back(static_cast<int>(transfers_.size()), &op);
      transfers_.push_back({.stage = stage, .sender = from, .axis = op.axis});
    }
  }
}

const Operation& ReplayEngine::operation_of(int stage) const {
  const auto s = static_cast<std::size_t>(stage);
  return programs_[s][stages_[s].next];
}

// Until it computes, waits or ends.
void ReplayEngine::run_stage(int stage) {
  Stage& here = at(stage);
  const StepProgram& program = programs_[static_cast<std::size_t>(stage)];
  for (; here.next < program.size(); ++here.next) {
    const Operation& op = operation_of(stage);
    if (waits_for_background(stage, op)) return;
    if (op.kind == OpKind::compute || op.kind == OpKind::optimizer) {
      if (start_computing(stage, op)) return;
    } else if (op.kind == OpKind::communicate && op.collective == Collective::send) {
      send(stage, op);
    } else if (op.kind == OpKind::communicate) {
      int& id = here.transfer_of[here.next];
      if (id == kNone) issue(stage, op);
      if (!is_in_background(op) && waits(stage, id)) return;
    }
  }
  for (std::size_t id = 0; id < program.size(); ++id) {
    if (is_in_background(program[id]) && waits(stage, here.transfer_of[id])) return;
  }
  here.ended = true;
}

bool ReplayEngine::waits(int stage, int id) {
  if (transfer(id).done) return false;
  at(stage).waits_for = id;
  return true;
}

bool ReplayEngine::waits_for_background(int stage, const Operation& operation) {
  const StepProgram& program = programs_[static_cast<std::size_t>(stage)];
  const Stage& here = at(stage);
  for (const OperationId before : operation.after) {
    const auto id = static_cast<std::size_t>(before);
    const bool legal = before >= 0 && id < here.next;
    if (legal && is_in_background(program[id]) && waits(stage, here.transfer_of[id])) return true;
  }
  return false;
}

// True: it takes time, at whose end the stage goes on behind it.
bool ReplayEngine::start_computing(int stage, const Operation& operation) {
  const double seconds = cost_(operation, stage);
  if (!(seconds > 0)) return false;
  Stage& here = at(stage);
  account(here);
  here.computes = true;
  here.busy += seconds;
  here.clock += seconds;
  ++here.next;
  events_.push({here.clock, pushed_++, stage, kNone, 0});
  return true;
}

void ReplayEngine::send(int stage, const Operation& operation) {
  auto& receives = expected_[{stage, grid_.coordinates(operation.peer).pipeline}];
  TANDEM_CHECK(!receives.empty(), fmt::format("stage {}: {} is never received", stage, to_string(operation)));
  const auto [id, received] = receives.front();
  receives.pop_front();
  TANDEM_CHECK(agree(operation, *received),
               fmt::format("stage {}: {} meets {}", stage, to_string(operation), to_string(*received)));
  begin(id, cost_(*received, transfer(id).stage));
}

int ReplayEngine::group_of(int stage, GroupAxis axis) {
  int& id = group_ids_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(axis)];
  if (id != kNone) return id;
  std::vector<int> members = {stage};
  const bool all = axis == GroupAxis::world || axis == GroupAxis::model || axis == GroupAxis::pipeline;
  const bool ends = axis == GroupAxis::embedding && (stage == 0 || stage == last_stage_);
  if (all) {
    members.clear();
    for (int other = 0; other < std::ssize(stages_); ++other) members.push_back(other);
  } else if (ends && last_stage_ != 0) {
    members = {0, last_stage_};
  }
  id = static_cast<int>(groups_.size());
  groups_.push_back({members, std::vector<std::deque<int>>(members.size()), 0});
  const int known = id;
  for (const int member : members) group_ids_[static_cast<std::size_t>(member)][static_cast<std::size_t>(axis)] = known;
  return known;
}

void ReplayEngine::issue(int stage, const Operation& operation) {
  const int id = static_cast<int>(transfers_.size());
  Stage& here = at(stage);
  const int group = group_of(stage, operation.axis);
  transfers_.push_back({.stage = stage, .group = group, .axis = operation.axis, .remaining = cost_(operation, stage)});
  here.transfer_of[here.next] = id;
  Group& issuing = groups_[static_cast<std::size_t>(group)];
  const auto member = std::find(issuing.members.begin(), issuing.members.end(), stage) - issuing.members.begin();
  issuing.issued[static_cast<std::size_t>(member)].push_back(id);
  carry_out(group);
}

void ReplayEngine::carry_out(int id) {
  const auto waiting = [](const std::deque<int>& issued) { return !issued.empty(); };
  Group& group = groups_[static_cast<std::size_t>(id)];
  while (group.under_way == 0 && std::all_of(group.issued.begin(), group.issued.end(), waiting)) {
    std::vector<int> together;
    for (std::deque<int>& issued : group.issued) {
      together.push_back(issued.front());
      issued.pop_front();
    }
    // A transfer without duration ends at once: none of the others may take the group for free then.
    group.under_way = static_cast<int>(together.size()) + 1;
    for (const int begun : together) begin(begun, transfer(begun).remaining);
    --group.under_way;
  }
}

void ReplayEngine::begin(int id, double seconds) {
  Transfer& begun = transfer(id);
  Stage& here = at(begun.stage);
  account(here);
  ++here.under_way;
  begun.remaining = std::max(0.0, seconds);
  begun.updated_at = now_;
  if (begun.remaining == 0) return finish(id);
  if (links_are_shared_) use_links(id, true);
  push_end(id);
}

void ReplayEngine::push_end(int id) {
  const Transfer& moving = transfer(id);
  events_.push({now_ + moving.remaining / moving.rate, pushed_++, kNone, id, moving.version});
}

void ReplayEngine::finish(int id) {
  Transfer& ended = transfer(id);
  ended.done = true;
  ++ended.version;
  Stage& here = at(ended.stage);
  account(here);
  --here.under_way;
  if (ended.on_links) use_links(id, false);
  if (here.waits_for == id) {
    here.waits_for = kNone;
    here.exposed += std::max(0.0, now_ - here.clock);
    here.clock = std::max(here.clock, now_);
    runnable_.push_back(ended.stage);
  }
  if (ended.group == kNone) return;
  --groups_[static_cast<std::size_t>(ended.group)].under_way;
  carry_out(ended.group);
}

void ReplayEngine::use_links(int id, bool begins) {
  Transfer& user = transfer(id);
  user.on_links = begins;
  const auto axis = static_cast<std::size_t>(user.axis);
  for (const int end : {user.stage, user.sender}) {
    if (end == kNone || (end == user.sender && user.sender == user.stage)) continue;
    Stage& here = at(end);
    here.active_on[axis] += begins ? 1 : -1;
    if (begins) {
      here.active.push_back(id);
    } else {
      here.active.erase(std::find(here.active.begin(), here.active.end(), id));
    }
  }
  set_rates(user.stage);
  if (user.sender != kNone) set_rates(user.sender);
}

int ReplayEngine::sharers(int stage, GroupAxis axis) const {
  int axes = 1;
  for (std::size_t other = 0; other < kGroupAxes; ++other) {
    const bool uses = stages_[static_cast<std::size_t>(stage)].active_on[other] > 0;
    if (uses && shares_[static_cast<std::size_t>(axis)][other]) ++axes;
  }
  return axes;
}

void ReplayEngine::set_rates(int stage) {
  for (const int id : at(stage).active) {
    Transfer& moving = transfer(id);
    int most = sharers(moving.stage, moving.axis);
    if (moving.sender != kNone) most = std::max(most, sharers(moving.sender, moving.axis));
    const double rate = 1.0 / most;
    if (rate == moving.rate) continue;
    moving.remaining = std::max(0.0, moving.remaining - (now_ - moving.updated_at) * moving.rate);
    moving.updated_at = now_;
    moving.rate = rate;
    ++moving.version;
    push_end(id);
  }
}

void ReplayEngine::account(Stage& stage) const {
  const double passed = now_ - stage.changed_at;
  stage.changed_at = now_;
  if (stage.under_way == 0) return;
  stage.transfers += passed;
  if (stage.computes || counted_twice_) stage.hidden += passed;
}

void ReplayEngine::require_ended() const {
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    if (stages_[stage].ended) continue;
    const bool at_end = stages_[stage].next >= programs_[stage].size();
    throw ContractError(fmt::format("stage {} is stuck at {}", stage,
                                    at_end ? "its background operations" : to_string(programs_[stage][stages_[stage].next])));
  }
}

ReplayTiming ReplayEngine::timing() const {
  ReplayTiming timing;
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    const Stage& here = stages_[stage];
    timing.step_seconds = std::max(timing.step_seconds, here.clock);
    timing.busy_seconds.push_back(here.busy);
    timing.exposed_seconds.push_back(here.exposed);
    timing.transfer_seconds.push_back(here.transfers);
    timing.hidden_seconds.push_back(here.hidden);
    timing.communication_seconds = std::max(timing.communication_seconds, here.transfers);
    timing.operations += std::ssize(programs_[stage]);
  }
  return timing;
}

}  // namespace tandem
