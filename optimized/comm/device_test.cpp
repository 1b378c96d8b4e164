// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <deque>
#include <thread>

#include "core/error.h"
#include "optimized/comm/device_test_support.h"

namespace tandem::comm_test {
namespace {

class DeviceOperations : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override { skip_without_gpu(); }
  [[nodiscard]] static Way way() { return std::get<Way>(GetParam()); }
  [[nodiscard]] static int ranks() { return std::get<int>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(World, DeviceOperations, testing::Combine(kBothWays, testing::Values(1, 2, 3, 4)), param_name);
class DeviceOperationsOfSeveral : public DeviceOperations {};
INSTANTIATE_TEST_SUITE_P(World, DeviceOperationsOfSeveral, testing::Combine(kBothWays, testing::Values(2, 3)), param_name);
class DeviceOperationsOfThree : public testing::Test {
 protected:
  void SetUp() override { skip_without_gpu(); }
};

void expect_like_host(Communicator& comm, Memory& memory, const CommOptions& options) {
  for (const Case& operation : cases()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Bytes expected = on_host(comm, operation, dtype, options);
      OnDevice here(comm, memory, operation, dtype);
      here.begin(options);
      wait_for(here.works());
      here.end();
      here.expect(expected, operation.name);
    }
  }
}

TEST_P(DeviceOperations, GiveTheBitsOfHostOperations) {
  run_ranks(ranks(), way(), [&](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    for (const Progress progress : {Progress::background, Progress::on_wait}) {
      expect_like_host(comm, device.memory, {.name = "device", .progress = progress});
    }
    // Host values go through the same communicator.
    EXPECT_EQ(all_reduce_sum(comm, 1.5), 1.5 * comm.size());
  });
}

TEST_F(DeviceOperationsOfThree, GiveTheBitsOfHostOperationsByEveryAlgorithm) {
  run_ranks(3, Way::messages, [&](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    for (const CollectiveAlgorithm algorithm : all_algorithms()) {
      expect_like_host(comm, device.memory, {.name = std::string(name(algorithm)), .algorithm = algorithm});
    }
  });
}

TEST_P(DeviceOperations, SeveralInFlightKeepTheirResults) {
  run_ranks(ranks(), way(), [&](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    const std::vector<Case> all = cases();
    std::vector<Bytes> expected;
    std::deque<OnDevice> here;
    for (const Case& operation : all) expected.push_back(on_host(comm, operation, DType::f32, {}));
    for (const Case& operation : all) here.emplace_back(comm, device.memory, operation, DType::f32);
    for (std::size_t i = 0; i < all.size(); ++i) {
      here[i].begin({.name = all[i].name, .progress = i % 3 == 1 ? Progress::on_wait : Progress::background});
    }
    // From the back, which also carries out what was issued before.
    for (std::size_t i = all.size(); i-- > 0;) {
      wait_for(here[i].works());
      here[i].end();
      here[i].expect(expected[i], all[i].name);
    }
  });
}

TEST_P(DeviceOperationsOfSeveral, AreCompleteWhenTheySaySo) {
  run_ranks(ranks(), way(), [&](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    for (const Case& operation : cases()) {
      const Bytes expected = on_host(comm, operation, DType::f32, {});
      OnDevice here(comm, device.memory, operation, DType::f32);
      here.begin({});
      for (Work& work : here.works()) {
        while (!work.done()) std::this_thread::yield();
      }
      here.end();
      here.expect(expected, operation.name);
      wait_for(here.works());
    }
  });
}

TEST_P(DeviceOperations, KeepTheirValuesWithAnAdversary) {
  run_adversarial(way(), ranks(), {.seed = 5, .longest_delay_seconds = 2e-4}, [&](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    expect_like_host(comm, device.memory, {.name = "late"});
    comm.set_memory(nullptr);
  });
}

TEST_P(DeviceOperationsOfSeveral, WorkInPartsOfASplit) {
  const auto body = [](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    const std::unique_ptr<Communicator> reversed = comm.split(0, -comm.rank());
    const std::unique_ptr<Communicator> alone = comm.split(comm.rank(), 0);
    expect_like_host(*reversed, device.memory, {});
    expect_like_host(*alone, device.memory, {});
  };
  run_ranks(ranks(), way(), body);
  run_adversarial(way(), ranks(), {.seed = 7, .longest_delay_seconds = 1e-4}, body);
}

TEST_P(DeviceOperationsOfSeveral, CountTheBytesOfHostOperations) {
  run_ranks(ranks(), way(), [&](Communicator& comm) {
    Device device;
    comm.set_memory(&device.memory);
    for (const Case& operation : cases()) {
      static_cast<void>(on_host(comm, operation, DType::f32, {.purpose = Purpose::gradient}));
      OnDevice here(comm, device.memory, operation, DType::f32);
      here.begin({.purpose = Purpose::activation});
      wait_for(here.works());
      EXPECT_EQ(comm.bytes_sent(Purpose::activation), comm.bytes_sent(Purpose::gradient)) << operation.name;
    }
  });
}

TEST_P(DeviceOperationsOfSeveral, AnAdversaryPoisonsResultsUnderWayAndSeesWhoDisturbsThem) {
  const std::string text = text_of<ContractError>([&] {
    run_adversarial(way(), ranks(), {.seed = 6}, [&](Communicator& comm) {
      Device device;
      comm.set_memory(&device.memory);
      const Bytes ones = numbers(DType::f32, 64, comm.rank());
      Buffer data(device.memory, ones.size());
      data.write(ones);
      Work work = comm.all_reduce(TensorView(data.data(), DType::f32, {64}), {.name = "bucket"});
      const Bytes early = data.read();
      float first = 0;
      std::memcpy(&first, early.data(), sizeof(first));
      EXPECT_TRUE(std::isnan(first));
      if (comm.rank() == 1) device.memory.set_bytes(static_cast<std::byte*>(data.data()) + 40, 0, 4);
      work.wait_host();
      comm.barrier();
    });
  });
  EXPECT_TRUE(contains(text, "rank 1: element 10 of the output was written while all_reduce 'bucket' of 64 fp32 was under way"))
      << text;
}

TEST_F(DeviceOperationsOfThree, RanksThatShareTheirMemoryMustAgreeWhereBuffersLie) {
  const auto run_mixed = [&](const std::function<Work(Communicator&, TensorView)>& operation) {
    return text_of<ContractError>([&] {
      run_ranks(3, [&](Communicator& comm) {
        Device device;
        comm.set_memory(&device.memory);
        std::vector<float> host(64);
        const Buffer data(device.memory, 64 * sizeof(float));
        void* const own = comm.rank() == 0 ? host.data() : data.data();
        operation(comm, TensorView(own, DType::f32, {64})).wait_host();
        comm.barrier();
      });
    });
  };
  const std::string sum = run_mixed([](Communicator& comm, TensorView data) { return comm.all_reduce(data, {.name = "mixed"}); });
  EXPECT_TRUE(contains(sum, "all_reduce 'mixed' of 64 fp32 lie apart: those of rank 0 in host memory, those of rank 1 in "))
      << sum;
  const std::string message = run_mixed([](Communicator& comm, TensorView data) {
    if (comm.rank() > 1) return Work();
    return comm.rank() == 0 ? comm.send(data, 1, {}, {}) : comm.recv(data, 0, {}, {});
  });
  EXPECT_TRUE(contains(message, "lie apart: the sender's in host memory, the receiver's in ")) << message;
}

TEST_P(DeviceOperationsOfSeveral, BuffersOfOneCallLieTogether) {
  const std::string text = text_of<ContractError>([&] {
    run_ranks(ranks(), way(), [&](Communicator& comm) {
      Device device;
      comm.set_memory(&device.memory);
      std::vector<float> host(static_cast<std::size_t>(comm.size()));
      const Buffer data(device.memory, sizeof(float));
      comm.all_gather(TensorView(data.data(), DType::f32, {1}), flat_view(host), Counts(host.size(), 1), {}).wait_host();
    });
  });
  EXPECT_TRUE(contains(text, "lies in ") && contains(text, ", output in host memory")) << text;
}

}  // namespace
}  // namespace tandem::comm_test
