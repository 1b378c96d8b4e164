// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/anomaly_config.h"
#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "core/text_data.h"

namespace tandem {

/// Everything that determines a training run. Read from JSON, changed by --set key=value.
struct RunConfig {
  GptConfig model;
  TrainingPlan plan;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  Initialization initialization = Initialization::gpt2;
  std::int64_t steps = 100;
  std::uint64_t seed = 1;
  double validation_fraction = 0.1;        ///< of the documents (or of the text, when it is one document)
  std::int64_t evaluate_every_steps = 50;  ///< 0: only at the end
  std::int64_t evaluate_batches = 4;
  std::int64_t checkpoint_every_steps = 0;  ///< 0: only at the end, where an output folder is given
  bool checkpoint_async = true;             ///< written in the background
  std::int64_t checkpoint_keep = 0;         ///< newest checkpoints that stay; 0: all
  Batching batching = Batching::stream;     ///< of text (core/text_data.h)
  DocumentRule documents = DocumentRule::file;
  bool respect_documents = false;
  std::int64_t bucket_batches = 16;
  std::int64_t pad_multiple = 1;
  std::int64_t prefetch_batches = 2;  ///< made ahead of the step; 0: when the step asks
  int loader_threads = 1;             ///< that make them
  /// Steps between two copies of the state in the memory of the machine (train --memory-tier); 0: none but the checkpoints.
  std::int64_t memory_every_steps = 1;
  AnomalyConfig anomaly;
};

/// Reads a configuration file: {"model": {...}, "plan": {...}, "optimizer": {...}, "schedule": {...}, "run": {...}}, every key
/// optional. Throws InputError naming file, key and value: an unknown key (with the nearest known one), a wrong type, a value out
/// of range.
[[nodiscard]] RunConfig read_config(const std::filesystem::path& file);
[[nodiscard]] RunConfig config_from_json(std::string_view text, std::string_view source_name);

/// Applies "key=value", key being "section.key" or the bare key (keys are unique across sections). Same errors.
void set_option(RunConfig& config, std::string_view assignment);

/// The whole configuration as JSON text, in the format that read_config() reads.
[[nodiscard]] std::string to_json(const RunConfig& config);

/// One line per key, "section.key   type   default   meaning", for --help and the docs.
[[nodiscard]] std::vector<std::string> describe_options();

}  // namespace tandem
