// SPDX-License-Identifier: Apache-2.0
#include "optimized/loss_scaling/fp8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/comm/comm_test_support.h"

namespace tandem {
namespace {

using comm_test::run_ranks;

constexpr Fp8Slot kX{0, Fp8Linear::c_attn, Fp8Operand::x};
constexpr Fp8Slot kDy{0, Fp8Linear::c_attn, Fp8Operand::dy};

PitfallSet with(Pitfall pitfall) { return PitfallSet(std::vector<Pitfall>{pitfall}); }

Fp8Config config_of(int history, int margin = 0) { return {history, margin}; }

std::vector<Fp8Slot> all_slots(int layers) {
  std::vector<Fp8Slot> slots;
  for (int layer = 0; layer < layers; ++layer) {
    for (const Fp8Linear linear : {Fp8Linear::c_attn, Fp8Linear::attn_c_proj, Fp8Linear::c_fc, Fp8Linear::mlp_c_proj}) {
      for (const Fp8Operand operand : {Fp8Operand::x, Fp8Operand::w, Fp8Operand::dy}) slots.push_back({layer, linear, operand});
    }
  }
  return slots;
}

TEST(Fp8Scale, IsTheFloorPowerOfTwo) {
  // 448 / amax and 57344 / amax, rounded down to a power of two.
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 448, 0), 1);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 224, 0), 2);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 225, 0), 1);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 449, 0), 0.5);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 1, 0), 256);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 1.75, 0), 256);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 1.76, 0), 128);
  EXPECT_EQ(fp8_scale(Fp8Format::e5m2, 57344, 0), 1);
  EXPECT_EQ(fp8_scale(Fp8Format::e5m2, 1, 0), 32768);
  EXPECT_EQ(fp8_scale(Fp8Format::e5m2, 1e-3, 0), std::ldexp(1.0, 25));
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 1, 3), 32);
  EXPECT_EQ(fp8_scale(Fp8Format::e4m3, 0, 3), 1);
}

TEST(Fp8Scale, BringsTheLargestIntoTheTopBinadeAndNeverBeyond) {
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    const double most = largest(format);
    for (int exponent = -40; exponent <= 40; ++exponent) {
      for (const float fraction : {1.0F, std::nextafterf(1.75F, 0.0F), 1.75F, std::nextafterf(1.75F, 2.0F), 1.999F}) {
        const double amax = std::ldexp(fraction, exponent);
        const double scaled = amax * fp8_scale(format, amax, 0);
        EXPECT_LE(scaled, most) << amax;
        EXPECT_GT(scaled, most / 2) << amax;
      }
    }
  }
}

TEST(Fp8Scale, RefusesWhatIsNotFinite) {
  EXPECT_THROW((void)fp8_scale(Fp8Format::e4m3, std::numeric_limits<double>::infinity(), 0), ContractError);
  EXPECT_THROW((void)fp8_scale(Fp8Format::e4m3, std::numeric_limits<double>::quiet_NaN(), 0), ContractError);
  EXPECT_THROW((void)fp8_scale(Fp8Format::e4m3, -1, 0), ContractError);
}

TEST(Fp8Scaling, StartsWithOneAndChangesOnlyAtTheEndOfAStep) {
  Fp8Scaling scaling(config_of(4), 2);
  EXPECT_EQ(scaling.scale(kX), 1);
  scaling.observe(kX, 0.25);
  scaling.observe(kX, 1.0);
  scaling.observe(kX, 0.5);
  EXPECT_EQ(scaling.scale(kX), 1);
  scaling.end_step(nullptr);
  EXPECT_EQ(scaling.scale(kX), 256);
  EXPECT_EQ(scaling.scale(kDy), 1);
}

TEST(Fp8Scaling, GradientsUseTheWiderFormat) {
  Fp8Scaling scaling(config_of(4, 1), 1);
  scaling.observe(kX, 1.0);
  scaling.observe(kDy, 1.0);
  scaling.end_step(nullptr);
  EXPECT_EQ(scaling.scale(kX), 128);
  EXPECT_EQ(scaling.scale(kDy), 16384);
}

TEST(Fp8Scaling, KeepsSlotsApart) {
  const std::vector<Fp8Slot> slots = all_slots(3);
  ASSERT_EQ(slots.size(), 36U);
  Fp8Scaling scaling(config_of(2), 3);
  for (std::size_t i = 0; i < slots.size(); ++i) scaling.observe(slots[i], std::ldexp(1.0, static_cast<int>(i) - 18));
  scaling.end_step(nullptr);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const double of_one = slots[i].operand == Fp8Operand::dy ? 32768 : 256;
    EXPECT_EQ(scaling.scale(slots[i]), std::ldexp(of_one, 18 - static_cast<int>(i))) << i;
  }
}

TEST(Fp8Scaling, ForgetsAJumpAfterTheWindow) {
  Fp8Scaling scaling(config_of(3), 1);
  const auto step = [&](double amax) {
    scaling.observe(kX, amax);
    scaling.end_step(nullptr);
    return scaling.scale(kX);
  };
  EXPECT_EQ(step(1), 256);
  EXPECT_EQ(step(1), 256);
  // The step of the jump still runs with the old scale: its largest value saturates.
  EXPECT_EQ(round_to_fp8(static_cast<float>(64 * scaling.scale(kX)), Fp8Format::e4m3) / scaling.scale(kX), 1.75);
  EXPECT_EQ(step(64), 4);
  EXPECT_EQ(round_to_fp8(static_cast<float>(64 * scaling.scale(kX)), Fp8Format::e4m3) / scaling.scale(kX), 64);
  EXPECT_EQ(step(1), 4);
  EXPECT_EQ(step(1), 4);
  EXPECT_EQ(step(1), 256);
}

TEST(Fp8Scaling, TakesAStepWithoutAnyObservationForNone) {
  Fp8Scaling scaling(config_of(2), 1);
  scaling.observe(kX, 2);
  scaling.end_step(nullptr);
  scaling.end_step(nullptr);
  EXPECT_EQ(scaling.scale(kX), 128);
  scaling.end_step(nullptr);
  EXPECT_EQ(scaling.scale(kX), 1);
}

TEST(Fp8Scaling, LeavesOutWhatIsNotFinite) {
  Fp8Scaling scaling(config_of(2), 1);
  scaling.observe(kX, std::numeric_limits<double>::infinity());
  scaling.observe(kX, 1.0);
  scaling.observe(kX, std::numeric_limits<double>::quiet_NaN());
  scaling.end_step(nullptr);
  EXPECT_EQ(scaling.scale(kX), 256);
}

double amax_of(int step, std::size_t slot) { return std::ldexp(1.0 + 0.1 * static_cast<double>(slot), (step * 7) % 5 - 2); }

void run_step(Fp8Scaling& scaling, int step) {
  const std::vector<Fp8Slot> slots = all_slots(2);
  for (std::size_t i = 0; i < slots.size(); ++i) scaling.observe(slots[i], amax_of(step, i));
  scaling.end_step(nullptr);
}

TEST(Fp8Scaling, GoesOnFromASavedStateAtEveryStep) {
  for (int saved_after = 0; saved_after < 8; ++saved_after) {
    Fp8Scaling first(config_of(3), 2);
    for (int step = 0; step < saved_after; ++step) run_step(first, step);
    Fp8Scaling second(config_of(3), 2);
    run_step(second, 100);
    second.observe(kX, 1e6);

    second.set_state(first.state());

    EXPECT_EQ(second.state(), first.state());
    for (int step = saved_after; step < saved_after + 5; ++step) {
      for (const Fp8Slot& slot : all_slots(2)) EXPECT_EQ(second.scale(slot), first.scale(slot)) << saved_after << " " << step;
      run_step(first, step);
      run_step(second, step);
      EXPECT_EQ(second.state(), first.state());
    }
  }
}

TEST(Fp8Scaling, RefusesAStateOfAnotherModelOrHistory) {
  const Fp8ScalingState state = Fp8Scaling(config_of(3), 2).state();
  EXPECT_EQ(state.histories.size(), 2U * 12 * 3);
  Fp8Scaling other_model(config_of(3), 1);
  EXPECT_THROW(other_model.set_state(state), InputError);
  Fp8Scaling other_history(config_of(4), 2);
  EXPECT_THROW(other_history.set_state(state), InputError);
  Fp8Scaling same(config_of(3), 2);
  EXPECT_NO_THROW(same.set_state(state));
  Fp8ScalingState bad = state;
  bad.position = 3;
  EXPECT_THROW(same.set_state(bad), InputError);
  bad = state;
  bad.histories[5] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(same.set_state(bad), InputError);
}

TEST(Fp8Scaling, RefusesWhatIsNotThere) {
  Fp8Scaling scaling(config_of(2), 2);
  EXPECT_THROW((void)scaling.scale({2, Fp8Linear::c_fc, Fp8Operand::x}), ContractError);
  EXPECT_THROW(scaling.observe({-1, Fp8Linear::c_fc, Fp8Operand::x}, 1), ContractError);
  EXPECT_THROW(Fp8Scaling(config_of(0), 2), ContractError);
}

// Ranks hold every other layer and see different values; states of all ranks after some steps, and of one rank that sees all.
struct Ranked {
  std::vector<Fp8ScalingState> states;
  Fp8ScalingState alone;
};

Ranked run_ranked(int ranks, const PitfallSet& pitfalls) {
  constexpr int kLayers = 4;
  constexpr int kSteps = 5;
  const std::vector<Fp8Slot> slots = all_slots(kLayers);
  const auto value = [](int rank, int step, std::size_t slot) {
    return amax_of(step, (slot * 5 + static_cast<std::size_t>(rank) * 11) % 36);
  };
  const auto holds = [](int rank, const Fp8Slot& slot) { return slot.layer % 2 == rank % 2; };
  Ranked result;
  result.states.resize(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](Communicator& world) {
    Fp8Scaling scaling(config_of(3), kLayers, pitfalls);
    for (int step = 0; step < kSteps; ++step) {
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (holds(world.rank(), slots[i])) scaling.observe(slots[i], value(world.rank(), step, i));
      }
      scaling.end_step(&world, step);
    }
    result.states[static_cast<std::size_t>(world.rank())] = scaling.state();
  });
  Fp8Scaling all(config_of(3), kLayers);
  for (int step = 0; step < kSteps; ++step) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (holds(rank, slots[i])) all.observe(slots[i], value(rank, step, i));
      }
    }
    all.end_step(nullptr);
  }
  result.alone = all.state();
  return result;
}

class Fp8Agreement : public testing::TestWithParam<int> {};

TEST_P(Fp8Agreement, GivesEveryRankWhatOneRankWouldHaveSeen) {
  const Ranked ranked = run_ranked(GetParam(), {});
  for (const Fp8ScalingState& state : ranked.states) EXPECT_EQ(state, ranked.alone);
}

TEST_P(Fp8Agreement, IsMissedWhereOneRankDecides) {
  const Ranked ranked = run_ranked(GetParam(), with(Pitfall::fp8_amax_of_one_rank));
  const bool agree = std::ranges::all_of(ranked.states, [&](const Fp8ScalingState& state) { return state == ranked.alone; });
  EXPECT_EQ(agree, GetParam() == 1);
}

INSTANTIATE_TEST_SUITE_P(Over, Fp8Agreement, testing::Values(1, 2, 3, 4, 7), comm_test::ranks_name);

}  // namespace
}  // namespace tandem
