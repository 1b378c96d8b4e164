// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <memory>
#include <span>
#include <string>

#include "core/error.h"
#include "kernels/lent_memory_test_support.h"
#include "optimized/comm/comm_test_support.h"
#include "optimized/comm/world_state.h"

namespace tandem::comm_test {
namespace {

// Of a GPU that fails whoever waits for it.
class BrokenMemory final : public LentMemory {
 public:
  explicit BrokenMemory(std::span<const float> held) : LentMemory(std::as_bytes(held)), held_(held) {}
  [[nodiscard]] std::string_view description() const noexcept override { return "a broken GPU"; }
  void write(const void*, void*, std::int64_t) override {}
  void read(const void*, void*, std::int64_t) override { synchronize(); }
  void synchronize() override { throw GpuError("the GPU has fallen off the bus"); }
  [[nodiscard]] std::unique_ptr<Memory> new_lane() override { return std::make_unique<BrokenMemory>(held_); }

 private:
  std::span<const float> held_;
};

using Operation = std::function<Work(Communicator&, TensorView)>;

std::string text_of_failure(int ranks, Way way, const Operation& operation) {
  return text_of<GpuError>([&] {
    run_ranks(ranks, way, [&](Communicator& comm) {
      std::array<float, 8> data{};
      BrokenMemory memory(data);
      comm.set_memory(&memory);
      Work work = operation(comm, TensorView(data.data(), DType::f32, {8}));
      if (comm.size() > 1) {
        // Of the device or of the rank that it failed: nobody hangs.
        EXPECT_ANY_THROW(work.wait_host());
        EXPECT_ANY_THROW(comm.barrier());
        throw GpuError("as seen by the rank");
      }
      work.wait_host();
      throw GpuError("not seen");
    });
  });
}

class DeviceFailure : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, DeviceFailure, testing::Combine(kBothWays, testing::Values(2, 3)), param_name);

TEST_P(DeviceFailure, InACollectiveEndsItOnEveryRank) {
  for (const Progress progress : {Progress::background, Progress::on_wait}) {
    static_cast<void>(text_of_failure(
        ranks(), way(), [&](Communicator& comm, TensorView data) { return comm.all_reduce(data, {.progress = progress}); }));
  }
}

TEST_P(DeviceFailure, InAMessageEndsItOnBothSides) {
  const std::string text = text_of<GpuError>([&] {
    run_ranks(2, [&](Communicator& comm) {
      std::array<float, 8> data{};
      BrokenMemory memory(data);
      comm.set_memory(&memory);
      const TensorView view(data.data(), DType::f32, {8});
      (comm.rank() == 0 ? comm.send(view, 1, {}, {}) : comm.recv(view, 0, {}, {})).wait_host();
      comm.barrier();
    });
  });
  EXPECT_TRUE(contains(text, "the GPU has fallen off the bus")) << text;
}

// Each send waits for its device on a thread that has come to rest meanwhile.
TEST(DeviceMessages, AreSentHoweverLongAfterOneAnother) {
  run_ranks(2, Way::messages, [](Communicator& comm) {
    std::array<float, 8> data{};
    LentMemory memory(std::as_bytes(std::span(data)));
    comm.set_memory(&memory);
    const TensorView view(data.data(), DType::f32, {8});
    for (int message = 1; message <= 50; ++message) {
      if (comm.rank() == 0) data.fill(static_cast<float>(message));
      (comm.rank() == 0 ? comm.send(view, 1, {}, {}) : comm.recv(view, 0, {}, {})).wait_host();
      EXPECT_EQ(data[7], static_cast<float>(message));
      comm.barrier();
    }
  });
}

// Whoever waits for the rank learns which one it was, from the error's field too.
TEST(DeviceOfOneRank, IsNamedAlsoWhereItsErrorHasNoWords) {
  for (const int rank : {0, 1, 2}) {
    WorldState world(3, std::chrono::milliseconds(1000), 1);
    try {
      throw rank;  // as a library may
    } catch (...) {
      world.fail_by_device(rank);
    }
    try {
      world.throw_failure("all_reduce");
    } catch (const PeerError& error) {
      EXPECT_EQ(error.rank(), rank);
      EXPECT_EQ(std::string(error.what()), "rank " + std::to_string(rank) + " failed (during all_reduce)");
    }
  }
}

// Its operations are calls of its own lane like others.
TEST(DeviceOfOneRank, IsNotWaitedFor) {
  const std::string text =
      text_of_failure(1, Way::shared_memory, [](Communicator& comm, TensorView data) { return comm.all_reduce(data, {}); });
  EXPECT_EQ(text, "not seen");
}

}  // namespace
}  // namespace tandem::comm_test
