// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <span>

#include <gtest/gtest.h>

#include "core/error.h"
#include "harness/finding.h"
#include "suites/composition_checks.h"
#include "suites/composition_draw.h"
#include "suites/composition_minimise.h"
#include "suites/expected_yardstick.h"

namespace tandem {
namespace {

Composition with(std::initializer_list<const char*> settings) {
  Composition composition = simplest_composition();
  for (const char* setting : settings) set_option(composition, setting);
  return composition;
}

// What is left of a large composition when the fault is planted: settings, but for the seed.
std::string smallest_that_shows(Pitfall pitfall, const Composition& large) {
  RunnerOptions options;
  options.context.pitfalls = PitfallSet(std::array{pitfall});
  const auto failure = first_failure(large, "planted", options);
  if (!failure) return "the fault does not show";
  const Minimised least = minimise(large, [&](const Composition& smaller) {
    const auto found = first_failure(smaller, "planted", options, failure->check);
    return found && found->same_as(*failure);
  });
  EXPECT_TRUE(least.complete);
  return to_settings(least.composition);
}

TEST(Composition, IsDrawnLegalAndTheSameWheneverItIsDrawn) {
  DrawCounts counts;
  for (std::int64_t number = 0; number < 200; ++number) {
    const DrawnComposition drawn = draw_composition(9, number, counts, Decidable::no);
    EXPECT_EQ(refusal(drawn.composition), std::nullopt) << to_settings(drawn.composition);
    EXPECT_LE(drawn.composition.config.plan.parallel.world_size(), kMostComposedRanks);
    DrawCounts alone;
    EXPECT_EQ(to_json(draw_composition(9, number, alone, Decidable::no).composition), to_json(drawn.composition));
  }
  EXPECT_GE(counts.drawn, 200);
}

TEST(Composition, ReachesEveryValueOfEveryOption) {
  std::int64_t values = 0;
  for (const ComposedOption& option : composed_options()) values += static_cast<std::int64_t>(option.values.size());
  EXPECT_EQ(reachable_pairs(3000).values(), values);
}

TEST(Composition, ComesBackFromItsFileAndFromItsSettings) {
  DrawCounts counts;
  for (std::int64_t number = 0; number < 50; ++number) {
    const Composition drawn = draw_composition(3, number, counts, Decidable::no).composition;
    EXPECT_EQ(to_json(composition_from_json(to_json(drawn), "text")), to_json(drawn));
  }
  EXPECT_EQ(to_settings(with({"tensor=2", "algorithm=ring"})), "--set tensor=2 --set algorithm=ring");
  EXPECT_EQ(to_settings(simplest_composition()), "");
}

TEST(Composition, SaysWhichKeyOrPlanIsWrong) {
  Composition composition = simplest_composition();
  EXPECT_THROW(set_option(composition, "algorithm=rings"), InputError);
  EXPECT_THROW(set_option(composition, "adversary=-1"), InputError);
  EXPECT_THROW(static_cast<void>(composition_from_json(R"({"composition": {"row_shapes": "full"}})", "text")), InputError);
  EXPECT_NE(refusal(with({"tensor=3"})).value_or("").find("heads"), std::string::npos);
  EXPECT_NE(refusal(with({"overflow_step=0"})).value_or("").find("dynamic loss scale"), std::string::npos);
  EXPECT_NE(undecidable(with({"data=2", "rows=1"})), std::nullopt);
}

// Terms of these sums over tokens cancel to a sixth, and the fp32 reference is right beyond its means by chance.
TEST(Composition, IsNotJudgedByAYardstickThatIsExactByChance) {
  const Composition cancelling =
      with({"vocabulary=13", "hidden=3", "heads=3", "tied=false", "rows=5", "seed=356114", "row_shape=full"});
  const PairInputs inputs = inputs_of(cancelling);
  const Evidence truth = reference_evidence<double>(inputs, 1, 1);
  const auto error_of = [&](const Evidence& side) {
    const EvidenceTensor& exact = *find_tensor(*find_stage(truth, kGradients, 0), "h.0.attn.c_proj.bias");
    const EvidenceTensor& values = *find_tensor(*find_stage(side, kGradients, 0), "h.0.attn.c_proj.bias");
    double squares = 0, size = 0;
    for (std::size_t i = 0; i < exact.values.size(); ++i) {
      squares += std::pow(values.values[i] - exact.values[i], 2);
      size += std::pow(exact.values[i], 2);
    }
    return std::sqrt(squares / size) / 0x1p-24;
  };
  EXPECT_LT(error_of(reference_evidence<float>(inputs, 1, 1)), 5);
  EXPECT_GT(error_of(expected_yardstick(inputs, truth)), 7);
  EXPECT_EQ(first_failure(cancelling, "cancelling", {}), std::nullopt);
}

// A step that is skipped leaves its largest values in the histories of scales, as any other does.
TEST(Composition, OfAnOverflowInFp8GoesOnWithTheHistoryOfTheSkippedStep) {
  std::vector<CaseResult> results;
  const Composition skips = with({"precision=fp8", "loss_scale=dynamic", "steps=2", "seed=681354", "overflow_step=0"});
  EXPECT_EQ(first_failure(skips, "skips", {}, "overflow", &results), std::nullopt);
  EXPECT_EQ(results.size(), 1U);
}

// Residuals of matrices that the factors hold whole are rounding, of the size of what they are the difference of; a sum around a
// ring or a tree has an order of its own.
TEST(Composition, OfCodesIsJudgedByWhatIsRounded) {
  for (const Composition& coded : {with({"vocabulary=37", "hidden=12", "heads=6", "mlp_hidden=20", "experts=3", "tied=false",
                                         "attention_dropout=0.1", "residual_dropout=0.1", "context=2", "rows=1",
                                         "compression=power_sgd", "weight_decay=0", "steps=4", "seed=592683", "row_shape=full"}),
                                   with({"data=3", "rows=3", "compression=random_k", "seed=24349", "algorithm=hierarchical"})}) {
    EXPECT_EQ(first_failure(coded, "coded", {}, "compression"), std::nullopt) << to_settings(coded);
  }
}

TEST(Composition, OfOneRankIsGood) { EXPECT_EQ(first_failure(simplest_composition(), "simplest", {}), std::nullopt); }

TEST(Minimise, EndsAtWhatTheFailureNeedsAndNothingElse) {
  const Composition large = with({"data=2", "tensor=2", "pipeline=2", "pipeline_schedule=zb-v", "chunks=2", "layers=6", "heads=4",
                                  "hidden=12", "zero=3", "micro_batches=3", "rows=7", "recompute=full", "vocabulary=13"});
  // Two options that must meet.
  const Minimised least =
      minimise(large, [](const Composition& c) { return c.config.plan.pipeline.chunks == 2 && c.config.plan.zero_stage >= 2; });

  EXPECT_TRUE(least.complete);
  EXPECT_EQ(to_settings(least.composition),
            "--set layers=4 --set pipeline=2 --set pipeline_schedule=zb-v --set chunks=2 --set zero=2");
}

TEST(Minimise, OfABiasOnEveryTensorRankKeepsTensorRanksAndThePrecisionOfTheFinding) {
  EXPECT_EQ(smallest_that_shows(Pitfall::row_bias_on_every_rank,
                                with({"data=2", "tensor=2", "rows=5", "layers=2", "precision=bf16", "zero=2", "vocabulary=11"})),
            "--set tensor=2 --set precision=bf16");
}

TEST(Minimise, OfMasksThatAreDrawnAnewKeepsRecomputationAndDropout) {
  EXPECT_EQ(smallest_that_shows(Pitfall::recompute_draws_other_masks,
                                with({"tensor=2", "sequence_parallel=true", "recompute=full", "recompute_layers=2", "layers=3",
                                      "dropout=0.3", "micro_batches=2", "rows=4"})),
            "--set residual_dropout=0.3 --set recompute=full");
}

TEST(Minimise, OfMeansOfRankMeansKeepsDataRanks) {
  EXPECT_EQ(smallest_that_shows(Pitfall::mean_of_rank_means, with({"data=3", "pipeline=2", "layers=2", "rows=7",
                                                                   "overlap_gradients=true", "bucket_bytes=400"})),
            "--set data=2");
}

TEST(Minimise, OfGatesThatDoNotAddUpKeepsTheTwoChoicesOfATokenAndNoOtherOption) {
  const std::string least =
      smallest_that_shows(Pitfall::gates_not_renormalised,
                          with({"data=2", "expert=2", "experts=4", "expert_choices=2", "rows=6", "zero=1", "tied=false"}));
  EXPECT_EQ(least, "--set experts=3 --set expert_choices=2");
}

}  // namespace
}  // namespace tandem
