// SPDX-License-Identifier: Apache-2.0
#include "core/config_field_makers.h"

namespace tandem {
namespace {

using namespace config_field;

void add_run(std::vector<ConfigField>& fields) {
  fields.push_back(number("run", "steps", kAnyCount, "training steps", in_run(&RunConfig::steps)));
  fields.push_back(number("run", "seed", {}, "of parameters, data order and dropout", in_run(&RunConfig::seed)));
  fields.push_back(choice<Initialization>(
      "run", "initialization", {{"gpt2", Initialization::gpt2}, {"scattered", Initialization::scattered}},
      "how parameters start; scattered: no zeros and ones, for checks", in_run(&RunConfig::initialization)));
  fields.push_back(
      number("run", "validation_fraction", kProbability, "part of the data held out", in_run(&RunConfig::validation_fraction)));
  fields.push_back(
      number("run", "evaluate_every_steps", kAnyCount, "0 means at the end only", in_run(&RunConfig::evaluate_every_steps)));
  fields.push_back(
      number("run", "evaluate_batches", kPositiveCount, "batches of one evaluation", in_run(&RunConfig::evaluate_batches)));
  fields.push_back(
      number("run", "checkpoint_every_steps", kAnyCount, "0 means at the end only", in_run(&RunConfig::checkpoint_every_steps)));
  fields.push_back(flag("run", "checkpoint_async", "checkpoints are written while training goes on; false: it waits for them",
                        in_run(&RunConfig::checkpoint_async)));
  fields.push_back(number("run", "checkpoint_keep", kAnyCount,
                          "newest checkpoints that stay, beside the last one that is known to be healthy; 0: all",
                          in_run(&RunConfig::checkpoint_keep)));
}

void add_data(std::vector<ConfigField>& fields) {
  fields.push_back(choice<Batching>("run", "batching",
                                    {{"stream", Batching::stream},
                                     {"padded", Batching::padded},
                                     {"bucketed", Batching::bucketed},
                                     {"packed", Batching::packed}},
                                    "rows of text: cut from the stream, one document each padded to the longest of the batch, "
                                    "padded among documents of about the same length, or several documents a row",
                                    in_run(&RunConfig::batching)));
  fields.push_back(choice<DocumentRule>(
      "run", "documents", {{"file", DocumentRule::file}, {"paragraph", DocumentRule::paragraph}, {"line", DocumentRule::line}},
      "what one document of a text file is; prepared data has its own", in_run(&RunConfig::documents)));
  fields.push_back(flag("run", "respect_documents", "stream: attention and positions restart at each document of a row",
                        in_run(&RunConfig::respect_documents)));
  fields.push_back(number("run", "bucket_batches", kPositiveInt, "bucketed: batches among which pieces are grouped by length",
                          in_run(&RunConfig::bucket_batches)));
  fields.push_back(number("run", "pad_multiple", kPositiveInt, "padded, bucketed: the length of a batch is a multiple of it",
                          in_run(&RunConfig::pad_multiple)));
  fields.push_back(number("run", "prefetch_batches", kAnyCount, "made ahead of the step; 0: when the step asks",
                          in_run(&RunConfig::prefetch_batches)));
  fields.push_back(number("run", "loader_threads", kPositiveInt, "that make them", in_run(&RunConfig::loader_threads)));
  fields.push_back(number("run", "memory_every_steps", kAnyCount,
                          "between two copies of the state in memory (--memory-tier); 0: none but of checkpoints",
                          in_run(&RunConfig::memory_every_steps)));
}

void add_anomaly(std::vector<ConfigField>& fields) {
  const auto in_anomaly = [](auto member) {
    return [member](auto& config) -> auto& { return config.anomaly.*member; };
  };
  fields.push_back(choice<AnomalyAction>("anomaly", "anomaly_action",
                                         {{"off", AnomalyAction::off},
                                          {"report", AnomalyAction::report},
                                          {"skip", AnomalyAction::skip},
                                          {"clip", AnomalyAction::clip},
                                          {"rollback", AnomalyAction::rollback}},
                                         "what is done about a step that is still wrong when it is computed again",
                                         in_anomaly(&AnomalyConfig::action)));
  fields.push_back(flag("anomaly", "anomaly_retry", "a suspicious step is computed once more before anything else is done",
                        in_anomaly(&AnomalyConfig::retry)));
  fields.push_back(number("anomaly", "anomaly_window", {.low = 8, .high = 4096}, "steps that a step is compared with",
                          in_anomaly(&AnomalyConfig::window)));
  fields.push_back(number("anomaly", "anomaly_threshold", {.low = 3, .high = 1e6},
                          "distance from the median, in robust standard deviations, that is suspicious",
                          in_anomaly(&AnomalyConfig::threshold)));
  fields.push_back(number("anomaly", "anomaly_confirm_steps", kPositiveCount,
                          "steps without a finding that make the checkpoint before them healthy",
                          in_anomaly(&AnomalyConfig::confirm_steps)));
  fields.push_back(number("anomaly", "anomaly_sample_every_steps", kPositiveCount,
                          "between two looks at weights, activations, replicas and links",
                          in_anomaly(&AnomalyConfig::sample_every_steps)));
  fields.push_back(number("anomaly", "anomaly_max_rollbacks", {.low = 0, .high = 1000},
                          "to the same checkpoint; one more ends the run", in_anomaly(&AnomalyConfig::max_rollbacks)));
}

}  // namespace

void add_run_fields(std::vector<ConfigField>& fields) {
  add_run(fields);
  add_data(fields);
  add_anomaly(fields);
}

}  // namespace tandem
