// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/fault_injector.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optimized/checkpoint/checkpoint_test_support.h"
#include "optimized/recovery/fault_effects.h"
#include "optimized/recovery/faulty_communicator.h"

namespace tandem {
namespace {

FaultInjectorOptions script(std::vector<Fault> faults, const std::filesystem::path& struck_file = {}) {
  for (std::size_t i = 0; i < faults.size(); ++i) faults[i].id = i;
  FaultInjectorOptions options;
  options.faults = std::move(faults);
  options.struck_file = struck_file;
  options.in_process = true;
  return options;
}

using Gate = std::function<UpdateDecision(const UpdateSigns&)>;

struct RunRecord {
  std::vector<std::vector<double>> parameters;  // by rank
  std::vector<StepResult> steps;                // of rank 0, those that are done again not
};

// As the trainer: steps that the gate wants again are computed again.
RunRecord run(const RunConfig& config, FaultInjector& faults, std::int64_t steps, const Gate& gate = {}) {
  const SyntheticCorpus corpus({.vocabulary = config.model.vocabulary, .sequence = config.model.sequence});
  const int ranks = config.plan.parallel.world_size();
  RunRecord record;
  record.parameters.resize(static_cast<std::size_t>(ranks));
  run_world({.ranks = ranks, .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& world) {
    const std::unique_ptr<Communicator> disturbed = faults.disturbed(world);
    Communicator& comm = disturbed ? *disturbed : world;
    Arena arena({.poison = true, .huge_pages = false});
    const auto kernels = make_cpu_kernels({});
    EngineOptions options{config.model, config.plan, config.optimizer, config.schedule, config.steps, 1};
    options.gate = gate;
    faults.add_hooks(options, comm.rank());
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, std::move(options));
    engine.store().initialise(config.model, Initialization::scattered, 1);
    for (std::int64_t step = 0; step < steps;) {
      faults.begin_step(step, comm.rank(), engine);
      const StepResult result = engine.train_step(corpus.training_batch(step, config.plan.batch.rows), step);
      if (result.retry) continue;
      if (comm.rank() == 0) record.steps.push_back(result);
      ++step;
    }
    std::vector<double>& values = record.parameters[static_cast<std::size_t>(comm.rank())];
    for (std::size_t i = 0; i < engine.store().size(); ++i) {
      const std::vector<double> part = ParameterStore::values_of(engine.store().parameter(i));
      values.insert(values.end(), part.begin(), part.end());
    }
  });
  return record;
}

RunRecord undisturbed(const RunConfig& config, std::int64_t steps) {
  FaultInjector none(script({}));
  return run(config, none, steps);
}

TEST(FaultInjector, KillsARankOnceInARunRestartsIncluded) {
  const TestFolder folder;
  const RunConfig config = tiny_config({.data = 2});
  const std::vector<Fault> faults = {{.kind = FaultKind::lose, .step = 2, .rank = 1}, {.kind = FaultKind::kill, .step = 3}};
  FaultInjector first(script(faults, folder / "struck"));
  EXPECT_EQ(message_of<FaultStruck>([&] { run(config, first, 4); }), "fault lose@step=2,rank=1 has struck");
  FaultInjector second(script(faults, folder / "struck"));
  EXPECT_EQ(message_of<FaultStruck>([&] { run(config, second, 4); }), "fault kill@step=3 has struck");
  EXPECT_EQ(TestFolder::read(folder / "struck"), "0 lose@step=2,rank=1\n1 kill@step=3\n");
  FaultInjector third(script(faults, folder / "struck"));
  EXPECT_EQ(run(config, third, 4).parameters, undisturbed(config, 4).parameters);
  EXPECT_EQ(third.lost_ranks(), std::vector<int>{1});
}

TEST(FaultInjector, StrikesWithAnotherFaultAtThePlaceOfOneThatHasStruck) {
  const TestFolder folder;
  const RunConfig config = tiny_config({.data = 2});
  FaultInjector first(script({{.kind = FaultKind::kill, .step = 2}}, folder / "struck"));
  EXPECT_THROW(run(config, first, 4), FaultStruck);
  FaultInjector other(script({{.kind = FaultKind::kill, .step = 3}}, folder / "struck"));
  EXPECT_THROW(run(config, other, 4), FaultStruck);
  FaultInjector same(script({{.kind = FaultKind::kill, .step = 2}}, folder / "struck"));
  EXPECT_NO_THROW(run(config, same, 4));
}

TEST(FaultInjectorDeathTest, EndsTheProcessWithASignalOutsideOfTests) {
  FaultInjectorOptions options = script({{.kind = FaultKind::kill, .step = 3, .rank = 1, .moment = FaultMoment::save}});
  options.in_process = false;
  options.before_end = [](const Fault& fault) { std::fprintf(stderr, "soon %s\n", to_string(fault).c_str()); };
  FaultInjector faults(options);
  faults.during(FaultMoment::save, 1, 1);     // before its step
  faults.during(FaultMoment::save, 5, 0);     // another rank
  faults.during(FaultMoment::restore, 5, 1);  // another moment
  EXPECT_EXIT(faults.during(FaultMoment::save, 5, 1), testing::KilledBySignal(SIGKILL),
              "^soon kill@step=3,rank=1,during=save\n$");
}

TEST(FaultInjector, HangsUntilItIsReleased) {
  FaultInjector faults(script({{.kind = FaultKind::hang, .step = 1, .moment = FaultMoment::restore}}));
  auto hanging = std::async(std::launch::async, [&] { faults.during(FaultMoment::restore, 0, 0); });
  faults.release();  // whether or not it hangs already
  EXPECT_THROW(hanging.get(), FaultStruck);
  EXPECT_NO_THROW(faults.during(FaultMoment::restore, 0, 0));
}

TEST(FaultInjector, StrikesAStepThatIsComputedAgainTheFirstTimeOnly) {
  const RunConfig config = tiny_config({.data = 2});
  for (const FaultTarget target : {FaultTarget::gradients, FaultTarget::activations}) {
    for (const FaultKind kind : {FaultKind::nan, FaultKind::flip}) {
      FaultInjector faults(script({{.kind = kind, .step = 2, .rank = 1, .target = target}}));
      std::atomic<int> asked_again = 0;
      const RunRecord clean = undisturbed(config, 3);
      const double limit = 10 * clean.steps[1].gradient_norm;
      const RunRecord record = run(config, faults, 3, [&](const UpdateSigns& signs) {
        if (signs.gradient_norm < limit) return UpdateDecision();
        ++asked_again;
        return UpdateDecision{.kind = UpdateDecision::Kind::retry};
      });
      // A huge activation is taken back by the norm behind it, so that its gradient may be an ordinary one.
      if (kind == FaultKind::nan || target == FaultTarget::gradients) {
        EXPECT_EQ(asked_again, 2) << name(kind) << name(target);  // once on each rank
        EXPECT_EQ(record.parameters, clean.parameters);
      } else {
        EXPECT_NE(record.parameters, clean.parameters);
      }
    }
  }
}

TEST(FaultInjector, TurnsOneBitInTheStateOfOneReplica) {
  const RunConfig config = in_precision(tiny_config({.data = 2}), "bf16");
  for (const FaultTarget target : {FaultTarget::weights, FaultTarget::moments}) {
    FaultInjector faults(script({{.kind = FaultKind::flip, .step = 3, .rank = 1, .target = target}}));
    std::vector<int> changed(2);
    with_engines(config, [&](Engine& engine) {
      const auto rank = static_cast<std::size_t>(engine.context().world->rank());
      engine.train_step(make_batch(4, 7), 0);
      const auto read = [&] {
        std::vector<double> values;
        for (const OwnedPart& part : engine.store().parts()) {
          for (const TensorView view : {engine.store().master(part), engine.store().first_moment(part)}) {
            const std::vector<double> some = ParameterStore::values_of(view);
            values.insert(values.end(), some.begin(), some.end());
          }
        }
        return values;
      };
      std::vector<double> before = read();
      faults.begin_step(2, static_cast<int>(rank), engine);
      const std::vector<double> after = read();
      for (std::size_t i = 0; i < before.size(); ++i) {
        if (before[i] == after[i]) continue;
        ++changed[rank];
        EXPECT_TRUE(std::isfinite(after[i]));
        EXPECT_GE(std::abs(after[i]), 2 * std::abs(before[i]));
      }
      for (const OwnedPart& part : engine.store().parts()) {  // what is computed with is the rounded copy
        std::vector<double> rounded = ParameterStore::values_of(engine.store().master(part));
        for (double& value : rounded) value = from_bf16_bits(to_bf16_bits(static_cast<float>(value)));
        EXPECT_EQ(ParameterStore::values_of(engine.store().stored(part)), rounded);
      }
    });
    EXPECT_EQ(changed, (std::vector<int>{0, 1})) << name(target);
  }
}

TEST(FaultInjector, RaisesTheLearningRateInItsStepsAlone) {
  const RunConfig config = tiny_config({.data = 2});
  FaultInjector faults(script({{.kind = FaultKind::spike, .step = 2, .count = 2, .factor = 50}}));
  const RunRecord clean = undisturbed(config, 4), record = run(config, faults, 4);
  for (std::size_t i = 0; i < 4; ++i) {
    const double factor = i == 1 || i == 2 ? 50 : 1;
    EXPECT_DOUBLE_EQ(record.steps[i].learning_rate, factor * clean.steps[i].learning_rate);
  }
  EXPECT_EQ(record.parameters[0], record.parameters[1]);
  // Steps that are computed again after a rollback are as they should be.
  const RunRecord again = run(config, faults, 4);
  EXPECT_EQ(again.parameters, clean.parameters);
}

TEST(FaultInjector, SlowsOneRankBesideWhatSlowsItAlready) {
  FaultInjector faults(script({{.kind = FaultKind::slow, .step = 2, .rank = 1, .milliseconds = 3000, .count = 1}}));
  EngineOptions slow, other;
  slow.injected_seconds = [](const Operation&) { return 0.25; };
  faults.add_hooks(slow, 1);
  faults.add_hooks(other, 0);
  EXPECT_FALSE(other.injected_seconds);
  with_engines(tiny_config(), [&](Engine& engine) {
    std::vector<double> seconds;
    for (const std::int64_t step : {0, 1, 1, 2}) {  // once more by a retry
      faults.begin_step(step, 1, engine);
      for (int operation = 0; operation < 2; ++operation) seconds.push_back(slow.injected_seconds({}));
    }
    EXPECT_EQ(seconds, (std::vector<double>{0.25, 0.25, 3.25, 0.25, 0.25, 0.25, 0.25, 0.25}));
  });
}

TEST(FaultInjector, PoisonsABatchForGoodAndNoOther) {
  const FaultInjector faults(script({{.kind = FaultKind::poison, .step = 0, .batch = 5}}));
  const SyntheticCorpus corpus({.vocabulary = 200, .sequence = 64});
  const std::unique_ptr<BatchSource> poisoned = faults.poisoned(corpus);
  ASSERT_NE(poisoned, nullptr);
  EXPECT_EQ(poisoned->identity(), corpus.identity());
  EXPECT_EQ(poisoned->training_batch(4, 8).ids, corpus.training_batch(4, 8).ids);
  const Batch clean = corpus.training_batch(5, 8), garbage = poisoned->training_batch(5, 8);
  EXPECT_NO_THROW(validate_tokens(garbage, 200));
  EXPECT_EQ(garbage.valid_tokens(), clean.valid_tokens());
  std::size_t same = 0, same_targets = 0;
  for (std::size_t i = 0; i < clean.ids.size(); ++i) {
    same += garbage.ids[i] == clean.ids[i];
    same_targets += garbage.targets[i] == clean.targets[i];
  }
  EXPECT_LT(same, clean.ids.size() / 20);
  EXPECT_LT(same_targets, clean.ids.size() / 20);
  EXPECT_EQ(poisoned->training_rows(5, 8, {3, 6}).ids, slice_rows(garbage, 3, 3).ids);
  EXPECT_EQ(FaultInjector(script({})).poisoned(corpus), nullptr);
}

TEST(FaultInjector, FillsTheDiskForSomeSteps) {
  const TestFolder folder;
  FaultInjector faults(script({{.kind = FaultKind::disk_full, .step = 2, .count = 2}}));
  FileOperations* const files = faults.files(system_files());
  ASSERT_NE(files, nullptr);
  with_engines(tiny_config(), [&](Engine& engine) {
    const std::vector<std::byte> bytes(3);
    for (std::int64_t step = 0; step < 4; ++step) {
      faults.begin_step(step, 0, engine);
      const std::filesystem::path file = folder / std::to_string(step);
      const std::string error = message_of<IoError>([&] { write_new_file(*files, file, bytes); });
      EXPECT_EQ(error, step == 1 || step == 2 ? "cannot write " + file.string() + ": No space left on device" : "");
    }
  });
  EXPECT_EQ(FaultInjector(script({})).files(system_files()), nullptr);
}

TEST(FaultInjector, CorruptsTheNewestCheckpointOnce) {
  const TestFolder folder;
  const RunConfig config = tiny_config({.data = 2});
  FaultInjectorOptions options = script({{.kind = FaultKind::corrupt, .step = 1}});
  options.checkpoints = folder / "none";
  with_engines(tiny_config(), [&](Engine& engine) { FaultInjector(options).begin_step(0, 0, engine); });
  save_trained(config, folder.path(), 1);
  save_trained(config, folder.path(), 2);
  options.checkpoints = folder.path();
  FaultInjector faults(options);
  with_engines(tiny_config(), [&](Engine& engine) {
    faults.begin_step(3, 0, engine);
    EXPECT_TRUE(find_damage(folder / step_folder_name(2), VerifyDepth::contents).has_value());
    EXPECT_FALSE(find_damage(folder / step_folder_name(1), VerifyDepth::contents).has_value());
    faults.begin_step(4, 0, engine);  // turned back, it would be whole
    EXPECT_TRUE(find_damage(folder / step_folder_name(2), VerifyDepth::contents).has_value());
  });
}

TEST(FaultInjector, TurnsABitOfWhatOneRankReceivesNext) {
  FaultInjector faults(script({{.kind = FaultKind::message, .step = 2, .rank = 1}}));
  const RunConfig config = tiny_config({.data = 2});
  const RunRecord clean = undisturbed(config, 3), record = run(config, faults, 3);
  EXPECT_EQ(record.steps[0].gradient_norm, clean.steps[0].gradient_norm);
  EXPECT_NE(record.parameters[0], record.parameters[1]);  // the replicas have parted
}

TEST(FaultyCommunicator, DamagesOneElementOfTheNextNumbersAndNothingElse) {
  FaultInjector faults(script({{.kind = FaultKind::message, .step = 1, .rank = 2},
                               {.kind = FaultKind::jitter, .step = 1, .rank = 2, .milliseconds = 0.01, .count = 1}}));
  std::vector<int> wrong(4);
  run_world({.ranks = 4, .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& world) {
    const std::unique_ptr<Communicator> disturbed = faults.disturbed(world);
    EXPECT_EQ(disturbed != nullptr, world.rank() == 2);
    const std::unique_ptr<Communicator> pair = (disturbed ? *disturbed : world).split(world.rank() / 2, world.rank());
    const std::unique_ptr<Communicator> alone = pair->split(pair->rank(), 0);
    Arena arena({.huge_pages = false});
    const auto kernels = make_cpu_kernels({});
    const RunConfig config = tiny_config();
    Engine engine({alone.get(), kernels.get(), &arena, nullptr, {}}, {config.model, config.plan, {}, {}, 1, 1});
    faults.begin_step(0, world.rank(), engine);
    EXPECT_EQ(all_reduce_sum(*pair, 0.5), 1);  // no numbers of the model
    for (int times = 0; times < 2; ++times) {
      std::vector<float> values(9, 0.125F);
      all_reduce(*pair, view_of(values, {9}), {.purpose = Purpose::gradient});
      for (const float value : values) wrong[static_cast<std::size_t>(world.rank())] += value != 0.25F;
    }
    pair->barrier();
    EXPECT_EQ(pair->bytes_sent(Purpose::gradient), 2 * 9 * 4);
  });
  EXPECT_EQ(wrong, (std::vector<int>{0, 0, 1, 0}));
}

TEST(FaultyCommunicator, StrikesEveryOperationThatReceivesAndNoneThatOnlySends) {
  run_world({.ranks = 2, .deadline = std::chrono::milliseconds(20000)}, [](Communicator& world) {
    MessageFaults faults;
    const std::unique_ptr<Communicator> comm = make_faulty(world, faults);
    const int other = 1 - world.rank();
    const CommOptions numbers{.purpose = Purpose::activation};
    const std::vector<std::int64_t> parts = {4, 4};
    const auto strike = [&](const char* what, int wrong_on_rank_1,
                            const std::function<Work(TensorView in, TensorView out)>& call) {
      faults.flip_next = world.rank() == 1;
      std::vector<float> in(8, 0.25F), out(8, 0.25F);
      call(view_of(in, {8}), view_of(out, {8})).wait_host();
      const auto is_wrong = [](float value) { return value != 0.25F && value != 0.5F; };
      const auto wrong = std::ranges::count_if(in, is_wrong) + std::ranges::count_if(out, is_wrong);
      EXPECT_EQ(wrong, world.rank() == 1 ? wrong_on_rank_1 : 0) << what;
      EXPECT_EQ(faults.flip_next, world.rank() == 1 && wrong_on_rank_1 == 0) << what;
    };
    strike("all_reduce", 1, [&](TensorView in, TensorView) { return comm->all_reduce(in, numbers); });
    strike("reduce_scatter", 1,
           [&](TensorView in, TensorView out) { return comm->reduce_scatter(in, out.flat(0, 4), parts, numbers); });
    strike("all_gather", 1, [&](TensorView in, TensorView out) { return comm->all_gather(in.flat(0, 4), out, parts, numbers); });
    strike("all_to_all", 1, [&](TensorView in, TensorView out) { return comm->all_to_all(in, parts, out, parts, numbers); });
    strike("broadcast, received", 1, [&](TensorView in, TensorView) { return comm->broadcast(in, 0, numbers); });
    strike("broadcast, sent", 0, [&](TensorView in, TensorView) { return comm->broadcast(in, 1, numbers); });
    strike("recv", 1, [&](TensorView in, TensorView) {
      return world.rank() == 1 ? comm->recv(in, other, {}, numbers) : comm->send(in, other, {}, numbers);
    });
    strike("send", 0, [&](TensorView in, TensorView) {
      return world.rank() == 0 ? comm->recv(in, other, {}, numbers) : comm->send(in, other, {}, numbers);
    });
  });
}

TEST(FaultInjector, TellsHeartbeatsAndPreemptionToWhomTheyConcern) {
  std::int64_t lost = 0;
  int preempted = 0;
  FaultInjectorOptions options = script({{.kind = FaultKind::heartbeat, .step = 1, .count = 7},
                                         {.kind = FaultKind::preempt, .step = 1},
                                         {.kind = FaultKind::preempt, .step = 1, .moment = FaultMoment::save}});
  options.lose_beats = [&](std::int64_t beats) { lost += beats; };
  options.preempt = [&] { ++preempted; };
  FaultInjector faults(options);
  with_engines(tiny_config(), [&](Engine& engine) {
    faults.begin_step(0, 0, engine);
    faults.begin_step(0, 0, engine);
  });
  EXPECT_EQ(lost, 7);
  EXPECT_EQ(preempted, 1);
  faults.during(FaultMoment::save, 1, 0);
  EXPECT_EQ(preempted, 2);
}

TEST(FaultEffects, KeepTurnedValuesFiniteInEveryDtype) {
  for (const double value : {0.0, 1e-3, 0.75, -0.02, 1.0, 3.0}) {
    std::vector<double> wide(5, value);
    turn_exponent_bit(view_of(wide, {5}), FlipStrength::subtle);
    EXPECT_TRUE(std::isfinite(wide[2]) && wide[2] != value) << value;
    std::vector<float> narrow(5, static_cast<float>(value));
    turn_exponent_bit(view_of(narrow, {5}), FlipStrength::fatal);
    EXPECT_TRUE(std::isfinite(narrow[2]) && narrow[2] != static_cast<float>(value)) << value;
    std::vector<std::uint16_t> half(5, to_f16_bits(static_cast<float>(value)));
    turn_exponent_bit(TensorView(half.data(), DType::f16, {5}), FlipStrength::fatal);
    EXPECT_TRUE(std::isfinite(from_f16_bits(half[2]))) << value;
    put_nan(TensorView(half.data(), DType::f16, {5}));
    EXPECT_TRUE(std::isnan(from_f16_bits(half[2])));
  }
  std::vector<float> behind = {0.5F, 0, 0};  // the first that is not zero, around the end
  turn_exponent_bit(view_of(behind, {3}), FlipStrength::fatal);
  EXPECT_EQ(behind, (std::vector<float>{0.5F * 0x1p127F * 2, 0, 0}));
}

}  // namespace
}  // namespace tandem
