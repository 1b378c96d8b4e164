// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/compressed_reduction.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/world.h"
#include "optimized/compression/compression_test_support.h"
#include "reference/compressed_reduction.h"

namespace tandem {
namespace {

struct Setting {
  std::string codec;
  bool error_feedback;
  int ranks;
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const char* codec : {"int8", "int4", "sign", "top_k", "random_k", "power_sgd"}) {
    for (const bool feedback : {true, false}) {
      for (int ranks = 2; ranks <= 5; ++ranks) all.push_back({codec, feedback, ranks});
    }
  }
  return all;
}

std::string setting_name(const testing::TestParamInfo<Setting>& info) {
  const Setting& setting = info.param;
  return fmt::format("{}{}Ranks{}", setting.codec, setting.error_feedback ? "Feedback" : "Plain", setting.ranks);
}

CompressionConfig config_of(const Setting& setting, std::int64_t block = 8) {
  CompressionConfig config;
  config.codec = setting.codec;
  config.error_feedback = setting.error_feedback;
  config.block = block;
  config.density = 0.2;
  config.rank = 2;
  return config;
}

// Every size up to 2 * ranks + 3, and some larger; matrices with and without factors that are smaller.
std::vector<CompressedTensor> tensors_of(int ranks) {
  std::vector<CompressedTensor> tensors;
  for (int n = 1; n <= 2 * ranks + 3; ++n) tensors.push_back({fmt::format("n{}", n), 1, n});
  tensors.push_back({"vector", 1, 301});
  tensors.push_back({"small", 3, 5});
  tensors.push_back({"matrix", 23, 17});
  tensors.push_back({"wide", 7, 41});
  return tensors;
}

std::vector<CompressedBucket> buckets_of(std::int64_t tensors, std::int64_t of_tensors, int ranks, int rank) {
  std::vector<CompressedBucket> buckets;
  for (std::int64_t first = 0; first < tensors; first += of_tensors) {
    buckets.push_back({{first, std::min(tensors, first + of_tensors)}, ranks, rank});
  }
  return buckets;
}

Floats gradient_of(const CompressedTensor& tensor, int rank, int step) {
  CounterRng rng(static_cast<std::uint64_t>(100 * step + rank), tensor.name);
  Floats values(static_cast<std::size_t>(tensor.elements()));
  for (float& value : values)
    value = static_cast<float>(rng.next_normal() * std::ldexp(1.0, static_cast<int>(rng.next_below(6))));
  return values;
}

// One rank's side of a reduction of some tensors in buckets.
class Rank {
 public:
  Rank(Communicator& comm, const CompressionConfig& config, std::vector<CompressedTensor> tensors, std::int64_t bucket_tensors)
      : comm_(comm),
        buckets_(buckets_of(std::ssize(tensors), bucket_tensors, comm.size(), comm.rank())),
        reduction_(arena_, {config, 5, tensors, buckets_, {}}),
        tensors_(std::move(tensors)) {}

  // Sums, by tensor.
  std::vector<Floats> step(int step, double scale = 1, float poison = 0) {
    Floats flat;
    for (const CompressedTensor& tensor : tensors_) {
      for (const float value : gradient_of(tensor, comm_.rank(), step)) flat.push_back(value * static_cast<float>(scale));
    }
    if (poison != 0) flat.back() = poison;
    reduction_.begin_step(step, scale);
    std::vector<std::int64_t> offsets = {0};
    for (const CompressedTensor& tensor : tensors_) offsets.push_back(offsets.back() + tensor.elements());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const std::int64_t begin = offsets[static_cast<std::size_t>(buckets_[b].tensors.begin)];
      const std::int64_t end = offsets[static_cast<std::size_t>(buckets_[b].tensors.end)];
      reduction_.reduce(comm_, view_of(flat, {std::ssize(flat)}).flat(begin, end - begin), static_cast<int>(b));
    }
    std::vector<Floats> sums;
    for (std::size_t t = 0; t < tensors_.size(); ++t) sums.emplace_back(flat.begin() + offsets[t], flat.begin() + offsets[t + 1]);
    return sums;
  }

  Floats sum_residual(const CompressedTensor& tensor, float missing) const {
    Floats whole(static_cast<std::size_t>(tensor.elements()), missing);
    for (const auto& owned : reduction_.sum_residuals(tensor.name)) std::ranges::copy(owned.values, whole.begin() + owned.first);
    return whole;
  }

  CompressedReduction& reduction() { return reduction_; }
  const std::vector<CompressedTensor>& tensors() const { return tensors_; }

 private:
  Communicator& comm_;
  Arena arena_{{.poison = true, .huge_pages = false}};
  std::vector<CompressedBucket> buckets_;
  CompressedReduction reduction_;
  std::vector<CompressedTensor> tensors_;
};

class CompressedSum : public testing::TestWithParam<Setting> {};

// Of each tensor and step, what the definition makes of all ranks' gradients.
std::vector<std::vector<reference::ReducedTensor<float>>> expected_of(const CompressionConfig& config,
                                                                      const std::vector<CompressedTensor>& tensors, int ranks,
                                                                      int steps) {
  std::vector<std::vector<reference::ReducedTensor<float>>> all;
  for (const CompressedTensor& tensor : tensors) {
    const reference::CodedTensor of{tensor.name, tensor.rows, tensor.columns};
    auto state = reference::initial_reduction_state<float>(config, 5, of, ranks);
    all.emplace_back();
    for (int step = 0; step < steps; ++step) {
      std::vector<Floats> gradients;
      for (int rank = 0; rank < ranks; ++rank) gradients.push_back(gradient_of(tensor, rank, step));
      all.back().push_back(reference::compressed_sum<float>(config, 5, step, of, gradients, state));
      state = all.back().back().next;
    }
  }
  return all;
}

void expect_near(const Floats& got, const Floats& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  EXPECT_LE(std::sqrt(difference), 1e-4 * std::sqrt(norm)) << what;
}

TEST_P(CompressedSum, IsThatOfTheReferenceToTheLastBit) {
  const Setting setting = GetParam();
  const CompressionConfig config = config_of(setting);
  const std::vector<CompressedTensor> tensors = tensors_of(setting.ranks);
  constexpr int kSteps = 3;
  const auto expected = expected_of(config, tensors, setting.ranks, kSteps);
  const bool exact = setting.codec != "power_sgd";
  for (const std::int64_t bucket_tensors : {std::int64_t{3}, std::ssize(tensors)}) {
    run_world({.ranks = setting.ranks}, [&](Communicator& comm) {
      Rank rank(comm, config, tensors, bucket_tensors);
      for (int step = 0; step < kSteps; ++step) {
        const std::vector<Floats> sums = rank.step(step);
        rank.reduction().finish_step(true);
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          const std::string what = fmt::format("{} step {}", tensors[t].name, step);
          const reference::ReducedTensor<float>& of = expected[t][static_cast<std::size_t>(step)];
          const std::span<const float> residual = rank.reduction().residual(tensors[t].name);
          if (!exact && is_coded(config, tensors[t])) {
            expect_near(sums[t], of.sum, what);
            if (residual.empty()) continue;
            expect_near({residual.begin(), residual.end()}, of.next.residuals[static_cast<std::size_t>(comm.rank())], what);
            continue;
          }
          ASSERT_EQ(bits_of(sums[t]), bits_of(of.sum)) << what;
          if (of.next.residuals.empty()) {
            ASSERT_TRUE(residual.empty()) << what;
            continue;
          }
          ASSERT_EQ(bits_of(residual), bits_of(of.next.residuals[static_cast<std::size_t>(comm.rank())])) << what;
          for (const auto& owned : rank.reduction().sum_residuals(tensors[t].name)) {
            const std::span<const float> all = of.next.sum_residual;
            ASSERT_EQ(bits_of(owned.values), bits_of(all.subspan(static_cast<std::size_t>(owned.first), owned.values.size())))
                << what;
          }
        }
      }
    });
  }
}

TEST_P(CompressedSum, KeepsEachElementOfASumsResidualOnExactlyOneRank) {
  const Setting setting = GetParam();
  const CompressionConfig config = config_of(setting);
  const std::vector<CompressedTensor> tensors = tensors_of(setting.ranks);
  std::map<std::string, std::vector<int>> owners;
  std::mutex mutex;
  run_world({.ranks = setting.ranks}, [&](Communicator& comm) {
    Rank rank(comm, config, tensors, 4);
    const std::scoped_lock lock(mutex);
    for (const CompressedTensor& tensor : tensors) {
      std::vector<int>& counts = owners[tensor.name];
      counts.resize(static_cast<std::size_t>(tensor.elements()));
      for (const auto& owned : rank.reduction().sum_residuals(tensor.name)) {
        for (std::size_t i = 0; i < owned.values.size(); ++i) ++counts[static_cast<std::size_t>(owned.first) + i];
      }
    }
  });
  const int expected = setting.error_feedback && sums_at_owners(config) ? 1 : 0;
  for (const auto& [name, counts] : owners) {
    for (const int count : counts) ASSERT_EQ(count, expected) << name;
  }
}

TEST_P(CompressedSum, SendsTheBytesOfTheFormula) {
  const Setting setting = GetParam();
  const CompressionConfig config = config_of(setting);
  const std::vector<CompressedTensor> tensors = tensors_of(setting.ranks);
  std::int64_t expected = 0, equivalent = 0;
  for (const CompressedTensor& tensor : tensors) {
    expected += reference::compressed_sum_bytes(config, {tensor.name, tensor.rows, tensor.columns}, setting.ranks);
    equivalent += 2 * (setting.ranks - 1) * equivalent_bytes(config, tensor, setting.ranks);
  }
  std::atomic<std::int64_t> sent = 0;
  run_world({.ranks = setting.ranks}, [&](Communicator& comm) {
    Rank rank(comm, config, tensors, 5);
    static_cast<void>(rank.step(0));
    sent += comm.bytes_sent(Purpose::gradient);
    EXPECT_EQ(comm.bytes_sent(Purpose::other) + comm.bytes_sent(Purpose::parameter), 0);
  });
  EXPECT_EQ(sent, expected);
  EXPECT_EQ(equivalent, expected);
}

TEST_P(CompressedSum, ShowsOneRanksOverflowToAllAndKeepsTheResidualsOfASkippedStep) {
  const Setting setting = GetParam();
  const CompressionConfig config = config_of(setting);
  // The last tensor alone: a matrix of which one element on one rank is not finite.
  const std::vector<CompressedTensor> tensors = {{"vector", 1, 30}, {"wide", 7, 41}};
  for (const float poison : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    run_world({.ranks = setting.ranks}, [&](Communicator& comm) {
      Rank rank(comm, config, tensors, 2), undisturbed(comm, config, tensors, 2);
      for (Rank* both : {&rank, &undisturbed}) {
        static_cast<void>(both->step(0));
        both->reduction().finish_step(true);
      }
      const std::vector<Floats> spoiled = rank.step(1, 1, comm.rank() == 1 ? poison : 0);
      EXPECT_TRUE(std::ranges::any_of(spoiled[1], [](float value) { return std::isnan(value); })) << comm.rank();
      EXPECT_TRUE(std::ranges::all_of(spoiled[0], [](float value) { return std::isfinite(value); })) << comm.rank();
      rank.reduction().finish_step(false);
      for (const CompressedTensor& tensor : tensors) {
        EXPECT_EQ(bits_of(rank.reduction().residual(tensor.name)), bits_of(undisturbed.reduction().residual(tensor.name)));
        EXPECT_EQ(bits_of(rank.sum_residual(tensor, 0)), bits_of(undisturbed.sum_residual(tensor, 0)));
      }
      const std::vector<Floats> next = rank.step(2), other = undisturbed.step(2);
      for (std::size_t t = 0; t < tensors.size(); ++t) EXPECT_EQ(bits_of(next[t]), bits_of(other[t]));
    });
  }
}

TEST_P(CompressedSum, FollowsTheLossScaleExactly) {
  const Setting setting = GetParam();
  const CompressionConfig config = config_of(setting);
  const std::vector<CompressedTensor> tensors = {{"vector", 1, 30}, {"wide", 7, 41}};
  run_world({.ranks = setting.ranks}, [&](Communicator& comm) {
    Rank scaled(comm, config, tensors, 2), plain(comm, config, tensors, 2);
    for (int step = 0; step < 4; ++step) {
      const double scale = std::ldexp(1.0, 3 * step - 2);
      const std::vector<Floats> with = scaled.step(step, scale), without = plain.step(step);
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        for (std::size_t i = 0; i < with[t].size(); ++i) ASSERT_EQ(with[t][i], without[t][i] * static_cast<float>(scale)) << step;
      }
      scaled.reduction().finish_step(true);
      plain.reduction().finish_step(true);
    }
  });
}

TEST_P(CompressedSum, GoesOnFromRestoredStateWhateverTheBuckets) {
  const Setting setting = GetParam();
  const CompressionConfig config = config_of(setting);
  const std::vector<CompressedTensor> tensors = tensors_of(setting.ranks);
  run_world({.ranks = setting.ranks}, [&](Communicator& comm) {
    Rank before(comm, config, tensors, 4), after(comm, config, tensors, std::ssize(tensors));
    for (int step = 0; step < 2; ++step) {
      static_cast<void>(before.step(step));
      before.reduction().finish_step(true);
    }
    for (const CompressedTensor& tensor : tensors) {
      // The owners' parts come together as sums of bits of which all but one are zero.
      Floats whole = before.sum_residual(tensor, 0);
      all_reduce(comm, TensorView(whole.data(), DType::i32, {std::ssize(whole)}), {});
      if (setting.error_feedback && is_coded(config, tensor)) {
        after.reduction().restore_residual(tensor.name, before.reduction().residual(tensor.name));
      }
      after.reduction().restore_sum_residual(tensor.name, whole);
      after.reduction().restore_start(tensor.name, before.reduction().start(tensor.name));
    }
    const std::vector<Floats> expected = before.step(2), got = after.step(2);
    for (std::size_t t = 0; t < tensors.size(); ++t) ASSERT_EQ(bits_of(got[t]), bits_of(expected[t])) << tensors[t].name;
  });
}

INSTANTIATE_TEST_SUITE_P(Codecs, CompressedSum, testing::ValuesIn(settings()), setting_name);

TEST(CompressedReduction, RefusesAStepInWhichABucketWasForgotten) {
  run_world({.ranks = 2}, [](Communicator& comm) {
    Arena arena({.huge_pages = false});
    CompressedReduction reduction(
        arena, {config_of({"int8", true, 2}), 1, {{"a", 1, 9}, {"b", 1, 9}}, buckets_of(2, 1, 2, comm.rank()), {}});
    Floats values(9);
    reduction.begin_step(0, 1);
    reduction.reduce(comm, view_of(values, {9}), 0);
    EXPECT_THROW(reduction.finish_step(true), ContractError);
  });
}

TEST(CompressedReduction, LosesNothingWhereAllElementsAreSent) {
  for (const std::int64_t elements : {(1 << 15) - 1, 1 << 15, (1 << 16) + 1}) {
    CompressionConfig config = config_of({"top_k", true, 2});
    config.density = 1;
    const std::vector<CompressedTensor> tensors = {{"all", 1, elements}};
    run_world({.ranks = 2}, [&](Communicator& comm) {
      Rank rank(comm, config, tensors, 1);
      const Floats sum = rank.step(0).front();
      const Floats a = gradient_of(tensors[0], 0, 0), b = gradient_of(tensors[0], 1, 0);
      for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], a[i] + b[i]) << i;
    });
  }
}

}  // namespace
}  // namespace tandem
