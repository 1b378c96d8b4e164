// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

class GradientChecker {
 public:
  GradientChecker(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems)
      : program_(program),
        rank_(rank),
        mine_(expectation.ranks[static_cast<std::size_t>(rank)]),
        norm_of_several_(expectation.group(GroupAxis::model, rank).size() > 1),
        problems_(problems) {}

  void run() {
    collect();
    end_of_step();
    norm_sums();
    counts();
    for (const int sum : sums_) {
      if (mine_.zero_stage >= 2 && at(sum).bucket >= 0) continue;  // many, and judged by check_zero
      const std::vector<bool> before_sum = all_before(program_, sum);
      contributions_before(sum, before_sum);
      reductions_before(sum, before_sum);
    }
    waits_at_the_end();
  }

 private:
  void problem(const std::string& text) { problems_.push_back(fmt::format("rank {}: {}", rank_, text)); }
  [[nodiscard]] const Operation& at(int index) const { return program_[static_cast<std::size_t>(index)]; }

  void collect() {
    for (int i = 0; i < std::ssize(program_); ++i) {
      const Operation& op = at(i);
      if (op.kind == OpKind::compute) {
        last_compute_ = i;
        for (const int source : adds(op)) contributions_[source].push_back(i);
      } else if (op.kind == OpKind::gradient_norm) {
        norm_ = i;
        ++norms_;
      } else if (op.kind == OpKind::optimizer) {
        optimizer_ = i;
        ++optimizers_;
      } else if (op.kind == OpKind::communicate && op.purpose == Purpose::gradient) {
        sums_.push_back(i);
      } else if (op.kind == OpKind::communicate && op.purpose == Purpose::other) {
        if (op.axis == GroupAxis::model) model_sums_.push_back(i);
        if (op.axis == GroupAxis::gradient || op.axis == GroupAxis::expert_gradient) part_sums_.push_back(i);
      }
    }
  }

  void end_of_step() {
    if (norms_ != 1) problem(fmt::format("the gradient norm is taken {} times, not once", norms_));
    if (optimizers_ != 1) problem(fmt::format("the optimizer runs {} times, not once", optimizers_));
    if (norms_ == 0 || optimizers_ == 0) return;
    if (norm_ < last_compute_) problem(fmt::format("the gradient norm is taken before {}", to_string(at(last_compute_))));
    if (optimizer_ < norm_) problem("the optimizer runs before the gradient norm");
  }

  // Squares are summed over the ranks that hold the parameters of one replica and, with ZeRO, over those that hold the parts of
  // one parameter.
  void norm_sums() {
    if (norms_ == 0 || optimizers_ == 0) return;
    if (norm_of_several_ && model_sums_.size() != 1) {
      problem(fmt::format("the gradient norm is summed over the model group {} times, not once", model_sums_.size()));
    }
    for (const int sum : model_sums_) {
      if (!after_norm(sum)) problem("the sum over the model group is not between gradient norm and optimizer");
    }
    for (const GroupAxis axis : {GroupAxis::gradient, GroupAxis::expert_gradient}) {
      const auto sums =
          std::count_if(part_sums_.begin(), part_sums_.end(), [&](int sum) { return at(sum).axis == axis && after_norm(sum); });
      if (!deals_over(axis) || sums == 1) continue;
      problem(fmt::format("the gradient norm is summed over the {} group {} times, not once", name(axis), sums));
    }
  }
  void waits_at_the_end() {
    if (norm_ < 0) return;
    const std::vector<bool> before_norm = all_before(program_, norm_);
    const std::vector<bool> before_optimizer = optimizer_ < 0 ? std::vector<bool>{} : all_before(program_, optimizer_);
    const auto waited_for = [](const std::vector<bool>& waits, int sum) { return waits[static_cast<std::size_t>(sum)]; };
    for (const int sum : sums_) {
      if (!waited_for(before_norm, sum)) {
        problem(fmt::format("the gradient norm does not wait for {}", to_string(at(sum))));
      } else if (optimizer_ > norm_ && !waited_for(before_optimizer, sum)) {
        problem(fmt::format("the optimizer does not wait for {}", to_string(at(sum))));
      }
    }
    for (const std::vector<int>* sums : {&model_sums_, &part_sums_}) {
      for (const int sum : *sums) {
        if (!at(sum).background || !after_norm(sum) || waited_for(before_optimizer, sum)) continue;
        problem(fmt::format("the optimizer does not wait for {}", to_string(at(sum))));
      }
    }
  }
  [[nodiscard]] bool deals_over(GroupAxis axis) const {
    for (std::size_t bucket = 0; mine_.zero_stage > 0 && bucket < mine_.bucket_is_reduced.size(); ++bucket) {
      const bool experts = !mine_.bucket_is_expert.empty() && mine_.bucket_is_expert[bucket];
      if (mine_.bucket_is_reduced[bucket] && experts == (axis == GroupAxis::expert_gradient)) return true;
    }
    return false;
  }
  [[nodiscard]] bool after_norm(int index) const { return index > norm_ && index < optimizer_; }

  // all_gather may bring sums back that reduce_scatter made: it reduces nothing.
  // With ZeRO from stage 2 on buckets are reduced many times (check_zero).
  void counts() {
    std::map<int, int> reduced;  // bucket -> times
    for (const int sum : sums_) {
      if (at(sum).collective != Collective::all_gather) ++reduced[at(sum).bucket];
    }
    const auto buckets = static_cast<int>(mine_.bucket_is_reduced.size());
    for (int bucket = 0; mine_.zero_stage < 2 && bucket < buckets; ++bucket) {
      const int expected = mine_.bucket_is_reduced[static_cast<std::size_t>(bucket)] ? 1 : 0;
      if (reduced[bucket] == expected) continue;
      problem(fmt::format("gradient bucket {} is reduced {} times, not {}", bucket, reduced[bucket], expected));
    }
    for (const auto& [bucket, times] : reduced) {
      if (bucket >= buckets || bucket == -1 || bucket < kTiedEmbeddingGradient) {
        problem(fmt::format("gradient bucket {} does not exist", bucket));
      } else if (bucket < 0 && times > 1) {
        problem(fmt::format("gradient bucket {} is reduced {} times, not 1", bucket, times));
      }
    }
  }

  [[nodiscard]] Sources sources(int bucket) const {
    if (bucket == kTiedEmbeddingGradient) return {kEmbeddingSource, kHeadSource};
    if (bucket >= 0 && bucket < std::ssize(mine_.bucket_sources)) return mine_.bucket_sources[static_cast<std::size_t>(bucket)];
    Sources all;
    if (bucket == kTensorPartialGradients) {
      for (const auto& [source, operations] : contributions_) all.push_back(source);
    }
    return all;
  }

  [[nodiscard]] bool may_hold_tensors_of(int bucket, int sum) const {
    if (at(sum).bucket == kTensorPartialGradients) return true;
    const Sources& of_bucket = mine_.bucket_sources[static_cast<std::size_t>(bucket)];
    return std::any_of(of_bucket.begin(), of_bucket.end(),
                       [](int source) { return source == kEmbeddingSource || source == kHeadSource; });
  }

  // Sums over other axes than the buckets' are of what the buckets' reductions leave: they come last, whoever keeps what.
  void reductions_before(int sum, const std::vector<bool>& waits) {
    if (at(sum).bucket >= 0) return;
    for (const int reduction : sums_) {
      const int bucket = at(reduction).bucket;
      if (bucket < 0 || bucket >= std::ssize(mine_.bucket_sources) || !may_hold_tensors_of(bucket, sum)) continue;
      if (waits[static_cast<std::size_t>(reduction)]) continue;
      problem(fmt::format("{} does not wait for {}", to_string(at(sum)), to_string(at(reduction))));
    }
  }

  void contributions_before(int sum, const std::vector<bool>& waits) {
    for (const int source : sources(at(sum).bucket)) {
      const auto found = contributions_.find(source);
      if (found == contributions_.end()) continue;  // another rank's, or missing and reported as work
      for (const int contribution : found->second) {
        if (waits[static_cast<std::size_t>(contribution)]) continue;
        problem(fmt::format("{} does not wait for {}", to_string(at(sum)), to_string(at(contribution))));
      }
    }
  }

  const StepProgram& program_;
  int rank_;
  const RankExpectation& mine_;
  bool norm_of_several_;  // the parameters of one replica lie on several ranks
  Problems& problems_;
  std::map<int, std::vector<int>> contributions_;  // source as in bucket_sources -> the operations that add to it
  std::vector<int> sums_, model_sums_, part_sums_;
  int last_compute_ = -1, norm_ = -1, norms_ = 0, optimizer_ = -1, optimizers_ = 0;
};

}  // namespace

void check_gradients(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems) {
  GradientChecker(program, rank, expectation, problems).run();
}

}  // namespace tandem::step_program_check
