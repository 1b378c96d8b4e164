// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <tuple>

#include "core/step_program_test_support.h"

namespace tandem::step_program_test {
namespace {

std::vector<int> read_sources(const Operation& op) {
  if (op.kind != OpKind::compute || op.phase == Phase::backward_weight) return {};
  if (op.part == Part::head_norm) return {kFinalNormSource};
  if (op.part == Part::head_logits || op.part == Part::head_loss) return {kHeadSource};
  if (op.part == Part::embedding_lookup) return {kEmbeddingSource};
  return {op.part == Part::embedding ? kPositionSource : op.layer};
}

std::vector<int> added_sources(const Operation& op) {
  if (op.kind != OpKind::compute) return {};
  if (op.part == Part::head_loss) return {kHeadSource};
  if (op.phase != Phase::backward_weight) return {};
  if (op.part == Part::head_norm) return {kFinalNormSource};
  if (op.part == Part::embedding_lookup) return {kEmbeddingSource};
  return op.part == Part::embedding ? std::vector<int>{kEmbeddingSource, kPositionSource} : std::vector<int>{op.layer};
}

// Turns the program of one rank into one with ZeRO.
class Dealer {
 public:
  Dealer(const WorldShape& shape, int stage, RankExpectation& expected, StepProgram& program, const ProgramExpectation& all,
         int rank)
      : shape_(shape), stage_(stage), expected_(expected), program_(program), all_(all), rank_(rank) {}

  void run() {
    make_buckets();
    std::erase_if(program_,
                  [](const Operation& op) { return op.kind == OpKind::communicate && op.purpose == Purpose::gradient; });
    for (int bucket = 0; bucket < std::ssize(expected_.bucket_sources); ++bucket) {
      if (!expected_.bucket_is_reduced[static_cast<std::size_t>(bucket)]) continue;
      if (stage_ >= 2) around(bucket, MemoryCategory::gradients);
      if (stage_ >= 3) around(bucket, MemoryCategory::parameters);
      if (stage_ == 1) before_[norm()].push_back(communicate(bucket, Purpose::gradient, -1));
      if (stage_ <= 2)
        after_[find_operation(program_, is_kind(OpKind::optimizer))].push_back(communicate(bucket, Purpose::parameter, -1));
    }
    for (const GroupAxis axis : {GroupAxis::gradient, GroupAxis::expert_gradient}) {
      if (all_.group(axis, rank_).size() == 1 || (axis == GroupAxis::expert_gradient && !shape_.experts)) continue;
      Operation sum;
      sum.kind = OpKind::communicate;
      sum.axis = axis;
      sum.bytes = kNormBytes;
      after_[norm()].push_back(sum);
    }
    insert();
  }

 private:
  void bucket(std::vector<int> sources, bool experts) {
    expected_.bucket_sources.push_back(std::move(sources));
    expected_.bucket_is_expert.push_back(experts);
    expected_.bucket_is_reduced.push_back(all_.group(axis(expected_.bucket_is_expert.size() - 1), rank_).size() > 1);
  }

  void make_buckets() {
    expected_.zero_stage = stage_;
    expected_.bucket_sources.clear();
    expected_.bucket_is_reduced.clear();
    for (auto layers = expected_.chunk_layers.rbegin(); layers != expected_.chunk_layers.rend(); ++layers) {
      for (auto layer = static_cast<int>(layers->end) - 1; layer >= layers->begin; --layer) {
        if (shape_.experts) bucket({layer}, true);
        bucket({layer}, false);
      }
    }
    const bool embedding = expected_.embedding_chunk >= 0;
    const bool head = expected_.head_chunk >= 0;
    if (head) bucket({kFinalNormSource}, false);
    if (embedding) bucket({kPositionSource}, false);
    if (embedding && head) bucket({kHeadSource, kEmbeddingSource}, false);
    if (embedding != head) bucket({embedding ? kEmbeddingSource : kHeadSource}, false);
  }

  [[nodiscard]] GroupAxis axis(std::size_t bucket) const {
    return expected_.bucket_is_expert[bucket] ? GroupAxis::expert_gradient : GroupAxis::gradient;
  }

  [[nodiscard]] int norm() const { return find_operation(program_, is_kind(OpKind::gradient_norm)); }

  Operation communicate(int bucket, Purpose purpose, int micro_batch) const {
    Operation op;
    op.kind = OpKind::communicate;
    op.collective = purpose == Purpose::gradient ? Collective::reduce_scatter : Collective::all_gather;
    op.axis = axis(static_cast<std::size_t>(bucket));
    op.purpose = purpose;
    op.bucket = bucket;
    op.micro_batch = micro_batch;
    op.bytes = purpose == Purpose::gradient ? kGradientBytes : kParameterBytes;
    return op;
  }

  // Memory and communication around each run of operations of one pass that use the bucket.
  void around(int bucket, MemoryCategory category) {
    const bool gradients = category == MemoryCategory::gradients;
    const auto& sources = expected_.bucket_sources[static_cast<std::size_t>(bucket)];
    const bool experts = expected_.bucket_is_expert[static_cast<std::size_t>(bucket)];
    std::vector<std::tuple<int, int, Phase, int, int>> runs;  // source, micro-batch, phase; first and last operation
    for (int i = 0; i < std::ssize(program_); ++i) {
      const Operation& op = program_[static_cast<std::size_t>(i)];
      const std::vector<int> used = gradients ? added_sources(op) : read_sources(op);
      const auto found = std::find_first_of(used.begin(), used.end(), sources.begin(), sources.end());
      if (found == used.end()) continue;
      const int source = *found;
      if (!gradients && experts != (op.part == Part::experts)) continue;
      const auto same = [&](const auto& run) {
        return std::get<0>(run) == source && std::get<1>(run) == op.micro_batch && std::get<2>(run) == op.phase;
      };
      if (runs.empty() || !same(runs.back())) runs.emplace_back(source, op.micro_batch, op.phase, i, i);
      std::get<4>(runs.back()) = i;
    }
    for (const auto& [source, micro_batch, phase, first, last] : runs) {
      Operation memory;
      memory.kind = OpKind::allocate;
      memory.category = category;
      memory.bucket = bucket;
      memory.micro_batch = micro_batch;
      memory.phase = phase;
      memory.bytes = gradients ? kGradientBytes : kParameterBytes;
      before_[first].push_back(memory);
      if (!gradients) before_[first].push_back(communicate(bucket, Purpose::parameter, micro_batch));
      if (gradients) after_[last].push_back(communicate(bucket, Purpose::gradient, micro_batch));
      memory.kind = OpKind::free;
      after_[last].push_back(memory);
    }
  }

  void insert() {
    StepProgram with;
    for (int i = 0; i < std::ssize(program_); ++i) {
      with.insert(with.end(), before_[i].begin(), before_[i].end());
      with.push_back(program_[static_cast<std::size_t>(i)]);
      with.insert(with.end(), after_[i].begin(), after_[i].end());
    }
    program_ = std::move(with);
    chain(program_);
  }

  const WorldShape& shape_;
  int stage_;
  RankExpectation& expected_;
  StepProgram& program_;
  const ProgramExpectation& all_;
  int rank_;
  std::map<int, std::vector<Operation>> before_, after_;  // index in the program without ZeRO
};

bool shares(const std::vector<int>& sources, const std::vector<int>& others) {
  return std::find_first_of(sources.begin(), sources.end(), others.begin(), others.end()) != sources.end();
}

bool is_sum_of_bucket(const Operation& op) {
  return op.kind == OpKind::communicate && op.purpose == Purpose::gradient && op.bucket >= 0;
}

// Takes the frees of gradients away from their reductions: to where they are allocated again, or to the norm.
void free_late(StepProgram& program) {
  StepProgram late;
  std::map<int, Operation> waiting;  // by bucket
  for (const Operation& op : program) {
    const bool gradients = op.category == MemoryCategory::gradients;
    if (op.kind == OpKind::free && gradients) {
      waiting.emplace(op.bucket, op);
      continue;
    }
    for (auto free = waiting.begin(); free != waiting.end();) {
      const bool now = op.kind == OpKind::gradient_norm || (op.kind == OpKind::allocate && gradients && op.bucket == free->first);
      if (now) late.push_back(free->second);
      free = now ? waiting.erase(free) : std::next(free);
    }
    late.push_back(op);
  }
  program = std::move(late);
}

void reduce_early(StepProgram& program, const RankExpectation& expected) {
  StepProgram sums;
  for (const Operation& op : program) {
    if (is_sum_of_bucket(op)) sums.push_back(op);
  }
  std::erase_if(program, is_sum_of_bucket);
  for (const Operation& sum : sums) {
    std::size_t behind = 0;
    for (std::size_t i = 0; i < program.size(); ++i) {
      if (shares(added_sources(program[i]), expected.bucket_sources[static_cast<std::size_t>(sum.bucket)])) behind = i;
    }
    program.insert(program.begin() + static_cast<std::ptrdiff_t>(behind) + 1, sum);
  }
}

}  // namespace

World make_overlapped_world(const WorldShape& shape, int stage) {
  World world = stage == 0 ? make_world(shape) : make_zero_world(shape, stage);
  for (std::size_t rank = 0; rank < world.programs.size(); ++rank) {
    StepProgram& program = world.programs[rank];
    stage < 2 ? reduce_early(program, world.expectation.ranks[rank]) : free_late(program);
    for (Operation& op : program) {
      const bool gather = stage == 3 && op.kind == OpKind::communicate && op.purpose == Purpose::parameter;
      op.background = is_sum_of_bucket(op) || gather;
    }
    chain_overlapped(program, world.expectation.ranks[rank]);
  }
  return world;
}

void chain_overlapped(StepProgram& program, const RankExpectation& expected) {
  OperationId foreground = -1;
  std::map<int, OperationId> reducing, gathering;  // by bucket
  for (OperationId i = 0; i < std::ssize(program); ++i) {
    Operation& op = program[static_cast<std::size_t>(i)];
    op.after.clear();
    if (foreground >= 0) op.after.push_back(foreground);
    for (auto gather = gathering.begin(); gather != gathering.end();) {
      const auto bucket = static_cast<std::size_t>(gather->first);
      const bool experts = !expected.bucket_is_expert.empty() && expected.bucket_is_expert[bucket];
      const bool reads = shares(read_sources(op), expected.bucket_sources[bucket]) && experts == (op.part == Part::experts);
      if (reads) op.after.push_back(gather->second);
      gather = reads ? gathering.erase(gather) : std::next(gather);
    }
    for (auto sum = reducing.begin(); sum != reducing.end();) {
      const bool frees = op.kind == OpKind::free && op.category == MemoryCategory::gradients && op.bucket == sum->first;
      const bool needs = frees || op.kind == OpKind::gradient_norm;
      if (needs) op.after.push_back(sum->second);
      sum = needs ? reducing.erase(sum) : std::next(sum);
    }
    if (!op.background) foreground = i;
    if (op.background && op.purpose == Purpose::gradient) reducing[op.bucket] = i;
    if (op.background && op.purpose == Purpose::parameter) gathering[op.bucket] = i;
  }
}

World make_zero_world(const WorldShape& shape, int stage) {
  World world = make_world(shape);
  for (std::size_t rank = 0; rank < world.programs.size(); ++rank) {
    Dealer(shape, stage, world.expectation.ranks[rank], world.programs[rank], world.expectation, static_cast<int>(rank)).run();
  }
  return world;
}

void chain(StepProgram& program) {
  for (OperationId i = 0; i < std::ssize(program); ++i) {
    program[static_cast<std::size_t>(i)].after = i > 0 ? std::vector<OperationId>{i - 1} : std::vector<OperationId>{};
  }
}

void erase_everywhere(World& world, const Wanted& wanted) {
  for (StepProgram& program : world.programs) {
    erase_operation(program, find_operation(program, wanted));
    chain(program);
  }
}

void move_before(StepProgram& program, const Wanted& moved, const Wanted& wanted) {
  const int from = find_operation(program, moved);
  const int to = find_operation(program, wanted);
  move_operation(program, from, from < to ? to - 1 : to);
  chain(program);
}

void move_behind(StepProgram& program, const Wanted& moved, const Wanted& wanted) {
  const int from = find_operation(program, moved);
  const int to = find_operation(program, wanted);
  move_operation(program, from, from < to ? to : to + 1);
  chain(program);
}

Wanted is_of_bucket(OpKind kind, MemoryCategory category, int bucket, int micro_batch) {
  const Purpose purpose = category == MemoryCategory::gradients ? Purpose::gradient : Purpose::parameter;
  return [=](const Operation& op) {
    const bool same = kind == OpKind::communicate ? op.purpose == purpose : op.category == category;
    return op.kind == kind && same && op.bucket == bucket && op.micro_batch == micro_batch;
  };
}

}  // namespace tandem::step_program_test
