// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "core/pipeline_layout.h"
#include "core/process_grid.h"

namespace tandem {
namespace {

using Conflicts = std::vector<Conflict>;

bool positive(Conflicts& found, std::int64_t value, const std::string& option) {
  if (value < 1) found.push_back({option, fmt::format("{} is {}, it must be at least 1", option, value)});
  return value >= 1;
}

// What is dealt to the ranks of an axis must divide by their number.
void divides(Conflicts& found, int degree, const std::string& option, std::int64_t total, const std::string& what) {
  if (total % degree == 0) return;
  found.push_back({option, fmt::format("{} = {} does not divide {} {}", option, degree, what, total)});
}

void check_tensor(Conflicts& found, const TrainingPlan& plan, const GptConfig& model) {
  const int degree = plan.parallel.tensor;
  divides(found, degree, "tensor", model.heads, "heads");
  divides(found, degree, "tensor", model.mlp_width(), "mlp_hidden");
  if (degree > model.vocabulary) {
    found.push_back({"tensor", fmt::format("tensor = {} is more than the vocabulary of {}", degree, model.vocabulary)});
  }
  if (plan.sequence_parallel && degree == 1) {
    found.push_back({"sequence_parallel", "sequence_parallel splits tokens over tensor ranks; it needs tensor of at least 2"});
  }
}

void check_schedule(Conflicts& found, const TrainingPlan& plan) {
  const int ranks = plan.parallel.pipeline;
  const int chunks = plan.pipeline.chunks;
  const std::string_view schedule = plan.pipeline.effective_schedule();
  const auto wants_chunks = [&](bool good, const std::string& wanted) {
    if (!good) found.push_back({"chunks", fmt::format("schedule {} needs {}, not chunks = {}", schedule, wanted, chunks)});
  };
  if (schedule == "gpipe" || schedule == "1f1b" || schedule == "zb-h1") {
    wants_chunks(chunks == 1, "chunks = 1 (several are interleaved or zb-v)");
  } else if (schedule == "interleaved") {
    wants_chunks(chunks >= 2, "at least 2 chunks of each rank");
    if (ranks == 1) found.push_back({"chunks", "schedule interleaved needs pipeline of at least 2"});
    if (chunks >= 2 && ranks > 1 && plan.batch.micro_batches % ranks != 0) {
      found.push_back({"micro_batches", fmt::format("schedule interleaved takes micro-batches in rounds of pipeline = {}, which "
                                                    "does not divide micro_batches = {}",
                                                    ranks, plan.batch.micro_batches)});
    }
  } else if (schedule == "zb-v") {
    wants_chunks(chunks == 2, "chunks = 2");
    if (ranks == 1) found.push_back({"chunks", "schedule zb-v needs pipeline of at least 2"});
  } else {
    found.push_back({"pipeline_schedule", fmt::format("there is no schedule '{}'", schedule)});
  }
}

void check_stages(Conflicts& found, const TrainingPlan& plan, const GptConfig& model) {
  const int stages = plan.parallel.pipeline * plan.pipeline.chunks;
  if (plan.pipeline.stage_layers.empty()) {
    if (stages > model.layers) {
      found.push_back({"pipeline", fmt::format("pipeline = {} with chunks = {} makes {} stages of {} layers; each needs one",
                                               plan.parallel.pipeline, plan.pipeline.chunks, stages, model.layers)});
    }
    return;
  }
  const auto layers = parse_stage_layers(plan.pipeline.stage_layers);
  const std::string text = fmt::format("stage_layers '{}'", plan.pipeline.stage_layers);
  if (!layers) {
    found.push_back({"stage_layers", text + " is not a list like 3-2-2-1"});
  } else if (std::ssize(*layers) != stages) {
    found.push_back(
        {"stage_layers", fmt::format("{} names {} stages, there are {} (pipeline x chunks)", text, layers->size(), stages)});
  } else if (std::any_of(layers->begin(), layers->end(), [](int count) { return count < 1; })) {
    found.push_back({"stage_layers", text + " has a stage without layers"});
  } else if (std::accumulate(layers->begin(), layers->end(), 0) != model.layers) {
    found.push_back({"stage_layers", fmt::format("{} does not add up to {} layers", text, model.layers)});
  }
}

void check_recompute(Conflicts& found, const RecomputeConfig& recompute) {
  if (recompute.mode != "none" && recompute.mode != "selective" && recompute.mode != "full") {
    found.push_back({"recompute", fmt::format("there is no recompute '{}'; use none, selective or full", recompute.mode)});
  }
  if (recompute.layers < 1) {
    found.push_back({"recompute_layers", fmt::format("recompute_layers is {}, it must be at least 1", recompute.layers)});
  } else if (recompute.layers > 1 && recompute.mode != "full") {
    found.push_back({"recompute_layers", fmt::format("recompute_layers = {} groups layers of recompute = full, not of {}",
                                                     recompute.layers, recompute.mode)});
  }
}

void check_context(Conflicts& found, const TrainingPlan& plan, const GptConfig& model) {
  const int degree = plan.parallel.context;
  if (degree > 1 && model.sequence < 2 * degree) {
    found.push_back({"context", fmt::format("context = {} needs sequences of at least {} tokens (two slices a rank), not {}",
                                            degree, 2 * degree, model.sequence)});
  }
}

void check_expert(Conflicts& found, const TrainingPlan& plan, const GptConfig& model) {
  const int degree = plan.parallel.expert;
  if (degree == 1) return;
  if (model.experts == 0) {
    found.push_back({"expert", fmt::format("expert = {} needs a model with experts; model.experts is 0", degree)});
    return;
  }
  divides(found, degree, "expert", model.experts, "experts");
  divides(found, degree, "expert", plan.parallel.data, "data");
}

template <class... Words>
bool one_of(Conflicts& found, const std::string& option, const std::string& value, Words... words) {
  if (((value == words) || ...)) return true;
  std::string all;
  ((all += (all.empty() ? "" : ", ") + std::string(words)), ...);
  found.push_back({option, fmt::format("there is no {} '{}'; use one of {}", option, value, all)});
  return false;
}

void check_memory(Conflicts& found, const TrainingPlan& plan) {
  one_of(found, "attention", plan.attention, "blocked", "materialized");
  if (plan.attention == "materialized" && plan.parallel.context > 1) {
    found.push_back({"attention", "attention materialized keeps whole rows of probabilities, which context ranks do not have"});
  }
  if (plan.zero_stage < 0 || plan.zero_stage > 3) {
    found.push_back({"zero", fmt::format("zero = {}; there are stages 0, 1, 2 and 3", plan.zero_stage)});
  }
  if (plan.zero_stage > 0 && plan.buckets.bucket_bytes > 0) {
    found.push_back({"bucket_bytes", "bucket_bytes has no effect with zero, where every block is a bucket; leave it 0"});
  }
  if (plan.zero_stage > 0 && plan.numerics.reduce == DType::f16 && plan.numerics.accumulate == DType::f32) {
    found.push_back({"zero", "zero reduces gradients in the precision that they are accumulated in, not fp32 ones in fp16"});
  }
  one_of(found, "offload", plan.offload, "none", "optimizer");
}

void check_loss_scale(Conflicts& found, const TrainingPlan& plan, const GptConfig& model) {
  const LossScaleConfig& scale = plan.loss_scale;
  one_of(found, "loss_scale", scale.mode, "auto", "none", "dynamic", "static");
  const auto demand = [&](bool good, const char* option, const char* reason) {
    if (!good) found.push_back({option, reason});
  };
  // It multiplies and divides in fp32: outside of the normal numbers it, or its inverse, is infinite.
  const bool fits = scale.initial >= std::numeric_limits<float>::min() && scale.initial <= std::numeric_limits<float>::max();
  demand(scale.initial > 0, "loss_scale_initial", "loss_scale_initial must be positive");
  demand(scale.initial <= 0 || fits, "loss_scale_initial",
         "loss_scale_initial must lie between 1.2e-38 and 3.4e38, as fp32 does");
  demand(scale.growth_factor > 1, "loss_scale_growth_factor", "loss_scale_growth_factor must be more than 1");
  demand(scale.backoff_factor > 0 && scale.backoff_factor < 1, "loss_scale_backoff_factor",
         "loss_scale_backoff_factor must lie between 0 and 1");
  demand(scale.growth_interval >= 1, "loss_scale_growth_interval", "loss_scale_growth_interval must be at least 1");
  demand(!plan.numerics.fp8 || model.experts == 0, "precision",
         "precision fp8 quantises the linear layers of dense blocks; this model has experts");
  demand(plan.fp8.history >= 1, "fp8_history", "fp8_history must be at least 1");
}

void check_communication(Conflicts& found, const TrainingPlan& plan) {
  const auto demand = [&](bool good, const char* option, const char* reason) {
    if (!good) found.push_back({option, reason});
  };
  const int chunks = plan.overlap.tensor_chunks;
  demand(chunks >= 1, "overlap_tensor_chunks", "overlap_tensor_chunks must be at least 1");
  demand(chunks <= 1 || (plan.sequence_parallel && plan.parallel.tensor > 1), "overlap_tensor_chunks",
         "overlap_tensor_chunks cuts products whose sum is scattered: it needs tensor > 1 and sequence_parallel");
  const CompressionConfig& compression = plan.compression;
  if (!one_of(found, "compression", compression.codec, "none", "int8", "int4", "top_k", "random_k", "sign", "power_sgd")) return;
  demand(compression.block >= 2 && compression.block <= 1 << 20, "compression_block",
         "compression_block must lie between 2 and 1048576");
  demand(compression.density > 0 && compression.density <= 1, "compression_density",
         "compression_density must be more than 0 and at most 1");
  demand(compression.rank >= 1, "compression_rank", "compression_rank must be at least 1");
  if (compression.codec == "none") return;
  demand(plan.zero_stage == 0, "compression", "compression reduces whole gradients; with zero they are dealt: use zero = 0");
  demand(plan.numerics.accumulate == DType::f32 && plan.numerics.reduce == DType::f32, "compression",
         "compression codes fp32 gradients: use a precision other than fp64, and gradients = wide");
}

}  // namespace

bool scales_loss(const TrainingPlan& plan) {
  if (plan.loss_scale.mode != "auto") return plan.loss_scale.mode != "none";
  return plan.numerics.storage == DType::f16 || plan.numerics.compute == DType::f16;
}

bool scales_loss_dynamically(const TrainingPlan& plan) { return scales_loss(plan) && plan.loss_scale.mode != "static"; }

TrainingPlan on_one_rank(TrainingPlan plan) {
  plan.parallel = {};
  plan.pipeline = {};
  plan.sequence_parallel = false;
  plan.zero_stage = 0;
  plan.overlap = {};
  plan.compression = {};
  return plan;
}

std::vector<Conflict> conflicts(const TrainingPlan& plan, const GptConfig& model) {
  std::vector<Conflict> found;
  if (model.heads < 1 || model.hidden % model.heads != 0) {
    found.push_back({"heads", fmt::format("heads {} do not divide hidden {}", model.heads, model.hidden)});
  }
  bool degrees = true;
  const ParallelDegrees& parallel = plan.parallel;
  degrees &= positive(found, parallel.data, "data");
  degrees &= positive(found, parallel.tensor, "tensor");
  degrees &= positive(found, parallel.pipeline, "pipeline");
  degrees &= positive(found, parallel.context, "context");
  degrees &= positive(found, parallel.expert, "expert");
  degrees &= positive(found, plan.pipeline.chunks, "chunks");
  degrees &= positive(found, plan.batch.micro_batches, "micro_batches");
  positive(found, plan.batch.rows, "rows");
  if (plan.buckets.bucket_bytes < 0) found.push_back({"bucket_bytes", "bucket_bytes is negative; 0 means one bucket"});
  if (degrees) {
    check_tensor(found, plan, model);
    check_schedule(found, plan);
    check_stages(found, plan, model);
    check_context(found, plan, model);
    check_expert(found, plan, model);
  }
  try {
    const ProcessGrid grid(plan);
  } catch (const InputError& error) {
    found.push_back({"rank_order", error.what()});
  }
  check_recompute(found, plan.recompute);
  check_memory(found, plan);
  check_loss_scale(found, plan, model);
  check_communication(found, plan);
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
