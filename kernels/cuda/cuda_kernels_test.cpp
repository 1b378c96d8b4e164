// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "kernels/cuda/device_test_support.h"

namespace tandem::device_test {
namespace {

class CudaKernels : public DeviceTest {};

std::string refusal(const std::string& backend, int device) {
  try {
    static_cast<void>(make_cuda_kernels(backend, {.device = device}));
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

TEST(CudaBackends, SayWhyTheyAreNotThere) {
  EXPECT_EQ(why_no_gpu("rocm"), "there is no GPU backend 'rocm'; there are cuda and simt");
  EXPECT_NE(refusal("rocm", 0).find("there is no GPU backend 'rocm'"), std::string::npos);
  const std::string why = why_no_gpu("cuda");
  EXPECT_EQ(why.find('\n'), std::string::npos);
  EXPECT_EQ(why.empty(), refusal("cuda", 0).empty());
  EXPECT_NE(refusal("cuda", 0).find(why), std::string::npos);
}

TEST_F(CudaKernels, TellWhatTheyAre) {
  const KernelsInfo info = kernels().info();
  EXPECT_EQ(info.backend, test_backend());
  EXPECT_FALSE(info.matrix_library.empty());
  EXPECT_FALSE(kernels().memory().description().empty());
  EXPECT_NE(refusal(test_backend(), 1000).find("there is no GPU 1000; there are "), std::string::npos);
  EXPECT_NE(refusal(test_backend(), -1).find("there is no GPU -1"), std::string::npos);
}

TEST_F(CudaKernels, HostValuesMayChangeWhenACallHasReturned) {
  // Large enough for the ring of uploads to go round, and small ones of several spans in between.
  constexpr std::int64_t kIds = 16'000, kRows = 50;
  constexpr int kCalls = 40;
  std::vector<double> numbers(kRows);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i);
  const DeviceTensor table(kernels(), DType::f32, {kRows, 1}, numbers);
  std::vector<std::unique_ptr<DeviceTensor>> gathered, embedded;
  for (int call = 0; call < kCalls; ++call) {
    gathered.push_back(std::make_unique<DeviceTensor>(kernels(), DType::f32, Shape{kIds, 1}));
    embedded.push_back(std::make_unique<DeviceTensor>(kernels(), DType::f32, Shape{3, 1}));
    std::vector<std::int32_t> ids(kIds, call), few = {call, 1, 2}, places = {7, 8, call};
    kernels().gather_rows(ids, table.view(), gathered.back()->view());
    kernels().embedding_forward(few, places, table.view(), table.view(), embedded.back()->view());
    ids.assign(kIds, 49);
    few = places = {49, 49, 49};
  }

  for (int call = 0; call < kCalls; ++call) {
    const auto index = static_cast<std::size_t>(call);
    EXPECT_EQ(gathered[index]->values(), std::vector<double>(kIds, call)) << call;
    EXPECT_EQ(embedded[index]->values(), (std::vector<double>{call + 7.0, 9.0, call + 2.0})) << call;
  }
}

TEST_F(CudaKernels, PeaksAreMeasured) {
  const MeasuredPeaks peaks = measure_gpu_peaks(test_backend(), 0);
  EXPECT_GT(peaks.memory_bytes_per_second, 1e6);
  EXPECT_GT(peaks.bf16_matmul_flops_per_second, 1e6);
  EXPECT_GT(peaks.fp32_matmul_flops_per_second, 1e6);
}

}  // namespace
}  // namespace tandem::device_test
