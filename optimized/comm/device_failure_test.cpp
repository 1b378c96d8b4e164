// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <memory>
#include <span>

#include "core/error.h"
#include "kernels/memory.h"
#include "optimized/comm/comm_test_support.h"

namespace tandem::comm_test {
namespace {

// Device memory, in truth the host's, of a GPU that fails whoever waits for it.
class BrokenMemory final : public Memory {
 public:
  explicit BrokenMemory(std::span<const float> held) : held_(held) {}
  [[nodiscard]] bool on_host() const noexcept override { return false; }
  [[nodiscard]] std::string_view description() const noexcept override { return "a broken GPU"; }
  [[nodiscard]] bool holds(const void* address) const noexcept override {
    return address >= held_.data() && address < held_.data() + held_.size();
  }
  [[nodiscard]] void* reserve(std::int64_t size_bytes) override { return host_memory().reserve(size_bytes); }
  void give_back(void* address, std::int64_t size_bytes) noexcept override { host_memory().give_back(address, size_bytes); }
  void copy(const void* from, void* to, std::int64_t size_bytes) override { host_memory().copy(from, to, size_bytes); }
  void copy_rows(const void*, std::int64_t, void*, std::int64_t, std::int64_t, std::int64_t) override {}
  void set_bytes(void*, std::uint8_t, std::int64_t) override {}
  void write(const void*, void*, std::int64_t) override {}
  void read(const void*, void*, std::int64_t) override { synchronize(); }
  void sum_in_order(DType, std::span<const std::byte* const>, std::span<std::byte* const>, std::int64_t) override {}
  void synchronize() override { throw GpuError("the GPU has fallen off the bus"); }
  [[nodiscard]] std::shared_ptr<Mark> mark(Timed timed) override { return host_memory().mark(timed); }
  void begin_after(Mark&) override {}
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

// Its operations are calls of its own lane like others.
TEST(DeviceOfOneRank, IsNotWaitedFor) {
  const std::string text =
      text_of_failure(1, Way::shared_memory, [](Communicator& comm, TensorView data) { return comm.all_reduce(data, {}); });
  EXPECT_EQ(text, "not seen");
}

}  // namespace
}  // namespace tandem::comm_test
