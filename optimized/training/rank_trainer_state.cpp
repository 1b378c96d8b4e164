// SPDX-License-Identifier: Apache-2.0
// What a rank keeps of its run, and goes back to: checkpoints, copies in memory, rollbacks.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/load.h"
#include "optimized/checkpoint/tiers.h"
#include "optimized/checkpoint/timings.h"
#include "optimized/comm/world.h"
#include "optimized/engine/progress_scope.h"
#include "optimized/training/rank_trainer.h"

namespace tandem {
namespace {

bool due(std::int64_t done, std::int64_t every) { return every > 0 && done % every == 0; }

// Planted: what a rollback forgets.
class KeptMoments {
 public:
  explicit KeptMoments(ParameterStore& store) : store_(store) {
    for_each([&](TensorView moment) {
      const std::size_t at = bytes_.size();
      bytes_.resize(at + static_cast<std::size_t>(moment.size_bytes()));
      read_tensor(store_.memory(), moment, bytes_.data() + at);
    });
  }
  void put_back() {
    std::size_t at = 0;
    for_each([&](TensorView moment) {
      write_tensor(store_.memory(), bytes_.data() + at, moment);
      at += static_cast<std::size_t>(moment.size_bytes());
    });
  }

 private:
  template <class Use>
  void for_each(const Use& use) {
    for (const OwnedPart& part : store_.parts()) {
      use(store_.first_moment(part));
      use(store_.second_moment(part));
    }
  }
  ParameterStore& store_;
  std::vector<std::byte> bytes_;
};

}  // namespace

CheckpointInfo RankTrainer::info(std::int64_t done) const {
  CheckpointInfo info;
  info.config = options_.config;
  info.next_step = done;
  info.data = options_.data_name;
  info.data_identity = options_.data->identity();
  const std::set<std::int64_t> skipped = data_.source.list().batches();
  info.skipped_batches.assign(skipped.begin(), skipped.end());
  return info;
}

void RankTrainer::wait_for_all() {
  const ProgressScope waiting(progress_, true);
  comm_.barrier();
}

// Retention counts files; the last that is known to be good stays however many come after it, and where the run may go back,
// what it would go back to.
std::set<std::int64_t> RankTrainer::worth_keeping() const {
  if (options_.config.anomaly.action != AnomalyAction::report) return {guard_->rollback_step()};
  const std::optional<std::int64_t> healthy = guard_->ledger().newest_healthy();
  return healthy ? std::set{*healthy} : std::set<std::int64_t>();
}

AnomalyDecision RankTrainer::save(std::int64_t done) {
  if (options_.output.empty()) return AnomalyDecision::go_on;
  enter(RunPhase::checkpoint);
  const SpanScope span(&timeline_, "checkpoint", Activity::checkpoint, static_cast<int>(done - 1));
  if (watches()) {
    // What is kept must be worth going back to.
    const AnomalyDecision decision = guard_->before_save();
    last_is_refused_ = decision == AnomalyDecision::skip_step;
    if (last_is_refused_ && leads()) refused(done);
    if (decision != AnomalyDecision::go_on) return decision;
    if (!options_.pitfalls.on(Pitfall::healthy_checkpoint_pruned)) checkpointer_.protect(worth_keeping());
  }
  checkpointer_.save(info(done));
  if (options_.faults != nullptr) options_.faults->during(FaultMoment::save, done, comm_.rank());
  if (watches()) guard_->saved(done);
  return AnomalyDecision::go_on;
}

void RankTrainer::keep_in_memory(std::int64_t done) {
  if (memory_ == nullptr || !due(done, options_.config.memory_every_steps)) return;
  // As of checkpoints: a restart from a copy whose replicas differ would spread what nobody has found yet.
  if (watches() && !guard_->vouches_for_state()) return;
  enter(RunPhase::checkpoint);
  const SpanScope span(&timeline_, "copy in memory", Activity::checkpoint, static_cast<int>(done - 1));
  memory_->save(info(done));
  if (leads() && memory_->problem() != memory_problem_) {
    memory_problem_ = memory_->problem();
    if (!memory_problem_.empty()) tell_problem("no copy in memory: " + memory_problem_);
  }
  if (options_.faults != nullptr) options_.faults->during(FaultMoment::save, done, comm_.rank());
}

// To the state that later steps have shown to be good, on all ranks; the step to go on with.
std::int64_t RankTrainer::roll_back() {
  checkpointer_.finish();
  enter(RunPhase::restore);
  const std::int64_t target = guard_->rollback_step();
  if (leads()) {
    FileOperations& files = options_.checkpoint_files != nullptr ? *options_.checkpoint_files : system_files();
    set_aside_checkpoints_after(options_.output, target, files);
    if (options_.store != nullptr) remove_remote_after(*options_.store, target);
  }
  wait_for_all();
  load(target);
  if (memory_ != nullptr) memory_->forget_after(target);
  guard_->rolled_back();
  wait_for_all();
  // The ranks of one process share its loader.
  if (leads() || options_.world.transport != "threads") {
    std::set<std::int64_t> skipped = data_.source.list().batches();
    skipped.insert(guard_->ledger().skipped_batches.begin(), guard_->ledger().skipped_batches.end());
    data_.source.set(SkipList(std::move(skipped), options_.pitfalls));
    data_.batches.rewind(target);
  }
  wait_for_all();
  report_incidents();
  if (!leads()) return target;
  const auto kept = static_cast<std::size_t>(std::max<std::int64_t>(0, target - report_.first_step));
  report_.steps.resize(std::min(kept, report_.steps.size()));
  report_.step_seconds.resize(report_.steps.size());
  report_.first_step = std::min(report_.first_step, target);
  std::erase_if(report_.validation_losses, [target](const auto& entry) { return entry.first > target; });
  return target;
}

void RankTrainer::load(std::int64_t step) {
  const bool is_beginning = resumed_ && resumed_->next_step == step;
  const std::filesystem::path own = options_.output / step_folder_name(step);
  const std::filesystem::path folder = is_beginning && !std::filesystem::exists(own) ? *options_.resume : own;
  std::optional<KeptMoments> moments;
  const bool has_moments = options_.config.optimizer.kind == OptimizerKind::adamw;
  if (options_.pitfalls.on(Pitfall::rollback_keeps_moments) && has_moments) moments.emplace(engine_.store());
  load_checkpoint(folder, read_checkpoint_info(folder), engine_);
  if (moments) moments->put_back();
}

void RankTrainer::tell_problem(const std::string& problem) {
  report_.checkpoint_problems.push_back(problem);
  if (options_.on_checkpoint_problem) options_.on_checkpoint_problem(problem);
}

void RankTrainer::refused(std::int64_t done) {
  tell_problem(fmt::format(
      "the checkpoint of step {} was not written: the state is not sound (incidents say why); anomaly_action=rollback would go "
      "back to the last that is",
      done));
}

void RankTrainer::report_checkpoints() {
  if (!leads()) return;
  const std::vector<std::string>& problems = checkpointer_.problems();
  for (; problems_told_ < problems.size(); ++problems_told_) tell_problem(problems[problems_told_]);
  report_.last_checkpoint_failed = last_is_refused_ || !checkpointer_.last_is_safe();
  report_.checkpoint_times = checkpointer_.times();
  report_.checkpoint = checkpointer_.newest();
  keep_timings();
}

void RankTrainer::report_incidents() {
  if (!watches() || !leads()) return;
  const std::vector<AnomalyIncident>& incidents = guard_->incidents();
  for (; told_ < incidents.size(); ++told_) {
    report_.incidents.push_back(incidents[told_]);
    if (options_.on_incident) options_.on_incident(incidents[told_]);
  }
}

void RankTrainer::keep_timings() {
  const std::vector<CheckpointTimes>& times = report_.checkpoint_times;
  for (; timed_ < times.size() && times[timed_].ended; ++timed_) {
    if (!times[timed_].published || report_.step_seconds.empty()) continue;
    std::vector<double> steps = report_.step_seconds;
    std::nth_element(steps.begin(), steps.begin() + std::ssize(steps) / 2, steps.end());
    try {
      append_timings(options_.output, {times[timed_], steps[steps.size() / 2]});
    } catch (const IoError& error) {
      if (options_.on_checkpoint_problem) options_.on_checkpoint_problem(error.what());
    }
  }
}

}  // namespace tandem
