// SPDX-License-Identifier: Apache-2.0
// Sizes that nothing divides, and more elements than 16 bits count: the collectives alone.
#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "core/rng.h"
#include "optimized/comm/world.h"
#include "reference/compressed_reduction.h"
#include "suites/compression_cases.h"

namespace tandem {
namespace {

constexpr std::uint64_t kSeed = 7;

std::vector<float> gradient_of(const CompressedTensor& tensor, int rank, std::int64_t step) {
  CounterRng rng(static_cast<std::uint64_t>(rank + 100 * step), tensor.name);
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  for (float& value : values) value = static_cast<float>(rng.next_normal());
  return values;
}

// What the definition makes of the gradients of all ranks, step after step.
std::vector<reference::ReducedTensor<float>> expected_of(const CompressionConfig& config, const CompressedTensor& tensor,
                                                         int ranks, std::int64_t steps) {
  const reference::CodedTensor of{tensor.name, tensor.rows, tensor.columns};
  auto state = reference::initial_reduction_state<float>(config, kSeed, of, ranks);
  std::vector<reference::ReducedTensor<float>> all;
  for (std::int64_t step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> gradients;
    for (int rank = 0; rank < ranks; ++rank) gradients.push_back(gradient_of(tensor, rank, step));
    all.push_back(reference::compressed_sum<float>(config, kSeed, step, of, gradients, state));
    state = all.back().next;
  }
  return all;
}

// Elements of sums that are not the definition's, on all ranks together.
double wrong_elements(const CompressionConfig& config, const std::vector<CompressedTensor>& tensors, int ranks,
                      std::int64_t steps, const RunContext& context) {
  std::vector<std::vector<reference::ReducedTensor<float>>> expected;
  for (const CompressedTensor& tensor : tensors) expected.push_back(expected_of(config, tensor, ranks, steps));
  double all = 0;
  run_world({.ranks = ranks, .settings = context.world}, [&](Communicator& comm) {
    Arena arena({.poison = true, .huge_pages = false});
    const CompressedBucket whole{{0, std::ssize(tensors)}, ranks, comm.rank()};
    CompressedReduction reduction(arena, {config, kSeed, tensors, {whole}, context.pitfalls});
    double wrong = 0;
    for (std::int64_t step = 0; step < steps; ++step) {
      std::vector<float> flat;
      for (const CompressedTensor& tensor : tensors) {
        const std::vector<float> gradient = gradient_of(tensor, comm.rank(), step);
        flat.insert(flat.end(), gradient.begin(), gradient.end());
      }
      reduction.begin_step(step, 1);
      reduction.reduce(comm, view_of(flat, {std::ssize(flat)}), 0);
      reduction.finish_step(true);
      std::size_t at = 0;
      for (const auto& of_tensor : expected) {
        for (const float value : of_tensor[static_cast<std::size_t>(step)].sum) {
          wrong += std::bit_cast<std::uint32_t>(flat[at++]) != std::bit_cast<std::uint32_t>(value) ? 1 : 0;
        }
      }
    }
    const double sum = all_reduce_sum(comm, wrong);
    if (comm.rank() == 0) all = sum;
  });
  return all;
}

Case sizes_case(const std::string& codec) {
  CompressionConfig compression = compression_of(codec);
  compression.block = 8;
  compression.density = 0.3;
  const ParallelVariant shown{.degrees = {.data = 5}};
  Case result = compression_case(fmt::format("{}/sizes", codec), "1 to 2 N + 3 elements on N = 2 to 5 ranks, three steps of each",
                                 shown, compression);
  result.execute = [=](const RunContext& context) {
    CaseEvidence evidence;
    for (int ranks = 2; ranks <= 5; ++ranks) {
      std::vector<CompressedTensor> tensors;
      for (int n = 1; n <= 2 * ranks + 3; ++n) tensors.push_back({fmt::format("n{}", n), 1, n});
      evidence.properties.push_back({fmt::format("wrong_elements ranks {}", ranks),
                                     wrong_elements(compression, tensors, ranks, 3, context), Relation::equal, 0.0,
                                     "reference/compressed_reduction.h, bit for bit", -1, ""});
    }
    return evidence;
  };
  return result;
}

Case indices_case() {
  CompressionConfig compression = compression_of("top_k");
  compression.density = 1;
  Case result = compression_case("top_k/indices", "all of 2^15 - 1, 2^15 and 2^16 + 1 elements are sent: the plain sum",
                                 {.degrees = {.data = 2}}, compression);
  result.execute = [=](const RunContext& context) {
    CaseEvidence evidence;
    for (const std::int64_t elements : {(1 << 15) - 1, 1 << 15, (1 << 16) + 1}) {
      const std::vector<CompressedTensor> tensors = {{"all", 1, elements}};
      evidence.properties.push_back({fmt::format("wrong_elements of {}", elements),
                                     wrong_elements(compression, tensors, 2, 1, context), Relation::equal, 0.0,
                                     "k = n loses nothing: gradients added in rank order", -1, ""});
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_compression_size_cases(CaseList& cases) {
  for (const char* codec : {"int8", "int4", "sign", "top_k", "random_k"}) cases.push_back(sizes_case(codec));
  cases.push_back(indices_case());
}

}  // namespace tandem
