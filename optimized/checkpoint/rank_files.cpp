// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/rank_files.h"

#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/shard_writer.h"
#include "optimized/engine/optimizer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

CheckpointFile write_residuals(FileOperations& files, const fs::path& path, const ResidualSnapshot& residuals) {
  std::vector<TensorHeading> headings;
  for (const auto& [name, values] : residuals.tensors) headings.push_back({name, DType::f32, {std::ssize(values)}});
  ShardWriter writer(files, path, headings, residuals.metadata);
  for (const auto& [name, values] : residuals.tensors) writer.write(std::as_bytes(std::span(values)));
  return writer.finish();
}

}  // namespace

CheckpointInfo with_engine_state(CheckpointInfo info, const Engine& engine) {
  const EngineOptions& options = engine.options();
  info.config.model = options.model;
  info.config.plan = options.plan;
  info.config.optimizer = options.optimizer;
  info.config.schedule = options.schedule;
  info.config.steps = options.total_steps;
  info.updates = engine.updates();
  info.loss_scaler = engine.loss_scaler().state();
  info.fp8 = engine.fp8_scaling() != nullptr ? engine.fp8_scaling()->state() : Fp8ScalingState();
  info.learning_rate = scheduled_learning_rate(options.optimizer, options.schedule,
                                               info.next_step - info.loss_scaler.skipped_steps, options.total_steps);
  return info;
}

std::vector<CheckpointFile> write_rank_files(FileOperations& files, const fs::path& folder,
                                             const std::vector<CheckpointPart>& parts,
                                             const std::function<std::span<const std::byte>(std::size_t)>& bytes,
                                             const ResidualSnapshot& residuals, int rank, bool durable) {
  std::vector<CheckpointFile> written;
  if (!parts.empty()) {
    std::vector<TensorHeading> headings;
    for (const CheckpointPart& part : parts) {
      const bool flat = part.shard.flat_range.has_value();
      headings.push_back({part.name, part.shard.dtype, flat ? Shape{part.elements.size()} : part.shard.local_shape()});
    }
    files.remove(folder / shard_name(rank));  // of a run that ended while it wrote this step
    ShardWriter writer(files, folder / shard_name(rank), headings);
    for (std::size_t i = 0; i < parts.size(); ++i) writer.write(bytes(i));
    written.push_back(writer.finish(durable));
  }
  if (!residuals.tensors.empty()) {
    files.remove(folder / residuals_name(rank));
    written.push_back(write_residuals(files, folder / residuals_name(rank), residuals));
  }
  return written;
}

}  // namespace tandem
