// SPDX-License-Identifier: Apache-2.0
// The engine on memory that the host cannot touch, against itself on the CPU: by default on the emulated GPU, where each access
// of the host and each forgotten wait ends the test.
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/machine.h"

namespace tandem {
namespace {

std::string device_backend() {
  const char* const name = std::getenv("TANDEM_TEST_BACKEND");
  return name != nullptr && *name != '\0' ? name : "simt";
}

struct Setting {
  std::string name;
  std::function<void(TrainingPlan& plan, GptConfig& model)> change;
  std::string precision = "fp32";
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

GptConfig model_of(const Setting& setting, TrainingPlan& plan) {
  GptConfig model;
  model.vocabulary = 29;
  model.sequence = 9;
  model.layers = 2;
  model.hidden = 16;
  model.heads = 2;
  model.mlp_hidden = 24;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  plan.batch = {5, 1};
  setting.change(plan, model);
  return model;
}

using Tensors = std::map<std::string, std::vector<double>>;

struct Record {
  Tensors gradients, parameters;
  std::vector<double> losses, norms;
  double validation = 0;
  RunConfig config;
};

void collect(const Engine& engine, PartView view, Tensors& into) {
  const ParameterStore& store = engine.store();
  for (const OwnedPart& part : store.parts()) {
    if (part.shard.replica_index != 0) continue;
    std::vector<double>& whole = into[part.shard.global_name];
    whole.resize(static_cast<std::size_t>(num_elements(part.shard.global_shape)), std::nan(""));
    scatter_into(part.shard, ParameterStore::values_of(store.memory(), (store.*view)(part)), whole);
  }
}

void with_engines(const RunConfig& config, const std::string& backend, const std::function<void(Engine&)>& use) {
  run_world({.ranks = config.plan.parallel.world_size(), .deadline = std::chrono::milliseconds(120000)}, [&](Communicator& comm) {
    const auto kernels = make_kernels(config.plan, MachineChoice{backend});
    Arena arena({.poison = true, .huge_pages = false, .memory = &kernels->memory()});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}},
                  {config.model, config.plan, config.optimizer, config.schedule, config.steps, 5});
    engine.store().initialise(config.model, Initialization::scattered, 5);
    use(engine);
  });
}

Record run(const Setting& setting, const std::string& backend, const std::string& precision, OptimizerKind optimizer) {
  Record record;
  RunConfig& config = record.config;
  config.plan.precision = precision;
  config.plan.numerics = numerics_from_precision(precision);
  config.model = model_of(setting, config.plan);
  config.optimizer.kind = optimizer;
  config.optimizer.epsilon = 1e-4;                 // a tiny gradient's sign must not decide an update
  config.steps = setting.name == "adamw" ? 3 : 2;  // the third step is the first that updates a graph
  const SyntheticCorpus corpus(
      {.vocabulary = config.model.vocabulary, .sequence = config.model.sequence, .seed = 3, .row_shape = RowShape::packed});
  std::mutex mutex;
  with_engines(config, backend, [&](Engine& engine) {
    const bool leads = engine.groups().rank() == 0;
    for (std::int64_t step = 0; step < config.steps; ++step) {
      if (step == 0) {
        engine.set_gradient_observer([&](const Engine& e) {
          const std::scoped_lock lock(mutex);
          collect(e, &ParameterStore::gradient, record.gradients);
        });
      }
      const StepResult result = engine.train_step(corpus.training_batch(step, config.plan.batch.rows), step);
      engine.set_gradient_observer({});
      if (leads) record.losses.push_back(result.loss);
      if (leads) record.norms.push_back(result.gradient_norm);
    }
    const double validation = engine.evaluate(corpus.training_batch(7, 3));
    if (leads) record.validation = validation;
    const std::scoped_lock lock(mutex);
    collect(engine, &ParameterStore::master, record.parameters);
  });
  return record;
}

double relative_l2(const std::vector<double>& values, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);  // an expert that nobody chose has no gradient
}

// What the device's rounding may be off by, given what the CPU's is: four times as much, or what a sum of K terms costs.
double bound(double of_cpu, const std::string& precision) {
  constexpr double kTerms = 100;
  const double roundoff = precision == "fp32" ? std::ldexp(1.0, -24) : std::ldexp(1.0, -9);
  return 4 * std::max(of_cpu, roundoff * std::sqrt(kTerms));
}

void compare(const Tensors& device, const Tensors& cpu, const Tensors& exact, const Setting& setting, const std::string& what) {
  ASSERT_EQ(device.size(), exact.size());
  for (const auto& [name, values] : exact) {
    if (name.ends_with("c_attn.bias")) continue;  // its key third is rounding noise
    const double error = relative_l2(device.at(name), values);
    EXPECT_LE(error, bound(relative_l2(cpu.at(name), values), setting.precision)) << what << " of " << name;
  }
}

class EngineOnDevice : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(device_backend()); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(EngineOnDevice, ComputesWhatItDoesOnTheCpu) {
  const Setting& setting = GetParam();
  const OptimizerKind kind = setting.name == "sgd" ? OptimizerKind::sgd : OptimizerKind::adamw;
  // What is lossy by design is off by the same from double.
  const Record exact = run(setting, "cpu", setting.name == "compressed" ? "fp32" : "fp64", kind);
  const Record cpu = run(setting, "cpu", setting.precision, kind);
  const Record device = run(setting, device_backend(), setting.precision, kind);

  compare(device.gradients, cpu.gradients, exact.gradients, setting, "gradient");
  compare(device.parameters, cpu.parameters, exact.parameters, setting, "parameters");
  for (std::size_t step = 0; step < exact.losses.size(); ++step) {
    const double off = std::abs(cpu.losses[step] - exact.losses[step]) / exact.losses[step];
    EXPECT_NEAR(device.losses[step], exact.losses[step], bound(off, setting.precision) * exact.losses[step]) << step;
    const double norm_off = std::abs(cpu.norms[step] - exact.norms[step]) / exact.norms[step];
    EXPECT_NEAR(device.norms[step], exact.norms[step], bound(norm_off, setting.precision) * exact.norms[step]) << step;
  }
  const double off = std::abs(cpu.validation - exact.validation) / exact.validation;
  EXPECT_NEAR(device.validation, exact.validation, bound(off, setting.precision) * exact.validation);
}

const auto nothing = [](TrainingPlan&, GptConfig&) {};

INSTANTIATE_TEST_SUITE_P(
    Settings, EngineOnDevice,
    testing::Values(Setting{"sgd", nothing}, Setting{"adamw", nothing}, Setting{"bf16", nothing, "bf16"},
                    Setting{"accumulation",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.batch = {6, 3};
                            }},
                    Setting{"tensor",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.parallel.tensor = 2;
                              plan.sequence_parallel = true;
                            }},
                    Setting{"pipeline",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.parallel.pipeline = 2;
                              plan.batch = {5, 2};
                            }},
                    Setting{"context", [](TrainingPlan& plan, GptConfig&) { plan.parallel.context = 2; }},
                    Setting{"zero_1",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.parallel.data = 2;
                              plan.zero_stage = 1;
                            }},
                    Setting{"zero_2",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.parallel.data = 2;
                              plan.zero_stage = 2;
                            },
                            "bf16"},
                    Setting{"zero_3_overlapped",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.parallel.data = 2;
                              plan.zero_stage = 3;
                              plan.overlap.gradients = plan.overlap.prefetch = true;
                            }},
                    Setting{"recomputed", [](TrainingPlan& plan, GptConfig&) { plan.recompute.mode = "full"; }},
                    Setting{"experts",
                            [](TrainingPlan& plan, GptConfig& model) {
                              plan.parallel.data = plan.parallel.expert = 2;
                              model.experts = 4;
                              model.expert_choices = 2;
                              model.auxiliary_loss_weight = 0.1;
                            }},
                    Setting{"offloaded", [](TrainingPlan& plan, GptConfig&) { plan.offload = "optimizer"; }, "bf16"},
                    Setting{"compressed",
                            [](TrainingPlan& plan, GptConfig&) {
                              plan.parallel.data = 2;
                              plan.compression.codec = "random_k";  // draws the same elements whatever the last bits are
                              plan.compression.density = 0.3;
                              plan.overlap.gradients = true;
                            }}),
    [](const auto& setting) { return setting.param.name; });

TEST(EngineOnDeviceCheckpoint, IsSavedAndComesBackBitForBitAndOnTheCpuToo) {
  if (const std::string why = why_no_gpu(device_backend()); !why.empty()) GTEST_SKIP() << why;
  const TestFolder folder;
  RunConfig config;
  config.plan.precision = "bf16";
  config.plan.numerics = numerics_from_precision("bf16");
  config.plan.parallel.data = 2;
  config.plan.zero_stage = 3;
  config.model = model_of({"checkpoint", [](TrainingPlan& plan, GptConfig&) { plan.batch = {4, 1}; }}, config.plan);
  config.steps = 4;
  const SyntheticCorpus corpus({.vocabulary = config.model.vocabulary, .sequence = config.model.sequence, .seed = 3});
  constexpr PartView kViews[] = {&ParameterStore::master, &ParameterStore::stored, &ParameterStore::first_moment,
                                 &ParameterStore::second_moment};
  std::mutex mutex;
  const auto state_of = [&](const Engine& engine, std::map<std::size_t, Tensors>& state) {
    const std::scoped_lock lock(mutex);
    for (std::size_t view = 0; view < std::size(kViews); ++view) collect(engine, kViews[view], state[view]);
  };
  std::map<std::size_t, Tensors> saved, on_device, on_cpu;
  std::filesystem::path step_folder;
  with_engines(config, device_backend(), [&](Engine& engine) {
    for (std::int64_t step = 0; step < 2; ++step) engine.train_step(corpus.training_batch(step, 4), step);
    const auto written = save_checkpoint(folder.path(), engine, {config, 2, "synthetic", corpus.identity()});
    if (engine.groups().rank() == 0) step_folder = written;
    state_of(engine, saved);
  });
  const CheckpointInfo info = read_checkpoint_info(step_folder);
  const auto load_into = [&](std::map<std::size_t, Tensors>& state) {
    return [&](Engine& engine) {
      load_checkpoint(step_folder, info, engine);
      state_of(engine, state);
    };
  };
  with_engines(config, device_backend(), load_into(on_device));
  with_engines(config, "cpu", load_into(on_cpu));

  EXPECT_EQ(saved, on_device);
  EXPECT_EQ(saved, on_cpu);
}

}  // namespace
}  // namespace tandem
