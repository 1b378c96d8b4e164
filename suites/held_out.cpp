// SPDX-License-Identifier: Apache-2.0
#include "suites/held_out.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/machine.h"
#include "suites/kept_training.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kEvaluationDeadline{20000};
constexpr std::array<int, 3> kHeldOut = {0, 1, 0};  // batches, in the order in which they are evaluated

Batch held_out(const PairInputs& inputs, int which) {
  return *inputs.data->validation_batch(which, inputs.plan.batch.rows + which);
}

// The reference's loss without dropout: of one training step of a run that has these rows.
double reference_loss(PairInputs inputs, int which, bool as_candidate) {
  inputs.model.embedding_dropout = inputs.model.attention_dropout = inputs.model.residual_dropout = 0;
  reference::TrainingRun run = reference_run(inputs);
  run.steps = 1;
  run.batch = [&](std::int64_t) { return held_out(inputs, which); };
  if (!as_candidate || inputs.plan.numerics.storage == DType::f64) return kept_training<double>(run)->losses.front();
  run.numerics = inputs.plan.numerics;
  run.loss_scale.mode = "none";
  run.fp8 = inputs.plan.fp8;
  run.materialized_attention = inputs.plan.attention == "materialized";
  return kept_training<float>(run)->losses.front();
}

// [ranks][evaluations]
using Losses = std::vector<std::array<double, kHeldOut.size()>>;

Losses engine_losses(const PairInputs& inputs, const RunContext& context) {
  Losses losses(static_cast<std::size_t>(inputs.plan.parallel.world_size()));
  WorldSettings settings = context.world;
  settings.transport = "threads";
  run_world({.ranks = inputs.plan.parallel.world_size(), .deadline = kEvaluationDeadline, .settings = settings},
            [&](Communicator& comm) {
              const auto kernels = make_kernels(inputs.plan, machine_of(context));
              Arena arena({.poison = true, .memory = &kernels->memory()});
              Engine engine({&comm, kernels.get(), &arena, nullptr, context.pitfalls, {}},
                            {inputs.model, inputs.plan, own_optimizer(inputs), {}, 1, inputs.seed, {}});
              engine.store().initialise(inputs.model, inputs.initialization, inputs.seed);
              for (std::size_t i = 0; i < kHeldOut.size(); ++i) {
                losses[static_cast<std::size_t>(comm.rank())][i] = engine.evaluate(held_out(inputs, kHeldOut[i]));
              }
            });
  return losses;
}

}  // namespace

CaseEvidence beside_held_out_rows(const PairInputs& inputs, const RunContext& context) {
  const Losses losses = engine_losses(inputs, context);
  double unlike = 0;
  for (const auto& of_rank : losses) unlike += of_rank == losses.front() && of_rank[0] == of_rank[2] ? 0 : 1;
  CaseEvidence evidence;
  evidence.properties.push_back({"ranks_with_another_loss", unlike, Relation::equal, 0.0,
                                 "every rank has the loss of rank 0; the same rows the same, after other rows", -1, ""});
  const double roundoff = candidate_roundoff(inputs.plan);
  const auto longest = static_cast<double>(std::max(inputs.model.mlp_width(), inputs.model.vocabulary));
  double yardstick = roundoff * std::sqrt(longest);
  std::array<double, 2> truth = {};
  for (int which = 0; which < 2; ++which) {
    truth[static_cast<std::size_t>(which)] = reference_loss(inputs, which, false);
    const double same = reference_loss(inputs, which, true);
    yardstick = std::max(yardstick, std::fabs(same / truth[static_cast<std::size_t>(which)] - 1));
  }
  for (std::size_t which = 0; which < truth.size(); ++which) {
    evidence.properties.push_back({fmt::format("held_out_loss_error of batch {}", which),
                                   std::fabs(losses.front()[which] / truth[which] - 1), Relation::at_most, 4 * yardstick,
                                   "4 max(error of the reference in the same precision, eps sqrt(K))", -1, ""});
  }
  return evidence;
}

}  // namespace tandem
