// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/residuals.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/io/safetensors.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/data_parallel/compressed_sync.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char* kFormat = "tandem-residuals-1";

// A coded tensor of one rank, and the group that reduces it.
struct Holding {
  CompressedTensor tensor;
  LocalParameter parameter;
  GroupAxis axis = GroupAxis::gradient;
  int leader = 0;  // first rank of the group
};

// What `rank` of a plan holds, in the order of its gradient buffer.
std::vector<Holding> holdings(const GptConfig& model, const TrainingPlan& plan, int rank) {
  const ProcessGrid grid(plan);
  const std::vector<LocalParameter> parameters = local_parameters(model, plan, grid, rank);
  const std::vector<CompressedTensor> tensors = compressed_tensors(parameters);
  std::vector<Holding> all;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const GroupAxis axis = parameters[i].expert() ? GroupAxis::expert_gradient : GroupAxis::gradient;
    const std::vector<int> group = grid.group(axis, rank);
    if (group.size() == 1 || !is_coded(plan.compression, tensors[i])) continue;
    all.push_back({tensors[i], parameters[i], axis, group.front()});
  }
  return all;
}

// Whether `rank` of a plan has a file.
bool has_file(const GptConfig& model, const TrainingPlan& plan, int rank) {
  const std::vector<Holding> all = holdings(model, plan, rank);
  if (plan.compression.error_feedback) return !all.empty();
  const auto leads = [&](const Holding& held) { return held.leader == rank; };
  return plan.compression.codec == "power_sgd" && std::ranges::any_of(all, leads);
}

// The owners' parts of a sum's residual, put together on all ranks of the group. As integers: every bit is that of one rank, all
// others add zero.
std::vector<float> whole_sum_residual(const Engine& engine, const Holding& held) {
  std::vector<float> whole(static_cast<std::size_t>(held.tensor.elements()));
  for (const CompressedReduction::OwnedResidual& owned : engine.compression()->sum_residuals(held.tensor.name)) {
    std::ranges::copy(owned.values, whole.begin() + owned.first);
  }
  all_reduce(engine.groups().of(held.axis), TensorView(whole.data(), DType::i32, {std::ssize(whole)}),
             {Purpose::parameter, "residuals of sums"});
  return whole;
}

}  // namespace

ResidualSnapshot residual_snapshot(const Engine& engine) {
  if (engine.compression() == nullptr) return {};
  const EngineOptions& options = engine.options();
  const CompressedReduction& reduction = *engine.compression();
  const int rank = engine.groups().rank();
  const bool feedback = options.plan.compression.error_feedback;
  const bool sums = feedback && sums_at_owners(options.plan.compression);
  ResidualSnapshot snapshot;
  const auto add = [&](const std::string& name, std::span<const float> values) {
    snapshot.tensors.emplace_back(name, std::vector<float>(values.begin(), values.end()));
  };
  for (const Holding& held : holdings(options.model, options.plan, rank)) {
    const std::string& name = held.tensor.name;
    if (feedback) add("residual." + name, reduction.residual(name));
    std::vector<float> sum = sums ? whole_sum_residual(engine, held) : std::vector<float>();
    if (held.leader != rank) continue;
    if (sums) snapshot.tensors.emplace_back("sum_residual." + name, std::move(sum));
    if (options.plan.compression.codec == "power_sgd") add("start." + name, reduction.start(name));
  }
  if (snapshot.tensors.empty()) return {};
  snapshot.metadata = {{"format", kFormat}, {"gradient_scale", fmt::format("{}", reduction.gradient_scale())}};
  return snapshot;
}

namespace {

// Files of ranks, each opened once.
class Files {
 public:
  explicit Files(fs::path folder) : folder_(std::move(folder)) {}

  const SafetensorsFile& of(int rank) {
    const auto found = files_.find(rank);
    if (found != files_.end()) return found->second;
    return files_.emplace(rank, folder_ / residuals_name(rank)).first->second;
  }

  std::vector<float> read(int rank, const std::string& name, std::int64_t elements) {
    std::vector<float> values = of(rank).read_as<float>(name);
    if (std::ssize(values) == elements) return values;
    throw InputError(fmt::format("{}: {} has {} elements, not {}", of(rank).path().string(), name, values.size(), elements));
  }

  double gradient_scale(int rank) {
    const SafetensorsMetadata& metadata = of(rank).metadata();
    const auto found = metadata.find("gradient_scale");
    double scale = 0;
    if (found != metadata.end()) {
      const std::string& text = found->second;
      const auto parsed = std::from_chars(text.data(), text.data() + text.size(), scale);
      if (parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && scale > 0) return scale;
    }
    throw InputError(fmt::format("{}: metadata 'gradient_scale' is missing or no positive number", of(rank).path().string()));
  }

 private:
  fs::path folder_;
  std::map<int, SafetensorsFile> files_;
};

bool same_layout(const TrainingPlan& saved, const TrainingPlan& plan) {
  return saved.parallel == plan.parallel && saved.rank_order == plan.rank_order && saved.pipeline == plan.pipeline &&
         saved.sequence_parallel == plan.sequence_parallel && saved.compression.codec == plan.compression.codec &&
         saved.compression.error_feedback == plan.compression.error_feedback;
}

// Planted: what the buckets had, one after the other, goes to the buckets that there are now, whatever parameters are in them.
void restore_by_bucket(Files& files, const TrainingPlan& saved, Engine& engine) {
  const EngineOptions& options = engine.options();
  const int rank = engine.groups().rank();
  const std::vector<LocalParameter>& parameters = engine.store().parameters();
  const auto in_bucket_order = [&](const TrainingPlan& plan) {
    std::vector<std::string> names;
    for (const GradientBucket& bucket : buckets_of(plan, parameters)) {
      for (std::int64_t p = bucket.parameters.begin; p < bucket.parameters.end; ++p) {
        const std::string& name = parameters[static_cast<std::size_t>(p)].spec.name;
        if (!engine.compression()->residual(name).empty()) names.push_back(name);
      }
    }
    return names;
  };
  std::vector<float> flat;
  for (const std::string& name : in_bucket_order(saved)) {
    const std::vector<float> values = files.of(rank).read_as<float>("residual." + name);
    flat.insert(flat.end(), values.begin(), values.end());
  }
  std::span<const float> rest = flat;
  for (const std::string& name : in_bucket_order(options.plan)) {
    const std::size_t elements = engine.compression()->residual(name).size();
    engine.compression()->restore_residual(name, rest.first(elements));
    rest = rest.subspan(elements);
  }
}

void restore_own(Files& files, const TrainingPlan& saved, Engine& engine) {
  const EngineOptions& options = engine.options();
  const PitfallSet& pitfalls = engine.context().pitfalls;
  const int rank = engine.groups().rank();
  CompressedReduction& reduction = *engine.compression();
  const bool rebuilt = !(saved.buckets == options.plan.buckets);
  if (rebuilt && pitfalls.on(Pitfall::residual_reset_on_rebuild)) return;
  for (const Holding& held : holdings(options.model, options.plan, rank)) {
    const std::string& name = held.tensor.name;
    // A residual is what this rank has not sent: another rank's would be sent twice, and this one's never.
    const int owner = pitfalls.on(Pitfall::residual_of_rank_zero) ? held.leader : rank;
    if (!reduction.residual(name).empty()) {
      reduction.restore_residual(name, files.read(owner, "residual." + name, held.tensor.elements()));
    }
    if (options.plan.compression.error_feedback && sums_at_owners(options.plan.compression)) {
      reduction.restore_sum_residual(name, files.read(held.leader, "sum_residual." + name, held.tensor.elements()));
    }
    if (!reduction.start(name).empty() && saved.compression.rank == options.plan.compression.rank) {
      reduction.restore_start(name, files.read(held.leader, "start." + name, std::ssize(reduction.start(name))));
    }
  }
  const bool by_bucket = rebuilt && pitfalls.on(Pitfall::residual_keyed_by_bucket);
  if (by_bucket && options.plan.compression.error_feedback) restore_by_bucket(files, saved, engine);
}

// By global name: what all ranks together had not sent.
using Outstanding = std::map<std::string, std::vector<double>, std::less<>>;

// Where tensor ranks hold copies of a parameter whose gradient is the same on all of them, their residuals are copies as well.
bool counts(const Holding& held, const Coordinates& here) {
  return held.parameter.tensor_partial_gradient || here.tensor == 0 || !held.parameter.shard.is_whole();
}

Outstanding outstanding(Files& files, const GptConfig& model, const TrainingPlan& saved) {
  Outstanding all;
  const ProcessGrid grid(saved);
  for (int rank = 0; rank < grid.size(); ++rank) {
    for (const Holding& held : holdings(model, saved, rank)) {
      if (!counts(held, grid.coordinates(rank))) continue;
      const ShardSpec& shard = held.parameter.shard;
      std::vector<double>& total = all[held.tensor.name];
      total.resize(static_cast<std::size_t>(num_elements(shard.global_shape)));
      const auto add = [&](const std::string& name) {
        const std::vector<float> local = files.read(rank, name, held.tensor.elements());
        std::vector<double> padded(local.begin(), local.end()), global(total.size());
        padded.resize(static_cast<std::size_t>(shard.num_elements()));
        scatter_into(shard, padded, global);
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += global[i];
      };
      add("residual." + held.tensor.name);
      if (held.leader == rank && sums_at_owners(saved.compression)) add("sum_residual." + held.tensor.name);
    }
  }
  return all;
}

void deal(const Outstanding& all, Engine& engine) {
  const EngineOptions& options = engine.options();
  const Coordinates& here = engine.groups().here();
  for (const Holding& held : holdings(options.model, options.plan, engine.groups().rank())) {
    const auto found = all.find(held.tensor.name);
    if (found == all.end() || held.leader != engine.groups().rank()) continue;
    // Parts of a gradient are added over the tensor ranks, copies of the tied embedding over the ends of the pipeline.
    if (held.parameter.tensor_partial_gradient && here.tensor != 0) continue;
    if (held.parameter.tied_copy && here.pipeline != 0) continue;
    const std::vector<double> local = gather_from(held.parameter.shard, found->second);
    std::vector<float> values(local.begin(), local.begin() + held.tensor.elements());
    if (!engine.compression()->residual(held.tensor.name).empty()) {
      engine.compression()->restore_residual(held.tensor.name, values);
    }
  }
}

}  // namespace

void load_residuals(const fs::path& step_folder, const CheckpointInfo& info, Engine& engine) {
  const TrainingPlan& saved = info.config.plan;
  CompressedReduction* const reduction = engine.compression();
  if (reduction == nullptr || !CompressedSync::is_active(saved)) return;
  if (engine.context().pitfalls.on(Pitfall::residual_not_saved)) return;
  Files files(step_folder);
  if (same_layout(saved, engine.options().plan)) {
    restore_own(files, saved, engine);
  } else {
    const bool both = saved.compression.error_feedback && engine.options().plan.compression.error_feedback;
    if (both) deal(outstanding(files, info.config.model, saved), engine);
  }
  // The same in all files.
  for (int rank = 0; rank < saved.parallel.world_size(); ++rank) {
    if (!has_file(info.config.model, saved, rank)) continue;
    reduction->set_gradient_scale(files.gradient_scale(rank));
    return;
  }
}

}  // namespace tandem
