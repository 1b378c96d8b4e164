// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/parameter_store.h"

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/kernels.h"
#include "optimized/engine/optimizer.h"

namespace tandem {
namespace {

GptConfig small_model() {
  GptConfig model;
  model.vocabulary = 7;
  model.sequence = 5;
  model.hidden = 4;
  model.heads = 2;
  model.mlp_hidden = 3;
  return model;
}

TrainingPlan plan_of(int zero_stage, const std::string& precision = "fp32") {
  TrainingPlan plan;
  plan.parallel.data = 3;
  plan.zero_stage = zero_stage;
  plan.precision = precision;
  plan.numerics = numerics_from_precision(precision);
  return plan;
}

int unit_of(const ParameterStore& store, const std::string& name) {
  for (std::size_t u = 0; u < store.units().size(); ++u) {
    const Interval held = store.units()[u].parameters;
    const auto index = static_cast<std::int64_t>(store.index_of(name));
    if (index >= held.begin && index < held.end) return static_cast<int>(u);
  }
  return -1;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ContractError& error) {
    return error.what();
  }
  return "";
}

TEST(ParameterStore, StageThreeHasNoWholeParametersButWhatWasGathered) {
  Arena arena;
  ParameterStore store(arena, small_model(), plan_of(3), OptimizerKind::adamw, 1);
  store.initialise(small_model(), Initialization::scattered, 1);
  const int unit = unit_of(store, "h.0.ln_1.weight");

  EXPECT_NE(error_of([&] { (void)store.parameter(store.index_of("h.0.ln_1.weight")); }).find("are not here"), std::string::npos);
  store.hold_parameters(unit);
  EXPECT_NE(error_of([&] { (void)store.parameter(store.index_of("h.0.ln_1.weight")); }).find("read before its unit is gathered"),
            std::string::npos);
  store.stamp(unit);
  EXPECT_EQ(store.parameter(store.index_of("h.0.ln_1.weight")).num_elements(), 4);
  store.drop_parameters(unit);
  EXPECT_NE(error_of([&] { (void)store.parameter(store.index_of("h.0.ln_1.weight")); }), "");
}

TEST(ParameterStore, EveryKindOfUpdateMakesGatheredParametersStale) {
  for (const std::string offload : {"none", "optimizer"}) {
    for (const OptimizerKind kind : {OptimizerKind::sgd, OptimizerKind::adamw}) {
      Arena arena, host;
      TrainingPlan plan = plan_of(3);
      plan.offload = offload;
      ParameterStore store(arena, small_model(), plan, kind, 0, &host);
      store.initialise(small_model(), Initialization::scattered, 1);
      const std::unique_ptr<Kernels> kernels = make_cpu_kernels(CpuKernelsOptions{});
      kernels->fill(store.kept_gradients(), 0.5);
      OptimizerConfig optimizer;
      optimizer.kind = kind;
      RankContext context;
      context.kernels = kernels.get();
      const int unit = unit_of(store, "wpe.weight");
      store.hold_parameters(unit);
      store.stamp(unit);
      update_parameters(context, optimizer, {0.1, 1.0, 1}, store);
      EXPECT_NE(error_of([&] { (void)store.parameter(store.index_of("wpe.weight")); }).find("is stale"), std::string::npos)
          << offload;
    }
  }
}

TEST(ParameterStore, GatheredParametersAreStaleAfterAnUpdate) {
  Arena arena;
  ParameterStore store(arena, small_model(), plan_of(3), OptimizerKind::adamw, 0);
  store.initialise(small_model(), Initialization::scattered, 1);
  const int unit = unit_of(store, "wpe.weight");
  store.hold_parameters(unit);
  store.stamp(unit);
  (void)store.parameter(store.index_of("wpe.weight"));

  store.count_update();

  const std::string error = error_of([&] { (void)store.parameter(store.index_of("wpe.weight")); });
  EXPECT_NE(error.find("wpe.weight is stale: gathered after update 0"), std::string::npos) << error;
}

TEST(ParameterStore, BytesAreThoseOfTheStage) {
  const std::int64_t all = num_parameters(small_model());
  for (const std::string precision : {"fp32", "bf16"}) {
    const std::int64_t element = precision == "fp32" ? 4 : 2;
    for (const int stage : {0, 1, 2, 3}) {
      Arena arena;
      const ParameterStore store(arena, small_model(), plan_of(stage, precision), OptimizerKind::adamw, 0);
      const std::int64_t owned = store.owned_elements();
      const auto held = [&](MemoryCategory category) { return arena.ledger().current()[static_cast<std::size_t>(category)]; };
      const auto within_64 = [](std::int64_t bytes, std::int64_t expected, int buffers) {
        return bytes >= expected && bytes <= expected + 64 * buffers;
      };
      EXPECT_TRUE(within_64(held(MemoryCategory::parameters), element * (stage == 3 ? owned : all), 1)) << precision << stage;
      EXPECT_TRUE(within_64(held(MemoryCategory::gradients), 4 * (stage >= 2 ? owned : all), 1)) << precision << stage;
      EXPECT_TRUE(within_64(held(MemoryCategory::optimizer), (precision == "fp32" ? 8 : 12) * owned, 3)) << precision << stage;
      EXPECT_EQ(stage == 0, owned == all);
    }
  }
}

TEST(ParameterStore, StoredValuesAreTheMastersRounded) {
  for (const int stage : {0, 1, 3}) {
    Arena arena;
    ParameterStore store(arena, small_model(), plan_of(stage, "bf16"), OptimizerKind::adamw, 2);
    store.initialise(small_model(), Initialization::scattered, 5);
    std::vector<double> values(28);
    std::iota(values.begin(), values.end(), 0.1);
    store.set_parameter(store.index_of("wte.weight"), values);
    for (const OwnedPart& part : store.parts()) {
      const std::vector<double> stored = ParameterStore::values_of(store.stored(part));
      const std::vector<double> master = ParameterStore::values_of(store.master(part));
      for (std::size_t i = 0; i < stored.size(); ++i) {
        EXPECT_EQ(stored[i], static_cast<double>(round_to(static_cast<float>(master[i]), DType::bf16))) << part.shard.global_name;
      }
    }
  }
}

TEST(ParameterStore, OffloadedStateLeavesTheDevice) {
  Arena device;
  Arena host;
  TrainingPlan plan = plan_of(1, "fp16");
  plan.offload = "optimizer";
  ParameterStore store(device, small_model(), plan, OptimizerKind::adamw, 0, &host);
  const auto optimizer = static_cast<std::size_t>(MemoryCategory::optimizer);

  EXPECT_EQ(device.ledger().current()[optimizer], 0);
  EXPECT_GE(host.ledger().current()[optimizer], 12 * store.owned_elements());
  store.initialise(small_model(), Initialization::scattered, 1);
  EXPECT_EQ(ParameterStore::values_of(store.first_moment(store.parts().front())).front(), 0.0);
}

}  // namespace
}  // namespace tandem
