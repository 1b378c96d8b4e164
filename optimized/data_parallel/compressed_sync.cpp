// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/compressed_sync.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

CompressedReductionOptions options_of(const RankContext& context, const TrainingPlan& plan, std::uint64_t seed,
                                      const ProcessGroups& groups, const std::vector<LocalParameter>& parameters) {
  return {plan.compression, seed, compressed_tensors(parameters),
          compressed_buckets(plan, groups.grid(), groups.rank(), parameters), context.pitfalls};
}

}  // namespace

std::vector<CompressedTensor> compressed_tensors(const std::vector<LocalParameter>& parameters) {
  std::vector<CompressedTensor> tensors;
  for (const LocalParameter& parameter : parameters) {
    const Shape shape = parameter.shard.local_shape();
    const std::int64_t columns = shape.back();
    const std::int64_t rows = columns > 0 ? num_elements(shape) / columns : 0;
    // Padding of a vocabulary that the tensor ranks do not divide: a code would make numbers of its zeros.
    const std::int64_t padded = parameter.shard.padded_rows;
    tensors.push_back({parameter.spec.name, rows - padded, columns, padded * columns});
  }
  return tensors;
}

std::vector<CompressedBucket> compressed_buckets(const TrainingPlan& plan, const ProcessGrid& grid, int rank,
                                                 const std::vector<LocalParameter>& parameters) {
  std::vector<CompressedBucket> buckets;
  for (const GradientBucket& bucket : buckets_of(plan, parameters)) {
    const std::vector<int> group = grid.group(bucket.axis(), rank);
    const auto place = static_cast<int>(std::ranges::find(group, rank) - group.begin());
    buckets.push_back({bucket.parameters, static_cast<int>(group.size()), place});
  }
  return buckets;
}

std::int64_t compressed_bucket_bytes(const CompressionConfig& config, const std::vector<LocalParameter>& parameters,
                                     const GradientBucket& bucket, int ranks) {
  std::int64_t bytes = 0;
  const std::vector<CompressedTensor> tensors = compressed_tensors(parameters);
  for (std::int64_t p = bucket.parameters.begin; p < bucket.parameters.end; ++p) {
    bytes += equivalent_bytes(config, tensors[static_cast<std::size_t>(p)], ranks);
  }
  return bytes;
}

std::int64_t compressed_state_bytes(const TrainingPlan& plan, const ProcessGrid& grid, int rank,
                                    const std::vector<LocalParameter>& parameters) {
  if (!CompressedSync::is_active(plan)) return 0;
  const CompressionConfig& config = plan.compression;
  const std::vector<CompressedTensor> tensors = compressed_tensors(parameters);
  std::int64_t elements = 0;
  for (const CompressedBucket& bucket : compressed_buckets(plan, grid, rank, parameters)) {
    std::int64_t blocks = 0;
    for (std::int64_t t = bucket.tensors.begin; t < bucket.tensors.end && bucket.ranks > 1; ++t) {
      const CompressedTensor& tensor = tensors[static_cast<std::size_t>(t)];
      if (!is_coded(config, tensor)) continue;
      blocks += (tensor.elements() + config.block - 1) / config.block;
      if (config.error_feedback) elements += tensor.elements();
      if (config.codec == "power_sgd") elements += config.rank * tensor.columns;
    }
    if (!config.error_feedback || !sums_at_owners(config)) continue;
    elements += balanced_part(blocks, bucket.ranks, bucket.rank).size() * config.block;
  }
  return 8 * elements;  // fp32, and those of the next step
}

CompressedSync::CompressedSync(const RankContext& context, Arena& coded, const TrainingPlan& plan, std::uint64_t seed,
                               ProcessGroups& groups, const std::vector<LocalParameter>& parameters)
    : memory_(context.kernels->memory()),
      groups_(groups),
      buckets_(buckets_of(plan, parameters)),
      reduction_(coded, options_of(context, plan, seed, groups, parameters)) {
  if (!plan.overlap.gradients) return;
  lane_ = memory_.new_lane();
  const auto of_thread = [&](GroupAxis axis) -> std::unique_ptr<Communicator> {
    if (groups.size(axis) == 1) return nullptr;
    return groups.of(axis).split(0, groups.of(axis).rank());
  };
  dense_ = of_thread(GroupAxis::gradient);
  const bool any_experts = std::ranges::find_if(buckets_, &GradientBucket::experts) != buckets_.end();
  if (any_experts) experts_ = of_thread(GroupAxis::expert_gradient);
  thread_ = std::jthread([this](const std::stop_token& stop) { work(stop); });
}

CompressedSync::~CompressedSync() {
  const std::unique_lock lock(mutex_);
  const bool under_way = busy_ || !tasks_.empty();
  tasks_.clear();
  if (!under_way) return;
  for (Communicator* comm : {dense_.get(), experts_.get()}) {
    if (comm != nullptr) comm->abort("left while gradients were being reduced");
  }
}

std::function<void()> CompressedSync::start(int bucket, TensorView gradients, Progress progress) {
  const GroupAxis axis = buckets_.at(static_cast<std::size_t>(bucket)).axis();
  if (progress == Progress::on_wait || !thread_.joinable()) {
    reduce(memory_, groups_.of(axis), gradients, bucket, Progress::on_wait);
    return {};
  }
  Communicator* const comm = axis == GroupAxis::gradient ? dense_.get() : experts_.get();
  std::packaged_task<void()> task([=, this, complete = memory_.mark()] {
    // Before anybody can know that it is done: who leaves right then must not abort the others.
    struct Finished {
      CompressedSync& sync;
      ~Finished() {
        const std::scoped_lock lock(sync.mutex_);
        sync.busy_ = false;
      }
    } const finished{*this};
    lane_->begin_after(*complete);
    reduce(*lane_, *comm, gradients, bucket, Progress::background);
    lane_->synchronize();
  });
  const std::shared_future<void> done = task.get_future().share();
  {
    const std::scoped_lock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
  return [done] { done.get(); };
}

void CompressedSync::reduce(Memory& lane, Communicator& replicas, TensorView gradients, int bucket, Progress progress) {
  HostView host(lane, gradients, Access::update);
  reduction_.reduce(replicas, host.view(), bucket, progress);
  host.finish();
}

void CompressedSync::work(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return !tasks_.empty(); })) {
    std::packaged_task<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    lock.lock();
  }
}

}  // namespace tandem
