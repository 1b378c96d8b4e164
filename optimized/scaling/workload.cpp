// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/workload.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/process_grid.h"

namespace tandem {
namespace {

class Judge {
 public:
  explicit Judge(const Workload& workload) : workload_(workload), plan_(workload.plan), model_(workload.model) {}

  std::vector<Conflict> judge() {
    if (!degrees()) return std::move(found_);
    tensor();
    context();
    experts();
    batch();
    schedule();
    stages();
    recompute();
    traits();
    return std::move(found_);
  }

 private:
  void demand(bool good, const char* option, const std::string& reason) {
    if (!good) found_.push_back({option, reason});
  }

  bool degrees() {
    const ParallelDegrees& at = plan_.parallel;
    const std::pair<const char*, int> all[] = {{"data", at.data},
                                               {"tensor", at.tensor},
                                               {"pipeline", at.pipeline},
                                               {"context", at.context},
                                               {"expert", at.expert},
                                               {"chunks", plan_.pipeline.chunks},
                                               {"micro_batches", plan_.batch.micro_batches}};
    for (const auto& [option, value] : all) {
      if (value < 1) found_.push_back({option, fmt::format("{} is {}, it must be at least 1", option, value)});
    }
    return found_.empty();
  }

  void tensor() {
    const std::int64_t degree = plan_.parallel.tensor;
    if (degree > 1) {
      const std::int64_t keys = model_.key_value_heads();
      if (model_.heads % degree != 0)
        demand(false, "tensor", fmt::format("tensor = {} does not divide {} heads", degree, model_.heads));
      if (keys % degree != 0 && degree % keys != 0) {
        demand(false, "tensor",
               fmt::format("tensor = {} neither divides {} key-value heads nor is a multiple of them", degree, keys));
      }
      if (model_.mlp_width() % degree != 0) {
        demand(false, "tensor", fmt::format("tensor = {} does not divide the MLP's width {}", degree, model_.mlp_width()));
      }
    } else if (plan_.sequence_parallel) {
      demand(false, "sequence_parallel", "sequence_parallel splits tokens over tensor ranks; it needs tensor of at least 2");
    }
  }

  void context() {
    const std::int64_t degree = plan_.parallel.context;
    if (degree > 1 && workload_.tokens_per_row() < 2 * degree) {
      demand(false, "context",
             fmt::format("context = {} needs rows of at least {} tokens (two slices a rank), not {}", degree, 2 * degree,
                         workload_.tokens_per_row()));
    }
  }

  void experts() {
    const int degree = plan_.parallel.expert;
    if (degree == 1) return;
    if (model_.experts == 0) {
      demand(false, "expert", fmt::format("expert = {} needs a model with experts", degree));
      return;
    }
    if (model_.experts % degree != 0)
      demand(false, "expert", fmt::format("expert = {} does not divide {} experts", degree, model_.experts));
    if (plan_.parallel.data % degree != 0) {
      demand(false, "expert", fmt::format("expert = {} does not divide data = {}", degree, plan_.parallel.data));
    }
  }

  void batch() {
    const std::int64_t tokens = workload_.tokens_per_row();
    if (model_.learned_positions && tokens > model_.sequence) {
      demand(false, "sequence",
             fmt::format("rows of {} tokens are longer than the model's table of {} positions", tokens, model_.sequence));
    }
    const std::int64_t least = static_cast<std::int64_t>(plan_.parallel.data) * plan_.batch.micro_batches;
    if (plan_.batch.rows < least) {
      demand(false, "rows",
             fmt::format("{} rows are fewer than one for each of {} data ranks x {} micro-batches", plan_.batch.rows,
                         plan_.parallel.data, plan_.batch.micro_batches));
    }
  }

  void schedule() {
    const int ranks = plan_.parallel.pipeline;
    const int chunks = plan_.pipeline.chunks;
    const std::string_view kind = plan_.pipeline.effective_schedule();
    if (kind == "gpipe" || kind == "1f1b" || kind == "zb-h1" || kind == "zb-2p") {
      if (chunks != 1) demand(false, "chunks", fmt::format("schedule {} has one chunk a rank, not {}", kind, chunks));
    } else if (kind == "interleaved") {
      demand(chunks >= 2 && ranks >= 2, "chunks", "schedule interleaved needs pipeline and chunks of at least 2");
      if (plan_.batch.micro_batches % ranks != 0) {
        demand(false, "micro_batches",
               fmt::format("schedule interleaved takes micro-batches in rounds of pipeline = {}, which does not "
                           "divide micro_batches = {}",
                           ranks, plan_.batch.micro_batches));
      }
    } else if (kind == "zb-v") {
      demand(chunks == 2 && ranks >= 2, "chunks", "schedule zb-v needs pipeline of at least 2 and chunks = 2");
    } else {
      demand(false, "pipeline_schedule",
             fmt::format("schedule '{}' is none of gpipe, 1f1b, interleaved, zb-h1, zb-2p and zb-v, which can be played", kind));
    }
  }

  void stages() {
    const std::int64_t stages = static_cast<std::int64_t>(plan_.parallel.pipeline) * plan_.pipeline.chunks;
    const std::string& text = plan_.pipeline.stage_layers;
    if (text.empty()) {
      if (stages > model_.layers) {
        demand(false, "pipeline",
               fmt::format("pipeline = {} with chunks = {} makes {} stages of {} layers", plan_.parallel.pipeline,
                           plan_.pipeline.chunks, stages, model_.layers));
      }
      return;
    }
    const auto layers = parse_stage_layers(text);
    if (!layers) {
      demand(false, "stage_layers", fmt::format("stage_layers '{}' is not a list like 3-2-2-1", text));
    } else if (std::ssize(*layers) != stages) {
      demand(false, "stage_layers", fmt::format("stage_layers names {} stages, there are {}", layers->size(), stages));
    } else if (std::accumulate(layers->begin(), layers->end(), std::int64_t{0}) != model_.layers) {
      demand(false, "stage_layers", fmt::format("stage_layers does not add up to {} layers", model_.layers));
    }
  }

  void recompute() {
    const RecomputeConfig& recompute = plan_.recompute;
    const SoftwareTraits& software = workload_.software;
    const bool full = recompute.mode == "full";
    if (!full && recompute.mode != "none" && recompute.mode != "selective") {
      demand(false, "recompute", fmt::format("there is no recompute '{}'; use none, selective or full", recompute.mode));
    }
    demand(recompute.layers >= 1 && (recompute.layers == 1 || full), "recompute_layers",
           "recompute_layers groups layers of recompute = full and is at least 1");
    if (software.recomputed_layers < 0 || software.recomputed_layers > model_.layers) {
      demand(false, "recomputed_layers",
             fmt::format("{} of {} layers cannot be recomputed", software.recomputed_layers, model_.layers));
    }
  }

  void traits() {
    const SoftwareTraits& software = workload_.software;
    const auto one_of = [&](const char* option, const std::string& value, std::initializer_list<std::string_view> words) {
      if (std::find(words.begin(), words.end(), value) != words.end()) return;
      demand(false, option, fmt::format("there is no {} '{}'; use one of {}", option, value, fmt::join(words, ", ")));
    };
    one_of("optimizer", software.optimizer, {"adam_fp32", "adam_bf16"});
    one_of("product_dtype", software.product_dtype, {"", "fp8", "fp8-rowwise", "mxfp8", "nvfp4"});
    one_of("loss", software.loss, {"fp32", "fused", "unfused"});
    one_of("selective", software.selective, {"attention", "norms", "products"});
    demand(software.host_offload_share >= 0 && software.host_offload_share <= 1, "host_offload_share",
           "host_offload_share must lie between 0 and 1");
    if (plan_.zero_stage < 0 || plan_.zero_stage > 3) {
      demand(false, "zero", fmt::format("zero = {}; there are stages 0, 1, 2 and 3", plan_.zero_stage));
    }
    const TrainingPlan usual;
    if (plan_.rank_order == usual.rank_order) return;
    try {
      static_cast<void>(ProcessGrid(plan_));
    } catch (const InputError& error) {
      found_.push_back({"rank_order", error.what()});
    }
  }

  const Workload& workload_;
  const TrainingPlan& plan_;
  const ModelShape& model_;
  std::vector<Conflict> found_;
};

}  // namespace

std::vector<Conflict> conflicts(const Workload& workload) { return Judge(workload).judge(); }

void require_possible(const Workload& workload) {
  std::vector<std::string> reasons;
  for (const Conflict& conflict : conflicts(workload)) reasons.push_back(conflict.reason);
  if (!reasons.empty()) throw InputError(fmt::format("this layout is not possible: {}", fmt::join(reasons, "; ")));
}

PipelineLayout pipeline_layout(const Workload& workload) {
  GptConfig layers;  // no other size matters
  layers.layers = static_cast<int>(workload.model.layers);
  return pipeline_layout(workload.plan, layers);
}

std::int64_t micro_batch_rows(const TrainingPlan& plan) {
  const std::int64_t parts = static_cast<std::int64_t>(plan.parallel.data) * plan.batch.micro_batches;
  return (plan.batch.rows + parts - 1) / parts;
}

}  // namespace tandem
