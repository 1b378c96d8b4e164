// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "optimized/comm/comm_test_support.h"
#include "optimized/recovery/faulty_communicator.h"

namespace tandem::comm_test {
namespace {

TEST(FaultyCommunicator, TurnsABitOfAResultOnADevice) {
  if (const std::string why = why_no_gpu("simt"); !why.empty()) GTEST_SKIP() << why;
  run_ranks(2, [](Communicator& comm) {
    const auto kernels = make_cuda_kernels("simt", {});
    Memory& memory = kernels->memory();
    MessageFaults faults;
    const auto faulty = make_faulty(comm, faults);
    faulty->set_memory(&memory);
    std::vector<float> values(100, 1.5F);
    void* const data = memory.reserve(400);
    memory.write(values.data(), data, 400);
    faults.flip_next = comm.rank() == 1;

    faulty->all_reduce(TensorView(data, DType::f32, {100}), {.purpose = Purpose::gradient}).wait_host();

    memory.read(data, values.data(), 400);
    EXPECT_EQ(std::ranges::count(values, 3.0F), comm.rank() == 1 ? 99 : 100);
    memory.give_back(data, 400);
    faulty->set_memory(nullptr);
  });
}

}  // namespace
}  // namespace tandem::comm_test
