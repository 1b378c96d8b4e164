// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

TEST(Plan, DefaultIsLegal) {
  const TrainingPlan plan;
  EXPECT_TRUE(conflicts(plan, GptConfig{}).empty());
  EXPECT_NO_THROW(require_legal(plan, GptConfig{}));
}

TEST(Plan, DataParallelismTakesAnyNumberOfRanks) {
  TrainingPlan plan;
  plan.batch.rows = 3;
  for (const int ranks : {1, 2, 3, 4, 7}) {
    plan.parallel.data = ranks;
    EXPECT_TRUE(conflicts(plan, GptConfig{}).empty()) << ranks;
  }
}

TEST(Plan, WorldIsTheProductOfTheDegrees) {
  const ParallelDegrees degrees{.data = 2, .tensor = 3, .pipeline = 4, .context = 5, .expert = 2};
  EXPECT_EQ(degrees.world_size(), 120);
}

using Damage = std::function<void(TrainingPlan&, GptConfig&)>;

GptConfig model_of_eight_layers() {
  GptConfig model;
  model.layers = 8;
  return model;
}

std::vector<Conflict> conflicts_after(const Damage& change) {
  TrainingPlan plan;
  GptConfig model = model_of_eight_layers();
  change(plan, model);
  return conflicts(plan, model);
}

TEST(Plan, AcceptsEachKindOfParallelismAndTheirCompositions) {
  const std::vector<Damage> legal = {
      [](TrainingPlan& p, GptConfig&) { p.parallel = {.data = 3, .tensor = 2, .pipeline = 2, .context = 2}; },
      [](TrainingPlan& p, GptConfig&) {
        p.parallel.tensor = 4;
        p.sequence_parallel = true;
      },
      [](TrainingPlan& p, GptConfig& m) {
        p.parallel = {.data = 4, .expert = 2};
        m.experts = 6;
      },
      [](TrainingPlan& p, GptConfig&) {
        p.parallel.pipeline = 2;
        p.pipeline = {"interleaved", 2, "3-2-2-1"};
        p.batch.micro_batches = 4;
      },
      [](TrainingPlan& p, GptConfig&) {
        p.parallel.pipeline = 4;
        p.pipeline = {"zb-v", 2, ""};
        p.batch.micro_batches = 3;
      },
      [](TrainingPlan& p, GptConfig&) { p.parallel.pipeline = 8; },
      [](TrainingPlan& p, GptConfig&) { p.pipeline.schedule = "zb-h1"; },
      [](TrainingPlan& p, GptConfig&) { p.rank_order = "pipeline-data-context-tensor"; },
      [](TrainingPlan& p, GptConfig&) {
        p.parallel.data = 3;
        p.zero_stage = 3;
        p.offload = "optimizer";
      },
      [](TrainingPlan& p, GptConfig&) { p.zero_stage = 1; },  // on one rank: nothing to deal, no harm
      [](TrainingPlan& p, GptConfig&) {
        p.parallel.tensor = 2;
        p.attention = "materialized";
      },
      [](TrainingPlan& p, GptConfig&) {
        p.parallel.data = 2;
        p.zero_stage = 2;
        p.numerics = numerics_from_precision("fp16");
        p.numerics.accumulate = p.numerics.reduce = DType::f16;
      },
  };
  for (std::size_t i = 0; i < legal.size(); ++i) {
    const std::vector<Conflict> found = conflicts_after(legal[i]);
    EXPECT_TRUE(found.empty()) << "case " << i << ": " << found.front().reason;
  }
}

struct Broken {
  std::string option;
  std::string reason;  // part of the text
  Damage damage;
};

// Each plan has this one fault alone.
void expect_each_named(const std::vector<Broken>& cases) {
  for (const Broken& broken : cases) {
    const std::vector<Conflict> found = conflicts_after(broken.damage);
    ASSERT_EQ(found.size(), 1U) << broken.reason;
    EXPECT_EQ(found.front().option, broken.option);
    EXPECT_NE(found.front().reason.find(broken.reason), std::string::npos) << found.front().reason;
  }
}

TEST(Plan, NamesTheOptionAtFault) {
  expect_each_named({
      {"data", "data is 0", [](TrainingPlan& p, GptConfig&) { p.parallel.data = 0; }},
      {"pipeline", "pipeline is 0", [](TrainingPlan& p, GptConfig&) { p.parallel.pipeline = 0; }},
      {"expert", "expert is -1", [](TrainingPlan& p, GptConfig&) { p.parallel.expert = -1; }},
      {"rows", "rows is 0", [](TrainingPlan& p, GptConfig&) { p.batch.rows = 0; }},
      {"micro_batches", "micro_batches is 0", [](TrainingPlan& p, GptConfig&) { p.batch.micro_batches = 0; }},
      {"bucket_bytes", "bucket_bytes is negative", [](TrainingPlan& p, GptConfig&) { p.buckets.bucket_bytes = -1; }},
      {"recompute", "no recompute 'some'", [](TrainingPlan& p, GptConfig&) { p.recompute.mode = "some"; }},
      {"recompute_layers", "groups layers of recompute = full", [](TrainingPlan& p, GptConfig&) { p.recompute.layers = 2; }},
      {"recompute_layers", "recompute_layers is 0",
       [](TrainingPlan& p, GptConfig&) {
         p.recompute = {"full", 0};
       }},
      {"zero", "zero = 4; there are stages 0, 1, 2 and 3", [](TrainingPlan& p, GptConfig&) { p.zero_stage = 4; }},
      {"zero", "zero = -1;", [](TrainingPlan& p, GptConfig&) { p.zero_stage = -1; }},
      {"threads_per_rank", "threads_per_rank", [](TrainingPlan& p, GptConfig&) { p.threads_per_rank = 0; }},
      {"rank_order", "rank_order 'data-tensor'", [](TrainingPlan& p, GptConfig&) { p.rank_order = "data-tensor"; }},
  });
}

TEST(Plan, NamesWaysToSaveMemoryThatExcludeEachOther) {
  expect_each_named({
      {"bucket_bytes", "no effect with zero",
       [](TrainingPlan& p, GptConfig&) {
         p.parallel.data = 2;
         p.zero_stage = 1;
         p.buckets.bucket_bytes = 1 << 20;
       }},
      {"zero", "not fp32 ones in fp16",
       [](TrainingPlan& p, GptConfig&) {
         p.parallel.data = 2;
         p.zero_stage = 2;
         p.numerics.reduce = DType::f16;
       }},
      {"attention", "no attention 'dense'; use one of blocked, materialized",
       [](TrainingPlan& p, GptConfig&) { p.attention = "dense"; }},
      {"attention", "context ranks do not have",
       [](TrainingPlan& p, GptConfig&) {
         p.parallel.context = 2;
         p.attention = "materialized";
       }},
      {"offload", "no offload 'all'; use one of none, optimizer", [](TrainingPlan& p, GptConfig&) { p.offload = "all"; }},
  });
}

TEST(Plan, NamesLossScalesThatCannotWork) {
  expect_each_named({
      {"loss_scale", "no loss_scale 'big'; use one of auto, none, dynamic, static",
       [](TrainingPlan& p, GptConfig&) { p.loss_scale.mode = "big"; }},
      {"loss_scale_initial", "must be positive", [](TrainingPlan& p, GptConfig&) { p.loss_scale.initial = 0; }},
      {"loss_scale_growth_factor", "more than 1", [](TrainingPlan& p, GptConfig&) { p.loss_scale.growth_factor = 1; }},
      {"loss_scale_backoff_factor", "between 0 and 1", [](TrainingPlan& p, GptConfig&) { p.loss_scale.backoff_factor = 0; }},
      {"loss_scale_backoff_factor", "between 0 and 1", [](TrainingPlan& p, GptConfig&) { p.loss_scale.backoff_factor = 1; }},
      {"loss_scale_growth_interval", "at least 1", [](TrainingPlan& p, GptConfig&) { p.loss_scale.growth_interval = 0; }},
      {"fp8_history", "at least 1", [](TrainingPlan& p, GptConfig&) { p.fp8.history = 0; }},
  });
}

TEST(Plan, ScalesTheLossWhereItSaysSoOrAnythingIsFp16) {
  TrainingPlan plan;
  for (const std::string_view precision : precisions()) {
    plan.numerics = numerics_from_precision(precision);
    const bool half = precision == "fp16" || precision == "fp16-autocast";
    plan.loss_scale.mode = "auto";
    EXPECT_EQ(scales_loss(plan), half) << precision;
    EXPECT_EQ(scales_loss_dynamically(plan), half) << precision;
    plan.loss_scale.mode = "none";
    EXPECT_FALSE(scales_loss(plan) || scales_loss_dynamically(plan)) << precision;
    plan.loss_scale.mode = "static";
    EXPECT_TRUE(scales_loss(plan) && !scales_loss_dynamically(plan)) << precision;
    plan.loss_scale.mode = "dynamic";
    EXPECT_TRUE(scales_loss(plan) && scales_loss_dynamically(plan)) << precision;
  }
}

TEST(Plan, OnOneRankKeepsTheArithmeticAndDealsNothing) {
  TrainingPlan plan;
  plan.parallel = {.data = 2, .tensor = 2};
  plan.zero_stage = 3;
  plan.numerics = numerics_from_precision("bf16");
  plan.attention = "materialized";
  const TrainingPlan single = on_one_rank(plan);
  EXPECT_EQ(single.parallel.world_size(), 1);
  EXPECT_EQ(single.zero_stage, 0);
  EXPECT_EQ(single.numerics, plan.numerics);
  EXPECT_EQ(single.attention, "materialized");
}

TEST(Plan, NamesWhatTensorParallelismCannotDivide) {
  expect_each_named({
      {"tensor", "tensor = 3 does not divide heads 4",
       [](TrainingPlan& p, GptConfig& m) {
         p.parallel.tensor = 3;
         m.mlp_hidden = 192;
       }},
      {"tensor", "tensor = 2 does not divide mlp_hidden 99",
       [](TrainingPlan& p, GptConfig& m) {
         p.parallel.tensor = 2;
         m.mlp_hidden = 99;
       }},
      {"tensor", "tensor = 4 is more than the vocabulary of 3",
       [](TrainingPlan& p, GptConfig& m) {
         p.parallel.tensor = 4;
         m.vocabulary = 3;
       }},
      {"sequence_parallel", "needs tensor of at least 2", [](TrainingPlan& p, GptConfig&) { p.sequence_parallel = true; }},
  });
}

TEST(Plan, NamesPipelinesThatTheScheduleOrTheLayersForbid) {
  const auto pipeline = [](int ranks, const PipelineConfig& config, int micro_batches) {
    return [=](TrainingPlan& p, GptConfig&) {
      p.parallel.pipeline = ranks;
      p.pipeline = config;
      p.batch.micro_batches = micro_batches;
    };
  };
  expect_each_named({
      {"pipeline_schedule", "no schedule 'fifo'", pipeline(2, {"fifo", 1, ""}, 2)},
      {"chunks", "schedule gpipe needs chunks = 1", pipeline(2, {"gpipe", 2, ""}, 2)},
      {"chunks", "schedule interleaved needs at least 2 chunks", pipeline(2, {"interleaved", 1, ""}, 2)},
      {"chunks", "schedule interleaved needs pipeline of at least 2", pipeline(1, {"interleaved", 2, ""}, 2)},
      {"micro_batches", "does not divide micro_batches = 3", pipeline(2, {"interleaved", 2, ""}, 3)},
      {"chunks", "schedule zb-v needs chunks = 2", pipeline(2, {"zb-v", 1, ""}, 2)},
      {"chunks", "schedule zb-v needs pipeline of at least 2", pipeline(1, {"zb-v", 2, ""}, 2)},
      {"chunks", "chunks is 0", pipeline(2, {"1f1b", 0, ""}, 2)},
      {"pipeline", "makes 12 stages of 8 layers", pipeline(3, {"interleaved", 4, ""}, 3)},
      {"stage_layers", "'3,5' is not a list", pipeline(2, {"1f1b", 1, "3,5"}, 2)},
      {"stage_layers", "names 3 stages, there are 2", pipeline(2, {"1f1b", 1, "3-3-2"}, 2)},
      {"stage_layers", "has a stage without layers", pipeline(2, {"1f1b", 1, "8-0"}, 2)},
      {"stage_layers", "does not add up to 8 layers", pipeline(2, {"1f1b", 1, "3-4"}, 2)},
  });
}

TEST(Plan, NamesWhatContextAndExpertParallelismCannotDeal) {
  expect_each_named({
      {"context", "context = 4 needs sequences of at least 8 tokens",
       [](TrainingPlan& p, GptConfig& m) {
         p.parallel.context = 4;
         m.sequence = 7;
       }},
      {"expert", "model.experts is 0", [](TrainingPlan& p, GptConfig&) { p.parallel = {.data = 2, .expert = 2}; }},
      {"expert", "expert = 2 does not divide experts 3",
       [](TrainingPlan& p, GptConfig& m) {
         p.parallel = {.data = 2, .expert = 2};
         m.experts = 3;
       }},
      {"expert", "expert = 2 does not divide data 3",
       [](TrainingPlan& p, GptConfig& m) {
         p.parallel = {.data = 3, .expert = 2};
         m.experts = 4;
       }},
  });
}

TEST(Plan, ReportsEveryConflictInOneLine) {
  TrainingPlan plan;
  plan.parallel.tensor = 2;
  plan.zero_stage = 5;
  const GptConfig model{.hidden = 64, .heads = 5};
  try {
    require_legal(plan, model);
    FAIL() << "no error";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("heads 5 do not divide hidden 64"), std::string::npos) << text;
    EXPECT_NE(text.find("tensor = 2 does not divide heads 5"), std::string::npos) << text;
    EXPECT_NE(text.find("zero = 5"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace tandem
