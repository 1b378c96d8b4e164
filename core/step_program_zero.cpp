// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

class ZeroChecker {
 public:
  ZeroChecker(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems)
      : program_(program),
        rank_(rank),
        mine_(expectation.ranks[static_cast<std::size_t>(rank)]),
        problems_(problems),
        gradients_(mine_.bucket_sources.size()),
        parameters_(mine_.bucket_sources.size()) {}

  void run() {
    for (int i = 0; i < std::ssize(program_); ++i) {
      const Operation& op = at(i);
      if (op.kind == OpKind::compute) {
        compute(i);
      } else if (op.kind == OpKind::optimizer) {
        optimizer_ = i;
      } else if (is_of_bucket(op) && legal_bucket(op)) {
        if (op.category == MemoryCategory::gradients || op.purpose == Purpose::gradient) {
          gradient(op.bucket, i);
        } else {
          parameter(op.bucket, i);
        }
      }
    }
    gathers_of_the_step();
  }

 private:
  // The whole gradients of a bucket between their allocation and their free.
  struct Gradients {
    int allocated = -1;
    int reduced = -1;
    std::vector<int> added;  // since the allocation, until the reduction
  };
  // The whole parameters of a bucket.
  struct Parameters {
    int allocated = -1;
    int gathered = -1;
    int gathers = 0;  // after the optimizer
    bool reported = false;
  };

  void problem(const std::string& text) { problems_.push_back(fmt::format("rank {}: {}", rank_, text)); }
  [[nodiscard]] const Operation& at(int index) const { return program_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] int buckets() const { return static_cast<int>(mine_.bucket_sources.size()); }
  [[nodiscard]] bool is_dealt(int bucket) const { return mine_.bucket_is_reduced[static_cast<std::size_t>(bucket)]; }
  [[nodiscard]] bool deals_gradients() const { return mine_.zero_stage >= 2; }
  [[nodiscard]] bool deals_parameters() const { return mine_.zero_stage >= 3; }

  // Gradient sums that are no bucket are judged with those of the whole step.
  static bool is_of_bucket(const Operation& op) {
    if (op.kind == OpKind::communicate)
      return op.purpose == Purpose::parameter || (op.purpose == Purpose::gradient && op.bucket >= 0);
    return (op.kind == OpKind::allocate || op.kind == OpKind::free) &&
           (op.category == MemoryCategory::gradients || op.category == MemoryCategory::parameters);
  }

  bool legal_bucket(const Operation& op) {
    if (op.bucket < 0 || op.bucket >= buckets()) {
      problem(fmt::format("{}: the bucket does not exist", to_string(op)));
      return false;
    }
    if (!is_dealt(op.bucket)) {
      problem(fmt::format("{}: the bucket has one rank", to_string(op)));
      return false;
    }
    return true;
  }

  [[nodiscard]] bool is_of(int bucket, const Sources& sources) const {
    const std::vector<int>& own = mine_.bucket_sources[static_cast<std::size_t>(bucket)];
    return std::any_of(sources.begin(), sources.end(),
                       [&](int source) { return std::find(own.begin(), own.end(), source) != own.end(); });
  }
  [[nodiscard]] bool is_of_experts(int bucket) const {
    return !mine_.bucket_is_expert.empty() && mine_.bucket_is_expert[static_cast<std::size_t>(bucket)];
  }

  void compute(int index) {
    const Operation& op = at(index);
    const Sources added = deals_gradients() ? adds(op) : Sources{};
    const Sources read_from = deals_parameters() ? reads(op) : Sources{};
    for (int bucket = 0; bucket < buckets(); ++bucket) {
      if (!is_dealt(bucket)) continue;
      if (is_of(bucket, added)) add(bucket, index);
      if (is_of(bucket, read_from) && (op.part == Part::experts) == is_of_experts(bucket)) read(bucket, index);
    }
  }

  void add(int bucket, int index) {
    Gradients& gradients = gradients_[static_cast<std::size_t>(bucket)];
    if (gradients.allocated < 0) {
      problem(fmt::format("{} adds to gradients of bucket {}, which are not allocated", to_string(at(index)), bucket));
    } else if (gradients.reduced >= 0) {
      problem(fmt::format("{} adds to bucket {} after {}", to_string(at(index)), bucket, to_string(at(gradients.reduced))));
    } else {
      gradients.added.push_back(index);
    }
  }

  // A pass reads in many places what was not brought for it: the first says enough.
  void read(int bucket, int index) {
    Parameters& parameters = parameters_[static_cast<std::size_t>(bucket)];
    if (parameters.reported) return;
    parameters.reported = true;
    if (parameters.allocated < 0) {
      problem(fmt::format("{} reads parameters of bucket {}, which are not allocated", to_string(at(index)), bucket));
    } else if (parameters.gathered < 0) {
      problem(fmt::format("{} reads parameters of bucket {}, which are not gathered", to_string(at(index)), bucket));
    } else if (!waits_for(program_, index, parameters.gathered)) {
      problem(fmt::format("{} does not wait for {}", to_string(at(index)), to_string(at(parameters.gathered))));
    } else {
      parameters.reported = false;
    }
  }

  void gradient(int bucket, int index) {
    const Operation& op = at(index);
    Gradients& gradients = gradients_[static_cast<std::size_t>(bucket)];
    if (op.kind == OpKind::communicate) {
      reduce(gradients, index);
    } else if (!deals_gradients()) {
      problem(fmt::format("{}: stage {} keeps whole gradients", to_string(op), mine_.zero_stage));
    } else if (op.kind == OpKind::allocate) {
      if (gradients.allocated >= 0) problem(fmt::format("{} after {}", to_string(op), to_string(at(gradients.allocated))));
      gradients = {index, -1, {}};
    } else if (gradients.allocated >= 0) {
      if (gradients.reduced < 0) {
        problem(fmt::format("{} before they are reduced", to_string(op)));
      } else if (!waits_for(program_, index, gradients.reduced)) {
        problem(fmt::format("{} does not wait for {}", to_string(op), to_string(at(gradients.reduced))));
      }
      gradients = {};
    }
  }

  void reduce(Gradients& gradients, int index) {
    const Operation& op = at(index);
    if (op.collective != Collective::reduce_scatter) {
      problem(fmt::format("{}: with ZeRO gradients are reduced by reduce_scatter", to_string(op)));
    }
    if (!deals_gradients()) return;
    if (gradients.allocated < 0) {
      problem(fmt::format("{}, which are not allocated", to_string(op)));
      return;
    }
    if (gradients.reduced >= 0) problem(fmt::format("{} after {}", to_string(op), to_string(at(gradients.reduced))));
    for (const int weight : gradients.added) {
      if (waits_for(program_, index, weight)) continue;
      problem(fmt::format("{} does not wait for {}", to_string(op), to_string(at(weight))));
    }
    gradients.reduced = index;
  }

  void parameter(int bucket, int index) {
    const Operation& op = at(index);
    Parameters& parameters = parameters_[static_cast<std::size_t>(bucket)];
    if (op.kind == OpKind::communicate) {
      gather(parameters, index);
    } else if (!deals_parameters()) {
      problem(fmt::format("{}: stage {} keeps whole parameters", to_string(op), mine_.zero_stage));
    } else if (op.kind == OpKind::allocate) {
      if (parameters.allocated >= 0) problem(fmt::format("{} after {}", to_string(op), to_string(at(parameters.allocated))));
      parameters = {.allocated = index};
    } else {
      // What is still being written cannot be given back, whether anybody has read it or not.
      if (parameters.gathered >= 0 && !parameters.reported && !waits_for(program_, index, parameters.gathered)) {
        problem(fmt::format("{} does not wait for {}", to_string(op), to_string(at(parameters.gathered))));
      }
      parameters = {};
    }
  }

  void gather(Parameters& parameters, int index) {
    const Operation& op = at(index);
    if (op.collective != Collective::all_gather) {
      problem(fmt::format("{}: parameters are brought together by all_gather", to_string(op)));
    }
    if (deals_parameters()) {
      if (optimizer_ >= 0) problem(fmt::format("{} follows the optimizer", to_string(op)));
      if (parameters.allocated < 0) problem(fmt::format("{}, which are not allocated", to_string(op)));
      if (parameters.gathered >= 0) problem(fmt::format("{} after {}", to_string(op), to_string(at(parameters.gathered))));
      parameters.gathered = index;
      parameters.reported = false;
      return;
    }
    if (optimizer_ < 0) {
      problem(fmt::format("{} runs before the optimizer", to_string(op)));
    } else {
      ++parameters.gathers;
      if (!waits_for(program_, index, optimizer_)) problem(fmt::format("{} does not wait for the optimizer", to_string(op)));
    }
  }

  void gathers_of_the_step() {
    if (deals_parameters()) return;
    for (int bucket = 0; bucket < buckets(); ++bucket) {
      const int gathers = parameters_[static_cast<std::size_t>(bucket)].gathers;
      if (!is_dealt(bucket) || gathers == 1) continue;
      problem(fmt::format("parameters of bucket {} are gathered {} times after the optimizer, not once", bucket, gathers));
    }
  }

  const StepProgram& program_;
  int rank_;
  const RankExpectation& mine_;
  Problems& problems_;
  std::vector<Gradients> gradients_;    // [buckets]
  std::vector<Parameters> parameters_;  // [buckets]
  int optimizer_ = -1;
};

}  // namespace

void check_zero(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems) {
  if (expectation.ranks[static_cast<std::size_t>(rank)].zero_stage > 0) ZeroChecker(program, rank, expectation, problems).run();
}

}  // namespace tandem::step_program_check
