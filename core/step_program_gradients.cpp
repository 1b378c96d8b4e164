// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

// Everything that one operation waits for, directly or through others.
class WaitsFor {
 public:
  explicit WaitsFor(const StepProgram& program) : program_(program), seen_(program.size(), false) {}

  const std::vector<bool>& of(int index) {
    std::fill(seen_.begin(), seen_.end(), false);
    std::vector<int> open = {index};
    while (!open.empty()) {
      const int at = open.back();
      open.pop_back();
      for (const OperationId before : program_[static_cast<std::size_t>(at)].after) {
        if (before < 0 || before >= at || seen_[static_cast<std::size_t>(before)]) continue;
        seen_[static_cast<std::size_t>(before)] = true;
        open.push_back(before);
      }
    }
    return seen_;
  }

 private:
  const StepProgram& program_;
  std::vector<bool> seen_;
};

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
    WaitsFor waits(program_);
    for (const int sum : sums_) {
      if (mine_.zero_stage >= 2 && at(sum).bucket >= 0) continue;  // many, and judged by check_zero
      const std::vector<bool>& before_sum = waits.of(sum);
      weights_before(sum, before_sum);
      parts_before(sum, before_sum);
    }
    if (norm_ < 0) return;
    const std::vector<bool>& before_norm = waits.of(norm_);
    for (const int sum : sums_) {
      if (!before_norm[static_cast<std::size_t>(sum)])
        problem(fmt::format("the gradient norm does not wait for {}", to_string(at(sum))));
    }
  }

 private:
  void problem(const std::string& text) { problems_.push_back(fmt::format("rank {}: {}", rank_, text)); }
  [[nodiscard]] const Operation& at(int index) const { return program_[static_cast<std::size_t>(index)]; }

  void collect() {
    for (int i = 0; i < std::ssize(program_); ++i) {
      const Operation& op = at(i);
      if (op.kind == OpKind::compute) {
        last_compute_ = i;
        if (op.phase != Phase::backward_weight) continue;
        const bool embedding = op.part == Part::embedding || op.part == Part::embedding_lookup;
        const int source = op.layer >= 0 ? op.layer : embedding ? kEmbeddingSource : kFinalNormSource;
        weights_[source].push_back(i);
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

  [[nodiscard]] std::vector<int> sources(int bucket) const {
    std::vector<int> list;
    if (bucket == kTiedEmbeddingGradient) {
      list = {kEmbeddingSource, kFinalNormSource};
    } else if (bucket == kTensorPartialGradients) {
      for (const auto& [source, operations] : weights_) list.push_back(source);
    } else if (bucket >= 0 && bucket < std::ssize(mine_.bucket_sources)) {
      list = mine_.bucket_sources[static_cast<std::size_t>(bucket)];
      // The head's matrix has its gradient before the head's backward begins.
      std::replace(list.begin(), list.end(), kHeadSource, kFinalNormSource);
      std::replace(list.begin(), list.end(), kPositionSource, kEmbeddingSource);
    }
    return list;
  }

  // Sums over other axes than the buckets' are, from stage 2 on, of the parts that the buckets' reductions leave.
  void parts_before(int sum, const std::vector<bool>& waits) {
    if (mine_.zero_stage < 2 || at(sum).bucket >= 0) return;
    for (const int reduction : sums_) {
      if (at(reduction).bucket < 0 || at(reduction).bucket >= std::ssize(mine_.bucket_sources)) continue;
      const std::vector<int>& of_bucket = mine_.bucket_sources[static_cast<std::size_t>(at(reduction).bucket)];
      const bool shared = at(sum).bucket == kTensorPartialGradients ||
                          std::any_of(of_bucket.begin(), of_bucket.end(),
                                      [](int source) { return source == kEmbeddingSource || source == kHeadSource; });
      if (shared && !waits[static_cast<std::size_t>(reduction)]) {
        problem(fmt::format("{} does not wait for {}", to_string(at(sum)), to_string(at(reduction))));
      }
    }
  }

  void weights_before(int sum, const std::vector<bool>& waits) {
    for (const int source : sources(at(sum).bucket)) {
      const auto found = weights_.find(source);
      if (found == weights_.end()) continue;  // another rank's, or missing and reported as work
      for (const int weight : found->second) {
        if (waits[static_cast<std::size_t>(weight)]) continue;
        problem(fmt::format("{} does not wait for {}", to_string(at(sum)), to_string(at(weight))));
      }
    }
  }

  const StepProgram& program_;
  int rank_;
  const RankExpectation& mine_;
  bool norm_of_several_;  // the parameters of one replica lie on several ranks
  Problems& problems_;
  std::map<int, std::vector<int>> weights_;  // source as in bucket_sources -> its backward_weight operations
  std::vector<int> sums_, model_sums_, part_sums_;
  int last_compute_ = -1, norm_ = -1, norms_ = 0, optimizer_ = -1, optimizers_ = 0;
};

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

void check_gradients(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems) {
  GradientChecker(program, rank, expectation, problems).run();
}

MemoryFacts check_memory(const StepProgram& program, int rank, Problems& problems) {
  return MemoryChecker(rank, problems).run(program);
}

}  // namespace tandem::step_program_check
