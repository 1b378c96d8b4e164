// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <fmt/format.h>

namespace tandem {
namespace {

void require_one(std::vector<Conflict>& found, int degree, const std::string& option) {
  if (degree < 1) {
    found.push_back({option, fmt::format("{} is {}, it must be at least 1", option, degree)});
  } else if (degree > 1) {
    found.push_back({option, fmt::format("{} = {} is not implemented yet; use 1", option, degree)});
  }
}

}  // namespace

std::vector<Conflict> conflicts(const TrainingPlan& plan, const GptConfig& model) {
  std::vector<Conflict> found;
  if (model.heads < 1 || model.hidden % model.heads != 0) {
    found.push_back({"heads", fmt::format("heads {} do not divide hidden {}", model.heads, model.hidden)});
  }
  if (plan.parallel.data < 1) found.push_back({"data", fmt::format("data is {}, it must be at least 1", plan.parallel.data)});
  require_one(found, plan.parallel.tensor, "tensor");
  require_one(found, plan.parallel.pipeline, "pipeline");
  require_one(found, plan.parallel.context, "context");
  require_one(found, plan.parallel.expert, "expert");
  if (plan.batch.rows < 1) found.push_back({"rows", fmt::format("rows is {}, it must be at least 1", plan.batch.rows)});
  if (plan.batch.micro_batches < 1) {
    found.push_back({"micro_batches", fmt::format("micro_batches is {}, it must be at least 1", plan.batch.micro_batches)});
  }
  if (plan.buckets.bucket_bytes < 0) found.push_back({"bucket_bytes", "bucket_bytes is negative; 0 means one bucket"});
  if (plan.schedule != "none") found.push_back({"schedule", fmt::format("schedule '{}' is not implemented yet", plan.schedule)});
  if (plan.recompute != "none")
    found.push_back({"recompute", fmt::format("recompute '{}' is not implemented yet", plan.recompute)});
  if (plan.zero_stage != 0) found.push_back({"zero", fmt::format("zero = {} is not implemented yet", plan.zero_stage)});
  if (plan.threads_per_rank < 1) found.push_back({"threads_per_rank", "threads_per_rank must be at least 1"});
  return found;
}

void require_legal(const TrainingPlan& plan, const GptConfig& model) {
  const std::vector<Conflict> found = conflicts(plan, model);
  if (found.empty()) return;
  std::string text;
  for (const Conflict& conflict : found) text += (text.empty() ? "" : "; ") + conflict.reason;
  throw InputError("this plan cannot run: " + text);
}

}  // namespace tandem
